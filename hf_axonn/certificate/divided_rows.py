"""Gradients that a run would have if it divided rows over context wrongly: those of the same rows with other inputs.

Each hypothesis changes the inputs of a micro-batch, whose gradients one process then computes (steps.py). A rank of
context has one piece of a row or two stripes (engine/rows.py), so the row is cut in context or in 2 * context pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hf_axonn.certificate.hypotheses import (
    FITS,
    TOKENS,
    Positions,
    Ranks,
    average,
    fit_multiple,
    largest_error,
    name_factor,
)
from hf_axonn.certificate.rows import IGNORED
from hf_axonn.certificate.steps import Steps
from hf_axonn.engine.documents import document_fields, find_document_ids
from hf_axonn.topology.grid import Grid


Inputs = Mapping[str, Tensor]
LOST = "rows that lose the label after each cut: they are divided over context before their labels are shifted"
JOINED = "rows whose documents see each other"
NUMBERED = "rows whose positions are numbered as if the ranks of context came in the order"
STRIPED = "rows whose positions are numbered as if the stripes of context came in the order"


def explain_division(steps: Steps, step: int, ranks: Ranks, positions: Positions, factors: Mapping[str, int]) -> str:
    """Return which wrong division of rows makes the gradients of a step; empty: none that is known.

    Args:
        steps: compute gradients on one process.
        step: counted from 1.
        ranks: their gradients.
        positions: the micro-batches of the step.
        factors: numbers by which a gradient may be off, with that of the ranks of context; without it none is tried.
    """
    parts = factors.get("context", 1)
    for name, change in _hypotheses(parts).items() if parts > 1 else ():
        inputs = [[change(batch.inputs) for batch in own] for own in positions]
        computed = steps.compute(steps.before(step), inputs)
        counted = [
            [replace(new, counted=old.counted) for new, old in zip(*pair, strict=True)]
            for pair in zip(computed, positions, strict=True)
        ]
        fit = fit_multiple(name, ranks, average(counted, TOKENS), largest_error)
        if fit.left <= FITS:
            scaled = f", times {name_factor(fit.ratio, factors)}" if fit.is_scaled() else ""
            return f"gradients are those of {name}{scaled}"
    return ""


def _hypotheses(parts: int) -> dict[str, Callable[[Inputs], Inputs]]:
    order = list(range(parts))
    orders = {tuple(each): NUMBERED for each in (order[::-1], order[1:] + order[:1], order[-1:] + order[:-1])}
    stripes = list(range(2 * parts))
    pairs = [*stripes[::2], *stripes[::-2]]  # as if a rank had two stripes that follow one another
    orders |= {tuple(each): STRIPED for each in (pairs, order + stripes[: parts - 1 : -1], stripes[::-1])}
    return {
        LOST: partial(_lose_labels, parts=parts, pieces=parts),
        f"{LOST} in stripes": partial(_lose_labels, parts=parts, pieces=2 * parts),
        JOINED: _join_documents,
        **{
            f"{name} {', '.join(map(str, each))}": partial(_renumber, parts=parts, order=each)
            for each, name in orders.items()
        },
    }


def _piece_length(length: int, parts: int, pieces: int) -> int:
    """Return how many positions each of the pieces has in which `parts` ranks deal a row."""
    return Grid(z=parts, context=parts).positions(length) * parts // pieces


def _lose_labels(inputs: Inputs, parts: int, pieces: int) -> Inputs:
    """Ignore the label that the last position of each piece but the last would predict."""
    labels = inputs["labels"].clone()
    piece = _piece_length(labels.shape[1], parts, pieces)
    labels[:, piece::piece] = IGNORED
    return {**inputs, "labels": labels}


def _join_documents(inputs: Inputs) -> Inputs:
    """Give Transformers a mask of ones, with which it does not look for documents in `position_ids`."""
    return {"attention_mask": torch.ones_like(inputs["input_ids"]), **inputs}


def _renumber(inputs: Inputs, parts: int, order: Sequence[int]) -> Inputs:
    """Give piece i of a row the positions of piece order[i], under the masks of the right ones."""
    rows, length = inputs["input_ids"].shape
    pieces = torch.arange(_piece_length(length, parts, len(order)) * len(order)).view(len(order), -1)
    dealt = pieces[list(order)].flatten()[:length].clamp(max=length - 1)
    positions = inputs.get("position_ids", torch.arange(length).expand(rows, -1))
    return {**inputs, "position_ids": positions[:, dealt], "attention_mask": _full_mask(inputs)}


def _full_mask(inputs: Inputs) -> Tensor:
    """[B, 1, S, S], true where a position sees another one: not after it, in its document, and no padding."""
    ids = inputs["input_ids"]
    documents = find_document_ids(ids, **document_fields(inputs))
    seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril().expand(len(ids), -1, -1)
    if documents is not None:
        seen = seen & (documents[:, :, None] == documents[:, None, :])
    if (mask := inputs.get("attention_mask")) is not None:
        seen = seen & (mask[:, None, :] != 0)
    return seen[:, None]
