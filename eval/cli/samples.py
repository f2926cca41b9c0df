"""The command `samples`: cut documents into prefixes and suffixes."""

import argparse
import shlex
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

from hf_axonn_eval.cli.common import at_least_one, command, load_tokenizer, pick, run_name, say
from hf_axonn_eval.data.chat import STYLES, ChatTemplate
from hf_axonn_eval.data.contract import deviations
from hf_axonn_eval.data.hub import pin
from hf_axonn_eval.data.protocols import PROTOCOLS, Protocol, changed_sampling, check_protocol, protocol
from hf_axonn_eval.data.windows import BOS, COMBINE, KINDS, STRIDE_UNITS, Sampling


_SETTINGS = tuple(field.name for field in fields(Sampling) if field.name != "kind")


def add(commands) -> None:
    """Add the command."""
    add = command(commands, "samples", "cut documents into prefixes and suffixes", run)
    flag = argparse.BooleanOptionalAction
    add_document_options(add)
    drop = "leave out the documents with these ids, one a line, as `overlaps` writes them"
    add("--drop", reads="ids", help=drop)
    add("--tokenizer", required=True, help="the tokenizer of the models that are to be measured")
    add("--trust_remote_code")
    add("--output", required=True, writes="samples", help="samples file to write")
    add("--protocol", choices=PROTOCOLS, help="a published way of asking; options below change it")
    add("--sampling", choices=KINDS, help="where to cut (default offsets; a protocol says it itself)")
    add("--prefix_length", type=at_least_one, nargs="+", help="tokens shown (default 32)")
    add("--suffix_length", type=at_least_one, nargs="+", help="tokens asked for (default 32)")
    add("--offset", type=int, nargs="+", help="tokens before the prefix; a sample for each (default 0)")
    add("--combine", choices=COMBINE, help="several lengths and offsets: each with each, or one changed at a time")
    add("--shared_suffix", action=flag, help="prefixes of several lengths end at the same place")
    add("--prefix_buckets", type=int, nargs="+", help="all prefix lengths only in these (default all)")
    add("--max_tokens", type=at_least_one, help="first, last: look at so many tokens (default all)")
    add("--stride", type=at_least_one, help="sliding: from one window to the next (default 10)")
    add("--stride_unit", choices=STRIDE_UNITS, help="sliding: what the stride counts (default tokens)")
    add("--slice_characters", type=at_least_one, help="sliding over characters: tokenize exactly so many")
    add("--append_eos", action=flag, help="rest, sentence: the suffix ends with the tokenizer's EOS")
    add("--min_document_tokens", type=int, help="leave out shorter documents")
    add("--max_document_tokens", type=int, help="leave out longer documents")
    add("--max_documents", type=at_least_one, help="at most so many documents of each bucket")
    add("--add_special_tokens", action=flag, help="begin documents with the tokenizer's BOS, as training did")
    add("--bos", choices=BOS, help="also a BOS before every prefix, or as the first token of every window")
    add("--min_type_token_ratio", type=float, help="leave out suffixes with fewer different tokens")
    add("--deduplicate", action=flag, help="leave out samples with the same tokens as an earlier one")
    add("--chat_template", choices=STYLES, help="ask in a chat: the prefix from the user, or as begun answer")


def add_document_options(add: Callable, *, required: bool = True) -> None:
    """Add the options of every command that reads documents; `all_documents` reads them."""
    forms = "JSON lines or parquet with id, text and bucket; texts; a dataset saved by `datasets`, or hub:OWNER/NAME"
    add("--documents", required=required, default=[], nargs="+", reads="documents", help=forms)
    controls = "the same of documents that were not trained on"
    needs = () if required else ("--documents", "--control")
    add("--control", nargs="+", default=[], reads="documents", help=controls)
    add("--id_key", needs=needs, help="field with the document's id")
    numbers = "ids are files and lines or rows, instead of a field"
    add("--number_documents", needs=needs, replaces="--id_key", action="store_true", help=numbers)
    add("--text_key", needs=needs, help="field with its text")
    bucket = "field with how often it was trained on, 0: control"
    add("--bucket_key", needs=needs, default="bucket", metavar="KEY", help=bucket)
    number = "this number for all --documents, instead of the field"
    add("--bucket", needs=("--documents",), replaces="--bucket_key", type=int, help=number)
    add("--split", needs=needs, metavar="NAME", help="of a dataset that has several")


