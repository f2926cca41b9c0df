"""Packed weights: the same products, where they may be used, and nothing left behind."""

from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

import hf_axonn
from hf_axonn import Grid
from hf_axonn.compat import packed_weights as module
from hf_axonn_eval import extract
from hf_axonn_eval.extraction.packed_weights import packed_weights
from tests.helpers.eval_families import family, parting_samples
from tests.helpers.ranks import run_ranks


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
    monkeypatch.setattr(module, "_CALLS", 0)
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
            found = layer(rows)
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


def test_a_few_calls_are_not_worth_a_copy(packed, monkeypatch):
    monkeypatch.setattr(module, "_CALLS", 6)
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
        assert torch.allclose(second(rows) - second.bias, first(rows) - first.bias, atol=1e-6)
        assert torch.equal(first(rows), first(rows))
    assert len(packed) == 1


@pytest.mark.parametrize("kind", ["float64", "a kind of its own", "a forward of its own", "compiled"])
def test_others_stay_as_they_are(packed, kind):
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer)
    if kind == "float64":
        layer.double()
    elif kind == "a kind of its own":
        layer.__class__ = Watched
    elif kind == "a forward of its own":
        layer.forward = lambda rows: rows
    else:
        model.compile(backend="eager")
    with packed_weights(model), torch.no_grad():
        layer(torch.ones(2, 8, dtype=layer.weight.dtype))
    assert not packed


def test_copies_fill_a_quarter_of_the_free_memory(packed, monkeypatch):
    layers = [nn.Linear(64, 64, bias=False) for _ in range(3)]
    needed = 4 * layers[0].weight.nbytes
    # ranks of a machine share its memory
    for available, ranks, copied in (
        (needed, 1, 1),
        (needed - 1, 1, 0),
        (needed, 2, 0),
        (needed * 2, 1, 2),
        (needed * 2, 2, 1),
        (needed * 9, 1, 3),
    ):
        monkeypatch.setattr(psutil, "virtual_memory", lambda available=available: SimpleNamespace(available=available))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        with packed_weights(nn.Sequential(*layers)), torch.no_grad():
            for layer in (*layers, *layers):
                layer(torch.ones(2, 64))
        assert len(packed) == copied
        packed.clear()


def test_autograd_and_autocast_have_the_layers_own_product():
    layer, rows = nn.Linear(8, 8), torch.randn(2, 8)
    with packed_weights(layer):
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
    assert_same(found, extract(model, None, samples, batch_size=4, progress=False))


def assert_same(found, expected, rounding: float = 1e-5) -> None:
    for result, other in zip(found, expected, strict=True):
        assert (result.sample_id, result.generated) == (other.sample_id, other.generated)
        assert result.logprobs == pytest.approx(other.logprobs, abs=rounding)


GRIDS = {2: [Grid(x=2), Grid(y=2), Grid(z=2), Grid(data=2)], 4: [Grid(y=2, x=2), Grid(z=2, x=2), Grid(z=2, y=2)]}


def packed_on_grids(names, grids, samples) -> dict:
    """Return results by family and grid, and how many matrices were packed: with decoding, and without."""
    answers = {}
    original = module.packed_product
    for name in names:
        for grid in grids:
            model = hf_axonn.parallelize(family(name, torch.float32), grid)[0]
            made: list = []
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "_CALLS", 0)
                patch.setattr(module, "packed_product", lambda weight, made=made: made.append(1) or original(weight))
                found = extract(model, None, samples[name], batch_size=4, progress=False)
                decoding = len(made)
                extract(model, None, samples[name], batch_size=4, progress=False, generate=False)
            assert parallel_packed(model) is None
            answers[name, str(grid)] = found, decoding, len(made) - decoding
    return answers


def parallel_packed(model):
    return hf_axonn.parallel_state(model).context.packed


@pytest.mark.parametrize(
    ("world", "names"),
    [(2, ["llama"]), *(pytest.param(world, ["llama", "gpt2", "gpt_neox"], marks=pytest.mark.slow) for world in GRIDS)],
    ids=["2", "2 with all", "4 with all"],
)
def test_shards_are_packed_and_answers_are_the_same(world, names):
    samples = {name: parting_samples(family(name, torch.float32), 12) for name in names}
    plain = {
        name: extract(family(name, torch.float32), None, samples[name], batch_size=4, progress=False) for name in names
    }
    for rank, answers in enumerate(run_ranks(packed_on_grids, world, names, GRIDS[world], samples)):
        for (name, grid), (found, decoding, scoring) in answers.items():
            # every Linear of two layers and the head, where none is divided over y
            assert decoding >= {"llama": 15, "gpt2": 9, "gpt_neox": 9}[name], grid
            assert scoring == (0 if "z=2" in grid else decoding), "over z weights are gathered for each pass anew"
            assert_same(found, plain[name] if rank == 0 else [], rounding=1e-4)
