"""Speed, utilisation, waiting, memory and goodput of a training, as numbers for its logs: `Monitor`.

    tokens_per_second              of all ranks, since the last log: tokens over the seconds of steps and of data
    tokens_per_second_per_device   the same, over the number of ranks
    mfu                            the planner's FLOPs of these tokens, over what the devices could do in that time
    exposed_communication          share of a step in which a rank waits for others (waits.py), mean over ranks
    peak_memory_gib                of the rank with most: allocated on CUDA, resident on CPUs
    peak_reserved_gib              on CUDA: what its allocator holds
    goodput                        seconds of steps over all seconds since the training began, restarts included
    seconds_KIND                   all seconds so far by what they went to (KINDS)
    experts/...                    of a mixture of experts: how evenly tokens go to them (expert_balance.py)

A token is a place of `input_ids` that `attention_mask` does not leave out. Ranks that share samples count once, rows
that fill up a short batch of a pipeline never.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping
from time import time as clock
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_axonn.compat.accelerate import ranks_sharing_samples
from hf_axonn.compat.messages import get_logger
from hf_axonn.distributed.collectives import reduce_, world_rank
from hf_axonn.distributed.mesh import SAME_SAMPLES
from hf_axonn.distributed.watchdog.progress import PROGRESS
from hf_axonn.engine.documents import document_fields, find_document_ids, positions_in_document
from hf_axonn.engine.parameter_counts import num_parameters
from hf_axonn.engine.state import parallel_state
from hf_axonn.monitoring.expert_balance import ExpertBalance, balance_numbers
from hf_axonn.monitoring.waits import WaitTimer
from hf_axonn.planner.machine import peak_tflops as peak_of
from hf_axonn.planner.shapes import ModelShape
from hf_axonn.profiling.read_shape import shape_of


logger = get_logger(__name__)
Batch = TypeVar("Batch")

STEP, DATA, EVALUATION, SAVE, RESTART, OTHER = "step", "data", "evaluation", "save", "restart", "other"
# What all seconds go to. restart: from the state that a checkpoint has to where it goes on, steps done again included.
KINDS = (STEP, DATA, EVALUATION, SAVE, RESTART, OTHER)


class Monitor:
    """Measures a training of one model, on every rank.

        monitor = hf_axonn.Monitor(model)
        accelerator.register_for_checkpointing(monitor)  # goodput over restarts
        for step, batch in enumerate(monitor.batches(loader)):
            ...
            if step % 10 == 0:
                accelerator.log(monitor.log(), step=step)
            if step % 1000 == 0:
                with monitor.time("save"):
                    accelerator.save_state("checkpoint")

    Trainer has it by `MonitorCallback`. No rank waits for its device but in `log` and `time`. The waits of
    `exposed_communication` are measured in one step of each log: the first after the log before, but never in the
    first step of all.

    Args:
        model: that is trained; over a grid a parallelized one.
        peak_tflops: dense TFLOP/s of a device, of which `mfu` is a share. None: as the data sheet of the GPU has it in
            bfloat16. Without either, and of a model that the planner cannot read, there is no `mfu`.

    Raises:
        ValueError: ranks share samples by Accelerate's own tensor, context or sequence parallelism.
    """

    def __init__(self, model: nn.Module, *, peak_tflops: float | None = None) -> None:
        state = parallel_state(model)
        if state is None and ranks_sharing_samples() > 1:
            raise ValueError(
                f"{ranks_sharing_samples()} ranks have the same samples by Accelerate's parallelism_config, and which "
                "ones is not known: tokens can be counted over a grid and with data parallelism alone."
            )
        self._device = next(model.parameters()).device
        self._world = dist.group.WORLD if dist.is_initialized() else None
        self._counts = state is None or state.grid_mesh.index(*SAME_SAMPLES) == 0
        self._peak, self._shape = _peak_and_shape(model, self._device, peak_tflops)
        self._trained = num_parameters(model, only_trainable=True) / num_parameters(model)
        self._waits = WaitTimer(self._device) if state is not None and state.grid.size > 1 else None
        self._balance, self._steps = ExpertBalance(model, self._device), 0
        self._measure_next = True
        self._warm, self._between_steps, self._done = False, False, PROGRESS.done
        self._counted = torch.zeros(2, dtype=torch.int64, device=self._device)
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._logged = 0.0  # of seconds of steps and data, those before the last log
        self._last = clock()
        self._inside = ""  # kind of the `time` that is under way
        self._told_no_tokens = False

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of a loader, whose tokens are counted; what the loader takes is time for data."""
        iterator = iter(loader)
        self.lap(OTHER)
        while True:
            self._notice_end()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self.lap(DATA)
            if self._between_steps:
                self.step_begins()
            self.count(batch)
            yield batch
            self.lap(STEP)

    @contextlib.contextmanager
    def time(self, kind: str) -> Iterator[None]:
        """Count the seconds of the context as `save`, `evaluation` or `other`, not as a step.

        Raises:
            ValueError: another kind.
        """
        if kind not in (SAVE, EVALUATION, OTHER):
            raise ValueError(f"kind is {kind!r}, but it is one of {SAVE}, {EVALUATION} and {OTHER}.")
        self.wait_for_device()
        self.lap(STEP)
        self._inside = kind
        try:
            yield
        finally:
            self._inside = ""
            self.lap(kind)

    def log(self) -> dict[str, float]:
        """Return the numbers since the last log; unknown ones are absent.

        Every rank must call it. Collectives: those of `ExpertBalance.take`, and two all-reduces over the world, of six
        numbers and of up to four.
        """
        self._notice_end()
        balance, steps = self._balance.take(self._world), self._steps
        self._steps = 0
        waits = self._waits.take() if self._waits is not None else (0.0, 0.0)
        peaks = _peak_memory(self._device)
        sums = torch.tensor([0.0, 0.0, *waits, *balance.sums], dtype=torch.float64, device=self._device)
        sums[:2] = self._counted
        most = torch.tensor([*peaks.values(), *balance.most], dtype=torch.float64, device=self._device)
        world = 1
        if self._world is not None:
            world = self._world.size()
            sums, most = reduce_(sums, self._world), reduce_(most, self._world, op="max")
        tokens, squares, waited, whole, *routed = sums.tolist()
        self.lap(STEP)
        spent = self._seconds[STEP] + self._seconds[DATA] - self._logged
        self._logged += spent
        self._counted.zero_()
        self._measure_next = True
        found = {}
        if tokens and spent:
            found["tokens_per_second"] = tokens / spent
            found["tokens_per_second_per_device"] = tokens / spent / world
            if self._shape is not None and self._peak is not None:
                flops = tokens * self._shape.model_flops(squares / tokens, self._trained)
                found["mfu"] = flops / (spent * world * self._peak)
        elif not tokens:
            self._tell_no_tokens()
        if whole:
            found["exposed_communication"] = waited / whole
        *highest, expert, rank = most.tolist()
        self._balance.warn(balance, rank, steps)
        found |= balance_numbers(expert, rank, *routed)
        return found | dict(zip(peaks, highest, strict=True)) | self.goodput()

    def goodput(self) -> dict[str, float]:
        """Return `goodput`, and the seconds of each kind. No communication: by the clock of this rank."""
        whole = sum(self._seconds.values())
        found = {f"seconds_{kind}": seconds for kind, seconds in self._seconds.items() if seconds}
        return {"goodput": self._seconds[STEP] / whole} | found if whole else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds so far and the time until which they count, for a checkpoint. No communication."""
        if self._inside:
            self.lap(self._inside)
        return {"seconds": dict(self._seconds), "time": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint: the seconds since it was saved count as the restart. No communication."""
        self._last = clock()
        self._seconds = dict.fromkeys(KINDS, 0.0) | state["seconds"]
        self._seconds[RESTART] += max(0.0, self._last - state["time"])
        self._logged = self._seconds[STEP] + self._seconds[DATA]

    def count(self, batch: Any) -> None:
        """Count the tokens of a batch. Without waiting for the device."""
        if self._counts and isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
            self._counted += tokens_and_squares(batch).to(self._device, non_blocking=True)

    def lap(self, kind: str) -> None:
        """Add the seconds since the last lap to this kind."""
        now = clock()
        self._seconds[kind] += max(0.0, now - self._last)  # a clock may be set back
        self._last = now

    def step_begins(self) -> None:
        """Note that an optimizer step begins."""
        self._between_steps = False
        if self._waits is not None and self._measure_next and self._warm:
            self._measure_next = False
            self._waits.start()

    def step_ends(self) -> None:
        """Note that the step has ended."""
        self._warm = self._between_steps = True
        self._steps += 1
        self._done = PROGRESS.done
        if self._waits is not None:
            self._waits.stop()

    def _notice_end(self) -> None:
        """End the step of a loop, which does not report it, where gradients have been averaged."""
        if PROGRESS.done != self._done:
            self.step_ends()

    def wait_for_device(self) -> None:
        """Wait for the device to finish its work, so that its seconds do not count for what comes next."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _tell_no_tokens(self) -> None:
        if not self._told_no_tokens and world_rank() == 0:
            logger.warning(
                "no tokens were counted, so the logs have no tokens_per_second: batches need a tensor input_ids, come "
                "through Monitor.batches in a loop, and under Trainer through its own get_batch_samples."
            )
        self._told_no_tokens = True


def tokens_and_squares(batch: Mapping[str, Any]) -> Tensor:
    """Tokens of a batch, and the sum of the squares of the lengths of its sequences, by which attention grows [2].

    A sequence is a row without its padding, or a document of a packed row (`find_document_ids`).
    """
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    assert isinstance(ids, Tensor)
    real = torch.ones_like(ids, dtype=torch.bool)
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        real = mask.bool()
    places = positions_in_document(ids, find_document_ids(ids, **document_fields(batch)))
    return torch.stack([real.sum(), ((2 * places + 1) * real).sum()])  # 1 + 3 + 5 + ... of n terms is n * n


def _peak_and_shape(
    model: nn.Module, device: torch.device, given: float | None
) -> tuple[float | None, ModelShape | None]:
    """FLOP/s of a device and the planner's shape of the model, if both are known. Says once what is not."""
    tflops, why = given, ""
    if tflops is None and device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        tflops, why = peak_of(name), f"the peak of a {name} is not known"
    elif tflops is None:
        why = f"there is no known peak of {device.type}"
    if tflops is not None:
        try:
            config: Any = getattr(model, "module", model).config  # DistributedDataParallel has none
            return tflops * 1e12, shape_of(config.to_dict())
        except (AttributeError, ValueError) as problem:
            why = f"the planner does not know the FLOPs of this model ({problem})"
    if world_rank() == 0:
        logger.warning(f"the logs have no mfu: {why}{'; give peak_tflops' if tflops is None else ''}.")
    return None, None


def _peak_memory(device: torch.device) -> dict[str, float]:
    """GiB of this rank: on CUDA since the last call, elsewhere since the process began."""
    if device.type == "cuda":
        found = {
            "peak_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30,
            "peak_reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
        }
        torch.cuda.reset_peak_memory_stats(device)
        return found
    unit = 1 if sys.platform == "darwin" else 2**10
    return {"peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