def run(arguments: argparse.Namespace) -> None:
    """Say what will be done, write the samples file and what it was made of, and say what is in it."""
    chosen, sampling = _chosen(arguments)
    if arguments.chat_template is not None and chosen is not None:
        raise ValueError("--chat_template does not go with --protocol: no protocol asks in a chat.")
    for paths in (arguments.documents, arguments.control):
        paths[:] = map(pin, paths)  # a branch on the Hub as the commit that it is now, to be read and recorded

    from tqdm import tqdm

    from hf_axonn_eval.data.documents import count_documents
    from hf_axonn_eval.data.kinds import kind_of
    from hf_axonn_eval.data.samples import write_about, write_samples
    from hf_axonn_eval.data.sampling import Tally, iter_samples
    from hf_axonn_eval.data.tokenizer_identity import tokenizer_identity

    tokenizer = load_tokenizer(arguments.tokenizer, arguments)
    identity = tokenizer_identity(tokenizer)
    _announce(arguments, chosen, sampling, identity)
    tally = Tally()
    drop = set(chosen.drop if chosen is not None else ())
    if arguments.drop is not None:
        from hf_axonn_eval.data.overlaps import read_drop  # imports SciPy

        drop.update(read_drop(arguments.drop))
    counts = [count_documents(path) for path in (*arguments.documents, *arguments.control)]
    total = None if None in counts else sum(count for count in counts if count is not None)
    # on a terminal alone; TQDM_DISABLE=1 switches it off there, too
    documents = tqdm(all_documents(arguments), total=total, unit="document", dynamic_ncols=True, disable=None)
    samples = iter_samples(documents, sampling=sampling, tokenizer=tokenizer, tally=tally, drop=drop)
    style = arguments.chat_template
    template = ChatTemplate.from_tokenizer(tokenizer, style) if style is not None else None
    digest = write_samples(samples if template is None else template.around(samples, tokenizer), arguments.output)
    if chosen is None:
        record: dict[str, Any] = {"name": None, "source": None, "settings": sampling.settings(), "changed": []}
    else:
        record = chosen.record(chosen.samples_facts(tally.facts(), sorted(tally.dropped_ids), tokenizer))
    if template is not None:
        record["chat_template"] = template.record()
    about = {"sha256": digest, "inputs": [*arguments.documents, *arguments.control], "tokenizer": identity}
    protocol = {"protocol": record, "extract": dict(chosen.extract) if chosen is not None else {}}
    write_about(arguments.output, {**tally.about(), **about, **protocol})
    _say_written(arguments, tally, digest)
    if chosen is not None:
        say(f"  protocol {chosen.name} ({chosen.source}), docs/protocols.md")
        found = deviations((check_protocol(record, {}) or {})["lines"])
        say(f"  these samples are {'not as published in' if found else 'as published'}{':' if found else ''}")
        for line in found:
            say(f"    {line}")
    model, name = "MODEL", "base"
    if kind_of(arguments.tokenizer) == ("model", ""):
        model, name = arguments.tokenizer, run_name(arguments.tokenizer)
    words = ["hf-axonn-eval", "extract", "--model", model, "--samples", arguments.output, "--output", f"runs/{name}"]
    words += ["--trust_remote_code"] if arguments.trust_remote_code else []
    say("next:")
    say(f"    {shlex.join(words)}")


def _announce(
    arguments: argparse.Namespace, chosen: Protocol | None, sampling: Sampling, identity: dict[str, Any] | None
) -> None:
    """Say what samples will be made of."""
    size = f" ({identity['size']:,} tokens, sha256 {identity['sha256'][:12]})" if identity is not None else ""
    say(f"documents  {', '.join([*arguments.documents, *(f'{path} (controls)' for path in arguments.control)])}")
    say(f"tokenizer  {arguments.tokenizer}{size}")
    say(f"protocol   {f'{chosen.name} ({chosen.source})' if chosen is not None else 'none'}")
    say(f"cuts       {_cuts(sampling)}")
    say(f"output     {arguments.output}{', written anew' if Path(arguments.output).exists() else ''}")


def _say_written(arguments: argparse.Namespace, tally: Any, digest: str) -> None:
    """Say how many samples there are, of which buckets, and which documents were left out and why."""
    say(f"{tally.samples} samples from {tally.documents} documents: {arguments.output}")
    for bucket, count in sorted(tally.buckets.items()):
        say(f"  bucket {bucket}: {count}")
    reasons = [f"{count:,} {reason.replace('_', ' ')}" for reason, count in tally.left_out().items()]
    say(f"  left out: {', '.join(reasons) or 'nothing'}")
    say(f"  sha256 {digest}")


def _cuts(sampling: Sampling) -> str:
    """Write where documents are cut, as the command line would."""
    settings = {name: value for name, value in sampling.settings().items() if value not in (None, False, ())}
    return ", ".join(f"{name} {_text(value)}" for name, value in settings.items())


def _text(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _chosen(arguments: argparse.Namespace) -> tuple[Protocol | None, Sampling]:
    """The protocol, if one is named, and where to cut."""
    given = {name: value for name, value in pick(arguments, *_SETTINGS).items() if value is not None}
    if arguments.protocol is None:
        kind = arguments.sampling or "offsets"
        return None, changed_sampling(Sampling(kind=kind), given, whose=f"--sampling {kind}")
    if arguments.sampling is not None:
        raise ValueError(f"--protocol {arguments.protocol} says itself where to cut: leave --sampling out.")
    chosen = protocol(arguments.protocol, **given)
    return chosen, chosen.sampling


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
        bucket=bucket,
        **pick(arguments, "text_key", "bucket_key", "split"),
    )
