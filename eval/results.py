"""What came out: one record a sample, and the directory in which a run keeps them so that it can go on.

run.json        everything needed to repeat the run; written first
results.jsonl   one line a sample, appended as they are measured
summary.json    the numbers per bucket; written when all samples are measured
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


RECORD, RESULTS, SUMMARY = "run.json", "results.jsonl", "summary.json"


@dataclass(frozen=True, kw_only=True)
class SampleResult:
    """The metrics of one sample; docs/evaluation.md defines them. None: not asked for, or not defined.

    `logprob` and `logprobs` are in nats, `divergence_point` and `longest_run` in tokens, `edit_distance` in edits per
    suffix token. `generated` holds the ids of the greedy continuation.
    """

    sample_id: str
    document_id: str
    bucket: int
    offset: int
    prefix_length: int
    suffix_length: int
    exact_match: bool
    token_accuracy: float
    divergence_point: int
    extraction_strength: float
    logprob: float
    logprobs: list[float]
    hits: list[bool]
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


class RunDirectory:
    """The files of one run. Only one process may write it: rank 0.

    Args:
        path: the directory; made if it is not there.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)

    def begin(self, record: dict[str, Any]) -> list[SampleResult]:
        """Start a run, or go on with one that was stopped.

        A last line that a crash cut short is removed.

        Args:
            record: what to write into run.json. Its entry `identity` says which run this is; a run goes on only with
                the same.
        Returns:
            The results that are already there.
        Raises:
            ValueError: the directory holds another run, or a damaged one.
        """
        file = self.path / RECORD
        if not file.exists():
            if (self.path / RESULTS).exists():
                raise ValueError(f"{self.path} holds {RESULTS} but no {RECORD}: name another output directory.")
            self.path.mkdir(parents=True, exist_ok=True)
            _write_json(file, record)
            return []
        before = read_record(self.path)["identity"]
        now = json.loads(json.dumps(record["identity"]))
        differing = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        if differing:
            changes = "; ".join(f"{key} was {before.get(key)!r} and is {now.get(key)!r}" for key in differing)
            raise ValueError(
                f"{self.path} holds another run ({changes}). Name another output directory, or remove this one to "
                "start over."
            )
        return self._finished()

    def append(self, results: Iterable[SampleResult]) -> None:
        """Add results, and see that they are on disk."""
        lines = "".join(json.dumps(asdict(result), separators=(",", ":")) + "\n" for result in results)
        with open(self.path / RESULTS, "a", encoding="utf-8", newline="\n") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary."""
        _write_json(self.path / SUMMARY, summary)

    def _finished(self) -> list[SampleResult]:
        file = self.path / RESULTS
        if not file.exists():
            return []
        content = file.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            with open(file, "r+b") as handle:
                handle.truncate(whole)
        return read_results(file)


def read_run(path: str | os.PathLike) -> tuple[dict[str, Any], list[SampleResult]]:
    """The record and the results of a finished run.

    Raises:
        ValueError: not the directory of a run, a damaged one, or one that was stopped before its last sample.
    """
    path = Path(path)
    record = read_record(path)
    results = read_results(path / RESULTS) if (path / RESULTS).exists() else []
    asked = record["identity"]["samples"]
    if len(results) != asked:
        raise ValueError(
            f"{path} holds {len(results)} of {asked} samples: run the same extract command again, it goes on there."
        )
    return record, results


def read_record(path: Path) -> dict[str, Any]:
    """What `begin` wrote into run.json.

    Raises:
        ValueError: there is none, or it is not readable.
    """
    file = path / RECORD
    if not file.is_file():
        raise ValueError(f"{path} is not the output directory of an extract run: it holds no {RECORD}.")
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        record["identity"]["samples"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{file} is damaged; remove {path} and run extract again.") from None
    return record


def read_results(file: Path) -> list[SampleResult]:
    """The lines of a results.jsonl.

    Raises:
        ValueError: a line is not a result, or a sample is there twice; the message names the line.
    """
    results = []
    seen = set()
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                result = SampleResult(**json.loads(line.decode("utf-8")))
            except (ValueError, TypeError, RecursionError):
                raise ValueError(f"{file}, line {number} is damaged; remove it and run extract again.") from None
            if result.sample_id in seen:
                raise ValueError(f"{file}, line {number}: sample {result.sample_id!r} is there twice; remove one.")
            seen.add(result.sample_id)
            results.append(result)
    return results


def _write_json(path: Path, content: dict[str, Any]) -> None:
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
