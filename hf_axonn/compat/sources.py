"""Sources of functions and modules, as syntax trees."""

from __future__ import annotations

import ast
import inspect
import os
import textwrap
import tokenize
from collections.abc import Callable
from types import ModuleType


def parse_source(code: Callable | ModuleType) -> ast.Module:
    """Return the syntax tree of the source of a function, or of all of a module. No communication.

    Python's cache of source lines is not safe among threads: another one that reads sources at the same time, as for a
    traceback, makes code of a file look as if it had none. So the file itself is asked then.

    Raises:
        OSError: it was made without a source.
        TypeError: it is neither a function of Python nor a module.
        SyntaxError: its source is no statement by itself, as that of a lambda.
    """
    code = inspect.unwrap(code)  # type: ignore[arg-type]
    # From 3.13 on Python keeps the text of `python -c` under the name that code of `exec` has, too.
    if inspect.isfunction(code) and code.__code__.co_filename == "<string>":
        raise OSError("could not get source code: it was made by exec")
    try:
        source = inspect.getsource(code)
    except OSError:
        path = inspect.getsourcefile(code)
        if path is None or not os.path.isfile(path):
            raise
        with tokenize.open(path) as file:
            lines = file.readlines()
        if not inspect.ismodule(code):
            lines = inspect.getblock(lines[code.__code__.co_firstlineno - 1 :])
        source = "".join(lines)
    return ast.parse(textwrap.dedent(source))
