"""`hf-axonn survey`: the plan of a model's blocks, in a table or not, and its certificates on eight kinds of grids.

hf-axonn survey olmo2
hf-axonn survey DIR --grids x2,x2y2 --output survey
hf-axonn survey DIR --trust-remote-code

A type that Transformers has added, or that comes with code of its own, is planned by the general rules, as under
`allow_untested: true`, made small, and trained on each grid and on one process in float64 (`hf-axonn certify`).
"""

from __future__ import annotations

import argparse
import contextlib
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from hf_axonn.compat.own_code import add_own_code_option, register_code
from hf_axonn.topology.grid import Grid


if TYPE_CHECKING:
    from hf_axonn.architectures.plan import ShardingPlan


GRIDS = {
    "x2": Grid(x=2),
    "y2": Grid(y=2),
    "z2": Grid(z=2),
    "data2": Grid(data=2),
    "x2y2": Grid(x=2, y=2),
    "x2z2": Grid(x=2, z=2),
    "y2z2": Grid(y=2, z=2),
    "x2y2z2": Grid(x=2, y=2, z=2),
}
STEPS = 2
EQUAL, DIFFERENT, NOT_STARTED = 0, 1, 2
ABOUT = re.compile(r": (the run |from step )")  # of a line of a certificate on what differs, or does not run
VERDICTS = {EQUAL: "equal", DIFFERENT: "DIFFERENT", NOT_STARTED: "not compared"}


def add_survey(commands) -> None:
    """Register `survey` with the subparsers of main.py."""
    parser = commands.add_parser(
        "survey",
        help="print how a type of model is sharded, and compare a small one with one process on eight grids",
        epilog="Exit code: 0 planned and equal on every grid; 1 no plan, or different; 2 not compared.",
    )
    parser.add_argument("model", help="a model type, a model's directory, its config.json, or its name on the hub")
    parser.add_argument("--grids", default=",".join(GRIDS), help="some of the eight, separated by commas")
    add_own_code_option(parser)
    parser.add_argument("--output", help="a new folder, for a certificate of each grid")


def run_survey(options: argparse.Namespace) -> int:
    """`hf-axonn survey`; returns the exit code.

    Raises:
        ValueError: nothing was started.
        OSError: a file cannot be read or written.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from hf_axonn.architectures.plan import plan_for
    from hf_axonn.certificate.certify import make_new_folder
    from hf_axonn.certificate.shrinking import config_of

    names = options.grids.split(",")
    if wrong := [name for name in names if name not in GRIDS]:
        raise ValueError(f"--grids: {wrong[0]} is none of {', '.join(GRIDS)}.")
    if len(names) > len(set(names)):
        raise ValueError(f"--grids: {max(names, key=names.count)} is given twice: leave one out.")
    output = Path(options.output or tempfile.mkdtemp(prefix="survey-"))
    make_new_folder(output)
    if options.trust_remote_code:
        register_code(options.model)
    config = config_of(options.model)
    with torch.device("meta"):
        plan = plan_for(AutoModelForCausalLM.from_config(config), allow_untested=True)
    print("\n".join([f"{config.model_type}: {plan.summary()}", *_describe(plan)]))
    if plan.reason:
        return DIFFERENT
    with tempfile.TemporaryDirectory(dir=output, prefix=".truths-") as truths:
        codes = [
            _certify(options.model, name, output / name, Path(truths), own_code=options.trust_remote_code)
            for name in names
        ]
    print(f"equal to one process on {codes.count(EQUAL)} of {len(names)} grids")
    if not any(codes) and plan.untested:
        print("To train it so, write allow_untested: true into axonn_config of the launch file.")
        if not options.trust_remote_code and set(names) == set(GRIDS):
            print(f'It can stand among CHECKED of hf_axonn/architectures/table.py as "{config.model_type}".')
    return max(codes)


def _describe(plan: ShardingPlan) -> Iterator[str]:
    """Yield a line for each kind of block, and for each kind of module that gets full sequences, in the layers."""
    lines: dict[str, None] = {}
    for block in plan.blocks:
        columns = " ".join(_within(name, plan.layers) for name in block.columns)
        heads = f" ({block.query} query and {block.kv} kv heads)" if block.query else ""
        lines[f"  {columns} -> {_within(block.row, plan.layers)}{heads}"] = None
    for name, reason in plan.full_sequence.items():
        lines[f"  {_within(name, plan.layers)} gets full sequences: {reason}"] = None
    yield from lines


def _within(name: str, layers: Sequence[str]) -> str:
    layer = next(layer for layer in layers if name.startswith(f"{layer}."))
    return name.removeprefix(f"{layer}.")


def _certify(model: str, name: str, folder: Path, truths: Path, *, own_code: bool) -> int:
    """Certify a small model on one grid, print a line, and return the exit code. The run on one process is that of the
    first grid with as many positions, if the model is as small."""
    from hf_axonn.certificate.certify import certify

    grid = GRIDS[name]
    folder.mkdir(parents=True)
    settings = {"distributed_type": "MULTI_GPU", "num_processes": grid.size, "use_cpu": True, "mixed_precision": "no"}
    settings["axonn_config"] = {"grid": grid.as_dict(), "allow_untested": True}
    launch = folder / "launch.yaml"
    launch.write_text(yaml.safe_dump(settings), encoding="utf-8")
    words = ["hf-axonn", "certify", "--config", str(launch), "--model", model, "--steps", str(STEPS)]
    words += ["--trust-remote-code"] if own_code else []
    report, why = folder / "report", ""
    try:
        with (folder / "log.txt").open("w", encoding="utf-8") as log, contextlib.redirect_stdout(log):
            code, screen = certify(
                launch,
                model,
                trainer_args=None,
                script=[],
                steps=STEPS,
                output=report,
                command_line=words,
                own_code=own_code,
                truths=truths,
            )
            log.write("\n".join(screen))
        label = "does not run" if "DOES NOT RUN" in screen[0] else VERDICTS[code]
        why = next((line.strip() for line in screen if ABOUT.search(line)), "") if code else ""
    except (RuntimeError, ValueError) as problem:
        code, label, why = NOT_STARTED, VERDICTS[NOT_STARTED], re.sub(r"\s+", " ", str(problem))
    print(f"  {name:<8}{label:<14}{why or report}", flush=True)
    return code
