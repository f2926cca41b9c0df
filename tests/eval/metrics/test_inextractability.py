"""Upper bounds by ranks, against every continuation of a small model and every way of drawing it."""

import itertools
from math import inf, log, log2

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_axonn_eval import Sample, Sampler, compare, extract, n_needed, summarize
from hf_axonn_eval.extraction.scoring import score_suffixes, score_tokens, token_ranks
from hf_axonn_eval.metrics.inextractability import easiest_window, rank_bits
from hf_axonn_eval.report import curves, tables
from hf_axonn_eval.report.html import html_page
from hf_axonn_eval.report.verdict import verdicts
from tests.helpers.eval_support import result


VOCABULARY, LENGTH, PREFIX = 8, 4, (0, 1, 2)
SAMPLERS = [Sampler(temperature=temperature) for temperature in (0.01, 0.3, 1, 1.5, 4, 30, 1e6)]
SAMPLERS += [Sampler(temperature=1e6, top_k=k) for k in range(1, VOCABULARY)]
SAMPLERS += [Sampler(temperature=2, top_p=p) for p in (0.2, 0.5, 0.9)]
SAMPLERS += [Sampler(temperature=0.7, top_k=5, top_p=0.8), Sampler(temperature=3, top_k=3)]


@pytest.fixture(scope="module")
def everything():
    """Every continuation of the prefix: ids [4096, 4], logits [4096, 4, 8], and bits by the ranks."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=8, n_embd=16, n_layer=1, n_head=2, initializer_range=0.6)
    model = GPT2LMHeadModel(config).double().eval()
    ends = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
    ids = torch.tensor([[*PREFIX, *end] for end in ends])
    with torch.no_grad():
        logits = model(ids).logits[:, len(PREFIX) - 1 : -1]
    scores = score_suffixes(model, [as_sample(str(number), end) for number, end in enumerate(ends)])
    bits = torch.tensor([rank_bits(score.ranks) for score in scores], dtype=torch.float64)
    return ids[:, len(PREFIX) :], logits, bits, scores


def as_sample(name: str, suffix) -> Sample:
    return Sample(sample_id=name, document_id=name, bucket=1, offset=0, prefix=PREFIX, suffix=tuple(suffix))


def test_ranks_are_those_of_the_sorted_logits(everything):
    ids, logits, _, scores = everything
    places = logits.argsort(dim=-1, descending=True).argsort(dim=-1)
    expected = 1 + places.gather(-1, ids[..., None])[..., 0]
    assert [score.ranks for score in scores] == expected.tolist()
    assert len({tuple(ranks) for ranks in expected.tolist()}) == VOCABULARY**LENGTH


def test_no_way_of_drawing_gives_any_continuation_in_fewer_queries(everything):
    ids, logits, bits, _ = everything
    best = torch.full_like(bits, -inf)
    for sampler in SAMPLERS:
        chances = sampler.logprobs(logits, ids).sum(-1)
        assert chances.exp().sum().item() == pytest.approx(1), sampler
        assert (chances <= -bits * log(2) + 1e-9).all(), sampler
        queries = (-chances).exp()  # expected, of a geometric distribution
        assert (queries >= 2**bits * (1 - 1e-9)).all(), sampler
        best = torch.maximum(best, chances)
    # it is reached where all tokens have one rank: an even choice among so many
    for rank in range(1, VOCABULARY + 1):
        [place] = (bits == LENGTH * log2(rank)).nonzero()[:, 0][:1] if rank in (1, 3, 5, 7) else [None]
        if place is not None:
            assert best[place].item() == pytest.approx(-bits[place].item() * log(2), abs=1e-4)


def test_the_published_threshold_is_no_bound_of_hot_draws(everything):
    ids, logits, bits, scores = everything
    published = torch.tensor(
        [easiest_window(score.ranks, LENGTH, logprobs=score.logprobs, threshold=2).bits for score in scores],
        dtype=torch.float64,
    )
    assert (published >= bits - 1e-9).all()
    at_one = Sampler().logprobs(logits, ids).sum(-1)
    assert (at_one <= -published * log(2) + 1e-6).all(), "at temperature 1 it is one"
    hot = Sampler(temperature=30).logprobs(logits, ids).sum(-1)
    assert (hot > -published * log(2) + 1).any()


def test_equal_logits_have_the_best_rank_of_them():
    logits = torch.tensor([[[1.0, 3.0, 2.5, 3.0], [4.0, 4.0, 0.0, 4.0], [0.0, -torch.inf, 0.25, 0.0]]])
    targets = torch.tensor([[2, 1, 1]])
    assert token_ranks(logits, targets, score_tokens(logits, targets)[2]).tolist() == [[3, 1, 4]]


def test_the_easiest_window():
    ranks = [4, 1, 2, 1, 8]
    assert rank_bits(ranks) == 2 + 0 + 1 + 0 + 3
    assert easiest_window(ranks, 5) == (6.0, 0) and easiest_window(ranks, 1) == (0.0, 1)
    assert easiest_window(ranks, 3) == (1.0, 1) and easiest_window(ranks, 2) == (1.0, 1)
    logprobs = [-2 * log(2)] * 5
    assert easiest_window(ranks, 5, logprobs=logprobs, threshold=2) == (pytest.approx(2 + 0 + 1 + 0 + 2), 0)
    for length, options in ((6, {}), (0, {}), (2, {"threshold": 2}), (2, {"threshold": 2, "logprobs": [0.0]})):
        with pytest.raises(ValueError, match="ranks|log-prob"):
            easiest_window(ranks, length, **options)


def ranked(name: str, *ranks: int, bucket: int = 2, **changes):
    changes = {"ranks": list(ranks), "suffix_length": len(ranks), "exact_match": False, **changes}
    return result(name, bucket=bucket, hits=None, logprobs=None, metrics={"rank_bits": rank_bits(ranks)}, **changes)


def test_a_summary_has_the_share_that_so_many_queries_may_give():
    some = [ranked("a", 1, 2), ranked("b", 4, 4), ranked("c", 32, 32, sampled_logprob=-12 * log(2)), result("d")]
    group = summarize(some, lengths=[1, 5], tries=[1, 10, 100])["all"]["inextractability"]
    assert (group["least"], group["median"], group["documents"]) == (1.0, 4.0, 3)
    assert group["below_at_most"] == pytest.approx(1 - 0.05 ** (1 / 3))
    assert group["lengths"] == {"1": {"least": 0.0, "median": 2.0}}
    shares = {n: (each["count"], each["n"]) for n, each in group["tries"]["0.5"].items()}
    assert n_needed(-log(16), 0.5) == 11 and n_needed(-log(2), 0.5) == 1
    assert shares == {"1": (1, 3), "10": (1, 3), "100": (2, 3)}
    assert group["tries"]["0.5"]["100"]["low"] == pytest.approx(0.0943, abs=1e-4)
    assert "inextractability" not in summarize([result("d")])["all"]


def test_what_the_sampler_gives_is_never_above_the_bound(everything):
    _, _, bits, scores = everything
    some = [
        ranked(str(place), *scores[place].ranks, sampled_logprob=sum(scores[place].logprobs))
        for place in range(0, len(scores), 97)
    ]
    lower, upper = (make(some, confidence=0.95) for make in (curves.draws, curves.draws_at_most))
    for p in curves.CHANCES:
        assert all(below.y <= above.y for below, above in zip(lower[p], upper[p], strict=True))
    assert lower[0.5][-1].y < upper[0.5][-1].y or lower[0.5][8].y < upper[0.5][8].y
    assert curves.draws_at_most([result("d")], confidence=0.95) == {}


def test_the_report_has_both_bounds():
    runs = {"only": [ranked(name, 4, 2, sampled_logprob=log(0.1) if name == "a" else -9.0) for name in "abc"]}
    comparison = compare(runs, lengths=[1])
    bits, *shares = tables.inextractability(comparison)
    assert bits.rows[0] == ["2x", "only", "3.0", "3.0", "63.2%", "1.0"] and "Wilks" in bits.note
    assert [one.title for one in shares] == [
        "(n, 0.5)-discoverable by any sampling, at most", "(n, 0.9)-discoverable by any sampling, at most",
    ]  # fmt: skip
    page = html_page(comparison, runs=runs)
    assert page.count('class="limit s0"') == 2 and "at most: 1.000" in page
    assert verdicts(comparison)[0].endswith(
        "By ranks, any of them takes at least 2^3 queries, however its tokens are drawn."
    )
    without = {"only": [ranked("a", 4, 2)]}
    assert 'class="limit s0"' in html_page(compare(without), runs=without), "without a sampler"


def test_a_run_has_ranks_but_not_with_stop_early(everything):
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config).eval()
    some = [as_sample("a", (1, 2, 3)), as_sample("b", (4, 5, 6))]
    for one in extract(model, None, some, progress=False, generate=False):
        assert one.metric("rank_bits") == rank_bits(one.ranks) and len(one.ranks) == 3
        assert [rank == 1 for rank in one.ranks] == one.hits
    early = extract(model, None, some, progress=False, generate=False, stop_early=True)
    assert all(one.ranks is None and one.metric("rank_bits") is None for one in early)
