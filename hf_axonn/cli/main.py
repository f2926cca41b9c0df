"""`hf-axonn`: commands for before a launch, for checkpoints and for bug reports; and the scripts.

    hf-axonn init                           a launch file for this machine, with the grid that a plan ranks first
    hf-axonn finetune --config axonn.yaml   fine-tune a model on a grid; without --config on one process
    hf-axonn demo                           ten minutes: a model that memorizes, and one with the goldfish loss
    hf-axonn study RECIPE                   memorization over model size, repetition and k
    hf-axonn convert CHECKPOINT OUTPUT      a sharded checkpoint becomes an ordinary Hugging Face directory
    hf-axonn verify CHECKPOINT              compare every file with its checksum: 0 complete, 1 not
    hf-axonn env                            versions, devices and links, to paste into a bug report
    hf-axonn doctor --config axonn.yaml     a launch file and a model, before a node-hour is spent: 0 fine, 1 warnings
    hf-axonn certify --config FILE --model MODEL    does a parallel run compute what one process would: 0 yes, 1 no
    hf-axonn survey MODEL                   how a type is sharded, and whether eight grids compute the same: 0 so
    hf-axonn plan                           the grid for a model, a machine and a number of GPUs
    hf-axonn bench-links --output FILE      measure this machine for a plan; under torchrun, on many processes
    hf-axonn kit --have FILE                the wheels that a machine without a network needs beside what it has

Bad input ends with exit code 2 and a message.
"""

from __future__ import annotations

import argparse
import math
import sys

from hf_axonn.cli.certify import add_certify, run_certify
from hf_axonn.cli.doctor import add_doctor, run_doctor
from hf_axonn.cli.init import add_init, run_init
from hf_axonn.cli.kit import add_kit, run_kit
from hf_axonn.cli.plan import add_bench_links, add_plan, run_bench_links, run_plan
from hf_axonn.cli.scripts import SCRIPTS, run_script
from hf_axonn.cli.survey import add_survey, run_survey
from hf_axonn.compat.arguments import Parser
from hf_axonn.compat.completion import add_completion


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    about = "Launch files, plans, checkpoints and bug reports of hf_axonn."
    parser = Parser(prog="hf-axonn", description=about)
    add_completion(parser)
    commands = parser.add_subparsers(dest="command", required=True)
    add_init(commands)
    for name, (_, about_it) in SCRIPTS.items():
        commands.add_parser(name, help=about_it, add_help=False)
    convert = commands.add_parser("convert", help="make an ordinary Hugging Face directory of a sharded checkpoint")
    convert.add_argument("checkpoint", help="a directory that training on a grid wrote")
    convert.add_argument("output", help="a new directory")
    convert.add_argument(
        "--max-shard-gb", type=float, default=5.0, help="most gigabytes (2**30 bytes) of one safetensors file"
    )
    verify = commands.add_parser("verify", help="check that a sharded checkpoint is complete and unchanged")
    verify.add_argument("checkpoint")
    commands.add_parser("env", help="print versions, devices and links, for a bug report")
    add_doctor(commands)
    add_certify(commands)
    add_survey(commands)
    add_plan(commands)
    add_bench_links(commands)
    add_kit(commands)
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0] in SCRIPTS:  # their options are their own
        return run_script(words[0], words[1:])
    options = parser.parse_args(words)
    try:
        run = {
            "init": run_init,
            "convert": _convert,
            "verify": _verify,
            "env": _env,
            "doctor": run_doctor,
            "certify": run_certify,
            "survey": run_survey,
            "plan": run_plan,
            "bench-links": run_bench_links,
            "kit": run_kit,
        }
        return run[options.command](options)
    except (ValueError, OSError) as problem:
        print(f"hf-axonn {options.command}: {problem}", file=sys.stderr)
        return 2


def _convert(options: argparse.Namespace) -> int:
    from pathlib import Path

    from hf_axonn.checkpoint.export import export_hf

    if not 0 < options.max_shard_gb < math.inf:
        raise ValueError(f"--max-shard-gb is {options.max_shard_gb}: give a number above 0.")
    export_hf(options.checkpoint, options.output, shard_bytes=int(options.max_shard_gb * 2**30))
    print(f"{options.output} holds the model: AutoModelForCausalLM.from_pretrained({options.output!r})")
    if not Path(options.output, "config.json").is_file():
        print(f"{options.checkpoint} has no config.json, as FSDP writes none: copy that of the model to it.")
    if code := sorted(path.name for path in Path(options.checkpoint).glob("*.py")):
        print(f"code that came with the model is left out: read {', '.join(code)}, and copy what is to run.")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from pathlib import Path

    from hf_axonn.checkpoint.manifest import find_problems, read_manifest

    if not Path(options.checkpoint).is_dir():
        raise ValueError(f"{options.checkpoint} is not a directory.")
    try:
        manifest = read_manifest(options.checkpoint)
    except ValueError as problem:
        print(problem)
        return 1
    problems = find_problems(options.checkpoint, manifest)
    for line in problems:
        print(line)
    if problems:
        print(f"{options.checkpoint} is damaged: {len(problems)} problem(s). Resume from another checkpoint.")
        return 1
    print(
        f"{options.checkpoint} is complete: {len(manifest.files)} files, {manifest.nbytes:,} bytes, written on "
        f"{manifest.grid}"
    )
    return 0


def _env(_options: argparse.Namespace) -> int:
    from hf_axonn.cli.env import environment_report

    for line in environment_report():
        print(line)
    return 0
