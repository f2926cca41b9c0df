"""The command `samples`: cut documents into prefixes and suffixes."""

import argparse
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from hf_axonn_eval.cli.common import at_least_one, command, say
from hf_axonn_eval.data.protocols import PROTOCOLS, changed_sampling, protocol
from hf_axonn_eval.data.windows import COMBINE, KINDS, STRIDE_UNITS, Sampling


_SETTINGS = (
    "prefix_length",
    "suffix_length",
    "offset",
    "combine",
    "shared_suffix",
    "max_tokens",
    "stride",
    "stride_unit",
    "min_document_tokens",
    "max_document_tokens",
    "max_documents",
    "add_special_tokens",
    "deduplicate",
)


def add(commands) -> None:
    """Say what the command takes."""
    add = command(commands, "samples", "cut documents into prefixes and suffixes", run)
    flag = argparse.BooleanOptionalAction
    add_document_options(add)
    add("--drop", metavar="FILE", help="leave out the documents with these ids, one a line, as `overlaps` writes them")
    add("--tokenizer", required=True, metavar="DIR", help="the tokenizer of the models that are to be measured")
    add("--output", required=True, metavar="FILE", help="samples file to write")
    add("--protocol", choices=PROTOCOLS, help="a published way of asking; options below change it")
    add("--sampling", choices=KINDS, help="where to cut (default offsets; a protocol says it itself)")
    add("--prefix_length", type=at_least_one, nargs="+", metavar="N", help="tokens shown (default 32)")
    add("--suffix_length", type=at_least_one, nargs="+", metavar="N", help="tokens asked for (default 32)")
    add("--offset", type=int, nargs="+", metavar="N", help="tokens before the prefix; a sample for each (default 0)")
    add("--combine", choices=COMBINE, help="several lengths and offsets: each with each, or one changed at a time")
    add("--shared_suffix", action=flag, help="prefixes of several lengths end at the same place")
    add("--max_tokens", type=at_least_one, metavar="N", help="first, last: look at so many tokens (default all)")
    add("--stride", type=at_least_one, metavar="N", help="sliding: from one window to the next (default 10)")
    add("--stride_unit", choices=STRIDE_UNITS, help="sliding: what the stride counts (default tokens)")
    add("--min_document_tokens", type=int, metavar="N", help="leave out shorter documents")
    add("--max_document_tokens", type=int, metavar="N", help="leave out longer documents")
    add("--max_documents", type=at_least_one, metavar="N", help="at most so many documents of each bucket")
    add("--add_special_tokens", action=flag, help="begin documents with the tokenizer's BOS, as training did")
    add("--deduplicate", action=flag, help="leave out samples with the same tokens as an earlier one")


def add_document_options(add: Callable) -> None:
    """The options of every command that reads documents; `all_documents` reads them."""
    add(
        "--documents",
        required=True,
        nargs="+",
        metavar="PATH",
        help="JSON lines or parquet with id, text and bucket; texts; a dataset saved by `datasets`; directories",
    )
    add("--control", nargs="+", default=[], metavar="PATH", help="the same of documents that were not trained on")
    add("--id_key", default="id", metavar="KEY", help="field with the document's id")
    add("--number_documents", action="store_true", help="ids are files and lines or rows, instead of a field")
    add("--text_key", default="text", metavar="KEY", help="field with its text")
    add("--bucket_key", default="bucket", metavar="KEY", help="field with how often it was trained on, 0: control")
    add("--bucket", type=int, metavar="N", help="this number for all --documents, instead of the field")
    add("--split", metavar="NAME", help="of a dataset that has several")


def run(arguments: argparse.Namespace) -> None:
    """Write the samples file and what it was made of, and say what is in it."""
    sampling, record, extract = _chosen_sampling(arguments)

    from hf_axonn_eval.data.overlaps import read_drop
    from hf_axonn_eval.data.samples import write_about, write_samples
    from hf_axonn_eval.data.sampling import Tally, iter_samples
    from hf_axonn_eval.data.tokenizer_identity import tokenizer_identity
    from hf_axonn_eval.extraction.load_model import load_tokenizer

    tokenizer = load_tokenizer(arguments.tokenizer)
    tally = Tally()
    drop = read_drop(arguments.drop) if arguments.drop is not None else ()
    samples = iter_samples(all_documents(arguments), sampling=sampling, tokenizer=tokenizer, tally=tally, drop=drop)
    digest = write_samples(samples, arguments.output)
    write_about(
        arguments.output,
        {
            "samples": tally.samples,
            "sha256": digest,
            "documents": tally.documents,
            "buckets": {str(bucket): count for bucket, count in sorted(tally.buckets.items())},
            "left_out": tally.left_out(),
            "not_round_trip": tally.not_round_trip,
            "inputs": [*arguments.documents, *arguments.control],
            "tokenizer": tokenizer_identity(tokenizer),
            "protocol": record,
            "extract": dict(extract),
        },
    )
    say(f"{tally.samples} samples from {tally.documents} documents: {arguments.output}")
    if record["source"]:
        changed = f", with another {', '.join(record['changed'])}" if record["changed"] else ""
        say(f"  protocol {record['name']} ({record['source']}){changed}")
    for bucket, count in sorted(tally.buckets.items()):
        say(f"  trained on {bucket}x: {count}")
    say(f"  sha256 {digest}")


def _chosen_sampling(arguments: argparse.Namespace) -> tuple[Sampling, dict[str, Any], dict[str, Any]]:
    """Where to cut, what is recorded of it, and the arguments that it gives `extract`."""
    given = {name: getattr(arguments, name) for name in _SETTINGS if getattr(arguments, name) is not None}
    if arguments.protocol is None:
        kind = arguments.sampling or "offsets"
        sampling = changed_sampling(Sampling(kind=kind), given, whose=f"--sampling {kind}")
        return sampling, {"name": None, "source": None, "settings": sampling.settings(), "changed": []}, {}
    if arguments.sampling is not None:
        raise ValueError(f"--protocol {arguments.protocol} says itself where to cut: leave --sampling out.")
    chosen = protocol(arguments.protocol, **given)
    return chosen.sampling, chosen.record(), dict(chosen.extract)


def all_documents(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Those of --documents and --control."""
    trained = [documents_of(arguments, path, bucket=arguments.bucket) for path in arguments.documents]
    controls = [documents_of(arguments, path, bucket=0) for path in arguments.control]
    return chain(*trained, *controls)


def documents_of(arguments: argparse.Namespace, path: str, *, bucket: int | None) -> Iterator[dict[str, Any]]:
    """Those of one path, with the fields that the options name; `bucket` as for `iter_documents`."""
    from hf_axonn_eval.data.documents import iter_documents

    return iter_documents(
        path,
        id_key=None if arguments.number_documents else arguments.id_key,
        text_key=arguments.text_key,
        bucket_key=arguments.bucket_key,
        split=arguments.split,
        bucket=bucket,
    )
