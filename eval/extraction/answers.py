"""From what the model said to the result of a sample."""

from collections.abc import Sequence
from typing import Any

from hf_axonn_eval.data.results import SampleResult
from hf_axonn_eval.data.samples import Sample
from hf_axonn_eval.extraction.prefix_matching import Match, matched
from hf_axonn_eval.extraction.scoring import Score
from hf_axonn_eval.metrics import text as metrics
from hf_axonn_eval.metrics.degeneracy import type_token_ratio, zlib_ratio
from hf_axonn_eval.metrics.rouge import rouge


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
