"""The study's figures, for the page and for print.

Losses have the colours of hf_axonn_eval's reports, sizes those of matplotlib's `cividis`: colour-blind readers can
tell them apart, and everything that has a colour has a marker or a name, too. Whiskers are 95% intervals over
articles, small points single seeds. Models that are plotted apart are hollow, and no line goes through them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import log, log10
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.ticker import NullFormatter

from hf_axonn.goldfish.mask import HASHES
from hf_axonn_eval.data.visible import visible
from hf_axonn_eval.report.charts import COLOURS
from hf_axonn_scripts.study.findings.findings import BASE, OVERALL, PRIMARY, TRIES, size_text
from hf_axonn_scripts.study.recipe.definition import ORDINARY
from hf_axonn_scripts.study.report.curves import curves
from hf_axonn_scripts.study.report.panels import DASHES, MARKERS, add_legend, make_panels, tidy
from hf_axonn_scripts.study.report.wording import Content, fullest, most_seen, select


DRAWN = ("gain", "verbatim", "near_verbatim", "extraction_strength")
CURVES = ("gain", "verbatim", "extraction_strength")
SIZES = "cividis"
MAPPED = 2  # losses with maps of their own, beside the ordinary one
LABEL_ROOM = 0.12  # of an axis, that the label of a size takes
LEAST_SHARE = 1e-6  # that the logarithmic axis of the draws shows
INK, SOFT = "#1b1f24", "#7a7f87"

Row = Mapping[str, Any]
Style = Mapping[str, Any]  # `colour`, `marker`, `dash` and `fill` of a series


def draw(content: Content, folder: Path) -> dict[str, str]:
    """Draw every figure that there are numbers for.

    Args:
        content: numbers of `findings.measure`.
        folder: for the PNG files; made if it is not there.
    Returns:
        By name of the file its caption, in the order of the page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    captions = {}
    for name, function in FIGURES.items():
        figure = function(content)
        if figure is None:
            continue
        for text in figure.findobj(Text):
            text.set_parse_math(False)
        figure.savefig(folder / name, dpi=150)
        captions[name] = " ".join((function.__doc__ or "").split())
    return captions


def heat(content: Content) -> Figure | None:
    """Size by repetitions, a row of maps for the ordinary loss and for the two with the most other runs: how much
    each passage gains, which share comes back verbatim and near-verbatim, and the extraction strength. Hatched:
    not measured. A model above the gap is plotted apart: its tokenizer and what it read before are others."""
    losses = _most_run(content)
    outcomes = [name for name in DRAWN if any(name in row for row in _rows(content))]
    if not losses or not outcomes:
        return None
    models, buckets = content["models"], content["buckets"]
    height = 1.3 + 0.34 * len(models)
    figure, panels = make_panels(len(losses), len(outcomes), width=3.1, height=height)
    for column, outcome in enumerate(outcomes):
        values = [row[outcome]["mean"] for row in _rows(content) if row["loss"] in losses and outcome in row]
        low, high = (min(0.0, *values), max(values)) if outcome == PRIMARY else (0.0, 1.0)
        for axes, loss in zip(panels[:, column], losses, strict=True):
            _map(axes, content, loss, outcome, low, high if high > low else low + 1)
            axes.set_title(f"{_title(content, outcome)}\n{loss} ({content['outcomes'][outcome]['unit']})", fontsize=8)
            axes.set_xticks(range(len(buckets)), [str(bucket) for bucket in buckets])
            axes.set_xlabel("times seen")
            names = [_name(model) for model in models] if column == 0 else [""] * len(models)
            axes.set_yticks([_place(models, number) for number in range(len(models))], names)
    return figure


def by_repetitions(content: Content) -> Figure | None:
    """Against how often a passage was seen (an axis of doublings), after the ordinary loss, a line for each size."""
    outcomes = [name for name in CURVES if any(name in row for row in _rows(content, loss=ORDINARY))]
    if not outcomes:
        return None
    figure, panels = make_panels(1, len(outcomes))
    for axes, outcome in zip(panels[0], outcomes, strict=True):
        for number, (model, style) in enumerate(_styled_models(content)):
            rows = [row for row in _rows(content, loss=ORDINARY, model=model["model"]) if outcome in row]
            rows = [row for row in rows if row["bucket"]]
            aside = 1.03 ** (number - (len(content["models"]) - 1) / 2)  # that whiskers do not cover each other
            places = [row["bucket"] * aside for row in rows]
            _series(axes, places, rows, outcome, model["model"], style, joined=True)
        axes.set_xscale("log", base=2)
        buckets = [bucket for bucket in content["buckets"] if bucket]
        axes.set_xticks(buckets, [str(bucket) for bucket in buckets])
        axes.set_xlabel("times seen")
        _frame(axes, content, outcome)
    add_legend(figure, panels[0][0])
    return figure


