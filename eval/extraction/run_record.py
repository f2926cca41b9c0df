"""Entries of run.json, which holds everything needed to repeat a run, and what must be the same to resume it."""

import contextlib
import platform
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hf_axonn import parallel_state
from hf_axonn_eval.data.access import WEIGHTS


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


def describe_model(model, model_record: Mapping[str, Any], settings: dict[str, Any], processes: int) -> dict[str, Any]:
    """Return the entries of a run of a model whose weights can be read (`Asker.describe`).

    Args:
        model: which is measured.
        model_record: what identifies it.
        settings: the plan of the batches, which may change when a stopped run is resumed.
        processes: how many measure.
    """
    import torch

    weight = next(model.parameters())
    dtype = str(weight.dtype).removeprefix("torch.")
    parallel = parallel_state(model)
    of_cuda = {"name": torch.cuda.get_device_name(weight.device)} if weight.device.type == "cuda" else {}
    return {
        "identity": {
            "model_fingerprint": model_record["fingerprint"],
            "base_fingerprint": model_record.get("base_fingerprint"),
            "dtype": dtype,
            "attn_implementation": getattr(model.config, "_attn_implementation", None),
        },
        "access": WEIGHTS,
        "model": dict(model_record),
        "vocabulary": model.config.get_text_config().vocab_size,
        "tokenizer": {},
        "settings": settings,
        "precision": {
            "weights": dtype,
            "scores": "float64" if weight.dtype == torch.float64 else "float32",
            "float32_matmul": torch.get_float32_matmul_precision(),
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        },
        "processes": processes,
        "grid": str(parallel.grid) if parallel is not None else None,
        "device": {
            "type": weight.device.type,
            "name": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            **of_cuda,
        },
    }


def describe_start() -> dict[str, Any]:
    """Return the entries of a start, whatever is measured: `versions` of Python and packages, `command`, `started`."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {"versions": versions, "command": sys.argv, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
