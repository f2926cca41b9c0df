"""Checks that a spec fits a module, and the numbers of its heads.

A spec (table.py) is trusted for nothing that can be read off the model: that its projections are Linears, that
numbers of heads explain their sizes, that the code of attention reads no number of the full model that is not known,
and that every parameter belongs to a module. No communication, no change to the model.
"""

from __future__ import annotations

import dis
import fnmatch
import inspect
from collections.abc import Iterator, Set
from dataclasses import replace
from pathlib import Path
from types import CodeType

from torch import nn

from hf_axonn.architectures.norm_probe import norm_kind
from hf_axonn.architectures.table import BlockSpec
from hf_axonn.architectures.trials import mixes_features
from hf_axonn.compat.transformers import configured_head_counts, text_config
from hf_axonn.engine.linears import is_linear, is_stacked, linear_size
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
# Projections of attention's input that scale its output: a number for each query head, or for each of its features.
GATES = ("gate_proj", "g_proj")
# Parts of attention that choose or make keys for all of its heads, from full activations of whole rows.
OF_WHOLE_ROWS = ("indexer", "compressor")
_KNOWN_NORMS: dict = {}  # what norm_kind has found out, by class and numbers


def has_module(module: nn.Module, path: str) -> bool:
    """Return whether a module is found below another one."""
    try:
        return isinstance(module.get_submodule(path), nn.Module)
    except AttributeError:
        return False


def fit(spec: BlockSpec, layer: nn.Module, *, divided_rows: bool = False) -> BlockSpec | None:
    """Return a spec as a layer has it, None if it does not.

    Attention may lack projections of keys and values: those of values are its keys then, or both are those of another
    layer. And it may have a gate beside them, and latent attention an indexer or compressor where it gets whole rows.
    """
    spec = _without_patterns(spec, layer)
    missing = [name for name in spec.columns if not has_module(layer, name)]
    optional = spec.is_attention and all(spec.columns[name] == ("kv",) for name in missing)
    if not all(has_module(layer, name) for name in (*spec.latent, spec.row)) or (missing and not optional):
        return None
    columns = {name: parts for name, parts in spec.columns.items() if name not in missing}
    if spec.is_attention:
        gates = (f"{spec.entry}.{name}" for name in GATES)
        gated = {name: ("query",) for name in gates if has_module(layer, name)}
        columns = gated | columns if spec.latent else columns | gated  # kv_b, or what makes keys, stays the last
    others = tuple(name for each in OF_WHOLE_ROWS if has_module(layer, name := f"{spec.entry}.{each}"))
    latent = tuple(name for name in spec.latent if name not in others)
    if spec.is_attention and spec.latent and not divided_rows:
        latent += others
    shared = {name: size for name, size in spec.shared.items() if name in latent}
    borrows = bool(missing) and not any("kv" in parts for parts in columns.values())
    return replace(spec, columns=columns, latent=latent, shared=shared, borrows=borrows)


def _without_patterns(spec: BlockSpec, layer: nn.Module) -> BlockSpec:
    patterns = [name for name in (*spec.columns, *spec.latent) if "*" in name]
    if not patterns:
        return spec
    modules = [name for name, _ in layer.named_modules()]
    listed = {pattern: fnmatch.filter(modules, pattern) for pattern in patterns}
    columns = {each: parts for name, parts in spec.columns.items() for each in listed.get(name, [name])}
    return replace(
        spec, columns=columns, latent=tuple(each for name in spec.latent for each in listed.get(name, [name]))
    )


def block_problem(model: nn.Module, layer: nn.Module, spec: BlockSpec) -> str | None:
    """Return why a block cannot be sharded as one; None where it can."""
    for name in (*spec.columns, spec.row):
        module = layer.get_submodule(name)
        if not (is_linear(module) or (spec.is_attention and spec.latent and is_stacked(module))):
            return f"{name} is a {type(module).__name__}, not an nn.Linear"
    entry = layer.get_submodule(spec.entry)
    if spec.is_attention:
        read = _reads(entry, GLOBAL_SIZES - {name.rpartition(".")[2] for name in spec.attributes})
        if read:
            return f"its attention reads {', '.join(read)} of the whole model at {', '.join(read.values())}"
        counts = head_counts(model, layer, spec)
        if counts is None:
            return "its numbers of heads do not explain the sizes of its projections"
        query = configured_head_counts(text_config(model), entry)[0] if spec.groups else counts[0]
        return _unknown_parameters(entry, spec, layer, query)
    norms = [layer.get_submodule(name) for name in inner_norms(layer, spec)]
    columns = {layer.get_submodule(name): len(parts) for name, parts in spec.columns.items()}
    if mixes_features(entry, columns, layer.get_submodule(spec.row), norms):
        return "its code computes with all of its features"
    return _unknown_parameters(entry, spec, layer, 0)


def _reads(module: nn.Module, names: Set[str]) -> dict[str, str]:
    """Return which attributes of some names are in the code of a module's forward and of the methods that it calls,
    with the file and line where each is first."""
    found: dict[str, str] = {}
    for code in _code_of(module):
        for step in dis.get_instructions(code) if not names.isdisjoint(code.co_names) else ():
            if step.opname.endswith(("_ATTR", "_METHOD")) and step.argval in names:
                line = step.positions.lineno if step.positions else None
                found.setdefault(step.argval, f"{Path(code.co_filename).name}:{line or code.co_firstlineno}")
    return dict(sorted(found.items()))


