"""A number of a sample that is changed alone is denied by the others."""

import math

import pytest

from hf_axonn_eval.bundle.consistency import contradictions
from hf_axonn_eval.bundle.verify import _wrong_access
from tests.helpers.eval_support import result


TRUE = result(
    "a",
    suffix_length=4,
    divergence_point=1,
    hits=[True, False, True, True],
    logprobs=[-0.1, -1.0, -0.5, -0.25],
    logprob=-1.85,
    token_accuracy=0.75,
    extraction_strength=0.5,
    margin=0.3,
    near_tie=False,
    edit_distance=0.5,
    near_verbatim=False,
    metrics={"nll": 1.85 / 4},
)
EXTRACTED = result(
    "b",
    exact_match=True,
    divergence_point=2,
    hits=[True, True],
    logprobs=[-0.0, -math.inf],
    logprob=-math.inf,
    token_accuracy=1.0,
    extraction_strength=1.0,
    edit_distance=0.0,
)


def with_(base, **changes):
    return type(base)(**{**vars(base), **changes})


@pytest.mark.parametrize("honest", [TRUE, EXTRACTED, with_(TRUE, hits=None, logprobs=None, margin=None)])
def test_honest_results_contradict_nothing(honest):
    assert list(contradictions(honest, 0.1)) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"exact_match": True}, "exact_match is True, but divergence_point, suffix_length give False"),
        ({"token_accuracy": 0.5}, "token_accuracy is 0.5, but hits give 0.75"),
        ({"extraction_strength": 0.6}, "extraction_strength is 0.6"),
        ({"divergence_point": 2}, "divergence_point is 2, but by the hits it is 1"),
        ({"divergence_point": 0}, "divergence_point is 0, but by the hits it is 1"),
        ({"logprob": -1.8}, "logprob is -1.8, but those of the tokens add up to -1.85"),
        ({"metrics": {"nll": 0.4}}, "nll is 0.4"),
        ({"logprobs": [-0.1, -0.6, -0.5, -0.65]}, "token 1 is said to be missed"),
        ({"near_tie": True}, "near_tie is True, but the margin is 0.3"),
        ({"margin": 0.05}, "near_tie is False, but the margin is 0.05"),
        ({"edit_distance": 0.0}, "edit_distance is 0.0, but exact_match False"),
        ({"near_verbatim": True}, "near_verbatim is True, but edit_distance 0.5"),
    ],
)
def test_a_number_changed_alone_is_denied(changes, said):
    found = list(contradictions(with_(TRUE, **changes), 0.1))
    assert any(each.startswith(said) for each in found), found


def test_an_unknown_bound_denies_nothing():
    assert list(contradictions(with_(TRUE, near_tie=True), None)) == []


def test_a_rank_is_denied_by_a_hit_and_by_a_probability_above_its_share():
    ranked = with_(TRUE, ranks=[1, 2, 1, 1])
    assert list(contradictions(ranked, None)) == []
    assert "token 0 is said to be the first choice, but its rank is 2" in next(
        contradictions(with_(ranked, ranks=[2, 2, 1, 1]), None)
    )
    assert "token 1 has rank 4" in next(contradictions(with_(ranked, ranks=[1, 4, 1, 1]), None))


@pytest.mark.parametrize(
    ("level", "fingerprint", "said"),
    [
        ("weights", "ab" * 32, []),
        ("top-k logits", "unknown", ["Min-K%++, which needs all logits"]),
        ("logits", "unknown", []),
        ("text", "unknown", ["Min-K%++", "there are log-probabilities"]),
        ("logits", "ab" * 32, ["the fingerprint is known"]),
        ("weights", "unknown: a server", ["the fingerprint is unknown"]),
    ],
)
def test_a_run_has_no_more_than_its_level_of_access_gives(level, fingerprint, said):
    record = {"identity": {"model_fingerprint": fingerprint}, "access": level}
    found = _wrong_access(record, [with_(TRUE, membership={"min_k_plus_plus": -1.0})])
    assert len(found) == len(said) and all(each in one for each, one in zip(said, found, strict=True))
