"""What lives for one pass of a parallelized model: its tokens, its random seed, and its communication in flight."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hf_axonn.config import AxonnConfig
from hf_axonn.distributed.mesh import GridMesh
from hf_axonn.engine.activation_layouts import Tokens
from hf_axonn.engine.averaging import GradientAveraging
from hf_axonn.engine.gather_cache import GatherCache
from hf_axonn.engine.gathering import start_gathers
from hf_axonn.engine.overlap import GatherAhead, GradientSchedule, ReductionQueue, in_backward
from hf_axonn.engine.sharded_weight import ShardedWeight


@dataclass
class StagePass:
    """A stage of a pipeline that is running.

    Args:
        received: the residual stream as the stage before has sent it, None in the first.
        last: whether it is the last stage, which has the head and the loss.
        handed: the residual stream for the next stage, when the stage has come to its end.
        routing: sums over the routers of the stages before (losses/router_aux.py), and then of this one too; None
            where no auxiliary loss is wanted.
        tokens: the batch in its layers, once that is known.
        real: (rows, columns) of the batch before it was filled up to a larger one; None: all are its own.
    """

    received: Tensor | None
    last: bool
    handed: Tensor | None = None
    routing: Tensor | None = None
    tokens: Tokens | None = None
    real: tuple[int, int] | None = None


class PassContext:
    """The pass that is under way, or the last one.

    Args:
        config: overlap switches.
        mesh: where z is 1 there is nothing to gather ahead and no reduction to hide.

    Attributes:
        tokens: the batch that passes through the decoder layers; None outside of them.
        in_forward: whether a forward pass of the whole model is under way.
        wants_gradients: whether the last pass began with gradients on.
        averaging: whether gradients are averaged, and who begins that.
        defer_head: whether the head leaves its logits to the loss in this pass (training with labels).
        items_of_all: whether the num_items_in_batch of a pass are those of all ranks, and not of this (data, z) alone.
        share_factor: what a loss for num_items_in_batch is multiplied by in this pass (losses/shares.py).
        random_seed, random_count: of the `keyed_random` that is open (layers/dropout.py).
        stage: of a pipeline that is running (parallel/pipeline/); None outside of them.
        deferred: where backward passes leave the computation of weight gradients (`matmul3d.finish_deferred`); None:
            they compute them.
        gather_cache: gathered weights that outlive their multiplication.
        gather_ahead: gathers that begin before they are needed.
        gradient_schedule: when finished weight gradients are handed to autograd.
        reductions: weight-gradient reductions in flight.
    """

    def __init__(self, config: AxonnConfig, mesh: GridMesh) -> None:
        z = mesh.size("z")
        self.tokens: Tokens | None = None
        self.in_forward = False
        self.wants_gradients = False
        self.averaging = GradientAveraging()
        self.defer_head = False
        self.items_of_all = True
        self.share_factor = 1
        self.stage: StagePass | None = None
        self.deferred: list[partial[list[Tensor]]] | None = None
        self.random_seed: int | None = None
        self.random_count = 0
        self.gather_cache = GatherCache()
        ahead = config.overlap.all_gather and z > 1
        self.gather_ahead = GatherAhead(
            partial(start_gathers, mesh=mesh), enabled=ahead, needless=self.gather_cache.__contains__
        )
        # Two groups behind, as many as `reductions` lets be in flight.
        self.gradient_schedule = GradientSchedule(distance=2 if z > 1 else 0)
        self.reductions = ReductionQueue(enabled=config.overlap.reduce_scatter)

    def begin_forward(self, weights: Sequence[ShardedWeight]) -> None:
        """Start a pass: drop earlier gathers, and give trained shards their nodes in the new graph."""
        self.wants_gradients = torch.is_grad_enabled()
        if self.wants_gradients:
            self.averaging.begin_pass()
        self.gather_ahead.begin_pass()
        self.gather_cache.begin_pass()
        for weight in weights:
            weight.begin_forward()
        if self.wants_gradients:
            self.gradient_schedule.begin_pass(weights)

    def end_forward(self) -> None:
        """End a forward pass of the whole model."""
        self.tokens, self.defer_head, self.in_forward = None, False, False

    def enter(self, group: Sequence[ShardedWeight]) -> None:
        """Note that a forward pass has come to these weights."""
        if torch.is_grad_enabled() and not in_backward():
            self.gradient_schedule.enter(group)

    @contextlib.contextmanager
    def with_tokens(self, tokens: Tokens | None) -> Iterator[None]:
        """Set `tokens` inside: a layer that is recomputed needs those of its own first pass."""
        before, self.tokens = self.tokens, tokens
        try:
            yield
        finally:
            self.tokens = before

    @contextlib.contextmanager
    def with_seed(self, seed: int | None, count: int) -> Iterator[None]:
        """Inside, a `keyed_random` derives its seed from this one, as the one after `count` others; None: from the
        generator."""
        before = self.random_seed, self.random_count
        self.random_seed, self.random_count = seed, count
        try:
            yield
        finally:
            self.random_seed, self.random_count = before
