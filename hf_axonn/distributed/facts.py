"""What ranks must have in common before they start: versions, settings, the model, the data. No communication.

Each function returns facts for `require_alike`, by what a message calls them.
"""

from __future__ import annotations

import functools
import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from hf_axonn import __version__


PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl", "safetensors")
# Of TrainingArguments: where a rank runs, and what only concerns its logs and its readers of data.
OWN_ARGUMENTS = {
    "local_rank",
    "logging_dir",
    "run_name",
    "project",
    "report_to",
    "disable_tqdm",
    "log_level",
    "log_level_replica",
    "parallelism_config",
    "push_to_hub",
    "use_cpu",
}
OWN_PREFIXES = ("hub_", "dataloader_num", "dataloader_prefetch", "dataloader_pin", "dataloader_persistent", "trackio")
PLAIN = (str, int, float, bool, list, tuple, dict, type(None))


@functools.lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Of Python, this package and those it stands on."""
    facts = {"python": ".".join(platform.python_version_tuple()[:2]), "hf_axonn": __version__}
    for name in PACKAGES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = "missing"
    return facts


def model_facts(model: nn.Module) -> dict[str, str]:
    """Class, and names, shapes and dtypes of all parameters. Their values are rank 0's anyway."""
    parameters = [(name, tuple(its.shape), str(its.dtype)) for name, its in model.named_parameters()]
    digest = hashlib.sha256(repr(parameters).encode()).hexdigest()[:12]
    return {"the model": f"{type(model).__name__} with {len(parameters)} parameters ({digest})"}


def argument_facts(arguments: Any) -> dict[str, str]:
    """Trainer's arguments, but for those that may differ from rank to rank."""
    return {
        name: repr(value)
        for name, value in arguments.to_dict().items()
        if name not in OWN_ARGUMENTS and not name.startswith(OWN_PREFIXES) and isinstance(value, PLAIN)
    }


def loader_facts(loader: torch.utils.data.DataLoader) -> dict[str, str]:
    """Length of the data set, its first, middle and last row where reading them changes nothing, the batch size."""
    dataset = loader.dataset
    try:
        length = len(dataset)
    except (TypeError, AttributeError, NotImplementedError):
        return {}
    digest = ""
    if length and _is_static(dataset):
        rows = [_plain(dataset[index]) for index in (0, length // 2, length - 1)]
        digest = f" ({hashlib.sha256(repr(rows).encode()).hexdigest()[:12]})"
    return {"the data set": f"{length} rows{digest}", "the batch size": str(loader.batch_size)}


def _is_static(dataset: Any) -> bool:
    """Whether rows are always the same: lists, tensors, and tables of `datasets` without a transformation."""
    if isinstance(dataset, (list, tuple)) or type(dataset) is torch.utils.data.TensorDataset:
        return True
    if type(dataset).__module__ == "datasets.arrow_dataset":
        return dataset.format["type"] in (None, "torch", "numpy", "python")
    return False


def _plain(value: Any) -> Any:
    """What is the same on every rank for equal rows: numbers and texts, and of other things their type."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), str(value.dtype), value.flatten().tolist())
    if isinstance(value, dict):
        return {str(name): _plain(its) for name, its in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(its) for its in value]
    if hasattr(value, "tolist") and hasattr(value, "dtype"):  # numpy
        return _plain(value.tolist())
    return value if isinstance(value, (str, int, float, bool, bytes, type(None))) else type(value).__name__
