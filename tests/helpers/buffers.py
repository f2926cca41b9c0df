"""Memory that a collective still uses: between launch and wait it is not freed, resized, written or read too early.

A backend gets clones, and holds none of the tensors that the engine gave it. So a buffer that the engine itself does
not hold is freed at once, as it could be on a GPU, whose allocator then gives it to others while a kernel still reads
or fills it. NCCL's group would hold it too, until the wait; gloo until its threads have sent. The engine is to rely on
neither.

    with Buffers() as buffers:
        travels = buffers.begin("all_gather", inputs=[shard], outputs=[full])
        ...                             what goes wrong here raises, at the operator that does it
        travels.run(lambda sent, room: ...)

Every operator inside is looked at, forward and backward: an error names the collective, the buffer and the line that
wrote or read it. What is changed behind torch (numpy, another process) is found at the wait, by its bytes.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


# Operators that take a tensor for its shape, dtype and device alone.
METADATA = ("empty", "new_", "zeros_like", "ones_like", "full_like", "rand", "sym_", "is_")
OF_WAITS = ("wait_tensor", "_wrap_tensor_autograd")  # of torch's functional collectives
WRAPPERS = (DTensor, AsyncCollectiveTensor)  # which come again with the tensors inside


class ReusedTooEarly(AssertionError):
    """A collective is under way, and a buffer of it was freed, resized, written, or read before it has arrived."""


class Buffer:
    """A tensor that a collective reads or fills, by a weak reference to its storage.

    Args:
        tensor: of the collective.
        fills: whether the collective writes it.
        what: the collective, for messages.
    """

    def __init__(self, tensor: Tensor, what: str, *, fills: bool) -> None:
        storage = tensor.untyped_storage()
        self.fills = fills
        self.storage = storage._cdata
        self.name = f"the {'output' if fills else 'input'} {list(tensor.shape)} {tensor.dtype} of {what}"
        self.freed = ""
        self._layout = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
        self._size = storage.nbytes()
        self.begin, self.end = extent(tensor)
        self._storage = weakref.ref(storage)
        self._bytes = tensor.detach().clone()
        self._watch = weakref.finalize(storage, self._note_free) if self._size else None

    def _note_free(self) -> None:
        self.freed = self.freed or where()

    def tensor(self) -> Tensor | None:
        """The tensor; None if its memory is no longer as it was."""
        storage = self._storage()
        if storage is None or storage.nbytes() != self._size:
            return None
        dtype, offset, shape, stride = self._layout
        with torch.no_grad():
            return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)

    def problem(self) -> str:
        """Say what has happened to it since the launch; empty if nothing."""
        if self.freed:
            return f"{self.name} was freed at {self.freed}, and nobody has waited for it"
        now = self.tensor()
        if now is None:
            return f"{self.name} was resized before the wait"
        if not torch.equal(as_bytes(now), as_bytes(self._bytes)):
            return f"{self.name} was written before the wait"
        return ""

    def release(self) -> None:
        """Watch it no longer."""
        if self._watch is not None:
            self._watch.detach()


def extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a storage that a tensor uses, and the one behind its last."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin, size = tensor.storage_offset(), tensor.element_size()
    return begin * size, (begin + last + 1) * size


def as_bytes(tensor: Tensor) -> Tensor:
    """[N] uint8 of all elements, for which NaN is NaN."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


