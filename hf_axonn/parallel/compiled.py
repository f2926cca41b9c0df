"""torch.compile by regions: what lies between the collectives of a decoder layer is compiled, the rest runs as ever.

A region is the code of a decoder layer, of its attention or of its MLP as Transformers has it. Dynamo traces that code
and breaks the graph at every module that has a sharded layer; between the breaks it finds

    decoder layer    norms with the residual additions around them
    attention        reshapes, norms of heads, rotary embedding; the kernel of attention is called as it is
    MLP              activation and gate

So are two functions of the loss, between its collectives and products (losses/vocab_parallel.py).

Norms whose parameters every rank holds are traced with plain tensors, which are read before the region begins: a
DTensor never enters a graph. Sharded layers, and with them all collectives, all products and all nodes whose order in
autograd's graph counts (engine/overlap.py), run outside of graphs. Graphs are made per code and shapes and shared by
all layers of a class that have the same sizes.

Without gradients (evaluation, generation) and where dropout is drawn (`keyed_random`) a region runs eagerly. So does
an encoder of images.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_axonn.compat.torch import compile_apart
from hf_axonn.layers.base import innermost, patch_innermost
from hf_axonn.layers.dropout import dropout_names
from hf_axonn.layers.mixer import MixerBlock
from hf_axonn.parallel.region import Region, find_kind, is_own_method
from hf_axonn.parallel.sharded_model import ShardedModel


# Modes of inductor that put graphs under CUDA graphs: their outputs live in memory that the next replay overwrites,
# and ours live until backward, across collectives.
REFUSED_MODES = ("reduce-overhead", "max-autotune")


def compile_regions(state: ShardedModel, model: nn.Module, **options: Any) -> None:
    """Compile a parallelized model by regions, in place; `model.compile` of a parallelized model. No communication.

    The model keeps its modules and the names of its parameters. A second call with the same options does nothing.

    Args:
        state: of the model.
        model: parallelized, with all of its adapters.
        options: of `torch.compile`: backend, mode, dynamic, options, disable.
    Raises:
        ValueError: fullgraph, a mode with CUDA graphs, a model without blocks (it is sharded Linear by Linear, so no
            region is known), a model that is divided over pipe, or a second call with other options.
    """
    if options.get("disable"):
        return
    if options.get("fullgraph"):
        raise ValueError(
            "torch.compile with fullgraph=True over a grid: the graph has to end at every collective, so omit "
            "fullgraph."
        )
    if options.get("mode") in REFUSED_MODES:
        raise ValueError(
            f"torch.compile with mode={options['mode']!r} over a grid: its CUDA graphs overwrite what backward still "
            "needs. Use the default mode, or 'max-autotune-no-cudagraphs'."
        )
    if state.pipeline is not None:
        raise ValueError(
            f"torch.compile over a grid with pipe ({state.grid}) is not supported: omit torch_compile and the dynamo "
            "settings, or use a grid without pipe."
        )
    if state.compile_options is not None:
        if options != state.compile_options:
            raise ValueError(
                f"this model is compiled already, with {state.compile_options}, and cannot be with {options}."
            )
        return
    decoder = {module for layer in state.layers for module in layer.modules()}
    # A mixer reads parameters of its convolution, which are DTensors until then.
    blocks = [entry for entry, block in state.blocks.items() if not isinstance(block, MixerBlock)]
    blocks = [module for module in blocks if module in decoder and any(True for _ in module.children())]
    modules = [module for module in (*state.layers, *blocks) if is_own_method(innermost(module), module)]
    if not modules:
        raise ValueError(
            f"torch.compile of a {type(model).__name__} over a grid: it is sharded Linear by Linear, without "
            "attention and MLP blocks that are known, so there is nothing to compile. Omit torch_compile."
        )
    kinds = {module: find_kind(module) for module in modules}
    # Torch refuses wrong options here.
    compiled = {kind: compile_apart(kind[0], **options) for kind in dict.fromkeys(kinds.values())}
    regions = {module: Region(state, module, compiled[kind]) for module, kind in kinds.items()}
    state.compile_with(dict(options))
    state.add_regions(regions)
    for module, region in state.regions.items():
        patch_innermost(module, region.forward)
        if module in state.ahead:
            state.ahead[module].keep_order()
    for module in dict.fromkeys(child for region in modules for child in region.modules()):
        if _is_opaque(module):
            module.forward = torch.compiler.disable(module.forward)


def _is_opaque(module: nn.Module) -> bool:
    """Return whether graphs end at a module: it has parameters, or a forward of ours; not at dropout that drops
    nothing."""
    if any(True for _ in module.parameters()):
        return True
    return "forward" in module.__dict__ and any(getattr(module, name) for name in dropout_names(module))
