"""The figures of peers.py: ratios of seconds, taken within a round, and whether the losses agree.

A run is what one heat gave: for each contender its turns, the first of which warmed up and does not count. A turn is
quiet if other programs took little of the processors meanwhile. Where two contenders have enough rounds in which both
turns were quiet, only these count.
"""

from __future__ import annotations

import itertools
import os
import platform
import statistics
from importlib.metadata import version
from pathlib import Path

from tests.benchmarks.peers import axonn_on_cpus
from tests.benchmarks.peers.contenders import AXONN, FLOORS, MIXTURES, PEERS, STAGES
from tests.benchmarks.peers.ranks import Traffic, Turn


Run = dict[str, list[Turn]]
QUIET = 0.1  # the part of the machine's processor time that other programs may take
ENOUGH = 5  # quiet rounds


def description(command: str, model: str, seconds: float, *, axonn: Path | None = None) -> str:
    """How to repeat the run: command, model, machine, versions, also of AxoNN's source in a folder."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "hf_axonn"))
    if axonn is not None:
        packages += f", AxoNN {axonn_on_cpus.version(axonn)}"
    return (
        f"    {command}\n\n{model}; {seconds / 60:.0f} minutes on {_processor()}, {os.cpu_count()} cores, "
        f"{platform.system()}; Python {platform.python_version()}, {packages}, gloo.\n"
    )


def table(runs: list[Run], tokens: int) -> str:
    """One line a contender, fastest first: its speed against each of the others, medians with the quartiles.

    A grid is compared with AxoNN on the same grid.

    Args:
        runs: of each heat.
        tokens: in one step.
    """
    names = list(dict.fromkeys(name for run in runs for name in run))
    against = [name for name in (*FLOORS, *PEERS, *MIXTURES, STAGES) if name in names]
    against += [mode for mode in AXONN if any(name.startswith(f"{mode} ") for name in names)]
    rows = []
    for name in names:
        turns = [turn for run in runs if name in run for turn in run[name][1:]]
        quiet = [turn for turn in turns if turn.others <= QUIET]
        counted = quiet if len(quiet) >= ENOUGH else turns
        seconds = statistics.median(turn.seconds for turn in counted)
        cpu_seconds = statistics.median(turn.cpu_seconds for turn in counted)
        peak = max(turn.peak_bytes for turn in turns) / 2**20
        cells = [f"{tokens / seconds:.0f}", f"{cpu_seconds:.2f}", f"{peak:.0f}", f"{len(quiet)} of {len(turns)}"]
        others = [f"{other} {name}" if other in AXONN else other for other in against]
        cells += [
            _spread(speed_ratios(runs, name, other)) if other in names and other != name else "" for other in others
        ]
        rows.append((seconds, f"| {name} | " + " | ".join(cells) + " |"))
    head = "| contender | tokens/s | CPU s a step | peak MiB a rank | quiet turns | "
    head += " | ".join(f"speed / {name}" for name in against) + " |"
    rule = "|---|" + "---:|" * (4 + len(against))
    return "\n".join([head, rule, *(line for _, line in sorted(rows))]) + "\n"


def traffic_table(traffic: dict[str, Traffic]) -> str:
    """One line a contender whose collectives could be counted, in their order."""
    head = "| contender | collectives a step | MiB a step that a rank sends |\n|---|---:|---:|"
    rows = [f"| {name} | {counts.calls} | {counts.sent / 2**20:.1f} |" for name, counts in traffic.items()]
    return "\n".join([head, *rows]) + "\n"


def speed_ratios(runs: list[Run], name: str, other: str) -> list[float]:
    """How many times as fast as `other`, in each counted round of the heats in which both ran."""
    rounds = [
        pair
        for run in runs
        if name in run and other in run
        for pair in list(zip(run[name], run[other], strict=True))[1:]
    ]
    quiet = [pair for pair in rounds if all(turn.others <= QUIET for turn in pair)]
    counted = quiet if len(quiet) >= ENOUGH else rounds
    return [theirs.seconds / mine.seconds for mine, theirs in counted]


def loss_difference(runs: list[Run]) -> float:
    """Return the largest relative difference of a loss from the first contender's that trained as many steps.

    A heat that time ended has fewer steps than another.
    """
    curves = [
        [loss for turn in turns for loss in turn.losses]
        for run in runs
        for name, turns in run.items()
        if name not in FLOORS
    ]
    steps = ([loss for loss in step if loss is not None] for step in itertools.zip_longest(*curves))
    return max(abs(loss / losses[0] - 1) for losses in steps for loss in losses)


def _spread(ratios: list[float]) -> str:
    if len(ratios) < 2:
        return f"{ratios[0]:.2f}"
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
