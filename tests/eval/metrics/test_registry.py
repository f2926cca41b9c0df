"""One registered function is all that a new metric takes."""

import io
import json
import math

import numpy as np
import pytest
from rich.console import Console

from hf_axonn_eval import compare, extract, read_run, register_metric, summarize, write_report
from hf_axonn_eval.analysis.intervals import clopper_pearson, mean_intervals
from hf_axonn_eval.data.results import RunDirectory, read_results
from hf_axonn_eval.metrics.registry import METRICS, value
from hf_axonn_eval.report.html import html_page
from hf_axonn_eval.report.write import terminal_table
from tests.helpers.eval_support import LEARNT, result, samples, topics_tokenizer, trained_llama


@pytest.fixture(autouse=True)
def registered_metrics():
    """What a test registers is forgotten after it."""
    before = dict(METRICS)
    yield
    METRICS.clear()
    METRICS.update(before)


def test_a_registered_metric_goes_from_the_model_into_every_report(tmp_path):
    @register_metric("starts_right", "starts right", mean="share")
    def starts_right(hits):
        return hits[0]

    @register_metric("odd_ids", "odd ids")
    def odd_ids(prefix, suffix, *, modulus=2):
        return sum(token % modulus for token in (*prefix, *suffix)) if len(suffix) > 1 else None

    extract(
        trained_llama(), topics_tokenizer(), samples(), output=tmp_path / "run", model_record={"fingerprint": "x"},
        generate=False, progress=False,
    )  # fmt: skip
    line = json.loads((tmp_path / "run" / "results.jsonl").read_text().splitlines()[0])
    assert set(line["metrics"]) >= {"starts_right", "odd_ids"}
    record, results = read_run(tmp_path / "run")
    asked = {sample.sample_id: sample for sample in samples()}
    for one in results:
        odd = sum(token % 2 for token in asked[one.sample_id].prefix + asked[one.sample_id].suffix)
        assert (one.metric("starts_right"), one.metric("odd_ids")) == (one.hits[0], odd)

    metrics = summarize(results)["all"]["metrics"]
    right = sum(one.hits[0] for one in results)
    assert (
        LEARNT <= right == metrics["starts_right"]["count"]
        and metrics["starts_right"]["interval"] == "clopper-pearson"
    )
    low, high = clopper_pearson(right, len(results))
    assert (metrics["starts_right"]["low"], metrics["starts_right"]["high"]) == (low, high)
    odd = metrics["odd_ids"]
    values = np.array([[one.metric("odd_ids")] for one in results])
    [(interval, kind)] = mean_intervals(values, [one.document_id for one in results])
    assert (odd["low"], odd["high"], odd["interval"]) == (*(interval or (None, None)), kind)

    comparison = compare({"base": results, "again": results})
    assert sum(test["starts_right"]["both"] for test in comparison["mcnemar"]["again"].values()) == right
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(terminal_table(comparison))
    paths = write_report(comparison, tmp_path / "report", runs={"base": results, "again": results})
    share, mean = f"{right} of {len(results)} [{low:.2f}, {high:.2f}]", f"{odd['mean']:.3f}"
    for text in (console.export_text(), paths["report.md"].read_text(), paths["report.html"].read_text()):
        assert share in text and mean in text
    assert "| starts right |" in paths["report.md"].read_text()
    assert '<th scope="col">odd ids</th>' in paths["report.html"].read_text()


def test_a_metric_is_computed_for_results_of_before_it():
    @register_metric("said_twice", "said twice", mean="share", shown_in="summary")
    def said_twice(generated):
        return len(set(generated)) < len(generated)

    old = [result("a", generated=[5, 5]), result("b", generated=[5, 6]), result("c")]
    assert [value(one, "said_twice") for one in old] == [True, False, None]
    comparison = compare({"old": old})
    entry = comparison["runs"]["old"]["all"]["metrics"]["said_twice"]
    assert (entry["count"], entry["n"]) == (1, 2), "a sample without a continuation does not enter"
    assert "said twice" not in html_page(comparison), "shown_in='summary'"


