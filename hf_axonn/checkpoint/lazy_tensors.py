"""Tensors that are still in a file: one may join, split and transpose them, and then read only a part of the result.

A checkpoint often lays weights out in another way than the model does: each expert in a tensor, query, key and value
in one, experts transposed. Transformers' converters turn full tensors into full tensors. Here they get tensors that
only remember what was done: they are sharded after the conversion, where shards are defined, and yet no rank reads
more than its shard. An operation that is not known here reads the tensors that it needs in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor


T = TypeVar("T")
Region = tuple[slice, ...]  # one (start, stop) for each dim
Function = Callable[..., Any]
Copy = tuple[Any, Region, Tensor]  # where to read, which part of it, and where to put it


class LazyTensor(Tensor):
    """A tensor that is still in files. Its values are on the meta device until `read` is called."""

    origin: _Origin

    @classmethod
    def __torch_function__(
        cls, function: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _REMEMBERED:
            result = _REMEMBERED[function](*args, **kwargs)
            if result is not NotImplemented:
                return result
        if getattr(function, "__name__", "") == "__get__" or function in _ABOUT:
            result = super().__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]  # torch's
            if not isinstance(result, Tensor):  # a shape, a dtype; what is a tensor, like `.T`, is of the values
                return result
        return function(*_read_all(args), **_read_all(kwargs))


def unread(source: Any, dtype: torch.dtype | None = None) -> LazyTensor:
    """Return a tensor in a file, to be read as `dtype` (None: as it is).

    Args:
        source: what takes slices: a slice of safetensors' `safe_open`, or a tensor, such as one that maps a file.
    """
    shape = source.shape if isinstance(source, Tensor) else source.get_shape()
    return _unread(_Source(source), shape, dtype or source[...].dtype)


def read(
    tensor: LazyTensor, region: Region | None = None, *, device: Any = None, readers: Executor | None = None
) -> Tensor:
    """Read a part of a tensor, into memory of its own.

    Memory that maps a file would change, or be gone, with the file, and would be fetched page by page in training.

    Args:
        region: one slice (start, stop) for each dim; None: all.
        device: where the result is to be; None: the CPU.
        readers: threads that read the parts if there are several; None: one after the other.
    """
    region = tuple(slice(0, size) for size in tensor.shape) if region is None else region
    size = [each.stop - each.start for each in region]
    result = torch.empty(size, dtype=tensor.dtype, device=device or "cpu")
    if result.numel():
        copies = list(tensor.origin.copies(region, result))
        for _ in map(_copy, copies) if readers is None or len(copies) == 1 else readers.map(_copy, copies):
            pass
    return result


@torch.no_grad()
def _copy(copy: Copy) -> None:
    source, region, target = copy
    target.copy_(source[region] if region else source[...])


class _Origin:
    """The way to get a tensor from its files."""

    def copies(self, region: Region, target: Tensor) -> Iterator[Copy]:
        """Yield the copies that fill `target`, of the region's size."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Source(_Origin):
    source: Any

    def copies(self, region: Region, target: Tensor) -> Iterator[Copy]:
        yield self.source, region, target


@dataclass(frozen=True)
class _Joined(_Origin):
    parts: Sequence[LazyTensor]
    dim: int

    def copies(self, region: Region, target: Tensor) -> Iterator[Copy]:
        target_part = region[self.dim]
        begin = 0
        for part in self.parts:
            end = begin + part.shape[self.dim]
            start, stop = max(begin, target_part.start), min(end, target_part.stop)
            if start < stop:
                inside = _with(region, self.dim, slice(start - begin, stop - begin))
                yield from part.origin.copies(inside, target.narrow(self.dim, start - target_part.start, stop - start))
            begin = end


@dataclass(frozen=True)
class _Part(_Origin):
    base: LazyTensor
    dim: int
    start: int

    def copies(self, region: Region, target: Tensor) -> Iterator[Copy]:
        own = region[self.dim]
        shifted = slice(self.start + own.start, self.start + own.stop)
        yield from self.base.origin.copies(_with(region, self.dim, shifted), target)


@dataclass(frozen=True)
class _Turned(_Origin):
    base: LazyTensor
    dims: tuple[int, int]

    def copies(self, region: Region, target: Tensor) -> Iterator[Copy]:
        first, second = self.dims
        turned = _with(_with(region, first, region[second]), second, region[first])
        yield from self.base.origin.copies(turned, target.transpose(first, second))


@dataclass(frozen=True)
class _Widened(_Origin):
    """One dim more, of size 1."""

    base: LazyTensor
    dim: int

    def copies(self, region: Region, target: Tensor) -> Iterator[Copy]:
        inside = (*region[: self.dim], *region[self.dim + 1 :])
        yield from self.base.origin.copies(inside, target.squeeze(self.dim))


