"""Import Transformers without torch, as where torch is not installed: tokenizers need none, and it takes seconds.

Transformers looks for torch once, when it is imported, so a process that has imported it in this way has no models of
Transformers any more. It is for a command that needs none, in the process that is started for it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, cast


ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"  # silences "PyTorch was not found"


@contextlib.contextmanager
def without_torch() -> Iterator[None]:
    """Hide torch while Transformers is imported. Does nothing where one of the two has been imported."""
    if "torch" in sys.modules or "transformers" in sys.modules:
        yield
        return
    advice = os.environ.get(ADVICE)
    os.environ[ADVICE] = "1"
    sys.modules["torch"] = cast(Any, None)  # Python's own mark of a module that cannot be imported
    try:
        yield
    finally:
        del sys.modules["torch"]
        del os.environ[ADVICE]
        if advice is not None:
            os.environ[ADVICE] = advice
