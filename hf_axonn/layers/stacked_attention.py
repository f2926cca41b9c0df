"""Attention whose projections of queries and output are experts, each with a part of every head, as JetMoE's.

    entry          this rank's tokens -> full [B, S, H], the same on all ranks of (x, y), as in latent_attention.py
    router         full inputs and choices; its weights of choices are used with every rank's own heads
    queries        rows of tokens [T * k, H], sorted by expert -> own heads [T * k, N/axes]: own rows of every expert
    keys, values   of own heads, the same for all experts (`LatentColumnParallel`)
    output         own heads [T * k, K/axes] -> [B, S, H], a share of a sum: own columns of every expert

The weights of experts are stored in shards and gathered in full (gathered.py), and a rank multiplies by its part.

Source: JetMoE (arXiv 2404.07413), section 2; the mixture of attention heads, arXiv 2210.05144.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hf_axonn.distributed.collectives import all_reduce, all_reduce_backward
from hf_axonn.engine.activation_layouts import take_tokens
from hf_axonn.engine.state import ParallelState
from hf_axonn.layers.base import patch_forward
from hf_axonn.topology.heads import Heads


class StackedRow:
    """The end of such attention, which returns a share of the sum over heads, and more. Global [B, S, H]; local: this
    rank's tokens where the residual stream is sharded, else [B, S, H].

    Collectives: a reduce-scatter over (x, y), all-gather in backward; an all-reduce over the axes of the heads, and in
    backward none, where the residual stream is replicated. Where heads are not divided over all of (x, y), that
    all-reduce, and an all-gather in backward.
    """

    def __init__(self, state: ParallelState, attention: nn.Module, heads: Heads) -> None:
        self.state, self.axes = state, heads.axes
        self._leading = torch.Size()
        patch_forward(attention, self._forward)

    def enter(self, hidden: Tensor) -> None:
        """Note the input of the attention, when a pass comes to it."""
        self._leading = hidden.shape[:-1]

    def _forward(self, original: Callable, *args, **kwargs) -> tuple:
        hidden, *others = original(*args, **kwargs)
        mesh, tokens = self.state.grid_mesh, self.state.context.tokens
        assert tokens is not None  # the first decoder layer has laid them out
        partial = tokens.sharded and self.axes == ("x", "y")
        if self.axes and not partial:
            hidden = all_reduce(hidden, mesh.group(*self.axes))
        if tokens.sharded:
            hidden = take_tokens(hidden, tokens, mesh, partial=partial).view(*self._leading, -1)
        return hidden, *others


def sum_gradient_hook(state: ParallelState, axes: tuple[str, ...]) -> Callable[[nn.Module], None]:
    """Return an installer for the projections of queries: the gradient of their input, which every rank has in full,
    is summed over `axes`, those of the heads. All-reduce of [T * k, H] in backward."""

    def enter(_module: nn.Module, args: tuple) -> tuple:
        return all_reduce_backward(args[0], state.grid_mesh.group(*axes)), *args[1:]

    def install(module: nn.Module) -> None:
        module.register_forward_pre_hook(enter)

    return install