def by_size(content: Content) -> Figure | None:
    """Against the number of parameters (an axis of factors of ten), after the ordinary loss, a colour for each number
    of repetitions. Straight lines are least squares through the models that are not plotted apart."""
    outcomes = [name for name in CURVES if any(name in row for row in _rows(content, loss=ORDINARY))]
    if not outcomes:
        return None
    figure, panels = make_panels(1, len(outcomes))
    apart = {model["model"] for model in content["models"] if model["apart"]}
    buckets = [bucket for bucket in content["buckets"] if bucket]
    for axes, outcome in zip(panels[0], outcomes, strict=True):
        for number, bucket in enumerate(buckets):
            style = _style(number, _shade(number, len(buckets)))
            rows = [row for row in _rows(content, loss=ORDINARY, bucket=bucket) if outcome in row]
            for hollow in (False, True):
                some = [row for row in rows if (row["model"] in apart) == hollow]
                label = None if hollow else f"{bucket}x"
                look = {**style, "fill": not hollow}
                _series(axes, [row["parameters"] for row in some], some, outcome, label, look, joined=False)
            _fit(axes, content, outcome, bucket, style["colour"])
        _sizes_axis(axes, sorted(model["parameters"] for model in content["models"]))
        _frame(axes, content, outcome)
    add_legend(figure, panels[0][0], title="times seen")
    return figure


def slopes(content: Content) -> Figure | None:
    """Left: by how much the gain grows for ten times as many parameters, by repetitions and loss. Thick: 95% intervals
    for other articles; thin: for other sizes. Right: what the straight line misses at each size, ordinary loss."""
    found = select(content["slopes"], outcome=PRIMARY)
    if not found:
        return None
    figure, panels = make_panels(1, 2, width=4.2)
    _draw_slopes(panels[0][0], content, found)
    _draw_residuals(panels[0][1], content, found)
    for axes in panels[0]:
        axes.axhline(0, color=SOFT, linewidth=0.8)
        tidy(axes)
    return figure


def _draw_slopes(axes: Axes, content: Content, found: Sequence[Row]) -> None:
    losses = list(dict.fromkeys(row["loss"] for row in found))
    kinds = [*(bucket for bucket in content["buckets"] if bucket), OVERALL]
    for number, loss in enumerate(losses):
        for row in select(found, loss=loss):
            place = kinds.index(row["bucket"]) + _shift(number, len(losses), 0.7)
            colour, label = COLOURS[number % len(COLOURS)], loss if row["bucket"] == kinds[0] else None
            for ends, width in ((row["over_sizes"], 1.0), (row["slope"], 3.5)):
                if ends["low"] is not None:
                    axes.plot([place] * 2, [ends["low"], ends["high"]], color=colour, linewidth=width)
            marker = MARKERS[number % len(MARKERS)]
            axes.plot(place, row["slope"]["mean"], marker, color=colour, markeredgecolor="white", label=label)
    axes.set_xticks(range(len(kinds)), [kind if kind == OVERALL else f"{kind}x" for kind in kinds])
    axes.set_xlabel("times seen")
    axes.set_title("slope of the gain\n(nats a token for 10x the parameters)", fontsize=9)
    _legend_below(axes)


def _draw_residuals(axes: Axes, content: Content, found: Sequence[Row]) -> None:
    ordinary = [row for row in select(found, loss=ORDINARY) if row["bucket"] != OVERALL]
    parameters = {model["model"]: model["parameters"] for model in content["models"]}
    for number, row in enumerate(ordinary):
        style = _style(number, _shade(number, len(ordinary)))
        rows = [{"residual": miss, "seeds": {}} for miss in row["residuals"].values()]
        places = [parameters[name] * 1.06 ** (number - len(ordinary) / 2) for name in row["residuals"]]
        _series(axes, places, rows, "residual", f"{row['bucket']}x", style, joined=False)
    _sizes_axis(axes, [model["parameters"] for model in content["models"] if not model["apart"]])
    axes.set_title("gain above the straight line, by times seen\n(nats a token)", fontsize=9)
    if ordinary:
        _legend_below(axes)


