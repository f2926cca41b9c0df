"""Embedding and head, whose weight [V, H] is sharded along the vocabulary: over y, then x, then z.

One placement serves both, so tied weights stay tied. The embedding returns the full [B, S, H], because models read
positions and masks off its shape. The head has two ways:

    full logits      [B, S, V] on every rank of (x, y), as from any HF model; callers repeat their work on them
    deferred         in training with labels: the loss takes hidden states and weight from `DeferredLogits` and forms
                     logits chunk by chunk (losses/head_chunks.py), never in full, whether or not the decoder is
                     sharded by blocks; in evaluation, where that is asked for (`PassContext.spreading_logits`), each
                     rank forms and reads those of its share of the tokens
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_axonn.compat.messages import get_logger
from hf_axonn.compat.torch import assert_on_device
from hf_axonn.distributed.collectives import (
    all_gather,
    all_reduce,
    all_reduce_backward,
    all_to_all,
    gather_replicated,
    world_rank,
)
from hf_axonn.distributed.consistency import raise_together
from hf_axonn.distributed.mesh import ROWS, SAME_SAMPLES, TOKENS
from hf_axonn.distributed.watchdog.diagnosis import ranks_in_words
from hf_axonn.engine.activation_layouts import Tokens, gather_tokens, pad_dim, take_tokens
from hf_axonn.engine.dtensors import replicated_local
from hf_axonn.engine.linears import linear_size
from hf_axonn.engine.matmul3d import Product, gathered_weight
from hf_axonn.engine.rows import Rows
from hf_axonn.engine.weight_layout import vocabulary_range, weight_layout
from hf_axonn.layers.base import patch_forward
from hf_axonn.topology.weight_kind import WeightKind


if TYPE_CHECKING:
    from hf_axonn.distributed.mesh import GridMesh
    from hf_axonn.engine.state import ParallelState


logger = get_logger(__name__)


def is_vocabulary(embedding: nn.Module) -> bool:
    """Return whether an embedding is a plain look-up, or one that is multiplied by its `embed_scale`."""
    scaled = type(embedding).__name__.endswith("ScaledWordEmbedding") and hasattr(embedding, "embed_scale")
    if not (type(embedding) is nn.Embedding or (isinstance(embedding, nn.Embedding) and scaled)):
        return False
    return embedding.max_norm is None and not embedding.sparse and not embedding.scale_grad_by_freq


def check_vocabulary(
    ids: Tensor, size: int, what: str, mesh: GridMesh, *, training: bool, ignored: int | None = None
) -> None:
    """Refuse ids that a vocabulary does not have: to every part of it they would be ids of another part.

    On a GPU the host does not wait for the answer. The device stops, and the next call that does wait raises.

    Args:
        ids: [...] of this (data, z) position.
        size: of the vocabulary.
        what: they are, for the message.
        training: whether all ranks of (data, z) come here if gradients are on.
        ignored: an id that stands for nothing.
    Raises:
        ValueError: an id is negative or not below `size`, with ranks, place and value; in training with gradients on
            all ranks, else on those that got it.
    Collectives: on CPUs, in training with gradients, `raise_together` over (data, z).
    """
    counted = ids if ignored is None else ids.masked_fill(ids == ignored, 0)
    if ids.device.type == "cuda":
        inside = (counted >= 0) & (counted < size)
        assert_on_device(inside.all(), f"a {what} is outside of the vocabulary of {size}")
    elif ids.device.type == "cpu":
        problem = ""
        lowest, highest = map(int, counted.aminmax()) if ids.numel() else (0, 0)
        if lowest < 0 or highest >= size:
            place = ((counted < 0) | (counted >= size)).nonzero()[0].tolist()
            problem = (
                f"{ranks_in_words(mesh.grid.ranks_along(SAME_SAMPLES, mesh.rank))} got the {what} "
                f"{int(ids[tuple(place)])} at {place}, which is outside of the vocabulary of {size}."
            )
        if training and torch.is_grad_enabled():
            raise_together(problem, ids.device, mesh.group(*TOKENS))
        elif problem:  # ranks that generate do not wait for each other
            raise ValueError(problem)


def _full_weight(layer: Embedding | Head, size: int) -> Tensor:
    """[V, H], for code that every rank of (x, y) repeats. All-gathers over z and (x, y); backward: reduce-scatter
    over z."""
    block = gathered_weight(Product(layer.state, layer.weights, layer.layouts))
    return in_order(gather_replicated(block, layer.state.grid_mesh.group("x", "y")), size, layer.state.grid_mesh)


def in_order(blocks: Tensor, size: int, mesh: GridMesh, dim: int = 0) -> Tensor:
    """[x*y, V/(x*y), ...] as ranks hold it -> [V, ...]; `dim` is that of V. No communication."""
    # Ranks of (x, y) are numbered with y innermost, the vocabulary is sharded over y first.
    parts = [
        blocks[x * mesh.size("y") + y].narrow(dim, 0, len(vocabulary_range(size, mesh, y=y, x=x)))
        for y in range(mesh.size("y"))
        for x in range(mesh.size("x"))
    ]
    return torch.cat(parts, dim)


class Embedding:
    """Look-up in a vocabulary sharded over (y, x, z). Ids [B, S] -> [B, S, H], the same on all ranks of (x, y).

    Raises:
        ValueError: see `check_vocabulary`.
    Collectives: all-gather over z of the weight, all-reduce over (x, y) of the rows found. Backward: reduce-scatter
    over z of the weight's gradient.
    """

    def __init__(self, state: ParallelState, module: nn.Embedding) -> None:
        self.state = state
        self.module = module
        self.weights = [state.weight_of(module)]
        self.layouts = [
            weight_layout(WeightKind.VOCABULARY, module.num_embeddings, module.embedding_dim, state.grid_mesh)
        ]
        state.add_layer(module, self)
        patch_forward(module, self._forward)

    def _forward(self, _original: Callable, ids: Tensor) -> Tensor:
        mesh, module = self.state.grid_mesh, self.module
        check_vocabulary(ids, module.num_embeddings, "token id", mesh, training=module.training)
        own = vocabulary_range(module.num_embeddings, mesh)
        is_own = (ids >= own.start) & (ids < own.stop)
        padding = module.padding_idx
        rows = F.embedding(
            torch.where(is_own, ids - own.start, 0),
            gathered_weight(Product(self.state, self.weights, self.layouts)),
            padding_idx=padding - own.start if padding is not None and padding in own else None,
        )
        output = all_reduce(torch.where(is_own.unsqueeze(-1), rows, 0), mesh.group("x", "y"))
        scale = getattr(module, "embed_scale", None)
        if scale is None:
            return output
        return output * (scale.to(output.dtype) if isinstance(scale, Tensor) else scale)

    def full_weight(self) -> Tensor:
        """See `_full_weight`."""
        return _full_weight(self, self.module.num_embeddings)


def warn_of_own_means(state: ParallelState) -> None:
    """Warn, once, where logits of a training pass are full, that a mean over them is not one over all ranks.

    Not in a Trainer, whose loss functions are given the items of all ranks. No communication.
    """
    ranks = state.grid_mesh.size(*ROWS)
    if ranks > 1 and torch.is_grad_enabled() and not state.context.in_trainer:
        _warn_of_own_means(ranks)


@functools.cache
def _warn_of_own_means(ranks: int) -> None:
    if world_rank() == 0:
        logger.warning(
            f"The logits of a training pass are formed in full. A mean over them is that of one of {ranks} "
            "data-parallel ranks, as under DistributedDataParallel, and where these have unequally many labels the "
            "average of their gradients is not that of the mean over all: give the labels to the model, with -100 "
            "where none counts, and take its loss."
        )


def defers(hidden: Tensor, state: ParallelState) -> bool:
    """Return whether a head that gets this leaves its logits to the loss, or to who reads them."""
    return (state.context.defer_head or state.context.spreads_logits) and (
        state.context.tokens is not None or hidden.dim() == 3
    )


def own_tokens(hidden: Tensor, state: ParallelState) -> tuple[Tensor, Tokens]:
    """Return this rank's tokens, [1, T/(x*y), H], of what comes into a head that `defers`."""
    if state.context.tokens is not None:
        return hidden, state.context.tokens
    tokens = Tokens(*hidden.shape[:2], sharded=True)
    return take_tokens(hidden, tokens, state.grid_mesh), tokens


