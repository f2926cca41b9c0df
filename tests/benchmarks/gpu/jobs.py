"""Jobs: one process (or launch of several) each, with a time limit, a log and a result that is kept.

All results lie in gpu.json, beside gpu.md and logs.tar.gz, and nothing else is needed to go on on another machine. A
job that is done, by the same command on the same kind of machine, is not run again; one that failed or was stopped is.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.settings import Settings, commit
from tests.helpers.launching import run


RESULT = "RESULT"  # in a command: the file that it writes
DONE, FAILED, STOPPED, OPEN, LEFT_OUT = "done", "failed", "stopped", "open", "left out"
OVER = "the time of the part or of the call was over"
LAST_LINES, LINE = 15, 300
ERROR = re.compile(r"^(?:\[rank\d+\]: *)?((?:\w+\.)*\w*(?:Error|Exception)\b:.*)$", re.MULTILINE)
RECORD, PAGE, LOGS = "gpu.json", "gpu.md", "logs.tar.gz"
LOG_BYTES, ALL_LOG_BYTES = 2**18, 15 * 2**20  # of the end of a log, and of all, before they are packed


@dataclass(frozen=True)
class Job:
    """What is run.

    Args:
        name: in its part.
        command: python's arguments; RESULT stands for the file of the result.
        limit: seconds.
        left_out: why it is not run on this machine.
    """

    name: str
    command: tuple[str, ...]
    limit: float = 0.0
    left_out: str = ""


@dataclass(frozen=True)
class Part:
    """Jobs that belong together.

    Args:
        name: as `--parts` takes it.
        title: what it is, for people.
        limit: seconds, after which no more job begins and none goes on.
        jobs: makes the jobs in their order.
        remedy: what to look at if it fails.
        together: jobs at a time.
    """

    name: str
    title: str
    limit: float
    jobs: Callable[[], Iterator[Job]]
    remedy: str
    together: int = 1


@dataclass(frozen=True)
class Outcome:
    """State of a job (DONE, ...), its result, seconds, the code that ran, and the reason or its last lines."""

    name: str
    state: str
    result: dict[str, Any] | None = None
    seconds: float = 0.0
    commit: str = ""
    reason: str = ""
    identity: str = ""


class Results:
    """All results of a size on a kind of machine.

    Args:
        folder: of the three files, and of jobs at work.
        settings: of the run.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.settings = folder, settings
        self._commit = commit()
        self._known: dict[tuple[str, str], Outcome] = {}
        try:
            for part in json.loads((folder / RECORD).read_text())["parts"]:
                for job in part["jobs"]:
                    self._known[part["name"], job["name"]] = Outcome(**job)
            with tarfile.open(folder / LOGS) as logs:
                logs.extractall(folder / "work", filter="data")
        except (OSError, ValueError, KeyError, TypeError, tarfile.TarError):  # there is nothing, or no whole file
            pass

    def place(self, part: str, job: Job) -> Path:
        """The folder that a job works in."""
        return self.folder / "work" / part / re.sub(r"[^\w.=]+", "-", job.name)

    def look(self, part: str, job: Job) -> Outcome:
        """Return the outcome of a job so far."""
        if job.left_out:
            return Outcome(job.name, LEFT_OUT, reason=job.left_out)
        known = self._known.get((part, job.name))
        return known if known and known.identity == self._identity(job) else Outcome(job.name, OPEN)

    def run_job(self, part: str, job: Job, seconds: float) -> Outcome:
        """Run a job for so many seconds at most, unless it is done; how it stands then."""
        before = self.look(part, job)
        if before.state in (DONE, LEFT_OUT):
            return before
        place = self.place(part, job)
        place.mkdir(parents=True, exist_ok=True)
        result, limit = place / "result.json", min(job.limit, seconds)
        result.unlink(missing_ok=True)
        begin = time.monotonic()
        ended = run(place, *(str(result) if word == RESULT else word for word in job.command), timeout=limit)
        took = time.monotonic() - begin
        found, last = _read(result), last_lines(ended.output)
        if ended.code == 0 and found is not None:
            failures = found.get("failures")
            state, last = (FAILED, failures[:50]) if failures else (DONE, [])
        elif took >= limit:
            cut = limit < job.limit
            state, why = (OPEN, f" of {job.limit:.0f}: {OVER}") if cut else (STOPPED, "")
            last = [*last, f"stopped after {limit:.0f} seconds{why}"]
        else:
            state, last = FAILED, [*last, f"ended with code {ended.code}"]
        reason = "\n".join(line[:LINE] for line in last)
        outcome = Outcome(job.name, state, found, took, self._commit, reason, self._identity(job))
        self._known[part, job.name] = outcome
        return outcome

    def run(self, part: Part, end: float = float("inf")) -> Iterator[Outcome]:
        """Run what is not done of a part, within its limit and until `end`; each job, as it ends.

        `end`: by the monotonic clock.
        """
        end = min(end, time.monotonic() + part.limit)

        def begin(job: Job) -> Outcome:
            left = end - time.monotonic()
            before = self.look(part.name, job)
            # One that would surely be cut off would be for nothing.
            if before.state in (DONE, LEFT_OUT) or left >= job.limit / self.settings.patience / 3:
                return self.run_job(part.name, job, left)
            return replace(before, reason=OVER) if before.state == OPEN else before

        if part.together == 1:
            yield from map(begin, part.jobs())
            return
        with ThreadPoolExecutor(part.together) as pool:
            for future in as_completed([pool.submit(begin, job) for job in part.jobs()]):
                yield future.result()

    def look_at(self, part: Part) -> list[Outcome]:
        """Return the outcomes of the jobs of a part so far, without running any."""
        return [self.look(part.name, job) for job in part.jobs()]

    def save(self, record: dict[str, Any], page: str, out: Path | None) -> None:
        """Write the three files, whole or not at all, here and in a folder of `out`, which brings them home."""
        files = {RECORD: json.dumps(record, indent=1).encode() + b"\n", PAGE: page.encode(), LOGS: self._pack_logs()}
        for folder in (self.folder, *([out / self.folder.name] if out else [])):
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                unfinished = folder / f".{name}"
                unfinished.write_bytes(content)
                unfinished.replace(folder / name)

    def _pack_logs(self) -> bytes:
        logs = sorted(self.folder.glob("work/*/*/log"))
        most = min(LOG_BYTES, ALL_LOG_BYTES // max(len(logs), 1))
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for log in logs:
                with open(log, "rb") as file:
                    size = file.seek(0, io.SEEK_END)
                    file.seek(max(0, size - most))
                    content = file.read(most)
                entry = tarfile.TarInfo(str(log.relative_to(self.folder / "work")))
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
        return packed.getvalue()

    def _identity(self, job: Job) -> str:
        machine = self.settings.machine
        kind = [machine.kind, machine.count, machine.name, machine.versions]
        return hashlib.sha256(json.dumps([kind, job.command]).encode()).hexdigest()[:16]


def _read(result: Path) -> dict[str, Any] | None:
    """Read what a job has written; None if it was killed before, or while it wrote."""
    try:
        return json.loads(result.read_text())
    except (OSError, ValueError):
        return None


def last_lines(output: str) -> list[str]:
    """The end of what a job printed, after its first errors: a launcher's own summary may hide them."""
    errors = list(dict.fromkeys(ERROR.findall(output)))[:3]
    last = output.strip().splitlines()[-LAST_LINES:]
    return [*(error for error in errors if error not in "\n".join(last)), *last]
