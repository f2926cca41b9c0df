"""Load a model of Transformers so that every rank reads only its own slices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hf_axonn.checkpoint.adapter_files import adapter_base
from hf_axonn.checkpoint.gguf import WHERE, convert_once
from hf_axonn.checkpoint.hf_loader import distribute_when_built
from hf_axonn.checkpoint.manifest import is_sharded_checkpoint
from hf_axonn.checkpoint.sharded import read_weights, verify_together
from hf_axonn.compat.torch import default_device_type
from hf_axonn.compat.transformers import progress_bars
from hf_axonn.compat.versions import check_versions
from hf_axonn.config import AxonnConfig
from hf_axonn.distributed.consistency import raise_on_all_ranks
from hf_axonn.distributed.mesh import grid_mesh
from hf_axonn.engine.dtensors import local_slices
from hf_axonn.engine.master_weights import leave_dtype_open
from hf_axonn.parallel.distributed_config import config_of_distributed
from hf_axonn.parallel.four_bit import add_second_scales
from hf_axonn.parallel.parallelize import KERNELS, join_settings, parallelize
from hf_axonn.topology.grid import Grid


NO_LOADING_INFO = "a rank reads its slices alone, and weights that a checkpoint lacks are an error"
_loading: ContextVar[bool] = ContextVar("loading", default=False)


def is_loading() -> bool:
    """Return whether `from_pretrained` is under way: what Transformers' method is called for then is a part of it."""
    return _loading.get()


@contextlib.contextmanager
def _while_loading() -> Iterator[None]:
    token = _loading.set(True)
    try:
        yield
    finally:
        _loading.reset(token)


