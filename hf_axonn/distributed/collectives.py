"""Every collective of the engine, and the backward that belongs to each.

The only file that calls collectives of torch.distributed. Blocks are always stacked in a new leading dim, so that
what travels is contiguous: `all_gather` turns [...] into [p, ...] and `reduce_scatter` turns [p, ...] into [...], p
being the number of ranks of the group. A group of one rank costs nothing.

Two meanings of "the same on every rank" keep the backward passes right:

    partial      each rank's gradient is its own share of a sum still to be taken
    replicated   each rank's gradient is already the full one, because every rank repeated the same work

    function             forward          backward          the gradient of the result is
    all_gather           all-gather       reduce-scatter    partial
    reduce_scatter       reduce-scatter   all-gather        of this rank's block
    all_to_all           all-to-all       all-to-all        of this rank's block
    exchange_rows        exchange         exchange          of the rows that this rank got
    all_reduce           all-reduce       identity          replicated
    all_reduce_backward  identity         all-reduce        partial
    gather_replicated    all-gather       own block         replicated
    take_replicated      own block        all-gather        of this rank's block

`observe` tells a callback of every collective that this process issues (tests/helpers/traffic_counter.py counts
bytes with it). `watch_waits` puts a context around everything in which this process waits for one
(monitoring/waits.py measures it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hf_axonn.compat.torch import backend_of, broadcast_coalesced, reshaped_result
from hf_axonn.distributed import gloo
from hf_axonn.distributed.meeting import meet


# torch 2.13 renamed these two; the old names warn there, the new ones are missing before.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Of several tensors in one launch: (group, outputs, inputs).
_all_gathers = ProcessGroup.allgather_into_tensor_coalesced
_reduce_scatters = ProcessGroup.reduce_scatter_tensor_coalesced

# A block of at least this size is worth a message of its own, see `send_unfused`.
ALONE_BYTES = 2**18
# Smaller tensors of a broadcast share a message of at most this size.
FUSED_BYTES = 25 * 2**20
FOREVER = timedelta(days=1000)

# Called with (kind, payload bytes, group) before each collective; see `observe`.
_observers: list[Callable[[str, int, ProcessGroup], None]] = []
# Called with (kind, group); see `watch_waits`.
_watches: list[Callable[[str, ProcessGroup], AbstractContextManager]] = []
_NOTHING = nullcontext()
_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "mean": dist.ReduceOp.AVG}


@contextmanager
def observe(callback: Callable[[str, int, ProcessGroup], None]) -> Iterator[None]:
    """Call `callback(kind, payload, group)` before every collective of more than one rank that is issued inside.

    `kind` is all_gather, reduce_scatter, all_to_all, exchange, all_reduce or broadcast, whatever the backend makes of
    it. The payload is in bytes: the block that an all-gather sends or a reduce-scatter leaves on each rank, what an
    exchange sends to others, the full tensor of the others. A backward pass may call it on a thread of autograd.
    """
    _observers.append(callback)
    try:
        yield
    finally:
        _observers.remove(callback)


def _report(kind: str, payload: int, group: ProcessGroup) -> None:
    for callback in _observers:
        callback(kind, payload, group)


@contextmanager
def watch_waits(watch: Callable[[str, ProcessGroup], AbstractContextManager]) -> Iterator[None]:
    """Be inside of the context `watch(kind, group)` wherever this process waits for a collective that begins inside.

    On CUDA the stream waits, and the host continues. A backward pass may call it on a thread of autograd.
    """
    _watches.append(watch)
    try:
        yield
    finally:
        _watches.remove(watch)


def waiting(kind: str, group: ProcessGroup) -> AbstractContextManager:
    """Return the context of a wait, or of a collective that ends with one."""
    if not _watches:
        return _NOTHING
    stack = ExitStack()
    for watch in _watches:
        stack.enter_context(watch(kind, group))
    return stack


class _Work:
    """A collective under way, with the tensors that it reads: their memory stays theirs until the wait.

    A backend may read them at any time until then. gloo holds them itself, and NCCL's group does, but the engine does
    not rely on it. On CUDA a wait makes the current stream wait, which is the one of the launch (docs/gpu.md): what is
    freed afterwards goes to later work of that stream, so no `record_stream` is due.
    """

    def __init__(self, work: Any, kind: str, group: ProcessGroup, *sent: Tensor) -> None:
        self._work, self._kind, self._group, self._sent = work, kind, group, sent
        self._watched = bool(_watches)

    def wait(self) -> None:
        with waiting(self._kind, self._group) if self._watched else _NOTHING:
            self._work.wait()
        self._sent = ()


def world_group() -> ProcessGroup:
    """Return the group of all ranks, which exists once torch.distributed is initialized."""
    assert dist.group.WORLD is not None, "torch.distributed is not initialized"
    return dist.group.WORLD


def start_all_gather(block: Tensor, group: ProcessGroup) -> Pending:
    """Begin to stack every rank's `block` [...] into [p, ...]. One all-gather over `group`."""
    if group.size() > 1 and _observers:
        _report("all_gather", block.nbytes, group)
    return _start_all_gather(block, group)


