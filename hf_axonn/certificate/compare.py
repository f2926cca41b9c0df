"""The comparison of two runs: every rank's copy of every part, number by number, with full names.

An error is max |difference| / max(max |truth|, floor), with the floor of docs/numerics.md: the largest element of a
tensor decides, and where that is zero by mathematics, a share of all of them.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from hf_axonn.certificate.float64 import error_floor, not_nan
from hf_axonn.certificate.job import Job
from hf_axonn.certificate.loading import load_saved
from hf_axonn.certificate.recording import Record
from hf_axonn.certificate.shards import Shard, assemble, shard_of
from hf_axonn.certificate.worker import ALONE, TOGETHER


BOUND = 1e-10
RATE = "logged learning_rate"
NEAR = 1e-6  # of the largest logit: nearer than this, rounding decides which of two tokens is the likelier
# In the order in which one thing follows from another.
KINDS = "samples start loss gradient norm parameter copy logged evaluation logits saved".split()


@dataclass
class Error:
    """The distance of something from the run on one process: its step, name and rank, and how far it may be."""

    size: float
    step: int
    name: str
    rank: int
    text: str = ""  # in place of a size, where that says nothing
    bound: float = BOUND

    @property
    def wrong(self) -> bool:
        """True if it is above its bound."""
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
        """True if nothing is above the bound."""
        return self.first is None and not self.failed

    def set_errors(self, errors: list[tuple[str, Error]]) -> None:
        """Take all errors of the case, and find the worst and the first ones."""
        self.errors, self.worst = errors, find_worst(errors)
        wrong = [(kind, error) for kind, error in errors if error.wrong]
        self.first = min(wrong, key=lambda each: (each[1].step, KINDS.index(each[0]), -each[1].size), default=None)

    def keep_before(self, step: int) -> None:
        """Let `worst` be of what comes before a step alone, and of what a run is measured by itself."""
        self.worst = find_worst(
            (kind, error)
            for kind, error in self.errors
            if kind == "saved" or error.step < step and kind not in ("evaluation", "logits")
        )


def find_worst(errors: Iterable[tuple[str, Error]]) -> dict[str, Error]:
    """Return for each kind the error that is largest beside its bound."""
    worst: dict[str, Error] = {}
    for kind, error in errors:
        if kind not in worst or error.size / error.bound > worst[kind].size / worst[kind].bound:
            worst[kind] = error
    return worst


@dataclass
class Runs:
    """The records of one case.

    Args:
        one, many: of one process, which was not interrupted, and of the ranks.
        whole: of a resumed case, those of the ranks that were not interrupted.
    """

    one: Record
    many: list[Record]
    whole: list[Record] = field(default_factory=list)


def read_runs(job: Job, path: str, optimizer: str) -> Runs:
    """The records of a case."""
    folder, resumed = Path(job.folder), path == "resumed"
    uninterrupted = f"{'trainer' if resumed else path}-{optimizer}"

    def read_ranks(name: str) -> list[Record]:
        return [Record(folder / TOGETHER / name, rank) for rank in range(job.ranks)]

    one = Record(folder / ALONE / uninterrupted, 0)
    return Runs(one, read_ranks(f"{path}-{optimizer}"), read_ranks(uninterrupted) if resumed else [])


def compare(job: Job, runs: Runs, path: str, optimizer: str) -> CaseResult:
    """Compare one case; `explain` finds the cause of what differs."""
    result = CaseResult(path, optimizer, groups=group_ranks(runs.many))
    found: list[tuple[str, Error]] = []
    begin = runs.many[0].after + 1
    steps = range(begin, job.steps + 1)
    if any(batch for batches in runs.one.samples for batch in batches):
        for step in steps:
            problem = find_sample_problem(runs, result.groups, job.positions, step)
            found.append(("samples", Error(math.inf if problem else 0.0, step, "samples", 0, problem)))
    found += [("start", error) for error in _compare_tensors(runs, begin - 1, Record.parameters)]
    found += [("copy", error) for error in _compare_copies(runs, begin - 1)]
    for step in steps:
        index = step - 1
        truth = sum(runs.one.losses[index])
        mean = sum(sum(record.losses[index]) for record in runs.many) / len(runs.many)
        found.append(("loss", Error(relative_error(mean, truth), step, "loss", 0)))
        found += [("gradient", error) for error in _compare_tensors(runs, step, Record.gradients)]
        if job.norms and runs.one.norms[index] is not None:
            found += [("norm", error) for error in _compare_numbers(runs, step, "norm", norm_at)]
        found += [("parameter", error) for error in _compare_tensors(runs, step, Record.parameters)]
        found += [("copy", error) for error in _compare_copies(runs, step)]
        for name in runs.one.logged[index] if runs.one.logged else ():
            read = partial(_read_logged, name=name)
            found += [("logged", error) for error in _compare_numbers(runs, step, f"logged {name}", read)]
    if runs.one.evaluation:
        end = job.steps
        errors = _compare_numbers(runs, end, "evaluation loss", lambda record, at: record.evaluation["loss"])
        found += [("evaluation", error) for error in errors]
        found += [("logits", error) for error in _compare_logits(runs, end)]
        found += [("saved", error) for error in (_compare_saved(job, runs) if job.saves else [])]
    result.set_errors(found)
    return result


def norm_at(record: Record, index: int) -> float:
    """Return the norm of a step, counted from 0; NaN where a rank has none."""
    norm = record.norms[index]
    return math.nan if norm is None else norm


def _read_logged(record: Record, index: int, name: str) -> float:
    return record.logged[index].get(name, math.nan)


def group_ranks(records: Sequence[Record]) -> list[list[int]]:
    """Return lists of ranks that saw the same samples in all steps."""
    groups: dict[str, list[int]] = {}
    for rank, record in enumerate(records):
        groups.setdefault(str(record.samples), []).append(rank)
    return list(groups.values())


def _count_samples(runs: Runs, groups: Sequence[Sequence[int]], step: int) -> tuple[Counter[int], Counter[int]]:
    """Return the samples of a step that one process and that the groups saw."""
    index = step - 1
    alone = Counter(row for batch in runs.one.samples[index] for row in batch)
    together = Counter(row for group in groups for batch in runs.many[group[0]].samples[index] for row in batch)
    return alone, together


def find_sample_problem(runs: Runs, groups: Sequence[Sequence[int]], positions: int, step: int) -> str:
    """Find what is wrong with the samples of a step; empty: every sample once, each position its own."""
    alone, together = _count_samples(runs, groups, step)
    if together == alone:
        return ""
    missing, more = sorted((alone - together).elements()), sorted((together - alone).elements())
    parts = []
    if len(groups) != positions:
        seen = ", ".join(" and ".join(map(str, group)) for group in groups if len(group) > 1)
        shared = f" (the same: {seen})" if seen else ""
        parts.append(f"{len(groups)} different sequences of samples on {positions} data-parallel positions{shared}")
    if missing:
        parts.append(f"samples {_join(missing)} were seen by no rank")
    if more:
        parts.append(f"samples {_join(more)} were seen once too often")
    return "; ".join(parts)


def is_filled_up(runs: Runs, groups: Sequence[Sequence[int]], positions: int, step: int, steps: int) -> bool:
    """Return whether samples differ only as Accelerate fills up the last batch: by the epoch's first ones."""
    if step != steps or len(groups) != positions:
        return False
    alone, together = _count_samples(runs, groups, step)
    order = [row for batches in runs.one.samples for batch in batches for row in batch]
    more = together - alone
    return not alone - together and set(more) <= set(order[: more.total()])


