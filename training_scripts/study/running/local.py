"""Do every step of a study that is left, one after the other, on this machine."""

import fnmatch
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from hf_axonn_eval.data.jsonl import write_json
from hf_axonn_scripts.demo.pipeline import Stamps
from hf_axonn_scripts.study.recipe.definition import Recipe
from hf_axonn_scripts.study.recipe.steps import Step, steps_of
from hf_axonn_scripts.study.running.listing import Forecast, duration, forecast, predictions
from hf_axonn_scripts.study.running.work import do_step, find_lacking, find_unfinished, hold_lock, hold_step


DONE, FAILED, UNFINISHED = 0, 1, 3  # exit codes; 2 says that nothing was started


def run(recipe: Recipe, output: Path, *, minutes: float | None = None, only: Sequence[str] = ()) -> int:
    """Do the steps that are left; a failed one loses only those that read what it makes.

    Args:
        recipe, output: the study and its directory.
        minutes: begin no step that is not predicted to end in this time.
        only: patterns of names; no other step is begun.
    Returns:
        0 if all is done (with `only`, all of that), 1 if a step failed, 3 if the time ended before.
    Raises:
        NotReady: another process works in this directory.
    """
    steps = steps_of(recipe, output)
    with hold_lock(Stamps(output.resolve()).folder / "study.lock", f"the study in {output}"):
        return _Study(recipe, output, steps, only).go(None if minutes is None else 60 * minutes)


def choose_steps(steps: Sequence[Step], patterns: Sequence[str]) -> list[Step]:
    """Return the steps whose names one of the patterns fits; without patterns, all.

    Raises:
        ValueError: a pattern fits none.
    """
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(step.name, pattern) for step in steps):
            raise ValueError(f"no step is called {pattern}: --dry-run --all lists the names")
    return [step for step in steps if any(fnmatch.fnmatchcase(step.name, pattern) for pattern in patterns or "*")]


class _Study:
    def __init__(self, recipe: Recipe, output: Path, steps: Sequence[Step], only: Sequence[str]) -> None:
        self.recipe, self.output, self.steps = recipe, output, steps
        self.chosen = choose_steps(steps, only)
        self.by_name = {step.name: step for step in steps}
        self.stamps = Stamps(output.resolve())
        self.failed: dict[str, str] = {}  # name -> why
        self.waiting: dict[str, list[str]] = {}  # name -> the steps before it that are not done
        self.late: list[str] = []  # would not end in time

    def go(self, seconds: float | None) -> int:
        start = time.monotonic()
        predicted = predictions(self.recipe, self.steps)
        known = forecast(self.steps, self.stamps, predicted)
        left = [step for step in self.chosen if step.name not in known.took]
        self.progress(known, None)
        for step in left:
            if missing := find_lacking(step, self.by_name, self.stamps):
                self.waiting[step.name] = missing
                continue
            if seconds is not None and time.monotonic() - start + known.seconds(step.name) > seconds:
                self.late.append(step.name)
                continue
            without = find_unfinished(step, self.by_name, self.stamps)
            of = f" of what is there, without {', '.join(without)}" if without else ""
            print(f"\n== {step.name}{of} (about {duration(known.seconds(step.name))})", flush=True)
            self.progress(known, step)
            begun = time.monotonic()
            try:
                do_step(self.recipe, self.output, step.name)
                print(f"== {step.name}: done in {duration(time.monotonic() - begun)}", flush=True)
            except (SystemExit, ValueError) as error:
                self.failed[step.name] = str(error)
                print(f"== {step.name}: FAILED: {error}", flush=True)
            known = forecast(self.steps, self.stamps, predicted)
            self.progress(known, None)
        return self.verdict()

    def progress(self, known: Forecast, step: Step | None) -> None:
        """Print the progress of the study, between steps, and write progress.json."""
        left = [other.name for other in self.chosen if other.name not in self.failed]
        content = {
            "study": self.recipe.name,
            "steps": len(self.steps),
            "done": len(known.took),
            "failed": sorted(self.failed),
            "running": step.name if step else None,
            "share": round(known.share, 4),
            "seconds_left": round(known.seconds_left(left)),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        write_json(self.output / "progress.json", content)
        if step is None:
            failed = f"; {len(self.failed)} failed" if self.failed else ""
            print(f"== {known.line(left)}{failed}", flush=True)

    def verdict(self) -> int:
        """Print what was not done, and why; return the exit code."""
        for name, why in self.failed.items():
            print(f"FAILED {name}: {why}")
        for roots, names in self._find_roots().items():
            print(f"not done for want of {', '.join(roots)}: {', '.join(names)}")
        if self.late:
            print(f"no time for {', '.join(self.late)}: the same command goes on")
        if self.failed:
            count = len(self.failed)
            print(
                f"{count} step{'s' if count > 1 else ''} failed: the same command does them again, and what needs them"
            )
            return FAILED
        if self.late:
            return UNFINISHED
        return FAILED if self.waiting else DONE

    def _find_roots(self) -> dict[tuple[str, ...], list[str]]:
        """Return the steps that were not begun, by the first steps on the way to them that are not done."""
        roots: dict[str, set[str]] = {}
        for name, missing in self.waiting.items():  # a step stands behind those it reads from
            roots[name] = set().union(*(roots.get(other, {other}) for other in missing))
        found: dict[tuple[str, ...], list[str]] = {}
        for name, first in roots.items():
            found.setdefault(tuple(sorted(first)), []).append(name)
        return found


def again(recipe: Recipe, output: Path, patterns: Sequence[str]) -> list[str]:
    """Remove the stamps of steps, so that they are done from the start; return their names."""
    stamps = Stamps(output.resolve())
    names = [step.name for step in choose_steps(steps_of(recipe, output), patterns)]
    for name in names:
        with hold_step(stamps, name):
            stamps.forget(name)
    return names
