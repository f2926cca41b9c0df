"""Models in 4 bits on a grid: read in slices, to the bit as whole ones; what is refused; what is saved."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_axonn import from_pretrained, parallelize, save_sharded
from hf_axonn.compat.bitsandbytes import parts_of
from hf_axonn.engine.dtensors import whole
from hf_axonn.engine.four_bit import four_bit_of
from hf_axonn.engine.state import parallel_state
from hf_axonn.topology.grid import Grid
from tests.helpers.adapting import adapt
from tests.helpers.four_bit import SIZES, dequantized_model, quantized_model
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks


bnb = pytest.importorskip("bitsandbytes")


def in_four_bits(*, double: bool, quant_type: str = "nf4", **options) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.bfloat16,
        **options,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models in full precision, and as bitsandbytes saves them."""
    folder = tmp_path_factory.mktemp("models")
    for kind in ("llama", "gpt2"):
        sizes = {"n_inner": 256, **{name: SIZES[name] for name in ("hidden_size", "num_attention_heads")}}
        sizes = SIZES if kind == "llama" else sizes
        tiny_model(kind, dtype=torch.bfloat16, **sizes).save_pretrained(folder / kind)
        for double in (False, True):
            stock(folder / kind, double).save_pretrained(folder / f"{kind}-{double}")
    return folder


def stock(path, double: bool) -> nn.Module:
    """The whole model on one process."""
    return AutoModelForCausalLM.from_pretrained(
        path, quantization_config=in_four_bits(double=double), dtype=torch.bfloat16
    )


def check_bits(model, reference) -> int:
    """All bytes of a sharded model's 4-bit weights, and second scales, are those of a whole one; how many."""
    count = 0
    for name, module in reference.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            weight = model.get_submodule(name).weight
            bits, stored = four_bit_of(parts_of(module.weight), module.out_features, module.in_features, None)
            assert torch.equal(stored, whole(weight)), name
            assert (bits.second is None) == (weight.four_bit.second is None)
            if bits.second is not None:
                for part in ("scales", "levels", "offset"):
                    assert torch.equal(getattr(bits.second, part), getattr(weight.four_bit.second, part)), name
            count += 1
    return count


def _read(folder, kinds, grids, doubles=(False, True)):
    for kind in kinds:
        for double in doubles:
            reference = stock(folder / kind, double)
            for grid in grids:
                options = {"grid": grid, "dtype": torch.bfloat16}
                quantized = from_pretrained(
                    str(folder / kind), quantization_config=in_four_bits(double=double), **options
                )
                read = from_pretrained(str(folder / f"{kind}-{double}"), **options)
                for model in (quantized, read):
                    assert check_bits(model, reference) == (14 if kind == "llama" else 8)
                    assert model.is_loaded_in_4bit


def test_what_ranks_read_has_the_bits_of_the_whole(folder):
    """From a file in full precision, of which each rank quantizes its shard, and from one in 4 bits."""
    run_ranks(_read, 2, folder, ["llama"], [Grid(z=2), Grid(x=2)], (True,))


def _save(folder):
    model = from_pretrained(
        str(folder / "llama"), grid=Grid(z=2, y=2), dtype=torch.bfloat16, quantization_config=in_four_bits(double=True)
    )
    with pytest.raises(ValueError, match="cannot be saved in shards"):
        save_sharded(model, folder / "shards")
    model.save_pretrained(folder / "saved")


@pytest.mark.slow
def test_more_models_and_grids(folder):
    run_ranks(_read, 4, folder, ["llama", "gpt2"], [Grid(y=2, x=2), Grid(data=2, y=2)], timeout=600)
    run_ranks(_save, 4, folder)
    ours, its = AutoModelForCausalLM.from_pretrained(folder / "saved"), stock(folder / "llama", True)
    assert ours.is_loaded_in_4bit
    own, reference = ours.state_dict(), its.state_dict()
    assert own.keys() == reference.keys()
    assert all(torch.equal(own[name], value) for name, value in reference.items())


