"""Gradients after backward: averaged over the ranks that saw different samples.

After a backward pass the gradient of a sharded weight is averaged over z already (matmul3d.py); what is left is the
average over data. The gradient of a replicated parameter is this rank's share, multiplied so that the *average* over
the world is right (`replicated_local`). Both are averages: doing it twice changes nothing.

    sync_gradients(model)        after backward: everything at once
    with syncing(model): ...     around the last backward of a step: the average over data of a bucket of gradients is
                                 launched as soon as all of them are there, while backward continues (ORS)

Both use the same buckets, so they give the same bits. Buckets depend on nothing but the parameters: a gradient that
this rank does not have travels as zeros.

A model that Accelerate has prepared does the first by itself at the end of a backward pass without the second, as
under DistributedDataParallel. Gradients that have not been averaged are refused at a step of an optimizer.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_axonn.compat.torch import at_end_of_backward, backward_pass
from hf_axonn.distributed.collectives import Pending, send_unfused, start_all_reduce, together
from hf_axonn.distributed.mesh import STAGE
from hf_axonn.distributed.watchdog.progress import PROGRESS
from hf_axonn.engine.dtensors import local
from hf_axonn.engine.state import ParallelState, parallel_state


BUCKET_BYTES = 32 * 2**20
MOST_IN_FLIGHT = 3  # buckets, each of which is a copy of its gradients


def sync_gradients(model: nn.Module) -> None:
    """Average all gradients over the ranks that saw different samples. Call it after backward, before clipping.

    `accelerator.backward` and Trainer do this by themselves. Every rank must call it. With gradient accumulation call
    it once, after the last micro-batch. Calling it again changes nothing.

    Collectives: all-reduces over data of sharded gradients and over the world of replicated ones, in buckets of about
    32 MiB; one all-reduce over the world of one number a parameter. With `tune_matmuls`, those of `MatmulTuner.tune`.
    """
    state = parallel_state(model)
    if state is not None:
        _Average(model, state).finish()
        PROGRESS.done += 1


@contextlib.contextmanager
def syncing(*models: nn.Module) -> Iterator[None]:
    """Average around the last backward pass of a step: `sync_gradients` of each model, begun while it is under way.

    If an exception leaves the block, some gradients are averaged and some are not. Every rank must enter it.
    Collectives: as `sync_gradients`, none for a model without trained parameters. With more than one model that is
    trained nothing is begun ahead: their collectives could then get out of order between ranks that reach different
    parameters.
    """
    averages = [_Average(model, state) for model in models if (state := parallel_state(model)) is not None]
    averages = [average for average in averages if average.trained]  # not of a frozen reference model
    if len(averages) == 1 and averages[0].state.config.overlap.reduce_scatter:
        with averages[0].watching():
            yield
    else:
        yield
    for average in averages:
        average.finish()
    PROGRESS.done += bool(averages)


@contextlib.contextmanager
def averaging(*models: nn.Module, last: bool = True) -> Iterator[None]:
    """Average around a backward pass of a trainer: `syncing` for models whose last pass is to be averaged, and no
    averages of their own (`GradientAveraging`).

    Args:
        last: it is the last backward pass of a step; before it nothing is averaged.
    Collectives: as `syncing`.
    """
    states = {model: state for model in models if (state := parallel_state(model)) is not None}
    with contextlib.ExitStack() as stack:
        for state in states.values():
            stack.enter_context(state.context.averaging.by_caller())
        averaged = [model for model, state in states.items() if last and state.context.averaging.averages]
        stack.enter_context(syncing(*averaged))
        yield


# Models through which a backward pass has gone since their gradients were averaged.
_unaveraged: weakref.WeakKeyDictionary[ParallelState, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def watch_backward(model: nn.Module, state: ParallelState, output: Any) -> None:
    """Note each backward pass through the output of a forward pass, and average at its end where the model does so."""
    if isinstance(output, Tensor):
        if output.requires_grad:
            output.register_hook(partial(_backward_begins, model, state))
    elif hasattr(type(output), "when_formed"):  # logits that a head has left to be formed
        output.when_formed(partial(watch_backward, model, state))
    elif isinstance(output, Mapping):
        watch_backward(model, state, tuple(output.values()))
    elif isinstance(output, list | tuple):
        for value in output:
            watch_backward(model, state, value)


def _backward_begins(model: nn.Module, state: ParallelState, grad: Tensor) -> Tensor | None:
    _unaveraged[state] = weakref.ref(model)
    if state.context.averaging.backward_begins():
        at_end_of_backward(partial(_average_at_end, model, state))
    # A loss to which a term of the parameters was added is a DTensor.
    return grad.full_tensor() if isinstance(grad, DTensor) else None


def _average_at_end(model: nn.Module, state: ParallelState) -> None:
    state.context.averaging.finish()
    sync_gradients(model)


def _refuse_unaveraged(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Refuse a step of an optimizer with gradients that have not been averaged. No communication.

    Raises:
        RuntimeError: it would use gradients of this rank alone, and copies of a parameter would differ afterwards.
    """
    if not _unaveraged:
        return
    given = (parameter for group in optimizer.param_groups for parameter in group["params"])
    used = {id(parameter) for parameter in given if parameter.grad is not None}
    for state, reference in _unaveraged.items():
        model = reference()
        if model is not None and any(id(parameter) in used for parameter in model.parameters()):
            raise RuntimeError(
                f"the gradients of {type(model).__name__} have not been averaged over the grid {state.grid} since the "
                "last backward pass: take the last one of a step out of no_sync (local SGD is not possible over a "
                "grid), and without Accelerate call hf_axonn.sync_gradients(model) after it."
            )


