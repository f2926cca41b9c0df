"""Rows that several samples share: one pass over the longest scores all whose tokens are its beginning.

    row          t0 t1 ... t39 | t40 ... t71
    sample       prefix 40       suffix 32
    another      prefix 20 | suffix 32              the same document and offset, a shorter prefix

A causal model sees at a place nothing of what follows, so the logits of the shorter sample are those of the longer
row. Asked with prefixes of 25, 50, 75 and 100 tokens, a document costs one row in place of four.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hf_axonn_eval.data.samples import Sample


_OF_ALL_TOKENS = ("dynamic", "longrope")  # kinds of RoPE whose angles depend on how long the row is


def may_share(model) -> bool:
    """Return whether the logits of a place depend on the tokens before it alone, not on the length of the row."""
    wrapped = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = wrapped.config.get_text_config()
    kinds = _rope_kinds(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    return not any(one in kind for one in _OF_ALL_TOKENS for kind in kinds)


def _rope_kinds(parameters: Mapping[str, Any]) -> set[str]:
    """Return the kinds of RoPE of all layers; some configurations have parameters for each type of layer."""
    found = {str(parameters.get("rope_type") or parameters.get("type") or "")}
    for value in parameters.values():
        if isinstance(value, Mapping):
            found |= _rope_kinds(value)
    return found


def share_rows(samples: Sequence[Sample]) -> list[list[int]]:
    """Divide samples into rows.

    Args:
        samples: of any documents.
    Returns:
        Rows as places of `samples`, the longest first; all others of the row are its beginning. Rows come in the
        order of the first of their samples.
    """
    starts: dict[tuple[str, int], list[int]] = {}
    for place, sample in enumerate(samples):
        starts.setdefault((sample.document_id, sample.offset), []).append(place)
    rows: list[list[int]] = []
    for places in starts.values():
        rows += _nest({place: (*samples[place].prefix, *samples[place].suffix) for place in places})
    return sorted(rows, key=min)


def followers(samples: Iterable[Sample]) -> dict[int, list[int]]:
    """Find the rows of samples that come one after the other, a document at a time.

    Args:
        samples: in their order; no more of them are kept than those of one document in a row.
    Returns:
        By the place of the longest sample of a row those of the others; rows of one sample are left out.
    """
    found: dict[int, list[int]] = {}
    waiting: list[Sample] = []
    first = 0

    def settle() -> None:
        for head, *others in share_rows(waiting) if len(waiting) > 1 else ():
            if others:
                found[first + head] = [first + place for place in others]

    for place, sample in enumerate(samples):
        if waiting and sample.document_id != waiting[0].document_id:
            settle()
            waiting, first = [], place
        waiting.append(sample)
    settle()
    return found


def _nest(tokens: Mapping[int, tuple[int, ...]]) -> list[list[int]]:
    """Divide texts into rows: each is the beginning of the first of its row."""
    rows: list[list[int]] = []
    for place in sorted(tokens, key=lambda place: -len(tokens[place])):  # stable: of equal ones the first
        text = tokens[place]
        row = next((row for row in rows if tokens[row[0]][: len(text)] == text), None)
        if row is None:
            rows.append([place])
        else:
            row.append(place)
    return rows
