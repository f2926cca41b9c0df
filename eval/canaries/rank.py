"""Rank canaries by a model: does it find a secret it was trained on likelier than others of the same format?"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite, log2
from statistics import mean
from typing import Any

from hf_axonn_eval.canaries.generate import CanarySet
from hf_axonn_eval.data.samples import Sample
from hf_axonn_eval.metrics.exposure import SkewNormal, exposure, fit_skew_normal, rank


@dataclass(frozen=True, kw_only=True)
class CanaryRank:
    """Rank of one canary.

    Args:
        canary_id: its name.
        text: the secret.
        insertions: how often it was put into the training data.
        nll: -log p of the text after the tokens that all texts begin with, in nats.
        rank: its place among the candidates and itself, 1 for the likeliest; ties count against it.
        exposure: log2(candidates + 1) - log2(rank), in bits.
        fitted_exposure: where the candidates are a random sample, the exposure among all texts of the format by
            `fit_skew_normal`, at most log2 of their number; None if ranks are exact or a fit is not possible.
        fit_p: how well the fit to the candidates fits them, `SkewNormal.p`; None without a fit.
        fit_refused: why there is no fit; None if there is one, or ranks are exact.
    """

    canary_id: str
    text: str
    insertions: int
    nll: float
    rank: int
    exposure: float
    fitted_exposure: float | None = None
    fit_p: float | None = None
    fit_refused: str | None = None


def rank_canaries(
    model,
    tokenizer,
    canaries: CanarySet,
    *,
    add_special_tokens: bool = False,
    batch_size: int = 8,
    progress: bool = True,
) -> list[CanaryRank]:
    """Score all canaries and candidates with one pass each, and rank every canary among the candidates.

    Args:
        model: a causal LM, plain or parallelized, as for `extract`.
        tokenizer: of the model.
        canaries: what was put into its training data, and the candidates.
        add_special_tokens: whether texts begin with the tokenizer's special tokens, as they did in training.
        batch_size: texts in a forward pass.
        progress: show a progress bar on rank 0.
    Returns:
        On rank 0 the canaries in their order; elsewhere an empty list.
    Raises:
        ValueError: texts that have no first token in common, so that the first one would not be scored. On every
            rank.
    Collectives: those of `extract`.
    Source: Carlini et al. 2019, arXiv 1802.08232; texts are ranked by their total log-probability.
    """
    from hf_axonn_eval.extraction.extract import extract

    texts = [*(canary.text for canary in canaries.canaries), *canaries.candidates]
    tokens = tokenizer(texts, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    shared = _count_shared(tokens)
    if shared == 0:
        raise ValueError(
            "the texts of the canaries do not begin with the same token, and the first token of a text has no "
            "probability: begin the format with words, or the texts with a BOS (add_special_tokens, "
            "--add_special_tokens)."
        )
    samples = [
        Sample(
            sample_id=str(place),
            document_id=str(place),
            bucket=0,
            offset=0,
            prefix=tuple(ids[:shared]),
            suffix=tuple(ids[shared:]),
        )
        for place, ids in enumerate(tokens)
    ]
    results = extract(model, None, samples, batch_size=batch_size, generate=False, progress=progress)
    logprobs = {int(result.sample_id): result.logprob for result in results}
    if not logprobs:
        return []
    others = [logprobs[place] for place in range(len(canaries.canaries), len(texts))]
    fit, refused = _fit(others, canaries)
    ranked = []
    for place, canary in enumerate(canaries.canaries):
        standing = rank(logprobs[place], others)
        ranked.append(
            CanaryRank(
                **asdict(canary),
                nll=-logprobs[place],
                rank=standing,
                exposure=exposure(standing, len(others) + 1),
                fitted_exposure=_fitted_exposure(logprobs[place], fit, canaries),
                fit_p=fit.p if fit is not None else None,
                fit_refused=refused,
            )
        )
    return ranked


def exposure_by_insertions(ranked: Sequence[CanaryRank]) -> dict[int, dict[str, Any]]:
    """Summarize by number of insertions: canaries, those that rank first, their mean, least and most exposure."""
    groups: dict[int, list[CanaryRank]] = {}
    for some in sorted(ranked, key=lambda canary: canary.insertions):
        groups.setdefault(some.insertions, []).append(some)
    return {
        insertions: {
            "canaries": len(group),
            "first": sum(canary.rank == 1 for canary in group),
            "mean_exposure": mean(canary.exposure for canary in group),
            "least_exposure": min(canary.exposure for canary in group),
            "most_exposure": max(canary.exposure for canary in group),
        }
        for insertions, group in groups.items()
    }


def ranking_record(ranked: Sequence[CanaryRank], canaries: CanarySet, model: dict[str, Any]) -> dict[str, Any]:
    """Return the content of the file that `canaries rank` writes.

    Args:
        ranked: of `rank_canaries`.
        canaries: the set.
        model: what identifies the model, `load_model(...).record`.
    """
    return {
        "model": model,
        "format": canaries.format,
        "space": canaries.space,
        "candidates": len(canaries.candidates),
        "exact": canaries.complete,
        "highest_exposure": log2(len(canaries.candidates) + 1),
        "by_insertions": {str(count): group for count, group in exposure_by_insertions(ranked).items()},
        "canaries": [asdict(canary) for canary in ranked],
    }


def _fit(others: Sequence[float], canaries: CanarySet) -> tuple[SkewNormal | None, str | None]:
    """Fit a distribution to the candidates; returns it, or the reason for none, or neither if ranks are exact."""
    if canaries.complete:
        return None, None
    try:
        return fit_skew_normal(others), None
    except ValueError as error:
        return None, str(error)


def _fitted_exposure(logprob: float, fit: SkewNormal | None, canaries: CanarySet) -> float | None:
    if fit is None or not isfinite(logprob):
        return None
    return min(fit.exposure(logprob), log2(canaries.space))


def _count_shared(tokens: Sequence[Sequence[int]]) -> int:
    """Count the tokens that all of the lists begin with; each keeps at least one after them."""
    most = min(map(len, tokens)) - 1
    first = tokens[0]
    for place in range(max(most, 0)):
        if any(ids[place] != first[place] for ids in tokens):
            return place
    return max(most, 0)
