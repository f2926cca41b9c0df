"""State of one pass of a parallelized model: its tokens, its random seed, and its communication in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from hf_axonn.compat.packed_weights import PackedWeights
from hf_axonn.compat.replaced import replace_attributes
from hf_axonn.config import AxonnConfig
from hf_axonn.distributed.mesh import GridMesh
from hf_axonn.engine.activation_layouts import Tokens
from hf_axonn.engine.averaging import GradientAveraging
from hf_axonn.engine.gather_cache import GatherCache
from hf_axonn.engine.gathering import start_gathers
from hf_axonn.engine.overlap import GatherAhead, GradientSchedule, ReductionQueue, in_backward
from hf_axonn.engine.rows import Rows
from hf_axonn.engine.sharded_weight import ShardedWeight


T = TypeVar("T")


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

    def arrive(self, tokens: Tokens) -> None:
        """Note the batch that has come to the layers."""
        self.tokens = tokens

    def depart(self, hidden: Tensor, tokens: Tokens) -> None:
        """Note the residual stream for the next stage, and the batch that has left the layers."""
        self.handed, self.tokens = hidden, tokens

    def add_routing(self, sums: Tensor) -> None:
        """Add the sums over the routers of this stage to those of the stages before."""
        self.routing = sums if self.routing is None else self.routing + sums

    def set_real(self, rows: int, columns: int) -> None:
        """Note how much of the batch was there before it was filled up."""
        self.real = rows, columns


class FirstRun:
    """Results of the first run of a checkpointed layer that it uses again when it is recomputed."""

    def __init__(self) -> None:
        self._results: list[Any] = []
        self._again: Iterator[Any] | None = None

    def begin_again(self) -> None:
        """Return the results from the first one on from now on: the layer is recomputed."""
        self._again = iter(self._results)

    def result(self, make: Callable[[], T]) -> T:
        """Return `make()` and keep it; when the layer is recomputed what was kept in its place."""
        if self._again is not None:
            return next(self._again)
        self._results.append(make())
        return self._results[-1]


class PassContext:
    """The pass that is under way, or the last one. What is set is set by the method that is named beside it.

    Args:
        config: overlap switches.
        mesh: where z is 1 there is nothing to gather ahead and no reduction to hide.

    Attributes:
        rows: the rows whose positions are divided over context in this pass (`with_rows`); None where they are whole.
        tokens: the batch that passes through the decoder layers (`enter_layers`); None outside of them.
        lone: hidden states of a single token as they came to the layers (`enter_layers`): their shape is that of a
            rank's part, too; None of more tokens.
        in_forward: whether a forward pass of the whole model is under way (`begin_forward`).
        wants_gradients: whether the last pass began with gradients on (`begin_forward`).
        defer_head: whether the head leaves its logits to the loss in this pass, in training with labels
            (`begin_forward`).
        spreads_logits: whether the head leaves its logits to who reads them, a share of them on each rank of (x, y)
            (`spreading_logits`).
        averaging: whether gradients are averaged, and who begins that.
        items_of_all: whether the num_items_in_batch of a pass are those of all ranks, and not of this (data, z) alone
            (`own_items`).
        in_trainer: whether a Trainer runs the pass, which divides by the items of all ranks (`run_by_trainer`).
        share_factor: what a loss for num_items_in_batch is multiplied by in this pass (`multiplied_shares`).
        first_run: of the checkpointed layer that runs (`with_first_run`); None outside of one.
        random_seed, random_count: of the `keyed_random` that is open (`with_seed`, `count_random`).
        stage: of a pipeline that is running (`running`); None outside of them.
        deferred: where backward passes leave the computation of weight gradients (`deferring`); None: they compute
            them.
        packed: packed copies of weights for passes without gradients (`packing`); None: torch's own products.
        gather_cache: gathered weights that outlive their multiplication.
        gather_ahead: gathers that begin before they are needed.
        gradient_schedule: when finished weight gradients are handed to autograd.
        reductions: weight-gradient reductions in flight.
    """

    def __init__(self, config: AxonnConfig, mesh: GridMesh) -> None:
        z = mesh.size("z")
        self.rows: Rows | None = None
        self.tokens: Tokens | None = None
        self.lone: Tensor | None = None
        self.in_forward = False
        self.wants_gradients = False
        self.averaging = GradientAveraging()
        self.defer_head = self.spreads_logits = False
        self.items_of_all = True
        self.in_trainer = False
        self.share_factor = 1
        self.stage: StagePass | None = None
        self.deferred: list[partial[list[Tensor]]] | None = None
        self.first_run: FirstRun | None = None
        self.random_seed: int | None = None
        self.random_count = 0
        self.packed: PackedWeights | None = None
        self.gather_cache = GatherCache()
        ahead = config.overlap.all_gather and z > 1
        self.gather_ahead = GatherAhead(
            partial(start_gathers, mesh=mesh), enabled=ahead, needless=self.gather_cache.__contains__
        )
        # Two groups behind, as many as `reductions` lets be in flight.
        self.gradient_schedule = GradientSchedule(distance=2 if z > 1 else 0)
        self.reductions = ReductionQueue(enabled=config.overlap.reduce_scatter)

    def begin_forward(
        self, weights: Sequence[ShardedWeight], *, whole_model: bool = False, defer_head: bool = False
    ) -> None:
        """Start a pass: drop earlier gathers, and give trained shards their nodes in the new graph.

        Args:
            whole_model: the pass is one of the whole model, and ends with `end_forward`.
            defer_head: the head of it leaves its logits to the loss.
        """
        self.in_forward, self.defer_head = whole_model, defer_head
        self.leave_layers()  # an exception may have ended a pass in them
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
        self.leave_layers()
        self.defer_head = self.in_forward = False

    def enter(self, group: Sequence[ShardedWeight]) -> None:
        """Note that a forward pass has come to these weights."""
        if torch.is_grad_enabled() and not in_backward():
            self.gradient_schedule.enter(group)

    def enter_layers(self, tokens: Tokens, *, hidden: Tensor | None = None) -> None:
        """Note the batch that has come to the decoder layers, as `hidden` where states of it may be wanted."""
        self.tokens, self.lone = tokens, hidden if tokens.count == 1 else None

    def leave_layers(self) -> None:
        """Note that the batch has left the decoder layers."""
        self.tokens = self.lone = None

    def with_tokens(self, tokens: Tokens | None) -> AbstractContextManager[None]:
        """Set `tokens` inside: a layer that is recomputed needs those of its own first pass."""
        return replace_attributes({(self, "tokens"): tokens})

    def with_rows(self, rows: Rows) -> AbstractContextManager[None]:
        """Set `rows` inside: a pass of this rank's positions."""
        return replace_attributes({(self, "rows"): rows})

    def with_seed(self, seed: int | None, count: int) -> AbstractContextManager[None]:
        """Let a `keyed_random` inside derive its seed from this one, as the one after `count` others; None: from the
        generator."""
        return replace_attributes({(self, "random_seed"): seed, (self, "random_count"): count})

    def count_random(self) -> int:
        """Count a nested `keyed_random`, and return its number."""
        self.random_count += 1
        return self.random_count

    def with_first_run(self, first_run: FirstRun) -> AbstractContextManager[None]:
        """Set `first_run` inside: a checkpointed layer runs, for the first time or again."""
        return replace_attributes({(self, "first_run"): first_run})

    def once(self, make: Callable[[], T]) -> T:
        """Return `make()`; in a checkpointed layer that is recomputed what it returned at first. All calls in a layer
        come in one order."""
        return make() if self.first_run is None else self.first_run.result(make)

    def snapshot(self) -> Callable[[], AbstractContextManager[None]]:
        """Return what puts the rows, the tokens and the seed of now back for the time of a block, when a layer runs
        again."""
        now = {(self, name): getattr(self, name) for name in ("rows", "tokens", "random_seed", "random_count")}
        return partial(replace_attributes, now)

    def running(self, stage: StagePass) -> AbstractContextManager[None]:
        """Set `stage` inside: the stage of a pipeline that runs."""
        return replace_attributes({(self, "stage"): stage})

    def deferring(self) -> AbstractContextManager[None]:
        """Let backward passes inside leave the computation of weight gradients to those who take them
        (`take_deferred`, `matmul3d.finish_deferred`)."""
        return replace_attributes({(self, "deferred"): []})

    def take_deferred(self) -> list[partial[list[Tensor]]]:
        """Return what backward passes have left since this was called last."""
        assert self.deferred is not None
        deferred, self.deferred = self.deferred, []
        return deferred

    def packing(self, packed: PackedWeights) -> AbstractContextManager[None]:
        """Multiply by packed copies in passes without gradients inside, in which no weight may change."""
        return replace_attributes({(self, "packed"): packed})

    def spreading_logits(self) -> AbstractContextManager[None]:
        """Return `DeferredLogits` from passes inside, which are without gradients, for `map_positions`."""
        return replace_attributes({(self, "spreads_logits"): True})

    def own_items(self) -> AbstractContextManager[None]:
        """Take the num_items_in_batch of passes inside as those of this (data, z) alone."""
        return replace_attributes({(self, "items_of_all"): False})

    def run_by_trainer(self) -> AbstractContextManager[None]:
        """Set `in_trainer` inside."""
        return replace_attributes({(self, "in_trainer"): True})

    def multiplied_shares(self, factor: int) -> AbstractContextManager[None]:
        """Multiply losses for num_items_in_batch inside (losses/shares.py)."""
        return replace_attributes({(self, "share_factor"): factor})
