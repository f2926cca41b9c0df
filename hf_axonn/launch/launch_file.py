"""A launch file with `axonn_config`: what is refused, what is mended, and what accelerate and the processes get.

One function, `resolve`, sees the whole file and the command line's options and decides; it starts nothing and changes
nothing. Options on the command line hold over the file, as in accelerate.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from glob import glob
from typing import Any

from hf_axonn.compat.own_code import OwnCodeError
from hf_axonn.config import PRECISIONS, VARIABLE, AxonnConfig, parse_grid
from hf_axonn.launch.forwarding import HANDLED, HANDLED_WITHOUT_TERM
from hf_axonn.launch.gpu_settings import gpu_settings, has_nvidia
from hf_axonn.planner.from_settings import resolve_auto
from hf_axonn.planner.shapes import ModelShape
from hf_axonn.profiling.read_shape import read_shape
from hf_axonn.topology.upstream_sizes import ACCELERATE_SIZES, PREFIX, grid_with_sizes, read_sizes


SECTION = "axonn_config"
UPSTREAM_SECTION = "parallelism_config"  # Accelerate's own, whose sizes mean a grid
# Other ways to run or to split a model, each with its switch on the command line.
REFUSED_SECTIONS = {
    "fsdp_config": "use_fsdp",
    "deepspeed_config": "use_deepspeed",
    "megatron_lm_config": "use_megatron_lm",
    "mpirun_config": "mpirun_hostfile",
    "fp8_config": "fp8_backend",
}
# Options of accelerate launch that only these read.
OTHERS_OPTIONS = (
    *("fsdp_", "deepspeed_", "zero_stage", "zero3_", "offload_", "gradient_accumulation_steps", "gradient_clipping"),
    *("megatron_lm_", "fp8_", "mpirun_"),
)
# Of drivers that torch.cuda needs: NVIDIA's, on Jetson too, AMD's, and Windows' under WSL.
DRIVER_FILES = ("/dev/nvidia*", "/dev/nvhost*", "/dev/nvmap", "/dev/kfd", "/dev/dxg")
PORTS = 2**16 - 1
# What makes accelerate start one process for each rank by torchrun.
MULTI_DEVICE = tuple(f"MULTI_{kind}" for kind in ("GPU", "XPU", "NPU", "HPU", "MLU", "SDAA", "MUSA", "NEURON"))


@dataclass(frozen=True)
class Launch:
    """A resolved launch file.

    Args:
        config: the validated section.
        settings: the launch file that stock accelerate is given.
        environment: variables for the processes.
        notes: sentences for the user.
    """

    config: AxonnConfig
    settings: dict[str, Any]
    environment: dict[str, str]
    notes: tuple[str, ...]


def check_spelling(file: str, settings: Mapping[str, Any]) -> None:
    """Raise ValueError if a key of the launch file is nearly `axonn_config`; accelerate's refusal names no remedy."""
    if SECTION not in settings:
        for key in get_close_matches(SECTION, [str(key) for key in settings], n=1, cutoff=0.8):
            raise ValueError(f"{file}: unknown key {key!r}: did you mean {SECTION}?")


