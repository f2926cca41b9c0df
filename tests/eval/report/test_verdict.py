"""The first sentences of a report: verdicts, what the design cannot show, warnings; and the models' own records."""

from math import log

import pytest

from hf_axonn.goldfish.record import FORMAT
from hf_axonn_eval import compare, html_page, write_report
from hf_axonn_eval.report import tables, training
from hf_axonn_eval.report.charts import Point, point_text
from hf_axonn_eval.report.verdict import cannot_show, page_title, verdicts, warnings
from hf_axonn_eval.report.words import settings, write_share
from hf_axonn_eval.report.write import markdown, terminal_table
from tests.helpers.eval_support import result


def run(known: int, *, seen: int = 12, controls: int = 12, **options):
    """A document each, seen 3 times or never; of those seen the first `known` come back."""
    return [
        result(f"{side}{place}", bucket=3 if side == "s" else 0, exact_match=side == "s" and place < known, **options)
        for side, count in (("s", seen), ("c", controls))
        for place in range(count)
    ]


def record(**changes) -> dict:
    return {
        "identity": {"samples": 24, "samples_sha256": "ab", "model_fingerprint": "cd" * 32, "dtype": "float32"},
        "model": {"path": "/home/someone/runs/ckpt"}, "vocabulary": 100, "grid": None, "device": {"type": "cpu"},
        "tokenizer": {"path": "tok", "size": 90, "sha256": "ef" * 32, "checked": True},
        "settings": {"sampler": {"top_k": 40, "top_p": None}, "batches": {"rows": 4, "number": 3, "in_a_unit": 1}},
        "versions": {"torch": "2.13.0"}, "started": "2026-02-03T04:05:06+0000", **changes,
    }  # fmt: skip


TRAINING = {
    "format": FORMAT, "steps": 30, "tokens": 1000, "dropped": 250, "model": "org/base", "earlier": None,
    "parts": [
        {
            "strategy": "none", "steps": 10, "tokens": 0, "dropped": 0,
            "data": {"rows": None, "why": "the rows are streamed"},
        },
        {
            "strategy": "hash-table", "k": 4, "context_width": 13, "table_sha256": "33025be4fa64d0", "steps": 20,
            "tokens": 1000, "dropped": 250, "data": {"rows": 1200, "rows_sha256": "9f" * 32},
        },
    ],
}  # fmt: skip


def test_nothing_came_back():
    comparison = compare({"base": run(0), "trained": run(0)})
    assert verdicts(comparison)[1] == (
        "No evidence of verbatim memorization by trained: 0 of 12 samples seen 3 times according to the samples file "
        "came back by greedy decoding; up to 26% is compatible with this."
    )


def test_evidence_names_what_it_is_compared_with():
    told = verdicts(compare({"base": run(0), "trained": run(12)}))[1]
    assert told == (
        "Evidence of verbatim memorization by trained: 12 of 12 samples seen 3 times according to the samples file "
        "[0.74, 1.00] came back by greedy decoding, against 0 of 12 controls (corrected p = 2.2e-06, Fisher's exact "
        "test of documents) and 0 of the same 12 from base (corrected p = 0.00098, McNemar's test)."
    )


def test_what_chance_may_give_is_no_evidence():
    told = verdicts(compare({"base": run(1), "trained": run(2)}))[1]
    assert told.startswith("No clear evidence of verbatim memorization by trained: 2 of 12 samples seen 3 times")
    assert told.endswith("no test shows that more came back; up to 48% is compatible with this.")


def test_without_anything_to_compare_with_there_is_no_verdict():
    [told] = verdicts(compare({"only": run(5, controls=0)}))
    assert told.startswith("only reproduced 5 of 12 samples seen 3 times") and told.endswith("no verdict is given.")
    assert verdicts(compare({"only": run(0, seen=0)})) == [
        "No verdict on only: all samples are controls, seen 0 times according to the samples file."
    ]


def test_draws_are_told_beside_a_greedy_zero():
    [told] = verdicts(compare({"only": run(0, sampled_logprob=log(0.1))}))
    assert told.endswith("compatible with this. 1,000 draws find 12 of 12 at least as likely as not.")


