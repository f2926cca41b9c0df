"""Refusals of what PEFT can put into or around a model and a grid cannot have: by name, before anything is changed."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from hf_axonn.architectures.plan import ShardingPlan, is_inside
from hf_axonn.compat.bitsandbytes import is_four_bit
from hf_axonn.compat.peft import adapter_layers, variant_names, without_peft, wrapped_modules
from hf_axonn.compat.versions import check_versions
from hf_axonn.engine.dtensors import local
from hf_axonn.engine.linears import is_linear
from hf_axonn.parallel.sharded_model import ShardedModel


# How PEFT may fill new adapters of a model that is sharded already: the other ways read the weight, or change it.
DORA = ("DoraLinearVariant", "DoraEmbeddingVariant")
PLAIN_INITS = ("gaussian", "orthogonal")
WHAT_WORKS = (
    "use LoRA, rsLoRA or DoRA on Linear layers and embeddings (LoraConfig), and modules_to_save for what is to be "
    "trained whole"
)


def check_adapters(model: nn.Module) -> None:
    """Refuse adapters in a model, sharded or not. Changes nothing.

    Raises:
        ValueError: an adapter is not LoRA, rsLoRA or DoRA of a Linear or an embedding, two share their weights, or
            parameters lie outside of the model itself; the release of PEFT is not proven.
    """
    inner = without_peft(model)
    own = {id(parameter) for parameter in inner.parameters()}
    outside = [name for name, parameter in model.named_parameters() if id(parameter) not in own]
    if outside:
        raise ValueError(
            f"{outside[0]} lies outside of the model (PEFT's prompt or prefix tuning), which cannot be sharded over a "
            "grid: use LoRA."
        )
    layers = list(adapter_layers(inner))
    if layers:
        check_versions("peft")
    for name, layer, kind in layers:
        variants = variant_names(layer)
        wrapper: Any = layer
        if variants and is_four_bit(wrapper.get_base_layer()):
            raise ValueError(DORA_OF_FOUR_BITS.format(name))
        kind = next((variant for variant in variants if variant not in DORA), kind)
        if kind not in ("lora.Linear", "lora.Linear4bit", "lora.Embedding", "lora.ParamWrapper"):
            raise ValueError(f"{name}: PEFT's {kind} cannot be sharded over a grid: {WHAT_WORKS}.")
    _check_sharing(inner)


def check_plan(model: nn.Module, plan: ShardingPlan) -> None:
    """Refuse adapters that do not fit the way in which a model is about to be sharded. Changes nothing.

    Args:
        model: with its adapters; `plan` is that of the model without them.
    Raises:
        ValueError: a parameter is adapted by itself that is a matrix of a Linear, or modules_to_save consist of
            several modules.
    """
    together = {plan.decoder, *plan.layers, *(block.entry for block in plan.all_blocks)}
    together -= {name for block in plan.all_blocks for name in block.columns}
    for name, wrapper, base in wrapped_modules(model):
        name = name.replace(".base_layer", "")
        if hasattr(wrapper, "modules_to_save") and any(is_inside(other, {name}) for other in together if other):
            raise ValueError(SEVERAL.format(name))
        in_block = any(name in (*block.columns, block.row) for block in plan.all_blocks)
        if hasattr(wrapper, "parameter_name") and is_linear(base) and (in_block or plan.is_full(name)):
            raise ValueError(LINEAR.format(name, wrapper.parameter_name))


SEVERAL = (
    "modules_to_save: {} consists of several modules that work together on a grid, so it cannot be copied: name its "
    "Linears, norms or embeddings."
)
LINEAR = (
    "{}: PEFT's LoRA of the parameter {} of a Linear (target_parameters) is not supported over a grid: name the "
    "Linear in target_modules."
)


DORA_OF_FOUR_BITS = (
    "{}: DoRA (use_dora) needs the norms of a weight's rows, which is not supported over a grid where the weight has "
    "4 bits: use LoRA or rsLoRA."
)


def _check_sharing(model: nn.Module) -> None:
    """Refuse two parameters on one memory, as ensure_weight_tying makes them: sharded they would go apart."""
    owner: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if "lora_" in name and not parameter.is_meta and parameter.numel():
            shard = local(parameter)
            other, same = owner.setdefault(shard.untyped_storage().data_ptr(), (name, parameter))
            if same is not parameter:
                raise ValueError(
                    f"{other} and {name} share their memory (ensure_weight_tying), which would go apart over a grid: "
                    "omit ensure_weight_tying, or adapt only one of the two layers."
                )


def check_config(state: ShardedModel, model: nn.Module, config) -> None:
    """Refuse adapters that are about to be put into a sharded model. Changes nothing.

    Args:
        config: PEFT's, of the new adapter.
    Raises:
        ValueError: another method than LoRA, one of its variants but DoRA, a way to fill new adapters that needs full
            weights, or modules_to_save that consist of several modules; the release of PEFT is not proven.
    """
    check_versions("peft")
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        raise ValueError(f"PEFT's {kind} is not supported on a model that is sharded over a grid: {WHAT_WORKS}.")
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        variant = field.metadata.get("is_lora_variant") and field.name != "use_dora"
        if value and (variant or field.name in REFUSED_FIELDS):
            raise ValueError(f"{field.name} of LoraConfig is not supported over a grid: {WHAT_WORKS}.")
    if config.use_dora:
        adapted = (name for name, module in model.named_modules() if is_four_bit(module))
        if (name := next(adapted, None)) is not None:
            raise ValueError(DORA_OF_FOUR_BITS.format(name))
    how = config.init_lora_weights
    if isinstance(how, str) and how.lower() not in (*PLAIN_INITS, "true", "false"):
        raise ValueError(
            f"init_lora_weights={how!r} needs whole weights: adapt the model before hf_axonn.parallelize, or choose "
            f"True, False or one of {', '.join(PLAIN_INITS)}."
        )
    for name, module in saved_modules(model, config):
        for inner in module.modules():
            if not state.can_copy(inner):
                raise ValueError(SEVERAL.format(name))


REFUSED_FIELDS = ("trainable_token_indices", "layer_replication", "ensure_weight_tying")


def saved_modules(model: nn.Module, config) -> list[tuple[str, nn.Module]]:
    """The modules that PEFT will copy for `modules_to_save`: those whose names end in one of them."""
    ends = tuple(getattr(config, "modules_to_save", None) or ())
    return [(name, module) for name, module in model.named_modules() if ends and name.endswith(ends)]
