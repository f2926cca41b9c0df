"""A script of the user's own, run by every process: its model made small, its output redirected, its steps noted.

What a script builds of Transformers and Accelerate is met where it is built, by methods that are replaced while it
runs. It ends, wherever it is, after the steps of the job. On one process every loader gives the rows that all
positions have together; lengths of loaders and steps of schedules are those of one position, as under the launch file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import GradientState
from torch import Tensor, nn
from transformers import AutoConfig, BatchEncoding, PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments

from hf_axonn.accelerator.training import TrainingMethods
from hf_axonn.certificate.float64 import ExactLogProbs, recompute_exactly
from hf_axonn.certificate.job import Job
from hf_axonn.certificate.loaders import NOT_PREPARED, Loading, names_of
from hf_axonn.certificate.loading import EXACT, distributed
from hf_axonn.certificate.recording import Recorder, number
from hf_axonn.certificate.shrinking import shrunk
from hf_axonn.compat.accelerate import as_on_gpus, counted_as, prepared_models
from hf_axonn.compat.replaced import replaced


# Options of from_pretrained: those that its configuration is read with; where the weights are, which those of the
# small model are not; dtype and device, which are the certificate's; and how one model is divided among processes.
OF_CONFIG = "revision subfolder token cache_dir force_download local_files_only trust_remote_code".split()
PLACE = "revision subfolder variant token cache_dir force_download local_files_only use_safetensors config".split()
DTYPES = ("dtype", "torch_dtype", "quantization_config", "load_in_8bit", "load_in_4bit", "device_map")
DIVIDING = ("tp_plan", "tp_size", "distributed_config")
# TrainingArguments that are the certificate's, whatever the script says.
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
CLIPPING = ("clip_grad_norm_", "clip_grad_value_")
WRITES = ("w", "a", "x", "+")  # one of them is in the mode of a file that is opened for writing


class _Enough(BaseException):
    """The steps are made; no `except Exception` of a script keeps it."""


class _Run:
    """What the replaced methods share.

    Args:
        job: the job; its `script` is run.
        recorder: of the case.
        parallel: whether this is a run under the launch file.
    Attributes:
        loading: what its loaders share.
        vocabulary: of the small model; 0: not loaded yet.
        models: directories of the small models.
        accelerator: the script's last one; started, written: whether a backward pass was begun, and whether the
            gradients of this step were noted.
        trainer: the script's, if it has one.
        norms, logged: for each step, the one that is being made too; counted: for each micro-batch.
    """

    def __init__(self, job: Job, recorder: Recorder, parallel: bool) -> None:
        self.job, self.recorder, self.parallel = job, recorder, parallel
        self.loading = Loading(1 if parallel else job.positions, job.seed, self.batch)
        self.vocabulary = 0
        self.models: list[str] = []
        self.accelerator: Accelerator | None = None
        self.started = self.written = False
        self.trainer: Trainer | None = None
        self.norms: list[float | None] = [None]
        self.logged: list[dict[str, float]] = []
        self.counted: list[int | None] = []
        self.steps = 0

    def small(self, kind: type[PreTrainedModel], config: Any) -> Path:
        """The directory of the small model of a class and its configuration; one process makes it."""
        text = json.dumps([kind.__name__, config.to_dict()], sort_keys=True, default=str)
        folder = Path(self.job.folder, "models", f"{kind.__name__}-{hashlib.sha256(text.encode()).hexdigest()[:8]}")
        if not folder.exists():
            if self.parallel:
                raise ValueError(
                    f"under the launch file the script loads another {kind.__name__} than on one process."
                )
            model = shrunk(config, ranks=self.job.ranks, layers=self.job.layers, seed=self.job.seed, kind=kind)
            model.save_pretrained(folder)
        small = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.vocabulary = int(small.get("vocab_size") or 0)
        self.models += [str(folder)] if str(folder) not in self.models else []
        return folder

    def load(self, kind: type[PreTrainedModel], config: Any, options: dict[str, Any]) -> Any:
        """The small model, as the script asks for it; its name is that of the large one, for tokenizers and copies."""
        if any(options.get(name) for name in ("quantization_config", "load_in_8bit", "load_in_4bit")):
            raise ValueError("the script loads quantized weights, which are no float64: omit quantization_config.")
        kept = {name: value for name, value in options.items() if name not in (*PLACE, *DTYPES)}
        if not self.parallel:
            kept = {name: value for name, value in kept.items() if name not in DIVIDING}
        elif not any(kept.get(name) is not None for name in DIVIDING):
            kept |= distributed(self.job)
        if str(kept.get("attn_implementation") or "sdpa") not in ("sdpa", "eager"):
            kept.pop("attn_implementation")
        loaded = _LOAD.__func__(kind, self.small(kind, config), **(kept | EXACT))
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info
        if name := getattr(config, "name_or_path", ""):
            model.config.name_or_path = model.name_or_path = name
        _seed(self.job.seed)  # whatever loading has drawn
        return loaded

    def batch(self, values: Any) -> Any:
        """A batch for the small model: ids and labels of its vocabulary, floats in float64."""
        if not isinstance(values, Mapping):
            return values
        found = dict(values)
        ids = found.get("input_ids")
        for name, value in found.items():
            if not isinstance(value, Tensor):
                continue
            tokens = name == "labels" and isinstance(ids, Tensor) and value.shape == ids.shape
            if value.is_floating_point():
                found[name] = value.double()
            elif self.vocabulary and (name.endswith("input_ids") or tokens):
                found[name] = torch.where(value >= 0, value % self.vocabulary, value)
        return BatchEncoding(found) if isinstance(values, BatchEncoding) else found

    def backward(self, accelerator: Accelerator, loss: Tensor) -> None:
        """Before a backward pass: note its micro-batch and its part of the step's loss; before the first one, the
        weights."""
        if not prepared_models(accelerator):
            raise ValueError("the script prepares no model with Accelerator.prepare.")
        if not self.started:
            recompute_exactly(self.bare(accelerator))
            self.recorder.start(self.bare(accelerator))
            self.started = True
        self.written = False
        loader = GradientState().active_dataloader
        waiting = self.loading.seen.get(NOT_PREPARED if loader is None else id(loader), [])
        self.recorder.batch(waiting.pop(0) if waiting else {}, loss.detach())

    def bare(self, accelerator: Accelerator) -> nn.Module:
        """The model without wrappers; of several, the first one that is trained."""
        models = prepared_models(accelerator)
        trained = [model for model in models if any(weight.requires_grad for weight in model.parameters())]
        bare: nn.Module = accelerator.unwrap_model((trained or models)[0])
        return bare

    def gradients(self, accelerator: Accelerator) -> None:
        """Before gradients are clipped, or where nothing clips them before a step."""
        if self.started and not self.written:
            self.recorder.gradients(self.bare(accelerator))
            self.written = True

    def stepped(self, accelerator: Accelerator, rate: float) -> None:
        """After a step of the optimizer; the last one ends the script, or its Trainer's logging does."""
        self.recorder.stepped(self.bare(accelerator))
        self.steps += 1
        self.norms.append(None)
        self.logged.append({"learning_rate": rate})
        if self.steps > self.job.steps or self.steps == self.job.steps and self.trainer is None:
            raise _Enough

    def log(self, logs: Mapping[str, Any]) -> None:
        """What a Trainer logs of a step."""
        if "loss" in logs and self.logged:
            self.logged[-1]["loss"] = float(logs["loss"])
        if self.steps >= self.job.steps:
            raise _Enough

    def close(self) -> None:
        """Write the rest, or say why there is nothing.

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
            averages=self.trainer is None or bool(self.trainer.args.average_tokens_across_devices),
            models=self.models,
        )


_LOAD: Any = vars(PreTrainedModel)["from_pretrained"]
_BUILD: Any = vars(PreTrainedModel)["_from_config"]


def run_script(job: Job, recorder: Recorder, *, parallel: bool) -> None:
    """Run the script of a job until its steps are made. Collectives: those of the script.

    Raises:
        ValueError: see `_Run.close` and `_Run.load`; the script ended by itself, with an exit code.
    """
    run = _Run(job, recorder, parallel)
    if job.divides and parallel:
        PartialState(cpu=True)
        as_on_gpus()
    script = Path(job.script[0])
    written = _Written(Path(job.folder))
    words, places = sys.argv, list(sys.path)
    sys.argv, sys.path[0] = list(job.script), str(script.parent)
    _seed(job.seed)
    with replaced(_of_models(run) | run.loading.replacements() | _of_accelerators(run) | _of_trainers(run)):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except _Enough:
            pass
        except SystemExit as end:
            if end.code and run.steps < job.steps:
                raise ValueError(f"{script} ended with {end.code} after {run.steps} step(s).") from None
        finally:
            sys.argv, sys.path[:] = words, places
            written.over = True
    run.close()
    listed = recorder.folder / f"elsewhere-rank{recorder.rank}.json"
    listed.write_text(json.dumps(sorted(written.paths)), encoding="utf-8")


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class _Written:
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
            writes = any(sign in mode for sign in WRITES) if isinstance(mode, str) else _writes(flags)
            if not writes:
                return
        full = os.path.abspath(os.fspath(values[0]))
        if not full.startswith(self.left_away) and "__pycache__" not in full:
            self.paths.add(full)


def _writes(flags: int) -> bool:
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _of_models(run: _Run) -> dict[tuple[Any, str], Any]:
    """Models are small, in float64, and without dropout."""

    def from_pretrained(kind: Any, /, pretrained_model_name_or_path: Any, *_: Any, **options: Any) -> Any:
        config = options.get("config")
        with replaced({(PreTrainedModel, "_from_config"): _BUILD}):
            if not isinstance(config, PreTrainedConfig):
                place = {key: value for key, value in options.items() if key in OF_CONFIG}
                whole = AutoConfig.from_pretrained(pretrained_model_name_or_path, **place)
                its = {key: options.pop(key) for key in [*options] if key in vars(whole)}
                config = AutoConfig.from_pretrained(pretrained_model_name_or_path, **place, **its)
            return run.load(kind, config, options)

    def from_config(kind: Any, /, config: Any, **options: Any) -> Any:
        with replaced({(PreTrainedModel, "_from_config"): _BUILD}):
            return run.load(kind, config, options).train()

    return {
        (PreTrainedModel, "from_pretrained"): classmethod(from_pretrained),
        (PreTrainedModel, "_from_config"): classmethod(from_config),
        (PreTrainedModel, "resize_token_embeddings"): lambda self, *_, **__: self.get_input_embeddings(),
        (nn.Dropout, "forward"): lambda _self, values: values,
    }


def _of_accelerators(run: _Run) -> dict[tuple[Any, str], Any]:
    """What is noted of training, and settings that are the certificate's."""
    make, step, move = Accelerator.__init__, AcceleratedOptimizer.step, AcceleratedScheduler.step
    differentiate: Any = Tensor.backward
    named = names_of(make)
    entered: list[bool] = []
    last: list[Any] = []

    def init(self: Any, *words: Any, **options: Any) -> None:
        folder = str(run.recorder.folder / "output")
        options |= named(words)
        options |= {"mixed_precision": "no", "log_with": None, "cpu": True, "project_dir": folder}
        if config := options.get("project_config"):
            config.set_directories(folder)
        options.pop("dynamo_plugin", None)
        if run.job.divides and run.parallel:
            PartialState(cpu=True)
            as_on_gpus()
        make(self, **options)
        run.accelerator = self

    def clipping(stock: Callable[..., Any]) -> Callable[..., Any]:
        def clip(self: Any, *words: Any, **options: Any) -> Any:
            if self.sync_gradients:
                run.gradients(self)
            norm = stock(self, *words, **options)
            run.norms[-1] = None if norm is None else number(norm)
            return norm

        return clip

    def clipping_bare(stock: Callable[..., Any]) -> Callable[..., Any]:
        """torch's own functions, which Accelerate's use too."""

        def clip(*words: Any, **options: Any) -> Any:
            if run.accelerator is None or not run.accelerator.sync_gradients or run.written:
                return stock(*words, **options)
            run.gradients(run.accelerator)
            norm = stock(*words, **options)
            run.norms[-1] = None if norm is None else number(norm)
            return norm

        return clip

    def passing(stock: Callable[..., Any]) -> Callable[..., Any]:
        def backward(self: Any, loss: Tensor, **options: Any) -> Any:
            if not entered:
                run.backward(self, loss / self.gradient_accumulation_steps)
                last[:] = [self]
            entered.append(True)
            try:
                return stock(self, loss, **options)
            finally:
                entered.pop()

        return backward

    def bare(loss: Tensor, *words: Any, **options: Any) -> None:
        """`loss.backward()` in place of `accelerator.backward(loss)`."""
        if not entered and run.accelerator is not None and prepared_models(run.accelerator):
            run.backward(run.accelerator, loss)
            last[:] = [run.accelerator]
        differentiate(loss, *words, **options)

    def stepping(self: Any, closure: Any = None) -> None:
        synced = self.gradient_state.sync_gradients and bool(last)
        rate = float(self.optimizer.param_groups[0]["lr"])
        if synced:
            run.gradients(last[0])
        step(self, closure)
        if synced:
            run.stepped(last[0], rate)

    def moving(self: Any, *words: Any, **options: Any) -> None:
        with counted_as(run.loading.positions) if run.loading.positions > 1 else contextlib.nullcontext():
            move(self, *words, **options)

    classes = (Accelerator, TrainingMethods)
    return {
        (Accelerator, "__init__"): init,
        **{(kind, "clip_grad_norm_"): clipping(kind.clip_grad_norm_) for kind in classes},
        **{(nn.utils, name): clipping_bare(getattr(nn.utils, name)) for name in CLIPPING},
        **{(kind, "backward"): passing(kind.backward) for kind in classes},
        (Tensor, "backward"): bare,
        (AcceleratedOptimizer, "step"): stepping,
        (AcceleratedScheduler, "step"): moving,
    }


def _of_trainers(run: _Run) -> dict[tuple[Any, str], Any]:
    """Arguments that are the certificate's; a Trainer's logging."""
    check: Any = TrainingArguments.__post_init__
    make, note, train = Trainer.__init__, Trainer.log, Trainer.training_step

    def post_init(self: Any) -> None:
        for name, value in FIXED.items():
            setattr(self, name, value)
        self.output_dir = str(run.recorder.folder / "output")
        check(self)
        if run.job.divides and run.parallel:
            as_on_gpus()

    def init(self: Any, *words: Any, **options: Any) -> None:
        run.trainer = self
        if of_trl := sys.modules.get("trl.trainer.utils"):
            vars(of_trl)["_ChunkedLogProbFunction"] = ExactLogProbs
        make(self, *words, **options)

    def log(self: Any, logs: dict[str, Any], *words: Any, **options: Any) -> None:
        note(self, logs, *words, **options)
        run.log(logs)

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        run.counted.append(None if num_items_in_batch is None else int(num_items_in_batch))
        return train(self, model, inputs, num_items_in_batch)

    return {
        (TrainingArguments, "__post_init__"): post_init,
        (Trainer, "__init__"): init,
        (Trainer, "log"): log,
        (Trainer, "training_step"): training_step,
    }