def _join(rows: Sequence[int], most: int = 6) -> str:
    return ", ".join(map(str, rows[:most])) + (f" and {len(rows) - most} more" if len(rows) > most else "")


def _compare_logits(runs: Runs, step: int) -> list[Error]:
    """Compare the logits of the rows of the evaluation; where another token is the likeliest, count near-ties."""
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
            text = f"off by {size:.1e}, at {int(other.sum())} of {len(other)} places another token is the likeliest"
            text += f", of which {ties} are near-ties"
            errors.append(Error(size, step, f"row {row}", record.rank, text if bool(other.any()) else ""))
    return errors


def relative_error(value: float, truth: float) -> float:
    """Return |value - truth| / |truth|; infinite in place of NaN."""
    error = abs(value - truth) / max(abs(truth), torch.finfo(torch.float64).tiny)
    return math.inf if math.isnan(error) else error


def _compare_numbers(runs: Runs, step: int, name: str, read: Callable[[Record, int], float]) -> list[Error]:
    truth = read(runs.one, step - 1)
    values = [read(record, step - 1) for record in runs.many]
    return [Error(relative_error(value, truth), step, name, rank) for rank, value in enumerate(values)]


def _compare_tensors(runs: Runs, step: int, read: Callable[[Record, int], list[Shard]]) -> list[Error]:
    truth = {shard.name: shard.values for shard in read(runs.one, step)}
    ranks = [read(record, step) for record in runs.many]
    errors = [error for rank, shards in enumerate(ranks) for error in shard_errors(shards, truth, step, rank)]
    return errors + find_absent(ranks, truth, step)


