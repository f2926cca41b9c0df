"""Selection and wording of the study's numbers: for sentences, claims and tables."""

from collections.abc import Iterable, Mapping
from typing import Any

from hf_axonn_eval.report.tables import estimate_text
from hf_axonn_scripts.study.recipe.definition import ORDINARY


Content = Mapping[str, Any]  # of findings.measure


def select(rows: Iterable[Mapping[str, Any]], **values: Any) -> list[Mapping[str, Any]]:
    """Return the rows that have these values."""
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def most_seen(content: Content) -> int:
    """Return the largest bucket; 0 if there is none."""
    return max(content["buckets"], default=0)


def largest(content: Content) -> str:
    """Return the largest model that is not plotted apart and has the ordinary loss."""
    names = [model["model"] for model in content["models"] if not model["apart"]]
    names = [name for name in names if cell_of(content, name, ORDINARY, 0) is not None]
    return names[-1] if names else ""


def fullest(content: Content) -> str:
    """Return the model with the most losses that is not plotted apart, of several the largest: losses are compared
    there."""
    names = [model["model"] for model in content["models"] if not model["apart"]]
    losses = {name: len({row["loss"] for row in select(content["cells"], model=name)}) for name in names}
    return max(reversed(names), key=losses.__getitem__, default="")


def cell_of(content: Content, model: str, loss: str, bucket: int) -> Mapping[str, Any] | None:
    """Return the numbers of a model, a loss and a bucket."""
    return next(iter(select(content["cells"], model=model, loss=loss, bucket=bucket)), None)


def slope_of(content: Content, outcome: str, loss: str, bucket: Any) -> Mapping[str, Any] | None:
    """Return the line of an outcome by size."""
    return next(iter(select(content["slopes"], outcome=outcome, loss=loss, bucket=bucket)), None)


def sign(estimate: Mapping[str, Any]) -> int:
    """Return the side of 0 on which the interval is; 0 if it holds 0, or there is none."""
    if estimate["low"] is None:
        return 0
    return 1 if estimate["low"] > 0 else -1 if estimate["high"] < 0 else 0


def cell_text(row: Mapping[str, Any], name: str) -> str:
    """Write an outcome of a cell: a share as a count, "-" where it was not measured."""
    entry = row.get(name)
    return "-" if entry is None else estimate_text(entry) if "count" in entry else number(entry)


def number(entry: Mapping[str, Any], digits: int = 2) -> str:
    """Write an estimate with its interval."""
    if entry["mean"] is None:
        return "-"
    return f"{entry['mean']:.{digits}f}" + ("" if entry["low"] is None else f" {ends_text(entry, digits)}")


def value_text(entry: Mapping[str, Any]) -> str:
    """Write `value` with its interval, as membership has it."""
    return number({**entry, "mean": entry["value"]})


def ends_text(entry: Mapping[str, Any], digits: int = 2) -> str:
    """Write the interval alone."""
    return "no interval" if entry["low"] is None else f"[{entry['low']:.{digits}f}, {entry['high']:.{digits}f}]"


def plain(number: float | None, digits: int = 3) -> str:
    """Write a number without an interval."""
    return "-" if number is None else f"{number:.{digits}g}"
