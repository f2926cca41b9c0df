"""Exact match and nothing else: a sample is dropped as soon as it has failed.

The suffix is checked in pieces of growing length. Most samples that fail do so in the first few tokens, so little
more than the prefix of them is ever fed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hf_axonn_eval.caches import can_be_kept, empty_cache, is_filled, select_rows
from hf_axonn_eval.samples import Sample
from hf_axonn_eval.scoring import device_of, last_logits, logits_after, score_suffixes, score_tokens


FIRST_PIECE = 8


class Match(NamedTuple):
    """Suffix tokens before the first miss, and the smallest margin up to there, in nats."""

    tokens: int
    margin: float


def match_suffixes(model, batch: Sequence[Sample]) -> list[Match]:
    """How far the model's first choices agree with each suffix.

    One forward pass for each piece of the suffix; on a parallelized model collective over its x, y and z, where ranks
    of z may need different numbers of them: see `decoding.weights_in_place`.

    Args:
        batch: samples; of different lengths only if `scoring.may_be_padded(model)`.
    Raises:
        ValueError: the model answers with NaN.
    """
    if not can_be_kept(model):
        return [
            matched(score.choices, sample.suffix, score.margins)
            for sample, score in zip(batch, score_suffixes(model, batch), strict=True)
        ]
    found: list[Match | None] = [None] * len(batch)
    choices: list[list[int]] = [[] for _ in batch]
    margins: list[list[float]] = [[] for _ in batch]
    left = list(range(len(batch)))
    longest = max(len(sample.prefix) for sample in batch)
    cache, begin, end = empty_cache(), 0, min(FIRST_PIECE, max(len(sample.suffix) for sample in batch))
    while left:
        # a suffix that is shorter than others of its batch is filled up on the right, where nothing looks back at
        asked = [_piece(batch[row].suffix, begin, end) for row in left]
        if begin == 0:
            rows = [[*batch[row].prefix, *piece[:-1]] for row, piece in zip(left, asked, strict=True)]
            logits = last_logits(model, rows, keep=end, cache=cache)
            if not is_filled(cache, len(batch)):
                raise ValueError(f"the cache of {type(model).__name__} cannot be cut; leave --stop_early out.")
        else:
            fed = [_piece(batch[row].suffix, begin - 1, end - 1) for row in left]
            padding = [longest - len(batch[row].prefix) for row in left]
            tokens = torch.tensor(fed, device=device_of(model))
            logits = logits_after(model, tokens, padding, keep=end - begin, cache=cache)
        targets = torch.tensor(asked, device=logits.device)
        logprobs, chosen, ahead = score_tokens(logits, targets)
        if logprobs.isnan().any():
            raise ValueError("the model's log-probabilities are not numbers (NaN): try --dtype float32.")
        going = []
        for place, row in enumerate(left):
            choices[row] += chosen[place].tolist()
            margins[row] += ahead[place].tolist()
            suffix = batch[row].suffix
            match = matched(choices[row][: len(suffix)], suffix[:end], margins[row])
            if match.tokens < min(end, len(suffix)) or end >= len(suffix):
                found[row] = match
            else:
                going.append(place)
        if going and len(going) < len(left):
            select_rows(cache, going)
        left = [left[place] for place in going]
        begin, end = end, min(2 * end, max((len(batch[row].suffix) for row in left), default=end))
    return found


def matched(choices: Sequence[int], suffix: Sequence[int], margins: Sequence[float]) -> Match:
    """Tokens before the first miss, and the smallest margin of these and of the miss."""
    hits = [choice == true for choice, true in zip(choices, suffix, strict=True)]
    tokens = next((place for place, hit in enumerate(hits) if not hit), len(hits))
    return Match(tokens, min(margins[: min(tokens + 1, len(hits))]))


def _piece(suffix: Sequence[int], begin: int, end: int) -> list[int]:
    piece = list(suffix[begin:end])
    return piece + [0] * (end - begin - len(piece))
