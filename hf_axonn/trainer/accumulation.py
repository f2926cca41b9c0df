"""Gradient accumulation over pipe: the batches of a step are the micro-batches of one schedule.

Trainer takes all batches of a step before it runs the first. So the first `training_step` runs them all, forward and
backward, each returns the loss of its batch as the stock method does, and the last one adds the gradients. What is
computed for a batch is what the stock method computes, up to its backward pass.

Each batch is a pipeline of its rows instead where the schedule cannot run so many batches, and where the loss is not
the model's own: other code may need the logits, or ranks that wait for each other. A step that is too short for
either, as the last of an epoch may be, is filled up with batches that count nothing.

Each function wraps the method of Trainer that has its name (hooks.py). Checked with transformers 5.20 to 5.24.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_axonn.compat.messages import get_logger
from hf_axonn.compat.replaced import replace_attributes
from hf_axonn.distributed.collectives import world_rank
from hf_axonn.engine.gradient_sync import watch_backward
from hf_axonn.losses.causal_lm import IGNORE_INDEX
from hf_axonn.losses.vocab_parallel import ShardedCausalLMLoss
from hf_axonn.parallel.pipeline.forward import by_row, divisions, is_labels, with_rows
from hf_axonn.parallel.sharded_model import ShardedModel, sharded_model
from hf_axonn.trainer.smoothing import loss_to_smooth


logger = get_logger(__name__)
Batch = dict[str, Any]

# Padding of keys with a value for each token.
PADS = {"attention_mask": 0, "position_ids": 0, "seq_idx": -1, "token_type_ids": 0, "loss_weights": 0}


def get_batch_samples(self, original: Callable, *args, **kwargs):
    """Note the batches of a step."""
    batches, items = original(*args, **kwargs)
    state = sharded_model(self.model)
    self._axonn_step = None
    if state is not None and state.pipeline is not None and batches:
        self._axonn_step = AccumulatedStep(state, batches)
    return batches, items


def training_step(self, original: Callable, model: nn.Module, inputs: Batch, *args, **kwargs) -> Tensor:
    """Return the loss of a batch; the first of a step runs all batches."""
    step: AccumulatedStep | None = getattr(self, "_axonn_step", None)
    if step is not None and step.begins_with(inputs):
        if not _runs_together(self, model, step):
            self._axonn_step = step = None
        else:
            step.run(self, lambda batch: _loss(self, original, model, batch, args, kwargs))
    if step is None or step.losses is None:
        return original(model, inputs, *args, **kwargs)
    return step.next(self, inputs)


def _runs_together(trainer, model: nn.Module, step: AccumulatedStep) -> bool:
    """Return whether the batches of a step can be the micro-batches of one schedule."""
    own = [owner.__module__ for owner in type(trainer).__mro__ if "compute_loss" in vars(owner)]
    if "compute_loss" in vars(trainer) or trainer.compute_loss_func is not None:
        return False
    if any(name.partition(".")[0] not in ("transformers", "hf_axonn") for name in own):
        return False
    model.train()
    if trainer.label_smoother is not None and loss_to_smooth(trainer, model, step.batches[0]) is None:
        return False
    tokens = all(isinstance(batch.get(name), Tensor) for batch in step.batches for name in ("input_ids", "labels"))
    loss = getattr(step.pipeline.model, "loss_function", None)
    return tokens and isinstance(loss, ShardedCausalLMLoss) and (step.fits() or not step.rows_fit())


def _loss(trainer, original: Callable, model: nn.Module, batch: Batch, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Return the loss on which the stock `training_step` calls backward."""
    found: list[Tensor] = []
    with replace_attributes({(trainer.accelerator, "backward"): lambda loss, **_: found.append(loss)}):
        original(model, dict(batch), *args, **kwargs)
    return found[0]


