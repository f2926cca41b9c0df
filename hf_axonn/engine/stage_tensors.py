"""Tensors of all stages of a pipeline: what others have, and all of each on rank 0 for files in ordinary formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_axonn.distributed.collectives import receive_, send_
from hf_axonn.distributed.consistency import gather_json
from hf_axonn.distributed.mesh import GridMesh
from hf_axonn.engine.dtensors import whole


class Counted(NamedTuple):
    """A parameter or buffer: numbers, bytes, and whether it is trained, an embedding's weight, or a buffer."""

    elements: int
    nbytes: int
    trains: bool
    embeds: bool
    is_buffer: bool


@dataclass(frozen=True)
class Staged:
    """One of the tensors that all stages have together.

    Args:
        pipe: the first place on pipe that has it.
        outline: an empty tensor of its shape and dtype, on the meta device.
    """

    pipe: int
    outline: Tensor


def over_stages(value: Any, mesh: GridMesh) -> list[Any]:
    """Return the `value`, which is JSON, of each place on pipe, in order. `gather_texts` over pipe."""
    return [value] if mesh.size("pipe") == 1 else gather_json(value, mesh.device, mesh.group("pipe"))


def outline_all_stages(tensors: Mapping[str, Tensor], mesh: GridMesh) -> dict[str, Staged]:
    """The tensors of all stages by name, in order, the same on all ranks; without pipe those that are given.

    Collectives: with pipe `gather_texts` over it.
    """
    facts = [[name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for name, tensor in tensors.items()]
    found: dict[str, Staged] = {}
    for pipe, own in enumerate(over_stages(facts, mesh)):
        for name, shape, dtype in own:
            found.setdefault(name, Staged(pipe, torch.empty(shape, dtype=getattr(torch, dtype), device="meta")))
    return found


def whole_at_first(name: str, tensors: Mapping[str, Tensor], staged: Staged, mesh: GridMesh) -> Tensor:
    """All of a tensor, on the CPU of the ranks with pipe=0; elsewhere its outline. Every rank must call it.

    Collectives: `whole` in its stage; from another stage than the first it is sent there, between equal coordinates.
    """
    here = mesh.index("pipe")
    if here == staged.pipe:
        full = whole(tensors[name]).detach()
        if here == 0:
            return full.cpu()
        send_(full.to(mesh.device), 0, mesh.group("pipe"))
    elif here == 0:
        return receive_(torch.empty_like(staged.outline, device=mesh.device), staged.pipe, mesh.group("pipe")).cpu()
    return staged.outline


def whole_of_all_stages(tensors: Mapping[str, Tensor], mesh: GridMesh) -> dict[str, Tensor]:
    """The tensors of all stages by name, all of each, on rank 0; empty on the others.

    Collectives: those of `outline_all_stages`, and of `whole_at_first` for each.
    """
    result = {}
    for name, staged in outline_all_stages(tensors, mesh).items():
        full = whole_at_first(name, tensors, staged, mesh)
        if mesh.rank == 0:
            result[name] = full
    return result
