"""Parts that figures have in common: panels, frames, legends, and the markers and dashes of series."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


MARKERS = "osD^vPX*"
DASHES = ("-", "--", "-.", ":")


def make_panels(rows: int, columns: int, *, width: float = 3.6, height: float = 3.3) -> tuple[Figure, Any]:
    """Return a figure, and its panels as an array [rows, columns]; sizes of a panel are in inches."""
    # the object interface, not pyplot: no global state and no display
    figure = Figure(figsize=(width * columns, height * rows + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def tidy(axes: Axes) -> None:
    """Draw small labels, a light grid, and no frame on the right and above."""
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", color="#e3e6ea", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def add_legend(figure: Figure, axes: Axes, title: str | None = None) -> None:
    """Draw one legend below all panels, with what has a label in one of them."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = min(len(handles), 8)
        figure.legend(
            handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False, title=title
        )
