"""From a plan to an installed model: which weight is cut how, DTensors for parameters, and a style for every module.

`parallelize` calls the three steps in order. Only `shard_parameters` communicates (one broadcast a parameter).
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard

from hf_axonn.architectures.feature_layout import LayoutChoice
from hf_axonn.architectures.parameter_reads import find_readers
from hf_axonn.architectures.plan import Plan, is_inside
from hf_axonn.compat.torch import has_causal_lm_loss, output_embedding
from hf_axonn.distributed.collectives import broadcast_
from hf_axonn.engine.activation_layouts import bounds
from hf_axonn.engine.report import Entry, Report
from hf_axonn.engine.state import ModelState, is_conv1d, is_linear, shard_placements
from hf_axonn.layers.base import FullLinear, Reading, Replicated
from hf_axonn.layers.block import Block, Column, Row, install_heads
from hf_axonn.layers.dropout import dropout_names, install_dropout, probability
from hf_axonn.layers.gathered import SMALLEST_PART, Gathered
from hf_axonn.layers.head_exchange import Selection
from hf_axonn.layers.latent_attention import LatentColumn, install_latent
from hf_axonn.layers.moe import expert_weights, is_experts, style_of
from hf_axonn.layers.norms import FeatureNorm, HeadNorm, NormKind
from hf_axonn.layers.vocabulary import Embedding, Head, is_vocabulary
from hf_axonn.losses.router_aux import install_router_loss
from hf_axonn.losses.vocab_parallel import ShardedCausalLMLoss
from hf_axonn.parallel.batch_check import install_batch_check
from hf_axonn.parallel.decoder import install_causal_lm, install_decoder, install_recomputation
from hf_axonn.topology.grid import WEIGHT_AXES, GridMesh
from hf_axonn.topology.heads import Heads, feature_slice


def weight_kinds(model: nn.Module, plan: Plan) -> dict[int, str]:
    """How each weight is cut, by id of the parameter: those not named here are replicated."""
    modules = dict(model.named_modules())
    kinds: dict[int, str] = {}
    for block in plan.blocks:
        for name in block.columns:
            kinds[id(modules[name].weight)] = "column"
        kinds[id(modules[block.row].weight)] = "row"
    vocabulary = _vocabulary(model, plan)
    for name, module in modules.items():
        if is_linear(module) and module not in vocabulary and plan.is_full(name):
            # A weight that two modules use in different ways can only be held whole.
            kinds[id(module.weight)] = "full" if kinds.get(id(module.weight), "full") == "full" else "replicated"
    for module in filter(is_experts, modules.values()):
        kinds |= {id(module._parameters[name]): "experts" for name in expert_weights(module)}
    embedded = {id(module.weight) for module in modules.values() if isinstance(module, nn.Embedding)}
    kinds = {key: "replicated" if key in embedded else kind for key, kind in kinds.items()}
    for module in vocabulary:
        kinds[id(module.weight)] = "vocabulary"
    kinds |= {key: "gathered" for key in _large_others(model, plan) - kinds.keys()}
    _, changed = find_readers(model)
    return kinds | {id(parameter): "replicated" for module in changed for parameter in module.parameters(False)}


def _large_others(model: nn.Module, plan: Plan) -> set[int]:
    """Ids of large parameters of more than one dim that one module has for itself, outside of blocks."""
    entries = {block.entry for block in plan.blocks}
    smallest = SMALLEST_PART * max((parameter.numel() for parameter in model.parameters()), default=0)
    found = Counter()
    for name, module in model.named_modules():
        weight = 2 if is_inside(name, entries) or is_experts(module) else 1
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1 and parameter.numel() >= smallest:
                found[id(parameter)] += weight
    return {key for key, weight in found.items() if weight == 1}


def _vocabulary(model: nn.Module, plan: Plan) -> list[nn.Module]:
    """The embeddings of a size with the largest, and the head, where they are of the plain kind.

    Not inside of decoder layers, where ranks look up different ids; and not where anything else has the weight too.
    """
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    head = output_embedding(model)
    head = head if type(head) is nn.Linear else None
    embeddings = [
        module
        for name, module in model.named_modules()
        if is_vocabulary(module) and not is_inside(name, plan.layers)
        if all(is_vocabulary(its) or its is head for its in owners[id(module.weight)])
    ]
    largest = max((module.weight.numel() for module in embeddings), default=0)
    found = [module for module in embeddings if 4 * module.weight.numel() >= largest]
    if head is not None and all(its is head or its in found for its in owners[id(head.weight)]):
        found.append(head)
    return found


def shard_slices(shape: torch.Size, placements: Sequence[Placement], mesh: GridMesh) -> tuple[slice, ...]:
    """Where this rank's piece of a full tensor lies, as DTensor cuts it on the storage mesh (y, x, z)."""
    spans = [(0, size) for size in shape]
    for axis, placement in zip(WEIGHT_AXES, placements, strict=True):
        if isinstance(placement, Shard):
            begin, end = spans[placement.dim]
            start, stop = bounds(end - begin, mesh.size(axis), mesh.index(axis))
            spans[placement.dim] = (begin + start, begin + stop)
    return tuple(slice(*span) for span in spans)


