"""tests/benchmarks/planner/memory_measured.py: what real ranks hold at the worst moment is what the planner says, on
every kind of grid."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

from hf_axonn.topology.grid import Grid
from tests.benchmarks.planner import memory_measured
from tests.benchmarks.planner.simulate import TOLERANCE, Case
from tests.helpers.ranks import run_ranks


LLAMA = LlamaConfig(
    hidden_size=384,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=1024,
    vocab_size=2048,
    max_position_embeddings=128,
)
GRIDS = [grid for grid in memory_measured.GRIDS[4] if grid != Grid(data=2, z=2)]


def cases() -> list[Case]:
    """Six grids of four ranks: every second one in bf16 with checkpointing, the others in fp32 with all kept."""
    return [
        Case(LLAMA, grid, rows=8 // grid.dp_size, seq=128, checkpointing=bool(place % 2), bf16=bool(place % 2))
        for place, grid in enumerate(GRIDS)
    ]


def _peaks():
    return [memory_measured.peak(case) for case in cases()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_real_ranks_hold_what_the_planner_says():
    # Sizes divide: ranks differ only by how soon a thread of gloo lets go of a buffer.
    peaks = [min(of_ranks) for of_ranks in zip(*run_ranks(_peaks, 4), strict=True)]
    errors = {
        str(case.grid): memory_measured.predicted(case) / peak - 1 for case, peak in zip(cases(), peaks, strict=True)
    }
    assert len(errors) == 6 and max(map(abs, errors.values())) <= TOLERANCE, errors
    # The grids differ by far more than the tolerance, and a tenth of the wrong one would not do.
    assert max(peaks) > 2 * min(peaks)


def test_gloo_needs_no_buckets_and_receives_before_it_adds():
    case = Case(LLAMA, Grid(data=4), rows=2, seq=128)
    needed = memory_measured.memory(case.shape, case.grid, case.step)
    assert needed.buckets > 0 and needed.total > memory_measured.predicted(case)
    case = Case(LLAMA, Grid(y=4), rows=8, seq=128, bf16=False)
    needed = memory_measured.memory(case.shape, case.grid, case.step, layout="feature")
    assert memory_measured.predicted(case) - needed.total == 8 * 128 * 1024 * 4  # [T, I], arriving
