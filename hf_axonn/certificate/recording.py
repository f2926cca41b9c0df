"""Files that a process writes while it trains, so that no collective is added, and that are read again.

rank0.json                  samples, losses, norms, logged numbers
gradients-1-rank0.pt        what this rank holds of the gradients before clipping, in step 1
parameters-1-rank0.pt       of the parameters after it; 0 is the start
copies-1-rank0.pt           what its model computes with, where DeepSpeed keeps the parameters beside it
batches-1-rank0.pt          the micro-batches themselves, of a script whose rows are not known otherwise
logits-rank0.pt             of the rows of the evaluation, by their indices
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_axonn.certificate.rows import Row, fingerprints, seen_in
from hf_axonn.certificate.shards import Shard, copied_shards, load_shards, save_shards, shards_of


class Recorder:
    """One process writes down one case.

    Args:
        folder: of the case.
        rank: of this process.
        rows: those that are trained on, by whose indices samples are named; None: not known, so that fingerprints
            name them and the batches are kept.
        after: steps that were made before, by a process that saved its state.
    """

    def __init__(self, folder: Path, rank: int, rows: Sequence[Row] | None, after: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rank, self.rows, self.after = folder, rank, rows, after
        self.step = after + 1
        self.samples: list[list[list[int]]] = [[] for _ in range(self.step)]
        self.losses: list[list[float]] = [[] for _ in range(self.step)]
        self.batches: list[dict[str, Tensor]] = []

    def start(self, model: nn.Module) -> None:
        """Write the parameters before the first step."""
        self._parameters(self.after, model)

    def batch(self, inputs: Mapping[str, Tensor], loss: Tensor) -> None:
        """Note a micro-batch and its loss."""
        if self.rows is not None:
            self.samples[-1].append(seen_in(inputs, self.rows))
        else:
            self.samples[-1].append(fingerprints(inputs))
            self.batches.append({name: value for name, value in inputs.items() if isinstance(value, Tensor)})
        self.losses[-1].append(number(loss))

    def gradients(self, model: nn.Module) -> None:
        """Write the gradients of a step: they are averaged, and not clipped yet."""
        self._write("gradients", self.step, shards_of(model, gradients=True))

    def end_step(self, model: nn.Module) -> None:
        """Write the parameters after a step, and begin the next one."""
        self._parameters(self.step, model)
        if self.batches:
            torch.save(self.batches, self.folder / f"batches-{self.step}-rank{self.rank}.pt")
            self.batches = []
        self.step += 1
        self.samples.append([])
        self.losses.append([])

    def close(self, **facts: Any) -> None:
        """Write everything else."""
        values = {"samples": self.samples[:-1], "losses": self.losses[:-1], "after": self.after, **facts}
        for name in ("norms", "logged"):
            if name in values:  # from the first step on, as the others
                values[name] = [None] * self.after + values[name]
        (self.folder / f"rank{self.rank}.json").write_text(json.dumps(values), encoding="utf-8")

    def logits(self, found: Mapping[int, Tensor]) -> None:
        """Write the logits of rows, without padding."""
        torch.save(dict(found), self.folder / f"logits-rank{self.rank}.pt")

    def _parameters(self, step: int, model: nn.Module) -> None:
        self._write("parameters", step, shards_of(model, gradients=False))
        if copies := copied_shards(model):
            self._write("copies", step, copies)

    def _write(self, what: str, step: int, shards: list[Shard]) -> None:
        save_shards(self.folder / f"{what}-{step}-rank{self.rank}.pt", shards)


class Record:
    """The files that one process wrote of one case.

    Attributes:
        samples: for each step and micro-batch the indices of its rows.
        losses: for each step and micro-batch the loss of this rank.
        norms: for each step the norm of the gradients before clipping; None: not computed.
        logged: for each step the logged loss and learning rate; of Trainer, and of scripts.
        after: steps before the first one.
        evaluation: rows and losses of the evaluation; of Trainer only.
        facts: all of it.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.facts = json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8"))
        self.samples: list[list[list[int]]] = self.facts["samples"]
        self.losses: list[list[float]] = self.facts["losses"]
        self.norms: list[float | None] = self.facts.get("norms", [])
        self.logged: list[dict[str, float]] = self.facts.get("logged", [])
        self.evaluation: dict[str, Any] = self.facts.get("evaluation", {})
        self.after: int = self.facts.get("after", 0)

    def gradients(self, step: int) -> list[Shard]:
        """Return this rank's parts of the gradients of a step, counted from 1."""
        return load_shards(self.folder / f"gradients-{step}-rank{self.rank}.pt")

    def parameters(self, step: int) -> list[Shard]:
        """Return this rank's parts of the parameters after a step; 0: before the first one."""
        return load_shards(self.folder / f"parameters-{step}-rank{self.rank}.pt")

    def copies(self, step: int) -> list[Shard]:
        """Return the weights that this rank's model computes with, if they are beside the parameters; else nothing."""
        path = self.folder / f"copies-{step}-rank{self.rank}.pt"
        return load_shards(path) if path.exists() else []

    def batches(self, step: int) -> list[dict[str, Tensor]]:
        """Return the micro-batches of a step, where they were kept."""
        path = self.folder / f"batches-{step}-rank{self.rank}.pt"
        kept: list[dict[str, Tensor]] = torch.load(path, weights_only=True)
        return kept

    def logits(self) -> dict[int, Tensor]:
        """Return logits of rows by their indices; nothing where this rank has none."""
        path = self.folder / f"logits-rank{self.rank}.pt"
        found: dict[int, Tensor] = torch.load(path, weights_only=True) if path.exists() else {}
        return found


def norm_of(value: Any) -> float | None:
    """Return the norm that clipping returns as a number; None where a framework returns none."""
    return None if value is None else number(value)


def number(value: Any) -> float:
    """Return a number, of a tensor or not; a collective where it is a DTensor whose parts are on several ranks."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return float(value)
