"""Transformers' loader, made to read only a rank's part of each weight. Private names, as in compat/torch.py.

Checked with transformers 5.20 to 5.24.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_axonn.checkpoint.four_bit_loading import is_stored_in_bytes, loading_hooks
from hf_axonn.checkpoint.lazy_tensors import LazyTensor, Region, read, unread
from hf_axonn.checkpoint.manifest import is_sharded_checkpoint
from hf_axonn.checkpoint.sharded import read_weights
from hf_axonn.compat.replaced import replace_attributes
from hf_axonn.compat.transformers import collected_tensors_are_numbered, note_what_is_read
from hf_axonn.engine.dtensors import local
from hf_axonn.engine.four_bit import keep_marks


if TYPE_CHECKING:
    from transformers import PreTrainedModel


INTEGERS = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")  # as weights they are quantized, or garbage
READERS = 4  # threads that copy out of files at the same time; as many as Transformers' loader has


@contextlib.contextmanager
def distribute_when_built(
    distribute: Callable[[nn.Module], None],
    part_of: Callable[[DTensor], Region],
    device: torch.device,
    read_shards: Callable[[nn.Module, str], None],
) -> Iterator[tuple[dict[str, Any], set[str]]]:
    """Let `from_pretrained` call `distribute(model)` on the model it has just built on the meta device, and then read
    `part_of(parameter)`, and nothing else, of each weight that is a DTensor, to `device`. A directory of files of
    shards is left to `read_shards(model, directory)`: torch.distributed.checkpoint opens all of them on every rank.

    Yields the keyword arguments to pass to `from_pretrained`, and a set that will have the names of what the
    checkpoint lacks (of a directory with adapters its own report has only what the adapters lack). The hook is the one
    that its own `distributed_config` uses (modeling_utils.py, `maybe_distribute_model`); we need no mesh of its own.
    Transformers' loader shards tensors before it converts them, which is only right for some conversions
    (core_model_loading.py), so the two places where it reads a tensor and where it sets a parameter are replaced, too.
    """
    from transformers import PreTrainedModel, core_model_loading
    from transformers.distributed import mixin
    from transformers.distributed.configuration_utils import DistributedConfig

    def distribute_model(model: PreTrainedModel, distributed_config: object, mesh_manager: None) -> PreTrainedModel:
        vars(model.config).pop("distributed_config", None)  # else it would be saved in config.json
        distribute(model)
        if any(map(is_stored_in_bytes, model.parameters())):  # else bitsandbytes would be imported, for a second
            replaced.enter_context(replace_attributes(loading_hooks(part_of, device)))
        return model

    missing: set[str] = set()
    finalize = PreTrainedModel._finalize_model_loading

    def finalize_and_note(model: PreTrainedModel, load_config: Any, info: Any) -> Any:
        note_what_is_read(model)
        info = finalize(model, load_config, info)
        missing.update(info.missing_keys)
        return info

    with ThreadPoolExecutor(READERS) as readers, contextlib.ExitStack() as replaced:
        attributes = {
            (mixin, "_load_model_checkpoint_distributed"): read_shards,
            (PreTrainedModel, "prepare_distribute_model"): staticmethod(
                lambda config, device_map=None: (config, device_map, None)
            ),
            (PreTrainedModel, "maybe_distribute_model"): staticmethod(distribute_model),
            (PreTrainedModel, "_finalize_model_loading"): staticmethod(finalize_and_note),
            (core_model_loading, "DtensorShardOperation"): lambda parameter: (
                STAYS if is_stored_in_bytes(parameter) else _Part(parameter.shape, part_of(parameter))
            ),
            (core_model_loading, "spawn_materialize"): _read_or_wait,
            (core_model_loading, "set_param_for_module"): partial(
                _set_part, core_model_loading.set_param_for_module, part_of, device, readers
            ),
        }
        replaced.enter_context(replace_attributes(attributes))
        yield {"distributed_config": DistributedConfig()}, missing


def fill(
    model: PreTrainedModel, stored: dict[str, Any], part_of: Callable[[DTensor], Region]
) -> tuple[set[str], set[str]]:
    """Fill the parameters and buffers of a parallelized Transformers model in place, this rank's parts alone.

    Args:
        stored: slices of safetensors by the names of a checkpoint, which may lay weights out in another way.
        part_of: what this rank has of a parameter.
    Returns:
        Names of what the checkpoint lacks, or has in another size, and of what the model does not have; without those
        that the model's class ignores.
    """
    from transformers import core_model_loading
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    def shard_operation(parameter: DTensor) -> _Part:
        return _Part(parameter.shape, part_of(parameter))

    def copy_part(model: nn.Module, name: str, value: torch.Tensor, info: Any, *_: object) -> None:
        own = _tensor_of(model, name)
        part = None if own is None else _rank_part(own, value, part_of, None, readers)
        if own is None or part is None:
            return
        info.missing_keys.discard(name)
        with torch.no_grad():
            local(own).copy_(part)

    before = getattr(model, "_weight_conversions", None)  # by which the model will be saved
    with ThreadPoolExecutor(READERS) as readers:
        attributes = {
            (core_model_loading, "DtensorShardOperation"): shard_operation,
            (core_model_loading, "spawn_materialize"): _read_or_wait,
            (core_model_loading, "set_param_for_module"): copy_part,
        }
        with replace_attributes(attributes):
            mapping: Any = get_model_conversion_mapping(model)  # Transformers annotates the two unequally
            options = LoadStateDictConfig(weight_mapping=mapping)
            info, _ = core_model_loading.convert_and_load_state_dict_in_model(model, stored, options)
    vars(model)["_weight_conversions"] = before
    model._adjust_missing_and_unexpected_keys(info)
    return info.missing_keys, info.unexpected_keys


def let_ranks_read_alone() -> None:
    """Let Transformers' from_pretrained of this process read our checkpoints on one of several ranks, too. Once.

    Its own reader, that of torch.distributed.checkpoint, would wait for all ranks.
    """
    from transformers.distributed import mixin

    within: Any = mixin
    stock = within._load_model_checkpoint_distributed
    if not hasattr(stock, "__wrapped__"):
        within._load_model_checkpoint_distributed = wraps(stock)(partial(_read_alone, stock))


def _read_alone(stock: Callable[..., None], model: nn.Module, directory: str, *args: Any, **kwargs: Any) -> None:
    whole = not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    if whole and torch.distributed.is_initialized() and is_sharded_checkpoint(directory):
        read_weights(model, directory)
    else:
        stock(model, directory, *args, **kwargs)


@dataclass(frozen=True)
class _Part:
    """This rank's part of a parameter."""

    shape: torch.Size
    region: Region


