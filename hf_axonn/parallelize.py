"""The one visible step: a plain Hugging Face model becomes a sharded one.

    model, report = parallelize(model, grid)           a model in memory, in place
    model = from_pretrained(name, grid=grid)           every rank reads only its own slices from disk

Parameters become DTensors on the storage mesh (y, x, z); modules get the forward of their style. This is the only
place where a model is changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hf_axonn import compat
from hf_axonn.checkpoint import check_complete, is_sharded_checkpoint
from hf_axonn.config import AxonnConfig
from hf_axonn.feature_layout import choose_layout
from hf_axonn.grid import Grid, grid_mesh
from hf_axonn.install import install_styles, shard_parameters, weight_kinds
from hf_axonn.lora import check_adapters
from hf_axonn.plans import plan_for
from hf_axonn.report import Report
from hf_axonn.state import ModelState, is_parallelized


def parallelize(model: nn.Module, grid: Grid, *, config: AxonnConfig | None = None) -> tuple[nn.Module, Report]:
    """Shard a model over a grid, in place.

    Every rank must call it with the same model class and grid. The weights of rank 0 are the ones that count, as in
    DistributedDataParallel: they are broadcast while they are cut. A model on the meta device is only prepared, its
    weights are for a loader to read. On a grid of one rank the model is left untouched.

    Args:
        model: a Transformers model, with or without PEFT adapters, or any nn.Module.
        grid: sizes of the axes; their product is the number of ranks.
        config: overlap switches and reduce_dtype; None takes those of the launch file if it has this grid.
    Returns:
        (the model itself, a report of what was sharded and what was not and why).
    Raises:
        ValueError: the grid is not the size of the world, the model is sharded already, quantized, or has adapters
            that cannot be sharded.
        RuntimeError: torch.distributed is not initialized.
    Collectives: creation of the process groups and one broadcast of each parameter and buffer, over the world.
    """
    config = config or _launched_config(grid)
    if grid.size == 1:
        return model, Report(str(grid), "one rank, the model is untouched")
    inner = compat.without_peft(model)
    if is_parallelized(inner):
        raise ValueError(f"this model is sharded over the grid {inner.axonn.grid} already.")
    if getattr(inner, "is_quantized", False) or getattr(inner, "hf_quantizer", None) is not None:
        raise ValueError("a quantized model cannot be sharded over a grid: load it without quantization_config.")
    check_adapters(model)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    device_type = compat.default_device_type() if device.type == "meta" else device.type
    state = ModelState(grid_mesh(grid, device_type), config)
    compat.quiet_redistribution()
    plan = plan_for(inner)
    layout = choose_layout(inner, plan, y=grid.y, wanted=config.layout)
    report = Report(str(grid), plan.summary(), layout.reason)
    kinds = weight_kinds(inner, plan)
    shard_parameters(inner, kinds, state)
    install_styles(inner, plan, kinds, state, report, layout)
    state.report = report
    inner.axonn = state
    return model, report


@contextlib.contextmanager
def auto_parallelize(grid: Grid, *, config: AxonnConfig | None = None) -> Iterator[None]:
    """AxoNN's easy API: the modules that are built inside are sharded when the block ends.

        with auto_parallelize(grid):
            net = MyModule()

    Every outermost module with parameters is given to `parallelize`: each Linear is cut on its own, takes whole
    activations and returns whole activations, so the module's code needs no change. After backward call
    `sync_gradients(net)`. Ranks with the same (data, z) must get the same inputs.

    Args:
        grid: sizes of the axes; their product is the number of ranks.
        config: overlap switches and reduce_dtype; None takes those of the launch file if it has this grid.
    Raises:
        As `parallelize`.
    Collectives: those of `parallelize`, for each such module.
    """
    built: list[nn.Module] = []
    initialize = nn.Module.__init__

    def recording(module: nn.Module, *args, **kwargs) -> None:
        initialize(module, *args, **kwargs)
        built.append(module)

    nn.Module.__init__ = recording
    try:
        yield
    finally:
        nn.Module.__init__ = initialize
    inside = {id(child) for module in built for child in module.modules() if child is not module}
    for module in built:
        if id(module) not in inside and any(True for _ in module.parameters()):
            parallelize(module, grid, config=config)


def _launched_config(grid: Grid) -> AxonnConfig:
    """The settings of the launch file if it launched this grid, else the defaults."""
    launched = AxonnConfig.from_env()
    return launched if launched is not None and launched.grid == grid else AxonnConfig(grid=grid)


def from_pretrained(
    name_or_path: str, *, grid: Grid, config: AxonnConfig | None = None, auto_class: type | None = None, **kwargs: Any
) -> nn.Module:
    """Load a causal LM so that every rank reads only its own slices of the weights.

    The model is built on the meta device, parallelized, and filled by Transformers' own loader, from an ordinary HF
    directory, the hub, or a sharded checkpoint of any grid. `model.axonn.report` says what was sharded.

    Args:
        name_or_path: what `AutoModelForCausalLM.from_pretrained` takes.
        grid: sizes of the axes. A grid of one rank gives the plain model.
        config: overlap switches and reduce_dtype; None takes those of the launch file if it has this grid.
        auto_class: AutoModelForCausalLM if None.
        kwargs: for `from_pretrained`: dtype, attn_implementation, revision and so on.
    Returns:
        The model, in eval mode as from_pretrained leaves it, on this rank's device.
    Raises:
        ValueError: GGUF or quantized weights, device_map, tp_plan or ignore_mismatched_sizes among the arguments, an
            incomplete sharded checkpoint, PEFT adapters in the directory, or weights that the checkpoint lacks (they
            would be filled with numbers that differ from rank to rank).
    Collectives: creation of the process groups; those of torch.distributed.checkpoint for a sharded checkpoint.
    """
    from transformers import AutoModelForCausalLM

    auto_class = auto_class or AutoModelForCausalLM
    refused = [
        key for key in ("device_map", "tp_plan", "tp_size", "distributed_config") if kwargs.get(key) is not None
    ]
    if refused:
        raise ValueError(f"{', '.join(refused)}: the grid decides where weights lie; leave {refused[0]} away.")
    if grid.size == 1:
        return auto_class.from_pretrained(name_or_path, **kwargs)
    if kwargs.get("gguf_file") or kwargs.get("quantization_config") is not None:
        raise ValueError(
            "GGUF and quantized weights cannot be read slice by slice: convert them once, with "
            "AutoModelForCausalLM.from_pretrained(..., gguf_file=..., quantization_config=GgufConfig(dequantize=True))"
            ".save_pretrained(DIR) on one process, and load DIR."
        )
    if kwargs.get("ignore_mismatched_sizes"):
        raise ValueError(
            "ignore_mismatched_sizes: every rank would fill such weights with other numbers; leave it away."
        )
    if is_sharded_checkpoint(name_or_path):
        check_complete(name_or_path)
    device = torch.device(compat.default_device_type())
    if device.type != "cpu":
        kwargs["device_map"] = {"": torch.get_device_module(device).current_device()}

    def distribute(model: nn.Module) -> None:
        parallelize(model, grid, config=config)

    with compat.distribute_when_built(distribute) as extra:
        model, info = auto_class.from_pretrained(name_or_path, output_loading_info=True, **extra, **kwargs)
    if any(compat.adapter_layers(model)):
        raise ValueError(
            f"{name_or_path} holds PEFT adapters, which must be in a model before it is sharded: load it on every "
            "rank with AutoModelForCausalLM.from_pretrained and shard the result with hf_axonn.parallelize."
        )
    missing = sorted(set(info["missing_keys"]) - set(getattr(model, "all_tied_weights_keys", {})))
    if missing:
        raise ValueError(
            f"{name_or_path} has no weights for {len(missing)} parameters, among them {', '.join(missing[:3])}: load "
            "it with AutoModelForCausalLM.from_pretrained and shard the result with hf_axonn.parallelize."
        )
    return model
