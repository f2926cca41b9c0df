"""The study's figures, for the page and for print.

Losses have the colours of hf_axonn_eval's reports, sizes those of matplotlib's `cividis`: colour-blind readers can
tell them apart, and everything that has a colour has a marker or a name, too. Whiskers are 95% intervals over
articles, small points single seeds. Models that are plotted apart are hollow, and no line goes through them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import NullFormatter

from hf_axonn.goldfish.mask import HASHES
from hf_axonn_eval.data.visible import visible
from hf_axonn_eval.report.charts import COLOURS
from hf_axonn_scripts.study.findings.findings import BASE, OVERALL, PRIMARY, TRIES, size_text
from hf_axonn_scripts.study.recipe.definition import ORDINARY
from hf_axonn_scripts.study.report.wording import fullest


DRAWN = ("gain", "verbatim", "near_verbatim", "extraction_strength")
CURVES = ("gain", "verbatim", "extraction_strength")
MARKERS = "osD^vPX*"
DASHES = ("-", "--", "-.", ":")
SIZES = "cividis"
MAPPED = 2  # losses with maps of their own, beside the ordinary one
LABEL_ROOM = 0.12  # of an axis, that the label of a size takes
LEAST_SHARE = 1e-6  # that the logarithmic axis of the draws shows
INK, SOFT = "#1b1f24", "#7a7f87"

Content = Mapping[str, Any]


def draw(content: Content, folder: Path) -> dict[str, str]:
    """Draw every figure that there are numbers for.

    Args:
        content: What `findings.measure` returned.
        folder: Where the PNG files go; made if it is not there.

    Returns:
        By name of the file a sentence that says what is drawn, in the order of the page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    said = {}
    for name, function in FIGURES.items():
        figure = function(content)
        if figure is None:
            continue
        for text in figure.findobj(Text):
            text.set_parse_math(False)
        figure.savefig(folder / name, dpi=150)
        said[name] = " ".join((function.__doc__ or "").split())
    return said


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
    figure, panels = _figure(len(losses), len(outcomes), width=3.1, height=height)
    for column, outcome in enumerate(outcomes):
        values = [row[outcome]["mean"] for row in _rows(content) if row["loss"] in losses and outcome in row]
        low, high = (min(0.0, *values), max(values)) if outcome == PRIMARY else (0.0, 1.0)
        for axes, loss in zip(panels[:, column], losses, strict=True):
            _map(axes, content, loss, outcome, low, high if high > low else low + 1)
            axes.set_title(f"{_title(content, outcome)}\n{loss} ({content['outcomes'][outcome]['unit']})", fontsize=8)
            axes.set_xticks(range(len(buckets)), [str(bucket) for bucket in buckets])
            axes.set_xlabel("times seen")
            names = [_named(model) for model in models] if column == 0 else [""] * len(models)
            axes.set_yticks([_place(models, number) for number in range(len(models))], names)
    return figure


def by_repetitions(content: Content) -> Figure | None:
    """Against how often a passage was seen (an axis of doublings), after the ordinary loss, a line for each size."""
    outcomes = [name for name in CURVES if any(name in row for row in _rows(content, loss=ORDINARY))]
    if not outcomes:
        return None
    figure, panels = _figure(1, len(outcomes))
    for axes, outcome in zip(panels[0], outcomes, strict=True):
        for number, (model, style) in enumerate(_styled(content)):
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
    _legend(figure, panels[0][0])
    return figure


def by_size(content: Content) -> Figure | None:
    """Against the number of parameters (an axis of factors of ten), after the ordinary loss, a colour for each number
    of repetitions. Straight lines are least squares through the models that are not plotted apart."""
    outcomes = [name for name in CURVES if any(name in row for row in _rows(content, loss=ORDINARY))]
    if not outcomes:
        return None
    figure, panels = _figure(1, len(outcomes))
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
    _legend(figure, panels[0][0], title="times seen")
    return figure


