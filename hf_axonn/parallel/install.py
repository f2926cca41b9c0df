"""The way from a plan to a sharded model: DTensors for parameters, and a sharded layer for every module that has some.

`parallelize` calls `shard_parameters`, then `install_layers`. Neither communicates.
"""

from __future__ import annotations

import functools
import inspect
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_axonn.architectures.divided_rows import runs_along_row
from hf_axonn.architectures.feature_layout import LayoutChoice
from hf_axonn.architectures.parameter_reads import find_readers
from hf_axonn.architectures.plan import BlockPlan, ShardingPlan, is_inside
from hf_axonn.architectures.shared_experts import find_beside
from hf_axonn.architectures.weight_kinds import vocabulary_modules
from hf_axonn.compat.transformers import has_causal_lm_loss, output_embedding, text_config
from hf_axonn.distributed.mesh import ROWS, TOKENS
from hf_axonn.engine.dtensors import distribute_parameter, scale_gradient, shard_placements
from hf_axonn.engine.four_bit import elements_of
from hf_axonn.engine.linears import is_conv1d, is_linear, is_stacked, linear_size
from hf_axonn.engine.report import Entry
from hf_axonn.layers.base import FullLinear, Replicated, patch_forward, take_slice
from hf_axonn.layers.block import Block, ColumnParallel, RowParallel
from hf_axonn.layers.computed_ahead import ComputedAhead
from hf_axonn.layers.dropout import dropout_names, install_dropout, probability
from hf_axonn.layers.gathered import GatheredParameters
from hf_axonn.layers.head_exchange import HeadExchange
from hf_axonn.layers.latent_attention import LatentColumnParallel, install_latent, shared_hook
from hf_axonn.layers.mixer import ChannelSum, GatedNorm, MixerBlock
from hf_axonn.layers.moe import MovingExperts, expert_weights, experts_layer, is_experts
from hf_axonn.layers.norms import FeatureNorm, InnerNorm
from hf_axonn.layers.stacked_attention import StackedRow, sum_gradient_hook
from hf_axonn.layers.vocabulary import Embedding, Head
from hf_axonn.losses.router_aux import install_router_loss
from hf_axonn.losses.shares import install_shares
from hf_axonn.losses.vocab_parallel import ShardedCausalLMLoss
from hf_axonn.parallel.decoder import install_causal_lm, install_decoder, install_recomputation
from hf_axonn.parallel.images import install_towers
from hf_axonn.parallel.sharded_model import ShardedModel
from hf_axonn.topology.heads import Heads, feature_slice, own_count
from hf_axonn.topology.weight_kind import WeightKind


# What takes a rank's part of parameters and buffers, by their modules and names.
OwnParts = dict[nn.Module, dict[str, Callable[[Tensor], Tensor]]]


def shard_parameters(model: nn.Module, kinds: dict[int, WeightKind], state: ShardedModel) -> None:
    """Replace every parameter by a DTensor; a parameter that several modules share stays shared. No communication.

    A model of which nothing is sharded keeps its parameters as they are, as under DistributedDataParallel.
    """
    mesh = state.grid_mesh
    if {kinds.get(id(parameter), WeightKind.REPLICATED) for parameter in model.parameters()} <= {
        WeightKind.REPLICATED
    }:
        return
    made: dict[int, nn.Parameter] = {}
    transposed = {id(module.weight) for module in model.modules() if is_conv1d(module)}
    for module in list(model.modules()):
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                kind = kinds.get(id(parameter), WeightKind.REPLICATED)
                placements = shard_placements(kind, mesh.grid, transposed=id(parameter) in transposed)
                sharded = made[id(parameter)] = distribute_parameter(parameter, placements, mesh)
                kinds[id(sharded)] = kind
                made[id(sharded)] = sharded  # the new id must not be taken for an old one's
            module._parameters[name] = made[id(parameter)]


