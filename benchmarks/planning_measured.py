"""Predicted against measured on this machine: every grid of some ranks of the 55M Llama of peers.py.

    python benchmarks/planning_measured.py links   --ranks 2 4 8 --folder F         a machine file for each number
    python benchmarks/planning_measured.py measure --ranks 4     --folder F         times of all grids, in pieces
    python benchmarks/planning_measured.py report  --ranks 4 8   --folder F --output FILE

`measure` may be run again: it goes on with the grids that are not in the folder yet, and begins none after --minutes.
Grids of a heat take turns, one step a turn, so that what disturbs the machine disturbs all alike; the medians of their
steps count. float32, AdamW, one thread a rank, no checkpointing. A machine file is made for each number of ranks,
because ranks that share cores have less of them each. Grids of different heats compare less well than those of one, so
take as many together as memory holds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import transformers  # noqa: E402
from peers import model_config, save_weights  # noqa: E402
from peers_contenders import grid_name  # noqa: E402
from peers_ranks import Ranks  # noqa: E402

from hf_axonn import __version__  # noqa: E402
from hf_axonn.perf import machines, models  # noqa: E402
from hf_axonn.perf.model import Job, Prediction, predict  # noqa: E402
from hf_axonn.perf.planner import grids  # noqa: E402


ROWS, SEQ = 8, 128
NEAR, ALIKE = 0.1, 0.8  # what is hoped for: see `verdict`


def links(ranks: int, folder: Path) -> None:
    """Write `machine-RANKS.json`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "hf_axonn.cli", "bench-links", "--output", str(folder / f"machine-{ranks}.json")]
    subprocess.run(command, check=True, timeout=300)


def measure(ranks: int, folder: Path, size: str, options: argparse.Namespace) -> None:
    """Add seconds of a step, by grid, to `measured-RANKS.json`."""
    file = folder / f"measured-{ranks}.json"
    found = json.loads(file.read_text()) if file.is_file() else {}
    names = [grid_name(grid) for grid in grids(ranks)]
    random.Random(0).shuffle(names)
    left, end = [name for name in names if name not in found], time.monotonic() + 60 * options.minutes
    config = model_config(size, sequence=SEQ)
    torch.manual_seed(0)
    batches = torch.randint(config.vocab_size, (4, ROWS, SEQ))
    with tempfile.TemporaryDirectory() as scratch:
        save_weights(config, Path(scratch) / "weights")
        while left and time.monotonic() < end:
            heat, left = left[: options.together], left[options.together :]
            found |= _heat(heat, ranks, Path(scratch), batches, options.steps)
            file.write_text(json.dumps(found, indent=1))
            print(", ".join(f"{name} {statistics.median(found[name]):.2f}" for name in heat), flush=True)
    print(f"{ranks} ranks: {len(found)} of {len(names)} grids are measured")


def _heat(names: list[str], ranks: int, folder: Path, batches: torch.Tensor, steps: int) -> dict[str, list[float]]:
    contenders, seconds = [], {name: [] for name in names}
    try:
        for name in names:
            contenders.append(Ranks(name, ranks, 1, folder / "weights", batches, folder))
        for number in range(steps + 1):
            for contender in contenders:
                turn = contender.turn(1)
                if number:  # the first step learns what to gather ahead, and makes the optimizer's state
                    seconds[contender.name].append(turn.seconds)
    finally:
        for contender in contenders:
            contender.stop()
    return seconds


def predictions(ranks: int, folder: Path, size: str) -> dict[str, Prediction]:
    """What the planner says of each grid, by name."""
    job = Job(
        shape=models.from_config(model_config(size, sequence=SEQ).to_dict()),
        machine=machines.load(str(folder / f"machine-{ranks}.json")),
        sequences=ROWS,
        seq=SEQ,
        compute_bytes=4,
        checkpointing=False,
    )
    return {grid_name(grid): predict(job, grid, micro_batches=1) for grid in grids(ranks)}