class Head:
    """The Linear that ends a causal LM. [B, S, H] -> [B, S, V], or `DeferredLogits` where the state says so.

    Collectives for full logits: all-gather over z of the weight, all-gather over (x, y) of the logits; backward:
    all-reduce over (x, y) of the input's gradient, reduce-scatter over z of the weight's.
    """

    def __init__(self, state: ParallelState, linear: nn.Linear) -> None:
        self.state = state
        self.linear = linear
        self.weights = [state.weight_of(linear)]
        self.layouts = [weight_layout(WeightKind.VOCABULARY, linear.out_features, linear.in_features, state.grid_mesh)]
        state.add_layer(linear, self)
        patch_forward(linear, self._forward)

    def _forward(self, _original: Callable, hidden: Tensor) -> Tensor | DeferredLogits:
        state = self.state
        if not defers(hidden, state):
            return self.full_logits(hidden)
        return DeferredLogits(self, *own_tokens(hidden, state), rows=state.context.rows)

    def product(self) -> Product:
        return Product(self.state, self.weights, self.layouts)

    def local_bias(self) -> Tensor | None:
        """[V/(x*y)], zero-padded like the local logits."""
        if self.linear.bias is None:
            return None
        own = vocabulary_range(self.linear.out_features, self.state.grid_mesh)
        bias = replicated_local(self.linear.bias, self.state.grid_mesh, ("x", "y"))
        return pad_dim(bias[own.start : own.stop], 0, self.layouts[0].out_size)

    def full_logits(self, hidden: Tensor) -> Tensor:
        """[..., H], the same on all ranks of (x, y) -> [..., V]."""
        mesh, size = self.state.grid_mesh, self.linear.out_features
        local = self._local_logits(all_reduce_backward(hidden, mesh.group("x", "y")))
        blocks = gather_replicated(local.reshape(-1, local.shape[-1]), mesh.group("x", "y"))
        return in_order(blocks, size, mesh, dim=1).view(*hidden.shape[:-1], size)

    def own_logits(self, hidden: Tensor) -> Tensor:
        """This rank's tokens [1, T/(x*y), H] -> their logits [1, T/(x*y), V]. All-gathers over z of the weight and
        over (x, y) of the tokens, all-to-all over (x, y) of the logits."""
        mesh, size = self.state.grid_mesh, self.linear.out_features
        group = mesh.group("x", "y")
        local = self._local_logits(all_gather(hidden.squeeze(0), group).flatten(0, 1))
        blocks = all_to_all(local.view(group.size(), -1, local.shape[-1]), group)
        return in_order(blocks, size, mesh, dim=1).unsqueeze(0)

    def _local_logits(self, hidden: Tensor) -> Tensor:
        """[..., H], the same on all ranks of (x, y) -> this rank's part of the vocabulary [..., V/(x*y)]."""
        (local,) = self.product().run(hidden)
        bias = self.local_bias()
        return local if bias is None else local + bias.to(local.dtype)

    def full_weight(self) -> Tensor:
        """See `_full_weight`."""
        return _full_weight(self, self.linear.out_features)


