"""The command `canaries`: put synthetic secrets into training data, and rank them by a model."""

import argparse

from hf_axonn_eval.cli.common import add_model_options, at_least_one, command, from_zero, load, pick, say


def add(commands) -> None:
    """Add the two commands."""
    summary = "put synthetic secrets into training data, and rank them by a model"
    parser = commands.add_parser("canaries", help=summary, description=summary)
    parts = parser.add_subparsers(required=True, metavar="make | rank")
    add = command(parts, "make", "draw canaries and candidates, and put the canaries into training data", make)
    add("--format", default="The random number is {digits:9}.", metavar="TEXT", help="fields: digits, letters, hex")
    add("--insertions", type=from_zero, nargs="+", default=[0, 1, 4, 16], help="0: controls (0 1 4 16)")
    add("--each", type=at_least_one, default=4, help="canaries for each number of insertions (default 4)")
    add("--candidates", type=at_least_one, default=10_000, help="texts to rank among (default 10000)")
    data = "training data, JSON lines; a copy with the canaries is written"
    add("--documents", reads="documents", metavar="FILE", help=data)
    add("--id_key", needs=("--documents",), help="field for the id of a canary in the copy")
    add("--text_key", needs=("--documents",), help="field with the text")
    add("--seed", type=int, default=0, help="of the draws (default 0)")
    add("--output", required=True, writes="canaries", help="for canaries.json, candidates.jsonl and documents.jsonl")
    add = command(parts, "rank", "exposure of the canaries in one model", rank)
    add("--canaries", required=True, reads="canaries", help="what `canaries make` wrote")
    add("--output", required=True, writes="ranks", help="JSON file to write")
    add_model_options(add)
    add("--batch_size", type=at_least_one, default=8, help="texts in a forward pass (default 8)")
    add("--add_special_tokens", action="store_true", help="begin texts with the tokenizer's BOS, as training did")


def make(arguments: argparse.Namespace) -> None:
    """Write the canaries, and the training data with them."""
    from pathlib import Path

    from hf_axonn_eval.canaries.generate import insert_canaries, make_canaries, write_canaries

    canaries = make_canaries(arguments.format, **pick(arguments, "insertions", "each", "candidates", "seed"))
    output = Path(arguments.output)
    if arguments.documents is not None:
        copy = output / "documents.jsonl"
        added = insert_canaries(arguments.documents, copy, canaries, **pick(arguments, "id_key", "text_key"))
        say(f"{added} lines added to a copy of {arguments.documents}: {copy}")
    write_canaries(canaries, output)
    kind = "all" if canaries.complete else "a random sample of"
    say(
        f"{len(canaries.canaries)} canaries and {len(canaries.candidates)} candidates, {kind} the {canaries.space} "
        f"texts of this format: {output}"
    )


def rank(arguments: argparse.Namespace) -> None:
    """Write the ranks, and show the exposure by number of insertions."""
    from pathlib import Path

    from hf_axonn_eval.canaries.generate import read_canaries
    from hf_axonn_eval.canaries.rank import rank_canaries, ranking_record
    from hf_axonn_eval.data.jsonl import write_json

    canaries = read_canaries(arguments.canaries)
    loaded = load(arguments)
    options = pick(arguments, "add_special_tokens", "batch_size")
    ranked = rank_canaries(loaded.model, loaded.tokenizer, canaries, **options)
    if not ranked:  # not rank 0
        return
    record = ranking_record(ranked, canaries, loaded.record)
    output = Path(arguments.output)
    write_json(output, record)
    _show(record)
    say(output)


def _show(record: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"exposure in bits, at most {record['highest_exposure']:.2f}; a control has 1.44 on average")
    for column in ("times trained on", "canaries", "rank 1", "mean", "least", "most"):
        table.add_column(column, justify="right")
    for count, group in record["by_insertions"].items():
        numbers = [f"{group[f'{name}_exposure']:.2f}" for name in ("mean", "least", "most")]
        table.add_row(count, str(group["canaries"]), str(group["first"]), *numbers)
    Console().print(table)
    fit = record["canaries"][0]
    if fit["fit_refused"] is not None:
        say(f"no fitted exposure: {fit['fit_refused']}")
    elif fit["fit_p"] is not None and fit["fit_p"] < 0.05:
        say(
            f"the candidates are not skew-normal (Kolmogorov-Smirnov, p = {fit['fit_p']:.1g}): a fitted_exposure "
            "above highest_exposure is no evidence"
        )
