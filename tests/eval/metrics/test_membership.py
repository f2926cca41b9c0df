"""Membership scores by hand, AUC and TPR against scikit-learn and the definition, intervals over documents."""

import math
import zlib

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score, roc_curve

from hf_axonn_eval.analysis.intervals import wilson
from hf_axonn_eval.analysis.membership_attack import attack, auc, tpr_at_fpr
from hf_axonn_eval.metrics.membership import scores, token_statistics


def test_token_statistics_by_hand():
    logits = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]], dtype=torch.float64).log()
    logprob, mean, deviation = token_statistics(logits, torch.tensor([1, 0]))
    assert logprob.tolist() == pytest.approx([math.log(0.25), 0])
    expected = 0.5 * math.log(0.5) + 0.5 * math.log(0.25)
    assert mean.tolist() == pytest.approx([expected, 0])
    # both values lie half of log 2 from their mean; a certain token has no spread, and impossible ones no weight
    assert deviation.tolist() == pytest.approx([math.log(2) / 2, 0])


def test_token_statistics_equal_the_formula_of_min_k_plus_plus():
    torch.manual_seed(0)
    logits = torch.randn(3, 5, 200, dtype=torch.float64) * 4
    targets = torch.randint(200, (3, 5))
    log_p = logits.log_softmax(-1)
    mean = (log_p.exp() * log_p).sum(-1)
    deviation = ((log_p.exp() * log_p.square()).sum(-1) - mean.square()).sqrt()
    kept = logits.clone()
    found = token_statistics(logits, targets)
    for mine, true in zip(found, (log_p.gather(-1, targets[..., None])[..., 0], mean, deviation), strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-10, atol=1e-12)
    assert torch.equal(logits, kept), "the caller's logits stay as they are"
    assert all(tensor.dtype == torch.float32 for tensor in token_statistics(logits.bfloat16(), targets))


def test_scores_by_hand():
    logprobs = [-1.0, -4.0, -2.0, -3.0, 0.0]
    found = scores(logprobs, [-1.0] * 5, [2.0, 1.0, 0.1, 2.0, 0.0], "some text", share=0.4)
    assert found["loss"] == -2.0
    assert found["zlib"] == -2.0 / len(zlib.compress(b"some text"))
    assert found["min_k"] == -3.5  # the two lowest of five
    # (l - mu) / sigma: 0, -3, -10, -1, and a huge one where the deviation is 0
    assert found["min_k_plus_plus"] == pytest.approx(-6.5)
    assert scores([-1.0, -2.0], [0, 0], [1, 1], "x")["min_k"] == -2.0, "a fifth of two tokens is one"


@pytest.mark.parametrize(
    ("logprobs", "means", "share", "message"),
    [([], [], 0.2, "one or more"), ([-1.0], [-1.0, -1.0], 0.2, "2 means"), ([-1.0], [-1.0], 20, "share is 20")],
)
def test_scores_of_nothing_are_refused(logprobs, means, share, message):
    with pytest.raises(ValueError, match=message):
        scores(logprobs, means, means, "x", share=share)


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
    # 1000 draws know the width to 3%, and it is made 2% wider for so few documents
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