def slopes(content: Content) -> Figure | None:
    """Left: by how much the gain grows for ten times as many parameters, by repetitions and loss. Thick: 95% intervals
    for other articles; thin: for other sizes. Right: what the straight line misses at each size, ordinary loss."""
    found = [row for row in content["slopes"] if row["outcome"] == PRIMARY]
    if not found:
        return None
    figure, panels = _figure(1, 2, width=4.2)
    axes, right = panels[0]
    losses = list(dict.fromkeys(row["loss"] for row in found))
    kinds = [*(bucket for bucket in content["buckets"] if bucket), OVERALL]
    for number, loss in enumerate(losses):
        for row in (row for row in found if row["loss"] == loss):
            place = kinds.index(row["bucket"]) + 0.7 * ((number + 0.5) / len(losses) - 0.5)
            colour, label = COLOURS[number % len(COLOURS)], loss if row["bucket"] == kinds[0] else None
            for ends, width in ((row["over_sizes"], 1.0), (row["slope"], 3.5)):
                if ends["low"] is not None:
                    axes.plot([place] * 2, [ends["low"], ends["high"]], color=colour, linewidth=width)
            marker = MARKERS[number % len(MARKERS)]
            axes.plot(place, row["slope"]["mean"], marker, color=colour, markeredgecolor="white", label=label)
    axes.axhline(0, color=SOFT, linewidth=0.8)
    axes.set_xticks(range(len(kinds)), [kind if kind == OVERALL else f"{kind}x" for kind in kinds])
    axes.set_xlabel("times seen")
    axes.set_title("slope of the gain\n(nats a token for 10x the parameters)", fontsize=9)
    _legend_below(axes)
    ordinary = [row for row in found if row["loss"] == ORDINARY and row["bucket"] != OVERALL]
    parameters = {model["model"]: model["parameters"] for model in content["models"]}
    for number, row in enumerate(ordinary):
        style = _style(number, _shade(number, len(ordinary)))
        names = list(row["residuals"])
        rows = [{"residual": row["residuals"][name], "seeds": {}} for name in names]
        places = [parameters[name] * 1.06 ** (number - len(ordinary) / 2) for name in names]
        _series(right, places, rows, "residual", f"{row['bucket']}x", style, joined=False)
    right.axhline(0, color=SOFT, linewidth=0.8)
    _sizes_axis(right, [model["parameters"] for model in content["models"] if not model["apart"]])
    right.set_title("gain above the straight line, by times seen\n(nats a token)", fontsize=9)
    if ordinary:
        _legend_below(right)
    _tidy(axes)
    _tidy(right)
    return figure


def goldfish(content: Content) -> Figure | None:
    """Goldfish by k, for the passages that were seen most often: the share given back verbatim, the share of the
    ordinary loss's gain that stays, and the accuracy on tokens that the loss left out (hollow) and on the others,
    given the true tokens before them. A loss that draws anew which tokens it leaves out has no such accuracy."""
    losses = [loss for loss in content["losses"] if loss != ORDINARY]
    most = max(content["buckets"], default=0)
    if not losses or not most:
        return None
    order = sorted(losses, key=lambda loss: (not _hashed(content, loss), content["losses"][loss].get("k", 0)))
    figure, panels = _figure(1, 3, width=3.6)
    verbatim, kept, tokens = panels[0]
    shown = [*order, ORDINARY]
    for number, (model, style) in enumerate(_styled(content)):
        name, shift = model["model"], 0.5 * ((number + 0.5) / len(content["models"]) - 0.5)
        rows = {row["loss"]: row for row in _rows(content, model=name, bucket=most) if row["loss"] in shown}
        some = [loss for loss in shown if loss in rows]
        places = [shown.index(loss) + shift for loss in some]
        _series(verbatim, places, [rows[loss] for loss in some], "verbatim", name, style, joined=False)
        ratios = {row["loss"]: row for row in content["goldfish"] if (row["model"], row["bucket"]) == (name, most)}
        some = [loss for loss in order if ratios.get(loss, {}).get("gain_kept", {"mean": None})["mean"] is not None]
        rows_kept = [{"gain_kept": ratios[loss]["gain_kept"], "seeds": {}} for loss in some]
        _series(kept, [order.index(loss) + shift for loss in some], rows_kept, "gain_kept", None, style, joined=False)
        hashed = [loss for loss in order if _hashed(content, loss)]
        for side, fill in (("supervised", True), ("dropped", False)):
            mine = {
                row["mask"]: row
                for row in content["tokens"]
                if (row["model"], row["bucket"], row["who"]) == (name, most, row["mask"]) and side in row
            }
            some = [loss for loss in hashed if loss in mine]
            cells = [{"accuracy": mine[loss][side]["accuracy"], "seeds": {}} for loss in some]
            places = [hashed.index(loss) + shift for loss in some]
            _series(tokens, places, cells, "accuracy", None, {**style, "fill": fill}, joined=False)
    kept.axhline(1, color=SOFT, linewidth=0.8)
    titles = {
        verbatim: f"given back verbatim, seen {most}x\n(share of passages)",
        kept: f"gain that stays, seen {most}x\n(share of the ordinary loss's)",
        tokens: f"tokens right, seen {most}x\n(hollow: dropped; filled: supervised)",
    }
    for axes, names in ((verbatim, shown), (kept, order), (tokens, hashed)):
        axes.set_xticks(range(len(names)), [visible(name) for name in names])
        axes.set_xlim(-0.5, max(len(names), 1) - 0.5)
        axes.set_title(titles[axes], fontsize=9)
        axes.set_ylim(-0.04, None if axes is kept else 1.04)
        _tidy(axes)
    _legend(figure, verbatim)
    return figure


