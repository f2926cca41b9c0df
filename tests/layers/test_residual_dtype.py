"""The residual stream in bfloat16: what it is between layers, what it saves, how near it is, where it is refused."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from hf_axonn import AxonnPlugin, Grid, parallelize
from hf_axonn.config import AxonnConfig
from hf_axonn.planner.dense import DenseShape
from hf_axonn.planner.memory import memory
from hf_axonn.planner.step import Step
from tests.helpers.equality import Case, worst_ratio
from tests.helpers.float64 import relative_errors
from tests.helpers.models import tiny_batch, tiny_model, unplanned_model
from tests.helpers.ranks import refused, run_ranks


GRIDS = [Grid(x=2), Grid(y=2), Grid(z=2), Grid(data=2)]
BF16 = functools.partial(torch.autocast, "cpu", torch.bfloat16)
NARROW = dict(residual_dtype="bfloat16")


def narrow(model) -> None:
    """What `residual_dtype: bfloat16` is to be, on one process: hooks around each layer."""
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(), *args[1:]))
        layer.register_forward_hook(lambda _, args, output: output.bfloat16())


def between_layers(model) -> list[torch.dtype]:
    """Filled in a pass with the dtypes of what goes into and comes out of the layers."""
    seen: list[torch.dtype] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, args, output: seen.append(output.dtype))
        layer.mlp.register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    return seen


def saved_bytes(model, batch) -> int:
    """Bytes that a forward pass saves for backward in tensors other than parameters, each storage once."""
    own = {parameter.to_local().untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with BF16(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch).loss
    total = sum(storage.nbytes() for storage in kept.values())
    loss.backward()
    return total


def config_of(grid: Grid, narrow: bool = True, **settings) -> AxonnConfig:
    return AxonnConfig(grid=grid, **(NARROW if narrow else {}), **settings)


def make(kind: str):
    return tiny_model(kind, dtype=torch.float32)


def case(kind: str, *, wide: bool = False) -> Case:
    name = f"{kind} {'float32' if wide else 'bfloat16'}"
    return Case(
        name, functools.partial(make, kind), config=functools.partial(config_of, narrow=not wide), context=BF16
    )


def distances(cases, truths):
    """Of each case on each grid the distance of loss and gradients from the float64 truth of its model."""
    found = {}
    for one, truth in zip(cases, truths, strict=True):
        for grid in GRIDS:
            found[one.name, str(grid)] = distance(one.on_grid(grid), truth)
    return found, seen_and_saved(), refusals()


def distance(outcome, truth) -> tuple[float, float]:
    losses = [loss.double() for loss in outcome.losses]
    return worst_ratio(losses, truth.losses), max(relative_errors(outcome.gradients, truth.gradients).values())


def seen_and_saved():
    """Dtypes between the layers, and saved bytes with the stream of the model and the narrow one, with and without
    checkpoints, by grid."""
    found = {}
    for grid in (Grid(x=2), Grid(y=2)):
        sizes = {}
        for checkpointing in (False, True):
            for wide in (True, False):
                model, _ = parallelize(make("llama").train(), grid, config=config_of(grid, narrow=not wide))
                seen = between_layers(model)
                if checkpointing:
                    model.gradient_checkpointing_enable(dict(use_reentrant=False))
                sizes[checkpointing, wide] = saved_bytes(model, tiny_batch(8, 7))
                before = seen[:4]
        found[str(grid)] = sizes, before
    return found


def planned(grid: str, checkpointing: bool) -> float:
    """How many saved bytes less the planner expects of a narrow stream."""
    sizes = dict(hidden=48, heads=12, kv_heads=6, head_dim=4, intermediate=40, vocab=131)
    step = Step(rows=8, seq=7, checkpointing=checkpointing)
    y = 2 if "y=2" in grid else 1
    wide, narrow = (
        memory(DenseShape(layers=2, **sizes), Grid(y=y, x=2 // y), each, layout="feature")
        for each in (step, replace(step, residual_bytes=2))
    )
    return wide.activations - narrow.activations


def refusals():
    with torch.no_grad():
        model, _ = parallelize(make("llama"), GRIDS[0], config=config_of(GRIDS[0]))
        wide, _ = parallelize(make("llama"), GRIDS[0])
        same = torch.equal(model(**tiny_batch(4, 7)).logits, wide(**tiny_batch(4, 7)).logits)
    model.train()
    said = [refused(model, **tiny_batch(4, 7))]
    with torch.autocast("cpu", torch.float16):
        said.append(refused(model, **tiny_batch(4, 7)))
    said.append(refused(parallelize, unplanned_model(), GRIDS[0], config=config_of(GRIDS[0])))
    AcceleratorState._reset_state(True)
    plugin = AxonnPlugin(grid=GRIDS[0], **NARROW)
    said.append(refused(Accelerator, cpu=True, parallelism_config=plugin, mixed_precision="no"))
    return same, said


def test_a_narrow_stream_on_a_grid():
    """No further from float64 than three times one process with the same stream; a loss is allowed two roundings."""
    kinds, truths, alone = ("llama", "glm4"), [], []
    for kind in kinds:
        exact = Case("float64", lambda kind=kind: make(kind).double()).truth()
        one = case(kind)
        one.before = narrow
        truths.append(exact)
        alone.append(distance(one.truth(), exact))
    wide = distance(case("llama", wide=True).truth(), truths[0])
    assert wide[1] < alone[0][1] < 4 * wide[1] < 0.2  # bfloat16 between the layers is not for nothing
    cases = [case(kind) for kind in kinds]
    for found, seen, (same, said) in run_ranks(distances, 2, cases, truths):
        for index, one in enumerate(cases):
            for grid in GRIDS:
                loss, gradients = found[one.name, str(grid)]
                assert gradients <= 3 * alone[index][1], (one.name, grid, gradients, alone)
                assert loss <= 3 * alone[index][0] + 2 * torch.finfo(torch.bfloat16).eps, (one.name, grid)
        for grid, (sizes, dtypes) in seen.items():
            assert set(dtypes) == {torch.bfloat16}, grid
            for checkpointing in (False, True):
                less = sizes[checkpointing, True] - sizes[checkpointing, False]
                assert less == planned(grid, checkpointing) > sizes[checkpointing, True] // 10, (grid, sizes)
        assert same
        assert "the model computes in torch.float32" in said[0] and "the model computes in torch.float16" in said[1]
        assert "UnlistedForCausalLM is sharded Linear by Linear" in said[2]
        assert "residual_dtype is bfloat16, but mixed_precision is no" in said[3]


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="residual_dtype is 'float16', but it is one of model, bfloat16"):
        AxonnConfig(grid=Grid(x=2), residual_dtype="float16")
    with pytest.raises(ValueError, match="a grid of one rank stays as it is"):
        AxonnConfig(grid=Grid(), residual_dtype="bfloat16")
    assert AxonnConfig(grid=Grid()).residual_dtype == "model"
