"""Replace attributes, as of other libraries, for the time of a `with`, and wrap methods."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def replace_attributes(values: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Give attributes other values inside: (owner, name) -> value. What was inherited is inherited again."""
    before = {(owner, name): vars(owner)[name] for owner, name in values if name in vars(owner)}
    try:
        for (owner, name), value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for owner, name in values:
            if (owner, name) in before:
                setattr(owner, name, before[owner, name])
            else:
                delattr(owner, name)


def around_method(original: Callable, wrapper: Callable) -> Callable:
    """Return a method with the name and signature of `original` that calls `wrapper(self, original of self, ...)`."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(self, functools.partial(original, self), *args, **kwargs)

    return method
