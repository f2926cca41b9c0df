"""The commands `report` and `compare`: put models beside each other."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_axonn_eval.cli.common import (
    at_least_one,
    check_asked,
    command,
    load_tokenizer,
    pick,
    read_runs,
    read_settings,
    say,
    show,
)
from hf_axonn_eval.cli.samples import add_document_options, all_documents


RECORDED = "recorded"  # --goldfish without settings


def add(commands) -> None:
    """Add the two commands."""
    add = command(commands, "report", "a report on one model or several: table, Markdown, JSON, HTML page", run_report)
    for option in ("--runs", "--base", "--lengths"):
        add(option)
    files = "directory for report.html, report.md, summary.json, plot.png"
    add("--output", required=True, writes="report", help=files)
    add("--samples", help="what `samples` wrote: the HTML page then shows prefixes")
    add(
        "--tokenizer",
        needs=("--samples",),
        help="to show tokens as text (default: that of the base run, if it is there)",
    )
    add("--trust_remote_code")
    add("--examples", type=at_least_one, default=4, help="texts shown of every bucket (default 4)")
    add("--title", metavar="TEXT", help="heading of the report (default: the names of runs and models)")
    grids = "runs of these models at several offsets and prefix lengths, for the grids of both (default: --runs)"
    add("--offset_runs", reads="run", nargs="+", metavar="NAME=DIR", help=grids)
    mask = "the mask of training, such as strategy=hash-table,k=4,context_width=13 (without: that of training records)"
    add("--goldfish", nargs="?", const=RECORDED, metavar="MASK", help=mask)
    for unit in ("queries", "tokens"):
        add(f"--budget_{unit}", type=at_least_one, nargs="+", default=(), help=f"what so many {unit} extract")
    add_document_options(add, required=False)
    add("--confidence")

    add = command(commands, "compare", "the differences of models from a base model, and tests of them", run_compare)
    for option in ("--runs", "--base", "--lengths"):
        add(option)
    add("--output", writes="comparison", help="write them: Markdown for a name that ends in .md, else JSON")
    add("--confidence")


def run_report(arguments: argparse.Namespace) -> None:
    """Show the table, and write the files of the report."""
    from hf_axonn_eval.analysis.goldfish_tokens import recorded_mask
    from hf_axonn_eval.analysis.summary import choose_base
    from hf_axonn_eval.data.samples import read_samples
    from hf_axonn_eval.report.write import write_report

    goldfish: dict[str, Any] = {}
    if arguments.goldfish not in (None, RECORDED):
        kinds = {"strategy": str, "k": int, "context_width": int, "table": str}
        goldfish = read_settings("--goldfish", arguments.goldfish, kinds, "strategy=hash-table,k=4,context_width=13")
    for option, given in (
        ("--goldfish", arguments.goldfish is not None),
        ("--documents", arguments.documents or arguments.control),
    ):
        if given and arguments.samples is None:
            raise ValueError(f"{option} needs the samples of the runs: give --samples, too.")
    runs, records = read_runs(arguments.runs)
    if arguments.goldfish == RECORDED:
        goldfish = recorded_mask(records)
    samples = tokenizer = None
    if arguments.samples is not None:
        samples = read_samples(arguments.samples)
        check_asked(samples, records, arguments.samples)
        tokenizer = _tokenizer(arguments, records[choose_base(records, arguments.base)])
        if tokenizer is not None:
            _check_texts(arguments.samples, tokenizer)
    offset_runs = read_runs(arguments.offset_runs)[0] if arguments.offset_runs else None
    attacks, books = _attacks(arguments, runs, samples, tokenizer, goldfish)
    comparison = show(runs, arguments, records=records, **pick(arguments, "base", "lengths"))
    paths = write_report(
        {**comparison, **attacks},
        arguments.output,
        runs=runs,
        samples=samples,
        tokenizer=tokenizer,
        books=books,
        offset_runs=offset_runs,
        **pick(arguments, "examples", "title"),
    )
    for path in paths.values():
        say(path)


def _proxies(pairs: Sequence[str]) -> dict[str, Any]:
    """Read the runs of proxies that `extract --proxy` left in those of models, by the names of the latter."""
    from hf_axonn_eval.data.results import PROXY, RECORD, read_run

    folders = {name: Path(directory) / PROXY for name, _, directory in (pair.partition("=") for pair in pairs)}
    return {name: read_run(folder)[1] for name, folder in folders.items() if (folder / RECORD).exists()}


def _check_texts(path: str, tokenizer: Any) -> None:
    """Raise ValueError if the samples are known to be of another tokenizer: the page would show other words."""
    from hf_axonn_eval.data.samples import read_about
    from hf_axonn_eval.data.tokenizer_identity import tokenizer_identity

    made_with, own = (read_about(path) or {}).get("tokenizer"), tokenizer_identity(tokenizer)
    if isinstance(made_with, dict) and own is not None and own["sha256"] != made_with["sha256"]:
        raise ValueError(
            f"{path} was made with the tokenizer {made_with.get('path')} (sha256 {made_with['sha256']}), and "
            f"{own['path']} is another one (sha256 {own['sha256']}): the page would show other words. Name the first "
            "with --tokenizer."
        )


def _attacks(
    arguments: argparse.Namespace,
    runs: Mapping[str, Sequence[Any]],
    samples: Any,
    tokenizer: Any,
    goldfish: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the numbers of attacks, as entries of the comparison, and the books for maps."""
    from hf_axonn_eval.analysis.attack_cost import attack_cost
    from hf_axonn_eval.analysis.coverage import book_coverage, books
    from hf_axonn_eval.analysis.goldfish_tokens import goldfish_tokens, token_masks
    from hf_axonn_eval.analysis.proxy import split_by_proxy

    budgets = {"queries": arguments.budget_queries, "tokens": arguments.budget_tokens}
    costs = {name: attack_cost(results, **budgets, confidence=arguments.confidence) for name, results in runs.items()}
    if any(budgets.values()) and not any(costs.values()):
        raise ValueError("--budget_queries and --budget_tokens need the chance of a draw: extract with --sampler.")
    found: dict[str, Any] = {"attack_cost": costs}
    if proxies := _proxies(arguments.runs):
        found["proxy"] = split_by_proxy(runs, proxies, confidence=arguments.confidence)
    if goldfish:
        masks = token_masks(samples, **goldfish)
        found["goldfish_tokens"] = goldfish_tokens(runs, masks, confidence=arguments.confidence)
    if not (arguments.documents or arguments.control):
        return found, None
    if tokenizer is None:
        raise ValueError("--documents needs the tokenizer of the samples: give --tokenizer.")
    shown = books(runs, samples, all_documents(arguments), tokenizer=tokenizer)
    found["coverage"] = book_coverage(shown)
    if not any(shown.values()):
        raise ValueError(
            "no document has samples at several places, so there is no coverage: leave --documents out, or make "
            "samples with a sliding window, such as --protocol cooper100."
        )
    return found, shown


def run_compare(arguments: argparse.Namespace) -> None:
    """Show the differences, and write them if asked."""
    from rich.console import Console

    from hf_axonn_eval.analysis.summary import compare
    from hf_axonn_eval.data.jsonl import json_text, replacing
    from hf_axonn_eval.report.write import markdown, terminal_differences

    runs, records = read_runs(arguments.runs)
    if len(runs) < 2:
        raise ValueError("compare needs two runs or more: --runs base=DIR trained=DIR.")
    comparison = compare(runs, records=records, **pick(arguments, "base", "lengths", "confidence"))
    for table in terminal_differences(comparison):
        Console().print(table)
    if arguments.output is not None:
        output = Path(arguments.output)
        text = markdown(comparison) if output.suffix == ".md" else json_text(comparison)
        with replacing(output) as file:
            file.write(text.encode())
        say(output)


def _tokenizer(arguments: argparse.Namespace, record: dict):
    """Load the tokenizer that was named, else that of the run if it is still there, else None."""
    path = arguments.tokenizer or record.get("model", {}).get("tokenizer")
    if arguments.tokenizer is None and (path is None or not Path(path).is_dir()):
        return None
    return load_tokenizer(path, arguments)
