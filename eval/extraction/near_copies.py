"""Near copies: a lower bound of the chance that one draw gives the suffix but for a few edits, by a beam search that
only follows beginnings of such near copies.

A continuation z of as many tokens as the suffix y is a near copy if the Levenshtein distance of the ids of z and y is
at most `edits`. There are too many of them to ask for the probability of each, and drawing needs 1 / p draws to see
what has probability p. The search keeps the likeliest `beams` beginnings of near copies, token by token:

    D_t[j]      distance of the first t tokens of z to the first j of y; for one more token v
    D_t+1[j]    min(D_t[j] + 1, D_t+1[j - 1] + 1, D_t[j - 1] + [v != y_j+1])
    least end   min over j of D_t[j] + |j - t|, what the rest adds if it is right: above `edits` nothing follows it

The sum over different near copies that were found is a lower bound of the probability of all; the beginning of y
itself is never dropped, so it is never below the probability of y. Last tokens are not searched: all that end as near
copies count. Source: Cooper et al. 2026, arXiv 2603.24917 (decoding-constrained beam search).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_axonn_eval.data.jsonl import is_count
from hf_axonn_eval.data.samples import Sample
from hf_axonn_eval.extraction import kv_cache
from hf_axonn_eval.extraction.scoring import last_logits, logits_after
from hf_axonn_eval.metrics.discoverability import Sampler


@dataclass(frozen=True, kw_only=True)
class NearCopySearch:
    """Settings of the search.

    Args:
        edits: insertions, deletions and substitutions of tokens that a near copy may have.
        beams: beginnings that are kept of each sample. The model reads at most `beams` tokens for one of a draw.
    Raises:
        ValueError: fewer than 0 edits or 1 beam, or no whole numbers.
    """

    edits: int = 5
    beams: int = 20

    def __post_init__(self) -> None:
        for name, least in (("edits", 0), ("beams", 1)):
            value = getattr(self, name)
            if not is_count(value, least=least):
                raise ValueError(f"{name} is {value!r}, but it must be a whole number of at least {least}.")

    def check(self, shortest: int) -> None:
        """Raise ValueError if suffixes of `shortest` tokens are not longer than `edits`: all texts are near them."""
        if self.edits >= shortest:
            raise ValueError(
                f"a near copy may have {self.edits} edits, but there is a suffix of {shortest} tokens, of which any "
                f"text is a near copy then: ask for at most {shortest - 1}, or for longer suffixes."
            )

    @property
    def text(self) -> str:
        """Text for records, such as "5 edits, 20 beams"."""
        return f"{self.edits} edits, {self.beams} beams"


class NearCopies(NamedTuple):
    """Result of the search for one sample.

    `logprobs[k]`: lower bound, in nats, of the log-probability that one draw is within k edits of the suffix, for k
    from 0, the suffix itself, to the edits that were asked for; -inf if the sampler draws none. `read`: tokens that
    the model read for it after the prefix; a draw reads as many as the suffix has, less one.
    """

    logprobs: list[float]
    read: int


@torch.no_grad()
def near_copies(
    model, samples: Sequence[Sample], search: NearCopySearch, *, sampler: Sampler | None = None
) -> list[NearCopies]:
    """Search for near copies of the suffixes of some samples, all at the same time.

    One pass over the prefixes, and one for each token of the suffix but the last, of at most `beams` rows a sample.
    On a parallelized model collective over its x, y and z: all of these ranks must search samples of the same length.

    Args:
        model: a causal LM. If its cache cannot be kept (`kv_cache.can_be_kept`), each pass reads all tokens again.
        samples: whose prefixes have one length, and whose suffixes have one length.
        search: how many edits and beams.
        sampler: how tokens are drawn; None: at temperature 1, from all of them.
    Raises:
        ValueError: samples of several lengths, or suffixes that are not longer than the edits.
    """
    if len({(len(sample.prefix), len(sample.suffix)) for sample in samples}) != 1:
        raise ValueError("samples of several lengths: near copies are searched for samples of one length at a time.")
    length = len(samples[0].suffix)
    search.check(length)
    sampler = sampler if sampler is not None else Sampler()
    searches = [_Beginnings(sample.suffix, search) for sample in samples]
    cache = kv_cache.empty_cache() if kv_cache.can_be_kept(model) else None
    rows = [list(sample.prefix) for sample in samples]
    logits = last_logits(model, rows, keep=1, cache=cache)
    for step in range(length):
        parents, tokens = _expand_all(searches, sampler.distribution(logits[:, -1]))
        if not parents:
            break
        rows = [[*rows[parent], token] for parent, token in zip(parents, tokens, strict=True)]
        if cache is None:
            logits = last_logits(model, rows, keep=1)
        else:
            cache = kv_cache.rows_of(cache, parents, room=length - 1 - step)
            read = torch.tensor(tokens, device=logits.device)[:, None]
            logits = logits_after(model, read, [0] * len(rows), keep=1, cache=cache)
    return [NearCopies(each.within(), each.read) for each in searches]


def _expand_all(searches: Sequence["_Beginnings"], logprobs: Tensor) -> tuple[list[int], list[int]]:
    """Take another step in every search; returns the row that each new row continues, and its next token.

    Args:
        logprobs: [rows, V], of the next token; the rows of the first search, those of the second, ...
    """
    parents, tokens, first = [], [], 0
    for each, of_rows in zip(searches, logprobs.split([each.rows for each in searches]), strict=True):
        chosen = each.expand(of_rows) if each.rows else []
        parents += [first + row for row, _ in chosen]
        tokens += [token for _, token in chosen]
        first += len(of_rows)
    return parents, tokens


class _Beginnings:
    """Kept beginnings of near copies of one suffix, and the near copies found.

    `logprobs` [rows], `distances` [rows, S + 1] (D_t), `verbatim` [rows], whether a beginning is that of the suffix.
    `found[k]` is the log-probability of the near copies of exactly k edits.
    """

    def __init__(self, suffix: Sequence[int], search: NearCopySearch) -> None:
        self.suffix = np.array(suffix)
        self.beams = search.beams
        self.step = 0
        self.read = 0
        self.logprobs = np.zeros(1)
        self.distances = np.arange(len(suffix) + 1)[None]
        self.verbatim = np.ones(1, dtype=bool)
        self.found = np.full(search.edits + 1, -np.inf)

    @property
    def rows(self) -> int:
        return len(self.logprobs)

    def within(self) -> list[float]:
        """Log-probability of what was found with at most 0, 1, 2, ... edits."""
        return np.logaddexp.accumulate(self.found).tolist()

    def expand(self, logprobs: Tensor) -> list[tuple[int, int]]:
        """Append a token to every row; returns the rows that continue, as (row before, token).

        All tokens that are not the suffix's near here have one distance, and the likeliest of them are enough.

        Args:
            logprobs: [rows, V], of the next token.
        """
        edits, length = len(self.found) - 1, len(self.suffix)
        near = np.unique(self.suffix[max(0, self.step - edits) : self.step + edits + 1])
        index = torch.from_numpy(near).to(logprobs.device)
        others = logprobs.index_fill(1, index, -torch.inf)
        either = torch.cat([logprobs[:, index], others.logsumexp(-1, keepdim=True)], dim=1)
        scores = self.logprobs[:, None] + either.double().cpu().numpy()  # [rows, near tokens, and all others]
        distances, ends = self._distances(near)
        self.step += 1
        if self.step == length:
            for edit in range(edits + 1):
                self.found[edit] = np.logaddexp.reduce(scores[ends == edit], initial=-np.inf)
            self.logprobs = np.zeros(0)
            return []
        likely = others.topk(min(self.beams, others.shape[1]))
        tokens = np.concatenate([np.broadcast_to(near, (self.rows, len(near))), likely.indices.cpu().numpy()], axis=1)
        scores = np.concatenate(
            [scores[:, :-1], self.logprobs[:, None] + likely.values.double().cpu().numpy()], axis=1
        )
        kind = np.minimum(np.arange(tokens.shape[1]), len(near))  # column of `ends` and `distances`
        verbatim = self.verbatim[:, None] & (tokens == self.suffix[self.step - 1])
        possible = np.flatnonzero((ends[:, kind] <= edits) & (scores > -np.inf))
        first = np.where(verbatim, np.inf, scores).flat[possible]
        kept = possible[np.argsort(-first, kind="stable")[: self.beams]]
        row, column = np.divmod(kept, tokens.shape[1])
        self.logprobs, self.verbatim = scores[row, column], verbatim[row, column]
        self.distances = distances[row, kind[column]]
        self.read += len(kept)
        return list(zip(row.tolist(), tokens[row, column].tolist(), strict=True))

    def _distances(self, near: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """D_t+1 [rows, K, S + 1] after each of the near tokens and, in the last place, any other one; and the least
        end [rows, K] of each."""
        places = np.arange(len(self.suffix) + 1)
        differs = np.concatenate([near[:, None] != self.suffix, np.ones((1, len(self.suffix)), dtype=bool)])
        before = self.distances[:, None]
        either = np.minimum(before[..., 1:] + 1, before[..., :-1] + differs)
        either = np.concatenate([np.broadcast_to(before[..., :1] + 1, (*either.shape[:2], 1)), either], axis=-1)
        after = np.minimum.accumulate(either - places, axis=-1) + places  # D_t+1[j - 1] + 1, for all j at once
        return after, (after + abs(places - self.step - 1)).min(-1)
