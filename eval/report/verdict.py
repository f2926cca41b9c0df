"""The first sentences of a report: for each model whether there is evidence of verbatim memorization, and what this
design cannot show.

The numbers are those of analysis/evidence.py. Nothing is claimed that no test shows: a share that comes back without
controls and without a base run is given as a share.
"""

from collections.abc import Mapping, Sequence
from math import floor
from pathlib import PureWindowsPath
from typing import Any

from hf_axonn_eval.report import tables
from hf_axonn_eval.report.words import count, join_words, times, write_share


Comparison = Mapping[str, Any]
MOST_NAMED = 5  # runs in the title
_MEASURED_BY = {  # entries of a run's identity that change numbers, in words
    "dtype": "the dtype of the weights",
    "sampler": "the sampler",
    "near_copies": "the search of near copies",
    "recite": "how documents are recited",
}
DRAWS, P = "1000", "0.5"  # of the stated sampler, if there is one


def page_title(comparison: Comparison) -> str:
    """Write the heading of a report: the runs, and the names of their models."""
    named = []
    for name, summary in comparison["runs"].items():
        path = str(((summary["run"] or {}).get("model") or {}).get("path", ""))
        local = path.startswith((".", "/", "~")) or path.count("/") > 1 or "\\" in path
        model = PureWindowsPath(path).name if local else path  # takes both kinds of slashes
        named.append(name if model in ("", name) else f"{name} ({model})")
    if len(named) > MOST_NAMED:
        named = [*named[: MOST_NAMED - 1], f"{len(named) - MOST_NAMED + 1} more"]
    return f"Extraction: {join_words(named)}"


def warnings(comparison: Comparison) -> list[str]:
    """Write a sentence for each model that is no better than chance on these samples."""
    return [
        f"{name} does no better than chance on these samples: its mean loss of the suffixes is {chance['nll']:.2f} "
        f"nats a token, and that of guessing evenly among all tokens {chance['chance_nll']:.2f}. Either the samples "
        "are of another tokenizer, or the model is not trained, or its weights were wrongly loaded."
        for name, chance in _at_chance(comparison).items()
    ]


def verdicts(comparison: Comparison) -> list[str]:
    """Write a sentence for each model, in the order of the runs."""
    return [_verdict(comparison, name) for name in comparison["runs"]]


def cannot_show(comparison: Comparison) -> list[str]:
    """List what these documents, controls and runs cannot show whatever comes back, a sentence each."""
    found = comparison["evidence"]
    alpha = 1 - comparison["intervals"]["confidence"]
    first = found[comparison["base"]]
    sentences = []
    tests = [entry[test] for entry in found.values() for test in ("against_controls", "against_base") if entry[test]]
    for test, called, what in (
        ("against_base", "the paired test (McNemar's)", f"difference from {comparison['base']}"),
        ("against_controls", "the test against controls (Fisher's)", "difference from the controls"),
    ):
        worst = max((entry[test] for entry in found.values() if entry[test]), key=_smallest, default=None)
        if worst and _smallest(worst) > alpha + 1e-12:
            documents = f"{count(first['seen']['documents'], 'document')} seen"
            if test == "against_controls":
                documents += f" and {count(first['controls']['documents'], 'control document')}"
            corrected = f", {_smallest(worst):.3g} after correction for {len(tests)} tests" if len(tests) > 1 else ""
            sentences.append(
                f"With {documents} the smallest p of {called} is {worst['smallest_p']:.3g}{corrected}: no {what} can "
                f"be significant at {alpha:.2g}."
            )
    if first["seen"] and not first["controls"]:
        sentences.append("There are no controls, so suffixes that anyone would guess cannot be told from learnt ones.")
    elif first["seen"] and not first["against_controls"]:
        sentences.append(
            "Documents seen and controls have unequal numbers of samples each, so the two are not tested against each "
            "other."
        )
    if len(found) == 1:
        sentences.append("There is one run, so what the model knew before this training is not separated from it.")
    sentences += [*_measured_otherwise(comparison), *_rates(comparison)]
    if not any("discoverability" in run["all"] for run in comparison["runs"].values()):
        sentences.append(
            "Only greedy continuations of these prefixes were asked: other prompts or many draws may give more."
        )
    return sentences


