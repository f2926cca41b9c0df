"""Norms of gradients that torch would not take: over all stages of a pipeline, and of shards beside plain tensors, as
a head of the user's has. For `accelerator.clip_grad_norm_`, Trainer, and a loop's own
`torch.nn.utils.clip_grad_norm_`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_axonn.compat.dtensor_numbers import total_norm
from hf_axonn.compat.torch import grid_of
from hf_axonn.distributed.collectives import gather_quietly
from hf_axonn.distributed.mesh import GridMesh
from hf_axonn.engine.dtensors import whole


class StagedModel(Protocol):
    """A pipeline: the parameters of this rank's stages, those of them that another rank counts, and the grid."""

    @property
    def parameters(self) -> list[nn.Parameter]: ...

    @property
    def mesh(self) -> GridMesh: ...

    def counted_elsewhere(self) -> list[nn.Parameter]: ...


_alive: WeakSet[StagedModel] = WeakSet()


def watch_norms(pipeline: StagedModel) -> None:
    """Let norms that torch takes of gradients of this pipeline's model be those of all of its stages."""
    _alive.add(pipeline)


def norm_over_stages(
    gradients: Sequence[Tensor], pipelines: Collection[StagedModel], mesh: GridMesh, norm_type: float
) -> Tensor:
    """The norm of the gradients of all stages, a plain tensor, the same on every rank. A weight that the first and the
    last stage have counts once, and so does what is in no stage, as of another model.

    Raises:
        ValueError: a norm that is not that of its parts' norms.
    Collectives: those of norms of DTensors; an all-gather over pipe.
    """
    if norm_type <= 0:
        raise ValueError(f"norm_type={norm_type} is not possible over a grid with pipe: use a positive one, or inf.")
    twice = {id(weight.grad) for pipeline in pipelines for weight in pipeline.counted_elsewhere()}
    staged = {id(each.grad) for pipeline in pipelines for each in pipeline.parameters}
    own: list[Tensor] = []
    rest: list[Tensor] = []
    for each in gradients:
        if id(each) not in twice:
            (own if id(each) in staged or isinstance(each, DTensor) else rest).append(each)
    of_stage, of_rest = (_norm(each, norm_type, mesh.device) for each in (own, rest))
    norms = torch.cat([gather_quietly(of_stage, mesh.group("pipe")), of_rest.view(1)])
    return cast(Tensor, torch.linalg.vector_norm(norms, norm_type))


def _norm(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the norm in the widest of dtypes, the same on all ranks of a stage."""
    kinds = ([each for each in gradients if isinstance(each, DTensor) is sharded] for sharded in (True, False))
    norms = [whole(total_norm(each, norm_type)).double() for each in kinds if each]
    nothing = torch.zeros((), dtype=torch.float64, device=device)
    every = torch.stack([nothing, *norms])
    return cast(Tensor, torch.linalg.vector_norm(every, norm_type))


def norm_of_all(gradients: list[Tensor], norm_type: float) -> Tensor | None:
    """The norm where gradients are of a pipeline that is alive, or some are shards on a grid and some plain tensors;
    else None. A stage that has none of them, as of frozen layers, takes part in that of the others.

    Raises and communicates as `norm_over_stages`; without a pipeline, the collectives of a norm of DTensors.
    """
    given = {id(each) for each in gradients}
    meant = [each for each in _alive if any(id(parameter.grad) in given for parameter in each.parameters)]
    if not gradients and len(_alive) == 1:
        meant = list(_alive)
    if meant:
        return norm_over_stages(gradients, meant, meant[0].mesh, norm_type)
    sharded = [each for each in gradients if isinstance(each, DTensor)]
    if not 0 < len(sharded) < len(gradients) or grid_of(sharded[0].device_mesh) is None:
        return None
    return _norm(gradients, norm_type, sharded[0].device).to(sharded[0].dtype)
