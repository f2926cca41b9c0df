"""Requests that a grid would not fulfil are refused, with the names of both.

Accelerate reads the same environment for every engine, and takes what it does not use without a word: an FSDP plugin
beside a grid, the grid of a second Accelerator. A run that asks for something should get it or an error. Settings of
DistributedDataParallel that change no result (find_unused_parameters, static_graph, bucket_cap_mb, broadcast_buffers,
gradient_as_bucket_view) are fulfilled by doing nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from hf_axonn.compat.accelerate import check_arguments, parallelism_in_use
from hf_axonn.config import LAUNCH_FILE, NOTEBOOK, AxonnConfig, Settings
from hf_axonn.topology.grid import Grid
from hf_axonn.topology.upstream_sizes import PREFIX, grid_with_sizes, read_sizes


if TYPE_CHECKING:
    from hf_axonn.engine.state import ParallelState


# The variable by which Accelerate turns another engine on, also for a plugin object -> what asks for it.
ENGINES = {
    "ACCELERATE_USE_FSDP": "FSDP (fsdp_plugin, TrainingArguments(fsdp=...), distributed_type: FSDP)",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed (deepspeed_plugin, TrainingArguments(deepspeed=...), deepspeed_config)",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM (megatron_lm_plugin, megatron_lm_config)",
}
TRAINER_SETTINGS = ("async_save", "offload", "save_failure")  # that Trainer or `prepare` reads, and not the model
ON = ("1", "true", "yes", "y", "t", "on")


def refuse_other_engines(grid: Grid, environ: Mapping[str, str] | None = None) -> None:
    """Refuse what the environment asks of other engines; a plugin object of Accelerate sets it, too. No communication.

    Raises:
        ValueError: another engine is turned on, or the sizes of a ParallelismConfig mean another grid.
    """
    environ = os.environ if environ is None else environ
    for variable, engine in ENGINES.items():
        if environ.get(variable, "").lower() in ON:
            raise ValueError(
                f"{variable}={environ[variable]} asks for {engine}, and AxonnPlugin for the grid {grid}, which shards "
                "the model itself: omit one of them."
            )
    grid_with_sizes(read_environment(environ), grid, f"the environment ({PREFIX.upper()}*)")


def read_environment(environ: Mapping[str, str] | None = None) -> dict[str, int]:
    """Return the sizes of a ParallelismConfig that the environment has, as Accelerate reads them.

    Raises:
        ValueError: one is not a whole number of at least 1.
    """
    environ = os.environ if environ is None else environ
    return read_sizes({name.lower(): value for name, value in environ.items()}, PREFIX)


def watch_accelerators() -> None:
    """Compare what each Accelerator of this process is given from now on with what it gets. No communication."""
    check_arguments(_check_accelerator)


def _check_accelerator(accelerator: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse the grid of an Accelerator that comes after another: all of a process share the state of the first.

    Raises:
        ValueError: the grid or the settings of its AxonnPlugin are not in effect, a torch_tp_plugin stands beside, or
            the mixed precision of notebook_launcher is not, as with TrainingArguments that were made before it.
    """
    requested = getattr(arguments.get("parallelism_config"), "config", None)
    found = getattr(parallelism_in_use()[0], "config", None)
    if isinstance(requested, AxonnConfig) and requested != found:
        raise ValueError(
            f"this Accelerator was given AxonnPlugin({requested}), but the first Accelerator of this process has "
            f"{f'AxonnPlugin({found})' if found else 'no grid'}, and all share its state: give both the same "
            "plugin, or train in another process."
        )
    if arguments.get("torch_tp_plugin") is not None and found is not None and found.grid.size > 1:
        raise ValueError(
            f"torch_tp_plugin asks for Transformers' tensor parallelism, and AxonnPlugin for the grid {found.grid}: "
            "omit torch_tp_plugin, and write its tp_size as the axis x of the grid."
        )
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if os.environ.get(LAUNCH_FILE) == NOTEBOOK and launched not in ("no", accelerator.mixed_precision):
        raise ValueError(
            f"notebook_launcher has mixed_precision={launched!r}, and this Accelerator or Trainer "
            f"{accelerator.mixed_precision!r}: make TrainingArguments in the function, or change one of the two."
        )


def check_model(state: ParallelState, config: AxonnConfig) -> None:
    """Compare the grid that a model lies on with that of the Accelerator or Trainer that gets it. No communication.

    Raises:
        ValueError: it is another grid, or the AxonnPlugin has a setting that the model was sharded without.
    """
    if state.grid != config.grid:
        raise ValueError(
            f"the model lies on the grid {state.grid}, and the AxonnPlugin of this Accelerator or Trainer has "
            f"{config.grid}: give hf_axonn.from_pretrained (or parallelize) and AxonnPlugin the same grid."
        )
    for name in (item.name for item in fields(Settings) if item.name not in TRAINER_SETTINGS):
        requested, found = getattr(config, name), getattr(state.config, name)
        if requested not in (found, getattr(Settings, name)):
            raise ValueError(
                f"AxonnPlugin({name}={requested!r}) has no effect on a model that was sharded with {name}={found!r} "
                "before: pass config=plugin.config to hf_axonn.from_pretrained (or parallelize)."
            )
