"""Makes a job of settings: of the command line of `hf-axonn plan`, or of a launch file with `grid: auto`.

    axonn_config:
      grid: auto
      plan: {model: my-model, machine: dgx-h100, batch_tokens: 4M, seq: 4096}

The launcher replaces both by the grid that the planner ranks first, and says which one and what comes second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from hf_axonn.planner.dense import load_shape
from hf_axonn.planner.digits import percent
from hf_axonn.planner.job import Job
from hf_axonn.planner.machine import load_machine
from hf_axonn.planner.predict import Prediction
from hf_axonn.planner.search import GridRanking, plan
from hf_axonn.planner.shapes import ModelShape
from hf_axonn.topology.axis_order import ORDER, check_order, trim_order
from hf_axonn.topology.grid import divisors


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
PRECISION_BYTES = {"fp32": 4, "bf16": 2}
SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
NEEDED = ("model", "machine", "batch_tokens", "seq")
OPTIONAL = ("checkpointing", "weights", "optimizer", "pipe", "context")
PLAN_EXAMPLE = "plan: {model: DIRECTORY, machine: dgx-h100, batch_tokens: 4M, seq: 4096}"
NEAR = 0.05  # share by which a batch may be changed, to divide among more grids
SILENT = 0.01  # and without a note
SEQUENCE = 2048  # tokens of a sequence by default, unless the model's window is shorter


def number(text: Any) -> int:
    """Read an integer, or a number with the suffix k, M, G or B, or T for 10**3, 10**6, 10**9 and 10**12: 16.8M.

    Raises:
        ValueError: it is none, not whole, or below 1.
    """
    words = str(text)
    factor = SUFFIXES.get(words[-1:].lower(), 1)
    try:
        exact = float(words[:-1] if factor > 1 else words) * factor
        value = round(exact)
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is not a number such as 4096 or 16.8M.") from None
    if value < 1 or isinstance(text, bool):
        raise ValueError(f"{text!r} is not a number of at least 1.")
    if not math.isclose(value, exact):
        raise ValueError(f"{text!r} is not a number such as 4096 or 16.8M: it has a fraction.")
    return value


def usual_seq(shape: ModelShape) -> int:
    """Tokens of a sequence by default: SEQUENCE, or the window of the model where that is shorter."""
    return min(SEQUENCE, shape.max_positions or SEQUENCE)


def too_long(seq: int, max_positions: int) -> str:
    """Return a sentence where sequences are longer than a config allows (0: it does not say); else nothing."""
    if not 0 < max_positions < seq:
        return ""
    return (
        f"sequences of {seq:,} tokens are longer than the {max_positions:,} that the config allows "
        "(max_position_embeddings)"
    )


def other_nodes(ranking: GridRanking, per_node: int, nodes: int) -> str:
    """Return a sentence where the processes of a node are not those of a node of the plan; else nothing."""
    machine = ranking.job.machine
    if per_node <= machine.gpus_per_node and (nodes == 1 or per_node == machine.gpus_per_node):
        return ""
    return f"planned as if every {machine.gpus_per_node} neighbours were a node of {machine.name}, not {per_node}"


class Batch(NamedTuple):
    """Sequences of a step, and a note for a user who asked for another number; empty if there is none."""

    sequences: int
    note: str = ""


def choose_batch(batch_tokens: int, seq: int, gpus: int) -> Batch:
    """Choose the sequences of a batch.

    A multiple of `seq` is taken as it is; of other batches the count within NEAR that divides best among `gpus`: 16.8M
    tokens of 2048 are 8192 sequences, 4M of 4096 are 1024.

    Raises:
        ValueError: the batch is less than a sequence.
    """
    sequences = batch_tokens / seq
    best = _divides_best(sequences, gpus)
    if best is None:
        raise ValueError(f"a batch of {batch_tokens:,} tokens is less than one sequence of {seq:,} tokens.")
    if batch_tokens % seq:
        change = best / sequences - 1
        note = (
            f"{batch_tokens:,} tokens are {sequences:,.1f} sequences of {seq:,}: planned for {best:,}, {change:+.1%}"
        )
        return Batch(best, note if abs(change) > SILENT else "")
    count = batch_tokens // seq
    if math.gcd(count, gpus) == math.gcd(best, gpus):
        return Batch(count)
    return Batch(count, f"{count:,} sequences divide among few grids of {gpus:,} GPUs: {best:,} among more")


def _divides_best(sequences: float, gpus: int) -> int | None:
    """The count within NEAR of `sequences` that is a multiple of the GPUs times a power of two, else of a part of
    them."""
    units = [gpus << shift for shift in reversed(range(max(1, round(sequences / gpus)).bit_length() + 1))]
    units += [divisor for divisor in reversed(divisors(gpus)) if divisor < gpus]
    for unit in units:
        count = unit * round(sequences / unit)
        if count and abs(count - sequences) <= NEAR * sequences:
            return count
    return max(1, round(sequences)) if sequences >= 1 else None


def axis_sizes(given: Any, where: str) -> list[int] | None:
    """Read the sizes of an axis, pipe or context, to plan with.

    Args:
        given: a size, a list of them, `1,2,4`, or any.
        where: what holds it, for the error.
    Returns:
        The sizes, ascending; None: any.
    Raises:
        ValueError: it is nothing of this.
    """
    if given == "any":
        return None
    sizes = list(map(str, given)) if isinstance(given, list) else str(given).split(",")
    if not sizes or not all(size.isdigit() and int(size) for size in sizes):
        raise ValueError(f"{where} is {given!r}: write sizes such as 1,2,4,8, or any.")
    return sorted(set(map(int, sizes)))


def make_job(
    model: str,
    machine: str,
    sequences: int,
    seq: int,
    *,
    read: Callable[[str], ModelShape] = load_shape,
    **settings: Any,
) -> Job:
    """Make a job of names and numbers; `settings` are those of `Job`, and `read` gives the shape of a model.

    Raises:
        ValueError: no such model or machine, or a wrong setting.
    """
    return Job(shape=read(model), machine=load_machine(machine), sequences=sequences, seq=seq, **settings)


def resolve_auto(
    section: Mapping[str, Any],
    num_processes: int,
    *,
    mixed_precision: str,
    nodes: int = 1,
    read: Callable[[str], ModelShape] = load_shape,
) -> tuple[dict[str, Any], list[str]]:
    """Replace `grid: auto` of the section `axonn_config` by the sizes that the planner ranks first.

    Args:
        section: as it stands in the launch file.
        num_processes: ranks of the grid.
        mixed_precision: no, bf16 or fp16, for the bytes of activations.
        nodes: on which as many ranks run each.
        read: gives the shape of a model by its name.
    Returns:
        The section, unchanged where it has neither `grid: auto` nor `plan`, and sentences for the user.
    Raises:
        ValueError: `plan` is missing, wrong, or stands beside sizes; or no grid fits.
    """
    if section.get("grid") != "auto" and "plan" not in section:
        return dict(section), []
    settings = _check_plan(section)
    try:
        seq = number(settings["seq"])
        batch = choose_batch(number(settings["batch_tokens"]), seq, num_processes)
        job = _job_of_plan(section, settings, batch.sequences, seq, mixed_precision, read)
        pipes = axis_sizes(settings.get("pipe", 1), "pipe")
        if mixed_precision == "fp16" and (pipes is None or 1 in pipes):
            pipes = [1]  # a launch refuses fp16 over pipe
        ranking = plan(
            job,
            num_processes,
            order=check_order(section["order"]) if "order" in section else None,
            # What the launch file does not say may be chosen; checkpointing is the script's.
            free=[name for name in ("keep_gathered", "experts") if name not in section],
            pipes=pipes,
            contexts=axis_sizes(settings.get("context", "any"), "context"),
        )
        best = ranking.best
    except (ValueError, OSError) as error:  # OSError: of a name that no file can have
        raise ValueError(f"axonn_config.plan: {error}") from None
    resolved = _write_best(section, job, best)
    return resolved, _explain(resolved, batch, ranking, other_nodes(ranking, num_processes // nodes, nodes))


def _check_plan(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section's `plan`, whose keys are known and whose checkpointing and weights are right.

    Raises:
        ValueError: it is missing, wrong, or stands beside sizes.
    """
    if section.get("grid") != "auto":
        raise ValueError("axonn_config.plan says how to choose a grid: write grid: auto beside it, or remove it.")
    if "stage_layers" in section:
        raise ValueError(
            "axonn_config.stage_layers lists the stages of one grid, and grid is auto: omit it, and the planner "
            "divides the layers, or write the sizes of the grid."
        )
    settings = section.get("plan")
    if not isinstance(settings, Mapping):
        raise ValueError(
            "axonn_config.grid is auto, but there is no plan that says for what: write the sizes of the grid, or "
            f"{PLAN_EXAMPLE} beside it."
        )
    for key in settings:
        if key not in NEEDED + OPTIONAL:
            near = get_close_matches(str(key), NEEDED + OPTIONAL, n=1)
            raise ValueError(
                f"axonn_config.plan has an unknown key {key!r}; it may hold {', '.join(NEEDED + OPTIONAL)}: "
                + (f"did you mean {near[0]}?" if near else "remove it.")
            )
    missing = [key for key in NEEDED if key not in settings]
    if missing:
        raise ValueError(f"axonn_config.plan has no {', '.join(missing)}: write it as in {PLAN_EXAMPLE}.")
    checkpointing, weights = settings.get("checkpointing", True), settings.get("weights", "fp32")
    if not isinstance(checkpointing, bool):
        raise ValueError(f"axonn_config.plan.checkpointing is {checkpointing!r}: write true or false.")
    if not isinstance(weights, str) or weights not in PRECISION_BYTES:
        raise ValueError(f"axonn_config.plan.weights is {weights!r}, but it is one of {', '.join(PRECISION_BYTES)}.")
    return settings


