"""Packed weights: the same products, where they may be used, and nothing left behind."""

from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from hf_axonn_eval import extract
from hf_axonn_eval.extraction import packed_weights as module
from hf_axonn_eval.extraction.packed_weights import packed_weights
from tests.helpers.eval_families import family, parting_samples


if not torch.backends.mkldnn.is_available():
    pytest.skip("this torch has no oneDNN", allow_module_level=True)

ROWS = {
    "one row": torch.randn(1, 48),
    "a batch of texts": torch.randn(3, 5, 48),
    "the ends of texts": torch.randn(3, 9, 48)[:, -2:],
    "columns of a wider one": torch.randn(7, 96)[:, 1::2],
    "none": torch.randn(0, 48),
}
# The largest rounding of a sum of 48 products of about 1.
ROUNDING = {torch.float32: 48 * 2**-23, torch.bfloat16: 2**-5}


class Watched(nn.Linear):
    """A kind of Linear of its own, as quantized ones are."""


@pytest.fixture
def packed(monkeypatch):
    """The weights that are packed."""
    made = []
    original = module.packed_product

    def noted(weight):
        made.append(weight)
        return original(weight)

    monkeypatch.setattr(module, "packed_product", noted)
    return made


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_products_are_those_of_the_layer(packed, rows, bias, dtype):
    """The layer stays as it is on a processor that has no bfloat16 for oneDNN."""
    possible = dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    torch.manual_seed(0)
    layer = nn.Linear(48, 33, bias=bias, dtype=dtype)
    rows = rows.to(dtype)
    with torch.no_grad():
        plain = layer(rows)
        with packed_weights(nn.Sequential(layer)):
            found = [layer(rows) for _ in range(8)][-1]
    assert "forward" not in vars(layer)
    assert len(packed) == (rows.numel() > 0 and possible)
    assert found.shape == plain.shape and found.dtype == dtype
    torch.testing.assert_close(found, plain, rtol=0, atol=ROUNDING[dtype])


def test_it_is_restored_after_an_error():
    layer = nn.Linear(4, 4)
    with pytest.raises(KeyError), packed_weights(layer):
        assert "forward" in vars(layer)
        raise KeyError
    assert "forward" not in vars(layer)


def test_a_few_calls_are_not_worth_a_copy(packed):
    layer, rows = nn.Linear(8, 8), torch.randn(2, 8)
    with packed_weights(layer), torch.no_grad():
        for calls in range(1, 9):
            layer(rows)
            assert len(packed) == (calls > 6)


def test_tied_weights_are_packed_once(packed):
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    with packed_weights(nn.Sequential(first, second)), torch.no_grad():
        rows = torch.randn(2, 8)
        for _ in range(8):
            assert torch.allclose(second(rows) - second.bias, first(rows) - first.bias, atol=1e-6)
    assert len(packed) == 1


@pytest.mark.parametrize(
    "kind", ["float64", "a kind of its own", "no weight here", "a forward of its own", "compiled"]
)
def test_others_stay_as_they_are(kind):
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer)
    if kind == "float64":
        layer.double()
    elif kind == "a kind of its own":
        layer.__class__ = Watched
    elif kind == "no weight here":
        layer.to("meta")
    elif kind == "a forward of its own":
        layer.forward = lambda rows: rows
    else:
        model.compile(backend="eager")
    before = dict(vars(layer))
    with packed_weights(model):
        assert vars(layer) == before


def test_a_model_that_fills_the_memory_is_not_copied(monkeypatch):
    layer = nn.Linear(256, 256, bias=False)
    needed = 4 * layer.weight.nbytes
    # ranks of a machine share its memory
    for available, ranks, copied in (
        (needed, 1, True),
        (needed - 1, 1, False),
        (needed, 2, False),
        (needed * 2, 2, True),
    ):
        monkeypatch.setattr(psutil, "virtual_memory", lambda available=available: SimpleNamespace(available=available))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        with packed_weights(layer):
            assert ("forward" in vars(layer)) == copied


def test_autograd_and_autocast_have_the_layers_own_product():
    layer, rows = nn.Linear(8, 8), torch.randn(2, 8)
    with packed_weights(layer):
        for _ in range(8):
            layer(rows).sum().backward()
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                assert layer(rows).dtype == torch.bfloat16
    assert layer.weight.grad is not None and layer.bias.grad is not None


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "mamba"])
def test_extraction_is_the_same(packed, monkeypatch, name):
    model = family(name, torch.float32)
    samples = parting_samples(model, 12)
    found = extract(model, None, samples, batch_size=4, progress=False)
    assert packed and not any("forward" in vars(layer) for layer in model.modules())
    monkeypatch.setattr(module, "can_be_packed", lambda weight: False)
    plain = extract(model, None, samples, batch_size=4, progress=False)
    for mine, other in zip(found, plain, strict=True):
        assert (mine.sample_id, mine.generated) == (other.sample_id, other.generated)
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-5)
