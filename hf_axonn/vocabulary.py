"""Embedding and head, whose weight [V, H] is cut along the vocabulary: over y, then x, then z.

One placement serves both, so tied weights stay tied. The embedding returns the full [B, S, H], because models read
positions and masks off its shape. The head has two ways:

    full logits      [B, S, V] on every rank of (x, y), as from any HF model; callers repeat their work on them
    deferred         in training with labels: the loss takes hidden states and weight from `DeferredLogits` and forms
                     logits chunk by chunk (loss.py), never whole
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_axonn.collectives import all_reduce, all_reduce_backward, gather_replicated
from hf_axonn.layouts import bounds, gather_tokens, pad_dim
from hf_axonn.matmul3d import Product, gathered_weight
from hf_axonn.state import replicated_local
from hf_axonn.styles import cut_weight, wrap_forward


if TYPE_CHECKING:
    from hf_axonn.grid import GridMesh
    from hf_axonn.state import ModelState


def vocabulary_range(size: int, mesh: GridMesh, *, y: int | None = None, x: int | None = None) -> range:
    """Ids whose rows lie at coordinates (y, x), by default this rank's own."""
    y = mesh.index("y") if y is None else y
    x = mesh.index("x") if x is None else x
    start, stop = bounds(size, mesh.size("y"), y)
    inner_start, inner_stop = bounds(stop - start, mesh.size("x"), x)
    return range(start + inner_start, start + inner_stop)


class Embedding:
    """Look-up in a vocabulary that is cut over (y, x, z). Ids [B, S] -> [B, S, H], the same on all ranks of (x, y).

    Collectives: all-gather over z of the weight, all-reduce over (x, y) of the rows found. Backward: reduce-scatter
    over z of the weight's gradient.
    """

    def __init__(self, state: ModelState, module: nn.Embedding) -> None:
        self.state = state
        self.module = module
        self.weights = [state.weight_of(module)]
        self.cuts = [cut_weight("vocabulary", module.num_embeddings, module.embedding_dim, state.mesh)]
        wrap_forward(module, self._forward)

    def _forward(self, _original: Callable, ids: Tensor) -> Tensor:
        mesh, module = self.state.mesh, self.module
        if ids.device.type == "cpu" and ids.numel():  # on a GPU the check would make the host wait
            lowest, highest = (int(bound) for bound in ids.aminmax())
            if lowest < 0 or highest >= module.num_embeddings:
                wrong = lowest if lowest < 0 else highest
                raise IndexError(f"token id {wrong} is outside of the vocabulary of {module.num_embeddings}.")
        own = vocabulary_range(module.num_embeddings, mesh)
        mine = (ids >= own.start) & (ids < own.stop)
        padding = module.padding_idx
        rows = F.embedding(
            torch.where(mine, ids - own.start, 0),
            gathered_weight(Product(self.state, self.weights, self.cuts)),
            padding_idx=padding - own.start if padding is not None and padding in own else None,
        )
        return all_reduce(torch.where(mine.unsqueeze(-1), rows, 0), mesh.group("x", "y"))


class Head:
    """The Linear that ends a causal LM. [B, S, H] -> [B, S, V], or `DeferredLogits` where the state says so.

    Collectives for full logits: all-gather over z of the weight, all-gather over (x, y) of the logits; backward:
    all-reduce over (x, y) of the input's gradient, reduce-scatter over z of the weight's.
    """

    def __init__(self, state: ModelState, linear: nn.Linear) -> None:
        self.state = state
        self.linear = linear
        self.weights = [state.weight_of(linear)]
        self.cuts = [cut_weight("vocabulary", linear.out_features, linear.in_features, state.mesh)]
        state.has_head = True
        wrap_forward(linear, self._forward)

    def _forward(self, _original: Callable, hidden: Tensor) -> Tensor | DeferredLogits:
        if self.state.defer_head and self.state.tokens is not None:
            return DeferredLogits(self, hidden)
        return self.full_logits(hidden)

    def product(self) -> Product:
        return Product(self.state, self.weights, self.cuts)

    def local_bias(self) -> Tensor | None:
        """[V/(x*y)], zero-padded like the local logits."""
        if self.linear.bias is None:
            return None
        own = vocabulary_range(self.linear.out_features, self.state.mesh)
        bias = replicated_local(self.linear.bias, self.state.mesh, ("x", "y"))
        return pad_dim(bias[own.start : own.stop], 0, self.cuts[0].out_size)

    def full_logits(self, hidden: Tensor) -> Tensor:
        """[..., H], the same on all ranks of (x, y) -> [..., V]."""
        mesh, size = self.state.mesh, self.linear.out_features
        product = self.product()
        handle = product.begin()
        hidden = all_reduce_backward(hidden, mesh.group("x", "y"))
        (local,) = product.run(hidden.reshape(1, -1, hidden.shape[-1]), handle)
        bias = self.local_bias()
        if bias is not None:
            local = local + bias.to(local.dtype)
        blocks = gather_replicated(local.squeeze(0), mesh.group("x", "y"))
        # Ranks of (x, y) are numbered with y innermost, the vocabulary is cut over y first.
        parts = [
            blocks[x * mesh.size("y") + y][:, : len(vocabulary_range(size, mesh, y=y, x=x))]
            for y in range(mesh.size("y"))
            for x in range(mesh.size("x"))
        ]
        return torch.cat(parts, dim=-1).view(*hidden.shape[:-1], size)


class DeferredLogits:
    """Logits that nobody has formed yet: `hidden` [1, T/(x*y), H] of this rank's tokens, and the head to multiply by.

    In training with labels a parallelized model returns this as `outputs.logits`. `full()` forms them.
    """

    def __init__(self, head: Head, hidden: Tensor) -> None:
        self.head = head
        self.hidden = hidden
        self.tokens = head.state.tokens

    def full(self) -> Tensor:
        """[B, S, V] on every rank of (x, y), each of which then repeats the same work. Collective over (x, y)."""
        return self.head.full_logits(gather_tokens(self.hidden, self.tokens, self.head.state.mesh))

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"outputs.logits.{name}: in training with labels the logits of a parallelized model are not formed; "
            "call outputs.logits.full() for them (on every rank), or model.eval() first."
        )
