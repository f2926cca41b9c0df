"""Lower bounds for near copies: against all continuations of a small model, and against what is known of one pass."""

import itertools
from math import exp, inf, log

import pytest
import torch
from rapidfuzz.distance import Levenshtein
from transformers import GPT2Config, GPT2LMHeadModel

from hf_axonn_eval import Sample, Sampler, extract, read_run
from hf_axonn_eval.extraction import kv_cache
from hf_axonn_eval.extraction.decoding import continue_greedily
from hf_axonn_eval.extraction.near_copies import NearCopySearch, near_copies
from hf_axonn_eval.extraction.scoring import score_suffixes
from tests.helpers.eval_support import SUFFIX, samples, trained_llama


VOCABULARY, LENGTH = 5, 5


@pytest.fixture(scope="module")
def model():
    """A random model that is sure enough of some tokens for continuations to differ much in probability."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=1, n_head=2, initializer_range=0.6)
    return GPT2LMHeadModel(config).double().eval()


def sample(suffix, *, prefix=(0, 1, 2), sample_id="a") -> Sample:
    return Sample(sample_id=sample_id, document_id="a", bucket=1, offset=0, prefix=tuple(prefix), suffix=tuple(suffix))


def all_within(model, asked: Sample, edits: int, sampler: Sampler) -> list[float]:
    """The probability of all continuations within 0, 1, ... edits, by asking for every one of them."""
    ends = list(itertools.product(range(VOCABULARY), repeat=len(asked.suffix)))
    ids = torch.tensor([[*asked.prefix, *end] for end in ends])
    with torch.no_grad():
        logits = model(ids).logits[:, len(asked.prefix) - 1 : -1]
    chances = sampler.logprobs(logits, ids[:, len(asked.prefix) :]).sum(-1).exp().tolist()
    distances = [Levenshtein.distance(end, asked.suffix) for end in ends]
    return [
        sum(chance for chance, distance in zip(chances, distances, strict=True) if distance <= edit)
        for edit in range(edits + 1)
    ]


def greedily(model) -> list[int]:
    """What follows the prefix (0, 1, 2)."""
    return continue_greedily(model, [[0, 1, 2]], steps=LENGTH)[0]


SAMPLERS = [Sampler(), Sampler(temperature=0.7, top_k=3), Sampler(top_p=0.8)]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda its: its.text)
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_with_room_for_all_it_is_the_probability_of_all_near_copies(model, changed, sampler):
    likely = greedily(model)
    asked = sample([(token + 1) % VOCABULARY if place < changed else token for place, token in enumerate(likely)])
    (found,) = near_copies(model, [asked], NearCopySearch(edits=3, beams=VOCABULARY**LENGTH), sampler=sampler)
    truth = all_within(model, asked, 3, sampler)
    assert [exp(logprob) for logprob in found.logprobs] == pytest.approx(truth, rel=1e-9, abs=1e-300)
    assert truth[3] > truth[0]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda its: its.text)
def test_few_beams_give_a_lower_bound_that_grows_with_them(model, sampler):
    asked = sample(greedily(model))
    truth = all_within(model, asked, 2, sampler)
    before = [0.0] * 3
    for beams in (1, 4, 16, 64):
        (found,) = near_copies(model, [asked], NearCopySearch(edits=2, beams=beams), sampler=sampler)
        bounds = [exp(logprob) for logprob in found.logprobs]
        assert all(bound <= true * (1 + 1e-9) for bound, true in zip(bounds, truth, strict=True))
        assert bounds[0] == pytest.approx(truth[0], rel=1e-9)  # the suffix itself is never dropped
        assert bounds[2] >= before[2]
        assert found.read <= beams * (LENGTH - 1)
        before = bounds
    assert before[2] > 0.9 * truth[2]


def test_samples_together_are_as_alone_and_with_a_cache_as_without(model, monkeypatch):
    asked = [sample((1, 2, 3, 4, 0)), sample((0, 0, 3, 1, 1), prefix=(4, 4, 4), sample_id="b")]
    alone = [near_copies(model, [one], NearCopySearch(edits=2, beams=6))[0] for one in asked]
    together = near_copies(model, asked, NearCopySearch(edits=2, beams=6))
    monkeypatch.setattr(kv_cache, "can_be_kept", lambda model: False)
    without = near_copies(model, asked, NearCopySearch(edits=2, beams=6))
    for one, other, third in zip(alone, together, without, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, rel=1e-9)
        assert one.logprobs == pytest.approx(third.logprobs, rel=1e-9)
        assert one.read == other.read == third.read


def test_without_edits_it_is_the_probability_of_the_suffix(model):
    asked = sample((1, 2, 3, 4, 0))
    (score,) = score_suffixes(model, [asked])
    (found,) = near_copies(model, [asked], NearCopySearch(edits=0, beams=20))
    assert found.logprobs == pytest.approx([sum(score.logprobs)])
    assert found.read == LENGTH - 1  # one row: nothing else can end as the suffix


def test_a_suffix_that_is_never_drawn_has_near_copies_that_are(model):
    greedy = Sampler(top_k=1)
    first = greedily(model)
    changed = [*first[:2], (first[2] + 1) % VOCABULARY, *first[3:]]
    (found,) = near_copies(model, [sample(changed)], NearCopySearch(edits=2, beams=3), sampler=greedy)
    assert found.logprobs[0] == -inf and found.logprobs[1] == pytest.approx(0, abs=1e-9)
    far = [(token + 1) % VOCABULARY for token in first]
    (found,) = near_copies(model, [sample(far)], NearCopySearch(edits=1, beams=3), sampler=greedy)
    assert found.logprobs == [-inf, -inf]


def test_of_a_trained_model_copies_with_an_edit_add_to_what_is_verbatim():
    known = [one for one in samples() if one.bucket]
    model = trained_llama()
    verbatim = [sum(score.logprobs) for score in score_suffixes(model, known)]
    for one, logprob in zip(near_copies(model, known, NearCopySearch(edits=2, beams=8)), verbatim, strict=True):
        assert one.logprobs[0] == pytest.approx(logprob, abs=1e-4)
        assert logprob < one.logprobs[1] < one.logprobs[2] <= 1e-6


def test_extract_searches_them_under_its_sampler(tmp_path):
    asked, options = samples()[:3], {"model_record": {"fingerprint": "f"}, "progress": False}
    search, sampler = NearCopySearch(edits=2, beams=4), Sampler(top_k=10)
    model = trained_llama()
    results = extract(model, None, asked, output=tmp_path, near_copies=search, sampler=sampler, **options)
    for one, result in zip(asked, results, strict=True):
        (wanted,) = near_copies(model, [one], search, sampler=sampler)
        assert result.near_copies == pytest.approx(wanted.logprobs, abs=1e-4)
        assert result.near_copies[0] == pytest.approx(result.sampled_logprob, abs=1e-4)
        assert result.near_copies_read == wanted.read <= 4 * (SUFFIX - 1)
    assert read_run(tmp_path)[1] == results
    with pytest.raises(ValueError, match="near_copies was '2 edits, 4 beams' and is '3 edits, 4 beams'"):
        other = NearCopySearch(edits=3, beams=4)
        extract(model, None, asked, output=tmp_path, near_copies=other, sampler=sampler, **options)
    with pytest.raises(ValueError, match="does not go with near_copies"):
        extract(model, None, asked, near_copies=search, stop_early=True, progress=False)
    with pytest.raises(ValueError, match=f"suffix of {SUFFIX} tokens"):
        extract(model, None, asked, near_copies=NearCopySearch(edits=SUFFIX), progress=False)


def test_what_cannot_be_asked(model):
    for options, problem in [({"edits": -1}, "edits is -1"), ({"beams": 0}, "beams is 0"), ({"edits": 1.5}, "1.5")]:
        with pytest.raises(ValueError, match=problem):
            NearCopySearch(**options)
    with pytest.raises(ValueError, match="5 edits, but there is a suffix of 5 tokens.*at most 4"):
        near_copies(model, [sample((1, 2, 3, 4, 0))], NearCopySearch())
    with pytest.raises(ValueError, match="several lengths"):
        near_copies(model, [sample((1, 2)), sample((1, 2, 3))], NearCopySearch(edits=1))


def test_the_logarithm_of_a_small_probability_is_kept(model):
    """A product of probabilities that a float cannot hold."""
    search, sure = NearCopySearch(edits=0, beams=1), Sampler(temperature=1e-3)
    (found,) = near_copies(model, [sample((1, 2, 3, 4, 0))], search, sampler=sure)
    assert found.logprobs[0] < log(5e-324)
