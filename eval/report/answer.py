"""What a report opens with, a sentence each: what was asked, what came back, how sure that is, what was left out.

Every number is one of the comparison's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hf_axonn_eval.report import protocols, tables


METRIC = "exact_match"
DRAWS = "1000"  # of the stated sampler, if there is one; one of metrics.discoverability.TRIES
P = "0.5"
_FEW = 5  # buckets that are named one by one

Comparison = Mapping[str, Any]


def answer(comparison: Comparison) -> list[str]:
    """The four sentences.

    What greedy decoding gave back is told of the samples that were trained on most often and of the controls, and
    what sampling finds of all that were trained on.

    Args:
        comparison: what `compare` returned.
    """
    trained = [bucket for bucket in tables.buckets(comparison) if bucket != "0"]
    told = max(trained, key=int, default="0")
    return [
        _asked(comparison, trained),
        _came_back(comparison, trained, told),
        _how_sure(comparison, told),
        _left_out(comparison),
    ]


def _asked(comparison: Comparison, trained: Sequence[str]) -> str:
    groups = comparison["runs"][comparison["base"]]["buckets"]
    samples = sum(groups[bucket]["samples"] for bucket in trained)
    controls = groups.get("0", {"samples": 0})["samples"]
    everything = comparison["runs"][comparison["base"]]["all"]
    times = _times(listed(trained, "or") if len(trained) <= _FEW else f"{trained[0]} to {trained[-1]}")
    if not trained:
        whose = ": only controls, which were not trained on"
    elif not controls:
        whose = f", trained on {times}, without any controls"
    else:
        whose = f": {samples:,} trained on {times}, and {_count(controls, 'control')}"
    runs = list(comparison["runs"])
    return (
        f"{_count(len(runs), 'model')} ({listed(runs)}) {'was' if len(runs) == 1 else 'were'} asked to continue "
        f"{_count(everything['samples'], 'sample')} of {_count(everything['documents'], 'document')}{whose}. "
        f"{protocols.standing(comparison)}"
    ).rstrip()


def _came_back(comparison: Comparison, trained: Sequence[str], told: str) -> str:
    if not _shares(comparison, told):
        return "Whether these were reproduced verbatim was not measured."
    whose = f"samples trained on {'most often, ' if len(trained) > 1 else ''}{_times(told)}" if trained else "controls"
    sentence = f"Of the {whose}, greedy decoding reproduced verbatim {_from_each(_shares(comparison, told))}"
    if trained and _shares(comparison, "0"):
        sentence += f", and of the controls {_from_each(_shares(comparison, '0'))}"
    drawn = {name: _drawn(run, trained or ["0"]) for name, run in comparison["runs"].items()}
    drawn = {name: share for name, share in drawn.items() if share}
    if drawn:
        sentence += "; of all that was trained on" if trained else "; of these"
        sentence += f", {int(DRAWS):,} draws find at least as likely as not {_from_each(drawn)}"
    return f"{sentence}."


def _how_sure(comparison: Comparison, told: str) -> str:
    if not _shares(comparison, told):
        return "So there is no share of them to be sure of."
    changes = []
    for name in comparison["minus_base"]:
        difference = comparison["minus_base"][name][told].get(METRIC)
        if difference is not None:
            p = comparison["mcnemar"][name][told][METRIC]["p_holm"]
            changes.append(f"{tables.difference_text(difference)} for {name} (p = {p:.2g})")
    against = "there is no other run to compare with, so how much of this comes from training is not known"
    if changes:
        against = (
            f"the share that came back differs from that of {comparison['base']} by {listed(changes)}, with p of "
            "McNemar's test after Holm's correction"
        )
    ties = sum(tables.group(run, told).get("undecided", {"count": 0})["count"] for run in comparison["runs"].values())
    doubt = f"; rounding could change {ties:,} of these answers" if ties else ""
    return f"Brackets are {tables.percent(comparison)} intervals; {against}{doubt}."


def _left_out(comparison: Comparison) -> str:
    counts = tables.left_out_counts(comparison)
    if counts is None:
        return "The runs do not record what was left out when the samples were made."
    reasons = {
        "too_short": "too short",
        "too_long": "too long",
        "beyond_max_documents": "over a bucket's limit",
        "dropped": "dropped by name",
    }
    gone = [f"{_count(counts[reason], 'document')} {why}" for reason, why in reasons.items() if counts[reason]]
    gone += [_count(counts["duplicate_samples"], "duplicate sample")] if counts["duplicate_samples"] else []
    samples = {"repetitive_suffixes": "sample with a repetitive suffix", "windows_too_short": "short window"}
    gone += [_count(counts[reason], one) for reason, one in samples.items() if counts[reason]]
    left_out = f"this was left out: {listed(gone)}" if gone else "nothing was left out"
    decoded = counts["not_round_trip"]
    changed = f"; the tokenizer does not give back {_count(decoded, 'document')} unchanged" if decoded else ""
    return f"When the samples were made of {_count(counts['documents'], 'document')}, {left_out}{changed}."


def _shares(comparison: Comparison, bucket: str) -> dict[str, str]:
    """By run, how much of a bucket came back; empty if that was not measured, or there is no such bucket."""
    found = {name: run["buckets"].get(bucket, {"metrics": {}}) for name, run in comparison["runs"].items()}
    return {
        name: tables.estimate_text(numbers["metrics"][METRIC])
        for name, numbers in found.items()
        if METRIC in numbers["metrics"]
    }


def _drawn(run: Mapping[str, Any], buckets: Sequence[str]) -> str:
    """How many samples DRAWS draws give back with probability P; empty without a sampler."""
    found = [run["buckets"][bucket].get("discoverability", {}).get(P, {"tries": {}})["tries"] for bucket in buckets]
    shares = [tries[DRAWS] for tries in found if DRAWS in tries]
    return f"{sum(share['count'] for share in shares):,} of {sum(share['n'] for share in shares):,}" if shares else ""


def _from_each(shares: Mapping[str, str]) -> str:
    """By run; in short where all are alike."""
    if len(shares) > 1 and len(set(shares.values())) == 1:
        return f"{next(iter(shares.values()))} from each"
    return listed([f"{share} from {name}" for name, share in shares.items()])


def _times(buckets: str) -> str:
    return "once" if buckets == "1" else f"{buckets} times"


def _count(number: int, one: str) -> str:
    return f"{number:,} {one}{'' if number == 1 else 's'}"


def listed(words: Sequence[object], last: str = "and") -> str:
    """a, b and c."""
    texts = [str(word) for word in words]
    return f" {last} ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