def costs(content: Content) -> Figure | None:
    """What it costs and what is left to an attack: the held-out loss after each continuation minus before it; the AUC
    of the loss attack between passages seen most often and unseen ones (0.5: a coin); and, of the model with the most
    losses, the share of passages seen most often that so many draws of each give back in expectation."""
    losses, most = content["losses"], max(content["buckets"], default=0)
    if not losses or not most:
        return None
    figure, panels = _figure(1, 3, width=3.6)
    held_out, auc, draws = panels[0]
    names = list(losses)
    for number, (model, style) in enumerate(_styled(content)):
        shift = 0.5 * ((number + 0.5) / len(content["models"]) - 0.5)
        log = [row for row in content["training"] if row["model"] == model["model"] and not row["grid"]]
        log = [row for row in log if row.get("held_out") is not None and row["held_out_before"] is not None]
        places = [names.index(row["loss"]) + shift for row in log]
        changes = [row["held_out"] - row["held_out_before"] for row in log]
        held_out.plot(places, changes, **_look(style), linestyle="none", label=visible(model["model"]))
        found = [
            row
            for row in content["membership"]
            if (row["model"], row["bucket"], row["score"]) == (model["model"], most, "loss")
        ]
        rows = [{"auc": {**row["auc"], "mean": row["auc"]["value"]}, "seeds": {}} for row in found]
        _series(auc, [names.index(row["loss"]) + shift for row in found], rows, "auc", None, style, joined=False)
    held_out.axhline(0, color=SOFT, linewidth=0.8)
    auc.axhline(0.5, color=SOFT, linewidth=0.8)
    auc.set_ylim(None, 1.02)
    for axes in (held_out, auc):
        axes.set_xticks(range(len(names)), [visible(name) for name in names])
        axes.set_xlim(-0.5, len(names) - 0.5)
    held_out.set_title("held-out loss, after minus before\n(nats a token; a point a run)", fontsize=9)
    auc.set_title(f"membership, seen {most}x against unseen\n(AUC of the loss attack)", fontsize=9)
    attacked = fullest(content)
    of_attacked = [row for row in content["attacks"] if (row["model"], row["bucket"]) == (attacked, most)]
    for row in of_attacked:
        number = names.index(row["loss"])
        tries = {int(count): entry["share"] for count, entry in row["tries"].items()}
        draws.plot(
            list(tries),
            [max(share, LEAST_SHARE) for share in tries.values()],
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            linestyle=DASHES[number % len(DASHES)],
            label=visible(row["loss"]),
        )
    draws.set_xscale("log")
    draws.set_yscale("log")
    draws.set_ylim(LEAST_SHARE / 1.5, 1.5)
    draws.set_xticks(TRIES, [f"{count:,}" for count in TRIES])
    draws.set_yticks(*zip(*[(10.0**-power, f"{10.0**-power:g}") for power in range(6, -1, -1)], strict=True))
    for axis in (draws.xaxis, draws.yaxis):
        axis.set_minor_formatter(NullFormatter())
    if of_attacked:
        draws.legend(fontsize=8, frameon=False)
    draws.set_xlabel("draws of each suffix")
    draws.set_title(
        f"given back by draws, {visible(attacked)}, seen {most}x\n(expected share; at the lower edge: less)",
        fontsize=9,
    )
    for axes in panels[0]:
        _tidy(axes)
    _legend(figure, held_out)
    return figure


