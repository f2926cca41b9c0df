"""THE algorithm: one Linear, or several with one input, multiplied on the (z, y, x) part of the grid.

    I_z = the dim is split over z; {U_y} = every rank of y holds a partial sum still to be reduced.
    M = tokens, K = in_features, N = out_features. Column layer; a row layer swaps x and y.

    forward    W[N_x,K_y]        = all_gather_z(W_shard)
               O[M_z,N_x]{U_y}   = I[M_z,K_y] @ W.T           -> reduced over y by the caller (layouts)
    backward   dI[M_z,K_y]{U_x}  = dO[M_z,N_x] @ W            -> reduced over x by the caller (layouts)
               dW[N_x,K_y]{U_z}  = dO.T @ I                   -> reduce_scatter over z, divided by z

Only the z shard is saved for backward and it is gathered again there, unless `keep_gathered` says to cache it
(gather_cache.py). Shards are cast to the compute dtype before the gather, so a bf16 run moves bf16 bytes; gradients
travel in `reduce_dtype` and end in the dtype of the shard. On CUDA 16-bit factors give float32 gradients at once, if
they travel or end in a wider dtype; elsewhere the product rounds them to 16 bits before they are added up.

The reduction of O over y is a reduce-scatter of features, and the input of a row layer is an all-gather of features.
So that no block has to be copied for them, features that such a collective shards are a leading dim here:

    input    [P, T, k]       P = y in a row layer, else 1
    weight   [Q, n, P, k]    padded with zeros where sizes do not divide
    output   [Q, T, n]       Q = y in a column layer, else 1

Where P and Q are 1, all three are matrices: [T, k], [n, k] and [T, n]. A `Product` takes and returns [..., k] and
[..., n] then, as a Linear does. Each view costs the host about as much as a small kernel.

Source: AxoNN (arXiv 2502.08145), algorithm for one layer; AxoNN, 2305.13525. Start: training_scripts/one_layer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from hf_axonn.compat.packed_weights import PackedProduct
from hf_axonn.compat.torch import in_backward, reshaped_result
from hf_axonn.distributed.collectives import Pending, start_reduce_scatters
from hf_axonn.distributed.mesh import GridMesh
from hf_axonn.engine.activation_layouts import Tokens
from hf_axonn.engine.gather_cache import GatheredBlocks
from hf_axonn.engine.gathering import Gathering, versions_of
from hf_axonn.engine.matmul_tuning import Matmul, plain
from hf_axonn.engine.overlap import GatheredInput
from hf_axonn.engine.weight_layout import WeightLayout


if TYPE_CHECKING:
    from hf_axonn.engine.sharded_weight import ShardedWeight
    from hf_axonn.engine.state import ParallelState


def start_reduction(
    grads: list[Tensor], layouts: list[WeightLayout], reduce_dtype: torch.dtype, mesh: GridMesh
) -> Pending:
    """Begin to sum weight gradients [Q, n, P, k] over z. Result: this rank's elements of each, flat. One
    reduce-scatter over z."""
    dtype = torch.promote_types(grads[0].dtype, reduce_dtype)
    blocks = [layout.unblock(grad).to(dtype) for grad, layout in zip(grads, layouts, strict=True)]
    return start_reduce_scatters(blocks, mesh.reductions)


def multiply(input_: Tensor, weights: list[Tensor], matmul: Matmul = plain) -> list[Tensor]:
    """[P, T, k] x [Q, n_i, P, k] -> [Q, T, n_i] for each weight; where Q > 1, one [Q, T, sum of n_i] for all. Of
    matrices [T, n_i]."""
    if input_.dim() == 2:
        outputs = [input_.new_empty(len(input_), len(weight)) for weight in weights]
        for output, weight in zip(outputs, weights, strict=True):
            matmul("forward", output, input_, weight.t())
        return outputs
    in_blocks, tokens, _ = input_.shape
    out_blocks = weights[0].shape[0]
    sizes = [weight.shape[1] for weight in weights]
    if out_blocks > 1:
        merged = input_.new_empty(out_blocks, tokens, sum(sizes))
        outputs = list(merged.split(sizes, dim=2))
    else:
        outputs = [input_.new_empty(1, tokens, size) for size in sizes]
    for output, weight in zip(outputs, weights, strict=True):
        for q in range(out_blocks):
            for p in range(in_blocks):
                matmul("forward", output[q], input_[p], weight[q, :, p].t(), accumulate=p > 0)
    return [merged] if out_blocks > 1 else outputs


def list_matrices(blocks: list[Tensor]) -> list[Tensor]:
    """Return the matrices [n, k] of blocks [Q, n, P, k], by weight, q and p."""
    if blocks[0].dim() == 2:
        return blocks
    return [matrix for block in blocks for of_q in block.unbind() for matrix in of_q.unbind(dim=1)]


def multiply_packed(input_: Tensor, products: Sequence[PackedProduct], out_blocks: int) -> list[Tensor]:
    """Same as `multiply`, of an input [P, T, k] by a product for each of `list_matrices`; Q is `out_blocks`."""
    blocks = input_.unbind()
    sums = []
    for begin in range(0, len(products), len(blocks)):
        total, *others = [product(block, None) for product, block in zip(products[begin:], blocks, strict=False)]
        for other in others:
            total += other
        sums.append(total)
    outputs = [torch.stack(sums[begin : begin + out_blocks]) for begin in range(0, len(sums), out_blocks)]
    return [torch.cat(outputs, dim=-1)] if out_blocks > 1 else outputs


def input_gradient(grads: list[Tensor], weights: list[Tensor], matmul: Matmul = plain) -> Tensor:
    """Sum over the weights of [Q, T, n] x [Q, n, P, k] -> [P, T, k]. Of matrices [T, k]."""
    if weights[0].dim() == 2:
        result = grads[0].new_empty(len(grads[0]), weights[0].shape[1])
        for i, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
            matmul("dinput", result, grad, weight, accumulate=i > 0)
        return result
    _, _, in_blocks, k = weights[0].shape
    result = grads[0].new_empty(in_blocks, grads[0].shape[1], k)
    terms = [(grad[q], weight[q]) for grad, weight in zip(grads, weights, strict=True) for q in range(len(weight))]
    for p in range(in_blocks):
        for i, (grad, weight) in enumerate(terms):
            matmul("dinput", result[p], grad, weight[:, p], accumulate=i > 0)
    return result


def weight_gradient(grad: Tensor, input_: Tensor, matmul: Matmul = plain, dtype: torch.dtype | None = None) -> Tensor:
    """[Q, T, n] x [P, T, k] -> [Q, n, P, k], of matrices [n, k].

    `dtype`: of the result (`ParallelState.product_dtype`); that of `grad` if None.
    """
    if grad.dim() == 2:
        result = grad.new_empty(grad.shape[1], input_.shape[1], dtype=dtype)
        matmul("dweight", result, grad.t(), input_)
        return result
    result = grad.new_empty(grad.shape[0], grad.shape[2], input_.shape[0], input_.shape[2], dtype=dtype)
    for q in range(grad.shape[0]):
        for p in range(input_.shape[0]):
            matmul("dweight", result[q, :, p], grad[q].t(), input_[p])
    return result


class Product:
    """Multiplication by the weights of a group, which share one gather over z and one reduction."""

    def __init__(self, state: ParallelState, weights: list[ShardedWeight], layouts: list[WeightLayout]) -> None:
        self.state = state
        self.weights = weights
        self.layouts = layouts

    def shards(self) -> list[Tensor]:
        """This rank's shard of each weight, in the graph; marks that the pass has come to them."""
        self.state.context.enter(self.weights)
        return [weight.local() for weight in self.weights]

    def run(self, input_: Tensor, *, over: ProcessGroup | None = None, tokens: Tokens | None = None) -> list[Tensor]:
        """[P, T, k], or [..., k] where P is 1 -> [Q, T, n], or [..., n] where Q is 1, as `multiply` does.

        Args:
            over: the input is this rank's block [..., k] of T / p tokens, or of P = p, to be gathered over this group.
            tokens: those that are gathered; then the input [B, S, k] comes first in the result.
        Collectives: all-gather over z; all-gather of the input. Backward as in the head of this file: the reduction of
        the input's gradient over the group runs while the weight gradients are computed (OAR).
        """
        dtype = self.state.compute_dtype(input_, self.weights)
        input_ = input_.to(dtype)
        entry = None if over is None else GatheredInput(input_, over, tokens, overlap=self.state.overlap_all_reduce)
        if input_.numel() and (packed := self._pack(dtype)) is not None:
            full = input_ if entry is None else entry.wait()
            if self.layouts[0].is_matrix:
                outputs = [product(full, None) for product in packed]
            else:
                outputs = multiply_packed(self.blocks_of(full), packed, self.layouts[0].out_blocks)
                outputs = self._as_input(outputs, full.shape)
            return outputs if tokens is None else [full, *outputs]
        gathered = self.gather_blocks(dtype)
        if self.keeps:
            self.keep(gathered, dtype)
        if torch.is_grad_enabled():
            return list(_Multiply.apply(input_, self, gathered, entry, *self._leaves()))
        full = input_ if entry is None else entry.wait()
        if self.layouts[0].is_matrix and self.state.matmul is plain:
            outputs = [F.linear(full, weight) for weight in gathered.blocks]  # one call, as in decoding
        else:
            outputs = self.multiply(self.blocks_of(full), gathered.blocks, full.shape)
        return outputs if tokens is None else [full, *outputs]

    def _pack(self, dtype: torch.dtype) -> list[PackedProduct] | None:
        """Return the products with packed copies, of each weight by q and p; None where they are not packed.

        Weights that are gathered for each pass anew are not, nor those that are stored in another dtype (autocast, 4
        bits). What is kept is gathered all the same: another rank of z may have no room for copies.
        """
        packed, cache = self.state.context.packed, self.state.context.gather_cache
        if packed is None or torch.is_grad_enabled() or (self.gathers and not cache.everything):
            return None
        if any(weight.parameter.dtype != dtype for weight in self.weights):
            return None
        if self.gathers:
            self.gather(dtype)
        return packed.products(self._key(dtype), lambda: list_matrices(self.gather(dtype)))

    def _leaves(self) -> Sequence[Tensor]:
        """Return the tensors that get the gradients: without z the parameters; none if nothing is trained."""
        if self.state.grid_mesh.size("z") > 1:
            leaves = self.shards()
        else:
            leaves = [weight.parameter for weight in self.weights]
        return leaves if any([leaf.requires_grad for leaf in leaves]) else ()

    def blocks_of(self, input_: Tensor) -> Tensor:
        """[P, T, k], or [..., k] where P is 1 -> what `multiply` takes."""
        layout = self.layouts[0]
        if layout.is_matrix:
            return input_.reshape(-1, layout.in_size)
        return input_ if layout.in_blocks > 1 else input_.reshape(1, -1, layout.in_size)

    def multiply(self, blocks: Tensor, weights: list[Tensor], shape: torch.Size) -> list[Tensor]:
        """Return what `run` does for an input of this shape, whose `blocks_of` these are. No communication."""
        return self._as_input(multiply(blocks, weights, self.state.matmul), shape)

    def _as_input(self, outputs: list[Tensor], shape: torch.Size) -> list[Tensor]:
        """Give the outputs of `multiply` the leading dims of the input, whose shape this is."""
        if self.layouts[0].out_blocks > 1:
            return outputs
        leading = shape[1:-1] if self.layouts[0].in_blocks > 1 else shape[:-1]
        if outputs[0].shape[:-1] == leading:
            return outputs
        return [reshaped_result(output, (*leading, output.shape[-1])) for output in outputs]

    @property
    def gathers(self) -> bool:
        """Return whether the weights are gathered over z."""
        return self.layouts[0].z > 1

    @property
    def keeps(self) -> bool:
        """Return whether what is gathered now is kept from forward to backward."""
        if not self.gathers:
            return False
        return self._runs_again or all(weight.keep_gathered for weight in self.weights)

    @property
    def _runs_again(self) -> bool:
        """Return whether this is a checkpointed layer that runs again, and such layers keep what they gather."""
        return self.state.keeps_recomputed and in_backward()

    def keep(self, gathered: GatheredBlocks, dtype: torch.dtype) -> None:
        """Let this layer find what it has gathered when it runs again, for as long as its graph holds that."""
        cache, key, with_graph = self.state.context.gather_cache, self._key(dtype), torch.is_grad_enabled()
        # Without a graph in a pass that wants gradients: a checkpointed layer, which runs again in backward. What
        # it then makes may be another graph than the one that backward goes through.
        again = self._runs_again
        cache.add(key, gathered, hold=again or (self.state.context.wants_gradients and not with_graph))
        if with_graph and not again:
            cache.release(key)

    def let_go(self, dtype: torch.dtype) -> None:
        """Release what a layer that ran again has kept, when backward has used it."""
        if self.state.keeps_recomputed:
            self.state.context.gather_cache.release(self._key(dtype))

    def gather(self, dtype: torch.dtype) -> list[Tensor]:
        """One [Q, n, P, k] for each weight, in `dtype`. One all-gather over z for all of them, if none is kept."""
        return self.gather_blocks(dtype).blocks

    def gather_blocks(self, dtype: torch.dtype) -> GatheredBlocks:
        """Same as `gather`, with the version of the weights; perhaps 0 without gradients, where it is not compared."""
        context = self.state.context
        if not self.gathers:
            version = self.version if torch.is_grad_enabled() else 0
            blocks = [weight.block(layout, dtype) for weight, layout in zip(self.weights, self.layouts, strict=True)]
            return GatheredBlocks(blocks, version)
        key, version = self._key(dtype), self.version
        kept = context.gather_cache.find(key, version)
        if kept is None:
            gathering = Gathering(self.weights, self.layouts, dtype)
            kept = GatheredBlocks(context.gather_ahead.take(key, gathering, version), version)
            if context.gather_cache.everything or (context.gather_cache.through and self.keeps):
                context.gather_cache.add(key, kept)
        return kept

    def _key(self, dtype: torch.dtype) -> tuple:
        return tuple(id(weight) for weight in self.weights), dtype

    @property
    def version(self) -> int:
        """A number that changes whenever one of the weights changes in place."""
        return versions_of(self.weights)

    def check_unchanged(self, version: int) -> None:
        """Check that backward, which gathers the weights once more, finds those of the forward pass.

        Raises:
            RuntimeError: they are no longer those of the forward pass that had this version.
        """
        if self.version == version:
            return
        shapes = " and ".join(str(list(weight.parameter.shape)) for weight in self.weights)
        raise RuntimeError(
            f"weights of shape {shapes} that backward needs have been modified since the forward pass, by a "
            "step of an optimizer or in place, or replaced, as after torch.func.functional_call: run backward first, "
            "or the forward pass again."
        )


