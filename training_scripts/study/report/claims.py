"""What publications report beside what a study sees.

Nothing here is decided by hand: a verdict says where an interval lies. What publications report comes with how well it
is known: read in the source, or recalled and not compared with it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hf_axonn.goldfish.mask import HASHES
from hf_axonn_eval.report.tables import estimate_text
from hf_axonn_eval.report.words import listed
from hf_axonn_scripts.study.findings.findings import OVERALL, PRIMARY
from hf_axonn_scripts.study.recipe.definition import ORDINARY
from hf_axonn_scripts.study.report.wording import (
    Content,
    cell_of,
    count,
    fullest,
    number,
    plain,
    sign,
    slope_of,
    value_text,
)


AS_REPORTED, OTHERWISE, UNDECIDED, UNMEASURED = "as reported", "otherwise", "not decided", "not measured"
NEAR = 0.1  # a share whose interval ends below is called near a control that gives nothing back


class Claim(NamedTuple):
    """What a publication reports, and what is seen here."""

    question: str
    reported: str
    source: str
    seen: str
    verdict: str


def claims(content: Content) -> list[Claim]:
    """What publications report beside what was seen, each with a verdict."""
    makers = (_log_size, _log_repetitions, _small_models, _goldfish_removes, _random_does_not, _dropped_tokens)
    return [make(content) for make in (*makers, _membership_stays, _price)]


def _log_size(content: Content) -> Claim:
    row = slope_of(content, PRIMARY, ORDINARY, OVERALL)
    reported = "Memorization grows in proportion to the logarithm of the number of parameters."
    seen, verdict = "", UNMEASURED
    if row is not None:
        off = [name for name, miss in row["residuals"].items() if sign(miss)]
        seen = f"Gain: {number(row['slope'])} nats a token for ten times the size. "
        seen += f"Not on the line: {listed(off)}." if off else "Every size is on the line within its interval."
        verdict = {1: AS_REPORTED, -1: OTHERWISE, 0: UNDECIDED}[sign(row["slope"])]
        verdict = f"{verdict}, but not on a straight line" if off and verdict == AS_REPORTED else verdict
    source = "Carlini et al. 2023, arXiv 2202.07646, abstract (exact matches of 50 tokens, 125M to 6B)"
    return Claim("Does memorization grow with size?", reported, source, seen, verdict)


def _log_repetitions(content: Content) -> Claim:
    rows = [row for row in content["doublings"] if (row["outcome"], row["loss"]) == (PRIMARY, ORDINARY)]
    reported = "Memorization grows in proportion to the logarithm of the number of copies."
    seen, verdict = "", UNMEASURED
    if rows:
        signs = [sign(row["slope"]) for row in rows]
        off = [row["model"] for row in rows if any(sign(miss) for miss in row["residuals"].values())]
        seen = "Gain for each doubling: " + "; ".join(f"{row['model']} {number(row['slope'])}" for row in rows) + "."
        seen += f" Not on a line: {listed(off)}." if off else ""
        verdict = _of_all(signs)
        verdict = f"{verdict}, but not on a straight line" if off and verdict == AS_REPORTED else verdict
    source = "Carlini et al. 2023, abstract"
    return Claim("Does memorization grow with repetition?", reported, source, seen, verdict)


def _small_models(content: Content) -> Claim:
    reported = "Models of up to 13B stay near the control; 70B gives back about 47% of what it saw six times."
    source = (
        "SC24, arXiv 2502.08145: appears at 70B by a summary; the figures are recalled, not compared with the paper"
    )
    most = max(content["buckets"], default=0)
    differ: list[str] = []
    same: list[str] = []
    near = True
    for model in content["models"]:
        found = (cell_of(content, model["model"], ORDINARY, bucket) for bucket in (most, 0))
        cells = [cell["verbatim"] for cell in found if cell is not None]
        if model["apart"] or len(cells) < 2 or not most:
            continue
        seen_often, unseen = cells
        apart = seen_often["low"] is not None and seen_often["low"] > (unseen["high"] or 0)
        near = near and seen_often["high"] is not None and seen_often["high"] <= NEAR
        (differ if apart else same).append(f"{model['model']} {estimate_text(seen_often)}")
    if not differ and not same:
        return Claim("Do small models stay near the control?", reported, source, "", UNMEASURED)
    seen = f"Verbatim, seen {most} times: " + "; ".join([*differ, *same]) + "."
    if differ:
        seen += (
            f" So small models, too, give back what they saw {most} times; this study shows passages more often, and "
            "asks for fewer tokens."
        )
    verdict = OTHERWISE if differ else AS_REPORTED if near else UNDECIDED
    return Claim("Do small models stay near the control?", reported, source, seen, verdict)


def _goldfish_removes(content: Content) -> Claim:
    reported = (
        "With k = 4, 0 of 100 articles come back verbatim, with the ordinary loss 84; with k = 2 models of SC24 "
    )
    reported += "are near the control."
    source = "Hans et al. 2024, arXiv 2406.10209 (authors' blog); SC24: recalled"
    most = max(content["buckets"], default=0)
    rows = [row for row in content["goldfish"] if row["bucket"] == most and row.get("strategy") in HASHES]
    rows = [row for row in rows if row["k"] <= 4 and row["verbatim_difference"]["passages"]]
    if not rows or not sum(row["verbatim_difference"]["ordinary"] for row in rows):
        why = "The ordinary loss gives nothing back either." if rows else ""
        return Claim("Does goldfish remove copies?", reported, source, why, UNDECIDED if rows else UNMEASURED)
    mine = sum(row["verbatim_difference"]["mine"] for row in rows)
    ordinary = sum(row["verbatim_difference"]["ordinary"] for row in rows)
    passages = sum(row["verbatim_difference"]["passages"] for row in rows)
    more = [f"{row['model']} {row['loss']}" for row in rows if not _like_control(content, row)]
    seen = f"k up to 4, all models, seen {most} times: {mine} of {passages}, the ordinary loss {ordinary}."
    seen += f" More than the control: {listed(more)}." if more else " Nowhere more than the control's interval allows."
    highs = [row["verbatim_difference"]["high"] for row in rows]
    shown = any(high is not None and high < 0 for high in highs)
    verdict = OTHERWISE if more else AS_REPORTED if shown else UNDECIDED
    return Claim("Does goldfish remove copies?", reported, source, seen, verdict)


def _like_control(content: Content, row: Mapping[str, Any]) -> bool:
    """Whether the passages seen most often come back no more often than unseen ones of the same runs may."""
    found = (cell_of(content, row["model"], row["loss"], bucket) for bucket in (row["bucket"], 0))
    cells = [cell["verbatim"] for cell in found if cell is not None]
    return len(cells) < 2 or cells[0]["low"] is None or cells[0]["low"] <= (cells[1]["high"] or 0)


def _random_does_not(content: Content) -> Claim:
    reported = "Tokens that are left out at random, anew in each pass, do not protect."
    source = "Hans et al. 2024 (the baseline of the paper)"
    most = max(content["buckets"], default=0)
    rows = [row for row in content["goldfish"] if row["bucket"] == most and row.get("strategy") not in (None, *HASHES)]
    rows = [row for row in rows if row.get("gain_kept", {"mean": None})["mean"] is not None]
    pairs = [(row, other) for row in rows for other in content["goldfish"] if _same_rate(row, other)]
    pairs = [(row, other) for row, other in pairs if other.get("gain_kept", {"mean": None})["mean"] is not None]
    if not pairs:
        return Claim("Does leaving out at random protect?", reported, source, "", UNMEASURED)
    above = [row["gain_kept"]["low"] is not None and row["gain_kept"]["low"] > _high(other) for row, other in pairs]
    below = [row["gain_kept"]["high"] is not None and row["gain_kept"]["high"] < _low(other) for row, other in pairs]
    verdict = AS_REPORTED if all(above) else OTHERWISE if any(below) else UNDECIDED
    row, other = (
        pairs[-1]
        if fullest(content) not in (one["model"] for one, _ in pairs)
        else next(pair for pair in pairs if pair[0]["model"] == fullest(content))
    )
    seen = (
        f"Seen {most} times, {row['model']}: {row['loss']} keeps {number(row['gain_kept'])} of the gain, "
        f"{other['loss']} {number(other['gain_kept'])}. Of {len(pairs)} models {sum(above)} keep more of it with "
        f"{row['loss']}, by intervals that do not meet, and {sum(below)} less."
    )
    return Claim("Does leaving out at random protect?", reported, source, seen, verdict)


def _same_rate(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    same = all(row[name] == other[name] for name in ("model", "bucket")) and row["k"] == other.get("k")
    return same and other.get("strategy") in HASHES


def _high(row: Mapping[str, Any]) -> float:
    kept = row["gain_kept"]
    return float(kept["mean"] if kept["high"] is None else kept["high"])


def _low(row: Mapping[str, Any]) -> float:
    kept = row["gain_kept"]
    return float(kept["mean"] if kept["low"] is None else kept["low"])


def _dropped_tokens(content: Content) -> Claim:
    reported = "A continuation leaves the text at the tokens that were left out, or beside them."
    source = "Hans et al. 2024 (caption of a figure)"
    most = max(content["buckets"], default=0)
    rows = [row for row in content["tokens"] if row["bucket"] == most and row["who"] == row["mask"]]
    rows = [row for row in rows if "difference" in row]
    if not rows:
        return Claim("Are dropped tokens not learnt?", reported, source, "", UNMEASURED)
    signs = [sign({**row["difference"]["accuracy"], "mean": 0}) for row in rows]
    mine = [row for row in rows if row["model"] == fullest(content)]
    told = "; ".join(
        f"{row['mask']} {number(row['dropped']['accuracy'])} and {number(row['supervised']['accuracy'])}"
        for row in mine
    )
    seen = f"Dropped and supervised tokens right in {fullest(content)}, seen {most} times: {told}. " if told else ""
    seen += (
        f"Of {count(len(rows), 'run')} by model and loss, {signs.count(1)} know fewer of the dropped ones, "
        f"{signs.count(-1)} more."
    )
    verdict = _of_all(signs)
    return Claim("Are dropped tokens not learnt?", reported, source, seen, verdict)


def _of_all(signs: Sequence[int]) -> str:
    """What several intervals say together: all above 0, more than half below it, or neither."""
    return AS_REPORTED if min(signs) > 0 else OTHERWISE if 2 * signs.count(-1) > len(signs) else UNDECIDED


def _membership_stays(content: Content) -> Claim:
    reported = "Membership inference by the loss tells members about as well as after ordinary training."
    source = "Hans et al. 2024, table 2 (only marginal difference, by a summary)"
    most, model = max(content["buckets"], default=0), fullest(content)
    rows = {
        row["loss"]: row["auc"]
        for row in content["membership"]
        if (row["model"], row["bucket"], row["score"]) == (model, most, "loss")
    }
    others = [loss for loss in rows if content["losses"][loss].get("strategy") in HASHES]
    if ORDINARY not in rows or not others:
        return Claim("Does goldfish hide membership?", reported, source, "", UNMEASURED)
    seen = f"AUC of {model}, seen {most} times: " + "; ".join(
        f"{loss} {value_text(auc)}" for loss, auc in rows.items()
    )
    apart = [rows[loss]["high"] is not None and rows[loss]["high"] < (rows[ORDINARY]["low"] or 0) for loss in others]
    chance = [rows[loss]["low"] is not None and rows[loss]["low"] > 0.5 for loss in others]
    verdict = OTHERWISE if any(apart) else AS_REPORTED if all(chance) else UNDECIDED
    return Claim("Does goldfish hide membership?", reported, source, f"{seen}.", verdict)


def _price(content: Content) -> Claim:
    reported = "At as many supervised tokens, k / (k - 1) times as many in all, the held-out loss is the same."
    source = "Hans et al. 2024 (caption of a figure)"
    found = [
        (model, loss, entry)
        for model, by_loss in content["same_loss"].items()
        for loss, entry in by_loss.items()
        if entry.get("at_end", {}).get("ratio") is not None
    ]
    seen = "; ".join(
        f"{model} {loss}: {entry['at_end']['ratio']:.2f} times as many tokens as the ordinary loss, "
        f"{entry['at_end']['supervised_ratio']:.2f} times as many supervised ones (k / (k - 1): "
        f"{plain(entry['predicted'])})"
        for model, loss, entry in found
    )
    seen += "; one training of each, so there is no interval." if found else ""
    return Claim("What does goldfish cost?", reported, source, seen, UNDECIDED if found else UNMEASURED)
