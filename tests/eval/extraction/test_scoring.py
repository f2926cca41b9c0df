"""One teacher-forced pass against a loop that asks for one token at a time, and greedy decoding against `generate`."""

import math

import pytest
import torch
from transformers import GenerationConfig

from hf_axonn_eval import document_nll
from hf_axonn_eval.extraction.decoding import continue_greedily
from hf_axonn_eval.extraction.scoring import evaluating, score_suffixes, score_tokens
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
    logprobs, choices, margins = score_tokens(logits, targets)
    assert torch.equal(logits, before)
    best = logits.float().topk(2).values
    assert torch.equal(margins, best[..., 0] - best[..., 1])
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
