"""Shapes of models whose type the planner does not know by name."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_axonn.built_shapes import built_shape, read_shape
from hf_axonn.cli import main
from hf_axonn.perf import models


SIZES = dict(hidden_size=48, intermediate_size=40, num_hidden_layers=3, num_attention_heads=6, vocab_size=131)
SIZES |= dict(max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, num_key_value_heads=3)
KNOWN = ("llama", "qwen2", "qwen3", "gemma2", "starcoder2", "phi3")  # read both ways, the same comes out


@pytest.mark.parametrize("kind", KNOWN)
def test_modules_say_what_the_families_say(kind):
    config = AutoConfig.for_model(kind, **SIZES, head_dim=8).to_dict()
    assert built_shape(config) == models.from_config(config)


UNKNOWN = {"ministral": {"head_dim": 8}, "helium": {"head_dim": 8}, "stablelm": {}, "cohere": {}, "glm": {}}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_type_that_is_not_known_by_name_is_built(kind, tmp_path):
    config = AutoConfig.for_model(kind, **SIZES | UNKNOWN[kind])
    assert kind not in models.FAMILIES
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = read_shape(str(tmp_path))
    assert shape.parameters() == sum(parameter.numel() for parameter in model.parameters())
    assert (shape.layers, shape.hidden, shape.heads, shape.kv, shape.intermediate) == (3, 48, 6, 3, 40)


def test_what_a_shape_cannot_describe_is_refused(tmp_path, capsys):
    config = AutoConfig.for_model("mixtral", **SIZES, num_local_experts=4)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model_type is 'mixtral', which the planner cannot describe: its layers are"):
        read_shape(str(tmp_path))
    command = ["plan", "--model", str(tmp_path), "--machine", "perlmutter", "--gpus", "4"]
    assert main([*command, "--batch-tokens", "1M", "--seq", "2048"]) == 2
    assert "cannot describe" in capsys.readouterr().err
    with pytest.raises(ValueError, match="norms of q and k span all heads"):
        built_shape(AutoConfig.for_model("olmo2", **SIZES).to_dict())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing-like-it"}))
    with pytest.raises(ValueError, match="'nothing-like-it', which cannot be built"):
        read_shape(str(tmp_path))
    with pytest.raises(ValueError, match="there is no model 'gpt-9b'"):
        read_shape("gpt-9b")