def _job_of_plan(
    section: Mapping[str, Any],
    settings: Mapping[str, Any],
    sequences: int,
    seq: int,
    mixed_precision: str,
    read: Callable[[str], ModelShape],
) -> Job:
    """The job of a checked `plan` and of the settings beside it."""
    param_bytes = PRECISION_BYTES[settings.get("weights", "fp32")]
    return make_job(
        str(settings["model"]),
        str(settings["machine"]),
        sequences,
        seq,
        read=read,
        compute_bytes=2 if mixed_precision in ("bf16", "fp16") else param_bytes,
        param_bytes=param_bytes,
        reduce_bytes=DTYPE_BYTES.get(str(section.get("reduce_dtype", "float32")), 4),
        residual_bytes=DTYPE_BYTES.get(str(section.get("residual_dtype", "model"))),
        checkpointing=settings.get("checkpointing", True),
        keep_gathered=section.get("keep_gathered", "recomputed"),
        context_attention=str(section.get("context_attention", "auto")),
        experts=section.get("experts", "auto"),
        offload=section.get("offload", "none"),
        optimizer=settings.get("optimizer", "adamw"),
        pipeline=section.get("schedule"),
        stages_per_rank=section.get("stages_per_rank"),
    )


def _write_best(section: Mapping[str, Any], job: Job, best: Prediction) -> dict[str, Any]:
    """The section with the best grid and the settings chosen with it in the place of `plan`."""
    resolved = {key: value for key, value in section.items() if key != "plan"}
    resolved["grid"] = best.grid.as_dict()
    if best.order != ORDER:
        resolved["order"] = trim_order(best.order, best.grid)
    if best.job.keep_gathered != job.keep_gathered:
        resolved["keep_gathered"] = best.job.keep_gathered
    if best.experts:
        resolved["experts"] = best.experts
    if best.pipelined:
        resolved["schedule"], resolved["stages_per_rank"] = best.job.pipeline_schedule
        resolved["stage_layers"] = [len(layers) for layers in best.pipelined.stages.layers]
    return resolved


def _explain(resolved: Mapping[str, Any], batch: Batch, ranking: GridRanking, unlike: str) -> list[str]:
    """Sentences on the best grid, the batch, nodes that are others and the grid that comes second."""
    best = ranking.best
    kept = f", keep_gathered {best.job.keep_gathered}" if "keep_gathered" in resolved else ""
    kept += f", experts {best.experts}" if best.experts else ""
    order = (
        "" if best.order == ORDER else f" with its axes in the order {', '.join(trim_order(best.order, best.grid))}"
    )
    notes = [
        f"grid: auto is {best.grid}{order}{kept}, {best.total:.3g} s a step predicted, micro-batches: "
        f"{best.micro_batches}."
    ]
    long = too_long(best.job.seq, best.job.shape.max_positions)
    notes += [f"{note}." for note in (batch.note, unlike, long, *best.job.untimed) if note]
    if len(ranking.ranked) > 1:
        second = ranking.ranked[1]
        notes.append(f"second is {second.grid}, {percent(second.total / best.total - 1)} slower.")
    return notes
