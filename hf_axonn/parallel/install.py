"""From a plan to an installed model: which weight is cut how, DTensors for parameters, and a style for every module.

`parallelize` calls the three steps in order. Only `shard_parameters` communicates (one broadcast a parameter).
"""

from __future__ import annotations

import functools
import re

from torch import nn

from hf_axonn.architectures.feature_layout import LayoutChoice
from hf_axonn.architectures.parameter_reads import find_readers
from hf_axonn.architectures.plan import ShardingPlan
from hf_axonn.architectures.weight_kinds import vocabulary_modules
from hf_axonn.compat.transformers import has_causal_lm_loss
from hf_axonn.distributed.collectives import broadcast_
from hf_axonn.engine.dtensors import distributed, shard_placements
from hf_axonn.engine.linears import is_conv1d, is_linear
from hf_axonn.engine.report import Entry, Report
from hf_axonn.engine.state import ModelState
from hf_axonn.layers.base import FullLinear, Reading, Replicated
from hf_axonn.layers.block import Block, Column, Row, install_heads
from hf_axonn.layers.dropout import dropout_names, install_dropout, probability
from hf_axonn.layers.gathered import GatheredParameters
from hf_axonn.layers.head_exchange import HeadExchange
from hf_axonn.layers.latent_attention import LatentColumn, install_latent
from hf_axonn.layers.moe import is_experts, style_of
from hf_axonn.layers.norms import FeatureNorm, HeadNorm, NormKind
from hf_axonn.layers.vocabulary import Embedding, Head
from hf_axonn.losses.router_aux import install_router_loss
from hf_axonn.losses.vocab_parallel import ShardedCausalLMLoss
from hf_axonn.parallel.batch_check import install_batch_check
from hf_axonn.parallel.decoder import install_causal_lm, install_decoder, install_recomputation
from hf_axonn.topology.heads import Heads, feature_slice
from hf_axonn.topology.weight_kind import WeightKind


def shard_parameters(model: nn.Module, kinds: dict[int, WeightKind], state: ModelState) -> None:
    """Replace every parameter by a DTensor; a parameter that several modules share stays shared.

    A model of which nothing is cut keeps its parameters as they are, as under DistributedDataParallel.
    """
    mesh = state.mesh
    if {kinds.get(id(parameter), WeightKind.REPLICATED) for parameter in model.parameters()} <= {
        WeightKind.REPLICATED
    }:
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                tensor.detach().copy_(broadcast_(tensor.detach().contiguous()))
        return
    made: dict[int, nn.Parameter] = {}
    transposed = {id(module.weight) for module in model.modules() if is_conv1d(module)}
    for module in list(model.modules()):
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                kind = kinds.get(id(parameter), WeightKind.REPLICATED)
                placements = shard_placements(kind, transposed=id(parameter) in transposed)
                sharded = made[id(parameter)] = distributed(parameter, placements, mesh)
                kinds[id(sharded)] = kind
                made[id(sharded)] = sharded  # the new id must not be taken for an old one's
            module._parameters[name] = made[id(parameter)]
    for buffer in model.buffers():
        if not buffer.is_meta:
            broadcast_(buffer)


