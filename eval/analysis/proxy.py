"""Memorized or predictable: what a small model that never saw the texts gives back as well is no sign of memory.

A suffix that both models reproduce verbatim is predictable: from the prefix anyone would guess it. One that only the
larger model reproduces is memorized, or needs what the small one lacks. The base model answers this better where there
is one; a proxy stands in for it where the model before training is not at hand.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hf_axonn_eval.analysis.estimates import estimates
from hf_axonn_eval.analysis.intervals import check_confidence
from hf_axonn_eval.analysis.table import Table
from hf_axonn_eval.data.results import SampleResult


SEEN = "seen"  # all buckets but 0


def split_by_proxy(
    runs: Mapping[str, Iterable[SampleResult]],
    proxies: Mapping[str, Iterable[SampleResult]],
    *,
    confidence: float = 0.95,
) -> dict[str, dict[str, Any]]:
    """Count what each model gives back verbatim, by whether its proxy does too.

    Args:
        runs: results by the name of the run.
        proxies: results of a small model on the same samples, by the name of the run; a run without one is left out.
        confidence: of the intervals.
    Returns:
        By run and bucket, as text, and "seen" for all buckets but 0 if these are several, estimates over its samples:
        `verbatim`; `predictable`, verbatim of both; `memorized`, verbatim of the model alone; and `gap`, the mean of
        how much likelier the suffix is to the model, in nats a token, if both have log-probabilities.
    Raises:
        ValueError: a proxy was asked other samples, or not 0 < confidence < 1.
    """
    check_confidence(confidence)
    return {
        name: _split(name, Table.read(runs[name]), Table.read(proxy), confidence)
        for name, proxy in proxies.items()
        if name in runs
    }


def _split(name: str, table: Table, proxy: Table, confidence: float) -> dict[str, Any]:
    places = {sample: place for place, sample in enumerate(proxy.ids)}
    missing = [sample for sample in table.ids if sample not in places]
    if missing or len(places) != len(table):
        raise ValueError(
            f"the proxy of run {name!r} has {len(places)} samples and the run {len(table)}, of which {len(missing)} "
            "are not the proxy's: extract with --proxy again."
        )
    proxy = proxy.rows(np.array([places[sample] for sample in table.ids]))
    own, also = (each.columns["exact_match"] == 1 for each in (table, proxy))
    columns = {"verbatim": own, "predictable": own & also, "memorized": own & ~also}
    shares = {key: column.astype(np.float64) for key, column in columns.items()}
    gap = proxy.column("nll") - table.column("nll")
    seen = table.buckets != 0
    groups = {str(bucket): table.buckets == bucket for bucket in np.unique(table.buckets)}
    if len(set(table.buckets[seen])) > 1:
        groups[SEEN] = seen
    return {
        bucket: estimates(
            {key: column[chosen] for key, column in shares.items()},
            {"gap": gap[chosen]},
            table.rows(chosen).documents,
            {"confidence": confidence},
        )
        for bucket, chosen in groups.items()
    }
