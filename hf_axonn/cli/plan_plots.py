"""Pictures of plans: the parts of a step for the first grids, and scaling curves. Needs matplotlib (extra `eval`)."""

from __future__ import annotations

from hf_axonn.planner.search import Plan


# Parts of a step in the order in which they are stacked: compute in blues, communication in reds, else grey.
PARTS = {
    "gemm": "#1f4e79",
    "attention": "#2e75b6",
    "elementwise": "#9dc3e6",
    "head": "#bdd7ee",
    "optimizer": "#a6a6a6",
    "exposed x/y": "#c00000",
    "exposed z": "#ed7d31",
    "exposed data": "#ffc000",
    "other": "#7f6000",
}


def _pyplot():
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib.") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_plan(found: Plan, file: str, top: int) -> None:
    """Stacked bars: what the step of each of the first grids is made of."""
    pyplot = _pyplot()
    entries = found.ranked[:top]
    names = [",".join(map(str, entry.grid.as_dict().values())) for entry in entries]
    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.42 * len(entries)))
    left = [0.0] * len(entries)
    for part, color in PARTS.items():
        widths = [entry.seconds[part] for entry in entries]
        if sum(widths) > 0.002 * sum(entry.total for entry in entries):
            axes.barh(names, widths, left=left, color=color, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step (communication: what nothing hides)")
    axes.set_ylabel("grid: data, z, y, x")
    axes.set_title(f"{found.job.machine.name}, {found.gpus:,} GPUs")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    _save(figure, file)
    pyplot.close(figure)


def plot_sweep(plans: list[Plan], file: str, *, weak: bool) -> None:
    """PFLOP/s of all GPUs, and TFLOP/s of one, against the number of GPUs."""
    pyplot = _pyplot()
    bests = [found.best for found in plans if found.ranked]
    counts = [best.grid.size for best in bests]
    figure, (whole, each) = pyplot.subplots(1, 2, figsize=(10, 4))
    whole.loglog(counts, [best.flops * best.grid.size / 1e15 for best in bests], "o-", color="#1f4e79", label="model")
    ideal = [bests[0].flops * size / 1e15 for size in counts]
    whole.loglog(counts, ideal, "--", color="#a6a6a6", label="linear")
    whole.set_ylabel("PFLOP/s, recomputation included")
    whole.legend(frameon=False)
    each.semilogx(counts, [best.flops / 1e12 for best in bests], "o-", color="#1f4e79")
    each.set_ylim(bottom=0)
    each.set_ylabel("TFLOP/s of a GPU")
    for axes in (whole, each):
        axes.set_xlabel("GPUs")
        axes.set_xticks(counts, [f"{size:,}" for size in counts], rotation=45)
        axes.minorticks_off()
    figure.suptitle(f"{plans[0].job.machine.name}: {'weak' if weak else 'strong'} scaling")
    _save(figure, file)
    pyplot.close(figure)


def _save(figure, file: str) -> None:
    try:
        figure.savefig(file, bbox_inches="tight", dpi=150)
    except (OSError, ValueError) as error:
        raise ValueError(f"the picture {file} cannot be written: {error}") from None
