"""The code of one module, compiled; compiled.py describes what a region is."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable

from torch import nn

from hf_axonn.compat.torch import in_backward
from hf_axonn.compat.transformers import checkpointed_forward, checkpoints_in_forward
from hf_axonn.engine.state import ParallelState
from hf_axonn.layers.base import PatchedForward, Replicated, innermost, replaced


def is_own_method(forward: Callable, module: nn.Module) -> bool:
    """Return whether a forward is that of the module's class, and not another in its place."""
    return inspect.ismethod(forward) and forward.__self__ is module


def plain_forward(module: nn.Module) -> Callable:
    """Return the code of a module, as a function of it and of its arguments."""
    return checkpointed_forward(module) or type(module).forward


def find_kind(module: nn.Module) -> tuple:
    """Return what is alike in modules that share graphs: their code (`plain_forward`), then their sizes.

    Layers of a class may have heads of different sizes, as in Gemma 4. A graph that serves all sizes saves other
    tensors than one that was made for the first, and layers that run again must not find it.
    """
    return plain_forward(module), *((name, parameter.shape) for name, parameter in module.named_parameters())


class Region:
    """The code of one module, compiled.

    Args:
        state: of the model.
        module: a decoder layer, an attention or an MLP.
        compiled: its `plain`, compiled, of modules of its `kind`.
    """

    def __init__(self, state: ParallelState, module: nn.Module, compiled: Callable) -> None:
        self.state = state
        self.module = module
        self.plain = plain_forward(module)
        self.compiled = compiled
        self.norms = [
            (norm, layer, innermost(norm))
            for norm in module.children()
            if (layer := _norm_on_its_own(state, norm)) is not None
        ]

    def forward(self, original: Callable, *args, **kwargs):
        """Run in place of the module's own forward, which is `original`."""
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
    forward = module.forward
    alone = isinstance(forward, PatchedForward) and is_own_method(forward.inner, module)  # only the layer is around it
    return layer if alone else None
