"""Attention of some positions of rows to those before them, chunk by chunk of queries.

    query   [B, heads, T, D], the positions [start, start + T) of rows
    k, v    [B, kv heads, S', D], the positions from `base` on that the queries may see
    output  [B, T, heads, D]

Queries meet only those keys that they may see some of. Where a mask or scores would be larger than `LARGEST`, queries
come in chunks, each of which is computed again in backward: between the passes stay the queries, the keys and values,
which all chunks share, and the output. In one piece stays what the attention function keeps: for eager attention the
scores, for sdpa the mask.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint


# Bytes of a mask, and of eager attention's scores. Little beside what a device has, as scores are there several times
# (in float32, with the mask, after softmax); and at 64k positions and 32 heads still 32 queries at a time.
LARGEST = 2**28

Call = Callable[[Tensor, Tensor, Tensor, Any], Tensor]  # (query, key, value, mask) -> output


class Mask(Protocol):
    """A description of the keys that the queries of a range see.

    Attributes:
        window: how many positions a query sees at most, itself included; None: it is not known that there is a limit.
    """

    @property
    def window(self) -> int | None: ...

    def keys(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of keys of which the queries [start, stop) may see some."""
        ...

    def between(self, start: int, stop: int, first: int, last: int, *, keep: bool = False) -> Any:
        """Return the mask of the queries [start, stop) and the keys [first, last), as the attention function takes
        it; with `keep` the same one for the same range."""
        ...


class GivenMask:
    """A mask [B, 1 or heads, S, S] of whole rows of `length` that is there; None: all see all."""

    window = None

    def __init__(self, mask: Tensor | None, length: int) -> None:
        self.mask, self.length = mask, length

    def keys(self, start: int, stop: int) -> tuple[int, int]:
        """Return all."""
        return 0, self.length

    def between(self, start: int, stop: int, first: int, last: int, *, keep: bool = False) -> Any:
        """Return a view."""
        return None if self.mask is None else self.mask[..., start:stop, first:last]


