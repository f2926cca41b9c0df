"""Units of samples through the model: matched or scored, decoded where that is asked, and gathered on rank 0 as
results."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hf_axonn import parallel_state
from hf_axonn_eval.data.results import SampleResult
from hf_axonn_eval.data.samples import Sample
from hf_axonn_eval.extraction import batching as batches
from hf_axonn_eval.extraction import decoding, scoring
from hf_axonn_eval.extraction import prefix_matching as matching
from hf_axonn_eval.extraction.kv_cache import Row, can_be_kept, empty_cache, is_filled
from hf_axonn_eval.extraction.prefix_matching import Match
from hf_axonn_eval.extraction.scoring import Score
from hf_axonn_eval.extraction.work_split import WorkSplit
from hf_axonn_eval.metrics.discoverability import Sampler
from hf_axonn_eval.metrics.registry import METRICS


@dataclass(kw_only=True)
class Runner:
    """Asks the model; `batch_size` shrinks where memory runs out. The other arguments are those of `extract`.

    Args:
        bound: margins below it, in nats, are near ties.
        decoded: rows that are decoded together, as long as the batch size is the planned one.
    """

    model: Any
    tokenizer: Any
    generate: bool
    stop_early: bool
    sampler: Sampler | None
    membership: bool
    bound: float
    batch_size: int
    decoded: int

    def __post_init__(self) -> None:
        self.planned = self.batch_size

    def measure(
        self, samples: Sequence[Sample], units: Sequence[list[list[int]]], work_split: WorkSplit
    ) -> Iterator[list[SampleResult]]:
        """Yield, unit by unit, the results of all ranks on rank 0, and an empty list elsewhere."""
        parallel = parallel_state(self.model)
        in_step = parallel is not None and parallel.grid.z > 1
        alone = parallel is None or parallel.grid.size == 1
        placed = in_step and (self.generate or self.stop_early)
        with decoding.weights_in_place(self.model) if placed else contextlib.nullcontext():
            for start in range(0, len(units), work_split.count):
                together = units[start : start + work_split.count]
                mine = together[work_split.index] if work_split.index < len(together) else []
                unit = [[samples[place] for place in batch] for batch in mine]
                measured, self.batch_size = batches.halving(
                    self.batch_size, lambda rows, unit=unit: self._unit(batches.smaller(unit, rows), rows), alone=alone
                )
                # ranks of z pass weights to each other: in every pass, or in the first one if they are kept then
                passes = max(map(len, together)) if in_step and not placed else int(in_step and start == 0)
                for _ in range(len(mine), passes):
                    scoring.score_suffixes(self.model, [samples[together[0][0][0]]])
                yield work_split.gather(measured if work_split.reports else [])

    def _unit(self, unit: Sequence[Sequence[Sample]], rows: int) -> list[SampleResult]:
        together = self.decoded if rows == self.planned else rows  # memory ran out: no more rows than in a pass
        rest = _Rest(self.model, rows=rows, together=together) if self.generate else None
        answers = []
        for batch in unit:
            first = len(answers)
            answers += self._matches(batch, first, rest) if self.stop_early else self._scores(batch, first, rest)
            if rest is not None:
                rest.decode(drain=False)
        if rest is not None:
            rest.decode(drain=True)
        samples = (sample for batch in unit for sample in batch)
        measured = []
        for number, (sample, answer) in enumerate(zip(samples, answers, strict=True)):
            match = answer if isinstance(answer, Match) else _match(sample, answer)
            continuation = [*match.known, *rest.tokens.get(number, ())] if rest is not None else None
            measured.append(result_of(sample, answer, continuation, self.tokenizer, bound=self.bound))
        return measured

    def _matches(self, batch: Sequence[Sample], first: int, rest: "_Rest | None") -> list[Match]:
        def missed(place: int, match: Match, row: Row | None) -> None:
            rest.add(first + place, batch[place], match, row)

        return matching.match_suffixes(self.model, batch, missed=missed if rest is not None else None)

    def _scores(self, batch: Sequence[Sample], first: int, rest: "_Rest | None") -> list[scoring.Score]:
        cache = empty_cache() if rest is not None and can_be_kept(self.model) else None
        scores = scoring.score_suffixes(
            self.model,
            batch,
            sampler=self.sampler,
            tokenizer=self.tokenizer if self.membership else None,
            cache=cache,
        )
        if rest is None:
            return scores
        filled = cache is not None and is_filled(cache, len(batch))
        for place, (sample, score) in enumerate(zip(batch, scores, strict=True)):
            match = _match(sample, score)
            if len(match.known) < len(sample.suffix):
                row = None
                if filled:
                    start = cache.get_seq_length() - len(sample.prefix) - len(sample.suffix) + 1
                    row = Row(cache, place, start, len(sample.prefix) + match.tokens)
                rest.add(first + place, sample, match, row)
        return scores


class _Rest:
    """What the model says after the first miss of samples: `tokens`, by the number of the sample.

    Args:
        rows: in a pass that feeds full prompts.
        together: rows in a pass that feeds one token of each.
    """

    def __init__(self, model, *, rows: int, together: int) -> None:
        self.model = model
        self.rows = rows
        self.tokens: dict[int, list[int]] = {}
        self._decoder = decoding.Decoder(model, rows=together)
        self._prompts: list[tuple[int, list[int], int]] = []  # without kept keys and values

    def add(self, number: int, sample: Sample, match: Match, row: Row | None) -> None:
        """Ask for the rest of the continuation of a sample; `row` holds what comes before the miss."""
        missing = len(sample.suffix) - len(match.known)
        if row is not None:
            self._decoder.add(number, row, match.known[-1], missing)
        else:
            self._prompts.append((number, [*sample.prefix, *match.known], missing))

    def decode(self, *, drain: bool) -> None:
        """Decode what makes full batches, or with `drain` everything."""
        self.tokens.update(self._decoder.run(drain=drain))
        if not drain:
            return
        for begin in range(0, len(self._prompts), self.rows):
            numbers, prompts, missing = zip(*self._prompts[begin : begin + self.rows], strict=True)
            decoded = decoding.continue_greedily(self.model, prompts, steps=max(missing))
            for number, tokens, wanted in zip(numbers, decoded, missing, strict=True):
                self.tokens[number] = tokens[:wanted]
        self._prompts = []


def _match(sample: Sample, score: scoring.Score) -> Match:
    return matching.matched(score.choices, sample.suffix, score.leads)


def result_of(
    sample: Sample, answer: Score | Match, continuation: Sequence[int] | None, tokenizer, *, bound: float
) -> SampleResult:
    """The result of one sample: what was measured, and every registered metric of it.

    Args:
        answer: of a teacher-forced pass; or a match, where the true tokens after the first miss were not fed. What
            they would say is unknown then, so log-probabilities and hits are None for all samples, those without a
            miss too: a mean over these alone would mislead.
        continuation: the greedy one, as long as the suffix; None without generation.
        tokenizer: for texts, which ROUGE and zlib read; None leaves these out.
        bound: margins below it, in nats, are near ties.
    """
    match = answer if isinstance(answer, Match) else _match(sample, answer)
    suffix_text = generated_text = None
    if tokenizer is not None:
        suffix_text = tokenizer.decode(list(sample.suffix), skip_special_tokens=True)
        if continuation is not None:
            same = list(continuation) == list(sample.suffix)
            generated_text = suffix_text if same else tokenizer.decode(list(continuation), skip_special_tokens=True)
    measured: dict[str, Any] = {
        "sample_id": sample.sample_id,
        "document_id": sample.document_id,
        "bucket": sample.bucket,
        "offset": sample.offset,
        "prefix_length": len(sample.prefix),
        "suffix_length": len(sample.suffix),
        "divergence_point": match.tokens,
        "margin": answer.margin,
        "near_tie": answer.margin < bound,
        **dict.fromkeys(("logprob", "logprobs", "hits")),
        "generated": list(continuation) if continuation is not None else None,
        "generated_text": generated_text,
        "suffix_text": suffix_text,
    }
    if isinstance(answer, Score):
        measured |= {
            "logprob": sum(answer.logprobs),
            "logprobs": answer.logprobs,
            "hits": [choice == true for choice, true in zip(answer.choices, sample.suffix, strict=True)],
            "sampled_logprob": answer.sampled_logprob,
            "membership": answer.membership,
        }
    inputs = {**measured, "prefix": sample.prefix, "suffix": sample.suffix}
    computed = {name: metric(inputs) for name, metric in METRICS.items()}
    if continuation is None:
        measured["suffix_text"] = None  # it is kept beside a continuation
    return SampleResult.of(measured, computed)
