"""The commands `report` and `compare`: put models beside each other."""

import argparse
from collections.abc import Callable
from pathlib import Path

from hf_axonn_eval.cli.common import add_interval_options, at_least_one, command, read_runs, say, show


def add(commands) -> None:
    """Say what the commands take."""
    add = command(commands, "report", "a report on one model or several: table, Markdown, JSON, HTML page", run_report)
    _add_runs(add)
    add("--output", required=True, metavar="DIR", help="directory for report.html, report.md, summary.json, plot.png")
    add("--samples", metavar="FILE", help="what `samples` wrote: the HTML page then shows prefixes")
    add("--tokenizer", metavar="DIR", help="to show tokens as text (default: that of the base run, if it is there)")
    add("--examples", type=at_least_one, default=4, metavar="N", help="texts shown of every bucket (default 4)")
    add("--title", default="Extraction", metavar="TEXT", help="heading of the HTML page")
    add_interval_options(add)

    add = command(commands, "compare", "the differences of models from a base model, and tests of them", run_compare)
    _add_runs(add)
    add("--output", metavar="FILE", help="write them: Markdown for a name that ends in .md, else JSON")
    add_interval_options(add)


def run_report(arguments: argparse.Namespace) -> None:
    """Show the table, and write the files of the report."""
    from hf_axonn_eval.data.samples import read_samples, samples_digest
    from hf_axonn_eval.report.write import write_report

    runs, records = read_runs(arguments.runs)
    options = {"lengths": arguments.lengths, "records": records, "base": arguments.base}
    samples = tokenizer = None
    if arguments.samples is not None:
        samples = read_samples(arguments.samples)
        asked = {record["identity"]["samples_sha256"] for record in records.values()}
        if asked != {samples_digest(samples)}:
            raise ValueError(
                f"{arguments.samples} is not what the runs were asked: its sha256 is {samples_digest(samples)}, "
                f"theirs {', '.join(sorted(asked))}."
            )
        base = arguments.base or ("base" if "base" in records else next(iter(records)))
        tokenizer = _tokenizer(arguments.tokenizer, records.get(base, {}))
    comparison = show(runs, arguments, **options)
    paths = write_report(
        comparison,
        arguments.output,
        runs=runs,
        samples=samples,
        tokenizer=tokenizer,
        examples=arguments.examples,
        title=arguments.title,
    )
    for path in paths.values():
        say(path)


def run_compare(arguments: argparse.Namespace) -> None:
    """Show the differences, and write them if asked."""
    from rich.console import Console

    from hf_axonn_eval.analysis.summary import compare
    from hf_axonn_eval.data.jsonl import json_text, replacing
    from hf_axonn_eval.report.write import markdown, terminal_differences

    runs, records = read_runs(arguments.runs)
    if len(runs) < 2:
        raise ValueError("compare needs two runs or more: --runs base=DIR trained=DIR.")
    comparison = compare(
        runs,
        records=records,
        base=arguments.base,
        lengths=arguments.lengths,
        confidence=arguments.confidence,
    )
    for table in terminal_differences(comparison):
        Console().print(table)
    if arguments.output is not None:
        output = Path(arguments.output)
        text = markdown(comparison) if output.suffix == ".md" else json_text(comparison)
        with replacing(output) as file:
            file.write(text.encode())
        say(output)


def _add_runs(add: Callable) -> None:
    add("--runs", required=True, nargs="+", metavar="NAME=DIR", help="outputs of `extract`, the untrained model first")
    add("--base", metavar="NAME", help="run that the others are compared with (default: base, or the first)")
    add("--lengths", type=at_least_one, nargs="+", default=(), metavar="N", help="also verbatim for suffixes cut to N")


def _tokenizer(named: str | None, record: dict):
    """The tokenizer that was named, else that of the run if it is still there, else None."""
    from hf_axonn_eval.extraction.load_model import load_tokenizer

    path = named or record.get("model", {}).get("tokenizer")
    if named is None and (path is None or not Path(path).is_dir()):
        return None
    return load_tokenizer(path)
