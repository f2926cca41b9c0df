"""What each rank has to say, told to all, so that a failure on one rank is an error on every rank and no one waits."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hf_axonn.distributed.collectives import gather_quietly, start_all_gather
from hf_axonn.distributed.watchdog.diagnosis import ranks_in_words


TOLD = 3  # differences are told one by one


def gather_texts(text: str, device: torch.device | str, group: ProcessGroup | None = None) -> list[str]:
    """The texts of all ranks of a group (default: the world), by rank; `device` is this rank's.

    Collectives: an all-gather over the group of the lengths, and one of the bytes if there are any.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [text]
    group = group or dist.group.WORLD
    content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.empty(0).byte()
    lengths = start_all_gather(torch.tensor([len(content)], device=device), group).wait().flatten().tolist()
    if not any(lengths):
        return [""] * len(lengths)
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(content)] = content.to(device)
    blocks = start_all_gather(padded, group).wait().cpu()
    return [
        block[:length].numpy().tobytes().decode(errors="replace")
        for block, length in zip(blocks, lengths, strict=True)
    ]


def first_problem(problem: str, device: torch.device) -> str:
    """The problem of the lowest rank that has one, with its rank; empty if none has. Collectives: `gather_texts`."""
    problems = gather_texts(problem, device)
    named = [f"rank {rank}: {text}" if len(problems) > 1 else text for rank, text in enumerate(problems) if text]
    more = f" ({len(named) - 1} more ranks failed)" if len(named) > 1 else ""
    return named[0] + more if named else ""


@contextlib.contextmanager
def raising_together(device: torch.device | str) -> Iterator[None]:
    """Around what may fail on one rank only: then it fails on all of them, with the words of the first.

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


def require_alike(facts: Mapping[str, object], device: torch.device | str, remedy: str) -> None:
    """Make sure that all ranks of the world say the same.

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
    if len(gather_quietly(number, dist.group.WORLD).unique()) == 1:
        return
    every = [json.loads(its) for its in gather_texts(text, device)]
    found = differences(every)
    more = f"; and {len(found) - TOLD} more" if len(found) > TOLD else ""
    raise ValueError(f"the ranks were not started alike: {'; '.join(found[:TOLD])}{more}. {remedy}")


def differences(facts: Sequence[Mapping[str, str]], ranks: Sequence[int] | None = None) -> list[str]:
    """For each fact that is not the same on all ranks, who has what; `ranks` of the facts: 0, 1 ... if None."""
    ranks = ranks or range(len(facts))
    found = []
    for name in dict.fromkeys(name for its in facts for name in its):
        values: dict[str, list[int]] = {}
        for rank, its in zip(ranks, facts, strict=True):
            values.setdefault(its.get(name, "missing"), []).append(rank)
        if len(values) > 1:
            told = ", ".join(f"{value} on {ranks_in_words(who)}" for value, who in values.items())
            found.append(f"{name} is {told}")
    return found
