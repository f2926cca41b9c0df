"""The kind of weight that each parameter of a model is."""

from __future__ import annotations

from collections import Counter

from torch import nn

from hf_axonn.architectures.parameter_reads import find_readers
from hf_axonn.architectures.plan import ShardingPlan, is_inside
from hf_axonn.compat.transformers import output_embedding
from hf_axonn.engine.linears import is_linear, is_stacked
from hf_axonn.layers.gathered import SMALLEST_PART
from hf_axonn.layers.moe import expert_weights, is_experts
from hf_axonn.layers.vocabulary import is_vocabulary
from hf_axonn.topology.weight_kind import WeightKind


def weight_kinds(
    model: nn.Module, plan: ShardingPlan, *, experts: WeightKind = WeightKind.EXPERTS
) -> dict[int, WeightKind]:
    """Return the kind of each weight, by id of the parameter; parameters that are not in it are replicated.

    `experts`: the kind of the weights of experts (`choose_experts`).
    """
    modules = dict(model.named_modules())
    kinds: dict[int, WeightKind] = {}
    for block in plan.all_blocks:
        for name in (*block.columns, block.row):
            kind = WeightKind.ROW if name == block.row else WeightKind.COLUMN
            kinds[id(modules[name].weight)] = WeightKind.GATHERED if is_stacked(modules[name]) else kind
    vocabulary = vocabulary_modules(model, plan)
    for name, module in modules.items():
        if is_linear(module) and module not in vocabulary and plan.is_full(name):
            # A weight that two modules use in different ways can only be replicated.
            other = kinds.get(id(module.weight), WeightKind.LINEAR) != WeightKind.LINEAR
            kinds[id(module.weight)] = WeightKind.REPLICATED if other else WeightKind.LINEAR
    for module in filter(is_experts, modules.values()):
        kinds |= {id(module._parameters[name]): experts for name in expert_weights(module)}
    embedded = {id(module.weight) for module in modules.values() if isinstance(module, nn.Embedding)}
    kinds = {key: WeightKind.REPLICATED if key in embedded else kind for key, kind in kinds.items()}
    for module in vocabulary:
        kinds[id(module.weight)] = WeightKind.VOCABULARY
    inside = [f"{block.entry}.{name}" for block in plan.blocks if block.mixer for name in block.mixer.linears]
    gathered = _large_others(model, plan) | {id(modules[name].weight) for name in inside}
    parts = (name for block in plan.blocks for name, dim in block.parts.items() if dim is not None)
    gathered |= {id(model.get_parameter(name)) for name in parts}
    kinds |= {key: WeightKind.GATHERED for key in gathered - kinds.keys()}
    _, changed = find_readers(model)
    return kinds | {id(each): WeightKind.REPLICATED for module in changed for each in module.parameters(False)}


def _large_others(model: nn.Module, plan: ShardingPlan) -> set[int]:
    """Return the ids of large parameters of more than one dim that one module has for itself, outside of blocks but
    for mixers, which work with parts of what is gathered."""
    entries = {block.entry for block in plan.all_blocks if block.mixer is None}
    smallest = SMALLEST_PART * max((parameter.numel() for parameter in model.parameters()), default=0)
    found = Counter()
    for name, module in model.named_modules():
        weight = 2 if is_inside(name, entries) or is_experts(module) else 1
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1 and parameter.numel() >= smallest:
                found[id(parameter)] += weight
    return {key for key, weight in found.items() if weight == 1}


def vocabulary_modules(model: nn.Module, plan: ShardingPlan) -> list[nn.Module]:
    """Return the embeddings of a size with the largest, and the head, where they are of the plain kind.

    Not inside of decoder layers, where ranks look up different ids; and not where anything else has the weight too.
    """
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        if getattr(module, "elsewhere", False):  # of another stage of a pipeline
            continue
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    head = output_embedding(model)
    head = head if type(head) is nn.Linear else None
    embeddings = [
        module
        for name, module in model.named_modules()
        if is_vocabulary(module) and not is_inside(name, plan.layers)
        if all(is_vocabulary(owner) or owner is head for owner in owners[id(module.weight)])
    ]
    largest = max((module.weight.numel() for module in embeddings), default=0)
    found = [module for module in embeddings if 4 * module.weight.numel() >= largest]
    if head is not None and all(owner is head or owner in found for owner in owners[id(head.weight)]):
        found.append(head)
    return found
