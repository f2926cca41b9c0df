"""Which module is what: from an architecture to a plan.

The plan of a causal LM is derived from the tensor-parallel plan that Transformers ships with it (which layers are
column and which row), for the architectures whose attention and MLP are known to read the number of local heads and
features off their inputs. Everything else is sharded Linear by Linear, which is right for any module, and the plan
says why. No communication, no change to the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn


# Attention reshapes by head_dim and never by a number of heads, MLPs are elementwise between column and row layers,
# `lm_head` hands its output to `loss_function` untouched: read in modeling_*.py of transformers 5.23.
BLOCKWISE = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class BlockPlan:
    """One attention or MLP: names of the block, of its column layers (queries first) and of its row layer."""

    name: str
    columns: tuple[str, ...]
    row: str
    is_attention: bool


@dataclass
class Plan:
    """What `parallelize` is to do.

    Attributes:
        decoder: name of the module that runs the decoder layers (the base model); None Linear by Linear.
        layers: names of the decoder layers in order.
        final: names of modules that run on tokens after the layers (the last norm).
        blocks: the attention and MLP blocks.
        reason: why the model is sharded Linear by Linear; None where it is not.
    """

    decoder: str | None = None
    layers: list[str] = field(default_factory=list)
    final: list[str] = field(default_factory=list)
    blocks: list[BlockPlan] = field(default_factory=list)
    reason: str | None = None


def adapted(module: nn.Module) -> nn.Module:
    """The layer itself where PEFT has wrapped it, else the module."""
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def plan_for(model: nn.Module) -> Plan:
    """The plan of a model (without PEFT's outer wrapper)."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type not in BLOCKWISE or not hasattr(model, "lm_head"):
        what = f"{model_type} models" if model_type else f"{type(model).__name__}"
        return Plan(reason=f"no block plan for {what}: every Linear on its own, activations whole on every (x, y)")
    decoder = model.base_model_prefix
    base = model.get_submodule(decoder)
    layers = [f"{decoder}.layers.{index}" for index in range(len(base.layers))]
    plan = Plan(decoder=decoder, layers=layers, final=[f"{decoder}.norm"])
    styles = {name.rpartition("layers.*.")[2]: style for name, style in model.tp_plan.items() if "layers.*." in name}
    for layer in layers:
        for child in ("self_attn", "mlp"):
            block = BlockPlan(
                name=f"{layer}.{child}",
                columns=_named(styles, child, "colwise"),
                row=_named(styles, child, "rowwise")[0],
                is_attention=child == "self_attn",
            )
            problem = _problem(model, block)
            if problem:
                return Plan(reason=f"{block.name}: {problem}; every Linear on its own instead")
            plan.blocks.append(block)
    return plan


def _named(styles: dict[str, str], block: str, style: str) -> tuple[str, ...]:
    names = (name.rpartition(".") for name, its in styles.items() if its == style)
    return tuple(child for parent, _, child in names if parent == block)


def _problem(model: nn.Module, block: BlockPlan) -> str | None:
    """Why a block cannot be cut as one, if so."""
    module = model.get_submodule(block.name)
    for name in (*block.columns, block.row):
        layer = adapted(module.get_submodule(name))
        if type(layer) is not nn.Linear:
            return f"{name} is a {type(layer).__name__}, not an nn.Linear"
    return None
