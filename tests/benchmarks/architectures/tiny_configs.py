"""A tiny model of any architecture of Transformers, from the defaults of its own configuration class.

Sizes are shrunk by the *name* of the field, in sub-configurations too, so that no architecture has to be written down;
what such a rule cannot know is in `SPECIAL`. Every kind of layer of the default configuration occurs once. Little
divides anything: 4 heads of 12 and 2 kv heads, intermediate 42, experts 22, vocabulary 131.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY = 131
HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, INTERMEDIATE, EXPERTS, TOP_K = 48, 4, 2, 12, 42, 4, 2
MOST_LAYERS = 6
ROWS, SEQ = 4, 7
SEQS = {"reformer": 8}  # where it has to be a multiple of something


# The tiny value of a field, by its name.
_FIELDS = {
    131: "vocab_size decoder_vocab_size vocab_size_per_layer_input unpadded_vocab_size shape_vocab_size "
    "pronunciation_vocab_size",
    48: "hidden_size d_model n_embd emb_dim embed_dim embedding_dim embedding_size input_embedding_size "
    "word_embed_proj_dim lru_width attention_hidden_size shape_embed_dim pronunciation_embed_dim "
    "input_size",
    4: "num_attention_heads num_heads n_head n_heads attention_heads decoder_attention_heads encoder_attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads linear_num_heads linear_num_value_heads index_n_heads "
    "mamba_n_heads mamba_num_heads n_mamba_heads swa_num_attention_heads "
    "num_experts num_local_experts n_routed_experts moe_num_experts "
    "mamba_d_conv conv_kernel linear_conv_kernel_dim short_conv_kernel_size conv1d_width conv_kernel_size",
    2: "num_key_value_heads kv_n_heads num_kv_heads linear_num_key_heads swa_num_key_value_heads n_groups "
    "mamba_n_groups mamba_ngroups num_query_groups "
    "num_experts_per_tok num_experts_per_token moe_k moe_top_k moe_topk n_group num_expert_group "
    "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
    "num_encoder_layers num_blocks depth max_window_layers num_codebooks zero_expert_num",
    1: "topk_group first_k_dense_replace num_dense_layers num_nextn_predict_layers index_topk_blocks",
    12: "head_dim global_head_dim attention_head_dim dim_head d_head kv_channels linear_head_dim "
    "linear_key_head_dim linear_value_head_dim v_head_dim index_head_dim swa_head_dim mamba_d_head mamba_headdim "
    "mamba_head_dim",
    6: "qk_rope_head_dim rotary_dim",
    8: "qk_nope_head_dim state_size ssm_state_size mamba_d_state q_lora_rank kv_lora_rank o_lora_rank "
    "time_step_rank mamba_dt_rank laurel_rank adapter_rank router_hidden_size hidden_size_per_layer_input index_topk "
    "d_rel gated_norm_rank chunk_size mamba_chunk_size block_size",
    14: "qk_head_dim",
    42: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner ffn_hidden_size d_inner dff dim_ff "
    "feed_forward_size dense_intermediate_size shared_intermediate_size intermediate_size_mlp d_ff",
    22: "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size "
    "shared_experts_intermediate_size moe_shared_expert_intermediate_size expert_intermediate_size",
    5: "sliding_window sliding_window_size local_attention attention_window_size",
    64: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions "
    "model_max_length context_length",
}
SIZES = {name: size for size, names in _FIELDS.items() for name in names.split()}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2}
ALWAYS = {"is_decoder": True, "head_dim": HEAD_SIZE}
# Fields that some classes take and others compute; these would not compute them any more if they were given.
DERIVED = (
    "head_dim",
    "qk_head_dim",
    "attention_head_dim",
    "mamba_headdim",
    "attention_hidden_size",
    "kv_channels",
)
# Fields whose lists have one entry a layer.
LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "num_decoder_layers",
    "num_blocks",
)
DROPOUT = re.compile("drop|jitter|mask_time_prob")

# What the rules cannot know.
SLIDING_LATENT = dict(
    swa_num_attention_heads=HEADS,
    swa_num_key_value_heads=HEADS,
    swa_q_lora_rank=8,
    swa_kv_lora_rank=8,
    swa_head_dim=14,
    swa_qk_nope_head_dim=8,
    swa_v_head_dim=HEAD_SIZE,
    head_dim=14,
)
INDEXER = dict(
    indexer_n_heads=HEADS,
    indexer_kv_heads=1,
    indexer_head_dim=HEAD_SIZE,
    indexer_budget=4,
    indexer_compress_ratio=2,
    hc_lowrank=6,
    ple_layer_ids=[1],
    ple_embed_dim=32,
    ngram_vocab_size_base=37,
    make_ngram_vocab_size_divisible_by=8,
    eos_token_id=2,
)
SHARED_KEYS = dict(
    global_head_dim=24,
    num_global_key_value_heads=1,
    attention_k_eq_v=True,
    num_hidden_layers=4,
    layer_types=["sliding_attention", "full_attention"] * 2,
    num_kv_shared_layers=2,
)
EXPERTS_BESIDE = dict(enable_moe_block=True, num_experts=EXPERTS, top_k_experts=TOP_K, moe_intermediate_size=22)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_d_head": 24, "attn_layer_indices": [1]},
    "blt": {
        "use_cache": False,
        "encoder_hash_byte_group_vocab": 37,
        "patcher_config": {"intermediate_size": INTERMEDIATE},
        "encoder_config": {"hidden_size_global": HIDDEN},
        "decoder_config": {"hidden_size_global": HIDDEN},
    },
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {**ROPE, "mrope_section": [2, 2, 2]}, "sliding_attention": ROPE},
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 2.0}},
    "deepseek_v2": {"num_experts_per_tok": TOP_K, "n_routed_experts": EXPERTS},
    "deepseek_v4": {
        "o_groups": 2,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3},
        "index_topk": 1,
    },
    "dots1": {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": TOP_K},
    "dots3_note_text": SLIDING_LATENT,
    "dots3_note": {
        "text_config": SLIDING_LATENT,
        "vision_config": {"adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN},
        "audio_config": {"adapter_out_dim": HIDDEN, "adapter_input_size": HIDDEN},
    },
    "falcon_h1": {"mamba_d_ssm": 48},
    "gemma3n_text": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
        "activation_sparsity_pattern": [0.9, 0.0, 0.0],
        "intermediate_size": [INTERMEDIATE] * 3,
    },
    "gemma4": {"text_config": SHARED_KEYS | EXPERTS_BESIDE},
    "gemma4_text": SHARED_KEYS | EXPERTS_BESIDE,
    "gemma4_unified": {"text_config": SHARED_KEYS},
    "gemma4_unified_text": SHARED_KEYS,
    "git": {"vision_config": {"image_size": 32}},
    "hy_v4": {"index_topk": 3},
    "granitemoehybrid": {"mamba_d_head": 24, "layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 2},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 6},
    "mamba2": {"head_dim": 24},
    "nemotron": {"num_key_value_heads": KV_HEADS},
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "moe_latent_size": 24,
    },
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "axial_pos_embds_dim": (24, 24),
        "axial_pos_shape": (2, 4),
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 2,
        "hash_seed": 0,
    },
    "rembert": {"output_embedding_size": 56},
    "xlstm": {"chunk_size": 8, "hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 96,
        "attention_head_dim": 24,
    },
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
}
DRAFTER = "a drafter of another model: it takes that model's keys and values and no labels"
UNTRAINABLE = {"gemma4_assistant": DRAFTER, "gemma4_unified_assistant": DRAFTER}
# Types of decoders that are in models of another type.
DECODER_OF = {
    "emu3_text_model": "emu3",
    "mllama_text_model": "mllama",
    "musicgen_decoder": "musicgen",
    "musicgen_melody_decoder": "musicgen_melody",
}
# The class takes the configuration of a part.
PART = {"musicgen": "decoder", "musicgen_melody": "decoder"}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The configuration of a tiny model of this type."""
    config = _shrink(CONFIG_MAPPING[model_type], dict(SPECIAL.get(model_type, {})))
    return config


