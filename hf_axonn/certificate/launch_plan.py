"""The plan of a launch file: the number of ranks, which of them share samples, and the file to launch.

The run is one of CPUs, on this machine, in the certificate's dtype: devices, machines and mixed precision of the file
are omitted, and the notes say so. How the model and the batch are divided stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_axonn.certificate.deepspeed import Zero, read_zero
from hf_axonn.launch.command import read_launch_file
from hf_axonn.launch.launch_file import SECTION, check_spelling, core_count, resolve
from hf_axonn.topology.grid import Grid, divisors


MOST_RANKS = 8  # on few cores; on more, as many
MOST_ACCUMULATION = 4
ELSEWHERE = (
    "machine_rank main_process_ip main_process_port gpu_ids rdzv_backend same_network enable_cpu_affinity "
    "downcast_bf16 fp16 debug dynamo_config"
).split()
NOT_YET = {"MEGATRON_LM": "Megatron-LM", "XLA": "TPUs", "TPU": "TPUs"}
PREFIX = "parallelism_config_"
SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")


@dataclass(frozen=True)
class LaunchPlan:
    """The launch of many processes.

    Args:
        title: the way of running in parallel, in words.
        ranks: number of processes.
        positions: number of ranks that see different samples.
        factors: numbers by which an error is off where something is averaged wrongly, by their names.
        settings: the launch file, for CPUs.
        stages: layers that the model has to have at least.
        fsdp: whether Accelerate's FSDP2 shards the model.
        loading: arguments of Transformers' DistributedConfig, with which the model is loaded; empty: an ordinary one.
        own: whether hf_axonn runs it.
        zero: what DeepSpeed is told; None: it does not run it.
        notes: what is done otherwise than the file says.
    """

    title: str
    ranks: int
    positions: int
    factors: dict[str, int]
    settings: dict[str, Any]
    stages: int = 1
    fsdp: bool = False
    loading: dict[str, int] = field(default_factory=dict)
    own: bool = False
    zero: Zero | None = None
    notes: tuple[str, ...] = ()


def read_launch_plan(path: Path, dtype: str = "float64") -> LaunchPlan:
    """Read the plan of a launch file of Accelerate, with the mixed precision of the dtype.

    Raises:
        ValueError: it cannot be read, cannot be certified, or asks for more ranks than may be started.
    """
    settings = read_launch_file(path)
    check_spelling(path.name, settings)
    environment = settings.get("compute_environment", "LOCAL_MACHINE")
    if environment != "LOCAL_MACHINE":
        raise ValueError(f"{path}: compute_environment is {environment}: a certificate is made with LOCAL_MACHINE.")
    notes = []
    precision = str(settings.get("mixed_precision") or "no").lower()
    mixed = dtype if dtype == "bf16" else "no"
    if (precision not in ("no", "false") or settings.get("fp16")) and precision != mixed:
        notes.append(
            f"mixed_precision ({precision}) is {'off' if mixed == 'no' else mixed}: it is compared in {dtype}."
        )
    if int(settings.get("num_machines") or 1) > 1:
        notes.append(f"the ranks of {settings['num_machines']} machines run on this one.")
    dynamo = settings.get("dynamo_config") or {}
    if dynamo and "no" not in {str(value).lower() for value in dynamo.values()}:
        notes.append("dynamo_config is omitted: nothing is compiled.")
    kept = {key: value for key, value in settings.items() if key not in ELSEWHERE}
    kept |= {"num_machines": 1, "mixed_precision": mixed, "use_cpu": False}
    try:
        return _plan_grid(kept, notes) if SECTION in settings else _plan_stock(kept, notes, dtype)
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}") from None


def _check_ranks(ranks: int, smaller: Callable[[int], str]) -> None:
    most = max(MOST_RANKS, core_count())
    if ranks > most:
        raise ValueError(f"it starts {ranks} processes, and on this machine {most} may be started: {smaller(most)}.")


def _plan_grid(settings: dict[str, Any], notes: list[str]) -> LaunchPlan:
    launch = resolve(
        {**settings, "use_cpu": True, "distributed_type": "MULTI_GPU", SECTION: _exact(settings, notes)}, {}
    )
    config, grid = launch.config, launch.config.grid
    _check_ranks(grid.size, lambda most: f"certify the grid {smaller_grid(grid, most)}, with num_processes to match")
    if grid.size == 1:
        raise ValueError("the grid has one rank, so that there is nothing to compare.")
    section = json.loads(config.to_json())
    rows = "data * z / context" if grid.context > 1 else "data * z"
    factors = {"ranks": grid.size, f"data-parallel positions ({rows})": grid.dp_size, "x * y": grid.x * grid.y}
    factors |= {axis: size for axis, size in grid.as_dict().items()}
    return LaunchPlan(
        title=f"hf_axonn, grid {grid}",
        ranks=grid.size,
        positions=grid.dp_size,
        factors=factors,
        settings={**launch.settings, "use_cpu": True, SECTION: section},
        stages=max(sum(config.stage_layers or ()), grid.pipe * config.stages_per_rank),
        own=True,
        notes=tuple(notes),
    )


def _exact(settings: dict[str, Any], notes: list[str]) -> Any:
    """Return the section without what needs a smaller dtype."""
    section = settings[SECTION]
    if isinstance(section, Mapping) and section.get("residual_dtype", "model") != "model":
        notes.append(f"residual_dtype ({section['residual_dtype']}) is off: the model stays as it is.")
        section = {key: value for key, value in section.items() if key != "residual_dtype"}
    return section


def smaller_grid(grid: Grid, most: int) -> Grid:
    """Return the largest grid of up to `most` ranks whose axes divide those of a grid, with most axes in use."""
    choices = [[size for size in range(1, whole + 1) if whole % size == 0] for whole in _axes(grid).values()]
    found: list[dict[str, int]] = [{}]
    for axis, sizes in zip(_axes(grid), choices, strict=True):
        found = [{**some, axis: size} for some in found for size in sizes]
    found = [sizes for sizes in found if sizes["z"] % sizes.get("context", 1) == 0]
    fitting = [small for small in (Grid(**sizes) for sizes in found) if small.size <= most]
    return max(fitting, key=lambda small: (sum(size > 1 for size in _axes(small).values()), small.size))


def _axes(grid: Grid) -> dict[str, int]:
    return {"pipe": 1, **grid.as_dict()}


def _plan_stock(settings: dict[str, Any], notes: list[str], dtype: str) -> LaunchPlan:
    """Plan what Accelerate does by itself: DDP, FSDP2, HSDP, tensor parallelism, DeepSpeed."""
    _check_keys(settings)
    kind = str(settings.get("distributed_type", "NO")).upper()
    if kind in NOT_YET:
        raise ValueError(f"distributed_type is {kind}: runs of {NOT_YET[kind]} cannot be certified yet.")
    ranks = int(settings.get("num_processes") or 1)
    sizes = _parallelism(settings.get("parallelism_config") or {})
    if kind == "NO" or ranks == 1:
        raise ValueError(
            "it starts one process, so that there is nothing to compare: write distributed_type, num_processes."
        )
    fsdp = kind == "FSDP"
    version = int((settings.get("fsdp_config") or {}).get("fsdp_version", 1))
    if fsdp and version != 2:
        raise ValueError("fsdp_version is 1, whose parameters have no names of their own: write fsdp_version: 2.")
    tensor, replicas = sizes["tp_size"], sizes["dp_replicate_size"]
    fewer = divisors(ranks)
    _check_ranks(ranks, lambda most: f"certify it with num_processes: {max(n for n in fewer if n <= most)}")
    if kind == "DEEPSPEED":
        return _plan_deepspeed(settings, notes, dtype, ranks)
    positions = ranks // tensor
    if sizes["dp_shard_size"] * replicas * tensor not in (1, ranks):
        raise ValueError(
            f"parallelism_config has {sizes['dp_shard_size'] * replicas * tensor} ranks, num_processes is {ranks}."
        )
    shards = fsdp or tensor > 1 and positions > replicas  # with tensor parallelism Transformers shards, not Accelerate
    title = "HSDP" if shards and replicas > 1 else "FSDP2" if shards else "DDP" if positions > 1 else ""
    title = " x ".join(filter(None, [title, f"tensor parallelism of {tensor}" if tensor > 1 else ""]))
    factors = {"ranks": ranks, "data-parallel positions": positions, "ranks of tensor parallelism": tensor}
    factors |= {"replicas": replicas, "ranks of a replica": positions // replicas}
    return LaunchPlan(
        title=f"{title}, {ranks} ranks",
        ranks=ranks,
        positions=positions,
        factors=factors,
        # For MULTI_CPU accelerate starts a single process, whatever num_processes says.
        settings={**settings, "distributed_type": "FSDP" if fsdp else "MULTI_GPU", "main_process_port": 0},
        fsdp=fsdp,
        loading=_loading(tensor, positions // replicas, replicas),
        notes=tuple(notes),
    )


def _plan_deepspeed(settings: dict[str, Any], notes: list[str], dtype: str, ranks: int) -> LaunchPlan:
    """Plan ZeRO, or data parallelism of DeepSpeed without it."""
    if any(size > 1 for size in _parallelism(settings.get("parallelism_config") or {}).values()):
        raise ValueError("parallelism_config beside DeepSpeed cannot be certified yet: omit it.")
    zero = read_zero(settings.get("deepspeed_config") or {}, dtype, notes, MOST_ACCUMULATION)
    away = ("parallelism_config", *(["mixed_precision"] if zero.in_file else []))  # Accelerate takes one of them
    kept = {key: value for key, value in settings.items() if key not in away}
    title = f"DeepSpeed ZeRO-{zero.stage}" if zero.stage else "DeepSpeed without ZeRO"
    return LaunchPlan(
        title=f"{title}, {ranks} ranks",
        ranks=ranks,
        positions=ranks,
        factors={"ranks": ranks, "data-parallel positions": ranks},
        settings={**kept, "distributed_type": "DEEPSPEED", "deepspeed_config": zero.section, "main_process_port": 0},
        zero=zero,
        notes=tuple(notes),
    )


def _loading(tensor: int, shards: int, replicas: int) -> dict[str, int]:
    if tensor == 1:
        return {}
    return {"tp_size": tensor, "fsdp_size": shards, "dp_replicate_size": replicas}


def _check_keys(settings: Mapping[str, Any]) -> None:
    """Raise ValueError for a key that Accelerate does not know."""
    from difflib import get_close_matches

    from accelerate.commands.config.config_args import ClusterConfig

    known = [*ClusterConfig.__dataclass_fields__, "dynamo_backend", SECTION]
    for key in settings:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            raise ValueError(f"unknown key {key!r}: {f'did you mean {near[0]}?' if near else 'remove it.'}")


def _parallelism(section: Mapping[str, Any]) -> dict[str, int]:
    sizes = {}
    for name in SIZES:
        sizes[name] = int(section.get(f"{PREFIX}{name}") or 1)
    for name, what in {"cp_size": "context", "sp_size": "sequence"}.items():
        if sizes[name] > 1:
            raise ValueError(f"{PREFIX}{name} is {sizes[name]}: runs with {what} parallelism cannot be certified yet.")
    return sizes


def divide_plan(plan: LaunchPlan, given: Mapping[str, Any]) -> LaunchPlan:
    """Return a plan whose model Transformers' DistributedConfig divides, for a Trainer, by the user's arguments.

    Raises:
        ValueError: it is none, has not as many ranks, or the launch file divides the model too.
    """
    from transformers.distributed.configuration_utils import DistributedConfig

    what = "--trainer-args: distributed_config"
    if plan.own or plan.fsdp or plan.loading or plan.zero is not None:
        raise ValueError(f"{what}: the launch file divides the model: give one of DDP.")
    try:
        config = DistributedConfig(**given)
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{what}: {problem}") from None
    replicas = getattr(config, "dp_size", config.fsdp_size)  # which is all of them up to Transformers 5.22
    tensor, experts, positions = (int(size or 1) for size in (config.tp_size, config.ep_size, replicas))
    if tensor * positions * int(config.pp_size or 1) != plan.ranks:
        raise ValueError(
            f"{what}: tp_size {tensor} x data parallelism of {positions} are not the {plan.ranks} processes of the "
            "launch file."
        )
    factors = {"ranks": plan.ranks, "data-parallel positions": positions, "ranks of tensor parallelism": tensor}
    factors |= {"ranks of expert parallelism": experts}
    sizes = ", ".join(f"{name}={value}" for name, value in given.items())
    title = f"Transformers' DistributedConfig({sizes}), {plan.ranks} ranks"
    return replace(plan, title=title, positions=positions, factors=factors, loading=dict(given))
