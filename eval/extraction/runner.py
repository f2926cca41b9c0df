"""Units of samples through the model: matched or scored, decoded if requested, and gathered on rank 0 as results."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_axonn import parallel_state
from hf_axonn_eval.data.results import SampleResult
from hf_axonn_eval.data.samples import Sample, tokens_of
from hf_axonn_eval.extraction import batching as batches
from hf_axonn_eval.extraction import decoding, scoring
from hf_axonn_eval.extraction import prefix_matching as matching
from hf_axonn_eval.extraction.kv_cache import Row, can_be_kept, empty_cache, is_filled
from hf_axonn_eval.extraction.near_copies import NearCopies, near_copies
from hf_axonn_eval.extraction.options import Options
from hf_axonn_eval.extraction.prefix_matching import Match
from hf_axonn_eval.extraction.run import Asker, Survey
from hf_axonn_eval.extraction.run_record import describe_model
from hf_axonn_eval.extraction.scoring import Score
from hf_axonn_eval.extraction.shared_rows import may_share, share_rows
from hf_axonn_eval.extraction.work_split import WorkSplit
from hf_axonn_eval.metrics.registry import METRICS


@dataclass(kw_only=True)
class Runner(Asker):
    """Asks a model; `extract` describes the arguments."""

    model: Any
    tokenizer: Any
    options: Options
    model_record: Mapping[str, Any] | None
    batch_size: int | str

    def __post_init__(self) -> None:
        self.work_split = WorkSplit.for_model(self.model)
        options = self.options
        decoding.check_decoding(
            self.model, generate=options.generate, stop_early=options.stop_early, near_copies=options.near_copies
        )
        self.vocabulary = self.model.config.get_text_config().vocab_size
        self.eos = eos_ids(self.model, self.tokenizer)
        self.bound = scoring.near_tie_below(self.model)  # margins below it, in nats, are near ties

    @contextlib.contextmanager
    def prepare(self, survey: Survey) -> Iterator[None]:
        """Divide the samples into units of batches of rows, the same on every rank; inside, the model is in eval mode.

        `planned` rows are in a batch, fewer (`rows`) once memory runs out, and `decoded` are decoded together. A row
        is a list of places: one of a sample, and those of others that are its beginning.
        """
        options, lengths, longest = self.options, survey.lengths, survey.longest
        shared = survey.followers if not options.stop_early and may_share(self.model) else {}
        following = {place for some in shared.values() for place in some}
        heads = [place for place in range(len(lengths)) if place not in following]
        kept = [_kept_logits(lengths, head, shared.get(head, ())) for head in heads]
        of_rows = [(sum(lengths[head]) - keep, keep) for head, keep in zip(heads, kept, strict=True)]
        with scoring.evaluating(self.model):
            if isinstance(self.batch_size, int):
                rows = self.batch_size
            else:  # "auto"
                keep = longest if options.membership else max(kept)
                rows = batches.fitting_batch_size(self.model, self.work_split, longest=longest, kept_logits=keep)
            self.rows = self.planned = rows
            self.decoded = batches.decoded_rows(self.model, self.rows, longest)
            even = batches.even_rows(len(heads), self.rows, self.work_split.count)
            planned = batches.plan_batches(of_rows, even, padding=scoring.may_be_padded(self.model))
            units = batches.plan_units(planned, self.work_split.count)
            self.plan = {"rows": even, "number": len(planned), "in_a_unit": len(units[0])}
            chunked = options.stop_early and can_be_kept(self.model)
            most = matching.FIRST_CHUNK if chunked else longest
            fed = [prefix + min(suffix, most) - 1 for prefix, suffix in of_rows]
            if shared:
                self.plan |= {"tokens": sum(fed), "tokens_alone": sum(map(sum, lengths)) - len(lengths)}
            passes = [batches.in_passes(unit, fed, scoring.device_of(self.model)) for unit in units]
            self.units = [
                [[[heads[row], *shared.get(heads[row], ())] for row in batch] for batch in unit] for unit in passes
            ]
            yield

    def facts(self) -> dict[str, Any]:
        dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        return {"dtype": dtype, "family": _family(self.model.config), "eos": list(self.eos)}

    def describe(self) -> dict[str, Any]:
        settings = {
            "batch_size": self.batch_size,
            "batches": self.plan,
            "decoded_rows": self.decoded,
            **self.options.decoding(),
            "near_tie_below": self.bound,
        }
        return describe_model(self.model, self.model_record, settings, self.work_split.world_size)

    def measure(self, samples: Sequence[Sample], done: set[int]) -> Iterator[list[SampleResult]]:
        units = [unit for unit in (_left_over(unit, done) for unit in self.units) if unit]
        options, split, parallel = self.options, self.work_split, parallel_state(self.model)
        in_step = parallel is not None and parallel.grid.z > 1
        alone = parallel is None or parallel.grid.size == 1
        placed = in_step and (options.generate or options.stop_early or options.near_copies is not None)
        with decoding.weights_in_place(self.model) if placed else contextlib.nullcontext():
            for start in range(0, len(units), split.count):
                together = units[start : start + split.count]
                own = together[split.index] if split.index < len(together) else []
                unit = [[[samples[place] for place in row] for row in batch] for batch in own]
                results, self.rows = batches.halving(
                    self.rows, lambda rows, unit=unit: self._unit(batches.smaller(unit, rows), rows), alone=alone
                )
                # ranks of z pass weights to each other: in every pass, or in the first one if they are kept then
                passes = max(map(len, together)) if in_step and not placed else int(in_step and start == 0)
                for _ in range(len(own), passes):
                    scoring.score_suffixes(self.model, [samples[together[0][0][0][0]]])
                yield split.gather(results)

    def _unit(self, of_rows: Sequence[Sequence[Sequence[Sample]]], rows: int) -> list[SampleResult]:
        """Return the results of a unit, batches of rows of samples; an empty list on a rank of whose share another
        rank hands in the results.
        """
        together = self.decoded if rows == self.planned else rows  # memory ran out: no more rows than in a pass
        unit = [[sample for row in batch for sample in row] for batch in of_rows]
        rest = _Rest(self.model, rows=rows, together=together) if self.options.generate else None
        answers: list[Any] = []
        for batch in unit:
            first = len(answers)
            answers += (
                self._matches(batch, first, rest) if self.options.stop_early else self._scores(batch, first, rest)
            )
            if rest is not None:
                rest.decode(drain=False)
        if rest is not None:
            rest.decode(drain=True)
        samples = [sample for batch in unit for sample in batch]
        continuations: list[list[int] | None] = [None] * len(samples)
        if rest is not None:
            for number, (sample, answer) in enumerate(zip(samples, answers, strict=True)):
                match = answer if isinstance(answer, Match) else _match(sample, answer)
                continuations[number] = [*match.known, *rest.tokens.get(number, ())]
        chances = self._score_guesses(samples, continuations, rows) if self.options.guesses else [None] * len(samples)
        copies = (
            self._near_copies(samples, together) if self.options.near_copies is not None else [None] * len(samples)
        )
        if not self.work_split.reports:
            return []
        table = zip(samples, answers, continuations, chances, copies, strict=True)
        return [
            result_of(
                sample,
                answer,
                continuation,
                self.tokenizer,
                bound=self.bound,
                eos=self.eos,
                generated_logprob=chance,
                near_copies=near,
            )
            for sample, answer, continuation, chance, near in table
        ]

    def _near_copies(self, samples: Sequence[Sample], rows: int) -> list[NearCopies]:
        """Search near copies of each sample, as many samples of one length at a time as have `rows` beams."""
        together = max(1, rows // self.options.near_copies.beams)
        alike: dict[tuple[int, int], list[int]] = {}
        for place, sample in enumerate(samples):
            alike.setdefault((len(sample.prefix), len(sample.suffix)), []).append(place)
        found: dict[int, NearCopies] = {}
        for places in alike.values():
            for begin in range(0, len(places), together):
                some = places[begin : begin + together]
                chosen = [samples[place] for place in some]
                copies = near_copies(self.model, chosen, self.options.near_copies, sampler=self.options.sampler)
                found.update(zip(some, copies, strict=True))
        return [found[place] for place in range(len(samples))]

    def _score_guesses(self, samples: Sequence[Sample], continuations: Sequence[Any], rows: int) -> list[float]:
        """Score each continuation, in nats, by one more pass with it in the place of the suffix."""
        guesses = [replace(sample, suffix=tuple(ids)) for sample, ids in zip(samples, continuations, strict=True)]
        lengths = [(len(guess.prefix), len(guess.suffix)) for guess in guesses]
        chances = [0.0] * len(guesses)
        for batch in batches.plan_batches(lengths, rows, padding=scoring.may_be_padded(self.model)):
            scores = scoring.score_suffixes(self.model, [guesses[place] for place in batch])
            for place, score in zip(batch, scores, strict=True):
                chances[place] = sum(score.logprobs)
        return chances

    def _matches(self, batch: Sequence[Sample], first: int, rest: "_Rest | None") -> list[Match]:
        def add_rest(place: int, match: Match, row: Row | None) -> None:
            rest.add(first + place, batch[place], match, row)

        return matching.match_suffixes(self.model, batch, missed=add_rest if rest is not None else None)

    def _scores(self, batch: Sequence[Sample], first: int, rest: "_Rest | None") -> list[scoring.Score]:
        cache = empty_cache() if rest is not None and can_be_kept(self.model) else None
        scores = scoring.score_suffixes(
            self.model,
            batch,
            sampler=self.options.sampler if self.work_split.reports or scoring.spreads_logits(self.model) else None,
            tokenizer=self.tokenizer if self.options.membership else None,
            cache=cache,
        )
        if rest is None:
            return scores
        shared = share_rows(batch) if may_share(self.model) else [[place] for place in range(len(batch))]
        filled = cache is not None and is_filled(cache, len(shared))
        for number, places in enumerate(shared):
            start = cache.get_seq_length() - tokens_of(batch[places[0]]) + 1 if filled else 0
            for place in places:
                sample, match = batch[place], _match(batch[place], scores[place])
                if len(match.known) < len(sample.suffix):
                    row = Row(cache, number, start, len(sample.prefix) + match.tokens) if filled else None
                    rest.add(first + place, sample, match, row)
        return scores


class _Rest:
    """Continuations after the first miss of samples: `tokens`, by the number of the sample.

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
        """Decode full batches, or with `drain` everything."""
        self.tokens.update(self._decoder.run(drain=drain))
        if not drain:
            return
        for begin in range(0, len(self._prompts), self.rows):
            numbers, prompts, missing = zip(*self._prompts[begin : begin + self.rows], strict=True)
            decoded = decoding.continue_greedily(self.model, prompts, steps=max(missing))
            for number, tokens, count in zip(numbers, decoded, missing, strict=True):
                self.tokens[number] = tokens[:count]
        self._prompts = []


