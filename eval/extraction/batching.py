"""Plan of a run: batches of samples of about the same length, units of batches, and passes of a good size.

A batch holds samples that need little padding; long ones come first, so that memory runs out at the beginning or not
at all, and the time left is not estimated too low. A unit is some batches that one rank works through: it decodes
rows of all of them together. Units are dealt to the ranks, so the results of one depend on no other rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from hf_axonn.compat.messages import get_logger
from hf_axonn_eval.extraction.scoring import core, device_of
from hf_axonn_eval.extraction.work_split import WorkSplit


if TYPE_CHECKING:
    import torch

logger = get_logger(__name__)
T = TypeVar("T")

PADDING = (8, 4)  # one column of 8 may be padding, and one of 4 places with logits
MOST_TOGETHER = 8  # batches in a unit
_TOKENS = {"cpu": 4096, "cuda": 65536}  # in a batch: more of them make a device no faster
# In a pass. A CPU multiplies as fast with a thousand tokens as with more, and what lies between the layers of more of
# them (6 MB for 1,536 numbers a token) no longer stays in its caches, nor in memory that the process holds already.
_IN_A_PASS = {"cpu": 1024}
_MOST_ROWS = 256
_MORE_ROWS = 4
_MEMORY_SHARE = 0.5  # of what is free


def plan_batches(lengths: Sequence[tuple[int, int]], batch_size: int, *, padding: bool) -> list[list[int]]:
    """Divide samples into batches.

    Args:
        lengths: prefix and suffix length of every sample, in tokens.
        batch_size: samples in a batch, at most.
        padding: whether a batch may hold different lengths.
    Returns:
        the places of the samples of each batch, in an order that depends on `lengths` only.
    """

    def key(place: int) -> tuple[int, int]:
        prefix, suffix = lengths[place]
        return prefix + suffix, suffix

    batches: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=key, reverse=True):  # stable: equal lengths keep their order
        if batches and len(batches[-1]) < batch_size:
            longest, here = key(batches[-1][0]), key(place)
            if here == longest or (padding and _close(here, longest)):
                batches[-1].append(place)
                continue
        batches.append([place])
    return batches


def _close(here: tuple[int, int], longest: tuple[int, int]) -> bool:
    return all(most * abs(large - small) <= large for large, small, most in zip(longest, here, PADDING, strict=True))


def even_rows(count: int, batch_size: int, shares: int) -> int:
    """Return how many of `count` rows are in a batch, at most `batch_size`, so that each of several `shares` of ranks
    gets as many batches."""
    if shares == 1:
        return batch_size
    batches = shares * -(-count // (batch_size * shares))
    return -(-count // batches)


def plan_units(batches: Sequence[T], shares: int) -> list[list[T]]:
    """Divide batches into units of about equal length, as many for each of `shares` ranks where there are enough."""
    units = min(len(batches), shares * -(-len(batches) // (MOST_TOGETHER * shares)))
    size, longer = divmod(len(batches), max(1, units))
    starts = [number * size + min(number, longer) for number in range(units + 1)]
    return [list(batches[start:stop]) for start, stop in pairwise(starts)]


def in_passes(batches: Sequence[Sequence[int]], fed: Sequence[int], device: torch.device) -> list[list[int]]:
    """Divide batches into passes of about the same number of rows, where a device is faster with fewer tokens.

    The division depends on lengths and the kind of device only, so that every grid adds the same numbers in the same
    order.

    Args:
        batches: places of samples.
        fed: tokens that a pass takes of each sample.
    """
    most = _IN_A_PASS.get(device.type)
    passes: list[list[int]] = []
    for batch in batches:
        tokens = len(batch) * max(fed[place] for place in batch)
        number = min(len(batch), -(-tokens // most)) if most is not None else 1
        rows = -(-len(batch) // number)
        passes += [list(batch[at : at + rows]) for at in range(0, len(batch), rows)]
    return passes


def decoded_rows(model, batch_size: int, longest: int) -> int:
    """Return how many rows are decoded together: more than are scored together, as a pass feeds one token of each.

    With few rows a step takes as long as reading the weights does. Short rows are decoded four batches at a time, long
    ones, whose keys and values fill the memory, one.

    Args:
        longest: tokens of the longest sample.
    """
    if batch_size == 1:  # there is no memory for more
        return 1
    held = _MORE_ROWS * _TOKENS.get(device_of(model).type, _TOKENS["cpu"])
    return max(batch_size, min(_MORE_ROWS * batch_size, held // longest))


def smaller(batches: Sequence[Sequence[T]], batch_size: int) -> list[list[T]]:
    """Divide batches further, into batches of at most `batch_size`."""
    return [list(batch[at : at + batch_size]) for batch in batches for at in range(0, len(batch), batch_size)]


def fitting_batch_size(model, work_split: WorkSplit, *, longest: int, kept_logits: int) -> int:
    """Find a batch size that fits into memory, the same on every rank: a power of two. Collective over the world.

    Enough rows to keep the device busy, and no more than half of the free memory: of a GPU what one and two rows took
    is measured, of a CPU it is worked out from the model's sizes.

    Args:
        longest: tokens of the longest sample.
        kept_logits: places of a row at which logits are computed.
    """
    device = device_of(model)
    busy = min(_MOST_ROWS, _TOKENS.get(device.type, _TOKENS["cpu"]) // longest)
    free, row = (
        _memory_of_gpu(model, longest, kept_logits)
        if device.type == "cuda"
        else _memory_of_cpu(model, longest, kept_logits)
    )
    rows = -work_split.maximum(-max(1, min(busy, int(_MEMORY_SHARE * free / row))))
    return 2 ** (rows.bit_length() - 1)


def _memory_of_cpu(model, longest: int, kept_logits: int) -> tuple[float, float]:
    """Return the bytes that are free for this process, and an upper estimate of those that a row takes."""
    import psutil

    config = core(model).config.get_text_config()
    size = next(model.parameters()).element_size()
    # keys and values: of the pass, of rows that wait, of those that are decoded, and of a layer while it is copied
    cache = (2 + 2 * _MORE_ROWS) * 2 * config.num_hidden_layers * config.hidden_size * size
    hidden = 8 * (config.hidden_size + (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)) * 4
    heads = getattr(config, "num_attention_heads", 1)
    row = longest * (cache + hidden + longest * heads * 4) + kept_logits * config.vocab_size * (size + 2 * 4)
    return psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", "1")), row


def _memory_of_gpu(model, longest: int, kept_logits: int) -> tuple[float, float]:
    import torch

    from hf_axonn_eval.extraction.kv_cache import can_be_kept, empty_cache
    from hf_axonn_eval.extraction.scoring import last_logits, score_tokens

    taken = []
    device = device_of(model)
    for rows in (1, 2):
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        tokens = [[0] * longest] * rows
        logits = last_logits(model, tokens, keep=kept_logits, cache=empty_cache() if can_be_kept(model) else None)
        score_tokens(logits, torch.zeros(logits.shape[:2], dtype=torch.long, device=device))
        del logits
        taken.append(torch.cuda.max_memory_allocated(device) - before)
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused - taken[0], (2 + _MORE_ROWS) * max(taken[1] - taken[0], taken[0] // 8, 1)


def halving(batch_size: int, work: Callable[[int], T], *, alone: bool) -> tuple[T, int]:
    """Do `work(batch_size)`; where memory runs out, again with half of it.

    Args:
        work: what is done, with nothing left behind when it fails.
        alone: whether no other rank takes part. Else a rank that began again would leave the others waiting.
    Returns:
        the result of `work`, and the batch size with which it ran.
    Raises:
        ValueError: out of memory with one sample, or with other ranks taking part.
    """
    while True:
        try:
            return work(batch_size), batch_size
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            if batch_size == 1 or not alone:
                advice = (
                    "use a grid over more ranks, or shorter samples"
                    if batch_size == 1
                    else (f"give --batch_size {batch_size // 2}, the run goes on where it is")
                )
                raise ValueError(f"out of memory with batch_size {batch_size}: {advice}. {error}") from error
        batch_size //= 2
        logger.warning("out of memory: the batch size is %d from here on.", batch_size)


def _is_out_of_memory(error: BaseException) -> bool:
    import torch

    text = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
    )
