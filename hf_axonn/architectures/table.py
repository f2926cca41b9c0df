"""How the blocks of an architecture are named: from Transformers' tensor-parallel plans, and a table beside them.

A recipe names, relative to a decoder layer, the projections of one attention or MLP and what its code needs to know
of a rank's own heads. plan.py checks it against the model in hand. No communication, no model.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class BlockSpec:
    """One attention or MLP; names are relative to the decoder layer.

    Attributes:
        columns: projection -> what its output consists of, packed parts in order (topology/heads.py). Queries first.
        row: the projection that ends the block.
        entry: the module at whose input tokens become features.
        is_attention: whether it has heads.
        attributes, arguments: as in plans.BlockPlan.
        grouped: what is divided are kv heads, each together with its query heads.
        latent: modules inside of it that make whole latents of whole activations (layers/latent_attention.py), the one
            whose output ends in the rotary part of the keys first.
    """

    columns: dict[str, tuple[str, ...]]
    row: str
    entry: str
    is_attention: bool = False
    attributes: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    grouped: bool = False
    latent: tuple[str, ...] = ()


def attention(
    path: str,
    names: str,
    row: str,
    *,
    attributes: str = "",
    arguments: str = "",
    entry: str | None = None,
    grouped: bool = False,
) -> BlockSpec:
    """A recipe of attention at `path`; `names` as "q_proj k_proj v_proj", or "qkv:query,kv,kv" for a packed one.

    `attributes` as "num_heads:query num_kv_heads:kv", those without a colon hold query heads.
    """
    columns = {}
    for index, word in enumerate(names.split()):
        name, _, parts = word.partition(":")
        columns[_join(path, name)] = tuple(parts.split(",")) if parts else ("kv" if index else "query",)
    pairs = (word.partition(":") for word in attributes.split())
    kinds = {name: kind or "query" for name, _, kind in pairs}
    return BlockSpec(columns, _join(path, row), entry or path, True, kinds, tuple(arguments.split()), grouped)


def latent_attention(path: str, query: str) -> BlockSpec:
    """A recipe of multi-head latent attention, whose queries are made by `query`."""
    columns = {_join(path, name): ("query",) for name in (query, "kv_b_proj")}
    before = ["kv_a_proj_with_mqa", "kv_a_layernorm"] + (["q_a_proj", "q_a_layernorm"] if query == "q_b_proj" else [])
    latent = tuple(_join(path, name) for name in before)
    return BlockSpec(columns, _join(path, "o_proj"), path, True, latent=latent)


def mlp(path: str, names: str, row: str, *, entry: str | None = None) -> BlockSpec:
    """A recipe of an MLP at `path`; `names` as "gate_proj up_proj", or "gate_up:own,own" for a packed one."""
    columns = {}
    for word in names.split():
        name, _, parts = word.partition(":")
        columns[_join(path, name)] = tuple(parts.split(",")) if parts else ("own",)
    return BlockSpec(columns, _join(path, row), entry or path or next(iter(columns)))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


_BERT = [
    attention("", "attention.self.query attention.self.key attention.self.value", "attention.output.dense",
              entry="attention.self"),
    mlp("", "intermediate.dense", "output.dense", entry="intermediate"),
]  # fmt: skip
_BART = [attention("self_attn", "q_proj k_proj v_proj", "out_proj"), mlp("", "fc1", "fc2")]
_LLAMA = [attention("self_attn", "q_proj k_proj v_proj", "o_proj"), mlp("mlp", "gate_proj up_proj", "down_proj")]
_USUAL = [
    *_LLAMA,
    latent_attention("self_attn", "q_b_proj"),
    latent_attention("self_attn", "q_proj"),
    *(
        mlp(path, "gate_proj up_proj", "down_proj")
        for path in ("feed_forward", "shared_mlp", "mlp.shared_expert", "mlp.shared_experts", "mlp.shared_mlp",
                     "block_sparse_moe.shared_expert", "feed_forward.shared_expert")
    ),
    mlp("feed_forward", "w1 w3", "w2"),
]  # fmt: skip
_GPT2 = [
    attention("attn", "c_attn:query,kv,kv", "c_proj", attributes="split_size"),
    mlp("mlp", "c_fc", "c_proj"),
]


def _falcon_attention(config) -> BlockSpec:
    names = "num_heads num_kv_heads:kv"
    if config.new_decoder_architecture:  # a kv head with its query heads, its key and its value, one after another
        return attention("self_attention", "query_key_value:kv", "dense", attributes=names, grouped=True)
    parts = "query,kv,kv" if config.multi_query else "query"
    return attention("self_attention", f"query_key_value:{parts}", "dense", attributes=names)


# Architectures without a tensor-parallel plan in transformers 5.23, and those whose plan says too little.
TABLE: dict[str, list[BlockSpec] | Callable[[Any], list[BlockSpec]]] = {
    "gpt2": _GPT2,
    "gpt-sw3": _GPT2,
    "openai-gpt": [attention("attn", "c_attn:query,kv,kv", "c_proj", attributes="split_size n_head"),
                   mlp("mlp", "c_fc", "c_proj")],
    "opt": [attention("self_attn", "q_proj k_proj v_proj", "out_proj", attributes="num_heads"), mlp("", "fc1", "fc2")],
    "bloom": [
        attention("self_attention", "query_key_value:query", "dense", attributes="num_heads hidden_size",
                  arguments="alibi"),
        mlp("mlp", "dense_h_to_4h", "dense_4h_to_h"),
    ],
    "falcon": lambda config: [_falcon_attention(config), mlp("mlp", "dense_h_to_4h", "dense_4h_to_h")],
    "mpt": [
        attention("attn", "Wqkv:query,kv,kv", "out_proj", attributes="n_heads", arguments="position_bias"),
        mlp("ffn", "up_proj", "down_proj"),
    ],
    "gptj": [
        attention("attn", "q_proj k_proj v_proj", "out_proj", attributes="num_attention_heads"),
        mlp("mlp", "fc_in", "fc_out"),
    ],
    "gpt_neo": [
        attention("attn.attention", "q_proj k_proj v_proj", "out_proj", attributes="num_heads"),
        mlp("mlp", "c_fc", "c_proj"),
    ],
    "gpt_bigcode": lambda config: [
        attention("attn", f"c_attn:{'query,kv,kv' if config.multi_query else 'query'}", "c_proj",
                  attributes="embed_dim num_heads kv_dim:kv"),
        mlp("mlp", "c_fc", "c_proj"),
    ],
    "codegen": [mlp("mlp", "fc_in", "fc_out")],
    "gpt_neox": [
        attention("attention", "query_key_value:query", "dense"),
        mlp("mlp", "dense_h_to_4h", "dense_4h_to_h"),
    ],
    "gpt_neox_japanese": [
        attention("attention", "query_key_value:query", "dense", attributes="num_attention_heads"),
        mlp("mlp", "dense_h_to_4h", "dense_4h_to_h"),
    ],
    "persimmon": [
        attention("self_attn", "query_key_value:query", "dense", attributes="num_heads"),
        mlp("mlp", "dense_h_to_4h", "dense_4h_to_h"),
    ],
    "stablelm": [
        attention("self_attn", "q_proj k_proj v_proj", "o_proj", attributes="num_heads num_key_value_heads:kv"),
        mlp("mlp", "gate_proj up_proj", "down_proj"),
    ],
    "phi3": [
        attention("self_attn", "qkv_proj:query,kv,kv", "o_proj",
                  attributes="config.num_attention_heads num_key_value_heads:kv"),
        mlp("mlp", "gate_up_proj:own,own", "down_proj"),
    ],
    "xglm": [
        attention("self_attn", "q_proj k_proj v_proj", "out_proj", attributes="num_heads embed_dim"),
        mlp("", "fc1", "fc2"),
    ],
    "mllama": [
        attention("self_attn", "q_proj k_proj v_proj", "o_proj", attributes="num_heads num_key_value_heads:kv"),
        mlp("mlp", "gate_proj up_proj", "down_proj"),
    ],
    "whisper": [
        attention("self_attn", "q_proj k_proj v_proj", "out_proj", attributes="num_heads"),
        mlp("", "fc1", "fc2"),
    ],
    "trocr": [mlp("", "fc1", "fc2")],
    "mvp": [
        attention("self_attn", "q_proj k_proj v_proj", "out_proj", attributes="num_heads embed_dim"),
        mlp("", "fc1", "fc2"),
    ],
    "modernbert-decoder": [mlp("mlp", "Wi:own,own", "Wo")],
    "lfm2": [
        attention("self_attn", "q_proj k_proj v_proj", "out_proj"),
        mlp("feed_forward", "w1 w3", "w2"),
    ],
    "bamba": [
        attention("self_attn", "q_proj k_proj v_proj", "o_proj"),
        mlp("feed_forward", "gate_proj up_proj", "down_proj"),
    ],
    "falcon_h1": [
        attention("self_attn", "q_proj k_proj v_proj", "o_proj"),
        mlp("feed_forward", "gate_proj up_proj", "down_proj"),
    ],
    "jamba": [
        attention("self_attn", "q_proj k_proj v_proj", "o_proj"),
        mlp("feed_forward", "gate_proj up_proj", "down_proj"),
    ],
}  # fmt: skip
for _name in ("bitnet", "diffllama", "gpt_oss", "hunyuan_v1_dense", "emu3", "recurrent_gemma"):
    TABLE[_name] = _LLAMA
for _name in ("bart", "biogpt", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart",
              "bigbird_pegasus", "musicgen", "musicgen_melody", "prophetnet"):  # fmt: skip
    TABLE[_name] = _BART
for _name in ("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "git",
              "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta",
              "xlm-roberta-xl", "xmod"):  # fmt: skip
    TABLE[_name] = _BERT
TABLE["roberta-prelayernorm"] = [_BERT[0], mlp("", "intermediate.dense", "output.dense")]  # a norm comes before it
for _name in ("glm", "glm4"):
    TABLE[_name] = [_LLAMA[0], mlp("mlp", "gate_up_proj:own,own", "down_proj")]

# Their decoders reshape the last layer's output to [B, S, H].
LAYERS_OUTPUT_IS_RESHAPED = ("codegen", "gpt2", "gpt-sw3", "gpt_bigcode", "gpt_neo", "gptj")
# Model types whose plan tests/benchmarks/architectures/survey.py has compared with one process on every kind of grid.
CHECKED = frozenset(
    {
        "afmoe", "apertus", "arcee", "aria_text", "axk1", "axk2", "bailing_hybrid", "bamba", "bart", "beam", "bert",
        "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small", "bloom", "blt",
        "camembert", "codegen", "cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "cwm", "data2vec-text",
        "deepseek_v2", "deepseek_v3", "deepseek_v32", "diffllama", "doge", "dots1", "dots3_note", "dots3_note_text",
        "electra", "emu3", "ernie", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "falcon_h1",
        "flex_olmo", "flint", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma4_unified", "gemma4_unified_text",
        "git", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "got_ocr2", "gpt-sw3", "gpt2",
        "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "granite", "granite_swa", "granitemoe",
        "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe",
        "hy_v3", "hyperclovax", "inkling_text", "internlm3", "iquestcoder", "jais2", "jamba", "kimi_linear",
        "kolibri1", "laguna", "lfm2", "lfm2_moe", "lfm3", "llama", "llama4", "llama4_text", "marian", "mbart",
        "megatron-bert", "mellum", "minicpm3", "minimax", "minimax_m2", "minimax_m3_vl_text", "ministral",
        "ministral3", "mistral", "mixtral", "mllama", "modernbert-decoder", "moss_transcribe_diarize", "mpt", "mvp",
        "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "openai-gpt", "opt", "pegasus",
        "persimmon", "phi", "phi3", "phimoe", "plbart", "qwen2", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_moe",
        "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "rembert", "roberta", "roberta-prelayernorm",
        "roc_bert", "roformer", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "trocr", "vaultgemma",
        "whisper", "xglm", "xlm-roberta", "xlm-roberta-xl", "youtu", "zaya",
    }
)  # fmt: skip


def block_specs(model_type: str, tp_plan: dict[str, str], config: Any) -> list[BlockSpec]:
    """The recipes of an architecture.

    Args:
        model_type: as in the config.
        tp_plan: Transformers' plan, names with `layers.*.` in them -> style.
        config: of the decoder.
    """
    if model_type in TABLE:
        return TABLE[model_type](config) if callable(TABLE[model_type]) else TABLE[model_type]
    styles = {name.partition("layers.*.")[2]: style for name, style in tp_plan.items() if "layers.*." in name}
    grouped: dict[str, dict[str, list[str]]] = {}
    for name, style in styles.items():
        parent, _, child = name.rpartition(".")
        if child != "sinks" and not child.endswith("bias"):
            grouped.setdefault(parent, {"colwise": [], "rowwise": []}).get(style, []).append(child)
    recipes = []
    for parent, named in grouped.items():
        if not named["colwise"] or len(named["rowwise"]) != 1 or parent.rpartition(".")[2] == "experts":
            continue
        if "kv_b_proj" in named["colwise"]:
            recipes += [latent_attention(parent, query) for query in ("q_b_proj", "q_proj")]
        elif re.search("attn|attention", parent.rpartition(".")[2]):
            # k and v are of kv heads, everything else (queries, gates) is of query heads and comes first.
            by_kind = sorted(named["colwise"], key=lambda name: name[:2] in ("k_", "v_"))
            names = " ".join(f"{name}:{'kv' if name[:2] in ('k_', 'v_') else 'query'}" for name in by_kind)
            recipes.append(attention(parent, names, named["rowwise"][0]))
        else:
            recipes.append(mlp(parent, " ".join(named["colwise"]), named["rowwise"][0]))
    # Plans leave away what Transformers' own tensor parallelism keeps whole, such as attention beside experts.
    entries = {recipe.entry for recipe in recipes}
    return recipes + [recipe for recipe in _USUAL if recipe.entry not in entries]
