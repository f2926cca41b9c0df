"""Settings that a plan may choose beside the grid, and their texts.

    checkpointing     on, off: whether layers run again in backward
    experts           gather, move: how tokens and the experts of a mixture meet (topology/experts.py)
    keep_gathered     recomputed, none, all or a number of layers (config.py)
    micro_batches     a number; otherwise the fewest that fit, with a pipeline the fastest of the most
    pipeline          with a pipeline its schedule (time/pipeline.py)
    stages_per_rank   with a pipeline a number
    reduce_dtype      fp32, bf16: of sums of gradients
    residual_dtype    model, bf16: of the residual stream

The first six change nothing of what is computed, so they are chosen unless they are fixed. The dtypes round
differently, so they are chosen only where a job says that they may be.
"""

from __future__ import annotations

import itertools
from collections import ChainMap
from collections.abc import Collection, Iterable
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from hf_axonn.planner.candidate import Candidate
from hf_axonn.planner.experts import choose_way
from hf_axonn.planner.job import Job
from hf_axonn.planner.memory import RESERVE
from hf_axonn.planner.predict import Prediction, predict, predict_candidate, refuses_residual
from hf_axonn.planner.time.pipeline import PIPELINES
from hf_axonn.topology.experts import EXPERTS
from hf_axonn.topology.grid import Grid


EXACT = ("checkpointing", "experts", "keep_gathered", "micro_batches", "pipeline", "stages_per_rank")
ROUNDING = ("reduce_dtype", "residual_dtype")
GAIN = 0.01  # share that keeping gathered weights has to save, as it takes memory
BF16 = 2


def variants(job: Job, free: Collection[str]) -> list[Job]:
    """Return the job with every choice of the free settings but those that depend on memory."""
    choices: list[list[dict[str, Any]]] = [
        [{"checkpointing": False}, {"checkpointing": True}] if "checkpointing" in free else [{}],
        [{"experts": "auto"}, {"experts": "gather"}] if "experts" in free and job.shape.experts else [{}],
        [{}, {"reduce_bytes": BF16}] if "reduce_dtype" in free else [{}],
        [{}, {"residual_bytes": BF16}]
        if "residual_dtype" in free and job.compute_bytes == BF16 < job.param_bytes
        else [{}],
    ]
    return [replace(job, **dict(ChainMap(*chosen))) for chosen in itertools.product(*choices)]


def on_grid(jobs: Iterable[Job], grid: Grid) -> list[Job]:
    """Return the jobs that a launch takes and that differ on a grid, which say how tokens and experts meet there."""
    found = [job for job in jobs if not refuses_residual(job, grid)]
    if not any(job.shape.experts for job in found):
        return found
    return list(dict.fromkeys(replace(job, experts=choose_way(job.shape, grid, job.experts)) for job in found))


def keep_weights(entry: Prediction, free: Collection[str]) -> Prediction:
    """Return the same with the gathered weights of as many layers kept for backward as fit, where that gains GAIN."""
    job, grid = entry.job, entry.grid
    if "keep_gathered" not in free or grid.z == 1:
        return entry
    if entry.seconds["exposed z"] + entry.seconds["slowdown"] < GAIN * entry.total:
        return entry
    if entry.pipelined is not None:  # all of a rank's layers, and then once a step
        every = Candidate(replace(job, keep_gathered="all"), grid, entry.micro_batches)
        kept = predict_candidate(every, entry.order, play=entry.pipelined.simulated)
    else:
        one = replace(job, keep_gathered=1, micro_batches=entry.micro_batches)
        layer = Candidate(one, grid, entry.micro_batches).memory.total - entry.memory.total
        room = (1 - RESERVE) * job.machine.memory - entry.memory.total
        count = min(job.shape.depth, int(room / layer) if layer > 0 else job.shape.depth)
        if count < (job.shape.depth if job.shape.loose else 1):
            return entry
        some = replace(one, keep_gathered="all" if count == job.shape.depth else count)
        kept = predict(some, grid, order=entry.order)
    return kept if kept.fits and kept.total < (1 - GAIN) * entry.total else entry


def as_text(job: Job) -> dict[str, str]:
    """Return the texts of a job's settings."""
    return {
        "checkpointing": "on" if job.checkpointing else "off",
        **({} if job.experts == "auto" else {"experts": job.experts}),
        "keep_gathered": str(job.keep_gathered),
        "reduce_dtype": "bf16" if job.reduce_bytes == BF16 else "fp32",
        "residual_dtype": "bf16" if job.residual_bytes == BF16 else "model",
        **({"pipeline": job.pipeline, "stages_per_rank": str(job.stages_per_rank)} if job.pipeline else {}),
    }


def parse_fixed(texts: Iterable[str]) -> dict[str, Any]:
    """Parse NAME=VALUE texts to fields of a Job.

    Raises:
        ValueError: no such setting, no such value of it, or two.
    """
    fields: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in VALUES:
            near = get_close_matches(name, VALUES, n=1)
            raise ValueError(
                f"{text!r} fixes no setting: write NAME=VALUE, of {', '.join(VALUES)}"
                + (f"; did you mean {near[0]}?" if near else ".")
            )
        field, known = VALUES[name]
        if field in fields:
            raise ValueError(f"{text!r}: {name} has a value already, leave one of the two out.")
        if value in known:
            fields[field] = known[value]
        elif name in COUNTED and value.isdigit():
            fields[field] = int(value)
        else:
            raise ValueError(f"{text!r}: {name} is {', '.join([*known, *(['a number'] if name in COUNTED else [])])}.")
    return fields


COUNTED = ("keep_gathered", "micro_batches", "stages_per_rank")
VALUES: dict[str, tuple[str, dict[str, Any]]] = {
    "checkpointing": ("checkpointing", {"on": True, "off": False}),
    "experts": ("experts", {value: value for value in EXPERTS}),
    "keep_gathered": ("keep_gathered", {value: value for value in ("recomputed", "none", "all")}),
    "micro_batches": ("micro_batches", {}),
    "pipeline": ("pipeline", {name: name for name in PIPELINES}),
    "stages_per_rank": ("stages_per_rank", {}),
    "reduce_dtype": ("reduce_bytes", {"fp32": 4, "bf16": BF16}),
    "residual_dtype": ("residual_bytes", {"model": None, "bf16": BF16}),
}
