"""From a plan to an installed model: which weight is cut how, DTensors for parameters, and a style for every module.

`parallelize` calls the three steps in order. Only `shard_parameters` communicates (one broadcast a parameter).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard

from hf_axonn import compat
from hf_axonn.blocks import Block, Column, Heads, Row
from hf_axonn.collectives import broadcast_
from hf_axonn.decoder import install_causal_lm, install_decoder
from hf_axonn.dropout import install_dropout, is_dropout, probability
from hf_axonn.grid import WEIGHT_AXES, GridMesh
from hf_axonn.layouts import bounds
from hf_axonn.lora import ColumnLora, RowLora, lora_parts
from hf_axonn.loss import ShardedCausalLMLoss
from hf_axonn.plans import Plan, adapted
from hf_axonn.report import Entry, Report
from hf_axonn.state import ModelState, shard_placements
from hf_axonn.styles import FullLinear, Replicated
from hf_axonn.vocabulary import Embedding, Head


def weight_kinds(model: nn.Module, plan: Plan) -> dict[int, str]:
    """How each weight is cut, by id of the parameter: those not named here are replicated."""
    modules = dict(model.named_modules())
    kinds: dict[int, str] = {}
    for block in plan.blocks:
        for name in block.columns:
            kinds[id(adapted(modules[f"{block.name}.{name}"]).weight)] = "column"
        kinds[id(adapted(modules[f"{block.name}.{block.row}"]).weight)] = "row"
    vocabulary = _vocabulary(model)
    if plan.reason:
        whole = {*vocabulary, *_adapters(model)}
        for module in modules.values():
            if type(module) is nn.Linear and module not in whole:
                # A weight that two modules use in different ways can only be held whole.
                kinds[id(module.weight)] = "replicated" if id(module.weight) in kinds else "full"
        embedded = {id(module.weight) for module in modules.values() if isinstance(module, nn.Embedding)}
        kinds = {key: "replicated" if key in embedded else kind for key, kind in kinds.items()}
    for module in vocabulary:
        kinds[id(module.weight)] = "vocabulary"
    return kinds


def _vocabulary(model: nn.Module) -> list[nn.Module]:
    """The token embedding and the head, where they are of the plain kind."""
    if not hasattr(model, "get_input_embeddings"):
        return []
    embedding, head = compat.input_embedding(model), compat.output_embedding(model)
    found = []
    if type(embedding) is nn.Embedding and embedding.max_norm is None and not embedding.sparse:
        if not embedding.scale_grad_by_freq:
            found.append(embedding)
    if type(head) is nn.Linear:
        if embedding in found or head.weight is not getattr(embedding, "weight", None):
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


def _adapters(model: nn.Module) -> set[nn.Module]:
    """The A and B of every LoRA layer. They are small, so every rank holds them whole."""
    return {part for layer in model.modules() for pair in lora_parts(layer) for part in pair}


def shard_of(tensor: Tensor, placements: Sequence[Placement], mesh: GridMesh) -> Tensor:
    """This rank's piece of a full tensor, as a view. No communication."""
    return tensor[shard_slices(tensor.shape, placements, mesh)]


def shard_parameters(model: nn.Module, kinds: dict[int, str], state: ModelState) -> None:
    """Replace every parameter by a DTensor; a parameter that several modules share stays shared."""
    mesh = state.mesh
    made: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                kind = kinds.get(id(parameter), "replicated")
                placements = shard_placements("column" if kind == "full" else kind)
                full = parameter.detach()
                if not full.is_meta:
                    full = broadcast_(full.contiguous())
                local = shard_of(full, placements, mesh)
                local = local.clone(memory_format=torch.contiguous_format) if kind != "replicated" else local
                sharded = nn.Parameter(
                    DTensor.from_local(
                        local, mesh.storage_mesh, placements, run_check=False, shape=full.shape, stride=_strides(full)
                    ),
                    requires_grad=parameter.requires_grad,
                )
                sharded.__dict__.update(parameter.__dict__)
                made[id(parameter)] = sharded
                kinds[id(sharded)] = kind
                made[id(sharded)] = sharded  # the new id must not be taken for an old one's
            module._parameters[name] = made[id(parameter)]
    for buffer in model.buffers():
        if not buffer.is_meta:
            broadcast_(buffer)


