"""Weak and strong scaling of AxoNN's GPTs on Frontier: what its authors published, and what the planner predicts.

    python -m tests.benchmarks.planner.scaling --output docs/results/scaling.md      scaling.svg comes beside it

Weak scaling as the authors define it: the model grows with the machine, 5B on 512 GCDs to 320B on 32,768, and the
batch stays 16.8 million tokens. Beside it the other one: the model stays and the batch grows. Strong scaling: 80B and
640B. A minute of one core, no machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from hf_axonn.planner.dense import load_shape
from hf_axonn.planner.job import Job
from hf_axonn.planner.machine import load_machine
from hf_axonn.planner.predict import Prediction
from hf_axonn.planner.search import plan
from hf_axonn.planner.settings import EXACT
from tests.benchmarks.planner.axonn import rank_axonn
from tests.benchmarks.planner.planning import POINTS, SEQ, SEQUENCES


WEAK = {512: "gpt-5b", 1024: "gpt-10b", 2048: "gpt-20b", 4096: "gpt-40b", 8192: "gpt-80b", 16384: "gpt-160b",
        32768: "gpt-320b"}  # fmt: skip
STRONG = {"gpt-80b": (128, 256, 512, 1024, 2048, 4096, 8192), "gpt-640b": (512, 1024, 2048, 4096, 8192)}
TOKENS = 2e12
# arXiv 2502.08145: 80B on 8,192 GCDs takes 25.5 days for 2 trillion tokens, 56.0 times faster than on 128; 640B 14
# years on 512 and about 15 months on 8,192.
PUBLISHED_DAYS = {("gpt-80b", 8192): 25.5, ("gpt-80b", 128): 25.5 * 56.0, ("gpt-640b", 512): 14 * 365.25,
                  ("gpt-640b", 8192): 15 * 30.4}  # fmt: skip
FRONTIER = {point.gpus: point.tflops for point in POINTS if point.machine == "frontier"}


def axonn(model: str, gpus: int, sequences: int = SEQUENCES) -> Prediction | None:
    """The best grid of AxoNN's schedule with checkpointing, its axes in the engine's order; None where none fits."""
    found = rank_axonn(_job(model, sequences), gpus)
    return found.best if found.ranked else None


def engine(model: str, gpus: int, sequences: int = SEQUENCES) -> Prediction | None:
    """The best grid and settings of this engine; None where none fits."""
    found = plan(_job(model, sequences), gpus, free=EXACT)
    return found.best if found.ranked else None


def _job(model: str, sequences: int) -> Job:
    return Job(shape=load_shape(model), machine=load_machine("frontier"), sequences=sequences, seq=SEQ)


def days(entry: Prediction | None) -> float | None:
    """Of 2 trillion tokens."""
    return TOKENS / entry.tokens_per_second / 86400 if entry else None


def _text(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def weak() -> tuple[list[str], dict[str, Any]]:
    """Lines of the table of weak scaling, and its curves by name: (GCDs, hardware TFLOP/s of one)."""
    lines = [
        "| GCDs | model | published | AxoNN's schedule | error | this engine | 20B, batch grows |",
        "| --: | --- | --: | --: | --: | --: | --: |",
    ]
    curves: dict[str, list[tuple[int, float]]] = {"published": sorted(FRONTIER.items())}
    for gpus, model in WEAK.items():
        theirs, ours = axonn(model, gpus), engine(model, gpus)
        other = axonn("gpt-20b", gpus, SEQUENCES * gpus // 2048)
        speeds = [entry.flops / 1e12 if entry else None for entry in (theirs, ours, other)]
        published = FRONTIER.get(gpus)
        error = f"{speeds[0] / published - 1:+.1%}" if published and speeds[0] else ""
        cells = [_text(published), _text(speeds[0]), error, _text(speeds[1]), _text(speeds[2])]
        lines.append(f"| {gpus:,} | {model[4:].upper()} | {' | '.join(cells)} |")
        for name, speed in zip(("AxoNN's schedule", "this engine", "20B, batch grows"), speeds, strict=True):
            if speed:
                curves.setdefault(name, []).append((gpus, speed))
    return lines, curves


def strong() -> tuple[list[str], dict[str, Any]]:
    """Lines of the table of strong scaling, and its curves: (GCDs, days of 2 trillion tokens)."""
    lines = [
        "| model | GCDs | published, days | AxoNN's schedule, days | times faster than on the fewest | "
        "this engine, days |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    curves: dict[str, list[tuple[int, float]]] = {}
    for model, counts in STRONG.items():
        first = None
        for gpus in counts:
            theirs, ours = days(axonn(model, gpus)), days(engine(model, gpus))
            published = PUBLISHED_DAYS.get((model, gpus))
            first = first or theirs
            times = first / theirs if first and theirs else None
            cells = [_text(published), _text(theirs), _text(times), _text(ours)]
            lines.append(f"| {model[4:].upper()} | {gpus:,} | {' | '.join(cells)} |")
            for name, value in (("published", published), ("AxoNN's schedule", theirs), ("this engine", ours)):
                if value:
                    curves.setdefault(f"{model[4:].upper()}, {name}", []).append((gpus, value))
    return lines, curves


def draw(file: Path, weak_curves: dict[str, Any], strong_curves: dict[str, Any]) -> None:
    """Both pictures side by side, to be read in print."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # letters stay letters
    matplotlib.rcParams["svg.hashsalt"] = "scaling"
    from matplotlib import pyplot

    styles = {"published": ("o", "black", "none"), "AxoNN's schedule": ("s-", "#1f4e79", "#1f4e79")}
    styles |= {"this engine": ("^--", "#c55a11", "#c55a11"), "batch grows": ("v:", "#7f7f7f", "#7f7f7f")}
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2))
    for axes, curves in ((left, weak_curves), (right, strong_curves)):
        for name, points in curves.items():
            style, color, face = styles[name.rpartition(", ")[2]]
            x, y = zip(*points, strict=True)
            axes.plot(x, y, style, color=color, markerfacecolor=face, label=name)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("GCDs of Frontier")
        ticks = sorted({x for points in curves.values() for x, _ in points})
        axes.set_xticks(ticks, [f"{x:,}" for x in ticks], rotation=45)
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=8)
    left.set_ylim(bottom=0)
    left.set_ylabel("TFLOP/s of a GCD, recomputation included")
    left.set_title("Weak scaling, 16.8 million tokens a step")
    right.set_yscale("log")
    right.set_ylabel("days for 2 trillion tokens")
    right.set_title("Strong scaling")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Published and predicted scaling on Frontier.")
    parser.add_argument("--output", type=Path, help="write the page here, and its picture beside it")
    options = parser.parse_args(arguments)
    (weak_lines, weak_curves), (strong_lines, strong_curves) = weak(), strong()
    text = [
        "# Scaling on Frontier, published and predicted", "",
        "`python -m tests.benchmarks.planner.scaling --output docs/results/scaling.md`: AxoNN's GPTs, sequences of "
        "2,048 tokens; published figures: arXiv 2502.08145. AxoNN's schedule with activation checkpointing, as in "
        "its runs; this engine with the settings that the planner chooses, so its FLOP/s may have no recomputation in "
        "them.", "",
        "![Weak and strong scaling](scaling.svg)", "",
        "## Weak scaling", "",
        "Hardware TFLOP/s of a GCD. The model grows with the machine and the batch stays 16.8 million tokens; in the "
        "last column the model stays, AxoNN's schedule, and the batch grows from 4.2 million tokens on 512 GCDs.", "",
        *weak_lines, "",
        "## Strong scaling", "",
        "Days for 2 trillion tokens, 16.8 million a step.", "",
        *strong_lines,
    ]  # fmt: skip
    print("\n".join(text))
    if options.output:
        options.output.write_text("\n".join(text) + "\n")
        draw(options.output.with_suffix(".svg"), weak_curves, strong_curves)
    return 0


if __name__ == "__main__":
    sys.exit(main())
