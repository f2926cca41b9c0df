"""Cross-entropy on logits that are cut along the vocabulary and never formed whole.

The head and the loss go together, chunk by chunk. For each chunk of tokens, gathered over (x, y):

    logits[chunk, V/(x*y)] = h @ W.T                        complete on each rank for its own part of the vocabulary
    nll = max + log(sum exp) - target logit                 three numbers a token reduced over (x, y), never logits
    dh[chunk/(x*y)], dW[V/(x*y)] from softmax - one-hot     dh reduce-scattered over (x, y), dW kept for the reduction

Gradients are formed in the forward pass, when the logits are there anyway; backward multiplies by the incoming number.

Source: vocabulary-parallel cross-entropy, Shoeybi et al. 2019 (arXiv 1909.08053), section 3; DESIGN 2.4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_axonn.collectives import reduce_, start_all_gather, start_reduce_scatter
from hf_axonn.goldfish import IGNORE_INDEX
from hf_axonn.layouts import pad_dim
from hf_axonn.matmul3d import leave_gradients
from hf_axonn.overlap import placeholder
from hf_axonn.state import ModelState
from hf_axonn.token_loss import CausalLMLoss
from hf_axonn.vocabulary import DeferredLogits, vocabulary_range


CHUNK_LOGITS = 2**26  # logits in a chunk of one rank: 256 MiB in float32. Head and loss need less than two of them


class ShardedCausalLMLoss(CausalLMLoss):
    """`model.loss_function` of a parallelized causal LM.

    Every rank of (x, y) gets the same number. Collectives: those of `_ChunkedLoss` over (x, y) and, in training
    without num_items_in_batch, one all-reduce of a count over (data, z).
    """

    def __init__(self, state: ModelState) -> None:
        super().__init__()
        self.state = state

    def weighted_nll(self, logits: Tensor | DeferredLogits, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """As the base class; for `DeferredLogits` the head is applied here."""
        if not isinstance(logits, DeferredLogits):
            return super().weighted_nll(logits, targets, weights)
        head, mesh = logits.head, self.state.mesh
        product = head.product()
        dtype = self.state.compute_dtype(logits.hidden)
        hidden = logits.hidden.squeeze(0)
        padded = logits.tokens.padded(mesh)
        targets = targets.to(hidden.device)
        return _ChunkedLoss.apply(
            hidden.to(dtype),
            product.shards()[0],
            head.local_bias(),
            product,
            len(vocabulary_range(head.linear.out_features, mesh)),
            vocabulary_range(head.linear.out_features, mesh).start,
            torch.nn.functional.pad(targets, (0, padded - len(targets)), value=IGNORE_INDEX),
            pad_dim(weights.to(hidden.device), 0, padded),
            len(targets),
            logits.apply_steps if logits.steps else None,
        )

    def normalize(self, weighted_sum: Tensor, kept_count: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
        """As the base class. In training without num_items_in_batch: sum * data * z / kept tokens of all ranks, so
        that the average over data and z that gradients get is right for unequal counts (DESIGN 2.4)."""
        if num_items_in_batch is not None or not torch.is_grad_enabled():
            return super().normalize(weighted_sum, kept_count, num_items_in_batch)
        mesh = self.state.mesh
        count = reduce_(kept_count.to(weighted_sum.device, torch.float64, copy=True), mesh.group("data", "z"))
        return weighted_sum * (mesh.size("data", "z") / count.clamp(min=1)).to(weighted_sum.dtype)


class _ChunkedLoss(torch.autograd.Function):
    """Head, softmax and cross-entropy of this (data, z) position's tokens.

    Global: hidden [T, H], weight [V, H]. Local: hidden [T/(x*y), H], weight's z shard. Returns (sum, nll [T]).
    Collectives, for each chunk: all-gather of tokens, all-reduce of max, all-reduce of sum-exp and target logit,
    reduce-scatter of dh, all over (x, y); all-gather of the weight over z; backward: reduce-scatter of dW over z.
    """

    @staticmethod
    def forward(ctx, hidden, shard, bias, product, own, start, targets, weights, count, steps):
        mesh = product.state.mesh
        group, parts = mesh.group("x", "y"), mesh.size("x", "y")
        ctx.product, ctx.like = product, placeholder(shard)
        grad_hidden, grad_shard, grad_bias = ctx.needs_input_grad[:3]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        weight = product.gather(hidden.dtype)[0].flatten(2).flatten(0, 1)  # [v, H], v = own padded
        dhidden = torch.empty_like(hidden) if grad_hidden else None
        dweight = torch.zeros_like(weight, dtype=wide) if grad_shard else None
        dbias = torch.zeros_like(bias, dtype=wide) if grad_bias else None
        # Token t of rank r is token r * T/(x*y) + t of the batch.
        targets, weights = targets.view(parts, -1), weights.view(parts, -1)
        nlls = []
        # The padded width is the same on every rank, and so is the number of chunks.
        step = max(1, CHUNK_LOGITS // weight.shape[0] // parts // (1 if steps is None else 3))
        with torch.autocast(hidden.device.type, enabled=False):
            for begin in range(0, hidden.shape[0], step):
                span = slice(begin, begin + step)
                tokens = start_all_gather(hidden[span], group).wait().flatten(0, 1)
                target, kept = targets[:, span].reshape(-1), weights[:, span].reshape(-1, 1)
                logits = local_logits(tokens, weight, bias).to(wide)
                if steps is not None:  # soft caps and scales, whose derivative autograd knows
                    with torch.enable_grad():
                        raw = logits.requires_grad_()
                        stepped = steps(raw)
                    logits = stepped.detach().clone()
                logits[:, own:] = float("-inf")
                nll, probabilities, mine, column = _cross_entropy(logits, target, start, own, group)
                nlls.append(nll.view(parts, -1))
                if not (grad_hidden or grad_shard or grad_bias):
                    del logits, probabilities
                    continue
                # softmax - one-hot, for kept tokens
                rows = mine.nonzero().squeeze(-1)
                probabilities[rows, column[rows]] -= 1
                dlogits = probabilities.mul_(kept.to(wide))
                if steps is not None:
                    (dlogits,) = torch.autograd.grad(stepped, raw, dlogits)
                if dbias is not None:
                    dbias += dlogits.sum(dim=0)
                dlogits = dlogits.to(weight.dtype)
                del logits, probabilities  # and what came of them: the next chunk needs the room
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
        total = (nll * weights.flatten()[:count]).sum()
        ctx.gradients = (dhidden, dweight, dbias)
        ctx.mark_non_differentiable(nll)
        return total, nll

    @staticmethod
    def backward(ctx, grad, _):
        if ctx.gradients is None:
            raise RuntimeError(
                "backward through the loss of a parallelized model a second time: its gradients are formed in the "
                "forward pass and given away once, so call the model again instead of retain_graph=True."
            )
        (dhidden, dweight, dbias), ctx.gradients = ctx.gradients, None
        product = ctx.product
        if dweight is not None:
            dweight *= grad
            leave_gradients(
                product.state, product.weights, product.cuts, [dweight.view(1, dweight.shape[0], 1, dweight.shape[1])]
            )
        return (
            dhidden * grad.to(dhidden.dtype) if dhidden is not None else None,
            ctx.like if dweight is not None else None,
            (dbias * grad) if dbias is not None else None,
            *(None,) * 7,
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
    logits: Tensor, target: Tensor, start: int, own: int, group
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Negative log-likelihood [T] of targets, and the softmax [T, v] of this rank's columns (in place of the logits).

    Also which targets are this rank's, and their columns. Two all-reduces over `group`.
    """
    peak = reduce_(logits.max(dim=-1).values, group, op="max")
    mine = (target >= start) & (target < start + own)
    column = torch.where(mine, target - start, 0)
    of_target = torch.where(mine, logits.gather(1, column.unsqueeze(1)).squeeze(1) - peak, 0)
    exponentials = logits.sub_(peak.unsqueeze(1)).exp_()
    total, of_target = reduce_(torch.stack([exponentials.sum(dim=-1), of_target]), group)
    nll = torch.where(target == IGNORE_INDEX, 0, total.log() - of_target)
    return nll, exponentials.div_(total.unsqueeze(1)), mine, column
