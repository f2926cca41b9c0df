"""Tables of attacks: coverage of books, dropped and supervised tokens, the cost of extracting.

The numbers are entries of a comparison, which `analysis` computes: `coverage`, `goldfish_tokens` and `attack_cost`. A
comparison without one has no table of it.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from hf_axonn_eval.analysis.attack_cost import EASIEST, TRAINED
from hf_axonn_eval.analysis.coverage import FULL, Book
from hf_axonn_eval.analysis.goldfish_tokens import DROPPED, SUPERVISED
from hf_axonn_eval.report.tables import SEEN, Details, bucket_name, difference_text, estimate_text, percent
from hf_axonn_eval.report.words import write_share


MOST_PASSAGES = 10  # of a run in the tables; passages.csv has all
MOST_BOOKS = 30  # in the tables; summary.json has all
GREEDY = "greedy"
_P = {FULL: "of the full distribution at temperature 1", None: "not measured"}

Comparison = Mapping[str, Any]


def coverage(comparison: Comparison) -> list[Details]:
    """Give the coverage of books, in characters, at each threshold and by greedy decoding."""
    entry = comparison.get("coverage")
    if not entry or not any(entry["runs"].values()):
        return []
    thresholds = [f"{threshold:g}" for threshold in entry["thresholds"]]
    documents = _most_covered(entry["runs"], thresholds[0])
    left_out = len(next(iter(entry["runs"].values()))) - len(documents)
    body, released = [], []
    for document in documents:
        for name, run in entry["runs"].items():
            book = run[document]
            about = [document, name, bucket_name(str(book["bucket"]))]
            parts = [{"characters": book["asked"]}, *map(book["at"].get, thresholds), book[GREEDY]]
            shares = [_share(part, book["characters"]) for part in parts]
            longest = book["at"][thresholds[0]]["longest"] if book["at"] else book[GREEDY]["longest"]
            body.append([*about, f"{book['characters']:,}", *shares, f"{longest:,}"])
            as_released = map(book["at_as_released"].get, thresholds)
            released.append([*about, *(_share(part, book["characters"]) for part in as_released)])
    kinds = {book["probability"] for run in entry["runs"].values() for book in run.values()}
    headings = ["document", "model", SEEN, "characters", "in a suffix"]
    headings += [f"p_z >= {threshold}" for threshold in thresholds] + [GREEDY, "longest passage"]
    what = "; ".join(sorted(_P.get(kind, "by the stated sampler") for kind in kinds))
    note = (
        f"Share of a document's characters in suffixes with p_z of at least tau; p_z is {what}. The longest passage, "
        f"in characters, is that at {thresholds[0]}. All windows were asked: a census of these documents, without "
        "intervals."
    )
    if left_out:
        note += f" {left_out:,} documents of which less is covered are in summary.json only."
    found = [Details("Coverage in characters", headings, body, note)]
    if any(book["at"] for run in entry["runs"].values() for book in run.values()):
        note = (
            "From as many characters after the beginning of a window as its prefix has tokens to one before its end, "
            "as the code of Cooper et al. 2025 counts (max_variable_length_probs at 7720bceb): to compare with its "
            "figures."
        )
        headings = ["document", "model", SEEN, *(f"p_z >= {threshold}" for threshold in thresholds)]
        found.append(Details("Coverage by the ranges of the published code", headings, released, note))
    return found


def passages(books: Mapping[str, Sequence[Book]], threshold: float) -> list[Details]:
    """List the longest passages of each run at a threshold."""
    body = []
    for name, some in books.items():
        found = [(book, passage) for book in some for passage in book.passages(threshold)]
        found.sort(key=lambda each: each[1].begin - each[1].end)
        for book, (begin, end, most) in found[:MOST_PASSAGES]:
            likeliest = "-" if most is None else f"{most:.3g}"
            body.append([book.document_id, name, f"{begin:,} to {end:,}", f"{end - begin:,}", likeliest])
    headings = ["document", "model", "characters", "length", "largest p_z"]
    note = f"The {MOST_PASSAGES} longest of each model; passages.csv has all, at each tau and by greedy decoding."
    return [Details(f"Longest passages with p_z >= {threshold:g}", headings, body, note)] if body else []


def passages_csv(books: Mapping[str, Sequence[Book]], thresholds: Sequence[float]) -> str:
    """Write all passages: run, document, bucket, tau (or "greedy"), begin, end, characters, largest p_z."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["run", "document_id", "bucket", "tau", "begin", "end", "characters", "largest_p_z"])
    for name, some in books.items():
        for book in some:
            for threshold in (None, *(thresholds if book.probability is not None else ())):
                tau = GREEDY if threshold is None else f"{threshold:g}"
                about = [name, book.document_id, book.bucket, tau]
                for begin, end, most in book.passages(threshold):
                    writer.writerow([*about, begin, end, end - begin, "" if most is None else most])
    return file.getvalue()