def _code_of(module: nn.Module) -> Iterator[CodeType]:
    """Yield the code of a module's forward, of the methods that it calls, also as `super()`, and of functions that are
    made in these."""
    pending, seen = [getattr(inspect.unwrap(type(module).forward), "__code__", None)], set()
    while pending:
        code = pending.pop()
        if code is None or code in seen:
            continue
        seen.add(code)
        yield code
        kinds = type(module).__mro__ if "super" in code.co_names else (type(module),)
        methods = (getattr(kind, name, None) for kind in kinds for name in code.co_names)
        pending += [inspect.unwrap(method).__code__ for method in methods if inspect.isfunction(method)]
        pending += [made for made in code.co_consts if isinstance(made, CodeType)]


def head_counts(model: nn.Module, layer: nn.Module, spec: BlockSpec) -> tuple[int, int] | None:
    """Return (query, kv) heads of an attention block, None if they do not fit the projections."""
    entry = layer.get_submodule(spec.entry)
    counts = configured_head_counts(text_config(model), entry)
    row_in = linear_size(layer.get_submodule(spec.row))[1]
    if spec.grouped:
        counts = (counts[1], counts[1])
    if spec.groups:
        groups = getattr(text_config(model), spec.groups)
        return (groups, groups) if _explain((groups, groups), layer, spec) and counts[0] % groups == 0 else None
    width = getattr(entry, "v_head_dim", None) or getattr(entry, "head_dim", None)
    if width and counts[0] * width != row_in and row_in % width == 0:  # layers with numbers of heads of their own
        values = [name for name in spec.columns if name.rpartition(".")[2].startswith("v_")]
        if len(values) == 1:
            counts = (row_in // width, linear_size(layer.get_submodule(values[0]))[0] // width)
    groups = getattr(entry, "num_key_value_groups", None)
    if isinstance(groups, int) and groups > 0 and counts[0] % groups == 0 and not spec.grouped:
        counts = (counts[0], counts[0] // groups)  # layers with numbers of kv heads of their own
    return counts if _explain(counts, layer, spec) else None


def _explain(counts: tuple[int, int], layer: nn.Module, spec: BlockSpec) -> bool:
    """Return whether numbers of query and kv heads explain the sizes of a block's projections."""
    units = {"query": counts[0], "kv": counts[1]}
    for name, segments in spec.columns.items():
        size, total = linear_size(layer.get_submodule(name))[0], sum(units.get(kind, 1) for kind in segments)
        if total == 0 or size % total:
            return False
    row_in = linear_size(layer.get_submodule(spec.row))[1]
    return bool(counts[0] and counts[1]) and row_in % counts[0] == 0 and counts[0] % counts[1] == 0


def inner_norms(layer: nn.Module, spec: BlockSpec) -> dict[str, tuple[NormKind, str]]:
    """Return norms inside of a block over features that are divided, by name: what they are, and of which projection
    they normalize the output (q, k) or, if it is the row layer, the input. Norms of one head are left out."""
    found: dict[str, tuple[NormKind, str]] = {}
    if spec.latent:
        return found
    projections = {name for name in (*spec.columns, spec.row)}
    taken = set().union(*(_inside(layer, name) for name in projections))
    for child, module in layer.get_submodule(spec.entry).named_children():
        named = [name for name in spec.columns if name.rpartition(".")[2][:2] == child[:2]]
        before = child[:2] in ("q_", "k_") and spec.is_attention
        if module in taken or (before and len(named) != 1):
            continue
        projection = named[0] if before else spec.row
        size = linear_size(layer.get_submodule(projection))[0 if before else 1]
        if any(parameter.shape == (size,) for parameter in module.parameters()):
            kind = norm_kind(module, size, _KNOWN_NORMS)
            if kind is not None:
                found[f"{spec.entry}.{child}"] = (kind, projection)
    return found


def _inside(layer: nn.Module, name: str) -> set[nn.Module]:
    return set(layer.get_submodule(name).modules())


def _unknown_parameters(entry: nn.Module, spec: BlockSpec, layer: nn.Module, query: int) -> str | None:
    """Describe parameters of a block that are of no projection or head, nor one for each head, nor single numbers."""
    owners = (name.rpartition(".")[0] for name in spec.parts)
    known = [_inside(layer, name) for name in (*spec.columns, *spec.latent, *owners, spec.row)]
    known += [_inside(layer, name) for name in inner_norms(layer, spec)]
    named = () if entry in (module for inner in known for module in inner) else entry.named_parameters(recurse=False)
    if any(parameter.shape[:1] != (query,) for name, parameter in named if name not in spec.added):
        return "it has parameters that are not one for each head"
    names = ["head_dim", "head_size", "v_head_dim", "attention_head_size"]
    names += (
        ["qk_rope_head_dim"] if spec.latent else []
    )  # one part of the keys for all heads, see layers/latent_attention
    head_sizes = {getattr(entry, name, None) for name in names}
    for name, module in entry.named_modules():
        if any(module in inner for inner in known):
            continue
        sizes = {parameter.numel() for parameter in module.parameters(recurse=False)}
        if module is not entry and not sizes <= (head_sizes - {None}) | {1}:
            return f"its {name} has parameters of all heads" if query else f"its {name} needs all of its features"
    return None
