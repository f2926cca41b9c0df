"""(n, p)-discoverability: the number of draws that a stated way of sampling needs until the suffix comes.

Let q be the probability that one draw gives the full suffix. At least one of n independent draws gives it with
probability 1 - (1 - q)^n; a sample is (n, p)-discoverable if that is at least p. q is the product of the
probabilities of the suffix tokens under the distribution that is drawn from, so one teacher-forced pass gives it.

Source: Hayes et al. 2024, arXiv 2410.19482.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, inf, isnan, log1p
from typing import TYPE_CHECKING

from hf_axonn_eval.data.jsonl import is_count
from hf_axonn_eval.data.results import LOGPROB_ROUNDING


if TYPE_CHECKING:
    from torch import Tensor


CHANCES = (0.5, 0.9)  # the p of (n, p) that summaries give
TRIES = (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)  # their n
_ROUNDING = 1e-12  # a quotient this close above a whole number is that number


@dataclass(frozen=True)
class Sampler:
    """A way of drawing tokens, as `generate(do_sample=True)` draws them: temperature, then top-k, then top-p.

    Args:
        temperature: the logits are divided by it.
        top_k: only the k largest logits stay (with all that equal the k-th one); None: all stay.
        top_p: of these only the smallest set of most likely tokens stays that has at least this probability; None:
            all stay.
    Raises:
        ValueError: a temperature that is not positive, a top_k below 1, or a top_p that is not above 0 and at most 1.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 < self.temperature < inf:
            raise ValueError(
                f"temperature is {self.temperature!r}, but it must be a positive number; at temperature 0 nothing is "
                "drawn, and exact_match answers the question."
            )
        if self.top_k is not None and not is_count(self.top_k, least=1):
            raise ValueError(f"top_k is {self.top_k!r}, but it must be a whole number of at least 1, or None for all.")
        if self.top_p is not None and (not _is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise ValueError(f"top_p is {self.top_p!r}, but it must be above 0 and at most 1, or None for all.")

    @property
    def text(self) -> str:
        """Text for records, such as "temperature 1, top-k 40"."""
        parts = [f"temperature {self.temperature:g}"]
        parts += [f"top-k {self.top_k}"] if self.top_k is not None else []
        parts += [f"top-p {self.top_p:g}"] if self.top_p is not None else []
        return ", ".join(parts)

    def logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the log-probability of each target when it is drawn this way.

        Args:
            logits: [..., V]; float64 stays, everything else is computed in float32, as in `generate`.
            targets: [...] ids.
        Returns:
            [...] in nats; -inf where the target is cut off and can never be drawn.
        """
        scores = self._scores(logits)
        return scores.gather(-1, targets[..., None])[..., 0] - scores.logsumexp(-1)

    def distribution(self, logits: Tensor) -> Tensor:
        """Return the log-probability of every token when it is drawn this way.

        Args:
            logits: [..., V]; float64 stays, everything else is computed in float32.
        Returns:
            [..., V] in nats; -inf for tokens that are cut off.
        """
        return self._scores(logits).log_softmax(-1)

    def _scores(self, logits: Tensor) -> Tensor:
        """Return logits [..., V] whose softmax is drawn from."""
        import torch

        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.temperature != 1:
            scores = scores / self.temperature
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < least, -inf)
        if self.top_p is not None and self.top_p < 1:
            # from the least likely token upwards, as Transformers does it: among equal logits at the edge of the set
            # the order of this sort decides which of them stay
            ordered, places = scores.sort(dim=-1)
            cut = ordered.softmax(-1).cumsum(-1) <= 1 - self.top_p
            cut[..., -1] = False
            scores = scores.masked_fill(cut.scatter(-1, places, cut), -inf)
        return scores


def n_needed(logprob: float, p: float) -> float:
    """Return the least number of draws after which the suffix has come at least once with probability p.

    log(1 - p) / log(1 - q) with q = exp(logprob), rounded up; at least 1.

    Args:
        logprob: log-probability of the suffix in one draw, in nats; -inf if it cannot be drawn.
        p: between 0 and 1.
    Returns:
        A whole number as a float; inf where the suffix cannot be drawn, or the number is too large for a float.
    Raises:
        ValueError: p is not between 0 and 1, or `logprob` is not the logarithm of a probability.
    """
    if not 0 < p < 1:
        raise ValueError(f"p is {p!r}, but it must be above 0 and below 1.")
    if isnan(logprob) or logprob > LOGPROB_ROUNDING:
        raise ValueError(f"logprob is {logprob!r}, but the logarithm of a probability is at most 0.")
    if logprob >= 0:
        return 1.0
    probability = exp(logprob)
    if probability == 1:
        return 1.0
    fail = log1p(-probability)  # about -q for a small q, without rounding 1 - q
    if fail == 0 or (tries := log1p(-p) / fail) == inf:
        return inf
    return float(max(1, ceil(tries * (1 - _ROUNDING))))


def is_discoverable(logprob: float, n: int, p: float) -> bool:
    """Return whether 1 - (1 - exp(logprob))^n >= p.

    Raises:
        ValueError: see `n_needed`; or n is below 1.
    """
    check_tries([n])
    return n >= n_needed(logprob, p)


def check_tries(tries: Sequence[int]) -> None:
    """Raise ValueError unless these are one or more numbers of draws: whole, and at least 1."""
    if not tries or not all(is_count(n, least=1) for n in tries):
        raise ValueError(f"tries are {list(tries)!r}, but they must be whole numbers of at least 1.")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
