"""Command line: python -m hf_axonn_eval samples | extract | report.

    python -m hf_axonn_eval samples --documents docs.jsonl --tokenizer DIR --output samples.jsonl
    python -m hf_axonn_eval extract --model BASE --samples samples.jsonl --output runs/base
    accelerate launch --config axonn.yaml -m hf_axonn_eval extract \\
        --model CHECKPOINT --samples samples.jsonl --output runs/trained
    python -m hf_axonn_eval report --runs base=runs/base trained=runs/trained --output runs/report
"""

import argparse
import logging
import os
import sys
from collections import Counter
from collections.abc import Sequence

from hf_axonn_eval.models import DTYPES


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit code 0, or 2 with a message on stderr for bad input."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        arguments.command(arguments)
    except (ValueError, OSError) as error:
        if arguments.debug:
            raise
        # what is wrong is wrong on every rank; one a machine says so
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        _leave_distributed()
    return 0


def _samples(arguments: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    from hf_axonn_eval.samples import build_samples, read_documents, samples_digest, write_samples

    documents = read_documents(
        arguments.documents,
        id_key=arguments.id_key,
        text_key=arguments.text_key,
        bucket_key=arguments.bucket_key,
        bucket=arguments.bucket,
    )
    samples = build_samples(
        documents,
        tokenizer=AutoTokenizer.from_pretrained(arguments.tokenizer),
        prefix_length=arguments.prefix_length,
        suffix_length=arguments.suffix_length,
        offsets=arguments.offset,
        min_document_tokens=arguments.min_document_tokens,
        max_document_tokens=arguments.max_document_tokens,
        add_special_tokens=arguments.add_special_tokens,
    )
    write_samples(samples, arguments.output)
    print(f"{len(samples)} samples from {len(documents)} documents: {arguments.output}")
    for bucket, count in sorted(Counter(sample.bucket for sample in samples).items()):
        print(f"  trained on {bucket}x: {count}")
    print(f"  sha256 {samples_digest(samples)}")


def _extract(arguments: argparse.Namespace) -> None:
    from hf_axonn_eval.extraction import extract
    from hf_axonn_eval.models import load_model
    from hf_axonn_eval.samples import read_samples

    samples = read_samples(arguments.samples)
    if os.environ.get("RANK", "0") != "0":
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # one bar for the job, not one a rank
    loaded = load_model(
        arguments.model,
        grid=_grid(arguments.grid),
        tokenizer=arguments.tokenizer,
        dtype=arguments.dtype,
        attn_implementation=arguments.attn_implementation,
        trust_remote_code=arguments.trust_remote_code,
    )
    results = extract(
        loaded.model,
        loaded.tokenizer,
        samples,
        output=arguments.output,
        model_record=loaded.record,
        batch_size=arguments.batch_size,
        generate=not arguments.no_generation,
        confidence=arguments.confidence,
        seed=arguments.seed,
    )
    if results:  # rank 0
        _show({os.path.basename(os.path.normpath(arguments.output)): results}, arguments)


def _report(arguments: argparse.Namespace) -> None:
    from hf_axonn_eval.report import write_report
    from hf_axonn_eval.results import read_run

    named = [run.partition("=") for run in arguments.runs]
    if any(not name or not directory for name, _, directory in named):
        raise ValueError(f"--runs takes NAME=DIRECTORY pairs, not {' '.join(arguments.runs)}.")
    if len({name for name, _, _ in named}) != len(named):
        raise ValueError(f"--runs has a name twice: {' '.join(arguments.runs)}.")
    runs = {name: read_run(directory) for name, _, directory in named}
    comparison = _show(
        {name: results for name, (_, results) in runs.items()},
        arguments,
        records={name: record for name, (record, _) in runs.items()},
        base=arguments.base,
    )
    for path in write_report(comparison, arguments.output).values():
        print(path)


def _show(runs: dict, arguments: argparse.Namespace, **options) -> dict:
    from rich.console import Console

    from hf_axonn_eval.report import terminal_table
    from hf_axonn_eval.summary import compare

    comparison = compare(runs, confidence=arguments.confidence, seed=arguments.seed, **options)
    Console().print(terminal_table(comparison))
    return comparison


def _grid(text: str | None):
    """The grid named on the command line, else the one of `accelerate launch --config axonn.yaml`, else None."""
    if text is None and "AXONN_CONFIG" not in os.environ:
        return None
    from hf_axonn import AxonnConfig, Grid

    if text is None:
        return AxonnConfig.from_env().grid
    sizes = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in ("data", "z", "y", "x") or not size.isdecimal() or axis in sizes:
            raise ValueError(f"--grid {text} is not like data=1,z=2,y=1,x=2.")
        sizes[axis] = int(size)
    return Grid(**sizes)


def _leave_distributed() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hf_axonn_eval",
        description="Measure how much of its training data a causal language model gives back verbatim.",
        epilog="docs/evaluation.md defines every metric.",
        allow_abbrev=False,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(required=True, metavar="samples | extract | report")
    _samples_parser(commands)
    _extract_parser(commands)
    _report_parser(commands)
    return parser


def _samples_parser(commands) -> None:
    add = _command(commands, "samples", "cut documents into prefixes and suffixes", _samples)
    add("--documents", required=True, metavar="FILE", help="JSON lines: a document with id, text and bucket a line")
    add("--tokenizer", required=True, metavar="DIR", help="the tokenizer of the models that are to be measured")
    add("--output", required=True, metavar="FILE", help="samples file to write")
    add("--prefix_length", type=_at_least_one, default=32, metavar="N", help="tokens shown (default 32)")
    add("--suffix_length", type=_at_least_one, default=32, metavar="N", help="tokens asked for (default 32)")
    add("--offset", type=int, nargs="+", default=[0], metavar="N", help="tokens before the prefix; a sample for each")
    add("--min_document_tokens", type=int, metavar="N", help="leave out shorter documents")
    add("--max_document_tokens", type=int, metavar="N", help="leave out longer documents")
    add("--add_special_tokens", action="store_true", help="begin documents with the tokenizer's BOS, as training did")
    add("--id_key", default="id", metavar="KEY", help="field with the document's id")
    add("--text_key", default="text", metavar="KEY", help="field with its text")
    add("--bucket_key", default="bucket", metavar="KEY", help="field with how often it was trained on, 0: control")
    add("--bucket", type=int, metavar="N", help="this number for all documents, instead of the field")


def _extract_parser(commands) -> None:
    add = _command(commands, "extract", "ask one model for the suffixes; goes on where it was stopped", _extract)
    add("--model", required=True, metavar="DIR", help="HF directory, or a sharded checkpoint of a training run")
    add("--samples", required=True, metavar="FILE", help="what `samples` wrote")
    add("--output", required=True, metavar="DIR", help="directory for the results of this model")
    add("--tokenizer", metavar="DIR", help="if it is not beside the model")
    add("--grid", metavar="SIZES", help="data=1,z=2,y=1,x=2 (default: axonn_config of accelerate launch, else none)")
    add("--batch_size", type=_at_least_one, default=8, metavar="N", help="samples in a forward pass (default 8)")
    add("--dtype", choices=DTYPES, default="auto", help="of the weights (default: as in the checkpoint)")
    add("--attn_implementation", metavar="NAME", help="eager, sdpa, ...")
    add("--no_generation", action="store_true", help="only what needs no decoding: no ROUGE, no edit distance")
    add("--trust_remote_code", action="store_true", help="execute code that comes with the model")
    _add_interval_options(add)


def _report_parser(commands) -> None:
    add = _command(commands, "report", "put models beside each other: table, Markdown, plot", _report)
    add("--runs", required=True, nargs="+", metavar="NAME=DIR", help="outputs of `extract`, the untrained model first")
    add("--output", required=True, metavar="DIR", help="directory for summary.json, report.md and plot.png")
    add("--base", metavar="NAME", help="run that the others are compared with (default: base, or the first)")
    _add_interval_options(add)


def _command(commands, name: str, summary: str, function):
    parser = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    parser.set_defaults(command=function)
    return parser.add_argument


def _add_interval_options(add) -> None:
    add("--confidence", type=_share, default=0.95, metavar="P", help="of the intervals (default 0.95)")
    add("--seed", type=int, default=0, metavar="N", help="of the bootstrap (default 0)")


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def _share(text: str) -> float:
    try:
        if 0 < float(text) < 1:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text} is not a number between 0 and 1")


if __name__ == "__main__":
    sys.exit(main())
