"""How a document of so many tokens is cut, as numbers alone.

offsets   |--prefix--|--suffix--|        at each offset, for each prefix and suffix length
sliding   |--prefix--|--suffix--|        from every stride-th token, or character, on
first     |---------prefix---------|--suffix--|      of the first max_tokens tokens the last ones are the suffix
last                 the same of the last max_tokens tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from hf_axonn_eval.data.jsonl import is_count


# What each kind looks at, besides the filters that are for all of them.
KINDS = {
    "offsets": ("prefix_length", "suffix_length", "offset", "combine", "shared_suffix"),
    "sliding": ("prefix_length", "suffix_length", "stride", "stride_unit"),
    "first": ("suffix_length", "max_tokens"),
    "last": ("suffix_length", "max_tokens"),
}
FILTERS = ("min_document_tokens", "max_document_tokens", "max_documents", "add_special_tokens", "deduplicate")
COMBINE = ("product", "axes")
STRIDE_UNITS = ("tokens", "characters")


class Window(NamedTuple):
    """One window: what its sample is called in the document, where it begins, its suffix begins, and it ends."""

    name: str
    offset: int
    middle: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Which windows of a document become samples; all lengths in tokens.

    Args:
        kind: "offsets", "sliding", "first" or "last"; see the picture above.
        prefix_length: tokens shown; for "offsets" one number or several.
        suffix_length: tokens asked for; for "offsets" one number or several.
        offset: where the prefix begins, one number or several.
        combine: several offsets and lengths: "product", each with each; "axes", the first of each, and from there
            one changed at a time.
        shared_suffix: prefixes of several lengths end at the same place, that of the longest, so that one suffix is
            asked for with more and more context.
        max_tokens: for "first" and "last" the tokens that are looked at; None: the full document.
        stride: from one window to the next.
        stride_unit: "tokens"; or "characters": the text is tokenized anew from every stride-th character on.
        min_document_tokens: shorter documents are left out. Those too short for any cut always are.
        max_document_tokens: longer documents are left out.
        max_documents: at most so many documents of each bucket, the first ones that fit.
        add_special_tokens: whether tokenizing a text adds the tokenizer's special tokens; set it to what training did.
        deduplicate: a sample with the tokens of an earlier one is left out, whatever its document.
    Raises:
        ValueError: a number that cannot be, or lengths that contradict each other.
    """

    kind: str = "offsets"
    prefix_length: int | Sequence[int] = 32
    suffix_length: int | Sequence[int] = 32
    offset: int | Sequence[int] = 0
    combine: str = "product"
    shared_suffix: bool = False
    max_tokens: int | None = None
    stride: int = 10
    stride_unit: str = "tokens"
    min_document_tokens: int | None = None
    max_document_tokens: int | None = None
    max_documents: int | None = None
    add_special_tokens: bool = False
    deduplicate: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("kind", tuple(KINDS)), ("combine", COMBINE), ("stride_unit", STRIDE_UNITS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}, but it must be one of {', '.join(allowed)}.")
        for name in ("shared_suffix", "add_special_tokens", "deduplicate"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}, but it must be True or False.")
        for name in ("prefix_length", "suffix_length"):
            values = self._several(name)
            wrong = [value for value in values if not is_count(value, least=1)]
            if wrong:
                raise ValueError(f"{name} is {wrong[0]!r}, but it must be a whole number of tokens, at least 1.")
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{name} is {values!r}, but it must be one or more different numbers.")
        offsets = self._several("offset")
        if not offsets or not all(map(is_count, offsets)) or len(set(offsets)) != len(offsets):
            raise ValueError(f"offsets are {offsets!r}, but they must be one or more different numbers of at least 0.")
        for name in ("stride", "max_tokens", "min_document_tokens", "max_document_tokens", "max_documents"):
            value = getattr(self, name)
            least = 0 if name == "min_document_tokens" else 1
            if not (value is None and name != "stride") and not is_count(value, least=least):
                raise ValueError(f"{name} is {value!r}, but it must be a whole number of at least {least}.")
        self._check_lengths()

    def _several(self, name: str) -> tuple:
        value = getattr(self, name)
        values = tuple(value) if isinstance(value, (list, tuple, range)) else (value,)
        object.__setattr__(self, name, values)
        return values

    def _check_lengths(self) -> None:
        single = {
            "sliding": ("prefix_length", "suffix_length"),
            "first": ("suffix_length",),
            "last": ("suffix_length",),
        }
        for name in single.get(self.kind, ()):
            if len(getattr(self, name)) > 1:
                raise ValueError(f"{name} has {len(getattr(self, name))} numbers, but {self.kind!r} takes one.")
        if self.max_tokens is not None and self.kind in ("first", "last") and self.max_tokens <= self.suffix_length[0]:
            raise ValueError(
                f"max_tokens is {self.max_tokens}, which leaves no prefix before a suffix of {self.suffix_length[0]}."
            )
        needed = max(self.needed, self.min_document_tokens or 0)
        if self.max_document_tokens is not None and self.max_document_tokens < needed:
            raise ValueError(
                f"max_document_tokens is {self.max_document_tokens}, but a document needs {needed} tokens (offset, "
                "prefix and suffix, or min_document_tokens)."
            )

    @property
    def needed(self) -> int:
        """The tokens of the shortest document that can be cut."""
        if self.kind == "offsets":
            return max(window.end for window in self._fixed())
        if self.kind == "sliding":
            return self.prefix_length[0] + self.suffix_length[0]
        return self.suffix_length[0] + 1

    def windows(self, tokens: int) -> list[Window]:
        """Where a document of `tokens` tokens is cut; at least `needed` of them. Not for a window over characters."""
        if self.kind == "offsets":
            return self._fixed()
        if self.kind == "sliding":
            prefix, suffix = self.prefix_length[0], self.suffix_length[0]
            begins = range(0, tokens - prefix - suffix + 1, self.stride)
            return [Window(str(begin), begin, begin + prefix, begin + prefix + suffix) for begin in begins]
        size = min(tokens, self.max_tokens or tokens)
        begin = 0 if self.kind == "first" else tokens - size
        return [Window(str(begin), begin, begin + size - self.suffix_length[0], begin + size)]

    def settings(self) -> dict[str, Any]:
        """What this kind looks at, by name, as JSON can say it."""
        names = ("kind", *KINDS[self.kind], *FILTERS)
        values = {name: getattr(self, name) for name in names}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def _fixed(self) -> list[Window]:
        axes = (self.offset, self.prefix_length, self.suffix_length)
        if self.combine == "product":
            combined = list(product(*axes))
        else:
            base = tuple(axis[0] for axis in axes)
            moved = [(*base[:place], value, *base[place + 1 :]) for place, axis in enumerate(axes) for value in axis]
            combined = list(dict.fromkeys(moved))
        plain = len(self.prefix_length) == len(self.suffix_length) == 1
        longest = max(self.prefix_length)
        windows = []
        for offset, prefix, suffix in combined:
            begin = offset + (longest - prefix if self.shared_suffix else 0)
            name = str(begin) if plain else f"{begin}+{prefix}+{suffix}"
            windows.append(Window(name, begin, begin + prefix, begin + prefix + suffix))
        return windows
