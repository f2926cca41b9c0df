"""The comparison of two runs: every rank's copy of every part, number by number, with full names.

An error is max |difference| / max(max |truth|, floor), with the floor of docs/numerics.md: the largest element of a
tensor decides, and where that is zero by mathematics, a share of all of them.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from hf_axonn.certificate.float64 import error_floor, not_nan
from hf_axonn.certificate.job import Job
from hf_axonn.certificate.loading import load_saved
from hf_axonn.certificate.pieces import Piece, assembled
from hf_axonn.certificate.recording import Record
from hf_axonn.certificate.worker import ALONE, TOGETHER


BOUND = 1e-10
NEAR = 1e-6  # of the largest logit: nearer than this, rounding decides which of two tokens is the likelier
# In the order in which one thing follows from another.
KINDS = (
    "samples",
    "start",
    "loss",
    "gradient",
    "norm",
    "parameter",
    "copy",
    "logged",
    "evaluation",
    "logits",
    "saved",
)


@dataclass
class Error:
    """How far something is from the run on one process: of which step, whose, on which rank, and how far it may be."""

    size: float
    step: int
    name: str
    rank: int
    text: str = ""  # in place of a size, where that says nothing
    bound: float = BOUND

    @property
    def wrong(self) -> bool:
        """Whether it is above its bound."""
        return not self.size <= self.bound


@dataclass
class CaseResult:
    """One case.

    Args:
        path, optimizer: what was run.
        errors: all of them, by kind.
        worst: for each of KINDS the largest error; absent where there was nothing to compare.
        first: the first error above the bound, by step and then in the order of KINDS; None: equal.
        groups: ranks that saw the same samples, for each position.
        cause: why it differs, where that is known.
        documented: whether the cause is how the framework says that it computes.
        failed: what the framework said, where it does not run.
    """

    path: str
    optimizer: str
    errors: list[tuple[str, Error]] = field(default_factory=list)
    worst: dict[str, Error] = field(default_factory=dict)
    first: tuple[str, Error] | None = None
    groups: list[list[int]] = field(default_factory=list)
    cause: str = ""
    documented: bool = False
    failed: str = ""

    @property
    def equal(self) -> bool:
        """Whether nothing is above the bound."""
        return self.first is None and not self.failed

    def before(self, step: int) -> None:
        """Let `worst` be of what comes before a step alone, and of what a run is measured by itself."""
        self.worst = {}
        for kind, error in self.errors:
            if kind == "saved" or error.step < step and kind not in ("evaluation", "logits"):
                if kind not in self.worst or error.size > self.worst[kind].size:
                    self.worst[kind] = error


@dataclass
class Runs:
    """What both sides wrote of one case."""

    one: Record
    many: list[Record]


def read_runs(job: Job, path: str, optimizer: str) -> Runs:
    """The records of a case."""
    folder, name = Path(job.folder), f"{path}-{optimizer}"
    many = [Record(folder / TOGETHER / name, rank) for rank in range(job.ranks)]
    alone = f"trainer-{optimizer}" if path == "resumed" else name  # one process was not interrupted
    return Runs(Record(folder / ALONE / alone, 0), many)


def compare(job: Job, path: str, optimizer: str) -> CaseResult:
    """Compare one case; `explain` finds the cause of what differs."""
    runs = read_runs(job, path, optimizer)
    result = CaseResult(path, optimizer, groups=same_samples(runs.many))
    found: list[tuple[str, Error]] = []
    begin = runs.many[0].after + 1
    steps = range(begin, job.steps + 1)
    if any(batch for batches in runs.one.samples for batch in batches):
        for step in steps:
            problem = sample_problem(runs, result.groups, job.positions, step)
            found.append(("samples", Error(math.inf if problem else 0.0, step, "samples", 0, problem)))
    found += [("start", error) for error in _tensors(runs, begin - 1, Record.parameters)]
    found += [("copy", error) for error in _copies(runs, begin - 1)]
    for step in steps:
        index = step - 1
        truth = sum(runs.one.losses[index])
        mean = sum(sum(record.losses[index]) for record in runs.many) / len(runs.many)
        found.append(("loss", Error(_relative(mean, truth), step, "loss", 0)))
        found += [("gradient", error) for error in _tensors(runs, step, Record.gradients)]
        if job.norms and runs.one.norms[index] is not None:
            found += [("norm", error) for error in _numbers(runs, step, "norm", norm_at)]
        found += [("parameter", error) for error in _tensors(runs, step, Record.parameters)]
        found += [("copy", error) for error in _copies(runs, step)]
        for name in runs.one.logged[index] if runs.one.logged else ():
            found += [("logged", error) for error in _numbers(runs, step, f"logged {name}", _logged(name))]
    if runs.one.evaluation:
        end = job.steps
        evaluated = _numbers(runs, end, "evaluation loss", lambda record, at: record.evaluation["loss"])
        found += [("evaluation", each) for each in evaluated]
        found += [("logits", each) for each in _logits(runs, end)]
        found += [("saved", each) for each in (_saved(job, runs, path, optimizer) if job.saves else [])]
    settle(result, found)
    return result


def norm_at(record: Record, index: int) -> float:
    """The norm of a step, counted from 0; NaN where a rank says none."""
    norm = record.norms[index]
    return math.nan if norm is None else norm


def settle(result: CaseResult, found: list[tuple[str, Error]]) -> None:
    """Let a result be that of these errors."""
    result.errors, result.worst = found, {}
    for kind, error in found:
        if kind not in result.worst or error.size / error.bound > result.worst[kind].size / result.worst[kind].bound:
            result.worst[kind] = error
    wrong = [(kind, error) for kind, error in found if error.wrong]
    result.first = min(wrong, key=lambda each: (each[1].step, KINDS.index(each[0]), -each[1].size), default=None)


def _logged(name: str) -> Callable[[Record, int], float]:
    return lambda record, at: record.logged[at].get(name, math.nan)


def same_samples(records: Sequence[Record]) -> list[list[int]]:
    """Ranks that saw the same samples in all steps, as lists."""
    groups: dict[str, list[int]] = {}
    for rank, record in enumerate(records):
        groups.setdefault(str(record.samples), []).append(rank)
    return list(groups.values())


def sample_problem(runs: Runs, groups: Sequence[Sequence[int]], positions: int, step: int) -> str:
    """What is wrong with the samples of a step; empty: every sample once, each position its own."""
    index = step - 1
    wanted = Counter(row for batch in runs.one.samples[index] for row in batch)
    given = Counter(row for group in groups for batch in runs.many[group[0]].samples[index] for row in batch)
    if given == wanted:
        return ""
    missing, more = sorted((wanted - given).elements()), sorted((given - wanted).elements())
    said = []
    if len(groups) != positions:
        seen = ", ".join(" and ".join(map(str, group)) for group in groups if len(group) > 1)
        shared = f" (the same: {seen})" if seen else ""
        said.append(f"{len(groups)} different sequences of samples on {positions} data-parallel positions{shared}")
    if missing:
        said.append(f"samples {_listed(missing)} were seen by no rank")
    if more:
        said.append(f"samples {_listed(more)} were seen once too often")
    return "; ".join(said)


def repeated_at_the_end(runs: Runs, groups: Sequence[Sequence[int]], positions: int, step: int, steps: int) -> bool:
    """Whether all that is wrong with the samples is how Accelerate fills up the last batch: by the epoch's first."""
    index = step - 1
    if step != steps or len(groups) != positions:
        return False
    wanted = Counter(row for batch in runs.one.samples[index] for row in batch)
    given = Counter(row for group in groups for batch in runs.many[group[0]].samples[index] for row in batch)
    order = [row for batches in runs.one.samples for batch in batches for row in batch]
    more = given - wanted
    return not wanted - given and set(more) <= set(order[: more.total()])