def _refuse(folder):
    for options, grid, message in (
        ({"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 192}, Grid(y=2), "use y=1"),
        ({"intermediate_size": 192}, Grid(x=2), "down_proj has rows of 192 numbers, which x=2 does not divide"),
        ({"intermediate_size": 80}, Grid(z=2), "name down_proj in llm_int8_skip_modules"),
    ):
        model = quantized_model(**options)
        with pytest.raises(ValueError, match=message):
            parallelize(model, grid)
        assert all(type(parameter).__name__ != "DTensor" for parameter in model.parameters())
    model = quantized_model()
    model.model.embed_tokens.weight = model.model.layers[0].mlp.gate_proj.weight  # in use for something else, too
    with pytest.raises(ValueError, match="gate_proj is a Linear of 4 bits whose weight is used as a"):
        parallelize(model, Grid(x=2))
    model = quantized_model()
    model.lm_head = bnb.nn.Linear8bitLt(128, 131, bias=False)
    with pytest.raises(ValueError, match="but for bitsandbytes' 4 bits, and this one has bitsandbytes's Linear8bitLt"):
        parallelize(model, Grid(x=2))
    model = quantized_model()
    model.model.layers[0].mlp.up_proj = bnb.nn.Linear4bit(128, 256, bias=False)
    with pytest.raises(ValueError, match="up_proj is not quantized yet"):
        parallelize(model, Grid(x=2))
    for config in (BitsAndBytesConfig(load_in_8bit=True),):
        with pytest.raises(ValueError, match="quantized weights cannot be sharded, but for bitsandbytes' 4 bits"):
            from_pretrained(str(folder / "llama"), grid=Grid(x=2), quantization_config=config)
    adapted = adapt(parallelize(quantized_model(), Grid(z=2))[0])
    with pytest.raises(ValueError, match="cannot be merged into a weight of 4 bits"):
        adapted.merge_and_unload()
    for make in (lambda: adapt(parallelize(quantized_model(), Grid(z=2))[0], use_dora=True), _dora_before):
        with pytest.raises(ValueError, match="DoRA .use_dora. needs the norms"):
            make()


def _dora_before():
    return parallelize(adapt(quantized_model(dtype=torch.float32), use_dora=True), Grid(z=2))


def test_what_cannot_be_in_4_bits_is_refused(folder):
    run_ranks(_refuse, 2, folder)


def _casts_and_dtypes(truth):
    """bnb_4bit_compute_dtype: products in bfloat16 outside of autocast, results in the dtype of the model."""
    model, _ = parallelize(asking(torch.bfloat16), Grid(z=2, x=2))
    seen = {}
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
        module = model.get_submodule(f"model.layers.0.{name}")
        module.register_forward_hook(lambda _, __, output, name=name: seen.update({name: output.dtype}))
    with torch.no_grad():
        loss = model(**tiny_batch(2, 7)).loss
    assert set(seen.values()) == {torch.float32}
    assert 0 < abs(loss - truth["float32"]) and abs(loss - truth["bfloat16"]) < 2e-3
    norm = model.model.norm.weight
    norm.data = norm.data.to(torch.bfloat16)
    model(**tiny_batch(2, 7))
    assert norm.to_local().dtype == norm.dtype == torch.bfloat16
    assert parallel_state(model).four_bit


def asking(dtype):
    model = quantized_model(dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.compute_dtype, module.compute_type_is_set = dtype, True
    return model


@pytest.mark.slow
def test_products_are_in_the_dtype_that_is_asked_for():
    truth = {}
    for dtype in (torch.float32, torch.bfloat16):
        with torch.no_grad():
            truth[str(dtype).partition(".")[2]] = float(asking(dtype).train()(**tiny_batch(2, 7)).loss)
    with torch.no_grad():
        plain = float(dequantized_model(asking(torch.float32)).float()(**tiny_batch(2, 7)).loss)
    assert abs(plain - truth["float32"]) < 1e-5
    run_ranks(_casts_and_dtypes, 4, truth)