class Travels:
    """A collective between its launch and its wait: clones of what it reads and fills, and none of its buffers.

    Attributes:
        sent, room: the clones.
    """

    def __init__(self, owner: Buffers, what: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self._owner = owner
        self.sent, self.room = ([each.detach().clone() for each in some] for some in (inputs, outputs))
        for output in outputs:
            poison(output)
        self._outputs = [Buffer(each, what, fills=True) for each in outputs]
        self.buffers = [*self._outputs, *(Buffer(each, what, fills=False) for each in inputs)]

    def run(self, function: Callable[[list[Tensor], list[Tensor]], object]) -> None:
        """Communicate by a function of (sent, room), and arrive."""
        with self._owner.quiet(), torch.no_grad():
            function(self.sent, self.room)
        self.arrive()

    def arrive(self) -> None:
        """End it, once: check its buffers, and fill the outputs with what is in their clones.

        Raises:
            ReusedTooEarly: something has happened to a buffer.
        """
        with self._owner.quiet(), torch.no_grad():
            if self._owner.end(self):
                for output, value in zip(self._outputs, self.room, strict=True):
                    output.tensor().copy_(value)


class Buffers(TorchDispatchMode):
    """Looks at every operator on this thread while collectives are under way.

    Attributes:
        count: how many buffers were watched.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._under_way: set[Travels] = set()
        self._busy: dict[int, list[Buffer]] = {}  # by storage
        self._quiet = 0

    def begin(self, what: str, *, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Travels:
        """Watch the buffers of a collective from now on until they arrive. The outputs hold what no result is."""
        for some, writes in ((inputs, False), (outputs, True)):
            self._check(f"the launch of {what}", some, writes=writes)
        with self.quiet(), torch.no_grad():
            travels = Travels(self, what, inputs, outputs)
        self._under_way.add(travels)
        self.count += len(travels.buffers)
        for buffer in travels.buffers:
            self._busy.setdefault(buffer.storage, []).append(buffer)
        return travels

    def end(self, travels: Travels) -> bool:
        """Watch them no longer; False if that was so already. Raises ReusedTooEarly as `Travels.arrive`."""
        if travels not in self._under_way:
            return False
        self._under_way.remove(travels)
        for buffer in travels.buffers:
            buffer.release()
            self._busy[buffer.storage].remove(buffer)
            if not self._busy[buffer.storage]:
                del self._busy[buffer.storage]
        problems = [problem for buffer in travels.buffers if (problem := buffer.problem())]
        if problems:
            raise ReusedTooEarly("; ".join(problems))
        return True

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """The operators inside are the backend's own."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        problems = [buffer.problem() for travels in self._under_way for buffer in travels.buffers if buffer.freed]
        if problems and error[0] is None:
            raise ReusedTooEarly("; ".join(problems))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, WRAPPERS) for kind in types):
            return NotImplemented
        if self._busy and not self._quiet:
            names, positional = kinds_of(func), iter(args)
            for name, (writes, reads) in names.items():
                value = kwargs[name] if name in kwargs else next(positional, None)
                if writes or reads:
                    self._check(func, value, writes=writes)
        return func(*args, **kwargs)

    def _check(self, who: Any, value: Any, *, writes: bool) -> None:
        for tensor in (value,) if isinstance(value, Tensor) else tree_leaves(value):
            if not isinstance(tensor, Tensor):
                continue
            for buffer in self._busy.get(tensor.untyped_storage()._cdata, ()):
                begin, end = extent(tensor)
                overlap = begin < buffer.end and buffer.begin < end and not buffer.freed
                if overlap and (writes or buffer.fills):
                    done = "writes" if writes else "reads"
                    raise ReusedTooEarly(f"{who} {done} {buffer.name} at {where()}, and nobody has waited for it")


@functools.cache
def kinds_of(func: Any) -> dict[str, tuple[bool, bool]]:
    """Return whether an operator writes and whether it reads each of its arguments.

    With an alias that is not written the result is a view, and nothing is read.
    """
    metadata = func.__name__.startswith(METADATA + OF_WAITS)
    aliases = {argument.name: argument.alias_info for argument in func._schema.arguments}
    return {
        name: (alias is not None and alias.is_write, alias is None and not metadata) for name, alias in aliases.items()
    }


def poison(tensor: Tensor) -> None:
    """Overwrite a tensor with what no result is."""
    with torch.no_grad():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(float("nan"))
        elif tensor.dtype == torch.bool:
            tensor.logical_not_()
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max)


def where() -> str:
    """The innermost line that is not PyTorch's or of these helpers."""
    others = Path(torch.__file__).parent, Path(__file__).parent, Path(weakref.__file__)
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.suffix == ".py" and not any(path.is_relative_to(other) for other in others):
            return f"{'/'.join(path.parts[-3:])}:{frame.lineno} {frame.line}"
    return "?"