def test_what_a_design_cannot_show():
    few = cannot_show(compare({"base": run(0, seen=4, controls=2), "trained": run(4, seen=4, controls=2)}))
    assert few[0] == (
        "With 4 documents seen the smallest p of the paired test (McNemar's) is 0.125, 0.2 after correction for 3 "
        "tests: no difference from base can be significant at 0.05."
    )
    assert few[1].startswith(
        "With 4 documents seen and 2 control documents the smallest p of the test against controls"
    )
    assert few[-1].startswith("Only greedy continuations") and few[-2].startswith(
        "2 independent controls are too few for"
    )
    alone = cannot_show(compare({"only": run(1, controls=0, sampled_logprob=-1.0)}))
    assert [told.partition(",")[0] for told in alone] == ["There are no controls", "There is one run"]
    assert cannot_show(compare({"base": run(0), "trained": run(0)}))[0].startswith("12 independent controls")


def test_no_better_than_chance_reaches_every_page(tmp_path):
    hopeless = {"base": run(0, logprob=-12.0), "trained": run(0, logprob=-2.0)}
    comparison = compare(hopeless, records={name: record() for name in hopeless})
    [warning] = warnings(comparison)
    assert "base does no better than chance" in warning and "6.00 nats a token" in warning and "4.61" in warning
    assert verdicts(comparison)[0].startswith("No verdict on base: it does no better than chance")
    assert verdicts(comparison)[1].startswith("No evidence")
    paths = write_report(comparison, tmp_path)
    for name in ("report.md", "report.html"):
        assert warning in paths[name].read_text(encoding="utf-8"), name
    assert '"no_better": true' in paths["summary.json"].read_text(encoding="utf-8")
    assert warning in str(terminal_table(comparison).caption)
    assert warning not in str(terminal_table(comparison, show_warnings=False).caption)
    assert warnings(compare(hopeless)) == [], "a record says how many tokens there are"


def test_the_title_names_the_models():
    runs = {"base": run(0), "ckpt": run(0), "hub": run(0)}
    records = {"base": record(), "ckpt": record(), "hub": record(model={"path": "org/model"})}
    comparison = compare(runs, records=records)
    assert page_title(comparison) == "Extraction: base (ckpt), ckpt and hub (org/model)"
    assert "<h1>Extraction: base (ckpt), ckpt and hub (org/model)</h1>" in html_page(comparison)
    assert markdown(comparison, title="Mine").startswith("# Mine\n")
    many = compare({f"m{place}": run(0) for place in range(7)})
    assert page_title(many) == "Extraction: m0, m1, m2, m3 and 3 more"


def test_models_and_training_records_are_tables():
    trained = record(model={"path": "x", "training": TRAINING}, access="log-probabilities and texts of a server")
    comparison = compare({"base": run(0), "goldfish": run(0)}, records={"base": record(), "goldfish": trained})
    models, records = tables.models(comparison)
    assert models.rows == [
        ["base", "/home/someone/runs/ckpt", "weights", "2026-02-03", "ef" * 6, "cd" * 6],
        ["goldfish", "x", "top-k logits", "2026-02-03", "ef" * 6, "cd" * 6],
    ]
    assert records.rows == [
        ["goldfish", "1", "ordinary loss", "10", "0", "unknown", "unknown", "unknown: the rows are streamed"],
        ["goldfish", "2", "goldfish loss (hash-table, k=4, h=13, table=33025be4fa64)", "20", "1,000", "25.00%",
         "1,200", "9f" * 6],
    ]  # fmt: skip
    assert training.sentence(comparison) == (
        "By their training records, goldfish: ordinary loss then goldfish loss (hash-table, k=4, h=13, "
        "table=33025be4fa64), 30 steps, 1,000 tokens, 25.00% of them dropped. base has no training record, so only "
        "the samples file says what was seen."
    )
    for damaged in ({"steps": 1}, [], {**TRAINING, "steps": "1"}, {**TRAINING, "parts": [{}]}):
        other = {**trained, "model": {"path": "x", "training": damaged}}
        assert len(tables.models(compare({"a": run(0)}, records={"a": other}))) == 1, "no table of what is no record"
    earlier = {**trained, "model": {"path": "x", "training": {**TRAINING, "earlier": TRAINING}}}
    assert len(training.records(compare({"a": run(0)}, records={"a": earlier}))[1]) == 4


