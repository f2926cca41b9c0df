"""The auxiliary loss over all ranks: which functions are recognized, and what happens to the others."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from transformers.models.doge import modeling_doge
from transformers.models.jamba import modeling_jamba
from transformers.models.mixtral import modeling_mixtral
from transformers.models.nllb_moe import modeling_nllb_moe

from hf_axonn.distributed.mesh import grid_mesh
from hf_axonn.losses.router_aux import RouterLogits, RouterLoss, _is_of_switch, _join_ranks, switch_loss
from hf_axonn.topology.grid import Grid
from tests.helpers.devices import moved, rank_device
from tests.helpers.equality import exact
from tests.helpers.ranks import run_ranks


pytestmark = pytest.mark.usefixtures("device")


LAYERS, ROWS, SEQ, WIDTH = 3, 4, 5, 6


def cubic(gate_logits, num_experts, top_k=2, attention_mask=None):
    """A loss of no known form, with the signature of the known one."""
    probabilities = torch.stack([logits.softmax(dim=-1) for logits in gate_logits])
    weights = torch.ones(probabilities.shape[1]) if attention_mask is None else attention_mask.flatten()
    mean = (probabilities * weights[:, None]).sum(dim=(0, 1)) / weights.sum()
    return (mean**3).sum() * num_experts


FUNCTIONS = {
    "mixtral": modeling_mixtral.load_balancing_loss_func,
    "cubic": cubic,
    "doge": modeling_doge.load_balancing_loss_func,
}


def arguments(name, mask):
    """Of the whole batch: logits [T, E] for each layer, those of doge [2, T, keys] for keys * keys experts."""
    generator = torch.Generator().manual_seed(7)
    if name == "doge":
        shape, more = (2, ROWS * SEQ, 3), {"num_experts": 9, "num_keys": 3, "top_k": 2}
    else:
        shape, more = (ROWS * SEQ, WIDTH), {"num_experts": WIDTH, "top_k": 2}
    logits = [torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") for _ in range(LAYERS)]
    if mask:
        attention_mask = torch.ones(ROWS, SEQ, dtype=torch.int64)
        attention_mask[1, 2:] = attention_mask[2, :1] = attention_mask[3, 4:] = 0
        more["attention_mask"] = attention_mask
    return moved((logits, more), rank_device())


def value_and_gradient(function, logits, more, wrap=tuple):
    leaves = [layer.clone().requires_grad_() for layer in logits]
    with exact():
        loss = function(wrap(leaves), **more)
    loss.backward()
    return loss.detach(), torch.stack([leaf.grad for leaf in leaves])


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("module", [modeling_mixtral, modeling_jamba, modeling_nllb_moe])
def test_the_loss_of_switch_transformers_is_recognized(module, mask):
    assert _is_of_switch(module.load_balancing_loss_func)
    logits, more = arguments("mixtral", mask)
    theirs = value_and_gradient(module.load_balancing_loss_func, logits, more)
    ours = value_and_gradient(switch_loss, logits, more)
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-9)


def test_other_losses_are_not_taken_for_it():
    assert not _is_of_switch(cubic)
    assert not _is_of_switch(modeling_doge.load_balancing_loss_func)


def test_logits_of_a_plain_model_go_to_the_function_itself():
    logits, more = arguments("mixtral", True)
    function = _join_ranks(modeling_mixtral.load_balancing_loss_func)
    assert function(tuple(logits), **more) == modeling_mixtral.load_balancing_loss_func(tuple(logits), **more)
    assert function(None) == 0


def _on_grid(grid, truths):
    mesh = grid_mesh(grid, rank_device().type)
    here, samples = mesh.index("data", "z"), mesh.size("data", "z")
    rows = slice(here * ROWS // samples, (here + 1) * ROWS // samples)
    tokens = slice(rows.start * SEQ, rows.stop * SEQ)
    state = types.SimpleNamespace(grid_mesh=mesh, context=types.SimpleNamespace(stage=None, rows=None))
    for (name, mask), (loss, gradient) in truths.items():
        logits, more = arguments(name, mask)
        mine = [layer[..., tokens, :] for layer in logits]
        if mask:
            more["attention_mask"] = more["attention_mask"][rows]
        router_loss = RouterLoss.__new__(RouterLoss)
        router_loss.state = state
        ours, own = value_and_gradient(
            _join_ranks(FUNCTIONS[name]), mine, more, functools.partial(RouterLogits, router_loss=router_loss)
        )
        # Gradients are averaged over (data, z) afterwards.
        torch.testing.assert_close(ours, loss, rtol=1e-7, atol=0)
        torch.testing.assert_close(own, gradient[..., tokens, :] * samples, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("grid", [Grid(z=2), Grid(data=2), Grid(data=2, z=2), Grid(z=2, x=2)], ids=str)
def test_every_rank_gets_the_loss_of_all_and_its_part_of_the_gradient(grid):
    truths = {
        (name, mask): value_and_gradient(FUNCTIONS[name], *arguments(name, mask))
        for name in FUNCTIONS
        for mask in (True, False)
    }
    run_ranks(_on_grid, grid.size, grid, truths)
