"""Log-probability, entropy and rank of labels from logits that are sharded along the vocabulary and never
formed in full.

The head and the statistics go together, chunk by chunk, and only where there is a label. Unlike in vocab_parallel.py
the gradient of each token is known in backward only, so the logits of a chunk are computed twice:

    logits[chunk, V/(x*y)] = h @ W.T
    max                                                     reduced over (x, y)
    sum exp, target logit, sum exp * logit, earlier maxima  reduced over (x, y)
    where asked for, sum of logits, sum of exp squared      with them
    backward: dlogits = g_p * (one-hot - softmax) - g_e * softmax * (log softmax + entropy)
              dh[chunk/(x*y)] reduce-scattered over (x, y), dW[V/(x*y)] kept for the reduction over z

Source: vocabulary-parallel cross-entropy, Shoeybi et al. 2019 (arXiv 1909.08053), section 3; the numbers are those of
trl 1.16 (trainer/utils.py, FusedCausalLMOutput).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_axonn.distributed.collectives import reduce_
from hf_axonn.engine.matmul3d import refuse_second_derivatives
from hf_axonn.layers.vocabulary import DeferredLogits
from hf_axonn.losses.causal_lm import IGNORE_INDEX
from hf_axonn.losses.head_chunks import HeadChunks, HeadGradients


ALWAYS = ("log_probs", "entropy", "is_top1")
MORE = ("mean_logits", "log_sum_sq_probs")


def label_statistics(
    logits: Tensor | DeferredLogits, targets: Tensor, *, temperature: float = 1.0, more: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """Return statistics of each target, by name; 0 where it is ignored.

    Args:
        logits: [B, S, V], or those that a sharded head has left to be formed.
        targets: [B * S] int64, IGNORE_INDEX where ignored.
        temperature: logits are divided by it first.
        more: which of `MORE` are asked for.
    Returns:
        [B * S] each: `log_probs` and `entropy` in nats, differentiable; `is_top1`, whether the target is the first of
        the most likely tokens; of `more`, without gradient, `mean_logits`, the mean over the vocabulary, and
        `log_sum_sq_probs`, the logarithm of the sum of squared probabilities.
    Collectives: those of `_ShardedStatistics` for deferred logits, and an all-gather over context of each number where
    that divides their positions; none for others.
    """
    if isinstance(logits, DeferredLogits) and logits.beside:
        logits = logits.full()
    if isinstance(logits, DeferredLogits) and (rows := logits.rows) is not None:
        own = rows.take(targets.view(rows.batch, -1), IGNORE_INDEX).reshape(-1)
        found = label_statistics(logits.without_rows(), own, temperature=temperature, more=more)
        return {name: rows.gather(value.view(rows.batch, -1)).reshape(-1) for name, value in found.items()}
    if not isinstance(logits, DeferredLogits):
        return _full_statistics(logits.reshape(-1, logits.shape[-1]), targets.to(logits.device), temperature, more)
    if temperature != 1.0:
        logits = logits.then(lambda formed: formed / temperature)
    head, hidden = logits.head, logits.hidden.squeeze(0)
    chunks = HeadChunks.from_logits(logits, targets)
    dtype = head.state.compute_dtype(hidden)
    found = _ShardedStatistics.apply(hidden.to(dtype), chunks.product.shards()[0], head.local_bias(), chunks, more)
    return {name: value.flatten()[: len(targets)] for name, value in zip((*ALWAYS, *more), found, strict=True)}


def _full_statistics(logits: Tensor, targets: Tensor, temperature: float, more: tuple[str, ...]) -> dict[str, Tensor]:
    """Same as `label_statistics`, for [T, V]."""
    rows = (targets != IGNORE_INDEX).nonzero().squeeze(-1)
    logits, labels = logits[rows], targets[rows]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    log_softmax = F.log_softmax(logits, dim=-1)
    found = {
        "log_probs": log_softmax.gather(1, labels.unsqueeze(1)).squeeze(1),
        "entropy": -(log_softmax.exp() * log_softmax).sum(dim=-1),
        "is_top1": logits.argmax(dim=-1) == labels,
    }
    if "mean_logits" in more:
        found["mean_logits"] = logits.detach().mean(dim=-1)
    if "log_sum_sq_probs" in more:
        found["log_sum_sq_probs"] = (2 * log_softmax.detach()).logsumexp(dim=-1)
    return {name: value.new_zeros(targets.shape).index_put((rows,), value) for name, value in found.items()}


def _iter_labels(chunks: HeadChunks, columns: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Tokens of each rank, which of all ranks' [x*y * chunk] have a label, and the labels; the same on every rank of
    (x, y). Chunks without labels are skipped."""
    for span in chunks.spans(columns):
        target = chunks.targets[:, span].reshape(-1)
        rows = (target != IGNORE_INDEX).nonzero().squeeze(-1)
        if len(rows):
            yield span, rows, target[rows]


