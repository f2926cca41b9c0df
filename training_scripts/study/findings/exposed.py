"""Membership of texts and exposure of secrets: what a run gives away beside its texts."""

from collections.abc import Iterable
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from hf_axonn_eval import SampleResult, auc
from hf_axonn_eval.analysis.intervals import kish, number_documents
from hf_axonn_eval.analysis.membership_attack import auc_interval, placements
from hf_axonn_eval.canaries.rank import CanaryRank, exposure_by_insertions
from hf_axonn_scripts.study.findings.results import read_json


TRAINED = "trained"  # every bucket but 0
UNSEEN_EXPOSURE = 1 / log(2)  # bits, on average, of a canary that was not inserted (hf_axonn_eval.metrics.exposure)


def membership(
    results: Iterable[SampleResult], base: Iterable[SampleResult] | None = None
) -> dict[str, dict[str, dict[str, Any]]]:
    """Measure how well scores tell passages that were trained on from those of bucket 0.

    Every article has passages in every bucket, so what makes an article likely does so on both sides. The variance of
    the AUC takes the articles of both sides together; it is smaller than that of `hf_axonn_eval`'s tables, which take
    them for two sets, and the same where no article is on both.

    Args:
        results: of a run; `document_id` is the article.
        base: of the model before the run on the same passages, for the score `reference`; buckets do not matter.
    Returns:
        By bucket as text, and `trained` for all but 0 if these are several, and by score (those of the results, higher
        for members; where some have none `loss` alone, the mean log-probability of a suffix token; and `reference`,
        `loss` minus that of `base`): `auc` with `value`, `low` and `high`, `members`, `controls`, and `articles`, of
        both. Without ends where members or controls are of one article. Nothing without bucket 0.
    Raises:
        ValueError: a passage is not among those of `base`, or has no log-probability.
    Source: Obuchowski 1997, Biometrics 53, 567-578, for the variance: clusters that have members and controls.
    """
    results, others = list(results), list(base) if base is not None else None
    full = all(result.membership is not None for result in [*results, *(others or [])])
    scores = [_scores(result, full) for result in results]
    if others is not None:
        before = {result.sample_id: _scores(result, full)["loss"] for result in others}
        lacks = next((result.sample_id for result in results if result.sample_id not in before), None)
        if lacks is not None:
            raise ValueError(f"the base model was not asked for {lacks!r}: ask both the same samples")
        for result, own in zip(results, scores, strict=True):
            own["reference"] = own["loss"] - before[result.sample_id]
    buckets = np.array([result.bucket for result in results])
    articles = number_documents([result.document_id for result in results])[0]
    groups = {str(bucket): buckets == bucket for bucket in np.unique(buckets) if bucket}
    if len(groups) > 1:
        groups[TRAINED] = buckets != 0
    if not (buckets == 0).any():
        return {}
    columns = {name: np.array([own[name] for own in scores]) for name in scores[0]}
    return {
        group: {
            name: _auc(column[chosen], column[buckets == 0], articles[chosen], articles[buckets == 0])
            for name, column in columns.items()
        }
        for group, chosen in groups.items()
    }


def canaries(path: Path) -> dict[str, Any]:
    """Return the exposure of the canaries of a run, in bits.

    Args:
        path: canaries.json of the run.
    Returns:
        `highest`, the most that ranks can show; `unseen`, the mean of a model that has not seen a canary; `exact`,
        whether canaries were ranked among all texts of their format; and `by_insertions`, by number of insertions as
        text the numbers of `exposure_by_insertions` and `exposures`, that of each canary.
    Raises:
        ValueError: there is no such file, or it is not what `rank_canaries` and `ranking_record` gave.
    """
    record = read_json(path)
    try:
        ranked = [CanaryRank(**canary) for canary in record["canaries"]]
        about = {"highest": record["highest_exposure"], "unseen": UNSEEN_EXPOSURE, "exact": record["exact"]}
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no ranking of canaries ({error}): remove it, and do the run's step again"
        ) from None
    by_insertions = {
        str(count): {**group, "exposures": [one.exposure for one in ranked if one.insertions == count]}
        for count, group in exposure_by_insertions(ranked).items()
    }
    return {**about, "by_insertions": by_insertions}


def _scores(result: SampleResult, full: bool) -> dict[str, float]:
    if full and result.membership is not None:
        return dict(result.membership)
    if result.logprob is None:
        raise ValueError(f"sample {result.sample_id!r} has no log-probability: extract without --stop_early")
    return {"loss": result.logprob / result.suffix_length}


def _auc(members: np.ndarray, controls: np.ndarray, of_members: np.ndarray, of_controls: np.ndarray) -> dict[str, Any]:
    area = auc(members, controls)
    count = int(max(of_members.max(), of_controls.max())) + 1
    sums, groups, variance = [], [], 0.0
    for won, articles in (
        (placements(members, controls), of_members),
        (1 - placements(controls, members), of_controls),
    ):
        sums.append(np.bincount(articles, weights=won - area, minlength=count) / len(won))
        groups.append(np.bincount(articles, minlength=count))
        here = int((groups[-1] > 0).sum())
        variance += here / max(1, here - 1) * float(sums[-1] @ sums[-1])
    both = int((groups[0] + groups[1] > 0).sum())
    variance += 2 * both / max(1, both - 1) * float(sums[0] @ sums[1])
    low = high = None
    if all((group > 0).sum() > 1 for group in groups):
        trials = min(kish(group[group > 0]) for group in groups)
        low, high = auc_interval(area, max(variance, 0.0), trials)
    return {
        "auc": {"value": area, "low": low, "high": high},
        "members": len(members),
        "controls": len(controls),
        "articles": both,
    }
