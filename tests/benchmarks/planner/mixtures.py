"""Mixtures of experts as the planner sees them: seconds and bytes of `gather` and of `move`, beside published runs.

    python -m tests.benchmarks.planner.mixtures                      the tables of docs/planning.md
    python -m tests.benchmarks.planner.mixtures --runs qwen-64       some

Each run is planned twice, with either way, with all settings that change no number. Bytes are those of the faster
plan's grid, in both ways, with its settings: of a whole step of rank 0, or of the rank of a pipeline that sends most,
what stages send each other left out. Routers choose all sets of experts alike.

Published: NVIDIA-NeMo/Automodel, docs/performance-summary.mdx at 2861c41 (its routing is balanced by force);
DeepSeek-V3 (arXiv 2412.19437), table 1: 180,000 GPU hours for 10^12 tokens.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from dataclasses import dataclass, replace
from functools import cache

from transformers import DeepseekV3Config, PreTrainedConfig

from hf_axonn.planner.candidate import Candidate
from hf_axonn.planner.experts import expected_rows
from hf_axonn.planner.job import Job
from hf_axonn.planner.machine import load_machine
from hf_axonn.planner.predict import Prediction
from hf_axonn.planner.search import plan
from hf_axonn.planner.settings import EXACT
from hf_axonn.planner.shapes import ModelShape
from hf_axonn.planner.traffic.volumes import volumes
from hf_axonn.profiling.read_shape import shape_of
from tests.benchmarks.planner.simulate import GIB, QWEN3_30B


WAYS = ("gather", "move")
CONFIGS: dict[str, PreTrainedConfig] = {"Qwen3-30B-A3B": QWEN3_30B, "DeepSeek-V3": DeepseekV3Config()}


@dataclass(frozen=True)
class Run:
    """A training. `published`: tokens of a GPU in a second; `weights`: bytes of a weight, its gradient and moments;
    `pipelines`: whether grids with pipe are planned."""

    model: str
    gpus: int
    machine: str
    sequences: int
    published: float | None = None
    weights: int = 4
    pipelines: bool = True

    def __str__(self) -> str:
        card = self.machine.partition("-")[2].upper()
        rest = "" if self.weights == 4 else ", weights in bf16"
        return f"{self.model}, {self.gpus:,} {card}, {self.sequences:,} sequences{rest}" + (
            "" if self.pipelines else ", no pipelines"
        )


RUNS = {
    "qwen-8": Run("Qwen3-30B-A3B", 8, "dgx-h100", 512, 12_040, weights=2),
    "qwen-64": Run("Qwen3-30B-A3B", 64, "dgx-h100", 512),
    "deepseek-256": Run("DeepSeek-V3", 256, "dgx-h100", 512, 1_002),
    "deepseek-1024": Run("DeepSeek-V3", 1024, "dgx-h100", 8192, 865),
    "deepseek-2048": Run("DeepSeek-V3", 2048, "hgx-h800", 15_360, 10**12 / (180_000 * 3600)),
    "deepseek-2048-z": Run("DeepSeek-V3", 2048, "hgx-h800", 15_360, pipelines=False),
}


@cache
def shape(model: str) -> ModelShape:
    """The model as the planner reads its config."""
    return shape_of(CONFIGS[model].to_dict())


def fastest(run: Run, way: str) -> Prediction | None:
    """The first place of a plan with this way; None where nothing fits."""
    job = Job(
        shape=shape(run.model),
        machine=load_machine(run.machine),
        sequences=run.sequences,
        seq=4096,
        param_bytes=run.weights,
        experts=way,
    )
    free = [name for name in EXACT if name != "experts"]
    ranked = plan(job, run.gpus, free=free, pipes=None if run.pipelines else (1,), contexts=(1,)).ranked
    return next((entry for entry in ranked if way == "gather" or entry.experts == "move"), None)


def gib_sent(entry: Prediction, way: str) -> float:
    """GiB that a rank sends in a step on a prediction's grid, with its settings but for `way`."""
    candidate = Candidate(replace(entry.job, experts=way), entry.grid, entry.micro_batches)
    held = (candidate.shape,) if entry.pipelined is None else candidate.stages.held
    ledgers = [volumes(each, entry.grid, candidate.step, layout=candidate.layout) for each in held]
    return max(float(ledger.bytes_sent()) for ledger in ledgers) / GIB


def rows_of_token(entry: Prediction) -> str:
    """The rows that a token sends to other ranks, each way, and the most that any routing sends."""
    experts = Candidate(replace(entry.job, experts="move"), entry.grid, entry.micro_batches).shape.experts[0]
    sent = float(expected_rows(experts, entry.grid, 0).sent)
    most = min(experts.chosen, entry.grid.z * entry.grid.x * entry.grid.y)
    assert sent <= most
    return f"{sent:.2f} of {most}"


def speeds(run: Run, plans: dict[str, Prediction]) -> str:
    """A line of the table of published runs."""
    found = {way: entry.tokens_per_second / run.gpus for way, entry in plans.items()}
    cells = [f"{found[way]:,.0f} ({plans[way].grid})" if way in found else "does not fit" for way in WAYS]
    published = (f"{run.published:,.0f}", f"{run.published / max(found.values()):.2f}") if run.published else ("", "")
    return f"| {run} | {published[0]} | {' | '.join(cells)} | {published[1]} |"


def sent(run: Run, plans: dict[str, Prediction]) -> list[str]:
    """Lines of the table of bytes: of the first grid with either way, the faster one first."""
    lines = []
    for way, entry in sorted(plans.items(), key=lambda item: item[1].total):
        if entry.experts:
            gather, move = (gib_sent(entry, other) for other in WAYS)
            cells = [f"{gather:,.0f}", f"{move:,.0f}", f"{move / gather:.2f}", rows_of_token(entry)]
        else:  # too few experts
            cells = [f"{gib_sent(entry, 'gather'):,.0f}", "", "", ""]
        lines.append(f"| {run} | {way}: {entry.grid}, {entry.micro_batches} micro-batches | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", choices=RUNS, nargs="*", default=list(RUNS), help="all")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    published, traffic = [], []
    for name in options.runs:
        plans = {way: entry for way in WAYS if (entry := fastest(RUNS[name], way)) is not None}
        published.append(speeds(RUNS[name], plans))
        traffic += sent(RUNS[name], plans)
    print("| run | published | gather | move | published / best |\n| --- | --: | --: | --: | --: |")
    print("\n".join(published))
    print("\n| run | first with | gather, GiB | move, GiB | move / gather | rows of a token |")
    print("| --- | --- | --: | --: | --: | --: |")
    print("\n".join(traffic))


if __name__ == "__main__":
    main()
