"""A sharded head, chunk by chunk: what the losses that never form full logits have in common.

    tokens[chunk, H]           all-gathered over (x, y)
    logits[chunk, V/(x*y)]     of this rank's part of the vocabulary; then the model's own steps (soft caps, scales)
    dh[chunk/(x*y), H]         reduce-scattered over (x, y)
    dW[V/(x*y), H]             summed over the chunks, reduced over z in the end

Whoever uses this drops the logits of a chunk before the next one is formed, so that less than two of them exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from hf_axonn.distributed.collectives import start_all_gather, start_reduce_scatter
from hf_axonn.engine.gather_cache import GatheredBlocks
from hf_axonn.engine.matmul3d import Product, as_matrix, gradients_of_shards
from hf_axonn.engine.matmul_tuning import plain
from hf_axonn.engine.weight_layout import vocabulary_range
from hf_axonn.layers.vocabulary import DeferredLogits
from hf_axonn.losses.causal_lm import IGNORE_INDEX


CHUNK_LOGITS = 2**26  # logits in a chunk of one rank: 256 MiB in float32. Head and loss need less than two of them

Graph = tuple[Tensor, Tensor] | None  # logits before and after the model's steps, for their derivative


@dataclass(frozen=True)
class HeadChunks:
    """A sharded head and the targets of this (data, z) position's tokens, which every rank of (x, y) has.

    Args:
        product: of the head's weight.
        own: ids of this rank's part of the vocabulary.
        vocabulary: how many ids there are.
        targets: [x*y, T/(x*y)], IGNORE_INDEX where ignored.
        steps: what the model does elementwise to logits, such as a soft cap; None for nothing.
    """

    product: Product
    own: range
    vocabulary: int
    targets: Tensor
    steps: Callable[[Tensor], Tensor] | None

    @classmethod
    def from_logits(cls, logits: DeferredLogits, targets: Tensor) -> HeadChunks:
        """The head that has left `logits` to be formed, and targets [B * S]. No communication.

        Raises:
            ValueError: the numbers of targets and tokens differ.
        """
        head, mesh = logits.head, logits.head.state.grid_mesh
        if len(targets) != logits.tokens.count:
            raise ValueError(
                f"labels for {len(targets)} tokens, but logits of {list(logits.shape[:2])}, which are "
                f"{logits.tokens.count}: labels have the shape of input_ids."
            )
        padding = logits.tokens.padded_count(mesh) - len(targets)
        # Token t of rank r is token r * T/(x*y) + t of the batch.
        targets = F.pad(targets.to(logits.hidden.device), (0, padding), value=IGNORE_INDEX)
        return cls(
            head.product(),
            vocabulary_range(head.linear.out_features, mesh),
            head.linear.out_features,
            targets.view(mesh.size("x", "y"), -1),
            logits.apply_steps if logits.steps else None,
        )

    @property
    def group(self) -> ProcessGroup:
        return self.product.state.grid_mesh.group("x", "y")

    def spans(self, columns: int) -> Iterator[slice]:
        """Yield the tokens of each rank in a chunk, `columns` logits each: equally many chunks on all (x, y)."""
        parts, tokens = self.targets.shape
        step = max(1, CHUNK_LOGITS // columns // parts // (1 if self.steps is None else 3))
        for begin in range(0, tokens, step):
            yield slice(begin, begin + step)

    def gather(self, local: Tensor, span: slice) -> Tensor:
        """[T/(x*y), ...] -> the chunk's [x*y * chunk, ...]. One all-gather over (x, y)."""
        return start_all_gather(local[span], self.group).wait().flatten(0, 1)

    def columns_of(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return which targets are this rank's, and their columns here (0 of others)."""
        is_own = (target >= self.own.start) & (target < self.own.stop)
        return is_own, torch.where(is_own, target - self.own.start, 0)

    def apply_steps(self, logits: Tensor) -> tuple[Tensor, Graph]:
        """Logits after the model's steps, and what `through_steps` takes."""
        if self.steps is None:
            return logits, None
        with torch.enable_grad():  # soft caps and scales, whose derivative autograd knows
            raw = logits.requires_grad_()
            stepped = self.steps(raw)
        return stepped.detach().clone(), (raw, stepped)

    @staticmethod
    def through_steps(graph: Graph, dlogits: Tensor) -> Tensor:
        """The gradient of logits before the model's steps."""
        if graph is None:
            return dlogits
        raw, stepped = graph
        return torch.autograd.grad(stepped, raw, dlogits)[0]

    @staticmethod
    def weight_of(gathered: GatheredBlocks) -> Tensor:
        """[v, H], v being this rank's part of the vocabulary, padded."""
        return as_matrix(gathered.blocks[0])

    @staticmethod
    def logits_of(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[n, H] x [v, H] -> [n, v], in float32 or wider."""
        logits = torch.mm(tokens, weight.t())
        logits = logits if bias is None else logits.add_(bias.to(logits.dtype))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


class HeadGradients:
    """The gradients of a head's input, weight and bias, summed chunk by chunk; None of what needs none.

    Args:
        needed: of input, weight and bias which need a gradient.
    """

    def __init__(
        self, chunks: HeadChunks, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]
    ) -> None:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        needs_hidden, needs_weight, needs_bias = needed
        self._chunks = chunks
        self.hidden = torch.zeros_like(hidden) if needs_hidden else None
        self.weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        self.bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None

    def add_bias(self, dlogits: Tensor) -> None:
        if self.bias is not None:
            self.bias += dlogits.sum(dim=0)

    def add(self, span: slice, dlogits: Tensor, tokens: Tensor, weight: Tensor, rows: Tensor | None = None) -> None:
        """Add a chunk: dlogits [n, v] in the dtype of the weight [v, H], tokens [n, H].

        Args:
            rows: [n] which of the chunk's tokens these are; None for all of them.
        Collectives: a reduce-scatter over (x, y), where the input needs a gradient.
        """
        if self.weight is not None:
            state = self._chunks.product.state
            _add_product(self.weight, dlogits, tokens, state.product_dtype(dlogits.dtype, self.weight.dtype))
        if self.hidden is not None:
            dtokens = torch.mm(dlogits, weight)
            targets = self._chunks.targets[:, span]
            if rows is not None:
                dtokens = dtokens.new_zeros(targets.numel(), dtokens.shape[1]).index_put_((rows,), dtokens)
            blocks = dtokens.view(len(targets), -1, dtokens.shape[1])
            self.hidden[span] = start_reduce_scatter(blocks, self._chunks.group).wait()

    def grad_shard(self) -> Tensor | None:
        """Return what a node returns to autograd for the shard of the weight. Launches the reduction over z."""
        if self.weight is None:
            return None
        product = self._chunks.product
        return gradients_of_shards(product.state, product.weights, product.layouts, [self.weight])[0]


def _add_product(dweight: Tensor, dlogits: Tensor, tokens: Tensor, dtype: torch.dtype) -> None:
    """dweight[v, H] += dlogits[T, v].T @ tokens[T, H], which is written in `dtype` (`ParallelState.product_dtype`).

    What it needs besides is no larger than `dlogits`.
    """
    if dtype == torch.float16:  # a sum over tokens, not divided by their number yet
        dlogits, tokens = dlogits.to(dweight.dtype), tokens.to(dweight.dtype)
    if dweight.dtype == dlogits.dtype:
        dweight.addmm_(dlogits.t(), tokens)
        return
    rows = max(1, dlogits.nbytes // (tokens.shape[1] * dtype.itemsize))
    for part, own in zip(dweight.split(rows), dlogits.split(rows, dim=1), strict=True):
        product = part.new_empty(part.shape, dtype=dtype)
        plain("dweight", product, own.t(), tokens)
        part += product
