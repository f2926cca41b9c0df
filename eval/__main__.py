r"""Command line: hf-axonn-eval COMMAND; samples, extract and report are the way from documents to a report.

    hf-axonn-eval samples --documents docs.jsonl --tokenizer DIR --output samples.jsonl
    hf-axonn-eval extract --model BASE --samples samples.jsonl --output runs/base
    accelerate launch --config axonn.yaml -m hf_axonn_eval extract \
        --model CHECKPOINT --samples samples.jsonl --output runs/trained
    hf-axonn-eval report --runs base=runs/base trained=runs/trained --output runs/report
"""

import io
import logging
import os
import sys
from collections.abc import Sequence

from hf_axonn.compat.arguments import Parser
from hf_axonn.compat.completion import add_completion
from hf_axonn.compat.extras import lacking
from hf_axonn_eval.cli import bundle as cli_bundle
from hf_axonn_eval.cli import canaries as cli_canaries
from hf_axonn_eval.cli import export as cli_export
from hf_axonn_eval.cli import extract as cli_extract
from hf_axonn_eval.cli import overlaps as cli_overlaps
from hf_axonn_eval.cli import report as cli_report
from hf_axonn_eval.cli import samples as cli_samples
from hf_axonn_eval.cli import tokens as cli_tokens
from hf_axonn_eval.cli.common import check_files, check_needs
from hf_axonn_eval.data.visible import visible


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Exit code 0; 1 if `verify` finds a contradiction; 2 with a message on stderr for bad input, or
    where the extra `eval` is not installed.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: not every terminal can show every name
    arguments = _parser().parse_args(argv)
    arguments.own_process = argv is None
    first = os.environ.get("RANK", "0") == "0"  # what libraries warn of is the same on every rank
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING if first else logging.ERROR)
    try:
        check_needs(arguments)
        check_files(arguments)
        code: int | None = arguments.command(arguments)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        reason = lacking("eval") if isinstance(error, ModuleNotFoundError) else str(error)
        if arguments.debug or not reason:
            raise
        # what is wrong is wrong on every rank; one a machine says so
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("error:", visible(reason, keep="\n"), file=sys.stderr)
        return 2
    finally:
        _leave_distributed()
    return code or 0


def _leave_distributed() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _parser() -> Parser:
    parser = Parser(
        prog="hf-axonn-eval",
        description="Measure how much of its training data a causal language model reproduces verbatim.",
        epilog="docs/evaluation.md defines every metric.",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    add_completion(parser)
    commands = parser.add_subparsers(
        required=True,
        metavar="samples | overlaps | extract | report | compare | tokens | canaries | bundle | verify | export",
    )
    for part in (cli_samples, cli_overlaps, cli_extract, cli_report, cli_tokens, cli_canaries, cli_bundle, cli_export):
        part.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
