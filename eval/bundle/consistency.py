"""Numbers of one sample that follow from others of it, and so must agree with them."""

from collections.abc import Iterator
from math import isclose, log

from hf_axonn_eval.data.results import LOGPROB_ROUNDING, MEASURED, SampleResult
from hf_axonn_eval.metrics.registry import METRICS
from hf_axonn_eval.metrics.text import NEAR_VERBATIM, first_miss


HALF = log(0.5)  # no other token is as likely as one that has more
_SUM = 1e-6  # of a sum of log-probabilities, relative, and in nats near 0


def contradictions(result: SampleResult, near_tie_below: float | None) -> Iterator[str]:
    """Yield sentences on numbers of a result that its other numbers deny.

    Args:
        result: without texts and ids.
        near_tie_below: margins below it, in nats, are near ties; None if it is not known.
    """
    hits, logprobs = result.hits, result.logprobs
    for name, metric in METRICS.items():
        stored = result.metric(name)
        if stored is None or name in MEASURED or not set(metric.inputs) <= set(MEASURED):
            continue
        found = metric(vars(result))
        if found is not None and not isclose(float(stored), float(found), rel_tol=_SUM, abs_tol=_SUM):
            yield f"{name} is {stored}, but {', '.join(metric.inputs)} give {found}"
    if hits is not None and result.divergence_point != first_miss(hits):
        yield f"divergence_point is {result.divergence_point}, but by the hits it is {first_miss(hits)}"
    if logprobs is not None and result.logprob is not None:
        if not isclose(result.logprob, sum(logprobs), rel_tol=_SUM, abs_tol=_SUM):
            yield f"logprob is {result.logprob}, but those of the tokens add up to {sum(logprobs)}"
    if hits is not None and logprobs is not None:
        for place, (hit, logprob) in enumerate(zip(hits, logprobs, strict=True)):
            if not hit and logprob > HALF + LOGPROB_ROUNDING:
                yield f"token {place} is said to be missed, but its log-probability {logprob} is above one half's"
    if result.ranks is not None and hits is not None and logprobs is not None:
        for place, (rank, hit, logprob) in enumerate(zip(result.ranks, hits, logprobs, strict=True)):
            if hit and rank != 1:
                yield f"token {place} is said to be the first choice, but its rank is {rank}"
            elif logprob > LOGPROB_ROUNDING - log(rank):
                yield f"token {place} has rank {rank}, but its log-probability {logprob} is above that of 1 / {rank}"
    if near_tie_below is not None and result.margin is not None and result.near_tie is not None:
        if result.near_tie != (result.margin < near_tie_below):
            yield f"near_tie is {result.near_tie}, but the margin is {result.margin} and the bound {near_tie_below}"
    if result.edit_distance is not None:
        if (result.edit_distance == 0) != result.exact_match:
            yield f"edit_distance is {result.edit_distance}, but exact_match {result.exact_match}"
        if result.near_verbatim is not None and result.near_verbatim != (result.edit_distance <= NEAR_VERBATIM):
            yield f"near_verbatim is {result.near_verbatim}, but edit_distance {result.edit_distance}"
