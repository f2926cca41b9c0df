"""Finds a model: a GPT of AxoNN's paper by its name, or a dense family by its config.json. Models of other types:
hf_axonn/profiling/read_shape.py.

Plain Python: a config is read as JSON, no torch and no Transformers. What a config does not say (whether the MLP is
gated, which Linears have a bias, which norms there are) is known for the families in FAMILIES.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_axonn.planner.dense import DenseShape
from hf_axonn.planner.machine import read_json


# layers, hidden, heads. Source: branch gordon-bell-perlmutter of axonn-ai/Megatron-AxoNN; 320b and 640b: recalled
# from arXiv 2502.08145.
GPTS = {
    "gpt-5b": (24, 4096, 32),
    "gpt-10b": (32, 5120, 40),
    "gpt-20b": (32, 7168, 56),
    "gpt-40b": (38, 9216, 72),
    "gpt-60b": (56, 9216, 72),
    "gpt-80b": (42, 12288, 96),
    "gpt-160b": (84, 12288, 96),
    "gpt-175b": (96, 12288, 96),
    "gpt-320b": (96, 16384, 128),
    "gpt-640b": (192, 16384, 128),
}
GPT_VOCAB = 50304  # the vocabulary of GPT-2, padded as Megatron-LM does
GPT_POSITIONS = 2048

LLAMA: dict[str, Any] = {}
# Traits of a model type beyond its config's numbers. A key of the config (attention_bias, mlp_bias) holds over them.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "smollm3": LLAMA,
    "granite": LLAMA,
    "gemma": LLAMA,
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "gemma2": {"norms_per_layer": 4},
    "gemma3_text": {"norms_per_layer": 4, "qk_norm": True},
    "phi3": {"packed_qkv": True, "packed_mlp": True},
    "gpt2": {
        "gated": False,
        "layer_norm": True,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "packed_qkv": True,
        "tied": True,
        "ends_full": True,
    },
    "starcoder2": {
        "gated": False,
        "layer_norm": True,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "tied": True,
    },
    "opt": {
        "gated": False,
        "layer_norm": True,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "tied": True,
        "ends_full": True,
    },
}
# Which layers have a sliding window where a config has no layer_types, and the window if it does not say.
WINDOWED: dict[str, tuple[Callable[[int], bool], int]] = {
    "mistral": (lambda layer: True, 4096),
    "starcoder2": (lambda layer: True, 0),
    "phi3": (lambda layer: True, 0),
    "gemma2": (lambda layer: layer % 2 == 0, 4096),
    "gemma3_text": (lambda layer: layer % 6 != 5, 4096),
}
DROPOUTS = ("resid_pdrop", "dropout", "hidden_dropout", "residual_dropout")  # after an MLP
LEARNED_POSITIONS = {"gpt2": 0, "opt": 2}  # rows beyond max_position_embeddings
TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3_text", "gpt2", "starcoder2", "opt")
ALIASES = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
    "intermediate": ("intermediate_size", "ffn_dim", "n_inner"),
    "positions": ("max_position_embeddings", "n_positions"),
}


def gpt(name: str) -> DenseShape:
    """Make a GPT of the paper: MLP of four times the hidden size, LayerNorm, biases, embedding and head tied."""
    layers, hidden, heads = GPTS[name]
    return DenseShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        intermediate=4 * hidden,
        vocab=GPT_VOCAB,
        gated=False,
        tied=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        layer_norm=True,
        positions=GPT_POSITIONS,
    )


def load_shape(model: str) -> DenseShape:
    """Load the shape of a model.

    Args:
        model: a name of GPTS, a config.json, or a directory with one.
    Raises:
        ValueError: there is no such model, or its type is not one of FAMILIES.
    """
    if model in GPTS:
        return gpt(model)
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        if (Path(model) / "adapter_config.json").is_file():
            raise ValueError(f"{model} holds an adapter: give its base model, and the adapter's rank as --lora.")
        raise ValueError(
            f"there is no model {model!r}: give {', '.join(GPTS)}, a config.json, or a directory that has one."
        )
    return read_json(path, "config", shape_from_config)


def shape_from_config(config: dict[str, Any]) -> DenseShape:
    """Read the shape of a config.json's contents.

    Raises:
        ValueError: a type that is not in FAMILIES, or a size that is missing.
    """
    if not isinstance(config, dict):
        raise ValueError("it holds no keys.")
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(
            f"model_type is {kind!r}; the planner knows {', '.join(FAMILIES)}. For a model of another type take the "
            "config of one of these with the same sizes."
        )

    def size(name: str, default: int | None = None) -> int:
        values = [config[key] for key in ALIASES[name] if config.get(key) is not None]
        if not values and default is None:
            raise ValueError(f"it has no {' or '.join(ALIASES[name])}.")
        value = values[0] if values else default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{ALIASES[name][0]} is {value!r}, but it is a whole number above 0.")
        return value

    traits = dict(FAMILIES[kind])
    if kind in ("llama", "granite", "gemma", "smollm3") and config.get("attention_bias") is not None:
        traits["qkv_bias"] = traits["out_bias"] = bool(config["attention_bias"])
    if kind in ("llama", "granite", "smollm3") and config.get("mlp_bias") is not None:
        traits["mlp_bias"] = bool(config["mlp_bias"])
    if kind == "starcoder2" and config.get("use_bias") is not None:
        traits["qkv_bias"] = traits["out_bias"] = traits["mlp_bias"] = bool(config["use_bias"])
    if kind in LEARNED_POSITIONS:
        traits["positions"] = size("positions") + LEARNED_POSITIONS[kind]
        traits["offset_positions"] = LEARNED_POSITIONS[kind] > 0
    traits["drops"] = any(config.get(name) for name in DROPOUTS)
    tied = config.get("tie_word_embeddings")
    hidden, layers = size("hidden"), size("layers")
    traits["windows"] = _windows(config, kind, layers)
    traits["context"] = next((config[key] for key in ALIASES["positions"] if isinstance(config.get(key), int)), 0)
    return DenseShape(
        layers=layers,
        hidden=hidden,
        heads=size("heads"),
        kv_heads=config.get("num_key_value_heads"),
        head_dim=config.get("head_dim"),
        intermediate=size("intermediate", 4 * hidden if not traits.get("gated", True) else None),
        vocab=size("vocab"),
        **{**traits, "tied": kind in TIED_BY_DEFAULT if tied is None else bool(tied)},
    )


def _windows(config: dict[str, Any], kind: str, layers: int) -> tuple[int, ...]:
    """The sliding window of each layer, 0 for none."""
    slides, usual = WINDOWED.get(kind, (None, 4096))
    window = config.get("sliding_window", usual if slides else None) or 0
    types = config.get("layer_types")
    if isinstance(types, list) and len(types) == layers:
        return tuple(window if each == "sliding_attention" else 0 for each in types)
    if kind in ("qwen2", "qwen3") and config.get("use_sliding_window"):
        first = config.get("max_window_layers", 28)
        return tuple(window if layer >= first else 0 for layer in range(layers))
    return tuple(window if slides and slides(layer) else 0 for layer in range(layers))
