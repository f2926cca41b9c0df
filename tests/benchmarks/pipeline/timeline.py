"""Who works when in a pipeline: real steps, their bubble, and the planner's for the same stages.

    python -m tests.benchmarks.pipeline.timeline --output docs/results/pipelines.md

Two kinds of runs:

    works    pipe=2, a rank for each core: the products of a Llama (peers.py's)
    sleeps   pipe=4 and pipe=8: a tiny model whose layers sleep in forward and backward, which needs no core a rank

Each rank notes when it begins and ends a forward pass, a backward pass and a pass of weight gradients. The bubble is
the share of all ranks' time, from the first pass of a step to the end of the last, in which a rank is in none. The
planner gets the mean seconds of each stage's passes and the time of a message between neighbours, and plays the
schedule (hf_axonn/planner/time/pipeline.py). What a rank does, in which order, has to be the planner's own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hf_axonn import Grid, parallelize
from hf_axonn.config import AxonnConfig
from hf_axonn.distributed.collectives import barrier, swap
from hf_axonn.parallel.pipeline.pipeline import Pipeline
from hf_axonn.planner.time.pipeline import BACKWARD, FORWARD, INPUT, WEIGHT, StageTime, order, pipeline_time
from tests.benchmarks.peers.peers import model_config
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks


SEQ = 128
PICTURED = 4
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2)]
COLORS = {FORWARD: "#9dc3e6", BACKWARD: "#2e75b6", INPUT: "#2e75b6", WEIGHT: "#a9d18e"}
NAMES = {FORWARD: "forward", BACKWARD: "backward", INPUT: "input gradients", WEIGHT: "weight gradients"}


class Run(NamedTuple):
    """One way to run steps: `nap` is for how many seconds a layer sleeps in each of its three passes, or 0."""

    pipe: int
    schedule: str
    per_rank: int
    micro_batches: int
    nap: float


class Pass(NamedTuple):
    """One pass of a rank: kind, stage, micro-batch, and seconds on a clock that all ranks share."""

    kind: str
    stage: int
    micro_batch: int
    begin: float
    end: float


class Measured(NamedTuple):
    """Steps of a run: of each step and rank its passes in order, and seconds of a message between neighbours."""

    steps: list[list[list[Pass]]]
    hop: float


class _Nap(torch.autograd.Function):
    """What a layer gives, after it has slept; in backward, too. Weight gradients that come later are counted."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, seconds: float, later: list[float] | None) -> torch.Tensor:
        ctx.seconds, ctx.later = seconds, later
        time.sleep(seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.seconds if ctx.later is not None else 2 * ctx.seconds)
        if ctx.later is not None:
            ctx.later.append(ctx.seconds)
        return grad, None, None


def let_sleep(pipeline: Pipeline, run: Run) -> None:
    """Let the layers of this rank sleep."""
    later: list[float] | None = [] if run.schedule == "zero_bubble" else None
    layers = pipeline.stages.layers
    for stage in pipeline.stages.own:
        for index in stage.layers:
            layers[index].register_forward_hook(lambda _, __, hidden: _Nap.apply(hidden, run.nap, later))
    if later is not None:
        left = pipeline._left_for_later

        def left_for_later() -> Any:
            naps, finish = sum(later), left()
            later.clear()

            def run_later() -> None:
                time.sleep(naps)
                finish()

            return run_later

        pipeline._left_for_later = left_for_later  # type: ignore[method-assign]


def watch(pipeline: Pipeline, batch: int, seq: int, micro_batches: int) -> list[Pass]:
    """Note every pass of the stages of this rank, in the list that is returned."""
    found: list[Pass] = []
    schedule, _ = pipeline._schedule(micro_batches, batch, seq, 0)
    for stage in schedule.of_grid:

        def noting(method: str, kind_of: Any, stage: Any = stage) -> None:
            original = getattr(stage, method)

            def call(micro_batch: int, *args: Any, **kwargs: Any) -> Any:
                begin = time.monotonic()
                result = original(micro_batch, *args, **kwargs)
                found.append(Pass(kind_of(kwargs), stage.stage_index, micro_batch, begin, time.monotonic()))
                return result

            setattr(stage, method, call)

        noting("forward_one_chunk", lambda _: FORWARD)
        noting("backward_one_chunk", lambda kwargs: BACKWARD if kwargs.get("full_backward", True) else INPUT)
        noting("backward_weight_one_chunk", lambda _: WEIGHT)
    return found


