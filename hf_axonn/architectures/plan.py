"""A plan of a model: the part of each module, from its architecture.

The plan of a causal LM is derived from the tensor-parallel plan that Transformers ships with it (which layers are
column and which row) or from our table (table.py), for the architectures that tests/benchmarks/architectures/survey.py
has shown to be right. In a decoder layer every module is one of

    a block      attention, a mixer or an MLP with its column layers and its row layer
    full         a module that needs the full sequence and that cannot be sharded: it gets [B, S, H], its Linears are
                 sharded one by one
    per token    norms, routers, activations: they run on this rank's tokens unchanged

Everything else is sharded Linear by Linear, which is right for any module, and the plan says why. No communication, no
change to the model.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from hf_axonn.architectures.block_checks import block_problem, fit, has_module, head_counts, inner_norms
from hf_axonn.architectures.mixers import MixerParts, divide_mixer, mixer_parts
from hf_axonn.architectures.table import (
    CHECKED,
    LAYERS_OUTPUT_IS_RESHAPED,
    PER_TOKEN_ARGUMENTS,
    TOWERS,
    BlockSpec,
    block_specs,
)
from hf_axonn.compat.attention import finds_attention_function
from hf_axonn.compat.bitsandbytes import is_four_bit
from hf_axonn.compat.transformers import output_embedding, text_config
from hf_axonn.layers.moe import is_experts
from hf_axonn.layers.norms import NormKind


# What mixes several copies of a token's residual stream: which stand before the batch, [C, B, S, H], or behind it,
# [B, S, C, H] or [B, S, C * H].
COPIES_FIRST, COPIES_LAST = re.compile(r"AltUp$"), re.compile(r"HyperConnection$|HyperHead$|GatedResidual$")
PER_TOKEN = re.compile(
    rf"Norm|Rotary|Dropout|Identity|Router|Activation|Laurel|Gat(e|ing)$|Experts$|MoA$|{COPIES_FIRST.pattern}"
    rf"|{COPIES_LAST.pattern}"
)
ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")


@dataclass(frozen=True)
class BlockPlan:
    """One attention, mixer or MLP: full names of its modules, and what its heads are.

    Attributes:
        entry: the module at whose input tokens become features.
        columns, segments: the projections (queries first) and what their outputs consist of (topology/heads.py).
        row: the projection that ends the block.
        query, kv: numbers of heads; 0 for an MLP, and for a mixer whose channels belong to no head.
        attributes: of the entry, which hold a number of the full model and are to be made this rank's: name ->
            "query" or "kv", or segments; a name like config.x is set beside the module's config.
        arguments: of the entry, whose first dim is batch x query heads, or query heads.
        latent, shared, parts, cross, borrows, added: as in table.BlockSpec.
        inner_norms: norms over all features that a column layer returns or the row layer gets: their name -> what they
            are, and the name of that layer.
        mixer: of a mixer, what else of it is divided; names are relative to the entry.
    """

    entry: str
    columns: tuple[str, ...]
    segments: tuple[tuple[str, ...], ...]
    row: str
    query: int = 0
    kv: int = 0
    attributes: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    latent: tuple[str, ...] = ()
    shared: dict[str, str] = field(default_factory=dict)
    parts: dict[str, int | None] = field(default_factory=dict)
    cross: bool = False
    borrows: bool = False
    added: tuple[str, ...] = ()
    inner_norms: dict[str, tuple[NormKind, str]] = field(default_factory=dict)
    mixer: MixerParts | None = None

    @property
    def is_attention(self) -> bool:
        """Return whether its heads attend to keys."""
        return bool(self.query) and self.mixer is None


@dataclass
class ShardingPlan:
    """Instructions for `parallelize`.

    Attributes:
        decoder: name of the module that runs the decoder layers (the base model); None Linear by Linear.
        layers: names of the decoder layers in order.
        final: names of modules that run on tokens after the layers (the last norm); None if what follows the layers
            needs the full sequence.
        blocks: the attention and MLP blocks.
        full_sequence: names of modules in the layers that get the full sequence, with the reason.
        per_token: names of arguments of the layers that have values for each token, as hidden states have.
        copies: where copies of the residual stream stand, "first" before the batch or "last" behind the token; empty
            where there is one.
        untested: whether it is of a type that has not been compared with one process.
        reason: why the model is sharded Linear by Linear; None where it is not.
        towers: plans of the encoders of images, whose blocks are sharded; every rank of (x, y) has full activations
            between them.
        begins, ends: whether the first and the last of `layers` are those of the model; not so on some stages of a
            pipeline.
    """

    decoder: str | None = None
    layers: list[str] = field(default_factory=list)
    final: list[str] | None = field(default_factory=list)
    blocks: list[BlockPlan] = field(default_factory=list)
    full_sequence: dict[str, str] = field(default_factory=dict)
    per_token: tuple[str, ...] = ()
    copies: str = ""
    untested: bool = False
    reason: str | None = None
    towers: list[ShardingPlan] = field(default_factory=list)
    begins: bool = True
    ends: bool = True

    def is_full(self, name: str) -> bool:
        """Return whether a module sees full activations, the same on every rank of (x, y)."""
        if self.reason or not is_inside(name, [*self.layers, *(self.final or ())]):
            return not any(name in (*block.columns, block.row) for tower in self.towers for block in tower.blocks)
        return is_inside(name, self.full_sequence) or any(is_inside(name, block.latent) for block in self.blocks)

    @property
    def all_blocks(self) -> list[BlockPlan]:
        """The blocks of the decoder and of encoders of images."""
        return [*self.blocks, *(block for tower in self.towers for block in tower.blocks)]

    @property
    def borrows(self) -> bool:
        """Return whether some attention has the keys and values of another layer."""
        return any(block.borrows for block in self.blocks)

    def why_undivided(self) -> str:
        """Return why the layers cannot be divided into stages, each with hidden states of the one before alone; else
        nothing."""
        if self.towers:
            return f"no stage encodes images ({self.towers[0].decoder})"
        if self.borrows:
            return "attention takes keys and values of other layers"
        if self.copies:
            return "they pass on several copies of the hidden states"
        return f"its layers take {self.per_token[0]} beside them" if self.per_token else ""

    def summary(self) -> str:
        """Return one line for the report."""
        if self.reason:
            return self.reason
        text = f"{len(self.layers)} decoder layers sharded as {len(self.blocks)} blocks"
        text += " by rules that are untested for this type" if self.untested else ""
        text += f", {len(self.full_sequence)} modules on full sequences" if self.full_sequence else ""
        images = f", {sum(len(tower.layers) for tower in self.towers)} layers of encoders of images as "
        return f"{text}{images}{len(self.all_blocks) - len(self.blocks)} blocks" if self.towers else text


def is_inside(name: str, others) -> bool:
    """Return whether a module is one of `others` or lies in one, by their names."""
    parts = name.split(".")
    return any(".".join(parts[:length]) in others for length in range(1, len(parts) + 1))


def plan_for(model: nn.Module, *, divided_rows: bool = False, allow_untested: bool = False) -> ShardingPlan:
    """Return the plan of a model (without PEFT's outer wrapper).

    Args:
        divided_rows: whether positions of rows are divided; then attention that chooses its keys gets full sequences.
        allow_untested: whether a type that has not been compared with one process may have a plan.
    """
    model_type = _type_of(model)
    if model_type not in CHECKED and not (allow_untested and model_type):
        what = f"{model_type} models" if model_type else type(model).__name__
        return ShardingPlan(
            reason=f"no block plan for {what}: every Linear on its own, activations full on every (x, y)"
        )
    plan = derive(model, model_type, divided_rows=divided_rows)
    plan.untested = model_type not in CHECKED and plan.reason is None
    return plan


def derive(model: nn.Module, model_type: str, *, divided_rows: bool = False) -> ShardingPlan:
    """Derive the plan of a model, whether its type has been checked or not."""
    specs = block_specs(model_type, getattr(model, "tp_plan", None) or {}, text_config(model))
    towers = _find_towers(model)
    found = next((each for each in _layer_lists(model, specs) if not is_inside(each[0], towers)), None)
    if found is None:
        return ShardingPlan(reason="no list of decoder layers with a block was found: every Linear on its own")
    list_name, layers = found
    decoder = list_name.rpartition(".")[0]
    plan = ShardingPlan(decoder=decoder, layers=[f"{list_name}.{index}" for index in range(len(layers))])
    for name, layer in zip(plan.layers, layers, strict=True):
        fitting = (fit(spec, layer, divided_rows=divided_rows) for spec in specs)
        _plan_layer(model, plan, name, layer, [spec for spec in fitting if spec is not None])
    if not plan.blocks and not _has_experts(model):
        return ShardingPlan(
            reason="no attention or MLP of this model can be sharded as a block: every Linear on its own"
        )
    if plan.borrows and not _lends_alike(plan):
        return ShardingPlan(
            reason="attention has keys of another layer, whose heads may be divided otherwise: every Linear on its own"
        )
    arguments = {name for layer in layers for name in inspect.signature(type(layer).forward).parameters}
    plan.per_token = tuple(name for name in PER_TOKEN_ARGUMENTS if name in arguments)
    kinds = {type(module).__name__ for layer in layers for module in layer.modules()}
    plan.copies = next(
        (place for place, mixes in (("first", COPIES_FIRST), ("last", COPIES_LAST)) if any(map(mixes.search, kinds))),
        "",
    )
    plan.final = _final(model, decoder, list_name, model_type)
    plan.towers = [_plan_tower(name, tower) for name, tower in towers.items()]
    return plan


def _find_towers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the encoders of images that are known, by name."""
    towers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if name and _type_of(module) in TOWERS and not is_inside(name, towers):
            towers[name] = module
    return towers


def _type_of(module: nn.Module) -> str | None:
    return getattr(getattr(module, "config", None), "model_type", None)


def _plan_tower(name: str, tower: nn.Module) -> ShardingPlan:
    """Return the blocks of an encoder of images, which are all that is sharded in its layers."""
    specs, plan = TOWERS[_type_of(tower) or ""], ShardingPlan(decoder=name)
    for list_name, layers in _layer_lists(tower, list(specs)):
        for index, layer in enumerate(layers):
            plan.layers.append(f"{name}.{list_name}.{index}")
            fitting = [found for spec in specs if (found := fit(spec, layer)) is not None]
            _plan_layer(tower, plan, plan.layers[-1], layer, fitting)
    return plan


def _lends_alike(plan: ShardingPlan) -> bool:
    """Return whether attention that has the keys and values of another layer finds there the heads of its rank: all
    attention is divided, and some layer with keys of its own has the same numbers of heads."""
    attention = [block for block in plan.blocks if block.is_attention]
    lenders = {(block.query, block.kv) for block in attention if not block.borrows}
    return len(attention) >= len(plan.layers) and all((block.query, block.kv) in lenders for block in attention)


def _layer_lists(model: nn.Module, specs: list[BlockSpec]) -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield lists of layers in which a spec finds its row layer, or experts are found."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module):
            known = any(has_module(layer, spec.row) for layer in module for spec in specs)
            if known or _has_experts(module[-1]) or any(map(mixer_parts, module[0].children())):
                yield name, module


def _has_experts(module: nn.Module) -> bool:
    return any(is_experts(inner) or is_per_token_experts(inner) for inner in module.modules())


def _plan_layer(model: nn.Module, plan: ShardingPlan, name: str, layer: nn.Module, specs: list[BlockSpec]) -> None:
    problems: dict[str, str] = {}
    inside: set[str] = set()  # entries, and rows and columns that lie outside of them
    for spec in specs:
        if spec.entry in inside:
            continue
        problem = block_problem(model, layer, spec)
        if problem:
            problems[spec.entry] = problem
            continue
        query, kv = head_counts(model, layer, spec) if spec.is_attention else (0, 0)
        plan.blocks.append(
            BlockPlan(
                entry=f"{name}.{spec.entry}",
                columns=tuple(f"{name}.{column}" for column in spec.columns),
                segments=tuple(spec.columns.values()),
                row=f"{name}.{spec.row}",
                query=query,
                kv=kv,
                attributes=spec.attributes,
                arguments=spec.arguments,
                latent=tuple(f"{name}.{path}" for path in spec.latent),
                shared={f"{name}.{path}": size for path, size in spec.shared.items()},
                parts={f"{name}.{path}": dim for path, dim in spec.parts.items()},
                cross=spec.cross,
                borrows=spec.borrows,
                added=spec.added,
                inner_norms={
                    f"{name}.{path}": (kind, f"{name}.{projection}")
                    for path, (kind, projection) in inner_norms(layer, spec).items()
                },
            )
        )
        inside |= {spec.entry, spec.row, *spec.columns}
    for path in _needs_full_sequence(layer, "", inside):
        module = layer.get_submodule(path)
        parts = "its projections are experts" if _has_experts(module) else divide_mixer(module)
        if isinstance(parts, MixerParts):
            plan.blocks.append(_mixer_block(f"{name}.{path}", parts))
        else:
            plan.full_sequence[f"{name}.{path}"] = problems.get(path, parts)


def _mixer_block(name: str, parts: MixerParts) -> BlockPlan:
    return BlockPlan(
        entry=name,
        columns=tuple(f"{name}.{column}" for column in parts.columns),
        segments=tuple(parts.columns.values()),
        row=f"{name}.{parts.row}",
        query=parts.query,
        kv=parts.kv,
        attributes=parts.attributes,
        mixer=parts,
    )


def _needs_full_sequence(module: nn.Module, prefix: str, planned: set[str]) -> Iterator[str]:
    """Yield the outermost modules that are neither planned nor per token."""
    for child_name, child in module.named_children():
        path = f"{prefix}{child_name}"
        if path in planned or is_per_token(child) or is_experts(child):
            continue
        around = any(other.startswith(f"{path}.") for other in planned) or isinstance(child, nn.ModuleList)
        around = around or any(map(mixer_parts, child.children()))
        # Attention that has experts for projections is no way to experts of tokens.
        if around or (_has_experts(child) and not finds_attention_function(child)):
            yield from _needs_full_sequence(child, f"{path}.", planned)
        else:
            yield path


def is_per_token_experts(module: nn.Module) -> bool:
    """Return whether a module has experts of a form of its own, whose weights are gathered to this rank's tokens."""
    return type(module).__name__.endswith("Experts")


def is_per_token(module: nn.Module) -> bool:
    """Return whether a module treats each token by itself: it may then run on any share of the tokens."""
    kind = type(module)
    if not any(True for _ in module.parameters()) and not any(True for _ in module.children()):
        return True
    linear = kind is nn.Linear or is_four_bit(module)
    return linear or kind.__module__ in ACTIVATIONS or bool(PER_TOKEN.search(kind.__name__))


def _final(model: nn.Module, name: str, list_name: str, model_type: str) -> list[str] | None:
    """Return the modules that run on tokens after the layers, if they are a norm, or what makes one of copies of the
    residual stream, and then the head alone."""
    if model_type in LAYERS_OUTPUT_IS_RESHAPED or not _ends_in_head(model, name):
        return None
    children = list(model.get_submodule(name).named_children())
    after = children[[child for child, _ in children].index(list_name.rpartition(".")[2]) + 1 :]
    after = [child for child, module in after if any(True for _ in module.parameters())]
    mixers = [child for child, module in children if COPIES_LAST.search(type(module).__name__)]
    # A norm that stands before the list may be the last one too; what runs before the layers is seldom a norm.
    norms = [child for child, module in children if "Norm" in type(module).__name__]
    last = [child for child, _ in children if child in (*norms, *mixers)]
    if not last or len(norms) > 1 or last != after or norms == ["layernorm_embedding"]:  # BART's family's comes first
        return None
    return [f"{name}.{child}" if name else child for child in last]


def _ends_in_head(model: nn.Module, decoder: str) -> bool:
    """Return whether nothing with parameters stands between a decoder and the model's output but the head."""
    head = output_embedding(model)
    parts = decoder.split(".") if decoder else []
    around = model
    for index, part in enumerate(parts):
        names = [name for name, _ in around.named_children()]
        for name in names[names.index(part) + 1 :]:
            module = around.get_submodule(name)
            if module is not head and any(True for _ in module.parameters()):
                return False
        around = model.get_submodule(".".join(parts[: index + 1]))
    return True