def start_all_gathers(bundle: Sequence[Sequence[Tensor]], group: ProcessGroup) -> list[Pending]:
    """Begin several all-gathers, each of one or more flat blocks [n], every one of which becomes [p, n].

    Args:
        bundle: the blocks of each all-gather, all of one dtype.
    Returns: for each all-gather, the list of its results.
    Collectives: one call of the backend over `group` for all; on gloo large blocks travel alone (`send_unfused`).
    """
    if group.size() > 1 and _observers:
        for blocks in bundle:
            _report("all_gather", sum([block.nbytes for block in blocks]), group)
    shared = [block for blocks in bundle for block in blocks if not send_unfused(block, group)]
    arriving = dict(zip(map(id, shared), _start_in_one_call(shared, group), strict=True))
    return [
        together([arriving.get(id(block)) or _start_all_gather(block, group) for block in blocks]) for blocks in bundle
    ]


def _start_in_one_call(blocks: list[Tensor], group: ProcessGroup) -> list[Pending]:
    """Begin to stack every rank's flat `blocks`, each [n], into [p, n]."""
    if not blocks:
        return []
    if backend_of(group, blocks[0].device) != "gloo":
        results = [block.new_empty(group.size(), len(block)) for block in blocks]
        work = _all_gathers(group, [result.view(-1) for result in results], blocks)
        under_way = _Work(work, "all_gather", group, *blocks)
        return [Pending(result, under_way) for result in results]
    # Not gloo's own gather of several, see gloo.py.
    joined = _start_all_gather(torch.cat(blocks) if len(blocks) > 1 else blocks[0], group)
    return joined.split([len(block) for block in blocks], dim=1)


