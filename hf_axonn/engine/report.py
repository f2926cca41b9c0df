"""What `parallelize` did, module by module, and why it left alone what it left alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """One module that has parameters.

    Args:
        name: its name in the model.
        style: column, row, vocabulary, full, experts, gathered, replicated or adapter.
        parameters: elements of its own parameters, in the whole model.
        reason: why it is not sharded, or how; empty where the style says it all.
    """

    name: str
    style: str
    parameters: int
    reason: str = ""


@dataclass
class Report:
    """The result of `parallelize`. `print(report)` shows a line a kind of module; `lines()` one for each module.

    Attributes:
        grid: the grid as text.
        summary: how the model as a whole was cut.
        layout: how the residual stream is laid out between blocks, and why.
        entries: one for each module that has parameters of its own.
    """

    grid: str
    summary: str
    layout: str = ""
    entries: list[Entry] = field(default_factory=list)

    def lines(self) -> list[str]:
        """One line a module: `sharded NAME STYLE` or `not sharded NAME: REASON`, for grep."""
        return [
            f"not sharded {entry.name}: {entry.reason}"
            if entry.style == "replicated"
            else f"sharded {entry.name} {entry.style}{': ' + entry.reason if entry.reason else ''}"
            for entry in self.entries
        ]

    def not_sharded(self) -> list[Entry]:
        """Modules whose parameters every rank holds whole."""
        return [entry for entry in self.entries if entry.style == "replicated"]

    def __str__(self) -> str:
        counts = Counter()
        sizes = Counter()
        for entry in self.entries:
            key = (entry.style, entry.reason)
            counts[key] += 1
            sizes[key] += entry.parameters
        lines = [f"grid {self.grid}: {self.summary}"]
        if self.layout:
            lines.append(f"  {self.layout}")
        for (style, reason), count in counts.items():
            text = f"{reason}" if style == "replicated" else f"{style}{', ' + reason if reason else ''}"
            mark = "not sharded" if style == "replicated" else "sharded"
            lines.append(f"  {mark:<11} {count:>5} modules {sizes[style, reason]:>15,} parameters  {text}")
        return "\n".join(lines)