# Of a weight that is quantized as it is read: what is in the file stays there until then.
STAYS = _Part(torch.Size(), ())


def _read_or_wait(
    pool: Executor | None,
    source: Any,
    device: Any = None,
    dtype: torch.dtype | None = None,
    sharding_op: _Part | None = None,
    tensor_idx: int | None = None,
) -> Future[torch.Tensor] | Callable[[], torch.Tensor] | LazyTensor:
    """Replace `spawn_materialize`: read this rank's part of a tensor now, in a thread.

    What a converter collects (it has a `tensor_idx`) stays unread, and so does a tensor that is not of its
    parameter's size, which the loader will report. So do all where a converter's tensors are not known:
    `_set_part` reads.
    """
    if sharding_op is STAYS:
        return unread(source, dtype if dtype is not None and dtype.is_floating_point else None)
    refuse_integers("a weight", source, dtype)
    lazy = unread(source, dtype)
    known = tensor_idx is None and collected_tensors_are_numbered()
    if not known or (sharding_op is not None and lazy.shape != sharding_op.shape):
        return lazy
    job = partial(_read_part, lazy, sharding_op.region if sharding_op else None, device)
    return pool.submit(job) if pool is not None else job


def refuse_integers(name: str, source: Any, dtype: torch.dtype | None) -> None:
    """Raise ValueError if a slice of safetensors holds integers where the model has floating-point numbers."""
    stored = getattr(source, "get_dtype", str)()
    if stored in INTEGERS and dtype is not None and dtype.is_floating_point:
        raise ValueError(
            f"{name} of shape {source.get_shape()} is stored as {stored}, but the model has it as {dtype}."
        )


def _read_part(lazy: LazyTensor, region: Region | None, device: Any) -> torch.Tensor:
    part = read(lazy, region, device=device)
    part.is_part = True  # type: ignore[attr-defined]  # a mark for `_set_part`: nothing is left to shard
    return part


def _set_part(
    stock: Callable[..., None],
    part_of: Callable[[DTensor], Region],
    device: torch.device,
    readers: Executor,
    model: nn.Module,
    name: str,
    value: torch.Tensor,
    info: Any,
    *rest: Any,
) -> None:
    """Replace `set_param_for_module`: shard what a converter made, and read it if it is not yet."""
    own = _tensor_of(model, name)
    if own is not None:
        part = _rank_part(own, value, part_of, device, readers)
        if part is None:
            info.missing_keys.discard(name)
            info.mismatched_keys.add((name, value.shape, own.shape))
            return
        value = part
    stock(model, name, value, info, *rest)
    if own is not None and is_stored_in_bytes(own):  # what hangs on a weight of 4 bits
        keep_marks(model.get_parameter(name), vars(own))


def _tensor_of(model: nn.Module, name: str) -> torch.Tensor | None:
    path, _, last = name.rpartition(".")
    own = getattr(model.get_submodule(path), last, None)
    return own if isinstance(own, torch.Tensor) else None


def _rank_part(
    own: torch.Tensor,
    value: torch.Tensor,
    part_of: Callable[[DTensor], Region],
    device: torch.device | None,
    readers: Executor,
) -> torch.Tensor | None:
    """Return this rank's part of what a parameter is to be; None if that has another size."""
    if getattr(value, "is_part", False):
        return value
    if value.shape != own.shape:
        return None
    lazy = value if isinstance(value, LazyTensor) else unread(value)
    return read(lazy, part_of(own) if isinstance(own, DTensor) else None, device=device, readers=readers)
