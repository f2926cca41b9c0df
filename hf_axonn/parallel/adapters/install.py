"""PEFT's adapters in a sharded model, whether they were put there before it was sharded or after.

    with without_wrappers(model): ...     the model as it was before PEFT wrapped some of its modules: what is planned
                                          and sharded
    install_adapters(state, model)        whatever wraps its modules now, and has not been seen yet, follows them

So both ways lead to the same. Kinds of wrappers: LoRA of a Linear or an embedding (lora.py), DoRA (dora.py), and
modules_to_save, whose copies get the shards and the sharded layers of the modules that they are copies of.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeGuard

from torch import nn
from torch.distributed.tensor import DTensor

from hf_axonn.compat.bitsandbytes import is_four_bit
from hf_axonn.compat.peft import MIXED_BATCH, wrapped_modules
from hf_axonn.distributed.collectives import broadcast_all
from hf_axonn.distributed.mesh import ROWS, STAGE, TOKENS
from hf_axonn.engine.dtensors import distribute_parameter, shard_placements
from hf_axonn.engine.report import Entry
from hf_axonn.layers.base import Reader, Replicated, patch_forward
from hf_axonn.layers.block import EXCHANGES
from hf_axonn.layers.dropout import dropout_names, install_dropout, probability
from hf_axonn.layers.latent_attention import shared_hooks
from hf_axonn.layers.moe import Experts
from hf_axonn.layers.vocabulary import Head
from hf_axonn.parallel.adapters.checks import LINEAR
from hf_axonn.parallel.adapters.dora import Dora
from hf_axonn.parallel.adapters.lora import HeadLora, install_pair, output_of, pair_of
from hf_axonn.parallel.adapters.merge import Merging, ParameterMerging
from hf_axonn.parallel.adapters.parameter_lora import ParameterLora
from hf_axonn.parallel.sharded_model import ShardedModel
from hf_axonn.topology.weight_kind import WeightKind


@contextlib.contextmanager
def without_wrappers(model: nn.Module) -> Iterator[None]:
    """Put every module that PEFT has wrapped in the place of its wrapper inside.

    A module that was replaced inside, as one of another stage of a pipeline, does not get its wrapper back.
    """
    bases = {wrapper: base for _, wrapper, base in wrapped_modules(model)}
    places = [
        (parent, child, module)
        for parent in model.modules()
        for child, module in parent._modules.items()
        if module in bases
    ]
    try:
        for parent, child, wrapper in places:
            parent._modules[child] = bases[wrapper]
        yield
    finally:
        for parent, child, wrapper in places:
            if parent._modules[child] is bases[wrapper]:
                parent._modules[child] = wrapper


def install_adapters(state: ShardedModel, model: nn.Module) -> None:
    """Shard what PEFT has put into a sharded model since this was called last, and install its sharded layers.

    Collectives: `broadcast_all` of the new parameters; the norms of new DoRA layers.
    """
    made: dict[int, nn.Parameter] = {}
    names = {module: name for name, module in model.named_modules()}
    for name, wrapper, base in list(wrapped_modules(model)):
        if state.claim(wrapper):
            if state.compile_options is not None:
                raise ValueError(
                    f"{names[wrapper]} of a compiled model has got an adapter: add adapters before compile (before "
                    "the model is prepared)."
                )
            _around(state, names, wrapper, base)
        if "modules_to_save" in wrapper._modules:
            _copies(state, names, wrapper, base, made)
        elif hasattr(wrapper, "parameter_name"):
            _parameter_lora(state, names, wrapper)
        else:
            _lora(state, names, name, wrapper, base)
    state.plan_gathers({module: name for name, module in model.named_modules()})


def _around(state: ShardedModel, names: dict, wrapper: nn.Module, base: nn.Module) -> None:
    """Install what a wrapper needs once, whatever the adapters in it."""
    if base in state.blocks:
        state.blocks[base].around(wrapper)
    if getattr(state.sharded_layers.get(base), "row_exchanges", None):
        raise ValueError(f"{names[wrapper]}: {EXCHANGES}")
    child = next((child for child, module in wrapper._modules.items() if module is base), None)
    for reading in state.readings:
        if base in reading.read and child is not None:
            reading.also(base, wrapper, child)
    if "modules_to_save" in wrapper._modules:
        return
    if hasattr(wrapper, "parameter_name"):
        sharded = state.sharded_layers.get(base)
        if not isinstance(sharded, (Experts, Replicated)):
            raise ValueError(LINEAR.format(names[wrapper], wrapper.parameter_name))
        ParameterMerging(state, wrapper, base)
        ParameterLora(state, wrapper, sharded)
    else:
        if is_four_bit(base):
            for name in ("merge", "unmerge"):
                patch_forward(wrapper, functools.partial(_refuse_merge, names[wrapper]), method=name)
        else:
            Merging(state, wrapper, base)
        patch_forward(wrapper, _refuse_mixed, method=MIXED_BATCH)


def _refuse_merge(name: str, _original, *args, **kwargs):
    raise ValueError(
        f"{name}: adapters cannot be merged into a weight of 4 bits over a grid, where it would be rounded once more: "
        "save the adapters (model.save_pretrained), and merge them on one process, into the base in full precision."
    )


def _refuse_mixed(_original, *args, **kwargs):
    raise ValueError(
        "adapter_names, one adapter for each row, is not supported over a grid: set_adapter and call the model once "
        "for each adapter."
    )


def _parameter_lora(state: ShardedModel, names: dict, layer: nn.Module) -> None:
    """The adapters of one parameter that are new."""
    for adapter, a in layer.lora_A.items():
        if state.claim(a):
            _replicate(state, names, a, layer.lora_B[adapter])


def _lora(state: ShardedModel, names: dict, name: str, layer: nn.Module, base: nn.Module) -> None:
    """The adapters of one layer that are new."""
    # A Linear that gets the full sequence by itself has its adapter outside of that, on this rank's tokens.
    axes = state.axes(name.rpartition(".")[0]) if name in state.full_sequence else state.axes(name)
    output = output_of(state, base, axes)
    tokens = ROWS if getattr(state.sharded_layers.get(base), "gathers_rows", False) else TOKENS
    for adapter, a in layer.lora_A.items():
        if not state.claim(a):
            continue
        b = layer.lora_B[adapter]
        _replicate(state, names, a, b)
        dropped = install_pair(state, base, output, a, b)
        if dropped is None:
            dropped = axes
            for part, own in ((a, {}), (b, dict.fromkeys(("weight", "bias"), output.take))):
                Replicated(state, part, axes, own=own)
            for hook in shared_hooks(base):
                b.register_forward_hook(hook)
            if isinstance(state.sharded_layers.get(base), Head):
                plain = isinstance(layer.lora_dropout[adapter], nn.Identity) and b.bias is None
                if plain and adapter not in layer.lora_variant:
                    HeadLora(state, a, b)
                else:
                    state.set_head(defers=False)  # PEFT changes the logits, so they are formed
        for module in layer.lora_dropout[adapter].modules():
            if found := dropout_names(module):
                install_dropout(state, module, dropped, probability(module, *found), tokens=tokens)
    if layer.lora_embedding_A:
        tables = (layer.lora_embedding_A, layer.lora_embedding_B)
        _replicate(state, names, *tables)
        if state.claim(tables[0]):
            for table in tables:
                Replicated(state, table, axes)
            state.add_reading(Reader(layer, "forward", tables))
    for adapter, magnitude in (layer.lora_magnitude_vector or {}).items():
        if state.claim(magnitude):
            unmeasured = magnitude.__dict__.pop("unmeasured", False)
            _replicate(state, names, magnitude)
            dora = Dora(state, magnitude, base, output)
            if unmeasured and not magnitude.weight.is_meta:
                dora.measure(*pair_of(layer, adapter), layer.scaling[adapter])


def _copies(
    state: ShardedModel, names: dict, wrapper: nn.Module, original: nn.Module, made: dict[int, nn.Parameter]
) -> None:
    """The copies of a module that PEFT trains and saves in full, one for each adapter."""
    entries = {entry.name: entry for entry in state.report.entries}
    for adapter, copy in wrapper.modules_to_save.items():
        if not state.claim(copy):
            continue
        broadcast_all(filter(_is_plain, copy.parameters()), state.grid_mesh.group(*STAGE))
        for (path, module), like in zip(copy.named_modules(), original.modules(), strict=True):
            for name, parameter in list(module._parameters.items()):
                if _is_plain(parameter):
                    if id(parameter) not in made:
                        sharded = distribute_parameter(parameter, like._parameters[name].placements, state.grid_mesh)
                        made[id(parameter)] = made[id(sharded)] = sharded
                    module._parameters[name] = made[id(parameter)]
            state.install_copy(like, module)
            entry = entries.get(".".join(filter(None, (names[wrapper], path))))
            if entry is not None:
                state.report.entries.append(replace(entry, name=names[module]))
            for reading in state.readings:
                if like in reading.read:
                    parent, _, child = path.rpartition(".")
                    holder = copy.get_submodule(parent) if path else wrapper.modules_to_save
                    reading.also(module, holder, child or adapter)


def _is_plain(parameter: nn.Parameter | None) -> TypeGuard[nn.Parameter]:
    return parameter is not None and not isinstance(parameter, DTensor)


def _replicate(state: ShardedModel, names: dict, *modules: nn.Module) -> None:
    """Replicate the parameters of small modules with the values of a stage's first rank. Collectives:
    `broadcast_all`."""
    placements = shard_placements(WeightKind.ADAPTER, state.grid_mesh.grid)
    new_ones = (each for module in modules for each in module._parameters.values() if _is_plain(each))
    broadcast_all(new_ones, state.grid_mesh.group(*STAGE))
    for module in modules:
        new = {name: parameter for name, parameter in module._parameters.items() if _is_plain(parameter)}
        module._parameters.update(
            {name: distribute_parameter(parameter, placements, state.grid_mesh) for name, parameter in new.items()}
        )
        if new:
            entry = Entry(names[module], WeightKind.ADAPTER, sum(parameter.numel() for parameter in new.values()))
            state.report.entries.append(entry)
