"""A column and a row layer on a grid of processes: the algorithm of hf_axonn, in plain torch.distributed.

    torchrun --nproc-per-node 8 training_scripts/one_layer.py      x=2, y=2, z=2; 16 ranks: data=2 besides

It computes an MLP, output = gelu(input @ column.T) @ row.T, forward and backward, and compares each result with that
of one process. M = tokens, H = hidden size, F = intermediate size; H_y: the dim is sharded over y.

                column layer                                 row layer: x and y are swapped
    forward     W[F_x,H_y] = all_gather_z(W_shard)           W[H_y,F_x] = all_gather_z(W_shard)
                O[M_z,F_x] = all_reduce_y(I[M_z,H_y] @ W.T)  O[M_z,H_y] = all_reduce_x(I[M_z,F_x] @ W.T)
    backward    W[F_x,H_y] = all_gather_z(W_shard)           W[H_y,F_x] = all_gather_z(W_shard)
                dI[M_z,H_y] = all_reduce_x(dO @ W)           dI[M_z,F_x] = all_reduce_y(dO @ W)
                dW_shard = reduce_scatter_z(dO.T @ I)        dW_shard = reduce_scatter_z(dO.T @ I)

Each axis has one job: each product sums over a dim that one axis shards, so the ranks of that axis add up their parts.
The row layer takes what the column layer returns, and returns what the next column layer takes: nothing is rearranged
between them. `data` shards tokens, as z does, but no weights: their gradients are added up over it at the end.

Source: AxoNN (arXiv 2502.08145), Algorithm 1. hf_axonn/engine/matmul3d.py is the same for real models.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import gelu


BOUND = 1e-10  # of an error in float64; sums in another order differ by about 1e-13
# Tensor -> the axes that shard its rows, the axes that shard its columns.
LAYOUTS = {
    "input": (("data", "z"), ("y",)),
    "column": (("x", "z"), ("y",)),
    "hidden": (("data", "z"), ("x",)),
    "row": (("y", "z"), ("x",)),
    "output": (("data", "z"), ("y",)),
}
RESULTS = ("hidden", "output", "grad_input", "grad_column", "grad_row")  # a gradient has the layout of its tensor


class Axis:
    """A group of p ranks that differ in one coordinate. Counts the bytes that this rank sends in ring algorithms."""

    sent: Counter[str] = Counter()

    def __init__(self, mesh: DeviceMesh, name: str) -> None:
        self.name, self.group = name, mesh.get_group(name)
        self.size, self.coordinate = self.group.size(), self.group.rank()

    def all_gather(self, part: Tensor) -> Tensor:
        """[n, ...] -> [p * n, ...], the parts of all ranks one below the other."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part, group=self.group)
        self.sent[f"all-gather over {self.name}"] += (self.size - 1) * part.nbytes
        return torch.cat(parts)

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        """[p * n, ...] -> [n, ...], this rank's part of the sum over all ranks."""
        parts = list(partial.chunk(self.size))
        total = torch.empty_like(parts[0])
        dist.reduce_scatter(total, parts, group=self.group)
        self.sent[f"reduce-scatter over {self.name}"] += (self.size - 1) * total.nbytes
        return total

    def all_reduce(self, partial: Tensor) -> Tensor:
        """[...] -> [...], the sum over all ranks, in place."""
        dist.all_reduce(partial, group=self.group)
        self.sent[f"all-reduce over {self.name}"] += 2 * (self.size - 1) * partial.nbytes // self.size
        return partial


def shard(tensor: Tensor, name: str, grid: dict[str, Axis]) -> Tensor:
    """Return the part of a whole tensor that this rank holds, by its layout. No communication."""
    for dim, axes in enumerate(LAYOUTS[name.removeprefix("grad_")]):
        for axis in axes:
            tensor = tensor.chunk(grid[axis].size, dim)[grid[axis].coordinate]
    return tensor.contiguous()


