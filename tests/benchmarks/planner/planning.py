"""The performance model against what AxoNN's authors published: the tables of docs/planning.md.

    python -m tests.benchmarks.planner.planning             both tables, seconds of one core
    python -m tests.benchmarks.planner.planning --sensitive what the errors are with each constant of ours 20% off
    python -m tests.benchmarks.planner.planning --search    processor seconds to plan for 32,768 GPUs, settings free

No machine and no process group is needed. Published grids are not known, so the model's own best stands for them, its
axes in the engine's own order.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from hf_axonn.planner.dense import load_shape
from hf_axonn.planner.job import Job
from hf_axonn.planner.machine import Machine, load_machine
from hf_axonn.planner.search import GridRanking, plan
from hf_axonn.planner.settings import EXACT
from hf_axonn.topology.axis_order import ORDER
from hf_axonn.topology.grid import Grid
from tests.benchmarks.planner.axonn import network_time, rank_axonn


SEQ, SEQUENCES = 2048, 8192  # 16.8 million tokens


@dataclass(frozen=True)
class Point:
    """A published run: model, machine, GPUs, hardware TFLOP/s of a GPU, and whether it counts for the error."""

    model: str
    machine: str
    gpus: int
    tflops: float
    counts: bool = True


# Whole-machine PFLOP/s of arXiv 2502.08145's abstract, and its weak-scaling efficiencies on Frontier (88.3%, 79.02%,
# 53.5% of 512 GCDs) and Alps (76.5% of 1,024 GPUs at 6,144), over the number of GPUs. Perlmutter at 512: 80.8 PFLOP/s.
# Model sizes are recalled from the paper.
POINTS = (
    Point("gpt-5b", "perlmutter", 512, 157.8),
    Point("gpt-40b", "perlmutter", 4096, 151.4),
    Point("gpt-5b", "frontier", 512, 78.8),
    Point("gpt-80b", "frontier", 8192, 69.6),
    Point("gpt-160b", "frontier", 16384, 62.2),
    Point("gpt-10b", "alps", 1024, 302.7),
    Point("gpt-60b", "alps", 6144, 231.6),
    Point("gpt-320b", "frontier", 32768, 42.1, counts=False),
)
# Seconds that the authors' own script prints (examples/comm_model.py, branch gordon-bell-perlmutter of
# axonn-ai/Megatron-AxoNN), by model, machine, batch in sequences and grid.
SCRIPT = (
    ("gpt-20b", "perlmutter", 512, Grid(z=32), 1.335),
    ("gpt-20b", "perlmutter", 512, Grid(data=2, z=16), 1.522),
    ("gpt-20b", "perlmutter", 512, Grid(z=8, x=4), 5.686),
    ("gpt-20b", "perlmutter", 512, Grid(z=16, x=2), 5.713),
    ("gpt-20b", "perlmutter", 512, Grid(y=4, z=8), 7.179),
    ("gpt-20b", "perlmutter", 512, Grid(y=2, x=4, z=4), 31.612),
    ("gpt-40b", "perlmutter", 1024, Grid(z=64), 2.663),
    ("gpt-40b", "perlmutter", 1024, Grid(data=2, z=32), 2.846),
    ("gpt-40b", "perlmutter", 1024, Grid(z=32, x=2), 9.371),
    ("gpt-5b", "perlmutter", 512, Grid(z=64), 0.332),
    ("gpt-5b", "perlmutter", 512, Grid(data=2, z=32), 0.355),
    ("gpt-5b", "perlmutter", 512, Grid(data=4, z=16), 0.401),
    ("gpt-40b", "perlmutter", 8192, Grid(z=4096), 2.705),
    ("gpt-80b", "frontier", 8192, Grid(z=8192), 10.63),
    ("gpt-80b", "frontier", 8192, Grid(data=8, z=32, y=8, x=4), 34.288),
)


def script_seconds(model: str, machine: str, sequences: int, grid: Grid) -> float:
    """What the equations give when counted as the script counts."""
    return network_time(load_shape(model), load_machine(machine), grid, sequences * SEQ, counting="script")


def job_of(point: Point, **changes: float) -> Job:
    """The job of a published run; `changes` scale the machine (`Machine.scale`)."""
    machine = load_machine(point.machine).scale(**changes)
    return Job(shape=load_shape(point.model), machine=machine, sequences=SEQUENCES, seq=SEQ)


def predicted(point: Point, **changes: float) -> GridRanking:
    """All grids of a published run, with AxoNN's schedule; `changes` as `job_of`."""
    return rank_axonn(job_of(point, **changes), point.gpus)


