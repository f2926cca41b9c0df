"""AxoNN's own schedule, planned as in its paper: the planner's seconds of it, and the equations of the paper.

    rank_axonn(job, gpus)       every grid of GPUs, by the planner's seconds of AxoNN's schedule
    network_time(shape, ...)    equations (1) to (7): communication alone, rings, no latency, nothing hidden
    rank_grids(shape, ...)      grids by that

One layer: O[m, n] = I[m, k] @ W[k, n], m tokens of one data-parallel replica. For a layer that is not transposed
(a column layer here: y shards k, x shards n):

    (1)  all-gather of W over z          (z - 1)       * k n / (x y z) / beta_z
    (2)  reduce-scatter of dW over z     (z - 1) / z   * k n / (x y)   / beta_z
    (3)  all-reduce of O over y        2 (y - 1) / y   * m n / (z x)   / beta_y
    (4)  all-reduce of dI over x       2 (x - 1) / x   * m k / (z y)   / beta_x
    (5)  all-reduce of dW over data    2 (d - 1) / d   * k n / (x y z) / beta_data
    (6)  the layer: their sum; a transposed layer swaps x and y; the network: the sum over layers
    (7)  beta between nodes: inter / min(gpus_per_node, stride), see planner/machine.py

in seconds, each times the bytes of an element. `counting="script"` counts as the authors' own script does (examples/
comm_model.py, branch gordon-bell-perlmutter of axonn-ai/Megatron-AxoNN): W is gathered twice, forward runs twice (all
activations are computed again), gradients travel over data in fp32, volumes are in GiB while bandwidths are in GB/s,
and the last layer of the MLP is charged four times its forward volume and a quarter of its backward volume. It
reproduces the script's figures.

Source: Singh et al., arXiv 2502.08145, section on the performance model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from hf_axonn.planner.candidate import Candidate
from hf_axonn.planner.dense import DenseShape
from hf_axonn.planner.job import Job
from hf_axonn.planner.machine import Machine
from hf_axonn.planner.predict import predict_candidate, refusal
from hf_axonn.planner.search import GridRanking, grids
from hf_axonn.planner.shapes import BlockShape, LinearShape, ModelShape
from hf_axonn.planner.step import Step
from hf_axonn.planner.time.compute import Compute
from hf_axonn.planner.time.exposed import Overlaps
from hf_axonn.planner.time.layer_traffic import LayerTraffic, Traffic
from hf_axonn.planner.time.links import strides
from hf_axonn.planner.traffic.ledger import Ledger
from hf_axonn.topology.axis_order import ORDER
from hf_axonn.topology.grid import Grid, ceil_div
from hf_axonn.topology.weight_kind import WeightKind


COUNTINGS = ("equations", "script")


class MatrixLayer(NamedTuple):
    """O[m, n] = I[m, k] @ W[k, n]; a transposed layer has the roles of x and y swapped."""

    k: int
    n: int
    transposed: bool = False


class Times(NamedTuple):
    """Seconds of the five collectives of a layer."""

    all_gather_z: float
    reduce_scatter_z: float
    forward: float
    backward: float
    data: float


def layer_times(layer: MatrixLayer, tokens: float, grid: Grid, beta: dict[str, float], *, element: int = 2) -> Times:
    """Equations (1) to (5).

    Args:
        layer: its sizes.
        tokens: m, tokens of one data-parallel replica, all z together.
        grid: sizes of the axes.
        beta: bytes/s of a ring along each axis.
        element: bytes of an element.
    """
    x, y = (grid.y, grid.x) if layer.transposed else (grid.x, grid.y)
    beta_x, beta_y = (beta["y"], beta["x"]) if layer.transposed else (beta["x"], beta["y"])
    z, data, weights = grid.z, grid.data, layer.k * layer.n
    return Times(
        all_gather_z=element * (z - 1) * weights / (x * y * z) / beta["z"],
        reduce_scatter_z=element * (z - 1) / z * weights / (x * y) / beta["z"],
        forward=element * 2 * (y - 1) / y * tokens * layer.n / (z * x) / beta_y,
        backward=element * 2 * (x - 1) / x * tokens * layer.k / (z * y) / beta_x,
        data=element * 2 * (data - 1) / data * weights / (x * y * z) / beta["data"],
    )


def decoder_layers(shape: ModelShape) -> list[MatrixLayer]:
    """A decoder layer as AxoNN shards it: q, k, v in one; o, transposed; up (and gate); down, transposed.

    Raises:
        ValueError: layers differ, or are not one attention and one MLP.
    """
    if not isinstance(shape, DenseShape):
        raise ValueError(
            "the paper's equations are of layers that are alike, of one attention and one MLP; this model has others."
        )
    found = []
    for block in (shape.attention, shape.mlp):
        found.append(MatrixLayer(shape.hidden, sum(linear.rows for linear in block.columns)))
        found.append(MatrixLayer(block.row.cols, block.row.rows, transposed=True))
    return found


def network_time(
    shape: ModelShape, machine: Machine, grid: Grid, batch_tokens: int, *, counting: str = "equations"
) -> float:
    """Equation (6): seconds of communication of all decoder layers in one step.

    Args:
        shape, machine, grid: which.
        batch_tokens: tokens of the full batch.
        counting: equations, or script (see the head of this file).
    Raises:
        ValueError: an unknown counting.
    """
    if counting not in COUNTINGS:
        raise ValueError(f"counting is {counting!r}, but it is one of {', '.join(COUNTINGS)}.")
    beta = {axis: machine.bandwidth(stride, getattr(grid, axis)) for axis, stride in strides(grid).items()}
    tokens, total = batch_tokens / grid.data, 0.0
    layers = decoder_layers(shape)
    for index, layer in enumerate(layers):
        times = layer_times(layer, tokens, grid, beta)
        if counting == "equations":
            total += sum(times)
            continue
        # The script exchanges k and n of the last layer, down of the MLP.
        ratio = layer.k / layer.n if index == len(layers) - 1 else 1
        activations = 2 * times.forward * ratio + times.backward / ratio
        total += 2 * times.all_gather_z + times.reduce_scatter_z + activations + 2 * times.data
    return shape.depth * total / (2**30 / 1e9 if counting == "script" else 1)


def rank_grids(
    shape: ModelShape,
    machine: Machine,
    grids: list[Grid],
    batch_tokens: int,
    *,
    counting: str = "equations",
) -> list[tuple[float, Grid]]:
    """Grids by their communication time, the shortest first."""
    times = [(network_time(shape, machine, grid, batch_tokens, counting=counting), grid) for grid in grids]
    return sorted(times, key=lambda entry: (entry[0], *entry[1].as_dict().values()))


def axonn_traffic(shape: ModelShape, grid: Grid, step: Step) -> Traffic:
    """Payloads by equations (1) to (5): all-reduces after every product, bf16 over z, fp32 over data.

    Under checkpointing forward all-reduces run again; the weights that were gathered for the recomputation serve
    backward too (so does the authors' script count). Embedding, head and loss are not in the paper's model: their
    gradients travel over data and z as all weights do, their activations are all-reduced once each way.
    """
    ledger, size = Ledger(grid), step.compute_bytes
    gathers: list[float] = []
    hidden: list[tuple[str, str, float] | None] = []
    shards = grid.x * grid.y * grid.z
    weights = Fraction(0)
    for layer in decoder_layers(shape):
        weights += shape.depth * Fraction(layer.k * layer.n, shards)
        gathers.append(layer.k * layer.n * size / shards)
        inner, outer = ("x", "y") if layer.transposed else ("y", "x")  # the axes that shard k and n
        forward = Fraction(step.tokens(grid) * layer.n * size, getattr(grid, outer))
        ledger.add("forward", "all_reduce", (inner,), forward)
        if step.checkpointing:
            ledger.add("backward", "all_reduce", (inner,), forward)
        backward = step.tokens(grid) * layer.k * size / getattr(grid, inner)
        hidden.append(("all_reduce", outer, backward) if getattr(grid, outer) > 1 else None)
    rest, gradients = Ledger(grid), Ledger(grid)
    stream = step.tokens(grid) * shape.hidden * size
    for phase in ("forward", "backward"):
        rest.add(phase, "all_reduce", ("x", "y"), stream)
    vocabulary = Fraction(shape.vocab * shape.hidden, shards)
    rest.add("forward", "all_gather", ("z",), vocabulary * size)
    rest.add("backward", "reduce_scatter", ("z",), vocabulary * size)
    gradients.add("gradients", "all_reduce", ("data",), 4 * (weights + vocabulary), 4 * shape.depth)
    traffic = LayerTraffic(gathers, gathers, False, ledger, hidden)
    layers = tuple((layer, traffic, count) for layer, count in shape.kinds)
    return Traffic(layers, rest, gradients, step.checkpointing)


class AxonnCompute(Compute):
    """Seconds of AxoNN's computation: one product for each group of Linears; ranks of y repeat attention, and ranks of
    x norms and residuals."""

    def __init__(self, shape: ModelShape, machine: Machine, grid: Grid, step: Step) -> None:
        super().__init__(shape, machine, grid, step)
        self.stream_share = grid.x / (grid.x * grid.y)

    def repeats(self, block: BlockShape) -> int:
        return self.grid.y

    def row_dims(self, block: BlockShape, repeat: int) -> tuple[list[int], list[int]]:
        return [ceil_div(block.row.cols, self.grid.x)], [ceil_div(block.row.rows, self.grid.y)]

    def column_dims(self, kind: WeightKind, linears: Sequence[LinearShape]) -> tuple[list[int], list[int]]:
        outer = sum(ceil_div(linear.rows, self.grid.x) for linear in linears)
        return [ceil_div(linears[0].cols, self.grid.y)], [outer]


class AxonnCandidate(Candidate):
    """A candidate with AxoNN's schedule: one communicator over z, gathers a group of weights ahead, averages after
    backward (sync_gradients waits for one all-reduce a parameter)."""

    @cached_property
    def traffic(self) -> Traffic:
        return axonn_traffic(self.job.shape, self.grid, self.step)

    @cached_property
    def compute(self) -> AxonnCompute:
        return AxonnCompute(self.job.shape, self.job.machine, self.grid, self.step)

    @cached_property
    def overlaps(self) -> Overlaps:
        return replace(super().overlaps, apart=False, layer_ahead=False)


def rank_axonn(job: Job, gpus: int) -> GridRanking:
    """Rank all grids of `gpus` ranks by the seconds of AxoNN's schedule, their axes in the engine's own order."""
    impossible = [(grid, why) for grid in grids(gpus) if (why := refusal(job, grid))]
    legal = [grid for grid in grids(gpus) if not refusal(job, grid)]
    entries = [predict_candidate(AxonnCandidate.fewest(job, grid), ORDER) for grid in legal]
    entries.sort(key=lambda entry: (entry.total, str(entry.grid)))
    return GridRanking(
        job=job,
        gpus=gpus,
        ranked=tuple(entry for entry in entries if entry.fits),
        too_big=tuple(entry for entry in entries if not entry.fits),
        impossible=tuple(impossible),
    )
