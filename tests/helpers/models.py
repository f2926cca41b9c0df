"""Tiny random models and batches whose sizes tell the axes apart."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.helpers.devices import rank_device


class UnlistedConfig(LlamaConfig):
    """The configuration of a model type that no table has."""

    model_type = "unlisted"


class UnlistedForCausalLM(LlamaForCausalLM):
    """A Llama under that type."""

    config: UnlistedConfig
    config_class = UnlistedConfig


AutoConfig.register("unlisted", UnlistedConfig)
AutoModelForCausalLM.register(UnlistedConfig, UnlistedForCausalLM)

BLOCKWISE = ("llama", "smollm2", "mistral", "qwen2", "qwen3")
# Of a tiny DeepSeek-V3, but for its number of routed experts.
DEEPSEEK = dict(
    n_group=2,
    topk_group=1,
    n_shared_experts=1,
    first_k_dense_replace=1,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=4,
    num_key_value_heads=12,
)


def tiny_config(kind: str, **changes):
    """A decoder with 12 query and 6 kv heads, hidden 48, intermediate 40, vocabulary 131: little divides by 4 or 3.

    smollm2 is a Llama with tied weights and 9 query and 3 kv heads, which 2 does not divide.
    """
    sizes = dict(
        hidden_size=48,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=12,
        num_key_value_heads=6,
        head_dim=4,
        vocab_size=131,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        attention_dropout=0.0,
    )
    if kind == "smollm2":
        sizes.update(num_attention_heads=9, num_key_value_heads=3, hidden_size=36, tie_word_embeddings=True)
    if kind == "mistral":
        sizes.update(sliding_window=5)
    kind = "llama" if kind == "smollm2" else kind
    # GPT-2 has no num_key_value_heads: one that it were given would be believed. A head_dim is read where it is given.
    known = AutoConfig.for_model(kind)
    # Falcon computes it.
    computed = {name for name in sizes if isinstance(getattr(type(known), name, None), property)}
    sizes = {name: value for name, value in sizes.items() if name == "head_dim" or hasattr(known, name)}
    sizes = {name: value for name, value in sizes.items() if name not in computed}
    return AutoConfig.for_model(kind, **sizes | changes)


def tiny_model(kind: str, *, dtype=torch.float64, seed: int = 0, attention: str = "sdpa", **changes):
    """A random model; its norms and biases are random too, because ones and zeros would hide mistakes.

    On the device of the rank that makes it, with the same numbers on every device.
    """
    with torch.device("cpu"):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(kind, **changes), attn_implementation=attention).to(dtype)
        generator = torch.Generator().manual_seed(seed + 1)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                noise = torch.randn(parameter.shape, generator=generator, dtype=dtype)
                parameter.data = (1.0 if "norm" in name else 0.0) + 0.3 * noise
    return model.to(rank_device())


def unplanned_model():
    """A model that has no block plan, as nobody has surveyed its type."""
    return tiny_model("unlisted", num_attention_heads=3, num_key_value_heads=3, hidden_size=24, head_dim=8)


def tiny_batch(rows: int, seq: int, vocab: int = 131, seed: int = 3) -> dict[str, torch.Tensor]:
    """A right-padded batch whose rows keep unequal numbers of labels, on the device of the rank that makes it."""
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, vocab, (rows, seq), generator=generator)
        labels = ids.clone()
        mask = torch.ones_like(ids)
        for row in range(rows):
            labels[row, : row % 3] = -100
            if row % 2:
                mask[row, seq - 1 - row % 4 :] = 0
                labels[row, seq - 1 - row % 4 :] = -100
        labels[0, 2:6] = -100
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {name: value.to(rank_device()) for name, value in batch.items()}
