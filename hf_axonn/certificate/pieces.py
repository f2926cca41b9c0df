"""What one rank holds of a tensor, and where that lies in the whole.

No collective: a rank writes down what it holds, and whoever has the whole compares every copy of every part, so that
ranks which should hold the same are all looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_axonn.compat.deepspeed import Part, copies_of, is_divided, part_of
from hf_axonn.compat.torch import offsets_of


# What wrappers put into the names of parameters.
WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@dataclass(frozen=True)
class Piece:
    """A part of a tensor: its name, the shape of the whole, where the part begins, and its values; a flat part has one
    offset, in the flat tensor."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Tensor

    def within(self, whole: Tensor) -> Tensor:
        """The same part of another tensor of that shape.

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


def piece_of(name: str, tensor: Tensor) -> Piece:
    """What this rank holds of a tensor; all of one that is no DTensor."""
    if not isinstance(tensor, DTensor):
        return Piece(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)
    return Piece(name, tuple(tensor.shape), offsets_of(tensor), tensor.to_local())


@torch.no_grad()
def pieces_of(model: nn.Module, *, gradients: bool) -> list[Piece]:
    """What this rank holds of a model's parameters, or of their gradients where there are any; copies."""
    found = []
    for name, parameter in model.named_parameters():
        if is_divided(parameter):
            part = part_of(parameter, gradients=gradients)
            found += [_piece(name, part)] if part is not None else []
            continue
        tensor = parameter.grad if gradients else parameter
        if tensor is not None:
            piece = piece_of(plain_name(name), tensor.detach())
            found.append(Piece(piece.name, piece.shape, piece.offsets, piece.values.clone()))
    return found


@torch.no_grad()
def copied_pieces(model: nn.Module) -> list[Piece]:
    """What a model computes with, where DeepSpeed keeps its parameters beside it; else nothing."""
    if not any(is_divided(parameter) for parameter in model.parameters()):
        return []
    found = []
    for name, parameter in model.named_parameters():
        if is_divided(parameter):
            found += [_piece(name, part) for part in copies_of(parameter)]
        else:
            found.append(Piece(plain_name(name), tuple(parameter.shape), (0,) * parameter.dim(), parameter.clone()))
    return found


def _piece(name: str, part: Part) -> Piece:
    return Piece(plain_name(name), part.shape, (part.start,), part.values.detach().clone())


def plain_name(name: str) -> str:
    """The name of a parameter without those of wrappers."""
    for wrapper in WRAPPERS:
        name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
    return name


def save_pieces(path: Path, pieces: Iterable[Piece]) -> None:
    """Write pieces to a file."""
    torch.save([(piece.name, piece.shape, piece.offsets, piece.values) for piece in pieces], path)


def load_pieces(path: Path) -> list[Piece]:
    """Read what `save_pieces` wrote."""
    return [Piece(*values) for values in torch.load(path, weights_only=True)]


def assembled(ranks: Iterable[list[Piece]]) -> dict[str, Tensor]:
    """The whole tensors; of a part that several ranks hold, what the first one has.

    Raises:
        ValueError: no rank holds some part of a tensor.
    """
    wholes: dict[str, Tensor] = {}
    held: dict[str, Tensor] = {}
    for pieces in ranks:
        for piece in pieces:
            whole = wholes.setdefault(piece.name, torch.zeros(piece.shape, dtype=torch.float64))
            there = piece.within(held.setdefault(piece.name, torch.zeros(piece.shape, dtype=torch.bool)))
            part = piece.within(whole)
            part.copy_(torch.where(there, part, piece.values.double()))
            there.fill_(True)
    for name, there in held.items():
        if not bool(there.all()):
            raise ValueError(f"{name}: {int((~there).sum())} of {there.numel()} numbers are on no rank.")
    return wholes