def make_model(run: Run) -> nn.Module:
    torch.manual_seed(0)
    if run.nap:
        return tiny_model("llama", dtype=torch.float32, num_hidden_layers=2 * run.pipe).train()
    return AutoModelForCausalLM.from_config(model_config("60m", sequence=SEQ)).train()


def _steps(run: Run, count: int) -> tuple[list[list[Pass]], float]:
    """On a rank: the passes of each of `count` steps, and seconds of a message. A step before them is not counted."""
    grid = Grid(pipe=run.pipe)
    config = AxonnConfig(grid=grid, schedule=run.schedule, stages_per_rank=run.per_rank)
    model, _ = parallelize(make_model(run), grid, config=config)
    pipeline = model.axonn.pipeline
    if run.nap:
        let_sleep(pipeline, run)
    rows, seq = 4 * run.pipe, SEQ if not run.nap else 8  # the rows of a batch make four micro-batches for each rank
    assert rows == run.micro_batches
    ids = torch.randint(3, 100, (rows, seq), generator=torch.Generator().manual_seed(0))
    found = watch(pipeline, 1, seq, run.micro_batches)
    steps = []
    for _ in range(count + 1):
        found.clear()
        barrier()
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
        steps.append(list(found))
    block = torch.empty(pipeline.stages.block_shape(1, seq))
    peer = pipeline.here ^ 1
    swap(block, peer, pipeline.group)
    begin = time.monotonic()
    for _ in range(20):
        swap(block, peer, pipeline.group)
    return steps[1:], (time.monotonic() - begin) / 20


def measure(run: Run, steps: int) -> Measured:
    """Start the ranks of a run."""
    ranks = run_ranks(_steps, run.pipe, run, steps, timeout=560)
    by_step = [[own[step] for own, _ in ranks] for step in range(steps)]
    return Measured(by_step, max(hop for _, hop in ranks))


def wrong_orders(run: Run, measured: Measured) -> list[int]:
    """Ranks that have done something else, or in another order, than the planner says."""
    orders = [
        [tuple(each) for each in order(run.schedule, run.pipe, rank, run.per_rank, run.micro_batches)]
        for rank in range(run.pipe)
    ]
    found = [[[tuple(each[:3]) for each in own] for own in step] for step in measured.steps]
    return [rank for rank in range(run.pipe) if any(step[rank] != orders[rank] for step in found)]


def bubble(step: list[list[Pass]]) -> float:
    """Share of all ranks' time in which they are in no pass."""
    every = [each for own in step for each in own]
    span = max(each.end for each in every) - min(each.begin for each in every)
    return 1 - sum(each.end - each.begin for each in every) / (span * len(step))


def predicted(run: Run, measured: Measured) -> float:
    """The planner's bubble for stages that take as long as these."""
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    for step in measured.steps:
        for own in step:
            for each in own:
                seconds[each.stage, each.kind].append(each.end - each.begin)
    mean = {key: statistics.mean(values) for key, values in seconds.items()}
    stages = [
        StageTime(
            mean[stage, FORWARD],
            mean.get((stage, BACKWARD), mean.get((stage, INPUT), 0.0)),
            mean.get((stage, WEIGHT), 0.0),
        )
        for stage in range(run.pipe * run.per_rank)
    ]
    hops = [measured.hop] * (len(stages) - 1)
    return pipeline_time(run.schedule, stages, run.pipe, run.micro_batches, hops).bubble


def table(found: dict[Run, Measured]) -> list[str]:
    lines = [
        "| pipe | layers | schedule | stages a rank | micro-batches | bubble | predicted | predicted / measured |",
        "| --: | --- | --- | --: | --: | --: | --: | --: |",
    ]
    for run, measured in found.items():
        ours, theirs = statistics.median(map(bubble, measured.steps)), predicted(run, measured)
        lines.append(
            f"| {run.pipe} | {'sleep' if run.nap else 'work'} | {run.schedule} | {run.per_rank} "
            f"| {run.micro_batches} | {ours:.1%} | {theirs:.1%} | {theirs / ours:.2f} |"
        )
    return lines


