"""An Accelerator over a grid: the methods of accelerate's class that must know of it.

    training.py   prepare, backward, accumulate, clipping, schedulers
    data.py       data loaders, gather, reduce: the samples of each rank
    files.py      save_model, save_state, load_state
    masters.py    float32 weights for optimizers

No class of accelerate is changed: an Accelerator that was made with an AxonnPlugin becomes one of this class.
"""

from __future__ import annotations

from accelerate import Accelerator

from hf_axonn.accelerator.data import DataMethods
from hf_axonn.accelerator.files import FileMethods, LoadMethods
from hf_axonn.accelerator.masters import MasterMethods
from hf_axonn.accelerator.training import TrainingMethods
from hf_axonn.distributed.mesh import grid_mesh
from hf_axonn.engine.optimizer_steps import step_on_shards


class GridMethods(TrainingMethods, DataMethods, FileMethods, MasterMethods):
    """Methods that are different over a grid; they stand before the class whose methods they replace."""


class GridAccelerator(GridMethods, Accelerator):
    """accelerate's Accelerator over a grid. Made by `bind`, not by its constructor."""


class SingleMethods(LoadMethods, MasterMethods):
    """Methods that are different on a grid of one rank."""


class SingleAccelerator(SingleMethods, Accelerator):
    """accelerate's Accelerator on a grid of one rank, which also loads the states of larger grids."""


def bind(accelerator: Accelerator, plugin) -> None:
    """Turn an Accelerator into one over a grid. Collectives: creation of the process groups, the first time."""
    accelerator.axonn_plugin = plugin
    step_on_shards()  # before a learning rate schedule wraps the step of an optimizer
    own = type(accelerator)
    methods, ready = (SingleMethods, SingleAccelerator) if plugin.grid.size == 1 else (GridMethods, GridAccelerator)
    if plugin.grid.size > 1:
        grid_mesh(plugin.grid, accelerator.device.type)
    if own is Accelerator:
        accelerator.__class__ = ready
    elif not issubclass(own, methods):  # a subclass of the user's
        accelerator.__class__ = type(f"Grid{own.__name__}", (methods, own), {"__module__": own.__module__})