def start_reduce_scatters(every: Sequence[Tensor], group: ProcessGroup) -> Pending:
    """Begin a reduce-scatter of several tensors: of each, [p, n], the sum of block i is left, [n], on rank i.

    Returns: the list of the results.
    Collectives: one call of the backend over `group`; on gloo an all-to-all, of each that is large alone
    (`send_unfused`), else of all of them joined.
    """
    if backend_of(group, every[0].device) != "gloo":
        if _observers:
            _report("reduce_scatter", sum([blocks.nbytes for blocks in every]) // group.size(), group)
        sent = [blocks.reshape(-1) for blocks in every]
        results = [blocks.new_empty(blocks.shape[1:]) for blocks in every]
        return Pending(results, _Work(_reduce_scatters(group, results, sent), "reduce_scatter", group, *sent))
    if all(send_unfused(blocks[0], group) for blocks in every):
        return together([start_reduce_scatter(blocks, group) for blocks in every])
    sizes = [blocks.shape[1] for blocks in every]
    pending = start_reduce_scatter(torch.cat(list(every), dim=1) if len(every) > 1 else every[0], group)
    return pending.then(lambda flat: flat.split(sizes))


def gather_quietly(block: Tensor, group: ProcessGroup) -> Tensor:
    """[...] -> [p, ...], for checks, which are no part of a step: observers do not count it. One all-gather."""
    return _start_all_gather(block, group).wait()


def _start_all_gather(block: Tensor, group: ProcessGroup) -> Pending:
    size = group.size()
    if size == 1:
        return Pending(block.unsqueeze(0))
    result = block.new_empty((size, *block.shape))
    # gloo moves tensors of a GPU, but not in messages.
    if block.nbytes >= gloo.LARGE_BYTES and block.device.type == "cpu" and backend_of(group, block.device) == "gloo":
        return Pending(result, _Work(gloo.start_all_gather(block, result, group), "all_gather", group))
    flat = block.contiguous().view(-1)
    work = _all_gather_single(result.view(-1), flat, group=group, async_op=True)
    return Pending(result, _Work(work, "all_gather", group, flat))


def start_reduce_scatter(blocks: Tensor, group: ProcessGroup) -> Pending:
    """Begin to sum block i of `blocks` [p, ...] over the ranks and leave it, [...], on rank i of `group`.

    One reduce-scatter; on gloo an all-to-all and a local sum, as gloo's own reduce-scatter takes about twice as long.
    """
    if group.size() == 1:
        return Pending(blocks[0])
    blocks = blocks.contiguous()
    if _observers:
        _report("reduce_scatter", blocks.nbytes // group.size(), group)
    if backend_of(group, blocks.device) == "gloo":
        received = torch.empty_like(blocks)
        work = dist.all_to_all_single(received, blocks, group=group, async_op=True)
        return Pending(received, _Work(work, "reduce_scatter", group, blocks), gloo.sum_blocks)
    result = blocks.new_empty(blocks.shape[1:])
    work = _reduce_scatter_single(result, blocks.flatten(0, 1), group=group, async_op=True)
    return Pending(result, _Work(work, "reduce_scatter", group, blocks))


def send_unfused(block: Tensor, group: ProcessGroup) -> bool:
    """Return whether `block` is better sent as a message of its own than copied into a larger one.

    On gloo a message costs little, and a copy takes processor time from the matmuls; elsewhere it is the other way.
    """
    return group.size() == 1 or (block.nbytes >= ALONE_BYTES and backend_of(group, block.device) == "gloo")


def exchange(blocks: Tensor, group: ProcessGroup) -> Tensor:
    """Send block i of `blocks` [p, ...] to rank i; returns what arrived, stacked by sender. One all-to-all."""
    if group.size() == 1:
        return blocks
    blocks = blocks.contiguous()
    if _observers:
        _report("all_to_all", blocks.nbytes, group)
    received = torch.empty_like(blocks)
    with waiting("all_to_all", group):
        dist.all_to_all_single(received, blocks, group=group)
    return received


def start_exchange_rows(rows: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Pending:
    """Begin to send `rows` [sum of send, ...] by receiver; result: [sum of receive, ...] by sender. One exchange."""
    rows = rows.contiguous()
    if _observers:
        own = send[dist.get_group_rank(group, dist.get_rank())]
        _report("exchange", (sum(send) - own) * rows[:1].nbytes, group)
    arrived = rows.new_empty(sum(receive), *rows.shape[1:])
    work = dist.all_to_all_single(arrived, rows, receive, send, group=group, async_op=True)
    return Pending(arrived, _Work(work, "exchange", group, rows))


def start_all_reduce(value: Tensor, group: ProcessGroup, *, op: str = "sum") -> Pending:
    """Begin to reduce `value` over `group` in place. `op` is sum, max or mean. One all-reduce."""
    if _observers and group.size() > 1:
        _report("all_reduce", value.nbytes, group)
    return _start_all_reduce(value, group, op)


def reduce_(value: Tensor, group: ProcessGroup, *, op: str = "sum") -> Tensor:
    """Reduce `value` over `group` in place and return it. `op` is sum, max or mean. One all-reduce."""
    return start_all_reduce(value, group, op=op).wait()


def reduce_quietly(value: Tensor, group: ProcessGroup, *, op: str = "sum") -> Tensor:
    """Reduce as `reduce_`, for checks, which are no part of a step: observers do not count it. One all-reduce."""
    return _start_all_reduce(value, group, op).wait()


def _start_all_reduce(value: Tensor, group: ProcessGroup, op: str) -> Pending:
    if group.size() == 1:
        return Pending(value)
    work = dist.all_reduce(value, op=_REDUCE_OPS[op], group=group, async_op=True)
    return Pending(value, _Work(work, "all_reduce", group))


def broadcast_over(value: Tensor, source: int, group: ProcessGroup) -> Tensor:
    """Overwrite a contiguous `value` with that of rank `source` of `group` and return it. One broadcast."""
    if group.size() > 1:
        if _observers:
            _report("broadcast", value.nbytes, group)
        with waiting("broadcast", group):
            dist.broadcast(value, group=group, group_src=source)
    return value


def send_(value: Tensor, peer: int, group: ProcessGroup) -> None:
    """Send to rank `peer` of `group`, point to point."""
    if _observers:
        _report("send", value.nbytes, group)
    with waiting("send", group):
        dist.send(value.contiguous(), group=group, group_dst=peer)


def receive_(value: Tensor, peer: int, group: ProcessGroup) -> Tensor:
    """Overwrite `value` with what rank `peer` of `group` sends, point to point, and return it."""
    with waiting("send", group):
        dist.recv(value, group=group, group_src=peer)
    return value


def swap(value: Tensor, peer: int, group: ProcessGroup) -> Tensor:
    """Swap `value` with rank `peer` of `group`, which calls this with this rank. Point to point, both ways."""
    if _observers:
        _report("send", value.nbytes, group)
    value, received = value.contiguous(), torch.empty_like(value, memory_format=torch.contiguous_format)
    both = [
        dist.P2POp(dist.isend, value, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, received, group=group, group_peer=peer),
    ]
    works = dist.batch_isend_irecv(both)
    with waiting("send", group):
        for work in works:
            work.wait()
    return received


def broadcast_(value: Tensor) -> Tensor:
    """Overwrite `value` with that of rank 0 of the world and return it. One broadcast over the world."""
    if _observers:
        _report("broadcast", value.nbytes, world_group())
    dist.broadcast(value, src=0)
    return value


def broadcast_all(tensors: Iterable[Tensor], group: ProcessGroup | None = None) -> None:
    """Overwrite each tensor with that of the first rank of a group; tensors on the meta device are left out.

    Args:
        group: of the ranks that have these tensors; the world if None.
    Collectives: broadcasts over the group. Small tensors share one, up to FUSED_BYTES: a message for each parameter
        would make the start of a model with thousands of them wait for as many latencies.
    """
    group = world_group() if group is None else group
    if group.size() == 1:
        return
    fused = []
    for tensor in (tensor.detach() for tensor in tensors if not tensor.is_meta):
        if tensor.nbytes < FUSED_BYTES or not tensor.is_contiguous():
            fused.append(tensor)
        else:
            broadcast_over(tensor, 0, group)
    if _observers and fused:
        _report("broadcast", sum(tensor.nbytes for tensor in fused), group)
    if fused:
        broadcast_coalesced(fused, FUSED_BYTES, group)


def broadcast_text(text: str, device: torch.device) -> str:
    """Return the text of rank 0 of the world; `device` is this rank's. Two broadcasts over it: length and bytes."""
    content = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    length = broadcast_(torch.tensor(len(content), device=device))
    if world_rank() != 0:
        content = torch.empty(int(length), dtype=torch.uint8, device=device)
    return bytes(broadcast_(content).tolist()).decode()


def broadcast_object(value: Any, source: int, device: torch.device) -> Any:
    """Return the `value` of rank `source` of the world, pickled; `device` is this rank's. Two broadcasts over it."""
    objects = [value]
    dist.broadcast_object_list(objects, source, device=device)
    return objects[0]


def barrier() -> None:
    """Wait for all ranks of the world; nothing on one process.

    Without a limit of time, other than all collectives: a rank may write or upload before it comes here. One that
    hangs there is found by the watchdog.

    Collectives: a barrier over the world.
    """
    if not dist.is_initialized() or backend_of() == "fake":
        return
    if backend_of() == "gloo":
        options = dist.BarrierOptions()
        options.timeout = FOREVER
        world_group().barrier(options).wait()
    else:
        meet()
        dist.barrier()


def leave_world() -> None:
    """Destroy the process group, if there still is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def world_rank() -> int:
    """This process' rank, 0 on one process."""
    return dist.get_rank() if dist.is_initialized() else 0


class _Collective(torch.autograd.Function):
    """A collective whose backward is another one: two functions of (tensor, group)."""

    @staticmethod
    def forward(ctx, value, group, run, run_backward):
        ctx.group, ctx.run_backward = group, run_backward
        return run(value, group)

    @staticmethod
    def backward(ctx, grad):
        return ctx.run_backward(grad, ctx.group), None, None, None


class _ReduceScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, group, leading):
        ctx.group, ctx.rows_shape = group, rows.shape
        size = rows.shape[-1]
        block = _scatter(rows.reshape(group.size(), -1, size), group)
        return reshaped_result(block, (*leading, size))

    @staticmethod
    def backward(ctx, grad):
        return _gather(grad.reshape(-1, grad.shape[-1]), ctx.group).view(ctx.rows_shape), None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, send, receive, group):
        ctx.sizes, ctx.group = (receive, send), group
        return start_exchange_rows(rows, send, receive, group).wait()

    @staticmethod
    def backward(ctx, grad):
        return start_exchange_rows(grad, *ctx.sizes, ctx.group).wait(), None, None, None


def _gather(block: Tensor, group: ProcessGroup) -> Tensor:
    return start_all_gather(block, group).wait()


def _scatter(blocks: Tensor, group: ProcessGroup) -> Tensor:
    return start_reduce_scatter(blocks, group).wait()


def _take_block(blocks: Tensor, group: ProcessGroup) -> Tensor:
    return blocks[dist.get_group_rank(group, dist.get_rank())]


def _copy_block(blocks: Tensor, group: ProcessGroup) -> Tensor:
    return _take_block(blocks, group).clone()


def _sum_copies(value: Tensor, group: ProcessGroup) -> Tensor:
    return reduce_(value.clone(memory_format=torch.contiguous_format), group)


def _alias(value: Tensor, group: ProcessGroup) -> Tensor:
    return value.view_as(value)


def all_gather(block: Tensor, group: ProcessGroup) -> Tensor:
    """[...] -> [p, ...]. Backward: reduce-scatter."""
    return block.unsqueeze(0) if group.size() == 1 else _Collective.apply(block, group, _gather, _scatter)


def reduce_scatter(blocks: Tensor, group: ProcessGroup) -> Tensor:
    """[p, ...] -> [...]: the sum of this rank's block. Backward: all-gather."""
    return blocks.squeeze(0) if group.size() == 1 else _Collective.apply(blocks, group, _scatter, _gather)


def reduce_scatter_rows(rows: Tensor, group: ProcessGroup, leading: Sequence[int]) -> Tensor:
    """[..., n] of T rows -> [*leading, n] of T/p rows: the sum of this rank's. Backward: all-gather."""
    if group.size() == 1:
        return rows if rows.shape[:-1] == torch.Size(leading) else rows.reshape(*leading, rows.shape[-1])
    return _ReduceScatterRows.apply(rows, group, leading)


def all_to_all(blocks: Tensor, group: ProcessGroup) -> Tensor:
    """[p, ...] by receiver -> [p, ...] by sender. Backward: all-to-all."""
    return blocks if group.size() == 1 else _Collective.apply(blocks, group, exchange, exchange)


def exchange_rows(rows: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
    """[sum of send, ...] by receiver -> [sum of receive, ...] by sender, of unequal sizes. Backward: the other way."""
    return rows if group.size() == 1 else _ExchangeRows.apply(rows, send, receive, group)


def all_reduce(value: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the ranks, which then repeat the same work. Backward: identity."""
    return value if group.size() == 1 else _Collective.apply(value, group, _sum_copies, _alias)


def all_reduce_backward(value: Tensor, group: ProcessGroup) -> Tensor:
    """Identity on a value that all ranks hold and use for different work. Backward: all-reduce."""
    return value if group.size() == 1 else _Collective.apply(value, group, _alias, _sum_copies)


def gather_replicated(block: Tensor, group: ProcessGroup) -> Tensor:
    """[...] -> [p, ...], on which all ranks repeat the same work. Backward: this rank's block."""
    return block.unsqueeze(0) if group.size() == 1 else _Collective.apply(block, group, _gather, _take_block)


def take_replicated(blocks: Tensor, group: ProcessGroup) -> Tensor:
    """[p, ...], the same on all ranks -> this rank's block [...]. Backward: all-gather."""
    return blocks.squeeze(0) if group.size() == 1 else _Collective.apply(blocks, group, _copy_block, _gather)


class Pending:
    """A result that may still be under way. `wait()` returns it, any number of times."""

    def __init__(self, result: Any, work: Any = None, finish: Callable[[Any], Any] | None = None):
        self._result = result
        self._work = work
        self._finish = finish

    def wait(self) -> Any:
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._finish is not None:
            self._result = self._finish(self._result)
            self._finish = None
        return self._result

    def then(self, finish: Callable[[Any], Any]) -> Pending:
        """Return the same work, whose result is `finish` of this one's."""
        first = self._finish
        both = finish if first is None else lambda result: finish(first(result))
        return Pending(self._result, self._work, both)

    def split(self, sizes: list[int], dim: int) -> list[Pending]:
        """Return parts of a tensor that needs no more work: views, made now.

        Work at `wait` runs inside of whatever waits first. That may be a layer that runs again for its checkpoint and
        did not wait before: torch refuses operators that it then sees.
        """
        assert self._finish is None, "parts are of what arrives"
        return [Pending(part, self) for part in self._result.split(sizes, dim)]


def together(pendings: list[Pending]) -> Pending:
    """Join several into one, whose `wait()` returns the list of their results."""
    return Pending(pendings, finish=lambda each: [pending.wait() for pending in each])
