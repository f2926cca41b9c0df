"""(n, p)-discoverability: the distribution that is drawn from, and the number of draws."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_axonn_eval.metrics.discoverability import CHANCES, TRIES, Sampler, is_discoverable, n_needed


SAMPLERS = [
    {},
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 10_000},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"top_p": 1.0},
    {"temperature": 1.5, "top_k": 7, "top_p": 0.8},
]


def warped(options, logits):
    """The distribution [N, V] that `generate` draws from, by Transformers' own warpers."""
    warpers = LogitsProcessorList()
    if "temperature" in options:
        warpers.append(TemperatureLogitsWarper(options["temperature"]))
    if "top_k" in options:
        warpers.append(TopKLogitsWarper(options["top_k"]))
    if options.get("top_p", 1.0) < 1:
        warpers.append(TopPLogitsWarper(options["top_p"]))
    return warpers(None, logits.float()).log_softmax(-1)


@pytest.mark.parametrize("options", SAMPLERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_distribution_is_that_of_transformers_warpers(options, dtype):
    torch.manual_seed(0)
    logits = torch.randn(4, 9, 60).mul(3).to(dtype)  # in bfloat16 many logits tie
    logits[0, 0] = 1.0  # all of them
    every = torch.arange(60).expand(4, 9, 60)
    mine = torch.stack([Sampler(**options).logprobs(logits, every[..., token]) for token in range(60)], dim=-1)
    truth = warped(options, logits.view(36, 60)).view(4, 9, 60)
    assert torch.equal(mine.isinf(), truth.isinf())
    torch.testing.assert_close(mine, truth, rtol=0, atol=2e-6)  # float32, of values around 10
    torch.testing.assert_close(mine.exp().sum(-1), torch.ones(4, 9))


def test_generate_uses_these_warpers_in_this_order():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=2)).eval()
    options = {"temperature": 0.3, "top_k": 8, "top_p": 0.8}
    config = GenerationConfig(do_sample=True, max_new_tokens=12, pad_token_id=0, **options)
    config.update(return_dict_in_generate=True, output_scores=True, output_logits=True)
    output = model.generate(torch.tensor([[1, 2, 3]]), generation_config=config)
    drawn = output.sequences[0, 3:]
    mine = Sampler(**options).logprobs(torch.stack(output.logits, dim=1)[0], drawn)
    scores = torch.stack(output.scores, dim=1)[0].log_softmax(-1)
    assert scores.isinf().sum() > 0
    torch.testing.assert_close(mine, scores.gather(-1, drawn[:, None])[:, 0])


def test_by_hand():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64).log()
    assert Sampler().logprobs(logits, torch.tensor(1)).exp().item() == pytest.approx(0.25)
    assert Sampler(top_k=2).logprobs(logits, torch.tensor(1)).exp().item() == pytest.approx(1 / 3)
    assert Sampler(top_k=2).logprobs(logits, torch.tensor(2)).item() == -math.inf
    assert Sampler(top_p=0.7).logprobs(logits, torch.tensor(0)).exp().item() == pytest.approx(2 / 3)
    assert Sampler(temperature=0.5).logprobs(logits, torch.tensor(0)).exp().item() == pytest.approx(8 / 11)


def test_the_text_of_a_sampler_names_all_of_it():
    assert Sampler().text == "temperature 1"
    assert Sampler(temperature=0.7, top_k=40, top_p=0.95).text == "temperature 0.7, top-k 40, top-p 0.95"


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0}, {"temperature": math.inf}, {"temperature": True}, {"top_k": 0}, {"top_k": 1.5}]
    + [{"top_p": 0.0}, {"top_p": 1.1}, {"top_p": math.nan}],
    ids=str,
)
def test_a_sampler_that_cannot_be_is_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} is .* must be"):
        Sampler(**options)


