"""Cross-entropy on logits that are cut along the vocabulary and never formed whole.

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

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from hf_axonn.distributed.collectives import reduce_, start_all_gather, start_reduce_scatter
from hf_axonn.engine.activation_layouts import pad_dim
from hf_axonn.engine.matmul3d import leave_gradients
from hf_axonn.engine.overlap import placeholder
from hf_axonn.engine.state import ParallelState
from hf_axonn.engine.weight_layout import vocabulary_range
from hf_axonn.layers.vocabulary import DeferredLogits
from hf_axonn.losses.causal_lm import IGNORE_INDEX, CausalLMLoss, Targets


CHUNK_LOGITS = 2**26  # logits in a chunk of one rank: 256 MiB in float32. Head and loss need less than two of them


class ShardedCausalLMLoss(CausalLMLoss):
    """`model.loss_function` of a parallelized causal LM.

    Every rank of (x, y) gets the same number. Collectives: those of `_ChunkedLoss` over (x, y) and, in training
    without num_items_in_batch, one all-reduce of a count over (data, z).
    """

    def __init__(self, state: ParallelState) -> None:
        super().__init__()
        self.state = state
        self._smoothing = 0.0

    @contextmanager
    def smoothed(self, epsilon: float) -> Iterator[None]:
        """Inside, losses are those of labels smoothed by epsilon, as Transformers' LabelSmoother defines them.

        They are not taken note of: they are not what tokens cost.
        """
        self._smoothing = epsilon
        try:
            yield
        finally:
            self._smoothing = 0.0

    def note(self, nll: Tensor, targets: Targets, *more: Tensor) -> None:
        """As the base class."""
        if not self._smoothing:
            super().note(nll, targets, *more)

    def weighted_nll(self, logits: Tensor | DeferredLogits, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """As the base class; for `DeferredLogits` the head is applied here."""
        if not isinstance(logits, DeferredLogits):
            total, nll = super().weighted_nll(logits, targets, weights)
            return self._smooth(total, logits, weights) if self._smoothing else total, nll
        head, mesh = logits.head, self.state.mesh
        product = head.product()
        dtype = self.state.compute_dtype(logits.hidden)
        low, up = logits.low_rank(torch.promote_types(dtype, torch.float32))
        hidden = logits.hidden.squeeze(0)
        padded = logits.tokens.padded(mesh)
        targets = targets.to(hidden.device)
        return _ChunkedLoss.apply(
            hidden.to(dtype),
            product.shards()[0],
            head.local_bias(),
            low,
            up,
            product,
            len(vocabulary_range(head.linear.out_features, mesh)),
            vocabulary_range(head.linear.out_features, mesh).start,
            torch.nn.functional.pad(targets, (0, padded - len(targets)), value=IGNORE_INDEX),
            pad_dim(weights.to(hidden.device), 0, padded),
            len(targets),
            logits.apply_steps if logits.steps else None,
            self._smoothing / head.linear.out_features,
            head.linear.out_features,
        )

    def _smooth(self, total: Tensor, logits: Tensor, weights: Tensor) -> Tensor:
        """The smoothed sum of whole logits [B, S, V], whose ordinary sum over kept tokens is `total`."""
        logits = logits.reshape(len(weights), -1)
        log_probs = log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
        spread = -(log_probs.mean(dim=-1) * weights.to(logits.device)).sum()
        return (1 - self._smoothing) * total + self._smoothing * spread

    def normalize(self, weighted_sum: Tensor, kept_count: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
        """As the base class. In training without num_items_in_batch: sum * data * z / kept tokens of all ranks, so
        that the average over data and z that gradients get is right for unequal counts."""
        if num_items_in_batch is not None or not torch.is_grad_enabled():
            return super().normalize(weighted_sum, kept_count, num_items_in_batch)
        mesh = self.state.mesh
        count = reduce_(kept_count.to(weighted_sum.device, torch.float64, copy=True), mesh.group("data", "z"))
        return weighted_sum * (mesh.size("data", "z") / count.clamp(min=1)).to(weighted_sum.dtype)


class _ChunkedLoss(torch.autograd.Function):
    """Head, softmax and cross-entropy of this (data, z) position's tokens.

    Global: hidden [T, H], weight [V, H]. Local: hidden [T/(x*y), H], weight's z shard. Returns (sum, nll [T]).
    What adapters add to the logits is low [T/(x*y), R] @ up [V/(x*y), R].T, both None without them.
    `smoothing` is e / V, `size` is V.
    Collectives, for each chunk: all-gather of tokens, all-reduce of max, all-reduce of sum-exp and target logit (and
    with smoothing the sum of logits), reduce-scatter of dh, all over (x, y); all-gather of the weight over z;
    backward: reduce-scatter of dW over z.
    """

    @staticmethod
    def forward(
        ctx, hidden, shard, bias, low, up, product, own, start, targets, weights, count, steps, smoothing, size
    ):
        mesh = product.state.mesh
        group, parts = mesh.group("x", "y"), mesh.size("x", "y")
        ctx.product, ctx.like = product, placeholder(shard)
        grad_hidden, grad_shard, grad_bias, grad_low, grad_up = ctx.needs_input_grad[:5]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        weight = product.gather(hidden.dtype)[0].flatten(2).flatten(0, 1)  # [v, H], v = own padded
        dhidden = torch.empty_like(hidden) if grad_hidden else None
        dweight = torch.zeros_like(weight, dtype=wide) if grad_shard else None
        dbias = torch.zeros_like(bias, dtype=wide) if grad_bias else None
        dlow = torch.empty_like(low) if grad_low else None
        dup = torch.zeros_like(up) if grad_up else None
        # Token t of rank r is token r * T/(x*y) + t of the batch.
        targets, weights = targets.view(parts, -1), weights.view(parts, -1)
        nlls, spreads = [], []
        # The padded width is the same on every rank, and so is the number of chunks.
        step = max(1, CHUNK_LOGITS // weight.shape[0] // parts // (1 if steps is None else 3))
        with torch.autocast(hidden.device.type, enabled=False):
            for begin in range(0, hidden.shape[0], step):
                span = slice(begin, begin + step)
                tokens = start_all_gather(hidden[span], group).wait().flatten(0, 1)
                target, kept = targets[:, span].reshape(-1), weights[:, span].reshape(-1, 1)
                logits = local_logits(tokens, weight, bias).to(wide)
                if low is not None:
                    beside = start_all_gather(low[span], group).wait().flatten(0, 1)
                    logits.addmm_(beside, up.t())
                if steps is not None:  # soft caps and scales, whose derivative autograd knows
                    with torch.enable_grad():
                        raw = logits.requires_grad_()
                        stepped = steps(raw)
                    logits = stepped.detach().clone()
                logits[:, own:] = float("-inf")
                found = _cross_entropy(logits, target, start, own, group, size if smoothing else 0)
                nll, probabilities, mine, column, spread = found
                nlls.append(nll.view(parts, -1))
                spreads.append(spread.view(parts, -1))
                if not any(ctx.needs_input_grad):
                    del logits, probabilities, found
                    continue
                # softmax - one-hot, for kept tokens
                rows = mine.nonzero().squeeze(-1)
                probabilities[rows, column[rows]] -= 1 - smoothing * size
                if smoothing:
                    probabilities[:, :own] -= smoothing
                dlogits = probabilities.mul_(kept.to(wide))
                if steps is not None:
                    (dlogits,) = torch.autograd.grad(stepped, raw, dlogits)
                if dbias is not None:
                    dbias += dlogits.sum(dim=0)
                if dup is not None:
                    dup.addmm_(dlogits.t(), beside)
                if dlow is not None:
                    dlow[span] = start_reduce_scatter((dlogits @ up).view(parts, -1, up.shape[1]), group).wait()
                dlogits = dlogits.to(weight.dtype)
                del logits, probabilities, found  # and what came of them: the next chunk needs the room
                if steps is not None:
                    del raw, stepped
                if dweight is not None:
                    add_product(dweight, dlogits, tokens)
                if dhidden is not None:
                    dtokens = torch.mm(dlogits, weight).view(parts, -1, hidden.shape[1])
                    dhidden[span] = start_reduce_scatter(dtokens, group).wait()
                    del dtokens
                del dlogits, tokens
        nll = torch.cat(nlls, dim=1).flatten()[:count]
        cost = nll
        if smoothing:
            cost = nll * (1 - smoothing * size) + torch.cat(spreads, dim=1).flatten()[:count] * smoothing
        total = (cost * weights.flatten()[:count]).sum()
        ctx.gradients = (dhidden, dweight, dbias, dlow, dup)
        ctx.mark_non_differentiable(nll)
        return total, nll

    @staticmethod
    def backward(ctx, grad, _):
        if ctx.gradients is None:
            raise RuntimeError(
                "backward through the loss of a parallelized model a second time: its gradients are formed in the "
                "forward pass and given away once, so call the model again instead of retain_graph=True."
            )
        (dhidden, dweight, *others), ctx.gradients = ctx.gradients, None
        product = ctx.product
        if dweight is not None:
            dweight *= grad
            leave_gradients(
                product.state, product.weights, product.cuts, [dweight.view(1, dweight.shape[0], 1, dweight.shape[1])]
            )
        return (
            dhidden * grad.to(dhidden.dtype) if dhidden is not None else None,
            ctx.like if dweight is not None else None,
            *(None if other is None else other * grad for other in others),
            *(None,) * 9,
        )


def local_logits(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[T, H] x [v, H] -> [T, v]."""
    logits = torch.mm(tokens, weight.t())
    return logits if bias is None else logits.add_(bias.to(logits.dtype))


