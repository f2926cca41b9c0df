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
from hf_axonn_eval.extraction.prefix_matching import Match, matched
from hf_axonn_eval.extraction.scoring import Score
from hf_axonn_eval.extraction.work_split import WorkSplit
from hf_axonn_eval.metrics import text as metrics
from hf_axonn_eval.metrics.discoverability import Sampler
from hf_axonn_eval.metrics.text import rouge, type_token_ratio, zlib_ratio


@dataclass(kw_only=True)
class Runner:
    """Asks the model; `batch_size` shrinks where memory runs out. The other arguments are those of `extract`.

    Args:
        bound: margins below it, in nats, are undecided.
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
        self, samples: Sequence[Sample], units: Sequence[list[list[int]]], division: WorkSplit
    ) -> Iterator[list[SampleResult]]:
        """Yield, unit by unit, the results of all ranks on rank 0, and an empty list elsewhere."""
        parallel = parallel_state(self.model)
        in_step = parallel is not None and parallel.grid.z > 1
        alone = parallel is None or parallel.grid.size == 1
        placed = in_step and (self.generate or self.stop_early)
        with decoding.weights_in_place(self.model) if placed else contextlib.nullcontext():
            for start in range(0, len(units), division.count):
                together = units[start : start + division.count]
                mine = together[division.index] if division.index < len(together) else []
                unit = [[samples[place] for place in batch] for batch in mine]
                measured, self.batch_size = batches.halving(
                    self.batch_size, lambda rows, unit=unit: self._unit(batches.smaller(unit, rows), rows), alone=alone
                )
                # ranks of z pass weights to each other: in every pass, or in the first one if they are kept then
                passes = max(map(len, together)) if in_step and not placed else int(in_step and start == 0)
                for _ in range(len(mine), passes):
                    scoring.score_suffixes(self.model, [samples[together[0][0][0]]])
                yield division.gather(measured if division.reports else [])

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
        result = matched_result if self.stop_early else scored_result
        samples = (sample for batch in unit for sample in batch)
        measured = []
        for number, (sample, answer) in enumerate(zip(samples, answers, strict=True)):
            match = answer if self.stop_early else _match(sample, answer)
            said = [*match.known, *rest.tokens.get(number, ())] if rest is not None else None
            measured.append(result(sample, answer, said, self.tokenizer, bound=self.bound))
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
        rows: in a pass that feeds whole prompts.
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
        """Decode what makes whole batches, or with `drain` everything."""
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
    return matching.matched(score.choices, sample.suffix, score.margins)


def scored_result(
    sample: Sample, score: Score, continuation: Sequence[int] | None, tokenizer, *, bound: float
) -> SampleResult:
    """The result of a teacher-forced pass, and of a continuation if there is one.

    Args:
        continuation: the greedy one, as long as the suffix.
        tokenizer: for texts, which ROUGE and zlib read; None leaves these out.
        bound: margins below it, in nats, are undecided.
    """
    hits = [choice == true for choice, true in zip(score.choices, sample.suffix, strict=True)]
    text = _suffix_text(sample, tokenizer)
    return _result(
        sample,
        matched(score.choices, sample.suffix, score.margins),
        bound,
        text,
        token_accuracy=metrics.token_accuracy(hits),
        extraction_strength=metrics.extraction_strength(hits),
        logprob=sum(score.logprobs),
        logprobs=score.logprobs,
        hits=hits,
        sampled_logprob=score.sampled_logprob,
        membership=score.membership,
        **_decoded(sample, continuation, text, tokenizer),
    )


def matched_result(
    sample: Sample, match: Match, continuation: Sequence[int] | None, tokenizer, *, bound: float
) -> SampleResult:
    """The result where the true tokens after a miss were not fed; arguments as of `scored_result`.

    What these would say is unknown then, so it is None for all samples, those without a miss too: a mean over these
    alone would mislead.
    """
    unknown = dict.fromkeys(("token_accuracy", "extraction_strength", "logprob", "logprobs", "hits"))
    text = _suffix_text(sample, tokenizer)
    return _result(sample, match, bound, text, **unknown, **_decoded(sample, continuation, text, tokenizer))


def _result(sample: Sample, match: Match, bound: float, text: str | None, **fields: Any) -> SampleResult:
    return SampleResult(
        sample_id=sample.sample_id,
        document_id=sample.document_id,
        bucket=sample.bucket,
        offset=sample.offset,
        prefix_length=len(sample.prefix),
        suffix_length=len(sample.suffix),
        exact_match=match.tokens == len(sample.suffix),
        divergence_point=match.tokens,
        margin=match.margin,
        undecided=match.margin < bound,
        type_token_ratio=type_token_ratio(sample.suffix),
        zlib_ratio=zlib_ratio(text) if text is not None else None,
        **fields,
    )


def _suffix_text(sample: Sample, tokenizer) -> str | None:
    return tokenizer.decode(list(sample.suffix), skip_special_tokens=True) if tokenizer is not None else None


def _decoded(sample: Sample, continuation: Sequence[int] | None, suffix_text: str | None, tokenizer) -> dict[str, Any]:
    if continuation is None:
        return {}
    continuation = list(continuation)
    distance = metrics.edit_distance(continuation, sample.suffix)
    fields: dict[str, Any] = {
        "generated": continuation,
        "free_running_accuracy": metrics.free_running_accuracy(continuation, sample.suffix),
        "longest_run": metrics.longest_common_run(continuation, sample.suffix),
        "edit_distance": distance,
        "near_verbatim": metrics.near_verbatim(distance),
    }
    if suffix_text is not None:
        same = continuation == list(sample.suffix)
        text = suffix_text if same else tokenizer.decode(continuation, skip_special_tokens=True)
        fields |= {"generated_text": text, "suffix_text": suffix_text, **rouge(text, suffix_text)}
    return fields
