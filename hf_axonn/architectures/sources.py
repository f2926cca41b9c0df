"""Sources of the functions of a model, as syntax trees."""

from __future__ import annotations

import ast
import inspect
import os
import textwrap
import tokenize
from collections.abc import Callable


def parse_source(function: Callable) -> ast.Module:
    """Return the syntax tree of a function's source. No communication.

    Python's cache of source lines is not safe among threads: another one that reads sources at the same time, as for a
    traceback, makes a function of a file look as if it had none. So the file itself is asked then.

    Raises:
        OSError: it was made without a source.
        TypeError: it is no function of Python.
        SyntaxError: its source is no statement by itself, as that of a lambda.
    """
    try:
        source = inspect.getsource(function)
    except OSError:
        code = inspect.unwrap(function).__code__
        if not os.path.isfile(code.co_filename):
            raise
        with tokenize.open(code.co_filename) as file:
            source = "".join(inspect.getblock(file.readlines()[code.co_firstlineno - 1 :]))
    return ast.parse(textwrap.dedent(source))
