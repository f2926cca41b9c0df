"""Public names of a package, written once: in its `__init__.pyi`, for type checkers and for Python.

The stub imports each name from the module that defines it, a line each. `__init__.py` imports a name when it is first
used.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any


IMPORT = re.compile(r"^from (?P<module>[\w.]+) import (?P<name>\w+) as (?P=name)$", re.MULTILINE)


def lazy_names(namespace: dict[str, Any]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package, whose `globals()` these are.

    They know the names that the stub imports, `__version__` where the package has one, and `__all__`.
    """

    @functools.cache
    def modules() -> dict[str, str]:
        spec = namespace["__spec__"]
        stub = spec.loader.get_data(os.path.join(*spec.submodule_search_locations, "__init__.pyi")).decode()
        return {match["name"]: match["module"] for match in IMPORT.finditer(stub)}

    def list_names() -> list[str]:
        return sorted({*modules(), *({"__version__"} & namespace.keys())})

    def look_up(name: str) -> Any:
        if name == "__all__":
            return list_names()
        if name not in modules():
            raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
        value = namespace[name] = getattr(import_module(modules()[name]), name)
        return value

    return look_up, list_names
