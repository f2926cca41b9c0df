"""Liger's kernels on CPUs, by Triton's interpreter (TRITON_INTERPRET=1), which runs their code on NumPy arrays.

Triton 3.9's interpreter lacks three things that these kernels use: numbers among their arguments have no `.to`, and
rsqrt and tanh, which come from a GPU's library, do nothing. They are filled in here. In float64 what the kernels call
float32 is float64: the same code, with casts that lose nothing. Constants in it (0.044715, 1 / H) stay float32.
"""

from __future__ import annotations

import importlib.util
import os
import types
from collections import Counter
from typing import Any

import torch


OPS = ("rms_norm", "swiglu", "geglu", "rope")


def why_not() -> str:
    """Why these kernels cannot run here on CPUs; empty if they can."""
    if importlib.util.find_spec("liger_kernel") is None or importlib.util.find_spec("triton") is None:
        return "needs the extra liger: pip install --no-deps liger-kernel triton"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "needs Triton's interpreter: TRITON_INTERPRET=1 python -m pytest, before anything has imported triton"
    return ""


def interpret(*, wide: bool) -> Counter:
    """Let this process, which ends after it, run the kernels on CPUs. Returns how often each has been launched.

    Args:
        wide: in float64.
    """
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    launched: Counter = Counter()
    convert, run = interpreter._implicit_cvt, interpreter.InterpretedFunction.run

    def with_numbers(argument: Any) -> Any:
        if not isinstance(argument, float):
            return convert(argument)
        return tl.tensor(interpreter.TensorHandle(numpy.array([argument]), tl.float64), tl.float64)

    def counted(function: Any, *args: Any, **kwargs: Any) -> Any:
        launched[function.__name__] += 1
        return run(function, *args, **kwargs)

    interpreter._implicit_cvt = with_numbers
    interpreter.InterpretedFunction.run = counted
    modules = {name: importlib.import_module(f"liger_kernel.ops.{name}") for name in OPS}
    modules["rms_norm"].rsqrt = lambda value: tl.math.rsqrt(value)
    modules["geglu"].tanh = lambda value: 2 * tl.sigmoid(2 * value) - 1
    if wide:
        modules["rms_norm"].torch_to_triton_dtype[torch.float64] = tl.float64
        for module in modules.values():
            module.own_tl = tl  # by which the interpreter finds that a kernel uses Triton
            module.tl, module.torch = _Wide(tl, float32=tl.float64), _Wide(torch, float32=torch.float64)
    return launched


class _Wide(types.ModuleType):
    """A module, some of whose names stand for something else."""

    def __init__(self, module: types.ModuleType, **names: Any) -> None:
        super().__init__(module.__name__)
        self._module = module
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
