"""A run of a user's script: its model made small, and its steps noted by the methods that stand in for libraries'."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from torch import Tensor, nn
from transformers import BatchEncoding, PreTrainedModel, Trainer

from hf_axonn.certificate.float64 import recompute_exactly
from hf_axonn.certificate.job import Job
from hf_axonn.certificate.loaders import NOT_PREPARED, LoaderPatches
from hf_axonn.certificate.loading import EXACT, dividing_options, save_adapters
from hf_axonn.certificate.recording import Recorder, norm_of
from hf_axonn.certificate.shrinking import shrink
from hf_axonn.compat.accelerate import allow_sharding_on_cpus, prepared_models


# Options of from_pretrained: where the weights are, which those of the small model are not; dtype and device, which
# are the certificate's; and how one model is divided among processes.
PLACE = "revision subfolder variant token cache_dir force_download local_files_only use_safetensors config".split()
DTYPES = ("dtype", "torch_dtype", "quantization_config", "load_in_8bit", "load_in_4bit", "device_map")
DIVIDING = ("tp_plan", "tp_size", "distributed_config")
WRITES = ("w", "a", "x", "+")  # one of them is in the mode of a file that is opened for writing
FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class EnoughSteps(BaseException):
    """The steps are made; no `except Exception` of a script keeps it."""


class ScriptRun:
    """The state of a script that runs.

    Args:
        job: the job; its `script` is run.
        recorder: of the case.
        parallel: whether this is a run under the launch file.
    Attributes:
        loading: the patches of its loaders.
        vocabulary: of the small model; 0: not loaded yet.
        models: directories of the small models.
        accelerator: the script's last one; started, written: whether a backward pass was begun, and whether the
            gradients of this step were noted.
        trainer: the script's, if it has one.
        labels: with which a model was called since the last backward pass.
        norms, logged: for each step, the one that is being made too; counted: for each micro-batch.
    """

    def __init__(self, job: Job, recorder: Recorder, parallel: bool) -> None:
        self.job, self.recorder, self.parallel = job, recorder, parallel
        self.loading = LoaderPatches(1 if parallel else job.positions, job.seed, self.fit_vocabulary)
        self.vocabulary = 0
        self.models: list[str] = []
        self.accelerator: Accelerator | None = None
        self.started = self.written = False
        self.trainer: Trainer | None = None
        self.labels: Tensor | None = None
        self.norms: list[float | None] = [None]
        self.logged: list[dict[str, float]] = []
        self.counted: list[int | None] = []
        self.steps = 0

    def make_small(self, kind: type[PreTrainedModel], config: Any) -> Path:
        """Return the directory of the small model of a class and its configuration, which one process makes."""
        text = json.dumps([kind.__name__, config.to_dict()], sort_keys=True, default=str)
        folder = Path(self.job.folder, "models", f"{kind.__name__}-{hashlib.sha256(text.encode()).hexdigest()[:8]}")
        if not folder.exists():
            if self.parallel:
                raise ValueError(
                    f"under the launch file the script loads another {kind.__name__} than on one process."
                )
            model = shrink(config, ranks=self.job.ranks, layers=self.job.layers, seed=self.job.seed, kind=kind)
            model.save_pretrained(folder)
        small = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.vocabulary = int(small.get("vocab_size") or 0)
        self.models += [str(folder)] if str(folder) not in self.models else []
        return folder

    def load(self, kind: type[PreTrainedModel], config: Any, options: dict[str, Any]) -> Any:
        """Load the small model as the script asks for it; its name is that of the large one, for tokenizers."""
        if any(options.get(name) for name in ("quantization_config", "load_in_8bit", "load_in_4bit")):
            raise ValueError("the script loads quantized weights, which are no float64: omit quantization_config.")
        kept = {name: value for name, value in options.items() if name not in (*PLACE, *DTYPES)}
        if not self.parallel:
            kept = {name: value for name, value in kept.items() if name not in DIVIDING}
        elif not any(kept.get(name) is not None for name in DIVIDING):
            kept |= dividing_options(self.job)
        if str(kept.get("attn_implementation") or "sdpa") not in ("sdpa", "eager"):
            kept.pop("attn_implementation")
        load: Any = vars(PreTrainedModel)["from_pretrained"].__func__
        loaded = load(kind, self.make_small(kind, config), **(kept | EXACT))
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info
        if name := getattr(config, "name_or_path", ""):
            model.config.name_or_path = model.name_or_path = name
        seed_all(self.job.seed)  # loading may have drawn
        return loaded

    def allow_division(self) -> None:
        """Let the next Accelerator divide the model, where the launch file does."""
        if self.job.divides and self.parallel:
            allow_sharding_on_cpus()

    def fit_vocabulary(self, batch: Any) -> Any:
        """Return a batch for the small model: ids and labels of its vocabulary, floats in float64."""
        if not isinstance(batch, Mapping):
            return batch
        fields = dict(batch)
        ids = fields.get("input_ids")
        for name, value in fields.items():
            if not isinstance(value, Tensor):
                continue
            tokens = name == "labels" and isinstance(ids, Tensor) and value.shape == ids.shape
            if value.is_floating_point():
                fields[name] = value.double()
            elif self.vocabulary and (name.endswith("input_ids") or tokens):
                fields[name] = torch.where(value >= 0, value % self.vocabulary, value)
        return BatchEncoding(fields) if isinstance(batch, BatchEncoding) else fields

    def note_backward(self, accelerator: Accelerator, loss: Tensor) -> None:
        """Note a micro-batch and its part of the step's loss before a backward pass; before the first one, the
        weights."""
        if not prepared_models(accelerator):
            raise ValueError("the script prepares no model with Accelerator.prepare.")
        if not self.started:
            model = self._unwrap(accelerator)
            recompute_exactly(model)
            self.recorder.start(model)
            if not self.parallel:
                save_adapters(model, self.recorder.folder)
            self.started = True
        self.written = False
        loader = GradientState().active_dataloader
        waiting = self.loading.seen.get(NOT_PREPARED if loader is None else id(loader), [])
        batch = waiting.pop(0) if waiting else {}
        if self.labels is not None and batch.get("labels") is None:
            batch = {**batch, "labels": self.labels}
        self.labels = None
        self.recorder.batch(batch, loss.detach())

    def _unwrap(self, accelerator: Accelerator) -> nn.Module:
        """Return the model without wrappers; of several, the first one that is trained."""
        models = prepared_models(accelerator)
        trained = [model for model in models if any(weight.requires_grad for weight in model.parameters())]
        model: nn.Module = accelerator.unwrap_model((trained or models)[0])
        return model

    def note_gradients(self, accelerator: Accelerator) -> None:
        """Note the gradients before they are clipped, or before a step where nothing clips them."""
        if self.started and not self.written:
            self.recorder.gradients(self._unwrap(accelerator))
            self.written = True

    def note_norm(self, norm: Any) -> Any:
        """Note the norm of the gradients of a step, which clipping has returned; returns it."""
        self.norms[-1] = norm_of(norm)
        return norm

    def note_step(self, accelerator: Accelerator, rate: float) -> None:
        """Note the parameters after a step; the last one ends the script, or its Trainer's logging does."""
        self.recorder.end_step(self._unwrap(accelerator))
        self.steps += 1
        self.norms.append(None)
        self.logged.append({"learning_rate": rate})
        if self.steps > self.job.steps or self.steps == self.job.steps and self.trainer is None:
            raise EnoughSteps

    def note_logs(self, logs: Mapping[str, Any]) -> None:
        """Note what a Trainer logs of a step."""
        if "loss" in logs and self.logged:
            self.logged[-1]["loss"] = float(logs["loss"])
        if self.steps >= self.job.steps:
            raise EnoughSteps

    def close(self) -> None:
        """Write the rest, or raise where there is nothing.

        Raises:
            ValueError: the script built no Trainer and no Accelerator, loaded no model, made no backward pass, stepped
                no prepared optimizer, or made fewer steps.
        """
        name = self.job.script[0]
        if self.accelerator is None:
            raise ValueError(f"{name} builds no Trainer and no Accelerator: there is nothing to compare.")
        if not self.started:
            raise ValueError(f"{name} ended without a backward pass: there is nothing to compare.")
        if not self.models:
            raise ValueError(f"{name} loads no model of Transformers, so that none was made small.")
        if not self.steps:
            raise ValueError(
                f"{name} makes backward passes, and no step of an optimizer that Accelerator.prepare was given: "
                "prepare the optimizer too."
            )
        if self.steps < self.job.steps:
            raise ValueError(f"{name} ended after {self.steps} of {self.job.steps} step(s): give fewer --steps.")
        self.recorder.close(
            norms=self.norms[: self.steps],
            logged=self.logged[: self.job.steps],
            counted=self.counted,
            sums_tokens=bool(getattr(self.trainer, "model_accepts_loss_kwargs", False)),
            trainer=self.trainer is not None,
            smoothing=0.0 if self.trainer is None else float(self.trainer.args.label_smoothing_factor),
            averages=self.trainer is None or bool(self.trainer.args.average_tokens_across_devices),
            models=self.models,
        )


def seed_all(seed: int) -> None:
    """Seed the generators of a process."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class WatchedWrites:
    """Files that are opened for writing, or folders that are made, outside of a folder; devices omitted."""

    def __init__(self, folder: Path) -> None:
        self.left_away = (f"{folder.resolve()}{os.sep}", "/dev/", "/proc/")
        self.over = False
        self.paths: set[str] = set()
        sys.addaudithook(self._hook)  # stays until the process ends

    def _hook(self, event: str, values: tuple[Any, ...]) -> None:
        if self.over or event not in ("open", "os.mkdir") or not isinstance(values[0], (str, os.PathLike)):
            return
        if event == "open":
            mode, flags = values[1], values[2]
            if not (any(sign in mode for sign in WRITES) if isinstance(mode, str) else flags & FLAGS):
                return
        full = os.path.abspath(os.fspath(values[0]))
        if not full.startswith(self.left_away) and "__pycache__" not in full:
            self.paths.add(full)