def gradient_dtype(state: ParallelState, weight: ShardedWeight, factors: torch.dtype) -> torch.dtype:
    """The dtype in which a product writes the gradient of a weight, which then travels over z or is there."""
    over_z = state.grid_mesh.size("z") > 1
    return state.product_dtype(factors, torch.promote_types(factors, state.reduce_dtype) if over_z else weight.dtype)


def gradients_of_shards(
    state: ParallelState, weights: list[ShardedWeight], layouts: list[WeightLayout], grads: list[Tensor]
) -> list[Tensor]:
    """Gradients [Q, n, P, k] of this rank's samples -> what a node returns to autograd for the shards.

    Launches the reduction over z, promises each result to the slot of its weight (ORS) and returns placeholders. Where
    z divides no block there is nothing to wait for.
    """
    if layouts[0].z == 1:
        return [
            grad.to(weight.dtype)
            if layout.is_matrix and layout.divides
            else own_gradient(layout, layout.unblock(grad)[0], weight.dtype)
            for weight, layout, grad in zip(weights, layouts, grads, strict=True)
        ]
    state.context.reductions.make_room()
    pending = state.context.reductions.add(start_reduction(grads, layouts, state.reduce_dtype, state.grid_mesh))
    for index, (weight, layout) in enumerate(zip(weights, layouts, strict=True)):
        weight.slot.add(partial(finish_reduction, pending, index, layout, weight.dtype))
    return [weight.placeholder() for weight in weights]


