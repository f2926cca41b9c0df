"""`hf-axonn plan`, the grid for a model, a machine and a number of GPUs, and `hf-axonn bench-links`.

    hf-axonn plan --model CONFIG|DIR|gpt-80b --machine frontier --gpus 8192 --batch-tokens 16.8M --seq 2048
    hf-axonn plan ... --sweep 512..32768       one line for each power of two
    torchrun --nproc-per-node 8 -m hf_axonn bench-links --output this.json

No process group and no GPU is needed for a plan. Bad input ends with exit code 2 and a message (main.py). `--plot`
draws the parts of a step for the first grids, or scaling curves; it needs matplotlib (extra `eval`).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any

from hf_axonn.cli.plan_report import cost, doubts, header, lines, sweep_lines
from hf_axonn.compat.arguments import with_reason
from hf_axonn.compat.own_code import add_own_code_option, register_code
from hf_axonn.config import OFFLOADED
from hf_axonn.planner import confidence, settings
from hf_axonn.planner.dense import GPTS
from hf_axonn.planner.from_settings import (
    PRECISION_BYTES,
    SEQUENCE,
    axis_sizes,
    choose_batch,
    make_job,
    number,
    usual_seq,
)
from hf_axonn.planner.job import Job
from hf_axonn.planner.machine import known_machines
from hf_axonn.planner.pipelined import Pipelined
from hf_axonn.planner.predict import Prediction
from hf_axonn.planner.search import GridRanking, plan, sweep
from hf_axonn.planner.shapes import ModelShape
from hf_axonn.planner.step import BASES, OPTIMIZERS
from hf_axonn.profiling.read_shape import read_shape
from hf_axonn.topology.axis_order import trim_order


TOP = 10  # grids that are shown where nobody says

# Parts of a step in the order in which they are stacked: compute in blues, communication in reds, else grey.
PARTS = {
    "gemm": "#1f4e79",
    "attention": "#2e75b6",
    "elementwise": "#9dc3e6",
    "head": "#bdd7ee",
    "optimizer": "#a6a6a6",
    "slowdown": "#7030a0",
    "exposed x/y": "#c00000",
    "exposed z": "#ed7d31",
    "exposed data": "#ffc000",
    "other": "#7f6000",
    "bubble": "#d9d9d9",
}


HATCHES = {"exposed": "///", "other": "...", "slowdown": "xxx"}


def add_plan(commands) -> None:
    """Register `plan` with the subparsers of main.py."""
    parser = commands.add_parser("plan", help="rank all grids of a number of GPUs by predicted time")
    dtypes = sorted(PRECISION_BYTES)
    parser.add_argument(
        "--model",
        required=True,
        help=f"a config.json, its directory, a name on the hub (org/model), or {', '.join(GPTS)}",
    )
    add_own_code_option(parser)
    parser.add_argument("--machine", required=True, help=f"{', '.join(known_machines())}, or a JSON file")
    parser.add_argument("--gpus", type=with_reason(number), help="number of GPUs")
    batch = parser.add_mutually_exclusive_group(required=True)
    batch.add_argument("--batch-tokens", type=with_reason(number), help="tokens of the full batch, such as 16.8M")
    batch.add_argument("--batch-sequences", type=with_reason(number), help="or its sequences")
    parser.add_argument(
        "--seq",
        type=with_reason(number),
        help=f"tokens of a sequence; by default {SEQUENCE}, or what the model allows",
    )
    parser.add_argument("--top", type=int, help=f"how many grids to show, {TOP} by default")
    parser.add_argument("--weights", choices=dtypes, default="fp32", help="dtype of weights, gradients and moments")
    parser.add_argument("--activations", choices=dtypes, default="bf16", help="dtype of products")
    parser.add_argument("--reduce-dtype", choices=dtypes, help="as --fix reduce_dtype=")
    parser.add_argument("--no-checkpointing", action="store_true", help="as --fix checkpointing=off")
    parser.add_argument(
        "--fix", nargs="+", default=[], metavar="NAME=VALUE", help=f"settings to keep: {', '.join(settings.VALUES)}"
    )
    parser.add_argument(
        "--free", nargs="+", default=[], choices=settings.ROUNDING, help="dtypes that may be chosen, too"
    )
    parser.add_argument(
        "--pipe", default="1", metavar="1,2,4", help="sizes of the axis pipe to plan with, or any; by default 1"
    )
    parser.add_argument(
        "--context",
        default="any",
        metavar="1,2,4",
        help="sizes of context, the part of z that divides the positions of a sequence; by default any",
    )
    parser.add_argument(
        "--lora", type=with_reason(number), default=0, metavar="RANK", help="train adapters of this rank alone"
    )
    parser.add_argument(
        "--base", choices=tuple(BASES), default="full", help="with --lora: the frozen Linears, in 4 bits (QLoRA)"
    )
    parser.add_argument(
        "--offload",
        choices=OFFLOADED,
        default="none",
        help="optimizer: AdamW's moments and float32 weights are in host memory",
    )
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="adamw",
        help="adamw_8bit: bitsandbytes' AdamW, as Trainer's optim; muon: torch's, for the layers' matrices",
    )
    parser.add_argument("--attention", help="attention kernel of the machine's file; by default its first")
    parser.add_argument(
        "--tokens", type=with_reason(number), help="tokens of the whole training, such as 2T: days and GPU hours"
    )
    parser.add_argument("--price", type=_above_zero, metavar="MONEY", help="of a GPU hour: what the training costs")
    parser.add_argument("--overlap", action="store_true", help="what each overlap of communication gains")
    parser.add_argument("--sweep", metavar="FIRST..LAST", help="plans for FIRST, twice as many, up to LAST GPUs")
    parser.add_argument("--weak", action="store_true", help="with --sweep: the batch grows with the GPUs")
    parser.add_argument("--plot", metavar="FILE", help="a picture of the table, .png or .svg; needs matplotlib")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_plan(options: argparse.Namespace) -> int:
    """`hf-axonn plan`; returns the exit code, 1 where no grid fits.

    Raises:
        ValueError: an option is wrong or missing.
    """
    if options.top is not None and options.top < 1:
        raise ValueError(f"--top is {options.top}: give a number above 0.")
    if options.sweep and options.top:
        raise ValueError("--sweep shows the fastest grid of each number of GPUs: leave --top out.")
    options.top = options.top or TOP
    if options.sweep and options.gpus:
        raise ValueError("--sweep stands in place of --gpus.")
    if not options.sweep and options.gpus is None:
        raise ValueError("--gpus is missing: give the number of GPUs, or --sweep FIRST..LAST.")
    if options.weak and not options.sweep:
        raise ValueError("--weak goes with --sweep FIRST..LAST.")
    if options.sweep and options.overlap:
        raise ValueError("--sweep says nothing of --overlap: leave one of them out.")
    if options.json and options.overlap:
        raise ValueError("--json says nothing of --overlap: leave one of them out.")
    counts = _gpu_counts(options.sweep) if options.sweep else [options.gpus]
    if options.trust_remote_code:
        register_code(options.model)
    shape = read_shape(options.model)
    options.seq = options.seq or usual_seq(shape)
    tokens = options.batch_tokens or options.batch_sequences * options.seq
    batch = choose_batch(tokens, options.seq, counts[0] if options.weak else counts[-1])
    if batch.note:
        print(f"note: {batch.note}", file=sys.stderr)
    texts = [*options.fix, *(["checkpointing=off"] if options.no_checkpointing else [])]
    texts += [f"reduce_dtype={options.reduce_dtype}"] if options.reduce_dtype else []
    fixed = settings.parse_fixed(texts)
    given = {text.partition("=")[0] for text in texts}
    if both := sorted(given & set(options.free)):
        raise ValueError(f"--free {both[0]} lets the plan choose what --fix {both[0]}= sets: leave one of them out.")
    options.free = [name for name in (*settings.EXACT, *options.free) if name not in given]
    if options.base != "full" and not options.lora:
        raise ValueError(f"--base {options.base} goes with --lora RANK: weights of 4 bits are not trained.")
    if options.pipe != "1" and options.lora:
        raise ValueError("--pipe is not planned with --lora: leave one of them out.")
    options.pipes = axis_sizes(options.pipe, "--pipe")
    options.contexts = axis_sizes(options.context, "--context")
    if options.pipes == [1] and (idle := sorted(given & {"pipeline", "stages_per_rank"})):
        raise ValueError(f"--fix {idle[0]} is of a pipeline: give --pipe with sizes of it, or any, or leave it out.")
    if "experts" in given and not shape.experts:
        raise ValueError("--fix experts is of a mixture of experts, and this model has none: leave it out.")
    job = _job(options, shape, batch.sequences, fixed)
    return _sweep(options, job, counts) if options.sweep else _plan(options, job)


def _above_zero(text: str) -> float:
    try:
        if 0 < float(text) < math.inf:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text} is not a number above 0")


def _job(options: argparse.Namespace, shape: ModelShape, sequences: int, fixed: dict[str, Any]) -> Job:
    return make_job(
        options.model,
        options.machine,
        sequences,
        options.seq,
        read=lambda _: shape,
        compute_bytes=PRECISION_BYTES[options.activations],
        param_bytes=PRECISION_BYTES[options.weights],
        attention=options.attention,
        lora=options.lora,
        base=options.base,
        offload=options.offload,
        optimizer=options.optimizer,
        **fixed,
    )


def _plan(options: argparse.Namespace, job: Job) -> int:
    """Plan for one number of GPUs."""
    found = plan(job, options.gpus, free=options.free, pipes=options.pipes, contexts=options.contexts)
    if options.json:
        print(json.dumps(as_json(found, options), indent=2))
    else:
        print(
            "\n".join(lines(found, options.top, tokens=options.tokens, price=options.price, overlap=options.overlap))
        )
    if options.plot and found.ranked:
        plot_plan(found, options.plot, options.top)
    return 0 if found.ranked else 1


def _sweep(options: argparse.Namespace, job: Job, counts: list[int]) -> int:
    """Plan for several numbers of GPUs."""
    plans = sweep(job, counts, weak=options.weak, free=options.free, pipes=options.pipes, contexts=options.contexts)
    if options.json:
        print(json.dumps([as_json(found, options, 1) for found in plans], indent=2))
    else:
        print(header(job, f"{options.sweep} GPUs") + ("; the batch grows with the GPUs" if options.weak else ""))
        print("".join(f"note: {note}\n" for note in (*job.shape.notes, *job.untimed)))
        print("\n".join(sweep_lines(plans, options.tokens, options.price)))
    if options.plot and any(found.ranked for found in plans):
        plot_sweep(plans, options.plot, weak=options.weak)
    return 0 if all(found.ranked for found in plans) else 1


def _gpu_counts(text: str) -> list[int]:
    """Read FIRST..LAST as numbers of GPUs, each twice the one before."""
    first, dots, last = text.partition("..")
    if not (dots and first.isdigit() and last.isdigit() and 0 < int(first) <= int(last)):
        raise ValueError(f"--sweep is {text!r}: write the first and last number of GPUs, 512..32768.")
    return [int(first) << shift for shift in range(int(last).bit_length()) if int(first) << shift <= int(last)]


def as_json(found: GridRanking, options: argparse.Namespace, top: int | None = None) -> dict[str, Any]:
    """Return a plan as JSON, with `top` grids, those of --top by default."""
    return {
        "machine": found.job.machine.name,
        "gpus": found.gpus,
        "sequences": found.job.sequences,
        "seq": found.job.seq,
        "ranked": [entry_json(entry, options) for entry in found.ranked[: top or options.top]],
        "fit": len(found.ranked),
        "do_not_fit": len(found.too_big),
        "impossible": len(found.impossible),
        "notes": [*found.job.shape.notes, *(doubts(found) if found.ranked else [found.why_none()])],
    }


def entry_json(entry: Prediction, options: argparse.Namespace) -> dict[str, Any]:
    """Return a prediction as JSON: seconds, bytes, FLOP/s, and what the training costs."""
    return {
        "grid": entry.grid.as_dict(),
        "order": trim_order(entry.order, entry.grid),
        "settings": settings.as_text(entry.job),
        "micro_batches": entry.micro_batches,
        "step_seconds": entry.total,
        "step_seconds_interval": confidence.seconds(entry),
        "seconds": entry.seconds,
        "communication_seconds": entry.traffic,
        "layer_seconds": [{"layers": count, **layer._asdict()} for layer, count in entry.layers],
        "tokens_per_second": entry.tokens_per_second,
        "flops_per_gpu": entry.flops,
        "mfu": entry.mfu,
        "hfu": entry.hfu,
        "memory_bytes": entry.memory.by_kind(),
        "fits": entry.fits,
        "cost": cost(entry, options.tokens, options.price),
        **({"pipeline": pipeline_json(entry.pipelined)} if entry.pipelined else {}),
    }


def pipeline_json(found: Pipelined) -> dict[str, Any]:
    """Return a pipeline as JSON: layers of each stage, shares, seconds."""
    return {
        "stages_per_rank": found.stages.per_rank,
        "layers": [len(stage) for stage in found.stages.layers],
        "bubble": found.bubble,
        "imbalance": found.imbalance,
        "in_flight": list(found.in_flight),
        "hop_seconds": found.hop,
        "simulated": found.simulated,
    }


def plot_plan(found: GridRanking, file: str, top: int) -> None:
    """Draw stacked bars: the parts of a step on each of the first grids."""
    pyplot = _pyplot()
    entries = found.ranked[:top]
    named = any(entry.pipelined or entry.grid.context > 1 for entry in entries)
    names = [str(entry.grid) if named else ",".join(map(str, entry.grid.as_dict().values())) for entry in entries]
    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.42 * len(entries)))
    left = [0.0] * len(entries)
    for part, color in PARTS.items():
        widths = [entry.seconds[part] for entry in entries]
        if sum(widths) > 0.002 * sum(entry.total for entry in entries):
            hatch = HATCHES.get(part.partition(" ")[0])  # to tell them apart in grey
            axes.barh(names, widths, left=left, color=color, label=part, hatch=hatch, edgecolor="white")
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step (communication: what nothing hides)")
    axes.set_ylabel("grid" if named else "grid: data, z, y, x")
    axes.set_title(f"{found.job.machine.name}, {found.gpus:,} GPUs")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    _save(figure, file)
    pyplot.close(figure)


def plot_sweep(plans: list[GridRanking], file: str, *, weak: bool) -> None:
    """Draw PFLOP/s of all GPUs, and TFLOP/s of one, against the number of GPUs."""
    pyplot = _pyplot()
    bests = [found.best for found in plans if found.ranked]
    counts = [best.grid.size for best in bests]
    figure, (total, each) = pyplot.subplots(1, 2, figsize=(10, 4))
    total.loglog(counts, [best.flops * best.grid.size / 1e15 for best in bests], "o-", color="#1f4e79", label="model")
    ideal = [bests[0].flops * size / 1e15 for size in counts]
    total.loglog(counts, ideal, "--", color="#a6a6a6", label="linear")
    total.set_ylabel("PFLOP/s, recomputation included")
    total.legend(frameon=False)
    each.semilogx(counts, [best.flops / 1e12 for best in bests], "o-", color="#1f4e79")
    each.set_ylim(bottom=0)
    each.set_ylabel("TFLOP/s of a GPU")
    for axes in (total, each):
        axes.set_xlabel("GPUs")
        axes.set_xticks(counts, [f"{size:,}" for size in counts], rotation=45)
        axes.minorticks_off()
    figure.suptitle(f"{plans[0].job.machine.name}: {'weak' if weak else 'strong'} scaling")
    _save(figure, file)
    pyplot.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib.") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, file: str) -> None:
    try:
        figure.savefig(file, bbox_inches="tight", dpi=150)
    except (OSError, ValueError) as error:
        raise ValueError(f"the picture {file} cannot be written: {error}") from None


def add_bench_links(commands) -> None:
    """Register `bench-links`."""
    parser = commands.add_parser("bench-links", help="measure this machine under torchrun and write a machine file")
    parser.add_argument("--output", required=True, help="the JSON file to write")
    parser.add_argument("--seconds", type=_above_zero, default=60.0, help="most seconds to spend")
    parser.add_argument(
        "--peak-tflops", type=_above_zero, help="advertised dense bf16 TFLOP/s of a GPU; by default that of its name"
    )


def run_bench_links(options: argparse.Namespace) -> int:
    """`hf-axonn bench-links`; returns the exit code."""
    from hf_axonn.profiling.bench_links import bench_links

    return bench_links(options.output, seconds=options.seconds, peak=options.peak_tflops)
