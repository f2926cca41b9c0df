"""How long an optimizer step takes on a grid, and what it needs: `predict(job, grid)`.

    time of a step = micro_batches * (forward + backward + head) + averages over data that nothing hides + optimizer

One decoder layer has four groups of Linears, g = (q, k, v), (o), (up and gate), (down); C = compute, A = gather over
z, R = reduction over z, X = reduction of dI over x or y. With the three overlaps (docs/algorithm.md) what is left of
the communication of a layer is

    OAG   A of the next group - min(A, C of this one), in forward, in the recomputation and in backward
    ORS   in backward R of the group before shares that window
    OAR   X - min(X, C of this group's dW)

and all other collectives over x and y in full. Without an overlap its collectives count in full. Averages over data
hide behind what is left of the last backward pass. Where the machine's `overlap` is below 1, only that share of what
could be hidden is. Compute does not slow down while something travels.

Two schedules: `hf_axonn`, whose collectives are those of volumes.py and so of the engine, byte by byte; `axonn`, the
paper's, whose volumes are equations (1) to (5), where ranks of y repeat attention and ranks of x repeat norms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hf_axonn.grid import Grid
from hf_axonn.perf.compute import Compute, Group
from hf_axonn.perf.ledger import Ledger
from hf_axonn.perf.links import Links
from hf_axonn.perf.machines import Machine
from hf_axonn.perf.memory import Memory, heads_repeat, memory
from hf_axonn.perf.paper import ORDER, decoder_layers
from hf_axonn.perf.schedules import Layer, Traffic, of_axonn, of_engine
from hf_axonn.perf.shapes import ModelShape, Step


MOST_TOKENS = 10**10  # of a batch; more is a slip, and its divisors take long to find
SCHEDULES = ("hf_axonn", "axonn")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be trained, and on what.

    Args:
        shape, machine: the model and the machine.
        sequences, seq: samples of the whole batch, and tokens a sample.
        compute_bytes, param_bytes, reduce_bytes: as `Step`; bf16 on fp32 weights by default.
        checkpointing: whether layers run again in backward.
        all_gather, reduce_scatter, all_reduce: the three overlaps.
        schedule: one of SCHEDULES.
    Raises:
        ValueError: a size below 1, or an unknown schedule.
    """

    shape: ModelShape
    machine: Machine
    sequences: int
    seq: int
    compute_bytes: int = 2
    param_bytes: int = 4
    reduce_bytes: int = 4
    checkpointing: bool = True
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
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule is {self.schedule!r}, but it is one of {', '.join(SCHEDULES)}.")

    @property
    def tokens(self) -> int:
        """Tokens of the whole batch."""
        return self.sequences * self.seq

    def model_flops(self) -> float:
        """FLOP of one step that the model asks for: 6 a weight and token, and whole squares of attention.

        Source: PaLM (arXiv 2204.02311), appendix B; embedding rows are looked up and not counted.
        """
        return 3 * self.layers_flops() + 6 * self.tokens * self.shape.vocab * self.shape.hidden

    def hardware_flops(self) -> float:
        """`model_flops`, and those of layers that run again. For a GPT under checkpointing this is the formula of the
        AxoNN paper, 96 B s L h^2 (1 + s / 6h + V / 16 L h)."""
        return self.model_flops() + (self.layers_flops() if self.checkpointing else 0)

    def layers_flops(self) -> float:
        """FLOP of one forward pass of all decoder layers."""
        weights = sum(layer.k * layer.n for layer in decoder_layers(self.shape))
        squares = 2 * self.seq * self.shape.heads * self.shape.width
        return self.shape.layers * self.tokens * 2 * (weights + squares)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a step on a grid comes to.

    Args:
        job, grid, order, micro_batches: of what.
        seconds: parts of the step: gemm, attention, elementwise, head, optimizer (compute); exposed x/y, exposed z,
            exposed data, other (communication that nothing hides; other: embedding, head and loss).
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
        return self.travels.by_axes(links, self.job.shape.layers, self.micro_batches)

    @property
    def layer(self) -> Layer:
        """Seconds of the collectives of one decoder layer and micro-batch, hidden or not."""
        return self.travels.layer.seconds(Links(self.job.machine, self.grid, self.order))

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
        rows=job.sequences // (grid.samples_size * micro_batches),
        seq=job.seq,
        micro_batches=micro_batches,
        compute_bytes=job.compute_bytes,
        param_bytes=job.param_bytes,
        reduce_bytes=job.reduce_bytes,
        checkpointing=job.checkpointing,
        counted=True,
    )


def refusal(job: Job, grid: Grid) -> str:
    """Why a batch cannot be divided over a grid, or nothing."""
    if job.sequences % grid.samples_size:
        return f"{job.sequences} sequences are not divisible by data * z = {grid.samples_size}"
    if grid.x * grid.y > job.sequences // grid.samples_size * job.seq:
        return f"a (data, z) position has fewer tokens than x * y = {grid.x * grid.y}"
    return ""


def fewest_micro_batches(job: Job, grid: Grid) -> tuple[int, Memory]:
    """The fewest micro-batches that fit a GPU, and what they need; one sample each where none fits."""
    rows = job.sequences // grid.samples_size
    layout = layout_of(grid)
    for count in divisors(rows):
        needed = memory(job.shape, grid, step_of(job, grid, count), layout=layout)
        if needed.fits(job.machine.memory) or count == rows:
            return count, needed
    raise AssertionError("rows divides itself")


