"""LoRA on a base of 4 bits (bitsandbytes) over a grid, against one process that holds the dequantized weights."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_axonn import parallelize
from hf_axonn.config import AxonnConfig
from hf_axonn.distributed.collectives import observe
from hf_axonn.engine.gradient_sync import sync_gradients
from hf_axonn.engine.state import parallel_state
from hf_axonn.topology.grid import Grid
from tests.helpers.adapting import Adapted, adapt
from tests.helpers.equality import Outcome, compare, exact, mean_over_world, rows_of, too_large
from tests.helpers.float64 import relative_errors
from tests.helpers.four_bit import WIDE, dequantized_model, quantized_model
from tests.helpers.models import tiny_batch
from tests.helpers.ranks import all_grids, run_ranks
from tests.parallel.adapters.test_lora import checkpointed


pytest.importorskip("bitsandbytes")

GRIDS = [Grid(z=2, x=2), Grid(y=2, x=2), Grid(data=2, z=2)]


class OfFourBits(Adapted):
    """A case that compares what is trained: the base is bytes on the grid, and numbers on one process."""

    def fit(self, model, batches, *, dp_size=1) -> Outcome:
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        outcome = super().fit(model, batches, dp_size=dp_size)
        outcome.parameters = {name: outcome.parameters[name] for name in trained}
        return outcome


def case(name, kind="llama", *, adapter=adapt, before=lambda model: None, config=lambda grid: None, **changes):
    """The case on the grid, and what it is compared with."""
    options = {"adapter": adapter, "before": before, "steps": 2, "config": config}
    quantized = functools.partial(quantized_model, kind, **changes)
    ours = OfFourBits(name, base=quantized, **options)
    return ours, OfFourBits(name, base=lambda: dequantized_model(quantized()), **options).truth()


def _after(cases, grids):
    for each, _ in cases:
        each.name, each.after = f"{each.name}, after", True
    return compare(cases, grids)


def _equality_and_traffic(cases):
    table = compare(cases[:1], GRIDS[:1]) | compare(cases[1:], GRIDS) | _after(cases[1:], GRIDS[1:2])
    for double, in_file in ((False, 36), (True, 33)):
        _check_traffic(double, in_file)
    return table


def _gathered_over_z(model, context) -> int:
    """Bytes that this rank sends of weights in a step, all layers and both ways."""
    state, sent = parallel_state(model), []
    mine = rows_of(tiny_batch(8, 7), state.grid, state.grid_mesh.rank)
    z = state.grid_mesh.group("z")
    with (
        observe(lambda kind, payload, group: sent.append(payload if kind == "all_gather" and group is z else 0)),
        context,
    ):
        model(**mine).loss.backward()
    return sum(sent)


def _check_traffic(double: bool, block_bytes: int) -> None:
    """Forward and backward send the blocks' bytes of these weights, and nothing else, where bf16 sends 2 a number."""
    totals, autocast = [], functools.partial(torch.autocast, "cpu", torch.bfloat16)
    quantized = quantized_model(double=double, dtype=torch.float32)
    for base in (quantized, dequantized_model(quantized).float()):
        model = parallelize(adapt(base).train(), Grid(data=2, z=2))[0]
        model.enable_input_require_grads()  # or the first projections would have no backward pass
        totals.append(_gathered_over_z(model, autocast()))
    linears = [module.weight for module in parallelized_linears(model)]
    elements = sum(weight.numel() for weight in linears)
    assert elements == 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 256)
    sent_as_bf16 = 2 * 2 * elements // 2  # forward and backward, 2 bytes, half of it by each rank of z
    assert totals[1] - totals[0] == sent_as_bf16 - 2 * elements // 64 * block_bytes // 2
    rest = totals[1] - sent_as_bf16
    assert (totals[0] - rest) / sent_as_bf16 == block_bytes / 128


def parallelized_linears(model):
    return [module for name, module in model.named_modules() if name.endswith("base_layer")]


def test_lora_on_4_bits_is_as_on_the_dequantized_weights():
    """Losses, norms, every gradient and two AdamW steps, in float64; and traffic over z to the byte."""
    cases = [case("nf4"), case("double", double=True)]
    for _, truth in cases:
        assert len(truth.gradients) == 2 * 2 * 7
        assert all(value.abs().max() > 1e-6 for value in truth.gradients.values())
    table = run_ranks(_equality_and_traffic, 4, cases)[0]
    assert len(table) == 1 + 3 + 1
    assert not too_large(table, 1e-10)


def _without(*skipped):
    """Adapters on a model of which some Linears stay as they are."""

    def make(model):
        plain = dequantized_model(model)
        for name, module in list(model.named_modules()):
            if name.endswith(skipped) and type(module) is not nn.Linear:
                model.set_submodule(name, plain.get_submodule(name))
        return adapt(model)

    return make


def _over_stages(ours, truth):
    for grid in (Grid(pipe=2, z=2), Grid(pipe=2, x=2)):
        model, _ = parallelize(ours.make().train(), grid)
        mine = rows_of(tiny_batch(8, 7), grid, dist.get_rank())
        with exact():
            loss = model(**mine).loss
            loss.backward()
        sync_gradients(model)
        gradients = {name: its.grad for name, its in model.named_parameters() if its.grad is not None}
        assert len(gradients) == 2 * 7  # of the layer of this stage
        assert max(relative_errors(gradients, {name: truth.gradients[name] for name in gradients}).values()) < 1e-10
        assert abs(mean_over_world(loss) - truth.losses[0]) < 1e-10


@pytest.mark.slow
def test_stages_of_a_pipeline_have_4_bits():
    run_ranks(_over_stages, 4, *case("double", double=True))


def keeping(grid, **options):
    return AxonnConfig(grid=grid, **options)


@pytest.mark.slow
@pytest.mark.usefixtures("way")
def test_4_bits_of_rows_that_are_cut():
    """The double quantization of QLoRA, and a checkpointed model."""
    checkpointing = case("checkpointing", before=functools.partial(checkpointed, reentrant=False), **WIDE)
    table = run_ranks(compare, 2, [case("double", double=True, **WIDE), checkpointing], [Grid(z=2, context=2)])[0]
    assert len(table) == 2 and not too_large(table, 1e-10)


def _every(cases):
    return compare(cases, [*all_grids(4), Grid(z=4, context=2)]) | _after(cases[:3], GRIDS)


@pytest.mark.slow
def test_every_kind_of_4_bits_on_every_grid():
    cases = [
        case("nf4", **WIDE),
        case("double", double=True, **WIDE),
        case("fp4", quant_type="fp4", **WIDE),
        case("the head too", head=True, **WIDE),
        case("biases", "qwen2", double=True, **WIDE),
        case("conv1d", "gpt2", n_inner=256, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **WIDE),
        case("checkpointing", before=functools.partial(checkpointed, reentrant=False), **WIDE),
        case("reentrant", double=True, before=functools.partial(checkpointed, reentrant=True), **WIDE),
        case("some in full precision", adapter=_without("k_proj", "down_proj"), **WIDE),
        case("all kept", config=functools.partial(keeping, keep_gathered="all"), **WIDE),
        case("small bundles", double=True, config=functools.partial(keeping, prefetch=1), **WIDE),
    ]
    table = run_ranks(_every, 4, cases, timeout=900)[0]
    assert len(table) == len(cases) * 11 + 9
    assert not too_large(table, 1e-10)