class CausalMask:
    """Rows that sdpa needs no mask for: queries see all keys up to their own position.

    Transformers' function asks sdpa for a mask that begins with the first key. Here the last query sees the last key.

    Attributes:
        kernel: whether torch has a kernel for this on the device of the queries; else masks are made.
    """

    window = None

    def __init__(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        self.kernel = query.is_cuda and _has_causal_kernel(query, key, value)
        self._device = query.device

    def keys(self, start: int, stop: int) -> tuple[int, int]:
        """Return those up to the last query."""
        return 0, stop

    def between(self, start: int, stop: int, first: int, last: int, *, keep: bool = False) -> Any:
        """Return torch's description of the mask for a kernel, or the mask; None for one query, which sees all."""
        queries, keys = stop - start, last - first
        if queries == 1:
            return None
        if self.kernel:
            return causal_lower_right(queries, keys)
        return torch.ones(queries, keys, dtype=torch.bool, device=self._device).tril(keys - queries)


def attend_causally(
    dropout: float, scale: float | None, query: Tensor, key: Tensor, value: Tensor, mask: Any
) -> Tensor:
    """Call sdpa with what `CausalMask` describes; kv heads that several query heads share are not repeated."""
    shared = query.shape[1] != key.shape[1]
    output = scaled_dot_product_attention(query, key, value, mask, dropout, scale=scale, enable_gqa=shared)
    return output.transpose(1, 2)


class FlashMask:
    """Rows for flash attention, which aligns the last query with the last key by itself, also of each document.

    Args:
        padding: [B, S], 0 or False where a token is padding, or None; for its last positions it is the queries' too.
        window: how many positions a query sees, itself included, or None.
        documents: positions at which the documents of one row begin, ascending; empty: they are not apart.
    """

    def __init__(self, padding: Tensor | None, window: int | None, documents: Sequence[int] = ()) -> None:
        self.padding, self.window, self.documents = padding, window, documents

    def keys(self, start: int, stop: int) -> tuple[int, int]:
        """Return those up to the last query, in the window and in the document of the first query."""
        begun = self.documents[bisect_right(self.documents, start) - 1] if self.documents else 0
        return max(begun, start + 1 - (self.window or stop)), stop

    def between(self, start: int, stop: int, first: int, last: int, *, keep: bool = False) -> Any:
        """Return the padding among the keys; of documents a dict of options: where their queries and keys end."""
        if self.padding is not None:
            return _with_queries(self.padding[:, first:last], stop - start)
        if not self.documents:
            return None
        cuts = [begun for begun in self.documents if start < begun < stop]
        ends: dict[str, list[int]] = {"q": [0], "k": [0]}
        for cut in (*cuts, stop):
            ends["q"].append(cut - start)
            ends["k"].append(cut - first)
        return {f"cu_seq_lens_{name}": torch.tensor(each, dtype=torch.int32) for name, each in ends.items()} | {
            f"max_length_{name}": max(map(int.__sub__, each[1:], each)) for name, each in ends.items()
        }


def _with_queries(padding: Tensor, queries: int) -> Tensor:
    """[B, K] of keys, of which the last are the queries': the same with the last one in rows that have no query there.

    Kernels take no batch without a query, and some none with rows without one (flash-attention#1537). What the padding
    token in the last place then gets nobody sees.
    """
    none = ~padding[:, -queries:].bool().any(dim=1, keepdim=True)
    return torch.cat([padding[:, :-1], padding[:, -1:].logical_or(none).to(padding)], dim=1)


def attend(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    *,
    start: int,
    pair_bytes: int,
    base: int = 0,
    random: bool = False,
) -> Tensor:
    """Attention of the queries at the positions from `start` on; shapes as above. No communication.

    Args:
        pair_bytes: of the largest tensor that has a number for each query and key, per query and key.
        random: whether the call draws random numbers, as for dropout.
    """
    count = query.shape[2]
    size = _chunk_size(mask, start, count, pair_bytes)
    if size == count:
        return _attend_to(call, mask, start, True, query, *_cut_keys(mask, start, count, base, key, value))
    outputs = []
    for offset in range(0, count, size):
        chunk = query[:, :, offset : offset + size]
        here = start + offset
        run = functools.partial(_attend_to, call, mask, here, False)
        seen = _cut_keys(mask, here, chunk.shape[2], base, key, value)
        outputs.append(checkpoint(run, chunk, *seen, use_reentrant=False, preserve_rng_state=random))
    return torch.cat(outputs, dim=1)


def _attend_to(call: Call, mask: Mask, start: int, keep: bool, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    stop = start + query.shape[2]
    return call(query, key, value, mask.between(start, stop, *mask.keys(start, stop), keep=keep))


def _cut_keys(mask: Mask, start: int, count: int, base: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    first, last = mask.keys(start, start + count)
    own = slice(first - base, last - base)
    return key[:, :, own], value[:, :, own]


def _chunk_size(mask: Mask, start: int, count: int, pair_bytes: int) -> int:
    """Return how many queries come at a time: all, or a part whose last chunk has none of `LARGEST` bytes."""
    size, stop = count, start + count
    while size > 1 and size * _key_count(mask, stop - size, stop) * pair_bytes > LARGEST:
        size = -(-size // 2)
    return size


def _key_count(mask: Mask, start: int, stop: int) -> int:
    first, last = mask.keys(start, stop)
    return last - first


def bytes_of_pair(implementation: str, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> int:
    """Return the bytes of a query and a key in the largest tensor that an implementation makes of both."""
    batch, heads = query.shape[:2]
    scores = batch * heads * max(query.element_size(), torch.float32.itemsize)
    if implementation == "eager":
        return scores
    if implementation != "sdpa":
        return 0  # blocks in the kernel
    if isinstance(mask, CausalMask) and mask.kernel:
        return 0
    if not query.is_cuda and query.shape[-1] != value.shape[-1]:  # then it has no kernel on CPUs
        return scores
    return batch * (1 + query.element_size())  # a mask, and the same as numbers to add


def _has_causal_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether torch has a kernel for `CausalMask` on a GPU, which shares kv heads where these are fewer."""
    params = cuda.SDPAParams(query, key, value, None, 0.0, False, query.shape[1] != key.shape[1])
    return cuda.can_use_flash_attention(params) or cuda.can_use_efficient_attention(params)