NEWER = {  # of ids that results do not have
    *("bleu", "rougeL_tokens", "lccs", "suffix_types"),
    *("rouge1_to_eos", "rouge2_to_eos", "rougeL_to_eos", "holds_eos", "guess_nll", "nv_recall", "rank_bits"),
}


def test_results_of_0_1_0_are_read_and_lack_only_newer_metrics(tmp_path):
    """A line as 0.1.0 wrote it: flat, without `metrics`."""
    line = {
        "sample_id": "a", "document_id": "a", "bucket": 4, "offset": 0, "prefix_length": 2, "suffix_length": 2,
        "exact_match": False, "token_accuracy": 0.5, "divergence_point": 1, "extraction_strength": 0.0,
        "logprob": "-inf", "logprobs": [-0.5, "-inf"], "hits": [True, False], "generated": [1, 3],
        "generated_text": "a b", "suffix_text": "a c", "free_running_accuracy": 0.5, "longest_run": 1,
        "edit_distance": 0.5, "near_verbatim": False, "rouge1": 0.5, "rouge2": 0.0, "rougeL": 0.5, "margin": 0.25,
        "undecided": False, "sampled_logprob": "-inf", "membership": None, "type_token_ratio": 1.0, "zlib_ratio": 1.5,
    }  # fmt: skip
    (tmp_path / "results.jsonl").write_text(json.dumps(line) + "\n")
    [old] = read_results(tmp_path / "results.jsonl")
    assert {name: value(old, name) for name in METRICS if name in line} == {
        name: line[name] for name in METRICS if name in line
    }
    assert old.near_tie is False, "0.1.0 called it undecided"
    assert [value(old, name) for name in ("nll", "probability", "sampled_probability")] == [math.inf, 0, 0]
    assert set(summarize([old])["all"]["metrics"]) == set(METRICS) - NEWER


def test_infinite_metrics_survive_the_file(tmp_path):
    run = RunDirectory(tmp_path)
    run.begin({"identity": {"samples": 1}})
    infinite = result("a", logprob=-math.inf, metrics={"nll": math.inf, "x": 1}, membership={"loss": -math.inf})
    run.append([infinite])
    assert run.results() == [infinite]


def test_wrong_metrics_are_named():
    for arguments, function, message in (
        (("x", "x"), lambda tokens: 1, "asks for tokens; there are prefix, suffix"),
        (("nll", "x"), lambda hits: 1, "'nll' is taken"),
        (("margin", "x"), lambda hits: 1, "'margin' is taken"),
    ):
        with pytest.raises(ValueError, match=message):
            register_metric(*arguments)(function)
    with pytest.raises(ValueError, match="mean is 'median'"):
        register_metric("x", "x", mean="median")
    register_metric("share", "x", mean="share")(lambda hits: 0.5)
    register_metric("number", "x")(lambda hits: math.nan)
    with pytest.raises(ValueError, match=r"'share' is a share, .* not 0.5"):
        value(result("a"), "share")
    with pytest.raises(ValueError, match="'number' is NaN; return None"):
        value(result("a"), "number")


def test_a_cell_of_a_notebook_registers_again():
    def register(answer):
        @register_metric("again", "again")
        def again(hits):
            return answer

    register(1)
    register(2)
    assert value(result("a"), "again") == 2


def test_a_value_outside_of_its_bounds_is_an_error():
    register_metric("of_one", "of one", least=0, most=1)(lambda suffix: len(suffix) / 2)
    assert METRICS["of_one"]({"suffix": [1, 2]}) == 1
    with pytest.raises(ValueError, match=r"metric 'of_one' is 1\.5, not from 0 to 1 as registered"):
        METRICS["of_one"]({"suffix": [1, 2, 3]})
    assert METRICS["probability"]({"logprob": 1e-9}) == pytest.approx(1), "rounding"


def test_no_number_of_ours_is_negative():
    assert {name for name, metric in METRICS.items() if metric.mean != "share" and metric.least != 0} == set()
