"""Jobs: one process (or launch of several) each, with a time limit, a log and a result that is kept.

A job's folder holds `log`, `result.json`, which its command writes, and `job.json`, written when it has ended. A job
that is done, by the same command on the same machine, is not run again; one that failed or was stopped is.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.settings import Settings, commit
from tests.helpers.launching import run


RESULT = "RESULT"  # in a command: the file that it writes
DONE, FAILED, STOPPED, WAITING, LEFT_OUT = "done", "failed", "stopped", "not begun", "left out"
LAST_LINES = 15
ERROR = re.compile(r"^(?:\[rank\d+\]: *)?((?:\w+\.)*\w*(?:Error|Exception)\b:.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Job:
    """What is run.

    Args:
        name: in its part.
        command: python's arguments; RESULT stands for the file of the result.
        limit: seconds.
        left_out: why it is not run on this machine.
        makes: a folder that has to be there besides the result, for jobs of any part.
    """

    name: str
    command: tuple[str, ...]
    limit: float = 0.0
    left_out: str = ""
    makes: Path | None = None


@dataclass(frozen=True)
class Part:
    """Jobs that belong together.

    Args:
        name: as `--parts` takes it.
        title: what it is, for people.
        limit: seconds, after which no more job begins and none goes on.
        jobs: makes the jobs in their order; one may depend on the result of those before it.
        remedy: what to look at if it fails.
    """

    name: str
    title: str
    limit: float
    jobs: Callable[[], Iterator[Job]]
    remedy: str


@dataclass(frozen=True)
class Outcome:
    """How a job stands: its state (DONE, ...), the result, seconds, the commit that ran, and why or its last lines."""

    name: str
    state: str
    result: dict[str, Any] | None = None
    seconds: float = 0.0
    commit: str = ""
    told: str = ""


class Results:
    """The folder of all results.

    Args:
        folder: where.
        settings: whose.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.settings = folder, settings
        self._commit = commit()

    def place(self, part: str, job: Job) -> Path:
        """The folder of a job; one that makes something for several parts has one for all of them."""
        return self.folder / (part if job.makes is None else "shared") / re.sub(r"[^\w.=]+", "-", job.name)

    def look(self, part: str, job: Job) -> Outcome:
        """How a job stands."""
        if job.left_out:
            return Outcome(job.name, LEFT_OUT, told=job.left_out)
        place = self.place(part, job)
        try:
            known = json.loads((place / "job.json").read_text())
            if known.pop("identity") != self._identity(job):
                return Outcome(job.name, WAITING)
            written = place / "result.json"
            result = json.loads(written.read_text()) if known["state"] == DONE or written.is_file() else None
        except (OSError, ValueError, KeyError):  # never run, or killed while writing
            return Outcome(job.name, WAITING)
        if job.makes is not None and not job.makes.is_dir():
            return Outcome(job.name, WAITING)
        return Outcome(result=result, **known)

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
        last = last_lines(ended.output)
        if ended.code == 0 and result.is_file():
            failures = json.loads(result.read_text()).get("failures")  # of tests
            state, last = (FAILED, failures) if failures else (DONE, [])
        elif took >= limit:
            state, last = STOPPED, [*last, f"stopped after its {limit:.0f} seconds"]
        else:
            state, last = FAILED, [*last, f"ended with code {ended.code}"]
        outcome = Outcome(job.name, state, None, took, self._commit, "\n".join(last))
        known = {key: value for key, value in asdict(outcome).items() if key != "result"}
        (place / "job.json").write_text(json.dumps({**known, "identity": self._identity(job)}))
        return self.look(part, job)

    def run(self, part: Part) -> Iterator[Outcome]:
        """Run what is not done of a part, within its limit; how each job stands then."""
        end = time.monotonic() + part.limit
        for job in part.jobs():
            left = end - time.monotonic()
            # One that would surely be cut off would be for nothing.
            if left < job.limit / 4 and self.look(part.name, job).state not in (DONE, LEFT_OUT):
                yield Outcome(job.name, WAITING, told=f"the {part.limit:.0f} seconds of the part were over")
            else:
                yield self.run_job(part.name, job, left)

    def look_at(self, part: Part) -> list[Outcome]:
        """How the jobs of a part stand, without running any."""
        return [self.look(part.name, job) for job in part.jobs()]

    def _identity(self, job: Job) -> dict[str, Any]:
        # Through JSON, which makes lists of tuples.
        command = [word.replace(str(self.folder), "") for word in job.command]
        return json.loads(json.dumps({"machine": asdict(self.settings.machine), "command": command}))


def last_lines(output: str) -> list[str]:
    """The end of what a job printed, after its first errors: a launcher's own summary may hide them."""
    errors = list(dict.fromkeys(ERROR.findall(output)))[:3]
    last = output.strip().splitlines()[-LAST_LINES:]
    return [*(error for error in errors if error not in "\n".join(last)), *last]
