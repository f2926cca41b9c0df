"""What the styles of one parallelized model share: its mesh, its options, and the pass that is under way.

It hangs on the model as `model.axonn`. Two models in one process share nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_axonn.config import AxonnConfig
from hf_axonn.distributed.mesh import GridMesh
from hf_axonn.engine.activation_layouts import Tokens
from hf_axonn.engine.gather_cache import GatherCache
from hf_axonn.engine.linears import is_conv1d
from hf_axonn.engine.matmul_tuning import Matmul, MatmulTuner, plain
from hf_axonn.engine.overlap import (
    GatherAhead,
    GradientSchedule,
    GradientSlot,
    ReductionQueue,
    in_backward,
    wait_gradient,
)
from hf_axonn.engine.report import Report
from hf_axonn.topology.grid import Grid


class ModelState:
    """The engine's view of one model.

    Attributes:
        mesh: the process groups; `grid` and `coordinates` are short for its own.
        tokens: the batch passing through the decoder layers, None outside of them.
        tuner: chooses operand layouts, None where that is off; `matmul` is what products are computed with.
        report: what parallelize did to the model.
        styles: of modules whose parameters others may read (styles.Reading).
        random_seed, random_count: of the `keyed_random` that is open (layers/dropout.py).
        in_forward: whether a pass of the whole model is under way.
        wants_gradients: whether the pass that began last did so with gradients on.
        no_sync: whether passes that begin now leave their gradients unaveraged (`accelerator.no_sync`).
        averages: whether the gradients of the pass that began last are to be averaged.
        features: H where the residual stream of the layers has the feature layout, else 0.
        has_head: whether the head is one of ours, which can leave the logits to the loss.
        defer_head: whether it is to do so in this pass (training with labels).
        attention_axes: the axes that divide the heads of attention blocks.
        makers: what gives a copy of a module the styles of the module itself; None of one that cannot be copied.
        axes_of, whole: on which of (x, y) ranks do different work inside of a module, and which modules get the whole
            sequence, by name.
        readings: every styles.Reading of the model.
        blocks: the blocks.Block of each entry.
        adapted: PEFT's modules that have their styles (adapters/install.py).
    """

    def __init__(self, mesh: GridMesh, config: AxonnConfig) -> None:
        self.mesh = mesh
        self.config = config
        self.reduce_dtype = getattr(torch, config.reduce_dtype)
        self.kept = GatherCache()
        ahead = config.overlap.all_gather and mesh.size("z") > 1
        self.gather_ahead = GatherAhead(enabled=ahead, needless=self.kept.__contains__)
        # Two groups behind, as many as `reductions` lets be in flight; without z there is no reduction to hide.
        self.delivery = GradientSchedule(distance=2 if mesh.size("z") > 1 else 0)
        self.reductions = ReductionQueue(enabled=config.overlap.reduce_scatter)
        self.overlap_all_reduce = config.overlap.all_reduce
        self.tuner = MatmulTuner() if config.tune_matmuls else None
        self.matmul: Matmul = self.tuner or plain
        self.report: Report | None = None
        self.weights: list[ShardedWeight] = []
        self._weight_of_parameter: dict[int, ShardedWeight] = {}
        self.styles: dict[nn.Module, object] = {}
        self.tokens: Tokens | None = None
        self.in_forward = False
        self.wants_gradients = False
        self.no_sync = False
        self.averages = True
        self.features = 0
        self.has_head = False
        self.defer_head = False
        self.attention_axes: tuple[str, ...] = ()
        self.makers: dict[nn.Module, list[Callable[[nn.Module], object]] | None] = {}
        self.axes_of: dict[str, tuple[str, ...]] = {}
        self.whole: set[str] = set()
        self.readings: list = []
        self.blocks: dict[nn.Module, object] = {}
        self.adapted: WeakSet[nn.Module] = WeakSet()
        self.random_seed: int | None = None
        self.random_count = 0

    @property
    def grid(self) -> Grid:
        return self.mesh.grid

    @property
    def coordinates(self) -> dict[str, int]:
        return self.mesh.coordinates

    def __deepcopy__(self, memo: dict):
        raise ValueError(
            "a model that is sharded over a grid cannot be copied with copy.deepcopy: load it a second time with "
            "hf_axonn.from_pretrained, or copy it before hf_axonn.parallelize."
        )

    def give(self, module: nn.Module, *makers: Callable[[nn.Module], object]) -> None:
        """Install styles on a module, and remember how for its copies."""
        for make in makers:
            make(module)
        if self.makers.setdefault(module, []) is not None:
            self.makers[module] += makers

    def axes(self, name: str) -> tuple[str, ...]:
        """On which of (x, y) ranks do different work inside of the module of this name: what is said of it, or of the
        innermost one around it, and nowhere where nothing is said."""
        parts = name.split(".")
        around = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        return next((self.axes_of[its] for its in around if its in self.axes_of), ())

    def weight_of(self, module: nn.Module, name: str = "weight", *, flat: bool = False) -> ShardedWeight:
        """The record of one parameter of a module, one for all modules that share the parameter."""
        key = id(module._parameters[name])
        if key not in self._weight_of_parameter:
            self._weight_of_parameter[key] = ShardedWeight(module, name, transposed=is_conv1d(module), flat=flat)
            self.weights.append(self._weight_of_parameter[key])
        return self._weight_of_parameter[key]

    def begin_forward(self) -> None:
        """Start a pass: earlier gathers are dropped, and trained shards get their nodes in the new graph."""
        self.wants_gradients = torch.is_grad_enabled()
        if self.wants_gradients:
            self.averages = not self.no_sync
        self.gather_ahead.begin_pass()
        self.kept.begin_pass()
        for weight in self.weights:
            weight.begin_forward()
        if self.wants_gradients:
            self.delivery.begin_pass(self.weights)

    def enter(self, group: list[ShardedWeight]) -> None:
        """A forward pass has come to these weights."""
        if torch.is_grad_enabled() and not in_backward():
            self.delivery.enter(group)

    def choose_kept(self, names: dict[nn.Module, str]) -> None:
        """Mark the weights that `keep_gathered` keeps from forward to backward; `names` are those of all modules.

        A layer is what stands in the outermost module list. Of n layers the last are kept: backward comes to them
        first, so they are kept for the shortest time.

        Raises:
            ValueError: keep_gathered is a number and the model has no layers.
        """
        keep = self.config.keep_gathered
        layers = [_layer_of(names.get(weight.module, "")) for weight in self.weights]
        if keep in ("all", "none", 0):
            chosen = set(layers) if keep == "all" else set()
        else:
            order = [layer for layer in dict.fromkeys(map(_layer_of, names.values())) if layer in layers and layer]
            if not order:
                raise ValueError(
                    f"keep_gathered is {keep}, a number of layers, but this model has no list of layers whose weights "
                    "are sharded: write all or none."
                )
            chosen = set(order[-keep:])
        for weight, layer in zip(self.weights, layers, strict=True):
            weight.keep = layer in chosen

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

    A `transposed` one is stored as [K, N] (Transformers' Conv1D) and seen as [N, K], a `flat` one as [N, ...].

    The node of the shard in the graph is made some way ahead of its use (`GradientSchedule`), so autograd comes to it
    some way behind: until then the reduction of its gradient may be under way (ORS).

    Attributes:
        keep: whether the gathered weight is kept from forward to backward.
    """

    def __init__(self, module: nn.Module, name: str, *, transposed: bool = False, flat: bool = False) -> None:
        self.module = module
        self.keep = False
        self._name = name
        self._transposed = transposed
        self._flat = flat
        self._current: Tensor | None = None
        self.slot = GradientSlot()

    @property
    def parameter(self) -> nn.Parameter:
        return self.module._parameters[self._name]

    @property
    def shard(self) -> Tensor:
        """This rank's shard [rows / z, cols] as it now is, outside the graph."""
        return self._view(self.parameter.to_local()).detach()

    def _view(self, local: Tensor) -> Tensor:
        local = local.t() if self._transposed else local
        return local.flatten(1) if self._flat else local

    def _in_graph(self) -> Tensor:
        parameter = self.parameter
        if not (torch.is_grad_enabled() and parameter.requires_grad):
            return self.shard
        return wait_gradient(self._view(parameter.to_local()), self.slot)

    def begin_forward(self) -> None:
        """Forget the pass before; what a broken backward pass left behind is dropped."""
        self.slot.clear()
        self._current = None

    def make_node(self) -> None:
        """Make the node of this pass, if that has not been done."""
        if self._current is None and torch.is_grad_enabled():
            self._current = self._in_graph()

    def local(self) -> Tensor:
        """This rank's shard [rows / z, cols], in the graph where gradients are wanted."""
        if not torch.is_grad_enabled():
            return self.shard
        self.make_node()
        return self._current


def _layer_of(name: str) -> str:
    """A module's name up to its first number, as in model.layers.3; empty if it has none."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


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


def parallel_state(model: object) -> ModelState | None:
    """How a parallelized model lies on the grid, also inside of wrappers (PEFT, accelerate); None for anything else.

    `parallel_state(model).grid` is the grid, `.report` says what was sharded, and what was not and why. No
    communication.
    """
    if not isinstance(model, nn.Module):
        return None
    for module in model.modules():
        if is_parallelized(module):
            return module.axonn
    return None
