"""The communication model of AxoNN, equations (1) to (7), as the paper has them: rings, no latency, nothing hidden.

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

from typing import NamedTuple

from hf_axonn.planner.dense import DenseShape
from hf_axonn.planner.machine import Machine
from hf_axonn.planner.shapes import ModelShape
from hf_axonn.topology.axis_order import ORDER
from hf_axonn.topology.grid import Grid


COUNTINGS = ("equations", "script")


class Layer(NamedTuple):
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


def strides(grid: Grid, order: tuple[str, ...] = ORDER) -> dict[str, int]:
    """Ranks between neighbours along each axis, P_i: the product of the sizes of the axes further in."""
    found, stride = {}, 1
    for axis in order:
        found[axis] = stride
        stride *= getattr(grid, axis)
    return found


def layer_times(layer: Layer, tokens: float, grid: Grid, beta: dict[str, float], *, element: int = 2) -> Times:
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


def decoder_layers(shape: ModelShape) -> list[Layer]:
    """A decoder layer as AxoNN shards it: q, k, v in one; o, transposed; up (and gate); down, transposed.

    Raises:
        ValueError: layers differ, or are not one attention and one MLP.
    """
    if not isinstance(shape, DenseShape):
        raise ValueError(
            "the paper's equations are of layers that are alike, of one attention and one MLP; this model has others: "
            "plan with the schedule hf_axonn."
        )
    found = []
    for block in (shape.attention, shape.mlp):
        found.append(Layer(shape.hidden, sum(linear.rows for linear in block.columns)))
        found.append(Layer(block.row.cols, block.row.rows, transposed=True))
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
