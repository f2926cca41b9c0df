"""How much work a function is, in a unit that does not depend on the machine or its load."""

import sys
from collections.abc import Callable
from typing import Any


def calls_of(function: Callable, *args: Any) -> tuple[int, Any]:
    """The number of calls, of Python and of C functions, that `function(*args)` makes, and its result."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        result = function(*args)
    finally:
        sys.setprofile(before)
    return calls, result