def add_product(dweight: Tensor, dlogits: Tensor, tokens: Tensor) -> None:
    """dweight[v, H] += dlogits[T, v].T @ tokens[T, H]; what it needs besides is no larger than `dlogits`."""
    if dweight.dtype == dlogits.dtype:
        dweight.addmm_(dlogits.t(), tokens)
        return
    rows = max(1, dlogits.numel() // tokens.shape[1])
    for part, own in zip(dweight.split(rows), dlogits.split(rows, dim=1), strict=True):
        part += torch.mm(own.t(), tokens)


def _cross_entropy(
    logits: Tensor, target: Tensor, start: int, own: int, group, spread_over: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Negative log-likelihood [T] of targets, and the softmax [T, v] of this rank's columns (in place of the logits).

    Also which targets are this rank's, and their columns, and [T] the sum of -log p over the whole vocabulary if its
    size is given as `spread_over` (else 0). Two all-reduces over `group`.
    """
    peak = reduce_(logits.max(dim=-1).values, group, op="max")
    mine = (target >= start) & (target < start + own)
    column = torch.where(mine, target - start, 0)
    of_target = torch.where(mine, logits.gather(1, column.unsqueeze(1)).squeeze(1) - peak, 0)
    sums = [of_target]
    logits.sub_(peak.unsqueeze(1))
    if spread_over:
        sums.append(logits[:, :own].sum(dim=-1))
    exponentials = logits.exp_()
    total, of_target, *every = reduce_(torch.stack([exponentials.sum(dim=-1), *sums]), group)
    ignored, log_total = target == IGNORE_INDEX, total.log()
    nll = torch.where(ignored, 0, log_total - of_target)
    spread = torch.where(ignored, 0, spread_over * log_total - every[0]) if every else torch.zeros_like(nll)
    return nll, exponentials.div_(total.unsqueeze(1)), mine, column, spread
