"""The weights of experts: how they lie on a rank, and how they are there for a call and gone until its backward pass.

The module's own code multiplies by them, so autograd would keep the gathered weights of every layer from forward to
backward. It is made to keep names in their place, and the weights are gathered again in backward: before anything
else of the call, and on every rank, whether or not a token came its way. All gradients of the call come together in
one node, so that no rank leaves out a collective that another waits for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_axonn.compat.torch import saved_tensors_have_hooks
from hf_axonn.engine.activation_layouts import bounds, ceil_div, pad_dim
from hf_axonn.engine.matmul3d import Product, leave_gradients
from hf_axonn.engine.overlap import placeholder


@dataclass(frozen=True)
class ExpertsCut:
    """How a weight [E, A, B] lies on this rank, in the way of matmul3d.Cut.

    z cuts B: Transformers' loader joins gate and up along A while it reads, so a cut of A would not be of the whole.

    Args:
        experts: of this rank, e.
        rows, cols: A and B.
        z, z_index: ranks that divide B, and which of them this is.
    """

    experts: int
    rows: int
    cols: int
    z: int
    z_index: int

    @property
    def pads(self) -> bool:
        """Whether this rank's block of the product has padding: experts are never padded."""
        return False

    @property
    def z_cols(self) -> int:
        """Columns that travel for each z rank; the last ones may be padding."""
        return ceil_div(self.cols, self.z)

    @property
    def travels(self) -> int:
        """Elements of one rank's padded shard."""
        return self.experts * self.rows * self.z_cols

    def padded(self, shard: Tensor) -> Tensor:
        """This rank's shard -> what travels, [e, A, z_cols]."""
        return pad_dim(shard, 2, self.z_cols)

    def block(self, gathered: Tensor) -> Tensor:
        """[z * travels] or, where z is 1, the shard itself -> [e, A, B]."""
        if self.z == 1:
            return gathered.view(self.experts, self.rows, self.cols)
        parts = gathered.view(self.z, self.experts, self.rows, self.z_cols).movedim(0, 2)
        whole = parts.reshape(self.experts, self.rows, self.z * self.z_cols)
        # Without padding between the rows: grouped matmuls want them to begin where they would on one process.
        return whole[..., : self.cols].contiguous()

    def unblock(self, grad: Tensor) -> Tensor:
        """[e, A, B] -> [z, travels], what each z rank is to receive."""
        parts = pad_dim(grad, 2, self.z * self.z_cols).unflatten(2, (self.z, self.z_cols))
        return parts.movedim(2, 0).reshape(self.z, self.travels)

    def own(self, reduced: Tensor) -> Tensor:
        """[travels] -> the gradient of this rank's shard."""
        start, stop = bounds(self.cols, self.z, self.z_index)
        return reduced.view(self.experts, self.rows, self.z_cols)[..., : stop - start]


def call_with_gathered(products: list[Product], work: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """`work(gathered weights, *inputs)`, for products of one weight each.

    Collectives over z: an all-gather of each weight, in backward another, and a reduce-scatter of its gradient.
    """
    passing = _Pass(products, inputs[0].dtype)
    made = _Begin.apply(passing, len(inputs), *inputs, *passing.shards())
    inputs, handle, gathered = made[: len(inputs)], made[len(inputs)], made[len(inputs) + 1 :]
    with passing.naming(gathered):
        output = work(gathered, *inputs)
    return _End.apply(passing, output, handle)


class _Pass:
    """The gathered weights of one call: at hand in forward, in name only until backward, then at hand again."""

    def __init__(self, products: list[Product], dtype: torch.dtype) -> None:
        self.products = products
        self.dtype = dtype
        self.named = False
        self.gathered: list[Tensor] | None = None

    def shards(self) -> list[Tensor]:
        return [product.weights[0].local() for product in self.products]

    def gather(self) -> list[Tensor]:
        return [product.gather(self.dtype)[0] for product in self.products]

    @contextlib.contextmanager
    def naming(self, gathered: Sequence[Tensor]) -> Iterator[None]:
        """Let autograd keep names in place of the gathered weights.

        Not where something else decides what is kept: a checkpointed layer keeps nothing of its first pass, and what
        it keeps of the second is used at once.
        """
        if not self.named:
            yield
            return
        places = {weight.untyped_storage().data_ptr(): i for i, weight in enumerate(gathered) if weight.numel()}
        starts = [weight.storage_offset() for weight in gathered]

        def pack(tensor: Tensor):
            i = places.get(tensor.untyped_storage().data_ptr())
            if i is None:
                return tensor
            return i, tensor.shape, tensor.stride(), tensor.storage_offset() - starts[i]

        def unpack(kept):
            if isinstance(kept, Tensor):
                return kept
            i, shape, stride, offset = kept
            weight = self.gathered[i]
            return weight.as_strided(shape, stride, weight.storage_offset() + offset)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield


class _Begin(torch.autograd.Function):
    """Gathers the weights. All gradients of a call come through here, so that no rank leaves out a collective."""

    @staticmethod
    def forward(ctx, passing, count, *tensors):
        inputs, shards = tensors[:count], tensors[count:]
        ctx.passing, ctx.count = passing, count
        ctx.save_for_backward(*shards)  # so that a change before backward is noticed
        gathered = passing.gather()
        own = {shard.untyped_storage().data_ptr() for shard in shards}
        copied = any(weight.untyped_storage().data_ptr() not in own for weight in gathered)
        kept = all(product.keeps for product in passing.products) or saved_tensors_have_hooks()
        passing.named = copied and any(ctx.needs_input_grad) and not kept
        return *[its.view_as(its) for its in inputs], inputs[0].new_zeros(()), *gathered

    @staticmethod
    def backward(ctx, *grads):
        passing, count = ctx.passing, ctx.count
        passing.gathered = None
        like = []
        for product, shard, grad, needed in zip(
            passing.products, ctx.saved_tensors, grads[count + 1 :], ctx.needs_input_grad[2 + count :], strict=True
        ):
            if needed:
                leave_gradients(product.state, product.weights, product.cuts, [grad])
            like.append(placeholder(shard) if needed else None)
        return None, None, *grads[:count], *like


class _End(torch.autograd.Function):
    """Identity; its backward gathers the weights again where autograd kept only their names."""

    @staticmethod
    def forward(ctx, passing, total, handle):
        ctx.passing = passing
        return total.view_as(total)

    @staticmethod
    def backward(ctx, grad):
        if ctx.passing.named:
            ctx.passing.gathered = ctx.passing.gather()
        return None, grad, grad.new_zeros(())