def _listed(rows: Sequence[int], most: int = 6) -> str:
    return ", ".join(map(str, rows[:most])) + (f" and {len(rows) - most} more" if len(rows) > most else "")


def _logits(runs: Runs, step: int) -> list[Error]:
    """The logits of the rows of the evaluation; where another token is the likeliest, how many are near-ties."""
    truth, errors = runs.one.logits(), []
    for record in runs.many:
        for row, values in record.logits().items():
            if row not in truth or values.shape != truth[row].shape:
                errors.append(Error(math.inf, step, f"row {row}", record.rank, "other rows, or other shapes"))
                continue
            whole = truth[row]
            size = not_nan((values - whole).abs().max()) / float(whole.abs().max())
            other = values.argmax(-1) != whole.argmax(-1)
            best = whole[other].topk(2).values
            ties = int((best[:, 0] - best[:, 1] <= NEAR * whole.abs().max()).sum())
            said = f"off by {size:.1e}, at {int(other.sum())} of {len(other)} places another token is the likeliest"
            said += f", of which {ties} are near-ties"
            errors.append(Error(size, step, f"row {row}", record.rank, said if bool(other.any()) else ""))
    return errors


def _relative(value: float, truth: float) -> float:
    error = abs(value - truth) / max(abs(truth), torch.finfo(torch.float64).tiny)
    return math.inf if math.isnan(error) else error


