"""`allow_untested`: a type that is in no table is sharded by general rules, or left whole where they do not hold."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from hf_axonn import AxonnConfig, Grid, parallelize, sync_gradients
from hf_axonn.architectures.plan import plan_for
from tests.benchmarks.architectures.survey import in_float64
from tests.helpers.equality import mean_over_world
from tests.helpers.float64 import relative_errors
from tests.helpers.models import tiny_batch, unplanned_model
from tests.helpers.own_type import OwnConfig, OwnForCausalLM, ReadingAttention, ReadingForCausalLM
from tests.helpers.ranks import run_ranks


GRIDS = (Grid(y=2, x=2), Grid(z=2, x=2))


def own_model(kind: type[OwnForCausalLM] = OwnForCausalLM) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 42, "num_hidden_layers": 2, "vocab_size": 131, "head_dim": 12}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 5}
    config = OwnConfig(**sizes, **heads, layer_types=["sliding_attention", "full_attention"], pad_token_id=0)
    return kind(config).double()


def train(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    with in_float64():
        loss = model(**batch).loss
        loss.backward()
    sync_gradients(model)
    return loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def _compare(truth: tuple[torch.Tensor, dict[str, torch.Tensor]], batch: dict[str, torch.Tensor]) -> None:
    for grid in GRIDS:
        config = AxonnConfig(grid=grid, allow_untested=True)
        model, report = parallelize(own_model(), config=config)
        assert "4 blocks by rules that are untested for this type" in report.summary
        loss, gradients = train(model, batch)  # the same on all ranks, so that averages change nothing
        assert abs(float(mean_over_world(loss) - truth[0])) < 1e-10
        assert max(relative_errors(gradients, truth[1]).values()) < 1e-10


def test_a_type_of_own_making_equals_one_process():
    batch = tiny_batch(4, 7)
    run_ranks(_compare, 4, train(own_model(), batch), batch, timeout=240)


def test_without_it_and_where_code_reads_a_number_of_the_whole_model_nothing_is_divided():
    assert plan_for(unplanned_model()).reason.startswith("no block plan for unlisted models")
    assert plan_for(unplanned_model(), allow_untested=True).untested
    plan = plan_for(own_model(ReadingForCausalLM), allow_untested=True)
    lines, first = inspect.getsourcelines(ReadingAttention.forward)
    line = first + next(place for place, text in enumerate(lines) if "num_attention_heads" in text)
    reason = f"its attention reads num_attention_heads of the whole model at own_type.py:{line}"
    assert plan.full_sequence == {"model.layers.1.self_attn": reason}
    with pytest.raises(ValueError, match="allow_untested is 'yes', but it is a switch"):
        AxonnConfig(grid=Grid(x=2), allow_untested="yes")
