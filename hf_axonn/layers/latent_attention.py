"""Multi-head latent attention (DeepSeek): keys and values are made of a narrow latent that all heads share.

    entry          this rank's tokens -> full [B, S, H], the same on all ranks of (x, y)
    q_a, kv_a      down to the latents: Linears on their own, full results
    q_b, kv_b      from the full latents to the heads of this rank (`LatentColumnParallel`)
    o              a row layer as in any attention

Attention to states of an encoder, which are full too, makes its keys and values of them as q_b and kv_b make theirs.
An MLP that makes a narrow latent beside its own projections, for low-rank terms of theirs, is sharded in the same way.

Where context divides rows and attention gathers keys (context_attention.py), it may gather what kv_b gets, and the
rotary part of keys; each rank makes keys and values of whole rows of them, for its own heads:

    latent, rotary key   [B, 1, L, R], [B, 1, L, D], own positions -> [B, 1, S, R], [B, 1, S, D]
    k, v                 [B, heads/x, S, ...]

For DeepSeek-V3 these are 576 numbers a position, and not 320 for each of 128 heads.

The rotary part of kv_a's output is used with every rank's own heads, so its gradient is a sum over them.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_axonn.compat.attention import EXPAND
from hf_axonn.distributed.collectives import all_reduce_backward
from hf_axonn.engine.activation_layouts import gather_tokens, take_features
from hf_axonn.engine.state import ParallelState
from hf_axonn.layers.base import patch_forward, split_hidden_states
from hf_axonn.layers.block import ColumnParallel, RowParallel
from hf_axonn.layers.stacked_attention import StackedRow


class LatentColumnParallel(ColumnParallel):
    """A column layer whose input is full: [..., K], the same on all ranks of (x, y) -> own heads [..., N/axes].

    Collectives: those of ColumnParallel; backward also an all-reduce over x and an all-gather over y of its
    gradient of the input.
    """

    def _compute(self, hidden: Tensor) -> list[Tensor]:
        mesh = self.state.grid_mesh
        return super()._compute(all_reduce_backward(take_features(hidden, mesh, "y"), mesh.group("x")))

    def gather_rows(self, attention: nn.Module) -> None:
        """Make keys and values of whole rows where context divides them: in `EXPAND` of `attention`, which calls this
        layer. All-gather over context of its two arguments together; backward: a reduce-scatter."""
        self.gathers_rows = True
        patch_forward(attention, self._expand, method=EXPAND)

    def _expand(self, original: Callable, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.state.context.rows
        if rows is None:
            return original(latent, rotary)
        # As the products would cast them: a norm or the rotation may have widened them under autocast.
        own = [each.to(self.state.compute_dtype(each)) for each in (latent, rotary)]
        whole = rows.join(torch.cat(own, dim=-1).transpose(1, 2)).transpose(1, 2)
        key, value = original(*whole.split([each.shape[-1] for each in own], dim=-1))
        return key, value.contiguous()  # a part of what kv_b returns, which is not to stay for it


def install_latent(state: ParallelState, attention: nn.Module, row: RowParallel | StackedRow) -> None:
    """Let an attention module, which `row` ends, see full activations. All-gather of tokens over (x, y)."""

    def forward(original: Callable, *args, **kwargs):
        hidden, args, kwargs = split_hidden_states(args, kwargs)
        tokens = state.context.tokens
        row.enter(hidden)
        if tokens.sharded:
            hidden = gather_tokens(hidden.reshape(1, -1, hidden.shape[-1]), tokens, state.grid_mesh)
        return original(hidden, *args, **kwargs)

    patch_forward(attention, forward)


def shared_hook(state: ParallelState, row: RowParallel | StackedRow, size: int) -> Callable[[nn.Module], None]:
    """Return an installer for a module in attention whose output goes to every head, as the rotary part of kv_a's:
    its gradient is summed over the axes of the heads. All-reduce over them in backward.

    Args:
        row: ends the attention.
        size: the number of its last features that do; 0 for all of them, and of the first of several results that has
            a gradient.
    """

    def add_up(value: Tensor) -> Tensor:
        return all_reduce_backward(value, state.grid_mesh.group(*row.axes))

    def sum_gradients(_module: nn.Module, _args: tuple, output: Any) -> Any:
        if isinstance(output, tuple):
            tensors = ((place, each) for place, each in enumerate(output) if isinstance(each, Tensor))
            first = next(place for place, each in tensors if each.is_floating_point())
            return (*output[:first], add_up(output[first]), *output[first + 1 :])
        if not size:
            return add_up(output)
        latent, rotary = output.split([output.shape[-1] - size, size], dim=-1)
        return torch.cat([latent, add_up(rotary)], dim=-1)

    # A hook: whatever is installed on its forward. An adapter of the module adds to its output after that, so the
    # hooks stand on its last part too (parallel/adapters/install.py).
    def install(module: nn.Module) -> None:
        if sum_gradients not in module._forward_hooks.values():  # a copy may have it already
            module.register_forward_hook(sum_gradients)

    return install


def shared_hooks(module: nn.Module) -> list[Callable]:
    """Return the hooks of `shared_hook` on a module, which its adapters need too; not those of a user."""
    return [hook for hook in module._forward_hooks.values() if getattr(hook, "__module__", "") == __name__]