def finish_reduction(pending: Pending, index: int, layout: WeightLayout, dtype: torch.dtype) -> Tensor:
    """This rank's gradient of one weight: its part of a finished reduction, averaged over z. Waits."""
    return own_gradient(layout, pending.wait()[index], dtype)


def own_gradient(layout: WeightLayout, flat: Tensor, dtype: torch.dtype) -> Tensor:
    """This rank's gradient of one weight, averaged over z, out of what its shard received: a sum over z."""
    own = layout.own(flat)
    if layout.summed_over > 1:
        own = own / layout.summed_over
    elif layout.pads:
        own = own.clone()  # or the padding would live as long as the parameter's `.grad`
    return own.to(dtype)


def refuse_second_derivatives() -> None:
    """Refuse to be differentiated again, in a backward pass: autograd does not see how its gradients are made.

    Raises:
        RuntimeError: it is one with `create_graph=True`.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a backward pass with create_graph=True through a model over a grid, whose gradients cannot be "
            "differentiated again, as a gradient penalty does: omit create_graph, or train on one process."
        )


class _Multiply(torch.autograd.Function):
    """O = I @ W.T on gathered weights.

    Backward gathers them again for dI, launches its reduction where forward has gathered I, computes dW meanwhile, and
    launches the reduction of that over z, for which the nodes of the shards wait.
    """

    @staticmethod
    def forward(ctx, input_, product, gathered, entry, *leaves):
        ctx.set_materialize_grads(False)
        ctx.product, ctx.version, ctx.entry, ctx.input_shape = product, gathered.version, entry, input_.shape
        ctx.gathered = gathered if product.keeps and ctx.needs_input_grad[0] else None
        full = input_ if entry is None else entry.wait()
        blocks = product.blocks_of(full)
        ctx.blocks_shape = blocks.shape
        if not any(ctx.needs_input_grad[4:]):  # frozen weights have no dW; all that backward asks for is the dtype
            ctx.save_for_backward(blocks.new_empty(0))
        else:
            # Detached: `full` is a result, too, so a view of it would hold this node, which holds the view.
            ctx.save_for_backward(blocks if entry is None else blocks.detach())
        outputs = product.multiply(blocks, gathered.blocks, full.shape)
        ctx.output_shapes = [output.shape for output in outputs]
        return tuple(outputs) if entry is None or entry.tokens is None else (full, *outputs)

    @staticmethod
    def backward(ctx, *grad_outputs):
        refuse_second_derivatives()
        (input_,) = ctx.saved_tensors
        needs_input, entry = ctx.needs_input_grad[0], ctx.entry
        grads, grad_full = list(grad_outputs), None
        if entry is not None and entry.tokens is not None:
            grad_full, *grads = grads
        if all(grad is None for grad in grads):
            grads = []
        else:
            grads = _by_weight(grads, ctx.output_shapes, ctx.product.layouts, input_)
        grad_input = _grad_input(ctx, grads, grad_full, input_) if needs_input else None
        ctx.product.let_go(input_.dtype)
        pending = entry.start_reduction(grad_input) if needs_input and entry is not None else None
        grad_leaves = _grad_leaves(ctx, grads, input_)
        if pending is not None:
            grad_input = pending.wait()
        return grad_input.view(ctx.input_shape) if needs_input else None, None, None, None, *grad_leaves


def _grad_input(ctx, grads: list[Tensor], grad_full: Tensor | None, input_: Tensor) -> Tensor:
    """dI of the product, and what the gathered input has from other uses (`grad_full`). Gathers the weights again.

    Zeros if nothing has come: other ranks reduce all the same.
    """
    if not grads:
        return input_.new_zeros(ctx.blocks_shape) if grad_full is None else grad_full
    product = ctx.product
    product.check_unchanged(ctx.version)
    gathered, ctx.gathered = ctx.gathered or product.gather_blocks(input_.dtype), None
    grad_input = input_gradient(grads, gathered.blocks, product.state.matmul)
    if grad_full is not None:
        grad_input += grad_full.reshape(grad_input.shape)
    return grad_input


def _grad_leaves(ctx, grads: list[Tensor], input_: Tensor) -> list[Tensor | None]:
    """dW of each leaf that is trained, or None for all if the pass leaves them for later (`PassContext.deferred`)."""
    needed = ctx.needs_input_grad[4:]
    result: list[Tensor | None] = [None] * len(needed)
    trained = [i for i, trains in enumerate(needed) if trains]
    if not grads or not trained:
        return result
    deferred = ctx.product.state.context.deferred
    if deferred is not None:
        deferred.append(partial(_weight_gradients, ctx.product, trained, grads, input_))
        return result
    for i, grad in zip(trained, _weight_gradients(ctx.product, trained, grads, input_), strict=True):
        result[i] = grad
    return result


def _by_weight(
    grads: Sequence[Tensor | None], shapes: list[torch.Size], layouts: list[WeightLayout], like: Tensor
) -> list[Tensor]:
    """The gradients of a product's outputs -> one for each weight, as `input_gradient` takes them; zeros for None."""
    full = [like.new_zeros(shape) if grad is None else grad for grad, shape in zip(grads, shapes, strict=True)]
    if layouts[0].is_matrix:
        return [grad.reshape(-1, grad.shape[-1]) for grad in full]
    if layouts[0].out_blocks == 1:
        return [grad.reshape(1, -1, grad.shape[-1]) for grad in full]
    if len(full) < len(layouts):  # one merged output; its parts are views
        return list(full[0].split([layout.out_size for layout in layouts], dim=2))
    return full