class _ShardedStatistics(torch.autograd.Function):
    """Head and statistics of this (data, z) position's tokens, [x*y, T/(x*y)] each on every rank of (x, y).

    Global: hidden [T, H], weight [V, H]. Local: hidden [T/(x*y), H], weight's z shard. The gradients that come back
    are the same on all (x, y), which repeat the same work with the result. `more` is that of `label_statistics`.
    Collectives, for each chunk: all-gather of tokens, all-reduce of max, all-reduce of four to six sums, all over
    (x, y); all-gather of the weight over z. Backward: the gathers again (the weight's unless it is kept),
    reduce-scatter of dh over (x, y) for each chunk, reduce-scatter of dW over z.
    """

    @staticmethod
    def forward(ctx, hidden, shard, bias, chunks, more):
        ctx.set_materialize_grads(False)
        gathered = chunks.product.gather_blocks(hidden.dtype)
        weight = chunks.weight_of(gathered)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        values = {name: hidden.new_zeros(chunks.targets.shape, dtype=wide) for name in (*ALWAYS, *more, "log_total")}
        values["is_top1"] = values["is_top1"].bool()
        with torch.autocast(hidden.device.type, enabled=False):
            for span, rows, target in _iter_labels(chunks, weight.shape[0]):
                tokens = chunks.gather(hidden, span)[rows]
                logits = chunks.logits_of(tokens, weight, bias)
                if chunks.steps is not None:
                    logits = chunks.steps(logits).clone()
                found = _statistics(logits, target, chunks, more)
                for name, full in values.items():
                    chunk = full[:, span].reshape(-1).index_put((rows,), found[name])
                    full[:, span] = chunk.view(len(full), -1)
                del tokens, logits
        log_total = values.pop("log_total")
        ctx.chunks, ctx.version = chunks, chunks.product.version
        ctx.gathered = gathered if chunks.product.keeps and any(ctx.needs_input_grad) else None
        ctx.save_for_backward(hidden, bias, values["entropy"], log_total)
        ctx.mark_non_differentiable(*(values[name] for name in ("is_top1", *more)))
        return tuple(values[name] for name in (*ALWAYS, *more))

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy, *_):
        refuse_second_derivatives()
        hidden, bias, entropy, log_total = ctx.saved_tensors
        chunks = ctx.chunks
        chunks.product.check_unchanged(ctx.version)
        gathered, ctx.gathered = ctx.gathered or chunks.product.gather_blocks(hidden.dtype), None
        weight = chunks.weight_of(gathered)
        gradients = HeadGradients(chunks, hidden, weight, bias, ctx.needs_input_grad[:3])
        with torch.autocast(hidden.device.type, enabled=False):
            for span, rows, target in _iter_labels(chunks, weight.shape[0]):
                tokens = chunks.gather(hidden, span)[rows]
                logits, graph = chunks.apply_steps(chunks.logits_of(tokens, weight, bias))

                def chosen(value, span=span, rows=rows):
                    return None if value is None else value[:, span].reshape(-1)[rows]

                given = (chosen(value) for value in (grad_log_probs, grad_entropy, entropy, log_total))
                dlogits = chunks.through_steps(graph, _gradient(logits, target, chunks, *given))
                gradients.add_bias(dlogits)
                dlogits = dlogits.to(weight.dtype)
                del logits, graph  # the next products need the room
                gradients.add(span, dlogits, tokens, weight, rows)
                del dlogits, tokens
        dbias = None if gradients.bias is None else gradients.bias.to(bias.dtype)
        return gradients.hidden, gradients.grad_shard(), dbias, None, None


def _statistics(logits: Tensor, target: Tensor, chunks: HeadChunks, more: tuple[str, ...]) -> dict[str, Tensor]:
    """Return of [T, v] the `label_statistics` of a target, and `log_total`, log sum exp of the full row (overwrites
    logits).

    Two all-reduces over (x, y).
    """
    own = len(chunks.own)
    logits[:, own:] = float("-inf")
    first = logits.argmax(dim=-1, keepdim=True)
    best = logits.gather(1, first).squeeze(1)
    peak = reduce_(best.clone(), chunks.group, op="max")
    # Where other ranks or columns are as high, the lowest id is the most likely token.
    earlier = (best == peak) & (first.squeeze(1) + chunks.own.start < target)
    is_own, column = chunks.columns_of(target)
    logits.sub_(peak.unsqueeze(1))
    sums = {
        "of_target": torch.where(is_own, logits.gather(1, column.unsqueeze(1)).squeeze(1), 0),
        "earlier": earlier.to(logits.dtype),
    }
    if "mean_logits" in more:  # while the logits are still there
        sums["logits"] = logits[:, :own].sum(dim=-1)
    exponentials = logits.exp()
    sums["weighted"] = logits[:, :own].mul_(exponentials[:, :own]).sum(dim=-1)
    sums["total"] = exponentials.sum(dim=-1)
    if "log_sum_sq_probs" in more:
        sums["squares"] = exponentials.square_().sum(dim=-1)
    sums = dict(zip(sums, reduce_(torch.stack([*sums.values()]), chunks.group), strict=True))
    log_total = sums["total"].log()
    found = {
        "log_probs": sums["of_target"] - log_total,
        "entropy": log_total - sums["weighted"] / sums["total"],
        "is_top1": (sums["of_target"] == 0) & (sums["earlier"] == 0),
        "log_total": peak + log_total,
    }
    if "mean_logits" in more:
        found["mean_logits"] = peak + sums["logits"] / chunks.vocabulary
    if "log_sum_sq_probs" in more:
        found["log_sum_sq_probs"] = sums["squares"].log() - 2 * log_total
    return found


def _gradient(
    logits: Tensor,
    target: Tensor,
    chunks: HeadChunks,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    entropy: Tensor,
    log_total: Tensor,
) -> Tensor:
    """[T, v] the gradient of this rank's logits, which are overwritten. No communication."""
    is_own, column = chunks.columns_of(target)
    log_softmax = logits.sub_(log_total.unsqueeze(1))
    factor = log_softmax.new_zeros(len(target), 1) if grad_log_probs is None else -grad_log_probs.unsqueeze(1)
    if grad_entropy is not None:
        factor = factor - (log_softmax + entropy.unsqueeze(1)).mul_(grad_entropy.unsqueeze(1))
    dlogits = log_softmax.exp_().mul_(factor)
    if grad_log_probs is not None:
        rows = torch.arange(len(column), device=column.device)
        dlogits[rows, column] += torch.where(is_own, grad_log_probs, 0)
    dlogits[:, len(chunks.own) :] = 0
    return dlogits
