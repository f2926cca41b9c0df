"""Membership scores by hand, and against the formulas of their papers."""

import math
import zlib

import pytest
import torch

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


def test_a_fifth_of_the_tokens_is_taken_and_one_at_least():
    falling = [-float(place) for place in range(1, 11)]
    assert scores(falling, [0] * 10, [1] * 10, "x")["min_k"] == -9.5, "two of ten"
    assert scores(falling[:9], [0] * 9, [1] * 9, "x")["min_k"] == -9, "one of nine"
    assert scores(falling, [0] * 10, [1] * 10, "x", share=1)["min_k"] == -5.5, "all"
    assert scores(falling, [0] * 10, [1] * 10, "x", share=0.01)["min_k"] == -10
    for wrong in (0, -0.1, 1.001):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            scores(falling, [0] * 10, [1] * 10, "x", share=wrong)
    with pytest.raises(ValueError, match="2 deviations"):
        scores([-1.0], [-1.0], [1.0, 1.0], "x")


def test_a_place_where_the_model_is_certain_does_not_divide_by_nothing():
    assert scores([-1.0], [-1.5], [0.0], "x")["min_k_plus_plus"] == pytest.approx(0.5 / 1e-6)
    assert scores([-1.0], [-1.5], [2e-6], "x")["min_k_plus_plus"] == pytest.approx(0.5 / 2e-6)
