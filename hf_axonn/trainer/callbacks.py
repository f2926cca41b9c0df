"""Callbacks for Trainer: `MonitorCallback` puts the numbers of `Monitor` into its logs, `ProfilerCallback` writes
traces."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from hf_axonn.compat.messages import get_logger
from hf_axonn.distributed.collectives import world_rank
from hf_axonn.monitoring.monitor import DATA, EVALUATION, OTHER, SAVE, STEP, Monitor
from hf_axonn.monitoring.ranges import named_ranges
from hf_axonn.trainer import hooks
from hf_axonn.trainer.watching import Watcher


logger = get_logger(__name__)


class MonitorCallback(TrainerCallback, ExportableState, Watcher):
    """The numbers of `Monitor` in every log of training that Trainer makes, and so in every tracker.

        trainer = Trainer(..., callbacks=[MonitorCallback()])

    For Trainer, GoldfishTrainer and SFTTrainer, over a grid or without one. The last log, of `train_loss`, has goodput
    and seconds alone. Checkpoints keep the seconds, so that goodput continues over restarts.

    Args:
        peak_tflops: See `Monitor`.

    Attributes:
        monitor: During training and after it; None before.

    Collectives: those of `Monitor.log`, in each log of the losses of training.
    """

    def __init__(self, peak_tflops: float | None = None) -> None:
        self.peak_tflops = peak_tflops
        self.monitor: Monitor | None = None
        self.kept: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""
        if self.monitor is not None:
            self.monitor.lap(SAVE)  # so far
            self.kept = self.monitor.state_dict()
        return {"args": {"peak_tflops": self.peak_tflops}, "attributes": {"kept": self.kept}}

    def see_batches(self, batches: list[Any]) -> None:
        """Count their tokens."""
        if self.monitor is not None:
            for batch in batches:
                self.monitor.count(batch)

    def numbers(self, *, last: bool) -> dict[str, float]:
        """Return the numbers of a log."""
        if self.monitor is None:
            return {}
        if not last:
            return self.monitor.log()
        self.monitor.lap(OTHER)
        return self.monitor.goodput()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Start, or continue where the checkpoint was saved."""
        self.monitor = Monitor(model, peak_tflops=self.peak_tflops)
        every: Any = state.stateful_callbacks  # as JSON, of the checkpoint or of this callback as it was before
        kept = every.get(type(self).__name__, {}).get("attributes", {}).get("kept")
        if state.global_step and kept:
            self.monitor.load_state_dict(kept)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Note the time: the batches are here."""
        assert self.monitor is not None
        self.monitor.lap(DATA)
        self.monitor.step_begins()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Note the time: the optimizer has made its step."""
        assert self.monitor is not None
        self.monitor.step_ends()
        if control.should_save or control.should_evaluate:
            self.monitor.wait_for_device()
        self.monitor.lap(STEP)

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Note the time: an evaluation is over."""
        if self.monitor is not None:
            self.monitor.lap(EVALUATION)

    def on_save(self, *_: Any, **__: Any) -> None:
        """Note the time: a checkpoint is written, or its rest is written in the background."""
        assert self.monitor is not None
        self.monitor.lap(SAVE)


class ProfilerCallback(TrainerCallback):
    """Traces of a few steps by torch.profiler, one file a rank, with names by layer and collective (`named_ranges`).

    Open them in https://ui.perfetto.dev. Steps outside of `warmup` and `active` are not slowed.

    Args:
        folder: Where `rank-R.json.gz` is written. None: `profile` in the output_dir.
        wait: Steps before, counted from where this training starts or continues.
        warmup: Steps that the profiler runs and does not record.
        active: Steps that it records.
        options: Of `torch.profiler.profile`: record_shapes, profile_memory, with_stack and others.
    """

    def __init__(
        self, folder: str | Path | None = None, *, wait: int = 5, warmup: int = 1, active: int = 2, **options: Any
    ) -> None:
        self.folder = folder
        self.wait, self.warmup, self.active = wait, warmup, active
        self.options = options
        self._profiler: torch.profiler.profile | None = None
        self._inside = contextlib.ExitStack()
        self._steps = 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Count from here."""
        self._stop()  # what a training that has failed has left
        self._steps = 0

    def on_step_begin(self, args: TrainingArguments, *_: Any, model: Any = None, **__: Any) -> None:
        """Start before the first step that is profiled."""
        if self._steps != self.wait:
            return
        folder = Path(str(args.output_dir), "profile") if self.folder is None else Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{world_rank()}.json.gz"
        self._inside.enter_context(named_ranges(model))
        self._profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=0, warmup=self.warmup, active=self.active, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
            **self.options,
        )
        self._profiler.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop after the last one."""
        self._steps += 1
        if self._profiler is not None:
            self._profiler.step()
            if self._steps == self.wait + self.warmup + self.active:
                self._stop()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Say what is missing if training was too short."""
        if self._steps < self.wait + self.warmup + self.active and world_rank() == 0:
            logger.warning(
                f"the profiler was to record steps {self.wait + self.warmup + 1} to "
                f"{self.wait + self.warmup + self.active}, but this training had {self._steps}: the trace is "
                f"{'short' if self._steps > self.wait + self.warmup else 'missing'}. Lower wait or active."
            )
        self._stop()

    def _stop(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
        self._inside.close()


# Also without a launch file: batches are shown, and logs extended, by Trainer's own methods.
hooks.install(Trainer)