@pytest.mark.parametrize(
    ("probability", "p", "n"),
    [(1.0, 0.9, 1), (0.5, 0.5, 1), (0.5, 0.75, 2), (0.5, 0.76, 3), (0.1, 0.5, 7), (0.1, 0.9, 22), (0.95, 0.5, 1)],
)
def test_draws_needed_by_hand(probability, p, n):
    # 1 - 0.9^6 = 0.469, 1 - 0.9^7 = 0.522; 1 - 0.9^21 = 0.891, 1 - 0.9^22 = 0.902
    assert n_needed(math.log(probability), p) == n
    assert is_discoverable(math.log(probability), n, p)
    assert n == 1 or not is_discoverable(math.log(probability), n - 1, p)


def test_draws_needed_of_the_tiniest_probabilities():
    # log(1 - p) / log(1 - q) is -log(1 - p) / q to 16 digits, where 1 - q is 1 in floating point
    assert n_needed(-50.0, 0.5) == pytest.approx(math.log(2) * math.exp(50.0))
    assert n_needed(-700.0, 0.9) == pytest.approx(math.log(10) * math.exp(700.0))
    assert n_needed(-2000.0, 0.5) == n_needed(-math.inf, 0.5) == math.inf
    assert not is_discoverable(-math.inf, 10**9, 0.5)
    assert n_needed(1e-6, 0.9) == n_needed(-1e-20, 0.9) == 1  # certain, but for rounding


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (SimpleNamespace(logprob=0.5, n=1, p=0.5), "at most 0"),
        (SimpleNamespace(logprob=math.nan, n=1, p=0.5), "nan"),
        (SimpleNamespace(logprob=-1.0, n=1, p=1.0), "p is 1.0"),
        (SimpleNamespace(logprob=-1.0, n=0, p=0.5), "tries are"),
    ],
)
def test_what_is_no_probability_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        is_discoverable(**vars(arguments))


def test_the_bounds_of_what_is_a_sampler():
    Sampler(temperature=1e-9, top_k=1, top_p=1e-9), Sampler(temperature=3, top_p=1)
    for options in ({"temperature": -1.0}, {"top_k": -1}, {"top_p": -0.1}, {"top_p": True}, {"temperature": "1"}):
        with pytest.raises(ValueError, match="must be"):
            Sampler(**options)
    with pytest.raises(AttributeError):
        Sampler().temperature = 2.0


def test_the_bounds_of_what_is_a_probability():
    assert n_needed(0.0, 0.5) == n_needed(1e-3, 0.5) == 1, "certain, up to rounding"
    assert n_needed(math.log(1 - 1e-9), 5e-324) == 1, "never fewer than one"
    assert n_needed(math.log(0.5), 1e-9) == 1 and n_needed(math.log(0.5), 1 - 2**-20) == 20
    for wrong in (0.0, 1.0, -0.1, 1.1):
        with pytest.raises(ValueError, match="above 0 and below 1"):
            n_needed(-1.0, wrong)
    with pytest.raises(ValueError, match="at most 0"):
        n_needed(1.01e-3, 0.5)
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match="whole numbers of at least 1"):
            is_discoverable(-1.0, wrong, 0.5)
    assert is_discoverable(0.0, 1, 0.9)


def test_ties_at_the_edge_of_top_k_stay_together_and_all_is_kept_where_k_is_all():
    logits = torch.tensor([0.4, 0.2, 0.2, 0.2], dtype=torch.float64).log()
    every = [Sampler(top_k=2).logprobs(logits, torch.tensor(token)).exp().item() for token in range(4)]
    assert every == pytest.approx([0.4, 0.2, 0.2, 0.2]), "three are as large as the second"
    assert Sampler(top_k=4).logprobs(logits, torch.tensor(3)).exp().item() == pytest.approx(0.2)
    assert Sampler(top_p=0.39).logprobs(logits, torch.tensor(0)).item() == pytest.approx(0, abs=1e-12)


def test_the_numbers_that_summaries_give():
    assert CHANCES == (0.5, 0.9)
    assert TRIES == (1, 10, 100, 1000, 10_000, 100_000, 1_000_000)
