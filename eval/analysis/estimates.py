"""The numbers of one group of samples: every mean and share with its interval, by the rules of intervals.py."""

from collections.abc import Hashable, Mapping, Sequence
from math import inf
from typing import Any

import numpy as np

from hf_axonn_eval.analysis.intervals import Found, difference_interval, mean_intervals, share_intervals
from hf_axonn_eval.analysis.membership_attack import attack
from hf_axonn_eval.analysis.table import (
    MEMBERSHIP,
    NEAR_COPIES,
    NEAR_COPIES_COST,
    NEEDED,
    NEEDED_AT_LEAST,
    RANK_BITS,
    Table,
    share_names,
)
from hf_axonn_eval.metrics.bleu import NEAR_BLEU
from hf_axonn_eval.metrics.discoverability import CHANCES
from hf_axonn_eval.metrics.registry import METRICS


Columns = dict[str, np.ndarray]
Bounds = dict[str, tuple[float, float]]
LIKELY = 1e-3  # a suffix that one draw gives with at least this chance is called extractable by Cooper et al. 2025


def group(table: Table, options: Mapping[str, Any], *, lengths: Sequence[int], tries: Sequence[int]) -> dict[str, Any]:
    """Compute the numbers of some samples but membership, which takes two groups; see `summary.summarize`."""
    shares, means, bounds = _group_columns(table, lengths, tries)
    found = estimates(shares, means, table.documents, options, bounds=bounds)
    entry: dict[str, Any] = {
        "samples": len(table),
        "documents": len(set(table.documents)),
        "metrics": {metric: found[metric] for metric in METRICS if metric in found},
    }
    if lengths:
        at = {str(length): f"exact_match_at.{length}" for length in lengths}
        entry["exact_match_at"] = {length: found[name] for length, name in at.items() if name in found}
    needed = {f"{chance:g}": table.column(f"{NEEDED}{chance:g}") for chance in CHANCES}
    if any(not np.isnan(column).all() for column in needed.values()):
        entry["discoverability"] = {
            chance: {
                "median_n": _finite(np.nanquantile(column, 0.5, method="lower")),
                "tries": {str(number): found[f"discoverable.{chance}.{number}"] for number in tries},
            }
            for chance, column in needed.items()
        }
    if not np.isnan(table.column(RANK_BITS)).all():
        entry["inextractability"] = _inextractability(table, found, options, lengths=lengths, tries=tries)
    if "bleu_copies" in found:
        entry["bleu_copies"] = found["bleu_copies"]
    copies = {name.removeprefix(NEAR_COPIES): name for name in _near_copies(table)}
    if copies:
        entry["near_copies"] = {
            "edits": {edit: {"probability": found[n], "likely": found[f"{n}.likely"]} for edit, n in copies.items()},
            "draws": float(np.nanmean(table.column(NEAR_COPIES_COST))),
        }
    degenerate = table.column("degenerate")
    if not np.isnan(degenerate).all():
        counts = {"count": int(np.nansum(degenerate)), "n": int((~np.isnan(degenerate)).sum())}
        entry["degenerate"] = {**counts, "exact_match_of_others": found.get("original")}
    near_ties = table.column("near_tie")
    if not np.isnan(near_ties).all():
        entry["undecided"] = _near_ties(near_ties, table.columns["exact_match"])
    return entry


def _group_columns(table: Table, lengths: Sequence[int], tries: Sequence[int]) -> tuple[Columns, Columns, Bounds]:
    """Return the columns that are shares, those that are means, and the bounds of the latter, by name."""
    columns = {metric: table.columns[metric] for metric in METRICS if metric in table.columns}
    shares = {metric: columns[metric] for metric in share_names() if metric in columns}
    means = {metric: column for metric, column in columns.items() if metric not in shares}
    bounds = {metric: (METRICS[metric].least, METRICS[metric].most) for metric in means}
    for length in lengths:
        reached = table.columns["divergence_point"] >= length
        shares[f"exact_match_at.{length}"] = np.where(table.columns["suffix_length"] >= length, reached, np.nan)
    for chance in CHANCES:
        for name, column in (
            ("discoverable", table.column(f"{NEEDED}{chance:g}")),
            ("at_most", table.column(f"{NEEDED_AT_LEAST}{chance:g}")),
        ):
            for number in tries:
                shares[f"{name}.{chance:g}.{number}"] = np.where(np.isnan(column), np.nan, column <= number)
    shares["original"] = np.where(table.column("degenerate") == 0, table.columns["exact_match"], np.nan)
    bleu = table.column("bleu")
    shares["bleu_copies"] = np.where(np.isnan(bleu), np.nan, bleu > NEAR_BLEU)
    for name in _near_copies(table):
        column = table.columns[name]
        means[name], bounds[name] = column, (0, 1)
        shares[f"{name}.likely"] = np.where(np.isnan(column), np.nan, column >= LIKELY)
    return shares, means, bounds


