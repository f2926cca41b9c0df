"""The level of access of a run, what each level shows, and leaks the other way round."""

from html import unescape
from math import log

import pytest

from hf_axonn_eval import compare, html_page
from hf_axonn_eval.data.access import LEVELS, access_of, access_of_server
from hf_axonn_eval.report import access, tables
from hf_axonn_eval.report.answer import answer
from hf_axonn_eval.report.write import markdown
from tests.helpers.eval_support import result


def record(level: str | None, **changes) -> dict:
    identity = {"samples": 24, "samples_sha256": "ab", "model_fingerprint": "cd", "dtype": "float32"}
    return {
        "identity": identity, "model": {"path": "m"}, "grid": None, "device": {"type": "cpu"}, "settings": {},
        "versions": {}, "access": level, **changes,
    }  # fmt: skip


def some(*, members: float = -1.0, **changes):
    """Twelve documents seen twice, of which three come back, and twelve controls."""
    return [
        result(
            f"{side}{place}", bucket=2 if side == "s" else 0, exact_match=side == "s" and place < 3,
            membership={"loss": members if side == "s" else -2.0, "min_k_plus_plus": -0.1 * place}, **changes,
        )
        for side in "sc" for place in range(12)
    ]  # fmt: skip


def test_the_level_of_a_record():
    assert [access_of(record(level)) for level in LEVELS] == list(LEVELS)
    assert access_of(record(None)) == "weights"
    served = record("log-probabilities and texts of a server")
    served["identity"]["served"] = {"name": "m"}
    assert access_of(served) == "top-k logits", "as earlier versions wrote it"
    assert (access_of_server(20, 800), access_of_server(800, 800)) == ("top-k logits", "logits")


def test_a_finding_stands_at_the_least_level_that_gives_it():
    runs = {"only": some(sampled_logprob=log(0.1))}
    [found] = access.levels(compare(runs, records={"only": record("weights")}))
    cells = {row[0]: row[3] for row in found.rows}
    assert list(cells) == list(LEVELS)
    assert cells["text"].startswith("verbatim by greedy decoding 3 of 12 [0.05, 0.57]; by 1,000 draws 12 of 12")
    assert cells["top-k logits"].startswith("membership: AUC 1.000 [") and cells["top-k logits"].endswith("by loss")
    assert cells["logits"].endswith("by Min-K%++") and "fingerprint" in cells["weights"]
    [found] = access.levels(compare(runs, records={"only": record("top-k logits")}))
    assert [row[3] for row in found.rows[2:]] == ["not seen: this run had top-k logits"] * 2
    assert access.levels(compare(runs)) == [], "without records"
    without = {"only": [result("a", bucket=1), result("b")]}
    [found] = access.levels(compare(without, records={"only": record("weights")}))
    assert found.rows[1][3] == "membership was not measured (--membership)"


@pytest.mark.parametrize(
    ("level", "said"),
    [
        ("text", "only was seen through texts alone: no probability"),
        ("top-k logits", "only was seen through the 20 likeliest tokens of each place: Min-K%++ and draws"),
        ("logits", "only was seen through its logits; that the same weights"),
    ],
)
def test_what_a_level_leaves_open_is_said(level, said):
    runs = {"only": some()}
    comparison = compare(runs, records={"only": record(level, settings={"alternatives": 20})})
    [sentence] = access.limits(comparison)
    assert sentence.startswith(said)
    assert sentence in markdown(comparison) and sentence in unescape(html_page(comparison, runs=runs))
    assert access.limits(compare(runs, records={"only": record("weights")})) == []


def test_an_auc_below_one_half_is_a_leak():
    comparison = compare({"only": some(members=-3.0)})
    [table] = tables.membership(comparison)
    cells = {(row[0], row[2]): row[4] for row in table.rows}
    assert cells["2x", "loss"].endswith(", turned round 1.000") and cells["2x", "loss"].startswith("0.000 [0.00, 0.")
    assert "turned round" not in cells["2x", "Min-K%++"]
    assert answer(comparison)[-1].startswith("only leaks membership the other way round: the AUC of loss is 0.000 [")
    assert not any("leaks" in sentence for sentence in answer(compare({"only": some()})))
