"""Rows of the architecture survey, and how they are printed."""

from __future__ import annotations

import os
import platform
import re
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path


VERDICTS = ("wrong", "planned", "planned in part", "Linear by Linear", "not possible")
REFUSED = "refused"  # a verdict on grids with context alone
DIVIDED_ROWS = "## Divided rows\n"  # the section that is surveyed by itself
IMAGES = "## Models with images\n"  # the section of tests/parallel/test_images.py


@dataclass
class Row:
    """One model type.

    Attributes:
        impossible: why it does not run on one process.
        refused: why its rows cannot be divided over context.
        planned: whether it is cut by blocks, in whole or in part.
        part: whether it is so without attention and mixers, or without MLPs and experts.
        whole: modules of its layers that get full sequences.
        how: what the report of `parallelize` says in one line.
        sharded, replicated: parameters that are divided among the ranks, and that every rank holds.
        errors: by grid, (largest relative error, whose): of the loss and of all gradients.
        failures: by grid, what went wrong in place of errors.
    """

    model_type: str
    class_name: str = ""
    impossible: str = ""
    refused: str = ""
    planned: bool = False
    part: bool = False
    whole: int = 0
    how: str = ""
    sharded: int = 0
    replicated: int = 0
    errors: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def worst(self) -> tuple[float, str, str]:
        """(error, whose, grid), the largest of all; a NaN counts as infinite."""
        every = [(error, whose, grid) for grid, errors in self.errors.items() for error, whose in errors]
        finite = [(error if error == error else float("inf"), whose, grid) for error, whose, grid in every]
        return max(finite, default=(0.0, "", ""))

    def verdict(self, bound: float) -> str:
        """One of VERDICTS, or REFUSED."""
        if self.impossible:
            return "not possible"
        if self.refused:
            return REFUSED
        if self.failures or self.worst()[0] > bound:
            return "wrong"
        if self.part:
            return "planned in part"
        return "planned" if self.planned else "Linear by Linear"

    def note(self, bound: float) -> str:
        """What else there is to say: how it is cut, why not by blocks, or what is wrong."""
        if self.impossible or self.refused:
            return self.impossible or self.refused
        problems = [f"{grid}: {text}" for grid, text in self.failures.items()]
        error, whose, grid = self.worst()
        if error > bound:
            problems.append(f"{grid}: {whose} {error:.1e}")
        # The table says Linear by Linear already.
        return "; ".join(problems) or re.sub(r"[:;,]? every Linear on its own.*", "", self.how)

    def line(self, bound: float) -> str:
        """The row as a line of text."""
        size = f"{self.sharded:>8,} {self.replicated:>8,}" if self.how else " " * 17
        error, _, grid = self.worst()
        return f"{self.model_type:<26} {self.verdict(bound):<17}{size}  {error:.0e} {grid:<7} {self.note(bound)}"


HEADER = f"{'model type':<26} {'verdict':<17} sharded  replic.  error on      how, or why not"


def summary(rows: list[Row], bound: float) -> str:
    """How many rows have which verdict, in one line."""
    return _count([(row.verdict(bound), bool(row.whole)) for row in rows])


def _count(found: list[tuple[str, bool]]) -> str:
    """Summarize pairs of a verdict and whether some module gets full sequences."""
    counts = Counter(verdict for verdict, _ in found)
    parts = {verdict: f"{counts[verdict]} {verdict}" for verdict in (*VERDICTS, REFUSED)}
    parts["planned"] += f" ({found.count(('planned', False))} with nothing on full sequences)"
    if not counts[REFUSED]:
        del parts[REFUSED]
    return f"{len(found)} model types: " + ", ".join(parts.values())


EXPLANATION = """\
Every model type that `AutoModelForCausalLM` knows is built tiny and random, parallelized, and compared with one
process in float64, the loss and every gradient, on the grids {grids}. Wrong
means an error above {bound:.0e} on any of them. `python -m tests.benchmarks.architectures.survey` repeats it.
Last run: {minutes:.0f} minutes on {cores} cores; {versions}.

- **planned**: attention or a mixer, and MLPs or experts, are sharded as blocks, the residual stream is sharded too.
- **planned in part**: one of the two is, the other one gets full sequences.
- **Linear by Linear**: every Linear, embedding and head is sharded separately, activations are full on every (x, y).
- **not possible**: the class does not train on one process as it is; the last column has the reason.

*Sharded* and *replicated* count the parameters of the tiny model that the ranks shard and that every rank holds.
*Error* is the largest relative error of loss and gradients over all grids, measured as in numerics.md.
"""


