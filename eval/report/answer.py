"""The sentences of a report after its verdicts: what was asked, what came back, how sure that is, what was left out,
and what the models say of their own training.

Every number is one of the comparison's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hf_axonn_eval.report import protocols, tables, training
from hf_axonn_eval.report.verdict import DRAWS, count_drawn
from hf_axonn_eval.report.words import count, join_words, round_mean, times


METRIC = "exact_match"
_FEW = 5  # buckets that are named one by one

Comparison = Mapping[str, Any]


def answer(comparison: Comparison) -> list[str]:
    """Write the five sentences.

    How often a document was seen is what the samples file says. Greedy decoding is reported for the samples that
    were seen most often and for the controls, sampling for all that were seen.

    Args:
        comparison: what `compare` returned.
    """
    seen = [bucket for bucket in tables.buckets(comparison) if bucket != "0"]
    largest = max(seen, key=int, default="0")
    own = _came_back(comparison, seen, largest), _how_sure(comparison, largest), _left_out(comparison)
    return [_questions(comparison, seen), *own, training.sentence(comparison), *_leaks(comparison)]


def _questions(comparison: Comparison, seen: Sequence[str]) -> str:
    groups = comparison["runs"][comparison["base"]]["buckets"]
    samples = sum(groups[bucket]["samples"] for bucket in seen)
    controls = groups.get("0", {"samples": 0})["samples"]
    everything = comparison["runs"][comparison["base"]]["all"]
    often = times(seen) if len(seen) <= _FEW else f"{seen[0]} to {seen[-1]} times"
    if not seen:
        whose = ": only controls, which were not seen"
    elif not controls:
        whose = f", seen {often}, without any controls,"
    else:
        whose = f": {samples:,} seen {often}, and {count(controls, 'control')},"
    runs = list(comparison["runs"])
    return (
        f"{count(len(runs), 'model')} ({join_words(runs)}) {'was' if len(runs) == 1 else 'were'} asked to continue "
        f"{count(everything['samples'], 'sample')} of {count(everything['documents'], 'document')}{whose} according "
        f"to the samples file. {protocols.standing(comparison)}"
    ).rstrip()


def _came_back(comparison: Comparison, seen: Sequence[str], largest: str) -> str:
    if not _shares(comparison, largest):
        return "Whether these were reproduced verbatim was not measured."
    whose = f"samples seen {'most often, ' if len(seen) > 1 else ''}{times([largest])}" if seen else "controls"
    sentence = f"Of the {whose}, greedy decoding reproduced verbatim {_from_each(_shares(comparison, largest))}"
    if seen and _shares(comparison, "0"):
        sentence += f", and of the controls {_from_each(_shares(comparison, '0'))}"
    counts = {name: count_drawn(run, seen or ["0"]) for name, run in comparison["runs"].items()}
    drawn = {name: f"{some:,} of {samples:,}" for name, (some, samples) in counts.items() if samples}
    if drawn:
        sentence += "; of all samples seen" if seen else "; of these"
        sentence += f", {int(DRAWS):,} draws find at least as likely as not {_from_each(drawn)}"
    return f"{sentence}."


def _how_sure(comparison: Comparison, largest: str) -> str:
    if not _shares(comparison, largest):
        return "So there is no share of them to be sure of."
    changes = []
    for name in comparison["minus_base"]:
        difference = comparison["minus_base"][name][largest].get(METRIC)
        if difference is not None:
            p = comparison["mcnemar"][name][largest][METRIC]["p_holm"]
            changes.append(f"{tables.difference_text(difference)} for {name} (p = {p:.2g})")
    against = "there is no other run to compare with, so how much of this comes from training is not known"
    if changes:
        against = (
            f"the share that came back differs from that of {comparison['base']} by {join_words(changes)}, with p of "
            "McNemar's test after Holm's correction"
        )
    groups = [tables.group(run, largest) for run in comparison["runs"].values()]
    ties = sum(numbers.get("undecided", {"count": 0})["count"] for numbers in groups)
    doubt = f"; rounding could change {ties:,} of these answers" if ties else ""
    return f"Brackets are {tables.percent(comparison)} intervals; {against}{doubt}."


def _left_out(comparison: Comparison) -> str:
    counts = tables.left_out_counts(comparison)
    if counts is None:
        return "The runs do not record what was left out when the samples were made."
    reasons = {"too_short": "too short", "too_long": "too long", "beyond_max_documents": "over a bucket's limit"}
    reasons |= {"dropped": "dropped by name"}
    gone = [f"{count(counts[reason], 'document')} {why}" for reason, why in reasons.items() if counts[reason]]
    gone += [count(counts["duplicate_samples"], "duplicate sample")] if counts["duplicate_samples"] else []
    samples = {"repetitive_suffixes": "sample with a repetitive suffix", "windows_too_short": "short window"}
    gone += [count(counts[reason], one) for reason, one in samples.items() if counts[reason]]
    left_out = f"this was left out: {join_words(gone)}" if gone else "nothing was left out"
    decoded = counts["not_round_trip"]
    changed = f"; the tokenizer does not give back {count(decoded, 'document')} unchanged" if decoded else ""
    same = counts["copies"]
    copies = f"; {same:,} have the tokens of an earlier one, and yet count as documents" if same else ""
    return f"When the samples were made of {count(counts['documents'], 'document')}, {left_out}{changed}{copies}."


def _leaks(comparison: Comparison) -> list[str]:
    """Name the scores whose AUC is below one half, of each run the one that is furthest."""
    sentences = []
    for name, run in comparison["runs"].items():
        found = {score: one for score, one in run["all"].get("membership", {}).items() if tables.leaks(one)}
        if found:
            score = min(found, key=lambda one: found[one]["auc"]["value"])
            area = found[score]["auc"]
            turned = round_mean(1 - area["value"])
            sentences.append(
                f"{name} leaks membership the other way round: the AUC of {tables.ATTACKS.get(score, score)} is "
                f"{round_mean(area['value'])}{tables.ends_text(area)}, so controls look more like members than what "
                f"was seen, and whoever turns the score round tells them apart with {turned}. Controls of another "
                "kind may do this, and so may training against memorization."
            )
    return sentences


def _shares(comparison: Comparison, bucket: str) -> dict[str, str]:
    """Write by run how much of a bucket came back; empty if that was not measured, or there is no such bucket."""
    found = {name: run["buckets"].get(bucket, {"metrics": {}}) for name, run in comparison["runs"].items()}
    return {
        name: tables.estimate_text(numbers["metrics"][METRIC])
        for name, numbers in found.items()
        if METRIC in numbers["metrics"]
    }


def _from_each(shares: Mapping[str, str]) -> str:
    """Join the shares by run, in short where all are alike."""
    if len(shares) > 1 and len(set(shares.values())) == 1:
        return f"{next(iter(shares.values()))} from each"
    return join_words([f"{share} from {name}" for name, share in shares.items()])