def _compare_copies(runs: Runs, step: int) -> list[Error]:
    """Compare the weights that models compute with and the parameters, rounded to the dtype of the copy."""
    copies = [record.copies(step) for record in runs.many]
    if not any(copies):
        return []
    parameters = assemble(record.parameters(step) for record in runs.many)
    errors = []
    for rank, shards in enumerate(copies):
        for shard in shards:
            truth = {shard.name: parameters[shard.name].to(shard.values.dtype).double()}
            errors += shard_errors([replace(shard, values=shard.values.double())], truth, step, rank)
    return errors


def find_absent(ranks: Sequence[Sequence[Shard]], truth: dict[str, Tensor], step: int) -> list[Error]:
    """Return an error for each tensor of which some part is on no rank."""
    held: dict[str, Tensor] = {}
    for shard in chain(*ranks):
        if shard.name in truth:
            shard.within(held.setdefault(shard.name, torch.zeros(shard.shape, dtype=torch.bool))).fill_(True)
    absent = [name for name in truth if name not in held or not bool(held[name].all())]
    return [Error(math.inf, step, name, 0, "some of it is on no rank") for name in absent]


def shard_errors(shards: Iterable[Shard], truth: Mapping[str, Tensor], step: int, rank: int) -> list[Error]:
    """Return the error of each shard of a rank."""
    floor = error_floor(truth.values())
    errors = []
    for shard in shards:
        whole = truth.get(shard.name)
        if whole is None:
            errors.append(Error(math.inf, step, shard.name, rank, "not there on one process"))
        elif tuple(whole.shape) != shard.shape:
            shapes = f"shape {list(shard.shape)}, on one process {list(whole.shape)}"
            errors.append(Error(math.inf, step, shard.name, rank, shapes))
        elif shard.values.numel():
            difference = not_nan((shard.values - shard.within(whole)).abs().max())
            errors.append(Error(difference / float(torch.maximum(whole.abs().max(), floor)), step, shard.name, rank))
    return errors


def _compare_saved(job: Job, runs: Runs) -> list[Error]:
    """Compare the weights of `save_model`, loaded again, with those after the last step of the same run."""
    folder = runs.many[0].folder / "saved"
    if not any(folder.glob("*.safetensors*")):
        return [Error(math.inf, job.steps, "save_model", 0, "wrote no weights")]
    trained = assemble(record.copies(job.steps) or record.parameters(job.steps) for record in runs.many)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is meant
        loaded = dict(load_saved(job, folder).named_parameters())
    shards = [shard_of(name, weight.detach()) for name, weight in loaded.items()]
    absent = [Error(math.inf, job.steps, name, 0, "not in the file") for name in trained if name not in loaded]
    return shard_errors(shards, trained, job.steps, 0) + absent
