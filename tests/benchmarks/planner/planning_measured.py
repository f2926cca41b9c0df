"""Predicted against measured on this machine: every grid of some ranks of the 55M Llama of peers.py.

    python -m tests.benchmarks.planner.planning_measured links  --ranks 2 4 8 --folder F  a machine file for each
    python -m tests.benchmarks.planner.planning_measured measure --ranks 4  --folder F  times of all grids, in pieces
    python -m tests.benchmarks.planner.planning_measured report  --ranks 4 8   --folder F --output FILE

`measure` may be run again: it goes on with what is not in the folder yet, and begins nothing after --minutes. It goes
round all grids in random order, several times. A visit to a grid starts its processes, trains some steps and ends
them, so that memory limits nothing. A step in which other programs took more than QUIET of the processors does not
count, nor does a machine file that was made so. The median of all steps of a grid counts; how well two rounds agree
says how well any prediction could. float32, AdamW, one thread a rank, no checkpointing. A machine file is made for
each number of ranks, because ranks that share cores have less of them each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import transformers  # noqa: E402

from hf_axonn import __version__  # noqa: E402
from hf_axonn.planner.dense import shape_from_config  # noqa: E402
from hf_axonn.planner.job import Job
from hf_axonn.planner.machine import load_machine  # noqa: E402
from hf_axonn.planner.predict import Prediction, predict  # noqa: E402
from hf_axonn.planner.search import grids  # noqa: E402
from tests.benchmarks.peers.contenders import grid_name  # noqa: E402
from tests.benchmarks.peers.peers import model_config, save_weights  # noqa: E402
from tests.benchmarks.peers.ranks import Ranks, busy_seconds  # noqa: E402


ROWS, SEQ = 8, 128
NEAR, ALIKE = 0.1, 0.8  # what is hoped for: see `verdict`
WARM = 2  # steps of a visit that do not count
QUIET = 0.03  # the part of the machine's processor time that other programs may take in a step that counts
ATTEMPTS = 3  # so many times as many steps as wanted a visit may take, where others disturb


def links(ranks: int, folder: Path) -> None:
    """Write `machine-RANKS.json`; again and again while other programs disturb.

    Raises:
        RuntimeError: they disturb always.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "hf_axonn", "bench-links", "--output", str(folder / f"machine-{ranks}.json")]
    for _ in range(ATTEMPTS):
        begin, busy, own = time.perf_counter(), busy_seconds(), _seconds_of_children()
        subprocess.run(command, check=True, timeout=300)
        others = busy_seconds() - busy - (_seconds_of_children() - own)
        others /= (time.perf_counter() - begin) * os.cpu_count()
        print(f"{ranks} ranks: other programs took {others:.0%} of the processors")
        if others <= QUIET:
            return
    raise RuntimeError(f"other programs took more than {QUIET:.0%} of the processors, {ATTEMPTS} times.")


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(ranks: int, folder: Path, options: argparse.Namespace) -> None:
    """Add visits to `measured-RANKS.json`: by grid, a list of visits, each a list of seconds of a step."""
    file = folder / f"measured-{ranks}.json"
    found = json.loads(file.read_text()) if file.is_file() else {}
    names, end = [grid_name(grid) for grid in grids(ranks)], time.monotonic() + 60 * options.minutes
    config = model_config(options.size, sequence=SEQ)
    torch.manual_seed(0)
    batches = torch.randint(config.vocab_size, (4, ROWS, SEQ))
    with tempfile.TemporaryDirectory() as scratch:
        save_weights(config, Path(scratch) / "weights")
        for visits in range(options.rounds):
            for name in random.Random(visits).sample(names, len(names)):
                if len(found.get(name, [])) > visits:
                    continue
                if time.monotonic() >= end:
                    return
                seconds, others = visit(name, ranks, Path(scratch), batches, options.steps)
                if len(seconds) == options.steps:
                    found.setdefault(name, []).append(seconds)
                    file.write_text(json.dumps(found, indent=1))
                print(
                    f"round {visits + 1}, {ranks} ranks, {name}: {statistics.median(seconds or [0]):.2f} s, "
                    f"{len(seconds)} of {options.steps} steps; others took {max(others):.0%} at most",
                    flush=True,
                )