def _kept_logits(lengths: Sequence[tuple[int, int]], head: int, others: Sequence[int]) -> int:
    """Return how many places at the end of a row have logits that a sample of it needs."""
    whole = sum(lengths[head])
    return max(whole - lengths[place][0] for place in (head, *others))


def _left_over(unit: Sequence[Sequence[Sequence[int]]], done: set[int]) -> list[list[list[int]]]:
    """Return the batches of a unit without the samples that are done; what is left of a row is one."""
    batches_left = [[[place for place in row if place not in done] for row in batch] for batch in unit]
    return [some for some in ([row for row in batch if row] for batch in batches_left) if some]


def _match(sample: Sample, score: scoring.Score) -> Match:
    return matching.match_choices(score.choices, sample.suffix, score.leads)


def _family(config) -> str:
    """Return the model type; of Llama, which names three generations alike, the third has a larger vocabulary."""
    text = config.get_text_config()
    return "llama-3" if text.model_type == "llama" and text.vocab_size >= 128_000 else text.model_type


def eos_ids(model, tokenizer) -> tuple[int, ...]:
    """Return the ids that end a text: of the model's generation config, as in `generate`, else of its tokenizer."""
    config = getattr(model, "generation_config", None)
    for owner in (config, getattr(model, "config", None), tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)
    return ()


