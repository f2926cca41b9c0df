"""Dense decoders: in a few numbers, by the name of a GPT of AxoNN's paper, or by the config.json of a dense family.

Plain Python: a config is read as JSON, no torch and no Transformers. What a config does not say (whether the MLP is
gated, which Linears have a bias, which norms there are) is known for the families in FAMILIES. Models of other types:
hf_axonn/profiling/read_shape.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from hf_axonn.planner.machine import read_json
from hf_axonn.planner.shapes import BlockShape, LayerShape, LinearShape, ModelShape, TableShape, WeightShape
from hf_axonn.topology.weight_kind import WeightKind


SMALLEST_PART = 1 / 64  # as in layers/gathered.py
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
GPT: dict[str, Any] = {"gated": False, "layer_norm": True, "tied": True}
GPT |= {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
# Traits of a model type beyond its config's numbers. A key of the config (attention_bias, mlp_bias) holds over them.
# num_key_value_heads and head_dim: what Transformers takes where a config does not name them.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": {"num_key_value_heads": 8},
    "smollm3": {"num_key_value_heads": 4},
    "granite": LLAMA,
    "gemma": {"num_key_value_heads": 16, "head_dim": 256},
    "qwen2": {"qkv_bias": True, "num_key_value_heads": 32},
    "qwen3": {"qk_norm": True, "num_key_value_heads": 32, "head_dim": 128},
    "gemma2": {"norms_per_layer": 4, "num_key_value_heads": 4, "head_dim": 256},
    "gemma3_text": {"norms_per_layer": 4, "qk_norm": True, "num_key_value_heads": 4, "head_dim": 256},
    "phi3": {"packed_qkv": True, "packed_mlp": True},
    "gpt2": GPT | {"packed_qkv": True, "ends_full": True},
    "starcoder2": GPT | {"num_key_value_heads": 2},
    "opt": GPT | {"ends_full": True},
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
TIED_BY_DEFAULT = ("smollm3", "gemma", "gemma2", "gemma3_text", "gpt2", "starcoder2", "opt")
ALIASES = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
    "intermediate": ("intermediate_size", "ffn_dim", "n_inner"),
    "positions": ("max_position_embeddings", "n_positions"),
}


@dataclass(frozen=True, kw_only=True)
class DenseShape(ModelShape):
    """A decoder-only transformer, all layers alike: attention and an MLP.

    Args:
        layers, hidden, heads, intermediate, vocab: sizes of the full model.
        kv_heads: key and value heads; None: as many as `heads`.
        head_dim: width of a head; None: hidden / heads.
        gated: whether the MLP multiplies two column layers (gate and up), or has one.
        qkv_bias, out_bias, mlp_bias: biases of q, k, v; of o; of both kinds of MLP layers.
        packed_qkv, packed_mlp: q, k, v are one Linear; gate and up are one Linear.
        layer_norm: LayerNorm with weight and bias, else RMSNorm with a weight.
        norms_per_layer: norms on the residual stream of one layer.
        qk_norm: RMSNorms [head_dim] of each query and key head.
        positions: rows of a learned position embedding [positions, hidden]; 0 for none.
        offset_positions: whether the class of the embedding shifts its positions, so that it is not a plain one.
        windows: of each layer, tokens that its attention looks back over at most; 0: all before. Empty: all 0.
        drops: whether features are dropped after the MLP (their mask is saved, so recomputation goes to the end).
        tied, head_bias, ends_full, max_positions, divides_layers, divides_rows: as in `ModelShape`.
    Raises:
        ValueError: a size is below 1, kv_heads does not divide heads, or windows are not as many as layers.
    """

    runs: tuple[tuple[LayerShape, int], ...] = field(init=False, repr=False)
    centered: bool = field(init=False, repr=False)
    final: tuple[int, ...] = field(init=False, repr=False)
    tables: tuple[TableShape, ...] = field(init=False, repr=False)
    layers: int
    heads: int
    intermediate: int
    kv_heads: int | None = None
    head_dim: int | None = None
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    packed_qkv: bool = False
    packed_mlp: bool = False
    layer_norm: bool = False
    norms_per_layer: int = 2
    qk_norm: bool = False
    positions: int = 0
    offset_positions: bool = False
    windows: tuple[int, ...] = ()
    drops: bool = False
    divides_layers: bool = True
    divides_rows: bool = True

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "intermediate", "vocab", "kv", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but a model has at least 1 of it.")
        if self.heads % self.kv:
            raise ValueError(f"{self.kv} kv heads do not divide {self.heads} query heads: use a divisor.")
        if self.windows and len(self.windows) != self.layers:
            raise ValueError(f"{len(self.windows)} windows are not those of {self.layers} layers.")
        # The fields of ModelShape that follow from these numbers. The class is frozen, and each needs those before it.
        object.__setattr__(self, "centered", self.layer_norm)
        object.__setattr__(self, "final", (self.hidden,) * (2 if self.layer_norm else 1))
        windows = groupby(self.windows or (0,) * self.layers)
        object.__setattr__(self, "runs", tuple((self._layer(window), len(list(run))) for window, run in windows))
        object.__setattr__(self, "tables", self._tables())

    @property
    def kv(self) -> int:
        """Number of kv heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def width(self) -> int:
        """Features of a head."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    def _tables(self) -> tuple[TableShape, ...]:
        """Table of positions: as the vocabulary if it is large, gathered if it is not small (parallel/install.py)."""
        if not self.positions:
            return ()
        largest = max(weight.elements for weight in self.runs[0][0].weights)
        small = self.positions * self.hidden < SMALLEST_PART * max(largest, self.vocab * self.hidden)
        plain = not self.offset_positions and 4 * self.positions >= self.vocab
        return (
            TableShape(
                WeightKind.VOCABULARY if plain else WeightKind.REPLICATED if small else WeightKind.GATHERED,
                self.positions,
            ),
        )

    @cached_property
    def attention(self) -> BlockShape:
        """The attention block of a layer."""
        query, kv = self.heads * self.width, self.kv * self.width
        rows = [query + 2 * kv] if self.packed_qkv else [query, kv, kv]
        return BlockShape(
            columns=tuple(LinearShape(size, self.hidden, self.qkv_bias) for size in rows),
            segments=(("query", "kv", "kv"),) if self.packed_qkv else (("query",), ("kv",), ("kv",)),
            row=LinearShape(self.hidden, query, self.out_bias),
            query=self.heads,
            kv=self.kv,
        )

    @cached_property
    def mlp(self) -> BlockShape:
        """The MLP of a layer."""
        count = 2 if self.gated else 1
        packed = self.gated and self.packed_mlp
        rows = [count * self.intermediate] if packed else [self.intermediate] * count
        return BlockShape(
            columns=tuple(LinearShape(size, self.hidden, self.mlp_bias) for size in rows),
            segments=(("own",) * count,) if packed else (("own",),) * count,
            row=LinearShape(self.hidden, self.intermediate, self.mlp_bias),
        )

    def _layer(self, window: int) -> LayerShape:
        """The layer with this window."""
        blocks = (replace(self.attention, window=window), self.mlp)
        replicated = [linear.rows for block in blocks for linear in block.linears if linear.bias]
        replicated += self.norms_per_layer * list(self.final) + ([self.width] * 2 if self.qk_norm else [])
        weights: list[WeightShape] = []
        for block in blocks:
            weights += [WeightShape(WeightKind.COLUMN, linear.rows, linear.cols) for linear in block.columns]
            weights.append(WeightShape(WeightKind.ROW, block.row.rows, block.row.cols))
        return LayerShape(
            parts=blocks,
            norms=self.norms_per_layer,
            weights=tuple(weights),
            replicated=tuple(replicated),
            # Two norms stand before the blocks; where there are more, one comes after the MLP and saves its input.
            ends=None if self.norms_per_layer > 2 or self.drops else 1,
        )


def gpt(name: str) -> DenseShape:
    """Make a GPT of the paper: MLP of four times the hidden size, LayerNorm, biases, embedding and head tied."""
    layers, hidden, heads = GPTS[name]
    return DenseShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        intermediate=4 * hidden,
        vocab=GPT_VOCAB,
        positions=GPT_POSITIONS,
        max_positions=GPT_POSITIONS,
        **GPT,
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
        return _whole(ALIASES[name][0], values[0] if values else default)

    traits = dict(FAMILIES[kind])
    usual = {key: traits.pop(key, None) for key in ("num_key_value_heads", "head_dim")}
    kv_heads, head_dim = (
        None if (value := config.get(key, usual[key])) is None else _whole(key, value) for key in usual
    )
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
    positions = [config[key] for key in ALIASES["positions"] if isinstance(config.get(key), int)]
    traits["max_positions"] = positions[0] if positions else 0
    return DenseShape(
        layers=layers,
        hidden=hidden,
        heads=size("heads"),
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=size("intermediate", 4 * hidden if not traits.get("gated", True) else None),
        vocab=size("vocab"),
        **{**traits, "tied": kind in TIED_BY_DEFAULT if tied is None else bool(tied)},
    )


def _whole(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} is {value!r}, but it is a whole number above 0.")
    return value


def _windows(config: dict[str, Any], kind: str, layers: int) -> tuple[int, ...]:
    """The sliding window of each layer, 0 for none."""
    slides, usual = WINDOWED.get(kind, (None, 4096))
    window = config.get("sliding_window", usual if slides else None) or 0
    window = window and _whole("sliding_window", window)
    types = config.get("layer_types")
    if isinstance(types, list) and len(types) == layers:
        return tuple(window if each == "sliding_attention" else 0 for each in types)
    if kind in ("qwen2", "qwen3") and config.get("use_sliding_window"):
        first = config.get("max_window_layers", 28)
        return tuple(window if layer >= first else 0 for layer in range(layers))
    return tuple(window if slides and slides(layer) else 0 for layer in range(layers))