def goldfish(comparison: Comparison) -> list[Details]:
    """Give hit rate and loss of dropped and of supervised tokens, and their differences."""
    entry = comparison.get("goldfish_tokens")
    if not entry:
        return []
    body = []
    for bucket in dict.fromkeys(bucket for run in entry["runs"].values() for bucket in run):
        for name, run in entry["runs"].items():
            numbers = run[bucket]
            for side in (DROPPED, SUPERVISED):
                if side in numbers:
                    of = numbers[side]
                    hits = f"{of['hits']:,} of {of['n']:,}"
                    cells = [estimate_text(of["accuracy"]), estimate_text(of["nll"])]
                    body.append([bucket_name(bucket), name, side, hits, *cells])
            if "difference" in numbers:
                differences = [difference_text(numbers["difference"][metric]) for metric in ("accuracy", "nll")]
                body.append([bucket_name(bucket), name, f"{SUPERVISED} minus {DROPPED}", "", *differences])
    mask, tokens = entry["mask"], entry["tokens"]
    unknown = f"; of {tokens['unknown']:,} tokens it is not known" if tokens["unknown"] else ""
    note = (
        f"Mask: {', '.join(f'{key} {value}' for key, value in mask.items())}; {tokens[DROPPED]:,} suffix tokens "
        f"dropped, {tokens[SUPERVISED]:,} supervised{unknown}. In brackets: {percent(comparison)} intervals, "
        "Student's t over documents. In a model or documents that were not trained with this mask there is no "
        "difference but for chance. No difference proves nothing by itself: with another tokenizer, context width or "
        "strategy than those of training there is none either, and with another k only a part of it."
    )
    headings = [SEEN, "model", "tokens", "hits", "accuracy", "nll, nats a token"]
    return [Details("Dropped and supervised tokens", headings, body, note)]