class ShardedMatmul(torch.autograd.Function):
    """input @ weight.T, where the weight is gathered over z. Each product sums over a dim that another axis shards."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight_shard: Tensor, layer: ColumnParallel) -> Tensor:
        ctx.save_for_backward(input_, weight_shard)  # the gathered weight is freed
        ctx.layer = layer
        weight = layer.z.all_gather(weight_shard)
        return layer.in_axis.all_reduce(input_ @ weight.T)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        (input_, weight_shard), layer = ctx.saved_tensors, ctx.layer
        weight = layer.z.all_gather(weight_shard)
        grad_input = layer.out_axis.all_reduce(grad_output @ weight)
        # A sum over the tokens of all ranks of z. hf_axonn divides it by z, because losses are means over tokens.
        grad_weight = layer.z.reduce_scatter(grad_output.T @ input_)
        return grad_input, grad_weight, None


class ColumnParallel(torch.nn.Module):
    """A Linear without bias. Its output features are sharded over x, its input features over y."""

    name = "column"

    def __init__(self, weight: Tensor, grid: dict[str, Axis]) -> None:
        super().__init__()
        (out_axis, _), (in_axis,) = LAYOUTS[self.name]
        self.out_axis, self.in_axis, self.z = grid[out_axis], grid[in_axis], grid["z"]
        self.weight = torch.nn.Parameter(shard(weight, self.name, grid))

    def forward(self, input_: Tensor) -> Tensor:
        """[M_z, H_y] -> [M_z, F_x]. All-gather over z, all-reduce over y; in backward, all-reduce over x instead."""
        output: Tensor = ShardedMatmul.apply(input_, self.weight, self)  # type: ignore[no-untyped-call]
        return output


class RowParallel(ColumnParallel):
    """The same with x and y swapped: [M_z, F_x] -> [M_z, H_y]."""

    name = "row"


def make_grid(world_size: int) -> dict[str, Axis]:
    """Deal the prime factors of the world size to x, y, z and data in turn. Ranks vary fastest along y, then x."""
    sizes = {"data": 1, "z": 1, "x": 1, "y": 1}
    axes = itertools.cycle(("x", "y", "z", "data"))
    while (left := world_size // math.prod(sizes.values())) > 1:
        sizes[next(axes)] *= next(factor for factor in range(2, left + 1) if left % factor == 0)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return {name: Axis(mesh, name) for name in sizes}


def run_whole(whole: dict[str, Tensor], grad_output: Tensor) -> dict[str, Tensor]:
    """Run forward and backward as one process does. Return the results and the gradients."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in whole.items()}
    hidden = leaves["input"] @ leaves["column"].T
    output = gelu(hidden) @ leaves["row"].T
    gradients = torch.autograd.grad(output, [*leaves.values()], grad_output)
    return dict(zip(RESULTS, (hidden, output, *gradients), strict=True))


def run_sharded(whole: dict[str, Tensor], grad_output: Tensor, grid: dict[str, Axis]) -> dict[str, Tensor]:
    """Run the same on this rank's shards of the same tensors. Return its shards of the same results."""
    input_ = shard(whole["input"], "input", grid).requires_grad_()
    column, row = ColumnParallel(whole["column"], grid), RowParallel(whole["row"], grid)
    hidden = column(input_)
    output = row(gelu(hidden))  # each rank has all of a sum over features, so gelu needs no communication
    leaves = [input_, column.weight, row.weight]
    gradients = torch.autograd.grad(output, leaves, shard(grad_output, "output", grid))
    for grad_weight in gradients[1:]:
        grid["data"].all_reduce(grad_weight)
    return dict(zip(RESULTS, (hidden, output, *gradients), strict=True))


def main() -> int:
    """Run both and compare them on every rank. Return the exit code: 1 if they differ anywhere."""
    world_size = dist.get_world_size()
    grid = make_grid(world_size)
    torch.manual_seed(0)  # every rank draws the same tensors
    tokens, features, inner = 2 * world_size, 3 * world_size, 4 * world_size  # sizes that the axes divide
    shapes = {"input": (tokens, features), "column": (inner, features), "row": (features, inner)}
    whole = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    grad_output = torch.randn(tokens, features, dtype=torch.float64)
    expected = run_whole(whole, grad_output)
    results = run_sharded(whole, grad_output, grid)
    differences = [results[name] - shard(expected[name], name, grid) for name in RESULTS]
    errors = torch.stack([difference.abs().max().nan_to_num(nan=math.inf) for difference in differences])
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)

    if dist.get_rank() == 0:
        print(f"{world_size} ranks:", ", ".join(f"{name}={axis.size}" for name, axis in grid.items()))
        print("Tensors, whole -> on rank 0:")
        for name, tensor in (whole | expected).items():
            rows, columns = (" and ".join(axes) for axes in LAYOUTS[name.removeprefix("grad_")])
            sizes = f"{[*tensor.shape]} -> {[*shard(tensor, name, grid).shape]}"
            print(f"    {name:<12}{sizes:<22}rows over {rows}, columns over {columns}")
        print("Bytes that rank 0 sends:")
        for collective, sent in sorted(Axis.sent.items()):
            print(f"    {collective:<22}{sent:>8}")
        print(f"Largest errors against one process, in float64; at most {BOUND} is equal:")
        for name, error in zip(RESULTS, errors.tolist(), strict=True):
            print(f"    {name:<12}{error:.1e}  {'equal' if error <= BOUND else 'WRONG'}")
    return int(errors.max() > BOUND)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    code = main()
    dist.destroy_process_group()
    sys.exit(code)