def goldfish(content: Content) -> Figure | None:
    """Goldfish by k, for the passages that were seen most often: the share given back verbatim, the share of the
    ordinary loss's gain that stays, and the accuracy on tokens that the loss left out (hollow) and on the others,
    given the true tokens before them. A loss that draws anew which tokens it leaves out has no such accuracy."""
    losses = [loss for loss in content["losses"] if loss != ORDINARY]
    most = most_seen(content)
    if not losses or not most:
        return None
    order = sorted(losses, key=lambda loss: (not _is_hashed(content, loss), content["losses"][loss].get("k", 0)))
    shown, hashed = [*order, ORDINARY], [loss for loss in order if _is_hashed(content, loss)]
    figure, panels = make_panels(1, 3, width=3.6)
    verbatim, kept, tokens = panels[0]
    for number, (model, style) in enumerate(_styled_models(content)):
        name, shift = model["model"], _shift(number, len(content["models"]), 0.5)
        rows = [row for row in _rows(content, model=name, bucket=most) if row["loss"] in shown]
        rows.sort(key=lambda row: shown.index(row["loss"]))
        places = [shown.index(row["loss"]) + shift for row in rows]
        _series(verbatim, places, rows, "verbatim", name, style, joined=False)
        changes = select(content["goldfish"], model=name, bucket=most)
        _by_loss(kept, order, {row["loss"]: row["gain_kept"] for row in changes if "gain_kept" in row}, shift, style)
        own = [row for row in select(content["tokens"], model=name, bucket=most) if row["who"] == row["mask"]]
        for side, fill in (("supervised", True), ("dropped", False)):
            estimates = {row["mask"]: row[side]["accuracy"] for row in own if side in row}
            _by_loss(tokens, hashed, estimates, shift, {**style, "fill": fill})
    kept.axhline(1, color=SOFT, linewidth=0.8)
    for axes, names, title in (
        (verbatim, shown, f"given back verbatim, seen {most}x\n(share of passages)"),
        (kept, order, f"gain that stays, seen {most}x\n(share of the ordinary loss's)"),
        (tokens, hashed, f"tokens right, seen {most}x\n(hollow: dropped; filled: supervised)"),
    ):
        _losses_axis(axes, names)
        axes.set_title(title, fontsize=9)
        axes.set_ylim(-0.04, None if axes is kept else 1.04)
        tidy(axes)
    add_legend(figure, verbatim)
    return figure


def costs(content: Content) -> Figure | None:
    """Cost of each loss and what is left to an attack: the held-out loss after each continuation minus before it; the
    AUC of the loss attack between passages seen most often and unseen ones (0.5: a coin); and, of the model with the
    most losses, the share of passages seen most often that so many draws of each give back in expectation."""
    if not content["losses"] or not most_seen(content):
        return None
    figure, panels = make_panels(1, 3, width=3.6)
    held_out, auc, draws = panels[0]
    _draw_held_out(held_out, content)
    _draw_membership(auc, content)
    _draw_attacks(draws, content)
    for axes in panels[0]:
        tidy(axes)
    add_legend(figure, held_out)
    return figure


def _draw_held_out(axes: Axes, content: Content) -> None:
    names = list(content["losses"])
    for number, (model, style) in enumerate(_styled_models(content)):
        log = [row for row in select(content["training"], model=model["model"]) if not row["grid"]]
        log = [row for row in log if row.get("held_out") is not None and row["held_out_before"] is not None]
        places = [names.index(row["loss"]) + _shift(number, len(content["models"]), 0.5) for row in log]
        changes = [row["held_out"] - row["held_out_before"] for row in log]
        axes.plot(places, changes, **_look(style), linestyle="none", label=visible(model["model"]))
    axes.axhline(0, color=SOFT, linewidth=0.8)
    _losses_axis(axes, names)
    axes.set_title("held-out loss, after minus before\n(nats a token; a point a run)", fontsize=9)


def _draw_membership(axes: Axes, content: Content) -> None:
    most = most_seen(content)
    for number, (model, style) in enumerate(_styled_models(content)):
        found = select(content["membership"], model=model["model"], bucket=most, score="loss")
        estimates = {row["loss"]: {**row["auc"], "mean": row["auc"]["value"]} for row in found}
        _by_loss(axes, list(content["losses"]), estimates, _shift(number, len(content["models"]), 0.5), style)
    axes.axhline(0.5, color=SOFT, linewidth=0.8)
    axes.set_ylim(None, 1.02)
    _losses_axis(axes, list(content["losses"]))
    axes.set_title(f"membership, seen {most}x against unseen\n(AUC of the loss attack)", fontsize=9)