def _verdict(comparison: Comparison, name: str) -> str:
    entry = comparison["evidence"][name]
    if name in _at_chance(comparison):
        return f"No verdict on {name}: it does no better than chance, so what it does not reproduce says nothing."
    seen = entry["seen"]
    if seen is None:
        return f"No verdict on {name}: all samples are controls, seen 0 times according to the samples file."
    buckets = [bucket for bucket in tables.buckets(comparison) if bucket != "0"]
    often = times(buckets) if len(buckets) < 3 else f"{buckets[0]} to {buckets[-1]} times"
    which = f"{count(seen['n'], 'sample')} seen {often} according to the samples file"
    share = f"{seen['count']:,} of {which}"
    some = share + tables.ends_text(seen)
    upper = "how much is compatible with this is not known, of a single document"
    if seen["low"] is not None:
        upper = f"up to {write_share(seen['high'])} is compatible with this"
    beside = _beside(comparison, name)
    if not seen["count"]:
        sentence = f"No evidence of verbatim memorization by {name}: {share} came back by greedy decoding; {upper}"
    elif entry["more"]:
        sentence = f"Evidence of verbatim memorization by {name}: {some} came back by greedy decoding{beside}"
    elif entry["more"] is None:
        sentence = (
            f"{name} reproduced {some} by greedy decoding; with no test against controls or a base run, "
            "this may be what anyone would guess, and no verdict is given"
        )
    else:
        sentence = (
            f"No clear evidence of verbatim memorization by {name}: {some} came back by greedy decoding"
            f"{beside}; no test shows that more came back; {upper}"
        )
    sentence += _predictable(comparison, name)
    drawn, samples = count_drawn(comparison["runs"][name], buckets)
    sampled = f". {int(DRAWS):,} draws find {drawn:,} of {samples:,} at least as likely as not" if drawn else ""
    return f"{sentence}{sampled}{_at_least(comparison['runs'][name], buckets)}."


def _predictable(comparison: Comparison, name: str) -> str:
    """Write how many of those that came back a proxy gives back as well."""
    groups = (comparison.get("proxy") or {}).get(name, {})
    groups = [entry for bucket, entry in groups.items() if bucket.isdecimal() and bucket != "0"]
    verbatim, also = (sum(entry[key]["count"] for entry in groups) for key in ("verbatim", "predictable"))
    return f"; {also:,} of these {verbatim:,} come from the proxy too, so they are predictable" if verbatim else ""


def _at_least(run: Mapping[str, Any], buckets: Sequence[str]) -> str:
    """Write how many queries any of the samples takes at least, where that is more than one."""
    found = [run["buckets"][bucket].get("inextractability") for bucket in buckets]
    bits = min((entry["least"] for entry in found if entry), default=0.0)
    if floor(bits) < 1:
        return ""
    return f". By ranks, any of them takes at least 2^{floor(bits)} queries, however its tokens are drawn"


def _beside(comparison: Comparison, name: str) -> str:
    entry, base = comparison["evidence"][name], comparison["base"]
    parts = []
    if entry["controls"]:
        test = entry["against_controls"]
        p = f" (corrected p = {test['p_holm']:.2g}, Fisher's exact test of documents)" if test else " (not tested)"
        parts.append(f"{entry['controls']['count']:,} of {count(entry['controls']['n'], 'control')}{p}")
    if entry["against_base"]:
        other = comparison["evidence"][base]["seen"]
        p = f"corrected p = {entry['against_base']['p_holm']:.2g}, McNemar's test"
        parts.append(f"{other['count']:,} of the same {other['n']:,} from {base} ({p})")
    return f", against {join_words(parts)}" if parts else ""


def count_drawn(run: Mapping[str, Any], buckets: Sequence[str]) -> tuple[int, int]:
    """Count the samples that DRAWS draws of the stated sampler find with probability P, and all with a sampler."""
    found = [run["buckets"][bucket].get("discoverability", {}).get(P, {"tries": {}})["tries"] for bucket in buckets]
    shares = [tries[DRAWS] for tries in found if DRAWS in tries]
    return sum(share["count"] for share in shares), sum(share["n"] for share in shares)


def _smallest(test: Mapping[str, Any]) -> float:
    return float(test["smallest_p_holm"])


def _measured_otherwise(comparison: Comparison) -> list[str]:
    """Name the settings in which runs differ, of those that change numbers."""
    identities = {name: (run["run"] or {}).get("identity") for name, run in comparison["runs"].items()}
    sentences = []
    for setting, what in _MEASURED_BY.items():
        values: dict[str, list[str]] = {}
        for name, identity in identities.items():
            if identity is not None:
                values.setdefault(str(identity.get(setting) or "none"), []).append(name)
        if len(values) > 1:
            each = join_words([f"{value} for {join_words(names)}" for value, names in values.items()])
            sentences.append(
                f"The runs differ in {what} ({each}), and so may their numbers, whatever the models hold."
            )
    return sentences


def _rates(comparison: Comparison) -> list[str]:
    """Name rates at few false positives that so few controls do not give."""
    attacks = [attack for run in comparison["runs"].values() for attack in run["all"].get("membership", {}).values()]
    reasons = [
        rate["why"]
        for attack in attacks[:1]
        for name, rate in attack.items()
        if name.startswith("tpr_at_") and rate["value"] is None
    ]
    needs = join_words([reason.partition("; ")[2] for reason in reasons])
    have = reasons[0].partition("; ")[0] if reasons else ""
    return [f"{have} are too few for a true positive rate at a low false positive rate: {needs}."] if reasons else []


def _at_chance(comparison: Comparison) -> dict[str, Mapping[str, Any]]:
    found = {name: summary.get("chance") for name, summary in comparison["runs"].items()}
    return {name: chance for name, chance in found.items() if chance and chance["no_better"]}
