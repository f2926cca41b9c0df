"""A job from what people write: on the command line of `hf-axonn plan`, or in a launch file with `grid: auto`.

    axonn_config:
      grid: auto
      plan: {model: my-model, machine: dgx-h100, batch_tokens: 4M, seq: 4096}

The launcher replaces both by the grid that the planner ranks first, and says which one and what comes second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from hf_axonn.planner.machine import load_machine
from hf_axonn.planner.model.catalog import load_shape
from hf_axonn.planner.model.stack import Stack
from hf_axonn.planner.predict import Job
from hf_axonn.planner.search import plan
from hf_axonn.topology.axis_order import ORDER, check_order


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
PRECISION_BYTES = {"fp32": 4, "bf16": 2}
SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}
NEEDED = ("model", "machine", "batch_tokens", "seq")
OPTIONAL = ("checkpointing", "weights")
PLAN_EXAMPLE = "plan: {model: DIRECTORY, machine: dgx-h100, batch_tokens: 4M, seq: 4096}"
NEAR = 0.01  # a batch this near to a power of two of sequences is meant to be it


def number(text: Any) -> int:
    """An integer, or a number with the suffix k, M, G or B for 10**3, 10**6 and 10**9: 16.8M.

    Raises:
        ValueError: it is none, or below 1.
    """
    words = str(text)
    factor = SUFFIXES.get(words[-1:].lower(), 1)
    try:
        value = round(float(words[:-1] if factor > 1 else words) * factor)
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is not a number such as 4096 or 16.8M.") from None
    if value < 1 or isinstance(text, bool):
        raise ValueError(f"{text!r} is not a number of at least 1.")
    return value


def sequences_of(batch_tokens: int, seq: int) -> int:
    """Sequences of a batch: 16.8M tokens of 2048 are 8192 sequences, the power of two that is within NEAR."""
    count = max(1, round(batch_tokens / seq))
    if batch_tokens % seq == 0:
        return count
    powers = (2 ** (count.bit_length() - 1), 2 ** count.bit_length())
    near = min(powers, key=lambda size: abs(size - count))
    return near if abs(near - count) <= NEAR * near else count


def make_job(
    model: str,
    machine: str,
    batch_tokens: int,
    seq: int,
    *,
    read: Callable[[str], Stack] = load_shape,
    **settings: Any,
) -> Job:
    """A job of names and numbers; `settings` are those of `Job`, and `read` gives the shape of a model.

    Raises:
        ValueError: no such model or machine, or a wrong setting.
    """
    return Job(
        shape=read(model),
        machine=load_machine(machine),
        sequences=sequences_of(batch_tokens, seq),
        seq=seq,
        **settings,
    )


def resolve_auto(
    section: Mapping[str, Any],
    num_processes: int,
    *,
    mixed_precision: str,
    read: Callable[[str], Stack] = load_shape,
) -> tuple[dict[str, Any], list[str]]:
    """The section `axonn_config` with `grid: auto` replaced by sizes, and what to tell the user.

    Args:
        section: as it stands in the launch file; returned as it is where it has neither `grid: auto` nor `plan`.
        num_processes: ranks of the grid.
        mixed_precision: no, bf16 or fp16, for the bytes of activations.
        read: gives the shape of a model by its name.
    Raises:
        ValueError: `plan` is missing, wrong, or stands beside sizes; or no grid fits.
    """
    auto = section.get("grid") == "auto"
    if not auto and "plan" not in section:
        return dict(section), []
    if not auto:
        raise ValueError("axonn_config.plan says how to choose a grid: write grid: auto beside it, or remove it.")
    given = section.get("plan")
    if not isinstance(given, Mapping):
        raise ValueError(
            "axonn_config.grid is auto, but there is no plan that says for what: write the sizes of the grid, or "
            f"{PLAN_EXAMPLE} beside it."
        )
    for key in given:
        if key not in NEEDED + OPTIONAL:
            near = get_close_matches(str(key), NEEDED + OPTIONAL, n=1)
            raise ValueError(
                f"axonn_config.plan has an unknown key {key!r}; it may hold {', '.join(NEEDED + OPTIONAL)}: "
                + (f"did you mean {near[0]}?" if near else "remove it.")
            )
    missing = [key for key in NEEDED if key not in given]
    if missing:
        raise ValueError(f"axonn_config.plan has no {', '.join(missing)}: write it as in {PLAN_EXAMPLE}.")
    checkpointing, weights = given.get("checkpointing", True), given.get("weights", "fp32")
    if not isinstance(checkpointing, bool):
        raise ValueError(f"axonn_config.plan.checkpointing is {checkpointing!r}: write true or false.")
    if not isinstance(weights, str) or weights not in PRECISION_BYTES:
        raise ValueError(f"axonn_config.plan.weights is {weights!r}, but it is one of {', '.join(PRECISION_BYTES)}.")
    try:
        job = make_job(
            str(given["model"]),
            str(given["machine"]),
            number(given["batch_tokens"]),
            number(given["seq"]),
            read=read,
            compute_bytes=2 if mixed_precision in ("bf16", "fp16") else PRECISION_BYTES[weights],
            param_bytes=PRECISION_BYTES[weights],
            reduce_bytes=DTYPE_BYTES.get(str(section.get("reduce_dtype", "float32")), 4),
            residual_bytes=DTYPE_BYTES.get(str(section.get("residual_dtype", "model"))),
            checkpointing=checkpointing,
        )
        order = check_order(section["order"]) if "order" in section else None
        found = plan(job, num_processes, order=order)
        best = found.best
    except (ValueError, OSError) as error:  # OSError: of a name that no file can have
        raise ValueError(f"axonn_config.plan: {error}") from None
    resolved = {key: value for key, value in section.items() if key != "plan"}
    resolved["grid"] = best.grid.as_dict()
    if best.order != ORDER:
        resolved["order"] = list(best.order)
    lying = "" if best.order == ORDER else f" with its axes in the order {', '.join(best.order)}"
    notes = [
        f"grid: auto is {best.grid}{lying}, {best.total:.3g} s a step predicted, {best.micro_batches} micro-batch(es)."
    ]
    if len(found.ranked) > 1:
        second = found.ranked[1]
        notes.append(f"second is {second.grid}, {second.total / best.total - 1:.1%} slower.")
    return resolved, notes
