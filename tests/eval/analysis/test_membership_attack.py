"""AUC and TPR against scikit-learn and the definition; intervals by hand and against known ones; what is withheld."""

import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score, roc_curve

from hf_axonn_eval.analysis.intervals import clopper_pearson
from hf_axonn_eval.analysis.membership_attack import attack, auc, auc_interval, placements, thresholds, tpr_at_fpr


def test_auc_and_tpr_by_hand():
    # of six pairs the member is above in (3, 2), (3, 1), (2, 1) and level in (2, 2): 3.5; and 0 loses twice
    assert auc([3, 2, 0], [2, 1]) == pytest.approx(3.5 / 6)
    assert tpr_at_fpr([3, 2, 0], [2, 1], 0.0) == pytest.approx(1 / 3)
    assert tpr_at_fpr([3, 2, 0], [2, 1], 0.5) == pytest.approx(2 / 3)
    assert tpr_at_fpr([3, 2, 0], [2, 1], 1.0) == 1
    assert auc([5], [1]) == 1 and auc([1], [5]) == 0 and auc([1, 1], [1]) == 0.5


@pytest.mark.parametrize("decimals", [0, 1, 8])
def test_auc_and_tpr_equal_scikit_learn(decimals):
    generator = np.random.default_rng(decimals)
    members = generator.normal(0.7, 1, size=400).round(decimals)  # few decimals: many ties
    controls = generator.normal(0, 1.5, size=300).round(decimals)
    truth, both = [1] * 400 + [0] * 300, np.concatenate([members, controls])
    assert auc(members, controls) == pytest.approx(roc_auc_score(truth, both), abs=1e-12)
    false, true, _ = roc_curve(truth, both, drop_intermediate=False)
    for rate in (0.0, 0.001, 0.01, 0.05, 0.5, 1.0):
        assert tpr_at_fpr(members, controls, rate) == pytest.approx(true[false <= rate + 1e-12].max(), abs=1e-12)
    by_pairs = np.mean((members[:, None] > controls) + 0.5 * (members[:, None] == controls))
    assert auc(members, controls) == pytest.approx(by_pairs, abs=1e-12)


def test_a_false_positive_is_allowed_where_the_controls_suffice_for_it():
    controls = list(range(300))
    assert tpr_at_fpr([297.5, 296.5, 295.5, 0], controls, 0.01) == 0.5  # 297.5 has 2 above it, 296.5 has 3 of 300
    assert tpr_at_fpr([297.5, 298.5, 299.5, 300], controls[:99], 0.001) == 1


def one_each(members, controls, **options):
    """The attack with a document for each sample."""
    documents = {"member_documents": range(len(members)), "control_documents": range(len(controls))}
    return attack(members, controls, **documents, **options)


def test_an_end_of_the_interval_solves_its_equation():
    """The end is Clopper and Pearson's of as many trials as give the variance of the definition, at the end t."""
    z, area, variance, documents = 1.959964, 0.9, 0.001, 40
    low, high = auc_interval(area, variance, documents)
    for share, end in ((area, low), (1 - area, 1 - high)):
        solutions = np.linspace(0, share, 1_000_001)[1:-1]
        spread = solutions / share * (variance + share * (share - solutions) / documents)
        t = solutions[np.argmin(np.abs(share - solutions - z * np.sqrt(spread)))]
        trials = t * (1 - t) / (t / share * (variance + share * (share - t) / documents))
        assert end == pytest.approx(clopper_pearson(share * trials, trials).low, abs=1e-5)
    # of the largest variance that there is, as of answers yes and no, it is the exact interval of these
    assert auc_interval(area, area * (1 - area) / 40, 40) == pytest.approx(clopper_pearson(36, 40))


