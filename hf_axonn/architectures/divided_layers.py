"""Checks that the decoder layers of a model can be divided among ranks, as pipe does. No change to the model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from hf_axonn.architectures.plan import ShardingPlan, is_inside
from hf_axonn.compat.transformers import output_embedding


def why_layers_stay(model: nn.Module, plan: ShardingPlan) -> str:
    """Return why pipe cannot divide the layers of a model into stages, or nothing where it can."""
    if plan.decoder is None:
        return f"{type(model).__name__} is sharded Linear by Linear, and its layers are not known ({plan.reason})"
    if problem := plan.why_undivided():
        return f"a stage gets hidden states alone of the one before, but {problem}"
    names = {module: name for name, module in model.named_modules()}
    head = output_embedding(model)
    inside = {plan.decoder} if plan.decoder else {name for name, _ in model.named_children()}
    for module, name in names.items():
        if module is not head and any(True for _ in module.parameters(recurse=False)) and not is_inside(name, inside):
            return f"{name} has parameters outside of the decoder, so it is not known to which stage it belongs"
    for module, after in beside_layers(model, plan):
        if not (isinstance(module, nn.Embedding) and not after or "Norm" in type(module).__name__):
            return (
                f"{names[module]}, a {type(module).__name__}, is neither an embedding nor a norm, so it is not known "
                "to which stage it belongs"
            )
    return ""


def beside_layers(model: nn.Module, plan: ShardingPlan) -> Iterator[tuple[nn.Module, bool]]:
    """Yield each module with parameters that the decoder has beside its layers and the head; and if after them."""
    layers, head, after = model.get_submodule(plan.layers[0].rpartition(".")[0]), output_embedding(model), False
    for module in model.get_submodule(plan.decoder or "").children():
        after = after or module is layers
        if module not in (layers, head) and any(True for _ in module.parameters()):
            yield module, after
