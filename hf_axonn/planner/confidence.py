"""Intervals of predicted steps, by the published runs that predictions were compared with.

    spread(prediction)   -> the middle 80% of published over predicted step times, of runs like it
    MARGIN_...           errors of two predictions of one job against each other

The numbers are those of `python -m tests.benchmarks.planner.published --spread`; tests/planner/test_predict.py holds
them to it.
"""

from __future__ import annotations

from typing import NamedTuple

from hf_axonn.planner.predict import Prediction


LONG = 8192  # tokens of a sequence
MANY = 512  # GPUs


class Spread(NamedTuple):
    """Published over predicted step time: the middle 80%, number and class of the runs."""

    low: float
    high: float
    runs: int
    kind: str


SPREADS = {
    "short": Spread(0.86, 1.01, 174, f"without tensor parallelism, sequences of up to {LONG:,} tokens"),
    "long": Spread(0.91, 1.00, 43, f"without tensor parallelism, sequences of more than {LONG:,} tokens"),
    "tensor": Spread(0.92, 1.13, 18, "with tensor parallelism"),
    "pipeline": Spread(0.83, 1.20, 18, "with pipelines"),
    "many": Spread(0.82, 1.20, 7, f"of AxoNN, on {MANY} GPUs or more"),
}
# By how much the errors of two predictions differ at most, in 80% of the pairs of published runs of one model on one
# machine: of the same tensor degree (x * y), and of different ones (nearly all on nodes of four H200).
MARGIN_SAME, MARGIN_OTHER = 0.09, 0.44


def spread(entry: Prediction) -> Spread:
    """The spread of published runs like this one."""
    if entry.grid.pipe > 1:
        return SPREADS["pipeline"]
    if entry.grid.size >= MANY:
        return SPREADS["many"]
    if entry.grid.x * entry.grid.y > 1:
        return SPREADS["tensor"]
    return SPREADS["long" if entry.job.seq > LONG else "short"]


def seconds(entry: Prediction) -> tuple[float, float]:
    """The interval of a step's seconds."""
    low, high, *_ = spread(entry)
    return low * entry.total, high * entry.total


def too_close(best: Prediction, other: Prediction) -> bool:
    """True if the other could as well be the faster of the two."""
    same = best.grid.x * best.grid.y == other.grid.x * other.grid.y
    return other.total <= (1 + (MARGIN_SAME if same else MARGIN_OTHER)) * best.total
