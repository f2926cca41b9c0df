"""Log-probability, entropy and rank of labels from logits that are cut along the vocabulary and never formed whole.

The head and the statistics go together, chunk by chunk, and only where there is a label. Unlike in vocab_parallel.py
the gradient of each token is known in backward only, so the logits of a chunk are computed twice:

    logits[chunk, V/(x*y)] = h @ W.T
    max                                                     reduced over (x, y)
    sum exp, target logit, sum exp * logit, earlier maxima  reduced over (x, y)
    backward: dlogits = g_p * (one-hot - softmax) - g_e * softmax * (log softmax + entropy)
              dh[chunk/(x*y)] reduce-scattered over (x, y), dW[V/(x*y)] kept for the reduction over z

Source: vocabulary-parallel cross-entropy, Shoeybi et al. 2019 (arXiv 1909.08053), section 3; the numbers are those of
trl 1.16 (trainer/utils.py, FusedCausalLMOutput).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_axonn.distributed.collectives import reduce_, start_all_gather, start_reduce_scatter
from hf_axonn.engine.gather_cache import GatheredBlocks
from hf_axonn.engine.matmul3d import Product, leave_gradients
from hf_axonn.engine.overlap import placeholder
from hf_axonn.engine.state import ParallelState
from hf_axonn.engine.weight_layout import vocabulary_range
from hf_axonn.layers.vocabulary import DeferredLogits
from hf_axonn.losses.causal_lm import IGNORE_INDEX
from hf_axonn.losses.vocab_parallel import CHUNK_LOGITS, add_product, local_logits


def label_statistics(logits: Tensor | DeferredLogits, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probability, entropy, whether it is the most likely) of each target, 0 where ignored.

    Args:
        logits: [B, S, V], or those that a sharded head has left to be formed.
        targets: [B * S] int64, IGNORE_INDEX where ignored.
    Collectives: those of `_ShardedStatistics` for deferred logits, none for others.
    """
    if isinstance(logits, DeferredLogits) and logits.beside:
        logits = logits.full()
    if not isinstance(logits, DeferredLogits):
        return _whole_statistics(logits.reshape(-1, logits.shape[-1]), targets.to(logits.device))
    head = logits.head
    mesh, product = head.state.mesh, head.product()
    hidden = logits.hidden.squeeze(0)
    targets = targets.to(hidden.device)
    missing = logits.tokens.padded(mesh) - len(targets)
    of = _OfHead(
        product,
        vocabulary_range(head.linear.out_features, mesh),
        # Token t of rank r is token r * T/(x*y) + t of the batch.
        F.pad(targets, (0, missing), value=IGNORE_INDEX).view(mesh.size("x", "y"), -1),
        logits.apply_steps if logits.steps else None,
    )
    dtype = head.state.compute_dtype(hidden)
    found = _ShardedStatistics.apply(hidden.to(dtype), product.shards()[0], head.local_bias(), of)
    log_probs, entropy, is_top1 = (value.flatten()[: len(targets)] for value in found)
    return log_probs, entropy, is_top1


