"""What the most likely tokens of a place tell, and what they leave open."""

import math

import pytest
import torch

from hf_axonn_eval import Sample
from hf_axonn_eval.metrics.discoverability import Sampler
from hf_axonn_eval.served.backend import Place, alternatives_needed, score_of


def sample_of(*suffix: int) -> Sample:
    return Sample(sample_id="a", document_id="a", bucket=0, offset=0, prefix=(1,), suffix=suffix)


def places_of(logits: torch.Tensor, suffix: list[int], alternatives: int) -> list[Place]:
    """As a server gives them, its own token among them or beside them."""
    rows = logits.log_softmax(-1)
    places = []
    for row, token in zip(rows, suffix, strict=True):
        known = {int(other): float(row[other]) for other in row.topk(alternatives).indices}
        places.append(Place(float(row[token]), {token: float(row[token]), **known}))
    return places


@pytest.mark.parametrize(
    "sampler",
    [
        Sampler(),
        Sampler(top_k=3),
        Sampler(temperature=0.5, top_k=5),
        Sampler(temperature=2, top_k=8, top_p=0.7),
        Sampler(top_k=1),
    ],
)
def test_a_sampler_gives_what_it_gives_with_the_full_distribution(sampler):
    torch.manual_seed(1)
    _, alternatives = alternatives_needed(sampler)
    seen, ranks = set(), (sampler.top_k or 5) + 1
    for _ in range(100):
        logits = 2 * torch.randn(2, 50, dtype=torch.float64)
        suffix = [int(row.topk(ranks).indices[torch.randint(ranks, ())]) for row in logits]
        expected = float(sampler.logprobs(logits, torch.tensor(suffix)).sum())
        score = score_of(
            sample_of(*suffix), places_of(logits, suffix, alternatives), sampler=sampler, alternatives=alternatives
        )
        assert score.sampled_logprob == pytest.approx(expected, abs=1e-9)
        seen.add(math.isinf(expected))
        best = logits.clone()
        best[range(2), suffix] = -math.inf
        leads = logits[range(2), suffix] - best.amax(-1)
        assert score.choices == logits.argmax(-1).tolist() and score.leads == pytest.approx(leads.tolist())
    assert seen == ({False} if sampler == Sampler() else {False, True})


def test_how_many_are_needed():
    assert alternatives_needed(None) == alternatives_needed(Sampler(top_p=1.0)) == (2, 2)
    assert alternatives_needed(Sampler(top_k=1)) == (2, 2)
    assert alternatives_needed(Sampler(top_k=40, top_p=0.9, temperature=0.8)) == (41, 80)


def test_equal_tokens_beyond_the_kth_leave_the_sampler_open():
    sampler = Sampler(top_k=2)
    place = Place(math.log(0.4), {3: math.log(0.4), 5: math.log(0.2), 4: math.log(0.2), 6: math.log(0.2)})
    full = torch.tensor([[0.4, 0.2, 0.2, 0.2]], dtype=torch.float64).log()
    known = score_of(sample_of(3), [place], sampler=sampler, alternatives=4)
    assert known.sampled_logprob is None  # a fifth may equal them too
    further = Place(place.logprob, {**place.alternatives, 9: math.log(0.1)})
    known = score_of(sample_of(3), [further], sampler=sampler, alternatives=5)
    assert known.sampled_logprob == pytest.approx(float(sampler.logprobs(full, torch.tensor([0]))))


def test_of_equal_tokens_the_first_is_chosen_and_the_lead_is_nothing():
    tied = Place(-1.0, {7: -1.0, 4: -1.0})
    score = score_of(sample_of(7), [tied], sampler=None, alternatives=2)
    assert score.choices == [4] and score.margin == 0


def test_ranks_are_at_least_those_of_what_is_shown():
    torch.manual_seed(2)
    logits = torch.randn(6, 50, dtype=torch.float64)
    suffix = [int(row.argsort(descending=True)[place]) for place, row in enumerate(logits)]
    score = score_of(sample_of(*suffix), places_of(logits, suffix, 3), sampler=None, alternatives=3)
    assert score.ranks == [1, 2, 3, 4, 4, 4], "the true ones are 1 to 6"
    equal = [Place(-1.0, {5: -1.0, 6: -1.0, 7: -1.0})]
    assert score_of(sample_of(6), equal, sampler=None, alternatives=3).ranks == [1]
