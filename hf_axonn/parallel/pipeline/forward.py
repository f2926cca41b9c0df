"""The forward of a model that is divided into stages, as scripts call it.

in training with labels   a schedule: the rows of the batch are its micro-batches
else                      one stage after another; also for the auxiliary loss of routers, which is no sum over rows
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_axonn.compat.messages import get_logger
from hf_axonn.distributed.collectives import world_rank
from hf_axonn.engine.gradient_sync import watch_backward
from hf_axonn.layers.base import patch_forward
from hf_axonn.layers.vocabulary import DeferredLogits, check_vocabulary
from hf_axonn.losses.causal_lm import IGNORE_INDEX, kept_labels
from hf_axonn.losses.router_aux import check_routers
from hf_axonn.losses.vocab_parallel import ShardedCausalLMLoss
from hf_axonn.parallel.pipeline.pipeline import Pipeline


logger = get_logger(__name__)
ROUNDS = 4  # micro-batches for each stage, from which on a fifth of a step or less is waiting
REFUSED = ("inputs_embeds", "past_key_values", "output_hidden_states", "output_attentions")


class NoLogits(DeferredLogits):
    """Logits of a pass of a schedule, which its last stage alone forms, chunk by chunk: any use is refused."""

    dtype = torch.float32  # accelerate looks for halves in outputs

    def __init__(self) -> None:
        pass

    def full(self) -> Tensor:
        raise ValueError(
            "in training with labels, a grid with pipe returns the loss alone: to use the logits, call the model "
            "without labels, and compute the loss from its logits."
        )


def install_pipeline(model: nn.Module, pipeline: Pipeline) -> None:
    """Let a model's forward pass go through all of its stages. The last patch of its forward."""
    patch_forward(pipeline.stages.decoder, functools.partial(_decoder, pipeline))
    signature = inspect.signature(model.forward)

    def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if pipeline.state.context.stage is not None:
            return original(*args, **kwargs)
        given = _arguments(pipeline, signature, args, kwargs)
        _check_tokens(model, pipeline, given)
        trains = model.training and torch.is_grad_enabled() and _labels(given) is not None
        if trains and pipeline.experts_of(given):
            _warn_of_routers(pipeline)
        elif trains:
            return _run_schedule(model, pipeline, original, given)
        return pipeline.one_after_another(functools.partial(original, **given))

    patch_forward(model, forward)
    if hasattr(model, "generate"):
        vars(model)["generate"] = _refuse_generate


