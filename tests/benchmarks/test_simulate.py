"""tests/benchmarks/planner/simulate.py: the engine's step on fake ranks is what the planner says, in traffic and in
memory."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig, MixtralConfig, Starcoder2Config

from hf_axonn.topology.grid import Grid
from tests.benchmarks.planner import simulate
from tests.benchmarks.planner.groups_cost import build_groups
from tests.benchmarks.planner.meter import Meter, nbytes


SIZES = dict(
    hidden_size=512, num_hidden_layers=3, num_attention_heads=16, vocab_size=4000, max_position_embeddings=512
)
LLAMA = LlamaConfig(**SIZES, intermediate_size=1408, num_key_value_heads=8)
# What layers hold has to be more than what is full of tokens outside of them, of which LoRA's count is coarse.
WIDER = LlamaConfig(
    hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=8
)
GPT = Starcoder2Config(**SIZES, intermediate_size=2048, num_key_value_heads=16, sliding_window=None)
MIXTURE = MixtralConfig(
    **SIZES, intermediate_size=1024, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2
)
LATENT = DeepseekV3Config(
    **SIZES, intermediate_size=1024, num_key_value_heads=16, moe_intermediate_size=256, n_routed_experts=16,
    num_experts_per_tok=4, n_group=4, topk_group=2, first_k_dense_replace=1, q_lora_rank=256, kv_lora_rank=128,
    qk_rope_head_dim=32, qk_nope_head_dim=64, v_head_dim=96,
)  # fmt: skip
# Ranks by the thousand cost nothing but the making of their groups.
CASES = {
    "512 ranks": simulate.Case(LLAMA, Grid(data=8, z=16, y=2, x=2), rows=2, seq=512),
    "all kept": simulate.Case(LLAMA, Grid(data=2, z=2, y=2, x=2), rows=2, seq=512, checkpointing=False),
    "gpt": simulate.Case(GPT, Grid(z=4, y=2, x=2), rows=2, seq=512),
    "gpt, all kept": simulate.Case(GPT, Grid(z=2, x=4), rows=2, seq=512, checkpointing=False),
    "fp32": simulate.Case(LLAMA, Grid(z=8), rows=2, seq=512, checkpointing=False, bf16=False),
    "data": simulate.Case(LLAMA, Grid(data=4), rows=2, seq=512),
    "x": simulate.Case(LLAMA, Grid(x=4), rows=2, seq=512, checkpointing=False),
    "mixture": simulate.Case(MIXTURE, Grid(z=4, y=2, x=2), rows=2, seq=512),
    "latent": simulate.Case(LATENT, Grid(z=4, y=2, x=2), rows=2, seq=512),
    "mixture, move": simulate.Case(MIXTURE, Grid(data=2, z=4, x=2), rows=8, seq=512, experts="move"),
    "mixture, move, all kept": simulate.Case(
        MIXTURE, Grid(z=4, y=2), rows=2, seq=512, checkpointing=False, experts="move"
    ),
    "latent, move": simulate.Case(LATENT, Grid(z=4, y=2, x=2), rows=2, seq=512, experts="move"),
    "y": simulate.Case(LLAMA, Grid(y=4), rows=2, seq=512),
    "LoRA": simulate.Case(WIDER, Grid(z=2, x=4), rows=2, seq=1024, lora=16),
    "LoRA, all kept": simulate.Case(WIDER, Grid(data=2, y=2, x=2), rows=2, seq=1024, lora=16, checkpointing=False),
}


# Of the others, test_traffic.py compares what a step sends with what the planner says, by gloo.
REPRESENTATIVES = ("all kept",)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slow] * (name not in REPRESENTATIVES))
        for name, case in CASES.items()
    ],
)
def test_a_simulated_rank_sends_and_holds_what_the_planner_says(case):
    outcome = simulate.simulate(case)
    lines, agree = simulate.compare(case, outcome)
    assert agree, "\n".join(lines)
    assert outcome.ledger.calls() > 3 and outcome.peak > outcome.parameters + outcome.moments
    # The comparison can fail: nothing is within a tenth of twice as much.
    outcome.backward *= 4
    assert not simulate.compare(case, outcome)[1]


@pytest.mark.filterwarnings("ignore")
def test_the_last_rank_sends_what_is_said_of_it():
    """Sizes that do not divide: 3 parts of 1408 / 2 features, and of 4000 / 6 rows."""
    case = simulate.Case(LLAMA, Grid(z=3, x=2), rows=1, seq=64)
    outcome = simulate.simulate(case, 5)
    assert "Collectives of a step" in "\n".join(simulate.compare(case, outcome, 5)[0])
    assert outcome.ledger.entries == simulate.volumes(case.shape, case.grid, case.step, rank=5).entries


def test_the_meter_counts_storages_until_they_are_gone():
    kept = torch.zeros(10)
    with Meter([kept]) as meter:
        kept.add_(1)
        first = torch.zeros(1000)
        view = first.view(10, 100)[2:]
        second = view + 1
        assert meter.live == meter.most == 4000 + 3200
        del first, view
        assert (meter.live, meter.most) == (3200, 7200)
        meter.begin()
        third = second[:1].clone()
        assert meter.most == 3600
    assert nbytes([second, second[1:], third]) == 3600


@pytest.mark.slow
def test_a_rank_makes_its_own_groups_alone():
    """One for each axis and for both products; axes of one rank share one, and one of all ranks is the world's."""
    counts = {grid: build_groups(grid)[2] for grid in (Grid(data=4, z=64, y=8, x=8), Grid(z=4), Grid(z=2, x=2))}
    assert list(counts.values()) == [6, 1, 3]
