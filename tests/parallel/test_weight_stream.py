"""The stream of weights of a sharded model: what `save_pretrained` of the plain model writes, a layer at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn

from hf_axonn import Grid, parallelize
from hf_axonn.engine.dtensors import local, whole
from hf_axonn.parallel import weight_stream
from hf_axonn.parallel.weight_stream import WeightStream
from tests.helpers.allocated import Peak, glibc
from tests.helpers.models import DEEPSEEK, tiny_model
from tests.helpers.ranks import run_ranks


MIXTURE = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, decoder_sparse_step=1)
MIXTURE |= dict(mlp_only_layers=[])
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def lora(**changes: Any) -> LoraConfig:
    options: dict[str, Any] = dict(r=3, lora_alpha=6, init_lora_weights=False, task_type="CAUSAL_LM")
    return LoraConfig(**(options | dict(target_modules=["q_proj", "down_proj"]) | changes))


# Model, and adapters in it; "tied" and "experts" are saved otherwise than they are held.
CASES: dict[str, tuple[Callable[[], nn.Module], LoraConfig | None]] = {
    "plain": (lambda: tiny_model("llama"), None),
    "tied": (lambda: tiny_model("smollm2"), None),
    "experts": (lambda: tiny_model("qwen3_moe", **MIXTURE), None),
    "buffers": (lambda: tiny_model("deepseek_v3", n_routed_experts=4, num_experts_per_tok=2, **DEEPSEEK), None),
    "LoRA": (lambda: tiny_model("llama"), lora()),
    "LoRA and copies": (lambda: tiny_model("llama"), lora(modules_to_save=["lm_head", "model.norm"])),
    "DoRA": (lambda: tiny_model("llama"), lora(use_dora=True)),
    "LoRA of experts": (
        lambda: tiny_model("qwen3_moe", **MIXTURE),
        lora(target_modules=["q_proj"], target_parameters=EXPERTS),
    ),
}
GRIDS = (Grid(x=2), Grid(y=2), Grid(z=2))


def make(case: str) -> nn.Module:
    build, config = CASES[case]
    model = build()
    if config is None:
        return model
    torch.manual_seed(3)
    model = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:  # a copy that has been trained
                parameter += 0.1
    return model


def saved(case: str, folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors in the files of one process, adapters merged."""
    model: Any = make(case)
    (model.merge_and_unload() if CASES[case][1] else model).save_pretrained(folder / case)
    (file,) = (folder / case).glob("*.safetensors")
    return load_file(file)


def _streams(truths: dict[str, dict[str, torch.Tensor]]) -> list[list]:
    orders = []
    for grid in GRIDS:
        for case, truth in truths.items():
            model = make(case)
            parallelize(model, grid)
            before = [local(parameter).detach().clone() for parameter in model.parameters()]
            stream, order = WeightStream(model), []
            held = {id(tensor): name for name, tensor in stream._tensors().items()}

            def note(tensor, order=order, held=held):
                order.append(held[id(tensor)])
                return whole(tensor)

            names = stream.names()
            outline = dict(stream.outline(names))
            with mock.patch.object(weight_stream, "whole", note):
                found = dict(stream.tensors(names, receive=dist.get_rank() == 0))
            orders.append([str(grid), case, order])
            after = [local(parameter).detach() for parameter in model.parameters()]
            assert all(map(torch.equal, before, after)), (grid, case, "weights are what they were")
            assert {name: each.shape for name, each in outline.items()} == {n: t.shape for n, t in truth.items()}
            if dist.get_rank() > 0:
                assert not found
                continue
            assert list(found) == list(outline) and found.keys() == truth.keys()
            for name, tensor in found.items():
                assert type(tensor) is torch.Tensor and tensor.dtype == outline[name].dtype == truth[name].dtype
                same = torch.equal if CASES[case][1] is None else lambda a, b: torch.allclose(a, b, rtol=0, atol=1e-14)
                assert same(tensor, truth[name]), (grid, case, name)
    return orders


@pytest.mark.slow
def test_a_stream_is_what_one_process_saves_and_all_ranks_gather_in_one_order(tmp_path):
    one, other = run_ranks(_streams, 2, {case: saved(case, tmp_path) for case in CASES})
    assert one == other and all(len(order) == len(set(order)) >= 20 for *_, order in one)


def test_weights_that_training_changes_come_with_all_beside_them():
    stream = WeightStream(make("LoRA and copies"))
    attention = {f"self_attn.{each}_proj.weight" for each in "qkvo"}
    mlp = {f"mlp.{each}_proj.weight" for each in ("gate", "up", "down")}
    names = {f"model.layers.{layer}.{name}" for layer in range(2) for name in attention | mlp}
    assert stream.names(trained=True) == names | {"model.norm.weight", "lm_head.weight"} < stream.names()
    model = tiny_model("llama")
    stream = WeightStream(model)
    assert stream.names(trained=True) == stream.names()
    model.requires_grad_(False)
    assert stream.names(trained=True) == stream.names(), "what was trained before is sent once more"
    assert not WeightStream(model).names(trained=True)


def _growth() -> tuple[int, int, int]:
    sizes = dict(hidden_size=192, intermediate_size=384, num_hidden_layers=12, num_key_value_heads=12, head_dim=16)
    model = tiny_model("llama", **sizes)
    layer = sum(parameter.numel() * 8 for parameter in model.model.layers[0].parameters())
    parallelize(model, Grid(z=2))
    stream = WeightStream(model)
    names, peak = stream.names(), Peak()
    sent = sum(tensor.numel() * 8 for _, tensor in stream.tensors(names, receive=dist.get_rank() == 0))
    assert sent > 11 * layer or dist.get_rank() > 0
    return peak.growth(), layer, sent


@glibc
@pytest.mark.slow
def test_no_rank_holds_more_than_a_layer():
    (growth, layer, sent), (other, _, _) = run_ranks(_growth, 2)
    print(f"layer {layer / 1e6:.1f} MB, sent {sent / 1e6:.1f}; receives: {growth / 1e6:.1f}, other: {other / 1e6:.1f}")
    assert growth < 2 * layer and other < layer
