"""What a process writes down while it trains, and what is read again: in files, so that no collective is added.

rank0.json                  samples, losses, norms, logged numbers
gradients-1-rank0.pt        what this rank holds of the gradients before clipping, in step 1
parameters-1-rank0.pt       of the parameters after it; 0 is the start
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_axonn.certificate.pieces import Piece, load_pieces, pieces_of, save_pieces
from hf_axonn.certificate.rows import Row, seen_in


class Recorder:
    """One process writes down one case.

    Args:
        folder: of the case.
        rank: of this process.
        rows: those that are trained on, by whose indices samples are named.
    """

    def __init__(self, folder: Path, rank: int, rows: Sequence[Row]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rank, self.rows = folder, rank, rows
        self.step = 1
        self.samples: list[list[list[int]]] = [[]]
        self.losses: list[list[float]] = [[]]
        self.facts: dict[str, Any] = {}

    def start(self, model: nn.Module) -> None:
        """Write the parameters before the first step."""
        self._write("parameters", 0, pieces_of(model, gradients=False))

    def batch(self, inputs: Mapping[str, Tensor], loss: Tensor) -> None:
        """Note a micro-batch and its loss."""
        self.samples[-1].append(seen_in(inputs, self.rows))
        self.losses[-1].append(number(loss))

    def gradients(self, model: nn.Module) -> None:
        """Write the gradients of a step: they are averaged, and not clipped yet."""
        self._write("gradients", self.step, pieces_of(model, gradients=True))

    def stepped(self, model: nn.Module) -> None:
        """Write the parameters after a step."""
        self._write("parameters", self.step, pieces_of(model, gradients=False))
        self.step += 1
        self.samples.append([])
        self.losses.append([])

    def close(self, **facts: Any) -> None:
        """Write everything else."""
        values = {"samples": self.samples[:-1], "losses": self.losses[:-1], **self.facts, **facts}
        (self.folder / f"rank{self.rank}.json").write_text(json.dumps(values), encoding="utf-8")

    def _write(self, what: str, step: int, pieces: list[Piece]) -> None:
        save_pieces(self.folder / f"{what}-{step}-rank{self.rank}.pt", pieces)


class Record:
    """What one process wrote of one case.

    Attributes:
        samples: for each step and micro-batch the indices of its rows.
        losses: for each step and micro-batch the loss of this rank.
        norms: for each step the norm of the gradients before clipping.
        logged: for each step the logged loss and learning rate; of Trainer only.
        evaluation: rows and losses of the evaluation; of Trainer only.
        facts: all of it.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.facts = json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8"))
        self.samples: list[list[list[int]]] = self.facts["samples"]
        self.losses: list[list[float]] = self.facts["losses"]
        self.norms: list[float] = self.facts.get("norms", [])
        self.logged: list[dict[str, float]] = self.facts.get("logged", [])
        self.evaluation: dict[str, Any] = self.facts.get("evaluation", {})

    def gradients(self, step: int) -> list[Piece]:
        """What this rank held of the gradients of a step, counted from 1."""
        return load_pieces(self.folder / f"gradients-{step}-rank{self.rank}.pt")

    def parameters(self, step: int) -> list[Piece]:
        """What this rank held of the parameters after a step; 0: before the first one."""
        return load_pieces(self.folder / f"parameters-{step}-rank{self.rank}.pt")


def number(value: Any) -> float:
    """A number, of a tensor or not; a collective where it is a DTensor whose parts are on several ranks."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return float(value)
