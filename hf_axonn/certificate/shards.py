"""Parts of tensors that a rank holds, and where they lie in the whole.

No collective: a rank writes down what it holds, and whoever has the whole compares every copy of every part, so that
ranks which should hold the same are all looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_axonn.compat.deepspeed import Part, copies_of, is_divided, part_of
from hf_axonn.compat.torch import offsets_of


# What wrappers put into the names of parameters.
WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@dataclass(frozen=True)
class Shard:
    """A part of a tensor: its name, the shape of the whole, where the part begins, and its values; a flat part has one
    offset, in the flat tensor."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Tensor

    def within(self, whole: Tensor) -> Tensor:
        """Return the same part of another tensor of that shape.

        Raises:
            ValueError: it has another shape.
        """
        if tuple(whole.shape) != self.shape:
            raise ValueError(f"{self.name} has shape {self.shape}, on one process {tuple(whole.shape)}.")
        if len(self.offsets) != len(self.shape):
            whole = whole.view(-1)
        for dim, (start, size) in enumerate(zip(self.offsets, self.values.shape, strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole


def shard_of(name: str, tensor: Tensor) -> Shard:
    """Return this rank's part of a tensor; all of one that is no DTensor."""
    if not isinstance(tensor, DTensor):
        return Shard(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)
    return Shard(name, tuple(tensor.shape), offsets_of(tensor), tensor.to_local())


@torch.no_grad()
def shards_of(model: nn.Module, *, gradients: bool) -> list[Shard]:
    """Return copies of this rank's parts of a model's parameters, or of their gradients where there are any."""
    shards = []
    for name, parameter in model.named_parameters():
        if is_divided(parameter):
            part = part_of(parameter, gradients=gradients)
            shards += [_flat_shard(name, part)] if part is not None else []
        elif (tensor := parameter.grad if gradients else parameter) is not None:
            shard = shard_of(plain_name(name), tensor.detach())
            shards.append(replace(shard, values=shard.values.clone()))
    return shards


@torch.no_grad()
def copied_shards(model: nn.Module) -> list[Shard]:
    """Return the weights that a model computes with, where DeepSpeed keeps its parameters beside it; else nothing."""
    if not any(is_divided(parameter) for parameter in model.parameters()):
        return []
    shards = []
    for name, parameter in model.named_parameters():
        if is_divided(parameter):
            shards += [_flat_shard(name, part) for part in copies_of(parameter)]
        else:
            shards.append(shard_of(plain_name(name), parameter.clone()))
    return shards


def _flat_shard(name: str, part: Part) -> Shard:
    return Shard(plain_name(name), part.shape, (part.start,), part.values.detach().clone())


def plain_name(name: str) -> str:
    """Return the name of a parameter without those of wrappers."""
    for wrapper in WRAPPERS:
        name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
    return name


def save_shards(path: Path, shards: Iterable[Shard]) -> None:
    """Write shards to a file."""
    torch.save([(shard.name, shard.shape, shard.offsets, shard.values) for shard in shards], path)


def load_shards(path: Path) -> list[Shard]:
    """Read what `save_shards` wrote."""
    return [Shard(*values) for values in torch.load(path, weights_only=True)]


def assemble(ranks: Iterable[list[Shard]]) -> dict[str, Tensor]:
    """Assemble the whole tensors; a part that several ranks hold is that of the first one.

    Raises:
        ValueError: no rank holds some part of a tensor.
    """
    wholes: dict[str, Tensor] = {}
    held: dict[str, Tensor] = {}
    for shards in ranks:
        for shard in shards:
            whole = wholes.setdefault(shard.name, torch.zeros(shard.shape, dtype=torch.float64))
            there = shard.within(held.setdefault(shard.name, torch.zeros(shard.shape, dtype=torch.bool)))
            part = shard.within(whole)
            part.copy_(torch.where(there, part, shard.values.double()))
            there.fill_(True)
    for name, there in held.items():
        if not bool(there.all()):
            raise ValueError(f"{name}: {int((~there).sum())} of {there.numel()} numbers are on no rank.")
    return wholes