def _strides(full: Tensor) -> tuple[int, ...]:
    return torch.empty(full.shape, device="meta").stride()


def install_styles(model: nn.Module, plan: Plan, kinds: dict[int, str], state: ModelState, report: Report) -> None:
    """Give every module that has parameters the forward of its style, and write the report."""
    done: set[nn.Module] = set()
    names = {module: name for name, module in model.named_modules()}

    def note(module: nn.Module, style: str, reason: str = "") -> None:
        done.add(module)
        own = sum(parameter.numel() for parameter in module._parameters.values() if parameter is not None)
        report.entries.append(Entry(names[module] or "(root)", style, own, reason))

    vocabulary = _vocabulary(model)
    for module in vocabulary:
        style = Embedding if isinstance(module, nn.Embedding) else Head
        style(state, module)
        note(module, "vocabulary")
    # On which of (x, y) the ranks do different work inside of a module, by name; on none where nothing is said.
    axes_of: dict[str, tuple[str, ...]] = {}
    for block in plan.blocks:
        heads = Heads.divide(*compat.head_counts(model.config), state.mesh) if block.is_attention else None
        parent = model.get_submodule(block.name)
        columns = [parent.get_submodule(name) for name in block.columns]
        last = parent.get_submodule(block.row)
        column = Column(state, [adapted(layer) for layer in columns], heads)
        row = Row(state, adapted(last), heads)
        for layer in (*columns, last):
            is_row = layer is last
            for pair in lora_parts(layer):
                RowLora(state, row, pair) if is_row else ColumnLora(state, column, adapted(layer), pair)
                for part in pair:
                    note(part, "adapter")
            if layer is not adapted(layer):
                # What PEFT drops of a column layer's input is whole on x; a row layer's is cut as its heads are.
                axes_of[names[layer]] = row.axes if is_row else ("y",)
            note(adapted(layer), "row" if is_row else "column", _why(heads, state))
        Block(state, parent, column, row)
        axes_of[block.name] = row.axes
        if heads is not None:
            state.attention_axes = heads.axes
            compat.set_kv_groups(parent, 1 if heads.expand else None)
            install_dropout(state, parent, heads.axes, probability(parent, "attention_dropout"))
    adapters = _adapters(model)
    for name in (*plan.layers, *plan.final):
        axes_of[name] = ("x", "y")
    for name, module in model.named_modules():
        axes = next((axes_of[part] for part in _prefixes(name) if part in axes_of), ())
        if is_dropout(module):
            install_dropout(state, module, axes, probability(module, "p"))
        if module in done or not any(parameter is not None for parameter in module._parameters.values()):
            continue
        if type(module) is nn.Linear and kinds.get(id(module.weight)) == "full":
            FullLinear(state, module)
            note(module, "full")
            continue
        Replicated(state, module, axes)
        if module in adapters:
            note(module, "adapter")
        else:
            note(module, "replicated", _why_replicated(module))
    if plan.decoder is not None:
        install_decoder(state, model, plan)
    install_causal_lm(state, model)
    if compat.has_causal_lm_loss(model):
        model.loss_function = ShardedCausalLMLoss(state)


def _prefixes(name: str) -> list[str]:
    """A module's name and those of the modules around it, innermost first."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _why(heads: Heads | None, state: ModelState) -> str:
    """How an attention block is cut where it is not over all of (x, y)."""
    if heads is None or (heads.axes == ("x", "y") and not heads.expand):
        return ""
    sizes = f"x*y = {state.mesh.size('x', 'y')}"
    if heads.axes == ("x", "y"):
        return f"{heads.kv} kv heads are not divisible by {sizes}: k and v are gathered, one kv head a query head"
    if heads.axes:
        return f"{heads.query} heads are divisible by x = {state.mesh.size('x')} but not by {sizes}: repeated over y"
    return f"{heads.query} heads are not divisible by x = {state.mesh.size('x')}: attention on all heads on every rank"


def _why_replicated(module: nn.Module) -> str:
    if isinstance(module, nn.Linear):
        return f"a {type(module).__name__}, whose weight is used in more than one way or that is a class of its own"
    return f"a {type(module).__name__}, whose parameters every rank holds whole"