register_optimizer_step_pre_hook(_refuse_unaveraged)


class _Bucket:
    """Gradients that travel as one, in `dtype` or in their own if that is wider. The averages go into `.grad`, or into
    `unclaimed` where there is none."""

    def __init__(self, group, dtype: torch.dtype) -> None:
        self.group = group
        self.dtype = dtype
        self.parameters: list[nn.Parameter] = []
        self.nbytes = 0
        self.awaited: set[int] = set()  # ids of parameters whose gradients backward has yet to bring
        self.pending: Pending | None = None
        self.sizes: list[list[int]] = []  # elements of each gradient in each message
        self.unclaimed: dict[int, Tensor] = {}

    def add(self, parameter: nn.Parameter) -> None:
        self.parameters.append(parameter)
        self.nbytes += local(parameter).nbytes
        self.awaited.add(id(parameter))

    @torch.no_grad()
    def launch(self) -> None:
        """Begin the average. One all-reduce over the group, or one for each gradient where copies are dear."""
        flat = [self._flat(parameter) for parameter in self.parameters]
        unfused = all(send_unfused(grad, self.group) for grad in flat)
        parts = [[grad] for grad in flat] if unfused else [flat]
        self.sizes = [[grad.numel() for grad in part] for part in parts]
        messages = [torch.cat(part) if len(part) > 1 else part[0] for part in parts]
        self.pending = together([start_all_reduce(message, self.group, op="mean") for message in messages])

    def _flat(self, parameter: nn.Parameter) -> Tensor:
        own = local(parameter)
        grad = torch.zeros_like(own, device=parameter.device) if parameter.grad is None else local(parameter.grad)
        return grad.reshape(-1).to(torch.promote_types(own.dtype, self.dtype))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the average, if it was launched, and put it where it belongs."""
        if self.pending is None:
            return
        averaged, self.pending = self.pending.wait(), None
        for message in averaged:
            if message.is_cuda:
                # It was made on the stream of backward. At the end of a step another one may wait and read it, that of
                # whoever calls a model on a stream of its own; on the same one this does nothing.
                message.record_stream(torch.cuda.current_stream())
        means = [mean for message, sizes in zip(averaged, self.sizes, strict=True) for mean in message.split(sizes)]
        for parameter, mean in zip(self.parameters, means, strict=True):
            if parameter.grad is None:
                self.unclaimed[id(parameter)] = mean.clone()
                continue
            grad = local(parameter.grad)
            if grad.data_ptr() != mean.data_ptr():  # what was sent unfused was averaged in place
                grad.copy_(mean.view_as(grad))


def _runs_of_false(flags: list[bool]) -> list[tuple[int, int]]:
    """Return the begin and the end of each run of False."""
    runs, start = [], 0
    for value, group in itertools.groupby(flags):
        stop = start + len(list(group))
        if not value:
            runs.append((start, stop))
        start = stop
    return runs


class _Average:
    """The averages of one step.

    All ranks of a group launch its buckets in one order, whether they do so during backward or after it. If a gradient
    changes when it has been averaged (a layer that is used twice, under reentrant checkpointing), its bucket is
    averaged once more by all ranks: the average of an average and a new part is that of both.
    """

    def __init__(self, model: nn.Module, state: ParallelState) -> None:
        self.state = state
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        new = [parameter for parameter in self.trained if not isinstance(parameter, DTensor)]
        if 0 < len(new) < len(self.trained):
            state.check_new(new)
        self.over_data: list[_Bucket] = []
        self.over_stage: list[_Bucket] = []
        self._of: dict[int, _Bucket] = {}
        self._stale: set[_Bucket] = set()
        self._launched = 0  # of `over_data`
        self._passes: set[int] = set()  # of autograd, which brought gradients
        self._in_flight: deque[_Bucket] = deque()
        stage = state.grid_mesh.group(*STAGE)
        # Backward comes to the last parameters first. Sorting is stable: the same order on all ranks.
        for parameter in sorted(reversed(self.trained), key=lambda parameter: str(parameter.dtype)):
            placements = parameter.placements if isinstance(parameter, DTensor) else ()
            if any(isinstance(placement, Shard) for placement in placements):
                self._place(parameter, self.over_data, state.grid_mesh.group("data"))
            else:
                self._place(parameter, self.over_stage, stage)

    def _place(self, parameter: nn.Parameter, buckets: list[_Bucket], group) -> None:
        if group.size() == 1:
            return
        size = local(parameter).nbytes
        last = buckets[-1] if buckets else None
        if last is None or last.nbytes + size > BUCKET_BYTES or last.parameters[0].dtype != parameter.dtype:
            buckets.append(_Bucket(group, self.state.reduce_dtype))
        buckets[-1].add(parameter)
        self._of[id(parameter)] = buckets[-1]

    def _launch(self, bucket: _Bucket) -> None:
        while len(self._in_flight) >= MOST_IN_FLIGHT:
            self._in_flight.popleft().finish()
        bucket.launch()
        self._in_flight.append(bucket)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Launch averages over data inside, as gradients arrive."""
        hooks = []
        for bucket in self.over_data:
            for parameter in bucket.parameters:
                # A launched average must not be under way while its gradient is added to.
                hooks.append(parameter.register_hook(lambda _, bucket=bucket: bucket.finish()))
                hooks.append(parameter.register_post_accumulate_grad_hook(self._note_gradient))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _note_gradient(self, parameter: nn.Parameter) -> None:
        self._passes.add(backward_pass())
        bucket = self._of[id(parameter)]
        if id(parameter) not in bucket.awaited:
            if bucket in self.over_data[: self._launched]:
                self._stale.add(bucket)
            return
        bucket.awaited.discard(id(parameter))
        while self._launched < len(self.over_data) and not self.over_data[self._launched].awaited:
            self._launch(self.over_data[self._launched])
            self._launched += 1

    def finish(self) -> None:
        """Launch what is left, and wait for everything.

        A parameter that some rank's samples reached counts as zeros on the others. One that no rank's samples reached
        keeps None, so that the optimizer leaves it alone as on one process.
        """
        if self.trained:
            for bucket in self.over_data[self._launched :]:
                self._launch(bucket)
            self._launched = len(self.over_data)
            agreement = self._start_agreement()
            for bucket in self.over_stage:
                self._launch(bucket)
            while self._in_flight:
                self._in_flight.popleft().finish()
            self._end_agreement(agreement)
        _unaveraged.pop(self.state, None)
        if self.state.tuner is not None:
            self.state.tuner.tune(self.state.grid_mesh.device)

    def _start_agreement(self) -> Pending:
        """Tell all ranks which gradients exist here, and which buckets have to be averaged again."""
        flags = [parameter.grad is not None for parameter in self.trained]
        flags += [bucket in self._stale for bucket in self.over_data]
        # Filled on the device, in runs of equal flags: a list that is copied there makes the host wait.
        message = torch.ones(len(flags), dtype=torch.int32, device=self.state.grid_mesh.device)
        for start, stop in _runs_of_false(flags):
            message[start:stop].zero_()
        return start_all_reduce(message, self.state.grid_mesh.group(*STAGE), op="max")

    def _end_agreement(self, agreement: Pending) -> None:
        """Wait for the answer only where it can change something here.

        A rank that has all gradients has no use for those of others. Of which buckets are averaged again all ranks
        need the same answer; but a gradient comes twice only if several passes of autograd bring gradients (reentrant
        checkpoints, several calls of backward), and on all ranks it is the same code that makes them.
        """
        agreed = agreement.wait()
        if len(self._passes) < 2 and all(parameter.grad is not None for parameter in self.trained):
            return
        flags = agreed.tolist()
        for parameter, somewhere in zip(self.trained, flags, strict=False):
            if somewhere and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                bucket = self._of.get(id(parameter))
                if bucket is not None:
                    grad = local(parameter.grad)
                    with torch.no_grad():
                        grad.copy_(bucket.unclaimed[id(parameter)].view_as(grad))
        for bucket, again in zip(self.over_data, flags[len(self.trained) :], strict=True):
            if again:
                bucket.launch()
                bucket.finish()
