"""The command `tokens`: the log-probability of every suffix token of a run, as Parquet or NPZ."""

import argparse
from typing import Any

from hf_axonn_eval.cli.common import check_asked, command, say


def add(commands: Any) -> None:
    """Add the command."""
    add = command(commands, "tokens", "write the log-probability of every suffix token of a run", run)
    add("--run", required=True, reads="run", help="output of `extract`")
    add("--output", required=True, writes="tokens", help="a name that ends in .parquet or .npz")
    add("--samples", help="what `samples` wrote: also the ids of the tokens")


def run(arguments: argparse.Namespace) -> None:
    """Write the file."""
    from hf_axonn_eval.data.results import read_run
    from hf_axonn_eval.data.samples import SampleFile
    from hf_axonn_eval.data.token_file import write_tokens

    record, results = read_run(arguments.run)
    samples = None
    if arguments.samples is not None:
        samples = SampleFile(arguments.samples)
        check_asked(samples, {arguments.run: record}, arguments.samples)
    count = write_tokens(results, arguments.output, samples=samples)
    say(f"{count:,} tokens of {len(results):,} samples: {arguments.output}")
