"""The figure of runs on their way: held-out loss and what can be extracted."""

from matplotlib.figure import Figure

from hf_axonn_eval.data.visible import visible
from hf_axonn_eval.report.charts import COLOURS
from hf_axonn_scripts.study.report.panels import DASHES, MARKERS, add_legend, make_panels, tidy
from hf_axonn_scripts.study.report.wording import Content, most_seen, select


SHOWN = {"drawable": "from above", "drawn": "from below"}  # bounds, the looser one first


def curves(content: Content) -> Figure | None:
    """Shares of the passages seen most often that can be extracted, against the held-out loss, on the way of each
    continuation: a line for each loss and seed, a point for each place at which it was measured, the last one the
    largest. Above: by ranks, at most; below: by draws at temperature 1, at least. Compare losses along a vertical."""
    found = content["at_same_loss"]
    names = [model["model"] for model in content["models"] if select(found["curves"], model=model["model"])]
    if not names:
        return None
    figure, panels = make_panels(len(SHOWN), len(names))
    for column, model in enumerate(names):
        for axes, (name, side) in zip(panels[:, column], SHOWN.items(), strict=True):
            for number, loss in enumerate(content["losses"]):
                rows = [row for row in select(found["curves"], model=model, loss=loss) if name in row]
                for seed in dict.fromkeys(row["seed"] for row in rows):
                    points = [(row["held_out"], row[name]) for row in rows if row["seed"] == seed]
                    label = visible(loss) if seed == rows[0]["seed"] else None
                    style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
                    sizes = {"markersize": 3, "linewidth": 1}
                    axes.plot(*zip(*points, strict=True), linestyle=DASHES[number % 4], label=label, **style, **sizes)
                    axes.plot(*points[-1], linestyle="none", markersize=7, **style)
            axes.set_ylim(-0.04, 1.04)
            axes.set_xlabel("held-out loss (nats a token)", fontsize=8)
            about = f"{visible(model)}, seen {most_seen(content)}x"
            axes.set_title(f"{about}: share that {found['draws']}\ndraws give, {side}", fontsize=9)
            tidy(axes)
    add_legend(figure, panels[0][0])
    return figure
