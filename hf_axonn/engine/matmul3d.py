"""THE algorithm: one Linear, or several with one input, multiplied on the (z, y, x) part of the grid.

    I_z = the dim is split over z; {U_y} = every rank of y holds a partial sum still to be reduced.
    M = tokens, K = in_features, N = out_features. Column layer; a row layer swaps x and y.

    forward    W[N_x,K_y]        = all_gather_z(W_shard)
               O[M_z,N_x]{U_y}   = I[M_z,K_y] @ W.T           -> reduced over y by the caller (layouts)
    backward   dI[M_z,K_y]{U_x}  = dO[M_z,N_x] @ W            -> reduced over x by the caller (layouts)
               dW[N_x,K_y]{U_z}  = dO.T @ I                   -> reduce_scatter over z, divided by z

Only the z shard is saved for backward and it is gathered again there, unless `keep_gathered` says to cache it
(gather_cache.py). Shards are cast to the compute dtype before the gather, so a bf16 run moves bf16 bytes; gradients
travel in `reduce_dtype` and end in the dtype of the shard.

The reduction of O over y is a reduce-scatter of features, and the input of a row layer is an all-gather of features.
So that no block has to be copied for them, features that such a collective shards are a leading dim here:

    input    [P, T, k]       P = y in a row layer, else 1
    weight   [Q, n, P, k]    padded with zeros where sizes do not divide
    output   [Q, T, n]       Q = y in a column layer, else 1

Source: AxoNN (arXiv 2502.08145), algorithm for one layer; AxoNN, 2305.13525.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_axonn.distributed.collectives import Pending, send_unfused, start_all_gather, start_reduce_scatter, together
from hf_axonn.distributed.mesh import GridMesh
from hf_axonn.engine.gather_cache import GatheredBlocks
from hf_axonn.engine.matmul_tuning import Matmul, plain
from hf_axonn.engine.overlap import placeholder
from hf_axonn.engine.weight_layout import WeightLayout


if TYPE_CHECKING:
    from hf_axonn.engine.sharded_weight import ShardedWeight
    from hf_axonn.engine.state import ParallelState


def start_gather(
    weights: list[ShardedWeight], layouts: list[WeightLayout], dtype: torch.dtype, mesh: GridMesh
) -> Pending:
    """Begin to join the z shards of several weights. Result: one [Q, n, P, k] for each.

    One all-gather over z, or one for each where they are large and copies are dear (`send_unfused`).
    """
    group = mesh.group("z")
    shards = [layout.padded(weight.shard.to(dtype)) for weight, layout in zip(weights, layouts, strict=True)]
    flat = [shard.reshape(-1) for shard in shards]
    if all(send_unfused(shard, group) for shard in flat):
        gathers = [start_all_gather(shard, group) for shard in flat]
        return together([gather.then(layout.block) for gather, layout in zip(gathers, layouts, strict=True)])
    pending = start_all_gather(torch.cat(flat) if len(flat) > 1 else flat[0], group)
    return pending.then(partial(split_gathered, layouts=layouts))


def split_gathered(gathered: Tensor, layouts: list[WeightLayout]) -> list[Tensor]:
    """[z, elements] -> one [Q, n, P, k] for each weight."""
    parts = gathered.split([layout.travels for layout in layouts], dim=1)
    return [layout.block(part.reshape(-1)) for part, layout in zip(parts, layouts, strict=True)]


def start_reduction(
    grads: list[Tensor], layouts: list[WeightLayout], reduce_dtype: torch.dtype, mesh: GridMesh
) -> Pending:
    """Begin to sum weight gradients [Q, n, P, k] over z. Result: this rank's elements of each, flat.

    One reduce-scatter over z, or one for each where they are large and copies are dear (`send_unfused`).
    """
    group = mesh.group("z")
    dtype = torch.promote_types(grads[0].dtype, reduce_dtype)
    blocks = [layout.unblock(grad).to(dtype) for grad, layout in zip(grads, layouts, strict=True)]
    if all(send_unfused(block[0], group) for block in blocks):
        return together([start_reduce_scatter(block, group) for block in blocks])
    pending = start_reduce_scatter(torch.cat(blocks, dim=1) if len(blocks) > 1 else blocks[0], group)
    return pending.then(lambda flat: flat.split([layout.travels for layout in layouts]))


def multiply(input_: Tensor, weights: list[Tensor], matmul: Matmul = plain) -> list[Tensor]:
    """[P, T, k] x [Q, n_i, P, k] -> [Q, T, n_i] for each weight; where Q > 1, one [Q, T, sum of n_i] for all."""
    in_blocks, tokens, _ = input_.shape
    out_blocks = weights[0].shape[0]
    sizes = [weight.shape[1] for weight in weights]
    if out_blocks > 1:
        merged = input_.new_empty(out_blocks, tokens, sum(sizes))
        outputs = merged.split(sizes, dim=2)
    else:
        outputs = [input_.new_empty(1, tokens, size) for size in sizes]
    for output, weight in zip(outputs, weights, strict=True):
        for q in range(out_blocks):
            for p in range(in_blocks):
                matmul("forward", output[q], input_[p], weight[q, :, p].t(), accumulate=p > 0)
    return [merged] if out_blocks > 1 else outputs


def input_gradient(grads: list[Tensor], weights: list[Tensor], matmul: Matmul = plain) -> Tensor:
    """Sum over the weights of [Q, T, n] x [Q, n, P, k] -> [P, T, k]."""
    _, _, in_blocks, k = weights[0].shape
    result = grads[0].new_empty(in_blocks, grads[0].shape[1], k)
    terms = [(grad[q], weight[q]) for grad, weight in zip(grads, weights, strict=True) for q in range(len(weight))]
    for p in range(in_blocks):
        for i, (grad, weight) in enumerate(terms):
            matmul("dinput", result[p], grad, weight[:, p], accumulate=i > 0)
    return result


def weight_gradient(grad: Tensor, input_: Tensor, matmul: Matmul = plain) -> Tensor:
    """[Q, T, n] x [P, T, k] -> [Q, n, P, k]."""
    result = grad.new_empty(grad.shape[0], grad.shape[2], input_.shape[0], input_.shape[2])
    for q in range(grad.shape[0]):
        for p in range(input_.shape[0]):
            matmul("dweight", result[q, :, p], grad[q].t(), input_[p])
    return result


class Product:
    """One multiplication by the weights of a group, from the moment its gradients have a place in the graph.

    `begin` and `run` are apart because the nodes have to be created in the order wait, weight gradient, enter, matmul
    (overlap.py): `begin` creates the weight-gradient node, then the caller enters the block, then `run` multiplies.
    """

    def __init__(self, state: ParallelState, weights: list[ShardedWeight], layouts: list[WeightLayout]) -> None:
        self.state = state
        self.weights = weights
        self.layouts = layouts
        self.stashed: tuple[list[Tensor], Tensor] | None = None

    def shards(self) -> list[Tensor]:
        """This rank's shard of each weight, in the graph; marks that the pass has come to them."""
        self.state.context.enter(self.weights)
        return [weight.local() for weight in self.weights]

    def begin(self) -> Tensor | None:
        """The handle to pass to `run`: it ties the weight-gradient node to the matmul. None if nothing is trained."""
        shards = self.shards()
        if not (torch.is_grad_enabled() and any(shard.requires_grad for shard in shards)):
            return None
        return _WeightGradient.apply(self, *shards)

    def run(self, input_: Tensor, handle: Tensor | None) -> list[Tensor]:
        """[P, T, k] -> what `multiply` returns. One all-gather over z; backward as in the head of this file."""
        dtype = self.state.compute_dtype(input_)
        gathered = self.gathered(dtype)
        if self.keeps:
            context, with_graph = self.state.context, torch.is_grad_enabled()
            # Without a graph in a pass that wants gradients: a checkpointed layer, which runs again in backward.
            context.gather_cache.add(self._key(dtype), gathered, hold=context.wants_gradients and not with_graph)
            if with_graph:
                context.gather_cache.release(self._key(dtype))
        return list(_Matmul.apply(input_.to(dtype), handle, self, gathered))

    @property
    def keeps(self) -> bool:
        """Whether the gathered weights are kept from forward to backward."""
        return self.state.mesh.size("z") > 1 and all(weight.keep_gathered for weight in self.weights)

    def gather(self, dtype: torch.dtype) -> list[Tensor]:
        """One [Q, n, P, k] for each weight, in `dtype`. One all-gather over z for all of them, if none is kept."""
        return self.gathered(dtype).blocks

    def gathered(self, dtype: torch.dtype) -> GatheredBlocks:
        """As `gather`, with the version of the weights."""
        mesh, context, version = self.state.mesh, self.state.context, self.version
        if mesh.size("z") == 1:
            blocks = [
                layout.block(weight.shard.to(dtype)) for weight, layout in zip(self.weights, self.layouts, strict=True)
            ]
            return GatheredBlocks(blocks, version)
        key = self._key(dtype)
        found = context.gather_cache.find(key, version)
        if found is None:
            start = partial(start_gather, self.weights, self.layouts, dtype, mesh)
            found = GatheredBlocks(context.gather_ahead.take(key, start, lambda: self.version), version)
            if context.gather_cache.everything:
                context.gather_cache.add(key, found)
        return found

    def _key(self, dtype: torch.dtype) -> tuple:
        return tuple(id(weight) for weight in self.weights), dtype

    @property
    def version(self) -> int:
        """Another number whenever one of the weights has changed in place."""
        return sum(weight.version for weight in self.weights)

    def check_unchanged(self, version: int) -> None:
        """For backward, which gathers the weights once more.

        Raises:
            RuntimeError: they are no longer those of the forward pass that had this version.
        """
        if self.version == version:
            return
        shapes = " and ".join(str(list(weight.parameter.shape)) for weight in self.weights)
        raise RuntimeError(
            f"weights of shape {shapes} that backward needs have been modified since the forward pass, by a step "
            "step or in place: run backward first, or the forward pass again."
        )


