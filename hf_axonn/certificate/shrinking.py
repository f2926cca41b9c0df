"""A small model of the type that is meant: fewer layers, narrower, a small vocabulary, random weights.

What an error may hang on stays: numbers of heads and their groups, ties, biases, kinds of layers, one of each, and by
which numbers of ranks a size can be divided. All widths that belong together (hidden size, sizes of heads, ranks of
latent attention) are divided by one factor, so that sums and products of them still fit; which one is found by trying,
as no list of names says what every class computes of its sizes. Fields are known by their names.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from hf_axonn.checkpoint.model_config import read_config
from hf_axonn.compat.transformers import from_config_of


VOCABULARY, WIDTH, WINDOW, EXPERTS, TOP_K = 160, 96, 5, 8, 2
MOST_LAYERS = 6
MOST_PARAMETERS = 8_000_000
TRIES = 6  # factors that are tried
SMALLEST_HEAD = 4
ROWS, TOKENS = 2, 9  # of the batch with which a factor is tried


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Sizes that are sums and products of one another: all are divided by the factor.
COUPLED = _names(
    "hidden_size d_model n_embd emb_dim embed_dim embedding_dim embedding_size input_embedding_size input_size "
    "word_embed_proj_dim lru_width attention_hidden_size head_dim global_head_dim attention_head_dim dim_head d_head "
    "kv_channels linear_head_dim linear_key_head_dim linear_value_head_dim v_head_dim index_head_dim swa_head_dim "
    "mamba_d_head mamba_headdim mamba_head_dim mamba_d_ssm qk_rope_head_dim rotary_dim qk_nope_head_dim qk_head_dim "
    "q_lora_rank kv_lora_rank o_lora_rank swa_q_lora_rank swa_kv_lora_rank swa_qk_nope_head_dim swa_v_head_dim "
    "query_pre_attn_scalar mrope_section"
)
HEAD_SIZES = _names("head_dim attention_head_dim dim_head d_head kv_channels qk_rope_head_dim v_head_dim rotary_dim")
HIDDEN = ("hidden_size", "d_model", "n_embd")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads")
# Sizes that stand alone: made small, with the same common divisors with the numbers of ranks.
ALONE = _names(
    "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner ffn_hidden_size dff dim_ff feed_forward_size "
    "dense_intermediate_size shared_intermediate_size intermediate_size_mlp d_ff moe_intermediate_size "
    "expert_ffn_hidden_size shared_expert_intermediate_size shared_experts_intermediate_size "
    "moe_shared_expert_intermediate_size expert_intermediate_size"
)
VOCABULARIES = _names("vocab_size decoder_vocab_size vocab_size_per_layer_input unpadded_vocab_size")
MOST_OF = {
    **dict.fromkeys(_names("num_experts num_local_experts n_routed_experts moe_num_experts"), EXPERTS),
    **dict.fromkeys(_names("num_experts_per_tok num_experts_per_token moe_k moe_top_k moe_topk n_group"), TOP_K),
    **dict.fromkeys(_names("topk_group first_k_dense_replace num_dense_layers num_nextn_predict_layers"), 1),
    **dict.fromkeys(_names("state_size ssm_state_size mamba_d_state chunk_size mamba_chunk_size"), 8),
    **dict.fromkeys(_names("sliding_window sliding_window_size attention_window_size"), WINDOW),
}
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
DROPOUT = re.compile("drop|jitter")
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def config_of(model: str) -> PreTrainedConfig:
    """Read the configuration of a model: a directory with a config.json, such a file, a model type, or a Hub name.

    Raises:
        ValueError: there is none, or it is of no causal language model.
    """
    path = Path(model)
    if model in CONFIG_MAPPING and not path.exists():
        config = CONFIG_MAPPING[model]()
    else:
        config = read_config(model, more="a model type of Transformers as llama, ")
    text = config.get_text_config()
    if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return text
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{model} is of type {config.model_type}, of which Transformers has no causal language model."
        )
    return config


def shrink(
    config: PreTrainedConfig, *, ranks: int, layers: int = 2, seed: int = 0, kind: type[PreTrainedModel] | None = None
) -> PreTrainedModel:
    """Make a small float64 model of the type of a configuration.

    Args:
        config: of the model that is meant; unchanged.
        ranks: among which sizes are divided: what it has in common with a size, it has with the small one.
        layers: how many there are at least, where the model has as many.
        seed: of the weights. Norms and biases are random too, as ones and zeros would hide mistakes.
        kind: the class of the model; None: its causal language model.
    Raises:
        ValueError: no factor gives a model that runs and has a loss; the message has the last reason.
    """
    problem = "no common factor of its sizes is known"
    for factor in _factors(config, ranks):
        try:
            model = _random_model(_divide(config, factor, ranks, layers), seed, kind)
            _try(model, labels=kind is None)
            return model
        except Exception as error:  # any class may fail in a way of its own
            problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    raise ValueError(
        f"a model of type {config.model_type} could not be made small ({problem}): give a config.json of small sizes."
    )


def _factors(config: PreTrainedConfig, ranks: int) -> list[int]:
    """Return the numbers that all coupled sizes can be divided by, the largest first; 1 is the last resort."""
    coupled = [value for name, value in _sizes(config) if name in COUPLED]
    heads = [value for name, value in _sizes(config) if name in HEAD_SIZES]
    hidden = [getattr(config, name) for name in HIDDEN if isinstance(getattr(config, name, None), int)]
    number = [getattr(config, name) for name in HEADS if isinstance(getattr(config, name, None), int)]
    alone = bool(hidden and number and number[0] and not heads)  # then the class computes the size of its heads
    each = number[0] if alone else 1
    if alone:
        heads.append(hidden[0] // each)
    common = math.gcd(*coupled) if coupled else 1
    fits = [
        factor
        for factor in range(common, 0, -1)
        if common % factor == 0
        and all(size // factor % each == 0 for size in hidden)
        and all(size // factor >= SMALLEST_HEAD and size // factor % 2 == size % 2 for size in heads)
        and all(math.gcd(size // factor, ranks) == math.gcd(size, ranks) for size in coupled if size not in heads)
    ]
    return fits[:TRIES] or [1]


def _sizes(config: PreTrainedConfig) -> Iterator[tuple[str, int]]:
    for name, value in _fields(vars(config)):
        for number in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(number, int) and not isinstance(number, bool) and number > 0:
                yield name, number


def _fields(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _fields(value)
        else:
            yield name, value


def _divide(config: PreTrainedConfig, factor: int, ranks: int, layers: int) -> PreTrainedConfig:
    small = copy.deepcopy(config)
    fields = vars(small)
    changed = {name: _tiny(name, value, factor, ranks) for name, value in fields.items()}
    changed |= _fewer_layers(changed, layers)
    fields.update(changed)
    # A sum over the batch that is no sum over its parts: no data-parallel run has that of one process.
    if getattr(small, "output_router_logits", False):
        small.output_router_logits = False
    return type(config).from_dict({key: value for key, value in small.to_dict().items() if key != "dtype"})


def _tiny(name: str, value: Any, factor: int, ranks: int) -> Any:
    if isinstance(value, dict):
        return {key: _tiny(key, item, factor, ranks) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and name in COUPLED | ALONE:
        return [_tiny(name, item, factor, ranks) for item in value]
    if isinstance(value, float) and DROPOUT.search(name):
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0 and name not in IDS:
        return value
    if name in COUPLED and value % factor == 0:
        return value // factor
    if name in ALONE:
        return alike(int(value), WIDTH, ranks)
    if name in VOCABULARIES:
        return alike(int(value), VOCABULARY, ranks)
    if name in IDS:
        return IDS[name]
    if name.endswith(("_token_id", "_token_index")):
        return min(int(value), VOCABULARY // 2)
    return min(value, MOST_OF[name]) if name in MOST_OF else value


def alike(size: int, most: int, ranks: int) -> int:
    """Return the largest size up to `most` that has the common divisors of `size` with 8 and with `ranks`."""
    whole = math.lcm(8, ranks)
    return (
        size
        if size <= most
        else next((small for small in range(most, 0, -1) if math.gcd(small, whole) == math.gcd(size, whole)), size)
    )


def _fewer_layers(fields: dict[str, Any], least: int) -> dict[str, Any]:
    """Return fields for one layer of each kind, and for at least `least`."""
    name = next((name for name in LAYERS if isinstance(fields.get(name), int)), None)
    if name is None:
        return {}
    layers = fields[name]
    lists = {key: value for key, value in fields.items() if isinstance(value, (list, tuple)) and len(value) == layers}
    kinds = [tuple(map(str, kind)) for kind in zip(*lists.values(), strict=True)] or [()] * layers
    chosen = sorted({kinds.index(kind) for kind in kinds})[:MOST_LAYERS]
    others = [index for index in range(len(kinds)) if index not in chosen]
    chosen = sorted(chosen + others[: max(0, least - len(chosen))])
    counts = {other: len(chosen) for other in LAYERS if isinstance(fields.get(other), int)}
    return {**{key: [value[index] for index in chosen] for key, value in lists.items()}, **counts}


def _random_model(config: PreTrainedConfig, seed: int, kind: type[PreTrainedModel] | None) -> PreTrainedModel:
    made = from_config_of(kind) if kind else AutoModelForCausalLM.from_config
    with torch.device("meta"):
        number = sum(weight.numel() for weight in made(config).parameters())
    if number > MOST_PARAMETERS:
        raise ValueError(f"it still has {number:,} parameters, more than {MOST_PARAMETERS:,}")
    torch.manual_seed(seed)
    # grouped matrix products of experts are not written for float64
    model: PreTrainedModel = made(config, experts_implementation="eager").double()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            if weight.dim() <= 1:
                weight.add_(0.3 * noise)
            elif not weight.any() or bool((weight == weight.flatten()[0]).all()):
                weight.add_(0.1 * noise)
    model.train()
    return model


def _try(model: PreTrainedModel, *, labels: bool) -> None:
    """Raise where the model does not train; without labels, where what it gives has no gradients."""
    ids = torch.arange(3, 3 + ROWS * TOKENS).reshape(ROWS, TOKENS)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **({"labels": ids} if labels else {})}
    loss: Tensor = model(**given).loss if labels else model(**given)[0].square().sum()
    loss.backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    model.zero_grad()
    if not gradients or not all(bool(gradient.isfinite().all()) for gradient in gradients):
        raise ArithmeticError("its gradients on one process are not finite")