FIGURES: dict[str, Callable[[Content], Figure | None]] = {
    "heat.png": heat,
    "repetitions.png": by_repetitions,
    "sizes.png": by_size,
    "slopes.png": slopes,
    "goldfish.png": goldfish,
    "costs.png": costs,
}


def _figure(rows: int, columns: int, *, width: float = 3.6, height: float = 3.3) -> tuple[Figure, Any]:
    # the object interface, not pyplot: no global state and no display
    figure = Figure(figsize=(width * columns, height * rows + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _rows(content: Content, **wanted: Any) -> list[Mapping[str, Any]]:
    """Cells after a continuation, of this loss, model or bucket."""
    rows = [row for row in content["cells"] if row["loss"] != BASE]
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def _named(model: Mapping[str, Any]) -> str:
    return f"{visible(model['model'])}\n{size_text(model['parameters'])}"


def _most_run(content: Content) -> list[str]:
    """The ordinary loss, and MAPPED others with the most runs."""
    runs = {loss: sum(len(row["seeds"]) for row in _rows(content, loss=loss)) for loss in content["losses"]}
    others = sorted((loss for loss in runs if loss != ORDINARY), key=lambda loss: -runs[loss])[:MAPPED]
    return [loss for loss in content["losses"] if loss == ORDINARY or loss in others]


def _hashed(content: Content, loss: str) -> bool:
    return content["losses"][loss].get("strategy") in HASHES


def _title(content: Content, outcome: str) -> str:
    return str(content["outcomes"][outcome]["title"])


def _sizes_axis(axes: Axes, sizes: Sequence[int]) -> None:
    """Sizes of models, the smallest first, on a logarithmic axis: those of them that have room for their label."""
    from math import log

    axes.set_xscale("log")
    axes.set_xlabel("parameters")
    shown = [*sizes[:1]]
    for size in sizes[1:]:
        if log(size / shown[-1]) >= LABEL_ROOM * log(sizes[-1] / sizes[0]):
            shown.append(size)
    axes.set_xticks(shown, [size_text(size) for size in shown])
    axes.set_xticks([], minor=True)


def _place(models: Sequence[Mapping[str, Any]], number: int) -> float:
    """Where the row of a model is: those that are plotted apart after a gap."""
    return number + (0.35 if models[number]["apart"] else 0.0)


def _map(axes: Axes, content: Content, loss: str, outcome: str, low: float, high: float) -> None:
    from matplotlib.patches import Rectangle

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
    """The colour of one of several ordered things; the lightest of the map are left out, which white paper hides."""
    return colormaps[SIZES](0.85 * number / max(of - 1, 1))


def _style(number: int, colour: Any, *, fill: bool = True) -> dict[str, Any]:
    return {
        "colour": colour,
        "marker": MARKERS[number % len(MARKERS)],
        "dash": DASHES[number % len(DASHES)],
        "fill": fill,
    }


def _styled(content: Content) -> Iterator[tuple[Mapping[str, Any], dict[str, Any]]]:
    """Models with how each is drawn: the smaller the darker; those plotted apart hollow, in another colour."""
    ordered = [model for model in content["models"] if not model["apart"]]
    for number, model in enumerate(content["models"]):
        if model["apart"]:
            yield model, _style(number, COLOURS[2], fill=False)
        else:
            yield model, _style(number, _shade(number, len(ordered)))


def _look(style: Mapping[str, Any]) -> dict[str, Any]:
    face = style["colour"] if style["fill"] else "white"
    return {"color": style["colour"], "marker": style["marker"], "markerfacecolor": face, "markersize": 5}


def _series(
    axes: Axes,
    places: Sequence[float],
    rows: Sequence[Mapping[str, Any]],
    name: str,
    label: str | None,
    style: Mapping[str, Any],
    *,
    joined: bool,
) -> None:
    """Estimates with whiskers, and the seeds as small points."""
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
    from math import log10

    wanted = (outcome, ORDINARY, bucket)
    rows = [row for row in content["slopes"] if (row["outcome"], row["loss"], row["bucket"]) == wanted]
    for row in rows:
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
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", color="#e3e6ea", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _legend_below(axes: Axes) -> None:
    axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=4)


def _legend(figure: Figure, axes: Axes, title: str | None = None) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = min(len(handles), 8)
        figure.legend(
            handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False, title=title
        )
