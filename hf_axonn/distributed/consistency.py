"""Facts and failures of each rank, reported to all: a failure on one rank is an error on every rank, and none waits.

`assert_same_on_all_ranks` compares what ranks must have in common before they start: versions, settings, the model,
the data. The functions that end in _facts, `versions` among them, return such facts by what a message calls them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from hf_axonn.distributed.collectives import barrier, gather_quietly, reduce_quietly, world_group
from hf_axonn.distributed.watchdog.diagnosis import ranks_in_words


REPORTED = 3  # differences are reported one by one
PACKAGES = ("hf_axonn", "torch", "transformers", "accelerate", "peft", "trl", "safetensors")
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


def gather_texts(text: str, device: torch.device | str, group: ProcessGroup | None = None) -> list[str]:
    """Return the texts of all ranks of a group (default: the world), by rank; `device` is this rank's.

    Collectives: an all-gather over the group of the lengths, and one of the bytes if there are any.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [text]
    group = group or world_group()
    content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.empty(0).byte()
    lengths = gather_quietly(torch.tensor([len(content)], device=device), group).flatten().tolist()
    if not any(lengths):
        return [""] * len(lengths)
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(content)] = content.to(device)
    blocks = gather_quietly(padded, group).cpu()
    return [
        block[:length].numpy().tobytes().decode(errors="replace")
        for block, length in zip(blocks, lengths, strict=True)
    ]


def gather_json(value: Any, device: torch.device | str, group: ProcessGroup | None = None) -> list[Any]:
    """Return `value`, which is JSON, of all ranks of a group, by rank. Collectives: `gather_texts`; in a fake world,
    which has no other ranks, each is taken to have the same."""
    if dist.is_initialized() and dist.get_backend(group) == "fake":
        return [value] * dist.get_world_size(group)
    return [json.loads(text) for text in gather_texts(json.dumps(value), device, group)]


def first_problem(problem: str, device: torch.device) -> str:
    """Return the problem of the lowest rank that has one, with its rank; empty if none has.

    For all ranks of the world, some of which may have worked long before they came here.

    Collectives: `barrier`, an all-reduce over the world of one number; where a rank has a problem, `gather_texts`.
    """
    barrier()
    if dist.is_initialized():
        failed = torch.tensor([bool(problem)], dtype=torch.int32, device=device)
        if not reduce_quietly(failed, world_group(), op="max").item():
            return ""
    problems = gather_texts(problem, device)
    named = [f"rank {rank}: {text}" if len(problems) > 1 else text for rank, text in enumerate(problems) if text]
    more = f" ({len(named) - 1} more ranks failed)" if len(named) > 1 else ""
    return named[0] + more if named else ""


def raise_together(problem: str, device: torch.device | str, group: ProcessGroup) -> None:
    """Raise on all ranks of a group if one has a problem, in the same place: none waits for one that has raised.

    Args:
        problem: of this rank; empty if there is none.
        device: this rank's.
        group: ranks that all come here.
    Raises:
        ValueError: a rank has a problem, with the words of the first.
    Collectives: `gather_texts`.
    """
    if dist.get_backend(group) == "fake":
        return
    for text in filter(None, gather_texts(problem, device, group)):
        raise ValueError(text)


@contextlib.contextmanager
def raise_on_all_ranks(device: torch.device | str) -> Iterator[None]:
    """Let what fails inside on one rank fail on all of them, with the words of the first.

    Raises:
        ValueError: any rank raised anything.
    Collectives: `gather_texts`, at the end.
    """
    problem, cause = "", None
    try:
        yield
    except Exception as error:
        problem, cause = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}", error
    problem = first_problem(problem, device)
    if problem:
        raise ValueError(problem) from cause


def digest_number(text: str) -> int:
    """62 bits of a hash of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def assert_same_on_all_ranks(facts: Mapping[str, object], device: torch.device | str, remedy: str) -> None:
    """Compare facts between all ranks of the world.

    Args:
        facts: what must be equal, by what it is called.
        device: this rank's.
        remedy: the end of the message.
    Raises:
        ValueError: a fact differs; on every rank alike, with the ranks and what each has.
    Collectives: an all-gather over the world of one number; where it differs, `gather_texts`. Nothing on one process.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return
    text = json.dumps({name: str(value) for name, value in facts.items()})
    number = torch.tensor([digest_number(text)], device=device)
    if len(gather_quietly(number, world_group()).unique()) == 1:
        return
    found = differences(list(map(json.loads, gather_texts(text, device))))
    more = f"; and {len(found) - REPORTED} more" if len(found) > REPORTED else ""
    raise ValueError(f"the ranks were not started alike: {'; '.join(found[:REPORTED])}{more}. {remedy}")


def differences(facts: Sequence[Mapping[str, str]], ranks: Sequence[int] | None = None) -> list[str]:
    """Return a text for each fact that differs between ranks, with its values; `ranks` of facts: 0, 1 ... if None."""
    ranks = ranks or range(len(facts))
    found = []
    for name in dict.fromkeys(name for each in facts for name in each):
        values: dict[str, list[int]] = {}
        for rank, own in zip(ranks, facts, strict=True):
            values.setdefault(own.get(name, "missing"), []).append(rank)
        if len(values) > 1:
            reported = ", ".join(f"{value} on {ranks_in_words(who)}" for value, who in values.items())
            found.append(f"{name} is {reported}")
    return found


@functools.lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Return the versions of Python, of this package and of those that it uses."""
    facts = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in PACKAGES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = "missing"
    return facts


def model_facts(model: nn.Module) -> dict[str, str]:
    """Return the class, and names, shapes and dtypes of all parameters. Their values are rank 0's anyway."""
    parameters = [(name, tuple(parameter.shape), str(parameter.dtype)) for name, parameter in model.named_parameters()]
    digest = hashlib.sha256(repr(parameters).encode()).hexdigest()[:12]
    return {"the model": f"{type(model).__name__} with {len(parameters)} parameters ({digest})"}


def argument_facts(arguments: Any) -> dict[str, str]:
    """Return Trainer's arguments, but for those that may differ from rank to rank."""
    return {
        name: repr(value)
        for name, value in arguments.to_dict().items()
        if name not in OWN_ARGUMENTS and not name.startswith(OWN_PREFIXES) and isinstance(value, PLAIN)
    }


def loader_facts(loader: torch.utils.data.DataLoader) -> dict[str, str]:
    """Return the length of the data set, a digest of three rows if reading changes nothing, the batch size."""
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
    """Return whether rows never change: lists, tensors, and tables of `datasets` without a transformation."""
    if isinstance(dataset, (list, tuple)) or type(dataset) is torch.utils.data.TensorDataset:
        return True
    if type(dataset).__module__ == "datasets.arrow_dataset":
        return dataset.format["type"] in (None, "torch", "numpy", "python")
    return False


def _plain(value: Any) -> Any:
    """Return a value that equal rows have in common on all ranks: numbers and texts, and the type of anything else."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), str(value.dtype), value.flatten().tolist())
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist") and hasattr(value, "dtype"):  # numpy
        return _plain(value.tolist())
    return value if isinstance(value, (str, int, float, bool, bytes, type(None))) else type(value).__name__