def cost(comparison: Comparison) -> list[Details]:
    """Give expected queries and tokens of each text, and the texts that numbers of queries and budgets give."""
    groups = [
        ("all but 0x" if bucket == TRAINED else bucket_name(bucket), name, run[bucket])
        for bucket in dict.fromkeys(bucket for run in (comparison.get("attack_cost") or {}).values() for bucket in run)
        for name, run in comparison["attack_cost"].items()
        if bucket in run
    ]
    if not groups:
        return []
    body = []
    for bucket, name, numbers in groups:
        cells = [f"{numbers['never']:,} of {numbers['samples']:,}"]
        for each in numbers["to_extract"].values():
            known = each["queries"] is not None and each["tokens"] is not None
            cells.append(f"{_number(each['queries'])}, {_number(each['tokens'])}" if known else "never")
        body.append([bucket, name, *cells])
    headings = [SEEN, "model", "never drawn", *(f"easiest {share:.0%}" for share in EASIEST)]
    note = (
        "Expected queries, and tokens of prefixes and suffixes, until the suffix has come, for the hardest of this "
        "share of the samples: 1 / q queries, with q the chance of the suffix in one draw of the stated sampler."
    )
    found = [Details("Expected queries and tokens to extract a text", headings, body, note)]
    tries = list(groups[0][2]["tries"])
    numbers_of = [f"n = {int(number):,}" for number in tries]
    bounds = groups[0][2]["bounds"]
    sure = (
        "Of other documents like these at least the share that is given comes, as the mean over documents of the "
        f"share of their samples, {percent(comparison)} sure for all {bounds['count']} numbers and budgets of a row "
        "at once (Bentkus 2004, Bonferroni; a document is one trial)."
    )
    note = f"Expected number of these samples, which is exact for them, and a share. {sure}"
    body = [
        [bucket, name, _number(of["tokens"]), *(_expected_text(of["tries"][number]) for number in tries)]
        for bucket, name, of in groups
    ]
    headings = [SEEN, "model", "tokens for n = 1", *numbers_of]
    found.append(Details("What n queries of each sample give", headings, body, note))
    body = [[bucket, name, *(_each(of["tries"][number]) for number in tries)] for bucket, name, of in groups]
    note = "Tokens of all queries, prefixes and suffixes, by the expected number of samples."
    heading = "Tokens for each text that n queries of each sample give"
    found.append(Details(heading, [SEEN, "model", *numbers_of], body, note))
    budgets = [
        [bucket, name, f"{row['budget']:,} {row['unit']}", _number(row["draws"]), _expected_text(row), _each(row)]
        for bucket, name, of in groups
        for row in of["budgets"]
    ]
    if budgets:
        headings = [SEEN, "model", "budget", "queries of each", "expected", "tokens for each"]
        found.append(Details("What a budget gives, spread evenly", headings, budgets, sure))
    return found


def proxy(comparison: Comparison) -> list[Details]:
    """Give what came back verbatim by whether a proxy, a small model that never saw the texts, gives it too."""
    body = [
        [bucket_name(bucket) if bucket.isdecimal() else bucket, name]
        + [estimate_text(of.get(key)) for key in ("verbatim", "memorized", "predictable", "gap")]
        for name, groups in (comparison.get("proxy") or {}).items()
        for bucket, of in groups.items()
    ]
    headings = [SEEN, "model", "verbatim", "memorized: not from the proxy", "predictable: from both"]
    headings.append("likelier than to the proxy, nats per token")
    note = "The proxy is a small model that was asked the same samples (extract --proxy)."
    return [Details("Memorized or predictable, by a proxy", headings, body, note)] if body else []


def all_attacks(comparison: Comparison) -> list[Details]:
    """List all of them that a comparison has, in the order of a report."""
    return [details for make in (coverage, goldfish, cost, proxy) for details in make(comparison)]


def _most_covered(runs: Mapping[str, Mapping[str, Any]], threshold: str) -> list[str]:
    """List the MOST_BOOKS documents of which most is covered by any run, in the order in which they come."""

    def largest_share(document: str) -> float:
        return max(run[document]["at"].get(threshold, run[document][GREEDY])["share"] for run in runs.values())

    documents = list(next(iter(runs.values())))
    chosen = set(sorted(documents, key=lambda document: -largest_share(document))[:MOST_BOOKS])
    return [document for document in documents if document in chosen]


def _share(entry: Mapping[str, Any] | None, characters: int) -> str:
    return "-" if entry is None else write_share(entry["characters"] / characters, 2)


def _expected_text(row: Mapping[str, Any]) -> str:
    low = "" if row["low"] is None else f", at least {row['low']:.1%}"
    return f"{row['expected']:.3g}{low}"


def _each(row: Mapping[str, Any]) -> str:
    return "-" if row["tokens_each"] is None else _number(row["tokens_each"])


def _number(number: float) -> str:
    return f"{number:.1e}" if number >= 1e7 else f"{number:,.0f}" if number >= 10 else f"{number:.3g}"
