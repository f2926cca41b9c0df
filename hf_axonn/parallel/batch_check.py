"""Ranks that share samples must be given the same batch, and stand at the same random number.

Of ranks along pipe only the batches are compared: not all stages have something that draws.

Checked at the first passes, at every 32nd after them and at the first of each epoch of a prepared data loader,
training and evaluation each for itself: other batches would not always fail, but train on nonsense. Each pass adds its
batch to a checksum, which is what is compared, so that a single batch that differs is found at the next check. A check
waits for the device and for the other ranks; the adding does not.

Shapes of every batch are noted for the account that a rank gives when the run stands still
(distributed/watchdog/progress.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_axonn.compat.accelerate import epoch_being_read, parallelism_in_use
from hf_axonn.distributed.collectives import gather_quietly
from hf_axonn.distributed.consistency import differences, digest_number, gather_json
from hf_axonn.distributed.mesh import SAME_SAMPLES, GridMesh
from hf_axonn.distributed.watchdog.progress import PROGRESS
from hf_axonn.engine.context import PassContext
from hf_axonn.layers.base import patch_forward
from hf_axonn.layers.dropout import dropout_names, probability


FIRST_PASSES = 4
EVERY = 32
SHOWN = 6  # numbers of a batch are shown in the message
EARLIER = "a batch among the last {}"  # where this one does not differ
_ODD = 0x9E3779B97F4A7C1
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a float


def install_batch_check(check: BatchCheck, context: PassContext) -> None:
    """Check what the model is called with; what its stages are called with has been. The last patch of its forward."""

    def forward(original: Callable, *args, **kwargs):
        if context.stage is None:
            check(args, kwargs)
        return original(*args, **kwargs)

    patch_forward(check.model, forward)


class BatchCheck:
    """Compares the arguments of a call over the ranks of (pipe, context, x, y).

    Raises:
        ValueError: they differ; on all ranks of this (data, z).
    Collectives: where it checks, an all-gather over them of three numbers; where they differ, `gather_texts`.
    """

    def __init__(self, mesh: GridMesh, model: nn.Module) -> None:
        self.mesh = mesh
        self.model = model
        self._passes = {True: 0, False: 0}
        self._read: dict[bool, tuple[int, int] | None] = {True: None, False: None}  # see `epoch_being_read`
        self._since = {True: _Sum(self.mesh.device), False: _Sum(self.mesh.device)}  # since the last check

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> None:
        named = {f"argument {place}": value for place, value in enumerate(args)} | kwargs
        tensors = {name: value for name, value in named.items() if type(value) is Tensor}
        PROGRESS.passes += 1
        PROGRESS.batch = {name: tuple(value.shape) for name, value in tensors.items()}
        training = self.model.training
        number = self._passes[training]
        self._passes[training] = number + 1
        if self.mesh.size(*SAME_SAMPLES) == 1:
            return
        self._since[training].add(tensors)
        before, self._read[training] = self._read[training], epoch_being_read()
        if number < FIRST_PASSES or number % EVERY == 0 or self._read[training] not in (before, None):
            since, self._since[training] = self._since[training], _Sum(self.mesh.device)
            self._compare(tensors, since)

    def _compare(self, tensors: dict[str, Tensor], since: _Sum) -> None:
        group, device = self.mesh.group(*SAME_SAMPLES), self.mesh.device
        random = digest_number(torch.random.get_rng_state().numpy().tobytes().hex()) if self._uses_random() else 0
        numbers = torch.tensor([since.shapes, random], device=device)
        own = torch.cat([numbers, since.content.view(1)])
        every = gather_quietly(own, group).tolist()
        size = self.mesh.size("context", "x", "y")
        in_step = [every[first : first + size] for first in range(0, len(every), size)]  # by their random states
        strayed = any(numbers[1] != block[0][1] for block in in_step for numbers in block)
        differ = any((numbers[0], numbers[2]) != (every[0][0], every[0][2]) for numbers in every)
        if not (strayed or differ):
            return
        facts = {name: _in_words(name, value) for name, value in tensors.items()}
        if strayed:
            facts["the random state"] = f"number {random % 10**6} (of seed {torch.initial_seed()})"
        if differ:
            facts[EARLIER.format(since.batches)] = f"of checksum {(int(since.content) ^ since.shapes) % 10**6}"
        ranks = dist.get_process_group_ranks(group)
        by_rank = dict(zip(ranks, gather_json(facts, device, group), strict=True))
        self._refuse(by_rank)

    def _refuse(self, facts: dict[int, dict[str, str]]) -> None:
        axes = ("data", "z" if self.mesh.grid.context == 1 else "rows")
        place = ", ".join(f"{axis}={self.mesh.index(axis)}" for axis in axes)
        found = differences(list(facts.values()), list(facts))
        found = [text for text in found if not text.startswith(EARLIER[:9])] or found
        divides = getattr(parallelism_in_use()[0], "grid", self.mesh.grid)
        if divides != self.mesh.grid:
            remedy = (
                f"The model lies on the grid {self.mesh.grid}, but samples are divided by that of this process's "
                f"Accelerator, {divides}: give both the same grid."
            )
        elif found == [] or (len(found) == 1 and found[0].startswith("the random state")):
            remedy = (
                "They would drop different values: give all ranks one seed, transformers.set_seed(N) without "
                "device_specific."
            )
        else:
            remedy = f"Feed ranks by their ({', '.join(axes)}): accelerator.prepare(loader) and Trainer do that."
        raise ValueError(
            f"ranks that share samples ({place}) were not given the same {PROGRESS.when}: {'; '.join(found)}. {remedy}"
        )

    def _uses_random(self) -> bool:
        """Return whether the model drops anything as it now is."""
        modules = self.model.modules() if self.model.training else ()
        return any(probability(module, *dropout_names(module))() for module in modules)


class _Sum:
    """A checksum of all batches that were added, in their order, on a device."""

    def __init__(self, device: torch.device) -> None:
        self.batches = 0
        self.shapes = 0
        self.content = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Add the tensors of a batch. Without waiting for the device."""
        shapes = json.dumps({name: list(value.shape) for name, value in sorted(tensors.items())})
        self.batches += 1
        self.shapes = digest_number(f"{self.shapes} {shapes}")
        content = self.content
        for name, value in sorted(tensors.items()):
            content = content * 31 + checksum(_exact(name, value)).to(content.device)
        self.content = content


