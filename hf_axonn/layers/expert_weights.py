"""The weights of experts: how they lie on a rank, and how they are there for a call and gone until its backward pass.

The module's own code multiplies by them, so autograd would keep the gathered weights of every layer from forward to
backward. It is made to keep names in their place, and the weights are gathered again in backward: before anything
else of the call, and on every rank, whether or not a token came its way. All gradients of the call come together in
one node, so that no rank leaves out a collective that another waits for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hf_axonn.compat.torch import saved_tensors_have_hooks
from hf_axonn.engine.gather_cache import GatheredBlocks
from hf_axonn.engine.matmul3d import Product, gradients_of_shards


def call_with_gathered(products: list[Product], work: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """`work(gathered weights, *inputs)`, for products of one weight each.

    Collectives over z: an all-gather of each weight, in backward another, and a reduce-scatter of its gradient.
    """
    passing = _Pass(products, inputs[0].dtype)
    made = _Begin.apply(passing, len(inputs), *inputs, *passing.shards())
    passing.keep()
    inputs, handle, gathered = made[: len(inputs)], made[len(inputs)], made[len(inputs) + 1 :]
    with passing.naming(gathered):
        output = work(gathered, *inputs)
    return _End.apply(passing, output, handle)


class _Pass:
    """The gathered weights of one call: at hand in forward, in name only until backward, then at hand again."""

    def __init__(self, products: list[Product], dtype: torch.dtype) -> None:
        self.products = products
        self.dtype = dtype
        self.versions = [product.version for product in products]
        self.named = False
        self.gathered: list[Tensor] | None = None
        self.blocks: list[GatheredBlocks] = []

    def shards(self) -> list[Tensor]:
        return [product.weights[0].local() for product in self.products]

    def gather(self) -> list[Tensor]:
        self.blocks = [product.gather_blocks(self.dtype) for product in self.products]
        return [each.blocks[0].detach() for each in self.blocks]  # which get the graph that holds this

    def keep(self) -> None:
        """Hold what `keep_gathered` keeps, for a checkpointed layer that runs again; and nothing else."""
        for product, gathered in zip(self.products, self.blocks, strict=True):
            if product.keeps and not product.state.keeps_recomputed:
                product.keep(gathered, self.dtype)
            else:
                self.blocks = []

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
        gathered = passing.gather()
        own = {shard.untyped_storage().data_ptr() for shard in shards}
        copied = any(weight.untyped_storage().data_ptr() not in own for weight in gathered)
        kept = all(product.keeps for product in passing.products) or saved_tensors_have_hooks()
        passing.named = copied and any(ctx.needs_input_grad) and not kept
        return *[tensor.view_as(tensor) for tensor in inputs], inputs[0].new_zeros(()), *gathered

    @staticmethod
    def backward(ctx, *grads):
        passing, count = ctx.passing, ctx.count
        passing.gathered, passing.blocks = None, []
        of_shards: list[Tensor | None] = []
        for product, grad, needed in zip(
            passing.products, grads[count + 1 :], ctx.needs_input_grad[2 + count :], strict=True
        ):
            of_product = product.weights, product.layouts, [grad]
            of_shards += gradients_of_shards(product.state, *of_product) if needed else [None]
        return None, None, *grads[:count], *of_shards


class _End(torch.autograd.Function):
    """Identity; its backward gathers the weights again where autograd kept only their names.

    It saves a tensor and takes it back: a checkpointed layer is recomputed here at the latest, and as far as to here,
    on every rank, also where no token came its way. The collectives of all ranks are then in one order.
    """

    @staticmethod
    def forward(ctx, passing, total, handle):
        ctx.passing = passing
        ctx.save_for_backward(handle)
        return total.view_as(total)

    @staticmethod
    def backward(ctx, grad):
        ctx.saved_tensors  # noqa: B018
        for product, version in zip(ctx.passing.products, ctx.passing.versions, strict=True):
            product.check_unchanged(version)
        if ctx.passing.named:
            ctx.passing.gathered = ctx.passing.gather()
        return None, grad, grad.new_zeros(())
