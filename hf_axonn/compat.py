"""Everything of torch, accelerate and transformers that is private or may change, in one place.

Checked with torch 2.11 and 2.13, transformers 5.23.0, accelerate 1.15.0, peft 0.21.2. setup.cfg pins what is not
proven on other versions.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def unnamed_mesh(groups: list[ProcessGroup], device_type: str, ranks: torch.Tensor) -> DeviceMesh:
    """A DeviceMesh over process groups that exist, without axis names (`DeviceMesh.from_group` insists on them).

    Args:
        groups: one for each dim of `ranks`, this rank's own.
        ranks: global ranks by position.
    """
    mesh = DeviceMesh(device_type, ranks, _init_backend=False)
    mesh._dim_group_names = [group.group_name for group in groups]
    registry = getattr(mesh, "_pg_registry", None)  # absent before torch 2.13
    if registry is not None:
        registry.update({group.group_name: group for group in groups})
    return mesh


def quiet_redistribution() -> None:
    """Silence torch's advice to flatten a mesh for `full_tensor()`: every rank repeats it, none can act on it."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    if not logger.filters:
        logger.addFilter(lambda record: "While redistributing from" not in record.getMessage())


def without_peft(model: nn.Module) -> nn.Module:
    """The Transformers model inside of a PeftModel; any other model as it is."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def adapter_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """PEFT's layers in a model: name, layer and a short name of its class, as in lora.Linear or ia3.Linear."""
    if "peft" not in sys.modules:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name, module, f"{type(module).__module__.split('.')[-2]}.{type(module).__name__}"


def default_device_type() -> str:
    """The device type on which this process trains: that of accelerate if it has decided, else torch's accelerator."""
    from accelerate import PartialState

    if PartialState._shared_state:
        return PartialState().device.type
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def input_embedding(model: nn.Module) -> nn.Module | None:
    """`get_input_embeddings()`, None where a model does not have one."""
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None


def output_embedding(model: nn.Module) -> nn.Module | None:
    """`get_output_embeddings()`, None where a model does not have one."""
    try:
        return model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def text_config(model: nn.Module):
    """The config of a model's decoder: its own, or that of its language part."""
    config = model.config
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def head_counts(config, attention: nn.Module) -> tuple[int, int]:
    """Numbers of query and kv heads of an attention module: its own, or else the config's; 0 unknown."""

    def first(*names: str) -> int:
        for owner in (attention, config):
            for name in names:
                # A config whose layers differ refuses to name one number.
                with contextlib.suppress(AttributeError, RuntimeError, ValueError):
                    if isinstance(getattr(owner, name), int):
                        return getattr(owner, name)
        return 0

    query = first("num_heads", "num_attention_heads", "n_heads", "n_head", "decoder_attention_heads")
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return query, 1
    return query, first("num_key_value_heads", "num_kv_heads") or query


def has_causal_lm_loss(model: nn.Module) -> bool:
    """Whether the model takes Transformers' causal LM loss, which ours may then replace."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    try:
        return model.loss_function is ForCausalLMLoss
    except (AttributeError, KeyError, ValueError):
        return False


@contextlib.contextmanager
def distribute_when_built(distribute: Callable[[nn.Module], None]) -> Iterator[dict]:
    """Let `from_pretrained` call `distribute(model)` on the model it has just built on the meta device.

    Yields the keyword arguments to pass to `from_pretrained`. Transformers' loader then reads only the local slice of
    every DTensor parameter (core_model_loading.py, `DtensorShardOperation`). The hook is the one that its own
    `distributed_config` uses (modeling_utils.py, `maybe_distribute_model`); we need no mesh of its making.
    """
    from transformers import PreTrainedModel
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.sharding_utils import DtensorShardOperation

    class _NoMesh:  # from_pretrained asks its mesh manager for a mesh and passes it on; the loader does not read it
        def get_mesh(self, names):
            return None

    def distribute_model(model, distributed_config, mesh_manager):
        vars(model.config).pop("distributed_config", None)  # else it would be saved in config.json
        distribute(model)
        return model

    replaced = {
        (PreTrainedModel, "prepare_distribute_model"): staticmethod(
            lambda config, device_map=None: (config, device_map, _NoMesh())
        ),
        (PreTrainedModel, "maybe_distribute_model"): staticmethod(distribute_model),
        # It looks axes up by name, and the storage mesh has none.
        (DtensorShardOperation, "_get_sub_mesh"): lambda operation, dim: _MeshDim(operation.device_mesh, dim),
    }
    before = {(owner, name): vars(owner).get(name) for owner, name in replaced}
    try:
        for (owner, name), value in replaced.items():
            setattr(owner, name, value)
        yield {"distributed_config": DistributedConfig()}
    finally:
        for (owner, name), value in before.items():
            if value is None:  # inherited before
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@dataclass(frozen=True)
class _MeshDim:
    """One dim of a mesh without names, as far as the loader asks."""

    mesh: DeviceMesh
    dim: int

    def get_local_rank(self) -> int:
        return self.mesh.get_local_rank(self.dim)

    def size(self) -> int:
        return self.mesh.size(self.dim)


def save_shards(tensors: dict[str, torch.Tensor], directory: Path) -> None:
    """Write tensors and DTensors as safetensors, every rank its own file. Collective over the world."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch.distributed.*")
        dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(path=str(directory), save_distributed=True))


