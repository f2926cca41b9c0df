"""AUC and TPR against scikit-learn and the definition, intervals over documents."""

import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score, roc_curve

from hf_axonn_eval.analysis.intervals import wilson
from hf_axonn_eval.analysis.membership_attack import attack, auc, tpr_at_fpr


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


def test_intervals_of_an_attack_resample_documents_on_both_sides():
    generator = np.random.default_rng(0)
    members, controls = generator.normal(0.8, 1, size=150), generator.normal(size=120)
    options = {"resamples": 1000, "seed": 3}
    alone = attack(members, controls, member_documents=range(150), control_documents=range(120), **options)
    assert (alone["members"], alone["controls"]) == (150, 120)
    assert alone["auc"]["value"] == auc(members, controls)
    assert alone["tpr_at_0.01"]["value"] == tpr_at_fpr(members, controls, 0.01)
    # Hanley and McNeil's standard error of an AUC
    a = alone["auc"]["value"]
    more = 149 * (a / (2 - a) - a * a) + 119 * (2 * a * a / (1 + a) - a * a)
    error = math.sqrt((a * (1 - a) + more) / (150 * 120))
    # 1000 draws know the width to 3%, and it is made 2% wider for so few documents: 2% and not quite three times 3%
    assert alone["auc"]["high"] - alone["auc"]["low"] == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert alone["auc"]["low"] < a < alone["auc"]["high"]
    # five copies of each inside its document bring no new information
    copied = attack(
        members.repeat(5),
        controls.repeat(5),
        member_documents=np.arange(150).repeat(5).tolist(),
        control_documents=np.arange(120).repeat(5).tolist(),
        **options,
    )
    assert copied["auc"] == pytest.approx(alone["auc"])
    single = attack(members, controls, member_documents=range(150), control_documents=["c"] * 120)
    assert single["auc"]["value"] == a and single["auc"]["low"] is None


def test_a_score_that_parts_all_is_no_surer_than_its_documents():
    """12 documents with two members each above 20 controls: every draw says 1, or 0 the other way round."""
    members, controls = np.arange(100, 124), np.arange(20)
    documents = {"member_documents": (np.arange(24) // 2).tolist(), "control_documents": range(20)}
    found = attack(members, controls, resamples=100, **documents)
    assert found["auc"] == found["tpr_at_0.001"] == {"value": 1.0, **wilson(12, 12)._asdict()}
    found = attack(-members, controls, resamples=100, **documents)
    assert found["auc"] == found["tpr_at_0.01"] == {"value": 0.0, **wilson(0, 12)._asdict()}


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


def test_an_attack_says_what_was_asked_and_draws_2000_times_by_default():
    generator = np.random.default_rng(1)
    members, controls = generator.normal(0.5, 1, size=30), generator.normal(size=25)
    documents = {"member_documents": range(30), "control_documents": range(25)}
    plain = attack(members, controls, **documents)
    assert plain == attack(members, controls, **documents, confidence=0.95, resamples=2000, seed=0)
    assert list(plain) == ["members", "controls", "auc", "tpr_at_0.001", "tpr_at_0.01"]
    assert plain != attack(members, controls, **documents, resamples=1999)
    assert plain != attack(members, controls, **documents, seed=1)
    narrow, wide = (attack(members, controls, **documents, confidence=share)["auc"] for share in (0.5, 0.99))
    assert wide["low"] < plain["auc"]["low"] < narrow["low"] < narrow["high"] < plain["auc"]["high"] < wide["high"]
    assert list(attack(members, controls, **documents, rates=[0.2]))[2:] == ["auc", "tpr_at_0.2"]
    # two documents a side are the fewest that say something
    two = attack([3, 5], [4, 1], member_documents="ab", control_documents="cd", resamples=100)
    assert two["auc"]["low"] is not None and two["auc"]["value"] == 0.75


def test_draws_of_members_do_not_go_with_those_of_controls():
    """Members and controls of the same scores, as many of each: if the same places were drawn, every draw said 1/2."""
    scores_of_both = np.arange(30.0)
    found = attack(scores_of_both, scores_of_both, member_documents=range(30), control_documents=range(30))["auc"]
    # by Hanley and McNeil 0.5 +- 1.96 * 0.075; 2000 draws know an end to 0.0045, of which this is three, beside the
    # 0.006 by which it is moved out for so few documents
    assert (found["low"], found["high"]) == pytest.approx((0.5 - 0.147, 0.5 + 0.147), abs=0.02)
