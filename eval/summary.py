"""From results to numbers: means per bucket with intervals, and runs side by side.

Intervals are Wilson's for a share with one sample a document, and a bootstrap over documents otherwise.
"""

from collections.abc import Mapping, Sequence
from math import exp
from typing import Any

from hf_axonn_eval.results import SampleResult
from hf_axonn_eval.stats import bootstrap, wilson


SHARES = ("exact_match", "near_verbatim")  # yes or no for each sample
MEANS = (
    "rouge1",
    "rouge2",
    "rougeL",
    "token_accuracy",
    "free_running_accuracy",
    "divergence_point",
    "longest_run",
    "edit_distance",
    "extraction_strength",
    "nll",
    "probability",
)
METRICS = SHARES + MEANS


def value(result: SampleResult, metric: str) -> float | None:
    """A metric of one sample as a number, None where it was not asked for or is not defined."""
    if metric == "nll":
        return -result.logprob / result.suffix_length
    if metric == "probability":
        return exp(result.logprob)
    measured = getattr(result, metric)
    return None if measured is None else float(measured)


def summarize(
    results: Sequence[SampleResult],
    *,
    record: Mapping[str, Any] | None = None,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> dict[str, Any]:
    """Means of every metric, per bucket and over all samples.

    Args:
        results: of one run.
        record: run.json of the run; it is put into the summary.
        confidence: of the intervals.
        resamples: draws of the bootstrap.
        seed: of the bootstrap.
    Returns:
        A JSON-ready dict: `buckets` maps the bucket, as text, to `samples`, `documents` and per metric `mean`, `low`,
        `high`, `n` (samples that have it), `interval` (its kind) and for a share `count`; `all` is the same over all
        buckets.
    Raises:
        ValueError: there are no results.
    """
    if not results:
        raise ValueError("there are no results to summarize; in a job of several ranks only rank 0 has them.")
    options = {"confidence": confidence, "resamples": resamples, "seed": seed}
    return {
        "run": dict(record) if record is not None else None,
        "intervals": options,
        "buckets": {
            str(bucket): _group([result for result in results if result.bucket == bucket], options)
            for bucket in sorted({result.bucket for result in results})
        },
        "all": _group(results, options),
    }


def compare(
    runs: Mapping[str, Sequence[SampleResult]],
    *,
    records: Mapping[str, Mapping[str, Any]] | None = None,
    base: str | None = None,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> dict[str, Any]:
    """Several models on the same samples, and what each differs from the base model by.

    Args:
        runs: results by the name of the run.
        records: run.json by the name of the run.
        base: name of the run with the model before training; by default "base", or the first run.
        confidence: of the intervals.
        resamples: draws of the bootstrap.
        seed: of the bootstrap.
    Returns:
        `runs`: the summary of each; `base`: its name; `minus_base`: for each other run, bucket and metric the mean
        `difference` over samples with `low` and `high`, from a bootstrap over documents of the paired differences.
    Raises:
        ValueError: no runs, a `base` that is not among them, or runs that were not asked the same samples.
    """
    if not runs:
        raise ValueError("there are no runs to compare.")
    base = base if base is not None else "base" if "base" in runs else next(iter(runs))
    if base not in runs:
        raise ValueError(f"the base run {base!r} is not among the runs {', '.join(runs)}.")
    by_id = {name: {result.sample_id: result for result in results} for name, results in runs.items()}
    for name, results in by_id.items():
        asked, of_base = results.keys(), by_id[base].keys()
        if asked != of_base:
            raise ValueError(
                f"run {name!r} has {len(asked)} samples and run {base!r} {len(of_base)}, of which "
                f"{len(asked & of_base)} are the same: run extract on the same samples file for both."
            )
    digests = {name: record["identity"]["samples_sha256"] for name, record in (records or {}).items()}
    if len(set(digests.values())) > 1:
        raise ValueError(f"the runs were asked different samples, though with the same ids (sha256): {digests}.")
    options = {"confidence": confidence, "resamples": resamples, "seed": seed}
    return {
        "base": base,
        "intervals": options,
        "runs": {
            name: summarize(results, record=(records or {}).get(name), **options) for name, results in runs.items()
        },
        "minus_base": {
            name: _differences(list(results.values()), by_id[base], options)
            for name, results in by_id.items()
            if name != base
        },
    }


def _group(results: Sequence[SampleResult], options: dict[str, Any]) -> dict[str, Any]:
    metrics = {}
    for metric in METRICS:
        measured = [(value(result, metric), result.document_id) for result in results]
        measured = [(number, document) for number, document in measured if number is not None]
        if measured:
            metrics[metric] = _estimate(metric, *map(list, zip(*measured, strict=True)), options)
    return {
        "samples": len(results),
        "documents": len({result.document_id for result in results}),
        "metrics": metrics,
    }


def _estimate(metric: str, values: list[float], documents: list[str], options: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = {"mean": sum(values) / len(values), "n": len(values)}
    apart = len(set(documents))
    if metric in SHARES:
        entry["count"] = int(sum(values))
    if metric in SHARES and apart == len(values):
        kind, interval = "wilson", wilson(entry["count"], len(values), confidence=options["confidence"])
    elif metric in SHARES and entry["count"] in (0, len(values)):
        # resampling equal answers finds no spread; each document counts as one trial then
        kind, interval = "wilson", wilson(apart if entry["count"] else 0, apart, confidence=options["confidence"])
    else:
        kind, interval = "bootstrap", bootstrap(values, documents, **options)
    if interval is None:
        kind, interval = "none: a single document", (None, None)
    low, high = interval
    return entry | {"low": low, "high": high, "interval": kind}


def _differences(
    results: Sequence[SampleResult], base: Mapping[str, SampleResult], options: dict[str, Any]
) -> dict[str, Any]:
    groups = {str(bucket): [] for bucket in sorted({result.bucket for result in results})} | {"all": list(results)}
    for result in results:
        groups[str(result.bucket)].append(result)
    return {bucket: _group_differences(group, base, options) for bucket, group in groups.items()}


def _group_differences(
    results: Sequence[SampleResult], base: Mapping[str, SampleResult], options: dict[str, Any]
) -> dict[str, Any]:
    differences = {}
    for metric in METRICS:
        values, documents = [], []
        for result in results:
            mine, of_base = value(result, metric), value(base[result.sample_id], metric)
            if mine is not None and of_base is not None:
                values.append(mine - of_base)
                documents.append(result.document_id)
        if values:
            interval = bootstrap(values, documents, **options)
            low, high = interval if interval is not None else (None, None)
            differences[metric] = {"difference": sum(values) / len(values), "low": low, "high": high, "n": len(values)}
    return differences