def _whole_statistics(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `label_statistics`, for [T, V]."""
    rows = (targets != IGNORE_INDEX).nonzero().squeeze(-1)
    logits, labels = logits[rows], targets[rows]
    log_softmax = F.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    of_label = log_softmax.gather(1, labels.unsqueeze(1)).squeeze(1)
    entropy = -(log_softmax.exp() * log_softmax).sum(dim=-1)
    found = (of_label, entropy, logits.argmax(dim=-1) == labels)
    return tuple(value.new_zeros(targets.shape).index_put((rows,), value) for value in found)


@dataclass(frozen=True)
class _OfHead:
    """What the statistics of a sharded head are made of, besides tensors with gradients.

    Args:
        product: of the head's weight.
        own: ids of this rank's part of the vocabulary.
        targets: [x*y, T/(x*y)], IGNORE_INDEX where ignored.
        steps: what is done elementwise to logits, such as a soft cap.
    """

    product: Product
    own: range
    targets: Tensor
    steps: Callable[[Tensor], Tensor] | None

    @property
    def state(self) -> ParallelState:
        return self.product.state

    @property
    def group(self):
        return self.state.mesh.group("x", "y")

    def chunks(self, columns: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Tokens of each rank, which of all ranks' [x*y * chunk] have a label, and the labels; the same on every rank
        of (x, y). Chunks without labels are left out."""
        step = max(1, CHUNK_LOGITS // columns // len(self.targets) // (1 if self.steps is None else 3))
        for begin in range(0, self.targets.shape[1], step):
            span = slice(begin, begin + step)
            target = self.targets[:, span].reshape(-1)
            rows = (target != IGNORE_INDEX).nonzero().squeeze(-1)
            if len(rows):
                yield span, rows, target[rows]

    def column(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Which targets are this rank's, and their columns here (0 of others)."""
        mine = (target >= self.own.start) & (target < self.own.stop)
        return mine, torch.where(mine, target - self.own.start, 0)


class _ShardedStatistics(torch.autograd.Function):
    """Head and statistics of this (data, z) position's tokens, [x*y, T/(x*y)] each on every rank of (x, y).

    Global: hidden [T, H], weight [V, H]. Local: hidden [T/(x*y), H], weight's z shard. The gradients that come back
    are the same on all (x, y), which repeat the same work with the result.
    Collectives, for each chunk: all-gather of tokens, all-reduce of max, all-reduce of four sums, all over (x, y);
    all-gather of the weight over z. Backward: the gathers again (the weight's unless it is kept), reduce-scatter of
    dh over (x, y) for each chunk, reduce-scatter of dW over z.
    """

    @staticmethod
    def forward(ctx, hidden, shard, bias, of):
        ctx.set_materialize_grads(False)
        gathered = of.product.gathered(hidden.dtype)
        weight = _rows_of(gathered)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        log_probs, entropy, log_total = (hidden.new_zeros(of.targets.shape, dtype=wide) for _ in range(3))
        is_top1 = torch.zeros_like(of.targets, dtype=torch.bool)
        with torch.autocast(hidden.device.type, enabled=False):
            for span, rows, target in of.chunks(weight.shape[0]):
                tokens = start_all_gather(hidden[span], of.group).wait().flatten(0, 1)[rows]
                logits = local_logits(tokens, weight, bias).to(wide)
                if of.steps is not None:
                    logits = of.steps(logits).clone()
                found = _statistics(logits, target, of)
                for whole, part in zip((log_probs, entropy, is_top1, log_total), found, strict=True):
                    chunk = whole[:, span].reshape(-1).index_put((rows,), part)
                    whole[:, span] = chunk.view(len(whole), -1)
                del tokens, logits
        ctx.of, ctx.like = of, placeholder(shard)
        ctx.gathered = gathered if of.product.keeps and any(ctx.needs_input_grad) else None
        # The shard, so that a change before backward is noticed.
        ctx.save_for_backward(hidden, shard, bias, entropy, log_total)
        ctx.mark_non_differentiable(is_top1)
        return log_probs, entropy, is_top1

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy, _):
        hidden, _, bias, entropy, log_total = ctx.saved_tensors
        of = ctx.of
        grad_hidden, grad_shard, grad_bias = ctx.needs_input_grad[:3]
        gathered, ctx.gathered = ctx.gathered or of.product.gathered(hidden.dtype), None
        weight = _rows_of(gathered)
        wide = entropy.dtype
        dhidden = torch.zeros_like(hidden) if grad_hidden else None
        dweight = torch.zeros_like(weight, dtype=wide) if grad_shard else None
        dbias = torch.zeros_like(bias, dtype=wide) if grad_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for span, rows, target in of.chunks(weight.shape[0]):
                tokens = start_all_gather(hidden[span], of.group).wait().flatten(0, 1)[rows]
                logits = local_logits(tokens, weight, bias).to(wide)
                raw = stepped = logits
                if of.steps is not None:  # soft caps and scales, whose derivative autograd knows
                    with torch.enable_grad():
                        raw = logits.requires_grad_()
                        stepped = of.steps(raw)
                    logits = stepped.detach().clone()

                def chosen(value, span=span, rows=rows):
                    return None if value is None else value[:, span].reshape(-1)[rows]

                given = (chosen(value) for value in (grad_log_probs, grad_entropy, entropy, log_total))
                dlogits = _gradient(logits, target, of, *given)
                if of.steps is not None:
                    (dlogits,) = torch.autograd.grad(stepped, raw, dlogits)
                if dbias is not None:
                    dbias += dlogits.sum(dim=0)
                dlogits = dlogits.to(weight.dtype)
                del logits, raw, stepped  # the next products need the room
                if dweight is not None:
                    add_product(dweight, dlogits, tokens)
                if dhidden is not None:
                    every = hidden.new_zeros(of.targets[:, span].numel(), hidden.shape[1])
                    every[rows] = torch.mm(dlogits, weight)
                    blocks = every.view(len(of.targets), -1, hidden.shape[1])
                    dhidden[span] = start_reduce_scatter(blocks, of.group).wait()
                del dlogits, tokens
        if dweight is not None:
            block = dweight.view(1, dweight.shape[0], 1, dweight.shape[1])
            leave_gradients(of.state, of.product.weights, of.product.cuts, [block])
        return dhidden, ctx.like if grad_shard else None, dbias if dbias is None else dbias.to(bias.dtype), None


def _rows_of(gathered: GatheredBlocks) -> Tensor:
    """[v, H], v being this rank's part of the vocabulary, padded."""
    return gathered.blocks[0].flatten(2).flatten(0, 1)


def _statistics(logits: Tensor, target: Tensor, of: _OfHead) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of [T, v]: log-probability, entropy, whether most likely, and log sum exp of the whole row (overwrites logits).

    Two all-reduces over (x, y).
    """
    own = len(of.own)
    logits[:, own:] = float("-inf")
    first = logits.argmax(dim=-1, keepdim=True)
    best = logits.gather(1, first).squeeze(1)
    peak = reduce_(best.clone(), of.group, op="max")
    # Where other ranks or columns are as high, the lowest id is the most likely token.
    earlier = (best == peak) & (first.squeeze(1) + of.own.start < target)
    mine, column = of.column(target)
    logits.sub_(peak.unsqueeze(1))
    of_target = torch.where(mine, logits.gather(1, column.unsqueeze(1)).squeeze(1), 0)
    exponentials = logits.exp()
    weighted = logits[:, :own].mul_(exponentials[:, :own]).sum(dim=-1)
    total, of_target, weighted, earlier = reduce_(
        torch.stack([exponentials.sum(dim=-1), of_target, weighted, earlier.to(logits.dtype)]), of.group
    )
    log_total = total.log()
    return of_target - log_total, log_total - weighted / total, (of_target == 0) & (earlier == 0), peak + log_total


def _gradient(
    logits: Tensor,
    target: Tensor,
    of: _OfHead,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    entropy: Tensor,
    log_total: Tensor,
) -> Tensor:
    """[T, v] the gradient of this rank's logits, which are overwritten. No communication."""
    mine, column = of.column(target)
    log_softmax = logits.sub_(log_total.unsqueeze(1))
    factor = log_softmax.new_zeros(len(target), 1) if grad_log_probs is None else -grad_log_probs.unsqueeze(1)
    if grad_entropy is not None:
        factor = factor - (log_softmax + entropy.unsqueeze(1)).mul_(grad_entropy.unsqueeze(1))
    dlogits = log_softmax.exp_().mul_(factor)
    if grad_log_probs is not None:
        rows = mine.nonzero().squeeze(-1)
        dlogits[rows, column[rows]] += grad_log_probs[rows]
    dlogits[:, len(of.own) :] = 0
    return dlogits
