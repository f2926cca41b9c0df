"""The program of every process, one alone and those of the launch file: the same model, rows and steps.

    python -m hf_axonn.certificate.worker JOB CASE ...                              one process
    accelerate launch --config FILE -m hf_axonn.certificate.worker JOB CASE ...     what is certified

Every case is run in turn, "trainer-sgd" and so on: Transformers' Trainer and a loop of Accelerate, as scripts have
them, each with SGD (whose step is as wrong as its gradient, which Adam's is not) and with another optimizer; or the
user's own script.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, InitProcessGroupKwargs, PartialState
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from hf_axonn.certificate.deepspeed import before_steps, on_cpus
from hf_axonn.certificate.float64 import Float64, recompute_exactly, without_noise
from hf_axonn.certificate.job import FLOAT64, WITNESS, Job
from hf_axonn.certificate.loaders import draw_alike
from hf_axonn.certificate.loading import load_model
from hf_axonn.certificate.recording import Recorder, norm_of
from hf_axonn.certificate.rows import Row, collate, collate_evenly, pack, seen_in, spans, tokens_of
from hf_axonn.certificate.script import run_script
from hf_axonn.certificate.watching import be_watched
from hf_axonn.compat.accelerate import allow_sharding_on_cpus, forget_state
from hf_axonn.compat.own_code import register_code


ALONE, TOGETHER = "one", "many"


def side(parallel: bool) -> str:
    """Return the name of the folder of the runs of one process, or of many."""
    return TOGETHER if parallel else ALONE


def main() -> None:
    """Run the job of the command line; a failure is left in a file, and ends the process."""
    job = Job.load(sys.argv[1])
    parallel, rank = int(os.environ.get("WORLD_SIZE", 1)) > 1, int(os.environ.get("RANK", 0))
    be_watched(Path(job.folder, side(parallel)), rank)
    try:
        run(job, sys.argv[2:])
        PartialState().destroy_process_group()
    except BaseException as error:
        text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        Path(job.folder, side(parallel), f"failed-rank{rank}.txt").write_text(text, encoding="utf-8")
        raise


def run(job: Job, names: Sequence[str] = ()) -> None:
    """Train the cases of these names, or all that need no other process before them, and write them down.

    Collective over the world.
    """
    logging.set_verbosity_error()
    if job.code:
        register_code(job.code)
    exact = _dtype(job) == torch.float64
    if _zero(job):
        on_cpus()
    torch.set_default_dtype(_dtype(job))  # constants that models and Trainer make in it
    ways = {"trainer": _trainer, "resumed": _trainer, "loop": _loop, "script": _script}
    begun = Path(job.folder, side(_parallel()), f"begun-rank{os.environ.get('RANK', 0)}.txt")
    for path, optimizer in job.cases:
        if f"{path}-{optimizer}" in names or not names and path != "resumed":
            forget_state()
            with begun.open("a", encoding="utf-8") as cases:
                cases.write(f"{path}-{optimizer}\n")
            with Float64() if exact else contextlib.nullcontext(), without_noise(exact):
                ways[path](job, path, optimizer)


def _parallel() -> bool:
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


def _zero(job: Job) -> bool:
    """Return whether DeepSpeed runs this process."""
    return job.zero and _parallel()


def _dtype(job: Job) -> torch.dtype:
    """Return the dtype of parameters: one process has the truth, whatever the ranks compute in."""
    return torch.float64 if job.dtype == FLOAT64 or not _parallel() else torch.float32


def _folder(job: Job, path: str, optimizer: str) -> Path:
    return Path(job.folder, side(_parallel()), f"{path}-{optimizer}")


def _recorder(job: Job, path: str, optimizer: str) -> Recorder:
    after = job.saved_at if path == "resumed" else 0
    return Recorder(_folder(job, path, optimizer), int(os.environ.get("RANK", 0)), job.rows, after)


def _collator(job: Job) -> Any:
    if job.packing:
        return pack
    return collate_evenly if job.loaders["dispatch_batches"] else collate


class _RecordingTrainer(Trainer):
    """The stock Trainer, which says what it sees."""

    recorder: Recorder
    evaluated: list[dict[str, Any]]
    answers: list[Any]
    counted: list[int | None]
    times: int = 1  # by which a batch is larger than that of a rank
    engine: Any = None  # of DeepSpeed, whose steps come within `training_step`

    @property
    def trained(self) -> nn.Module:
        """The model without wrappers."""
        assert isinstance(self.model, nn.Module)
        return self.model

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Train a micro-batch, and note it."""
        seen = dict(inputs)
        if self.is_deepspeed_enabled and self.engine is None:
            self.engine = model
            before_steps(model, lambda: self.recorder.gradients(self.trained))
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.recorder.batch(seen, loss)
        self.counted.append(None if num_items_in_batch is None else int(num_items_in_batch))
        if self.accelerator.sync_gradients and self.engine is None:
            self.recorder.gradients(self.trained)
        return loss

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Return the sampler of a rank, so that all processes draw the same order."""
        with self._as_a_rank():
            return draw_alike(super()._get_train_sampler(train_dataset), self.args.seed)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """Return the sampler of a rank."""
        with self._as_a_rank():
            return super()._get_eval_sampler(eval_dataset)

    @contextlib.contextmanager
    def _as_a_rank(self) -> Iterator[None]:
        """Let the arguments have the batch size of a rank inside: rows are grouped by their lengths so."""
        if self.args.train_sampling_strategy != "group_by_length":
            yield
            return
        before = self.args.per_device_train_batch_size, self.args.per_device_eval_batch_size
        self.args.per_device_train_batch_size, self.args.per_device_eval_batch_size = (
            size // self.times for size in before
        )
        try:
            yield
        finally:
            self.args.per_device_train_batch_size, self.args.per_device_eval_batch_size = before

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **kwargs: Any) -> Any:
        """Evaluate a batch, and keep its logits here alone."""
        seen = dict(inputs)
        kwargs.pop("prediction_loss_only", None)
        loss, logits, _labels = super().prediction_step(model, inputs, False, **kwargs)
        self.evaluated.append(seen)
        self.answers.append(logits)
        return loss, None, None


class _Steps(TrainerCallback):
    """Parameters before the first step, and after each."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the parameters before the first batch: the model is prepared."""
        if torch.get_default_dtype() == torch.float64:
            recompute_exactly(kwargs["model"])
        self.recorder.start(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the parameters after the optimizer's step."""
        self.recorder.end_step(kwargs["model"])


def _arguments(job: Job, optimizer: str, folder: Path) -> TrainingArguments:
    options = dict(job.trainer)
    if optimizer == WITNESS:
        options.pop("optim_args", None)
    options |= {
        "output_dir": str(folder / "output"),
        "per_device_train_batch_size": job.batch_of(_parallel()),
        "per_device_eval_batch_size": job.batch_of(_parallel()),
        "gradient_accumulation_steps": job.accumulation,
        "max_steps": job.steps,
        "optim": optimizer,
        "learning_rate": job.rate(optimizer),
        "logging_steps": 1,
        "save_strategy": "steps" if job.saved_at else "no",
        "save_steps": job.saved_at or 500,
        "report_to": "none",
        "use_cpu": not _zero(job),
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
    }
    if not _zero(job):
        return TrainingArguments(**options)
    arguments = TrainingArguments(**options, ddp_backend="gloo")
    arguments.bf16 = job.dtype == "bf16"  # afterwards, as there is no GPU; Trainer asks DeepSpeed for the same
    return arguments


def _trainer(job: Job, path: str, optimizer: str) -> None:
    """Run a script with a Trainer: train, from the start or from what another process saved, evaluate, save."""
    recorder = _recorder(job, path, optimizer)
    arguments = _arguments(job, optimizer, recorder.folder)
    if job.divides and _parallel():
        allow_sharding_on_cpus()
    trainer = _RecordingTrainer(
        model=load_model(job, parallel=_parallel(), dtype=_dtype(job)),
        args=arguments,
        train_dataset=job.rows,
        eval_dataset=job.evaluation_rows,
        data_collator=_collator(job),
        callbacks=[_Steps(recorder)],
    )
    trainer.recorder, trainer.evaluated, trainer.answers, trainer.counted = recorder, [], [], []
    trainer.times = job.batch_of(_parallel()) // job.batch_of(True)
    saved = _folder(job, "trainer", optimizer) / "output" / f"checkpoint-{job.saved_at}"
    trainer.train(resume_from_checkpoint=str(saved) if path == "resumed" else None)
    metrics = trainer.evaluate()
    trainer.save_model(str(recorder.folder / "saved"))
    recorder.logits(_answers(trainer.evaluated, trainer.answers, job.evaluation_rows))
    rows = [seen_in(batch, job.evaluation_rows) for batch in trainer.evaluated]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry][recorder.after :]
    recorder.close(
        norms=[entry.get("grad_norm") for entry in logged],
        logged=[{name: entry[name] for name in ("loss", "learning_rate")} for entry in logged],
        evaluation={"loss": metrics["eval_loss"], "rows": rows},
        sums_tokens=trainer.model_accepts_loss_kwargs,
        counted=trainer.counted,
    )


