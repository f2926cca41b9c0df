"""Tables of a study's report, the same for the page and for Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from hf_axonn_eval.report.tables import Details, difference_text, estimate_text
from hf_axonn_scripts.study.findings.at_same_loss import CHANCE
from hf_axonn_scripts.study.findings.findings import BASE, BUDGETS, OVERALL, PRIMARY, TRIES
from hf_axonn_scripts.study.report.wording import Content, cell_of, cell_text, ends_text, number, plain, value_text


LIKELY = f"{CHANCE:g}"  # p of (n, p)


def tables(content: Content) -> list[Details]:
    """Return every table that has rows, in the order of the page."""
    makers = (outcomes, lengths, slopes, doublings, goldfish, tokens, bounds, attacks, at_same_loss)
    others = (utility, same_loss, membership, canaries, again, grids, pilot, missing)
    found = [make(content) for make in (*makers, *others)]
    return [table for table in found if table.rows]


def outcomes(content: Content) -> Details:
    """Return every outcome by model, loss and repetitions."""
    names = list(content["outcomes"])
    rows = [
        [
            row["model"],
            row["loss"],
            _bucket(row),
            str(len(row["seeds"]) or 1),
            *(cell_text(row, name) for name in names),
        ]
        for row in content["cells"]
    ]
    heads = [f"{one['title']} ({one['unit']})" for one in content["outcomes"].values()]
    note = (
        f"Of the first {content['suffix']} tokens after the prefix. Gain: log-probability after the run minus before "
        "it, minus the same of the run's passages that were not seen, for each of these tokens. In brackets: 95% "
        "intervals over articles (docs/evaluation.md)."
    )
    heads = ["model", "loss", "seen", "seeds", *heads]
    return Details("Memorization by size, loss and repetitions", heads, rows, note)


def _bucket(row: Mapping[str, Any], who: str = "loss") -> str:
    return "before" if row[who] == BASE else f"{row['bucket']}x"


def lengths(content: Content) -> Details:
    """Return the exact match of shorter parts of the suffix."""
    found = sorted({int(length) for row in content["cells"] for length in row["verbatim_at"]})
    rows = [
        [row["model"], row["loss"], _bucket(row), *(estimate_text(row["verbatim_at"].get(str(n))) for n in found)]
        for row in content["cells"]
        if row["loss"] != BASE
    ]
    note = "The first so many tokens of what was asked for come back, after the same prefix. The study's suffix: "
    note += f"{content['suffix']} tokens."
    rows = rows if len(found) > 1 else []
    heads = ["model", "loss", "seen", *(f"{length} tokens" for length in found)]
    return Details("Verbatim by length of the suffix", heads, rows, note)


def slopes(content: Content) -> Details:
    """Return slopes by size."""
    rows = [
        [
            content["outcomes"][row["outcome"]]["title"],
            row["loss"],
            row["bucket"] if row["bucket"] == OVERALL else f"{row['bucket']}x",
            str(row["places"]),
            number(row["slope"]),
            ends_text(row["over_sizes"]),
            plain(row["r_squared"]),
            "; ".join(f"{name} {number(miss)}" for name, miss in row["residuals"].items()),
        ]
        for row in content["slopes"]
    ]
    heads = ["outcome", "loss", "seen", "sizes", "slope", "over sizes", "r squared", "above the line"]
    note = (
        "Least squares against log10 of the parameters: the change for ten times as many. In brackets the interval "
        "for other articles, with these models as they were trained; `over sizes` the one for other sizes, if what "
        "the line misses is like independent normal errors, which so few sizes cannot show. `above the line`: what "
        "each size has more than the line, with intervals that hold all together. Shares near 0 or 1 do not lie on a "
        "line."
    )
    return Details("Slope by size", heads, rows, note)


def doublings(content: Content) -> Details:
    """Return slopes by repetitions."""
    rows = [
        [row["model"], row["loss"], content["outcomes"][row["outcome"]]["title"], number(row["slope"])]
        + [plain(row["r_squared"]), "; ".join(f"{name}x {number(miss)}" for name, miss in row["residuals"].items())]
        for row in content["doublings"]
        if row["outcome"] in (PRIMARY, "verbatim")
    ]
    heads = ["model", "loss", "outcome", "for each doubling", "r squared", "above the line"]
    return Details("Slope by repetitions", heads, rows, "Least squares against log2 of how often a passage was seen.")


def goldfish(content: Content) -> Details:
    """Return the changes of each loss."""
    rows = []
    for row in content["goldfish"]:
        change = row["verbatim_difference"]
        counts = f"{change['mine']} and {change['ordinary']} of {change['passages']}" if change["passages"] else "-"
        cells = [row["model"], row["loss"], f"{row['bucket']}x", plain(row.get("k")), row.get("strategy", "-")]
        cells += [", ".join(map(str, row["seeds"])), counts, difference_text(change, digits=(2, 2))]
        cells += [number(row[name]) if name in row else "-" for name in ("gain_difference", "gain_kept")]
        rows.append(cells)
    heads = ["model", "loss", "seen", "k", "strategy", "seeds", "verbatim: this and ordinary", "difference"]
    heads += ["gain: difference (nats a token)", "share of the gain that stays"]
    note = "Each passage after this loss beside the same passage after the ordinary loss with the same seed."
    return Details("Goldfish beside the ordinary loss", heads, rows, note)


def tokens(content: Content) -> Details:
    """Return the accuracy and loss of dropped and of supervised tokens."""
    rows = [
        [row["model"], row["mask"], row["who"], _bucket(row, "who")]
        + [number(row[side]["accuracy"]) if side in row else "-" for side in ("dropped", "supervised")]
        + [number({**row["difference"]["accuracy"], "mean": row["difference"]["accuracy"]["difference"]})]
        + [number(row[side]["nll"]) if side in row else "-" for side in ("dropped", "supervised")]
        for row in content["tokens"]
        if "difference" in row
    ]
    heads = ["model", "mask", "loss", "seen", "right: dropped", "right: supervised", "difference"]
    heads += ["nats a token: dropped", "nats a token: supervised"]
    note = (
        "Tokens of the suffix that the mask leaves out and those that it does not, given the true ones before them. "
        "The ordinary loss and the model before any run are the control: there the mask means nothing. A loss that "
        "leaves tokens out by chance has no row: its texts do not tell which."
    )
    return Details("Dropped and supervised tokens", heads, rows, note)


def bounds(content: Content) -> Details:
    """Return the shares of passages that draws give, from below and from above, and the bits that they take."""
    measured = [row for row in content["cells"] if "discoverability" in row and "inextractability" in row]
    rows = []
    for row in measured:
        lower = row["discoverability"][LIKELY]["tries"]
        upper = row["inextractability"]["tries"][LIKELY]
        shares = [f"{lower[count]['mean']:.2f} to {upper[count]['mean']:.2f}" for count in map(str, TRIES)]
        bits = [f"{row['inextractability'][name]:.1f}" for name in ("least", "median")]
        rows.append([row["model"], row["loss"], _bucket(row), *shares, *bits])
    heads = ["model", "loss", "seen", *(f"{count:,} draw{'s' if count > 1 else ''}" for count in TRIES)]
    note = (
        f"Share of passages whose suffix comes with a probability of {LIKELY} within so many draws: at least what "
        f"draws by {content['sampler']} give, and at most what any temperature, top-k and top-p may, by the ranks of "
        "the tokens. A suffix of b bits takes 2^b queries at least, in expectation (docs/evaluation.md#upper-bounds)."
    )
    return Details("Extraction from below and from above", [*heads, "least bits", "median bits"], rows, note)


def at_same_loss(content: Content) -> Details:
    """Return what losses leave extractable at equal held-out loss, beside another loss, with verdicts."""
    found = content["at_same_loss"]
    rows = []
    for row in found["rows"]:
        compared = [
            f"{seed['held_out']:.3f} ({_step(seed['own']):.0f} and {_step(seed['at_reference']):.0f})"
            for seed in row["seeds"].values()
            if "held_out" in seed
        ]
        about = [row["model"], row["loss"], row["reference"], _bucket(row)]
        about += [", ".join(compared) or "-", f"{len(compared)} of {len(row['seeds'])}"]
        cells = []
        for name in found["bounds"]:
            entry = row.get(name)
            if entry is None:
                cells.append(row.get("verdict", "-"))
                continue
            difference = {**entry["difference"], "difference": entry["difference"]["mean"]}
            verdict = f"; {entry['verdict']}" if "verdict" in entry else ""
            text = difference_text(difference, digits=(2, 2))
            cells.append(f"{entry['own']:z.2f} and {entry['at_reference']:z.2f}: {text}{verdict}")
        rows.append([*about, *cells])
    heads = ["model", "loss", "beside", "seen", "at held-out loss (steps)", "seeds", *found["bounds"].values()]
    note = (
        "Both runs of a seed at one held-out loss (nats a token), with which one of them ends and which the other has "
        "on its way, as late as it has it, and the steps of both there; between two evaluations numbers are "
        "interpolated, and nothing is extrapolated. In brackets: 95% intervals over articles, which do not include "
        "that held-out losses and trainings vary. Verdicts are about the passages seen most often, with Holm's "
        "correction over all comparisons in a column: less or more extractable than beside."
    )
    return Details("What can be extracted at equal held-out loss", heads, rows, note)


def _step(place: Sequence[float]) -> float:
    """Return the step of a place on a curve: the step before, the step after, and the weight of the latter."""
    before, after, share = place
    return before + share * (after - before)


def attacks(content: Content) -> Details:
    """Return the yield of draws and budgets."""
    tries = list(dict.fromkeys(count for row in content["attacks"] for count in row["tries"]))
    rows = []
    for row in content["attacks"]:
        budgets = {int(entry["budget"]): entry for entry in row["budgets"]}
        cells = [row["model"], row["loss"], _bucket(row)]
        cells += [f"{row['tries'][count]['share']:.2g}" for count in tries]
        rows.append(cells + [f"{budgets[budget]['expected']:.2g} of {row['samples']}" for budget in BUDGETS])
    heads = ["model", "loss", "seen", *(f"{int(count):,} draw{'s' if int(count) > 1 else ''}" for count in tries)]
    heads += [f"{budget:,} tokens" for budget in BUDGETS]
    note = (
        f"Expected share of passages whose suffix so many draws of each give at least once, and how many a budget of "
        f"tokens gives that is spread over them evenly. Sampler: {content['sampler']}. Exact for these passages "
        "(docs/attacks.md#cost-of-an-attack)."
    )
    return Details("Cost of an attack", heads, rows, note)


def utility(content: Content) -> Details:
    """Return held-out loss and tasks."""
    rows = []
    for model, entries in content["utility"].items():
        for name, entry in (entries or {}).items():
            tasks, change = entry["tasks"], entry.get("minus_ordinary", {})
            cells = [model, name, number(entry["held_out_loss"], 3)]
            for key in ("bits_per_byte", "acc", "acc_norm"):
                cells.append(number(tasks[key], 3) if key in tasks else "-")
            keys = ("held_out_loss", "bits_per_byte", "acc")
            rows.append(cells + [difference_text(change.get(key), digits=(3, 3)) for key in keys])
    shown = ["held-out loss", "bits a byte", "right endings"]
    heads = ["model", "run", f"{shown[0]} (nats a token)", *shown[1:], "right endings, by length"]
    heads += [f"minus ordinary: {what}" for what in shown]
    why = sorted(
        {
            str(entry["tasks"]["left_out"])
            for entries in content["utility"].values()
            for entry in (entries or {}).values()
            if entry["tasks"].get("left_out")
        }
    )
    note = "Tasks of lm-evaluation-harness made of held-out texts; one ending in four is right by chance. "
    note += f"Left out: {'; '.join(why)}." if why else ""
    return Details("What it costs: held-out loss and tasks", heads, rows, note.strip())


def same_loss(content: Content) -> Details:
    """Return the tokens for the same held-out loss."""
    rows = []
    for model, by_loss in content["same_loss"].items():
        for loss, entry in by_loss.items():
            for point in [*entry.get("points", ()), *([entry["at_end"]] if "at_end" in entry else [])]:
                counts = [f"{point[name]:,.0f}" if point[name] is not None else "-" for name in ("ordinary", "other")]
                cells = [model, loss, f"{point['loss']:.3f}", *counts]
                rows.append(
                    cells + [plain(point["ratio"]), plain(point["supervised_ratio"]), plain(entry["predicted"])]
                )
            if "left_out" in entry:
                rows.append([model, loss, entry["left_out"], *["-"] * 5])
    heads = ["model", "loss", "held-out loss", "tokens, ordinary", "tokens, this loss", "ratio", "ratio, supervised"]
    note = (
        "Base trainings from nothing. The last line of a loss is where its own training ended. One training of each."
    )
    return Details("Tokens for the same held-out loss", [*heads, "k / (k - 1)"], rows, note)


def membership(content: Content) -> Details:
    """Return the AUC of the attacks."""
    scores = list(dict.fromkeys(row["score"] for row in content["membership"]))
    found: dict[tuple[str, str, Any], dict[str, Any]] = {}
    for row in content["membership"]:
        found.setdefault((row["model"], row["loss"], row["bucket"]), {})[row["score"]] = row["auc"]
    rows = [
        [model, loss, f"{bucket}x" if isinstance(bucket, int) else str(bucket)]
        + [value_text(by_score[score]) if score in by_score else "-" for score in scores]
        for (model, loss, bucket), by_score in found.items()
    ]
    note = (
        "Chance that a passage that was seen scores higher than one that was not; 0.5 is a coin. The articles are the "
    )
    note += "same on both sides. `reference` subtracts the score before the run."
    return Details("Membership (AUC)", ["model", "loss", "seen", *scores], rows, note)


def canaries(content: Content) -> Details:
    """Return the exposure of canaries."""
    rows = []
    for row in content["canaries"]:
        about = [row["model"], row["loss"], str(row["seed"]) + (f" on {row['grid']}" if row["grid"] else "")]
        if "why" in row:
            rows.append([*about, "-", row["why"], "-", "-"])
        for count, group in row.get("by_insertions", {}).items():
            exposure = f"{group['mean_exposure']:.1f} ({group['least_exposure']:.1f} to {group['most_exposure']:.1f})"
            rows.append(
                [*about, f"{count}x", exposure, f"{group['first']} of {group['canaries']}", f"{row['highest']:.1f}"]
            )
    heads = ["model", "loss", "seed", "inserted", "mean exposure, bits (least to most)", "ranked first", "highest"]
    note = "Carlini et al. 2019: 1.4 bits on average for a secret that was not inserted."
    return Details("Exposure of canaries", heads, rows, note)


def again(content: Content) -> Details:
    """Return gains over the same passage unseen in another seed."""
    rows = []
    for row in content["again"]:
        cell = cell_of(content, row["model"], row["loss"], row["bucket"]) or {}
        if row["pairs"]:
            cells = [row["model"], row["loss"], f"{row['bucket']}x", str(row["pairs"]), number(row["gain"])]
            rows.append([*cells, number(cell[PRIMARY]) if PRIMARY in cell else "-"])
    heads = ["model", "loss", "seen", "pairs", "gain over the same passage unseen", "gain over other passages unseen"]
    note = (
        "A second estimate of the gain (nats a token): each passage beside itself in a run of another seed that did "
        "not see it. Repetitions without such a pair have no row."
    )
    return Details("The same passage, not seen", heads, rows, note)


def grids(content: Content) -> Details:
    """Return runs on other grids."""
    rows = [
        [row["model"], f"{row['loss']}, seed {row['seed']}", row["grid"]]
        + [plain(row.get(f"largest_{name}"), 2) for name in ("loss", "held_out", "logprob")]
        + [plain(row["mean_logprob"], 2)]
        + [f"{row['changed_verbatim']} of {row['passages']}"]
        for row in content["grids"]
    ]
    heads = ["model", "run", "grid", "training loss", "held-out loss", "log-probability: largest", "mean", "verbatim"]
    note = "Largest differences from the same run on the model's own grid, in nats; how many answers changed."
    return Details("The same run on another grid", heads, rows, note)


def pilot(content: Content) -> Details:
    """Return the trials of the pilot."""
    found = content["pilot"] or {"tried": []}
    rows = [
        [f"{row['learning_rate']:g}", str(row["suffix"]), f"{row['largest']:.1%}", f"{row['none']:.1%}"]
        + [plain(row.get("held_out_loss")), "chosen" if _is_chosen(row, found) else ""]
        for row in found["tried"]
    ]
    heads = ["learning rate", "suffix", "verbatim, most repetitions", "verbatim, not seen", "held-out loss", ""]
    return Details("The pilot", heads, rows, "With the ordinary loss and a seed that no run has.")


def missing(content: Content) -> Details:
    """Return the steps whose outputs are not there."""
    rows = [[one["step"], one["state"], one["why"]] for one in content["missing"]]
    return Details("What is missing", ["step", "state", "why"], rows)


def _is_chosen(row: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    return all(row[name] == found.get(name) for name in ("learning_rate", "suffix"))
