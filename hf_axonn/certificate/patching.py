"""Methods of libraries that are replaced while a script runs, by methods of one object that share its state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


Stock = Callable[..., Any]  # a function that is replaced


def patch(*owners: Any, name: str = "") -> Callable[[Any], Any]:
    """Mark a method of `Patches` as one that replaces that of its name, or of another name, in classes or modules.

    It is called with the stock function before the arguments that this would get.
    """

    def mark(method: Any) -> Any:
        targets = [(owner, name or method.__name__) for owner in owners]
        method.targets = [*getattr(method, "targets", ()), *targets]
        return method

    return mark


class Patches:
    """Methods that replace others."""

    def replacements(self) -> dict[tuple[Any, str], Any]:
        """Return the values for `compat.replaced.replace_attributes`."""
        return {
            (owner, name): _replace(getattr(owner, name), vars(owner).get(name), getattr(self, method.__name__))
            for method in vars(type(self)).values()
            for owner, name in getattr(method, "targets", ())
        }


def _replace(stock: Any, own: Any, method: Callable[..., Any]) -> Any:
    if isinstance(own, property):
        return property(_replace(own.fget, None, method))
    stock = own.__func__ if isinstance(own, classmethod) else stock

    @functools.wraps(stock)
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(stock, *args, **kwargs)

    return classmethod(call) if isinstance(own, classmethod) else call