def _shrink(config_class: type[PreTrainedConfig], special: dict[str, Any]) -> PreTrainedConfig:
    default = config_class()
    changes: dict[str, Any] = {}
    fields = vars(default)
    for name, value in fields.items():
        if name in DERIVED and name not in config_class.__dataclass_fields__:
            continue
        if isinstance(value, PreTrainedConfig):
            changes[name] = _shrink(type(value), dict(special.pop(name, {})))
        else:
            tiny = _tiny(name, value)
            if tiny is not value:
                changes[name] = tiny
    if "kv_lora_rank" in fields and "num_key_value_heads" in changes:
        changes["num_key_value_heads"] = HEADS  # latent attention makes one key and value a query head
    changes.update(_layers(fields))
    changes.update(special)
    return config_class(**changes)


def _tiny(name: str, value: Any) -> Any:
    """The tiny value of a field; the value itself where nothing has to shrink."""
    if isinstance(value, dict):
        shrunk = {key: _tiny(key, item) for key, item in value.items()}
        return shrunk if any(shrunk[key] is not value[key] for key in value) else value
    if name in ALWAYS:
        return ALWAYS[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if name == "partial_rotary_factor":
        return 0.5 if value < 1 else value
    if DROPOUT.search(name) and isinstance(value, float):
        return 0.0
    if name in IDS:
        return IDS[name]
    if name.endswith(("_token_id", "_token_index")):
        return min(value, VOCABULARY - 1)
    return min(value, SIZES[name]) if name in SIZES else value


def _layers(fields: dict[str, Any]) -> dict[str, Any]:
    """One layer of each kind that the default configuration has, and at least two layers."""
    name = next((name for name in LAYERS if isinstance(fields.get(name), int)), None)
    if name is None:
        return {}
    lists = {
        key: value for key, value in fields.items() if isinstance(value, (list, tuple)) and len(value) == fields[name]
    }
    kinds = [tuple(map(str, kind)) for kind in zip(*lists.values(), strict=True)]
    chosen = sorted({kinds.index(kind) for kind in kinds})[:MOST_LAYERS]
    chosen += [len(kinds) - 1] if len(chosen) == 1 else []
    changes = {key: [value[index] for index in chosen] for key, value in lists.items()}
    return {**changes, name: len(chosen)} if chosen else {}


def tiny_model(model_type: str, *, seed: int = 0) -> nn.Module:
    """A random float64 model in training mode. Its norms and biases are random too, as ones would hide mistakes."""
    torch.manual_seed(seed)
    config = tiny_config(model_type)
    if model_type in PART:
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](getattr(config, PART[model_type]))
    else:  # grouped matrix products of experts are not written for float64
        model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    model = model.double()
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.dim() <= 1:
            parameter.data += 0.3 * noise
        elif not parameter.any() or (parameter == parameter.flatten()[0]).all():
            parameter.data += 0.1 * noise
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):  # the experts of each token id, all of them the first where nothing is read
            table.copy_(torch.randint(EXPERTS, table.shape, generator=generator))
    return model.train()


