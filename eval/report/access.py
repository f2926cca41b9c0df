"""Findings of a comparison by level of access: what an attacker has to see for each of them.

A finding belongs to the least level that gives it. Verbatim continuations need texts alone; scores of a guessed text
need its log-probability; Min-K%++ needs the full distribution. No test here needs weights for more than to know which
model answered.
"""

from collections.abc import Mapping
from typing import Any

from hf_axonn_eval.data.access import LEVELS, LOGITS, TEXT, TOP_K_LOGITS, WEIGHTS, access_of
from hf_axonn_eval.report import tables
from hf_axonn_eval.report.tables import ATTACKS, Details
from hf_axonn_eval.report.verdict import DRAWS, count_drawn
from hf_axonn_eval.report.words import join_words, round_mean


SCORES = {TOP_K_LOGITS: ("loss", "zlib", "min_k", "reference"), LOGITS: ("min_k_plus_plus",)}  # by the level they need
_SHOWN = {
    TEXT: "continuations: greedy ones, and draws",
    TOP_K_LOGITS: "the log-probability of a guessed text, as far as its tokens are shown",
    LOGITS: "the distribution at every token",
    WEIGHTS: "everything; which model it is",
}

Comparison = Mapping[str, Any]


def levels(comparison: Comparison) -> list[Details]:
    """Give the findings of each run by level of access, up to its own."""
    body = []
    for level in LEVELS:
        for name, summary in comparison["runs"].items():
            run = summary["run"]
            if run is None:
                continue
            own = access_of(run)
            seen = LEVELS.index(level) <= LEVELS.index(own)
            found = _FINDINGS[level](comparison, name) if seen else f"not seen: this run had {own}"
            body.append([level, _SHOWN[level], name, found])
    note = "Over all that was seen. A finding stands at the least level that gives it; higher levels have it too."
    headings = ["level of access", "an attacker sees", "model", "this run found"]
    return [Details("What each level of access shows", headings, body, note)] if body else []


def limits(comparison: Comparison) -> list[str]:
    """List what runs cannot show because of the level of access that they had, a sentence for each level."""
    names: dict[tuple[str, Any], list[str]] = {}
    for name, summary in comparison["runs"].items():
        if summary["run"] is not None and (level := access_of(summary["run"])) != WEIGHTS:
            shown = summary["run"].get("settings", {}).get("alternatives") if level == TOP_K_LOGITS else None
            names.setdefault((level, shown), []).append(name)
    sentences = []
    for (level, shown), some in names.items():
        whose = f"{join_words(some)} {'was' if len(some) == 1 else 'were'}"
        if level == TEXT:
            seen = "through texts alone: no probability of anything is known"
        elif level == LOGITS:
            seen = "through its logits"
        else:
            places = f"the {shown} likeliest tokens" if shown else "the likeliest tokens"
            seen = f"through {places} of each place: Min-K%++ and draws from more of them are not known"
        sentences.append(f"{whose} seen {seen}; that the same weights answered throughout is the server's word.")
    return sentences


def _verbatim(comparison: Comparison, name: str) -> str:
    entry = comparison["evidence"][name]["seen"]
    if entry is None:
        return "only controls"
    buckets = [bucket for bucket in tables.buckets(comparison) if bucket != "0"]
    drawn, samples = count_drawn(comparison["runs"][name], buckets)
    draws = f"; by {int(DRAWS):,} draws {drawn:,} of {samples:,}, as likely as not" if samples else ""
    return f"verbatim by greedy decoding {tables.estimate_text(entry)}{draws}"


def _membership(level: str, comparison: Comparison, name: str) -> str:
    attacks = comparison["runs"][name]["all"].get("membership", {})
    known = {score: attacks[score]["auc"] for score in SCORES[level] if score in attacks}
    if not known:
        return "membership was not measured (--membership)"
    best = max(known, key=lambda score: abs(known[score]["value"] - 0.5))
    return f"membership: AUC {round_mean(known[best]['value'])}{tables.ends_text(known[best])} by {ATTACKS[best]}"


_FINDINGS = {
    TEXT: _verbatim,
    TOP_K_LOGITS: lambda comparison, name: _membership(TOP_K_LOGITS, comparison, name),
    LOGITS: lambda comparison, name: _membership(LOGITS, comparison, name),
    WEIGHTS: lambda comparison, name: "the fingerprint; attacks on weights were not tried",
}