def result_of(
    sample: Sample,
    answer: Score | Match,
    continuation: Sequence[int] | None,
    tokenizer,
    *,
    bound: float,
    eos: Sequence[int] = (),
    generated_logprob: float | None = None,
    near_copies: NearCopies | None = None,
) -> SampleResult:
    """Make the result of one sample: its measured fields, and every registered metric.

    Args:
        answer: of a teacher-forced pass; or a match, where the true tokens after the first miss were not fed. Their
            log-probabilities are unknown then, so these and hits are None for all samples, those without a miss too:
            a mean over these alone would mislead.
        continuation: the greedy one, as long as the suffix; None without generation.
        tokenizer: for texts, which ROUGE and zlib read; None leaves these out.
        bound: margins below it, in nats, are near ties.
        eos: the ids that end a text (`eos_ids`).
        generated_logprob: of the continuation, in nats; None if it was not asked for.
        near_copies: what was found of them; None if they were not searched.
    """
    match = answer if isinstance(answer, Match) else _match(sample, answer)
    suffix_text = generated_text = text_to_eos = None
    if tokenizer is not None:
        suffix_text = tokenizer.decode(list(sample.suffix), skip_special_tokens=True)
        if continuation is not None:
            same = list(continuation) == list(sample.suffix)
            generated_text = suffix_text if same else tokenizer.decode(list(continuation), skip_special_tokens=True)
            end = next((place for place, token in enumerate(continuation) if token in eos), None)
            text_to_eos = generated_text
            if end is not None:
                text_to_eos = tokenizer.decode(list(continuation[:end]), skip_special_tokens=True)
    measured: dict[str, Any] = {
        "sample_id": sample.sample_id,
        "document_id": sample.document_id,
        "bucket": sample.bucket,
        "offset": sample.offset,
        "prefix_length": len(sample.prefix),
        "suffix_length": len(sample.suffix),
        "divergence_point": match.tokens,
        "margin": answer.margin,
        "near_tie": answer.margin < bound if answer.margin is not None else None,
        **dict.fromkeys(("logprob", "logprobs", "hits", "ranks")),
        "generated": list(continuation) if continuation is not None else None,
        "generated_text": generated_text,
        "suffix_text": suffix_text,
        "near_copies": near_copies.logprobs if near_copies is not None else None,
        "near_copies_read": near_copies.read if near_copies is not None else None,
    }
    if isinstance(answer, Score):
        measured |= {
            "logprob": sum(answer.logprobs),
            "logprobs": answer.logprobs,
            "hits": [choice == true for choice, true in zip(answer.choices, sample.suffix, strict=True)],
            "ranks": answer.ranks,
            "sampled_logprob": answer.sampled_logprob,
            "membership": answer.membership,
        }
    inputs = {
        **measured,
        "prefix": sample.prefix,
        "suffix": sample.suffix,
        "eos": tuple(eos),
        "text_to_eos": text_to_eos if eos else None,
        "generated_logprob": generated_logprob,
    }
    computed = {name: metric(inputs) for name, metric in METRICS.items()}
    if continuation is None:
        measured["suffix_text"] = None  # it is kept beside a continuation
    return SampleResult.from_measured(measured, computed)