def _draw_attacks(axes: Axes, content: Content) -> None:
    attacked, most, names = fullest(content), most_seen(content), list(content["losses"])
    rows = select(content["attacks"], model=attacked, bucket=most)
    for row in rows:
        number = names.index(row["loss"])
        tries = {int(count): entry["share"] for count, entry in row["tries"].items()}
        axes.plot(
            list(tries),
            [max(share, LEAST_SHARE) for share in tries.values()],
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            linestyle=DASHES[number % len(DASHES)],
            label=visible(row["loss"]),
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(LEAST_SHARE / 1.5, 1.5)
    axes.set_xticks(TRIES, [f"{count:,}" for count in TRIES])
    axes.set_yticks(*zip(*[(10.0**-power, f"{10.0**-power:g}") for power in range(6, -1, -1)], strict=True))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    if rows:
        axes.legend(fontsize=8, frameon=False)
    axes.set_xlabel("draws of each suffix")
    axes.set_title(
        f"given back by draws, {visible(attacked)}, seen {most}x\n(expected share; at the lower edge: less)",
        fontsize=9,
    )


FIGURES: dict[str, Callable[[Content], Figure | None]] = {
    "heat.png": heat,
    "repetitions.png": by_repetitions,
    "sizes.png": by_size,
    "slopes.png": slopes,
    "goldfish.png": goldfish,
    "costs.png": costs,
    "curves.png": curves,
}


def _rows(content: Content, **values: Any) -> list[Row]:
    """Return the cells after a continuation, of this loss, model or bucket."""
    return [row for row in select(content["cells"], **values) if row["loss"] != BASE]


def _shift(number: int, of: int, width: float) -> float:
    """Return the offset of one of several markers that share a place of this width."""
    return width * ((number + 0.5) / of - 0.5)


def _losses_axis(axes: Axes, names: Sequence[str]) -> None:
    axes.set_xticks(range(len(names)), [visible(name) for name in names])
    axes.set_xlim(-0.5, max(len(names), 1) - 0.5)


def _by_loss(axes: Axes, names: Sequence[str], estimates: Mapping[str, Row], shift: float, style: Style) -> None:
    """Draw estimates of some losses, each beside its place in `names`."""
    losses = [loss for loss in names if loss in estimates and estimates[loss]["mean"] is not None]
    rows = [{"estimate": estimates[loss], "seeds": {}} for loss in losses]
    _series(axes, [names.index(loss) + shift for loss in losses], rows, "estimate", None, style, joined=False)


def _name(model: Row) -> str:
    return f"{visible(model['model'])}\n{size_text(model['parameters'])}"


def _most_run(content: Content) -> list[str]:
    """Return the ordinary loss, and MAPPED others with the most runs."""
    runs = {loss: sum(len(row["seeds"]) for row in _rows(content, loss=loss)) for loss in content["losses"]}
    others = sorted((loss for loss in runs if loss != ORDINARY), key=lambda loss: -runs[loss])[:MAPPED]
    return [loss for loss in content["losses"] if loss == ORDINARY or loss in others]


def _is_hashed(content: Content, loss: str) -> bool:
    return content["losses"][loss].get("strategy") in HASHES


def _title(content: Content, outcome: str) -> str:
    return str(content["outcomes"][outcome]["title"])


def _sizes_axis(axes: Axes, sizes: Sequence[int]) -> None:
    """Label the sizes of models, the smallest first, on a logarithmic axis: those that have room for it."""
    axes.set_xscale("log")
    axes.set_xlabel("parameters")
    shown = [*sizes[:1]]
    for size in sizes[1:]:
        if log(size / shown[-1]) >= LABEL_ROOM * log(sizes[-1] / sizes[0]):
            shown.append(size)
    axes.set_xticks(shown, [size_text(size) for size in shown])
    axes.set_xticks([], minor=True)


def _place(models: Sequence[Mapping[str, Any]], number: int) -> float:
    """Return the place of a model's row: those that are plotted apart come after a gap."""
    return number + (0.35 if models[number]["apart"] else 0.0)


def _map(axes: Axes, content: Content, loss: str, outcome: str, low: float, high: float) -> None:
    colours = colormaps[SIZES]
    models, buckets = content["models"], content["buckets"]
    cells = {(row["model"], row["bucket"]): row for row in _rows(content, loss=loss)}
    for number, model in enumerate(models):
        for column, bucket in enumerate(buckets):
            entry = cells.get((model["model"], bucket), {}).get(outcome)
            corner = (column - 0.5, _place(models, number) - 0.5)
            if outcome == PRIMARY and bucket == 0:  # by its definition
                axes.text(column, corner[1] + 0.5, "0", ha="center", va="center", fontsize=8, color=SOFT)
                continue
            if entry is None:
                axes.add_patch(Rectangle(corner, 1, 1, facecolor="none", edgecolor="#c8ccd1", hatch="//", linewidth=0))
                continue
            share = (entry["mean"] - low) / (high - low)
            axes.add_patch(Rectangle(corner, 1, 1, facecolor=colours(share), edgecolor="white", linewidth=1))
            ink = "white" if share < 0.55 else INK
            text = f"{entry['mean']:.2f}"
            axes.text(column, corner[1] + 0.5, text, ha="center", va="center", fontsize=8, color=ink)
    axes.set_xlim(-0.5, len(buckets) - 0.5)
    axes.set_ylim(-0.5, _place(models, len(models) - 1) + 0.5)
    axes.tick_params(length=0, labelsize=8)
    for side in axes.spines.values():
        side.set_visible(False)


def _shade(number: int, of: int) -> Any:
    """Return the colour of one of several ordered things, without the lightest of the map, which white paper hides."""
    return colormaps[SIZES](0.85 * number / max(of - 1, 1))


def _style(number: int, colour: Any, *, fill: bool = True) -> Style:
    return {
        "colour": colour,
        "marker": MARKERS[number % len(MARKERS)],
        "dash": DASHES[number % len(DASHES)],
        "fill": fill,
    }


def _styled_models(content: Content) -> Iterator[tuple[Row, Style]]:
    """Yield models with their styles: the smaller the darker; those plotted apart hollow, in another colour."""
    ordered = [model for model in content["models"] if not model["apart"]]
    for number, model in enumerate(content["models"]):
        if model["apart"]:
            yield model, _style(number, COLOURS[2], fill=False)
        else:
            yield model, _style(number, _shade(number, len(ordered)))


def _look(style: Style) -> dict[str, Any]:
    face = style["colour"] if style["fill"] else "white"
    return {"color": style["colour"], "marker": style["marker"], "markerfacecolor": face, "markersize": 5}


def _series(
    axes: Axes,
    places: Sequence[float],
    rows: Sequence[Row],
    name: str,
    label: str | None,
    style: Style,
    *,
    joined: bool,
) -> None:
    """Draw estimates with whiskers, and the seeds as small points."""
    if not rows:
        return
    means = [row[name]["mean"] for row in rows]
    whiskers = [
        [0.0 if row[name]["low"] is None else max(0.0, sign * (row[name][end] - row[name]["mean"])) for row in rows]
        for end, sign in (("low", -1), ("high", 1))
    ]
    dash = style["dash"] if joined and style["fill"] else "none"
    text = None if label is None else visible(label)
    axes.errorbar(
        places,
        means,
        yerr=whiskers,
        **_look(style),
        linestyle=dash,
        linewidth=1.3,
        capsize=2,
        elinewidth=1,
        label=text,
    )
    for place, row in zip(places, rows, strict=True):
        found = [seed[name] for seed in row["seeds"].values() if name in seed]
        if len(found) > 1:
            axes.plot([place] * len(found), found, ".", color=style["colour"], markersize=3, alpha=0.7)


def _fit(axes: Axes, content: Content, outcome: str, bucket: int, colour: Any) -> None:
    for row in select(content["slopes"], outcome=outcome, loss=ORDINARY, bucket=bucket):
        cells = {cell["model"]: cell for cell in _rows(content, loss=ORDINARY, bucket=bucket)}
        sizes = [cells[name]["parameters"] for name in row["residuals"]]
        middle = sum(map(log10, sizes)) / len(sizes)
        mean = sum(cells[name][outcome]["mean"] for name in row["residuals"]) / len(sizes)
        ends = [min(sizes), max(sizes)]
        heights = [mean + row["slope"]["mean"] * (log10(end) - middle) for end in ends]
        axes.plot(ends, heights, color=colour, linewidth=1)


def _frame(axes: Axes, content: Content, outcome: str) -> None:
    axes.set_title(f"{_title(content, outcome)}\n({content['outcomes'][outcome]['unit']})", fontsize=9)
    if outcome == PRIMARY:
        axes.axhline(0, color=SOFT, linewidth=0.8)
    else:
        axes.set_ylim(-0.03, 1.03)
    tidy(axes)


def _legend_below(axes: Axes) -> None:
    axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=4)
