"""Checkpoints of one process, read by a grid: whatever way they lay weights out, and into the parameters there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hf_axonn import Grid, parallelize
from hf_axonn.checkpoint.single_process import load_plain_weights
from tests.benchmarks.architectures.tiny_configs import tiny_model
from tests.helpers.ranks import run_ranks


# Experts that lie apart in a checkpoint, weights that are joined along a dim that is cut, and neither.
KINDS = ("mixtral", "olmo_hybrid", "llama")
GRIDS = (Grid(z=2, x=2), Grid(y=2, x=2))


def _small() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 8))


def _fills(folder: Path) -> list[str]:
    wrong = []
    for kind in (*KINDS, "module"):
        for grid in GRIDS:
            model = _small() if kind == "module" else tiny_model(kind, seed=1)
            truth = (_small() if kind == "module" else tiny_model(kind)).state_dict()
            if kind == "module":
                truth = load_file(folder / kind / "model.safetensors")
            model, _ = parallelize(model, grid)
            before = {name: id(parameter) for name, parameter in model.named_parameters()}
            load_plain_weights(model, folder / kind)
            assert before == {name: id(parameter) for name, parameter in model.named_parameters()}
            for name, parameter in model.named_parameters():
                if not torch.equal(parameter.full_tensor(), truth[name]):
                    wrong.append(f"{kind} {grid} {name}")
    with pytest.raises(ValueError, match=r"lacks 1 weights of the model, among them model\.norm\.weight"):
        load_plain_weights(parallelize(tiny_model("llama"), GRIDS[0])[0], folder / "without")
    with pytest.raises(ValueError, match="lacks 1 weights of the model, among them 2.bias"):
        load_plain_weights(parallelize(_small(), GRIDS[0])[0], folder / "module without")
    with pytest.raises(ValueError, match="is no checkpoint"):
        load_plain_weights(parallelize(_small(), GRIDS[0])[0], folder)
    return wrong


def test_parameters_are_filled_in_place(tmp_path):
    for kind in KINDS:
        tiny_model(kind).save_pretrained(tmp_path / kind, max_shard_size="30KB")
    assert any(
        "experts.1.w1" in key for file in (tmp_path / "mixtral").glob("*.safetensors") for key in load_file(file)
    )
    assert len(list((tmp_path / "llama").glob("*.safetensors"))) > 1
    weights = tiny_model("llama").state_dict()
    del weights["model.norm.weight"]
    modules = _small().state_dict()
    for name, tensors in {"without": weights, "module": modules, "module without": modules}.items():
        (tmp_path / name).mkdir()
        left_out = "2.bias" if name == "module without" else ""
        kept = {key: its.clone() for key, its in tensors.items() if key != left_out}
        save_file(kept, tmp_path / name / "model.safetensors")
    assert run_ranks(_fills, 4, tmp_path) == [[]] * 4