def divisors(number: int) -> list[int]:
    """Divisors in ascending order."""
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def layout_of(grid: Grid) -> str:
    """The layout of the residual stream that the engine takes for norms it knows."""
    return "feature" if grid.y > 1 else "token"


def predict(job: Job, grid: Grid, *, order: tuple[str, ...] = ORDER, micro_batches: int | None = None) -> Prediction:
    """Time, utilisation and memory of one optimizer step.

    Args:
        job, grid: of what.
        order: axes from the innermost on.
        micro_batches: how many; None: the fewest that fit.
    Raises:
        ValueError: the batch cannot be divided so.
    """
    why = refusal(job, grid)
    if why:
        raise ValueError(f"grid {grid}: {why}.")
    if micro_batches is None:
        micro_batches, needed = fewest_micro_batches(job, grid)
    else:
        if micro_batches < 1 or job.sequences // grid.samples_size % micro_batches:
            raise ValueError(
                f"{job.sequences // grid.samples_size} samples of a (data, z) position do not make {micro_batches} "
                "micro-batches of one size."
            )
        needed = memory(job.shape, grid, step_of(job, grid, micro_batches), layout=layout_of(grid))
    step = step_of(job, grid, micro_batches)
    if job.schedule == "axonn":
        traffic = of_axonn(job.shape, grid, step)
    else:
        traffic = of_engine(job.shape, grid, step, layout_of(grid))
    compute = _compute(job, grid, step)
    return _assemble(job, grid, order, traffic, compute, needed)


def reorder(prediction: Prediction, order: tuple[str, ...]) -> Prediction:
    """The same grid with its axes in another order on the machine."""
    job, grid = prediction.job, prediction.grid
    compute = _compute(job, grid, step_of(job, grid, prediction.micro_batches))
    return _assemble(job, grid, order, prediction.travels, compute, prediction.memory)


def _compute(job: Job, grid: Grid, step: Step) -> Compute:
    ours = job.schedule == "hf_axonn"
    heads, stream = (heads_repeat(job.shape, grid), 1) if ours else (grid.y, grid.x)
    return Compute(job.shape, job.machine, grid, step, repeat_heads=heads, repeat_stream=stream, blocks=ours)


def _assemble(
    job: Job, grid: Grid, order: tuple[str, ...], traffic: Traffic, compute: Compute, needed: Memory
) -> Prediction:
    links = Links(job.machine, grid, order)
    layer, groups = traffic.layer.seconds(links), compute.groups()
    times, layers = compute.step.micro_batches, job.shape.layers
    forward_z, backward_z, exposed_xy, slack = _exposed(job, layer, groups)
    data = _sum(traffic.gradients, links)
    hidden = slack * layers if job.all_gather and job.reduce_scatter else 0.0
    passes = 2 if job.checkpointing else 1
    products, rest = compute.head()
    products_layer = sum(g.forward * passes + g.input_gradient + g.weight_gradient for g in groups)
    between = [g.after_forward * passes + g.after_backward for g in groups]
    seconds = {
        "gemm": times * layers * products_layer,
        "attention": times * layers * between[0],
        "elementwise": times * (layers * sum(between[1:])),
        "head": times * (products + rest),
        "optimizer": compute.optimizer(needed.parameters),
        "exposed x/y": times * layers * exposed_xy,
        "exposed z": times * layers * (forward_z + backward_z),
        "exposed data": max(0.0, data - hidden),
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


def _exposed(job: Job, layer: Layer, groups: list[Group]) -> tuple[float, float, float, float]:
    """Seconds of one layer that nothing hides: over z in forward, over z in backward, over x and y; and the compute
    of backward behind which nothing over z travels."""
    forward = [group.forward + group.after_forward for group in groups]
    backward = [group.input_gradient + group.weight_gradient + group.after_backward for group in groups]
    count = len(groups)
    share = job.machine.overlap
    gathers = [layer.gathers[(index + 1) % count] for index in range(count)]  # of the next group
    beside = share if job.all_gather else 0.0
    forward_z = sum(travel - beside * min(travel, room) for travel, room in zip(gathers, forward, strict=True))
    if job.checkpointing and layer.gathers_again:
        forward_z *= 2  # a recomputed layer gathers once more, in the same order
    # Backward goes from the last group to the first: while group g computes, the weights of g - 1 come and the
    # gradients of g + 1 leave.
    backward_z = slack = 0.0
    for index in range(count):
        gather, reduce, room = layer.gathers[index - 1], layer.reduces[(index + 1) % count], backward[index]
        travel = (gather if job.all_gather else 0.0) + (reduce if job.reduce_scatter else 0.0)
        hidden = share * min(travel, room)
        backward_z += gather + reduce - hidden
        slack += share * max(0.0, room - travel)
    exposed_xy = layer.forward + layer.backward
    for index, group in enumerate(groups):
        room = share * min(layer.hidden[index], group.weight_gradient) if job.all_reduce else 0.0
        exposed_xy += layer.hidden[index] - room
    return forward_z, backward_z, exposed_xy, slack


def _sum(ledger: Ledger, links: Links) -> float:
    return math.fsum(links.of(key, volume) for key, volume in ledger.entries.items())
