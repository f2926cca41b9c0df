"""One teacher-forced pass against a loop that asks for one token at a time, and greedy decoding against `generate`."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from hf_axonn_eval import Sample, Sampler, document_nll, extract, read_run, summarize
from hf_axonn_eval.extraction import scoring
from hf_axonn_eval.extraction.decoding import continue_greedily
from hf_axonn_eval.extraction.scoring import (
    Score,
    check_fits,
    evaluating,
    first_choices,
    first_largest,
    may_be_padded,
    near_tie_below,
    score_suffixes,
    score_tokens,
)
from hf_axonn_eval.metrics import membership
from tests.helpers.eval_families import family
from tests.helpers.eval_support import PREFIX, SUFFIX, samples, tiny_gpt2, tiny_llama, topics_tokenizer, trained_llama


MODELS = {"llama": trained_llama, "gpt2": tiny_gpt2}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_scores_equal_asking_token_by_token(make):
    model = make().double()
    batch = samples()[4:8]
    for sample, score in zip(batch, score_suffixes(model, batch), strict=True):
        shown = list(sample.prefix)
        for place, token in enumerate(sample.suffix):
            with torch.no_grad():
                distribution = model(input_ids=torch.tensor([shown])).logits[0, -1].log_softmax(-1)
            assert score.logprobs[place] == pytest.approx(distribution[token].item(), abs=1e-10)
            assert score.choices[place] == distribution.argmax().item()
            shown.append(token)


def test_the_model_need_not_know_logits_to_keep():
    model = tiny_llama()
    forward = model.forward

    def without_it(input_ids, attention_mask, use_cache):
        return forward(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)

    expected = score_suffixes(model, samples()[:3])
    model.forward = without_it
    for score, wanted in zip(score_suffixes(model, samples()[:3]), expected, strict=True):
        assert score.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)


def test_bfloat16_logits_are_scored_in_float32():
    logits = torch.randn(2, 300, 50).bfloat16()
    targets = torch.randint(50, (2, 300))
    before = logits.clone()
    logprobs, choices, leads = score_tokens(logits, targets)
    assert torch.equal(logits, before)
    true = logits.float().gather(-1, targets[..., None])
    others = logits.float().scatter(-1, targets[..., None], -math.inf)
    assert torch.equal(leads, (true - others.amax(-1, keepdim=True))[..., 0])
    wanted = logits.float().log_softmax(-1)
    torch.testing.assert_close(logprobs, wanted.gather(-1, targets[..., None])[..., 0])
    assert logprobs.dtype == torch.float32 and torch.equal(choices, wanted.argmax(-1))


def test_nan_is_an_error_and_not_a_low_score():
    model = tiny_llama()
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="NaN"):
        score_suffixes(model, samples()[:1])


def reference(model, prompt, steps: int) -> list[int]:
    """Greedy decoding by hand: no generate, no cache, no padding."""
    tokens = list(prompt)
    for _ in range(steps):
        with torch.no_grad():
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_greedy_continuations_of_prompts_of_many_lengths(make):
    model = make().double()
    prompts = [sample.prefix[: 3 + place] for place, sample in enumerate(samples()[:8])]
    assert continue_greedily(model, prompts, steps=9) == [reference(model, prompt, 9) for prompt in prompts]


def test_the_models_generation_config_changes_nothing_and_is_kept():
    model = trained_llama().double()
    prompts = [sample.prefix for sample in samples()]
    neutral = [reference(model, prompt, SUFFIX) for prompt in prompts]
    common = max(range(len(topics_tokenizer())), key=lambda token: sum(row.count(token) for row in neutral))
    hindering = GenerationConfig(
        eos_token_id=common,
        repetition_penalty=1.9,
        no_repeat_ngram_size=2,
        suppress_tokens=[common],
        forced_bos_token_id=3,
        min_new_tokens=2,
        do_sample=True,
        temperature=5.0,
        num_beams=2,
        max_length=PREFIX + 2,
    )
    model.generation_config = hindering
    stock = model.generate(torch.tensor([prompts[0]]), attention_mask=torch.ones(1, PREFIX, dtype=torch.long))
    assert stock[0, PREFIX:].tolist() != neutral[0], "this config would hinder"
    assert continue_greedily(model, prompts, steps=SUFFIX) == neutral
    assert model.generation_config is hindering


def test_document_nll_is_the_sum_over_all_but_each_first_token():
    model = tiny_gpt2()
    texts = [sample.prefix + sample.suffix[:length] for length, sample in enumerate(samples()[:7])]
    expected = 0.0
    for tokens in texts:
        ids = torch.tensor([tokens])
        with torch.no_grad():
            expected += model(input_ids=ids, labels=ids).loss.item() * (len(tokens) - 1)
    for batch_size in (1, 3, 10):
        loss = document_nll(model, texts, batch_size=batch_size)
        assert loss.tokens == sum(len(tokens) - 1 for tokens in texts)
        assert loss.nll == pytest.approx(expected, rel=1e-5)
    assert loss.mean == loss.nll / loss.tokens


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([], {}, "one or more documents"),
        ([[1, 2], [3]], {}, "at least 2 tokens"),
        ([[1] * 65], {}, "65 tokens, but the model's window is 64"),
        ([[1, 800]], {}, "token id 800, but the model's vocabulary has 800 entries"),
        ([[1, 2]], {"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_document_nll_names_wrong_input(texts, options, message):
    assert len(topics_tokenizer()) == 800
    with pytest.raises(ValueError, match=message):
        document_nll(tiny_llama(), texts, **options)


def test_evaluating_restores_the_mode():
    model = tiny_llama()
    model.train()
    with evaluating(model):
        assert not model.training
    assert model.training


@pytest.mark.parametrize("size", [1, 255, 256, 511, 512, 513, 767, 1000, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_first_of_the_largest_is_found(size, dtype):
    torch.manual_seed(0)
    drawn = torch.randn(3, 50, size).to(dtype)
    assert torch.equal(first_largest(drawn), drawn.argmax(-1))
    # whole numbers: many are equally large, in a block and in several
    ties = torch.randint(0, 3, (3, 50, size)).to(dtype)
    first = [[row.tolist().index(row.max().item()) for row in rows] for rows in ties]
    assert first_largest(ties).tolist() == first
    for place in {0, size // 2, size - 1}:
        alone = torch.full((1, size), -torch.inf, dtype=dtype)
        alone[0, place] = -5
        assert first_largest(alone).tolist() == [place]
        alone[0, place] = torch.nan
        assert first_largest(alone).tolist() == [place], "as argmax says it"


def test_leads_and_choices_by_hand():
    logits = torch.tensor([[[1.0, 3.0, 2.5], [4.0, 4.0, 0.0], [0.0, 1.0, 0.25]]])
    kept, targets = logits.clone(), torch.tensor([[2, 1, 1]])
    logprobs, choices, leads = score_tokens(logits, targets)
    assert choices.tolist() == [[1, 0, 1]], "of equal ones the first"
    assert leads.tolist() == [[-0.5, 0.0, 0.75]], "of the true token before the best other one"
    assert logprobs[0, 0].item() == pytest.approx(2.5 - math.log(math.exp(1) + math.exp(3) + math.exp(2.5)))
    assert logprobs[0, 1].item() == pytest.approx(-math.log(2 + math.exp(-4)))
    alone = [column.tolist() for column in first_choices(logits, targets)]
    assert alone == [choices.tolist(), leads.tolist()]
    assert torch.equal(logits, kept)


@pytest.mark.parametrize(
    ("leads", "margin"),
    [
        ([3.0, 0.25, 2.0], 0.25),  # extracted: the closest other token
        ([3.0, -0.25, 2.0, -4.0], 4.0),  # not: every missed token has to move, so the furthest
        ([0.125, -0.25], 0.25),  # a token that was right stays as it is
        ([2.0, 0.0], 0.0),  # equal logits, whichever of them was chosen
        ([1.0, -math.inf], math.inf),  # a token that the model never says
    ],
)
def test_how_far_a_sample_is_from_the_other_answer(leads, margin):
    score = Score(logprobs=[-1.0] * len(leads), choices=[1] * len(leads), leads=leads)
    assert score.margin == margin


def test_a_sample_that_is_far_from_extracted_is_decided():
    """An untrained model: its first choices are close to each other, and some true tokens far from them."""
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight *= 0.8  # closer logits
    model.bfloat16()
    results = extract(model, None, samples(), progress=False, generate=False)
    scores = [score for sample in samples() for score in score_suffixes(model, [sample])]
    assert near_tie_below(model) == 0.5
    assert not any(result.exact_match or result.near_tie for result in results)
    undecided = summarize(results)["all"]["undecided"]
    assert (undecided["count"], undecided["exact_match_at_most"]) == (0, 0)
    first_misses = [next(lead for lead in score.leads if lead <= 0) for score in scores]
    assert min(first_misses) < -0.5 < max(first_misses), "at the first miss alone some would be"


def test_a_token_that_the_model_never_says_leaves_a_result_that_can_be_written(tmp_path):
    model = tiny_llama()
    [sample] = samples()[:1]
    never = sample.suffix[3]
    forward = model.forward

    def masked(**options):
        answer = forward(**options)
        answer.logits[..., never] = -math.inf
        return answer

    model.forward = masked
    options = {"output": tmp_path, "model_record": {"fingerprint": "masked"}}
    extract(model, None, [sample], progress=False, generate=False, **options)
    [result] = read_run(tmp_path)[1]
    assert result.margin == math.inf and not result.near_tie and result.logprob == -math.inf


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_more_logits_are_looked_at_together_than_fit(monkeypatch, dtype):
    logits = torch.randn(3, 7, 10).to(dtype)
    targets = torch.randint(10, (3, 7))
    whole, chosen = score_tokens(logits, targets), scoring._choices
    for most, rows in ((40, [4] * 5 + [1]), (49, [4] * 5 + [1]), (10, [1] * 21), (3, [1] * 21), (10_000, [21])):
        seen = []
        with monkeypatch.context() as patch:
            patch.setattr(scoring, "_LOGITS_AT_ONCE", {"cpu": most})
            patch.setattr(
                scoring, "_choices", lambda some, *true, seen=seen: seen.append(len(some)) or chosen(some, *true)
            )
            parts = score_tokens(logits, targets)
            assert seen == rows
            patch.setattr(scoring, "_LOGITS_AT_ONCE", {"elsewhere": 1})
            patch.setattr(scoring, "_LOGITS_AT_ONCE_ELSEWHERE", most)
            alone = first_choices(logits, targets)
            assert seen == rows * 2
        for one, other in zip(parts, whole, strict=True):
            assert torch.equal(one, other)
        assert torch.equal(alone[0], whole[1]) and torch.equal(alone[1], whole[2])
        assert whole[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_statistics_are_made_in_pieces_that_fit(monkeypatch):
    model, batch, sampler = tiny_llama(), samples()[:5], Sampler(top_k=9)
    options = {"sampler": sampler, "tokenizer": topics_tokenizer()}
    whole = score_suffixes(model, batch, **options)
    vocabulary, seen, places = len(topics_tokenizer()), [], []
    logprobs, statistics = Sampler.logprobs, membership.token_statistics

    def noted(self, logits, targets):
        seen.append(tuple(logits.shape))
        return logprobs(self, logits, targets)

    def noted_too(logits, targets):
        places.append(len(logits))
        return statistics(logits, targets)

    monkeypatch.setattr(Sampler, "logprobs", noted)
    monkeypatch.setattr(membership, "token_statistics", noted_too)
    scored = len(batch) * (PREFIX + SUFFIX - 1)
    for most, rows, pieces in (
        (2 * SUFFIX * vocabulary, [2, 2, 1], 2 * SUFFIX),
        (1, [1] * 5, 1),
        (10 * SUFFIX * vocabulary, [5], 10 * SUFFIX),
    ):
        monkeypatch.setattr(scoring, "_STATISTICS_AT_ONCE", most)
        seen.clear(), places.clear()
        parts = score_suffixes(model, batch, **options)
        assert seen == [(some, SUFFIX, vocabulary) for some in rows]
        assert sum(places) == scored and set(places[:-1]) <= {pieces} and places[-1] <= pieces
        for one, other in zip(parts, whole, strict=True):
            assert one.sampled_logprob == pytest.approx(other.sampled_logprob)
            assert one.membership == pytest.approx(other.membership)


class Grid:
    """What `parallel_state` says of a model on a grid."""

    def __init__(self, **sizes):
        self.grid = SimpleNamespace(**{"data": 1, "z": 1, "y": 1, "x": 1, **sizes})


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.float16, 1 / 16), (torch.bfloat16, 0.5), (torch.int8, 0.5)],
)
def test_below_which_margin_a_sample_is_a_near_tie(monkeypatch, dtype, bound):
    model = SimpleNamespace(parameters=lambda: iter([torch.zeros(1, dtype=dtype)]))
    for sizes, times in (({}, 1), ({"data": 4, "z": 4}, 1), ({"y": 2}, 2), ({"x": 3}, 2), ({"x": 2, "y": 2}, 2)):
        monkeypatch.setattr(scoring, "parallel_state", lambda model, sizes=sizes: Grid(**sizes))
        assert near_tie_below(model) == times * bound
    monkeypatch.setattr(scoring, "parallel_state", lambda model: None)
    assert near_tie_below(model) == bound


def test_what_fits_to_the_last_token():
    model = tiny_llama()
    check_fits(model, longest=64, largest_id=799)
    with pytest.raises(ValueError, match="65 tokens, but the model's window is 64"):
        check_fits(model, longest=65, largest_id=799)
    with pytest.raises(ValueError, match="token id 800"):
        check_fits(model, longest=64, largest_id=800)
    unbounded = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=3)))
    check_fits(unbounded, longest=10**6, largest_id=2)


def test_where_rows_may_be_padded():
    def padded(implementation, dtype):
        model = tiny_llama().to(dtype)
        model.config._attn_implementation = implementation
        return may_be_padded(model)

    assert padded("sdpa", torch.float64) and padded("eager", torch.float32) and padded("sdpa", torch.float32)
    assert not padded("eager", torch.float64), "the smallest number of float64 is no number in float32"
    prompted = tiny_llama()
    prompted.active_peft_config = SimpleNamespace(is_prompt_learning=True)
    assert not may_be_padded(prompted) and not may_be_padded(family("mamba"))


@pytest.mark.parametrize(("documents", "reported"), [(1, "1/1"), (3, "1/1"), (7, "3/3")])
def test_progress_counts_batches_and_is_shown_if_asked(documents, reported, capsys):
    texts = [sample.prefix for sample in samples()[:documents]]
    loss = document_nll(tiny_llama(), texts, batch_size=3, progress=True)
    assert reported in capsys.readouterr().err and loss.tokens == documents * (PREFIX - 1)
    assert document_nll(tiny_llama(), texts, batch_size=3) == loss
    assert capsys.readouterr().err == ""


def test_the_shortest_documents_have_one_token_to_foresee():
    loss = document_nll(tiny_llama(), [[1, 2]])
    [score] = score_suffixes(
        tiny_llama(),
        [Sample(sample_id="a", document_id="a", bucket=0, offset=0, prefix=(1,), suffix=(2,))],
    )
    assert loss.tokens == 1 and loss.nll == pytest.approx(-score.logprobs[0], rel=1e-6)