def test_the_interval_of_an_auc_is_about_that_of_hanley_and_mcneil():
    generator = np.random.default_rng(0)
    members, controls = generator.normal(0.8, 1, size=1500), generator.normal(size=1200)
    alone = one_each(members, controls)
    assert (alone["members"], alone["controls"]) == (1500, 1200)
    a = alone["auc"]["value"]
    assert a == auc(members, controls)
    more = 1499 * (a / (2 - a) - a * a) + 1199 * (2 * a * a / (1 + a) - a * a)
    error = math.sqrt((a * (1 - a) + more) / (1500 * 1200))
    # and wider by documents of another kind, of which there may be 3 in 1200 that were not seen
    width = alone["auc"]["high"] - alone["auc"]["low"]
    assert 2 * 1.96 * error < width < 2 * 1.96 * error * 1.05 + 4 / 1200
    assert alone["auc"]["low"] < a < alone["auc"]["high"]


def test_copies_inside_a_document_bring_no_new_information():
    generator = np.random.default_rng(0)
    members, controls = generator.normal(0.8, 1, size=150), generator.normal(size=120)
    alone = one_each(members, controls, rates=[0.1])
    copied = attack(
        members.repeat(5),
        controls.repeat(5),
        member_documents=np.arange(150).repeat(5).tolist(),
        control_documents=np.arange(120).repeat(5).tolist(),
        rates=[0.1],
    )
    assert copied["auc"] == pytest.approx(alone["auc"])
    false = copied["tpr_at_0.1"].pop("false_positive_rate")
    assert false.pop("count") == 5 * alone["tpr_at_0.1"]["false_positive_rate"].pop("count") == 60
    assert false == pytest.approx(alone["tpr_at_0.1"].pop("false_positive_rate"))
    assert copied["tpr_at_0.1"] == pytest.approx(alone["tpr_at_0.1"])
    # independent windows do: the interval of the AUC is of what they vary by
    windows = generator.normal(0.8, 1, size=1500), generator.normal(size=1200)
    of_ten = attack(
        *windows,
        member_documents=np.arange(150).repeat(10).tolist(),
        control_documents=np.arange(120).repeat(10).tolist(),
    )
    assert of_ten["auc"]["high"] - of_ten["auc"]["low"] < 0.6 * (alone["auc"]["high"] - alone["auc"]["low"])
    single = attack(members, controls, member_documents=range(150), control_documents=["c"] * 120)
    assert single["auc"] == {"value": alone["auc"]["value"], "low": None, "high": None}
    single = attack(members, controls, member_documents=["m"] * 150, control_documents=range(120), rates=[0.1])
    assert (single["tpr_at_0.1"]["value"], single["tpr_at_0.1"]["low"]) == (alone["tpr_at_0.1"]["value"], None)


def test_the_variance_is_of_placements_clustered_in_documents():
    """DeLong's for one sample a document, and Obuchowski's sums over documents of unequal size, by hand."""
    members, controls, documents = np.array([5.0, 3.0, 1.0]), np.array([4.0, 2.0, 0.0]), ["a", "a", "b"]
    assert placements(members, controls).tolist() == pytest.approx([1, 2 / 3, 1 / 3])
    area = 2 / 3
    of_members = 2 / 1 * ((1 / 3 + 0) ** 2 + (1 / 3) ** 2) / 9
    of_controls = 3 / 2 * ((1 / 3 - area) ** 2 + 0 + (1 - area) ** 2) / 9
    found = attack(members, controls, member_documents=documents, control_documents="xyz")["auc"]
    expected = auc_interval(area, of_members + of_controls, 9 / 5)  # Kish: (2 + 1)^2 / (4 + 1)
    assert (found["low"], found["high"]) == pytest.approx(tuple(expected))


