"""The worst order that an asynchronous backend may choose, on gloo, and the order in which each rank issued what.

A backend may send late: a GPU's collective runs when its stream comes to it. So here nothing is sent before `wait()`,
inputs are read then, and until then outputs hold what no result is: NaN, of integers the largest. What changes an
input under way or reads an output too early gives other numbers, in every run. gloo itself hides both: it is mostly
done before the caller goes on.

    with backend("nccl"):                   the engine's code for NCCL, run by gloo as gloo would
    with backend("nccl", late=True) as it:  the same by the worst order; `it.issued` is what this rank issued
    with backend("nccl", tracked=True):     the same, and a buffer that is reused too early raises (buffers.py)
    problems_of_order([issued of rank 0, issued of rank 1, ...])

It stands in for what hf_axonn/distributed calls, the only place of collectives, for the messages of torch's pipeline
schedules, and for the functional collectives of torch that DTensor calls (`full_tensor`, a norm over all ranks). What
Accelerate gathers by itself goes past it.
"""

from __future__ import annotations

import contextlib
import functools
import graphlib
import itertools
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.pipelining import schedules

from hf_axonn.compat.replaced import replace_attributes
from hf_axonn.distributed import collectives, gloo, mesh
from hf_axonn.engine import gradient_sync
from tests.helpers.buffers import Buffers, Travels, poison


REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


@dataclass(frozen=True, order=True)
class Issued:
    """One collective, as a rank issued it. The group is its name, the same on its members, and their ranks."""

    group: tuple[str, tuple[int, ...]]
    op: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.op} of {list(self.shape)} {self.dtype}"


class AsTheyAre:
    """The tensors that a collective reads and fills: the engine's own tensors, as they are when it runs."""

    def __init__(self, sent: Sequence[Tensor], room: Sequence[Tensor]) -> None:
        self.sent, self.room = sent, room
        for output in room:
            poison(output)

    def run(self, function: Callable[[Sequence[Tensor], Sequence[Tensor]], object]) -> None:
        with torch.no_grad():
            function(self.sent, self.room)

    def arrive(self) -> None:
        """Nothing is left to do."""


class Held:
    """A collective that was issued and that the backend has not begun. `wait()` runs it.

    Args:
        call: a function of (sent, room) that communicates.
        travels: what it reads and fills; nobody may write to the latter before.
        what: for messages.
    """

    def __init__(self, call: Callable[..., object], travels: AsTheyAre | Travels, what: str) -> None:
        self._call: Callable[..., object] | None = call
        self._travels = travels
        self._what = what
        self._versions = self._count()

    def wait(self, timeout: object = None) -> bool:
        if self._call is not None:
            call, self._call = self._call, None
            assert self._versions == self._count(), (
                f"an output of {self._what} was written to before it was waited for"
            )
            self._travels.run(call)
        return True

    def _count(self) -> list[int]:
        return [0 if output.is_inference() else output._version for output in self._travels.room]


class HeldMessage:
    """A message between two ranks that has not been begun. `start()` begins it."""

    def __init__(self, begin: Callable[[Tensor], dist.Work], travels: AsTheyAre | Travels) -> None:
        self._begin, self._travels = begin, travels
        self._work: dist.Work | None = None

    def start(self) -> None:
        self._work = self._work or self._begin(*self._travels.sent, *self._travels.room)

    def wait(self, timeout: object = None) -> bool:
        self.start()
        self._work.wait()
        self._travels.arrive()
        return True


class HeldMessages(gloo.Messages):
    """Messages that are waited for together are begun together: the other ranks wait for theirs before they send."""

    def wait(self) -> None:
        for work in self._works:
            work.start()
        super().wait()


class HeldBatch:
    """Messages between stages that have not been begun. Whoever waits for some begins all that were issued before.

    torch's schedules wait for what they have sent long after, when others have waited for it: of a GPU that is on its
    stream by then, but nothing says that it was read before.
    """

    def __init__(
        self, earlier: list[HeldBatch], begin: Callable[..., list[dist.Work]], travels: AsTheyAre | Travels
    ) -> None:
        self._begin, self._travels = begin, travels
        self._earlier = earlier
        self._works: list[dist.Work] | None = None
        earlier.append(self)

    def wait(self, timeout: object = None) -> bool:
        while self._earlier:
            batch = self._earlier.pop(0)
            batch._works = batch._begin(batch._travels.sent, batch._travels.room)
        for work in self._works:
            work.wait()
        self._travels.arrive()
        return True