def checksum(value: Tensor) -> Tensor:
    """A number, as a tensor on the same device, that depends on every whole number of a tensor and its place.

    Of floating-point tensors, which ranks may have computed each for itself, 0.
    """
    if value.is_floating_point() or value.is_complex() or not value.numel():
        return torch.zeros((), dtype=torch.int64, device=value.device)
    flat = value.detach().flatten().to(torch.int64)
    return ((flat + 1) * (torch.arange(len(flat), device=value.device) * _ODD + 1)).sum()


def _exact(name: str, value: Tensor) -> Tensor:
    """Return what is compared of an argument: of pixels, which ranks have read, the sums of their bits over rows and
    over columns; others as they are."""
    if not (name.startswith("pixel_values") and value.is_floating_point() and value.dim() > 1):
        return value
    bits = value.detach().contiguous().view(_INTEGERS[value.itemsize]).flatten(1)
    return torch.cat([bits.sum(dim, dtype=torch.int64) for dim in (0, 1)])


def _in_words(name: str, value: Tensor) -> str:
    shape = f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    exact = _exact(name, value)
    if exact.is_floating_point() or exact.is_complex():
        return shape
    if exact is not value:
        return f"{shape} (checksum {int(checksum(exact)) % 10**6})"
    flat = value.detach().flatten()
    return f"{shape} {flat[:SHOWN].tolist()}... (checksum {int(checksum(value)) % 10**6})"