@dataclass(frozen=True)
class _Narrowed(_Origin):
    """One dim less, which had size 1."""

    base: LazyTensor
    dim: int

    def copies(self, region: Region, target: Tensor) -> Iterator[Copy]:
        inside = (*region[: self.dim], slice(0, 1), *region[self.dim :])
        yield from self.base.origin.copies(inside, target.unsqueeze(self.dim))


def _unread(origin: _Origin, shape: Sequence[int], dtype: torch.dtype) -> LazyTensor:
    tensor = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(LazyTensor)
    tensor.origin = origin
    return tensor


def _with(values: Sequence[T], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _read_all(value: Any) -> Any:
    """Arguments of a function, with what is unread in them read."""
    if isinstance(value, LazyTensor):
        return read(value)
    if isinstance(value, dict):
        return {key: _read_all(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_read_all, value))
    return value


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    first = tensors[0]
    dim = dim % first.ndim
    parts = _all_lazy(tensors)
    for other in parts:
        if other.dtype != first.dtype or other.ndim != first.ndim:
            return NotImplemented
        if _with(other.shape, dim, 0) != _with(first.shape, dim, 0):
            return NotImplemented  # torch says what is wrong
    if not parts:
        return NotImplemented
    size = sum(part.shape[dim] for part in parts)
    return _unread(_Joined(parts, dim), _with(first.shape, dim, size), first.dtype)


def _all_lazy(tensors: Sequence[Tensor]) -> list[LazyTensor]:
    """The tensors, or nothing if one of them is in memory already."""
    lazy = [tensor for tensor in tensors if isinstance(tensor, LazyTensor)]
    return lazy if len(lazy) == len(tensors) else []


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    parts = _all_lazy(tensors)
    if not parts:
        return NotImplemented
    dim = dim % (parts[0].ndim + 1)
    return _cat([_unsqueeze(part, dim) for part in parts], dim)


def _unsqueeze(tensor: LazyTensor, dim: int) -> LazyTensor:
    dim = dim % (tensor.ndim + 1)
    shape = (*tensor.shape[:dim], 1, *tensor.shape[dim:])
    return _unread(_Widened(tensor, dim), shape, tensor.dtype)


def _squeeze(tensor: LazyTensor, *dims: int, dim: int | None = None) -> Any:
    where = dims[0] if len(dims) == 1 else dim
    if not isinstance(where, int):
        return NotImplemented
    where = where % tensor.ndim
    if tensor.shape[where] != 1:
        return tensor
    return _unread(_Narrowed(tensor, where), (*tensor.shape[:where], *tensor.shape[where + 1 :]), tensor.dtype)


def _narrow(tensor: LazyTensor, dim: int, start: int, length: int) -> LazyTensor:
    return _unread(_Part(tensor, dim, start), _with(tensor.shape, dim, length), tensor.dtype)


def _split(tensor: LazyTensor, split_size_or_sections: int | Sequence[int], dim: int = 0) -> Any:
    dim = dim % tensor.ndim
    size = tensor.shape[dim]
    sizes = split_size_or_sections
    if isinstance(sizes, int):
        sizes = [min(sizes, size - start) for start in range(0, size, sizes)]
    if sum(sizes) != size:
        return NotImplemented
    return tuple(_narrow(tensor, dim, sum(sizes[:i]), size) for i, size in enumerate(sizes))


def _chunk(tensor: LazyTensor, chunks: int, dim: int = 0) -> Any:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


def _unbind(tensor: LazyTensor, dim: int = 0) -> Any:
    return tuple(_squeeze(row, dim) for row in _split(tensor, 1, dim))


def _transpose(tensor: LazyTensor, dim0: int, dim1: int) -> LazyTensor:
    first, second = dim0 % tensor.ndim, dim1 % tensor.ndim
    shape = _with(_with(tensor.shape, first, tensor.shape[second]), second, tensor.shape[first])
    return _unread(_Turned(tensor, (first, second)), shape, tensor.dtype)


def _same(tensor: LazyTensor, *_args: Any, **_kwargs: Any) -> LazyTensor:
    return tensor


def _to(tensor: LazyTensor, *args: Any, **kwargs: Any) -> Any:
    """Another device is for `read` to choose."""
    changes = [*args, *kwargs.values()]
    return NotImplemented if any(isinstance(change, (torch.dtype, Tensor)) for change in changes) else tensor


_REMEMBERED: dict[Function, Function] = {
    torch.cat: _cat,
    torch.concat: _cat,
    torch.stack: _stack,
    torch.unsqueeze: _unsqueeze,
    Tensor.unsqueeze: _unsqueeze,
    torch.squeeze: _squeeze,
    Tensor.squeeze: _squeeze,
    torch.split: _split,
    Tensor.split: _split,
    torch.chunk: _chunk,
    Tensor.chunk: _chunk,
    torch.unbind: _unbind,
    Tensor.unbind: _unbind,
    torch.transpose: _transpose,
    Tensor.transpose: _transpose,
    Tensor.contiguous: _same,
    Tensor.detach: _same,
    Tensor.to: _to,
}
_ABOUT = {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.nelement,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.__len__,
}
