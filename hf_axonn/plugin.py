"""Accelerate's view of a grid: a ParallelismConfig that it takes.

    accelerator = Accelerator(parallelism_config=AxonnPlugin(grid=Grid(z=2, x=2)))
    accelerator = Accelerator()                        # under `accelerate launch --config axonn.yaml`

To Accelerate, pipe * context * x * y is its tensor-parallel size (ranks that get the same samples) and
data * z / context its sharded data-parallel size (ranks that get different ones). No method of Accelerate's classes is
changed: `_validate_accelerator` gets the live object, and turns that one into a `GridAccelerator`
(accelerator/accelerator.py).
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Concatenate, ParamSpec

from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils.dataclasses import DDPCommunicationHookType

from hf_axonn.accelerator.requests import read_environment, refuse_other_engines, watch_accelerators
from hf_axonn.compat.post_import import after_import
from hf_axonn.compat.versions import check_versions, refusal
from hf_axonn.config import PRECISIONS, VARIABLE, AxonnConfig, Settings
from hf_axonn.distributed.consistency import assert_same_on_all_ranks, versions
from hf_axonn.distributed.mesh import grid_mesh
from hf_axonn.distributed.watchdog.watchdog import watch
from hf_axonn.topology.grid import Grid
from hf_axonn.topology.upstream_sizes import ACCELERATE_SIZES, grid_with_sizes, read_sizes


P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True)
class _Arguments(Settings):
    """The arguments of AxonnPlugin: the grid, which may be the first without its name, and `Settings`."""

    grid: Grid | None = field(default=None, kw_only=False)


_Arguments.__init__.__qualname__ = "AxonnPlugin.__init__"  # the name under which Python reports a wrong argument


def _arguments_of(source: Callable[P, object]) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give an `__init__` the signature of `source`, for `inspect.signature` and for type checkers."""

    def decorate(init: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        init.__signature__ = inspect.Signature([this, *inspect.signature(source).parameters.values()])
        return init

    return decorate


class AxonnPlugin(ParallelismConfig):
    """Train with Accelerate over a grid.

    Args:
        grid: sizes of the axes; None takes the grid and all settings of the launch file (the environment variable
            AXONN_CONFIG). Under a launch file it must be that of the file.
        dp_replicate_size, dp_shard_size, tp_size, cp_size: the grid in the words of Accelerate's ParallelismConfig
            (topology/upstream_sizes.py), whose place this class takes under a launch file; by default those of the
            environment (PARALLELISM_CONFIG_*), as there.
        overlap, reduce_dtype, residual_dtype, keep_gathered, prefetch, tune_matmuls, layout, experts,
            context_attention, allow_untested, offload, async_save, save_failure, schedule, stages_per_rank,
            stage_layers: those of `config.Settings`.
    Raises:
        ValueError: no grid is given and none was launched, or the launch file has another grid or another value of a
            setting (`AxonnConfig.with_launch`), or there are settings without a grid, or a library has a release that
            is not proven (`check_versions`); later, when the Accelerator is made: the grid is not the number of
            processes, or residual_dtype is given without bf16, or fp8, fp16 with pipe, another engine or a
            communication hook of DistributedDataParallel is asked for (accelerator/requests.py).
    """

    @_arguments_of(_Arguments)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        stock = {item.name: kwargs.pop(item.name) for item in fields(ParallelismConfig) if item.name in kwargs}
        given = _Arguments(*args, **kwargs)
        settings = {item.name: getattr(given, item.name) for item in fields(Settings)}
        grid = _grid_of_stock(stock, given.grid)
        if grid is None:
            config = AxonnConfig.with_launch(None, "AxonnPlugin")
            unread = [name for name, value in settings.items() if value != getattr(Settings, name)]
            if unread:
                raise ValueError(
                    f"AxonnPlugin({unread[0]}=...) without a grid takes all settings from the launch file: write "
                    f"{unread[0]} there, under axonn_config, or pass grid=Grid(...) as well."
                )
        else:
            config = AxonnConfig.with_launch(AxonnConfig(grid=grid, **settings), "AxonnPlugin")
        self.config = config
        if config.grid.size > 1:
            check_versions()
            _install_trainer_hooks()
            watch_accelerators()
        super().__init__(
            dp_replicate_size=1,
            dp_shard_size=config.grid.dp_size,
            tp_size=config.grid.size // config.grid.dp_size,
            cp_size=1,
            sp_size=1,
        )

    @property
    def grid(self) -> Grid:
        """Sizes of the axes."""
        return self.config.grid

    @property
    def tp_enabled(self) -> bool:
        """False: Accelerate's own tensor-parallel preparation is not for our models."""
        return False

    def __repr__(self) -> str:
        return f"AxonnPlugin({self.config})"

    def __getstate__(self) -> dict[str, Any]:
        # Process groups cannot be pickled, and Trainer saves its arguments; they are looked up again when needed.
        return {**self.__dict__, "device_mesh": None}

    def __deepcopy__(self, memo: dict) -> AxonnPlugin:
        copied = AxonnPlugin(self.grid)
        copied.config = self.config
        return copied

    def build_device_mesh(self, device_type: str):
        """The (dp_shard, tp) mesh that Accelerate's data loaders read, made of the grid's own process groups."""
        if self.grid.size == 1:
            return super().build_device_mesh(device_type)
        return grid_mesh(self.grid, device_type).sample_mesh

    def _validate_accelerator(self, accelerator) -> None:
        from hf_axonn.accelerator.accelerator import bind  # which imports accelerate, of which this is a part

        if self.grid.size > 1:
            refuse_other_engines(self.grid)
        if accelerator.num_processes > 1:
            watch()
            facts = self.config.to_facts() | {
                "mixed_precision": accelerator.state.mixed_precision,
                "dynamo_config": str(accelerator.state.dynamo_plugin),
            }
            assert_same_on_all_ranks(
                facts | versions(), accelerator.device, "Start every rank with the same file and packages."
            )
        self.grid.check(accelerator.num_processes)
        if self.grid.size == 1:
            bind(accelerator, self)
            return
        if accelerator.state.mixed_precision not in PRECISIONS:
            raise ValueError(
                f"mixed_precision={accelerator.state.mixed_precision} is not supported over a grid: use "
                f"{', '.join(PRECISIONS)}."
            )
        if self.grid.pipe > 1 and accelerator.state.mixed_precision == "fp16":
            raise ValueError(
                f"mixed_precision=fp16 is not possible over a grid with pipe ({self.grid}): a pipeline makes its "
                "gradients in the forward pass, before the scale of fp16 is known. Use bf16."
            )
        if self.config.residual_dtype == "bfloat16" and accelerator.state.mixed_precision != "bf16":
            raise ValueError(
                f"residual_dtype is bfloat16, but mixed_precision is {accelerator.state.mixed_precision}: write bf16, "
                "or omit residual_dtype. A model of bfloat16 weights has such a residual stream already."
            )
        hook = getattr(accelerator.ddp_handler, "comm_hook", DDPCommunicationHookType.NO)
        if hook != DDPCommunicationHookType.NO:
            raise ValueError(
                f"DistributedDataParallelKwargs(comm_hook={hook}): over a grid gradients are averaged without "
                "DistributedDataParallel, and its hooks are not called. Omit comm_hook; the dtype in which they "
                "travel is reduce_dtype under axonn_config."
            )
        bind(accelerator, self)


def _grid_of_stock(stock: dict[str, Any], grid: Grid | None) -> Grid | None:
    """Return the grid that arguments of a stock ParallelismConfig mean, or that its variables mean without a launch
    file; `grid` where there are none.

    Raises:
        ValueError: they mean another grid than `grid`, or an argument is none of the sizes.
    """
    read = (*ACCELERATE_SIZES, "cp_backend", "sp_backend")
    if unread := [name for name, value in stock.items() if name not in read and value is not None]:
        raise ValueError(
            f"ParallelismConfig({unread[0]}=...) sets what a grid does in its own way: omit it. context_attention "
            "(AxonnPlugin, axonn_config) says how attention sees rows that context divides."
        )
    sizes, place = read_sizes(stock), "ParallelismConfig"
    if not sizes and grid is None and AxonnConfig.from_env() is None:
        sizes, place = read_environment(), "the environment"
    return grid_with_sizes(sizes, grid, place)


def install_default() -> None:
    """Let a bare `Accelerator()` or `Trainer` of this process use the grid of the launch file, and, where it has
    `load: sharded`, Transformers' from_pretrained.

    Called in worker processes right after accelerate.parallelism_config has been imported, or this module if that is
    what imports accelerate (see launch/autoload.py), and in those of a notebook, where accelerate may be there.
    Raises nothing, which could end in torch's import: releases that are not proven are refused by the AxonnPlugin that
    `Accelerator()` makes, and until then nothing of theirs is replaced.
    """
    for name, module in [*sys.modules.items()]:  # accelerate's modules import the class from each other
        if name.partition(".")[0] == "accelerate" and vars(module).get("ParallelismConfig") is ParallelismConfig:
            vars(module)["ParallelismConfig"] = AxonnPlugin
    os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    if not refusal():
        _install_trainer_hooks()
        if hasattr(sys.modules.get("accelerate"), "Accelerator"):  # a notebook's, with arguments older than the launch
            watch_accelerators()
        if '"load"' in os.environ.get(VARIABLE, ""):  # it is written where it is not whole
            after_import("transformers.modeling_utils", _install_sharded_loading)


def _install_trainer_hooks() -> None:
    from hf_axonn.trainer.hooks import install_when_imported

    install_when_imported()


def _install_sharded_loading() -> None:
    from hf_axonn.parallel.sharded_loading import install_sharded_loading

    install_sharded_loading()
