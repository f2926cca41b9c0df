"""The feature layout of a residual stream, [1, T/x, H/y] between blocks: which models can have it.

Those can where y > 1, all blocks are sharded, every norm between them is one that layers/norms.py knows how to shard,
and the code of the layers apart from blocks and norms treats every feature by itself. Both are found out by trial, not
by name. No communication; the model is unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from hf_axonn.architectures.norm_probe import norm_kind
from hf_axonn.architectures.plan import ShardingPlan, is_inside
from hf_axonn.architectures.trials import EXACT, close, isolate, replace_forwards
from hf_axonn.engine.linears import linear_size
from hf_axonn.layers.norms import NormKind


@dataclass
class LayoutChoice:
    """The layout of the residual stream.

    Attributes:
        reason: why it is the one, in a line; empty where there is no choice.
        features: H in the feature layout, 0 in the token layout.
        norms: what each norm computes that has to work in the feature layout.
    """

    reason: str
    features: int = 0
    norms: dict[nn.Module, NormKind] = field(default_factory=dict)

    def restrict_to(self, model: nn.Module) -> LayoutChoice:
        """Return the choice for the part of the model that a stage of a pipeline has."""
        there = set(model.modules())
        return replace(self, norms={norm: kind for norm, kind in self.norms.items() if norm in there})


def choose_layout(model: nn.Module, plan: ShardingPlan, *, y: int, requested: str) -> LayoutChoice:
    """Decide between the token and the feature layout. No communication; the model is unchanged.

    Call it before `install_layers`.

    Args:
        y: size of the axis; at 1 the two layouts are one.
        requested: auto, token or feature.
    Raises:
        ValueError: `feature` is requested and the model cannot have it; the message names the module.
    """
    if y == 1:
        return LayoutChoice("the token and the feature layout are one where y = 1")
    if requested == "token":
        return LayoutChoice("token layout, as configured")
    with isolate():
        size, problem, norms = _search(model, plan)
    if problem is None:
        kinds = " and ".join(sorted({str(kind) for kind in norms.values()}))
        return LayoutChoice(f"feature layout: {len(norms)} norms verified ({kinds})", size, norms)
    if requested == "feature":
        raise ValueError(
            f"layout is feature, but this model cannot have it: {problem}. Leave layout at auto, which takes the "
            "token layout for such a model."
        )
    # Linear by Linear, which the report has said, there is no residual stream to lay out.
    return LayoutChoice("" if plan.reason else f"token layout: {problem}")


def _search(model: nn.Module, plan: ShardingPlan) -> tuple[int, str | None, dict[nn.Module, NormKind]]:
    """Return (H, what speaks against the feature layout, the norms on the residual stream)."""
    norms: dict[nn.Module, NormKind] = {}
    if plan.reason or plan.full_sequence or not plan.blocks:
        some = next(iter(plan.full_sequence), None)
        return 0, plan.reason or (f"{some} needs full sequences" if some else "it has no blocks"), norms
    if plan.per_token:
        return 0, f"its layers take {plan.per_token[0]} of whole tokens", norms
    sizes = [linear_size(model.get_submodule(block.row))[0] for block in plan.blocks]
    for block in plan.blocks:
        for name in block.columns:
            sizes.append(linear_size(model.get_submodule(name))[1])
    if len(set(sizes)) > 1:
        return 0, f"its blocks are of several hidden sizes, {min(sizes)} to {max(sizes)}", norms
    known: dict[tuple, NormKind | None] = {}
    for name in plan.layers:
        problem = _find_norms(model, plan, name, sizes[0], norms, known) or layer_problem(model, plan, name, norms)
        if problem:
            return sizes[0], problem, norms
    return sizes[0], None, norms


def _find_norms(
    model: nn.Module, plan: ShardingPlan, layer: str, size: int, norms: dict[nn.Module, NormKind], known: dict
) -> str | None:
    """Add the norms on the residual stream of one layer to `norms`; returns what else has parameters there, if any."""
    blocks = {name for block in plan.blocks for name in (block.entry, *block.columns, block.row)}
    for name, module in model.get_submodule(layer).named_modules(prefix=layer):
        if is_inside(name, blocks):
            continue
        leaf = next(module.children(), None) is None
        kind = norm_kind(module, size, known) if leaf else None
        if kind is not None:
            norms[module] = kind
        elif any(parameter is not None for parameter in module._parameters.values()):
            return f"{name}, a {type(module).__name__}, is neither an RMSNorm nor a LayerNorm of {size} features"
    return None


def layer_problem(model: nn.Module, plan: ShardingPlan, name: str, norms: dict[nn.Module, NormKind]) -> str | None:
    """Return what keeps a decoder layer from running on some of the features, or None.

    The layer's own code runs with an elementwise function in the place of every block and norm: then each feature of
    its output may depend on the same feature of its input only.
    """
    layer = model.get_submodule(name)
    attention: set[nn.Module] = set()
    stubs: dict[nn.Module, Callable] = {norm: torch.sin for norm in norms}
    for block in plan.blocks:
        if block.entry.startswith(f"{name}."):
            stubs |= {model.get_submodule(part): _stub(torch.cos, 0) for part in (*block.columns, block.row)}
            stubs[model.get_submodule(block.entry)] = _stub(torch.tanh, 0)
            attention |= {model.get_submodule(block.entry)} if block.is_attention else set()
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, 4, 6, generator=generator, dtype=torch.float64)
    # What comes back from attention is known to its caller alone.
    for extras in (1, 0, 2):
        stubs |= {module: _stub(torch.tanh, extras) for module in attention}
        try:
            with replace_forwards(layer, stubs), torch.no_grad():
                full, parts = _call(layer, hidden), [_call(layer, part) for part in hidden.split((2, 4), dim=-1)]
            if full.shape == hidden.shape and close(full, torch.cat(parts, dim=-1), EXACT):
                return None
        except Exception:  # another number of results, or code that needs all features or more inputs
            continue
    return f"{name}, a {type(layer).__name__}, does more than add up what its blocks and norms return"


def _stub(function: Callable[[Tensor], Tensor], extras: int) -> Callable:
    def forward(*args, **kwargs):
        # More than one where a block adds the residual itself.
        hidden = function(sum(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)))
        return (hidden, *[None] * extras) if extras else hidden

    return forward


def _call(layer: nn.Module, hidden: Tensor) -> Tensor:
    """Run the layer's own code, without hooks, and with None for every other input that it requires."""
    first, *others = inspect.signature(layer.forward).parameters.values()
    named = [each for each in others if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    output = layer.forward(hidden, **{each.name: None for each in named if each.default is each.empty})
    return output[0] if isinstance(output, tuple) else output
