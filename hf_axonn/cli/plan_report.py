"""Writes the answer of `hf-axonn plan`: the first grid, the next ones, those left out, and the section to paste."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hf_axonn.planner import confidence, settings
from hf_axonn.planner.digits import decimals, gib, percent
from hf_axonn.planner.experts import expected_rows, why_gathered
from hf_axonn.planner.from_settings import too_long
from hf_axonn.planner.job import Job
from hf_axonn.planner.memory import RESERVE
from hf_axonn.planner.predict import Prediction, predict
from hf_axonn.planner.search import GridRanking, alternatives
from hf_axonn.planner.shapes import gathers_keys, gathers_latents, heads_repeat
from hf_axonn.topology.axis_order import ORDER, trim_order
from hf_axonn.topology.grid import Grid


NEXT = 4  # places that a short answer names
WORTH = 0.02  # share that a dtype with other rounding has to save to be mentioned
# The overlaps in the order in which AxoNN's paper adds them (arXiv 2502.08145), as fields of a Job.
OVERLAPS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("none", {"all_reduce": False, "reduce_scatter": False, "all_gather": False}),
    ("+ OAR, sums of input gradients beside weight gradients", {"reduce_scatter": False, "all_gather": False}),
    ("+ ORS, sums of weight gradients beside backward", {"all_gather": False}),
    ("+ OAG, gathers of weights ahead", {}),
)


def number_of(count: int, noun: str, plural: str = "") -> str:
    """Write a count with its noun: 1 sequence, 2 sequences."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def _short(number: int) -> str:
    """Write a number as on the command line: 2T, 300B, 16.8M."""
    for letter, value in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= value:
            return f"{number / value:g}{letter}"
    return f"{number:,}"


def sizes(grid: Grid) -> str:
    """The axes of a grid that are longer than 1."""
    return ", ".join(f"{axis}={size}" for axis, size in grid.as_dict().items() if size > 1) or "one GPU"


def header(job: Job, gpus: str) -> str:
    """One line on the model, the machine, the batch, and the options that are not the default."""
    count = job.shape.parameters()
    size = f"{count / 1e9:.1f} billion" if count >= 10**9 else f"{count / 1e6:.3g} million"
    options = {
        f"LoRA of rank {job.lora}"
        + {"full": "", "4bit": " on 4 bits", "4bit-double": " on 4 bits, double quantization"}[job.base]: job.lora,
        "weights bf16": job.param_bytes == 2,
        "activations fp32": job.compute_bytes == 4,
        f"optimizer {job.optimizer}": job.optimizer != "adamw",
        f"offload {job.offload}": job.offload != "none",
        f"attention {job.attention}": job.attention is not None,
    }
    return ", ".join(
        [
            f"{size} parameters on {gpus} of {job.machine.name}",
            f"{number_of(job.sequences, 'sequence')} of {job.seq:,} tokens a step",
            *(text for text, holds in options.items() if holds),
        ]
    )


def lines(
    found: GridRanking, top: int, *, tokens: int | None = None, price: float | None = None, overlap: bool = False
) -> list[str]:
    """Lines of a plan.

    Args:
        found: the plan.
        top: how many grids.
        tokens, price: as for `cost`.
        overlap: whether to say what each overlap of communication gains on the first grid.
    """
    job = found.job
    text = [header(job, number_of(found.gpus, "GPU")), *(f"note: {note}" for note in job.shape.notes), ""]
    if not found.ranked:
        return [*text, found.why_none(), *_left_out(found)]
    left_out = _left_out(found)
    text += [
        *_answer(found, cost(found.best, tokens, price)),
        "",
        *_table(found.ranked[:top]),
        *(["", *left_out] if left_out else []),
    ]
    if overlap:
        text += ["", *_overlaps(found.best)]
    return [*text, "", *section_lines(found.best)]


def cost(entry: Prediction, tokens: int | None = None, price: float | None = None) -> dict[str, Any]:
    """Costs of a training on a grid: days, GPU hours and money, with the interval of its step.

    Args:
        tokens: of the whole training; None: of a billion.
        price: of a GPU hour, in any currency; None: no money.
    """
    tokens = tokens or 10**9
    days = tokens / entry.tokens_per_second / 86400
    amounts = {"gpu_hours": days * 24 * entry.grid.size}
    if price is not None:
        amounts["money"] = price * amounts["gpu_hours"]
    found: dict[str, Any] = {"tokens": tokens, "days": days, **({} if price is None else {"price": price})}
    for name, amount in amounts.items():
        found[name] = amount
        found[f"{name}_interval"] = [amount * end / entry.total for end in confidence.seconds(entry)]
    return found


