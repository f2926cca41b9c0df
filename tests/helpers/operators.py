"""Which operators of torch are called, and what they return: what a test asks that is not about numbers."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Notes all calls inside, in backward too.

    Attributes:
        names: of the operators, as `mm.dtype_out`.
        results: (name, what it has returned) for each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.results: list[tuple[str, object]] = []

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.results]

    def results_of(self, name: str) -> list:
        return [result for called, result in self.results if called == name]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.results.append((func.__name__, result))
        return result


def widen_on_cpu() -> None:
    """Give the CPU of this process what CUDA has: torch.mm of 16-bit matrices that is written in float32.

    For good: call it in a process of the test's own, such as a rank of `run_ranks`.
    """

    def multiply(a, b, out_dtype, *, out):
        return out.copy_(a.to(out_dtype) @ b.to(out_dtype))

    widen_on_cpu.library = torch.library.Library("aten", "IMPL")  # it ends what it has added when it is gone
    widen_on_cpu.library.impl("mm.dtype_out", multiply, "CPU")
