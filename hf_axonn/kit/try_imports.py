"""Imports every module of some packages, and the other packages of a folder; a program for another interpreter.

    python -P try_imports.py FOLDER PACKAGE...

The last line that it prints is JSON: the number of modules that can be imported, and for each other one its error, or
the module that it needs and that is not there. It uses the standard library alone.
"""

import importlib
import json
import pkgutil
import sys


def try_imports(folder: str, packages: list[str]) -> dict[str, object]:
    """Return what can be imported: `imported` (a number), `lacking` and `failed` (modules with the reason)."""
    lacking: dict[str, str] = {}
    failed: dict[str, str] = {}
    left, imported = [found.name for found in pkgutil.iter_modules([folder])], 0
    while left:
        name = left.pop()
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            lacking[name] = error.name or str(error)
            continue
        except BaseException as error:  # a module may end the process
            failed[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
            continue
        imported += 1
        if name.partition(".")[0] in packages:
            inside = pkgutil.iter_modules(getattr(module, "__path__", ()))
            left += [f"{name}.{found.name}" for found in inside if found.name != "__main__"]
    return {"imported": imported, "lacking": lacking, "failed": failed}


if __name__ == "__main__":
    found = try_imports(sys.argv[1], sys.argv[2:])
    print(json.dumps(found), flush=True)
