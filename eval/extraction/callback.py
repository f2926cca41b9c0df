"""`ExtractionCallback`: measures how much of a probe set a model gives back while it trains.

    probe = build_samples(documents, tokenizer=tokenizer, prefix_length=32, suffix_length=32)
    trainer.add_callback(ExtractionCallback(trainer, probe, every=100))

It works with Transformers' Trainer and with GoldfishTrainer, on one process and on a grid, where all ranks take part.
What it measures goes through `trainer.log`, and so to every tracker and into trainer_state.json.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl

from hf_axonn_eval.data.results import SampleResult
from hf_axonn_eval.data.samples import Sample
from hf_axonn_eval.extraction.decoding import check_decoding
from hf_axonn_eval.extraction.extract import extract
from hf_axonn_eval.extraction.work_split import WorkSplit
from hf_axonn_eval.metrics.registry import value


LOGGED = ("exact_match", "near_verbatim", "rougeL", "token_accuracy", "nll")
PREFIX = "eval_extraction_"  # trackers put what begins with eval_ into a group of its own


class ExtractionCallback(TrainerCallback):
    """Extraction on a probe set every `every` steps, or with every evaluation.

    It logs `eval_extraction_<metric>` over all samples and `eval_extraction_<metric>_<bucket>x` for each bucket, if
    there are several, for each of LOGGED that is measured, and `eval_extraction_seconds`. With every evaluation these
    are among its metrics, too, so that `metric_for_best_model` may name one.

    Training continues as if nothing had been measured, to the bit: random states, the mode of every module and the
    gradients are left as they were.

    Args:
        trainer: whose model is asked and whose `log` is called.
        samples: the probe set; the same on every rank.
        every: optimizer steps between two measurements; None: with every evaluation.
        at_start: also before the first step. Without `every` that is what `eval_on_start` is for.
        generate: whether to decode as well, which ROUGE and near-verbatim need, and which takes longer.
        batch_size: samples in one forward pass on a rank.
        tokenizer: for ROUGE; by default the trainer's, if it is one.
        output: directory that keeps the results of each measurement, as a run in `step-<step>`; None: only what is
            logged stays.
        fingerprint: text that names the training, for these runs; needed with `output`. A training that is resumed
            has the same, and any other training another one, so that results of other weights are refused.
    Raises:
        ValueError: no samples, `every` or `batch_size` below 1, `at_start` without `every`, `output` without
            `fingerprint`, or a trainer with FSDP or DeepSpeed.
    Collectives: those of `extract`, and a broadcast over the world.
    """

    def __init__(
        self,
        trainer,
        samples: Sequence[Sample],
        *,
        every: int | None = None,
        at_start: bool = False,
        generate: bool = False,
        batch_size: int = 8,
        tokenizer=None,
        output: str | os.PathLike[str] | None = None,
        fingerprint: str | None = None,
    ) -> None:
        for name, number in (("every", every), ("batch_size", batch_size)):
            if number is not None and number < 1:
                raise ValueError(f"{name} is {number}, but it must be at least 1.")
        if not samples:
            raise ValueError("there are no samples to ask: the probe set is empty.")
        if at_start and every is None:
            raise ValueError("at_start needs every=<steps>; with every evaluation, set eval_on_start of the Trainer.")
        if output is not None and not fingerprint:
            raise ValueError("output=... needs fingerprint=..., a text that names the training, such as its settings.")
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise ValueError("ExtractionCallback does not work with FSDP or DeepSpeed: use an axonn_config, or none.")
        self.trainer = trainer
        self.samples = list(samples)
        self.every = every
        self.at_start = at_start
        self.generate = generate
        self.batch_size = batch_size
        found = tokenizer if tokenizer is not None else getattr(trainer, "processing_class", None)
        self.tokenizer = found if hasattr(found, "decode") else None
        self.output = Path(output) if output is not None else None
        self.fingerprint = fingerprint
        self._measured: tuple[int, dict[str, float]] | None = None  # step, and what was measured with its evaluation

    def on_train_begin(self, args, state, control, **kwargs: Any) -> None:
        """Measure before the first step, if asked.

        Raises:
            ValueError: the grid has stages, or context and `generate` is set.
        """
        WorkSplit.for_model(self.trainer.model)
        check_decoding(self.trainer.model, generate=self.generate)
        if self.at_start and state.global_step == 0:
            self._log(control)

    def on_step_end(self, args, state, control, **kwargs: Any) -> None:
        """Measure after every `every`-th optimizer step."""
        if self.every is not None and state.global_step % self.every == 0:
            self._log(control)

    def on_evaluate(self, args, state, control, metrics: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Measure with every evaluation, and put it among its metrics."""
        if self.every is not None:
            return
        # a Trainer with several evaluation sets calls for each of them
        if not self.trainer.is_in_train or self._measured is None or self._measured[0] != state.global_step:
            self._measured = (state.global_step, self._log(control))
        if metrics is not None:
            metrics.update(self._measured[1])

    def measure(self) -> dict[str, float]:
        """Measure now, and return what is logged; the same on every rank."""
        start = time.perf_counter()
        model, step = self.trainer.model, self.trainer.state.global_step
        record = {"fingerprint": f"{self.fingerprint}, step {step}"} if self.output is not None else None
        with _preserve_state(model):
            results = extract(
                model,
                self.tokenizer,
                self.samples,
                batch_size=self.batch_size,
                generate=self.generate,
                output=self.output / f"step-{step}" if self.output is not None else None,
                model_record=record,
                progress=False,
            )
            found = WorkSplit.for_model(model).on_rank_zero(lambda: self.summarize(results))
        return found | {f"{PREFIX}seconds": round(time.perf_counter() - start, 4)}

    def summarize(self, results: Sequence[SampleResult]) -> dict[str, float]:
        """Return what is logged of the results, on rank 0."""
        return _means(results)

    def _log(self, control: TrainerControl) -> dict[str, float]:
        found = self.measure()
        awaited = control.should_log
        self.trainer.log(dict(found))
        control.should_log = awaited  # a log takes this back, and with it the log of the loss of this step
        return found


def _means(results: Sequence[SampleResult]) -> dict[str, float]:
    """Return means over all samples and over those of each bucket, by the name in the log."""
    groups = {"": list(results)}
    buckets = sorted({result.bucket for result in results})
    if len(buckets) > 1:
        groups |= {f"_{bucket}x": [result for result in results if result.bucket == bucket] for bucket in buckets}
    means = {}
    for suffix, some in groups.items():
        for metric in LOGGED:
            values = [number for result in some if (number := value(result, metric)) is not None]
            if values:
                means[f"{PREFIX}{metric}{suffix}"] = sum(values) / len(values)
    return means


@contextmanager
def _preserve_state(model: nn.Module) -> Iterator[None]:
    """Restore random states and the mode of every module afterwards; no gradient is recorded inside."""
    modes = [(module, module.training) for module in model.modules()]
    python, numpy_state = random.getstate(), np.random.get_state()
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=list(devices)), torch.no_grad():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
        for module, training in modes:
            module.training = training
