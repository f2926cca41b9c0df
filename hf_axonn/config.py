"""The section `axonn_config` of a launch file: what it may hold, and how it travels to the processes.

The launcher validates the section before any process starts and passes it on as JSON in the environment variable
AXONN_CONFIG. Plain Python: the launcher reads this while torch is still being imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from hf_axonn.compat.messages import printed_on_first_rank
from hf_axonn.topology.axis_order import ORDER, check_order
from hf_axonn.topology.experts import EXPERTS
from hf_axonn.topology.grid import SIZES, Grid


VARIABLE = "AXONN_CONFIG"
LAUNCH_FILE = "AXONN_LAUNCH_FILE"  # the name of the file, for messages
NOTEBOOK = "notebook_launcher"  # stands there for a file
REDUCE_DTYPES = ("float32", "bfloat16", "float64")
LAYOUTS = ("auto", "token", "feature")
CONTEXT_ATTENTION = ("auto", "heads", "keys")
SAVE_FAILURES = ("stop", "continue")
PRECISIONS = ("bf16", "fp16", "no")  # of accelerate, its mixed_precision
KEPT = ("none", "recomputed", "all")
RESIDUAL_DTYPES = ("model", "bfloat16")
OFFLOADED = ("none", "optimizer")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble")
LOADS = ("whole", "sharded")
CHOICES = {
    "reduce_dtype": REDUCE_DTYPES,
    "residual_dtype": RESIDUAL_DTYPES,
    "layout": LAYOUTS,
    "experts": EXPERTS,
    "context_attention": CONTEXT_ATTENTION,
    "offload": OFFLOADED,
    "save_failure": SAVE_FAILURES,
    "schedule": SCHEDULES,
}
READ_ALONG = {  # settings that nothing reads where an axis has one rank
    "context": ("context_attention",),
    "pipe": ("schedule", "stages_per_rank", "stage_layers"),
    "z": ("keep_gathered", "prefetch"),
}
GRID_EXAMPLE = "grid: {data: 1, z: 2, y: 1, x: 2}"


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Switches for collectives that run while the device computes.

    Args:
        all_gather: the weights of the next layer are gathered over z during this one.
        reduce_scatter: weight gradients are reduced over z during the layers that follow in backward.
        all_reduce: input gradients are reduced over x while the weight gradients are computed.
        all_to_all: tokens travel to their experts while shared experts are computed.
    Raises:
        ValueError: a value is neither true nor false.
    """

    all_gather: bool = True
    reduce_scatter: bool = True
    all_reduce: bool = True
    all_to_all: bool = True

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, bool):
                raise ValueError(f"overlap.{name} is {value!r}, but it is a switch: write true or false.")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that stand beside the grid: keyword arguments of AxonnConfig and of AxonnPlugin.

    Args:
        overlap: which collectives run while the device computes.
        reduce_dtype: the dtype in which gradients are summed over z and averaged over data, one of REDUCE_DTYPES; or
            their own if that is wider.
        residual_dtype: of the residual stream between the layers, one of RESIDUAL_DTYPES: as the model has it, which
            under autocast is float32, or bfloat16, under bfloat16 autocast only.
        keep_gathered: which weights that were gathered over z are kept for backward, instead of gathered again:
            "recomputed", those of a checkpointed layer from when it runs again, "none", "all" from forward on, or a
            number: those of the last so many layers from forward on.
        prefetch: how much is gathered over z ahead of its use: "layer", as much as the largest layer has, or a number
            of bytes of gathered weights, but at least the next ones.
        tune_matmuls: whether operand layouts of matmuls are timed on the first steps and the fastest used
            (engine/matmul_tuning.py).
        layout: of the residual stream between blocks, one of LAYOUTS; auto takes feature wherever it is possible
            (y > 1, norms that are RMSNorm or LayerNorm), else token.
        experts: how tokens and the experts of a mixture meet, one of EXPERTS: with gather an expert lies on one
            position of (y, x) and is gathered over z, with move it lies whole on one rank of (z, x, y) and tokens
            travel to it; auto takes move wherever it is possible (topology/experts.py), else gather.
        context_attention: how attention sees whole rows whose positions context divides, one of CONTEXT_ATTENTION
            (layers/context_attention.py); auto takes heads where context divides the query heads that a rank of (x, y)
            has in every attention, else keys.
        allow_untested: whether a model of a type that nobody has compared with one process is sharded by blocks, as
            the general rules have them, with a warning (architectures/plan.py); else Linear by Linear.
        offload: what is kept in host memory, one of OFFLOADED: nothing, or the moments of the optimizer that Trainer,
            `prepare` or Lightning is given and, in mixed precision, the float32 weights that only products read
            (engine/host_moments.py, host_weights.py).
        async_save: whether Trainer's checkpoints are written while training goes on.
        save_failure: what a Trainer does when a checkpoint cannot be saved (a full disk), one of SAVE_FAILURES.
        schedule: when a rank of pipe runs which micro-batch forward and backward, one of SCHEDULES.
        stages_per_rank: into how many stages the layers of a rank of pipe are divided.
        stage_layers: how many layers each stage has, the first one first; None: divided by what they cost.
    Raises:
        ValueError: a value is not of its kind; the message says what to write.
    """

    overlap: Overlap = Overlap()
    reduce_dtype: str = "float32"
    residual_dtype: str = "model"
    keep_gathered: str | int = "recomputed"
    prefetch: str | int = "layer"
    tune_matmuls: bool = False
    layout: str = "auto"
    experts: str = "auto"
    context_attention: str = "auto"
    allow_untested: bool = False
    offload: str = "none"
    async_save: bool = False
    save_failure: str = "stop"
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    stage_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.overlap, Overlap):
            raise ValueError(f"overlap is {self.overlap!r}, but it is an Overlap, for instance Overlap().")
        keep = self.keep_gathered
        if isinstance(keep, bool) or not (keep in KEPT or (isinstance(keep, int) and keep >= 0)):
            raise ValueError(
                f"keep_gathered is {keep!r}, but it is {', '.join(KEPT)}, or a number of layers that is not negative."
            )
        ahead = self.prefetch
        if isinstance(ahead, bool) or not (ahead == "layer" or (isinstance(ahead, int) and ahead > 0)):
            raise ValueError(f"prefetch is {ahead!r}, but it is layer, or a number of bytes that is positive.")
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} is {value!r}, but it is one of {', '.join(choices)}.")
        stages, listed = self.stages_per_rank, self.stage_layers
        if not _counts(stages):
            raise ValueError(f"stages_per_rank is {stages!r}, but it is a whole number of at least 1.")
        if (self.schedule == "interleaved") != (stages > 1) and self.schedule != "zero_bubble":
            raise ValueError(
                f"schedule is {self.schedule} and stages_per_rank {stages}: write schedule: interleaved (or "
                "zero_bubble) with stages_per_rank: 2 or more, gpipe and 1f1b with stages_per_rank: 1."
            )
        if listed is not None:
            if not (isinstance(listed, list | tuple) and listed and all(map(_counts, listed))):
                raise ValueError(
                    f"stage_layers is {listed!r}, but it lists how many layers each stage has: [7, 8, 7]."
                )
            object.__setattr__(self, "stage_layers", tuple(listed))
        for name in ("tune_matmuls", "allow_untested", "async_save"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}, but it is a switch: write true or false.")


@dataclass(frozen=True, kw_only=True)
class AxonnConfig(Settings):
    """The settings under `axonn_config`: the grid, its order, how models are loaded, and `Settings`.

    Args:
        grid: sizes of the axes.
        order: the axes as they lie on the machine, the one with the fastest links first; read where processes start
            (topology/axis_order.py), it changes nothing in a running one.
        load: what Transformers' from_pretrained gives in a launched script, one of LOADS: a whole model on every rank,
            or shards, of which each rank reads its own (parallel/sharded_loading.py); read where processes start.
    Raises:
        ValueError: a value is not of its kind, or residual_dtype is given with a grid of one rank; the message says
            what to write.
    """

    grid: Grid
    order: tuple[str, ...] = ORDER
    load: str = "whole"

    def __post_init__(self) -> None:
        if not isinstance(self.grid, Grid):
            raise ValueError(f"grid is {self.grid!r}, but it is a Grid, for instance Grid(z=2, x=2).")
        super().__post_init__()
        if self.residual_dtype != "model" and self.grid.size == 1:
            raise ValueError(
                f"residual_dtype is {self.residual_dtype}, but a model on a grid of one rank stays as it is: omit "
                "residual_dtype."
            )
        stages = self.grid.pipe * self.stages_per_rank
        if self.stage_layers is not None and len(self.stage_layers) != stages:
            raise ValueError(
                f"stage_layers lists {len(self.stage_layers)} stages, but there are {stages}: pipe={self.grid.pipe} "
                f"times stages_per_rank={self.stages_per_rank}."
            )
        object.__setattr__(self, "order", check_order(self.order))
        if self.load not in LOADS:
            raise ValueError(f"load is {self.load!r}, but it is one of {', '.join(LOADS)}.")

    @classmethod
    def from_mapping(cls, section: Mapping[str, Any], *, num_processes: int | None = None) -> AxonnConfig:
        """Validate a section `axonn_config` as it stands in a launch file.

        Args:
            section: keys grid (required; a mapping from axis to size), overlap (a mapping of switches), reduce_dtype,
                residual_dtype, keep_gathered, prefetch, tune_matmuls, layout, experts, context_attention,
                allow_untested, offload, async_save, save_failure, schedule, stages_per_rank, stage_layers, order,
                load.
            num_processes: number of processes on all machines together, which the grid must have; None: not checked.
        Raises:
            ValueError: an unknown key, a value of the wrong kind, or a grid of another size than `num_processes`.
        """
        if not isinstance(section, Mapping):
            raise ValueError(f"axonn_config is {section!r}, but it holds keys: write {GRID_EXAMPLE} under it.")
        loose_axes = [axis for axis in SIZES if axis in section]
        if loose_axes:
            raise ValueError(
                f"axonn_config.{loose_axes[0]} is out of place: sizes stand under grid, as in {GRID_EXAMPLE}."
            )
        _check_keys("axonn_config", section, ["grid", *(item.name for item in fields(Settings)), "order", "load"])
        if "grid" not in section:
            raise ValueError(f"axonn_config has no grid: write the sizes of the axes, as in {GRID_EXAMPLE}.")
        values = dict(section)
        try:
            values["grid"] = parse_grid(section["grid"])
            if "overlap" in section:
                values["overlap"] = _overlap(section["overlap"])
            config = cls(**values)
            if num_processes is not None:
                config.grid.check(num_processes)
        except ValueError as error:
            message = str(error)
            raise ValueError(message if message.startswith("axonn_config") else f"axonn_config: {message}") from None
        return config

    def idle_settings(self) -> list[str]:
        """Return the settings that differ from their default and that nothing reads on this grid, with the reason."""
        return [
            f"{name}={getattr(self, name)} ({axis} is 1)"
            for axis, names in READ_ALONG.items()
            for name in names
            if getattr(self.grid, axis) == 1 and getattr(self, name) != getattr(type(self), name)
        ]

    def to_json(self) -> str:
        """Return the section as one line of JSON, which `from_env` reads back."""
        values = {"grid": None, **asdict(self)} | {"grid": self.grid.as_dict()}  # the grid first
        for name in ("order", "load"):
            if getattr(self, name) == getattr(type(self), name):  # then there is nothing to do at the start
                del values[name]
        return json.dumps(values)

    def to_facts(self) -> dict[str, str]:
        """Return the settings one by one, by which `assert_same_on_all_ranks` names those that differ."""
        return {f"axonn_config.{name}": json.dumps(value) for name, value in json.loads(self.to_json()).items()}

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> AxonnConfig | None:
        """Read what the launcher left in AXONN_CONFIG; None where it is not set or empty.

        Args:
            environ: by default os.environ as it is now: `map(num_proc=...)` of datasets puts a copy in its place.

        Raises:
            ValueError: the variable holds something else than a valid section in JSON.
        """
        text = (os.environ if environ is None else environ).get(VARIABLE, "")
        if not text:
            return None
        try:
            return cls.from_mapping(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"the environment variable {VARIABLE} cannot be used: {error} It is set by the launcher from the "
                f'launch file; written by hand it looks like {{"grid": {{"z": 2, "x": 2}}}}.'
            ) from None

    @classmethod
    def with_launch(cls, given: AxonnConfig | None, call: str) -> AxonnConfig:
        """Join the settings of the launch file and those that a call in the code gives; either may be missing.

        Args:
            given: the settings in the code. One that has its default value leaves the launch file's.
            call: the name of the call, for messages.
        Raises:
            ValueError: neither names a grid, or both name another grid or another value of a setting. Of several
                ranks that raise this, the first prints it.
        """
        launched = cls.from_env()
        if launched is None:
            if given is None:
                raise ValueError(
                    f"{call}() without a grid takes it from the launch file, but {VARIABLE} is not set: start with "
                    "accelerate launch --config axonn.yaml, or pass grid=Grid(...)."
                )
            return given
        if given is None:
            return launched
        values = {}
        for item in fields(cls):
            ours, theirs = getattr(given, item.name), getattr(launched, item.name)
            if ours not in (theirs, item.default) and theirs != item.default:
                file = os.environ.get(LAUNCH_FILE) or f"the variable {VARIABLE}"
                with printed_on_first_rank():
                    raise ValueError(
                        f"{item.name} has two values. {file}: {_short(theirs)}; code, {call}: {_short(ours)}. Leave "
                        f"{item.name} out of the code, which then takes that of the launch, or change one of them."
                    )
            values[item.name] = theirs if ours == item.default else ours
        return cls(**values)


def _short(value: Any) -> str:
    """Return a setting for a message; of a grid the axes that are used."""
    if not isinstance(value, Grid):
        return str(value)
    return ", ".join(f"{axis}={size}" for axis, size in value.as_dict().items() if size > 1) or "one rank"


def _counts(value: Any) -> bool:
    """Return whether it is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def parse_grid(sizes: Any) -> Grid:
    """Return the grid that a mapping of a launch file means.

    Raises:
        ValueError: it is no mapping, or has another key than an axis.
    """
    if sizes == "auto":
        raise ValueError(
            "axonn_config.grid is auto, which only the launcher can resolve, from axonn_config.plan: start with "
            f"accelerate launch or axonn-launch, or write the sizes, as in {GRID_EXAMPLE}."
        )
    if not isinstance(sizes, Mapping):
        raise ValueError(f"axonn_config.grid is {sizes!r}, but it maps axes to sizes: write {GRID_EXAMPLE}.")
    _check_keys("axonn_config.grid", sizes, ["data", "pipe", "z", "y", "x", "context"])
    if sizes.get("data") == "auto":
        raise ValueError(
            "axonn_config.grid has data: auto, which only the launcher can resolve, from the number of processes: "
            "start with accelerate launch or axonn-launch, or write a size."
        )
    return Grid(**sizes)


def _overlap(switches: Any) -> Overlap:
    if not isinstance(switches, Mapping):
        raise ValueError(
            f"axonn_config.overlap is {switches!r}, but it holds switches: write overlap: {{all_gather: true, "
            "reduce_scatter: true, all_reduce: true, all_to_all: true}."
        )
    _check_keys("axonn_config.overlap", switches, [item.name for item in fields(Overlap)])
    return Overlap(**switches)


def _check_keys(place: str, given: Iterable[Any], known: list[str]) -> None:
    from difflib import get_close_matches

    for key in given:
        if key not in known:
            near = get_close_matches(str(key).lower(), known, n=1)
            remedy = f"did you mean {near[0]}?" if near else "remove it."
            raise ValueError(f"{place} has an unknown key {key!r}; it may hold {', '.join(known)}: {remedy}")
