"""The command `overlaps`: which members, controls and held-out documents share text."""

import argparse
from itertools import chain

from hf_axonn_eval.cli.common import at_least_one, command, load_tokenizer, pick, say, share
from hf_axonn_eval.cli.samples import add_document_options, all_documents, documents_of


def add(commands) -> None:
    """Add the command."""
    add = command(commands, "overlaps", "find documents of different buckets that share text", run)
    add_document_options(add)
    held_out = "the same of documents that nobody trained on"
    add("--held_out", nargs="+", default=[], reads="documents", help=held_out)
    add("--tokenizer", help="compare token ids, not words; needed for texts beside ids")
    add("--trust_remote_code")
    add("--output", required=True, writes="overlaps", help="JSON file to write")
    add("--drop", writes="ids", help="also write the ids that `samples --drop` should leave out, one a line")
    add("--ngram", type=at_least_one, default=8, help="words, or ids, in a run (default 8)")
    add("--least", type=share, default=0.2, help="containment from which on to report (default 0.2)")
    add("--one_in", type=at_least_one, default=1, help="estimate from one of N runs, to save memory")


def run(arguments: argparse.Namespace) -> None:
    """Write what overlaps and what to drop, and say how much it is."""
    from pathlib import Path

    from hf_axonn_eval.data.jsonl import write_json
    from hf_axonn_eval.data.overlaps import find_overlaps, write_drop

    found = find_overlaps(
        all_documents(arguments),
        chain(*(documents_of(arguments, path, bucket=0) for path in arguments.held_out)),
        tokenizer=load_tokenizer(arguments.tokenizer, arguments) if arguments.tokenizer is not None else None,
        n=arguments.ngram,
        **pick(arguments, "least", "one_in"),
    )
    record = {"inputs": pick(arguments, "documents", "control", "held_out")}
    write_json(Path(arguments.output), {**record, "tokenizer": arguments.tokenizer, **found.record()})
    counts = ", ".join(f"{count} of bucket {bucket}" for bucket, count in found.documents.items())
    say(f"compared {counts}: {arguments.output}")
    for entry in found.by_buckets():
        one, other = entry["buckets"]
        say(f"  {one} and {other}: {entry['pairs']} pairs, largest containment {entry['most_containment']:.2f}")
    say(f"  {len(found.drop)} controls and held-out documents overlap with members")
    if arguments.drop is not None:
        write_drop(found.drop, arguments.drop)
        say(f"  their ids: {arguments.drop}")