def test_runs_that_were_measured_otherwise_are_named():
    runs = {"base": run(0), "trained": run(12)}
    records = {name: record() for name in runs}
    assert not any("differ in" in sentence for sentence in cannot_show(compare(runs, records=records)))
    other = {"dtype": "bfloat16", "near_copies": "5 edits, 20 beams"}
    records["trained"] = record(identity=records["base"]["identity"] | other)
    found = [sentence for sentence in cannot_show(compare(runs, records=records)) if "differ in" in sentence]
    assert [sentence.partition(")")[0] for sentence in found] == [
        "The runs differ in the dtype of the weights (float32 for base and bfloat16 for trained",
        "The runs differ in the search of near copies (none for base and 5 edits, 20 beams for trained",
    ]


def test_settings_are_words_and_no_python(tmp_path):
    assert settings({"a": {"b": 1, "c": None}, "d": [1, {"e": "f"}], "g": None}) == "a (b 1), d 1 (e f)"
    comparison = compare({"base": run(0)}, records={"base": record()})
    for text in (markdown(comparison), html_page(comparison)):
        assert "sampler (top_k 40), batches (rows at most 4, in all 3, at once 1)" in text
        assert "tok, tokens 90" in text and "the samples were made with it" in text and "checked" not in text
        assert "{'" not in text and "&#39;rows" not in text and "sha256 " + "ef" * 32 in text


def test_what_rounds_to_zero_has_no_sign():
    ends = {"low": -0.004, "high": -0.001}
    assert tables.estimate_text({"mean": -0.0002, **ends}) == "0.000 [-0.004, 0.00]"
    assert tables.difference_text({"difference": -0.0002, **ends}) == "+0.000 [-0.004, +0.00]"
    assert point_text(Point(0, -0.0002, -0.0004, -0.0001)) == "0.000 [-0.0004, 0.000]"


@pytest.mark.parametrize(
    ("low", "mean", "high", "text"),
    [
        (0, 0, 0.00184, "0.000 [0.00, 0.0018]"),  # 0 of 2,000: there may be some
        (8.4e-6, 1 / 3000, 0.00186, "0.00033 [0.00, 0.0019]"),
        (0.99816, 1, 1, "1.000 [0.9982, 1.00]"),
        (0.99722, 0.9995, 0.99999, "0.99950 [0.9972, 1.00]"),
        (0, 1e-9, 4e-8, "1e-09 [0.00, 4e-08]"),
        (0, 0, 0, "0.000 [0.00, 0.00]"),
    ],
)
def test_rounding_makes_no_interval_narrower_than_it_is_at_0_and_1(low, mean, high, text):
    assert tables.estimate_text({"mean": mean, "low": low, "high": high}) == text
    assert point_text(Point(0, 0.5, 0.0, 0.0004)) == "0.500 [0.000, 0.0004]"
    change = {"difference": 0.0, "low": -0.00184, "high": 0.00184}  # nothing changed in 2,000
    assert tables.difference_text(change) == "+0.000 [-0.0018, +0.0018]"
    assert tables.difference_text({"difference": -1.0, "low": -1.0, "high": -0.998}) == "-1.000 [-1.00, -0.9980]"


@pytest.mark.parametrize(
    ("share", "digits", "text"),
    [
        (3e-5, 1, "0.003%"),  # of 100,000 documents none takes less: not 0.0% of others
        (20 / 600_000, 2, "0.0033%"),
        (0.99996, 1, "99.9960%"),
        (0.99996, 0, "99.9960%"),
        (0.1234, 2, "12.34%"),
        (0, 1, "0.0%"),
        (1, 2, "100.00%"),
    ],
)
def test_only_nothing_is_0_percent_and_only_all_is_100(share, digits, text):
    assert write_share(share, digits) == text


@pytest.mark.parametrize(
    ("share", "told"), [(0.2646, "26%"), (1, "100%"), (0.0037, "0.37%"), (0.036, "3.6%"), (0.0999, "10%")]
)
def test_percent(share, told):
    assert write_share(share) == told
