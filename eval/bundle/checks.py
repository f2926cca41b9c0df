"""The checks of a bundle: what each looked at, and its outcome."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hf_axonn_eval.data.visible import visible


State = Literal["agrees", "contradicts", "unchecked"]
_HEADINGS: dict[State, str] = {
    "agrees": "checked, and agrees",
    "contradicts": "CONTRADICTS",
    "unchecked": "could not be checked",
}
SHOWN = 3  # of many cases; the rest is counted


@dataclass(frozen=True)
class Check:
    """One thing that a verifier looks at.

    Args:
        what: the thing.
        state: whether it agrees or contradicts, or could not be checked.
        finding: figures and names.
        needs: of what could not be checked, what it would take.
    """

    what: str
    state: State
    finding: str
    needs: str = ""

    @property
    def said(self) -> str:
        """The finding, by the name that it has in files."""
        return self.finding

    def record(self) -> dict[str, str]:
        """Return the check as the file of `verify --output` has it."""
        return {"what": self.what, "state": self.state, "said": self.finding, "needs": self.needs}


def check_cases(what: str, wrong: Sequence[str], finding: str) -> Check:
    """Return a check that contradicts with what is wrong, if anything is; else it agrees with the `finding`."""
    return Check(what, "contradicts", join_cases(wrong)) if wrong else Check(what, "agrees", finding)


def join_cases(cases: Sequence[str]) -> str:
    """Join the first of some cases, and count the others."""
    more = f"; and {len(cases) - SHOWN:,} more" if len(cases) > SHOWN else ""
    return "; ".join(cases[:SHOWN]) + more


def exit_code(checks: Iterable[Check]) -> int:
    """Return 1 if anything contradicts, else 0."""
    return int(any(check.state == "contradicts" for check in checks))


def terminal_checks(checks: Sequence[Check]) -> list[Any]:
    """List for rich what agrees, what contradicts, and what could not be checked, with what that would take."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    shown: list[Any] = []
    for state, heading in _HEADINGS.items():
        some = [check for check in checks if check.state == state]
        shown.append(Text(f"{heading}: {len(some)}", style="bold"))
        table = Table(box=SIMPLE, show_header=False)
        for _ in range(2):
            table.add_column(overflow="fold")
        for check in some:
            text = f"{check.finding}\nneeded: {check.needs}" if check.needs else check.finding
            table.add_row(Text(visible(check.what)), Text(visible(text, keep="\n")))
        if some:
            shown.append(table)
    return shown
