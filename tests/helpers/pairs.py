"""Few command lines in which every pair of values of any two options occurs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product


Values = Mapping[str, Sequence[object]]


def pairwise(options: Values, most: int = 40) -> Iterator[dict[str, object]]:
    """Choices of one value for each option, at most `most`: each begins with a pair that is left, and takes for every
    other option the value with which most pairs are new."""
    names = list(options)
    left = {
        ((one, this), (other, that))
        for one, other in combinations(names, 2)
        for this, that in product(range(len(options[one])), range(len(options[other])))
    }
    for _ in range(most):
        if not left:
            return
        chosen = dict(min(left))
        for name in names:
            if name not in chosen:
                chosen[name] = max(
                    range(len(options[name])),
                    key=lambda value: len(left & _pairs({**chosen, name: value}, names)),  # noqa: B023 - used at once
                )
        left -= _pairs(chosen, names)
        yield {name: options[name][chosen[name]] for name in names}


def _pairs(chosen: Mapping[str, int], names: Sequence[str]) -> set:
    return set(combinations([(name, chosen[name]) for name in names if name in chosen], 2))


def words(choice: Mapping[str, object]) -> list[str]:
    """The words of a command line: None and False leave an option out, True is a switch, a list has several values. A
    name without dashes is an argument."""
    found: list[str] = []
    for name, value in choice.items():
        if value is None or value is False:
            continue
        found += [name] if name.startswith("-") else []
        found += [] if value is True else [str(each) for each in (value if isinstance(value, list) else [value])]
    return found