def install_layers(
    model: nn.Module,
    plan: ShardingPlan,
    kinds: dict[int, WeightKind],
    state: ShardedModel,
    layout: LayoutChoice,
    exchanging: Mapping[str, Heads],
) -> None:
    """Replace the forward of every module that has parameters, and write the report. No communication.

    Later steps wrap what earlier ones have installed: dropout and norms need the blocks around them, the decoder and
    the loss need all layers.

    Args:
        exchanging: as of `RowsChoice`.
    """
    state.take_plan(model, plan, exchanging)
    _install_vocabulary(model, plan, state)
    for block in plan.all_blocks:
        _install_block(model, block, state)
    _install_dropout(model, plan, state)
    _install_experts(model, kinds, state)
    _install_linears(model, kinds, state)
    own = {module: parts for block in plan.all_blocks for module, parts in _own_parts(model, block, state).items()}
    _install_gathered(model, plan, kinds, own, state)
    _install_replicated(model, own, state)
    _install_norms(model, plan, layout, state)
    if plan.decoder is not None:
        install_decoder(state, model, plan)
    install_towers(state, model, plan)
    install_recomputation(state, model)
    for reader in find_readers(model)[0]:
        state.add_reading(reader)
    install_causal_lm(state, model)
    install_router_loss(state, model)
    install_shares(state, model)
    if has_causal_lm_loss(model):
        vocabulary = getattr(output_embedding(model), "out_features", text_config(model).vocab_size)
        model.loss_function = ShardedCausalLMLoss(state, vocabulary)


def _note(state: ShardedModel, name: str, module: nn.Module, kind: WeightKind, reason: str = "") -> None:
    """Write a module into the report."""
    report = state.report
    own = [each for each in module._parameters.values() if each is not None and id(each) not in report.counted]
    report.counted.update(map(id, own))
    report.entries.append(Entry(name or "(root)", kind, sum(map(elements_of, own)), reason))