def _inextractability(
    table: Table,
    found: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    lengths: Sequence[int],
    tries: Sequence[int],
) -> dict[str, Any]:
    """Give the bits that samples take at least, and what so many queries may give at most, whatever the sampling.

    `below_at_most`: none of n documents takes less than the least of them. If more than this share of all documents
    did, n would hold one of these with the confidence (the tolerance bound of Wilks 1941, Annals of Mathematical
    Statistics 12, 91).
    """

    def spread(name: str) -> dict[str, float]:
        column = table.column(name)
        return {"least": float(np.nanmin(column)), "median": float(np.nanquantile(column, 0.5, method="higher"))}

    known = table.rows(~np.isnan(table.column(RANK_BITS)))
    documents = len(set(known.documents))
    entry: dict[str, Any] = spread(RANK_BITS)
    entry |= {"documents": documents, "below_at_most": 1 - (1 - options["confidence"]) ** (1 / documents)}
    entry["tries"] = {
        f"{chance:g}": {str(number): found[f"at_most.{chance:g}.{number}"] for number in tries} for chance in CHANCES
    }
    windows = {str(length): f"{RANK_BITS}.{length}" for length in lengths}
    some = {length: spread(name) for length, name in windows.items() if not np.isnan(table.column(name)).all()}
    return entry | ({"lengths": some} if some else {})


def _near_copies(table: Table) -> list[str]:
    """List the columns of near copies that any sample has."""
    names = [name for name in table.columns if name.startswith(NEAR_COPIES) and name != NEAR_COPIES_COST]
    return [name for name in names if not np.isnan(table.columns[name]).all()]


def estimates(
    shares: Mapping[str, np.ndarray],
    means: Mapping[str, np.ndarray],
    documents: Sequence[Hashable],
    options: Mapping[str, Any],
    *,
    bounds: Mapping[str, tuple[float, float]] | None = None,
) -> dict[str, dict[str, Any]]:
    """Compute mean and interval of columns; those that no sample has are left out.

    Args:
        shares: by name [samples] 1 or 0, NaN where a sample does not have it.
        means: by name [samples] numbers.
        documents: the document of each sample.
        options: `confidence`.
        bounds: by name the least and the most that a value can be, where there is such; intervals end there.
    Returns:
        By name `mean`, `n` (samples that have it), `low`, `high`, `interval` (its kind), and for shares `count`.
    """
    known = {name: column for name, column in {**shares, **means}.items() if not np.isnan(column).all()}
    found: dict[str, dict[str, Any]] = {}
    for name, column in known.items():
        found[name] = {"mean": float(np.nanmean(column)), "n": int((~np.isnan(column)).sum())}
        if name in shares:
            found[name]["count"] = int(np.nansum(column))
    for intervals, names in (
        (share_intervals, [name for name in known if name in shares]),
        (mean_intervals, [name for name in known if name not in shares]),
    ):
        if names:
            columns = np.stack([known[name] for name in names], axis=1)
            for name, interval in zip(names, intervals(columns, documents, **options), strict=True):
                found[name] |= ends(interval, *(bounds or {}).get(name, (-inf, inf)))
    return found


def differences(after: Table, before: Table, options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Compute mean and interval of what one run has more than another, sample by sample.

    Args:
        after: the run.
        before: the run that is subtracted; the same samples in the same order.
        options: `confidence`.
    Returns:
        By metric that both have `difference`, `low`, `high`, `n` (samples) and `interval` (its kind).
    """
    common = [metric for metric in METRICS if metric in after.columns and metric in before.columns]
    changes = {metric: after.columns[metric] - before.columns[metric] for metric in common}
    widths = {metric: METRICS[metric].most - METRICS[metric].least for metric in common}
    bounds = {metric: (-width, width) for metric, width in widths.items()}
    found = estimates({}, changes, after.documents, options, bounds=bounds)
    for metric in share_names():
        if metric not in found:
            continue
        has = ~np.isnan(changes[metric])
        yes, was = (table.columns[metric][has] == 1 for table in (after, before))
        found[metric] |= ends(difference_interval(yes, was, after.rows(has).documents, **options))
    return {
        metric: {"difference": entry["mean"], **{key: entry[key] for key in ("low", "high", "n", "interval")}}
        for metric, entry in found.items()
    }


def membership(table: Table, members: np.ndarray, options: Mapping[str, Any]) -> dict[str, Any]:
    """Measure how well each membership score separates some samples from those of bucket 0; see `attack`.

    Args:
        table: all samples.
        members: [samples] bool, which ones should be separated from bucket 0.
        options: `confidence`.
    Returns:
        By the name of the score; empty where there is no score, or nobody on one of the sides.
    """
    found = {}
    for name, column in table.columns.items():
        if not name.startswith(MEMBERSHIP):
            continue
        sides = [np.flatnonzero(side & ~np.isnan(column)) for side in (members, table.buckets == 0)]
        if not all(map(len, sides)):
            continue
        ours, controls = (table.rows(side) for side in sides)
        found[name.removeprefix(MEMBERSHIP)] = attack(
            ours.columns[name],
            controls.columns[name],
            member_documents=ours.documents,
            control_documents=controls.documents,
            **options,
        )
    return found


def _near_ties(near_ties: np.ndarray, exact: np.ndarray) -> dict[str, int]:
    known = ~np.isnan(near_ties)
    doubtful, exact = near_ties[known] == 1, exact[known] == 1
    return {
        "count": int(doubtful.sum()),
        "n": int(known.sum()),
        "exact_match_at_least": int((exact & ~doubtful).sum()),
        "exact_match_at_most": int((exact | doubtful).sum()),
    }


def ends(found: Found, least: float = -inf, most: float = inf) -> dict[str, Any]:
    """Give `low`, `high` and `interval` (its kind) as summaries have them, between the least and the most possible."""
    if found.interval is None:
        return {"low": None, "high": None, "interval": found.kind}
    low, high = found.interval
    return {"low": max(low, least), "high": min(high, most), "interval": found.kind}


def _finite(number: float) -> float | None:
    return float(number) if np.isfinite(number) else None
