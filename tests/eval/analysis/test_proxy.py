"""Memorized or predictable: what a proxy gives back as well."""

import pytest

from hf_axonn_eval import compare, html_page, split_by_proxy
from hf_axonn_eval.report import attacks
from hf_axonn_eval.report.verdict import verdicts
from tests.helpers.eval_support import result


def some(known: str, logprob: float):
    """Documents a to f, seen twice, and a control; those in `known` come back."""
    return [
        result(name, bucket=0 if name == "z" else 2, exact_match=name in known, logprob=logprob) for name in "abcdefz"
    ]


def test_what_only_the_model_gives_is_memorized():
    runs, proxies = {"model": some("abcz", -1.0)}, {"model": some("cd", -3.0)[::-1]}
    split = split_by_proxy(runs, proxies)["model"]
    counts = {
        bucket: {name: of[name]["count"] for name in ("verbatim", "memorized", "predictable")}
        for bucket, of in split.items()
    }
    assert counts == {
        "0": {"verbatim": 1, "memorized": 1, "predictable": 0},
        "2": {"verbatim": 3, "memorized": 2, "predictable": 1},
    }
    assert split["2"]["gap"]["mean"] == 1.0 and split["2"]["memorized"]["n"] == 6
    assert split["2"]["memorized"]["low"] is not None
    comparison = {**compare(runs), "proxy": {"model": split}}
    assert "; 1 of these 3 come from the proxy too" in verdicts(comparison)[0]
    [table] = attacks.proxy(comparison)
    assert table.rows[1][:2] == ["2x", "model"] and table.rows[1][3].startswith("2 of 6 [")
    page = html_page(comparison, runs=runs)
    assert 'id="degenerate"' in page and table.title in page
    assert attacks.proxy(compare(runs)) == [] and "proxy" not in verdicts(compare(runs))[0]


def test_several_buckets_have_a_sum():
    runs = {"model": [result("a", bucket=1), result("b", bucket=2, exact_match=True), result("c")]}
    split = split_by_proxy(runs, {"model": list(runs["model"]), "other": []})
    assert list(split) == ["model"] and list(split["model"]) == ["0", "1", "2", "seen"]
    assert split["model"]["seen"]["predictable"]["count"] == 1 and split["model"]["seen"]["verbatim"]["n"] == 2


def test_a_proxy_of_other_samples_is_refused():
    with pytest.raises(ValueError, match="6 samples and the run 7, of which 1 are not"):
        split_by_proxy({"model": some("", -1.0)}, {"model": some("", -1.0)[1:]})
