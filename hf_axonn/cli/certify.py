"""`hf-axonn certify`: does a parallel run compute what one process would? Any launch file of Accelerate, in float64.

hf-axonn certify --config accelerate.yaml --model llama
hf-axonn certify --config accelerate.yaml --script "train.py --data rows.jsonl"
hf-axonn certify --config axonn.yaml --model DIR --trainer-args arguments.yaml --steps 3 --output certificate
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path

from hf_axonn.compat.own_code import add_own_code_option


NOT_STARTED = 2


def add_certify(commands) -> None:
    """Register `certify` with the subparsers of main.py."""
    parser = commands.add_parser(
        "certify",
        help="compare a run under a launch file with one process, in float64",
        epilog="Exit code: 0 equal, or different as documented; 1 different; 2 nothing was compared.",
    )
    parser.add_argument("--config", required=True, help="a launch file of Accelerate, with or without axonn_config")
    parser.add_argument(
        "--model", help="a model's directory, its config.json, a model type, or its name on the hub; not with --script"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--trainer-args",
        help="a YAML or JSON file of TrainingArguments, with peft, packing and distributed_config beside them",
    )
    what.add_argument(
        "--script",
        help="your script and its arguments, in quotes: 'train.py --data rows.jsonl'; its model is made small, "
        "its output goes to --output",
    )
    parser.add_argument(
        "--dtype", default="float64", help="in which the ranks compute and are compared: float64, bf16 or fp32"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=3,
        help="optimizer steps; of a model at least 2, as the last one is the uneven end of the epoch",
    )
    add_own_code_option(parser)
    parser.add_argument("--output", help="a new folder, for certificate.json, certificate.html and logs")


def run_certify(options: argparse.Namespace) -> int:
    """`hf-axonn certify`; returns the exit code.

    Raises:
        ValueError: nothing was started.
        OSError: a file cannot be read or written.
    """
    from hf_axonn.certificate.certify import certify

    output = Path(options.output or tempfile.mkdtemp(prefix="certificate-"))
    if bool(options.model) == bool(options.script):
        raise ValueError("give --model, or --script, whose model is the one that it loads.")
    if options.trust_remote_code and options.script:
        raise ValueError("--trust-remote-code is of --model: a script says for itself whether it runs such code.")
    words = ["hf-axonn", "certify", "--config", options.config, "--steps", str(options.steps)]
    if options.trust_remote_code:
        words.append("--trust-remote-code")
    if options.dtype != "float64":
        words += ["--dtype", options.dtype]
    for name in ("model", "trainer_args", "script"):
        if given := getattr(options, name):
            words += [f"--{name.replace('_', '-')}", given]
    arguments = Path(options.trainer_args) if options.trainer_args else None
    try:
        code, screen = certify(
            Path(options.config),
            options.model,
            trainer_args=arguments,
            script=shlex.split(options.script or ""),
            steps=options.steps,
            output=output,
            command_line=words,
            dtype=options.dtype,
            own_code=options.trust_remote_code,
        )
    except RuntimeError as problem:
        print(f"hf-axonn certify: {problem}", file=sys.stderr)
        return NOT_STARTED
    print("\n".join(screen))
    return code
