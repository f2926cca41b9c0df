"""How hypothesis makes things up: the same ones in every run; AXONN_FUZZ=2000 tries as many others."""

from __future__ import annotations

import os

from hypothesis import settings


def fuzz(examples: int) -> settings:
    """Settings, and a decorator, for so many examples."""
    more = int(os.environ.get("AXONN_FUZZ", "0"))
    return settings(max_examples=more or examples, derandomize=not more)
