"""Whole documents on the page: how much of each comes back near-verbatim, and the texts side by side."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hf_axonn_eval.data.results import SampleResult
from hf_axonn_eval.metrics.near_verbatim import PASSES, Block, near_verbatim_blocks, size_of
from hf_axonn_eval.metrics.registry import value
from hf_axonn_eval.report.tables import SEEN, Details, bucket_name
from hf_axonn_eval.report.texts import OTHER, START, Span, join_spans
from hf_axonn_eval.report.words import write_share


MOST_DOCUMENTS = 5  # whose texts are shown; the table has MOST_ROWS
MOST_ROWS = 30
MOST_WORDS = 1500  # of a text on the page

Runs = Mapping[str, Sequence[SampleResult]]


def documents(runs: Runs) -> dict[str, Any]:
    """Prepare the section for templates/page.html; {} if no sample has a near-verbatim recall.

    Returns:
        `table`: tables.Details of the documents of which most comes back. `shown`: for some of them `heading` and
        `answers`, each the `run`, a `verdict`, and `true` and `generated`, marked spans of words.
    """
    found: dict[str, dict[str, tuple[SampleResult, float]]] = {}
    for name, results in runs.items():
        for result in results:
            recall = value(result, "nv_recall")
            if recall is not None and result.suffix_text is not None and result.generated_text is not None:
                found.setdefault(result.sample_id, {})[name] = result, float(recall)
    if not found:
        return {}
    order = sorted(found.values(), key=lambda answers: -max(recall for _, recall in answers.values()))
    rows = [_row(name, *answer) for answers in order[:MOST_ROWS] for name, answer in answers.items()]
    headings = ["document", "model", SEEN, "words", "near-verbatim recall", "blocks", "longest block, words"]
    headings.append("tokens before the first miss")
    gap, difference, least = PASSES[-1]
    note = (
        f"Share of the words after the seed in blocks of {least} words and more, whose runs are at most {gap} words "
        f"apart and lie {difference} words differently at most (nv-recall, after Ahmed et al. 2026). A document is a "
        "census of itself: its number has no interval, the means by bucket have."
    )
    left_out = len(order) - MOST_ROWS
    note += f" {left_out:,} documents of which less comes back are in results.jsonl only." if left_out > 0 else ""
    shown = [
        {
            "heading": next(iter(answers.values()))[0].document_id,
            "answers": [_answer(name, *answer) for name, answer in answers.items()],
        }
        for answers in order[:MOST_DOCUMENTS]
    ]
    return {"table": [Details("Whole documents, near-verbatim", headings, rows, note)], "shown": shown}


def _row(name: str, result: SampleResult, recall: float) -> list[str]:
    blocks = _blocks(result)
    words = len((result.suffix_text or "").split())
    return [
        result.document_id,
        name,
        bucket_name(str(result.bucket)),
        f"{words:,}",
        write_share(recall, 1),
        f"{len(blocks):,}",
        f"{max(map(size_of, blocks), default=0):,}",
        f"{result.divergence_point:,} of {result.suffix_length:,}",
    ]


def _answer(name: str, result: SampleResult, recall: float) -> dict[str, Any]:
    blocks = _blocks(result)
    true = {place for block in blocks for run in block for place in range(run.true, run.true + run.size)}
    recited = {place for block in blocks for run in block for place in range(run.generated, run.generated + run.size)}
    return {
        "run": name,
        "verdict": f"{write_share(recall, 1)} near-verbatim",
        "true": _spans(result.suffix_text or "", true),
        "generated": _spans(result.generated_text or "", recited),
    }


def _blocks(result: SampleResult) -> tuple[Block, ...]:
    return near_verbatim_blocks(result.suffix_text or "", result.generated_text or "")


def _spans(text: str, marked: set[int]) -> list[Span]:
    """Mark words; of a long text the first ones."""
    words = re.findall(r"\s*\S+", text)
    spans = [(word, START if place in marked else OTHER) for place, word in enumerate(words[:MOST_WORDS])]
    if len(words) > MOST_WORDS:
        spans.append((f" [... {len(words) - MOST_WORDS:,} more words]", OTHER))
    return join_spans(spans)
