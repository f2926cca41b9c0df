"""Private names of torch, and those that may change. Checked with torch 2.11 to 2.15."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn, cast

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from hf_axonn.compat.replaced import replace_attributes


OperatorMode = TorchDispatchMode  # sees operators below autograd, forward and backward
MapFetcher = _MapDatasetFetcher  # reads and collates the items of a batch of a map-style dataset


def unnamed_mesh(groups: list[ProcessGroup], device_type: str, ranks: torch.Tensor, grid: object) -> DeviceMesh:
    """Return a DeviceMesh over process groups that exist, without axis names, on which `from_group` insists.

    It is equal to itself alone. torch compares meshes by their ranks, and DTensor gives results that it remembers the
    mesh that it remembers them of: that of another grid, or one whose process groups are gone.

    Args:
        groups: one for each dim of `ranks`, this rank's own.
        ranks: global ranks by position.
        grid: what `grid_of` this mesh returns.
    """
    mesh = DeviceMesh(device_type, ranks, _init_backend=False)
    mesh._thread_id = id(mesh)  # a part of what torch compares; the threads of its tests differ in it
    mesh._dim_group_names = [group.group_name for group in groups]
    registry = getattr(mesh, "_pg_registry", None)  # absent before torch 2.13
    if registry is not None:
        registry.update({group.group_name: group for group in groups})
    # A copied parameter lies on the same ranks; a pickled one would be read on others.
    vars(mesh).update(__deepcopy__=lambda memo: mesh, __reduce_ex__=lambda protocol: refuse_pickle(), of_grid=grid)
    return mesh


def grid_of(mesh: DeviceMesh) -> Any:
    """Return the Grid that an `unnamed_mesh` is of; None for another mesh."""
    return vars(mesh).get("of_grid")


def offsets_of(tensor: DTensor) -> tuple[int, ...]:
    """Return where this rank's part of a DTensor begins in the whole, as torch's own checkpoints find it."""
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets)


def refuse_pickle() -> NoReturn:
    """Raises ValueError: a sharded tensor is to be pickled, or written as it is."""
    raise ValueError(
        "a tensor that is sharded over a grid cannot be saved as it is (torch.save, accelerator.save): this rank has "
        "only its shard. Write the whole model with accelerator.save_model(model, DIR) or model.save_pretrained(DIR), "
        "get its tensors on rank 0 with accelerator.get_state_dict(model), save model and optimizer with "
        "accelerator.save_state(DIR); every rank makes these calls."
    )


def quiet_redistribution() -> None:
    """Silence torch's advice to flatten a mesh for `full_tensor()`: every rank repeats it, none can act on it."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    if not logger.filters:
        logger.addFilter(lambda record: "While redistributing from" not in record.getMessage())


def read_whole_values() -> None:
    """Let `.item()`, `float()` and `bool()` of a DTensor give its value where ranks hold parts of it, as after
    `gradient.norm()`: torch gives each rank its own part. Collectives: those of `full_tensor`, over such an axis."""
    handlers: dict = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = _whole_value


def _whole_value(_: object, args: tuple[DTensor], kwargs: dict) -> float:
    with torch.no_grad():
        return args[0].full_tensor().item()


def decide_finiteness(reduce: Callable[[torch.Tensor], object]) -> None:
    """Let a GradScaler that has looked at gradients on an `unnamed_mesh` take the answer that `reduce` leaves.

    Args:
        reduce: gets 1 if a gradient of this rank is inf or NaN, else 0, and writes that of all ranks in its place.
    """
    handlers: dict = DTensor._op_dispatcher._custom_op_handlers
    operator = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    others = getattr(handlers[operator], "others", handlers[operator])

    def handler(op: Callable, args: tuple[list[torch.Tensor], torch.Tensor, torch.Tensor], kwargs: dict) -> None:
        gradients, found_inf, inverse_scale = args
        sharded = [each for each in gradients if isinstance(each, DTensor)]
        if any(grid_of(each.device_mesh) is None for each in sharded):
            return others(op, args, kwargs)
        op([each._local_tensor if isinstance(each, DTensor) else each for each in gradients], found_inf, inverse_scale)
        reduce(found_inf)

    handler.others = others  # type: ignore[attr-defined]
    handlers[operator] = handler


