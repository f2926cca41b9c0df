"""Check what a bundle says, as far as what is at hand allows.

signature   the file beside it; the public key of the signer says by whom
numbers     every aggregate, interval and test, computed again from the numbers of the samples
samples     with the samples and the key: that these are the ones, each by its keyed hash
model       with the model too: its fingerprint, and some samples asked again (rerun.py)
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from hf_axonn_eval.bundle.anonymous import Anonymous
from hf_axonn_eval.bundle.archive import is_name, unpack
from hf_axonn_eval.bundle.checks import Check, listed
from hf_axonn_eval.bundle.consistency import contradictions
from hf_axonn_eval.bundle.coverage import STUDIED, statement
from hf_axonn_eval.bundle.keys import Key
from hf_axonn_eval.bundle.numbers import (
    COMPARISON,
    COVERAGE,
    TOLERANCE,
    against_chance,
    as_json,
    computed,
    difference,
    registered,
    summary_file,
)
from hf_axonn_eval.bundle.origin import origin
from hf_axonn_eval.bundle.pack import ABOUT, SAMPLES
from hf_axonn_eval.bundle.rerun import Again, rerun, widest_bound
from hf_axonn_eval.bundle.signature import check_signature
from hf_axonn_eval.data.jsonl import is_count, json_lines
from hf_axonn_eval.data.results import SampleResult, read_run
from hf_axonn_eval.data.samples import Sample, SampleFile, samples_digest
from hf_axonn_eval.extraction.work_split import WorkSplit


class Entry(NamedTuple):
    """A line of samples.jsonl: keyed hashes of document and tokens, and the part of each run that the sample is of."""

    document: str
    tokens: str
    parts: tuple[Any, ...]


@dataclass
class Bundle:
    """What was read of a bundle; what cannot be read is not there, and `unreadable` says why."""

    about: dict[str, Any] = field(default_factory=dict)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    results: dict[str, Sequence[SampleResult]] = field(default_factory=dict)
    trees: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, Entry] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)


def verify_bundle(
    bundle: str | os.PathLike[str],
    *,
    signers: str | os.PathLike[str] | None = None,
    samples: str | os.PathLike[str] | None = None,
    key: Key | None = None,
    again: Again | None = None,
) -> list[Check]:
    """Check a bundle.

    Args:
        bundle: what `write_bundle` wrote.
        signers: the file of allowed signers of `ssh-keygen -Y verify`; None if the signer's key is not known.
        samples: what the runs were asked.
        key: the owner's.
        again: the model, and how many samples it should be asked again; needs `samples` and `key`.
    Returns:
        What was checked and agrees, what contradicts, and what could not be checked.
    Raises:
        ValueError: it is no bundle, or one of the other files cannot be read.
    Collectives: with `again`, those of `load_model` and `extract`.
    """
    if (samples is None) != (key is None):
        raise ValueError("the samples and the key are needed together: --samples FILE --key FILE.")
    if again is not None and samples is None:
        raise ValueError("asking the model again needs the samples and the key: --samples FILE --key FILE.")
    checks = [check_signature(bundle, signers)]
    with TemporaryDirectory() as scratch:
        directory = Path(scratch)
        members, wrong = unpack(bundle, directory)
        checks.append(Check.of("manifest", wrong, f"{len(members)} members, by size and sha256"))
        read = _read(directory)
        if read.unreadable:
            checks.append(Check.contradicts("members", listed(read.unreadable)))
        if read.about and read.results:
            with registered(read.about["metrics"]):
                checks += _numbers(read)
        asked: dict[str, int] = {}
        file: Sequence[Sample] = []
        if samples is not None and key is not None and read.about:
            file = SampleFile(samples)
            check, asked = _samples(read, file, Path(samples).name, key)
            checks.append(check)
        else:
            checks.append(
                Check.unchecked(
                    "samples", "hashes were made with a key that is not in the bundle", "--samples FILE --key FILE"
                )
            )
        if again is not None and asked and read.results:
            checks += rerun(read.records, read.results, read.trees, file, asked, again)
        else:
            needs = "the model: --model DIR, with --samples and --key" if again is None else "samples of the bundle"
            said = "that these are the answers of the model with this fingerprint, metrics of decoded text among them"
            checks.append(Check.unchecked("model", f"{said}, is the owner's word", needs))
        checks.append(_word_of_the_owner(read))
    return checks


def _read(directory: Path) -> Bundle:
    read = Bundle()
    try:
        about = _json(directory / ABOUT)
        options = about["options"]
        if (
            not isinstance(about["metrics"], dict)
            or not all(isinstance(entry, dict) for entry in about["metrics"].values())
            or not all(isinstance(about[name], str) for name in ("base", "key", "samples_sha256"))
            or not isinstance(about["runs"], list)
            or not all(isinstance(name, str) and is_name(name) for name in about["runs"])
            or len(set(about["runs"])) < len(about["runs"])
            or not is_count(about["samples"], least=1)
            or about["base"] not in about["runs"]
            or not isinstance(about["made_by"], dict)
            or not isinstance(options["confidence"], float)
            or not all(is_count(number, least=1) for number in [*options["lengths"], *options["tries"]])
        ):
            raise TypeError
        for described in about["metrics"].values():
            float(described["least"]), float(described["most"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        read.unreadable.append(f"{ABOUT} cannot be read")
        return read
    read.about = about
    for name in about["runs"]:
        try:
            read.records[name], read.results[name] = read_run(directory / "runs" / name)
        except (OSError, ValueError) as error:
            read.unreadable.append(str(error).replace(f"{directory}{os.sep}", "").partition("; remove")[0])
    for member in [*map(summary_file, about["runs"]), COVERAGE, *([COMPARISON] if len(about["runs"]) > 1 else [])]:
        try:
            read.trees[member] = _json(directory / member)
        except (OSError, ValueError, TypeError, RecursionError):
            read.unreadable.append(f"{member} cannot be read")
    try:
        for line in json_lines(directory / SAMPLES):
            entry: Any = line.value
            if not all(isinstance(entry[name], str) for name in ("sample", "document", "tokens")):
                raise TypeError
            if entry["sample"] in read.samples or not isinstance(entry["parts"], dict):
                raise TypeError
            parts = tuple(entry["parts"].get(name) for name in about["runs"])
            read.samples[entry["sample"]] = Entry(entry["document"], entry["tokens"], parts)
    except (OSError, ValueError, KeyError, TypeError):
        read.unreadable.append(f"{SAMPLES} cannot be read")
    return read


def _json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise TypeError
    return content


def _numbers(read: Bundle) -> list[Check]:
    """What follows from the numbers of the samples."""
    checks = []
    for name, results in read.results.items():
        wrong = []
        digest = read.records[name]["identity"]["samples_sha256"]
        if digest != read.about["samples_sha256"]:
            wrong.append(f"run.json is of the samples {digest}, {ABOUT} of {read.about['samples_sha256']}")
        for result in results:
            entry = read.samples.get(result.sample_id)
            if entry is None:
                wrong.append(f"{_told(result)}: not in {SAMPLES}")
            elif entry.document != result.document_id:
                wrong.append(f"{_told(result)}: its document is another one in {SAMPLES}")
            wrong += [f"{_told(result)}: {said}" for said in contradictions(result, _bound(read, name, entry))]
        wrong += _wide_bounds(read.records[name])
        if len(results) != len(read.samples):
            wrong.append(f"{len(results)} results of {len(read.samples)} samples")
        agreed = f"{len(results):,} samples; what their numbers say twice, they say alike"
        checks.append(Check.of(f"samples of {name}", wrong, agreed))
    if read.unreadable:
        need = "all members of the bundle"
        return [*checks, Check.unchecked("summaries", "members of the bundle are missing", need)]
    try:
        trees = computed(read.results, base=read.about["base"], **read.about["options"])
    except ValueError as error:
        return [*checks, Check.contradicts("summaries", f"cannot be computed: {error}")]
    confidence = read.about["options"]["confidence"]
    # of the figures that are claimed: they are compared themselves, and another version may have others
    whole = [read.trees[member] for member in trees if member != COVERAGE]
    trees[COVERAGE] = as_json(statement(*(whole[-1:] if COMPARISON in trees else whole), confidence=confidence))
    same = _same_code(read.about["made_by"])
    checks += [check for member, tree in trees.items() for check in _tree(read, member, tree, same)]
    if confidence != STUDIED:
        said = f"the intervals are of {confidence:g}; how often they hold the truth was studied for {STUDIED:g}"
        checks.append(Check.unchecked("coverage", said, "the study for that, tests/benchmarks/eval/coverage.py"))
    return checks


def _tree(read: Bundle, member: str, found: dict[str, Any], same: bool) -> list[Check]:
    """Compare a member with what was computed; `same`: by the code that made it, so that entries are the same, too."""
    claimed = read.trees[member]
    chance = claimed.get("chance")
    if isinstance(chance, dict):
        found["chance"] = against_chance(found, chance)
    seen = difference(claimed, found)
    apart = [f"{path} is left out" for path in seen.only_computed]
    apart += [f"{path} does not follow from the samples" for path in seen.only_claimed]
    wrong = [*seen.differing, *(apart if same else ())]
    made_by = read.about["made_by"]
    versions = "" if same else f" (made by version {made_by.get('hf_axonn')}, commit {made_by.get('commit')})"
    if wrong:
        return [Check.contradicts(member, listed(wrong) + versions)]
    exactly = "all equal" if seen.largest == 0 else f"largest relative difference {seen.largest:.1e} of {TOLERANCE:g}"
    checks = [Check.agrees(member, f"{seen.compared:,} entries computed again from the samples, {exactly}")]
    if apart:
        checks.append(Check.unchecked(member, listed(apart) + versions, "the version that made the bundle"))
    return checks


def _same_code(made_by: Mapping[str, Any]) -> bool:
    """Whether the code here is that which made a bundle, as far as releases and commits tell."""
    here = origin()
    return not here["modified"] and all(made_by.get(name) == here[name] for name in ("hf_axonn", "commit", "modified"))


def _bound(read: Bundle, run: str, entry: Entry | None) -> float | None:
    """Below which margin a sample was called a near tie, by the settings of the part of the run that it is of."""
    record = read.records[run]
    parts = record.get("parts") or [record]
    place = entry.parts[read.about["runs"].index(run)] if entry is not None else None
    if not isinstance(place, int) or not 0 <= place < len(parts):
        return None
    settings = parts[place].get("settings", record["settings"])
    bound = settings.get("near_tie_below") if isinstance(settings, dict) else None
    return bound if isinstance(bound, float) else None


def _wide_bounds(record: Mapping[str, Any]) -> list[str]:
    """Bounds of near ties that are not those of the dtype, or twice that: a wider one makes samples undecided."""
    dtype = record["identity"]["dtype"]
    allowed = widest_bound(dtype)
    settings = [part.get("settings") for part in [record, *(record.get("parts") or [])]]
    told = [each["near_tie_below"] for each in settings if isinstance(each, dict) and "near_tie_below" in each]
    known = [bound for bound in told if bound is not None]
    wide = [bound for bound in known if not isinstance(bound, float) or not 0 < bound <= allowed]
    return [f"near_tie_below is {bound!r}, and that of {dtype} at most {allowed:g}" for bound in dict.fromkeys(wide)]


def _samples(read: Bundle, samples: Sequence[Sample], path: str, key: Key) -> tuple[Check, dict[str, int]]:
    """Whether these are the samples; and the place of each by the name that it has in the bundle."""
    if key.name != read.about["key"]:
        return Check.contradicts("samples", "the key is another one than that of the bundle"), {}
    anonymous = Anonymous(key, document_ids=read.about.get("document_ids") == "clear")
    asked: dict[str, int] = {}
    cuts: dict[str, tuple[int, int, int, int]] = {}
    wrong = []
    for place, sample in enumerate(samples):
        told = f"sample {place + 1}, {sample.sample_id!r},"
        name = anonymous.sample_id(sample.sample_id)
        entry = read.samples.get(name)
        if entry is None:
            wrong.append(f"{told} is not in the bundle")
            continue
        asked[name], cuts[name] = place, _cut(sample)
        if entry.tokens != anonymous.tokens(sample):
            wrong.append(f"{told} has other tokens")
        if entry.document != anonymous.document_id(sample.document_id):
            wrong.append(f"{told} is of another document")
    if missing := len(read.samples) - len(asked):
        wrong.append(f"{missing:,} samples of the bundle are not in {path}")
    for run, results in read.results.items():
        for result in results:
            if result.sample_id in cuts and cuts[result.sample_id] != _cut_of(result):
                wrong.append(
                    f"sample {asked[result.sample_id] + 1} has bucket, offset and lengths {cuts[result.sample_id]}, "
                    f"in run {run!r} {_cut_of(result)}"
                )
    if not wrong and anonymous.samples_hash(samples_digest(samples)) != read.about["samples_sha256"]:
        wrong.append("each is, but the file is not: another order, or other bytes")
    return Check.of("samples", wrong, f"{len(asked):,} are those of the bundle, by keyed hashes"), asked


def _cut(sample: Sample) -> tuple[int, int, int, int]:
    return sample.bucket, sample.offset, len(sample.prefix), len(sample.suffix)


def _cut_of(result: SampleResult) -> tuple[int, int, int, int]:
    return result.bucket, result.offset, result.prefix_length, result.suffix_length


def _told(result: SampleResult) -> str:
    return f"sample {result.sample_id[:24]}"


def _word_of_the_owner(read: Bundle) -> Check:
    made_by = read.about.get("made_by") or {}
    commit = made_by.get("commit", "unknown")
    changed = {True: ", modified", False: "", None: ""}.get(made_by.get("modified"), "")
    return Check.unchecked(
        "what ran",
        f"command, versions, protocol, device and times are as recorded; bundle made by version "
        f"{made_by.get('hf_axonn', 'unknown')}, commit {commit}{changed}",
        "someone who saw the run: no file proves that it took place",
    )


def is_rank_zero() -> bool:
    """Whether this process is the one that tells what came out."""
    return WorkSplit.for_model(None).rank == 0
