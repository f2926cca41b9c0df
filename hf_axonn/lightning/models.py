"""The module of a LightningModule, or of what Fabric sets up, that lies on the grid, and its way there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from hf_axonn.accelerator.prepare import point_to_shards
from hf_axonn.compat.lightning import is_compiled
from hf_axonn.compat.torch import ask_class_for_step
from hf_axonn.config import AxonnConfig
from hf_axonn.distributed.collectives import broadcast_all
from hf_axonn.engine.master_weights import make_masters
from hf_axonn.engine.optimizer_steps import keep_moments_on_host, keep_weights_on_host, refuse_unserved
from hf_axonn.engine.state import is_parallelized, parallel_state
from hf_axonn.parallel.parallelize import parallelize


PRECISIONS = {  # of Lightning -> the dtype that all weights get; None: as they are
    "32-true": None,
    "bf16-mixed": None,
    "16-mixed": None,
    "bf16-true": torch.bfloat16,
    "64-true": torch.float64,
}


def check_precision(precision: Any) -> None:
    """Refuse precision plugins that change modules or gradients in ways that do not fit shards.

    Raises:
        ValueError: it is none of those of PRECISIONS.
    """
    plain = type(precision).__name__ in ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision")
    if not plain or str(precision.precision) not in PRECISIONS:
        raise ValueError(
            f"{type(precision).__name__} with precision {precision.precision!r} is not supported over a grid: use one "
            f"of {', '.join(PRECISIONS)}."
        )


def model_inside(module: nn.Module, *, or_all: bool = False) -> nn.Module:
    """Return the one model of Transformers or PEFT, or that `parallelize` has sharded, in a module.

    Args:
        module: a LightningModule, or what Fabric is given.
        or_all: whether a module without such a model is taken as a whole.
    Raises:
        ValueError: there is none, or more than one.
    """
    found = _outermost(module)
    if not found and or_all:
        return module
    if len(found) == 1:
        return found[0]
    name = type(module).__name__
    if not found:
        raise ValueError(
            f"{name} holds no model of Transformers: make one in __init__ or configure_model, or call "
            "hf_axonn.parallelize(self.net, self.trainer.strategy.grid) in configure_model for any other module."
        )
    classes = ", ".join(type(model).__name__ for model in found)
    raise ValueError(
        f"{name} holds {len(found)} models ({classes}), but a strategy over a grid trains and saves one: keep the "
        "others out of the module (in a list, for instance), read with hf_axonn.from_pretrained(name, grid=...)."
    )


def _outermost(module: nn.Module) -> list[nn.Module]:
    from transformers import PreTrainedModel

    if is_parallelized(module) or isinstance(module, PreTrainedModel) or hasattr(module, "peft_config"):
        return [module]
    found: list[nn.Module] = []
    for child in module.children():
        found += [model for model in _outermost(child) if model not in found]
    return found


@contextlib.contextmanager
def without(module: nn.Module, model: nn.Module) -> Iterator[None]:
    """Take the model out of the module that holds it, while inside."""
    places = [
        (parent, name)
        for parent in module.modules()
        for name, child in parent._modules.items()
        if child is model and parent is not model
    ]
    for parent, name in places:
        parent._modules[name] = None
    try:
        yield
    finally:
        for parent, name in places:
            parent._modules[name] = model


def put_on_grid(
    module: nn.Module,
    config: AxonnConfig,
    device: torch.device,
    *,
    precision: Any,
    convert: Callable[[nn.Module], Any],
    or_all: bool = False,
) -> nn.Module:
    """Shard the model inside of a module, if it is not, and bring the rest to this rank's device. Returns the model.

    Args:
        module: a LightningModule, or what Fabric is given.
        config: of the strategy.
        device: this rank's.
        precision: the precision plugin.
        convert: gives the weights of a module the dtype of the plugin.
        or_all: as of `model_inside`.
    Raises:
        ValueError: what `check_precision`, `model_inside` and `parallelize` refuse; a compiled module; a model that
            lies on another grid, with other settings or in another dtype; trained parameters beside the model.
    Collectives: those of `parallelize`, and `broadcast_all` of what lies beside the model.
    """
    check_precision(precision)
    if is_compiled(module):
        raise ValueError(
            "torch.compile of a whole module is not possible over a grid: omit it, and call compile() of the "
            "sharded model, in on_fit_start or after fabric.setup."
        )
    model = model_inside(module, or_all=or_all)
    with without(module, model):
        if module is not model and config.grid.size > 1:
            _refuse_trained(module)
    state = parallel_state(model)
    if config.grid.size == 1:
        if state is not None:
            raise ValueError(f"the model lies on the grid {state.grid} already, not on one rank.")
        convert(module)
        module.to(device)
        return model
    if state is None:
        convert(module)
        parallelize(model.to(device), config.grid, config=config)
        state = parallel_state(model)
        assert state is not None
    else:
        if state.config != config:
            raise ValueError(
                f"the model was sharded with {state.config}, and the strategy has {config}: shard it with "
                "grid=self.trainer.strategy.grid and config=self.trainer.strategy.config."
            )
        dtype = PRECISIONS[str(precision.precision)]
        dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
        if dtype is not None and dtypes != {dtype}:
            raise ValueError(
                f"precision={precision.precision} needs weights of {dtype}, but the sharded model has "
                f"{', '.join(sorted(map(str, dtypes)))}: read it with from_pretrained(..., dtype={dtype})."
            )
        for buffer in model.buffers():  # as `convert` on one process
            if dtype is not None and buffer.is_floating_point():
                buffer.data = buffer.to(dtype)
    # Where a script calls loss.backward(), as under DistributedDataParallel.
    state.context.averaging.average_by_itself()
    with without(module, model):
        if module is not model:
            convert(module)
            module.to(device)
            broadcast_all([*module.parameters(), *module.buffers()])
    return model


def _refuse_trained(rest: nn.Module) -> None:
    trained = [name for name, parameter in rest.named_parameters() if parameter.requires_grad]
    if trained:
        raise ValueError(
            f"{type(rest).__name__} has {len(trained)} trained parameter(s) beside its model, among them "
            f"{trained[0]}: make them a part of the model before it is sharded, or set requires_grad=False."
        )


def fit_optimizer(optimizer: Optimizer, model: nn.Module, precision: Any) -> None:
    """Let an optimizer train the shards of a model, also one that was made on its full parameters; in mixed precision
    they become float32 (engine/master_weights.py), and with `offload: optimizer` its moments go to host memory, and
    then so do the weights.

    Raises:
        ValueError: its class is refused, or keeps moments that cannot be in host memory; it needs a closure, has taken
            steps on full parameters, or trains nothing of the model.
    """
    refuse_unserved(optimizer)
    if isinstance(optimizer, LBFGS):
        raise ValueError("LBFGS is not supported over a grid: its step flattens full parameters. Use AdamW, for one.")
    point_to_shards(optimizer)
    ask_class_for_step(optimizer)
    mixed = {"bf16-mixed": "bf16", "16-mixed": "fp16"}.get(str(precision), "no")
    make_masters((each for group in optimizer.param_groups for each in group["params"]), mixed_precision=mixed)
    state = parallel_state(model)
    if state is not None and state.config.offload == "optimizer":
        keep_moments_on_host(optimizer, state.grid_mesh.device)
        keep_weights_on_host(state.weights, optimizer, mixed_precision=mixed)
    owned = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in owned for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            f"the optimizer ({type(optimizer).__name__}) has no parameter of the model ({type(model).__name__}): it "
            "would train nothing. Make it of the parameters that the module has in configure_optimizers."
        )
