"""Liger's kernels on a parallelized model: those that work on each token by itself, in the place of its own code.

    RMSNorm           every token of this rank; where its features are divided over y, layers/norms.py stays
    SwiGLU, GeGLU     between the column and the row layer of an MLP, on this rank's features
    RoPE              on this rank's heads
    losses            off: they multiply or read the whole head, and a rank has a part of it
    experts           off: their kernel multiplies the whole weights of all experts

Trainer has a model patched when training starts, after it has been sharded: Liger puts its forwards on MLPs and norms.
Here they go inside of everything that stands around those modules by then, so that blocks still lay out their input
and norms still find plain parameters.

Checked with liger-kernel 0.8.5 (transformers/monkey_patch.py) and transformers 5.20 to 5.24 (trainer.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from hf_axonn.compat.peft import without_peft
from hf_axonn.compat.replaced import replace_attributes
from hf_axonn.compat.versions import check_versions
from hf_axonn.engine.state import parallel_state
from hf_axonn.layers.base import moved_inside, replaced
from hf_axonn.topology.grid import Grid


LOSSES = ("cross_entropy", "fused_linear_cross_entropy")
# Types of models that were compared with one process, and the kernel of their MLPs; none for experts.
MODELS = {
    **dict.fromkeys(("granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"), "swiglu"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), "geglu"),
    **dict.fromkeys(("mixtral", "qwen3_moe"), ""),
}
ACTIVATIONS = {"swiglu": ("silu", "swish"), "geglu": ("gelu_pytorch_tanh",)}  # that the kernels compute, always


def without_losses(config: dict[str, bool] | None, why: str) -> dict[str, bool]:
    """Return `liger_kernel_config` with Liger's losses off.

    Args:
        why: what does not go together with them.
    Raises:
        ValueError: it asks for one of them.
    """
    for name in LOSSES:
        if (config or {}).get(name):
            raise ValueError(f"liger_kernel_config={{'{name}': True}} does not go together with {why}: omit it.")
    return {**(config or {}), **dict.fromkeys(LOSSES, False)}


def check(args: Any, dynamo: str, model: nn.Module | None, grid: Grid) -> None:
    """Refuse what `use_liger_kernel` cannot do over a grid, and turn off the kernels that it leaves out.

    Args:
        args: TrainingArguments with use_liger_kernel; its `liger_kernel_config` is filled in.
        dynamo: the backend of torch.compile, "NO" for none.
        model: None where it is still to be made.
    Raises:
        ValueError: there is no GPU, the package is missing or not proven, the model is to be compiled or none of
            `MODELS`, or another kernel is requested.
    """
    from transformers.utils.import_utils import is_liger_kernel_available

    reason = ""
    if args.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        reason = "its kernels are Triton's, which need a GPU: omit it on CPUs"
    elif not is_liger_kernel_available():
        reason = "liger-kernel is not installed: pip install 'hf_axonn[liger]'"
    elif dynamo != "NO":
        reason = "it has not been compared with torch.compile: omit one of them"
    if reason:
        raise ValueError(f"use_liger_kernel is not supported over this grid ({grid}): {reason}.")
    check_versions("liger-kernel")
    args.liger_kernel_config = _settings(model, args.liger_kernel_config)


def apply_liger_kernel(original: Callable, model: nn.Module, kernel_config: dict[str, bool] | None) -> None:
    """Wrap Transformers' function of this name, which Trainer calls when training starts, for parallelized models.

    Its classes in the module of the model, which Liger replaces as well, are put back: what is built later is probed,
    sharded and patched like this one. Rotary embedding is a function there, which stays Liger's. No communication.

    Raises:
        ValueError: the model is compiled, or as `check`.
    """
    state = parallel_state(model)
    if state is None:
        return original(model, kernel_config)
    if state.compile_options is not None:
        raise ValueError("use_liger_kernel on a model that torch.compile has compiled already: omit one of them.")
    inner: Any = without_peft(model)
    settings = _settings(inner, kernel_config)
    decoder = getattr(inner, inner.base_model_prefix, inner)
    modeling = sys.modules[type(decoder).__module__]
    classes = {(modeling, name): value for name, value in vars(modeling).items() if isinstance(value, type)}
    with moved_inside(inner), replace_attributes(classes), replaced(decoder._modules, _drop_other_stages(decoder)):
        return original(model, settings)


def _settings(model: nn.Module | None, config: dict[str, bool] | None) -> dict[str, bool]:
    """Return `config` with everything off that a parallelized model cannot have.

    Raises:
        ValueError: the model is none of `MODELS`, or something that is off here is asked for.
    """
    settings = without_losses(config, "a head that is sharded over a grid")
    if model is None:
        return settings
    own: Any = getattr(without_peft(model), "config", None)
    kind = getattr(own, "model_type", type(model).__name__)
    if kind not in MODELS:
        raise ValueError(
            f"use_liger_kernel with a model of type {kind} is not supported over a grid: nobody has compared it with "
            f"one process. Of the types that Liger knows, {', '.join(sorted(MODELS))} are."
        )
    kernel = MODELS[kind]
    if not kernel:
        if settings.get("swiglu"):
            raise ValueError(
                "liger_kernel_config={'swiglu': True} does not go together with experts that are sharded over a grid, "
                "of which its kernel multiplies the whole weights: omit it."
            )
        return settings | {"swiglu": False}
    activation = getattr(own, "hidden_activation", None) or own.hidden_act
    if settings.get(kernel, True) and activation not in ACTIVATIONS[kernel]:
        raise ValueError(
            f"Liger's {kernel} computes {ACTIVATIONS[kernel][0]}, but this model has {activation}: set "
            f"liger_kernel_config={{'{kernel}': False}}."
        )
    return settings


def _drop_other_stages(decoder: nn.Module) -> dict[str, nn.Module]:
    """Return the children of a decoder without the stand-ins for modules of other stages, which have no parts."""
    own: dict[str, nn.Module] = {}
    for name, child in decoder.named_children():
        if isinstance(child, nn.ModuleList):
            own[name] = nn.ModuleList(each for each in child if not getattr(each, "elsewhere", False))
        elif getattr(child, "elsewhere", False):
            own[name] = nn.Identity()  # what is put on it is put nowhere
    return own