def test_a_score_that_parts_all_is_no_surer_than_its_documents():
    """12 documents with two members each above 20 controls: an AUC of 1 or 0 is 12 of 12 or 0 of 12."""
    members, controls = np.arange(100, 124), np.arange(20)
    documents = {"member_documents": (np.arange(24) // 2).tolist(), "control_documents": range(20)}
    found = attack(members, controls, **documents, rates=[0.5])
    assert found["auc"] == pytest.approx({"value": 1.0, **clopper_pearson(12, 12)._asdict()})
    assert found["tpr_at_0.5"].pop("false_positive_rate")["count"] == 10
    assert found["tpr_at_0.5"] == pytest.approx({"value": 1.0, **clopper_pearson(12, 12)._asdict()})
    found = attack(-members, controls, **documents)
    assert found["auc"] == pytest.approx({"value": 0.0, **clopper_pearson(0, 12)._asdict()})


@pytest.mark.parametrize("mirrored", [False, True])
def test_the_interval_does_not_jump_where_one_pair_is_swapped(mirrored):
    """From every member above every control on, members sink one place at a time below the highest control."""
    sign = -1 if mirrored else 1
    controls = np.arange(12.0)
    ends = []
    for sunk in range(6):
        members = np.arange(100, 112.0)
        members[0] = 11.5 - sunk  # below as many controls
        found = one_each(sign * members, sign * controls)["auc"]
        assert found["value"] == pytest.approx(sunk / 144 if mirrored else 1 - sunk / 144)
        ends.append((found["low"], found["high"]))
    steps = np.abs(np.diff(ends, axis=0))
    assert steps.max() < 2.5 / 144, "an end moves about as far as the AUC does"
    assert min(high - low for low, high in ends) > 0.25, "12 documents leave much open"


def test_a_score_that_says_nothing_has_an_interval_though_nothing_varies():
    found = one_each([1.0] * 12, [1.0] * 12)["auc"]
    assert found["value"] == 0.5 and found["low"] < 0.4 and found["high"] > 0.6


def test_a_rate_is_given_from_ten_expected_false_positives_on():
    members = np.linspace(500, 1500, 40)
    for controls, why in (
        (12, "12 independent controls; 1% needs 1,000"),
        (999, "999 independent controls; 1% needs 1,000"),
    ):
        found = one_each(members, np.arange(float(controls)))["tpr_at_0.01"]
        assert found == {"value": None, "low": None, "high": None, "why": why}
    found = one_each(members, np.arange(1000.0))
    assert found["tpr_at_0.01"]["value"] == tpr_at_fpr(members, np.arange(1000.0), 0.01) == 0.5
    assert found["tpr_at_0.01"]["false_positive_rate"] == {
        "count": 10, "value": 0.01, **clopper_pearson(10, 1000)._asdict(),
    }  # fmt: skip
    assert found["tpr_at_0.001"]["why"] == "1,000 independent controls; 0.1% needs 10,000"
    # samples of a document are not independent controls, and documents of unequal size count for fewer
    scores, sizes = np.arange(1200.0), [1] * 600 + [4] * 150
    several = attack(
        members,
        scores,
        member_documents=range(40),
        control_documents=np.arange(750).repeat(sizes).tolist(),
        rates=[0.01, 0.02],
    )
    assert several["tpr_at_0.01"]["why"] == "480 independent controls; 1% needs 1,000"
    assert several["tpr_at_0.02"]["why"] == "480 independent controls; 2% needs 500"


def test_the_interval_of_a_rate_has_that_of_its_threshold():
    """10 of 1000 controls may be above it, but the true quantile is between the 4th and the 18th control."""
    assert thresholds(0.01, 1000, 1000, 0.95) == (3, 10, 17)
    assert thresholds(0.01, 2000, 1000, 0.95) == (7, 20, 34), "two samples of each document"
    assert thresholds(0.01, 2000, 1000.9, 0.95) == (7, 20, 34), "the binomial has whole trials"
    assert thresholds(0.01, 1000, 1000, 0.5) == (7, 10, 12)
    assert thresholds(1, 10, 10, 0.95) == (9, 10, 10)
    controls = np.arange(1000.0)
    # 20 members above all, and one in each gap from the 1st to the 30th control
    members = np.append(np.full(20, 2000.0), 999 - np.arange(30) - 0.5)
    found = one_each(members, controls)["tpr_at_0.01"]
    assert found["value"] == 30 / 50
    assert found["low"] == clopper_pearson(20 + 3, 50).low and found["high"] == clopper_pearson(20 + 17, 50).high
    everything = one_each([-math.inf, 3.0], np.arange(10.0), rates=[1])["tpr_at_1"]
    assert everything["value"] == 1 and everything["false_positive_rate"]["count"] == 10


def test_with_ties_the_achieved_rate_is_below_the_one_that_was_asked():
    controls = np.array([2.0] * 30 + [1.0] * 70)
    found = one_each([3.0, 2.0, 1.0, 0.0], controls, rates=[0.2])["tpr_at_0.2"]
    assert found["value"] == 0.25, "above 2.0, which 30 of 100 controls reach"
    assert (found["false_positive_rate"]["count"], found["false_positive_rate"]["value"]) == (0, 0.0)


@pytest.mark.parametrize(("members", "controls", "message"), [([], [1.0], "0 members"), ([1.0], [math.nan], "NaN")])
def test_what_cannot_be_ranked_is_named(members, controls, message):
    with pytest.raises(ValueError, match=message):
        auc(members, controls)


def test_the_bounds_of_a_false_positive_rate():
    assert tpr_at_fpr([3, 0], [2, 1], 0) == 0.5 and tpr_at_fpr([3, 0], [2, 1], 1) == 1
    assert tpr_at_fpr([1.5, 0], [2, 1], 0.49) == 0 and tpr_at_fpr([1.5, 0], [2, 1], 0.5) == 0.5
    for wrong in (-0.01, 1.01):
        with pytest.raises(ValueError, match="a share between 0 and 1"):
            tpr_at_fpr([3], [2], wrong)


def test_an_attack_says_what_was_asked_and_needs_no_draws():
    generator = np.random.default_rng(1)
    members, controls = generator.normal(0.5, 1, size=30), generator.normal(size=25)
    plain = one_each(members, controls)
    assert plain == one_each(members, controls, confidence=0.95)
    assert list(plain) == ["members", "controls", "auc", "tpr_at_0.001", "tpr_at_0.01"]
    assert list(one_each(members, controls, rates=[0.2]))[2:] == ["auc", "tpr_at_0.2"]
    for name, rates in (("auc", [0.5]), ("tpr_at_0.5", [0.5])):
        narrow, usual, wide = (
            one_each(members, controls, rates=rates, confidence=share)[name] for share in (0.5, 0.95, 0.99)
        )
        assert wide["low"] < usual["low"] < narrow["low"] < narrow["high"] < usual["high"] < wide["high"]
    # two documents a side are the fewest that say something
    two = attack([3, 5], [4, 1], member_documents="ab", control_documents="cd")
    assert two["auc"]["low"] is not None and two["auc"]["value"] == 0.75


def test_an_attack_refuses_what_it_cannot_use():
    with pytest.raises(ValueError, match="2 scores of 3 documents"):
        attack([1.0, 2.0], [1.0], member_documents="abc", control_documents="d")
    with pytest.raises(ValueError, match="1 scores of 2 documents"):
        attack([1.0, 2.0], [1.0], member_documents="ab", control_documents="de")
    for rate in (0, -0.1, 1.1):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            one_each([1.0, 2.0], [1.0], rates=[rate])
    with pytest.raises(ValueError, match="confidence"):
        one_each([1.0, 2.0], [1.0], confidence=1)
    with pytest.raises(ValueError, match="NaN"):
        one_each([1.0, math.nan], [1.0])


def test_an_untrained_model_is_given_no_rate_that_12_controls_cannot_show():
    """The true positive rate at 0.1% of scores that know nothing is 0.001; on average 0.08 are above 12 controls."""
    generator = np.random.default_rng(3)
    found = one_each(generator.normal(size=12), generator.normal(size=12))
    assert [found[name]["value"] for name in found if name.startswith("tpr")] == [None, None]
    assert found["auc"]["low"] < 0.5 < found["auc"]["high"]
