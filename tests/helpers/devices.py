"""On which device the ranks of a test compute: CPUs by gloo, or with HF_AXONN_TEST_DEVICE=cuda GPUs by NCCL.

A test that asks for the fixture `device` runs there; every other test stays on CPUs. The process of the tests itself
sees no GPUs, except with `-m gpu` (conftest.py).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hf_axonn.layers.moe import Experts


CHOICE = "HF_AXONN_TEST_DEVICE"


@dataclass(frozen=True)
class Devices:
    """What there is to run ranks on: `kind` is cpu or cuda (also AMD's GPUs), `count` the number of GPUs."""

    kind: str = "cpu"
    count: int = 0

    def backend(self, world: int) -> str:
        """nccl with a GPU for each rank; it refuses two ranks on one GPU, so there gloo moves CUDA tensors."""
        return "nccl" if self.kind == "cuda" and self.count >= world else "gloo"

    def skip_reason(self, world: int) -> str | None:
        """Why `world` ranks cannot run here. Several ranks share one GPU; of several GPUs each has one rank."""
        if self.kind == "cpu":
            return None
        if self.count == 0:
            return f"{CHOICE}=cuda, but torch finds no GPU here"
        if 1 < self.count < world:
            return f"{world} ranks need {world} GPUs, and there are {self.count}"
        return None

    def of_rank(self, rank: int) -> torch.device:
        """The device of a rank on this machine."""
        return torch.device("cpu") if self.kind == "cpu" else torch.device("cuda", rank % self.count)


CPUS = Devices()
_used = CPUS


@functools.cache
def chosen(kind: str | None = None) -> Devices:
    """What HF_AXONN_TEST_DEVICE asks for: cpu, which is the default, or cuda.

    Raises:
        ValueError: it asks for something else.
    """
    kind = kind or os.environ.get(CHOICE, "cpu")
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"{CHOICE} is {kind!r}, but it is cpu or cuda")
    return CPUS if kind == "cpu" else Devices("cuda", _gpu_count())


def _gpu_count() -> int:
    """Counted by a process of its own: where NVML is missing torch initializes CUDA for it."""
    code = "import torch; print(torch.cuda.device_count())"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


@contextlib.contextmanager
def used(devices: Devices) -> Iterator[Devices]:
    """Ranks that are started inside run on these."""
    global _used
    before, _used = _used, devices
    try:
        yield devices
    finally:
        _used = before


def in_use() -> Devices:
    """What ranks that are started now run on."""
    return _used


def take_device(rank: int) -> torch.device:
    """Called by a rank when it starts: what it makes from here on, it makes on its device."""
    device = _used.of_rank(rank)
    if device.type == "cpu":
        os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")  # else it would load models onto a GPU
        return device
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for results that are compared bit by bit
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.cuda.set_device(device)
    torch.set_default_device(device)
    return device


def rank_device() -> torch.device:
    """The device of this rank; the CPU in the process of the tests, where truths are computed."""
    return torch.get_default_device()


def seeded(seed: int) -> torch.Generator:
    """A generator on this rank's device, which draws other numbers there than on a CPU."""
    return torch.Generator(rank_device()).manual_seed(seed)


def moved(value: Any, device: torch.device) -> Any:
    """The same with every tensor on `device`, inside of containers, dataclasses and functools.partial too."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, functools.partial):
        return functools.partial(value.func, *moved(value.args, device), **moved(value.keywords, device))
    if isinstance(value, dict):
        result = copy.copy(value)
        for key, item in value.items():
            result[key] = moved(item, device)
        return result
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(moved(item, device) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not value.__dataclass_params__.frozen:
        result = copy.copy(value)
        for field in dataclasses.fields(value):
            setattr(result, field.name, moved(getattr(value, field.name), device))
        return result
    return value


def few_foreign_on_gpus(experts, hidden, choices, dtype=None, original=Experts._few_foreign) -> bool:
    """`Experts._few_foreign` as a GPU would answer; of `dtype` in the place of that of the hidden states."""
    return original(experts, torch.empty_like(hidden, dtype=dtype, device="meta"), choices)
