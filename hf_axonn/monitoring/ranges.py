"""Names by layer and collective, in traces of torch.profiler and as NVTX ranges on CUDA.

model.layers.3                 a decoder layer's forward pass, also where it runs again; so its parts, as
                               model.layers.3.mlp
model.layers.3 backward        from the gradient of its output to that of its input
all_gather over z, 2.0 MiB     a collective begins on this rank
wait: all_gather over z        this rank waits for one
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from hf_axonn.compat.torch import tensors_in
from hf_axonn.distributed.collectives import observe, watch_waits
from hf_axonn.engine.state import ParallelState, parallel_state


LAYER = re.compile(r"(?:[^\d.]\w*\.)+\d+")  # up to its first number
PART = re.compile(rf"{LAYER.pattern}(?:\.\w+)?")


@contextlib.contextmanager
def named_ranges(model: nn.Module) -> Iterator[None]:
    """Name the work of a model in profilers, as in the head of this file, until the end of the context.

        with hf_axonn.named_ranges(model), accelerator.profile() as profiler:
            ...

    For a plain model, too, of which only layers have names. Under torch.compile the parts of layers have none.

    Args:
        model: with decoder layers in a module list.
    """
    state = parallel_state(model)
    pattern = LAYER if state is not None and state.compile_options is not None else PART
    with contextlib.ExitStack() as stack:
        stack.enter_context(observe(partial(_mark_begin, state)))
        stack.enter_context(watch_waits(lambda kind, group: _open(f"wait: {kind} over {_axes_of(group, state)}")))
        backward = _Backward()
        stack.callback(backward.close)
        for name, module in model.named_modules():
            if pattern.fullmatch(name):
                for handle in _hooks(name, module, backward if LAYER.fullmatch(name) else None):
                    stack.callback(handle.remove)
        yield


def _axes_of(group: ProcessGroup, state: ParallelState | None) -> str:
    """The axes of a process group of the model's grid; world for others."""
    axes = state.grid_mesh.find_axes(group) if state is not None else None
    return ", ".join(axes) if axes else "world"


def _open(name: str) -> contextlib.ExitStack:
    """Open a range of this name."""
    stack = contextlib.ExitStack()
    stack.enter_context(record_function(name))
    if torch.cuda.is_available():
        stack.enter_context(torch.cuda.nvtx.range(name))
    return stack


def _mark_begin(state: ParallelState | None, kind: str, payload: int, group: ProcessGroup) -> None:
    _open(f"{kind} over {_axes_of(group, state)}, {payload / 2**20:.1f} MiB").close()


class _Backward:
    """Range of the layer whose backward pass is under way: autograd reports when one begins, not when it ends."""

    def __init__(self) -> None:
        self._name = ""
        self._open = contextlib.ExitStack()

    def close(self) -> None:
        self._open.close()

    def begin(self, name: str, *_: Tensor) -> None:
        self.close()
        self._name, self._open = name, _open(f"{name} backward")

    def end(self, name: str, *_: Tensor) -> None:
        if name == self._name:  # else the layer before has begun, by a hook on the same tensor
            self.close()


def _hooks(name: str, module: nn.Module, backward: _Backward | None) -> Iterator[Any]:
    """Hooks that open and close the ranges of a module; backward for a layer."""
    ranges: list[contextlib.ExitStack] = []  # a layer that runs again does so inside of backward

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if backward is not None:
            _on_gradient((args, kwargs), partial(backward.end, name))
        ranges.append(_open(name))

    def leave(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        ranges.pop().close()
        if backward is not None:
            _on_gradient(output, partial(backward.begin, name))

    yield module.register_forward_pre_hook(enter, with_kwargs=True)
    yield module.register_forward_hook(leave, always_call=True)


def _on_gradient(values: Any, hook: Callable[[Tensor], None]) -> None:
    """Call a hook when the gradient of the first tensor in a structure arrives that gets one."""
    for value in tensors_in(values):
        if value.requires_grad:
            value.register_hook(hook)
            return
