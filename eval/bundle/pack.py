"""Make a bundle of runs: their numbers, and of their texts no more than keyed hashes.

manifest.json              every other member, with size and sha256
about.json                 which code made it, the options, the metrics, the keyed hash of the samples, the key's name
coverage.json              how often intervals of these kinds hold the truth
samples.jsonl              keyed hashes of id, document and tokens of each sample, and which part of each run it is of
runs/NAME/run.json         the record of a run, with names in place of paths
runs/NAME/results.jsonl    the numbers of each sample, sorted by the keyed hash of its id
runs/NAME/summary.json     every aggregate and interval
comparison.json            of several runs: differences from the base, and tests

The folder of a run is one that `data.results.read_run` reads, and so every command does.
"""

import json
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hf_axonn.compat.messages import get_logger
from hf_axonn_eval.analysis.summary import choose_base
from hf_axonn_eval.bundle import numbers
from hf_axonn_eval.bundle.anonymous import Anonymous, iterate_texts
from hf_axonn_eval.bundle.archive import is_name, pack
from hf_axonn_eval.bundle.checks import join_cases
from hf_axonn_eval.bundle.keys import Key
from hf_axonn_eval.bundle.origin import origin
from hf_axonn_eval.data.jsonl import write_json
from hf_axonn_eval.data.results import RECORD, SUMMARY, RunDirectory, SampleResult, read_run
from hf_axonn_eval.data.samples import SampleFile, samples_digest
from hf_axonn_eval.metrics.discoverability import TRIES


logger = get_logger(__name__)
ABOUT, SAMPLES = "about.json", "samples.jsonl"
_AT_ONCE = 1000  # results in memory


def write_bundle(
    runs: Mapping[str, str | os.PathLike[str]],
    samples: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    key: Key,
    base: str | None = None,
    lengths: Sequence[int] = (),
    confidence: float | None = None,
    document_ids: bool = False,
) -> None:
    """Write the bundle of one run or several of the same samples. The same input and key make the same bytes.

    Warns of a summary.json that contradicts the results of its run; the bundle has what results give.

    Args:
        runs: directories by the name of the run.
        samples: what the runs were asked, as `write_samples` wrote it.
        output: the archive, a tar.
        key: for hashes; it is not in the bundle.
        base: the run that others are compared with; by default "base", or the first.
        lengths: as of `summarize`.
        confidence: of the intervals; by default that of the runs' own summaries.
        document_ids: show ids of documents and samples in the clear.
    Raises:
        ValueError: no runs, one that is not finished or was asked other samples, or a name that is no plain word.
    """
    if not runs:
        raise ValueError("there are no runs to bundle.")
    base = choose_base(runs, base)
    file = SampleFile(samples)
    digest = samples_digest(file)
    read = {name: read_run(directory) for name, directory in runs.items()}
    summaries = {name: _summary(Path(directory)) for name, directory in runs.items()}
    texts = [text for record, _ in read.values() for text in iterate_texts(record)]
    anonymous = Anonymous(key, texts, document_ids=document_ids)
    _check_runs({name: record for name, (record, _) in read.items()}, anonymous, samples, digest)
    if confidence is None:
        confidence = max(_confidence(record) for record, _ in read.values())
    places = {sample.sample_id: place for place, sample in enumerate(file)}
    options: dict[str, Any] = {"confidence": confidence, "lengths": sorted(set(lengths)), "tries": list(TRIES)}
    metrics = numbers.describe_metrics(summary for summary in summaries.values() if summary)
    with TemporaryDirectory() as scratch, numbers.use_metrics(metrics):
        directory = Path(scratch)
        parts = {}
        for name, (record, results) in read.items():
            folder = directory / "runs" / name
            write_json(folder / RECORD, anonymous.record(record))
            parts[name] = _write_results(folder, results, record, anonymous, places)
        written = {name: read_run(directory / "runs" / name)[1] for name in runs}
        trees = numbers.compute_trees(written, base=base, **options)
        for name, summary in summaries.items():
            tree = trees[numbers.summary_file(name)]
            _check_summary(name, summary, tree)
            if chance := (summary or {}).get("chance"):
                tree["chance"] = numbers.against_chance(tree, chance)
        for member, tree in trees.items():
            write_json(directory / member, tree)
        with open(directory / SAMPLES, "w", encoding="utf-8", newline="\n") as lines:
            lines.writelines(sorted(_line(anonymous, sample, parts) for sample in file))
        about = {
            "made_by": origin(),
            "key": key.name,
            "document_ids": "clear" if document_ids else "keyed",
            "samples": len(file),
            "samples_sha256": anonymous.samples_hash(digest),
            "runs": list(runs),
            "base": base,
            "options": options,
            "metrics": metrics,
        }
        write_json(directory / ABOUT, about)
        pack(directory, output)


