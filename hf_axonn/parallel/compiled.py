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
all layers of a class.

Without gradients (evaluation, generation) and where dropout is drawn (`keyed_random`) a region runs eagerly.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_axonn.compat.torch import in_backward
from hf_axonn.compat.transformers import checkpointed_forward, checkpoints_in_forward
from hf_axonn.engine.state import ParallelState
from hf_axonn.layers.base import Replicated, innermost, patch_innermost, replaced
from hf_axonn.layers.dropout import dropout_names


# Modes of inductor that put graphs under CUDA graphs: their outputs live in memory that the next replay overwrites,
# and ours live until backward, across collectives.
REFUSED_MODES = ("reduce-overhead", "max-autotune")


def compile_regions(state: ParallelState, model: nn.Module, **options: Any) -> None:
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
    if state.regions:
        if options != state.compile_options:
            raise ValueError(
                f"this model is compiled already, with {state.compile_options}, and cannot be with {options}."
            )
        return
    blocks = [module for module in state.blocks if any(True for _ in module.children())]
    modules = [module for module in (*state.layers, *blocks) if _is_plain_method(innermost(module), module)]
    if not modules:
        raise ValueError(
            f"torch.compile of a {type(model).__name__} over a grid: it is sharded Linear by Linear, without "
            "attention and MLP blocks that are known, so there is nothing to compile. Omit torch_compile."
        )
    state.compile_options = dict(options)
    state.regions = {module: Region(state, module, options) for module in modules}
    for module, region in state.regions.items():
        patch_innermost(module, region.forward)
    for module in dict.fromkeys(child for region in modules for child in region.modules()):
        if _is_opaque(module):
            module.forward = torch.compiler.disable(module.forward)


def _is_plain_method(forward: Callable, module: nn.Module) -> bool:
    """Whether a forward is that of the module's class, and not what somebody has put in its place."""
    return inspect.ismethod(forward) and forward.__self__ is module


def _is_opaque(module: nn.Module) -> bool:
    """Whether graphs end at a module: it has parameters, or a forward of ours. Not so dropout that drops nothing."""
    if any(True for _ in module.parameters()):
        return True
    return "forward" in module.__dict__ and any(getattr(module, name) for name in dropout_names(module))


class Region:
    """The code of one module, compiled.

    Args:
        state: of the model.
        module: a decoder layer, an attention or an MLP.
        options: of `torch.compile`.
    """

    def __init__(self, state: ParallelState, module: nn.Module, options: dict[str, Any]) -> None:
        self.state = state
        self.module = module
        self.plain = checkpointed_forward(module) or type(module).forward
        self.compiled = torch.compile(self.plain, **options)
        self.norms = [
            (norm, layer, innermost(norm))
            for norm in module.children()
            if (layer := _norm_on_its_own(state, norm)) is not None
        ]

    def forward(self, original: Callable, *args, **kwargs):
        """In place of the module's own forward, which is `original`."""
        if getattr(self.module, "gradient_checkpointing", False) and self.module.training and checkpoints_in_forward():
            return original(*args, **kwargs)  # its checkpoint calls `run`
        return self.run(*args, **kwargs)

    def run(self, *args, **kwargs):
        """The module's code, compiled where that may be; arguments as those of its forward."""
        context = self.state.context
        # In backward it runs again, perhaps after a pass of the model without gradients.
        if not (context.wants_gradients or in_backward()) or context.random_seed is not None:
            return self.plain(self.module, *args, **kwargs)
        with contextlib.ExitStack() as stack:
            for norm, layer, own in self.norms:
                stack.enter_context(layer.plain_parameters())
                stack.enter_context(replaced(norm.__dict__, {"forward": own}))
            return self.compiled(self.module, *args, **kwargs)


def _norm_on_its_own(state: ParallelState, module: nn.Module) -> Replicated | None:
    """The sharded layer of a norm that every rank computes by the norm's own code; None for anything else."""
    layer = state.sharded_layers.get(module)
    if type(layer) is not Replicated or any(True for _ in module.children()):
        return None
    alone = getattr(module.forward, "__wrapped__", None) == innermost(module)  # nothing but the layer is around it
    return layer if alone and _is_plain_method(innermost(module), module) else None