def shard_of(tensor: Tensor, placements: Sequence[Placement], mesh: GridMesh) -> Tensor:
    """This rank's piece of a full tensor, as a view. No communication."""
    return tensor[shard_slices(tensor.shape, placements, mesh)]


def distributed(parameter: nn.Parameter, placements: Sequence[Placement], mesh: GridMesh) -> nn.Parameter:
    """A whole parameter as a DTensor; the values of rank 0 count. One broadcast over the world, none on the meta
    device."""
    full = parameter.detach()
    if not full.is_meta:
        full = broadcast_(full.contiguous())
    local = shard_of(full, placements, mesh)
    if any(isinstance(its, Shard) for its in placements):
        local = local.clone(memory_format=torch.contiguous_format)
    whole = DTensor.from_local(
        local, mesh.storage_mesh, placements, run_check=False, shape=full.shape, stride=_strides(full)
    )
    sharded = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    sharded.__dict__.update(parameter.__dict__)
    parameter.sharded_as = sharded  # for an optimizer that was made on it
    return sharded


def take_shards(model: nn.Module, state_dict: dict, prefix: str, *_) -> None:
    """Before `load_state_dict`: of whole tensors this rank takes its shards. No communication."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for key, value in state_dict.items():
        own = parameters.get(key.removeprefix(prefix)) if key.startswith(prefix) else None
        if isinstance(own, DTensor) and not isinstance(value, DTensor) and own.shape == value.shape:
            local = shard_of(value, own.placements, model.axonn.mesh).clone(memory_format=torch.contiguous_format)
            state_dict[key] = DTensor.from_local(
                local, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
            )


def shard_parameters(model: nn.Module, kinds: dict[int, str], state: ModelState) -> None:
    """Replace every parameter by a DTensor; a parameter that several modules share stays shared.

    A model of which nothing is cut keeps its parameters as they are, as under DistributedDataParallel.
    """
    mesh = state.mesh
    if all(kinds.get(id(parameter), "replicated") == "replicated" for parameter in model.parameters()):
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
                kind = kinds.get(id(parameter), "replicated")
                kept = {"full": "column", "gathered": "vocabulary"}.get(kind, kind)
                placements = shard_placements(kept, transposed=id(parameter) in transposed)
                sharded = made[id(parameter)] = distributed(parameter, placements, mesh)
                kinds[id(sharded)] = kind
                made[id(sharded)] = sharded  # the new id must not be taken for an old one's
            module._parameters[name] = made[id(parameter)]
    for buffer in model.buffers():
        if not buffer.is_meta:
            broadcast_(buffer)


def _strides(full: Tensor) -> tuple[int, ...]:
    return torch.empty(full.shape, device="meta").stride()


def install_styles(
    model: nn.Module, plan: Plan, kinds: dict[int, str], state: ModelState, report: Report, layout: LayoutChoice
) -> None:
    """Give every module that has parameters the forward of its style, and write the report."""
    state.features = layout.features
    done: set[nn.Module] = set()
    names = {module: name for name, module in model.named_modules()}

    def note(module: nn.Module, style: str, reason: str = "") -> None:
        done.add(module)
        own = sum(parameter.numel() for parameter in module._parameters.values() if parameter is not None)
        report.entries.append(Entry(names[module] or "(root)", style, own, reason))

    vocabulary = _vocabulary(model, plan)
    for module in vocabulary:
        state.give(module, functools.partial(Embedding if isinstance(module, nn.Embedding) else Head, state))
        note(module, "vocabulary")
    # On which of (x, y) the ranks do different work inside of a module, by name; on none where nothing is said.
    axes_of = state.axes_of
    axes_of |= {name: ("x", "y") for name in (*plan.layers, *(plan.final or ()))}
    axes_of |= {name: () for name in plan.whole}
    state.whole = set(plan.whole)
    experts = {name for name, module in model.named_modules() if is_experts(module)}
    axes_of |= {name: ("x", "y") for name in experts}
    head_norms: list[tuple[nn.Module, NormKind, Selection]] = []
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
            note(layer, "row" if layer is last else "column", heads.why(state.mesh) if heads else "")
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
            note(module, "experts")
            continue
        if is_linear(module) and kinds.get(id(module.weight)) == "full":
            state.give(module, functools.partial(FullLinear, state))
            note(module, "full")
            continue
        gathered = [its for its, parameter in module._parameters.items() if kinds.get(id(parameter)) == "gathered"]
        if gathered:
            state.give(module, functools.partial(Gathered, state, partial_axes=axes, names=gathered))
            note(module, "gathered")
            continue
        state.give(module, functools.partial(Replicated, state, partial_axes=axes, own=rows_of.get(name)))
        note(module, "replicated", _why_replicated(module))
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
