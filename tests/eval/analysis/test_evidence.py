"""Is there evidence of memorization: against the controls and the base, a document as one trial."""

import pytest

from hf_axonn_eval import compare
from hf_axonn_eval.analysis.chance import against_chance, chance_of
from hf_axonn_eval.analysis.intervals import clopper_pearson
from tests.helpers.eval_support import result


def run(known: int, *, seen: int = 8, controls: int = 8, samples: int = 1, **options):
    """Documents with some samples each: of those seen the first `known` come back."""
    return [
        result(
            f"{side}{place}@{sample}",
            document_id=f"{side}{place}",
            bucket=3 if side == "s" else 0,
            exact_match=side == "s" and place < known,
            **options,
        )
        for side, count in (("s", seen), ("c", controls))
        for place in range(count)
        for sample in range(samples)
    ]


def evidence(**runs):
    return compare(runs)["evidence"]


def test_shares_and_tests_by_hand():
    found = evidence(base=run(0), trained=run(6))
    seen = found["trained"]["seen"]
    assert (seen["count"], seen["n"], seen["documents"]) == (6, 8, 8)
    assert (seen["low"], seen["high"]) == clopper_pearson(6, 8)
    against = found["trained"]["against_controls"]
    assert (against["seen"], against["controls"]) == ([6, 8], [0, 8])
    assert against["p"] == pytest.approx(2 * 28 / 8008)  # 6 of 16 all fall among 8 of them, or all among the other 8
    assert against["smallest_p"] == pytest.approx(2 / 12870)
    paired = found["trained"]["against_base"]
    assert paired["p"] == 2 / 2**6 and paired["smallest_p"] == 2 / 2**8
    assert paired["p_holm"] == 2 * paired["p"], "of three tests, of which one has a smaller p"
    assert against["p_holm"] == pytest.approx(3 * against["p"])
    assert found["base"]["against_base"] is None and found["base"]["more"] is False and found["trained"]["more"]


def test_four_documents_cannot_show_anything_against_a_base():
    found = evidence(base=run(0, seen=4, controls=0), trained=run(4, seen=4, controls=0))["trained"]
    assert found["against_base"]["p"] == found["against_base"]["smallest_p"] == 0.125 and found["more"] is False


def test_samples_of_a_document_are_one_trial():
    once = evidence(base=run(0), trained=run(6))["trained"]
    often = evidence(base=run(0, samples=10), trained=run(6, samples=10))["trained"]
    for test in ("against_controls", "against_base"):
        assert often[test]["p"] == once[test]["p"]
    assert (often["seen"]["n"], often["seen"]["documents"]) == (80, 8)
    assert often["seen"]["high"] == pytest.approx(once["seen"]["high"])


def test_fewer_than_the_base_is_no_evidence():
    found = evidence(base=run(12, seen=12, controls=0), goldfish=run(0, seen=12, controls=0))["goldfish"]
    assert found["against_base"]["p"] < 0.001 and found["more"] is False


def test_documents_with_more_samples_are_not_tested_against_controls():
    seen = [one for one in run(6, samples=10) if one.bucket]
    controls = [one for one in run(0) if not one.bucket]
    assert evidence(only=seen + controls)["only"]["against_controls"] is None


def test_without_controls_and_base_nothing_is_claimed():
    assert evidence(only=run(8, controls=0))["only"]["more"] is None
    found = evidence(only=run(0, seen=0))["only"]
    assert found["seen"] is None and found["more"] is None and found["controls"]["n"] == 8


def test_the_rate_of_false_evidence_is_at_most_that_of_the_confidence():
    """Of a model that knows documents of both kinds alike, by chance."""
    import numpy as np

    generator = np.random.default_rng(0)
    false = 0
    for _ in range(300):
        known = generator.random(24) < 0.4
        results = [result(f"{place}", bucket=place % 2, exact_match=bool(yes)) for place, yes in enumerate(known)]
        base = [result(f"{place}", bucket=place % 2, exact_match=generator.random() < 0.4) for place in range(24)]
        false += bool(evidence(base=base, same=results)["same"]["more"])
    assert false <= 300 * 0.05


@pytest.mark.parametrize(
    ("record", "vocabulary"),
    [
        ({"vocabulary": 800, "tokenizer": {"size": 700}}, 800),
        ({"tokenizer": {"size": 700}}, 700),
        ({"vocabulary": "800"}, None),
        ({"tokenizer": {"size": None}}, None),
        (None, None),
    ],
)
def test_chance_is_known_by_the_record(record, vocabulary):
    found = chance_of({"metrics": {"nll": {"mean": 6.6}}}, record)
    assert found == (against_chance(6.6, vocabulary) if vocabulary else None)
    assert found is None or found["no_better"] == (vocabulary == 700)
    assert chance_of({"metrics": {}}, record) is None
