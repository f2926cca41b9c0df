"""A plain model that accelerate or Trainer is given on a grid: it is sharded there, and its optimizer follows."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from hf_axonn.accelerator.requests import check_model
from hf_axonn.compat.messages import get_logger
from hf_axonn.distributed.collectives import world_rank
from hf_axonn.engine.state import parallel_state


logger = get_logger(__name__)


def shard_plain_model(model: nn.Module, plugin, device: torch.device) -> bool:
    """Parallelize a model that is not, with a warning that names the better way. Returns whether it had to.

    Raises:
        ValueError: it lies on another grid, or with other settings (`check_model`); as `parallelize`.
    """
    from hf_axonn.parallel.parallelize import parallelize

    state = parallel_state(model)
    if state is not None:
        check_model(state, plugin.config)
    if plugin.grid.size == 1 or state is not None:
        return False
    if world_rank() == 0 and plugin.grid.size > plugin.grid.data and _could_be_read_in_slices(model):
        _advise(str(plugin.grid))
    _, report = parallelize(model.to(device), plugin.grid, config=plugin.config)
    if world_rank() == 0:
        logger.info(report)
    return True


def _could_be_read_in_slices(model: nn.Module) -> bool:
    """Return whether `from_pretrained` takes such models; with an adapter, its base."""
    from transformers import PreTrainedModel

    base: Callable[[], nn.Module] = getattr(model, "get_base_model", lambda: model)
    return isinstance(base(), PreTrainedModel)


@functools.cache
def _advise(grid: str) -> None:
    """Warn once, however many models are prepared."""
    logger.warning(
        f"a model was loaded whole on every rank and is sharded over {grid} now. hf_axonn.from_pretrained(name, "
        "grid=...), or load: sharded in the launch file, reads only each rank's own slices."
    )


def point_to_shards(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that was made on full parameters have the sharded ones, and none of other stages of a pipeline;
    its groups and settings stay.

    Raises:
        ValueError: it has taken steps, so its state is of the full parameters.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # Left by install.distributed and by pipeline.stages.
    if not any(hasattr(each, "sharded_as") or hasattr(each, "of_other_stage") for each in parameters):
        return
    if optimizer.state:
        raise ValueError(
            "the optimizer has taken steps on the whole model already: shard the model with hf_axonn.parallelize "
            "before the optimizer is made."
        )
    for group in optimizer.param_groups:
        group["params"] = [
            getattr(parameter, "sharded_as", parameter)
            for parameter in group["params"]
            if not hasattr(parameter, "of_other_stage")
        ]