def _check_runs(
    records: Mapping[str, Mapping[str, Any]], anonymous: Anonymous, samples: str | os.PathLike[str], digest: str
) -> None:
    """Raise ValueError for a run of other samples, or a name that tells of its user or is no plain word."""
    for name, record in records.items():
        if not is_name(name) or anonymous.hide(name) != name:
            raise ValueError(
                f"the name of run {name!r} is no plain word, or that of this user or machine: name it, NAME=DIRECTORY."
            )
        found = record["identity"]["samples_sha256"]
        if found != digest:
            raise ValueError(
                f"run {name!r} was asked other samples than those in {samples}: theirs have the sha256 {found}, these "
                f"{digest}."
            )


def _write_results(
    folder: Path,
    results: Sequence[SampleResult],
    record: Mapping[str, Any],
    anonymous: Anonymous,
    places: Mapping[str, int],
) -> dict[str, int]:
    """Write results in the order of their hashed ids; return by sample id the part of the run that it is of."""
    starts = [part.get("index", 0) for part in record.get("parts") or [{}]]
    ids = [result.sample_id for result in results]
    unknown = [name for name in ids if name not in places]
    if unknown:
        raise ValueError(f"{folder.name} has a result of a sample that was not asked: {unknown[0]!r}.")
    order = sorted(range(len(ids)), key=lambda place: anonymous.sample_id(ids[place]))
    output = RunDirectory(folder)
    for start in range(0, len(order), _AT_ONCE):
        output.append(anonymous.result(results[place]) for place in order[start : start + _AT_ONCE])
    return {name: bisect_right(starts, line) - 1 for line, name in enumerate(ids)}


def _line(anonymous: Anonymous, sample: Any, parts: Mapping[str, Mapping[str, int]]) -> str:
    entry = {
        "sample": anonymous.sample_id(sample.sample_id),
        "document": anonymous.document_id(sample.document_id),
        "tokens": anonymous.tokens(sample),
        "parts": {name: part[sample.sample_id] for name, part in parts.items()},
    }
    return json.dumps(entry, separators=(",", ":")) + "\n"


def _summary(directory: Path) -> dict[str, Any] | None:
    """Read summary.json of a run; None if there is none, or not one of `summarize`."""
    try:
        summary = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
        return summary if isinstance(summary["all"]["metrics"], dict) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _check_summary(name: str, written: Mapping[str, Any] | None, found: Mapping[str, Any]) -> None:
    if written is None:
        logger.warning("run %r has no summary.json that can be read; the bundle has what its results give.", name)
        return
    shared = {part: written.get(part) for part in ("buckets", "all")}
    if written.get("intervals") != found["intervals"]:
        return  # of another confidence: nothing to compare
    seen = numbers.compare_trees(shared, {part: found[part] for part in shared})
    if seen.only_claimed:
        logger.warning(
            "summary.json of run %r has %d entries that do not follow from what a bundle carries, so they are left "
            "out: %s.",
            name,
            len(seen.only_claimed),
            join_cases(seen.only_claimed),
        )
    if seen.differing:
        logger.warning(
            "summary.json of run %r contradicts its results in %d entries, of which the first is %s. It was edited, "
            "or written by another version. The bundle has what the results give.",
            name,
            len(seen.differing),
            seen.differing[0],
        )


def _confidence(record: Mapping[str, Any]) -> float:
    found = record["settings"].get("confidence")
    return float(found) if isinstance(found, int | float) else 0.95