def _remaining(model: nn.Module, state: ShardedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with parameters that no step has taken yet."""
    for name, module in model.named_modules():
        if getattr(module, "elsewhere", False):  # of another stage of a pipeline
            continue
        if module not in state.sharded_layers and any(
            parameter is not None for parameter in module._parameters.values()
        ):
            yield name, module


def _install_vocabulary(model: nn.Module, plan: ShardingPlan, state: ShardedModel) -> None:
    names = {module: name for name, module in model.named_modules()}
    for module in vocabulary_modules(model, plan):
        layer = Embedding if isinstance(module, nn.Embedding) else Head
        state.install(module, functools.partial(layer, state))
        if layer is Head:
            state.set_head(defers=True)
        _note(state, names[module], module, WeightKind.VOCABULARY)


def _install_block(model: nn.Module, block: BlockPlan, state: ShardedModel) -> None:
    """Install attention or an MLP: its column and row layers, the way in, and the numbers of heads that it sees."""
    heads = state.heads_of(block)
    linears = [model.get_submodule(name) for name in block.columns]
    last, entry = model.get_submodule(block.row), model.get_submodule(block.entry)
    row: RowParallel | StackedRow
    if is_stacked(last) and heads is not None:
        row = StackedRow(state, entry, heads)
    else:
        row = RowParallel(state, last, heads)
        state.install_copies_by(last, row.install_copy)
    together = 0 if block.latent else 1 if block.cross else len(linears)  # that share the block's input
    columns = [ColumnParallel(state, linears[:together], heads, list(block.segments[:together]))] if together else []
    for linear, segments in list(zip(linears, block.segments, strict=True))[together:]:
        if not is_stacked(linear):
            columns.append(LatentColumnParallel(state, [linear], heads, [segments]))
        elif row.axes:
            state.install(linear, sum_gradient_hook(state, row.axes))
    state.refuse_copies(entry)  # unless it is one of the Linears
    for column in columns:
        for index, linear in enumerate(column.linears):
            state.install_copies_by(linear, functools.partial(column.install_copy, index))
    if block.latent:
        install_latent(state, entry, row)
        for name, size in block.shared.items() if heads and row.axes else ():
            state.install(model.get_submodule(name), shared_hook(state, row, getattr(entry, size) if size else 0))
    else:
        assert isinstance(row, RowParallel)  # experts are projections of latent attention alone (block_checks.py)
        state.add_block(entry, _way_in(state, entry, columns[0], row, block))
    if (within := state.heads_within(block)) is not None:
        _install_heads(state, entry, within, block)
    reason = heads.why(state.grid_mesh) if heads else ""
    for name, linear in zip((*block.columns, block.row), (*linears, last), strict=True):
        if not is_stacked(linear):  # which `_install_gathered` comes to
            _note(state, name, linear, WeightKind.ROW if linear is last else WeightKind.COLUMN, reason)


def _way_in(
    state: ShardedModel, entry: nn.Module, column: ColumnParallel, row: RowParallel, block: BlockPlan
) -> Block:
    if block.mixer is None:
        return Block(state, entry, column, row)
    inner = state.heads_within(block) if state.exchanges(block) else None
    return MixerBlock(state, entry, column, row, direct=block.mixer.direct, masks=block.mixer.masks, inner=inner)


class OwnConfig:
    """The config of a module that has numbers of its own: those that are set here. All else, as the implementation of
    attention, which may be changed at any time, is that of the full model's config as it is then."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._config, name)


def _install_heads(state: ShardedModel, attention: nn.Module, heads: Heads, block: BlockPlan) -> None:
    """Let attention see this rank's numbers of heads, and its own heads of arguments that have them all."""
    mesh = state.grid_mesh
    query, kv = heads.own_query(mesh), heads.own_kv(mesh)
    if heads.replicate_kv and hasattr(attention, "num_key_value_groups"):
        attention.num_key_value_groups = query // kv
    for name, kind in block.attributes.items():
        owner, _, attribute = name.rpartition(".")
        if owner and not isinstance(getattr(attention, owner), nn.Module):
            setattr(attention, owner, OwnConfig(getattr(attention, owner)))
        target = getattr(attention, owner) if owner else attention
        setattr(target, attribute, own_count(getattr(target, attribute), kind, heads, mesh))
    if block.arguments and heads.axes:
        signature = inspect.signature(attention.forward)
        rows, _ = feature_slice(heads.query, mesh, *heads.axes)

        def forward(original: Callable, *args, **kwargs):
            given = signature.bind(*args, **kwargs)
            for name in block.arguments:
                value = given.arguments.get(name)
                if value is not None:
                    by_head = value.view(-1, heads.query, *value.shape[1:])
                    given.arguments[name] = by_head[:, rows].flatten(0, 1)
            return original(*given.args, **given.kwargs)

        patch_forward(attention, forward)


def _install_dropout(model: nn.Module, plan: ShardingPlan, state: ShardedModel) -> None:
    # Ranks of context repeat these.
    whole = [name for name in plan.full_sequence if runs_along_row(model.get_submodule(name))]
    whole += [block.entry for block in plan.blocks if block.mixer and not state.exchanges(block)]
    for name, module in model.named_modules():
        attributes = dropout_names(module)
        if attributes:
            axes = state.axes(name)
            if axes and any(re.search("hidden|resid", word) for word in (name, *attributes)):
                axes = ("x", "y")  # what a block drops after its row layer are tokens
            tokens = ROWS if is_inside(name, whole) else TOKENS
            state.install(module, functools.partial(_keyed_dropout, state, axes, tokens, attributes))


def _install_experts(model: nn.Module, kinds: dict[int, WeightKind], state: ShardedModel) -> None:
    for name, module in _remaining(model, state):
        if is_experts(module):
            kind = kinds[id(module._parameters[expert_weights(module)[0]])]
            state.install(module, functools.partial(experts_layer(module, kind), state))
            _note(state, name, module, kind)
            layer = state.sharded_layers[module]
            if isinstance(layer, MovingExperts):
                _install_beside(model, name, layer, state)


def _install_beside(model: nn.Module, name: str, experts: MovingExperts, state: ShardedModel) -> None:
    """Let what needs no token that travels to experts be computed meanwhile."""
    (mixture, own), *around = ((model.get_submodule(path), found) for path, found in find_beside(model, name).items())
    after = [outer.get_submodule(child) for outer, children in around for child in children]
    if own or after:
        ahead = ComputedAhead(mixture, own, after)
        experts.compute_meanwhile(ahead)
        state.add_ahead(mixture, ahead)


def _install_linears(model: nn.Module, kinds: dict[int, WeightKind], state: ShardedModel) -> None:
    """Install Linears on their own."""
    for name, module in _remaining(model, state):
        if is_linear(module) and kinds.get(id(module.weight)) == WeightKind.LINEAR:
            state.install(module, functools.partial(FullLinear, state))
            _note(state, name, module, WeightKind.LINEAR)


def _install_gathered(
    model: nn.Module, plan: ShardingPlan, kinds: dict[int, WeightKind], own: OwnParts, state: ShardedModel
) -> None:
    """Install modules with large parameters of which nothing is known, or of which ranks use parts."""
    sums = {f"{block.entry}.{path}": block for block in plan.blocks if block.mixer for path in block.mixer.sums}
    for name, module in _remaining(model, state):
        parameters = module._parameters.items()
        names = [child for child, parameter in parameters if kinds.get(id(parameter)) == WeightKind.GATHERED]
        if names:
            layer: Callable = GatheredParameters
            if name in sums:
                layer = functools.partial(ChannelSum, exchanges=state.exchanges(sums[name]))
            layer = functools.partial(layer, state, own=own.get(module))
            state.install(module, functools.partial(layer, partial_axes=state.axes(name), names=names))
            _note(state, name, module, WeightKind.GATHERED)


def _install_replicated(model: nn.Module, own: OwnParts, state: ShardedModel) -> None:
    """Install all that is left."""
    for name, module in _remaining(model, state):
        axes = state.axes(name)
        state.install(module, functools.partial(Replicated, state, partial_axes=axes, own=own.get(module)))
        _note(state, name, module, WeightKind.REPLICATED, _why_replicated(module))


def _own_parts(model: nn.Module, block: BlockPlan, state: ShardedModel) -> OwnParts:
    """Return what takes this rank's part of parameters and buffers in a block, by their modules and names. Those of
    attention itself have a row for each query head."""
    heads, entry = state.heads_within(block), model.get_submodule(block.entry)
    parts: OwnParts = {}
    if block.mixer is not None:
        for path, (dim, segments) in block.mixer.parameters.items():
            owner, _, name = path.rpartition(".")
            module = entry.get_submodule(owner)
            exchange = HeadExchange(getattr(module, name).shape[dim], segments, heads, state.grid_mesh)
            parts.setdefault(module, {})[name] = functools.partial(exchange.take, dim=dim)
    elif heads is not None:
        mesh = state.grid_mesh
        for name, parameter in entry._parameters.items():
            if parameter is not None:
                rows, _ = feature_slice(len(parameter), mesh, *heads.axes)
                parts.setdefault(entry, {})[name] = operator.itemgetter(rows)
        for path, cut in block.parts.items():
            owner, _, name = path.rpartition(".")
            if cut is None:
                take: Callable = functools.partial(torch.div, other=mesh.size(*heads.axes))
            else:
                rows, _ = feature_slice(model.get_parameter(path).shape[cut], mesh, *heads.axes)
                take = functools.partial(torch.narrow, dim=cut, start=rows.start, length=rows.stop - rows.start)
            parts.setdefault(model.get_submodule(owner), {})[name] = take
        added = (name for name in block.added if entry._parameters.get(name) is not None)
        parts.setdefault(entry, {}).update(
            dict.fromkeys(added, functools.partial(_take_for_tokens, state, heads.axes))
        )
    return parts


def _take_for_tokens(state: ShardedModel, axes: tuple[str, ...], parameter: Tensor) -> Tensor:
    """Return what this rank's tokens need of a parameter [H] that is added to them; `axes`: those over which its
    gradient is summed already, where every rank of (x, y) has the gradient of its own tokens or features."""
    tokens, mesh = state.context.tokens, state.grid_mesh
    assert tokens is not None  # Block has seen to that
    parameter = scale_gradient(parameter, mesh.size("x", "y") / mesh.size(*axes))
    return take_slice(parameter, len(parameter), mesh, "y") if tokens.features else parameter


def _install_norms(model: nn.Module, plan: ShardingPlan, layout: LayoutChoice, state: ShardedModel) -> None:
    """Install norms on the residual stream, and norms over the features of all heads."""
    for module, kind in layout.norms.items():
        state.install(module, functools.partial(FeatureNorm, state, kind=kind))
    for block in plan.all_blocks:
        heads, within = state.heads_of(block), state.heads_within(block)
        if block.mixer is not None and block.mixer.gate is not None and within is not None:
            norm = model.get_submodule(f"{block.entry}.{block.mixer.norm}")
            state.install(norm, functools.partial(GatedNorm, state, kind=block.mixer.gate, heads=within))
        for name, (kind, projection) in block.inner_norms.items():
            linear = model.get_submodule(projection)
            layer = state.sharded_layers[linear]
            if projection == block.row:
                parts = ("query",) if heads else ("own",)
                exchange = HeadExchange(linear_size(linear)[1], parts, heads, state.grid_mesh)
            else:
                exchange = layer.exchange_of(linear)
            if layer.axes:
                install = functools.partial(InnerNorm, state, kind=kind, exchange=exchange)
                state.install(model.get_submodule(name), install)


def _keyed_dropout(
    state: ShardedModel, axes: tuple[str, ...], tokens: tuple[str, ...], names: list[str], module: nn.Module
) -> None:
    install_dropout(state, module, axes, probability(module, *names), tokens=tokens)


def _why_replicated(module: nn.Module) -> str:
    if isinstance(module, nn.Linear):
        return f"a {type(module).__name__}, whose weight is used in more than one way or that is a class of its own"
    return f"a {type(module).__name__}, whose parameters every rank holds in full"