def _cost_line(found: dict[str, Any]) -> str:
    days = found["days"]
    text = f"{_short(found['tokens'])} tokens: " + (f"{days:,.1f} days" if days >= 1 else f"{24 * days:.3g} hours")
    for name, what in (("gpu_hours", "GPU hours"), ("money", f"at {found.get('price', 0):g} a GPU hour")):
        if name in found:
            low, high = map(_amount, found[f"{name}_interval"])
            text += f", {_amount(found[name])} {what} ({low} to {high})"
    return text


def _amount(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _answer(found: GridRanking, costs: dict[str, Any]) -> list[str]:
    """The first grid: how long, how much, with which settings, and how sure."""
    best = found.best
    chosen = settings.as_text(best.job)
    lost, waits = best.seconds["slowdown"], best.exposed
    rows = best.job.sequences // (best.grid.dp_size * best.micro_batches)
    text = [
        *_first(found),
        f"  {decimals(best.tokens_per_second, 0)} tokens/s, MFU {percent(best.mfu)}, HFU {percent(best.hfu)} "
        f"({decimals(best.flops / 1e12, 0)} TFLOP/s a GPU)",
        f"  {gib(best.memory.total)} of {best.job.machine.memory / 2**30:.0f} GiB a GPU; checkpointing "
        f"{chosen['checkpointing']}, keep_gathered {chosen['keep_gathered']}, "
        f"{number_of(best.micro_batches, 'micro-batch', 'micro-batches')} of {number_of(rows, 'sequence')}"
        + _positions(best),
        f"  {best.total - lost - waits - best.seconds['bubble']:.3g} s compute, {_part(lost, best)} s lost to "
        f"communication beside it, {_part(waits, best)} s waiting for communication"
        + (f", {_part(best.seconds['bubble'], best)} s for other stages" if best.pipelined else ""),
        *_experts(best),
        *_stages(best),
        f"  {_cost_line(costs)}",
    ]
    return text + [f"  {line}" for line in (*doubts(found), *_rounding(best))]


def _positions(best: Prediction) -> str:
    """Return how context divides a sequence, or nothing."""
    if best.grid.context == 1:
        return ""
    shape, requested, way = best.job.shape, best.job.context_attention, "by heads"
    if gathers_keys(shape, best.grid, requested):
        blocks = [block for layer, _ in shape.kinds for block in layer.blocks]
        latents = any(gathers_latents(shape, block, best.grid, requested) for block in blocks)
        way = f"on gathered {'latents' if latents else 'keys and values'}"
    return f", {best.job.positions(best.grid):,} positions of each on a rank, attention {way}"


def _experts(best: Prediction) -> list[str]:
    """A line on how tokens and experts meet on the first grid, for a mixture of experts."""
    shape, grid = best.job.shape, best.grid
    if not shape.experts:
        return []
    if why := why_gathered(shape, grid):
        return [f"  experts gather, their weights over z and tokens over x and y: {why}"]
    ranks, other = grid.z * grid.x * grid.y, "gather" if best.experts == "move" else "move"
    sent, most = float(expected_rows(shape.experts[0], grid, 0).sent), min(shape.experts[0].chosen, ranks)
    beside = predict(replace(best.job, experts=other, micro_batches=None), grid, order=best.order)
    takes = f"{other}: {beside.total:.3g} s" if beside.fits else f"{other} does not fit"
    ways = {
        "gather": "their weights over z and tokens over x and y",
        "move": f"each whole on one of {ranks} ranks; a token travels to {sent:.1f} others in the mean where routers "
        f"choose all experts alike, and to {most} at most",
    }
    return [f"  experts {best.experts}, {ways[best.experts]} ({takes})"]


def _stages(best: Prediction) -> list[str]:
    """Lines on the stages of the first grid, if it has a pipeline."""
    found = best.pipelined
    if found is None:
        return []
    lengths = [len(stage) for stage in found.stages.layers]
    layers = f"{min(lengths)} to {max(lengths)}" if min(lengths) < max(lengths) else f"{lengths[0]}"
    inside = f"{max(found.in_flight)} to {min(found.in_flight)}"
    return [
        f"  pipeline {best.job.pipeline}, {number_of(best.grid.pipe, 'rank')} of "
        f"{number_of(found.stages.per_rank, 'stage')} of {layers} layers",
        f"  bubble {percent(found.bubble)}, the busiest rank {percent(found.imbalance)} above the mean, {inside} "
        "activations of a stage and micro-batch in flight",
    ]


def _first(found: GridRanking) -> list[str]:
    """The first grid, and its time."""
    best = found.best
    low, high = confidence.seconds(best)
    spread = confidence.spread(best)
    return [
        f"The fastest of {number_of(len(found.ranked), 'grid')} that fit: {sizes(best.grid)}",
        f"  {best.total:.3g} s a step ({low:.3g} to {high:.3g} by {spread.runs} published runs {spread.kind})",
    ]


def in_short(found: GridRanking) -> list[str]:
    """The first grid, its time and memory, and the next ones."""
    best = found.best
    text = [*_first(found), f"  {gib(best.memory.total)} of {best.job.machine.memory / 2**30:.0f} GiB a GPU"]
    behind = [f"{sizes(each.grid)} ({percent(each.total / best.total - 1)} slower)" for each in found.ranked[1:NEXT]]
    return [*text, f"  next: {'; '.join(behind)}"] if behind else text


def _part(seconds: float, best: Prediction) -> str:
    """Three digits of a part of a step, 0 where it is none to speak of."""
    return f"{seconds:.3g}" if seconds >= 0.001 * best.total else "0"


def doubts(found: GridRanking) -> list[str]:
    """Sentences on how sure the first place is, on what its seconds leave out, and on the order of its axes."""
    best, text = found.best, []
    close = [entry for entry in found.ranked[1:] if confidence.too_close(best, entry)]
    if close:
        behind = close[0].total / best.total - 1
        text.append(
            f"too close to call: {number_of(len(close), 'other')} may be as fast, the next is {sizes(close[0].grid)} "
            f"({percent(behind)} slower): measure the first ones"
        )
    others = [(name, entry) for name, entry in alternatives(found) if entry.grid != best.grid]
    text += [f"with {name} the first would be {sizes(entry.grid)}" for name, entry in others]
    text += best.job.untimed
    if best.grid.context > 1:
        text.append("only one of the published runs divides the positions of sequences among ranks, as context does")
    if long := too_long(best.job.seq, best.job.shape.max_positions):
        text.append(long)
    ranks = _repeats(best)
    if ranks > 1:
        text.append(
            f"{ranks} ranks of x and y compute the same attention, as the heads of the model do not divide among them"
        )
    if best.order != ORDER:
        gain = 1 - best.total / best.reorder(ORDER).total
        text.append(
            f"its axes lie on the machine in the order {', '.join(trim_order(best.order, best.grid))} (the fastest "
            f"links first), which takes {gain:.0%} less than the engine's own, "
            f"{', '.join(trim_order(ORDER, best.grid))}"
        )
    return text


def _repeats(best: Prediction) -> int:
    """Ranks that compute the same attention, in the layer where they are most."""
    blocks = [block for layer, _ in best.job.shape.kinds for block in layer.blocks if block.is_attention]
    return max((heads_repeat(block, best.grid) for block in blocks), default=1)


def _rounding(best: Prediction) -> list[str]:
    """Dtypes that would be faster, but round differently."""
    text = []
    for name in settings.ROUNDING:
        for job in settings.on_grid(settings.variants(best.job, (name,)), best.grid)[1:]:
            if settings.as_text(job) == settings.as_text(best.job):
                continue
            other = predict(replace(job, micro_batches=None), best.grid, order=best.order)
            gain = 1 - other.total / best.total
            if other.fits and gain >= WORTH:
                text.append(f"{name} bf16 would take {gain:.0%} less, with other rounding: --free {name}")
    return text


def _table(entries: Iterable[Prediction]) -> list[str]:
    entries = list(entries)
    pipes = any(entry.pipelined for entry in entries)
    contexts = any(entry.grid.context > 1 for entry in entries)
    text = [
        f"{'':>3} {'data':>5}{' pipe' if pipes else ''} {'z':>5} {'y':>4} {'x':>4}{' context' if contexts else ''}  "
        f"{'checkpointing':<13} "
        f"{'keep_gathered':<13} {'micro-batches':>13} {'step s':>8} {'waiting':>8} {'tokens/s':>11} {'MFU':>6} "
        f"{'GiB':>6}{'  pipeline' if pipes else ''}"
    ]
    for place, entry in enumerate(entries, start=1):
        grid, chosen = entry.grid, settings.as_text(entry.job)
        pipe = f" {grid.pipe:>4}" if pipes else ""
        context = f" {grid.context:>7}" if contexts else ""
        way = f"  {entry.job.pipeline} {entry.job.stages_per_rank}" if entry.pipelined else ""
        text.append(
            f"{place:>3} {grid.data:>5}{pipe} {grid.z:>5} {grid.y:>4} {grid.x:>4}{context}  "
            f"{chosen['checkpointing']:<13} "
            f"{chosen['keep_gathered']:<13} {entry.micro_batches:>13} {decimals(entry.total, 3):>8} "
            f"{decimals(entry.exposed, 3):>8} {decimals(entry.tokens_per_second, 0):>11} {percent(entry.mfu):>6} "
            f"{gib(entry.memory.total):>6}{way}"
        )
    return text


def _left_out(found: GridRanking) -> list[str]:
    text = []
    if found.too_big:
        least = found.too_big[0]
        line = (
            f"{number_of(len(found.too_big), 'grid')} left out: more than {found.job.machine.memory / 2**30:.0f} GiB, "
            f"of which {RESERVE:.0%} is kept free"
        )
        if found.ranked:  # else `why_none` has named it
            line += f"; the smallest is {sizes(least.grid)} with {gib(least.memory.total)} GiB"
        text.append(line)
    if found.impossible:
        grid, why = found.impossible[0]
        text.append(f"{number_of(len(found.impossible), 'grid')} left out, for instance {sizes(grid)}: {why}")
    return text


def _overlaps(best: Prediction) -> list[str]:
    """Lines on the gain of each overlap on the first grid."""
    text, before = ["Overlaps on this grid, added one by one:"], 0.0
    for name, off in OVERLAPS:
        job = replace(best.job, micro_batches=best.micro_batches, **off)
        total = predict(job, best.grid, order=best.order).total
        gain = f"  {percent(1 - total / before):>6} less" if before else ""
        text.append(f"  {name:<56} {decimals(total, 3):>8} s{gain}")
        before = total
    return text


def section_lines(best: Prediction) -> list[str]:
    """The section of a launch file, and Trainer's arguments, as a comment."""
    chosen, job = settings.as_text(best.job), best.job
    text = ["axonn_config:", f"  grid: {inline(best.grid)}"]
    if best.order != ORDER:
        text.append(f"  order: [{', '.join(trim_order(best.order, best.grid))}]")
    if best.experts:
        text.append(f"  experts: {best.experts}")
    if job.keep_gathered != "recomputed":
        text.append(f"  keep_gathered: {job.keep_gathered}")
    if job.offload != "none":
        text.append(f"  offload: {job.offload}")
    text += [f"  {name}: bfloat16" for name in settings.ROUNDING if chosen[name] == "bf16"]
    if best.pipelined:
        text += [f"  schedule: {job.pipeline}", f"  stages_per_rank: {job.stages_per_rank}"]
        text += [f"  stage_layers: [{', '.join(str(len(layers)) for layers in best.pipelined.stages.layers)}]"]
    rows = job.sequences // (best.grid.dp_size * best.micro_batches)
    return [
        *text,
        f"# for Trainer: gradient_accumulation_steps {best.micro_batches}, per_device_train_batch_size {rows}, "
        f"gradient_checkpointing {str(job.checkpointing).lower()}"
        + (", optim adamw_bnb_8bit" if job.optimizer == "adamw_8bit" else ""),
    ]


def inline(grid: Grid) -> str:
    """The grid as a YAML mapping in one line."""
    return "{" + ", ".join(f"{axis}: {size}" for axis, size in grid.as_dict().items()) + "}"


def sweep_lines(plans: list[GridRanking], tokens: int | None = None, price: float | None = None) -> list[str]:
    """Plans as a table, one line a number of GPUs; efficiency: FLOP/s of a GPU beside those of the first plan.

    With `tokens` or `price` each has a line more, with its `cost`.
    """
    text = [f"{'GPUs':>7} {'grid':<32} {'step s':>9} {'tokens/s':>13} {'PF':>9} {'TF/GPU':>7} {'efficiency':>10}"]
    first_flops = next((found.best.flops for found in plans if found.ranked), 1.0)
    for found in plans:
        if not found.ranked:
            text.append(f"{found.gpus:>7} {found.why_none()}")
            continue
        best = found.best
        text.append(
            f"{found.gpus:>7} {sizes(best.grid):<32} {decimals(best.total, 3):>9} "
            f"{decimals(best.tokens_per_second, 0):>13} {decimals(best.flops * found.gpus / 1e15, 1):>9} "
            f"{decimals(best.flops / 1e12, 1):>7} {percent(best.flops / first_flops):>10}"
        )
        if tokens or price is not None:
            text.append(f"{'':>7} {_cost_line(cost(best, tokens, price))}")
    return text
