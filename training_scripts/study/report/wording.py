"""How the study's numbers are written, and where they are found: for sentences, claims and tables."""

from collections.abc import Mapping
from typing import Any

from hf_axonn_eval.report.tables import estimate_text
from hf_axonn_scripts.study.recipe.definition import ORDINARY


Content = Mapping[str, Any]  # what findings.measure returned


def largest(content: Content) -> str:
    """The largest model that is not plotted apart and has the ordinary loss."""
    names = [model["model"] for model in content["models"] if not model["apart"]]
    names = [name for name in names if cell_of(content, name, ORDINARY, 0) is not None]
    return names[-1] if names else ""


def fullest(content: Content) -> str:
    """The model with the most losses that is not plotted apart, of several the largest: where losses are compared."""
    names = [model["model"] for model in content["models"] if not model["apart"]]
    losses = {name: len({row["loss"] for row in content["cells"] if row["model"] == name}) for name in names}
    return max(reversed(names), key=losses.__getitem__, default="")


def cell_of(content: Content, model: str, loss: str, bucket: int) -> Mapping[str, Any] | None:
    """The numbers of a model, a loss and a bucket."""
    wanted = (model, loss, bucket)
    rows = (row for row in content["cells"] if (row["model"], row["loss"], row["bucket"]) == wanted)
    return next(rows, None)


def slope_of(content: Content, outcome: str, loss: str, bucket: Any) -> Mapping[str, Any] | None:
    """The line of an outcome by size."""
    wanted = (outcome, loss, bucket)
    rows = (row for row in content["slopes"] if (row["outcome"], row["loss"], row["bucket"]) == wanted)
    return next(rows, None)


def sign(estimate: Mapping[str, Any]) -> int:
    """On which side of 0 the interval is; 0 if it holds 0, or there is none."""
    if estimate["low"] is None:
        return 0
    return 1 if estimate["low"] > 0 else -1 if estimate["high"] < 0 else 0


def cell_text(row: Mapping[str, Any], name: str) -> str:
    """An outcome of a cell: a share as a count, "-" where it was not measured."""
    entry = row.get(name)
    return "-" if entry is None else estimate_text(entry) if "count" in entry else number(entry)


def number(entry: Mapping[str, Any], digits: int = 2) -> str:
    """An estimate with its interval."""
    if entry["mean"] is None:
        return "-"
    return f"{entry['mean']:.{digits}f}" + ("" if entry["low"] is None else f" {ends_text(entry, digits)}")


def difference_text(entry: Mapping[str, Any] | None, digits: int = 2) -> str:
    """A difference with its interval, both with their sign."""
    if entry is None or entry["difference"] is None:
        return "-"
    ends = "" if entry["low"] is None else f" [{entry['low']:+.{digits}f}, {entry['high']:+.{digits}f}]"
    return f"{entry['difference']:+.{digits}f}{ends}"


def value_text(entry: Mapping[str, Any]) -> str:
    """`value` with its interval, as membership has it."""
    return number({**entry, "mean": entry["value"]})


def ends_text(entry: Mapping[str, Any], digits: int = 2) -> str:
    """The interval alone."""
    return "no interval" if entry["low"] is None else f"[{entry['low']:.{digits}f}, {entry['high']:.{digits}f}]"


def plain(number: float | None) -> str:
    """A number without an interval, in three digits."""
    return "-" if number is None else f"{number:.3g}"


def small(number: float | None) -> str:
    """The size of a difference, in two digits."""
    return "-" if number is None else f"{number:.2g}"


def count(number: int, one: str, several: str | None = None) -> str:
    """1 run, 2 runs."""
    return f"{number} {one if number == 1 else several or one + 's'}"
