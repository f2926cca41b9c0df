"""Summaries of runs: means per bucket with intervals, and runs side by side."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hf_axonn_eval.analysis.chance import chance_of
from hf_axonn_eval.analysis.estimates import differences, group, membership
from hf_axonn_eval.analysis.evidence import evidence, holm
from hf_axonn_eval.analysis.guesses import ERRORS, recall_at_errors
from hf_axonn_eval.analysis.intervals import check_confidence, mcnemar
from hf_axonn_eval.analysis.table import MEMBERSHIP, Table, share_names
from hf_axonn_eval.data.jsonl import is_count
from hf_axonn_eval.data.results import SampleResult
from hf_axonn_eval.metrics.discoverability import TRIES, check_tries


def summarize(
    results: Iterable[SampleResult],
    *,
    record: Mapping[str, Any] | None = None,
    lengths: Sequence[int] = (),
    tries: Sequence[int] = TRIES,
    confidence: float = 0.95,
) -> dict[str, Any]:
    """Compute the numbers of a run, per bucket and over all samples.

    Args:
        results: of one run; read once, so that an iterator over a file of any length will do.
        record: run.json of the run; it is put into the summary.
        lengths: also report the exact match of suffixes cut to these many tokens, and the bits of windows of so many;
            longer ones than a suffix leave it out.
        tries: numbers of draws for which discoverability is reported.
        confidence: of the intervals.
    Returns:
        A JSON-ready dict: `run`; `intervals`; `buckets`, which maps the bucket, as text, to its numbers; `all`, the
        same over all buckets; `chance`, what `chance_of` returns, if the record tells the size of the vocabulary. The
        numbers of a group are

        - `samples`, `documents`: how many;
        - `metrics`: by name an estimate, that is `mean`, `low`, `high`, `n` (samples that have it), `interval` (its
          kind) and for a share `count`;
        - `exact_match_at`, with `lengths`: by length, as text, an estimate;
        - `discoverability`, if there is a sampler: by p, as text, `median_n` (draws that half of the samples need;
          None: no number suffices) and `tries`, by n, as text, the estimate of the share that is (n, p)-discoverable;
        - `inextractability`, if ranks are known: `least` and `median` bits that a sample takes; `documents`, and
          `below_at_most`, the share of other documents like these that may take less than the least, at most; `tries`
          by p and n, as text, the estimate of the share that some sampling may give with n queries and probability p;
          with `lengths` `lengths`, by length, as text, `least` and `median` of the easiest windows;
        - `membership`, if there are scores and samples of bucket 0 beside these: by score what `attack`
          returns; for `all` of every other bucket against bucket 0;
        - `degenerate`, if known: `count` of `n`, and `exact_match_of_others`, an estimate;
        - `undecided`, if near ties are known: `count` of `n` that are one, and how many `exact_match` would be
          `at_least` and `at_most` if each of them fell the other way.
    Raises:
        ValueError: there are no results, or a length or number of draws below 1.
    """
    options = _options(confidence)
    lengths = _check_lengths(lengths)
    return _summarize(Table.read(results, lengths), record, options, lengths=lengths, tries=tries)


def compare(
    runs: Mapping[str, Iterable[SampleResult]],
    *,
    records: Mapping[str, Mapping[str, Any]] | None = None,
    base: str | None = None,
    lengths: Sequence[int] = (),
    tries: Sequence[int] = TRIES,
    confidence: float = 0.95,
) -> dict[str, Any]:
    """Compare several models on the same samples, each with the base model.

    Args:
        runs: results by the name of the run; each is read once.
        records: run.json by the name of the run.
        base: name of the run with the model before training; by default "base", or the first run.
        lengths: as of `summarize`.
        tries: likewise.
        confidence: of the intervals.
    Returns:
        - `runs`: the summary of each; the membership scores of runs other than the base have one more, `reference`:
          the mean log-probability of a token, minus that by the base model;
        - `reference_over`: what that mean is over, "sample" (prefix and suffix) or "suffix";
        - `base`: its name;
        - `minus_base`: for each other run, bucket and metric the mean `difference` over samples with `low`, `high`,
          `n` and `interval`, its kind;
        - `mcnemar`: for each other run, bucket and yes-or-no metric what `mcnemar` returns, and `p_holm`, its p by
          Holm's correction for all these tests; those of bucket 0, the controls, are corrected apart. "all" is of
          everything that was seen, if that is more than one bucket;
        - `evidence`: what the function of this name returns.
    Raises:
        ValueError: no runs, a `base` that is not among them, or runs that were not asked the same samples.
    """
    if not runs:
        raise ValueError("there are no runs to compare.")
    base = choose_base(runs, base)
    digests = {name: record["identity"]["samples_sha256"] for name, record in (records or {}).items()}
    options, lengths = _options(confidence), _check_lengths(lengths)
    tables = {name: Table.read(results, lengths) for name, results in runs.items()}
    tables = {name: _in_order_of(tables[base], table, name, base) for name, table in tables.items()}
    if len(set(digests.values())) > 1:
        raise ValueError(f"the runs were asked different samples, though with the same ids (sha256): {digests}.")
    loss = MEMBERSHIP + "loss"
    over = "sample" if all(loss in table.columns for table in tables.values()) else "suffix"
    losses = {
        name: table.columns[loss] if over == "sample" else -table.column("nll") for name, table in tables.items()
    }
    for name, table in tables.items():
        if name != base:
            tables[name] = table.with_column(MEMBERSHIP + "reference", losses[name] - losses[base])
    others = {name: table for name, table in tables.items() if name != base}
    changes = {name: _changes(table, tables[base]) for name, table in others.items()}
    for controls in (False, True):
        groups = (group for run in changes.values() for name, group in run.items() if (name == "0") == controls)
        holm([test for group in groups for test in group.values()])
    return {
        "base": base,
        "intervals": options,
        "reference_over": over,
        "runs": {
            name: _summarize(table, (records or {}).get(name), options, lengths=lengths, tries=tries)
            for name, table in tables.items()
        },
        "minus_base": {name: _differences(table, tables[base], options) for name, table in others.items()},
        "mcnemar": changes,
        "evidence": evidence(tables, base, options),
    }


def choose_base(runs: Iterable[str], base: str | None) -> str:
    """Return the name of the base run: the one that is named, else "base", else the first.

    Raises:
        ValueError: it is not among the runs.
    """
    names = list(runs)
    base = base if base is not None else "base" if "base" in names else names[0]
    if base not in names:
        raise ValueError(f"the base run {base!r} is not among the runs {', '.join(names)}.")
    return base


def _summarize(
    table: Table,
    record: Mapping[str, Any] | None,
    options: dict[str, Any],
    *,
    lengths: Sequence[int],
    tries: Sequence[int],
) -> dict[str, Any]:
    check_tries(tries)
    groups = {}
    for name, chosen in table.groups().items():
        groups[name] = group(table.rows(chosen), options, lengths=lengths, tries=tries)
        attacks = membership(table, chosen & (table.buckets != 0), options)
        groups[name] |= {"membership": attacks} if attacks else {}
    everything = groups.pop("all")
    losses = table.column("guess_nll")
    if not np.isnan(losses).any():
        recall = recall_at_errors(losses, table.columns["exact_match"] == 1)
        everything["recall_at_errors"] = {"errors": ERRORS, "recall": recall, "n": len(table)}
    chance = chance_of(everything, record)
    return {
        "run": dict(record) if record is not None else None,
        "intervals": options,
        "buckets": groups,
        "all": everything,
        **({"chance": chance} if chance is not None else {}),
    }


def _in_order_of(base: Table, table: Table, name: str, base_name: str) -> Table:
    """Order the samples of a table as the base's, so that rows are pairs."""
    places = {sample: place for place, sample in enumerate(table.ids)}
    same = sum(sample in places for sample in base.ids)
    if not same == len(base) == len(table):
        raise ValueError(
            f"run {name!r} has {len(table)} samples and run {base_name!r} {len(base)}, of which {same} are the same: "
            "run extract on the same samples file for both."
        )
    return table.rows(np.fromiter((places[sample] for sample in base.ids), dtype=np.int64, count=len(base)))


def _differences(table: Table, base: Table, options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: differences(table.rows(chosen), base.rows(chosen), options) for name, chosen in table.groups().items()
    }


def _changes(table: Table, base: Table) -> dict[str, Any]:
    groups, seen = table.groups(), table.buckets != 0
    del groups["all"]
    if len(set(table.buckets[seen])) > 1:
        groups["all"] = seen
    changes: dict[str, Any] = {}
    for name, chosen in groups.items():
        changes[name] = {}
        for metric in share_names():
            known = chosen & ~np.isnan(table.column(metric)) & ~np.isnan(base.column(metric))
            if known.any():
                after, before = (each.columns[metric][known] == 1 for each in (table, base))
                changes[name][metric] = mcnemar(after, before, table.rows(known).documents)
    return changes


def _options(confidence: float) -> dict[str, Any]:
    check_confidence(confidence)
    return {"confidence": confidence}


def _check_lengths(lengths: Sequence[int]) -> list[int]:
    if not all(is_count(length, least=1) for length in lengths):
        raise ValueError(f"lengths are {list(lengths)!r}, but they must be whole numbers of at least 1.")
    return sorted(set(lengths))