def draw(found: dict[Run, Measured]) -> str:
    """An SVG picture of the last step of each run, all on one scale: a line for each rank, a box for each pass."""
    width, lane, left = 960, 16, 50
    begins = {run: min(each.begin for own in its.steps[-1] for each in own) for run, its in found.items()}
    longest = max(each.end - begins[run] for run, its in found.items() for own in its.steps[-1] for each in own)
    scale = (width - left - 5) / longest
    legend = "".join(
        f'<rect class="{kind}" x="{left + 130 * place}" y="4" width="12" height="12"/>'
        f'<text class="left" x="{left + 130 * place + 17}" y="14">{NAMES[kind]}</text>'
        for place, kind in enumerate((FORWARD, BACKWARD, WEIGHT))
    )
    lines, top = [legend], 34
    for run, measured in found.items():
        step = measured.steps[-1]
        many = f", {run.per_rank} stages a rank, the second one pale" if run.per_rank > 1 else ""
        title = f"{run.schedule}{many}: {bubble(step):.0%} of the time is bubble"
        lines.append(f'<text class="left" x="{left}" y="{top}">{title}</text>')
        for rank, own in enumerate(step):
            y = top + 6 + lane * rank
            lines.append(f'<text class="left" x="0" y="{y + 12}">rank {rank}</text>')
            for each in own:
                x, wide = left + scale * (each.begin - begins[run]), scale * (each.end - each.begin)
                pale = ' opacity=".6"' if each.stage >= run.pipe else ""
                lines.append(
                    f'<rect class="{each.kind}"{pale} x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{lane - 2}"/>'
                    f'<text x="{x + wide / 2:.1f}" y="{y + 10}">{each.micro_batch}</text>'
                )
        top += lane * run.pipe + 30
    style = "".join(f".{kind}{{fill:{color}}}" for kind, color in COLORS.items())
    style += "rect{stroke:#fff;stroke-width:.4}text{font:7px sans-serif;text-anchor:middle}"
    style += ".FB+text,.I+text{fill:#fff}.left{font-size:12px;text-anchor:start}"
    size = f'viewBox="0 0 {width} {top - 20}" width="{width}" height="{top - 20}"'
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{style}</style>", RECT, *lines, "</svg>", ""]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Pipelines: who works when, and the bubble, measured and predicted.")
    parser.add_argument("--pipes", type=int, nargs="+", default=[2, 4, 8], help="ranks of the pipelines (2 4 8)")
    parser.add_argument("--nap", type=float, default=0.1, help="seconds that a layer sleeps in a pass (0.1)")
    parser.add_argument("--steps", type=int, default=3, help="steps of a run that count (3)")
    parser.add_argument("--output", type=Path, help="write the page to this file; the picture lies beside it")
    options = parser.parse_args(arguments)
    found = {}
    for pipe in options.pipes:
        for schedule, per_rank in SCHEDULES:
            run = Run(pipe, schedule, per_rank, 4 * pipe, 0.0 if pipe == 2 else options.nap)
            found[run] = measure(run, options.steps)
            if wrong := wrong_orders(run, found[run]):
                raise ValueError(f"{run}: ranks {wrong} did something else than the planner says.")
            print(table({run: found[run]})[-1], flush=True)
    lines = table(found)
    print("\n".join(lines))
    if options.output:
        drawn = {run: measured for run, measured in found.items() if run.pipe == PICTURED}
        picture = options.output.with_suffix(".svg")
        picture.write_text(draw(drawn))
        options.output.write_text("\n".join([*PAGE, *lines, "", *UNDER, f"![{ALT}]({picture.name})"]) + "\n")
    return 0


RECT = '<path fill="#fff" d="M0 0H2000V2000H0z"/>'  # behind, for dark pages
ALT = "For each schedule the passes of four ranks in one step, on a line of time"
PAGE = [
    "# Pipelines: the bubble, measured and predicted",
    "",
    "`python -m tests.benchmarks.pipeline.timeline`: pipe=2 trains the 60m Llama of peers.py, a rank for each core, "
    f"a row of {SEQ} tokens for each micro-batch, float32, gloo. With pipe=4 and 8 the layers of a tiny Llama, two a "
    "rank, sleep: as long in backward for input gradients as in forward, and as long again for weight gradients. The "
    "planner gets the seconds of the stages as they were.",
    "",
]
UNDER = [
    "The picture is one step with pipe=4 by each schedule, from a real run; numbers are micro-batches.",
    "",
]


if __name__ == "__main__":
    sys.exit(main())