def from_pretrained(
    name_or_path: str,
    *,
    grid: Grid | None = None,
    config: AxonnConfig | None = None,
    auto_class: type | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Load a causal LM so that every rank reads only its own slices of the weights.

    The model is built on the meta device, parallelized, and filled by Transformers' own loader, from an ordinary HF
    directory, the hub, or a sharded checkpoint of any grid. A rank's memory grows by its shards and, for a moment, by
    one slice. A GGUF file is dequantized, by one process to safetensors that all ranks then read (checkpoint/gguf.py).
    In bitsandbytes' 4 bits a rank quantizes the blocks that it will hold, as it reads them (four_bit_loading.py).
    Of a directory with PEFT adapters the base is read so, and then the adapters, frozen as Transformers leaves them.
    `model.axonn.report` says what was sharded.

    Args:
        name_or_path: what `AutoModelForCausalLM.from_pretrained` takes.
        grid: sizes of the axes; None takes those of `config`, or of the launch file. A grid of one rank gives the
            plain model.
        config: overlap switches and reduce_dtype, beside those of the launch file.
        auto_class: AutoModelForCausalLM if None.
        kwargs: for `from_pretrained`: dtype, attn_implementation, revision and so on. Without a dtype the weights have
            that of the checkpoint, until they are trained in mixed precision: then they become float32
            (engine/master_weights.py).
    Returns:
        The model, in eval mode as from_pretrained leaves it, on this rank's device.
    Raises:
        ValueError: there is no grid, or the launch file has another (`AxonnConfig.with_launch`); quantized weights
            other than bitsandbytes' 4 bits, device_map, tp_plan, use_kernels, output_loading_info or
            ignore_mismatched_sizes among the arguments, or the config of a model; an incomplete sharded checkpoint,
            weights that the checkpoint lacks (they would be filled with numbers that differ from rank to rank) or has
            in another size; on every rank, if one of them cannot read its slices.
    Collectives: those of `parallelize` for a model on the meta device, and of `raise_on_all_ranks`; those of
        `verify_together` for a sharded checkpoint, and of `add_second_scales` in 4 bits.
    """
    from transformers import AutoModelForCausalLM

    if (distributed := kwargs.pop("distributed_config", None)) is not None:
        config = config_of_distributed(distributed, grid, config)
    return load_shards(
        name_or_path, join_settings("from_pretrained", grid, config), auto_class or AutoModelForCausalLM, kwargs
    )


@_while_loading()
def load_shards(name_or_path: str, config: AxonnConfig, auto_class: type, kwargs: dict[str, Any]) -> nn.Module:
    """Do the work of `from_pretrained` with settings that are joined; `kwargs` may have Transformers' own `config`."""
    grid = config.grid
    place = Path(name_or_path, kwargs.get("subfolder") or "")  # if it is a directory
    refused = [key for key in ("device_map", "tp_plan", "tp_size") if kwargs.get(key) is not None]
    if refused:
        raise ValueError(f"{', '.join(refused)}: the grid decides where weights lie; omit {refused[0]}.")
    if kwargs.get("output_loading_info"):
        raise ValueError(f"output_loading_info: {NO_LOADING_INFO}; omit it.")
    _check_quantization(kwargs, grid)
    four_bit = getattr(kwargs.get("quantization_config"), "load_in_4bit", False)
    if four_bit and grid.size > 1 and is_sharded_checkpoint(place):
        raise ValueError(
            f"{place} is a sharded checkpoint, which cannot be read in 4 bits over a grid: write an ordinary "
            "directory first, with hf-axonn convert."
        )
    open_dtype = kwargs.get("dtype", kwargs.get("torch_dtype")) is None
    if grid.size == 1:
        _verify(place)
        model = auto_class.from_pretrained(name_or_path, **kwargs)
        if open_dtype:
            leave_dtype_open(model)
        return model
    check_versions()
    if kwargs.get("use_kernels") or kwargs.get("kernel_config") is not None:
        raise ValueError(KERNELS)
    if kwargs.get("ignore_mismatched_sizes"):
        raise ValueError("ignore_mismatched_sizes: every rank would fill such weights with other numbers; omit it.")
    origin = name_or_path
    if gguf_file := kwargs.pop("gguf_file", None):
        del kwargs["quantization_config"]
        where = {key: kwargs.pop(key) for key in WHERE if key in kwargs}
        name_or_path = convert_once(origin, gguf_file, auto_class=auto_class, dtype=kwargs.get("dtype"), **where)
    _verify(place)
    device = torch.device(default_device_type())
    if device.type != "cpu":
        # By its number: the threads that read have a current device of their own, which is the first.
        device = torch.device(device.type, torch.get_device_module(device).current_device())
        kwargs["device_map"] = {"": device.index}

    def distribute(model: nn.Module) -> None:
        parallelize(model, grid, config=config)
        # From here on a rank may fail alone, at a file that only its node cannot read.
        reading.enter_context(raise_on_all_ranks(device))

    def part_of(parameter: DTensor) -> tuple[slice, ...]:
        return local_slices(parameter.shape, parameter.placements, grid_mesh(grid, device.type))

    hooks = distribute_when_built(distribute, part_of, device, read_weights)
    bars = progress_bars(not dist.is_initialized() or dist.get_rank() == 0)
    with contextlib.ExitStack() as reading, bars, hooks as (extra, missing):
        model, info = auto_class.from_pretrained(name_or_path, output_loading_info=True, **extra, **kwargs)
    missing = sorted({*missing, *info["missing_keys"]} - set(getattr(model, "all_tied_weights_keys", {})))
    if missing:
        raise ValueError(
            f"{name_or_path} has no weights for {len(missing)} parameters, among them {', '.join(missing[:3])}: load "
            "it with AutoModelForCausalLM.from_pretrained and shard the result with hf_axonn.parallelize."
        )
    add_second_scales(model)
    if open_dtype:
        leave_dtype_open(model)
    if gguf_file:
        model.name_or_path = model.config.name_or_path = str(origin)
    return model


def _verify(place: Path) -> None:
    """Check a sharded checkpoint, and that of the base of adapters. Collectives: those of `verify_together`."""
    directories: list[str | Path | None] = [place, adapter_base(place)]
    for directory in directories:
        if directory and is_sharded_checkpoint(directory):
            verify_together(directory)


def _check_quantization(kwargs: dict[str, Any], grid: Grid) -> None:
    """Refuse weights that stay quantized otherwise than in 4 bits; a GGUF file is always dequantized."""
    from transformers import GgufConfig

    config = kwargs.get("quantization_config")
    if kwargs.get("gguf_file"):
        if config is not None and not getattr(config, "dequantize", False):
            raise ValueError("GGUF weights are trained dequantized: omit quantization_config.")
        kwargs["quantization_config"] = GgufConfig(dequantize=True)
    elif config is not None and grid.size > 1 and not getattr(config, "load_in_4bit", False):
        raise ValueError(
            f"quantized weights cannot be sharded, but for bitsandbytes' 4 bits: {type(config).__name__} asks for "
            "others. Take BitsAndBytesConfig(load_in_4bit=True), omit quantization_config, or save them "
            "dequantized."
        )