def error(point: Point, found: GridRanking) -> float:
    """Predicted over published FLOP/s of the best grid, minus 1."""
    return found.best.flops / 1e12 / point.tflops - 1


def mean_error(plans: dict[Point, GridRanking]) -> float:
    """Mean absolute error over the points that count."""
    return statistics.mean(abs(error(point, found)) for point, found in plans.items() if point.counts)


def published() -> list[str]:
    """Lines of the table of published and predicted FLOP/s."""
    plans = {point: predicted(point) for point in POINTS}
    ours = {point: plan(job_of(point), point.gpus, order=ORDER) for point in POINTS}
    titles = ("machine, GPUs, model", "published", "predicted", "error", "first ten", "grid: data, z, y, x", "engine")
    lines = [f"| {' | '.join(titles)} |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for point, found in plans.items():
        ten = [entry.flops / 1e12 for entry in found.ranked[:10]]
        grid = ", ".join(map(str, found.best.grid.as_dict().values()))
        lines.append(
            f"| {point.machine}, {point.gpus:,}, {point.model} | {point.tflops} | {ten[0]:.1f} | "
            f"{error(point, found):+.1%} | {ten[-1]:.1f} to {ten[0]:.1f} | {grid} | "
            f"{ours[point].best.flops / 1e12:.1f} |"
        )
    lines += ["", f"mean absolute error up to 16,384 GPUs: {mean_error(plans):.1%}"]
    return lines


def sensitive() -> list[str]:
    """Lines of the table of errors with one assumption off."""

    def changed(change: Callable[[Machine], Machine]) -> dict[Point, GridRanking]:
        plans = {}
        for point in POINTS:
            job = job_of(point)
            plans[point] = rank_axonn(replace(job, machine=change(job.machine)), point.gpus)
        return plans

    def times(name: str, factor: float) -> Callable[[Machine], Machine]:
        return lambda machine: replace(machine, **{name: getattr(machine, name) * factor})

    def attention(factor: float) -> Callable[[Machine], Machine]:
        def scaled(machine: Machine) -> Machine:
            there, back = machine.attention_rates(None)
            return replace(machine, attention={"scaled": (there * factor, back * factor)})

        return scaled

    cases = {"as it is": {point: predicted(point) for point in POINTS}}
    for factor in (0.8, 1.2):
        cases[f"links x {factor}"] = {point: predicted(point, bandwidth=factor) for point in POINTS}
        cases[f"share of GEMM speed x {factor}"] = changed(times("gemm_fraction", factor))
        cases[f"attention x {factor}"] = changed(attention(factor))
        cases[f"memory x {factor}"] = changed(times("memory_fraction", factor))
        cases[f"slowdown by hidden communication x {factor}"] = changed(times("slowdown", factor))
    lines = ["| assumption | mean absolute error |", "| --- | --- |"]
    return lines + [f"| {name} | {mean_error(plans):.1%} |" for name, plans in cases.items()]


def search() -> list[str]:
    """Lines of the table of seconds of a processor that a plan takes, all legal grids with every setting that changes
    no number, without pipelines and with any."""
    lines = ["| model | GPUs | pipe | grids | processor seconds |", "| --- | --: | --- | --: | --: |"]
    for model in ("gpt-80b", "gpt-320b"):
        job = Job(shape=load_shape(model), machine=load_machine("frontier"), sequences=SEQUENCES, seq=SEQ)
        for pipe, pipes in (("1", (1,)), ("any", None)):
            begin = time.process_time()
            found = plan(job, 32768, free=EXACT, pipes=pipes)
            count = len(found.ranked) + len(found.too_big)
            lines.append(f"| {model} | 32,768 | {pipe} | {count:,} | {time.process_time() - begin:.1f} |")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The performance model against published figures.")
    parser.add_argument("--sensitive", action="store_true", help="errors with each assumption 20%% off")
    parser.add_argument("--search", action="store_true", help="processor seconds that a plan takes")
    options = parser.parse_args(arguments)
    if options.search:
        print("\n".join(search()))
        return 0
    if options.sensitive:
        print("\n".join(sensitive()))
        return 0
    print("| model, machine, sequences | grid | script | here |\n| --- | --- | --- | --- |")
    for model, machine, sequences, grid, seconds in SCRIPT:
        print(
            f"| {model}, {machine}, {sequences:,} | {grid} | {seconds} | "
            f"{script_seconds(model, machine, sequences, grid):.3f} |"
        )
    print("", *published(), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
