"""Multi-head latent attention (DeepSeek): keys and values are made of a narrow latent that all heads share.

    entry          this rank's tokens -> full [B, S, H], the same on all ranks of (x, y)
    q_a, kv_a      down to the latents: Linears on their own, full results
    q_b, kv_b      from the full latents to the heads of this rank (`LatentColumnParallel`)
    o              a row layer as in any attention

Attention to states of an encoder, which are full too, makes its keys and values of them as q_b and kv_b make theirs.
An MLP that makes a narrow latent beside its own projections, for low-rank terms of theirs, is sharded in the same way.

The rotary part of kv_a's output is used with every rank's own heads, so its gradient is a sum over them.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hf_axonn.distributed.collectives import all_reduce_backward
from hf_axonn.engine.activation_layouts import gather_tokens, take_features
from hf_axonn.engine.state import ParallelState
from hf_axonn.layers.base import patch_forward, split_hidden_states
from hf_axonn.layers.block import ColumnParallel, RowParallel


class LatentColumnParallel(ColumnParallel):
    """A column layer whose input is full: [..., K], the same on all ranks of (x, y) -> own heads [..., N/axes].

    Collectives: those of ColumnParallel; backward also an all-reduce over x and an all-gather over y of its
    gradient of the input.
    """

    def _compute(self, hidden: Tensor) -> list[Tensor]:
        mesh = self.state.mesh
        return super()._compute(all_reduce_backward(take_features(hidden, mesh, "y"), mesh.group("x")))


def install_latent(state: ParallelState, attention: nn.Module, row: RowParallel) -> None:
    """Let an attention module, which `row` ends, see full activations. All-gather of tokens over (x, y)."""

    def forward(original: Callable, *args, **kwargs):
        hidden, args, kwargs = split_hidden_states(args, kwargs)
        tokens = state.context.tokens
        row.enter(hidden)
        if tokens.sharded:
            hidden = gather_tokens(hidden.reshape(1, -1, hidden.shape[-1]), tokens, state.mesh)
        return original(hidden, *args, **kwargs)

    patch_forward(attention, forward)


def rotary_hook(state: ParallelState, attention: nn.Module, row: RowParallel) -> Callable[[nn.Module], None]:
    """Return an installer for kv_a, whose last `attention.qk_rope_head_dim` features go to every head: their gradient
    is summed over the axes of the heads. All-reduce over them in backward."""

    def sum_gradients(_module: nn.Module, _args: tuple, output: Tensor) -> Tensor:
        size = attention.qk_rope_head_dim
        latent, rotary = output.split([output.shape[-1] - size, size], dim=-1)
        return torch.cat([latent, all_reduce_backward(rotary, state.mesh.group(*row.axes))], dim=-1)

    # A hook: whatever is installed on its forward. An adapter of the module adds to its output after that, so the
    # hooks stand on its last part too (parallel/adapters/install.py).
    def install(module: nn.Module) -> None:
        if sum_gradients not in module._forward_hooks.values():  # a copy may have it already
            module.register_forward_hook(sum_gradients)

    return install
