"""torchtitan's way to train in stages: torch's 1F1B over parts of a Llama, each of them FSDP2 over its own ranks.

The parts are made of Transformers' own modules; a row of the batch is a micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


class LlamaPart(nn.Module):
    """Consecutive layers of a Llama. Ids [B, S] or hidden states [B, S, H] -> hidden states, or logits [B, S, V]."""

    def __init__(self, model: Any, stage: int, stages: int) -> None:
        super().__init__()
        share = len(model.model.layers) // stages
        first, last = stage == 0, stage == stages - 1
        self.layers = model.model.layers[stage * share : None if last else (stage + 1) * share]
        self.embedding = model.model.embed_tokens if first else None
        self.rotary = model.model.rotary_emb
        self.norm = model.model.norm if last else None
        self.head = model.lm_head if last else None

    def forward(self, given: Tensor) -> Tensor:
        hidden = given if self.embedding is None else self.embedding(given)
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        rotated = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_ids=positions, position_embeddings=rotated)
        return hidden if self.norm is None or self.head is None else self.head(self.norm(hidden))


class InStages:
    """A rank's part of a Llama, and steps of it without the optimizer's.

    Args:
        model: the whole one.
        stages: P; ranks of a stage are neighbours, and FSDP2 divides it among them.
    """

    def __init__(self, model: nn.Module, stages: int) -> None:
        mesh = init_device_mesh(
            torch.get_default_device().type, (stages, dist.get_world_size() // stages), mesh_dim_names=("pipe", "data")
        )
        self.stage, self.stages, self.group = mesh.get_local_rank("pipe"), stages, mesh.get_group("pipe")
        self.parts, self.part = mesh["data"].size(), mesh.get_local_rank("data")
        self.model = LlamaPart(model, self.stage, stages)
        if self.parts > 1:
            for layer in self.model.layers:
                fully_shard(layer, mesh=mesh["data"], reshard_after_forward=False)
            fully_shard(self.model, mesh=mesh["data"], reshard_after_forward=False)
        self._schedules: dict[int, Schedule1F1B] = {}

    def loss(self, rows: Tensor) -> Tensor:
        """Forward and backward of the rows [B, S]; the mean loss, on all stages."""
        if len(rows) not in self._schedules:
            device = torch.get_default_device()
            stage = PipelineStage(self.model, self.stage, self.stages, device, group=self.group)
            self._schedules[len(rows)] = Schedule1F1B(stage, len(rows), loss_fn=_next_token_loss)
        losses: list[Tensor] = []
        targets = rows if self.stage == self.stages - 1 else None
        self._schedules[len(rows)].step(*([rows] if self.stage == 0 else []), target=targets, losses=losses)
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(loss, group=self.group)
        return loss


def _next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
