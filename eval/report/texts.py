"""The part of the HTML report that shows texts: what was shown, what was hoped for, what each model generated.

They stand side by side, with what agrees marked. Token ids are what is compared. With a tokenizer every mark begins
and ends at a token; without one the texts of the results are compared word by word.
"""

import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from hf_axonn_eval.data.results import SampleResult
from hf_axonn_eval.data.samples import Sample


START, RUN, OTHER = "start", "run", ""  # marks of a span; see Span
MOST_SHOWN = 200  # tokens of a prefix; sc24 has 1998, and a page with all of them cannot be read


class Span(NamedTuple):
    """Text, and its mark: START within the unbroken agreement from the first token on, RUN within the longest run
    that occurs in both elsewhere, OTHER if neither.
    """

    text: str
    mark: str


class Passage(NamedTuple):
    """One run's answer: the true suffix and what the model generated, in marked spans; None without generation."""

    true: list[Span] | None
    generated: list[Span] | None


def passage(result: SampleResult, sample: Sample | None = None, tokenizer=None) -> Passage:
    """Mark what agrees in the two texts of a result.

    Args:
        result: of one sample. Without generation `generated` is None.
        sample: the question, with the ids of the suffix.
        tokenizer: for the texts of single tokens. Without it, or `sample`, the texts in `result` are compared word by
            word.
    """
    if sample is not None and tokenizer is not None:
        true = (list(sample.suffix), token_texts(sample.suffix, tokenizer))
        generated = None if result.generated is None else (result.generated, token_texts(result.generated, tokenizer))
    else:
        true, generated = _words(result.suffix_text), _words(result.generated_text)
    if true is None or generated is None:
        return Passage(None if true is None else join_spans([(text, OTHER) for text in true[1]]), None)
    marks = _marks(true[0], generated[0])
    return Passage(
        *(join_spans(zip(side[1], mark, strict=True)) for side, mark in zip((true, generated), marks, strict=True))
    )


def token_texts(ids: Sequence[int], tokenizer) -> list[str]:
    """Decode each token to the text that it adds; joined they are the decoded text.

    A character of several tokens comes with its last one. Where decoding changes what it has already given (tokenizers
    that clean up spaces), tokens are decoded one by one, and the joined text may differ in its spaces.
    """
    texts, before = [], ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(list(ids[:end]))
        if end < len(ids):
            text = text.rstrip("\ufffd")  # the beginning of a character that is not complete yet
        if not text.startswith(before):
            return [tokenizer.decode([token]) for token in ids]
        texts.append(text[len(before) :])
        before = text
    return texts


def examples(runs: Mapping[str, Sequence[SampleResult]], *, count: int) -> dict[int, list[dict[str, SampleResult]]]:
    """Choose samples of every bucket from the best known to the least known, evenly spread over that order.

    The order is by the longest agreement from the first token on that any run has, then by its log-probability. The
    results are read twice, and only those of the examples are kept.

    Args:
        runs: results by the name of the run, of the same samples.
        count: how many at most of a bucket.
    Returns:
        By bucket, the largest first, for each example the result of every run by its name.
    """
    known: dict[int, dict[str, tuple[int, float]]] = {}
    for results in runs.values():
        for result in results:
            best = known.setdefault(result.bucket, {})
            this = (result.divergence_point, result.logprob or 0.0)
            best[result.sample_id] = max(best.get(result.sample_id, this), this)
    chosen: dict[int, dict[str, dict[str, SampleResult]]] = {}
    for bucket in sorted(known, reverse=True):
        order = sorted(known[bucket], key=known[bucket].__getitem__, reverse=True)
        if 1 < count < len(order):
            order = [order[round(place * (len(order) - 1) / (count - 1))] for place in range(count)]
        chosen[bucket] = {sample_id: {} for sample_id in order[:count]}
    for name, results in runs.items():
        for result in results:
            if result.sample_id in chosen[result.bucket]:
                chosen[result.bucket][result.sample_id][name] = result
    return {bucket: list(some.values()) for bucket, some in chosen.items()}


def _marks(true: Sequence, generated: Sequence) -> tuple[list[str], list[str]]:
    start = next(
        (place for place, (one, other) in enumerate(zip(true, generated, strict=False)) if one != other),
        min(len(true), len(generated)),
    )
    run = SequenceMatcher(None, true, generated, autojunk=False).find_longest_match()
    marks = []
    for side, begin in ((true, run.a), (generated, run.b)):
        mark = [OTHER] * len(side)
        if run.size > 1:  # any two texts have a token in common
            mark[begin : begin + run.size] = [RUN] * run.size
        mark[:start] = [START] * start
        marks.append(mark)
    return marks[0], marks[1]


def _words(text: str | None) -> tuple[list[str], list[str]] | None:
    if text is None:
        return None
    words = re.findall(r"\s*\S+|\s+$", text)
    return [word.strip() for word in words], words


def join_spans(spans) -> list[Span]:
    """Join neighbours with the same mark to one span."""
    joined: list[Span] = []
    for text, mark in spans:
        if joined and joined[-1].mark == mark:
            joined[-1] = Span(joined[-1].text + text, mark)
        else:
            joined.append(Span(text, mark))
    return joined


def text_examples(
    runs: Mapping[str, Sequence[SampleResult]], *, samples: Sequence[Sample] | None, tokenizer, count: int
) -> dict[int, list[dict[str, Any]]]:
    """Prepare examples of every bucket for templates/page.html, from the best known to the least known.

    Args:
        runs: results by the name of the run.
        samples: the questions; without them, or without a tokenizer, the prefixes are not shown.
        tokenizer: to decode prefixes and tokens.
        count: examples of a bucket.
    Returns:
        By bucket; empty where there is no text to show.
    """
    chosen = examples(runs, count=count)
    shown = [result for some in chosen.values() for answers in some for result in answers.values()]
    has_texts = any(result.suffix_text is not None for result in shown)
    if not has_texts and (not samples or tokenizer is None):
        return {}
    ids = {result.sample_id for result in shown}
    questions = {sample.sample_id: sample for sample in samples or () if sample.sample_id in ids}
    return {bucket: [_example(answers, questions, tokenizer) for answers in some] for bucket, some in chosen.items()}


def _example(answers: Mapping[str, SampleResult], questions: Mapping[str, Sample], tokenizer) -> dict[str, Any]:
    one = next(iter(answers.values()))
    sample = questions.get(one.sample_id)
    label, prefix = f"Prefix, {one.prefix_length} tokens", None
    if sample is not None and tokenizer is not None:
        prefix = [Span(tokenizer.decode(list(sample.prefix[-MOST_SHOWN:])), OTHER)]
        if one.prefix_length > MOST_SHOWN:
            label = f"Prefix, the last {MOST_SHOWN} of {one.prefix_length:,} tokens"
    return {
        "heading": f"{one.document_id}, tokens from {one.offset} on",
        "prefix_label": label,
        "prefix": prefix,
        "answers": [
            {"run": name, "verdict": _verdict(result), **passage(result, sample, tokenizer)._asdict()}
            for name, result in answers.items()
        ],
    }


def _verdict(result: SampleResult) -> str:
    if result.exact_match:
        return f"all {result.suffix_length} tokens right"
    return f"first {result.divergence_point} of {result.suffix_length} tokens right"
