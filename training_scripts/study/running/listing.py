"""Tables of what a study has to do, what is done, and how long the rest takes."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_axonn_scripts.demo.pipeline import Stamps
from hf_axonn_scripts.study.recipe.cost import cost_of
from hf_axonn_scripts.study.recipe.definition import MACHINE, Recipe
from hf_axonn_scripts.study.recipe.steps import Step, steps_of
from hf_axonn_scripts.study.running.work import failure_of, is_done


@dataclass(frozen=True)
class Forecast:
    """Seconds of steps: the predicted ones, times the ratio of real to predicted seconds of finished steps.

    Attributes:
        steps: every step by its name.
        predicted: name of a step -> seconds as predicted.
        took: name of a finished step -> seconds of its last attempt.
        whole: names of the finished steps whose last attempt was the only one.
    """

    steps: Mapping[str, Step]
    predicted: Mapping[str, float]
    took: Mapping[str, float]
    whole: Collection[str]

    def seconds(self, name: str) -> float:
        """Forecast a step by the finished ones of its kind; if there is none, by all that use a model.

        Downloads say nothing of products.
        """
        kinds = {other: self.steps[other].kind for other in self.whole}
        alike = [other for other, kind in kinds.items() if kind == self.steps[name].kind]
        alike = alike or [other for other, kind in kinds.items() if kind != "data"]
        predicted = sum(self.predicted[other] for other in alike)
        scale = sum(self.took[other] for other in alike) / predicted if predicted else 1.0
        return self.predicted[name] * scale

    def seconds_left(self, names: Collection[str] | None = None) -> float:
        """Return the seconds of those steps that are not finished."""
        names = self.steps if names is None else names
        return sum(self.seconds(name) for name in names if name not in self.took)

    @property
    def share(self) -> float:
        """Finished part of the predicted work."""
        return sum(self.predicted[name] for name in self.took) / (sum(self.predicted.values()) or 1.0)

    def line(self, names: Collection[str] | None = None) -> str:
        """Return the progress of the study in a line; time left is that of the named steps."""
        left = duration(self.seconds_left(names))
        return f"{len(self.took)} of {len(self.steps)} steps, {self.share:.0%} of the predicted work, {left} left"


def predictions(recipe: Recipe, steps: Sequence[Step]) -> dict[str, float]:
    """Return the predicted seconds by name of a step."""
    return {step.name: cost_of(step, recipe).seconds for step in steps}


def forecast(steps: Sequence[Step], stamps: Stamps, predicted: Mapping[str, float]) -> Forecast:
    """Return what is known now of the time that steps take."""
    finished = {step.name: stamps.read(step.name) for step in steps if is_done(step, stamps)}
    return Forecast(
        {step.name: step for step in steps},
        predicted,
        {name: stamp["seconds"] for name, stamp in finished.items()},
        [name for name, stamp in finished.items() if stamp["attempts"] == 1],
    )


def dry_run(recipe: Recipe, output: Path, *, every: bool = False) -> str:
    """Return a table of the steps: arithmetic, time and disk as predicted, and whether they are done.

    Args:
        recipe, output: the study and its directory, which need not be there.
        every: one line a step; else one for each kind and model.
    """
    steps = steps_of(recipe, output)
    costs = {step.name: cost_of(step, recipe) for step in steps}
    finished = _find_finished(steps, output)
    columns: dict[str, tuple[str, Callable[[float], str]]] = {"FLOPs": ("flops", _flops)}
    columns |= {"time": ("seconds", duration), "disk": ("disk_bytes", size)}
    if recipe.machine != MACHINE:
        columns["GPU hours"] = ("gpu_hours", lambda hours: f"{hours:,.0f}" if hours else "-")

    def sums(group: Sequence[Step]) -> list[str]:
        return [shown(sum(getattr(costs[step.name], name) for step in group)) for name, shown in columns.values()]

    groups: dict[tuple[str, ...], list[Step]] = {}
    for step in steps:
        groups.setdefault((step.name,) if every else (step.kind, step.model or ""), []).append(step)
    heads = ["step", "done"] if every else ["kind", "model", "steps", "done"]
    rows = []
    for key, group in [*groups.items(), (("all",) if every else ("all", ""), steps)]:
        done = sum(step.name in finished for step in group)
        counts = ["yes" if done == len(group) else "no"] if every else [f"{len(group)}", f"{done}"]
        rows.append([*key, *counts, *sums(group)])
    ranks = max(step.processes for step in steps)
    text = (
        f"{recipe.name}: {len(recipe.models)} models, {len(recipe.runs)} continuations, up to {ranks} ranks of "
        f"{recipe.machine}; files in {output}\n\n{_table([*heads, *columns], rows)}"
    )
    left = [step for step in steps if step.name not in finished]
    if finished and left:
        about = ", ".join(f"{value} {name}" for name, value in zip(columns, sums(left), strict=True))
        text += f"\n\n{len(left)} steps are left: {about}"
    return text


def status(recipe: Recipe, output: Path) -> str:
    """Return the progress of a study: time by kind, the steps that failed or were cut off, and the time left."""
    steps, stamps = steps_of(recipe, output), Stamps(output.resolve())
    known = forecast(steps, stamps, predictions(recipe, steps))
    kinds: dict[str, list[str]] = {}
    for step in steps:
        kinds.setdefault(step.kind, []).append(step.name)
    rows = []
    for kind, names in kinds.items():
        took = duration(sum(known.took.get(name, 0.0) for name in names))
        finished = sum(name in known.took for name in names)
        rows.append([kind, str(len(names)), str(finished), took, duration(known.seconds_left(names))])
    lines = [_table(["kind", "steps", "done", "took", "left"], rows), ""]
    for step in steps:
        if step.name in known.took:
            continue
        if failure_of(step, stamps).exists():
            lines.append(f"failed: {step.name}, {failure_of(step, stamps).read_text(encoding='utf-8').strip()}")
        elif mark := stamps.begun(step.name):
            lines.append(f"begun and not done: {step.name}, {mark['began']}, attempt {mark['attempts']}")
    return "\n".join([*lines, known.line()])


def duration(seconds: float) -> str:
    """Write seconds as people say them: `50 s`, `12 min`, `1 h 20 min`, `3.5 days`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes / 1440:.1f} days"


def size(amount: float) -> str:
    """Write bytes with a decimal prefix."""
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB")):
        if amount >= 10**power:
            return f"{amount / 10**power:.1f} {unit}"
    return f"{amount / 1000:.0f} kB"


def _find_finished(steps: Sequence[Step], output: Path) -> set[str]:
    if not (output / ".stamps").exists():  # a look makes no directory
        return set()
    stamps = Stamps(output.resolve())
    return {step.name for step in steps if is_done(step, stamps)}


def _flops(amount: float) -> str:
    return f"{amount:.1e}" if amount else "-"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write columns of text; those that hold numbers are set to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    right = [head not in ("kind", "model", "step") for head in heads]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in (heads, *rows)
    )