def visit(name: str, ranks: int, folder: Path, batches: torch.Tensor, steps: int) -> tuple[list[float], list[float]]:
    """Start a grid's processes, train `steps` undisturbed steps, end them.

    Returns:
        Seconds of each step in which other programs took at most QUIET of the processors; what they took in every one.
    """
    contender = Ranks(name, ranks, 1, folder / "weights", batches, folder)
    try:
        contender.turn(WARM)  # the first step learns what to gather ahead, and makes the optimizer's state
        seconds, others = [], []
        while len(seconds) < steps and len(others) < ATTEMPTS * steps:
            turn = contender.turn(1)
            others.append(turn.others)
            if turn.others <= QUIET:
                seconds.append(turn.seconds)
    finally:
        contender.stop()
    return seconds, others


def predictions(ranks: int, folder: Path, size: str) -> dict[str, Prediction]:
    """What the planner says of each grid, by name."""
    job = job_of(ranks, folder, size)
    return {grid_name(grid): predict(job, grid) for grid in grids(ranks)}


def job_of(ranks: int, folder: Path, size: str) -> Job:
    """What contenders train, on the machine of the folder's file."""
    return Job(
        shape=shape_from_config(model_config(size, sequence=SEQ).to_dict()),
        machine=load_machine(str(folder / f"machine-{ranks}.json")),
        sequences=ROWS,
        seq=SEQ,
        compute_bytes=4,
        checkpointing=False,
        micro_batches=1,
    )


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


def agreement(visits: dict[str, list[list[float]]]) -> list[str]:
    """How well the first two rounds agree, where there are two."""
    both = [[statistics.median(each[number]) for each in visits.values() if len(each) > 1] for number in (0, 1)]
    if len(both[0]) < 3:
        return []
    apart = statistics.median(abs(second / first - 1) for first, second in zip(*both, strict=True))
    alike = statistics.correlation(*map(places, both))
    return [f"- two rounds of the same grids: rank correlation {alike:.2f}, {apart:.1%} apart in the median"]


def report(ranks: int, folder: Path, size: str) -> list[str]:
    """A section of Markdown for one number of ranks."""
    visits = json.loads((folder / f"measured-{ranks}.json").read_text())
    timings = {name: [seconds for each in of_grid for seconds in each] for name, of_grid in visits.items()}
    measured = {name: statistics.median(seconds) for name, seconds in timings.items()}
    entries = {name: entry for name, entry in predictions(ranks, folder, size).items() if name in measured}
    predicted = {name: entry.total for name, entry in entries.items()}
    behind, alike = verdict(measured, predicted)
    fastest = verdict({name: min(seconds) for name, seconds in timings.items()}, predicted)
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
        *agreement(visits),
        f"- of this machine: products {machine.gemm_flops / 1e9:.0f} GFLOP/s a rank, links "
        f"{machine.fastest_link / 1e9:.2f} GB/s, memory {machine.memory_bandwidth / 1e9:.1f} GB/s, overlap "
        f"{machine.overlap:.2f}, latency of a gather "
        f"{1e3 * (machine.base + (ranks - 1) * machine.intra_step):.1f} ms, of an all-reduce "
        f"{machine.relative_latency.get('all_reduce', 1.0):.1f} times that",
        "",
        "| grid | measured s | steps | predicted s | compute | x/y | z | data | other |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for name in sorted(measured, key=measured.get):
        entry = entries[name]
        exposed = [entry.seconds[f"exposed {axes}"] for axes in ("x/y", "z", "data")] + [entry.seconds["other"]]
        numbers = [entry.total, entry.total - entry.exposed, *exposed]
        lines.append(
            f"| {name} | {measured[name]:.2f} | {len(timings[name])} | "
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
    parser.add_argument("--rounds", type=int, default=2, help="visits to each grid (2)")
    parser.add_argument("--steps", type=int, default=4, help="steps of a visit that count (4)")
    parser.add_argument("--minutes", type=float, default=10, help="after so many no visit begins (10)")
    parser.add_argument("--output", type=Path, help="write the report to this file")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    text = [
        "# Which grid is fastest: predicted and measured",
        "",
        f"`tests.benchmarks.planner.planning_measured`: the {options.size} Llama of peers.py, {ROWS} rows of {SEQ} "
        f"tokens, float32 and AdamW, gloo, one thread a rank on {os.cpu_count()} {platform.machine()} cores. hf_axonn "
        f"{__version__}, torch {torch.__version__}, transformers {transformers.__version__}, Python "
        f"{platform.python_version()}.",
        "",
    ]
    for ranks in options.ranks:
        if options.action == "links":
            links(ranks, options.folder)
        elif options.action == "measure":
            measure(ranks, options.folder, options)
        else:
            text += report(ranks, options.folder, options.size)
    if options.action == "report":
        print("\n".join(text))
        if options.output:
            options.output.write_text("\n".join(text).rstrip() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