class _WeightGradient(torch.autograd.Function):
    """Computes dW of a product and launches its reduction over z; the shards' own nodes wait for it."""

    @staticmethod
    def forward(ctx, product, *shards):
        ctx.product = product
        ctx.needed = [shard.requires_grad for shard in shards]
        ctx.like = [placeholder(shard) for shard in shards]
        return shards[0].new_zeros(())

    @staticmethod
    def backward(ctx, _):
        product, state = ctx.product, ctx.product.state
        (grads, input_), product.stashed = product.stashed, None
        chosen = [i for i, needed in enumerate(ctx.needed) if needed]
        layouts = [product.layouts[i] for i in chosen]
        state.context.reductions.make_room()
        with torch.autocast(input_.device.type, enabled=False):
            weight_grads = [weight_gradient(grads[i], input_, state.matmul) for i in chosen]
        leave_gradients(state, [product.weights[i] for i in chosen], layouts, weight_grads)
        return None, *[like if needed else None for like, needed in zip(ctx.like, ctx.needed, strict=True)]


def leave_gradients(
    state: ParallelState, weights: list[ShardedWeight], layouts: list[WeightLayout], grads: list[Tensor]
) -> None:
    """Launch the reduction over z of gradients [Q, n, P, k] and promise each to the slot of its weight (ORS)."""
    state.context.reductions.make_room()
    pending = state.context.reductions.add(start_reduction(grads, layouts, state.reduce_dtype, state.mesh))
    for index, (weight, layout) in enumerate(zip(weights, layouts, strict=True)):
        weight.slot.add(partial(finish_reduction, pending, index, layout, weight.shard.dtype))


