"""The contenders of peers.py: how each one builds the model, and one training step of it, on one rank.

    plain           one process, no communication
    floor tokens    every rank takes its share of the tokens and of the optimizer's work, and communicates nothing
    DDP short rows  DDP over as many tokens in rows that are shorter by the number of ranks: the floor for divided rows
    floor width     every rank takes its share of the heads, features and vocabulary, and communicates nothing
    DDP             torch's DistributedDataParallel
    FSDP2           torch's fully_shard, layer by layer and around the rest
    FSDP2 in 2 stages   torchtitan's way: torch's 1F1B over two stages, each of them FSDP2 (stages.py)
    native TP       Transformers' own tensor parallelism, from_pretrained(distributed_config=...)
    native EP       Transformers' own expert parallelism of a mixture, all ranks on the same rows, beside its TP
    a grid          hf_axonn.from_pretrained(grid=...)
    AxoNN auto ...  AxoNN's own source on the same grid, by its auto_parallelize (axonn_models.py, axonn_on_cpus.py)
    AxoNN by hand ...   and by its expert mode, for grids with x > 1 and y = 1

The floors do not train a useful model: they are what no way of dividing the work can beat. All others start from the
same weights, see the same global batch and must have the same losses. Models lie on torch's default device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

import hf_axonn
from hf_axonn.config import AxonnConfig, Overlap
from hf_axonn.engine.gradient_sync import syncing
from tests.benchmarks.peers.axonn_models import axonn_llama, one_pass
from tests.benchmarks.peers.stages import InStages
from tests.helpers.traffic_counter import TrafficCounter, count_traffic


FLOORS = ("floor tokens", "DDP short rows", "floor width")
PEERS = ("DDP", "FSDP2", "native TP")
STAGES = "FSDP2 in 2 stages"
MIXTURES = ("native EP",)
KEEPING = " keeping "  # between a grid and its keep_gathered
EXPERTS = " experts "  # between a grid and its experts, gather or move
AXONN = ("AxoNN auto", "AxoNN by hand")
LEARNING_RATE = 3e-4


@dataclass
class Training:
    """A model in training on this rank.

    Args:
        model: what is called; its parameters are this rank's.
        trained: the parameters that this rank's optimizer steps, all by default.
        parts, part: into how many parts the rows of a batch are cut, and which of them is this rank's.
        short: whether rows are cut into shorter ones first, one for each part, where they are fewer.
        around_pass, around_forward, around_backward: what both, or forward, or backward, has to run inside of.
        vocabulary: ids are taken modulo this number (only the narrow floor has fewer than the text).
        counting: counts the collectives that run inside, where they can be counted.
        in_stages: runs forward and backward in their place.
    """

    model: nn.Module
    trained: list[nn.Parameter] | None = None
    parts: int = 1
    part: int = 0
    short: bool = False
    around_pass: Callable[[], AbstractContextManager] = nullcontext
    around_forward: Callable[[], AbstractContextManager] = nullcontext
    around_backward: Callable[[], AbstractContextManager] = nullcontext
    vocabulary: int | None = None
    counting: Callable[[], AbstractContextManager[TrafficCounter]] | None = None
    in_stages: InStages | None = None
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        parameters = list(self.model.parameters()) if self.trained is None else self.trained
        # The fused AdamW is Trainer's default. It wants plain tensors and DTensors in groups of their own.
        groups = [[p for p in parameters if isinstance(p, DTensor) is sharded] for sharded in (False, True)]
        groups = [{"params": group} for group in groups if group]
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)
        self.model.train()

    def step(self, batch: Tensor) -> Tensor:
        """One optimizer step on ids [B, S], which are the same on every rank; returns this rank's loss."""
        if self.short and len(batch) < self.parts:
            batch = batch.reshape(self.parts, -1)
        rows = batch.chunk(self.parts)[self.part]
        if self.vocabulary is not None:
            rows = rows % self.vocabulary
        if self.in_stages is not None:
            loss = self.in_stages.loss(rows)
        else:
            with self.around_pass():
                with self.around_forward():
                    loss = self.model(input_ids=rows, labels=rows).loss
                with self.around_backward():
                    loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def build(name: str, folder: Path) -> Training:
    """Make a contender on this rank.

    Args:
        name: one of FLOORS, PEERS, STAGES, "plain", or a grid as `Grid.__str__` writes it without the axes of size 1
            ("x=2"), alone or after one of AXONN; or before overlaps that are off ("z=2 without all_gather") or the
            setting keep_gathered ("pipe=2 z=2 keeping all") or experts ("z=4 experts move").
        folder: the initial weights, saved by Transformers.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if name == "plain":
        return Training(AutoModelForCausalLM.from_pretrained(folder))
    if name == "floor tokens":
        model = AutoModelForCausalLM.from_pretrained(folder)
        return Training(model, trained=_own_share(model, rank, world), parts=world, part=rank, short=True)
    if name == "floor width":
        config = narrow(AutoConfig.from_pretrained(folder), world)
        return Training(AutoModelForCausalLM.from_config(config), vocabulary=config.vocab_size)
    if name in ("DDP", "DDP short rows"):
        model = nn.parallel.DistributedDataParallel(AutoModelForCausalLM.from_pretrained(folder))
        return Training(model, parts=world, part=rank, short=name != "DDP")
    if name == "FSDP2":
        return Training(fully_sharded(AutoModelForCausalLM.from_pretrained(folder)), parts=world, part=rank)
    if name == STAGES:
        stages = InStages(AutoModelForCausalLM.from_pretrained(folder), 2)
        return Training(stages.model, parts=stages.parts, part=stages.part, in_stages=stages)
    if name in ("native TP", "native EP"):
        from transformers.distributed.configuration_utils import DistributedConfig

        experts = {"ep_size": world} if name == "native EP" else {}
        config = DistributedConfig(tp_size=world, tp_plan="auto", **experts)
        return Training(AutoModelForCausalLM.from_pretrained(folder, distributed_config=config))
    for mode in AXONN:
        if name.startswith(f"{mode} "):
            return _by_axonn(parse_grid(name.removeprefix(f"{mode} ")), folder, by_hand=mode == "AxoNN by hand")
    name, _, experts = name.partition(EXPERTS)
    name, _, kept = name.partition(KEEPING)
    sizes, _, off = name.partition(" without ")
    grid = parse_grid(sizes)
    keep = ({"keep_gathered": kept} if kept else {}) | ({"experts": experts} if experts else {})
    settings = AxonnConfig(grid=grid, overlap=Overlap(**dict.fromkeys(off.split(), False)), **keep)
    model = hf_axonn.from_pretrained(str(folder), grid=grid, config=settings)
    mesh = model.axonn.grid_mesh
    return Training(
        model,
        parts=grid.dp_size,
        part=mesh.index("data", "rows"),
        around_backward=partial(syncing, model),  # as accelerator.backward does
        counting=None if grid.pipe > 1 else partial(count_traffic, grid),  # torch's schedules send by themselves
    )


def axonn_names(grids: list[str]) -> list[str]:
    """AxoNN's contenders on these grids."""
    by_hand = [name for name in grids if (grid := parse_grid(name)).x > 1 and grid.y == 1]
    return [f"{mode} {name}" for mode, names in zip(AXONN, (grids, by_hand), strict=True) for name in names]


