"""`from_pretrained`: every rank reads its own slices and no more, and has what plain loading gives, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import tiny_model
from ranks import run_ranks
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hf_axonn import Grid, from_pretrained, load_sharded, save_sharded


GRIDS = [Grid(z=2, x=2), Grid(y=2, x=2), Grid(data=2, z=2), Grid(y=4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in ("qwen3", "smollm2"):
        tiny_model(kind, dtype=torch.float32).save_pretrained(folder / kind)
    return folder


def _equal(folder: Path) -> None:
    for kind in ("qwen3", "smollm2"):
        plain = AutoModelForCausalLM.from_pretrained(folder / kind)
        for grid in GRIDS:
            model = from_pretrained(folder / kind, grid=grid)
            assert not model.training and model.axonn.grid == grid
            for name, parameter in plain.named_parameters():
                assert torch.equal(model.get_parameter(name).full_tensor(), parameter), (kind, grid, name)
            assert torch.equal(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
            tied = model.lm_head.weight is model.model.embed_tokens.weight
            assert tied == (kind == "smollm2")
            assert model.config.to_dict() == plain.config.to_dict()
            ids = torch.arange(3, 13).view(2, 5)
            with torch.no_grad():
                torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-5)


def test_bit_for_bit_what_plain_loading_gives(folder):
    run_ranks(_equal, 4, folder)


def _reads(folder: Path) -> None:
    """Count the elements that leave the file, by the tensors that Transformers' loader makes of its slices."""
    from transformers.distributed.sharding_utils import DtensorShardOperation

    read = []
    stock = DtensorShardOperation.shard_tensor

    def counting(self, *args, **kwargs):
        result = stock(self, *args, **kwargs)
        read.append(result.numel())
        return result

    DtensorShardOperation.shard_tensor = counting
    try:
        model = from_pretrained(folder / "qwen3", grid=Grid(y=2, x=2))
    finally:
        DtensorShardOperation.shard_tensor = stock
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    total = sum(parameter.numel() for parameter in model.parameters())
    assert sum(read) == held < 0.4 * total


def test_a_rank_reads_only_what_it_holds(folder):
    run_ranks(_reads, 4, folder)


def _refusals(folder: Path) -> None:
    grid = Grid(x=2)
    for name, value in {"device_map": "auto", "tp_plan": "auto"}.items():
        with pytest.raises(ValueError, match=name):
            from_pretrained(folder / "qwen3", grid=grid, **{name: value})
    with pytest.raises(ValueError, match="convert them once"):
        from_pretrained(folder / "qwen3", grid=grid, gguf_file="model.gguf")
    with pytest.raises(ValueError, match="has no weights for 1 parameters, among them lm_head.weight"):
        from_pretrained(folder / "headless", grid=grid)
    with pytest.raises(OSError, match="nowhere"):
        from_pretrained(folder / "nowhere", grid=grid)
    assert from_pretrained(folder / "qwen3", grid=Grid(), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_refusals_name_what_to_do(folder):
    from safetensors.torch import load_file, save_file

    headless = folder / "headless"
    headless.mkdir()
    (headless / "config.json").write_text((folder / "qwen3" / "config.json").read_text())
    weights = load_file(folder / "qwen3" / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, headless / "model.safetensors", metadata={"format": "pt"})
    run_ranks(_refusals, 2, folder)


def test_the_hooks_in_transformers_are_taken_away_again(folder):
    before = {name: vars(LlamaForCausalLM.__mro__[-1]).get(name) for name in ("maybe_distribute_model",)}
    run_ranks(_plain_afterwards, 2, folder)
    assert before == {name: vars(LlamaForCausalLM.__mro__[-1]).get(name) for name in before}


def _plain_afterwards(folder: Path) -> None:
    from_pretrained(folder / "qwen3", grid=Grid(x=2))
    plain = AutoModelForCausalLM.from_pretrained(folder / "qwen3")
    assert not hasattr(plain, "axonn") and type(plain.lm_head.weight) is torch.nn.Parameter


def _round_trip(folder: Path, output: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder / "smollm2")
    for index, (first, second) in enumerate(((Grid(z=2, x=2), Grid(y=4)), (Grid(y=2, x=2), Grid(data=2, z=2)))):
        save_sharded(from_pretrained(folder / "smollm2", grid=first), output / str(index))
        model = from_pretrained(output / str(index), grid=second)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load_sharded(model, output / str(index))
        for name, parameter in plain.named_parameters():
            assert torch.equal(model.get_parameter(name).full_tensor(), parameter), (index, name)
        assert "axonn" not in json.dumps(json.loads((output / str(index) / "config.json").read_text()))
    with pytest.raises(ValueError, match="save_pretrained"):
        save_sharded(plain, output / "plain")


def test_sharded_checkpoints_of_other_grids(folder, tmp_path):
    run_ranks(_round_trip, 4, folder, tmp_path)
