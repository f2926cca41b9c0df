"""The command `extract`: ask one model for the suffixes."""

import argparse
from collections.abc import Mapping
from typing import Any

from hf_axonn_eval.cli.common import (
    add_interval_options,
    add_model_options,
    at_least_one,
    command,
    load,
    run_name,
    show,
)


def add(commands) -> None:
    """Say what the command takes."""
    add = command(commands, "extract", "ask one model for the suffixes; goes on where it was stopped", run)
    add_model_options(add)
    add("--samples", required=True, metavar="FILE", help="what `samples` wrote")
    add("--output", required=True, metavar="DIR", help="directory for the results of this model")
    add("--batch_size", type=_batch_size, default="auto", metavar="N", help="samples in a forward pass (default auto)")
    add("--attn_implementation", metavar="NAME", help="eager, sdpa, ...")
    add("--no_generation", action="store_true", help="only what needs no decoding: no ROUGE, no edit distance")
    add("--generation", action="store_true", help="decode, though the protocol of the samples does not")
    add("--stop_early", action="store_true", help="no probabilities: a sample leaves the pass when it has failed")
    add(
        "--sampler",
        metavar="SETTINGS",
        help="also the chance of the suffix when drawn: temperature=1,top_k=40; or none",
    )
    add("--membership", action="store_true", help="also membership scores: loss, zlib, Min-K%%, Min-K%%++")
    add_interval_options(add)


def run(arguments: argparse.Namespace) -> None:
    """Write a run directory, and show its table."""
    from hf_axonn_eval.data.samples import SampleFile, about_file, counts, read_about

    # what is wrong is said before a model is loaded
    if arguments.generation and arguments.no_generation:
        raise ValueError("--generation does not go with --no_generation.")
    samples = SampleFile(arguments.samples)
    about = read_about(arguments.samples) or {}
    try:
        options = _options(arguments, about.get("extract") or {})
    except (TypeError, AttributeError):
        raise ValueError(
            f"{about_file(arguments.samples)} is damaged: extract is {about['extract']!r}, not generate and sampler; "
            "remove the file, or write the samples again."
        ) from None
    from hf_axonn_eval.extraction.extract import extract

    loaded = load(arguments, attn_implementation=arguments.attn_implementation)
    results = extract(
        loaded.model,
        loaded.tokenizer,
        samples,
        output=arguments.output,
        model_record=loaded.record,
        batch_size=arguments.batch_size,
        membership=arguments.membership,
        protocol=about.get("protocol"),
        left_out=counts(about),
        confidence=arguments.confidence,
        **options,
    )
    if len(results):  # rank 0
        show({run_name(arguments.output): results}, arguments)


def _options(arguments: argparse.Namespace, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What to measure: what the command line says, and where it says nothing what the samples' protocol asks for."""
    from hf_axonn_eval.metrics.discoverability import Sampler

    sampler = asked.get("sampler") if arguments.sampler is None else _sampler(arguments.sampler)
    if arguments.stop_early and arguments.sampler is None:
        sampler = None
    if arguments.generation or arguments.no_generation:
        generate = arguments.generation
    else:
        generate = asked.get("generate", True)
        if not isinstance(generate, bool):
            raise TypeError
    return {
        "generate": generate,
        "stop_early": arguments.stop_early,
        "sampler": Sampler(**sampler) if sampler is not None else None,
    }


def _sampler(text: str) -> dict[str, Any] | None:
    if text == "none":
        return None
    settings: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        kind = {"temperature": float, "top_k": int, "top_p": float}.get(name)
        try:
            settings[name] = kind(value)
        except (TypeError, ValueError, KeyError):
            raise ValueError(f"--sampler {text} is not like temperature=1,top_k=40,top_p=0.9, nor none.") from None
    return settings


def _batch_size(text: str) -> int | str:
    return text if text == "auto" else at_least_one(text)
