"""Tiny models of several families, and samples with answers that part from the suffix at many places."""

import functools
import random

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hf_axonn_eval import Sample


VOCABULARY = 96
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**_SIZES, num_key_value_heads=2)),
    "gpt2": (GPT2LMHeadModel, GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**_SIZES, num_key_value_heads=2, head_dim=8)),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig(**_SIZES)),
    # the window is shorter than every prefix, and what left it must not come back when a row is cut
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config(
            **_SIZES,
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=6,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
    ),
    "mamba": (MambaForCausalLM, MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4)),
}

MIXTURES = {
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **_SIZES,
            num_key_value_heads=2,
            head_dim=8,
            moe_intermediate_size=24,
            num_experts=4,
            num_experts_per_tok=2,
            experts_implementation="eager",
        ),
    ),
}


def family(name: str, dtype: torch.dtype = torch.float64):
    """A model with weights that make its answers differ from place to place."""
    torch.manual_seed(0)
    kind, config = (FAMILIES | MIXTURES)[name]
    config._attn_implementation = "eager" if name == "gemma2" else None
    model = kind(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3, generator=generator)
    return model


def generated(model, prefix, steps: int) -> list[int]:
    """What the definition says: `generate` under a neutral config, one sample at a time."""
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([list(prefix)])
    mask = torch.ones_like(prompt)
    output = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=steps, pad_token_id=0)
    return output[0, len(prefix) :].tolist()


def parting_samples(model, count: int, *, prefixes=(9, 16), suffixes=(5, 12)) -> list[Sample]:
    """Samples of mixed lengths. The suffix is what the model says, with a wrong token at a drawn place in most."""
    return samples_and_answers(model, count, prefixes=prefixes, suffixes=suffixes)[0]


def samples_and_answers(
    model, count: int, *, prefixes=(9, 16), suffixes=(5, 12)
) -> tuple[list[Sample], list[list[int]]]:
    """`parting_samples` and what `generate` says after each prefix."""
    draw = random.Random(0)
    made, answers = [], []
    for number in range(count):
        prefix = [draw.randrange(VOCABULARY) for _ in range(draw.randint(*prefixes))]
        suffix = generated(model, prefix, draw.randint(*suffixes))
        answers.append([*suffix])
        if number % 4:
            place = draw.randrange(len(suffix))
            suffix[place] = (suffix[place] + 1 + draw.randrange(VOCABULARY - 1)) % VOCABULARY
        made.append(
            Sample(
                sample_id=str(number),
                document_id=str(number),
                bucket=number % 2,
                offset=0,
                prefix=tuple(prefix),
                suffix=tuple(suffix),
            )
        )
    return made, answers


def fed_shapes(model) -> list[tuple[int, int]]:
    """The shapes of the tokens that the model is fed from now on; the list grows."""
    fed, forward = [], model.forward

    @functools.wraps(forward)
    def noted(input_ids, **options):
        fed.append(tuple(input_ids.shape))
        return forward(input_ids=input_ids, **options)

    model.forward = noted
    return fed
