"""Names of the blocks of each model family: a row a family, and Transformers' tensor-parallel plans for the rest.

A row names, relative to a decoder layer, the projections of attention and MLP: "where: column layers -> row layer".
plan.py checks it against the model in hand. No communication, no model.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class BlockSpec:
    """One attention or MLP; names are relative to the decoder layer, "a.*.b" stands for each of a list that has a b.

    Attributes:
        columns: projection -> what its output consists of, packed parts in order (topology/heads.py). Queries first.
        row: the projection that ends the block. Projections of latent attention may be those of experts, each of which
            has a part of every head (layers/stacked_attention.py).
        entry: the module at whose input tokens become features.
        is_attention: whether it has heads.
        attributes, arguments: as in plan.BlockPlan.
        grouped: what is divided are kv heads, each together with its query heads.
        latent: modules inside of it that make full latents of full activations (layers/latent_attention.py).
        shared: those whose output every head uses -> the attribute of the entry that says how many of its last
            features; empty where it is all of them.
        parts: parameters of other modules inside of it -> the dim in which a rank has those of its heads alone; None
            where it is added to a sum over the ranks of the heads.
        groups: the name in the config of a number of groups of query heads, which are then what is divided.
        cross: whether its keys and values are made of other states than its queries, full ones.
        borrows: whether its keys and values are those of another layer.
        added: parameters of the entry, [H] each, that it returns for its layer to add to what the row layer gives.
    """

    columns: dict[str, tuple[str, ...]]
    row: str
    entry: str
    is_attention: bool = False
    attributes: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    grouped: bool = False
    latent: tuple[str, ...] = ()
    shared: dict[str, str] = field(default_factory=dict)
    parts: dict[str, int | None] = field(default_factory=dict)
    groups: str = ""
    cross: bool = False
    borrows: bool = False
    added: tuple[str, ...] = ()


def attention(
    text: str,
    attributes: str = "",
    *,
    arguments: str = "",
    entry: str = "",
    grouped: bool = False,
    latent: str = "",
    cross: bool = False,
    added: str = "",
) -> BlockSpec:
    """Describe attention, such as "self_attn: q_proj k_proj v_proj -> o_proj", or "attn: c_attn=query,kv,kv -> c_proj"
    where one projection packs queries, keys and values.

    `attributes` of its code that hold a number of heads, as in "num_heads num_kv_heads=kv"; query heads where nothing
    is said.
    """
    path, named, row = _parse(text)
    columns = {name: parts or (("kv",) if index else ("query",)) for index, (name, parts) in enumerate(named)}
    pairs = (word.partition("=") for word in attributes.split())
    kinds = {name: kind or "query" for name, _, kind in pairs}
    return BlockSpec(
        columns,
        row,
        entry or path,
        True,
        kinds,
        tuple(arguments.split()),
        grouped,
        latent=tuple(latent.split()),
        cross=cross,
        added=tuple(added.split()),
    )


def mlp(text: str, *, entry: str = "", latent: str = "") -> BlockSpec:
    """Describe an MLP: "mlp: gate_proj up_proj -> down_proj", or "mlp: gate_up=own,own -> down" for a packed one."""
    path, columns, row = _parse(text)
    parts = {name: parts or ("own",) for name, parts in columns}
    return BlockSpec(parts, row, entry or path or columns[0][0], latent=tuple(latent.split()))


def latent_attention(path: str, query: str) -> BlockSpec:
    """Describe multi-head latent attention, whose queries are made by `query`."""
    before = ["kv_a_proj_with_mqa", "kv_a_layernorm"] + (["q_a_proj", "q_a_layernorm"] if query != "q_proj" else [])
    columns = {_join(path, name): ("query",) for name in (query, "kv_b_proj")}
    latent = tuple(_join(path, name) for name in before)
    return BlockSpec(columns, _join(path, "o_proj"), path, True, latent=latent, shared={latent[0]: "qk_rope_head_dim"})


def _latent_attentions(path: str) -> list[BlockSpec]:
    # The second makes queries and gates, head by head.
    return [latent_attention(path, query) for query in ("q_b_proj", "q_gate_proj", "q_proj")]


def _parse(text: str) -> tuple[str, list[tuple[str, tuple[str, ...]]], str]:
    """Return (path, columns with packed parts, row) of "path: a b=x,y -> c"; names get the path, if there is one."""
    before, _, row = text.partition(" -> ")
    path, _, names = before.rpartition(": ")
    words = (word.partition("=") for word in names.split())
    columns = [(_join(path, name), tuple(filter(None, parts.split(",")))) for name, _, parts in words]
    return path, columns, _join(path, row)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# As `attention` and `mlp` read them.
_LLAMA = "self_attn: q_proj k_proj v_proj -> o_proj"
_BART = "self_attn: q_proj k_proj v_proj -> out_proj"
_CROSS = "encoder_attn: q_proj k_proj v_proj -> out_proj"
_GPT2 = "attn: c_attn=query,kv,kv -> c_proj"
_ADAPTED = "shared_transformer.feed_forward: gate_up_proj=own,own gate_up_proj_adapter_list.*.1=own,own -> down_proj"
_MOSHI = "self_attn: q_proj.linear k_proj.linear v_proj.linear -> o_proj.linear"
_BLOOM = "self_attention: query_key_value=query -> dense"
_MPT = "attn: Wqkv=query,kv,kv -> out_proj"
_PHI3 = "self_attn: qkv_proj=query,kv,kv -> o_proj"
_DENSE = "intermediate.dense -> output.dense"
_SELF = "attention.self.query attention.self.key attention.self.value -> attention.output.dense"
_BERT = attention(_SELF, entry="attention.self")
_GATED = mlp("mlp: gate_proj up_proj -> down_proj")
_PACKED = mlp("mlp: gate_up_proj=own,own -> down_proj")
_FEED_FORWARD = mlp("feed_forward: gate_proj up_proj -> down_proj")
_W1_W3 = mlp("feed_forward: w1 w3 -> w2")
_FC = mlp("fc1 -> fc2")
_FC_IN = mlp("mlp: fc_in -> fc_out")
_C_FC = mlp("mlp: c_fc -> c_proj")
_4H = mlp("mlp: dense_h_to_4h -> dense_4h_to_h")


def _falcon(config: Any) -> tuple[BlockSpec, ...]:
    # In the new architecture a kv head stands with its query heads, its key and its value, one after another.
    new = config.new_decoder_architecture
    parts = "kv" if new else "query,kv,kv" if config.multi_query else "query"
    text = f"self_attention: query_key_value={parts} -> dense"
    return attention(text, "num_heads num_kv_heads=kv", grouped=new), _4H


def _gpt_bigcode(config: Any) -> tuple[BlockSpec, ...]:
    parts = "query,kv,kv" if config.multi_query else "query"
    return attention(f"attn: c_attn={parts} -> c_proj", "embed_dim num_heads kv_dim=kv"), _C_FC


# Architectures without a tensor-parallel plan in transformers 5.23, and those whose plan says too little.
# Model types of the family: its blocks, or a function of the config that gives them.
FAMILIES: dict[str, tuple[BlockSpec, ...] | Callable[[Any], tuple[BlockSpec, ...]]] = {
    "bitnet diffllama emu3_text_model gpt_oss hunyuan_v1_dense": (attention(_LLAMA), _GATED),
    "stablelm mllama_text_model": (attention(_LLAMA, "num_heads num_key_value_heads=kv"), _GATED),
    "bamba falcon_h1 jamba": (attention(_LLAMA), _FEED_FORWARD),
    "glm glm4": (attention(_LLAMA), _PACKED),
    "phi3 phi4_multimodal": (attention(_PHI3, "config.num_attention_heads num_key_value_heads=kv"), _PACKED),
    "nemotron_h": (
        attention("mixer: q_proj k_proj v_proj -> o_proj"),
        mlp("mixer: up_proj -> down_proj"),
        mlp("mixer.shared_experts: up_proj -> down_proj"),
    ),
    "longcat_flash": (
        *(latent_attention(f"self_attn.{index}", "q_b_proj") for index in range(2)),
        *(mlp(f"mlps.{index}: gate_proj up_proj -> down_proj") for index in range(2)),
    ),
    "zamba": (
        attention("shared_transf.self_attn: q_proj k_proj v_proj -> o_proj"),
        mlp("shared_transf.feed_forward: gate_proj up_proj -> down_proj"),
    ),
    "zamba2": (
        attention("shared_transformer.self_attn: q_proj k_proj v_proj -> o_proj"),
        mlp(_ADAPTED, latent="shared_transformer.feed_forward.gate_up_proj_adapter_list.*.0"),
    ),
    "recurrent_gemma": (
        attention("temporal_block: q_proj k_proj v_proj -> o_proj"),
        mlp("mlp_block: gate_proj up_proj -> down_proj"),
    ),
    "jetmoe": (
        # An expert has queries and output of all heads; keys and values are those of all experts.
        BlockSpec(
            columns={"self_attention.experts.input_linear": ("query",), "self_attention.kv_proj": ("kv", "kv")},
            row="self_attention.experts.output_linear",
            entry="self_attention",
            is_attention=True,
            attributes={"experts.hidden_size": "query"},
            grouped=True,
            latent=("self_attention.experts.router",),
            shared={"self_attention.experts.router": ""},
            parts={
                "self_attention.experts.input_linear.weight": 1,
                "self_attention.experts.output_linear.weight": 2,
                "self_attention.experts.bias": None,
            },
        ),
    ),
    "dbrx": (attention("norm_attn_norm.attn: Wqkv=query,kv,kv -> out_proj", "hidden_size num_key_value_heads=kv"),),
    "deepseek_v4": (
        # One head of keys, which are its values too, beside keys of compressed rows; heads end in low ranks by groups.
        BlockSpec(
            columns={"self_attn.q_b_proj": ("query",)},
            row="self_attn.o_b_proj",
            entry="self_attn",
            is_attention=True,
            attributes=dict.fromkeys(("config.o_groups", "num_key_value_groups", "o_a_proj.n_groups"), "query"),
            latent=tuple(f"self_attn.{name}" for name in ("q_a_proj", "q_a_norm", "kv_proj", "kv_norm")),
            shared={"self_attn.kv_norm": "", "self_attn.compressor": ""},
            parts={"self_attn.o_a_proj.weight": 0},
            groups="o_groups",
        ),
        mlp("mlp.shared_experts: gate_proj up_proj -> down_proj"),
    ),
    "qwen4_exp_text": (
        attention(_LLAMA, latent="self_attn.indexer"),
        mlp("mlp.shared_expert: gate_proj up_proj -> down_proj"),
    ),
    "lfm2 lfm2_moe": (attention(_BART), _W1_W3),
    "bart bigbird_pegasus biogpt blenderbot blenderbot-small marian mbart "
    "musicgen_decoder musicgen_melody_decoder pegasus plbart prophetnet": (
        attention(_BART),
        attention(_CROSS, cross=True),
        _FC,
    ),
    "opt whisper": (attention(_BART, "num_heads"), attention(_CROSS, "num_heads", cross=True), _FC),
    "xglm mvp": (
        attention(_BART, "num_heads embed_dim"),
        attention(_CROSS, "num_heads embed_dim", cross=True),
        _FC,
    ),
    "trocr": (_FC,),
    "gpt2 gpt-sw3": (attention(_GPT2, "split_size"), _C_FC),
    "openai-gpt": (attention(_GPT2, "split_size n_head"), _C_FC),
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neo": (attention("attn.attention: q_proj k_proj v_proj -> out_proj", "num_heads"), _C_FC),
    "gptj": (attention("attn: q_proj k_proj v_proj -> out_proj", "num_attention_heads"), _FC_IN),
    "codegen": (_FC_IN,),
    "gpt_neox": (attention("attention: query_key_value=query -> dense"), _4H),
    "gpt_neox_japanese": (
        attention("attention: query_key_value=query -> dense", "num_attention_heads", added="dense_bias"),
        _4H,
    ),
    "fuyu persimmon": (attention("self_attn: query_key_value=query -> dense", "num_heads"), _4H),
    "bloom": (attention(_BLOOM, "num_heads hidden_size", arguments="alibi"), _4H),
    "falcon": _falcon,
    "mpt": (attention(_MPT, "n_heads", arguments="position_bias"), mlp("ffn: up_proj -> down_proj")),
    "modernbert-decoder": (attention("attn: q_proj k_proj v_proj -> Wo"), mlp("mlp: Wi=own,own -> Wo")),
    "moshi": (attention(_MOSHI, "num_heads num_key_value_heads=kv"), mlp("mlp: fc1=own,own -> fc2")),
    "bert bert-generation big_bird camembert data2vec-text electra ernie roberta roc_bert xlm-roberta "
    "xlm-roberta-xl xmod": (_BERT, mlp(_DENSE, entry="intermediate")),
    "git megatron-bert rembert roformer": (
        attention(_SELF, "all_head_size", entry="attention.self"),
        mlp(_DENSE, entry="intermediate"),
    ),
    "roberta-prelayernorm": (_BERT, mlp(_DENSE)),  # a norm comes before it
}
TABLE = {model_type: blocks for family, blocks in FAMILIES.items() for model_type in family.split()}
# Encoders of images, by the model types of their own configs, which have been compared with one process.
_QKV = attention("attn: qkv=query,kv,kv -> proj", "num_heads")
_TOWER_FAMILIES = {
    "idefics3_vision siglip_vision_model smolvlm_vision": (attention(_BART), mlp("mlp: fc1 -> fc2")),
    "qwen2_vl_vision": (_QKV, mlp("mlp: fc1 -> fc2")),
    "qwen2_5_vl_vision": (_QKV, _GATED),
    "qwen3_vl_moe_vision qwen3_vl_vision": (_QKV, mlp("mlp: linear_fc1 -> linear_fc2")),
}
TOWERS = {model_type: blocks for family, blocks in _TOWER_FAMILIES.items() for model_type in family.split()}
# What plans omit because Transformers' own tensor parallelism replicates it, such as attention beside experts.
_USUAL = (
    attention(_LLAMA),
    _GATED,
    *_latent_attentions("self_attn"),
    _FEED_FORWARD,
    mlp("shared_mlp: gate_proj up_proj -> down_proj"),
    mlp("shared_mlp: input_linear=own,own -> output_linear"),
    mlp("mlp.shared_expert: gate_proj up_proj -> down_proj"),
    mlp("mlp.shared_experts: gate_proj up_proj -> down_proj"),
    mlp("mlp.shared_experts: gate_up_proj=own,own -> down_proj"),
    mlp("mlp.shared_mlp: gate_proj up_proj -> down_proj"),
    mlp("block_sparse_moe.shared_expert: gate_proj up_proj -> down_proj"),
    mlp("feed_forward.shared_expert: gate_proj up_proj -> down_proj"),
    _W1_W3,
)

# Arguments of decoder layers with values for each token, [B, S, .], that the layers use as they use hidden states.
PER_TOKEN_ARGUMENTS = ("input_ids", "per_layer_input", "original_hidden_states")
# Their decoders reshape the last layer's output to [B, S, H].
LAYERS_OUTPUT_IS_RESHAPED = ("codegen", "gpt2", "gpt-sw3", "gpt_bigcode", "gpt_neo", "gptj")
# Model types whose plan tests/benchmarks/architectures/survey.py has compared with one process on every kind of grid.
CHECKED = frozenset(
    {
        "afmoe", "apertus", "arcee", "aria_text", "axk1", "axk2", "bailing_hybrid", "bamba", "bart", "beam", "bert",
        "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "bitnet", "blenderbot", "blenderbot-small",
        "bloom", "blt", "camembert", "codegen", "cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "cwm",
        "data2vec-text", "dbrx", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "diffllama", "doge",
        "dots1", "dots3_note", "dots3_note_text", "electra", "emu3_text_model", "ernie", "ernie4_5", "ernie4_5_moe",
        "exaone4", "exaone_moe", "falcon", "falcon_h1", "falcon_mamba", "flex_olmo", "flint", "fuyu", "gemma",
        "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified",
        "gemma4_unified_text", "git", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "got_ocr2", "gpt-sw3",
        "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "gptj", "granite", "granite_swa",
        "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "helium", "hunyuan_v1_dense",
        "hunyuan_v1_moe", "hy_v3", "hy_v4", "hyperclovax", "inkling_text", "idefics3", "qwen2_vl", "qwen2_5_vl",
        "qwen3_vl", "qwen3_vl_moe", "smolvlm", "internlm3", "iquestcoder", "jais2", "jamba", "jetmoe", "kimi_linear",
        "kolibri1", "laguna", "lfm2", "lfm2_moe", "lfm3", "llama", "llama4", "llama4_text", "longcat_flash", "mamba",
        "mamba2", "marian", "mbart", "megatron-bert", "mellum", "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2",
        "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral", "mllama_text_model",
        "modernbert-decoder", "moshi", "moss_transcribe_diarize", "mpt", "musicgen_decoder", "musicgen_melody_decoder",
        "mvp", "nanochat", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "openai-gpt",
        "opt", "pegasus", "persimmon", "phi", "phi3", "phi4_multimodal", "phimoe", "plbart", "qwen2", "qwen2_moe",
        "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next",
        "qwen4_exp_text", "recurrent_gemma", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer",
        "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "trocr", "vaultgemma", "whisper", "xglm",
        "xlm-roberta", "xlm-roberta-xl", "youtu", "zamba", "zamba2", "zaya",
    }
)  # fmt: skip


def block_specs(model_type: str, tp_plan: dict[str, str], config: Any) -> list[BlockSpec]:
    """Return the blocks of an architecture.

    Args:
        model_type: as in the config.
        tp_plan: Transformers' plan, names with `layers.*.` in them -> "colwise", "rowwise" or another style.
        config: of the decoder.
    """
    if model_type in TABLE:
        return list(TABLE[model_type](config) if callable(TABLE[model_type]) else TABLE[model_type])
    specs = _specs_of_plan(tp_plan)
    entries = {spec.entry for spec in specs}
    return specs + [spec for spec in _USUAL if spec.entry not in entries]


def _specs_of_plan(tp_plan: dict[str, str]) -> list[BlockSpec]:
    """Return blocks whose layers Transformers' plan names: one row layer, and at least one column layer beside it."""
    styles = {name.partition("layers.*.")[2]: style for name, style in tp_plan.items() if "layers.*." in name}
    modules: dict[str, dict[str, list[str]]] = {}
    for name, style in styles.items():
        parent, _, child = name.rpartition(".")
        if child != "sinks" and not child.endswith("bias"):
            modules.setdefault(parent, {"colwise": [], "rowwise": []}).setdefault(style, []).append(child)
    specs = []
    for parent, children in modules.items():
        columns, rows, kind = children["colwise"], children["rowwise"], parent.rpartition(".")[2]
        if not columns or len(rows) != 1 or kind == "experts":
            continue
        prefix = f"{parent}: " if parent else ""
        if "kv_b_proj" in columns:
            specs += _latent_attentions(parent)
        elif re.search("attn|attention", kind):
            # k and v are of kv heads, everything else (queries, gates) is of query heads and comes first.
            columns = sorted(columns, key=lambda name: name[:2] in ("k_", "v_"))
            names = " ".join(f"{name}={'kv' if name[:2] in ('k_', 'v_') else 'query'}" for name in columns)
            specs.append(attention(f"{prefix}{names} -> {rows[0]}"))
        else:
            specs.append(mlp(f"{prefix}{' '.join(columns)} -> {rows[0]}"))
    return specs
