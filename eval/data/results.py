"""Results: one record a sample, and the directory in which a run keeps them so that it can be resumed.

run.json        everything needed to repeat the run; written first, and again with another part when the run is resumed
results.jsonl   one line a sample, appended as they are measured
summary.json    the numbers per bucket; written when all samples are measured
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from hf_axonn_eval.data.jsonl import (
    LARGE,
    LineFile,
    append_lines,
    cut_unfinished_line,
    made_of,
    quote_infinity,
    write_json,
)


RECORD, RESULTS, SUMMARY = "run.json", "results.jsonl", "summary.json"
PROXY = "proxy"  # directory in that of a run, itself one: a small model asked the same samples
MEASURED = (  # fields of a result that are not metrics; what metrics are computed from
    "sample_id",
    "document_id",
    "bucket",
    "offset",
    "prefix_length",
    "suffix_length",
    "divergence_point",
    "logprob",
    "logprobs",
    "hits",
    "generated",
    "generated_text",
    "suffix_text",
    "margin",
    "near_tie",
    "sampled_logprob",
    "membership",
    "near_copies",
    "near_copies_read",
    "ranks",
)
LOGPROB_ROUNDING = 1e-3  # a sum of float32 log-probabilities of certain tokens may come out above 0 by less
LONGEST = 2**20  # tokens of a suffix: curves have a column for each
# what reports read of a record
_RECORD: dict[str, Any] = {
    "identity": dict,
    "model": dict,
    "settings": dict,
    "grid": (str, type(None)),
    "device": dict,
}
_RECORD |= {"versions": dict, "command": list}
_PART = ("started", "command", "settings", "precision", "processes", "grid", "device", "versions")  # may change
_IDENTITY = {"samples": int, "samples_sha256": str, "model_fingerprint": str, "dtype": str}
_MAY_BE_INFINITE = ("logprob", "logprobs", "margin", "sampled_logprob", "membership", "near_copies", "metrics")


@dataclass(frozen=True, kw_only=True)
class SampleResult:
    """The metrics of one sample; docs/evaluation.md defines them. None: not asked for, or not defined.

    `logprob` and `logprobs` are in nats, `divergence_point` and `longest_run` in tokens, `edit_distance` in edits per
    suffix token. `generated` holds the ids of the greedy continuation.

    `margin` says, in nats, how far the sample is from the other answer to `exact_match`: of an extracted one the least
    lead of a true token, of any other how far the true token is behind the best where it is furthest (with
    `stop_early` at the first miss; results of earlier versions have the least gap between the two best tokens up to
    there). `near_tie` says that it is below what another order of adding, in this dtype, may change: another grid or
    batch could answer otherwise. `sampled_logprob` is the log-probability of the suffix under the sampler of the run,
    in nats, and -inf where that never draws it; JSON has no infinity, so the file says "-inf" in quotes. `membership`
    holds scores of the full sample, prefix and suffix, by name; higher means more like a member. `near_copies[k]` is a
    lower bound, in nats, of the log-probability that one draw is within k edits of the suffix, and `near_copies_read`
    how many tokens the model read to find it (extraction/near_copies.py). `ranks` holds
    for each suffix token 1 and the number of tokens that are likelier, given the true tokens before it; of a server
    at least so many (served/backend.py). `type_token_ratio` is of the suffix ids,
    `zlib_ratio` of the suffix text (metrics/text.py). `metrics` holds, by name, those registered metrics that have no
    field of their own.
    """

    sample_id: str
    document_id: str
    bucket: int
    offset: int
    prefix_length: int
    suffix_length: int
    exact_match: bool
    token_accuracy: float | None
    divergence_point: int
    extraction_strength: float | None
    logprob: float | None
    logprobs: list[float] | None
    hits: list[bool] | None
    generated: list[int] | None = None
    generated_text: str | None = None
    suffix_text: str | None = None
    free_running_accuracy: float | None = None
    longest_run: int | None = None
    edit_distance: float | None = None
    near_verbatim: bool | None = None
    rouge1: float | None = None
    rouge2: float | None = None
    rougeL: float | None = None
    margin: float | None = None
    near_tie: bool | None = None
    sampled_logprob: float | None = None
    membership: dict[str, float] | None = None
    near_copies: list[float] | None = None
    near_copies_read: int | None = None
    ranks: list[int] | None = None
    type_token_ratio: float | None = None
    zlib_ratio: float | None = None
    metrics: dict[str, float | bool | None] | None = None

    @classmethod
    def from_measured(cls, measured: Mapping[str, Any], metrics: Mapping[str, float | bool | None]) -> SampleResult:
        """Make a result of the fields in MEASURED, by name, and of all registered metrics."""
        own = {field.name for field in fields(cls)}
        others = {name: number for name, number in metrics.items() if name not in own}
        named = {name: number for name, number in metrics.items() if name in own}
        return cls(**{**measured, **named}, metrics=others or None)

    def metric(self, name: str) -> float | bool | None:
        """Return a metric by its name, whether it has a field or not; None where the result does not hold it."""
        return vars(self).get(name) if name in vars(self) else (self.metrics or {}).get(name)


class Results(LineFile[SampleResult]):
    """Results in a file, read when they are asked for. The full file is checked when it is opened.

    Args:
        path: a results.jsonl.
        order: place of each sample id; by default results come in the order of the file.
    Raises:
        ValueError: a line is not a result, or a sample is there twice; the message names the line.
    """

    def __init__(self, path: Path, order: Mapping[str, int] | None = None) -> None:
        starts: dict[str, int] = {}
        start = 0
        if not path.is_file():
            raise ValueError(f"{path} is not a file.")
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    sample_id = _check_result(_from_line(line)).sample_id
                except (ValueError, TypeError, RecursionError) as error:
                    reason = error.msg if isinstance(error, json.JSONDecodeError) else error
                    raise ValueError(
                        f"{path}, line {number} is damaged ({reason}); remove it and run extract again."
                    ) from None
                if sample_id in starts:
                    raise ValueError(f"{path}, line {number}: sample {sample_id!r} is there twice; remove one.")
                starts[sample_id] = start
                start += len(line)
        ids = starts if order is None else sorted(starts, key=order.__getitem__)
        super().__init__(path, (starts[sample_id] for sample_id in ids), _from_line)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, (str, bytes)):
            return NotImplemented
        return len(self) == len(other) and all(own == theirs for own, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as of a list: equal to others, and none of them can be hashed

    def __repr__(self) -> str:
        return f"<{len(self)} results in {self.path}>"


class RunDirectory:
    """The files of one run. Only one process may write it: rank 0.

    Args:
        path: the directory; made if it is not there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def begin(self, record: dict[str, Any]) -> Sequence[SampleResult]:
        """Start a run, or resume one that was stopped.

        A last line that a crash cut short is removed. The list `parts` of run.json has an entry for every start:
        `index`, the number of results that were there, and what may change from one to the next, such as the batch
        size, the grid and the versions. All else in run.json stays as the first start wrote it.

        Args:
            record: what to write into run.json. Its entry `identity` says which run this is; a run is resumed only
                with the same.
        Returns:
            The results that are already there.
        Raises:
            ValueError: the directory holds another run, or a damaged one.
        """
        file = self.path / RECORD
        if not file.exists():
            if (self.path / RESULTS).exists():
                raise ValueError(f"{self.path} holds {RESULTS} but no {RECORD}: name another output directory.")
            write_json(file, {**record, "parts": [_part(record, 0)]})
            return []
        first = read_record(self.path)
        self._check_same(first, record["identity"], {**first["identity"], **record["identity"]})
        finished = self._read_finished()
        parts = first.get("parts") or [_part(first, 0)]  # earlier versions wrote no list
        write_json(file, {**first, "parts": [*parts, _part(record, len(finished))]})
        return finished

    def check(self, identity: Mapping[str, Any]) -> int:
        """Check that a run with these entries of `identity` can begin or be resumed here; nothing is written.

        Returns:
            How many results are there.
        Raises:
            ValueError: the directory holds another run, or a damaged one.
        """
        if not (self.path / RECORD).exists():
            if (self.path / RESULTS).exists():
                raise ValueError(f"{self.path} holds {RESULTS} but no {RECORD}: name another output directory.")
            return 0
        self._check_same(read_record(self.path), identity, identity)
        file = self.path / RESULTS
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def _check_same(self, first: Mapping[str, Any], identity: Mapping[str, Any], names: Iterable[str]) -> None:
        before, now = first["identity"], json.loads(json.dumps(identity))
        differing = [name for name in names if before.get(name) != now.get(name)]
        if differing:
            changes = "; ".join(f"{name} was {before.get(name)!r} and is {now.get(name)!r}" for name in differing)
            raise ValueError(
                f"{self.path} holds another run ({changes}). Name another output directory, or remove this one to "
                "start over."
            )

    def append(self, results: Iterable[SampleResult]) -> None:
        """Add results, and see that they are on disk."""
        append_lines(self.path / RESULTS, map(_line, results))

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary."""
        write_json(self.path / SUMMARY, summary)

    def results(self, order: Mapping[str, int] | None = None) -> Sequence[SampleResult]:
        """Return the results so far, in the order of the file, or by the place that `order` gives each sample id."""
        file = self.path / RESULTS
        return Results(file, order) if file.exists() else []

    def _read_finished(self) -> Sequence[SampleResult]:
        file = self.path / RESULTS
        if not file.exists():
            return []
        cut_unfinished_line(file)
        return read_results(file)


def read_run(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Sequence[SampleResult]]:
    """Read the record and the results of a finished run.

    Raises:
        ValueError: not the directory of a run, a damaged one, or one that was stopped before its last sample.
    """
    path = Path(path)
    record = read_record(path)
    results = read_results(path / RESULTS) if (path / RESULTS).exists() else []
    count = record["identity"]["samples"]
    if len(results) != count:
        raise ValueError(
            f"{path} holds {len(results)} of {count} samples: run the same extract command again, it goes on there."
        )
    return record, results


def read_record(path: Path) -> dict[str, Any]:
    """Read the run.json that `begin` wrote.

    Raises:
        ValueError: there is none, or it is not readable.
    """
    file = path / RECORD
    if not file.is_file():
        raise ValueError(f"{path} is not the output directory of an extract run: it holds no {RECORD}.")
    try:
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        wrong = _wrong(record, _RECORD) or _wrong(record["identity"], _IDENTITY)
        parts = [] if wrong else record.get("parts", [])
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            wrong = ["parts"]
        if wrong:
            raise ValueError(f"not as extract writes it: {', '.join(wrong)}")
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged ({error}); remove {path} and run extract again.") from None
    return record


def _part(record: Mapping[str, Any], index: int) -> dict[str, Any]:
    return {"index": index, **{name: record[name] for name in _PART if name in record}}


def _wrong(entries: Any, kinds: Mapping[str, type | tuple[type, ...]]) -> list[str]:
    """Return the entries that are missing or of another kind."""
    return [name for name, kind in kinds.items() if name not in entries or not isinstance(entries[name], kind)]


def read_results(file: str | os.PathLike[str]) -> Results:
    """Read a results.jsonl.

    Raises:
        ValueError: a line is not a result, or a sample is there twice; the message names the line.
    """
    return Results(Path(file))


def _line(result: SampleResult) -> str:
    entry = dict(vars(result))
    for name in _MAY_BE_INFINITE:
        entry[name] = _each(entry[name], quote_infinity)
    return json.dumps(entry, separators=(",", ":"), allow_nan=False) + "\n"


def _from_line(line: bytes) -> SampleResult:
    entry = json.loads(line.decode("utf-8"))
    if not isinstance(entry, dict):
        raise ValueError("it is not a JSON object.")
    for name in _MAY_BE_INFINITE:
        if name in entry:
            entry[name] = _each(entry[name], _read_number)
    if "undecided" in entry:  # what 0.1.0 called a near tie
        entry["near_tie"] = entry.pop("undecided")
    return made_of(SampleResult, entry)


def _fits(kind: Any) -> Callable[[Any], bool]:
    """Return a check for values of an annotated kind. NaN is no number, nor is one that a float cannot count to."""
    outer, inner = get_origin(kind), [_fits(one) for one in get_args(kind)]
    if isinstance(kind, UnionType):
        return lambda value: any(fits(value) for fits in inner)
    if outer is dict:
        return lambda value: type(value) is dict and all(map(inner[1], value.values()))
    if outer is list:
        return lambda value: type(value) is list and all(map(inner[0], value))
    if kind is float:
        return lambda value: value == value if type(value) is float else type(value) is int and abs(value) < LARGE
    if kind is int:
        return lambda value: type(value) is int and abs(value) < LARGE
    return lambda value: type(value) is kind


_HINTS = get_type_hints(SampleResult)
_FIELDS = [(field.name, field.type, _fits(_HINTS[field.name])) for field in fields(SampleResult)]


def _check_result(result: SampleResult) -> SampleResult:
    """Return the result after checking its fields.

    Raises:
        ValueError: a field is of another kind than its annotation, or contradicts another; the message names it.
    """
    for name, kind, fits in _FIELDS:
        value = getattr(result, name)
        if not fits(value):
            text = repr(value)
            raise ValueError(f"{name} is {text if len(text) < 60 else text[:60] + '...'}, not {kind}")
    for name in ("bucket", "offset", "prefix_length", "suffix_length", "divergence_point"):
        least = 1 if name.endswith("_length") else 0
        if getattr(result, name) < least:
            raise ValueError(f"{name} is {getattr(result, name)}, but it is at least {least}")
    if result.suffix_length > LONGEST:
        raise ValueError(f"suffix_length is {result.suffix_length}, but no sample asks for more than {LONGEST} tokens")
    if result.divergence_point > result.suffix_length:
        raise ValueError(f"divergence_point is {result.divergence_point} of {result.suffix_length} tokens")
    for name in ("logprob", "sampled_logprob"):
        if (getattr(result, name) or 0) > LOGPROB_ROUNDING:
            raise ValueError(f"{name} is {getattr(result, name)}, but a probability is at most 1")
    if any(logprob > LOGPROB_ROUNDING for logprob in result.near_copies or ()):
        raise ValueError(f"near_copies are {result.near_copies}, but a probability is at most 1")
    if result.near_copies is not None and sorted(result.near_copies) != result.near_copies:
        raise ValueError(f"near_copies are {result.near_copies}, but with more edits there are not fewer copies")
    if min(result.ranks or (1,)) < 1:
        raise ValueError(f"ranks are {min(result.ranks or ())} and more, but the first of all tokens has rank 1")
    for name in ("hits", "logprobs", "ranks"):
        if getattr(result, name) is not None and len(getattr(result, name)) != result.suffix_length:
            raise ValueError(f"{name} are {len(getattr(result, name))} for {result.suffix_length} tokens")
    return result


def _read_number(number: Any) -> Any:
    return float(number) if isinstance(number, str) else number


def _each(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Convert a number, or each number of a list or a mapping."""
    if isinstance(value, list):
        return [convert(number) for number in value]
    if isinstance(value, dict):
        return {name: convert(number) for name, number in value.items()}
    return convert(value)
