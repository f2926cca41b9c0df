"""A script of the user's own, run by every process: its model made small, its output redirected, its steps noted.

Classes of Transformers and Accelerate are met where the script builds them, by methods that are replaced while it
runs. It ends, wherever it is, after the steps of the job. On one process every loader gives the rows that all
positions have together; lengths of loaders and steps of schedules are those of one position, as under the launch file.
"""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments

from hf_axonn.accelerator.training import TrainingMethods
from hf_axonn.certificate.float64 import ExactLogProbs
from hf_axonn.certificate.job import Job
from hf_axonn.certificate.loaders import name_arguments
from hf_axonn.certificate.patching import Patches, Stock, patch
from hf_axonn.certificate.process_counts import ProcessCount, as_launched
from hf_axonn.certificate.recording import Recorder
from hf_axonn.certificate.script_run import EnoughSteps, ScriptRun, WatchedWrites, seed_all
from hf_axonn.compat.accelerate import count_as, prepared_models
from hf_axonn.compat.replaced import replace_attributes


# Options of from_pretrained that its configuration is read with.
OF_CONFIG = "revision subfolder token cache_dir force_download local_files_only trust_remote_code".split()
# TrainingArguments that are the certificate's, whatever the script gives.
FIXED: dict[str, Any] = {
    **dict.fromkeys(("bf16", "fp16", "tf32", "bf16_full_eval", "fp16_full_eval", "torch_compile"), False),
    **dict.fromkeys(("push_to_hub", "load_best_model_at_end", "auto_find_batch_size", "use_liger_kernel"), False),
    **dict.fromkeys(("save_strategy", "eval_strategy"), "no"),
    "logging_strategy": "steps",
    "logging_steps": 1,
    "logging_first_step": False,
    "eval_on_start": False,
    "use_cpu": True,
    "disable_tqdm": True,
    "neftune_noise_alpha": None,
    "report_to": "none",
}


def run_script(job: Job, recorder: Recorder, *, parallel: bool) -> None:
    """Run the script of a job until its steps are made. Collectives: those of the script.

    Raises:
        ValueError: see `ScriptRun.close` and `ScriptRun.load`; the script ended by itself, with an exit code.
    """
    run = ScriptRun(job, recorder, parallel)
    run.allow_division()
    script = Path(job.script[0])
    writing = WatchedWrites(Path(job.folder))
    words, places = sys.argv, list(sys.path)
    sys.argv, sys.path[0] = list(job.script), str(script.parent)
    seed_all(job.seed)
    patches = (ModelPatches(run), run.loading, AcceleratorPatches(run), TrainerPatches(run))
    with replace_attributes({target: value for each in patches for target, value in each.replacements().items()}):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except EnoughSteps:
            pass
        except SystemExit as end:
            if end.code and run.steps < job.steps:
                raise ValueError(f"{script} ended with {end.code} after {run.steps} step(s).") from None
        finally:
            sys.argv, sys.path[:] = words, places
            writing.over = True
    run.close()
    listed = recorder.folder / f"elsewhere-rank{recorder.rank}.json"
    listed.write_text(json.dumps(sorted(writing.paths)), encoding="utf-8")


class ModelPatches(Patches):
    """Models are small, in float64, and without dropout."""

    def __init__(self, run: ScriptRun) -> None:
        self.run = run
        self.building = False  # while the small model is made and loaded, by the stock methods

    @patch(PreTrainedModel)
    def from_pretrained(self, stock: Stock, kind: Any, name_or_path: Any = None, *_: Any, **options: Any) -> Any:
        """Load the small model of the one that is asked for."""
        name_or_path = options.pop("pretrained_model_name_or_path", name_or_path)
        if self.building:
            return stock(kind, name_or_path, **options)
        with replace_attributes({(self, "building"): True}):
            config = options.get("config")
            if not isinstance(config, PreTrainedConfig):
                place = {key: value for key, value in options.items() if key in OF_CONFIG}
                whole = AutoConfig.from_pretrained(name_or_path, **place)
                fields = {key: options.pop(key) for key in [*options] if key in vars(whole)}
                config = AutoConfig.from_pretrained(name_or_path, **place, **fields)
            return self.run.load(kind, config, options)

    @patch(PreTrainedModel)
    def _from_config(self, stock: Stock, kind: Any, config: Any, **options: Any) -> Any:
        if self.building:
            return stock(kind, config, **options)
        with replace_attributes({(self, "building"): True}):
            return self.run.load(kind, config, options).train()

    @patch(PreTrainedModel)
    def resize_token_embeddings(self, _stock: Stock, model: Any, *_: Any, **__: Any) -> Any:
        """Leave the embeddings as they are."""
        return model.get_input_embeddings()

    @patch(PreTrainedModel, name="__call__")
    def call(self, stock: Stock, model: Any, *args: Any, **options: Any) -> Any:
        """Note the labels of training, which a batch may not have; models inside of one are called without."""
        if options.get("labels") is not None and torch.is_grad_enabled():
            self.run.labels = options["labels"]
        return stock(model, *args, **options)

    @patch(nn.Dropout)
    def forward(self, _stock: Stock, _module: Any, values: Any) -> Any:
        """Drop nothing."""
        return values


