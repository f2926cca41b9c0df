"""Check what a bundle says, as far as what is at hand allows.

signature   the file beside it; the public key of the signer says by whom
numbers     every aggregate, interval and test, computed again from the numbers of the samples
samples     with the samples and the key: that these are the ones, each by its keyed hash
model       with the model too: its fingerprint, and some samples asked again (rerun.py)
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hf_axonn_eval.bundle import numbers
from hf_axonn_eval.bundle.anonymous import UNKNOWN, Anonymous
from hf_axonn_eval.bundle.archive import unpack
from hf_axonn_eval.bundle.checks import Check, check_cases, join_cases
from hf_axonn_eval.bundle.consistency import contradictions
from hf_axonn_eval.bundle.contents import Bundle, Entry
from hf_axonn_eval.bundle.coverage import STUDIED
from hf_axonn_eval.bundle.keys import Key
from hf_axonn_eval.bundle.origin import origin
from hf_axonn_eval.bundle.pack import ABOUT, SAMPLES
from hf_axonn_eval.bundle.rerun import Again, rerun, widest_bound
from hf_axonn_eval.bundle.signature import check_signature
from hf_axonn_eval.data.access import TEXT, TOP_K_LOGITS, WEIGHTS, access_of
from hf_axonn_eval.data.results import SampleResult
from hf_axonn_eval.data.samples import Sample, SampleFile, samples_digest
from hf_axonn_eval.extraction.work_split import WorkSplit


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
        members, wrong = unpack(bundle, Path(scratch))
        checks.append(check_cases("manifest", wrong, f"{len(members)} members, by size and sha256"))
        read = Bundle.read(Path(scratch))
        if read.unreadable:
            checks.append(Check("members", "contradicts", join_cases(read.unreadable)))
        if read.about and read.results:
            with numbers.use_metrics(read.about["metrics"]):
                checks += [*_check_results(read), *_check_summaries(read)]
        places: dict[str, int] = {}
        file: Sequence[Sample] = []
        if samples is not None and key is not None and read.about:
            file = SampleFile(samples)
            check, places = _check_samples(read, file, Path(samples).name, key)
            checks.append(check)
        else:
            finding = "hashes were made with a key that is not in the bundle"
            checks.append(Check("samples", "unchecked", finding, "--samples FILE --key FILE"))
        if again is not None and places and read.results:
            checks += rerun(read, file, places, again)
        else:
            needs = "the model: --model DIR, with --samples and --key" if again is None else "samples of the bundle"
            claim = "that these are the answers of the model with this fingerprint, metrics of decoded text among them"
            checks.append(Check("model", "unchecked", f"{claim}, is the owner's word", needs))
    return [*checks, _check_origin(read.about.get("made_by") or {})]


def _check_results(read: Bundle) -> list[Check]:
    """Check the numbers of each sample against each other, a check for each run."""
    checks = []
    for name, results in read.results.items():
        wrong = []
        digest = read.records[name]["identity"]["samples_sha256"]
        if digest != read.about["samples_sha256"]:
            wrong.append(f"run.json is of the samples {digest}, {ABOUT} of {read.about['samples_sha256']}")
        for result in results:
            entry, label = read.samples.get(result.sample_id), f"sample {result.sample_id[:24]}"
            if entry is None:
                wrong.append(f"{label}: not in {SAMPLES}")
            elif entry.document != result.document_id:
                wrong.append(f"{label}: its document is another one in {SAMPLES}")
            wrong += [f"{label}: {case}" for case in contradictions(result, _bound(read, name, entry))]
        wrong += _wide_bounds(read.records[name])
        wrong += _wrong_access(read.records[name], results)
        if len(results) != len(read.samples):
            wrong.append(f"{len(results)} results of {len(read.samples)} samples")
        finding = f"{len(results):,} samples; what their numbers say twice, they say alike"
        checks.append(check_cases(f"samples of {name}", wrong, finding))
    return checks


def _check_summaries(read: Bundle) -> list[Check]:
    """Check summaries, comparison and coverage against what the numbers of the samples give."""
    if read.unreadable:
        return [Check("summaries", "unchecked", "members of the bundle are missing", "all members of the bundle")]
    try:
        trees = numbers.compute_trees(read.results, base=read.about["base"], **read.about["options"])
    except ValueError as error:
        return [Check("summaries", "contradicts", f"cannot be computed: {error}")]
    confidence = read.about["options"]["confidence"]
    # of the figures that are claimed: they are compared themselves, and another version may have others
    trees[numbers.COVERAGE] = numbers.as_json(numbers.state_coverage(read.trees, confidence))
    same = _is_same_code(read.about["made_by"])
    checks = [check for member, tree in trees.items() for check in _check_tree(read, member, tree, same)]
    if confidence != STUDIED:
        finding = f"the intervals are of {confidence:g}; how often they hold the truth was studied for {STUDIED:g}"
        checks.append(Check("coverage", "unchecked", finding, "the study for that, tests/benchmarks/eval/coverage.py"))
    return checks


def _check_tree(read: Bundle, member: str, found: dict[str, Any], same: bool) -> list[Check]:
    """Compare a member with what was computed; `same`: by the code that made it, so that entries are the same, too."""
    claimed = read.trees[member]
    if isinstance(claimed.get("chance"), dict):
        found["chance"] = numbers.against_chance(found, claimed["chance"])
    seen = numbers.compare_trees(claimed, found)
    apart = [f"{path} is left out" for path in seen.only_computed]
    apart += [f"{path} does not follow from the samples" for path in seen.only_claimed]
    wrong = [*seen.differing, *(apart if same else ())]
    made_by = read.about["made_by"]
    versions = "" if same else f" (made by version {made_by.get('hf_axonn')}, commit {made_by.get('commit')})"
    if wrong:
        return [Check(member, "contradicts", join_cases(wrong) + versions)]
    largest = f"largest relative difference {seen.largest:.1e} of {numbers.TOLERANCE:g}"
    exactly = "all equal" if seen.largest == 0 else largest
    checks = [Check(member, "agrees", f"{seen.compared:,} entries computed again from the samples, {exactly}")]
    if apart:
        needs = "the version that made the bundle"
        checks.append(Check(member, "unchecked", join_cases(apart) + versions, needs))
    return checks


def _is_same_code(made_by: Mapping[str, Any]) -> bool:
    """Return True if the code here made the bundle, as far as releases and commits tell."""
    here = origin()
    return not here["modified"] and all(made_by.get(name) == here[name] for name in ("hf_axonn", "commit", "modified"))


def _bound(read: Bundle, run: str, entry: Entry | None) -> float | None:
    """Return the margin below which a sample was a near tie, by the settings of its part of the run."""
    record = read.records[run]
    parts = record.get("parts") or [record]
    place = entry.parts[read.about["runs"].index(run)] if entry is not None else None
    if not isinstance(place, int) or not 0 <= place < len(parts):
        return None
    settings = parts[place].get("settings", record["settings"])
    bound = settings.get("near_tie_below") if isinstance(settings, dict) else None
    return bound if isinstance(bound, float) else None


def _wide_bounds(record: Mapping[str, Any]) -> list[str]:
    """List bounds of near ties that are wider than twice that of the dtype: they would make samples undecided."""
    dtype = record["identity"]["dtype"]
    allowed = widest_bound(dtype)
    settings = [part.get("settings") for part in [record, *(record.get("parts") or [])]]
    bounds = [each.get("near_tie_below") for each in settings if isinstance(each, dict)]
    wide = [bound for bound in bounds if bound is not None and not (isinstance(bound, float) and 0 < bound <= allowed)]
    return [f"near_tie_below is {bound!r}, and that of {dtype} at most {allowed:g}" for bound in dict.fromkeys(wide)]


def _wrong_access(record: Mapping[str, Any], results: Sequence[SampleResult]) -> list[str]:
    """List what a run has that its level of access does not give."""
    level = access_of(record)
    unknown = str(record["identity"]["model_fingerprint"]).startswith(UNKNOWN)
    wrong = []
    if unknown != (level != WEIGHTS):
        wrong.append(f"the level of access is {level}, and the fingerprint is {'unknown' if unknown else 'known'}")
    if level in (TEXT, TOP_K_LOGITS) and any("min_k_plus_plus" in (one.membership or {}) for one in results):
        wrong.append(f"the level of access is {level}, and there is Min-K%++, which needs all logits")
    if level == TEXT and any(one.logprobs is not None for one in results):
        wrong.append(f"the level of access is {level}, and there are log-probabilities")
    return wrong


def _check_samples(read: Bundle, samples: Sequence[Sample], path: str, key: Key) -> tuple[Check, dict[str, int]]:
    """Check that these are the samples; also return the place of each by the name that it has in the bundle."""
    if key.name != read.about["key"]:
        return Check("samples", "contradicts", "the key is another one than that of the bundle"), {}
    anonymous = Anonymous(key, document_ids=read.about.get("document_ids") == "clear")
    places: dict[str, int] = {}
    cuts: dict[str, tuple[int, int, int, int]] = {}
    wrong = []
    for place, sample in enumerate(samples):
        label = f"sample {place + 1}, {sample.sample_id!r},"
        name = anonymous.sample_id(sample.sample_id)
        entry = read.samples.get(name)
        if entry is None:
            wrong.append(f"{label} is not in the bundle")
            continue
        places[name], cuts[name] = place, (sample.bucket, sample.offset, len(sample.prefix), len(sample.suffix))
        if entry.tokens != anonymous.tokens(sample):
            wrong.append(f"{label} has other tokens")
        if entry.document != anonymous.document_id(sample.document_id):
            wrong.append(f"{label} is of another document")
    if missing := len(read.samples) - len(places):
        wrong.append(f"{missing:,} samples of the bundle are not in {path}")
    for run, results in read.results.items():
        for result in results:
            name, cut = result.sample_id, (result.bucket, result.offset, result.prefix_length, result.suffix_length)
            if name in cuts and cuts[name] != cut:
                label = f"sample {places[name] + 1} has bucket, offset and lengths"
                wrong.append(f"{label} {cuts[name]}, in run {run!r} {cut}")
    if not wrong and anonymous.samples_hash(samples_digest(samples)) != read.about["samples_sha256"]:
        wrong.append("each is, but the file is not: another order, or other bytes")
    return check_cases("samples", wrong, f"{len(places):,} are those of the bundle, by keyed hashes"), places


def _check_origin(made_by: Mapping[str, Any]) -> Check:
    """Return what the owner says of the run, which no file can prove."""
    changed = ", modified" if made_by.get("modified") is True else ""
    return Check(
        "what ran",
        "unchecked",
        "command, versions, protocol, device and times are as recorded; bundle made by version "
        f"{made_by.get('hf_axonn', 'unknown')}, commit {made_by.get('commit', 'unknown')}{changed}",
        "someone who saw the run: no file proves that it took place",
    )


def is_rank_zero() -> bool:
    """Return True on the process that prints the outcome."""
    return WorkSplit.for_model(None).rank == 0
