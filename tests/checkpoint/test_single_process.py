"""Checkpoints of one process, read by a grid: whatever way they lay weights out, and into the parameters there are."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import AdamW

from hf_axonn import Grid, parallelize
from hf_axonn.checkpoint.single_process import load_plain_weights, take_plain_optimizer
from hf_axonn.compat.torch import fake_world
from tests.benchmarks.architectures.tiny_configs import tiny_model
from tests.helpers.ranks import run_ranks


# Experts that lie apart in a checkpoint, weights that are joined along a dim that is cut, and neither.
KINDS = ("mixtral", "olmo_hybrid", "llama")
GRIDS = (Grid(z=2, x=2), Grid(y=2, x=2))


INDEX = "model.safetensors.index.json"
# What lies in a directory: (a function that makes it, the words of the refusal).
DAMAGES = {
    "no header": (
        lambda its: (its / "model.safetensors").write_bytes(b"1234567890"),
        "model.safetensors cannot be read",
    ),
    "nested": (lambda its: (its / INDEX).write_text("[" * 100_000), f"{INDEX} is no index of weights"),
    "no map": (lambda its: (its / INDEX).write_text("{}"), f"{INDEX} is no index of weights: KeyError"),
    "a list": (lambda its: (its / INDEX).write_text('{"weight_map": [1]}'), f"{INDEX} is no index of weights"),
    "no file": (lambda its: _index(its, "a"), "a is no file"),
    "a pipe": (lambda its: os.mkfifo(its / "a") or _index(its, "a"), "a is no file"),
    "other names": (
        lambda its: save_file({"b": torch.ones(2)}, its / "a") or _index(its, "a"),
        "a lacks 4 weights that the index names, among them 0.bias",
    ),
    "integers": (
        lambda its: save_file(
            {name: value.detach().view(torch.int32) for name, value in _small().state_dict().items()},
            its / "model.safetensors",
        ),
        "is stored as I32, but the model has it as torch.float32",
    ),
}


def _index(folder: Path, file: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(_small().state_dict(), file)}))


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
    for model, kind in ((tiny_model("llama"), "more"), (_small(), "module more")):
        with pytest.raises(
            ValueError, match="holds 1 tensors that the model does not have, among them another.weight"
        ):
            load_plain_weights(parallelize(model, GRIDS[0])[0], folder / kind)
    for kind, (_, words) in DAMAGES.items():
        with pytest.raises(ValueError, match=words):
            load_plain_weights(parallelize(_small(), GRIDS[0])[0], folder / kind)
    with pytest.raises(ValueError, match="a weight of shape .* is stored as I32, but the model has it as torch.float"):
        load_plain_weights(parallelize(tiny_model("llama"), GRIDS[0])[0], folder / "integers of llama")
    both, _ = parallelize(_small(), GRIDS[0])
    load_plain_weights(both, folder / "both")  # as Transformers, which looks for the index second
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
    weights, modules, more = tiny_model("llama").state_dict(), _small().state_dict(), {"another.weight": torch.ones(2)}
    folders = {
        "without": {name: value for name, value in weights.items() if name != "model.norm.weight"},
        "more": weights | more | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)},  # of old releases
        "module": modules,
        "module without": {name: value for name, value in modules.items() if name != "2.bias"},
        "module more": modules | more,
    }
    for name, tensors in folders.items():
        (tmp_path / name).mkdir()
        save_file({key: value.clone() for key, value in tensors.items()}, tmp_path / name / "model.safetensors")
    for kind, (make, _) in DAMAGES.items():
        (tmp_path / kind).mkdir()
        make(tmp_path / kind)
    integers = {name: its.view(torch.int32).clone() for name, its in tiny_model("llama").float().state_dict().items()}
    for kind, tensors in {"integers of llama": integers, "both": _small().state_dict()}.items():
        (tmp_path / kind).mkdir()
        save_file(tensors, tmp_path / kind / "model.safetensors")
    (tmp_path / "both" / INDEX).write_text("{}")
    assert run_ranks(_fills, 4, tmp_path) == [[]] * 4


def test_moments_get_the_dtype_of_their_parameters():
    one = AdamW(_with_gradients(nn.Linear(4, 6)).parameters())
    one.step()
    with fake_world(2):
        model, _ = parallelize(nn.Sequential(nn.Linear(4, 6)).bfloat16(), Grid(z=2))
        resumed = AdamW(_with_gradients(model).parameters())
        take_plain_optimizer(model, resumed, one.state_dict(), "optimizer.pt")
        resumed.step()
        assert {state["exp_avg"].dtype for state in resumed.state.values()} == {torch.bfloat16}


def _with_gradients(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model