def _answers(batches: list[dict[str, Any]], logits: list[Any], rows: list[Row]) -> dict[int, Tensor]:
    """Return the logits of rows, without padding, by the indices of the rows. Collective where they are DTensors."""
    found: dict[int, Tensor] = {}
    for batch, given in zip(batches, logits, strict=True):
        values = given[0] if isinstance(given, (tuple, list)) and given else given
        if isinstance(values, DTensor):
            values = values.full_tensor()
        if isinstance(values, Tensor) and values.shape[:2] == batch["input_ids"].shape:
            for index, (line, places) in zip(seen_in(batch, rows), spans(batch), strict=True):
                found[index] = values[line, places].detach().clone()
    return found


def _script(job: Job, path: str, optimizer: str) -> None:
    """Run the user's own script, in place of ours."""
    rank = int(os.environ.get("RANK", 0))
    run_script(job, Recorder(_folder(job, path, optimizer), rank, None), parallel=_parallel())


def _loop(job: Job, path: str, optimizer: str) -> None:
    """Run a script with Accelerate: the loop of its guide for batches of unequal numbers of tokens."""
    recorder = _recorder(job, path, optimizer)
    if job.divides and _parallel():
        allow_sharding_on_cpus()
    zero = _zero(job)
    backend = {"kwargs_handlers": [InitProcessGroupKwargs(backend="gloo")]}
    ways: dict[str, Any] = {"gradient_accumulation_steps": job.accumulation, **backend} if zero else {"cpu": True}
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**job.loaders), **ways)
    model: Any = load_model(job, parallel=_parallel(), dtype=_dtype(job))
    model.train()
    kind = {WITNESS: torch.optim.SGD, "adamw_torch": torch.optim.AdamW}[optimizer]
    loader: Any = DataLoader(job.rows, job.batch_of(_parallel()), collate_fn=_collator(job))  # type: ignore[arg-type]
    model, trained, loader = accelerator.prepare(model, kind(model.parameters(), lr=job.rate(optimizer)), loader)
    bare = accelerator.unwrap_model(model)
    recorder.start(bare)
    if zero:
        before_steps(model, lambda: recorder.gradients(bare))
    norms = []
    each = iter(loader)
    while batches := list(itertools.islice(each, job.accumulation)):
        own = torch.tensor([sum(tokens_of(batch) for batch in batches)])
        tokens = int(accelerator.gather(own).sum())
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            if zero:  # whose steps are within `backward`, where gradients are synchronized
                accelerator.sync_gradients = last
            with contextlib.nullcontext() if last or zero else accelerator.no_sync(model):
                # DistributedDataParallel averages over the processes, and `tokens` counts those of all
                loss = _loss(model, batch, tokens) * accelerator.num_processes
                accelerator.backward(loss * accelerator.gradient_accumulation_steps)  # by which it divides
            recorder.batch(batch, loss.detach())
        if not zero:
            recorder.gradients(bare)
        norm = float(job.trainer.get("max_grad_norm", 1.0)) or float("inf")
        norms.append(norm_of(accelerator.clip_grad_norm_(model.parameters(), norm)))
        trained.step()
        trained.zero_grad()
        recorder.end_step(bare)
    recorder.close(norms=norms, sums_tokens=True)


def _loss(model: nn.Module, batch: dict[str, Tensor], tokens: int) -> Tensor:
    """Return the losses of a batch's tokens, added up and divided by the number of tokens of all batches."""
    bare: Any = getattr(model, "module", model)
    bare = bare.get_base_model() if hasattr(bare, "get_base_model") else bare
    kinds = {parameter.kind for parameter in inspect.signature(type(bare).forward).parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        summed: Tensor = model(**batch, num_items_in_batch=tokens).loss
        return summed
    mean: Tensor = model(**batch).loss
    return mean * tokens_of(batch) / tokens


if __name__ == "__main__":
    main()