def _weight_gradients(product: Product, trained: list[int], grads: list[Tensor], input_: Tensor) -> list[Tensor]:
    """dW of these weights of a product, as its node returns them. Begins a reduce-scatter over z."""
    state = product.state
    state.context.reductions.make_room()
    weights, layouts = [product.weights[i] for i in trained], [product.layouts[i] for i in trained]
    weight_grads = [
        weight_gradient(grads[i], input_, state.matmul, gradient_dtype(state, weight, input_.dtype))
        for i, weight in zip(trained, weights, strict=True)
    ]
    shard_grads = gradients_of_shards(state, weights, layouts, weight_grads)
    if state.grid_mesh.size("z") > 1:
        return shard_grads
    return [weight.as_parameter(grad) for weight, grad in zip(weights, shard_grads, strict=True)]


@torch.no_grad()
def finish_deferred(state: ParallelState, deferred: Sequence[Callable[[], list[Tensor]]]) -> None:
    """Compute the weight gradients that a backward pass has left for later (`PassContext.deferred`), and add them to
    those of the parameters. Collectives: those of the products, reduce-scatters over z.

    Source: zero bubble pipelines, Qi et al. 2023 (arXiv 2401.10241), section 2.
    """
    products = [(work.args[0], work.args[1], work()) for work in deferred]
    added = set()
    for product, trained, grads in products:
        for i, grad in zip(trained, grads, strict=True):
            weight = product.weights[i]
            if state.grid_mesh.size("z") > 1:  # its slot has the sum of what all products have left there
                if weight in added:
                    continue
                added.add(weight)
                grad = weight.as_parameter(weight.slot.take_or(grad))
            weight.add_gradient(grad)


def as_matrix(block: Tensor) -> Tensor:
    """[Q, n, P, k] -> [Q * n, P * k]."""
    return block if block.dim() == 2 else block.flatten(2).flatten(0, 1)


class _GatheredWeight(torch.autograd.Function):
    """The zero-padded block of one weight for code that is not a matmul (an embedding look-up)."""

    @staticmethod
    def forward(ctx, product, shard):
        ctx.product = product
        matrix = as_matrix(product.gather(product.weights[0].dtype)[0])
        return reshaped_result(matrix, matrix.shape)  # another tensor: the block may be kept, and belong to no graph

    @staticmethod
    def backward(ctx, grad):
        product = ctx.product
        return None, *gradients_of_shards(product.state, product.weights, product.layouts, [grad])


def gathered_weight(product: Product) -> Tensor:
    """[N/.., K/..], the block of a product of one weight. All-gather over z; backward: reduce-scatter over z."""
    return _GatheredWeight.apply(product, product.shards()[0])
