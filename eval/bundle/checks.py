"""What was checked of a bundle, and what came of it."""

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


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that a verifier looks at.

    Args:
        what: the thing.
        state: what came of it.
        said: figures and names.
        needs: of what could not be checked, what it would take.
    """

    what: str
    state: State
    said: str
    needs: str = ""

    @classmethod
    def agrees(cls, what: str, said: str) -> Check:
        """It was checked and agrees."""
        return cls(what=what, state="agrees", said=said)

    @classmethod
    def contradicts(cls, what: str, said: str) -> Check:
        """Something else came out."""
        return cls(what=what, state="contradicts", said=said)

    @classmethod
    def unchecked(cls, what: str, said: str, needs: str) -> Check:
        """It could not be checked."""
        return cls(what=what, state="unchecked", said=said, needs=needs)

    @classmethod
    def of(cls, what: str, wrong: Sequence[str], said: str) -> Check:
        """Contradicts with what is wrong, if anything is; else agrees with what was `said`."""
        return cls.contradicts(what, listed(wrong)) if wrong else cls.agrees(what, said)


def listed(cases: Sequence[str]) -> str:
    """The first of some cases, and how many more there are."""
    more = f"; and {len(cases) - SHOWN:,} more" if len(cases) > SHOWN else ""
    return "; ".join(cases[:SHOWN]) + more


def exit_code(checks: Iterable[Check]) -> int:
    """1 if anything contradicts, else 0."""
    return int(any(check.state == "contradicts" for check in checks))


def terminal_checks(checks: Sequence[Check]) -> list[Any]:
    """For rich: what agrees, what contradicts, and what could not be checked, with what that would take."""
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
            said = f"{check.said}\nneeded: {check.needs}" if check.needs else check.said
            table.add_row(Text(visible(check.what)), Text(visible(said, keep="\n")))
        if some:
            shown.append(table)
    return shown