def _decoder(pipeline: Pipeline, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if pipeline.state.context.stage is None:
        raise ValueError(
            "a decoder was called without its model, but over a grid with pipe this rank has the layers of its own "
            "stages only: call the model, whose logits all ranks get, or use a grid without pipe."
        )
    return original(*args, **kwargs)


def _warn_of_routers(pipeline: Pipeline) -> None:
    if world_rank() == 0:
        _warn_once(
            "the auxiliary loss of routers is of a whole batch and no sum over its rows, so this loop's batches go "
            f"through the {pipeline.stages.total} stages one after another, and most of the time all but one wait. "
            "Under Trainer the batches of an accumulation step are a pipeline; so are the rows of a batch with "
            "output_router_logits=False, which omits this loss."
        )


def _refuse_generate(*_: Any, **__: Any) -> None:
    raise ValueError(
        "generate is not possible over a grid with pipe: each stage would need the caches of the others. Write the "
        "model with save_pretrained, and generate from that on one process or on a grid without pipe."
    )


def _arguments(
    pipeline: Pipeline, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return what the model is called with, by name.

    Raises:
        ValueError: something that a pipeline cannot have.
    """
    given = signature.bind(*args, **kwargs).arguments
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(parameter.name, {})
    for name in REFUSED:
        if given.get(name) is not None and given[name] is not False:
            raise ValueError(f"{name} is not possible over a grid with pipe: omit it.")
    if given.get("output_router_logits"):
        check_routers(pipeline.model, pipeline.state.grid)
    if given.get("return_dict") is False:
        raise ValueError("return_dict=False is not possible over a grid with pipe: omit it.")
    if not isinstance(given.get("input_ids"), Tensor):
        raise ValueError("over a grid with pipe a model is called with input_ids, which its stages all read.")
    return {**given, "use_cache": False}


def _check_tokens(model: nn.Module, pipeline: Pipeline, given: dict[str, Any]) -> None:
    """Refuse on every stage what only the first or the last would: the others would wait for it.

    Raises and communicates as `check_vocabulary`.
    """
    size, mesh = pipeline.stages.vocabulary, pipeline.state.grid_mesh
    check_vocabulary(given["input_ids"], size, "token id", mesh, training=model.training)
    labels = _labels(given)
    if labels is not None:
        check_vocabulary(labels, size, "label", mesh, training=model.training, ignored=IGNORE_INDEX)


def _labels(given: dict[str, Any]) -> Tensor | None:
    return given.get("labels") if given.get("shift_labels") is None else given["shift_labels"]


def _run_schedule(
    model: nn.Module, pipeline: Pipeline, original: Callable[..., Any], given: dict[str, Any]
) -> CausalLMOutputWithPast:
    """The loss of a batch whose rows are the micro-batches. One of too few is filled up with rows that count nothing.

    Raises:
        ValueError: a model whose loss is not a sum over tokens that is known.
    """
    loss_function = getattr(model, "loss_function", None)
    if not isinstance(loss_function, ShardedCausalLMLoss):
        raise ValueError(
            f"{type(model).__name__} has a loss of its own, of which it is not known how the losses of micro-batches "
            "make that of a batch: use a grid without pipe, or compute the loss from the logits."
        )
    labels = _labels(given)
    assert labels is not None
    kept = kept_labels(labels, shifted=given.get("shift_labels") is not None)
    given = _fill_up(given, pipeline)
    rows, seq = given["input_ids"].shape
    parts = micro_batches(rows, pipeline)
    size = rows // parts

    def run(index: int) -> Tensor:
        with loss_function.watch_rows(index * size, (index + 1) * size):
            return cast(Tensor, original(**part_of(given, rows, parts, index)).loss)

    calls = [functools.partial(run, index) for index in range(parts)]
    with loss_function.part_of(kept):
        losses, gradients = pipeline.train(calls, size, seq)
    loss = gradients.loss(losses.sum())
    watch_backward(model, pipeline.state, loss)
    return CausalLMOutputWithPast(loss=loss, logits=cast(Any, NoLogits()))


def _fill_up(given: dict[str, Any], pipeline: Pipeline) -> dict[str, Any]:
    """Add rows without labels to a batch until the schedule takes it: the last one of an epoch may be small."""
    rows = len(given["input_ids"])
    needed = next(number for number in itertools.count(rows) if divisions(number, pipeline))
    if needed == rows:
        return given
    if world_rank() == 0:
        _warn(rows, needed, pipeline.state.grid.pipe, pipeline.state.config.schedule)
    return {name: with_rows(name, value, needed) if by_row(value, rows) else value for name, value in given.items()}


def with_rows(name: str, value: Tensor, rows: int) -> Tensor:
    """Return a part of a batch with this number of rows: the first one again, as labels such that count nothing."""
    more = value[:1].expand(rows - len(value), *value.shape[1:])
    return torch.cat([value, torch.full_like(more, IGNORE_INDEX) if is_labels(name) else more])


def is_labels(name: str) -> bool:
    """Return whether an argument of a model is labels or shift_labels."""
    return name.endswith("labels")


def by_row(value: Any, rows: int) -> bool:
    """Return whether an argument of a model has something for each row of its batch."""
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == rows


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _warn(rows: int, needed: int, pipe: int, schedule: str) -> None:
    _warn_once(
        f"a batch of {rows} row(s) is too short for pipe={pipe} and schedule {schedule} and was filled up to {needed} "
        "with rows that count nothing. Unless this was the end of an epoch, give each (data, z) position more."
    )


def micro_batches(rows: int, pipeline: Pipeline) -> int:
    """Return the number of micro-batches of a batch of these rows: `ROUNDS` for each stage if there are enough."""
    possible = divisions(rows, pipeline)
    return next((parts for parts in possible if parts >= ROUNDS * pipeline.state.grid.pipe), possible[-1])


def divisions(rows: int, pipeline: Pipeline) -> list[int]:
    """Return the numbers of micro-batches that a batch of these rows can have, in ascending order."""
    return [parts for parts in range(1, rows + 1) if rows % parts == 0 and pipeline.takes(parts)]


def part_of(given: dict[str, Any], rows: int, parts: int, index: int) -> dict[str, Any]:
    """The rows of one of `parts` micro-batches; what has no row for each of the batch's stays whole."""
    size = rows // parts
    return {
        name: value[index * size : (index + 1) * size] if by_row(value, rows) else value
        for name, value in given.items()
    }
