"""How long an optimizer step takes on a grid, and what it needs: `predict(job, grid)`.

    time of a step = micro_batches * (forward + backward + head) + averages over data that nothing hides + optimizer

What overlaps hide of a layer's communication is in planner/time/exposed.py. Averages over data hide behind what is
left of the last backward pass. What is hidden slows the computation beside it (`Machine.slowdown`).

Two schedules: `hf_axonn`, whose collectives are those of planner/traffic/volumes.py and so of the engine, byte by
byte; `axonn`, the paper's, whose volumes are equations (1) to (5), where ranks of y repeat attention and ranks of x
repeat norms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hf_axonn.planner.machine import Machine
from hf_axonn.planner.memory import Memory, memory
from hf_axonn.planner.model.shapes import Step
from hf_axonn.planner.model.stack import Stack
from hf_axonn.planner.time.compute import Compute
from hf_axonn.planner.time.exposed import Overlaps, exposed
from hf_axonn.planner.time.links import Links
from hf_axonn.planner.time.schedules import LayerSeconds, Traffic, of_axonn, of_engine
from hf_axonn.planner.traffic.ledger import Ledger
from hf_axonn.topology.axis_order import ORDER
from hf_axonn.topology.grid import Grid, divisors


MOST_TOKENS = 10**10  # of a batch; more is a slip, and its divisors take long to find
SCHEDULES = ("hf_axonn", "axonn")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be trained, and on what.

    Args:
        shape, machine: the model and the machine.
        sequences, seq: samples of the full batch, and tokens a sample.
        compute_bytes, param_bytes, reduce_bytes, residual_bytes: as `Step`; bf16 on fp32 weights by default.
        checkpointing: whether layers run again in backward.
        lora: as `Step`.
        keep_gathered: recomputed, none, all or a number of layers, as in the settings of a run (config.py).
        micro_batches: how many; None: the fewest that fit.
        attention: name of the attention kernel, of those of the machine; None: its first.
        all_gather, reduce_scatter, all_reduce: the three overlaps.
        schedule: one of SCHEDULES.
    Raises:
        ValueError: a size below 1, or an unknown schedule.
    """

    shape: Stack
    machine: Machine
    sequences: int
    seq: int
    compute_bytes: int = 2
    param_bytes: int = 4
    reduce_bytes: int = 4
    residual_bytes: int | None = None
    checkpointing: bool = True
    lora: int = 0
    keep_gathered: str | int = "recomputed"
    micro_batches: int | None = None
    attention: str | None = None
    all_gather: bool = True
    reduce_scatter: bool = True
    all_reduce: bool = True
    schedule: str = "hf_axonn"

    def __post_init__(self) -> None:
        for name in ("sequences", "seq"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but a batch has at least 1.")
        if self.tokens > MOST_TOKENS:
            raise ValueError(f"a batch of {self.tokens} tokens cannot be planned: at most {MOST_TOKENS} can.")
        if self.micro_batches is not None and self.micro_batches < 1:
            raise ValueError(f"micro_batches is {self.micro_batches}, but a step has at least 1.")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule is {self.schedule!r}, but it is one of {', '.join(SCHEDULES)}.")

    @property
    def tokens(self) -> int:
        """Tokens of the full batch."""
        return self.sequences * self.seq

    @property
    def kept_layers(self) -> int:
        """Layers whose gathered weights are kept from forward to backward."""
        if isinstance(self.keep_gathered, int):
            return self.keep_gathered
        return self.shape.depth if self.keep_gathered == "all" else 0

    def model_flops(self) -> float:
        """FLOP of one step that the model asks for: 6 a weight and token, or 4 where weights are not trained, and full
        squares of attention. Adapters are not counted.

        Source: PaLM (arXiv 2204.02311), appendix B; embedding rows are looked up and not counted.
        """
        passes, shape = 2 if self.lora else 3, self.shape
        weights = passes * (shape.weight_flops + 2 * shape.vocab * shape.hidden)
        return self.tokens * (weights + 3 * shape.attention_flops(self.seq))

    def hardware_flops(self) -> float:
        """`model_flops`, and those of layers that run again. For a GPT under checkpointing this is the formula of the
        AxoNN paper, 96 B s L h^2 (1 + s / 6h + V / 16 L h)."""
        return self.model_flops() + (self.layers_flops() if self.checkpointing else 0)

    def layers_flops(self) -> float:
        """FLOP of one forward pass of all decoder layers."""
        return self.tokens * self.shape.flops(self.seq)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a step on a grid comes to.

    Args:
        job, grid, order, micro_batches: of what.
        seconds: parts of the step: gemm, attention, elementwise, head, optimizer, slowdown (compute; the last: what
            communication beside it costs); exposed x/y, exposed z, exposed data, other (communication that nothing
            hides; other: embedding, head and loss).
        memory: bytes of a rank; fits: whether it fits the machine's GPU.
        travels: the payloads of what travels.
    """

    job: Job
    grid: Grid
    order: tuple[str, ...]
    micro_batches: int
    seconds: dict[str, float]
    memory: Memory
    fits: bool
    travels: Traffic = field(repr=False)

    @property
    def traffic(self) -> dict[str, float]:
        """Seconds of all communication, hidden or not, by axes ("y", "x", "z", "data", "x+y", ...)."""
        links = Links(self.job.machine, self.grid, self.order)
        return self.travels.by_axes(links, self.micro_batches)

    @property
    def layers(self) -> list[tuple[LayerSeconds, int]]:
        """Seconds of the collectives of one decoder layer and micro-batch, hidden or not, and how many such layers."""
        links = Links(self.job.machine, self.grid, self.order)
        return [(traffic.seconds(links), count) for _, traffic, count in self.travels.layers]

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def exposed(self) -> float:
        """Seconds of communication that nothing hides."""
        return sum(value for name, value in self.seconds.items() if name in ("other",) or name.startswith("exposed"))

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.job.tokens / self.total

    @property
    def flops(self) -> float:
        """Hardware FLOP/s of one GPU, recomputation included."""
        return self.job.hardware_flops() / self.total / self.grid.size

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: of the advertised peak."""
        return self.job.model_flops() / self.total / self.grid.size / self.job.machine.peak_flops

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: with what is computed again."""
        return self.flops / self.job.machine.peak_flops


def step_of(job: Job, grid: Grid, micro_batches: int) -> Step:
    """One (data, z) position's part of a step."""
    return Step(
        rows=job.sequences // (grid.dp_size * micro_batches),
        seq=job.seq,
        micro_batches=micro_batches,
        compute_bytes=job.compute_bytes,
        param_bytes=job.param_bytes,
        reduce_bytes=job.reduce_bytes,
        residual_bytes=job.residual_bytes,
        checkpointing=job.checkpointing,
        kept_layers=job.kept_layers,
        lora=job.lora,
        keeps_recomputed=job.keep_gathered == "recomputed",
        counted=True,
    )


def refusal(job: Job, grid: Grid) -> str:
    """Why a batch cannot be divided over a grid, or nothing."""
    if job.sequences % grid.dp_size:
        return f"{job.sequences} sequences are not divisible by data * z = {grid.dp_size}"
    if grid.x * grid.y > job.sequences // grid.dp_size * job.seq:
        return f"a (data, z) position has fewer tokens than x * y = {grid.x * grid.y}"
    if job.micro_batches and job.sequences // grid.dp_size % job.micro_batches:
        rows = job.sequences // grid.dp_size
        return f"{rows} sequences of a (data, z) position do not make {job.micro_batches} micro-batches of one size"
    return ""


def fewest_micro_batches(job: Job, grid: Grid) -> tuple[int, Memory]:
    """The fewest micro-batches that fit a GPU, and what they need; one sample each where none fits. Those of the job,
    where it says how many."""
    rows = job.sequences // grid.dp_size
    layout = layout_of(job.shape, grid)
    if job.micro_batches is not None:
        return job.micro_batches, memory(job.shape, grid, step_of(job, grid, job.micro_batches), layout=layout)
    for count in divisors(rows):
        needed = memory(job.shape, grid, step_of(job, grid, count), layout=layout)
        if needed.fits(job.machine.memory) or count == rows:
            return count, needed
    raise AssertionError("rows divides itself")


def layout_of(shape: Stack, grid: Grid) -> str:
    """The layout of the residual stream that the engine takes."""
    return "feature" if shape.features and grid.y > 1 else "token"


def predict(job: Job, grid: Grid, *, order: tuple[str, ...] = ORDER) -> Prediction:
    """Time, utilisation and memory of one optimizer step.

    Args:
        job, grid: of what.
        order: axes from the innermost on.
    Raises:
        ValueError: the batch cannot be divided so.
    """
    why = refusal(job, grid)
    if why:
        raise ValueError(f"grid {grid}: {why}.")
    return predict_with(job, grid, *fewest_micro_batches(job, grid), order=order)


def predict_with(
    job: Job, grid: Grid, micro_batches: int, needed: Memory, *, order: tuple[str, ...] = ORDER
) -> Prediction:
    """`predict`, where micro-batches and what they need are known (`fewest_micro_batches`)."""
    step = step_of(job, grid, micro_batches)
    if job.schedule == "axonn":
        traffic = of_axonn(job.shape, grid, step)
    else:
        traffic = of_engine(job.shape, grid, step, layout_of(job.shape, grid))
    compute = _compute(job, grid, step)
    return _assemble(job, grid, order, traffic, compute, needed)


def reorder(prediction: Prediction, order: tuple[str, ...]) -> Prediction:
    """The same grid with its axes in another order on the machine."""
    job, grid = prediction.job, prediction.grid
    compute = _compute(job, grid, step_of(job, grid, prediction.micro_batches))
    return _assemble(job, grid, order, prediction.travels, compute, prediction.memory)


def _compute(job: Job, grid: Grid, step: Step) -> Compute:
    return Compute(job.shape, job.machine, grid, step, ours=job.schedule == "hf_axonn", attention=job.attention)


def _assemble(
    job: Job, grid: Grid, order: tuple[str, ...], traffic: Traffic, compute: Compute, needed: Memory
) -> Prediction:
    links = Links(job.machine, grid, order)
    times, passes = compute.step.micro_batches, 2 if job.checkpointing else 1
    overlaps = Overlaps(
        all_gather=job.all_gather,
        reduce_scatter=job.reduce_scatter,
        all_reduce=job.all_reduce,
        checkpointing=job.checkpointing,
        share=job.machine.overlap,
        # On GPUs, where moving data takes nothing from computing; the paper's code has one group over z.
        apart=job.schedule == "hf_axonn" and job.machine.overlap == 1,
        layer_ahead=job.schedule == "hf_axonn",
    )
    seconds = dict.fromkeys(("gemm", "attention", "elementwise"), 0.0)
    exposed_xy = exposed_z = slack = beside = 0.0
    for layer, travels, count in traffic.layers:
        groups = compute.groups(layer)
        hidden = exposed(overlaps, travels.seconds(links), travels.once, groups)
        exposed_z += times * count * (hidden.forward_z + hidden.backward_z)
        exposed_xy += times * count * hidden.xy
        slack += count * hidden.slack
        beside += times * count * hidden.hidden
        for group in groups:
            products = group.forward * passes + group.input_gradient + group.weight_gradient
            seconds["gemm"] += times * count * products
            between = group.after_forward * passes + group.after_backward
            seconds["attention" if group.attends else "elementwise"] += times * count * between
        forward, backward = compute.router(layer)
        seconds["elementwise"] += times * count * (forward * passes + backward)
    data = _sum(traffic.gradients, links)
    # AxoNN averages after the last backward pass is over: sync_gradients waits for one all-reduce a parameter.
    room = slack if job.all_gather and job.reduce_scatter and job.schedule == "hf_axonn" else 0.0
    behind_backward = overlaps.share * min(data, room)
    products, rest = compute.head()
    seconds |= {
        "head": times * (products + rest),
        "optimizer": compute.optimizer(needed.trained),
        "slowdown": job.machine.slowdown * (beside + behind_backward),
        "exposed x/y": exposed_xy,
        "exposed z": exposed_z,
        "exposed data": data - behind_backward,
        "other": times * _sum(traffic.rest, links),
    }
    return Prediction(
        job=job,
        grid=grid,
        order=tuple(order),
        micro_batches=times,
        seconds=seconds,
        memory=needed,
        fits=needed.fits(job.machine.memory),
        travels=traffic,
    )


def _sum(ledger: Ledger, links: Links) -> float:
    return math.fsum(links.of(key, volume) for key, volume in ledger.entries.items())
