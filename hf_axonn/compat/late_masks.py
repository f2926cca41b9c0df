"""Attention masks that Transformers' functions describe, and that are made where attention needs them, range by range.

The functions of transformers.masking_utils look up how an implementation's masks are made, and call that for whole
rows: [B, 1, S, S]. Here the call is noted, and made later for the queries and keys of a range.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hf_axonn.compat.replaced import replace_attributes


LATE = ("eager", "sdpa", "flex_attention")  # implementations with masks of S * S; flash attention has none
TABLE = "ALL_MASK_ATTENTION_FUNCTIONS"


class LateMask:
    """A causal mask [B, 1, S, S], or what an implementation has for it, that has not been made.

    A model's code that does more than hand it on to attention gets the whole mask: every use of it is one of that.

    Args:
        make: Transformers' function that makes the masks of an implementation.
        arguments: of its call for whole rows.
        anywhere: whether a query may see keys that stand behind it, as those of its own image, or no key, and its
            attention is then of all alike.

    Attributes:
        window: how many positions a query sees at most, itself included; None: all before it, or all.
    """

    def __init__(self, make: Callable, arguments: Mapping[str, Any], *, anywhere: bool = False) -> None:
        self._make, self._arguments, self._anywhere = make, arguments, anywhere
        self._kept: dict[tuple[int, ...], Any] = {}
        self.window: int | None = None if anywhere else arguments.get("local_size")

    def keys(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of keys of which the queries [start, stop) may see some: causal, in a window if it has
        one."""
        if self._anywhere:
            return 0, self._arguments["kv_length"]
        return max(0, start + 1 - (self.window or stop)), stop

    def between(self, start: int, stop: int, first: int, last: int, *, keep: bool = False) -> Any:
        """The mask of the queries [start, stop) and the keys [first, last): [B, 1, stop - start, last - first].

        Args:
            keep: whether another call for the same range, as that of the next layer, gets the same tensor.
        """
        place = (start, stop, first, last)
        if place in self._kept:
            return self._kept[place]
        lengths = {"q_length": stop - start, "q_offset": start, "kv_length": last - first, "kv_offset": first}
        mask = self._make(**{**self._arguments, **lengths, "allow_is_causal_skip": False})
        if keep:
            self._kept[place] = mask
        return mask

    def whole(self) -> Any:
        """The mask of whole rows."""
        length = self._arguments["kv_length"]
        return self.between(0, length, 0, length, keep=True)

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return function(*tree_map(_whole, args), **tree_map(_whole, kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # as copy and pickle ask for
        return getattr(self.whole(), name)

    __hash__ = object.__hash__


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, LateMask) else value


def _operator(name: str) -> Callable:
    @functools.wraps(getattr(Tensor, name))
    def operator(self: LateMask, *args: Any) -> Any:
        return getattr(self.whole(), name)(*map(_whole, args))

    return operator


# Python looks these up on the class, past `__getattr__`.
for _name in "getitem len iter bool invert neg add radd sub rsub mul rmul and or eq ne lt le gt ge".split():
    setattr(LateMask, f"__{_name}__", _operator(f"__{_name}__"))


def make_late(function: Callable, arguments: Mapping[str, Any]) -> Any:
    """Return what a function of masking_utils makes, as a `LateMask` where that would be a mask of [B, 1, S, S].

    None stays None, as for rows that sdpa needs no mask for. Masks that are not causal are made, those of flash
    attention as well.
    """
    from transformers import masking_utils

    blocks = arguments.get("block_sequence_ids") is not None  # whose tokens see each other
    with replace_attributes({(masking_utils, TABLE): _Table(getattr(masking_utils, TABLE), blocks)}):
        return function(**arguments)


class _Table:
    """Stands for Transformers' table of functions that make masks."""

    def __init__(self, table: Any, blocks: bool) -> None:
        self._table, self._blocks = table, blocks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def __getitem__(self, name: str) -> Callable:
        make = self._table[name]
        return functools.partial(_describe, make, name, self._blocks) if name in LATE else make


def _describe(make: Callable, name: str, blocks: bool, /, **arguments: Any) -> Any:
    square = arguments["q_length"] == arguments["kv_length"] and not (arguments["q_offset"] or arguments["kv_offset"])
    # Masks that are not causal say so by this argument; those of functions given by the caller are not by index.
    if not square or "allow_is_bidirectional_skip" in arguments or arguments.get("use_vmap"):
        return make(**arguments)
    if name == "sdpa" and make(**{**arguments, "mask_function": _see_all}) is None:
        return None
    # Eager attention adds a large negative number to what is hidden. Added to all, as where padding leaves a query no
    # key, it hides nothing; and where that is only the device knows.
    blind = name == "eager" and arguments["attention_mask"] is not None
    return LateMask(make, arguments, anywhere=blind or blocks)


def _see_all(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask function of one number for all, to ask whether a mask is needed without making one."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=query.device)