def _numbers(runs: Runs, step: int, name: str, read: Callable[[Record, int], float]) -> list[Error]:
    truth = read(runs.one, step - 1)
    return [Error(_relative(read(record, step - 1), truth), step, name, rank) for rank, record in enumerate(runs.many)]


def _tensors(runs: Runs, step: int, read: Callable[[Record, int], list[Piece]]) -> list[Error]:
    """The errors of all tensors on all ranks."""
    truth = {piece.name: piece.values for piece in read(runs.one, step)}
    each = [read(record, step) for record in runs.many]
    errors = [error for rank, pieces in enumerate(each) for error in piece_errors(pieces, truth, step, rank)]
    return errors + on_no_rank(each, truth, step)


def _copies(runs: Runs, step: int) -> list[Error]:
    """How far what models compute with is from the parameters, rounded to the dtype of the copy."""
    copies = [record.copies(step) for record in runs.many]
    if not any(copies):
        return []
    held = assembled(record.parameters(step) for record in runs.many)
    found = []
    for rank, pieces in enumerate(copies):
        for its in pieces:
            truth = {its.name: held[its.name].to(its.values.dtype).double()}
            found += piece_errors([Piece(its.name, its.shape, its.offsets, its.values.double())], truth, step, rank)
    return found


def on_no_rank(each: Sequence[Sequence[Piece]], truth: dict[str, Tensor], step: int) -> list[Error]:
    """An error for each tensor of which no rank has some part."""
    held: dict[str, Tensor] = {}
    for pieces in each:
        for piece in pieces:
            if piece.name in truth:
                piece.within(held.setdefault(piece.name, torch.zeros(piece.shape, dtype=torch.bool))).fill_(True)
    missing = [name for name in truth if name not in held or not bool(held[name].all())]
    return [Error(math.inf, step, name, 0, "some of it is on no rank") for name in missing]


def piece_errors(pieces: Iterable[Piece], truth: dict[str, Tensor], step: int, rank: int) -> list[Error]:
    """The error of each piece of a rank."""
    floor = error_floor(truth.values())
    errors = []
    for piece in pieces:
        whole = truth.get(piece.name)
        if whole is None:
            errors.append(Error(math.inf, step, piece.name, rank, "not there on one process"))
        elif tuple(whole.shape) != piece.shape:
            shapes = f"shape {list(piece.shape)}, on one process {list(whole.shape)}"
            errors.append(Error(math.inf, step, piece.name, rank, shapes))
        elif piece.values.numel():
            difference = not_nan((piece.values - piece.within(whole)).abs().max())
            errors.append(Error(difference / float(torch.maximum(whole.abs().max(), floor)), step, piece.name, rank))
    return errors


def _saved(job: Job, runs: Runs, path: str, optimizer: str) -> list[Error]:
    """What `save_model` wrote, loaded again, beside the parameters after the last step of the same run."""
    folder = Path(job.folder) / TOGETHER / f"{path}-{optimizer}" / "saved"
    if not any(folder.glob("*.safetensors*")):
        return [Error(math.inf, job.steps, "save_model", 0, "wrote no weights")]
    trained = assembled(record.copies(job.steps) or record.parameters(job.steps) for record in runs.many)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is meant
        loaded = load_saved(job, folder)
    pieces = [Piece(name, tuple(its.shape), (0,) * its.dim(), its.detach()) for name, its in loaded.named_parameters()]
    errors = piece_errors(pieces, trained, job.steps, 0)
    names = {piece.name for piece in pieces}
    return errors + [Error(math.inf, job.steps, name, 0, "not in the file") for name in trained if name not in names]
