"""Results that may still be under way: what every asynchronous collective returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Pending:
    """A result that may still be under way. `wait()` returns it, any number of times."""

    def __init__(self, result: Any, work: Any = None, finish: Callable[[Any], Any] | None = None):
        self._result = result
        self._work = work
        self._finish = finish

    def wait(self) -> Any:
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._finish is not None:
            self._result = self._finish(self._result)
            self._finish = None
        return self._result

    def then(self, finish: Callable[[Any], Any]) -> Pending:
        """The same work, whose result is `finish` of this one's."""
        first = self._finish
        both = finish if first is None else lambda result: finish(first(result))
        return Pending(self._result, self._work, both)


def together(pendings: list[Pending]) -> Pending:
    """Several as one, whose `wait()` returns the list of their results."""
    return Pending(pendings, finish=lambda each: [pending.wait() for pending in each])