def markdown(rows: list[Row], grids: list[str], bound: float, seconds: float) -> str:
    """The full survey as docs/architectures.md."""
    versions = [f"{name} {version(name)}" for name in ("torch", "transformers")]
    explanation = EXPLANATION.format(
        grids=", ".join(grids),
        bound=bound,
        minutes=seconds / 60,
        cores=os.cpu_count(),
        versions=", ".join([*versions, f"Python {platform.python_version()}"]),
    )
    lines = [
        "# Architectures",
        "",
        "<!-- written by tests/benchmarks/architectures/survey.py -->",
        "",
        f"{summary(rows, bound)}.",
        "",
        explanation,
        "| model type | class | sharding | sharded | replicated | error | grid | how, or why not |",
        "|---|---|---|--:|--:|--:|---|---|",
    ]
    lines += [_table_line(row, bound) for row in rows]
    return "\n".join(lines) + "\n"


def _table_line(row: Row, bound: float) -> str:
    error, _, grid = row.worst()
    numbers = f"{row.sharded:,} | {row.replicated:,} | {error:.0e} | {grid}" if row.how else " | | |"
    note = row.note(bound).replace("|", "/")
    return f"| {row.model_type} | {row.class_name} | {row.verdict(bound)} | {numbers} | {note} |"


def divided_rows(rows: list[Row], grids: list[str], bound: float) -> str:
    """The section of docs/architectures.md about grids with context: how many types are equal, and why others are
    refused."""
    trained = [row for row in rows if not row.impossible]
    equal = [row for row in trained if row.verdict(bound) in ("planned", "planned in part", "Linear by Linear")]
    reasons: dict[str, list[str]] = {}
    for row in trained:
        if row.refused:
            reasons.setdefault(_kind_of(row.refused), []).append(row.model_type)
    wrong = len(trained) - len(equal) - sum(map(len, reasons.values()))
    text = (
        f"Of {len(trained)} model types {len(equal)} equal one process where [context divides the positions of their "
        f"rows](how_to/long_rows.md), loss and every gradient within {bound:.0e} on the grid {', '.join(grids)}, and "
        f"{wrong} are wrong. The others are refused with one of the reasons below, before a step is made. "
        f"`python -m tests.benchmarks.architectures.survey` on that grid alone repeats it."
    )
    lines = [DIVIDED_ROWS, *textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False), ""]
    lines += ["| reason | number | model types |", "|---|--:|---|"]
    for reason, types in sorted(reasons.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {reason} | {len(types)} | {', '.join(types)} |")
    return "\n".join(lines) + "\n"


def _kind_of(reason: str) -> str:
    """A reason without the names of one model."""
    return re.sub(r" \(.*\)$", "", reason.replace("|", "/"))


def update_page(path: Path, rows: list[Row], bound: float) -> None:
    """Replace the lines of some model types in the table of docs/architectures.md, and count all lines again."""
    new = {row.model_type: _table_line(row, bound) for row in rows}
    table, *divided = path.read_text().partition(f"\n{DIVIDED_ROWS}")
    lines = table.split("\n")
    cells = _cells(lines)
    for index, row in cells.items():
        if row[1] in new:
            lines[index] = new[row[1]]
            cells[index] = [cell.strip() for cell in lines[index].split("|")]
    found = [(row[3], "on full sequences" in row[8]) for row in cells.values() if row[3] in VERDICTS]
    counted = next(index for index, line in enumerate(lines) if " model types: " in line)
    lines[counted] = f"{_count(found)}."
    path.write_text("".join(("\n".join(lines), *divided)))


def _cells(lines: list[str]) -> dict[int, list[str]]:
    """Cells of the lines that are rows of a table, by the number of the line; the first cell is empty."""
    return {index: [cell.strip() for cell in line.split("|")] for index, line in enumerate(lines) if line[:2] == "| "}


def read_verdicts(path: Path) -> dict[str, tuple[str, str]]:
    """Read (verdict, note) by model type from docs/architectures.md or another file of `markdown`."""
    table, _, _ = path.read_text().partition(f"\n{DIVIDED_ROWS}")
    return {row[1]: (row[3], row[8]) for row in _cells(table.split("\n")).values() if row[3] in VERDICTS}


def write_page(path: Path, rows: list[Row], grids: list[str], bound: float, seconds: float) -> None:
    """Write the part of docs/architectures.md that these grids are for; the others stay."""
    surveyed, *images = path.read_text().partition(f"\n{IMAGES}")
    table, _, _ = before = surveyed.partition(f"\n{DIVIDED_ROWS}")
    if any(row.refused for row in rows):
        path.write_text("".join((f"{table}\n{divided_rows(rows, grids, bound)}", *images)))
    else:
        path.write_text("".join((markdown(rows, grids, bound, seconds), *before[1:], *images)))
