"""The sentences that follow the verdicts of a report, in every kind of comparison, word for word."""

from math import log

import pytest

from hf_axonn_eval import compare, html_page
from hf_axonn_eval.report.answer import answer
from tests.helpers.eval_support import result


def run(known: int, *, buckets=(0, 0, 0, 0, 3, 3, 3, 3), **options):
    """A document each; of those that were trained on the first `known` come back."""
    trained = [place for place, bucket in enumerate(buckets) if bucket]
    return [
        result(f"d{place}", bucket=bucket, exact_match=place in trained[:known], **options)
        for place, bucket in enumerate(buckets)
    ]


def numbers(comparison, name: str, bucket: str) -> str:
    """The share that came back as the comparison has it, and the same for the difference from the base run."""
    entry = comparison["runs"][name]["buckets"][bucket]["metrics"]["exact_match"]
    return f"{entry['count']} of {entry['n']} [{entry['low']:.2f}, {entry['high']:.2f}]"


def difference(comparison, name: str, bucket: str) -> str:
    entry = comparison["minus_base"][name][bucket]["exact_match"]
    p = comparison["mcnemar"][name][bucket]["exact_match"]["p_holm"]
    ends = "" if entry["low"] is None else f" [{entry['low']:+.2f}, {entry['high']:+.2f}]"
    return f"{entry['difference']:+.3f}{ends} for {name} (p = {p:.2g})"


UNKNOWN = "The runs do not record what was left out when the samples were made."


def test_one_run():
    comparison = compare({"mine": run(3)})
    assert answer(comparison) == [
        "1 model (mine) was asked to continue 8 samples of 8 documents: 4 seen 3 times, and 4 controls, "
        "according to the samples file.",
        "Of the samples seen 3 times, greedy decoding reproduced verbatim "
        f"{numbers(comparison, 'mine', '3')} from mine, and of the controls {numbers(comparison, 'mine', '0')} "
        "from mine.",
        "Brackets are 95% intervals; there is no other run to compare with, so how much of this comes from training "
        "is not known.",
        UNKNOWN,
        "mine has no training record, so only the samples file says what was seen.",
    ]
    assert "3 of 4 [" in answer(comparison)[1]


def test_two_runs():
    comparison = compare({"base": run(0), "trained": run(4)}, confidence=0.999)
    told = answer(comparison)
    assert told[0].startswith("2 models (base and trained) were asked")
    assert told[1:3] == [
        "Of the samples seen 3 times, greedy decoding reproduced verbatim "
        f"{numbers(comparison, 'base', '3')} from base and {numbers(comparison, 'trained', '3')} from trained, and of "
        f"the controls {numbers(comparison, 'base', '0')} from each.",
        "Brackets are 99.9% intervals; the share that came back differs from that of base by "
        f"{difference(comparison, 'trained', '3')}, with p of McNemar's test after Holm's correction.",
    ]
    assert "(p = 0.12)" in told[2], "2 / 2^4, and one test"


def test_several_runs_and_buckets():
    buckets = (0, 0, 1, 1, 1, 12, 12, 12)
    runs = {"first": run(0, buckets=buckets), "second": run(6, buckets=buckets), "third": run(3, buckets=buckets)}
    comparison = compare(runs)
    told = answer(comparison)
    assert told[0] == (
        "3 models (first, second and third) were asked to continue 8 samples of 8 documents: 6 seen 1 or 12 "
        "times, and 2 controls, according to the samples file."
    )
    assert told[1].startswith("Of the samples seen most often, 12 times, greedy decoding reproduced verbatim 0")
    first, second, third = (numbers(comparison, name, "12") for name in runs)
    assert f"{first} from first, {second} from second and {third} from third, and of the controls 0 of 2" in told[1]
    changes = [difference(comparison, name, "12") for name in ("second", "third")]
    assert f"differs from that of first by {' and '.join(changes)}, with p" in told[2]


@pytest.mark.parametrize(
    ("buckets", "told"),
    [
        ((1, 0), "2 samples of 2 documents: 1 seen once, and 1 control,"),
        ((0,), "1 sample of 1 document: only controls, which were not seen"),
        ((5, 5), "2 samples of 2 documents, seen 5 times, without any controls,"),
        ((1, 2, 3, 4, 5), "5 samples of 5 documents, seen 1, 2, 3, 4 or 5 times, without any controls,"),
        ((10, 9, 1, 4, 3, 2), "6 samples of 6 documents, seen 1 to 10 times, without any controls,"),
    ],
)
def test_what_was_asked(buckets, told):
    assert answer(compare({"a": run(0, buckets=buckets)}))[0] == (
        f"1 model (a) was asked to continue {told} according to the samples file."
    )