def default_device_type() -> str:
    """The device type on which this process trains: that of accelerate if it has decided, else torch's accelerator."""
    from accelerate import PartialState

    if PartialState._shared_state:
        return PartialState().device.type
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def in_backward() -> bool:
    """Return whether autograd is running a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors in lists, tuples, dictionaries and outputs of Transformers, in their order."""
    leaves = torch.utils._pytree.tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def backward_pass() -> int:
    """A number of the pass of autograd that is under way on this thread; a reentrant checkpoint begins one in one."""
    return torch._C._current_graph_task_id()


def returns_gradient(node: torch.autograd.graph.Node) -> bool:
    """Called in the backward pass of a node that leads to a leaf: return whether the pass returns the gradient of that
    leaf (`torch.autograd.grad`), and leaves its `.grad` as it is."""
    leaf: Any = node.next_functions[0][0]
    try:
        torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # torch has no other answer
        return True
    return False


def take_gradient_hooks(parameter: torch.nn.Parameter, former: torch.nn.Parameter) -> None:
    """Let hooks of another parameter (`register_hook`, `register_post_accumulate_grad_hook`) be called of this one,
    for as long as their handles keep them."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(former, name):
            setattr(parameter, name, getattr(former, name))


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Called in a backward pass: have a function called when the pass is over, if it gets there."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def shard_in(tensor: DTensor) -> torch.Tensor:
    """This rank's part of a DTensor as it is, outside of the graph and without DTensor's dispatch."""
    return tensor._local_tensor


def placement_of(tensor: DTensor) -> object:
    """Return how a DTensor lies on its mesh, for `like_dtensor`."""
    return tensor._spec


def like_dtensor(shard: torch.Tensor, placement: object) -> DTensor:
    """The tensor of which this rank has `shard`, as one lies that has this `placement_of`."""
    return DTensor(shard, placement, requires_grad=False)


def lie_as(shard: torch.Tensor, other: DTensor) -> DTensor:
    """Return the tensor, of any dtype, of which this rank has `shard`, and which lies as `other` does."""
    mesh, placements, shape = other.device_mesh, other.placements, other.shape
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=other.stride())


def as_parameter(tensor: DTensor, requires_grad: bool) -> torch.nn.Parameter:
    """Return a DTensor that is in no graph as a parameter, in the same memory.

    As `nn.Parameter(tensor)`, which detaches it: for each shape on each mesh DTensor plans that for a millisecond.
    """
    parameter = DTensor(tensor._local_tensor.detach(), tensor._spec, requires_grad=requires_grad)
    parameter._is_param = True
    return cast(torch.nn.Parameter, parameter)


@functools.cache
def set_shards_by_data(shard_like: Callable[[torch.Tensor, DTensor], DTensor]) -> None:
    """Let `parameter.data = other` of a DTensor on an `unnamed_mesh` have the effect that it has on a plain tensor:
    torch changes what the DTensor says of itself, as its dtype, and leaves the shard. Once.

    Args:
        shard_like: makes this rank's shard of a full plain tensor.
    Raises (then): ValueError: a plain tensor has not the shape of the full parameter.
    Collectives then: where `other` lies otherwise on the mesh, those of `redistribute`.
    """
    data: Any = torch.Tensor.data

    def set_data(tensor: DTensor, value: torch.Tensor) -> None:
        own, grid = tensor._spec, grid_of(tensor.device_mesh)
        if grid is not None and not isinstance(value, DTensor):
            if value.shape != tensor.shape:
                raise ValueError(
                    f"the data of a parameter of shape {list(tensor.shape)} that is sharded over a grid is to be a "
                    f"tensor of shape {list(value.shape)}: give a full tensor, of which each rank takes its shard, "
                    "or a DTensor; parameter.to_local() is this rank's shard, to be changed in place."
                )
            value = shard_like(value, tensor)
        if grid is not None and isinstance(value, DTensor) and value.device_mesh is own.mesh:
            value = cast(DTensor, value.detach()).redistribute(placements=own.placements)
        data.__set__(tensor, value)
        if grid is not None and isinstance(value, DTensor):
            tensor._local_tensor, tensor._spec = value._local_tensor, value._spec

    DTensor.data = property(data.__get__, set_data)  # type: ignore[assignment]


def apply_of_class(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """Do to a module what `module.to` and others do, where an instance has a method in place of it."""
    return type(module)._apply(module, *args, **kwargs)


def version_of(parameter: DTensor) -> int:
    """Return how often the values of a DTensor have been changed in place: as a whole, or this rank's shard by itself.

    torch counts a call on the DTensor for the DTensor alone, and one on the shard for the shard alone.
    """
    return parameter._version + parameter._local_tensor._version


def unseen_by_checkpoints() -> contextlib.AbstractContextManager:
    """Inside, selective activation checkpoints see no operators: in a recomputation they refuse those that were not in
    the forward pass, and what is begun ahead belongs to no layer."""
    if not torch._C._len_torch_dispatch_stack():
        return contextlib.nullcontext()
    from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    selective = (_CachedTorchDispatchMode, _CachingTorchDispatchMode)
    seen = any(isinstance(mode, selective) for mode in _get_current_dispatch_mode_stack())
    return _disable_current_modes() if seen else contextlib.nullcontext()


def changes_of(tensor: torch.Tensor) -> int:
    """Return how often a plain tensor has been changed in place; nobody counts changes of inference tensors."""
    return -1 if tensor.is_inference() else tensor._version


def is_view(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether a tensor is another, or has its elements in its shape by views, and so its gradients."""
    if tensor is other:
        return True

    def layout(each: torch.Tensor) -> tuple:
        return each.untyped_storage()._cdata, each.storage_offset(), each.shape, each.stride(), each.dtype

    if tensor.requires_grad != other.requires_grad or layout(tensor) != layout(other):
        return False
    return not tensor.requires_grad or tensor._base is (other if other._base is None else other._base)