def load_shards(tensors: dict[str, torch.Tensor], directory: Path) -> None:
    """Fill tensors and DTensors in place from what `save_shards` wrote, on any grid. Collective over the world."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch.distributed.*")
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(directory)))


def save_model_shards(model: nn.Module, directory: Path) -> list[str]:
    """`save_shards` of a model's parameters and persistent buffers, by their names in the plain model.

    Returns the names that are second names of a tied tensor. They are written too, because Transformers' loader of
    sharded checkpoints asks for every name, but as copies: safetensors refuses tensors that share memory.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    tensors = get_model_state_dict(model)
    seen: set[int] = set()
    tied = []
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        key = (local.untyped_storage().data_ptr(), local.storage_offset(), local.shape)
        if local.numel() and key in seen:
            tied.append(name)
            tensors[name] = tensor.detach().clone()
        seen.add(key)
    save_shards(tensors, directory)
    return tied


def load_model_shards(model: nn.Module, directory: Path) -> None:
    """`load_shards` into a model's parameters and persistent buffers."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    tensors = get_model_state_dict(model)
    load_shards(tensors, directory)
    set_model_state_dict(model, tensors)


@contextlib.contextmanager
def _without_empty_groups(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizer under accelerate's wrapper, without groups of no parameters, which torch cannot flatten."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    empty = [(place, group) for place, group in enumerate(optimizer.param_groups) if not group["params"]]
    for _, group in empty:
        optimizer.param_groups.remove(group)
    try:
        yield optimizer
    finally:
        for place, group in empty:
            optimizer.param_groups.insert(place, group)


def flat_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], dict]:
    """An optimizer's state by parameter name: (tensors, numbers and other plain values).

    An optimizer that has not stepped yet gets its state made by a step that changes nothing (torch does that).
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    options = StateDictOptions(flatten_optimizer_state_dict=True)
    with _without_empty_groups(optimizer) as inner:
        flat = get_optimizer_state_dict(model, inner, options=options)
    tensors = {key: value for key, value in flat.items() if isinstance(value, torch.Tensor)}
    return tensors, {key: value for key, value in flat.items() if key not in tensors}


def set_flat_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict, values: dict) -> None:
    """Give an optimizer what `flat_optimizer_state` returned."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    with _without_empty_groups(optimizer) as inner:
        set_optimizer_state_dict(model, inner, {**values, **tensors}, options=options)


def consolidate_shards(directory: Path, output: Path, *, shard_bytes: int, leave_out: list[str]) -> None:
    """Join sharded safetensors into ordinary ones of at most `shard_bytes` each, with an index. No collective."""
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    metadata = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    index, used = 1, 0
    file_of = {}
    for name, tensor in metadata.items():
        if name in leave_out:
            continue
        nbytes = tensor.size.numel() * tensor.properties.dtype.itemsize
        if used and used + nbytes > shard_bytes:
            index, used = index + 1, 0
        used += nbytes
        file_of[name] = index
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch.distributed.*")
        consolidate_safetensors_files(input_dir=str(directory), output_dir=str(output), fqn_to_index_mapping=file_of)


def saved_tensors_have_hooks() -> bool:
    """Whether something decides what autograd keeps here (a checkpointed layer, offloading to the CPU)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