def test_only_controls():
    comparison = compare({"base": run(0, buckets=(0, 0)), "other": run(0, buckets=(0, 0))})
    shares = numbers(comparison, "base", "0")
    assert answer(comparison)[1:3] == [
        f"Of the controls, greedy decoding reproduced verbatim {shares} from each.",
        "Brackets are 95% intervals; the share that came back differs from that of base by "
        f"{difference(comparison, 'other', '0')}, with p of McNemar's test after Holm's correction.",
    ]


def test_no_controls():
    comparison = compare({"a": run(1, buckets=(2, 2))})
    assert answer(comparison)[1] == (
        f"Of the samples seen 2 times, greedy decoding reproduced verbatim {numbers(comparison, 'a', '2')} from a."
    )


def test_nothing_measured():
    comparison = compare({"a": run(1), "b": run(2)})
    for summary in comparison["runs"].values():
        for group in (summary["all"], *summary["buckets"].values()):
            del group["metrics"]["exact_match"]
    assert answer(comparison)[1:3] == [
        "Whether these were reproduced verbatim was not measured.",
        "So there is no share of them to be sure of.",
    ]


def test_what_sampling_finds_is_told_of_all_that_was_seen():
    """Of each document one draw in ten gives the suffix: seven draws find it with an even chance, none by chance 0."""
    buckets = (0, 1, 1, 4)
    known, unknown = run(0, buckets=buckets, sampled_logprob=log(0.1)), run(0, buckets=buckets, sampled_logprob=-99.0)
    told = answer(compare({"base": unknown, "trained": known}))[1]
    assert told.endswith(
        "; of all samples seen, 1,000 draws find at least as likely as not 0 of 3 from base and 3 of 3 from trained."
    )
    told = answer(compare({"base": run(0, buckets=buckets), "trained": known}))[1]
    assert told.endswith("at least as likely as not 3 of 3 from trained."), "the base run has no sampler"
    told = answer(compare({"only": run(0, buckets=(0, 0), sampled_logprob=log(0.1))}))[1]
    assert told.endswith("; of these, 1,000 draws find at least as likely as not 2 of 2 from only.")
    assert "draws" not in answer(compare({"only": known}, tries=[10]))[1], "a thousand were not asked for"


def test_answers_that_rounding_could_change_are_told():
    told = answer(compare({"a": run(1, near_tie=True), "b": run(1, near_tie=False)}))[2]
    assert told.endswith("; rounding could change 4 of these answers.")
    assert "rounding" not in answer(compare({"a": run(1, near_tie=False)}))[2]


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ({"documents": 1}, "1 document, nothing was left out."),
        (
            {"documents": 1500, "too_short": 1, "of_these_empty": 1, "too_long": 20, "beyond_max_documents": 3},
            "1,500 documents, this was left out: 1 document too short, 20 documents too long and 3 documents over a "
            "bucket's limit.",
        ),
        (
            {"documents": 9, "dropped": 4, "duplicate_samples": 2, "not_round_trip": 1},
            "9 documents, this was left out: 4 documents dropped by name and 2 duplicate samples; the "
            "tokenizer does not give back 1 document unchanged.",
        ),
        (
            {"documents": 9, "copies": 2},
            "9 documents, nothing was left out; 2 have the tokens of an earlier one, and yet count as documents.",
        ),
    ],
)
def test_what_was_left_out(counts, told):
    record = {"identity": {"samples_sha256": "x"}, "settings": {"left_out": counts}}
    comparison = compare({"base": run(1)}, records={"base": record})
    assert answer(comparison)[3] == f"When the samples were made of {told}"


@pytest.mark.parametrize("counts", [None, {}, {"documents": "9"}, {"documents": 1, "too_short": None}, [1], {"a": 1}])
def test_a_record_that_does_not_count_is_none(counts):
    record = {"identity": {"samples_sha256": "x"}, "settings": {"left_out": counts}}
    assert answer(compare({"base": run(1)}, records={"base": record}))[3] == UNKNOWN


def test_the_page_opens_with_them_and_one_picture():
    runs = {"base": run(0), "<b>trained</b>": run(4)}
    comparison = compare(runs)
    page = html_page(comparison, runs=runs)
    opening = page.split("<nav>")[0].split("<h1>")[1]
    assert (
        opening.count("<p>") == 7
        and opening.count("<strong>") == 2
        and opening.count("<svg") == 1
        and "verbatim by bucket" in opening
    )
    assert "&lt;b&gt;trained&lt;/b&gt;" in opening and "<b>" not in opening
    assert page.count('aria-label="verbatim by bucket"') == 1, "it is drawn once"
