"""The contenders of peers.py: how each one builds the model, and one training step of it, on one rank.

    plain           one process, no communication
    floor tokens    every rank takes its share of the tokens and of the optimizer's work, and communicates nothing
    floor width     every rank takes its share of the heads, features and vocabulary, and communicates nothing
    DDP             torch's DistributedDataParallel
    FSDP2           torch's fully_shard, layer by layer and around the rest
    native TP       Transformers' own tensor parallelism, from_pretrained(distributed_config=...)
    a grid          hf_axonn.from_pretrained(grid=...)

The floors do not train a useful model: they are what no way of dividing the work can beat. All others start from the
same weights, see the same global batch and must have the same losses.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

import hf_axonn
from hf_axonn.engine.gradient_sync import syncing


FLOORS = ("floor tokens", "floor width")
PEERS = ("DDP", "FSDP2", "native TP")
LEARNING_RATE = 3e-4


@dataclass
class Training:
    """A model in training on this rank.

    Args:
        model: what is called; its parameters are this rank's.
        trained: the parameters that this rank's optimizer steps, all by default.
        parts, part: into how many parts the rows of a batch are cut, and which of them is this rank's.
        around_backward: what backward has to run inside of.
        vocabulary: ids are taken modulo this number (only the narrow floor has fewer than the text).
    """

    model: nn.Module
    trained: list[nn.Parameter] | None = None
    parts: int = 1
    part: int = 0
    around_backward: Callable[[], AbstractContextManager] = nullcontext
    vocabulary: int | None = None
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
        rows = batch.chunk(self.parts)[self.part]
        if self.vocabulary is not None:
            rows = rows % self.vocabulary
        loss = self.model(input_ids=rows, labels=rows).loss
        with self.around_backward():
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def build(name: str, folder: Path) -> Training:
    """Make a contender on this rank.

    Args:
        name: one of FLOORS, PEERS, "plain", or a grid as `Grid.__str__` writes it without the axes of size 1 ("x=2").
        folder: the initial weights, saved by Transformers.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if name == "plain":
        return Training(AutoModelForCausalLM.from_pretrained(folder))
    if name == "floor tokens":
        model = AutoModelForCausalLM.from_pretrained(folder)
        return Training(model, trained=_own_share(model, rank, world), parts=world, part=rank)
    if name == "floor width":
        config = narrow(AutoConfig.from_pretrained(folder), world)
        return Training(AutoModelForCausalLM.from_config(config), vocabulary=config.vocab_size)
    if name == "DDP":
        model = nn.parallel.DistributedDataParallel(AutoModelForCausalLM.from_pretrained(folder))
        return Training(model, parts=world, part=rank)
    if name == "FSDP2":
        return Training(_fully_sharded(AutoModelForCausalLM.from_pretrained(folder)), parts=world, part=rank)
    if name == "native TP":
        from transformers.distributed.configuration_utils import DistributedConfig

        config = DistributedConfig(tp_size=world, tp_plan="auto")
        return Training(AutoModelForCausalLM.from_pretrained(folder, distributed_config=config))
    grid = parse_grid(name)
    model = hf_axonn.from_pretrained(str(folder), grid=grid)
    mesh = model.axonn.mesh
    return Training(
        model,
        parts=grid.dp_size,
        part=mesh.index("data", "z"),
        around_backward=partial(syncing, model),  # as accelerator.backward does
    )


def grid_name(grid: hf_axonn.Grid) -> str:
    """The axes that are longer than 1: "z=2 x=2"."""
    return " ".join(f"{axis}={size}" for axis, size in grid.as_dict().items() if size > 1)


def parse_grid(name: str) -> hf_axonn.Grid:
    """The inverse of `grid_name`; commas will do for spaces."""
    return hf_axonn.Grid(**{axis: int(size) for axis, size in (p.split("=") for p in name.replace(",", " ").split())})


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


def _fully_sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)
