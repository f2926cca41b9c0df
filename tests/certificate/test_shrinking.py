"""Small models: what errors may hang on stays as it is."""

from __future__ import annotations

import json
import math

import pytest
from transformers import AutoConfig

from hf_axonn.certificate.shrinking import MOST_PARAMETERS, alike, config_of, shrink


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "gemma2", "gpt_oss", "phi", "qwen3_next"])
def test_heads_ties_and_divisors_stay(kind):
    config = config_of(kind)
    model = shrink(config, ranks=4)
    small = model.config
    for name in ("num_attention_heads", "n_head", "num_key_value_heads", "tie_word_embeddings", "hidden_act"):
        assert getattr(small, name, None) == getattr(config, name, None)
    for name in ("hidden_size", "n_embd", "vocab_size", "intermediate_size"):
        if isinstance(getattr(config, name, None), int):
            assert math.gcd(getattr(small, name), 4) == math.gcd(getattr(config, name), 4)
    kinds = set(getattr(config, "layer_types", None) or [])
    assert set(getattr(small, "layer_types", None) or []) == kinds
    assert sum(weight.numel() for weight in model.parameters()) < MOST_PARAMETERS
    assert all(bool(weight.any()) for weight in model.parameters())


def test_sizes_are_alike():
    assert alike(11008, 96, 2) % 8 == 0 and alike(50257, 160, 4) % 2 == 1
    assert alike(30, 160, 4) == 30
    assert math.gcd(alike(4098, 96, 6), 24) == math.gcd(4098, 24)


def test_a_directory_and_its_file_are_read(tmp_path):
    AutoConfig.for_model("qwen2", hidden_size=896, num_attention_heads=14, num_key_value_heads=2).save_pretrained(
        tmp_path
    )
    small = shrink(config_of(str(tmp_path)), ranks=2).config
    assert (small.num_attention_heads, small.num_key_value_heads) == (14, 2)
    assert small.hidden_size == 56
    assert config_of(str(tmp_path / "config.json")).hidden_size == 896


def test_a_model_has_the_layers_of_its_stages():
    assert shrink(config_of("llama"), ranks=4, layers=4).config.num_hidden_layers == 4


def test_what_is_no_causal_language_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="of which Transformers has no causal language model"):
        config_of("t5")
    with pytest.raises(ValueError, match="is no model: give a directory"):
        config_of(str(tmp_path / "nowhere"))


def test_a_type_that_cannot_be_made_small_is_refused(tmp_path):
    """Sizes without a common factor."""
    config = AutoConfig.for_model(
        "llama", hidden_size=8192, head_dim=4098, intermediate_size=8191, num_attention_heads=2
    )
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["head_dim"] == 4098
    with pytest.raises(ValueError, match="a model of type llama could not be made small"):
        shrink(config_of(str(tmp_path)), ranks=2)