def compile_apart(function: Callable, **options: Any) -> Callable:
    """Compile a function, by `torch.compile(function, **options)`, with graphs that no other call of it shares.

    Before releases of torch that can tell them apart all calls for the same code share its graphs.
    """
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        options = {"isolate_recompiles": True} | options
    return torch.compile(function, **options)


def shard_has_changed(parameter: DTensor) -> None:
    """Count a change of this rank's shard, for `version_of` and for what autograd has saved of it."""
    torch.autograd.graph.increment_version(parameter._local_tensor)


def reshaped_result(result: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A contiguous tensor that an autograd.Function has made, in the shape in which it returns it.

    Not a view: autograd forbids to change what a Function returns in place if it is one, and models do that.
    """
    return torch.ops.aten._unsafe_view.default(result, shape)


def assert_on_device(condition: torch.Tensor, message: str) -> None:
    """Stop the device where `condition` is False, without making the host wait for it."""
    torch._assert_async(condition, message)


def is_dropout(module: torch.nn.Module) -> bool:
    """Return whether it is one of torch's dropouts."""
    return isinstance(module, torch.nn.modules.dropout._DropoutNd)


def saved_tensors_have_hooks() -> bool:
    """Return whether something decides what autograd keeps here (a checkpointed layer, offloading to the CPU)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def backend_of(group: ProcessGroup | None = None, device: torch.device | None = None) -> str:
    """The backend of a group for tensors on a device, as gloo or nccl.

    Args:
        group: the world if None.
        device: that on which this process trains if None. A group may have a backend for each kind of device: torch
            makes it so where `init_process_group` is told nothing, or `cpu:gloo,cuda:nccl`.
    Raises:
        ValueError: the group has none for this device.
    """
    group, device = group or torch.distributed.group.WORLD, device or torch.device(default_device_type())
    assert group is not None, "torch.distributed is not initialized"
    try:
        return group._get_backend(device).name()
    except RuntimeError:
        raise ValueError(
            f"the process group has no backend for tensors on {device.type}, only "
            f"{torch.distributed.get_backend_config(group)}: move the model to the device of this rank first, or call "
            f"torch.distributed.init_process_group with a backend for {device.type}."
        ) from None


def world_timeout(device_type: str = "") -> float:
    """The timeout of collectives over the world, in seconds, as `init_process_group` was given it.

    `device_type`: of the tensors; that on which this process trains if it is empty.
    """
    backend = torch.distributed.group.WORLD._get_backend(torch.device(device_type or default_device_type()))
    options = getattr(backend, "options", None)
    timeout = getattr(options, "_timeout", None) or torch.distributed.constants.default_pg_timeout
    return timeout.total_seconds()


def high_priority(seconds: float) -> object:
    """Options of a group of NCCL (only builds with CUDA have them) whose kernels start before those that compute.

    A product of matrices fills a GPU; without priority a collective that is launched beside it waits for its end.

    Args:
        seconds: the timeout of its collectives.
    """
    options = torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timedelta(seconds=seconds)
    return options


def bind_world(device: torch.device) -> None:
    """Give the world the device of this rank, as `init_process_group(device_id=...)` does, if it has none.

    torch then splits the world's communicator where groups are made, in the place of one rendezvous for each of them,
    and no longer guesses the device of a barrier. accelerate, which makes the world for Trainer, launched scripts and
    notebooks, gives it none, and its InitProcessGroupKwargs has no such field.

    It has to have its communicator: NCCL makes it in the first collective over the world on this device.
    """
    world = torch.distributed.group.WORLD
    if world is not None and world.bound_device_id is None:
        world.bound_device_id = device


def make_group(ranks: Sequence[int], label: str, *, seconds: float, options: object = None) -> ProcessGroup:
    """A process group of some ranks, this one among them, made by its members alone.

    `dist.new_group` lets every rank name every group of the world: of 16,384 ranks each would name ten thousand.
    Every rank of the world must come here in the same order, each with its own group of a partition of the world.

    Only members know the group, so torch would name it by how many groups a rank has, which may differ where a script
    has made some of its own; and, if the world was given a device, split its communicator by a hash of the ranks,
    which two groups may share. Here the least rank tells groups of one label apart; earlier ones of that label are as
    many on every rank.

    Args:
        ranks: ascending; seconds: the timeout of its collectives; options: of the backend, for this group alone.
    Collectives: those by which a backend connects the members. A split of the world's communicator if that is bound to
        a device.
    """
    from torch.distributed import distributed_c10d

    before = sum(name.startswith(f"{label}:") for name in distributed_c10d._world.pg_names.values())
    name = f"{label}:{before}:{ranks[0]}"
    names = {"_process_group_name": lambda *_, **__: name, "_process_group_color": lambda *_: ranks[0] + 1}
    with replace_attributes({(distributed_c10d, each): function for each, function in names.items()}):
        return torch.distributed.new_group(
            list(ranks),
            timeout=timedelta(seconds=seconds),
            pg_options=options,
            use_local_synchronization=True,
            group_desc=label,
        )


def groups_with_timeout(seconds: float) -> contextlib.AbstractContextManager[None]:
    """Process groups that are made inside, without a timeout of their own, get this one.

    Some makers of groups take none and use torch's default of 10 or 30 minutes. Of gloo, messages between two
    ranks keep the timeout with which their group was made, so that it cannot be mended afterwards.
    """
    from torch.distributed import distributed_c10d

    names = ("default_pg_timeout", "default_pg_nccl_timeout")
    return replace_attributes({(distributed_c10d, name): timedelta(seconds=seconds) for name in names})


def broadcast_coalesced(tensors: list[torch.Tensor], buffer_bytes: int, group: torch.distributed.ProcessGroup) -> None:
    """Overwrite tensors with those of a group's first rank, as DistributedDataParallel does: in fused broadcasts."""
    from torch._C._distributed_c10d import _broadcast_coalesced

    _broadcast_coalesced(group, tensors, buffer_bytes, 0)


def watch_store(keys: str) -> torch.distributed.Store:
    """Return a connection to the store through which the world was set up for keys of one kind: a thread may use it at
    any time."""
    from torch.distributed.distributed_c10d import _get_default_store

    return torch.distributed.PrefixStore(f"hf_axonn/{keys}", _get_default_store().clone())


def store_outlives_ranks() -> bool:
    """Return whether the store is kept by the launcher, or on disk, and not by rank 0."""
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    while isinstance(store, torch.distributed.PrefixStore):
        store = store.underlying_store
    return not isinstance(store, torch.distributed.TCPStore) or (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    )


def ask_class_for_step(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer step as its class does now (`around_step`): a learning rate schedule that was made before has
    wrapped the step that the class had then."""
    if not hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched"):
        return

    @functools.wraps(type(optimizer).step)
    def step(*args, **kwargs):
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True
    optimizer.step = step


def autocast_settings(device_type: str) -> dict[str, Any]:
    """Return the arguments of `torch.autocast` as it is now, for code that runs where it may be another; none for a
    device without one."""
    if not torch.amp.is_autocast_available(device_type):
        return {}
    return {
        "device_type": device_type,
        "dtype": torch.get_autocast_dtype(device_type),
        "enabled": torch.is_autocast_enabled(device_type),
    }


def around_step(
    optimizer: type[torch.optim.Optimizer],
    take_step: Callable[[torch.optim.Optimizer, Callable[[], object]], object],
) -> None:
    """Let a class of optimizers take its steps by `take_step(optimizer, its own step)`, inside of the hooks of steps.

    A closure runs before the hooks, which then see its gradients, so the class must call it once and first. A second
    time does nothing.
    """
    step = vars(optimizer).get("step")  # torch puts one with hooks into each class of which there is an instance
    if step is None or hasattr(step, "take_step"):
        return
    own = step.__wrapped__ if getattr(step, "hooked", False) else step

    @torch.optim.Optimizer.profile_hook_step
    def inside(self):
        return take_step(self, functools.partial(own, self))

    @functools.wraps(own)
    def with_closure(self, closure=None):
        if closure is None:
            return inside(self)
        with torch.enable_grad():
            loss = closure()
        inside(self)
        return loss

    wrapped: Any = with_closure
    wrapped.take_step, wrapped.hooked = take_step, True
    optimizer.step = wrapped  # type: ignore[method-assign]


def can_be_packed(weight: torch.Tensor) -> bool:
    """Return whether this torch and this processor have a `packed_product` for a weight."""
    operators = torch.ops.mkldnn
    names = ("_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported")
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    if not all(hasattr(operators, name) for name in names):
        return False
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and bool(operators._is_mkldnn_bf16_supported())
    )


def packed_product(weight: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """`linear(input, weight, bias)` as a function of input and bias, with a copy of the weight in the layout of
    oneDNN's kernels. torch makes a copy in each call, or multiplies without, which takes longer where rows are few.

    The copy does not follow changes of the weight, and autograd does not see the product.

    Args:
        weight: [N, K], one that `can_be_packed`.
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return lambda rows, bias: torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")


@contextlib.contextmanager
def fake_world(size: int) -> Iterator[None]:
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


def record_allocations() -> None:
    """Begin to keep the last allocations of CUDA's allocator, with the stack of each, for `write_allocations`."""
    torch.cuda.memory._record_memory_history(max_entries=100_000)


def write_allocations(path: str) -> None:
    """Write what `record_allocations` has kept, for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)


def when_out_of_memory(function: Callable[[], object]) -> None:
    """Call a function when CUDA's allocator finds no memory, before the error is raised."""
    cast(Any, torch._C)._cuda_attach_out_of_memory_observer(lambda device, requested, total, free: function())


class UnreadHistogram(TorchFunctionMode):
    """Let a histogram of one bin from a value to the same value count that value, inside.

    torch takes this range as unknown, and the host reads the least and the largest value from the device.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.histc and kwargs.get("bins") == 1 and kwargs.get("min") == kwargs.get("max"):
            return (args[0] == kwargs["min"]).sum(dim=0, keepdim=True, dtype=args[0].dtype)
        return func(*args, **kwargs)