@dataclass(frozen=True)
class LowRank:
    """The addition of a head's LoRA to logits that are not formed yet: low @ up.T.

    Args:
        low: [1, T/(x*y), r] of this rank's tokens.
        up: the replicated parameter [V, r].
    """

    low: Tensor
    up: nn.Parameter

    def __mul__(self, factor: float) -> LowRank:
        return LowRank(self.low * factor, self.up)


class DeferredLogits:
    """Logits that are not formed yet: `hidden` [1, T/(x*y), H] of this rank's tokens, and the head to multiply by.

    In training with labels a parallelized model returns this as `outputs.logits`. Scaling and tanh (soft caps) are
    kept for the loss, which applies them chunk by chunk; whatever else is done with it forms the logits first, as
    `full()` does, a collective over (x, y), and over context where that divides the positions of `rows`.
    """

    def __init__(self, head: Head, hidden: Tensor, tokens: Tokens, rows: Rows | None = None) -> None:
        self.head = head
        self.hidden = hidden
        self.tokens = tokens
        self.rows = rows
        self.steps: tuple[Callable[[Tensor], Tensor], ...] = ()
        self.beside: tuple[LowRank, ...] = ()
        self._full: Tensor | None = None
        self._watches: tuple[Callable[[Tensor], object], ...] = ()

    def _change(self, **changes: Any) -> DeferredLogits:
        """Return a copy that is not formed yet, with other attributes."""
        changed = copy.copy(self)
        vars(changed).update(changes, _full=None)
        return changed

    def when_formed(self, watch: Callable[[Tensor], object]) -> None:
        """Let `watch` have the logits, of these and of what is made of them, as soon as they are formed."""
        self._watches += (watch,)
        if self._full is not None:
            watch(self._full)

    def full(self) -> Tensor:
        """[B, S, V] on every rank of (x, y) and context, each of which then repeats the same work. Collective over
        (x, y), and over context."""
        if self._full is None:
            if not self.head.state.context.in_forward:
                warn_of_own_means(self.head.state)
            mesh = self.head.state.grid_mesh
            logits = self.head.full_logits(gather_tokens(self.hidden, self.tokens, mesh))
            for adapter in self.beside:
                low = gather_tokens(adapter.low, self.tokens, mesh)
                logits = logits + F.linear(low, replicated_local(adapter.up, mesh, ())).to(logits.dtype)
            logits = self.apply_steps(logits)
            self._full = logits if self.rows is None else self.rows.gather(logits)
            for watch in self._watches:
                watch(self._full)
        return self._full

    def low_rank(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return what adapters add, (low [T/(x*y), R], up [V/(x*y), R]); `up` is zero-padded like the local logits."""
        if not self.beside:
            return None, None
        mesh = self.head.state.grid_mesh
        own = vocabulary_range(self.head.linear.out_features, mesh)
        low = torch.cat([adapter.low.squeeze(0).to(dtype) for adapter in self.beside], dim=-1)
        ups = [
            replicated_local(adapter.up, mesh, ("x", "y"))[own.start : own.stop].to(dtype) for adapter in self.beside
        ]
        return low, pad_dim(torch.cat(ups, dim=-1), 0, self.head.layouts[0].out_size)

    def apply_steps(self, logits: Tensor) -> Tensor:
        """Apply to logits what has been done elementwise to these so far."""
        for step in self.steps:
            logits = step(logits)
        return logits

    def then(self, step: Callable[[Tensor], Tensor]) -> DeferredLogits:
        """The same logits with one more elementwise step."""
        return self._change(steps=(*self.steps, step))

    def map_positions(self, function: Callable[..., tuple[Tensor, ...]], *beside: Tensor) -> tuple[Tensor, ...]:
        """Return what `function` makes of logits [B, L, V] and of `beside`, for whole rows: [B, S] each.

        Each rank calls it with logits of tokens of its own, and no others are formed: of its positions where context
        divides rows, of its share [1, T/(x*y), V] where (x, y) has several ranks. Without gradients.
        Collectives: those of `Head.own_logits`, and all-gathers of the results over (x, y) and context.

        Args:
            function: of (logits [B, L, V], others [B, L]) -> tensors [B, L]; of each position by itself.
            beside: [B, S], what else it needs at each position.
        """
        if self.rows is not None:
            own = self.without_rows().map_positions(function, *(self.rows.take(each) for each in beside))
            return tuple(self.rows.gather(each) for each in own)
        mesh, tokens = self.head.state.grid_mesh, replace(self.tokens, features=0)
        if mesh.size("x", "y") == 1:
            return function(self.full(), *beside)
        logits = self.head.own_logits(self.hidden)
        for adapter in self.beside:
            logits = logits + F.linear(adapter.low, replicated_local(adapter.up, mesh, ())).to(logits.dtype)
        others = (take_tokens(each.unsqueeze(-1), tokens, mesh).squeeze(-1) for each in beside)
        results = function(self.apply_steps(logits), *others)
        return tuple(gather_tokens(each.unsqueeze(-1), tokens, mesh).squeeze(-1) for each in results)

    def without_rows(self) -> DeferredLogits:
        """Return the logits of this rank's positions alone, of rows that context divides."""
        return self._change(rows=None)

    def __add__(self, other):
        if isinstance(other, LowRank) and not self.steps:
            return self._change(beside=(*self.beside, other))
        return self.full() + other

    def to(self, *args, **kwargs) -> DeferredLogits | Tensor:
        return self if args == (self.dtype,) and not kwargs else self.full().to(*args, **kwargs)

    def _scale(self, operation: Callable, other) -> DeferredLogits | Tensor:
        if isinstance(other, (int, float)):
            return self.then(lambda logits: operation(logits, other))
        return operation(self.full(), other)

    def __mul__(self, other):
        return self._scale(operator.mul, other)

    __rmul__ = __mul__

    def __truediv__(self, other):
        return self._scale(operator.truediv, other)

    def tanh(self) -> DeferredLogits:
        return self.then(torch.tanh)

    def float(self) -> DeferredLogits:
        return self.then(torch.Tensor.float)

    def contiguous(self) -> DeferredLogits:
        return self

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def shape(self) -> torch.Size:
        length = self.tokens.seq if self.rows is None else self.rows.length
        return torch.Size((self.tokens.batch, length, linear_size(self.head.linear)[0]))

    def __len__(self) -> int:
        return self.tokens.batch

    def __getitem__(self, key) -> Tensor:
        return self.full()[key]

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.full(), name)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.tanh and len(args) == 1 and not kwargs:
            return args[0].tanh()

        def form(value):
            return value.full() if isinstance(value, cls) else value

        return func(*map(form, args), **{name: form(value) for name, value in (kwargs or {}).items()})


def _form_first(name: str) -> Callable[..., Any]:
    def method(logits: DeferredLogits, *others: Any) -> Any:
        return getattr(logits.full(), name)(*others)

    return method


# Python looks operators up in the class, where `__getattr__` is not asked.
for _name in "radd sub rsub rtruediv neg abs pow rpow matmul rmatmul eq ne lt le gt ge setitem".split():
    setattr(DeferredLogits, f"__{_name}__", _form_first(f"__{_name}__"))