def places(values: list[float]) -> list[float]:
    """Rank of each value, the smallest first; equal ones share the mean of their places."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def verdict(measured: dict[str, float], predicted: dict[str, float]) -> tuple[float, float]:
    """How much slower than the best the predicted best is, as measured; and Spearman's rank correlation."""
    choice = min(predicted, key=predicted.get)
    names = list(measured)
    both = [places([values[name] for name in names]) for values in (measured, predicted)]
    return measured[choice] / min(measured.values()) - 1, statistics.correlation(*both)


def report(ranks: int, folder: Path, size: str) -> list[str]:
    """A section of Markdown for one number of ranks."""
    timings = json.loads((folder / f"measured-{ranks}.json").read_text())
    measured = {name: statistics.median(seconds[1:]) for name, seconds in timings.items()}  # caches are warm by then
    entries = {name: entry for name, entry in predictions(ranks, folder, size).items() if name in measured}
    predicted = {name: entry.total for name, entry in entries.items()}
    behind, alike = verdict(measured, predicted)
    fastest = verdict({name: min(seconds[1:]) for name, seconds in timings.items()}, predicted)
    machine = next(iter(entries.values())).job.machine
    scale = statistics.median(measured[name] / predicted[name] for name in measured)
    lines = [f"## {ranks} ranks", ""]
    for text, holds in (
        (f"the predicted best is {behind:.1%} slower than the measured best, at most {NEAR:.0%}", behind <= NEAR),
        (f"rank correlation {alike:.2f}, at least {ALIKE}", alike >= ALIKE),
    ):
        lines.append(f"- {'holds' if holds else 'DOES NOT HOLD'}: {text}")
    lines += [
        f"- with the fastest step of each grid in place of the median: {fastest[0]:.1%} and {fastest[1]:.2f}",
        f"- {len(measured)} of {len(grids(ranks))} grids; measured over predicted seconds: {scale:.2f} in the median",
        f"- of this machine: products {machine.gemm_flops / 1e9:.0f} GFLOP/s a rank, links "
        f"{machine.fastest_link / 1e9:.2f} GB/s, memory {machine.memory_bandwidth / 1e9:.1f} GB/s, overlap "
        f"{machine.overlap:.2f}, a step of a ring {machine.intra_step * 1e6:.0f} us",
        "",
        "| grid | measured s | steps | predicted s | compute | x/y | z | data | other |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for name in sorted(measured, key=measured.get):
        entry = entries[name]
        exposed = [entry.seconds[f"exposed {axes}"] for axes in ("x/y", "z", "data")] + [entry.seconds["other"]]
        numbers = [entry.total, entry.total - entry.exposed, *exposed]
        lines.append(
            f"| {name} | {measured[name]:.2f} | {len(timings[name]) - 1} | "
            + " | ".join(f"{value:.2f}" for value in numbers)
            + " |"
        )
    return [*lines, ""]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("links", "measure", "report"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--folder", type=Path, required=True, help="for machine files and times")
    parser.add_argument("--size", choices=("60m", "tiny"), default="60m", help="the model, as in peers.py")
    parser.add_argument("--steps", type=int, default=5, help="steps of a grid that count (5)")
    parser.add_argument("--together", type=int, default=3, help="grids in a heat (3)")
    parser.add_argument("--minutes", type=float, default=6, help="after so many no heat begins (6)")
    parser.add_argument("--output", type=Path, help="write the report to this file")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    text = [
        "# Which grid is fastest: predicted and measured",
        "",
        f"`benchmarks/planning_measured.py`: the {options.size} Llama of peers.py, {ROWS} rows of {SEQ} tokens, "
        f"float32 and AdamW, gloo, one thread a rank on {os.cpu_count()} {platform.machine()} cores. hf_axonn "
        f"{__version__}, torch {torch.__version__}, transformers {transformers.__version__}, Python "
        f"{platform.python_version()}.",
        "",
    ]
    for ranks in options.ranks:
        if options.action == "links":
            links(ranks, options.folder)
        elif options.action == "measure":
            measure(ranks, options.folder, options.size, options)
        else:
            text += report(ranks, options.folder, options.size)
    if options.action == "report":
        print("\n".join(text))
        if options.output:
            options.output.write_text("\n".join(text).rstrip() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
