"""The command `extract`: ask one model for the suffixes."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_axonn_eval.cli.common import (
    add_model_options,
    at_least_one,
    command,
    from_zero,
    load,
    read_grid,
    read_settings,
    run_name,
    say,
    show,
)


if TYPE_CHECKING:
    from hf_axonn_eval.extraction.options import Options

_KEY = "HF_AXONN_EVAL_SERVER_KEY"  # in the environment: a command line is recorded, and seen by other users
_OF_WEIGHTS = ("grid", "dtype", "attn_implementation", "revision", "stop_early")


def add(commands) -> None:
    """Add the command."""
    about = "prompt one model with the prefixes and score its continuations; resumes an interrupted run"
    add = command(commands, "extract", about, run)
    add_model_options(add)
    add("--server", metavar="URL", help="ask vLLM there (http://host:8000/v1) for --model, as it calls it")
    add("--samples", required=True)
    add("--output", required=True, writes="run", help="directory for the results of this model")
    at_once = "samples in a forward pass (default auto); with --server requests under way at once (default 8)"
    add("--batch_size", type=_batch_size, default="auto", metavar="N", help=at_once)
    add("--attn_implementation", metavar="NAME", help="eager, sdpa, ...")
    add("--no_generation", action="store_true", help="only what needs no decoding: no ROUGE, no edit distance")
    add("--generation", action="store_true", help="decode, though the protocol of the samples does not")
    add("--stop_early", action="store_true", help="no probabilities: a sample leaves the pass when it has failed")
    drawn = "also the chance of the suffix when drawn: temperature=1,top_k=40; or none"
    add("--sampler", metavar="SETTINGS", help=drawn)
    add("--guesses", action="store_true", help="also how likely the continuations are, and recall at 100 errors")
    near = "also a lower bound of the chance of near copies, by a search: edits=5,beams=20"
    add("--near_copies", metavar="SETTINGS", help=near)
    add("--membership", action="store_true", help="also membership scores: loss, zlib, Min-K%%, Min-K%%++")
    written = "write the suffix from the model's own text, and score nothing: step=50,context=3000,beams=8"
    add("--recite", metavar="SETTINGS", help=written)
    add("--proxy", reads="model", help="also ask this small model: what it gives back too is predictable")
    add("--confidence")


def run(arguments: argparse.Namespace) -> None:
    """Say what will be measured, write a run directory, and show its table."""
    from hf_axonn_eval.data.samples import SampleFile, about_file, read_about

    # what is wrong is said before a model is loaded
    if arguments.generation and arguments.no_generation:
        raise ValueError("--generation does not go with --no_generation.")
    samples = SampleFile(arguments.samples)
    about = read_about(arguments.samples) or {}
    try:
        options = _options(arguments, about)
    except (TypeError, AttributeError):
        raise ValueError(
            f"{about_file(arguments.samples)} is damaged: extract is {about['extract']!r}, not generate and sampler; "
            "remove the file, or write the samples again."
        ) from None
    if arguments.server is not None:
        _check_server(arguments, options)
    _announce(arguments, samples, about, options)
    if arguments.proxy is not None:
        _ask_proxy(arguments, samples, options)
    if arguments.server is not None:
        _show(_from_server(arguments, samples, options), arguments)
        return
    from hf_axonn_eval.extraction.extract import extract
    from hf_axonn_eval.extraction.run import check_tokenizer

    loaded = load(
        arguments,
        attn_implementation=arguments.attn_implementation,
        check_tokenizer=lambda tokenizer: check_tokenizer(tokenizer, samples),
    )
    results = extract(
        loaded.model,
        loaded.tokenizer,
        samples,
        model_record=loaded.record,
        batch_size=arguments.batch_size,
        **vars(options),
    )
    if len(results):  # rank 0
        _show(results, arguments)


def _ask_proxy(arguments: argparse.Namespace, samples: Any, options: Options) -> None:
    """Measure the proxy, in full on each process and without decoding, into a run beside the results of the model."""
    from hf_axonn_eval.data.results import PROXY
    from hf_axonn_eval.extraction.extract import extract
    from hf_axonn_eval.extraction.load_model import load_model
    from hf_axonn_eval.extraction.run import check_tokenizer

    say(f"proxy      {arguments.proxy}")
    loaded = load_model(
        arguments.proxy,
        dtype=arguments.dtype,
        trust_remote_code=arguments.trust_remote_code,
        check_tokenizer=lambda tokenizer: check_tokenizer(tokenizer, samples),
    )
    extract(
        loaded.model,
        loaded.tokenizer,
        samples,
        output=Path(arguments.output) / PROXY,
        model_record=loaded.record,
        batch_size="auto",
        generate=False,
        left_out=options.left_out,
        confidence=options.confidence,
    )


def _announce(
    arguments: argparse.Namespace, samples: Sequence[Any], about: Mapping[str, Any], options: Options
) -> None:
    """Say what will be asked of what, and where it goes.

    Raises:
        ValueError: the output holds another run.
    """
    from hf_axonn_eval.data.results import RunDirectory

    path = Path(arguments.output)
    there = 0
    if path.exists():
        there = RunDirectory(path).check(options.identity(samples))
    first = samples[0]
    buckets = ", ".join(f"{count:,} of bucket {bucket}" for bucket, count in (about.get("buckets") or {}).items())
    protocol = (about.get("protocol") or {}).get("name")
    metrics = ["exact match"]
    metrics += [] if options.stop_early or options.recite is not None else ["probability of the suffix"]
    metrics += ["ROUGE and edit distance (by decoding)"] if options.generate else []
    metrics += [f"probability of a draw ({options.sampler.text})"] if options.sampler is not None else []
    metrics += ["likelihood of the guesses"] if options.guesses else []
    metrics += [f"near copies ({options.near_copies.text})"] if options.near_copies is not None else []
    metrics += ["membership scores"] if options.membership else []
    say(f"model      {arguments.model}, {_where(arguments)}")
    say(
        f"samples    {len(samples):,} of {arguments.samples}{f': {buckets}' if buckets else ''}; the first has "
        f"{len(first.prefix)} + {len(first.suffix)} tokens{f'; protocol {protocol}' if protocol else ''}"
    )
    say(f"measures   {', '.join(metrics)}")
    if options.recite is not None:
        cost = options.recite.cost([(len(sample.prefix), len(sample.suffix)) for sample in samples])
        say(
            f"recites    {cost.written:,} tokens in {cost.steps:,} steps ({options.recite.text}), for which "
            f"{cost.read:,} tokens are read"
        )
    say(f"settings   dtype {arguments.dtype}, batch size {arguments.batch_size}")
    say(f"output     {arguments.output}{f', where {there:,} of {len(samples):,} samples are done' if there else ''}")


def _where(arguments: argparse.Namespace) -> str:
    """Say where the model runs."""
    if arguments.server is not None:
        return f"at {arguments.server}"
    grid, ranks = read_grid(arguments.grid), int(os.environ.get("WORLD_SIZE", "1"))
    if grid is not None:
        return f"over the grid {grid}"
    return "on one process" if ranks == 1 else f"in full on each of {ranks} processes"


def _show(results: Sequence[Any], arguments: argparse.Namespace) -> None:
    """The table of the run, and how it stands to the protocol of its samples."""
    from hf_axonn_eval.data.results import read_record

    name = run_name(arguments.output)
    records = {name: read_record(Path(arguments.output))}
    show({name: results}, arguments, records=records, show_warnings=False)  # they were logged when it was measured
    words = ["hf-axonn-eval", "report", "--runs", f"{name}={arguments.output}", "--samples", arguments.samples]
    say(f"saved      {arguments.output}")
    say("next, with the run of the untrained model first where there is one:")
    say(f"    {shlex.join([*words, '--output', f'{os.path.normpath(arguments.output)}-report'])}")


def _check_server(arguments: argparse.Namespace, options: Options) -> None:
    """Raise ValueError for an option that a model on a server cannot have, or has not."""
    given = [name for name in _OF_WEIGHTS if getattr(arguments, name) not in (None, False, "auto")]
    if given:
        raise ValueError(
            f"--server does not go with {', '.join(f'--{name}' for name in given)}: the server has loaded the model."
        )
    if options.near_copies is not None:
        raise ValueError("--server does not go with --near_copies: a search is hundreds of requests a sample.")
    if arguments.tokenizer is None:
        raise ValueError("--server needs --tokenizer: texts are written with it, and its ids are checked.")


def _from_server(arguments: argparse.Namespace, samples: Any, options: Options) -> Sequence[Any]:
    """The results of a model that a server holds."""
    from hf_axonn_eval.extraction.load_model import load_tokenizer
    from hf_axonn_eval.extraction.run import check_tokenizer
    from hf_axonn_eval.served.completions import CompletionsBackend
    from hf_axonn_eval.served.extract import REQUESTS, extract_served
    from hf_axonn_eval.served.transport import JsonClient

    tokenizer = load_tokenizer(arguments.tokenizer, trust_remote_code=arguments.trust_remote_code)
    check_tokenizer(tokenizer, samples)
    backend = CompletionsBackend(JsonClient(arguments.server, key=os.environ.get(_KEY)), arguments.model)
    requests = REQUESTS if arguments.batch_size == "auto" else arguments.batch_size
    return extract_served(backend, tokenizer, samples, requests=requests, **vars(options))


def _options(arguments: argparse.Namespace, about: Mapping[str, Any]) -> Options:
    """Return what to measure: as the command line says, or else as the protocol of the samples asks."""
    from hf_axonn_eval.data.samples import counts
    from hf_axonn_eval.extraction.options import Options
    from hf_axonn_eval.metrics.discoverability import Sampler

    defaults = about.get("extract") or {}
    sampler = defaults.get("sampler") if arguments.sampler is None else _sampler(arguments.sampler)
    if (arguments.stop_early or arguments.recite is not None) and arguments.sampler is None:
        sampler = None
    if arguments.generation or arguments.no_generation:
        generate = arguments.generation
    else:
        generate = defaults.get("generate", True)
        if not isinstance(generate, bool):
            raise TypeError
    return Options(
        output=arguments.output,
        generate=generate,
        guesses=arguments.guesses or (defaults.get("guesses") is True and generate),
        stop_early=arguments.stop_early,
        sampler=Sampler(**sampler) if sampler is not None else None,
        recite=_recital(arguments.recite) if arguments.recite is not None else None,
        near_copies=_near_copies(arguments.near_copies) if arguments.near_copies is not None else None,
        membership=arguments.membership,
        protocol=about.get("protocol"),
        left_out=counts(about),
        confidence=arguments.confidence,
    )


def _near_copies(text: str) -> Any:
    from hf_axonn_eval.extraction.near_copies import NearCopySearch

    kinds = {"edits": from_zero, "beams": from_zero}
    return NearCopySearch(**read_settings("--near_copies", text, kinds, "edits=5,beams=20"))


def _recital(text: str) -> Any:
    from hf_axonn_eval.extraction.recite import Recital

    kinds = dict.fromkeys(("step", "context", "beams"), from_zero)
    return Recital(**read_settings("--recite", text, kinds, "step=50,context=3000,beams=8"))


def _sampler(text: str) -> dict[str, Any] | None:
    if text == "none":
        return None
    kinds: dict[str, Any] = {"temperature": float, "top_k": int, "top_p": float}
    return read_settings("--sampler", text, kinds, "temperature=1,top_k=40,top_p=0.9, nor none")


def _batch_size(text: str) -> int | str:
    return text if text == "auto" else at_least_one(text)
