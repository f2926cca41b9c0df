"""What the styles of one parallelized model share: its mesh, its options, and the pass that is under way.

It hangs on the model as `model.axonn`. Two models in one process share nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from hf_axonn.config import AxonnConfig
from hf_axonn.grid import Grid, GridMesh
from hf_axonn.layouts import Tokens
from hf_axonn.overlap import GatherAhead, GradientSlot, ReductionQueue, wait_gradient
from hf_axonn.report import Report


class ModelState:
    """The engine's view of one model.

    Attributes:
        mesh: the process groups; `grid` and `coordinates` are short for its own.
        tokens: the batch passing through the decoder layers, None outside of them.
        report: what parallelize did to the model.
        random_seed, random_count: of the `keyed_random` that is open (dropout.py).
        in_forward: whether a pass of the whole model is under way.
        has_head: whether the head is one of ours, which can leave the logits to the loss.
        defer_head: whether it is to do so in this pass (training with labels).
        attention_axes: the axes that divide the heads of attention blocks.
    """

    def __init__(self, mesh: GridMesh, config: AxonnConfig) -> None:
        self.mesh = mesh
        self.config = config
        self.reduce_dtype = getattr(torch, config.reduce_dtype)
        self.gather_ahead = GatherAhead(enabled=config.overlap.all_gather and mesh.size("z") > 1)
        self.reductions = ReductionQueue(enabled=config.overlap.reduce_scatter)
        self.overlap_all_reduce = config.overlap.all_reduce
        self.report: Report | None = None
        self.weights: list[ShardedWeight] = []
        self._weight_of_parameter: dict[int, ShardedWeight] = {}
        self.tokens: Tokens | None = None
        self.in_forward = False
        self.has_head = False
        self.defer_head = False
        self.attention_axes: tuple[str, ...] = ()
        self.random_seed: int | None = None
        self.random_count = 0

    @property
    def grid(self) -> Grid:
        return self.mesh.grid

    @property
    def coordinates(self) -> dict[str, int]:
        return self.mesh.coordinates

    def weight_of(self, module: nn.Module) -> ShardedWeight:
        """The record of `module.weight`, one for all modules that share the parameter."""
        key = id(module._parameters["weight"])
        if key not in self._weight_of_parameter:
            self._weight_of_parameter[key] = ShardedWeight(module, "weight")
            self.weights.append(self._weight_of_parameter[key])
        return self._weight_of_parameter[key]

    def begin_forward(self) -> None:
        """Start a pass: earlier gathers are dropped, and every trained shard gets its node in the new graph."""
        self.gather_ahead.begin_pass()
        for weight in self.weights:
            weight.begin_forward()

    @contextlib.contextmanager
    def passing(self, tokens: Tokens | None) -> Iterator[None]:
        """Set `tokens` for a while: a layer that is recomputed needs those of its own first pass."""
        before, self.tokens = self.tokens, tokens
        try:
            yield
        finally:
            self.tokens = before

    def compute_dtype(self, input_: Tensor) -> torch.dtype:
        """The dtype of matmuls: that of autocast if it is on, else that of the input."""
        device_type = input_.device.type
        if torch.is_autocast_enabled(device_type):
            return torch.get_autocast_dtype(device_type)
        return input_.dtype


class ShardedWeight:
    """One parameter [N, K] that is cut over (y, x, z); the modules that share the parameter share this.

    The node of the shard in the graph is made at the start of the forward pass, so autograd comes to it last, when
    nothing else is left to compute: until then the reductions of its gradient may be under way (ORS).
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = module
        self._name = name
        self._current: Tensor | None = None
        self.slot = GradientSlot()

    @property
    def parameter(self) -> nn.Parameter:
        return self._module._parameters[self._name]

    @property
    def shard(self) -> Tensor:
        """This rank's shard [rows / z, cols] as it now is, outside the graph."""
        return self.parameter.to_local().detach()

    def _in_graph(self) -> Tensor:
        parameter = self.parameter
        if not (torch.is_grad_enabled() and parameter.requires_grad):
            return self.shard
        return wait_gradient(parameter.to_local(), self.slot)

    def begin_forward(self) -> None:
        """Make the node of a new pass; what a broken backward pass left behind is dropped."""
        self.slot.clear()
        self._current = self._in_graph() if torch.is_grad_enabled() else None

    def local(self) -> Tensor:
        """This rank's shard [rows / z, cols], in the graph where gradients are wanted."""
        if self._current is not None and torch.is_grad_enabled():
            return self._current
        return self._in_graph()


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, factor):
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def scale_gradient(value: Tensor, factor: float) -> Tensor:
    """`value` itself; its gradient is multiplied by `factor`."""
    return value if factor == 1 else _ScaleGradient.apply(value, factor)


def shard_placements(kind: str) -> list:
    """Placements on the storage mesh (y, x, z). Kinds: column, row, vocabulary, replicated."""
    return {
        "column": [Shard(1), Shard(0), Shard(0)],
        "row": [Shard(0), Shard(1), Shard(0)],
        "vocabulary": [Shard(0), Shard(0), Shard(0)],
        "replicated": [Replicate(), Replicate(), Replicate()],
    }[kind]


def is_parallelized(model: nn.Module) -> bool:
    """Whether `parallelize` has sharded the model."""
    return isinstance(getattr(model, "axonn", None), ModelState)


def replicated_local(parameter: nn.Parameter, mesh: GridMesh, partial_axes: tuple[str, ...]) -> Tensor:
    """The plain tensor of a replicated parameter, for use on this rank's share of the work. No communication.

    `partial_axes` are the axes of (y, x) on which the ranks do different work, so that each has only a share of the
    gradient. It is multiplied by their number here and averaged over the world by `sync_gradients`: a sum over them,
    and an average over data and z; averaging twice changes nothing.
    """
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return scale_gradient(local, mesh.size(*partial_axes)) if local.requires_grad else local
