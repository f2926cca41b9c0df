"""Everything of torch, accelerate and transformers that is private or may change, in one place.

Checked with torch 2.11 and 2.13, transformers 5.23.0, accelerate 1.15.0, peft 0.21.2. setup.cfg pins what is not
proven on other versions.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def unnamed_mesh(groups: list[ProcessGroup], device_type: str, ranks: torch.Tensor) -> DeviceMesh:
    """A DeviceMesh over process groups that exist, without axis names (`DeviceMesh.from_group` insists on them).

    What DTensor remembers of meshes before is forgotten: it knows a mesh by its ranks, so that after process groups
    were made anew, or in a process forked from one that had some, its results would name groups that are gone.

    Args:
        groups: one for each dim of `ranks`, this rank's own.
        ranks: global ranks by position.
    """
    _clear_sharding_prop_cache()
    mesh = DeviceMesh(device_type, ranks, _init_backend=False)
    mesh._dim_group_names = [group.group_name for group in groups]
    registry = getattr(mesh, "_pg_registry", None)  # absent before torch 2.13
    if registry is not None:
        registry.update({group.group_name: group for group in groups})
    mesh.__deepcopy__ = lambda memo: mesh  # a copied parameter lies on the same ranks
    return mesh


def quiet_redistribution() -> None:
    """Silence torch's advice to flatten a mesh for `full_tensor()`: every rank repeats it, none can act on it."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    if not logger.filters:
        logger.addFilter(lambda record: "While redistributing from" not in record.getMessage())


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


def configured_head_counts(config, attention: nn.Module) -> tuple[int, int]:
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


def model_tensors(model: nn.Module) -> tuple[dict[str, torch.Tensor], list[str]]:
    """A model's parameters and persistent buffers by their names in the plain model, and which names are second ones.

    The tensors are the model's own: what is written into them is in the model. A second name of a tied tensor is saved
    like any other, because Transformers' loader of sharded checkpoints asks for every name.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    tensors = get_model_state_dict(model)
    seen: set[tuple] = set()
    tied = []
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        key = (local.untyped_storage().data_ptr(), local.storage_offset(), local.shape)
        if local.numel() and key in seen:
            tied.append(name)
        seen.add(key)
    return tensors, tied


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


def fresh_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The tensors of `flat_optimizer_state` with a state for every parameter, to be overwritten."""
    inner = getattr(optimizer, "optimizer", optimizer)
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    if any(parameter.requires_grad and parameter not in inner.state for parameter in parameters):
        inner.state.clear()  # torch makes all of it or nothing
    for parameter in parameters:
        parameter.grad = None  # torch makes no state beside gradients
    tensors, _ = flat_optimizer_state(model, optimizer)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return tensors


def set_flat_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict, values: dict, without: set[str]
) -> None:
    """Give an optimizer what `flat_optimizer_state` returned; the parameters named in `without` get no state."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    with _without_empty_groups(optimizer) as inner:
        set_optimizer_state_dict(model, inner, {**values, **tensors}, options=options)
        for name, parameter in model.named_parameters():
            if name in without:
                inner.state.pop(parameter, None)


def saved_tensors_have_hooks() -> bool:
    """Whether something decides what autograd keeps here (a checkpointed layer, offloading to the CPU)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def world_timeout(device_type: str = "") -> float:
    """The timeout of collectives over the world, in seconds, as `init_process_group` was given it.

    `device_type`: of the tensors; that on which this process trains if it is empty.
    """
    backend = torch.distributed.group.WORLD._get_backend(torch.device(device_type or default_device_type()))
    options = getattr(backend, "options", None)
    timeout = getattr(options, "_timeout", None) or torch.distributed.constants.default_pg_timeout
    return timeout.total_seconds()


@contextlib.contextmanager
def groups_with_world_timeout(device_type: str) -> Iterator[None]:
    """Process groups that are made inside get the timeout of the world.

    init_device_mesh cannot be told one and takes torch's default of 10 or 30 minutes. Of gloo, messages between two
    ranks keep the timeout with which their group was made, so that it cannot be mended afterwards.
    """
    from torch.distributed import distributed_c10d

    names = ("default_pg_timeout", "default_pg_nccl_timeout")
    before = {name: getattr(distributed_c10d, name) for name in names}
    timeout = timedelta(seconds=world_timeout(device_type))
    for name in names:
        setattr(distributed_c10d, name, timeout)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(distributed_c10d, name, value)


def watch_store() -> torch.distributed.Store:
    """A connection of its own to the store through which the world was set up: a thread may use it at any time."""
    from torch.distributed.distributed_c10d import _get_default_store

    return torch.distributed.PrefixStore("hf_axonn/watch", _get_default_store().clone())


def store_outlives_ranks() -> bool:
    """Whether the store is kept by the launcher, or on disk, and not by rank 0."""
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    while isinstance(store, torch.distributed.PrefixStore):
        store = store.underlying_store
    return not isinstance(store, torch.distributed.TCPStore) or (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    )


def ask_class_for_step(optimizer: torch.optim.Optimizer) -> None:
    """After an optimizer got another class: a learning rate schedule may have wrapped the step of the old one."""
    if "step" not in vars(optimizer):
        return

    @functools.wraps(type(optimizer).step)
    def step(*args, **kwargs):
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True
    optimizer.step = step


@contextlib.contextmanager
def paper_world(size: int) -> Iterator[None]:
    """Be rank 0 of a world of `size` ranks that are not there: collectives return at once and move nothing.

    Raises:
        RuntimeError: torch.distributed is initialized.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist = torch.distributed
    if dist.is_initialized():
        raise RuntimeError("torch.distributed is initialized already, with ranks that are there.")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
