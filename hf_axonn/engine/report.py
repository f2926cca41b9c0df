"""The report of `parallelize`: what it did, module by module, and why it left others as they were."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hf_axonn.topology.weight_kind import WeightKind


@dataclass(frozen=True)
class Entry:
    """One module that has parameters.

    Args:
        name: its name in the model.
        kind: of its weights.
        parameters: elements of its own parameters, in the full model; of tied ones in the first module alone.
        reason: why it is not sharded, or how; empty where the kind says it all.
    """

    name: str
    kind: WeightKind
    parameters: int
    reason: str = ""


@dataclass
class Report:
    """The result of `parallelize`. `print(report)` shows a line a kind of module; `lines()` one for each module.

    Attributes:
        grid: the grid as text.
        summary: how the model was sharded.
        layout: how the residual stream is laid out between blocks, and why.
        rows: how context divides the positions of rows; empty without it.
        experts: how tokens and experts meet, and why; empty without experts.
        entries: one for each module that has parameters of its own.
        counted: ids of the parameters in them, while they are written.
    """

    grid: str
    summary: str
    layout: str = ""
    rows: str = ""
    experts: str = ""
    entries: list[Entry] = field(default_factory=list)
    counted: set[int] = field(default_factory=set, repr=False, compare=False)

    def lines(self) -> list[str]:
        """One line a module: `sharded NAME KIND` or `not sharded NAME: REASON`, for grep."""
        return [
            f"not sharded {entry.name}: {entry.reason}"
            if entry.kind == WeightKind.REPLICATED
            else f"sharded {entry.name} {entry.kind}{': ' + entry.reason if entry.reason else ''}"
            for entry in self.entries
        ]

    def not_sharded(self) -> list[Entry]:
        """Modules whose parameters every rank holds in full."""
        return [entry for entry in self.entries if entry.kind == WeightKind.REPLICATED]

    def __str__(self) -> str:
        counts = Counter()
        sizes = Counter()
        for entry in self.entries:
            key = (entry.kind, entry.reason)
            counts[key] += 1
            sizes[key] += entry.parameters
        lines = [f"grid {self.grid}: {self.summary}"]
        lines += [f"  {text}" for text in (self.layout, self.rows, self.experts) if text]
        for (kind, reason), count in counts.items():
            text = f"{reason}" if kind == WeightKind.REPLICATED else f"{kind}{', ' + reason if reason else ''}"
            mark = "not sharded" if kind == WeightKind.REPLICATED else "sharded"
            lines.append(f"  {mark:<11} {count:>5} modules {sizes[kind, reason]:>15,} parameters  {text}")
        return "\n".join(lines)