def grid_name(grid: hf_axonn.Grid) -> str:
    """The axes that are longer than 1: "z=2 x=2"."""
    return " ".join(f"{axis}={size}" for axis, size in grid.as_dict().items() if size > 1)


def parse_grid(name: str) -> hf_axonn.Grid:
    """The inverse of `grid_name`; commas will do for spaces, and a setting after the grid is not read."""
    sizes = name.partition(EXPERTS)[0].partition(KEEPING)[0].replace(",", " ").split()
    return hf_axonn.Grid(**{axis: int(size) for axis, size in (each.split("=") for each in sizes)})


def _by_axonn(grid: hf_axonn.Grid, folder: Path, *, by_hand: bool) -> Training:
    model = axonn_llama(folder, grid, by_hand=by_hand)
    # In its automatic mode all ranks have samples of their own; ranks are ordered as ours, y and x fastest.
    shared_by = grid.x * grid.y if by_hand else 1
    return Training(
        model,
        parts=dist.get_world_size() // shared_by,
        part=dist.get_rank() // shared_by,
        around_pass=partial(one_pass, model, by_hand=by_hand),
        counting=partial(count_traffic, grid),
    )


def narrow(config, parts: int):
    """The part of a Llama that one of `parts` ranks computes when heads, features and vocabulary are divided."""
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        setattr(config, name, max(1, getattr(config, name) // parts))
    return config


def _own_share(model: nn.Module, rank: int, world: int) -> list[nn.Parameter]:
    """Parameters dealt out to the ranks so that each has about the same number of elements."""
    shares: list[list[nn.Parameter]] = [[] for _ in range(world)]
    for parameter in sorted(model.parameters(), key=torch.numel, reverse=True):
        min(shares, key=lambda share: sum(map(torch.numel, share))).append(parameter)
    return shares[rank]


def fully_sharded(model: nn.Module, **options: Any) -> nn.Module:
    """FSDP2 over all ranks; `options` are those of `fully_shard`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)