class Backend:
    """The `dist` that hf_axonn/distributed sees, and torch's functional collectives.

    Args:
        like: whose branch the engine takes, nccl or gloo.
        late: whether everything waits for `wait()`; otherwise gloo does as it always does.
        buffers: what watches the tensors of all that waits, or None.

    Attributes:
        issued: what this rank issued, in order.
        between_stages: how many messages of torch's schedules it issued besides; their order differs by stage.
    """

    def __init__(self, like: str, *, late: bool, buffers: Buffers | None = None) -> None:
        self.like = like
        self.late = late
        self.buffers = buffers
        self.issued: list[Issued] = []
        self.between_stages = 0
        self._functional: dict[int, Held] = {}
        self._batches: list[HeldBatch] = []

    def note(self, op: str, group: ProcessGroup | None, shape: Sequence[int], dtype: object) -> None:
        group = group or dist.group.WORLD
        who = group.group_name, tuple(dist.get_process_group_ranks(group))
        self.issued.append(Issued(who, op, tuple(shape), str(dtype).removeprefix("torch.")))

    def _travels(self, what: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> AsTheyAre | Travels:
        if self.buffers is None:
            return AsTheyAre(inputs, outputs)
        return self.buffers.begin(what, inputs=inputs, outputs=outputs)

    def _held(self, call: Callable[..., object], inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Held:
        """Hold the collective that was noted last: a function of (sent, room)."""
        what = str(self.issued[-1])
        return Held(call, self._travels(what, inputs, outputs), what)

    def _out_of_place(self, op: str, original: Callable) -> Callable:
        """An `original(output, input, ..., group=, async_op=)`."""

        def issue(output, input_, *sizes, group=None, async_op=False, **options):
            # Ranks send unequal numbers of rows where they say how many.
            self.note(op, group, input_.shape[1:] if sizes else input_.shape, input_.dtype)
            if not (self.late and async_op):
                return original(output, input_, *sizes, group=group, async_op=async_op, **options)

            def call(sent, room):
                original(*room, *sent, *sizes, group=group, **options)

            return self._held(call, [input_], [output])

        return issue

    def _in_one_launch(self, op: str, original: Callable) -> Callable:
        """An `original(group, outputs, inputs)`, which returns while it is under way."""

        def issue(group, outputs, inputs):
            for input_ in inputs:
                self.note(op, group, input_.shape, input_.dtype)
            held = self._held(lambda sent, room: original(group, room, sent).wait(), inputs, outputs)
            if not self.late:
                held.wait()  # gloo may not have two of them under way, see hf_axonn/distributed/gloo.py
            return held

        return issue

    def all_reduce(self, value, op=dist.ReduceOp.SUM, group=None, async_op=False):
        self.note(f"all_reduce {op}".replace("RedOpType.", "").lower(), group, value.shape, value.dtype)
        if not (self.late and async_op):
            return dist.all_reduce(value, op=op, group=group, async_op=async_op)
        travels = value.detach().clone(memory_format=torch.contiguous_format)

        def call(_, room):
            dist.all_reduce(travels, op=op, group=group)
            room[0].detach().copy_(travels)

        return self._held(call, [], [value])

    def _message(self, op: str, original: Callable, peer: str) -> Callable:
        """An `original(tensor, group=, peer=)`, noted by how far on in the group the other rank is."""

        def issue(tensor, *, group, **peers):
            away = (peers[peer] - group.rank()) % group.size()
            self.note(f"{op} +{away}", group, tensor.shape, tensor.dtype)
            if not self.late:
                return original(tensor, group=group, **peers)
            ends = ([], [tensor]) if op == "irecv" else ([tensor], [])
            begin = functools.partial(original, group=group, **peers)
            return HeldMessage(begin, self._travels(str(self.issued[-1]), *ends))

        return issue

    def batch_p2p(self, ops, desc=None):
        self.between_stages += len(ops)
        if not (self.late and ops):
            return _batch_p2p(ops, desc)
        leaving, arriving = ([op.tensor for op in ops if op.op is kind] for kind in (dist.isend, dist.irecv))
        travels = self._travels(f"a message between stages ({desc})", leaving, arriving)
        where = [(op.op, op.group, op.tag, op.group_peer) for op in ops]  # and not the tensors

        def begin(sent, room):
            left = {dist.isend: iter(sent), dist.irecv: iter(room)}
            again = [
                dist.P2POp(kind, next(left[kind]), group=group, tag=tag, group_peer=peer)
                for kind, group, tag, peer in where
            ]
            return _batch_p2p(again, desc)

        return [HeldBatch(self._batches, begin, travels)]

    def broadcast(self, value, **options):
        source = options.get("src", options.get("group_src", 0))
        self.note(f"broadcast from {source}", options.get("group"), value.shape, value.dtype)
        return dist.broadcast(value, **options)

    def broadcast_coalesced(self, tensors, buffer_bytes, group):
        sizes = [tensor.numel() for tensor in tensors]
        self.note("broadcasts", group, sizes, {tensor.dtype: None for tensor in tensors}.keys())
        return _broadcast_coalesced(tensors, buffer_bytes, group)

    def barrier(self, group, *options, **opts):
        self.note("barrier", group, (), None)
        return _barrier(group, *options, **opts)

    def _functional_op(self, op: str, group_name: str, input_: Tensor, output: Tensor, call: Callable) -> Tensor:
        group = _resolve_process_group(group_name)
        self.note(f"functional {op}", group, input_.shape, input_.dtype)

        def run(sent, room):
            call(room[0], sent[0].contiguous(), group)

        if self.late and output.numel():
            self._functional[output.untyped_storage().data_ptr()] = self._held(run, [input_], [output])
        else:
            run([input_], [output])
        return output

    def functional_all_reduce(self, value: Tensor, op: str, group_name: str) -> Tensor:
        def call(output, input_, group):
            dist.all_reduce(output.copy_(input_), op=REDUCE_OPS[op.lower()], group=group)

        return self._functional_op(f"all_reduce {op}", group_name, value, _new(value, 1), call)

    def functional_all_gather(self, block: Tensor, size: int, group_name: str) -> Tensor:
        def call(output, input_, group):
            _all_gather(output, input_, group=group)

        return self._functional_op("all_gather", group_name, block, _new(block, size), call)

    def functional_reduce_scatter(self, blocks: Tensor, op: str, size: int, group_name: str) -> Tensor:
        def call(output, input_, group):
            _reduce_scatter(output, input_, op=REDUCE_OPS[op.lower()], group=group)

        return self._functional_op(f"reduce_scatter {op}", group_name, blocks, _new(blocks, 1 / size), call)

    def wait_functional(self, value: Tensor) -> Tensor:
        held = self._functional.pop(value.untyped_storage().data_ptr(), None)
        if held is not None:
            held.wait()
        return value

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """In the place of what hf_axonn/distributed calls. Sizes from which it takes another way are small here."""
        isend, irecv = self._message("isend", dist.isend, "group_dst"), self._message("irecv", dist.irecv, "group_src")
        real = {isend: dist.isend, irecv: dist.irecv}
        stand_in = types.SimpleNamespace(
            **vars(dist)
            | {
                "all_reduce": self.all_reduce,
                "all_to_all_single": self._out_of_place("all_to_all", dist.all_to_all_single),
                "irecv": irecv,
                "isend": isend,
                "broadcast": self.broadcast,
                # Of messages that are waited for at once, and made of the functions themselves.
                "P2POp": lambda op, *args, **opts: dist.P2POp(real[op], *args, **opts),
            }
        )
        values = {
            (collectives, "dist"): stand_in,
            (gloo, "dist"): stand_in,
            (collectives, "_all_gather_single"): self._out_of_place("all_gather", _all_gather),
            (collectives, "_reduce_scatter_single"): self._out_of_place("reduce_scatter", _reduce_scatter),
            (collectives, "_all_gathers"): self._in_one_launch("all_gather", _all_gathers),
            (collectives, "_reduce_scatters"): self._in_one_launch("reduce_scatter", _reduce_scatters),
            (collectives, "backend_of"): lambda group=None, device=None: self.like,
            (collectives, "broadcast_coalesced"): self.broadcast_coalesced,
            (dist.ProcessGroup, "barrier"): lambda *args, **opts: self.barrier(*args, **opts),
            (schedules, "_batch_p2p"): self.batch_p2p,
            (gloo, "LARGE_BYTES"): 3_000,
            (collectives, "ALONE_BYTES"): 1_500,
            (gradient_sync, "BUCKET_BYTES"): 20_000,
        }
        if self.late:
            values[gloo, "Messages"] = HeldMessages
        if self.like == "nccl":  # then gradients have a group over z of their own
            values |= {(mesh, "backend_of"): lambda device: "nccl", (mesh, "high_priority"): lambda seconds: None}
            values |= {(mesh, "bind_world"): lambda device: None, (mesh, "_meshes"): _nccl_meshes}
        with torch.library._scoped_library("_c10d_functional", "IMPL") as library, replace_attributes(values):
            library.impl("all_reduce", self.functional_all_reduce, "CPU")
            library.impl("all_gather_into_tensor", self.functional_all_gather, "CPU")
            library.impl("reduce_scatter_tensor", self.functional_reduce_scatter, "CPU")
            library.impl("wait_tensor", self.wait_functional, "CPU")
            yield


# The functions themselves, before anything stands in for them.
_all_gather, _reduce_scatter = collectives._all_gather_single, collectives._reduce_scatter_single
_all_gathers, _reduce_scatters = collectives._all_gathers, collectives._reduce_scatters
_batch_p2p = schedules._batch_p2p
_broadcast_coalesced, _barrier = collectives.broadcast_coalesced, dist.ProcessGroup.barrier


# Process groups of grids, as NCCL has them.
_nccl_meshes: dict = {}


def _new(like: Tensor, times: float) -> Tensor:
    """An output of so many times the rows."""
    if times == 1:
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    return like.new_empty((round(len(like) * times), *like.shape[1:]))


@contextlib.contextmanager
def backend(like: str, *, late: bool = False, tracked: bool = False) -> Iterator[Backend]:
    """While inside, this rank's collectives go through a `Backend`. All ranks must come here alike.

    `tracked`: what waits is late, and a buffer that is reused before raises (tests/helpers/buffers.py).
    """
    buffers = Buffers() if tracked else None
    found = Backend(like, late=late or tracked, buffers=buffers)
    with found.installed(), buffers or contextlib.nullcontext():
        yield found


def problems_of_order(issued: Sequence[Sequence[Issued]]) -> list[str]:
    """What is wrong with the order in which ranks issued collectives; nothing where none can hang or mix two up.

    All members of a group must have issued the same ones on it, in one order. Between groups, it must be possible
    to run them one after the other: two ranks that begin the same two in opposite order may wait for each other.

    Args:
        issued: of each rank of the world, in order.
    """
    problems = []
    groups: dict[tuple[str, tuple[int, ...]], dict[int, list[Issued]]] = defaultdict(dict)
    for rank, own in enumerate(issued):
        for each in own:
            groups[each.group].setdefault(rank, []).append(each)
    for (name, members), of_ranks in groups.items():
        first = of_ranks.get(members[0], [])
        for rank in members[1:]:
            pairs = enumerate(itertools.zip_longest(first, of_ranks.get(rank, [])))
            for number, (its, other) in pairs:
                if its != other:
                    problems.append(
                        f"on group {name} of the ranks {list(members)}, collective {number} is {its or 'missing'} on "
                        f"rank {members[0]} and {other or 'missing'} on rank {rank}"
                    )
                    break
    return problems or _circles(issued)


def _circles(issued: Sequence[Sequence[Issued]]) -> list[str]:
    before: dict[Any, set] = defaultdict(set)
    for own in issued:
        count: dict[Any, int] = defaultdict(int)
        last = None
        for each in own:
            here = each.group, count[each.group]
            count[each.group] += 1
            if last is not None:
                before[here].add(last)
            last = here
    try:
        graphlib.TopologicalSorter(before).prepare()
    except graphlib.CycleError as error:
        places = [f"collective {number} on group {name} of {list(ranks)}" for (name, ranks), number in error.args[1]]
        return [f"these wait for each other: {', '.join(places)}"]
    return []
