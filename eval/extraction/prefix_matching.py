"""Match of the model's first choices with a suffix, up to the first miss: a sample that missed is dropped.

The suffix is checked in chunks of growing length. Most samples that fail do so in the first few tokens, so little
more than the prefix of them is ever fed.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hf_axonn_eval.data.samples import Sample
from hf_axonn_eval.extraction.kv_cache import Row, can_be_kept, empty_cache, is_filled, rows_of
from hf_axonn_eval.extraction.scoring import (
    device_of,
    first_choices,
    last_logits,
    logits_after,
    read_logits,
    score_suffixes,
)
from hf_axonn_eval.metrics.text import first_miss


FIRST_CHUNK = 4  # of 32 texts that SmolLM2-135M does not know, 30 miss one of the first four tokens
LONGER = 4  # times the tokens so far are checked after a chunk
_FEWEST = 64  # tokens in a pass: fewer take as long


class Match(NamedTuple):
    """Match of a suffix: `tokens` of it before the first miss, and the `margin`, in nats.

    The margin of a suffix that was met in full is that of `Score`. Else it is how far the true token is behind at the
    first miss: what comes after is not known, so the sample may be further from being extracted than this says. None
    where a text was written, and the true one not scored.

    `known` is the model's greedy continuation as far as that tells it: up to and including the first miss.
    """

    tokens: int
    margin: float | None
    known: list[int]


Missed = Callable[[int, Match, Row | None], None]


def match_suffixes(model, batch: Sequence[Sample], *, missed: Missed | None = None) -> list[Match]:
    """Match the model's first choices with each suffix.

    One forward pass for each chunk of the suffix; on a parallelized model collective over its x, y and z, where ranks
    of z may need different numbers of them: see `decoding.weights_in_place`.

    Args:
        batch: samples; of different lengths only if `scoring.may_be_padded(model)`.
        missed: called for each sample whose continuation is not known to its end: its place in the batch, its match,
            and the keys and values of the tokens before the miss; None instead of these where they cannot be kept.
    Raises:
        ValueError: the model answers with NaN.
    """
    if not can_be_kept(model):
        scores = zip(batch, score_suffixes(model, batch), strict=True)
        matches = [match_choices(score.choices, sample.suffix, score.leads) for sample, score in scores]
        for place, match in enumerate(matches):
            if missed is not None and len(match.known) < len(batch[place].suffix):
                missed(place, match, None)
        return matches
    found: list[Match | None] = [None] * len(batch)
    choices: list[list[int]] = [[] for _ in batch]
    leads: list[list[float]] = [[] for _ in batch]
    left = list(range(len(batch)))  # rows of the batch without a miss so far
    longest = max(len(sample.prefix) for sample in batch)
    padding = [longest - len(sample.prefix) for sample in batch]
    cache, begin, end = empty_cache(), 0, min(FIRST_CHUNK, max(len(sample.suffix) for sample in batch))
    while left:
        chosen, ahead = _feed(model, [batch[row] for row in left], [padding[row] for row in left], begin, end, cache)
        going, gone = [], []  # places in `left`
        for place, (row, words, gaps) in enumerate(zip(left, chosen.tolist(), ahead.tolist(), strict=True)):
            choices[row] += words
            leads[row] += gaps
            suffix = batch[row].suffix
            match = match_choices(choices[row][: len(suffix)], suffix[:end], leads[row])
            if match.tokens == min(end, len(suffix)) and end < len(suffix):
                going.append(place)
                continue
            found[row] = match
            if len(match.known) < len(suffix):
                gone.append(place)
        if missed is not None and gone:
            # where most rows are gone they keep what the pass left, and the others take a copy along, below
            most = 2 * len(gone) >= len(left)
            taken = cache if most else rows_of(cache, gone)
            for number, place in zip(gone if most else range(len(gone)), gone, strict=True):
                row = left[place]
                match = found[row]
                missed(row, match, Row(taken, number, padding[row], len(batch[row].prefix) + match.tokens))
        remaining = max((len(batch[left[place]].suffix) for place in going), default=end) - end
        if going and (begin == 0 or len(going) < len(left)):
            cache = rows_of(cache, going, room=remaining)
        left = [left[place] for place in going]
        begin, end = end, end + min(remaining, max((LONGER - 1) * end, _FEWEST // max(1, len(left))))
    return found


def _feed(
    model, samples: Sequence[Sample], padding: Sequence[int], begin: int, end: int, cache
) -> tuple[torch.Tensor, torch.Tensor]:
    """Feed tokens `begin` to `end` of the suffixes, the first time after their prefixes; fills the cache.

    A suffix that is shorter than others is filled up on the right, where nothing looks back at.

    Returns:
        first choices and leads, [samples, end - begin], of these tokens.
    """
    if begin == 0:
        rows = [[*sample.prefix, *_padded_slice(sample.suffix, 0, end)[:-1]] for sample in samples]
        logits = last_logits(model, rows, keep=end, cache=cache)
        if not is_filled(cache, len(samples)):
            raise ValueError(f"the cache of {type(model).__name__} cannot be cut; leave --stop_early out.")
    else:
        fed = [_padded_slice(sample.suffix, begin - 1, end - 1) for sample in samples]
        logits = logits_after(
            model, torch.tensor(fed, device=device_of(model)), padding, keep=end - begin, cache=cache
        )
    true = torch.tensor([_padded_slice(sample.suffix, begin, end) for sample in samples], device=logits.device)
    choices, leads = read_logits(logits, first_choices, true)
    if leads.isnan().any():
        raise ValueError("the model's logits are not numbers (NaN): try --dtype float32.")
    return choices, leads


def match_choices(choices: Sequence[int], suffix: Sequence[int], leads: Sequence[float]) -> Match:
    """Match choices with a suffix; `leads` are those of `Score`, of which none counts after the first miss."""
    hits = [choice == true for choice, true in zip(choices, suffix, strict=True)]
    tokens = first_miss(hits)
    return Match(tokens, abs(min(leads[: min(tokens + 1, len(hits))])), list(choices[: tokens + 1]))


def _padded_slice(suffix: Sequence[int], begin: int, end: int) -> list[int]:
    tokens = list(suffix[begin:end])
    return tokens + [0] * (end - begin - len(tokens))