def install_styles(
    model: nn.Module,
    plan: ShardingPlan,
    kinds: dict[int, WeightKind],
    state: ModelState,
    report: Report,
    layout: LayoutChoice,
) -> None:
    """Give every module that has parameters the forward of its style, and write the report."""
    state.features = layout.features
    done: set[nn.Module] = set()
    names = {module: name for name, module in model.named_modules()}

    def note(module: nn.Module, kind: WeightKind, reason: str = "") -> None:
        done.add(module)
        own = sum(parameter.numel() for parameter in module._parameters.values() if parameter is not None)
        report.entries.append(Entry(names[module] or "(root)", kind, own, reason))

    vocabulary = vocabulary_modules(model, plan)
    for module in vocabulary:
        state.give(module, functools.partial(Embedding if isinstance(module, nn.Embedding) else Head, state))
        note(module, WeightKind.VOCABULARY)
    # On which of (x, y) the ranks do different work inside of a module, by name; on none where nothing is said.
    axes_of = state.axes_of
    axes_of |= {name: ("x", "y") for name in (*plan.layers, *(plan.final or ()))}
    axes_of |= {name: () for name in plan.whole}
    state.whole = set(plan.whole)
    experts = {name for name, module in model.named_modules() if is_experts(module)}
    axes_of |= {name: ("x", "y") for name in experts}
    head_norms: list[tuple[nn.Module, NormKind, HeadExchange]] = []
    rows_of: dict[str, slice] = {}  # of parameters that have one row for each query head
    for block in plan.blocks:
        heads = Heads.divide(block.query, block.kv, state.mesh) if block.query else None
        columns = [model.get_submodule(name) for name in block.columns]
        last = model.get_submodule(block.row)
        row = Row(state, last, heads)
        state.makers[last] = [row.alone]
        if block.latent:
            pairs = zip(columns, block.segments, strict=True)
            own = [LatentColumn(state, [layer], heads, [segments]) for layer, segments in pairs]
        else:
            own = [Column(state, columns, heads, list(block.segments))]
        for column in own:
            for index, layer in enumerate(column.linears):
                state.makers[layer] = [functools.partial(column.alone, index)]
        for layer in (*columns, last):
            note(layer, WeightKind.ROW if layer is last else WeightKind.COLUMN, heads.why(state.mesh) if heads else "")
        entry = model.get_submodule(block.entry)
        state.makers.setdefault(entry, None)
        axes_of[block.entry] = row.axes
        for name, (kind, index) in block.head_norms.items():
            if row.axes:
                head_norms.append((model.get_submodule(name), kind, own[0].selections[index]))
        if block.latent:
            install_latent(state, entry, own, row, model.get_submodule(block.latent[0]))
            axes_of |= {name: () for name in block.latent}
        else:
            state.blocks[entry] = Block(state, entry, own[0], row)
        if heads is not None:
            rows_of[block.entry], _ = feature_slice(heads.query, state.mesh, *heads.axes)
            install_heads(state, entry, heads, block)
    for name, module in model.named_modules():
        axes = state.axes(name)
        dropouts = dropout_names(module)
        if dropouts:
            # What a block drops after its row layer are tokens.
            own = ("x", "y") if axes and any(re.search("hidden|resid", its) for its in (name, *dropouts)) else axes
            state.give(module, functools.partial(_keyed_dropout, state, own, dropouts))
        if module in done or not any(parameter is not None for parameter in module._parameters.values()):
            continue
        if name in experts:
            state.give(module, functools.partial(style_of(module), state))
            note(module, WeightKind.EXPERTS)
            continue
        if is_linear(module) and kinds.get(id(module.weight)) == WeightKind.LINEAR:
            state.give(module, functools.partial(FullLinear, state))
            note(module, WeightKind.LINEAR)
            continue
        gathered = [
            its for its, parameter in module._parameters.items() if kinds.get(id(parameter)) == WeightKind.GATHERED
        ]
        if gathered:
            state.give(module, functools.partial(GatheredParameters, state, partial_axes=axes, names=gathered))
            note(module, WeightKind.GATHERED)
            continue
        state.give(module, functools.partial(Replicated, state, partial_axes=axes, own=rows_of.get(name)))
        note(module, WeightKind.REPLICATED, _why_replicated(module))
    for module, kind in layout.norms.items():
        state.give(module, functools.partial(FeatureNorm, state, kind=kind))
    for module, kind, selection in head_norms:
        state.give(module, functools.partial(HeadNorm, state, kind=kind, selection=selection))
    if plan.decoder is not None:
        install_decoder(state, model, plan)
    install_recomputation(state, model)
    for reader in find_readers(model)[0]:
        Reading(state, reader)
    install_causal_lm(state, model)
    install_batch_check(state, model)
    install_router_loss(state, model)
    if has_causal_lm_loss(model):
        model.loss_function = ShardedCausalLMLoss(state)


def _keyed_dropout(state: ModelState, axes: tuple[str, ...], names: list[str], module: nn.Module) -> None:
    install_dropout(state, module, axes, probability(module, *names))


def _why_replicated(module: nn.Module) -> str:
    if isinstance(module, nn.Linear):
        return f"a {type(module).__name__}, whose weight is used in more than one way or that is a class of its own"
    return f"a {type(module).__name__}, whose parameters every rank holds whole"
