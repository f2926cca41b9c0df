"""Opening of a report: a few sentences made of the numbers of a study."""

from hf_axonn_eval.report.tables import estimate_text
from hf_axonn_eval.report.words import count, join_words
from hf_axonn_scripts.study.findings.at_same_loss import INCOMPARABLE, LESS, MORE
from hf_axonn_scripts.study.findings.effects import FEWEST_SIZES
from hf_axonn_scripts.study.findings.findings import OVERALL, PRIMARY, size_text
from hf_axonn_scripts.study.recipe.definition import ORDINARY
from hf_axonn_scripts.study.report.wording import (
    Content,
    cell_of,
    ends_text,
    fullest,
    largest,
    most_seen,
    number,
    plain,
    select,
    sign,
    slope_of,
)


COMPARED = ("verbatim", "drawn", "drawable")  # bounds whose verdicts the opening counts
NAMED = 8  # missing steps that the first sentences name; a table has all


def opening(content: Content) -> list[str]:
    """Return the sentences that the page begins with."""
    runs, missing = content["runs"], content["missing"]
    lines = [_design(content)]
    if runs["done"] < runs["asked"] or missing:
        steps = ", ".join(f"{one['step']} ({one['state']})" for one in missing[:NAMED])
        more = f", and {len(missing) - NAMED} more, which the last table names" if len(missing) > NAMED else ""
        lines.append(
            f"The study is not complete: {runs['done']} of {runs['asked']} runs are there, and these steps are "
            f"missing: {steps}{more}. Every number below is of what is there."
        )
    makers = (_by_repetitions, _by_size, _goldfish, _at_same_loss)
    lines += [sentence for make in makers if (sentence := make(content))]
    sizes = sum(not model["apart"] for model in content["models"])
    lines.append(
        f"{count(sizes, 'size')} of one family cannot show a jump: what appears all at once at 70B parameters may "
        "have no trace here, and a straight line through these sizes says nothing of larger ones."
    )
    return lines


def _design(content: Content) -> str:
    models, losses = content["models"], list(content["losses"])
    if not content["runs"]["done"]:
        return "No run of the study is done yet, so there is nothing to report."
    sizes = [model for model in models if not model["apart"]]
    apart = [model["model"] for model in models if model["apart"]]
    seeds = {seed for row in content["cells"] for seed in row["seeds"]}
    articles = max(row["articles"] for row in content["cells"])
    of = (
        f"from {size_text(sizes[0]['parameters'])} to {size_text(sizes[-1]['parameters'])} parameters" if sizes else ""
    )
    with_losses = f"{len(losses)} {'loss' if len(losses) == 1 else 'losses'} ({join_words(losses)})"
    return (
        f"{count(len(sizes), 'model')} {of}{' and, apart, ' + join_words(apart) if apart else ''} learnt passages of "
        f"{content['length']} tokens from {articles} articles, each passage seen "
        f"{join_words(content['buckets'], 'or')} times, with {with_losses} and {count(len(seeds), 'seed')}. Then each "
        f"was shown the first {content['length'] - content['asked_for']} tokens of every passage and asked for the "
        f"next {content['suffix']}."
    )


def _by_repetitions(content: Content) -> str:
    model, most = largest(content), most_seen(content)
    cell, unseen = cell_of(content, model, ORDINARY, most), cell_of(content, model, ORDINARY, 0)
    if cell is None or unseen is None:
        return ""
    gain = ""
    if PRIMARY in cell:
        gain = (
            f" The suffix of a passage seen {most} times gains {number(cell[PRIMARY])} nats a token over one that was "
            "not seen."
        )
    return (
        f"After the ordinary loss the largest model, {model}, reproduces {estimate_text(cell['verbatim'])} of the "
        f"passages seen {most} times verbatim, and {estimate_text(unseen['verbatim'])} of those it did not see."
        f"{gain} Brackets are 95% intervals over articles."
    )


def _by_size(content: Content) -> str:
    row = slope_of(content, PRIMARY, ORDINARY, OVERALL)
    if row is None:
        return ""
    grows = {1: "grows", -1: "falls", 0: "may grow or fall"}[sign(row["slope"])]
    gain = (
        f"With ten times as many parameters that gain {grows}: by {number(row['slope'])} nats a token, on average "
        "over the repetitions"
    )
    if row["places"] < FEWEST_SIZES:
        return f"{gain}; two sizes are always on a line."
    off = [name for name, miss in row["residuals"].items() if sign(miss)]
    line = "A straight line in the logarithm of the size misses no model by more than its interval allows"
    if off:
        line = f"A straight line in the logarithm of the size does not fit: it misses {join_words(off)}"
    return (
        f"{gain}; taking these {row['places']} sizes as a sample of sizes, {ends_text(row['over_sizes'])}. {line} "
        f"(r squared {plain(row['r_squared'])})."
    )


def _goldfish(content: Content) -> str:
    most, model = most_seen(content), fullest(content)
    rows, parts = select(content["goldfish"], model=model, bucket=most), []
    for row in rows:
        change = row["verbatim_difference"]
        if not change["passages"]:
            continue
        kept = row.get("gain_kept", {"mean": None})
        part = f" and keeps {number(kept)} of the gain" if kept["mean"] is not None else ""
        parts.append(f"{row['loss']} gives back {change['mine']} of {change['passages']}{part}")
    if not parts:
        return ""
    ordinary = rows[0]["verbatim_difference"]
    return (
        f"Of the same passages seen {most} times by {model} (the ordinary loss: {ordinary['ordinary']} of "
        f"{ordinary['passages']} on the seeds of {rows[0]['loss']}), {join_words(parts)}."
    )


def _at_same_loss(content: Content) -> str:
    """Count the verdicts at equal held-out loss, by loss and the loss beside it."""
    found, most = content["at_same_loss"], most_seen(content)
    parts = []
    for loss, reference in dict.fromkeys((row["loss"], row["reference"]) for row in found["rows"]):
        rows = select(found["rows"], loss=loss, reference=reference, bucket=most)
        verdicts = {name: [row[name]["verdict"] for row in rows if name in row] for name in COMPARED}
        less, more = (join_words([str(each.count(side)) for each in verdicts.values()]) for side in (LESS, MORE))
        none = sum(row.get("verdict") == INCOMPARABLE for row in rows)
        lacking = f", {none} not comparable" if none else ""
        sizes = count(len(rows), "size")
        parts.append(f"{loss} leaves less than {reference} at {less} of {sizes}, and more at {more}{lacking}")
    if not parts:
        return ""
    bounds = join_words([found["bounds"][name] for name in COMPARED])
    return (
        f"At equal held-out loss, passages seen {most} times, by three numbers ({bounds}): {'; '.join(parts)}. The "
        "others are not decided."
    )
