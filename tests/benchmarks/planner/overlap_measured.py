"""What each overlap of communication gains, predicted and measured on CPU grids: added one by one, as in the paper.

    python -m tests.benchmarks.planner.planning_measured links --ranks 4 --folder F    the machine's file
    python -m tests.benchmarks.planner.overlap_measured --ranks 4 --folder F --output docs/results/overlap.md

Visits to grids and stages in turns, as planning_measured.py makes them; the median of all steps of a stage counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from hf_axonn.cli.plan_report import OVERLAPS
from hf_axonn.planner.job import Job
from hf_axonn.planner.predict import predict
from tests.benchmarks.peers.contenders import parse_grid
from tests.benchmarks.peers.peers import model_config, save_weights
from tests.benchmarks.planner.planning_measured import ROWS, SEQ, job_of, visit


GRIDS = {2: ("z=2", "x=2"), 4: ("z=4", "x=4", "z=2 x=2", "data=2 z=2")}


def measure(grids: tuple[str, ...], ranks: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of steps, by the names of contenders."""
    config = model_config("60m", sequence=SEQ)
    torch.manual_seed(0)
    batches = torch.randint(config.vocab_size, (4, ROWS, SEQ))
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        save_weights(config, Path(scratch) / "weights")
        for _ in range(options.rounds):
            for grid in grids:
                for _, off in OVERLAPS:
                    name = contender(grid, off)
                    seconds, _ = visit(name, ranks, Path(scratch), batches, options.steps)
                    found.setdefault(name, []).extend(seconds)
                    print(f"{name}: {statistics.median(seconds or [0]):.2f} s", flush=True)
    return found


def contender(grid: str, off: dict[str, bool]) -> str:
    """Its name, see contenders.build."""
    return f"{grid} without {' '.join(off)}" if off else grid


def table(grids: tuple[str, ...], found: dict[str, list[float]], job: Job) -> list[str]:
    """Lines: seconds, and what a stage takes less than the one before."""
    lines = ["| grid | overlaps | measured, s | less | predicted, s | less |", "| --- | --- | --: | --: | --: | --: |"]
    for grid in grids:
        before: tuple[float, float] | None = None
        for name, off in OVERLAPS:
            seconds = statistics.median(found[contender(grid, off)])
            predicted = predict(replace(job, **off), parse_grid(grid)).total
            less = [f"{1 - now / then:.1%}" for now, then in zip((seconds, predicted), before or (), strict=False)]
            one, two = less or ("", "")
            lines.append(f"| {grid} | {name} | {seconds:.2f} | {one} | {predicted:.2f} | {two} |")
            before = seconds, predicted
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Overlaps one by one, predicted and measured.")
    parser.add_argument("--ranks", type=int, choices=GRIDS, default=4)
    parser.add_argument("--folder", type=Path, required=True, help="with machine-RANKS.json of planning_measured")
    parser.add_argument("--rounds", type=int, default=2, help="visits to each stage (2)")
    parser.add_argument("--steps", type=int, default=4, help="steps of a visit that count (4)")
    parser.add_argument("--output", type=Path, help="write the table to this file too")
    options = parser.parse_args(arguments)
    grids = GRIDS[options.ranks]
    job = job_of(options.ranks, options.folder, "60m")
    found = measure(grids, options.ranks, options)
    (options.folder / f"overlap-{options.ranks}.json").write_text(json.dumps(found, indent=1))
    lines = [
        "# Overlaps, predicted and measured on CPUs",
        "",
        f"`python -m tests.benchmarks.planner.overlap_measured --ranks {options.ranks}`: the 60m Llama of peers.py, "
        f"{ROWS} rows of {SEQ} tokens, float32, gloo, one thread a rank; overlaps added one by one.",
        "",
        *table(grids, found, job),
    ]
    print("\n".join(lines))
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
