"""Reports of publications beside the numbers of a study.

Nothing here is decided by hand: a verdict says where an interval lies. Each report comes with how well it is known:
read in the source, or recalled and not compared with it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hf_axonn.goldfish.mask import HASHES
from hf_axonn_eval.report.tables import estimate_text
from hf_axonn_eval.report.words import count, join_words
from hf_axonn_scripts.study.findings.findings import OVERALL, PRIMARY
from hf_axonn_scripts.study.recipe.definition import ORDINARY
from hf_axonn_scripts.study.report.wording import (
    Content,
    cell_of,
    fullest,
    most_seen,
    number,
    plain,
    select,
    sign,
    slope_of,
    value_text,
)


AS_REPORTED, OTHERWISE, UNDECIDED, UNMEASURED = "as reported", "otherwise", "not decided", "not measured"
NEAR = 0.1  # a share whose interval ends below is called near a control that gives nothing back
Row = Mapping[str, Any]
Seen = tuple[str, str] | None  # what is seen here, and a verdict; None: it was not measured


class Claim(NamedTuple):
    """A report of a publication, and what is seen here."""

    question: str
    reported: str
    source: str
    seen: str
    verdict: str


def claims(content: Content) -> list[Claim]:
    """Return the reports of publications beside what was seen, each with a verdict."""
    return [
        Claim(question, reported, source, *(look(content) or ("", UNMEASURED)))
        for question, reported, source, look in REPORTS
    ]


def _log_size(content: Content) -> Seen:
    row = slope_of(content, PRIMARY, ORDINARY, OVERALL)
    if row is None:
        return None
    off = [name for name, miss in row["residuals"].items() if sign(miss)]
    seen = f"Gain: {number(row['slope'])} nats a token for ten times the size. "
    seen += f"Not on the line: {join_words(off)}." if off else "Every size is on the line within its interval."
    return seen, _mind_line({1: AS_REPORTED, -1: OTHERWISE, 0: UNDECIDED}[sign(row["slope"])], off)


def _log_repetitions(content: Content) -> Seen:
    rows = select(content["doublings"], outcome=PRIMARY, loss=ORDINARY)
    if not rows:
        return None
    off = [row["model"] for row in rows if any(sign(miss) for miss in row["residuals"].values())]
    seen = "Gain for each doubling: " + "; ".join(f"{row['model']} {number(row['slope'])}" for row in rows) + "."
    seen += f" Not on a line: {join_words(off)}." if off else ""
    return seen, _mind_line(judge([sign(row["slope"]) for row in rows]), off)


def _mind_line(verdict: str, off: Sequence[str]) -> str:
    return f"{verdict}, but not on a straight line" if off and verdict == AS_REPORTED else verdict


def judge(signs: Sequence[int]) -> str:
    """Return the verdict of several intervals: all above 0, more than half below it, or neither."""
    return AS_REPORTED if min(signs) > 0 else OTHERWISE if 2 * signs.count(-1) > len(signs) else UNDECIDED


def _small_models(content: Content) -> Seen:
    most = most_seen(content)
    differ: list[str] = []
    same: list[str] = []
    near = True
    for model in content["models"]:
        cells = _verbatim(content, model["model"], ORDINARY, most)
        if model["apart"] or len(cells) < 2 or not most:
            continue
        seen_often, unseen = cells
        apart = seen_often["low"] is not None and seen_often["low"] > (unseen["high"] or 0)
        near = near and seen_often["high"] is not None and seen_often["high"] <= NEAR
        (differ if apart else same).append(f"{model['model']} {estimate_text(seen_often)}")
    if not differ and not same:
        return None
    seen = f"Verbatim, seen {most} times: " + "; ".join([*differ, *same]) + "."
    if differ:
        seen += (
            f" So small models, too, give back what they saw {most} times; this study shows passages more often, and "
            "asks for fewer tokens."
        )
    return seen, OTHERWISE if differ else AS_REPORTED if near else UNDECIDED


def _verbatim(content: Content, model: str, loss: str, bucket: int) -> list[Row]:
    """Return the verbatim shares of a bucket and of bucket 0, those that were measured."""
    cells = (cell_of(content, model, loss, each) for each in (bucket, 0))
    return [cell["verbatim"] for cell in cells if cell is not None]


def _goldfish_removes(content: Content) -> Seen:
    most = most_seen(content)
    rows = [row for row in select(content["goldfish"], bucket=most) if row.get("strategy") in HASHES and row["k"] <= 4]
    rows = [row for row in rows if row["verbatim_difference"]["passages"]]
    if not rows:
        return None
    names = ("mine", "ordinary", "passages")
    own, ordinary, passages = (sum(row["verbatim_difference"][name] for row in rows) for name in names)
    if not ordinary:
        return "The ordinary loss gives nothing back either.", UNDECIDED
    more = [f"{row['model']} {row['loss']}" for row in rows if not _like_control(content, row)]
    seen = f"k up to 4, all models, seen {most} times: {own} of {passages}, the ordinary loss {ordinary}."
    nowhere = " Nowhere more than the control's interval allows."
    seen += f" More than the control: {join_words(more)}." if more else nowhere
    highs = [row["verbatim_difference"]["high"] for row in rows]
    is_shown = any(high is not None and high < 0 for high in highs)
    return seen, OTHERWISE if more else AS_REPORTED if is_shown else UNDECIDED


def _like_control(content: Content, row: Row) -> bool:
    """Return whether the passages seen most often come back no more often than unseen ones of the same runs may."""
    cells = _verbatim(content, row["model"], row["loss"], row["bucket"])
    return len(cells) < 2 or cells[0]["low"] is None or cells[0]["low"] <= (cells[1]["high"] or 0)


def _random_does_not(content: Content) -> Seen:
    most = most_seen(content)
    measured = [row for row in content["goldfish"] if row.get("gain_kept", {"mean": None})["mean"] is not None]
    rows = [row for row in select(measured, bucket=most) if row.get("strategy") not in (None, *HASHES)]
    pairs = [(row, other) for row in rows for other in measured if _same_rate(row, other)]
    if not pairs:
        return None
    ends = [(row["gain_kept"], other["gain_kept"]) for row, other in pairs]
    above = [one["low"] is not None and one["low"] > _end(two, "high") for one, two in ends]
    below = [one["high"] is not None and one["high"] < _end(two, "low") for one, two in ends]
    row, other = next((pair for pair in pairs if pair[0]["model"] == fullest(content)), pairs[-1])
    seen = (
        f"Seen {most} times, {row['model']}: {row['loss']} keeps {number(row['gain_kept'])} of the gain, "
        f"{other['loss']} {number(other['gain_kept'])}. Of {len(pairs)} models {sum(above)} keep more of it with "
        f"{row['loss']}, by intervals that do not meet, and {sum(below)} less."
    )
    return seen, AS_REPORTED if all(above) else OTHERWISE if any(below) else UNDECIDED


def _same_rate(row: Row, other: Row) -> bool:
    same = all(row[name] == other[name] for name in ("model", "bucket")) and row["k"] == other.get("k")
    return same and other.get("strategy") in HASHES


def _end(kept: Row, name: str) -> float:
    return float(kept["mean"] if kept[name] is None else kept[name])


def _dropped_tokens(content: Content) -> Seen:
    most, model = most_seen(content), fullest(content)
    rows = [row for row in select(content["tokens"], bucket=most) if row["who"] == row["mask"] and "difference" in row]
    if not rows:
        return None
    signs = [sign({**row["difference"]["accuracy"], "mean": 0}) for row in rows]
    shares = "; ".join(
        f"{row['mask']} {number(row['dropped']['accuracy'])} and {number(row['supervised']['accuracy'])}"
        for row in select(rows, model=model)
    )
    seen = f"Dropped and supervised tokens right in {model}, seen {most} times: {shares}. " if shares else ""
    seen += (
        f"Of {count(len(rows), 'run')} by model and loss, {signs.count(1)} know fewer of the dropped ones, "
        f"{signs.count(-1)} more."
    )
    return seen, judge(signs)


def _membership_stays(content: Content) -> Seen:
    most, model = most_seen(content), fullest(content)
    rows = {row["loss"]: row["auc"] for row in select(content["membership"], model=model, bucket=most, score="loss")}
    others = [loss for loss in rows if content["losses"][loss].get("strategy") in HASHES]
    if ORDINARY not in rows or not others:
        return None
    seen = "; ".join(f"{loss} {value_text(auc)}" for loss, auc in rows.items())
    apart = [rows[loss]["high"] is not None and rows[loss]["high"] < (rows[ORDINARY]["low"] or 0) for loss in others]
    chance = [rows[loss]["low"] is not None and rows[loss]["low"] > 0.5 for loss in others]
    verdict = OTHERWISE if any(apart) else AS_REPORTED if all(chance) else UNDECIDED
    return f"AUC of {model}, seen {most} times: {seen}.", verdict


def _price(content: Content) -> Seen:
    seen = "; ".join(
        f"{model} {loss}: {entry['at_end']['ratio']:.2f} times as many tokens as the ordinary loss, "
        f"{entry['at_end']['supervised_ratio']:.2f} times as many supervised ones (k / (k - 1): "
        f"{plain(entry['predicted'])})"
        for model, by_loss in content["same_loss"].items()
        for loss, entry in by_loss.items()
        if entry.get("at_end", {}).get("ratio") is not None
    )
    return (f"{seen}; one training of each, so there is no interval.", UNDECIDED) if seen else None


REPORTS: tuple[tuple[str, str, str, Callable[[Content], Seen]], ...] = (
    (
        "Does memorization grow with size?",
        "Memorization grows in proportion to the logarithm of the number of parameters.",
        "Carlini et al. 2023, arXiv 2202.07646, abstract (exact matches of 50 tokens, 125M to 6B)",
        _log_size,
    ),
    (
        "Does memorization grow with repetition?",
        "Memorization grows in proportion to the logarithm of the number of copies.",
        "Carlini et al. 2023, abstract",
        _log_repetitions,
    ),
    (
        "Do small models stay near the control?",
        "Models of up to 13B stay near the control; 70B gives back about 47% of what it saw six times.",
        "SC24, arXiv 2502.08145: appears at 70B by a summary; the figures are recalled, not compared with the paper",
        _small_models,
    ),
    (
        "Does goldfish remove copies?",
        "With k = 4, 0 of 100 articles come back verbatim, with the ordinary loss 84; with k = 2 models of SC24 are "
        "near the control.",
        "Hans et al. 2024, arXiv 2406.10209 (authors' blog); SC24: recalled",
        _goldfish_removes,
    ),
    (
        "Does leaving out at random protect?",
        "Tokens that are left out at random, anew in each pass, do not protect.",
        "Hans et al. 2024 (the baseline of the paper)",
        _random_does_not,
    ),
    (
        "Are dropped tokens not learnt?",
        "A continuation leaves the text at the tokens that were left out, or beside them.",
        "Hans et al. 2024 (caption of a figure)",
        _dropped_tokens,
    ),
    (
        "Does goldfish hide membership?",
        "Membership inference by the loss tells members about as well as after ordinary training.",
        "Hans et al. 2024, table 2 (only marginal difference, by a summary)",
        _membership_stays,
    ),
    (
        "What does goldfish cost?",
        "At as many supervised tokens, k / (k - 1) times as many in all, the held-out loss is the same.",
        "Hans et al. 2024 (caption of a figure)",
        _price,
    ),
)
