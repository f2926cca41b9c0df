"""Cross-entropy on logits that are sharded along the vocabulary and never formed in full.

The head and the loss go together, chunk by chunk. For each chunk of tokens, gathered over (x, y):

    logits[chunk, V/(x*y)] = h @ W.T                        complete on each rank for its own part of the vocabulary
    nll = max + log(sum exp) - target logit                 three numbers a token reduced over (x, y), never logits
    dh[chunk/(x*y)], dW[V/(x*y)] from softmax - one-hot     dh reduce-scattered over (x, y), dW kept for the reduction

With label smoothing e a token costs (1 - e) * nll + e / V * sum over V of -log p, which takes one more sum a token:

    sum of -log p = V * log(sum exp) - sum of (logits - max);    dlogits = softmax - (1 - e) * one-hot - e / V

Gradients are formed in the forward pass, when the logits are there anyway; backward multiplies by the incoming number.

Source: vocabulary-parallel cross-entropy, Shoeybi et al. 2019 (arXiv 1909.08053), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, pad

from hf_axonn.distributed.collectives import reduce_, start_reduce_scatter
from hf_axonn.distributed.mesh import ROWS
from hf_axonn.engine.activation_layouts import pad_dim
from hf_axonn.engine.matmul3d import refuse_second_derivatives
from hf_axonn.engine.rows import Rows
from hf_axonn.engine.state import ParallelState
from hf_axonn.layers.vocabulary import DeferredLogits, check_vocabulary
from hf_axonn.losses.causal_lm import IGNORE_INDEX, CausalLMLoss, Targets
from hf_axonn.losses.head_chunks import HeadChunks, HeadGradients


class ShardedCausalLMLoss(CausalLMLoss):
    """`model.loss_function` of a parallelized causal LM.

    Every rank of (x, y) gets the same number. Collectives: those of `check_vocabulary` and of `_ChunkedLoss` over
    (x, y) and, in training without num_items_in_batch, one all-reduce of a count over the ranks with different rows.

    Args:
        state: of the model.
        vocabulary: the number of logits.
    """

    def __init__(self, state: ParallelState, vocabulary: int) -> None:
        super().__init__()
        self.state = state
        self.vocabulary = vocabulary
        self._smoothing = 0.0
        self._kept_of_batch: Tensor | None = None

    def __call__(self, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Same as the base class; 0 in the stages of a pipeline that have no head."""
        stage = self.state.context.stage
        if stage is not None and not stage.last:
            self.calls += 1
            return logits.new_zeros((), dtype=torch.promote_types(logits.dtype, torch.float32))
        if self._handed is not None and isinstance(logits, Tensor) and (rows := self._divided_rows(logits)):
            logits = rows.gather(logits)
        return super().__call__(logits, *args, **kwargs)

    def targets(self, labels: Tensor | None, shift_labels: Tensor | None = None, **options: Any) -> Targets:
        """Same as the base class.

        Raises:
            ValueError: also for labels that are not in the vocabulary (`check_vocabulary`).
        """
        found = super().targets(labels, shift_labels, **options)
        tokens = found.tokens.view(found.rows, -1)
        if shift_labels is None:  # as they stood in the labels, of which nothing predicts the first
            tokens = pad(tokens[:, :-1], (1, 0), value=IGNORE_INDEX)
        check_vocabulary(tokens, self.vocabulary, "label", self.state.grid_mesh, training=True, ignored=IGNORE_INDEX)
        return found

    @contextmanager
    def smooth_labels(self, epsilon: float) -> Iterator[None]:
        """Let losses inside be those of labels smoothed by epsilon, as Transformers' LabelSmoother defines them.

        They are not noted: they are not what tokens cost.
        """
        self._smoothing = epsilon
        try:
            yield
        finally:
            self._smoothing = 0.0

    @contextmanager
    def part_of(self, kept_count: Tensor) -> Iterator[None]:
        """Take calls inside as parts of a batch with this number of kept tokens: their losses add up to its loss."""
        self._kept_of_batch = kept_count
        try:
            yield
        finally:
            self._kept_of_batch = None

    def note(self, nll: Tensor, targets: Targets, *more: Tensor) -> None:
        """Same as the base class; smoothed losses are only counted as a call."""
        if self._smoothing:
            self.calls += 1
        else:
            super().note(nll, targets, *more)

    def weighted_nll(self, logits: Tensor | DeferredLogits, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Same as the base class; for `DeferredLogits` the head is applied here.

        Logits of this rank's positions alone, as context divides them, are taken with their targets, and what is
        returned is of whole rows. Collectives then: an all-gather and an all-reduce over context.
        """
        rows = self._divided_rows(logits)
        if rows is None:
            return self._own_nll(logits, targets, weights)
        own = [
            rows.take(each.view(rows.batch, -1), fill).reshape(-1)
            for each, fill in ((targets, IGNORE_INDEX), (weights, 0))
        ]
        total, nll = self._own_nll(logits, *own)
        return rows.sum(total), rows.gather(nll.view(rows.batch, -1)).reshape(-1)

    def _divided_rows(self, logits: Tensor | DeferredLogits) -> Rows | None:
        """Return the rows of which these logits are this rank's positions; None where they are of whole rows."""
        if isinstance(logits, DeferredLogits):
            return logits.rows
        rows = self.state.context.rows
        return rows if rows is not None and logits.dim() == 3 and rows.is_own(logits) else None

    def _own_nll(self, logits: Tensor | DeferredLogits, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """`weighted_nll` of the tokens that this rank has."""
        if not isinstance(logits, DeferredLogits):
            total, nll = super().weighted_nll(logits, targets, weights)
            return self._smooth(total, logits, weights) if self._smoothing else total, nll
        head = logits.head
        chunks = HeadChunks.from_logits(logits, targets)
        hidden = logits.hidden.squeeze(0)
        dtype = self.state.compute_dtype(hidden)
        low, up = logits.low_rank(torch.promote_types(dtype, torch.float32))
        return _ChunkedLoss.apply(
            hidden.to(dtype),
            chunks.product.shards()[0],
            head.local_bias(),
            low,
            up,
            chunks,
            pad_dim(weights.to(hidden.device), 0, chunks.targets.numel()).view_as(chunks.targets),
            len(targets),
            self._smoothing,
        )

    def _smooth(self, total: Tensor, logits: Tensor, weights: Tensor) -> Tensor:
        """The smoothed sum of full logits [B, S, V], whose ordinary sum over kept tokens is `total`."""
        logits = logits.reshape(len(weights), -1)
        log_probs = log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
        spread = -(log_probs.mean(dim=-1) * weights.to(logits.device, log_probs.dtype)).sum()
        return (1 - self._smoothing) * total + self._smoothing * spread

    def normalize(self, weighted_sum: Tensor, kept_count: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
        """Same as the base class.

        In training without num_items_in_batch: sum * (ranks with different rows) / kept tokens of all of them, so that
        the average that gradients get is right for unequal counts. With num_items_in_batch, in a pass whose loss is
        divided at its end (losses/shares.py), times what it is divided by.
        """
        if num_items_in_batch is not None and self.state.context.share_factor != 1:
            weighted_sum = weighted_sum * self.state.context.share_factor
        if num_items_in_batch is not None or not torch.is_grad_enabled():
            return super().normalize(weighted_sum, kept_count, num_items_in_batch)
        mesh = self.state.grid_mesh
        kept_count = kept_count if self._kept_of_batch is None else self._kept_of_batch
        count = reduce_(kept_count.to(weighted_sum.device, torch.float64, copy=True), mesh.group(*ROWS))
        return weighted_sum * (mesh.size(*ROWS) / count.clamp(min=1)).to(weighted_sum.dtype)


class _ChunkedLoss(torch.autograd.Function):
    """Head, softmax and cross-entropy of this (data, z) position's tokens.

    Global: hidden [T, H], weight [V, H]. Local: hidden [T/(x*y), H], weight's z shard. Returns (sum, nll [T]).
    What adapters add to the logits is low [T/(x*y), R] @ up [V/(x*y), R].T, both None without them.
    `weights` are as `chunks.targets`, bool or floats as in `Targets`; `count` is T; `smoothing` is e.
    Collectives, for each chunk: all-gather of tokens, all-reduce of max, all-reduce of sum-exp and target logit (and
    with smoothing the sum of logits), reduce-scatter of dh, all over (x, y); all-gather of the weight over z;
    backward: reduce-scatter of dW over z.
    """

    @staticmethod
    def forward(ctx, hidden, shard, bias, low, up, chunks, weights, count, smoothing):
        spread_over = chunks.vocabulary if smoothing else 0
        uniform = smoothing / chunks.vocabulary
        grad_low, grad_up = ctx.needs_input_grad[3:5]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        weight = chunks.weight_of(chunks.product.gather_blocks(hidden.dtype))
        gradients = HeadGradients(chunks, hidden, weight, bias, ctx.needs_input_grad[:3])
        dlow = torch.empty_like(low) if grad_low else None
        dup = torch.zeros_like(up) if grad_up else None
        parts, own = len(chunks.targets), len(chunks.own)
        nlls, spreads = [], []
        with torch.autocast(hidden.device.type, enabled=False):
            for span in chunks.spans(weight.shape[0]):
                tokens = chunks.gather(hidden, span)
                target, kept = chunks.targets[:, span].reshape(-1), weights[:, span].reshape(-1, 1)
                logits = chunks.logits_of(tokens, weight, bias)
                if low is not None:
                    beside = chunks.gather(low, span)
                    logits.addmm_(beside, up.t())
                logits, graph = chunks.apply_steps(logits)
                logits[:, own:] = float("-inf")
                nll, spread, total, is_own, column = _cross_entropy(logits, target, chunks, spread_over)
                nlls.append(nll.view(parts, -1))
                spreads.append(spread.view(parts, -1))
                if not any(ctx.needs_input_grad):
                    del logits, graph
                    continue
                share = is_own.to(wide) * (1 - smoothing)
                less_target = chunks.product.state.compile_function(_softmax_less_target)
                dlogits = less_target(logits, total, column, share, kept.to(wide), own, uniform)
                dlogits = chunks.through_steps(graph, dlogits)
                gradients.add_bias(dlogits)
                if dup is not None:
                    dup.addmm_(dlogits.t(), beside)
                if dlow is not None:
                    blocks = (dlogits @ up).view(parts, -1, up.shape[1])
                    dlow[span] = start_reduce_scatter(blocks, chunks.group).wait()
                dlogits = dlogits.to(weight.dtype)
                del logits, graph  # and what came of them: the next products need the room
                gradients.add(span, dlogits, tokens, weight)
                del dlogits, tokens
        nll = torch.cat(nlls, dim=1).flatten()[:count]
        cost = nll
        if smoothing:
            cost = nll * (1 - smoothing) + torch.cat(spreads, dim=1).flatten()[:count] * uniform
        total = (cost * weights.flatten()[:count].to(cost.dtype)).sum()
        ctx.gradients = (gradients, dlow, dup)
        ctx.mark_non_differentiable(nll)
        return total, nll

    @staticmethod
    def backward(ctx, grad, _):
        refuse_second_derivatives()
        if ctx.gradients is None:
            raise RuntimeError(
                "backward through the loss of a parallelized model a second time: its gradients are formed in the "
                "forward pass and given away once, so call the model again instead of retain_graph=True."
            )
        (gradients, *adapters), ctx.gradients = ctx.gradients, None
        if gradients.weight is not None:
            gradients.weight *= grad
        dhidden = gradients.hidden
        if dhidden is not None:  # fp16 has no room for `grad`, which has the scale of a GradScaler in it
            dhidden = (dhidden.to(torch.promote_types(dhidden.dtype, grad.dtype)) * grad).to(dhidden.dtype)
        return (
            dhidden,
            gradients.grad_shard(),
            *(None if other is None else other * grad for other in (gradients.bias, *adapters)),
            *(None,) * 4,
        )


def _cross_entropy(
    logits: Tensor, target: Tensor, chunks: HeadChunks, spread_over: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Negative log-likelihood [T] of targets; of the logits [T, v] it leaves their exponentials, in place.

    Also [T] the sum of -log p over the full vocabulary if its size is given as `spread_over` (else 0), [T] the sums of
    the exponentials over the full vocabulary, which targets are this rank's, and their columns. Two all-reduces over
    (x, y).
    """
    peak = reduce_(logits.max(dim=-1).values, chunks.group, op="max")
    is_own, column = chunks.columns_of(target)
    exponentiate = chunks.product.state.compile_function(_exponentiate)
    sums = exponentiate(logits, peak, is_own, column, len(chunks.own) if spread_over else None)
    total, of_target, *every = reduce_(sums, chunks.group)
    ignored, log_total = target == IGNORE_INDEX, total.log()
    nll = torch.where(ignored, 0, log_total - of_target)
    spread = torch.where(ignored, 0, spread_over * log_total - every[0]) if every else torch.zeros_like(nll)
    return nll, spread, total, is_own, column


def _exponentiate(logits: Tensor, peak: Tensor, is_own: Tensor, column: Tensor, spread_over: int | None) -> Tensor:
    """exp(logits - peak) of [T, v] and [T], in place.

    Returns: [2, T], the sums of a row and what stands at its target's column before exp, 0 where that is not `is_own`;
    with `spread_over` [3, T], with the sums before exp over that number of columns, perhaps none. No communication.
    """
    logits.sub_(peak.unsqueeze(1))
    sums = [torch.where(is_own, logits.gather(1, column.unsqueeze(1)).squeeze(1), 0)]
    if spread_over is not None:
        sums.append(logits[:, :spread_over].sum(dim=-1))
    return torch.stack([logits.exp_().sum(dim=-1), *sums])


def _softmax_less_target(
    exponentials: Tensor, total: Tensor, column: Tensor, share: Tensor, kept: Tensor, own: int, smoothing: float
) -> Tensor:
    """The gradient of logits [T, v], in place of their exponentials: softmax - one-hot, for `kept` tokens [T, 1].

    A row loses its `share` [T] at its target's column: 0 where that is another rank's, as the host would have to wait
    to know which these are. No communication.
    """
    probabilities = exponentials.div_(total.unsqueeze(1))
    rows = torch.arange(len(column), device=column.device)
    probabilities[rows, column] -= share
    if smoothing:
        probabilities[:, :own] -= smoothing
    return probabilities.mul_(kept)
