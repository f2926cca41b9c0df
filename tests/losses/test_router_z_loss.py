"""A z loss of routers (Zoph et al. 2022, ST-MoE, arXiv 2202.08906, equation 5) against one process, in float64.

No decoder of Transformers has one, so these are classes as a user writes them.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeForCausalLM

from hf_axonn import Grid
from tests.helpers.equality import Case
from tests.helpers.float64 import checkpointed, relative_errors
from tests.helpers.models import tiny_batch
from tests.layers.test_moe import Planned, counted, errors, gathered, moe, moved


WEIGHT = 0.5
GRIDS = [Grid(z=2, x=2), Grid(z=4), Grid(z=2, y=2), Grid(y=2, x=2), Grid(data=2, z=2), Grid(z=2, x=2, context=2)]


class OfEveryToken(Qwen3MoeForCausalLM):
    """Adds the mean over all tokens, of which every rank has as many."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, **kwargs):
        output = super().forward(input_ids, attention_mask, position_ids, labels=labels, **kwargs)
        squares = [logits.logsumexp(dim=-1).square().mean() for logits in output.router_logits]
        output["loss"] = output["loss"] + WEIGHT * torch.stack(squares).mean()
        return output


def load_balancing_loss_func(gate_logits, num_experts, top_k=2, attention_mask=None) -> Tensor:
    """The mean over real tokens, under the name of the function that gets the logits of all ranks."""
    squares = torch.stack([logits.logsumexp(dim=-1).square() for logits in gate_logits])
    real = torch.ones_like(squares[0]) if attention_mask is None else attention_mask.reshape(-1).to(squares)
    return (squares * real).sum() / real.sum() / len(gate_logits)


class OfRealTokens(Qwen3MoeForCausalLM):
    """Adds the mean over tokens that are no padding, of which ranks have different numbers."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, **kwargs):
        output = super().forward(input_ids, attention_mask, position_ids, labels=labels, **kwargs)
        loss = load_balancing_loss_func(output.router_logits, self.num_experts, 2, attention_mask)
        output["loss"] = output["loss"] + WEIGHT * loss
        return output


def make(own: type[nn.Module], **changes) -> nn.Module:
    model = moe("qwen3_moe", num_experts=6, num_hidden_layers=2, **changes)
    model.__class__ = own
    return model


def case(own: type[nn.Module], config, name: str = "", **options) -> Case:
    options.setdefault("batches", [tiny_batch(8, 8)])  # rows that context divides
    return Case(f"{own.__name__} {config.__name__} {name}", functools.partial(make, own), config=config, **options)


def test_a_z_loss_is_a_part_that_is_seen() -> None:
    plain = functools.partial(moe, "qwen3_moe", num_experts=6)
    without = Case("without", plain, batches=[tiny_batch(8, 8)]).truth().gradients
    routers = [name for name in without if "mlp.gate." in name]
    for own in (OfEveryToken, OfRealTokens):
        truth = case(own, moved).truth().gradients
        found = relative_errors({name: without[name] for name in routers}, {name: truth[name] for name in routers})
        assert min(found.values()) > 0.1


def test_a_z_loss_equals_one_process() -> None:
    of_items = [counted(tiny_batch(8, 8))]
    cases = [case(OfEveryToken, moved), case(OfRealTokens, moved, "of items", batches=of_items)]
    assert not errors(Planned(cases, GRIDS[:1]))


@pytest.mark.slow
@pytest.mark.parametrize("config", [moved, gathered])
def test_a_z_loss_on_every_grid(config) -> None:
    of_items = [counted(tiny_batch(8, 8)), counted(tiny_batch(8, 4, seed=4))]
    cases = [case(own, config, "of items", batches=of_items, steps=2) for own in (OfEveryToken, OfRealTokens)]
    again = functools.partial(checkpointed, reentrant=False)
    cases += [case(own, config, "recomputed", before=again) for own in (OfEveryToken, OfRealTokens)]
    assert not errors(Planned(cases, GRIDS))