class AccumulatedStep:
    """The batches of an optimizer step.

    Attributes:
        losses: of the batches, when they have run; None before.
    """

    def __init__(self, state: ShardedModel, batches: list[Batch]) -> None:
        assert state.pipeline is not None
        self.state = state
        self.pipeline = state.pipeline
        self.batches = batches
        self.losses: Tensor | None = None
        self._taken = 0

    def begins_with(self, inputs: Batch) -> bool:
        """Return whether nothing has run, and this is the first batch, as it was noted."""
        return self.losses is None and inputs is self.batches[0]

    def fits(self) -> bool:
        """Return whether a schedule runs this number of batches, and it is more than one."""
        return len(self.batches) > 1 and self.pipeline.takes(len(self.batches))

    def rows_fit(self) -> bool:
        """Return whether each batch can be a pipeline of its rows."""
        return all(divisions(len(batch["input_ids"]), self.pipeline) for batch in self.batches)

    def run(self, trainer, loss_of: Callable[[Batch], Tensor]) -> None:
        """Run all batches forward and backward. Collectives: those of `Pipeline.train` and of the batch check."""
        batches = pad_alike(self.batches, getattr(trainer.processing_class, "pad_token_id", None) or 0)
        if not self.fits():
            batches = self._fill_up(batches)
        named = {
            f"{name} of batch {number}": value for number, batch in enumerate(batches) for name, value in batch.items()
        }
        self.state.check_batch((), named)
        real = [tuple(batch["input_ids"].shape) for batch in self.batches]
        real += [(0, 0)] * (len(batches) - len(real))
        calls = [functools.partial(self._call, loss_of, *pair) for pair in zip(batches, real, strict=True)]
        (rows, columns), experts = batches[0]["input_ids"].shape, self.pipeline.experts_of(batches[0])
        with trainer.accelerator.autocast():
            self.losses, self.gradients = self.pipeline.train(calls, rows, columns, experts)

    def _call(self, loss_of: Callable[[Batch], Tensor], batch: Batch, real: tuple[int, int]) -> Tensor:
        """Return the loss of a batch, and tell the stage its size before it was filled up."""
        assert self.state.context.stage is not None
        self.state.context.stage.set_real(*real)
        return loss_of(batch)

    def _fill_up(self, batches: list[Batch]) -> list[Batch]:
        """Return the batches, followed by batches without labels up to a number that the schedule takes."""
        total = next(number for number in itertools.count(len(batches)) if self.pipeline.takes(number))
        if world_rank() == 0:
            _warn(len(batches), len(batches[0]["input_ids"]), total, self.state.grid.pipe)
        nothing = {
            name: torch.full_like(value, IGNORE_INDEX) if is_labels(name) else value
            for name, value in batches[0].items()
        }
        return batches + [nothing] * (total - len(batches))

    def next(self, trainer, inputs: Batch) -> Tensor:
        """Return the loss of the next batch; with the last one run backward, so that gradients are averaged as ever.

        Raises:
            ValueError: it is another batch than the one that has run.
        """
        assert self.losses is not None
        if inputs is not self.batches[self._taken]:
            raise ValueError(
                f"training_step got another batch {self._taken} than get_batch_samples returned, but over a grid with "
                "pipe all batches of a step run together: change batches in the data collator or in get_batch_samples."
            )
        loss = self.losses[self._taken]
        self._taken += 1
        if self._taken == len(self.batches):
            total = self.gradients.loss(self.losses.sum())
            self.state.context.averaging.begin_pass()  # what held for earlier batches may not for this one
            watch_backward(self.pipeline.model, self.state, total)
            trainer.accelerator.backward(total)
        return loss


def from_last_stage(model: object, value: Tensor | None) -> Tensor | None:
    """Return what the ranks with the last stage have as `value`; without a pipeline `value` itself.

    Collectives: those of `Pipeline.from_last`.
    """
    state = sharded_model(model)
    return value if state is None or state.pipeline is None else state.pipeline.from_last(value)


@functools.cache
def _warn(batches: int, rows: int, total: int, pipe: int) -> None:
    logger.warning(
        f"a step of {batches} batch(es) of {rows} row(s) is too short for pipe={pipe} and was filled up to {total} "
        "batches with empty ones. Unless this was the end of an epoch, raise gradient_accumulation_steps."
    )


def pad_alike(batches: list[Batch], pad_token: int) -> list[Batch]:
    """Pad batches of [B, S] tokens to the most rows and columns of all; what is added is ignored.

    Raises:
        ValueError: a value for each token is of a kind that is not known.
    """
    shapes = [tuple(batch["input_ids"].shape) for batch in batches]
    rows, columns = (max(sizes) for sizes in zip(*shapes, strict=True))
    return [
        {name: _pad(name, value, shape, (rows, columns), pad_token, shapes) for name, value in batch.items()}
        for batch, shape in zip(batches, shapes, strict=True)
    ]


def _pad(
    name: str, value: Any, shape: tuple[int, ...], target: tuple[int, int], pad_token: int, shapes: list[tuple]
) -> Any:
    if not by_row(value, shape[0]):
        return value
    if shape[1] < target[1] and value.dim() > 1 and shape[1] in value.shape[1:]:
        pad = pad_token if name == "input_ids" else IGNORE_INDEX if is_labels(name) else PADS.get(name)
        if pad is None or value.dim() > 2:
            raise ValueError(
                f"{name} of shape {list(value.shape)} cannot be padded: over a grid with pipe the batches of a step "
                f"need one shape, and those of this step have {', '.join(str(list(each)) for each in shapes)} tokens. "
                "Let the data collator pad all of them to one length (padding='max_length')."
            )
        value = F.pad(value, (0, target[1] - shape[1]), value=pad)
    return with_rows(name, value, target[0]) if shape[0] < target[0] else value


WRAPPERS = (get_batch_samples, training_step)
