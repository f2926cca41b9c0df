"""The layout of one parallelized model on the grid, as far as products, layers and losses need it.

Two models in one process share nothing. What lives for one pass is the `context` (context.py); the modules of the
model and what `parallelize` has installed on them are known to the `ShardedModel` (parallel/sharded_model.py), which
is the state that hangs on the model as `model.axonn`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hf_axonn.config import KEPT, AxonnConfig
from hf_axonn.distributed.mesh import GridMesh
from hf_axonn.engine.activation_layouts import Tokens
from hf_axonn.engine.context import PassContext
from hf_axonn.engine.four_bit import FourBitWeight
from hf_axonn.engine.gather_cache import GatherCache
from hf_axonn.engine.linears import is_conv1d
from hf_axonn.engine.matmul_tuning import Matmul, MatmulTuner, plain
from hf_axonn.engine.report import Report
from hf_axonn.engine.sharded_weight import ShardedWeight
from hf_axonn.engine.stage_tensors import Counted
from hf_axonn.topology.grid import Grid


class ParallelState:
    """The layout of one model on the grid.

    Args:
        mesh: the process groups.
        config: the settings that the model is parallelized with.
        report: what `parallelize` did to the model.
        features: H where the residual stream has the feature layout, else 0.
        copies_first: whether copies of the residual stream stand before the batch (activation_layouts.py).
        names: of the parameters of the whole model before stages divided it, in order.

    Attributes:
        grid_mesh: the process groups; `grid`, `coordinates` and `mesh` are short for its own, `gather_cache` for the
            context's.
        reduce_dtype: the dtype in which weight gradients travel.
        residual_dtype: of the residual stream between the layers; None: as the model has it.
        widens: whether products of 16-bit matrices can be written in float32, as on CUDA (`product_dtype`).
        keeps_recomputed: whether a layer that runs again in backward keeps what it gathers then (`keep_gathered`).
        overlap_all_reduce: whether the reduction of an input's gradient runs beside the weight gradients (OAR).
        tuner: chooses operand layouts; None where that is off.
        matmul: computes the products: the tuner, or a plain matmul.
        context: the pass that is under way.
        weights: the sharded weights, in the order of their modules (`weight_of`).
        has_head: whether the head is sharded and can leave the logits to the loss or a reader (`set_head`).
        four_bit: whether there are weights of 4 bits.
        sharded_layers: module -> what runs in place of its forward (`add_layer`).
        compile_options: of the code between sharded layers that is compiled (`compile_with`); None if it is eager.
        elsewhere: what only other stages have, by name (`set_elsewhere`).
    """

    def __init__(
        self,
        mesh: GridMesh,
        config: AxonnConfig,
        *,
        report: Report | None = None,
        features: int = 0,
        copies_first: bool = False,
        names: Sequence[str] = (),
    ) -> None:
        self.grid_mesh = mesh
        self.config = config
        self.report = report or Report(str(mesh.grid), "")
        self.features = features
        self.copies_first = copies_first
        self.names = names
        self.reduce_dtype = getattr(torch, config.reduce_dtype)
        self.residual_dtype = None if config.residual_dtype == "model" else getattr(torch, config.residual_dtype)
        self.widens = mesh.device_type == "cuda"  # the only one of which torch.mm takes out_dtype
        self.keeps_recomputed = config.keep_gathered == "recomputed"
        self.overlap_all_reduce = config.overlap.all_reduce
        self.tuner = MatmulTuner() if config.tune_matmuls else None
        self.matmul: Matmul = self.tuner or plain
        self.has_head = False
        self.context = PassContext(config, mesh)
        self.weights: list[ShardedWeight] = []
        self._weight_of_parameter: dict[int, ShardedWeight] = {}
        self.sharded_layers: dict[nn.Module, object] = {}
        self.four_bit = False
        self.compile_options: dict[str, Any] | None = None
        self._compiled: dict[Callable, Callable] = {}
        self.elsewhere: dict[str, Counted] = {}
        self._zeros: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def tokens_of(self, hidden: Tensor) -> Tokens:
        """Return the batch whose hidden states [B, S, H], or copies of them, come to the decoder layers, and their
        layout there."""
        batch, seq = hidden.shape[-3:-1] if self.copies_first else hidden.shape[:2]
        # One rank replicates it, too.
        sharded = self.grid_mesh.size("x", "y") > 1 and (torch.is_grad_enabled() or seq > 1)
        features = self.features if sharded else 0
        return Tokens(batch, seq, sharded=sharded, features=features, copies_first=self.copies_first)

    @property
    def grid(self) -> Grid:
        return self.grid_mesh.grid

    @property
    def coordinates(self) -> dict[str, int]:
        return self.grid_mesh.coordinates

    @property
    def mesh(self) -> DeviceMesh:
        """The grid as torch's DeviceMesh, with the names of its axes, over the process groups that training uses."""
        return self.grid_mesh.named_mesh

    @property
    def gather_cache(self) -> GatherCache:
        return self.context.gather_cache

    @property
    def travels_over_z(self) -> bool:
        """Return whether every pass needs all ranks of z, even where gathered weights are kept: tokens travel to
        experts there."""
        return self.grid.z > 1 and any(weight.stays for weight in self.weights)

    def __deepcopy__(self, memo: dict):
        raise ValueError(
            "a model that is sharded over a grid cannot be copied with copy.deepcopy: load it a second time with "
            "hf_axonn.from_pretrained, or copy it before hf_axonn.parallelize. For an average of the weights, as of "
            "AveragedModel, clone the parameters."
        )

    def add_layer(self, module: nn.Module, layer: object) -> None:
        """Note what runs in place of a module's forward (layers/)."""
        self.sharded_layers[module] = layer

    def check_new(self, parameters: Sequence[nn.Parameter]) -> None:
        """Check trained parameters that were not sharded with the model, and came into it later."""

    def set_elsewhere(self, counts: dict[str, Counted]) -> None:
        """Note what only other stages of a pipeline have, by name."""
        self.elsewhere = counts

    def weight_of(
        self, module: nn.Module, name: str = "weight", *, flat: bool = False, stays: bool = False
    ) -> ShardedWeight:
        """Return the record of one parameter of a module, one for all modules that share the parameter."""
        parameter = module._parameters[name]
        weight = self._weight_of_parameter.get(id(parameter))
        if weight is not None and weight.parameter is parameter:  # not one that is gone, whose id it has
            weight.share_with(module, name)
        else:
            if hasattr(parameter, "four_bit"):
                weight = FourBitWeight(module, name, self.grid_mesh)
                self.four_bit = True
            else:
                weight = ShardedWeight(module, name, transposed=is_conv1d(module), flat=flat, stays=stays)
            self._weight_of_parameter[id(parameter)] = weight
            self.weights.append(weight)
        if isinstance(module, nn.Embedding):
            weight.note_look_ups()
        return weight

    def plan_gathers(self, names: dict[nn.Module, str]) -> None:
        """Mark the weights that `keep_gathered` keeps from forward to backward, and set how much is gathered ahead
        (`prefetch`). `names` are those of all modules.

        A layer is what stands in the outermost module list. Of n layers the last are kept: backward comes to them
        first, so they are kept for the shortest time.

        Raises:
            ValueError: keep_gathered is a number and the model has no layers.
        """
        keep = self.config.keep_gathered
        layers = [_layer_of(names.get(weight.module, "")) for weight in self.weights]
        if keep in (*KEPT, 0):
            chosen = set(layers) if keep == "all" else set()
        else:
            order = [layer for layer in dict.fromkeys(map(_layer_of, names.values())) if layer in layers and layer]
            if not order:
                raise ValueError(
                    f"keep_gathered is {keep}, a number of layers, but this model has no list of layers whose weights "
                    "are sharded: write all or none."
                )
            chosen = set(order[-keep:])
        sizes: Counter[str] = Counter()
        for weight, layer in zip(self.weights, layers, strict=True):
            weight.keep_gathered = layer in chosen
            if layer and not weight.stays:
                sizes[layer] += weight.elements
        ahead, prefetch = self.context.gather_ahead, self.config.prefetch
        if isinstance(prefetch, int):
            ahead.set_bundle_size(prefetch * self.grid_mesh.size("x", "y"), lambda group: group.bytes)
        else:
            ahead.set_bundle_size(max(sizes.values(), default=1), lambda group: group.elements)

    def set_head(self, *, defers: bool) -> None:
        """Note whether the head can leave its logits to the loss or a reader: not where an adapter changes them."""
        self.has_head = defers

    def compile_with(self, options: dict[str, Any]) -> None:
        """Compile the code between sharded layers from now on, with these options of `torch.compile`."""
        self.compile_options = options

    def compile_function(self, function: Callable) -> Callable:
        """Return `function`, which communicates nothing, compiled in the passes in which the model's code is."""
        if self.compile_options is None or not self.context.wants_gradients:
            return function
        if function not in self._compiled:
            self._compiled[function] = torch.compile(function, **self.compile_options)
        return self._compiled[function]

    def zero(self, like: Tensor) -> Tensor:
        """Return a zero of the dtype and on the device of `like`, for gradients that are not read; always the same."""
        key = like.dtype, like.device
        if key not in self._zeros:
            self._zeros[key] = like.new_zeros(())
        return self._zeros[key]

    @staticmethod
    def requested_dtype(input_: Tensor, weights: Sequence[ShardedWeight]) -> torch.dtype | None:
        """The dtype in which weights of 4 bits are to be multiplied; None under autocast, and where they name none or
        several. A result is then cast back to the dtype of the input, as bitsandbytes does."""
        dtypes = {weight.compute_dtype for weight in weights}
        return dtypes.pop() if len(dtypes) == 1 and not torch.is_autocast_enabled(input_.device.type) else None

    @classmethod
    def compute_dtype(cls, input_: Tensor, weights: Sequence[ShardedWeight] = ()) -> torch.dtype:
        """The dtype of matmuls: that of autocast if it is on, else the `requested_dtype`, else that of the input.

        Autocast leaves float64 as it is.
        """
        device_type = input_.device.type
        if torch.is_autocast_enabled(device_type) and input_.dtype != torch.float64:
            return torch.get_autocast_dtype(device_type)
        return (cls.requested_dtype(input_, weights) if weights else None) or input_.dtype

    def as_residual(self, hidden: Tensor) -> Tensor:
        """Hidden states between two layers, in the dtype of the residual stream. No communication.

        Without gradients nothing is saved: then a pass without autocast has the precision of the model.

        Raises:
            ValueError: gradients are on, and the computation is not in the dtype that the stream is to have.
        """
        dtype = self.residual_dtype
        if dtype is None or hidden.dtype == dtype:
            return hidden
        if self.compute_dtype(hidden) == dtype:
            return hidden.to(dtype)
        if not torch.is_grad_enabled():
            return hidden
        raise ValueError(
            f"residual_dtype is {dtype}, but the model computes in {self.compute_dtype(hidden)}, and would lose that "
            "precision between its layers: train under autocast in bfloat16 (mixed_precision: bf16), or omit "
            "residual_dtype."
        )

    def product_dtype(self, factors: torch.dtype, result: torch.dtype) -> torch.dtype:
        """The dtype in which a product is written whose result is used as `result`.

        That of its factors, which rounds to 16 bits; on CUDA float32 where the result is to be wider than 16 bits.
        """
        return torch.float32 if self.widens and factors.itemsize == 2 < result.itemsize else factors


def _layer_of(name: str) -> str:
    """A module's name up to its first number, as in model.layers.3; empty if it has none."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def is_parallelized(model: nn.Module) -> bool:
    """Return whether `parallelize` has sharded the model."""
    return isinstance(getattr(model, "axonn", None), ParallelState)


def parallel_state(model: object) -> ParallelState | None:
    """Return the layout of a parallelized model, also inside of wrappers (PEFT, accelerate); None for anything else.

    `parallel_state(model).grid` is the grid, `.report` says what was sharded, and what was not and why. No
    communication.
    """
    if not isinstance(model, nn.Module):
        return None
    for module in model.modules():
        if is_parallelized(module):
            return module.axonn
    return None