def finish_reduction(pending: Pending, index: int, layout: WeightLayout, dtype: torch.dtype) -> Tensor:
    """This rank's gradient of one weight: its part of a finished reduction, averaged over z. Waits."""
    mine = layout.own(pending.wait()[index])
    if layout.z > 1:
        mine = mine / layout.z
    elif layout.pads:
        mine = mine.clone()  # or the padding would live as long as the parameter's `.grad`
    return mine.to(dtype)


class _Matmul(torch.autograd.Function):
    """O = I @ W.T on gathered weights; backward gathers them again for dI and stashes what dW needs."""

    @staticmethod
    def forward(ctx, input_, handle, product, gathered):
        ctx.product, ctx.version = product, gathered.version
        ctx.gathered = gathered if product.keeps and ctx.needs_input_grad[0] else None
        ctx.save_for_backward(input_)
        with torch.autocast(input_.device.type, enabled=False):
            return tuple(multiply(input_, gathered.blocks, product.state.matmul))

    @staticmethod
    def backward(ctx, *grads):
        (input_,) = ctx.saved_tensors
        needs_input, needs_handle = ctx.needs_input_grad[:2]
        if needs_input:
            ctx.product.check_unchanged(ctx.version)
        if len(grads) < len(ctx.product.layouts):  # one merged output; its parts are views
            grads = grads[0].split([layout.out_size for layout in ctx.product.layouts], dim=2)
        dinput = None
        if needs_input:
            gathered, ctx.gathered = ctx.gathered or ctx.product.gathered(input_.dtype), None
            with torch.autocast(input_.device.type, enabled=False):
                dinput = input_gradient(grads, gathered.blocks, ctx.product.state.matmul)
        if needs_handle:
            ctx.product.stashed = (grads, input_)
        return dinput, (grads[0].new_zeros(()) if needs_handle else None), None, None


class _GatheredWeight(torch.autograd.Function):
    """The zero-padded block of one weight for code that is not a matmul (an embedding look-up)."""

    @staticmethod
    def forward(ctx, product, shard):
        ctx.product, ctx.like = product, placeholder(shard)
        return product.gather(shard.dtype)[0].flatten(2).flatten(0, 1)

    @staticmethod
    def backward(ctx, grad):
        product = ctx.product
        leave_gradients(product.state, product.weights, product.layouts, [grad])
        return None, ctx.like


def gathered_weight(product: Product) -> Tensor:
    """[N/.., K/..], the block of a product of one weight. All-gather over z; backward: reduce-scatter over z."""
    return _GatheredWeight.apply(product, product.shards()[0])