def resolve(settings: Mapping[str, Any], options: Mapping[str, str | None], *, gpus: int | None = None) -> Launch:
    """Validate a launch file and work out what accelerate and the processes get.

    Args:
        settings: the launch file; has the key axonn_config.
        options: accelerate's options on the command line, by name with underscores; None for a switch.
        gpus: of the machine that it is to run on; None: of this one.
    Raises:
        ValueError: the launch cannot be right; the message says what to write instead.
    """
    _refuse(settings, options)
    num_processes, num_machines = _processes(settings, options)
    section = settings[SECTION]
    notes: list[str] = []
    precision = _precision(settings, options)
    if isinstance(section, Mapping):
        section, notes = _fill_data(section, num_processes)
        section, joined = _join_parallelism_config(section, settings, options)
        section, planned = resolve_auto(
            section, num_processes, mixed_precision=precision, nodes=num_machines, read=_read_shape
        )
        notes += joined + planned
    config = AxonnConfig.from_mapping(section, num_processes=num_processes)
    if config.residual_dtype == "bfloat16" and precision != "bf16":
        raise ValueError(
            f"axonn_config.residual_dtype is bfloat16, but mixed_precision is {precision!r}: write bf16, or omit "
            "residual_dtype."
        )
    if config.grid.pipe > 1 and precision == "fp16":
        raise ValueError(
            f"mixed_precision is 'fp16', but pipe is {config.grid.pipe}, and a pipeline makes gradients before a "
            "GradScaler has scaled the loss: write bf16 or 'no', or use a grid without pipe."
        )
    kept = {key: value for key, value in settings.items() if key not in (SECTION, UPSTREAM_SECTION, "fp16")}
    # YAML reads an unquoted no as false, where accelerate expects the word. What the command line says counts for it.
    kept["mixed_precision"] = _precision(settings, {})
    kept["num_processes"], kept["num_machines"] = num_processes, num_machines
    # The default port is shared by all launches of a machine; 0 takes a free one, of this machine alone.
    least = 0 if num_machines == 1 else 1
    kept["main_process_port"] = _integer("main_process_port", settings, options, default=0, least=least, most=PORTS)

    kind = _distributed_type(settings, options, num_processes)
    use_cpu, more = _use_cpu(settings, options, kind, num_processes, gpus)
    notes += more
    if use_cpu and precision == "fp16":
        raise ValueError("mixed_precision is 'fp16', which accelerate ignores on CPUs: write bf16, or 'no'.")
    environment = {VARIABLE: config.to_json()}
    if _restarts(options, num_machines):
        environment["PET_STANDALONE"] = environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    else:  # a launcher that restarts ranks has to know that they end because they should
        environment[HANDLED] = HANDLED_WITHOUT_TERM
    if use_cpu:
        environment["ACCELERATE_USE_CPU"] = "true"
        # For MULTI_CPU accelerate starts a single process, whatever num_processes says.
        kind = "MULTI_GPU" if kind == "MULTI_CPU" else kind
        if not os.environ.get("OMP_NUM_THREADS") and "num_cpu_threads_per_process" not in options:
            environment["OMP_NUM_THREADS"] = str(max(1, core_count() // (num_processes // num_machines)))
    elif kind == "MULTI_GPU" and config.grid.size > 1 and has_nvidia():
        chosen, gpu_notes = gpu_settings(config.grid, os.environ)
        environment |= chosen
        notes += gpu_notes
    kept["use_cpu"], kept["distributed_type"] = use_cpu, kind
    return Launch(config=config, settings=kept, environment=environment, notes=tuple(notes))


def _refuse(settings: Mapping[str, Any], options: Mapping[str, str | None]) -> None:
    """Refuse sections and options that cannot stand beside axonn_config.

    Raises:
        ValueError: there is one.
    """
    for section, switch in REFUSED_SECTIONS.items():
        if settings.get(section) or switch in options:
            name = section if settings.get(section) else f"--{switch}"
            raise ValueError(f"{name} cannot stand beside axonn_config, which splits the model itself: remove one.")
    for option in options:
        if option.startswith(OTHERS_OPTIONS):
            raise ValueError(
                f"--{option} is read by another engine and has no effect beside axonn_config, which splits the model "
                "itself: remove one."
            )
    environment = settings.get("compute_environment", "LOCAL_MACHINE")
    if environment != "LOCAL_MACHINE":
        raise ValueError(f"compute_environment is {environment!r}; with axonn_config write LOCAL_MACHINE.")
    precision = _precision(settings, options)
    if precision not in PRECISIONS:
        raise ValueError(f"mixed_precision is {precision!r}, which is not supported yet: write bf16, fp16 or 'no'.")


def _join_parallelism_config(
    section: Mapping[str, Any], settings: Mapping[str, Any], options: Mapping[str, str | None]
) -> tuple[Mapping[str, Any], list[str]]:
    """Give axonn_config the grid that Accelerate's parallelism_config means; options hold over the file.

    Returns:
        (axonn_config, sentences for the user).
    Raises:
        ValueError: both name a grid, and another one; or a size is none.
    """
    upstream = settings.get(UPSTREAM_SECTION) or {}
    wrong = (
        [key for key in upstream if not str(key).startswith(PREFIX)] if isinstance(upstream, Mapping) else [upstream]
    )
    if wrong:
        raise ValueError(f"{UPSTREAM_SECTION} holds {wrong[0]!r}, but its keys are {PREFIX}tp_size and so on.")
    given = {**upstream, **{name: value for name, value in options.items() if name.startswith(PREFIX)}}
    sizes, written, grid = read_sizes(given, PREFIX), section.get("grid"), None
    if isinstance(written, Mapping):
        grid = parse_grid(written)
    elif written is not None and max(sizes.values(), default=1) > 1:
        raise ValueError(
            f"{UPSTREAM_SECTION} has sizes, and axonn_config has grid: {written}, which may choose others: omit one "
            "of them."
        )
    meant = grid_with_sizes(sizes, grid, UPSTREAM_SECTION)
    if meant is None or meant == grid:
        return section, []
    notes = [f"{UPSTREAM_SECTION} means the grid {meant}."]
    if others := sorted(name for name in given if name.removeprefix(PREFIX) not in ACCELERATE_SIZES):
        notes.append(f"without effect over a grid: {', '.join(others)}.")
    return {**section, "grid": meant.as_dict()}, notes


def _read_shape(model: str) -> ModelShape:
    try:
        return read_shape(model)
    except OwnCodeError:
        raise ValueError(
            f"{model} comes with code of its own, which a launcher does not run: write the grid that  hf-axonn plan "
            "--trust-remote-code  ranks first, in the place of auto and plan."
        ) from None


def _fill_data(section: Mapping[str, Any], num_processes: int) -> tuple[Mapping[str, Any], list[str]]:
    """Give `data: auto` of a grid the size that makes up the number of processes.

    Returns:
        (axonn_config, sentences for the user).
    Raises:
        ValueError: the other sizes do not divide that number.
    """
    sizes = section.get("grid")
    if not isinstance(sizes, Mapping) or sizes.get("data") != "auto":
        return section, []
    copy = parse_grid({axis: size for axis, size in sizes.items() if axis != "data"})
    data, rest = divmod(num_processes, copy.size)
    if rest or not data:
        raise ValueError(
            f"axonn_config.grid has data: auto, and {num_processes} process(es) are to run, but a copy of the model "
            f"has {copy.size} rank(s) ({copy}): start a multiple of {copy.size}."
        )
    return {**section, "grid": {**sizes, "data": data}}, [f"data: auto is {data} on {num_processes} process(es)."]


def _precision(settings: Mapping[str, Any], options: Mapping[str, str | None]) -> str:
    """accelerate's mixed_precision; where nobody says one `fp16`, the key of its older files, does."""
    older = "fp16" if settings.get("fp16") else "no"
    return str(options.get("mixed_precision") or settings.get("mixed_precision") or older).lower()


def _processes(settings: Mapping[str, Any], options: Mapping[str, str | None]) -> tuple[int, int]:
    """Processes on all machines together, and machines."""
    num_processes = _integer("num_processes", settings, options, default=None, least=1)
    num_machines = _integer("num_machines", settings, options, default=1, least=1)
    machine_rank = _integer("machine_rank", settings, options, default=0, least=0)
    if num_processes is None:
        raise ValueError("num_processes is missing: write the number of processes on all machines together.")
    if num_processes % num_machines:
        raise ValueError(
            f"num_processes is {num_processes}, the number on all machines together, and num_machines is "
            f"{num_machines}: write a multiple of {num_machines}, so that every machine starts as many."
        )
    if machine_rank >= num_machines:
        raise ValueError(
            f"machine_rank is {machine_rank}, but with num_machines {num_machines} ranks go from 0 to "
            f"{num_machines - 1}."
        )
    for address in ("main_process_ip", "main_process_port"):
        if num_machines > 1 and not (options.get(address) or settings.get(address)):
            raise ValueError(
                f"num_machines is {num_machines}, but {address} is missing: write the address of the machine of rank "
                f"0, the same on all machines, or pass --{address}."
            )
    return num_processes, num_machines


def _integer(
    name: str,
    settings: Mapping[str, Any],
    options: Mapping[str, str | None],
    *,
    default: int | None,
    least: int,
    most: float = math.inf,
) -> int | None:
    value = options[name] if options.get(name) is not None else settings.get(name)
    if value is None:
        return default
    try:
        number = value if isinstance(value, int) and not isinstance(value, bool) else int(str(value))
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        bounds = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
        raise ValueError(f"{name} is {value!r}, but it is a whole number {bounds}.")
    return number


def _restarts(options: Mapping[str, str | None], num_machines: int) -> bool:
    """True if torchrun starts the processes again after a failure, and needs a store for each start.

    By default it keeps one store, in which new processes find what the former ones wrote: addresses at which no
    process listens, and the ranks that failed. Without the static rendezvous and without sharing, rank 0 makes one at
    each start.
    """
    restarts = _integer("max_restarts", {}, options, default=0, least=0)
    if restarts and num_machines > 1:
        raise ValueError(
            f"max_restarts is {restarts} on {num_machines} machines, where restarted processes find the addresses of "
            "the former ones: omit it and start the launchers of all machines again, with "
            "--resume_from_checkpoint last."
        )
    return bool(restarts)


def _distributed_type(settings: Mapping[str, Any], options: Mapping[str, str | None], num_processes: int) -> str:
    if "multi_gpu" in options:
        return "MULTI_GPU"
    kind = settings.get("distributed_type", "MULTI_GPU")
    kind = "NO" if kind is False else str(kind).upper()  # YAML reads an unquoted NO as false
    if kind == "NO" and num_processes > 1:
        raise ValueError(
            f"distributed_type is NO, with which accelerate starts one process, but num_processes is {num_processes}: "
            "write MULTI_GPU (on CPUs too, with use_cpu: true)."
        )
    if "tpu" in options or kind not in (*MULTI_DEVICE, "MULTI_CPU", "NO"):
        name = "TPU" if "tpu" in options else kind
        raise ValueError(f"distributed_type is {name}, which cannot stand beside axonn_config: write MULTI_GPU.")
    return kind


def _use_cpu(
    settings: Mapping[str, Any], options: Mapping[str, str | None], kind: str, num_processes: int, gpus: int | None
) -> tuple[bool, list[str]]:
    """Decide whether the processes run on the CPU, and return notes on it for the user, too.

    Left to itself, a process on a machine without a GPU would run alone, as if it were the only one.
    """
    given = settings.get("use_cpu")
    if given is not None and not isinstance(given, bool):
        raise ValueError(f"use_cpu is {given!r}, but it is a switch: write true or false.")
    if given or "cpu" in options or kind == "MULTI_CPU":
        return True, []
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "y", "t", "on"):
        return True, []
    if kind != "MULTI_GPU" or (gpu_count() if gpus is None else gpus) != 0:
        return False, []
    if given is None:
        return True, [f"no GPU was found on this machine: the {num_processes} processes run on its CPU."]
    raise ValueError(
        f"use_cpu is false, but no GPU was found on this machine: write use_cpu: true to run the {num_processes} "
        "processes on its CPU, or leave the key out to decide by what the machine has."
    )


def gpu_count() -> int:
    """Number of NVIDIA or AMD GPUs that torch sees; -1 where it cannot say.

    Where Linux has no file of a GPU's driver there is none, and torch is not imported.
    """
    if sys.platform == "linux" and not any(glob(pattern) for pattern in DRIVER_FILES):
        return 0
    import torch

    try:
        return torch.cuda.device_count()
    except Exception:  # a broken driver is reported by the processes, in torch's own words
        return -1


def core_count() -> int:
    """Cores this process may use, counting those that share one physical core once."""
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, psutil.cpu_count(logical=False) or allowed)
