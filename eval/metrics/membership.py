"""Was this text in the training data? Scores of a text, and how well they part members from controls.

Every score is higher for a text that is more likely a member. With l_t the log-probability of token t given the
tokens before it, over all T tokens that are scored:

    loss               (1/T) sum_t l_t                                            Yeom et al. 2018
    zlib               loss / number of bytes of the zlib-compressed text         Carlini et al. 2021
    min_k              mean of the k% smallest l_t                                Shi et al. 2023
    min_k_plus_plus    mean of the k% smallest (l_t - mu_t) / sigma_t             Zhang et al. 2024
    reference          loss - loss of another model that has not seen the text    Carlini et al. 2021

mu_t and sigma_t are mean and standard deviation of log p(v) for v drawn from the model's distribution p at place t.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np


if TYPE_CHECKING:
    from torch import Tensor


MIN_K_SHARE = 0.2
_LEAST_DEVIATION = 1e-6  # of a distribution that is certain; its deviation would be 0


def token_statistics(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute for Min-K%++ at every place log p(target), and mean and deviation of log p(v) over v drawn from p.

    Args:
        logits: [..., V]; float64 stays, everything else is computed in float32. Three tensors of this size are made:
            pass long ones in chunks.
        targets: [...] ids.
    Returns:
        logprob, mean, deviation: [...], in nats.
    """
    import torch

    with torch.no_grad():
        logprobs = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        of_target = logprobs.gather(-1, targets[..., None])[..., 0]
        probabilities = logprobs.exp()
        # a token of probability 0 adds nothing; 0 * -inf would be NaN
        logprobs.nan_to_num_(nan=float("nan"), neginf=0.0)
        mean = torch.linalg.vecdot(probabilities, logprobs)
        # centred first: the mean of squares minus the square of the mean cancels where the model is sure
        deviation = torch.linalg.vecdot(probabilities, logprobs.sub_(mean[..., None]).square_()).sqrt()
    return of_target, mean, deviation


def scores(
    logprobs: Sequence[float],
    means: Sequence[float],
    deviations: Sequence[float],
    text: str,
    *,
    share: float = MIN_K_SHARE,
) -> dict[str, float]:
    """Compute the scores of one text that need one model only.

    Args:
        logprobs: of every token that has one, in nats.
        means: of log p at the same places, from `token_statistics`.
        deviations: likewise.
        text: of the same tokens, for zlib.
        share: of the tokens that Min-K% and Min-K%++ take; at least one is taken.
    Returns:
        `loss`, `zlib`, `min_k`, `min_k_plus_plus`.
    Raises:
        ValueError: no tokens, different lengths, or not 0 < share <= 1.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share is {share!r}, but Min-K% takes a share above 0 and at most 1.")
    if not len(logprobs) == len(means) == len(deviations) or not len(logprobs):
        raise ValueError(
            f"there are {len(logprobs)} log-probabilities, {len(means)} means and {len(deviations)} deviations: as "
            "many are needed, and one or more."
        )
    of_tokens = np.asarray(logprobs, dtype=np.float64)
    standardized = (of_tokens - means) / np.maximum(deviations, _LEAST_DEVIATION)
    taken = max(1, int(share * len(of_tokens)))
    loss = float(of_tokens.mean())
    return {
        "loss": loss,
        "zlib": loss / len(zlib.compress(text.encode("utf-8", "surrogatepass"))),
        "min_k": float(np.sort(of_tokens)[:taken].mean()),
        "min_k_plus_plus": float(np.sort(standardized)[:taken].mean()),
    }
