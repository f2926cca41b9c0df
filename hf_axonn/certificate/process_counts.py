"""Numbers that a script makes of the number of processes, on one process that stands for several.

Accelerate moves a schedule as many steps at a time as there are processes, so scripts multiply its length by
`accelerator.num_processes`, as Transformers' examples do. On one process that is 1, and has to be for everything else:
its loss is not averaged, its batch not divided. So the number is 1, and remembers, as do numbers computed of it, what
it is under the launch file. Schedules are given that.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any


class ProcessCount(int):
    """A number of one process, and whole numbers computed of it.

    Attributes:
        launched: what it is under the launch file.
    """

    launched: int

    def __new__(cls, value: int, launched: int) -> ProcessCount:
        made = super().__new__(cls, value)
        made.launched = launched
        return made

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # whoever copies or stores it gets the number


def _remember(name: str) -> Callable[[ProcessCount, Any], Any]:
    operator = getattr(int, name)

    @functools.wraps(operator)
    def compute(self: ProcessCount, other: Any) -> Any:
        value, launched = operator(self, other), operator(self.launched, getattr(other, "launched", other))
        return value if value is NotImplemented else ProcessCount(value, launched)

    return compute


for _name in ("add", "sub", "mul", "floordiv"):
    for _side in ("", "r"):
        setattr(ProcessCount, f"__{_side}{_name}__", _remember(f"__{_side}{_name}__"))


def as_launched(schedule: Any) -> None:
    """Let a schedule of torch have the numbers that it has under the launch file: its own attributes, those of
    schedules that it joins, and arguments of the functions by which LambdaLR computes rates."""
    _replace_counts(vars(schedule))
    for part in getattr(schedule, "_schedulers", ()):
        as_launched(part)
    for function in getattr(schedule, "lr_lambdas", ()):
        if isinstance(function, functools.partial):
            _replace_counts(function.keywords)
        elif isinstance(function, FunctionType):
            for cell in function.__closure__ or ():
                with contextlib.suppress(ValueError):  # of a name that has no value yet
                    if isinstance(cell.cell_contents, ProcessCount):
                        cell.cell_contents = cell.cell_contents.launched
        else:
            _replace_counts(getattr(function, "__dict__", {}))


def _replace_counts(values: dict[str, Any] | list[Any]) -> None:
    """Replace counts in place, also in lists inside: others may have these, too."""
    for place, value in [*(values.items() if isinstance(values, dict) else enumerate(values))]:
        if isinstance(value, ProcessCount):
            values[place] = value.launched
        elif isinstance(value, list):
            _replace_counts(value)
