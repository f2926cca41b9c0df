"""Tokens that travel to experts by a given routing send what planner/traffic/volumes.py says, to the call and byte."""

from __future__ import annotations

from fractions import Fraction
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hf_axonn import Grid, parallelize
from hf_axonn.config import AxonnConfig
from hf_axonn.engine.gradient_sync import syncing
from hf_axonn.layers import moe
from hf_axonn.planner.experts import Rows, place_experts
from hf_axonn.planner.step import Step
from hf_axonn.planner.traffic import volumes as arithmetic
from hf_axonn.planner.traffic.volumes import volumes
from hf_axonn.profiling.read_shape import shape_of
from tests.helpers.equality import rows_of
from tests.helpers.models import DEEPSEEK, tiny_batch, tiny_config, tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.traffic_counter import count_traffic


SIZES = dict(num_experts_per_tok=2, moe_intermediate_size=24)
KINDS = {
    "qwen3_moe": dict(num_experts=6, decoder_sparse_step=1, mlp_only_layers=[], **SIZES),
    "gpt_oss": dict(num_local_experts=6, num_experts_per_tok=3, intermediate_size=24),  # Linear by Linear
    "deepseek_v3": dict(
        n_routed_experts=8,
        **DEEPSEEK,
        **SIZES,
    ),
}
# Whose shared experts are called before the others, or outside of the mixture.
KINDS |= {
    "qwen2_moe": KINDS["qwen3_moe"] | dict(shared_expert_intermediate_size=20),
    "granitemoeshared": KINDS["gpt_oss"] | dict(shared_intermediate_size=20, num_key_value_heads=12),
}
GRIDS = [Grid(z=4), Grid(z=2, x=2), Grid(data=2, z=2), Grid(y=2, x=2)]
ROWS, SEQ = 4, 8


class Routing:
    """Choices that depend on a token's place and its rank alone, and the rows that they made."""

    def __init__(self) -> None:
        self.rows: Rows | None = None
        self._find_routes = moe.find_routes

    def __call__(self, choices, owners, group):
        tokens, chosen = choices.shape
        place = torch.arange(tokens)[:, None] * 3 + torch.arange(chosen) + dist.get_rank()
        routes = self._find_routes(place % len(owners), owners, group)
        here = dist.get_group_rank(group, dist.get_rank())
        others = [sum(each) - each[here] for each in (routes.sent, routes.received)]
        self.rows = Rows(*(Fraction(rows, tokens) for rows in others))
        assert self.rows.sent <= min(chosen, len(routes.sent)), "a token goes once to a rank"
        return routes


def counted(kind: str, grid: Grid, *, checkpointing: bool, routing: Routing):
    """The second step of a model on a grid."""
    options = dict(dtype=torch.float32, attention="eager", experts_implementation="eager")
    model = tiny_model(kind, **options, **KINDS[kind]).train()
    model, _ = parallelize(model, grid, config=AxonnConfig(grid=grid, experts="move"))
    if checkpointing:
        model.gradient_checkpointing_enable()
    batch = rows_of(tiny_batch(ROWS, SEQ), grid, dist.get_rank())
    batch["num_items_in_batch"] = torch.tensor(20)
    with mock.patch.object(moe, "find_routes", routing):
        for _ in range(2):
            model.zero_grad()
            with count_traffic(grid) as counter:
                loss = model(**batch).loss
                with counter.during("gradients"), syncing(model):
                    loss.backward()
    return counter.ledger


def compare(kinds: list[str], grids: list[Grid]) -> list[tuple]:
    found = []
    for kind in kinds:
        shape = shape_of(tiny_config(kind, **KINDS[kind]).to_dict())
        for grid in grids:
            for checkpointing in (False, True):
                routing = Routing()
                ours = counted(kind, grid, checkpointing=checkpointing, routing=routing)
                step = Step(
                    rows=ROWS // grid.dp_size, seq=SEQ, compute_bytes=4, checkpointing=checkpointing, counted=True
                )
                moving = place_experts(shape, grid, "move")
                with mock.patch.object(arithmetic, "expected_rows", lambda *_: routing.rows):  # noqa: B023
                    theirs = volumes(moving, grid, step, layout=shape.layout(grid), rank=dist.get_rank())
                found.append((kind, grid, checkpointing, ours.entries, theirs.entries))
    return found


@pytest.mark.parametrize(
    ("kinds", "grids"),
    [(["qwen3_moe"], GRIDS[:2]), pytest.param([*KINDS], GRIDS, marks=pytest.mark.slow)],
    ids=["one", "all"],
)
def test_tokens_that_travel_send_what_volumes_says(kinds, grids):
    for rank, rows in enumerate(run_ranks(compare, 4, kinds, grids)):
        assert len(rows) == 2 * len(kinds) * len(grids)
        for kind, grid, checkpointing, ours, theirs in rows:
            wrong = {
                key: (ours.get(key), theirs.get(key)) for key in {*ours, *theirs} if ours.get(key) != theirs.get(key)
            }
            assert not wrong, f"rank {rank}, {kind} on {grid}, checkpointing {checkpointing}: (counted, said) {wrong}"
            assert any(key.kind == "exchange" for key in ours)
