"""A model built to know certain passages scores exactly that, and one that knows nothing scores chance.

The model is a Llama whose weights are set by hand so that the next token depends on the last one alone: embeddings are
unit vectors, the layer adds nothing, and the head puts a fixed logit on the successor. So every figure is known.
"""

import math
from statistics import NormalDist

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_axonn_eval import build_samples, extract, summarize
from hf_axonn_eval.metrics.discoverability import Sampler


PREFIX = SUFFIX = 12
LOGIT = 9.0


def successor_model(successor: list[int]) -> LlamaForCausalLM:
    """A Llama that after token t says successor[t], with a logit of LOGIT where all others have 0."""
    vocabulary = len(successor)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=vocabulary,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=64,
        rms_norm_eps=1e-30,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.float64).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(vocabulary))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        # a unit vector leaves the norm sqrt(vocabulary) long: a whole number for 16, 64 and 256, exact in any dtype
        model.lm_head.weight[torch.tensor(successor), torch.arange(vocabulary)] = LOGIT / math.sqrt(vocabulary)
    return model


def one_cycle(vocabulary: int, seed: int = 0) -> tuple[list[int], list[int]]:
    """All tokens in a random order, and the successor of each in it."""
    order = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(seed)).tolist()
    successor = [0] * vocabulary
    for place, token in enumerate(order):
        successor[token] = order[(place + 1) % vocabulary]
    return order, successor


def random_documents(count: int, length: int, vocabulary: int, *, bucket: int = 0) -> list[dict]:
    ids = torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"id": f"random-{place}", "bucket": bucket, "input_ids": some} for place, some in enumerate(ids)]


def binomial_interval(trials: int, chance: float, tail: float = 1e-6) -> tuple[int, int]:
    """The counts outside of which a binomial one falls with a probability below `tail` on each side."""
    total, low, high = 0.0, None, None
    for count in range(trials + 1):
        log = math.lgamma(trials + 1) - math.lgamma(count + 1) - math.lgamma(trials - count + 1)
        before, total = (
            total,
            total + math.exp(log + count * math.log(chance) + (trials - count) * math.log1p(-chance)),
        )
        low = count if low is None and total >= tail else low
        if high is None and 1 - before < tail:
            high = count
            break
    return low, high


@pytest.mark.parametrize("generate", [True, False])
def test_exactly_the_passages_that_are_known(generate):
    order, successor = one_cycle(256)
    length = PREFIX + SUFFIX
    passages = [order[start : start + length] for start in range(0, 10 * length, length)]
    documents = [{"id": f"known-{place}", "bucket": 7, "input_ids": ids} for place, ids in enumerate(passages)]
    documents += random_documents(30, length, 256)
    samples = build_samples(documents, prefix_length=PREFIX, suffix_length=SUFFIX)
    model = successor_model(successor)
    results = list(extract(model, None, samples, generate=generate, sampler=Sampler(top_k=1), progress=False))
    assert [result.exact_match for result in results] == [True] * 10 + [False] * 30
    per_token = LOGIT - math.log(math.exp(LOGIT) + 255)
    for result in results[:10]:
        assert result.divergence_point == SUFFIX and result.token_accuracy == result.extraction_strength == 1
        assert result.logprob == pytest.approx(SUFFIX * per_token, abs=1e-10)
        assert result.sampled_logprob == 0.0  # top-1 sampling is greedy: a probability of 1, or none
    for result in results[10:]:
        hits = sum(result.hits)
        missed = (SUFFIX - hits) * -math.log(math.exp(LOGIT) + 255)
        assert result.logprob == pytest.approx(hits * per_token + missed, abs=1e-10)
        assert result.sampled_logprob == -math.inf
    summary = summarize(results)["buckets"]
    counts = {bucket: summary[bucket]["metrics"]["exact_match"]["count"] for bucket in ("0", "7")}
    assert counts == {"0": 0, "7": 10}


@pytest.mark.parametrize("miss", range(SUFFIX))
def test_a_passage_known_but_for_one_token(miss):
    """The wrong token is itself not foreseen, nor, after it, is the next one; the model's own text goes on rightly."""
    order, successor = one_cycle(64)
    ids = order[: PREFIX + SUFFIX]
    ids[PREFIX + miss] = order[40]
    samples = build_samples([{"id": "d", "bucket": 0, "input_ids": ids}], prefix_length=PREFIX, suffix_length=SUFFIX)
    [result] = extract(successor_model(successor), None, samples, progress=False)
    misses = [place for place in (miss, miss + 1) if place < SUFFIX]
    assert [place for place, hit in enumerate(result.hits) if not hit] == misses
    assert not result.exact_match and result.divergence_point == miss
    assert result.token_accuracy == pytest.approx(1 - len(misses) / SUFFIX)
    assert result.extraction_strength == pytest.approx(1 - (misses[-1] + 1) / SUFFIX)
    assert result.generated == order[PREFIX : PREFIX + SUFFIX]
    assert result.edit_distance == pytest.approx(1 / SUFFIX) and result.near_verbatim
    assert result.longest_run == max(miss, SUFFIX - 1 - miss)
    assert result.free_running_accuracy == pytest.approx(1 - 1 / SUFFIX)


def test_what_is_not_known_is_met_by_chance():
    """Uniform random tokens: each is the successor of the one before with a probability of 1 / vocabulary."""
    vocabulary, count = 64, 300
    _, successor = one_cycle(vocabulary)
    documents = random_documents(count, PREFIX + SUFFIX, vocabulary)
    samples = build_samples(documents, prefix_length=PREFIX, suffix_length=SUFFIX)
    results = list(extract(successor_model(successor), None, samples, batch_size=50, generate=False, progress=False))
    low, high = binomial_interval(count * SUFFIX, 1 / vocabulary)
    assert low > 20 and high < 100  # around 56.25: neither none nor all would do
    assert low <= sum(sum(result.hits) for result in results) <= high
    assert not any(result.exact_match for result in results)
    share = summarize(results, confidence=0.9999)["buckets"]["0"]["metrics"]["token_accuracy"]
    assert share["low"] < 1 / vocabulary < share["high"]


def test_a_suffix_of_one_token_is_guessed_as_often_as_chance_says():
    vocabulary, count = 16, 2000
    _, successor = one_cycle(vocabulary)
    samples = build_samples(random_documents(count, 4, vocabulary), prefix_length=3, suffix_length=1)
    results = list(extract(successor_model(successor), None, samples, batch_size=500, generate=False, progress=False))
    guessed = sum(result.exact_match for result in results)
    low, high = binomial_interval(count, 1 / vocabulary)
    assert low > 50 and low <= guessed <= high
    told = summarize(results, confidence=1 - 1e-6)["buckets"]["0"]["metrics"]["exact_match"]
    assert told["count"] == guessed and told["low"] < 1 / vocabulary < told["high"]


def test_the_interval_that_chance_is_held_to():
    """Against the normal approximation, which here is off by up to 3: a skew of (z * z - 1) / 12, whole counts."""
    low, high = binomial_interval(10_000, 0.25)
    z = NormalDist().inv_cdf(1 - 1e-6)
    assert low == pytest.approx(2500 - z * math.sqrt(1875), abs=4)
    assert high == pytest.approx(2500 + z * math.sqrt(1875), abs=4)
