"""bitsandbytes' Adam and AdamW, paged or not: what is used of these optimizers. Checked with 0.50.

Their state of a tensor, beside a count of steps: `state1` and `state2`, the two moments, in float32 where the tensor
is small, else codes in uint8. A code is a number of a level of `qmap1` or `qmap2`, which is multiplied by the largest
magnitude of a block of 256 values, `absmax1` or `absmax2`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


MODULE = "bitsandbytes.optim.optimizer"
NESTED = "__bnb_optimizer_quant_state__"  # under which their `state_dict()` has it
MOMENTS = {"state1": "exp_avg", "state2": "exp_avg_sq"}  # as torch's Adam and AdamW name them
NOT_MOMENTS = ("step", "qmap1", "qmap2", "absmax1", "absmax2")
BLOCK = 256


def is_low_bit(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is any of bitsandbytes', in 8 or in 32 bits."""
    library = sys.modules.get(MODULE)
    return library is not None and isinstance(optimizer, vars(library)["Optimizer8bit"])


def is_adam(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is bitsandbytes' Adam or AdamW, whose update of a block needs no other block."""
    if not is_low_bit(optimizer):
        return False
    own: Any = optimizer
    return getattr(own, "optimizer_name", "") == "adam" and not own.args.max_unorm


def classes_with_steps() -> Iterator[type[Optimizer]]:
    """Yield the class from which all of bitsandbytes' have their step, and those into which torch has put it."""
    waiting: list[Any] = [vars(sys.modules[MODULE])["Optimizer8bit"]]
    for each in waiting:
        waiting += each.__subclasses__()
        if "step" in vars(each):
            yield each


def note_overrides(optimizer: Any) -> None:
    """Let settings of single parameters (`GlobalOptimManager`) stand by the places of the parameters in their groups.

    They are known by `id(parameter)` else, which shards do not have. Trainer makes one for each embedding.
    """
    manager = optimizer.mng
    if not optimizer.initialized:
        optimizer.check_overrides()
    if manager.pid2config:
        manager.register_parameters(optimizer.param_groups)


def refuse_norms(optimizer: Any) -> None:
    """Refuse a step that is scaled by the norms of single parameters.

    Raises:
        ValueError: a setting of a single parameter asks for it.
    """
    if any(settings.get("max_unorm") for settings in optimizer.mng.index2config.values()):
        raise ValueError(
            "max_unorm of bitsandbytes' GlobalOptimManager is not supported over a grid: it compares norms of whole "
            "parameters. Omit it, or clip gradients (max_grad_norm)."
        )


def skip_empty(optimizer: Any) -> None:
    """Take the step of parameters without elements, for which a kernel cannot be launched, and their gradients."""
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter.grad is not None and not parameter.numel():
                if not optimizer.state[parameter]:
                    optimizer.init_state(group, parameter, number, place)
                optimizer.state[parameter]["step"] += 1
                parameter.grad = None


def state_of(optimizer: Any, tensor: Tensor, place: tuple[int, int], moments: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the state of a tensor that has moments in float32, which are quantized if the tensor's are to be.

    Args:
        tensor: a parameter, or a shard of one.
        place: number of the group, and of the parameter in it.
        moments: `step`, and by torch's names the moments, of the tensor's shape, on any device.
    """
    optimizer.init_state(optimizer.param_groups[place[0]], tensor, *place)
    state = optimizer.state.pop(tensor)
    state["step"] = int(moments["step"])
    for key, name in MOMENTS.items():
        values = moments[name]
        if state[key].dtype == torch.uint8:
            from bitsandbytes.functional import quantize_blockwise

            scales, levels = (state[key.replace("state", kind)] for kind in ("absmax", "qmap"))
            values = values.to(scales.device, torch.float32).contiguous()
            values, found = quantize_blockwise(values, code=levels, blocksize=BLOCK)
            scales.copy_(found.absmax)
        state[key].copy_(values)
    return state


def moments_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `state_of` takes: the steps, and both moments in float32 in host memory, as torch's AdamW has them.

    Quantized again, they are the same codes and scales. Codes of the lowest level, -0.993, stand for -1 there: only so
    does a block whose largest magnitude is negative keep its scale. (The kernel for CPUs looks levels up in a table of
    16 bits, and finds 6.6e-5 in the place of 8.9e-5.)
    """
    moments: dict[str, Any] = {"step": torch.tensor(float(state["step"]))}
    for key, name in MOMENTS.items():
        values = state[key]
        if values.dtype == torch.uint8:
            from bitsandbytes.functional import dequantize_blockwise

            scales, levels = (state[key.replace("state", kind)] for kind in ("absmax", "qmap"))
            levels = torch.where(levels == levels.min(), -1.0, levels) if levels.min() < 0 else levels
            # Paged codes lie where both devices reach them, and say that they are on the CPU.
            values = dequantize_blockwise(values.to(scales.device), absmax=scales, code=levels, blocksize=BLOCK)
        moments[name] = values.cpu()
    return moments
