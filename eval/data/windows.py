"""Windows of a document, as numbers alone.

offsets   |--prefix--|--suffix--|        at each offset, for each prefix and suffix length
sliding   |--prefix--|--suffix--|        from every stride-th token, or character, on
first     |---------prefix---------|--suffix--|      of the first max_tokens tokens the last ones are the suffix
last                 the same of the last max_tokens tokens
rest      |--prefix--|-----------suffix----------|   the first tokens, and all that follow them
sentence             the same, of the first sentence and all that follows it
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from hf_axonn_eval.data.jsonl import is_count


# What each kind looks at, besides the filters that are for all of them.
KINDS = {
    "offsets": ("prefix_length", "suffix_length", "offset", "combine", "shared_suffix", "prefix_buckets"),
    "sliding": ("prefix_length", "suffix_length", "stride", "stride_unit", "slice_characters"),
    "first": ("suffix_length", "max_tokens"),
    "last": ("suffix_length", "max_tokens"),
    "rest": ("prefix_length", "append_eos"),
    "sentence": ("append_eos",),
}
FILTERS = (
    "min_document_tokens",
    "max_document_tokens",
    "max_documents",
    "add_special_tokens",
    "bos",
    "deduplicate",
    "min_type_token_ratio",
)
BOS = ("tokenizer", "prefix", "window")
COMBINE = ("product", "axes")
STRIDE_UNITS = ("tokens", "characters")


class Window(NamedTuple):
    """One window: the name of its sample in the document, the places where it and its suffix begin, and its end."""

    name: str
    offset: int
    middle: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Choice of the windows of a document that become samples; all lengths in tokens.

    Args:
        kind: "offsets", "sliding", "first", "last", "rest" or "sentence"; see the picture above.
        prefix_length: tokens shown; for "offsets" and "rest" one number or several.
        suffix_length: tokens asked for; for "offsets" one number or several.
        offset: where the prefix begins, one number or several.
        combine: several offsets and lengths: "product", each with each; "axes", the first of each, and from there
            one changed at a time.
        shared_suffix: prefixes of several lengths end at the same place, that of the longest, so that one suffix is
            asked for with more and more context.
        prefix_buckets: only documents of these buckets are asked with all prefix lengths, others with the first one;
            None: all are.
        max_tokens: for "first" and "last" the tokens that are looked at; None: the full document.
        stride: from one window to the next.
        stride_unit: "tokens"; or "characters": the text is tokenized anew from every stride-th character on.
        slice_characters: with a stride in characters, the number that is tokenized; a window that they do not fill is
            excluded. None: as many as the window needs.
        append_eos: for "rest" and "sentence", the tokenizer's EOS is the last token of the suffix.
        min_document_tokens: shorter documents are left out. Those too short for any cut always are.
        max_document_tokens: longer documents are left out.
        max_documents: the most documents of each bucket, the first ones that fit.
        add_special_tokens: whether tokenizing a text adds the tokenizer's special tokens; set it to what training did.
        bos: "tokenizer": a BOS stands where tokenizing a text puts it. "prefix": one more stands before every prefix,
            in addition to its tokens. "window": with a stride in characters, every window begins with one, which
            counts among its tokens, also where the tokenizer adds none by itself.
        deduplicate: a sample with the tokens of an earlier one is left out, whatever its document.
        min_type_token_ratio: a sample is left out if its suffix has fewer different tokens by all its tokens.
    Raises:
        ValueError: a number that cannot be, or lengths that contradict each other.
    """

    kind: str = "offsets"
    prefix_length: int | Sequence[int] = 32
    suffix_length: int | Sequence[int] = 32
    offset: int | Sequence[int] = 0
    combine: str = "product"
    shared_suffix: bool = False
    prefix_buckets: Sequence[int] | None = None
    max_tokens: int | None = None
    stride: int = 10
    stride_unit: str = "tokens"
    slice_characters: int | None = None
    append_eos: bool = False
    min_document_tokens: int | None = None
    max_document_tokens: int | None = None
    max_documents: int | None = None
    add_special_tokens: bool = False
    bos: str = "tokenizer"
    deduplicate: bool = False
    min_type_token_ratio: float | None = None

    def __post_init__(self) -> None:
        choices = {"kind": tuple(KINDS), "combine": COMBINE, "stride_unit": STRIDE_UNITS, "bos": BOS}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}, but it must be one of {', '.join(allowed)}.")
        for name in ("shared_suffix", "append_eos", "add_special_tokens", "deduplicate"):
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
        numbers = ("stride", "slice_characters", "max_tokens")
        for name in (*numbers, "min_document_tokens", "max_document_tokens", "max_documents"):
            value = getattr(self, name)
            least = 0 if name == "min_document_tokens" else 1
            if not (value is None and name != "stride") and not is_count(value, least=least):
                raise ValueError(f"{name} is {value!r}, but it must be a whole number of at least {least}.")
        self._check_buckets()
        self._check_ratio()
        self._check_lengths()

    def _check_buckets(self) -> None:
        if self.prefix_buckets is None:
            return
        buckets = self._several("prefix_buckets")
        if not buckets or not all(map(is_count, buckets)) or len(set(buckets)) != len(buckets):
            raise ValueError(
                f"prefix_buckets are {buckets!r}, but they must be one or more different numbers of at least 0, or "
                "None."
            )

    def _check_ratio(self) -> None:
        ratio = self.min_type_token_ratio
        if ratio is not None and (
            isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1
        ):
            raise ValueError(f"min_type_token_ratio is {ratio!r}, but it must be above 0 and at most 1, or None.")
        by_characters = self.kind == "sliding" and self.stride_unit == "characters"
        if self.bos == "window" and not by_characters:
            raise ValueError(
                f"bos is 'window', which is of windows over characters, but kind is {self.kind!r} with stride_unit "
                f"{self.stride_unit!r}: use 'prefix', or add_special_tokens."
            )
        if self.slice_characters is not None and not by_characters:
            raise ValueError(
                f"slice_characters is {self.slice_characters}, but kind is {self.kind!r} with stride_unit "
                f"{self.stride_unit!r}: it is of windows over characters."
            )

    def _numbers(self, name: str) -> tuple[int, ...]:
        """Return one of the settings that have several numbers, once it is checked."""
        return tuple(getattr(self, name))

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
        suffix = self._numbers("suffix_length")[0]
        if self.max_tokens is not None and self.kind in ("first", "last") and self.max_tokens <= suffix:
            raise ValueError(f"max_tokens is {self.max_tokens}, which leaves no prefix before a suffix of {suffix}.")
        needed = max(self.needed, self.min_document_tokens or 0)
        if self.max_document_tokens is not None and self.max_document_tokens < needed:
            raise ValueError(
                f"max_document_tokens is {self.max_document_tokens}, but a document needs {needed} tokens (offset, "
                "prefix and suffix, or min_document_tokens)."
            )

    @property
    def needed(self) -> int:
        """Tokens of the shortest document that can be cut."""
        if self.kind == "offsets":
            return max(window.end for window in self._cut_at_offsets())
        if self.kind == "sliding":
            return self._numbers("prefix_length")[0] + self._numbers("suffix_length")[0]
        if self.kind == "rest":
            return max(self._numbers("prefix_length")) + (0 if self.append_eos else 1)
        if self.kind == "sentence":
            return 1 if self.append_eos else 2
        return self._numbers("suffix_length")[0] + 1

    def needed_in(self, bucket: int) -> int:
        """Return the tokens of the shortest document of this bucket that can be cut."""
        return max(window.end for window in self._cut_at_offsets(bucket)) if self.kind == "offsets" else self.needed

    def windows(self, tokens: int, bucket: int | None = None) -> list[Window]:
        """Cut a document of `tokens` tokens, at least `needed`. Not for a window over characters, nor for a sentence.

        Args:
            bucket: of the document; None: one that is asked with all prefix lengths.
        """
        if self.kind == "offsets":
            return self._cut_at_offsets(bucket)
        if self.kind == "rest":
            prefixes = self._numbers("prefix_length")
            return [Window(f"0+{prefix}" if len(prefixes) > 1 else "0", 0, prefix, tokens) for prefix in prefixes]
        if self.kind == "sliding":
            prefix, suffix = self._numbers("prefix_length")[0], self._numbers("suffix_length")[0]
            begins = range(0, tokens - prefix - suffix + 1, self.stride)
            return [Window(str(begin), begin, begin + prefix, begin + prefix + suffix) for begin in begins]
        size = min(tokens, self.max_tokens or tokens)
        begin = 0 if self.kind == "first" else tokens - size
        return [Window(str(begin), begin, begin + size - self._numbers("suffix_length")[0], begin + size)]

    def settings(self) -> dict[str, Any]:
        """Return the settings that this kind reads, by name, for JSON."""
        names = ("kind", *KINDS[self.kind], *FILTERS)
        values = {name: getattr(self, name) for name in names}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def _cut_at_offsets(self, bucket: int | None = None) -> list[Window]:
        prefixes = self._numbers("prefix_length")
        if self.prefix_buckets is not None and bucket is not None and bucket not in self._numbers("prefix_buckets"):
            prefixes = prefixes[:1]
        axes = (self._numbers("offset"), prefixes, self._numbers("suffix_length"))
        if self.combine == "product":
            combined = list(product(*axes))
        else:
            base = tuple(axis[0] for axis in axes)
            moved = [(*base[:place], value, *base[place + 1 :]) for place, axis in enumerate(axes) for value in axis]
            combined = list(dict.fromkeys(moved))
        plain = len(self._numbers("prefix_length")) == len(self._numbers("suffix_length")) == 1
        longest = max(self._numbers("prefix_length"))
        windows = []
        for offset, prefix, suffix in combined:
            begin = offset + (longest - prefix if self.shared_suffix else 0)
            name = str(begin) if plain else f"{begin}+{prefix}+{suffix}"
            windows.append(Window(name, begin, begin + prefix, begin + prefix + suffix))
        return windows
