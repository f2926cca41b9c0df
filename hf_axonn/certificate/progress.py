"""Lines of a certificate while it is made: the plan and how long it will take, a line for each run, a bar."""

from __future__ import annotations

import time

import psutil
from tqdm import tqdm

from hf_axonn.certificate.job import Job
from hf_axonn.launch.launch_file import core_count


LAUNCHER = 0.8  # of the time in which this command has started: Accelerate's launcher
CASE = 0.1  # too: a case, on one process


class Progress:
    """Tell of the runs of a job on standard output; the bar is drawn on a terminal only, on standard error.

    Args:
        job: what is run.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.running = ""
        self.since = time.monotonic()
        resumed = sum(path == "resumed" for path, _ in job.cases)  # on one process it was not interrupted
        self.bar = tqdm(total=2 * len(job.cases) - resumed, unit="run", leave=False, disable=None)

    def begin(self, lines: list[str]) -> None:
        """Print what will be done."""
        for line in lines:
            self._print(line)

    def begin_case(self, side: str, case: str) -> None:
        """Note that a case has begun on one process or on many; the one before it has ended."""
        self.end()
        self.running, self.since = f"{case.replace('-', ' ', 1)}, {side}", time.monotonic()
        self.bar.set_description(self.running)

    def end(self, why: str = "") -> None:
        """Note that the case that was running has ended, or why it does not run."""
        if self.running:
            self._print(f"  {self.running:<44}{why or f'{time.monotonic() - self.since:.0f} s'}")
            self.bar.update()
        self.running = ""

    def close(self) -> None:
        """Remove the bar."""
        self.end()
        self.bar.close()

    def _print(self, line: str) -> None:
        tqdm.write(line)


def estimated_seconds(job: Job) -> int:
    """Estimate the time of the runs by how long this command has taken to start."""
    started = time.time() - psutil.Process().create_time()
    launches = 1 + any(path == "resumed" for path, _ in job.cases)
    share = max(1.0, job.ranks / core_count())  # of ranks on a core
    single = sum(path != "resumed" for path, _ in job.cases)
    starts = 1 + launches * (LAUNCHER + share)
    seconds: float = started * (starts + CASE * (single + len(job.cases) * share))
    return max(1, round(seconds))
