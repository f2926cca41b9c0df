"""Wait for all ranks through the store that connects them, where a collective cannot wait for long.

NCCL ends what is not over within the timeout of its process group. gloo takes a timeout for each barrier, and notices
at once if a rank that it waits for dies: `collectives.barrier` comes here for other backends only.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from hf_axonn.compat.torch import watch_store


FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.5  # seconds between two looks into the store

_world: dist.ProcessGroup | None = None
_store: torch.distributed.Store
_meetings = 0  # goes on from world to world, which may share a store


def meet() -> None:
    """Wait until every rank of the world has come here, in the same order. No collective."""
    global _world, _store, _meetings
    if _world is not dist.group.WORLD:
        _world, _store = dist.group.WORLD, watch_store("watch")
    _meetings += 1
    name, pause = f"meeting/{_meetings}", FIRST_PAUSE
    arrived = _store.add(name, 1)
    while arrived < dist.get_world_size():
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
        arrived = _store.add(name, 0)
