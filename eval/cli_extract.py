"""The command `extract`: ask one model for the suffixes."""

import argparse
import os
from collections.abc import Mapping
from typing import Any

from hf_axonn_eval.cli import add_interval_options, at_least_one, command, read_grid, run_name, show
from hf_axonn_eval.models import DTYPES


def add(commands) -> None:
    """Say what the command takes."""
    add = command(commands, "extract", "ask one model for the suffixes; goes on where it was stopped", run)
    add("--model", required=True, metavar="DIR", help="HF directory, or a sharded checkpoint of a training run")
    add("--samples", required=True, metavar="FILE", help="what `samples` wrote")
    add("--output", required=True, metavar="DIR", help="directory for the results of this model")
    add("--tokenizer", metavar="DIR", help="if it is not beside the model")
    add("--grid", metavar="SIZES", help="data=1,z=2,y=1,x=2 (default: axonn_config of accelerate launch, else none)")
    add("--batch_size", type=_batch_size, default="auto", metavar="N", help="samples in a forward pass (default auto)")
    add("--dtype", choices=DTYPES, default="auto", help="of the weights (default: as in the checkpoint)")
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
    add("--trust_remote_code", action="store_true", help="execute code that comes with the model")
    add_interval_options(add)


def run(arguments: argparse.Namespace) -> None:
    """Write a run directory, and show its table."""
    from hf_axonn_eval.samples import SampleFile, read_about

    # what is wrong is said before a model is loaded
    if arguments.generation and arguments.no_generation:
        raise ValueError("--generation does not go with --no_generation.")
    samples = SampleFile(arguments.samples)
    about = read_about(arguments.samples) or {}
    options = _options(arguments, about.get("extract") or {})
    from hf_axonn_eval.extraction import extract
    from hf_axonn_eval.models import load_model

    if os.environ.get("RANK", "0") != "0":
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # one bar for the job, not one a rank
    loaded = load_model(
        arguments.model,
        grid=read_grid(arguments.grid),
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
        membership=arguments.membership,
        protocol=about.get("protocol"),
        confidence=arguments.confidence,
        seed=arguments.seed,
        **options,
    )
    if len(results):  # rank 0
        show({run_name(arguments.output): results}, arguments)


def _options(arguments: argparse.Namespace, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What to measure: what the command line says, and where it says nothing what the samples' protocol asks for."""
    from hf_axonn_eval.discoverability import Sampler

    sampler = asked.get("sampler") if arguments.sampler is None else _sampler(arguments.sampler)
    if arguments.stop_early and arguments.sampler is None:
        sampler = None
    if arguments.generation or arguments.no_generation:
        generate = arguments.generation
    else:
        generate = asked.get("generate", True)
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