def has_shared_loss(model: nn.Module) -> bool:
    """Whether the class computes its loss by Transformers' `loss_function`, which parallelize replaces."""
    return "self.loss_function(" in inspect.getsource(type(model).forward)


def tiny_batch(model: nn.Module, *, rows: int = ROWS, seed: int = 3) -> dict[str, Tensor]:
    """Ids and labels. Rows keep unequal numbers of labels and have padding where the loss is Transformers' own.

    A class with a loss of its own averages over the tokens of one rank, so there every row keeps as many.
    """
    generator = torch.Generator().manual_seed(seed)
    seq = SEQS.get(model.config.model_type, SEQ)
    ids = torch.randint(3, VOCABULARY - 16, (rows, seq), generator=generator)
    labels = ids.clone()
    mask = torch.ones_like(ids)
    if has_shared_loss(model):
        for row in range(1, rows, 2):
            mask[row, seq - row :] = 0
        labels[0, 2:5] = -100
        labels[mask == 0] = -100
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    codebooks = getattr(model.config, "num_codebooks", 0) if model.config.model_type.endswith("_decoder") else 0
    if codebooks:  # [B, codebooks, S] and [B, S, codebooks]
        batch = {"input_ids": torch.stack([ids, ids.flip(1)], 1), "labels": torch.stack([labels, labels.flip(1)], 2)}
    if model.config.model_type == "git":  # its loss leaves the tokens of an image away
        size = model.config.vision_config.image_size
        batch["pixel_values"] = torch.randn(rows, 3, size, size, generator=generator, dtype=torch.float64)
    accepted = inspect.signature(type(model).forward).parameters
    return {name: value for name, value in batch.items() if name in accepted}
