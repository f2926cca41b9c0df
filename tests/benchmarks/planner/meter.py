"""Bytes that live while something runs: counted storage by storage, whatever the device, fake tensors too.

    with Meter(model.parameters()) as meter:
        loss = model(**batch).loss
        saved = meter.live                  made inside and still there
        meter.begin()                       `most` starts again from what is there now
        loss.backward()
    meter.most                              the largest that `live` was since

A storage counts from the operation that made it until its last tensor is gone, as an allocator without waste would
count it. What the kernels and collectives of a backend use inside is not seen. Storages of `known` tensors, which were
there before, are not counted.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def local(tensor: Tensor) -> Tensor:
    """The piece of a DTensor that is here; another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of these tensors on this rank, each once."""
    held = [local(tensor.detach()).untyped_storage() for tensor in tensors]
    return sum(storage.nbytes() for storage in {storage._cdata: storage for storage in held}.values())


class Meter(TorchDispatchMode):
    """Counts storages, see the head of this file.

    Attributes:
        live: bytes that were made inside and are there.
        most: the largest that `live` was since `begin`.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._made = self.most = 0
        self._gone: deque[int] = deque()  # a thread of a backend may be the last to hold a storage
        self._known = weakref.WeakSet(local(tensor.detach()).untyped_storage() for tensor in known)

    @property
    def live(self) -> int:
        while self._gone:
            self._made -= self._gone.popleft()
        return self._made

    def begin(self) -> None:
        """Forget what `most` was."""
        self.most = self.live

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {id(held.untyped_storage()) for held in tree_leaves((args, kwargs)) if _is_plain(held)}
        result = func(*args, **(kwargs or {}))
        for tensor in filter(_is_plain, tree_leaves(result)):
            held = tensor.untyped_storage()
            if id(held) not in given and held not in self._known:
                self._known.add(held)
                self._made += held.nbytes()
                weakref.finalize(held, self._gone.append, held.nbytes())
        self.most = max(self.most, self.live)
        return result


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor)