class AcceleratorPatches(Patches):
    """Accelerators have the certificate's settings, and what they train is noted."""

    def __init__(self, run: ScriptRun) -> None:
        self.run = run
        self.differentiating = False  # inside a backward pass of an Accelerator
        self.last: Accelerator | None = None  # the one of the last backward pass

    @patch(Accelerator, name="__init__")
    def init(self, stock: Stock, accelerator: Any, *args: Any, **options: Any) -> None:
        """Make an Accelerator of CPUs, without mixed precision."""
        folder = str(self.run.recorder.folder / "output")
        options |= name_arguments(stock, args)
        options |= {"mixed_precision": "no", "log_with": None, "cpu": True, "project_dir": folder}
        if config := options.get("project_config"):
            config.set_directories(folder)
        options.pop("dynamo_plugin", None)
        self.run.allow_division()
        stock(accelerator, **options)
        self.run.accelerator = accelerator

    @patch(Accelerator, name="num_processes")
    def count(self, stock: Stock, accelerator: Any) -> int:
        """Return the number of processes; of one process, it remembers what it is under the launch file."""
        positions = self.run.loading.positions
        return ProcessCount(stock(accelerator), positions) if positions > 1 else stock(accelerator)

    @patch(Accelerator)
    def prepare_scheduler(self, stock: Stock, accelerator: Any, scheduler: Any) -> Any:
        """Prepare a schedule that is as long as under the launch file."""
        as_launched(scheduler)
        return stock(accelerator, scheduler)

    @patch(Accelerator, TrainingMethods)
    def clip_grad_norm_(self, stock: Stock, accelerator: Any, *args: Any, **options: Any) -> Any:
        """Note the gradients of a step, clip them, and note their norm."""
        if accelerator.sync_gradients:
            self.run.note_gradients(accelerator)
        return self.run.note_norm(stock(accelerator, *args, **options))

    @patch(nn.utils, name="clip_grad_norm_")
    @patch(nn.utils, name="clip_grad_value_")
    def clip(self, stock: Stock, *args: Any, **options: Any) -> Any:
        """Do the same for torch's own functions, which Accelerate's use too."""
        accelerator = self.run.accelerator
        if accelerator is None or not accelerator.sync_gradients or self.run.written:
            return stock(*args, **options)
        return self.clip_grad_norm_(lambda _, *args, **options: stock(*args, **options), accelerator, *args, **options)

    @patch(Accelerator, TrainingMethods)
    def backward(self, stock: Stock, accelerator: Any, loss: Tensor, **options: Any) -> Any:
        """Note a micro-batch, and differentiate."""
        if not self.differentiating:
            self._note_backward(accelerator, loss / accelerator.gradient_accumulation_steps)
        with replace_attributes({(self, "differentiating"): True}):
            return stock(accelerator, loss, **options)

    @patch(Tensor, name="backward")
    def backward_of_loss(self, stock: Stock, loss: Tensor, *args: Any, **options: Any) -> None:
        """Do the same for `loss.backward()` in place of `accelerator.backward(loss)`."""
        accelerator = self.run.accelerator
        if not self.differentiating and accelerator is not None and prepared_models(accelerator):
            self._note_backward(accelerator, loss)
        stock(loss, *args, **options)

    def _note_backward(self, accelerator: Accelerator, loss: Tensor) -> None:
        self.run.note_backward(accelerator, loss)
        self.last = accelerator

    @patch(AcceleratedOptimizer)
    def step(self, stock: Stock, optimizer: Any, closure: Any = None) -> None:
        """Note gradients that nothing has clipped, step, and note the parameters."""
        last = self.last if optimizer.gradient_state.sync_gradients else None
        rate = float(optimizer.optimizer.param_groups[0]["lr"])
        if last is not None:
            self.run.note_gradients(last)
        stock(optimizer, closure)
        if last is not None:
            self.run.note_step(last, rate)

    @patch(AcceleratedScheduler, name="step")
    def move(self, stock: Stock, scheduler: Any, *args: Any, **options: Any) -> None:
        """Move on as often as under the launch file."""
        positions = self.run.loading.positions
        with count_as(positions) if positions > 1 else contextlib.nullcontext():
            stock(scheduler, *args, **options)


class TrainerPatches(Patches):
    """Trainers have the certificate's arguments, and what they log is noted."""

    def __init__(self, run: ScriptRun) -> None:
        self.run = run

    @patch(TrainingArguments, name="__post_init__")
    def post_init(self, stock: Stock, arguments: Any) -> None:
        """Set the certificate's arguments."""
        for name, value in FIXED.items():
            setattr(arguments, name, value)
        arguments.output_dir = str(self.run.recorder.folder / "output")
        stock(arguments)
        self.run.allow_division()

    @patch(Trainer, name="__init__")
    def init(self, stock: Stock, trainer: Any, *args: Any, **options: Any) -> None:
        """Make a Trainer, which computes log probabilities in float64 where it is one of TRL's."""
        self.run.trainer = trainer
        if utils := sys.modules.get("trl.trainer.utils"):
            vars(utils)["_ChunkedLogProbFunction"] = ExactLogProbs
        stock(trainer, *args, **options)

    @patch(Trainer)
    def log(self, stock: Stock, trainer: Any, logs: dict[str, Any], *args: Any, **options: Any) -> None:
        """Note the loss."""
        stock(trainer, logs, *args, **options)
        self.run.note_logs(logs)

    @patch(Trainer)
    def training_step(
        self, stock: Stock, trainer: Any, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> Any:
        """Note the number of tokens that Trainer has counted."""
        self.run.counted.append(None if num_items_in_batch is None else int(num_items_in_batch))
        return stock(trainer, model, inputs, num_items_in_batch)
