"""A type of model that is in no table, as code that comes with a model: it imports nothing of this project."""

from __future__ import annotations

from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention


class OwnConfig(Gemma3TextConfig):
    """Sizes of `OwnForCausalLM`."""

    model_type = "of_own_making"


class OwnForCausalLM(Gemma3ForCausalLM):
    """Local and global attention in turn, and norms of two kinds."""

    config: OwnConfig
    config_class = OwnConfig  # which Transformers reads of the annotation, but not where that is a string

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.post_attention_layernorm = nn.LayerNorm(config.hidden_size)


class ReadingAttention(Gemma3Attention):
    """Attention whose code reads a number of the whole model."""

    def forward(self, hidden_states, **kwargs):
        """Return hidden states that are smaller with more heads, and the weights of these."""
        hidden_states, weights = super().forward(hidden_states, **kwargs)
        return hidden_states / self.config.num_attention_heads, weights


class ReadingForCausalLM(OwnForCausalLM):
    """Same, with that attention in the second layer."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.model.layers[1].self_attn = ReadingAttention(config, 1)
