"""Do something as soon as a module has been imported, without importing it.

Only the standard library: `launch/autoload.py` uses it inside of every `import torch`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec


def after_import(name: str, callback: Callable[[], None]) -> None:
    """Call `callback()` once, right after the module `name` has been imported; at once if it already is.

    An exception of the callback surfaces at that import, and then the next import of the module tries again, unless
    the import was under way when this was called.
    """
    finder = _PostImportFinder(name, callback)
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if spec is not None and getattr(spec, "_initializing", False):
        spec.__class__ = _Executing
        vars(spec).setdefault("callbacks", []).append(callback)
    elif name in sys.modules:
        callback()
    elif finder not in sys.meta_path:
        sys.meta_path.insert(0, finder)


class _Executing(ModuleSpec):
    """The spec of a module that is being imported. Python tells it when it has been, or has failed."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "_initializing":
            super().__setattr__("__class__", ModuleSpec)
            for callback in vars(self).pop("callbacks"):
                after_import(self.name, callback)


@dataclass(frozen=True)
class _PostImportFinder:
    """Finds one module by asking the finders behind it, and wraps its loader."""

    name: str
    callback: Callable[[], None]

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find_spec = getattr(finder, "find_spec", None)
            spec = find_spec(fullname, path, target) if find_spec else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _PostImportLoader(spec.loader, self)
                return spec
        return None


class _PostImportLoader:
    """A module's own loader, with the callback after it."""

    def __init__(self, loader, finder):
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        # The module must not be seen with our loader: inspect and importlib.resources ask it for sources and files.
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.callback()
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
