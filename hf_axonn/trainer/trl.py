"""What TRL's trainers must do otherwise for a parallelized model, or with the goldfish loss, and not else.

SFTTrainer replaces `model.forward` by one that multiplies the whole of `lm_head.weight` itself (`add_fused_lm_head`).
For a DTensor it takes `full_tensor()`, a weight that is whole on every rank and whose gradient is not summed over z.
Here that function puts our statistics (fused_head.py) in the place of its own wherever the model's loss is ours, and
leaves all others as they are.

Checked with trl 1.16.0 (trainer/utils.py, trainer/sft_trainer.py).
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from torch import nn

from hf_axonn.engine.state import is_parallelized
from hf_axonn.losses.causal_lm import CausalLMLoss
from hf_axonn.losses.vocab_parallel import ShardedCausalLMLoss
from hf_axonn.topology.grid import Grid
from hf_axonn.trainer.fused_head import plain_label_statistics, sharded_label_statistics


RELEASE = "1.16"
MODULE = "trl.trainer.utils"
SERVED = ("log_probs", "entropy", "is_top1")
TRAINERS = ("SFTTrainer", "_BaseTrainer")  # of TRL, that train over a grid


def install() -> bool:
    """Wrap `add_fused_lm_head` in all modules of TRL that have it, once. Returns whether TRL is there."""
    utils = sys.modules.get(MODULE)
    original = getattr(utils, "add_fused_lm_head", None)
    if original is None:  # not imported, or half executed
        return False
    if not hasattr(original, "of_trl"):
        wrapped = functools.wraps(original)(functools.partial(_add_fused_lm_head, original))
        wrapped.of_trl = original
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "trl" and vars(module).get("add_fused_lm_head") is original:
                module.add_fused_lm_head = wrapped
    return True


def check_trainer(trainer: object, grid: Grid) -> None:
    """Refuse a trainer of TRL, over a grid, that nobody has compared with one process. Nothing for others.

    Raises:
        ValueError: it is not SFTTrainer, or TRL is of another release than this file was checked with.
    """
    names = [its.__name__ for its in type(trainer).__mro__ if its.__module__.partition(".")[0] == "trl"]
    for name in names:
        if name not in TRAINERS:
            raise ValueError(f"{name} of TRL is not supported over a grid ({grid}): of its trainers SFTTrainer is.")
    if names and not version("trl").startswith(RELEASE + "."):
        raise ValueError(
            f"trl {version('trl')} is not supported over a grid ({grid}): install trl {RELEASE}, as in "
            f'pip install "trl=={RELEASE}.*".'
        )


def _add_fused_lm_head(
    original: Callable,
    model: nn.Module,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
) -> None:
    """TRL's function; the forward it leaves on the model asks at each call whose loss the model has.

    Raises:
        ValueError: the model is parallelized and something is asked for that is not served.
    """
    if is_parallelized(model):
        _check(model, temperature, cast_lm_head_to_fp32, outputs)
    own = model.forward
    original(model, temperature=temperature, cast_lm_head_to_fp32=cast_lm_head_to_fp32, outputs=outputs)
    theirs = model.forward

    # Under the signature of the model's class, like the forward that it stands for.
    @functools.wraps(type(model).forward)
    def forward(self, *args, fused_lm_head: bool = False, **kwargs):
        loss = getattr(self, "loss_function", None) if fused_lm_head else None
        if fused_lm_head and is_parallelized(self):
            _check(self, temperature, cast_lm_head_to_fp32, outputs)
            return _output(self, kwargs, functools.partial(_sharded, self, own, args))
        if isinstance(loss, CausalLMLoss) and set(SERVED) <= set(outputs):
            return _output(self, kwargs, functools.partial(_plain, loss, theirs, args))
        return theirs(*args, fused_lm_head=fused_lm_head, **kwargs)

    model.forward = types.MethodType(forward, model)


def _check(model: nn.Module, temperature: float, cast_lm_head_to_fp32: bool, outputs: tuple[str, ...]) -> None:
    more = sorted(set(outputs) - set(SERVED))
    asked = {f"outputs={more}": more, f"temperature={temperature}": temperature != 1.0}
    asked["cast_lm_head_to_fp32=True"] = cast_lm_head_to_fp32
    for name, refused in asked.items():
        if refused:
            raise ValueError(
                f"TRL's fused head with {name} is not supported for a model that is sharded over a grid: of TRL's "
                "trainers only SFTTrainer is."
            )
    if not isinstance(getattr(model, "loss_function", None), ShardedCausalLMLoss):
        raise ValueError(
            f"{type(model).__name__} does not take Transformers' loss of causal language models, so TRL cannot train "
            "it over a grid."
        )


def _sharded(model: nn.Module, forward: Callable, args: tuple, labels, shift_labels, **inputs: Any):
    return sharded_label_statistics(model, functools.partial(forward, *args), labels, shift_labels, **inputs)


def _plain(loss: CausalLMLoss, fused: Callable, args: tuple, labels, shift_labels, **inputs: Any):
    def ask(its: dict):
        return fused(*args, fused_lm_head=True, **its, **inputs)

    return plain_label_statistics(loss, ask, labels, shift_labels)


def _output(model: nn.Module, inputs: dict[str, Any], statistics: Callable):
    """The output that TRL's own forward would return."""
    from trl.trainer.utils import FusedCausalLMOutput

    inputs = {"use_cache": False, **inputs}
    items = inputs.get("num_items_in_batch")
    config = model.config.get_text_config()
    wants_aux = inputs.get("output_router_logits", getattr(config, "output_router_logits", False))
    its = statistics(inputs.pop("labels", None), inputs.pop("shift_labels", None), **inputs)
    loss = -its.log_probs.sum() / (its.mask.sum().clamp(min=1) if items is None else items)
    if wants_aux:
        if its.aux_loss is None:
            raise ValueError(
                f"{type(model).__name__} returns no auxiliary loss of its router: set router_aux_loss_coef=0.0."
            )
        loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * its.aux_loss
    return FusedCausalLMOutput(
        loss=loss,
        log_probs=its.log_probs,
        entropy=its.entropy,
        is_top1=its.is_top1,
        label_mask=its.mask,
        aux_loss=its.aux_loss if wants_aux else None,
    )
