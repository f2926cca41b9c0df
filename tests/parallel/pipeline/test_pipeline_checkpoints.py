"""Checkpoints of a pipeline: between any grids, with and without pipe, and as an ordinary directory."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from hf_axonn import Grid, from_pretrained, load_sharded, parallelize, save_sharded, sync_gradients
from hf_axonn.checkpoint.whole_files import save_whole
from tests.helpers.equality import rows_of
from tests.helpers.float64 import Float64, relative_errors
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks


BOUND = 1e-10


def make(seed: int = 0) -> nn.Module:
    """A Llama with tied weights."""
    return tiny_model("smollm2", num_hidden_layers=4, seed=seed).train()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, grid: Grid | None = None) -> None:
    batch = tiny_batch(8, 7)
    with Float64():
        model(**(rows_of(batch, grid, dist.get_rank()) if grid else batch)).loss.backward()
    sync_gradients(model)
    optimizer.step()
    optimizer.zero_grad()


def new(grid: Grid, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = parallelize(make(seed), grid)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def error(model: nn.Module, truth: dict[str, torch.Tensor]) -> float:
    ours = state(model)
    return max(relative_errors(ours, {name: truth[name] for name in ours}).values())


def _go_around(folder: Path, pairs: list[tuple[Grid, Grid]], once: dict, twice: dict) -> dict[str, float]:
    found = {}
    for first, second in pairs:
        a, b = folder / f"{first} {second} a", folder / f"{first} {second} b"
        model, optimizer = new(first, 0)
        step(model, optimizer, first)
        save_sharded(model, a, optimizer=optimizer)
        other, its = new(second, 5)
        load_sharded(other, a, optimizer=its)
        found[f"{first} read on {second}"] = error(other, once)
        step(other, its, second)
        found[f"a step on {second}"] = error(other, twice)
        save_sharded(other, b, optimizer=its)
        load_sharded(model, b, optimizer=optimizer)
        found[f"{second} read on {first}"] = error(model, twice)
        for grid in (first, second):
            for place, truth in (("plain", once), (b, twice)):
                loaded = from_pretrained(str(folder / place), grid=grid, dtype=torch.float64)
                found[f"from_pretrained {place} on {grid}"] = error(loaded, truth)
        loaded.save_pretrained(folder / f"{first} {second} whole")
        save_whole(other, folder / f"{first} {second} files", max_shard_size=9000)
        if dist.get_rank() == 0:
            other.config.save_pretrained(folder / f"{first} {second} files")
        dist.barrier()
        for place in (f"{first} {second} whole", f"{first} {second} files", b):
            plain = AutoModelForCausalLM.from_pretrained(folder / place, dtype=torch.float64)
            found[f"one process reads {place}"] = error(plain, twice)
    return found


def test_a_checkpoint_goes_from_grid_to_grid(tmp_path: Path) -> None:
    model = make()
    model.save_pretrained(tmp_path / "plain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer)
    once = state(model)
    model.save_pretrained(tmp_path / "plain")
    step(model, optimizer)
    pairs = [(Grid(pipe=2, z=2), Grid(pipe=4)), (Grid(y=2, x=2), Grid(pipe=2, x=2))]
    for found in run_ranks(_go_around, 4, tmp_path, pairs, once, state(model)):
        assert all(its <= BOUND for its in found.values()), found
