"""Checks that a spec fits a module, and the numbers of its heads.

A spec (table.py) is trusted for nothing that can be read off the model: that its projections are Linears, that
numbers of heads explain their sizes, that the code of attention reads no number of the full model that is not known,
and that every parameter belongs to a module. No communication, no change to the model.
"""

from __future__ import annotations

import inspect

from torch import nn

from hf_axonn.architectures.norm_probe import norm_kind
from hf_axonn.architectures.table import BlockSpec
from hf_axonn.compat.transformers import configured_head_counts, text_config
from hf_axonn.engine.linears import is_linear, linear_size
from hf_axonn.layers.norms import NormKind


# What attention reads when it reshapes by a number of heads of the full model instead of by head_dim.
GLOBAL_SIZES = {
    "num_heads",
    "num_attention_heads",
    "num_attn_heads",
    "n_heads",
    "n_head",
    "num_key_value_heads",
    "num_kv_heads",
    "kv_heads",
    "kv_dim",
    "embed_dim",
    "hidden_size",
    "all_head_size",
    "split_size",
    "inner_dim",
}
_KNOWN_NORMS: dict = {}  # what norm_kind has found out, by class and numbers


def block_problem(model: nn.Module, layer: nn.Module, spec: BlockSpec) -> str | None:
    """Return why a block cannot be sharded as one; None where it can."""
    for name in (*spec.columns, spec.row):
        module = layer.get_submodule(name)
        if not is_linear(module):
            return f"{name} is a {type(module).__name__}, not an nn.Linear"
    entry = layer.get_submodule(spec.entry)
    if spec.is_attention:
        read = (_names_read(entry) & GLOBAL_SIZES) - {name.rpartition(".")[2] for name in spec.attributes}
        if read:
            return f"its attention reads {', '.join(sorted(read))} of the whole model"
        counts = head_counts(model, layer, spec)
        if counts is None:
            return "its numbers of heads do not explain the sizes of its projections"
        return _unknown_parameters(entry, spec, layer, counts[0])
    return _unknown_parameters(entry, spec, layer, 0)


def _names_read(module: nn.Module) -> set[str]:
    """Return the names of attributes in the code of a module's forward and of the methods that it calls."""
    pending, seen, names = ["forward"], set(), set()
    while pending:
        method = inspect.unwrap(getattr(type(module), pending.pop(), None))
        code = getattr(method, "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        names |= set(code.co_names)
        pending += [name for name in code.co_names if inspect.isfunction(getattr(type(module), name, None))]
    return names


def head_counts(model: nn.Module, layer: nn.Module, spec: BlockSpec) -> tuple[int, int] | None:
    """Return (query, kv) heads of an attention block, None if they do not fit the projections."""
    entry = layer.get_submodule(spec.entry)
    counts = configured_head_counts(text_config(model), entry)
    row_in = linear_size(layer.get_submodule(spec.row))[1]
    if spec.grouped:
        counts = (counts[1], counts[1])
    width = getattr(entry, "v_head_dim", None) or getattr(entry, "head_dim", None)
    if width and counts[0] * width != row_in and row_in % width == 0:  # layers with numbers of heads of their own
        values = [name for name in spec.columns if name.rpartition(".")[2].startswith("v_")]
        if len(values) == 1:
            counts = (row_in // width, linear_size(layer.get_submodule(values[0]))[0] // width)
    units = {"query": counts[0], "kv": counts[1]}
    for name, segments in spec.columns.items():
        size, total = linear_size(layer.get_submodule(name))[0], sum(units.get(kind, 1) for kind in segments)
        if total == 0 or size % total:
            return None
    return counts if counts[0] and counts[1] and row_in % counts[0] == 0 and counts[0] % counts[1] == 0 else None


def head_norms(layer: nn.Module, spec: BlockSpec) -> dict[str, tuple[NormKind, int]]:
    """Return norms inside of attention over all features of q or of k, by name; those of one head are left out."""
    found: dict[str, tuple[NormKind, int]] = {}
    if not spec.is_attention or spec.latent:
        return found
    columns = list(spec.columns)
    for child, module in layer.get_submodule(spec.entry).named_children():
        letter = child[:2]
        named = [index for index, name in enumerate(columns) if name.rpartition(".")[2][:2] == letter]
        if letter not in ("q_", "k_") or len(named) != 1 or any(module in _inside(layer, name) for name in columns):
            continue
        size = linear_size(layer.get_submodule(columns[named[0]]))[0]
        if any(parameter.shape == (size,) for parameter in module.parameters()):
            kind = norm_kind(module, size, _KNOWN_NORMS)
            if kind is not None:
                found[f"{spec.entry}.{child}"] = (kind, named[0])
    return found


def _inside(layer: nn.Module, name: str) -> set[nn.Module]:
    return set(layer.get_submodule(name).modules())


def _unknown_parameters(entry: nn.Module, spec: BlockSpec, layer: nn.Module, query: int) -> str | None:
    """Describe parameters of a block that are of no projection or head, nor one for each head, nor single numbers."""
    known = [_inside(layer, name) for name in (*spec.columns, *spec.latent, spec.row)]
    known += [_inside(layer, name) for name in head_norms(layer, spec)]
    own = () if entry in (module for inner in known for module in inner) else entry.parameters(recurse=False)
    if any(parameter.shape[:1] != (query,) for parameter in own):
        return "it has parameters that are not one for each head"
    names = ("head_dim", "head_size", "v_head_dim", "attention_head_size")
    head_sizes = {getattr(entry, name, None) for name in names}
    for name, module in entry.named_modules():
        if any(module in inner for inner in known):
            continue
        sizes = {parameter.numel() for parameter in module.parameters(recurse=False)}
        if module is not entry and not sizes <= (head_sizes - {None}) | {1}:
            return f"its {name} has parameters of all heads" if query else f"its {name} needs all of its features"
    return None
