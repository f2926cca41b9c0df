"""The part of the HTML report that shows texts: what was shown, what was hoped for, what each model said."""

from collections.abc import Mapping, Sequence
from html import escape

from hf_axonn_eval.data.results import SampleResult
from hf_axonn_eval.data.samples import Sample
from hf_axonn_eval.report.passages import OTHER, Piece, examples, passage


MOST_SHOWN = 200  # tokens of a prefix; sc24 has 1998, and a page with all of them cannot be read


def texts_section(
    runs: Mapping[str, Sequence[SampleResult]], *, samples: Sequence[Sample] | None, tokenizer, count: int
) -> str:
    """Examples of every bucket, from the best known to the least known.

    Args:
        runs: results by the name of the run.
        samples: the questions; without them, or without a tokenizer, the prefixes are not shown.
        tokenizer: to decode prefixes and tokens.
        count: examples of a bucket.
    """
    chosen = examples(runs, count=count)
    shown = [result for some in chosen.values() for answers in some for result in answers.values()]
    has_texts = any(result.suffix_text is not None for result in shown)
    if not has_texts and (not samples or tokenizer is None):
        return '<p class="note">No texts: extract without --no_generation, or give the samples and a tokenizer.</p>'
    wanted = {result.sample_id for result in shown}
    questions = {sample.sample_id: sample for sample in samples or () if sample.sample_id in wanted}
    parts = [
        '<p class="note">From every bucket some samples, evenly spread from the best known to the least known. '
        '<mark class="start">Marked like this</mark>: word for word from the first token on. '
        '<mark class="run">Like this</mark>: elsewhere, the longest run that is in both, unless it is the '
        "beginning.</p>"
    ]
    if not samples or tokenizer is None:
        parts.append('<p class="note">The prefixes are shown if the samples and a tokenizer are given.</p>')
    for bucket, some in chosen.items():
        parts.append(f"<h3>Trained on {bucket}x</h3>")
        parts += [
            _example(answers, questions.get(next(iter(answers.values())).sample_id), tokenizer) for answers in some
        ]
    return "".join(parts)


def _example(answers: Mapping[str, SampleResult], sample: Sample | None, tokenizer) -> str:
    one = next(iter(answers.values()))
    parts = [f"<h4>{escape(one.document_id)}, tokens from {one.offset} on</h4>"]
    if sample is not None and tokenizer is not None:
        label = f"Prefix, {one.prefix_length} tokens"
        if one.prefix_length > MOST_SHOWN:
            label = f"Prefix, the last {MOST_SHOWN} of {one.prefix_length:,} tokens"
        parts.append(_side(label, [Piece(tokenizer.decode(list(sample.prefix[-MOST_SHOWN:])), OTHER)]))
    for name, result in answers.items():
        found = passage(result, sample, tokenizer)
        sides = [_side("True suffix", found.true)] if found.true is not None else []
        sides += [_side(f"{name} said: {_verdict(result)}", found.said)] if found.said is not None else []
        if found.said is None:
            sides.append(f"<dl><dt>{escape(name)}: {escape(_verdict(result))}</dt></dl>")
        parts.append(f'<div class="sides">{"".join(sides)}</div>')
    return f'<article class="example">{"".join(parts)}</article>'


def _verdict(result: SampleResult) -> str:
    if result.exact_match:
        return f"all {result.suffix_length} tokens right"
    return f"first {result.divergence_point} of {result.suffix_length} tokens right"


def _side(label: str, pieces: Sequence[Piece]) -> str:
    text = "".join(
        f'<mark class="{piece.mark}">{escape(piece.text)}</mark>' if piece.mark else escape(piece.text)
        for piece in pieces
    )
    return f'<dl><dt>{escape(label)}</dt><dd class="text">{text}</dd></dl>'
