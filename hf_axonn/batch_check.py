"""Ranks that share samples must be given the same batch, and stand at the same random number.

Checked at the first passes and at every 32nd after them, training and evaluation each for itself: other batches would
not always fail, but train on nonsense. Shapes of every batch are noted for the account that a rank gives when the run
stands still (progress.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_axonn.agreement import differences, digest_number, gather_texts
from hf_axonn.collectives import gather_quietly
from hf_axonn.dropout import dropout_names, probability
from hf_axonn.progress import HERE
from hf_axonn.state import ModelState
from hf_axonn.styles import wrap_forward


FIRST_PASSES = 4
EVERY = 32
SHOWN = 6  # numbers of a batch are shown in the message
_ODD = 0x9E3779B97F4A7C1


def install_batch_check(state: ModelState, model: nn.Module) -> None:
    """Check what the model is called with."""
    check = BatchCheck(state, model)

    def forward(original: Callable, *args, **kwargs):
        check(args, kwargs)
        return original(*args, **kwargs)

    wrap_forward(model, forward)


class BatchCheck:
    """Compares the arguments of a call over the ranks of (x, y).

    Raises:
        ValueError: they differ; on all ranks of this (data, z).
    Collectives: where it checks, an all-gather over (x, y) of three numbers; where they differ, `gather_texts`.
    """

    def __init__(self, state: ModelState, model: nn.Module) -> None:
        self.mesh = state.mesh
        self.model = model
        self._passes = {True: 0, False: 0}
        self._drops: bool | None = None

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> None:
        named = {f"argument {place}": value for place, value in enumerate(args)} | kwargs
        tensors = {name: value for name, value in named.items() if type(value) is Tensor}
        HERE.passes += 1
        HERE.batch = {name: tuple(value.shape) for name, value in tensors.items()}
        number = self._passes[self.model.training]
        self._passes[self.model.training] = number + 1
        if self.mesh.size("x", "y") > 1 and (number < FIRST_PASSES or number % EVERY == 0):
            self._compare(tensors)

    def _compare(self, tensors: dict[str, Tensor]) -> None:
        group, device = self.mesh.group("x", "y"), self.mesh.device
        shapes = digest_number(json.dumps({name: list(value.shape) for name, value in sorted(tensors.items())}))
        random = digest_number(torch.random.get_rng_state().numpy().tobytes().hex()) if self._uses_random() else 0
        content = torch.zeros((), dtype=torch.int64, device=device)
        for value in tensors.values():
            content = content * 31 + checksum(value).to(device)
        own = torch.stack([torch.tensor(shapes, device=device), content, torch.tensor(random, device=device)])
        every = gather_quietly(own, group).tolist()
        if all(its == every[0] for its in every):
            return
        facts = {name: _in_words(value) for name, value in tensors.items()}
        if any(its[2] != every[0][2] for its in every):
            facts["the random state"] = f"number {random % 10**6} (of seed {torch.initial_seed()})"
        ranks = dist.get_process_group_ranks(group)
        by_rank = dict(zip(ranks, map(json.loads, gather_texts(json.dumps(facts), device, group)), strict=True))
        self._refuse(by_rank)

    def _refuse(self, facts: dict[int, dict[str, str]]) -> None:
        at = self.mesh.coordinates
        found = differences(list(facts.values()), list(facts))
        if found == [] or (len(found) == 1 and found[0].startswith("the random state")):
            remedy = (
                "They would drop different values: give all ranks one seed, transformers.set_seed(N) without "
                "device_specific."
            )
        else:
            remedy = "Feed ranks by their (data, z): accelerator.prepare(loader) and Trainer do that."
        raise ValueError(
            f"ranks that share samples (data={at['data']}, z={at['z']}) were not given the same {HERE.when}: "
            f"{'; '.join(found)}. {remedy}"
        )

    def _uses_random(self) -> bool:
        """Whether the model drops anything as it now is."""
        if not self.model.training:
            return False
        if self._drops is None:
            self._drops = any(probability(its, *dropout_names(its))() for its in self.model.modules())
        return self._drops


def checksum(value: Tensor) -> Tensor:
    """A number, as a tensor on the same device, that depends on every whole number of a tensor and its place.

    Of floating-point tensors, which ranks may have computed each for itself, 0.
    """
    if value.is_floating_point() or value.is_complex() or not value.numel():
        return torch.zeros((), dtype=torch.int64, device=value.device)
    flat = value.detach().flatten().to(torch.int64)
    return ((flat + 1) * (torch.arange(len(flat), device=value.device) * _ODD + 1)).sum()


def _in_words(value: Tensor) -> str:
    shape = f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if value.is_floating_point() or value.is_complex():
        return shape
    flat = value.detach().flatten()
    return f"{shape} {flat[:SHOWN].tolist()}... (checksum {int(checksum(value)) % 10**6})"
