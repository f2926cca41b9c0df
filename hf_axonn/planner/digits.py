"""Numbers for people: a small one is never printed as 0."""

from __future__ import annotations


NOISE = 1e-9  # what sums of floats leave


def decimals(number: float, digits: int) -> str:
    """Write a number with so many decimals, or its first two digits where these would all be 0."""
    text = f"{number:,.{digits}f}"
    return text if abs(number) < NOISE or text.strip("-0.") else f"{number:.2g}"


def percent(share: float) -> str:
    """Write a share in percent, with one decimal as `decimals`."""
    return f"{decimals(100 * share, 1)}%"


def gib(size: float) -> str:
    """Write bytes in GiB, with one decimal as `decimals`."""
    return decimals(size / 2**30, 1)
