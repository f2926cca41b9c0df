"""What run.json holds: everything needed to repeat a run, and what must be the same for a stopped one to go on."""

import contextlib
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hf_axonn import parallel_state
from hf_axonn_eval.data.samples import Sample, samples_digest
from hf_axonn_eval.extraction.near_copies import NearCopySearch
from hf_axonn_eval.extraction.work_split import WorkSplit
from hf_axonn_eval.metrics.discoverability import Sampler


_PACKAGES = (
    "hf_axonn",
    "torch",
    "transformers",
    "accelerate",
    "tokenizers",
    "safetensors",
    "peft",
    "rapidfuzz",
    "numpy",
)


def run_record(
    model,
    model_record: Mapping[str, Any],
    *,
    tokenizer_record: Mapping[str, Any],
    identity: Mapping[str, Any],
    settings: Mapping[str, Any],
    work_split: WorkSplit,
) -> dict[str, Any]:
    """The content of run.json.

    Args:
        model: which is measured.
        model_record: what identifies it.
        tokenizer_record: what identifies its tokenizer (`path`, `size`, `sha256`; each None if unknown), and whether
            the samples are known to be of the same one (`checked`).
        identity: what else tells this run from others; entries that are None are those of a run without the option.
        settings: what may change when a stopped run goes on, and the plan of the batches.
        work_split: who measures what.
    """
    import torch

    weight = next(model.parameters())
    dtype = str(weight.dtype).removeprefix("torch.")
    parallel = parallel_state(model)
    of_cuda = {"name": torch.cuda.get_device_name(weight.device)} if weight.device.type == "cuda" else {}
    return {
        "identity": {
            **identity,
            "model_fingerprint": model_record["fingerprint"],
            "base_fingerprint": model_record.get("base_fingerprint"),
            "dtype": dtype,
            "attn_implementation": getattr(model.config, "_attn_implementation", None),
            "tokenizer_sha256": tokenizer_record["sha256"],
        },
        "access": "weights",
        "model": dict(model_record),
        "vocabulary": model.config.get_text_config().vocab_size,
        "tokenizer": dict(tokenizer_record),
        "settings": dict(settings),
        "precision": {
            "weights": dtype,
            "scores": "float64" if weight.dtype == torch.float64 else "float32",
            "float32_matmul": torch.get_float32_matmul_precision(),
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        },
        "processes": work_split.world_size,
        "grid": str(parallel.grid) if parallel is not None else None,
        "device": {
            "type": weight.device.type,
            "name": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            **of_cuda,
        },
        **this_start(),
    }


def identity_of(
    samples: Sequence[Sample],
    *,
    generate: bool,
    stop_early: bool = False,
    sampler: Sampler | None = None,
    membership: bool = False,
    guesses: bool = False,
    near_copies: NearCopySearch | None = None,
) -> dict[str, Any]:
    """Return what tells a run from others before a model is known: the samples, and what is measured of them."""
    return {
        "samples": len(samples),
        "samples_sha256": samples_digest(samples),
        "generate": generate,
        "stop_early": stop_early or None,
        "sampler": sampler.text if sampler is not None else None,
        "membership": membership or None,
        "guesses": guesses or None,
        "near_copies": near_copies.text if near_copies is not None else None,
    }


def this_start() -> dict[str, Any]:
    """What run.json says of a start, whatever is measured: `versions` of Python and packages, `command`, `started`."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {"versions": versions, "command": sys.argv, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
