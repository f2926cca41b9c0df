"""torch.distributed.checkpoint on models over a grid: any grid, one process and FSDP2 read what the others wrote.

By torch's own functions alone, as docs/how_to/torch_checkpoints.md has them: weights and AdamW's moments are equal
to the bit.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from hf_axonn import Grid, parallelize
from hf_axonn.engine.gradient_sync import syncing
from tests.benchmarks.peers.contenders import fully_sharded
from tests.helpers.equality import full
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks


GRIDS = {
    "x2": Grid(x=2),
    "y2": Grid(y=2),
    "z2": Grid(z=2),
    "pipe2": Grid(pipe=2),
    "x2z2": Grid(x=2, z=2),
}
make = functools.partial(tiny_model, "llama", dtype=torch.float32)
FSDP2, ALONE = "FSDP2", "one process"


def made(name: str, seed: int):
    """A model of that kind on these ranks, and its optimizer, which has not stepped."""
    model = make(seed=seed).train()
    if name == FSDP2:
        fully_sharded(model)
    elif name != ALONE:
        model, _ = parallelize(model, GRIDS[name])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(name: str):
    """Make the same, and train it for two steps on rows that depend on the seed alone."""
    model, optimizer = made(name, seed=3)
    for _ in range(2):
        loss = model(**tiny_batch(2, 6)).loss
        if name in GRIDS:
            with syncing(model):
                loss.backward()
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def states(model, optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    return {"model": weights, "optimizer": moments}


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Each tensor in full, by its name; of a pipeline those of this rank's stages."""
    return {
        f"{part}.{name}": full(value)
        for part, values in state.items()
        for name, value in sorted(values.items())
        if isinstance(value, torch.Tensor)
    }


def write(names: list[str], folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Save each kind; returns what it has in memory, in full, of a pipeline this rank's stages."""
    held = {}
    for name in names:
        state = states(*trained(name))
        held[name] = whole(state)
        dcp.save(state, checkpoint_id=folder / name)
        dist.barrier()
    return held


def read(names: list[str], sources: list[str], folder: Path) -> list[str]:
    """Read each source into each kind of model; returns what is not that of the source."""
    wrong = []
    for name in names:
        for source in sources:
            truth = torch.load(folder / f"{source}.pt")
            model, optimizer = made(name, seed=5)
            state = states(model, optimizer)
            dcp.load(state, checkpoint_id=folder / source)
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
                options=StateDictOptions(flatten_optimizer_state_dict=True),
            )
            found = whole(states(model, optimizer))
            assert found and (name == "pipe2" or found.keys() == truth.keys()), (name, source)
            wrong += [
                f"{source} in {name}: {key}" for key, value in found.items() if not torch.equal(value, truth[key])
            ]
    return wrong


def keep_truth(ranks: list[dict[str, dict[str, torch.Tensor]]], folder: Path) -> list[str]:
    """Keep what a process without a group reads of each source; returns what is not what the ranks had in memory."""
    wrong = []
    for source in ranks[0]:
        state = states(*made(ALONE, seed=7))
        dcp.load(state, checkpoint_id=folder / source, no_dist=True)
        found = whole(state)
        torch.save(found, folder / f"{source}.pt")
        assert {key for rank in ranks for key in rank[source]} == found.keys(), source
        for number, rank in enumerate(ranks):
            wrong += [f"{source}, rank {number}: {k}" for k, v in rank[source].items() if not torch.equal(v, found[k])]
    return wrong


def write_alone(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    state = states(*trained(ALONE))
    dcp.save(state, checkpoint_id=folder / ALONE, no_dist=True)
    return {ALONE: whole(state)}


def pass_whole_states(names: list[str]) -> list[str]:
    """Rank 0 has a whole state on its CPU, and gives the next kind of model its shards; returns what differs."""
    get = StateDictOptions(full_state_dict=True, cpu_offload=True)
    give = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    wrong = []
    for name, other in zip(names, names[1:] + names[:1], strict=True):
        model, optimizer = trained(name)
        truth = whole(states(model, optimizer))
        weights, moments = get_state_dict(model, optimizer, options=get)
        assert bool(weights) == (dist.get_rank() == 0)
        target = made(other, seed=5)
        # Not set_state_dict, which on a rank with an empty state of a model sets the optimizer alone.
        set_model_state_dict(target[0], weights, options=give)
        set_optimizer_state_dict(*target, moments, options=give)
        found = whole(states(*target))
        assert found.keys() == truth.keys()
        wrong += [f"{name} to {other}: {key}" for key, value in found.items() if not torch.equal(value, truth[key])]
    model, optimizer = made("pipe2", seed=5)
    for call in (
        lambda: get_state_dict(model, optimizer, options=get),
        lambda: set_model_state_dict(model, {}, options=give),
        lambda: set_optimizer_state_dict(model, optimizer, {}, options=give),
    ):
        with pytest.raises(ValueError, match="full_state_dict is not possible over pipe"):
            call()
    return wrong


@pytest.mark.slow
def test_every_grid_and_back(tmp_path):
    pairs = [name for name, grid in GRIDS.items() if grid.size == 2] + [FSDP2]
    held = run_ranks(write, 2, pairs, tmp_path), run_ranks(write, 4, ["x2z2"], tmp_path), [write_alone(tmp_path)]
    sources = [*pairs, "x2z2", ALONE]
    assert [keep_truth(ranks, tmp_path) for ranks in held] == [[], [], []]
    assert run_ranks(read, 2, pairs, sources, tmp_path) == [[], []]
    assert run_ranks(read, 4, ["x2z2"], sources, tmp_path) == [[]] * 4
    assert run_ranks(pass_whole_states, 2, ["x2", "y2", "z2", FSDP2]) == [[], []]
