"""`hf-axonn env`: what a bug report should say about a machine, and nothing about who uses it.

Versions, devices, what joins them, and the settings of communication libraries. No names of users, machines, folders
or addresses, and no variable whose value could be a secret: only the named families are looked at, and of those only
values that are short words and numbers are shown.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from pathlib import Path

from hf_axonn.compat.arguments import VERSION
from hf_axonn.compat.versions import OPTIONAL, SWITCH, bounds, outside


PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl", "datasets", "safetensors", "tokenizers", "numpy")
# Families of variables that change how a job runs.
VARIABLES = re.compile(
    r"(NCCL|RCCL|GLOO|FI|UCX|OMP|MKL|TORCH|PYTORCH|ACCELERATE|CUDA_VISIBLE|CUDA_DEVICE|CUDA_LAUNCH|HIP|ROCR|HSA|"
    r"HF_HUB_OFFLINE|HF_DEACTIVATE|SLURM_(NNODES|NTASKS|GPUS|CPUS)|WORLD_SIZE|LOCAL_WORLD_SIZE)(_|$)"
)
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH|USER|HOST|ADDR|URL", re.IGNORECASE)
SHOWN = re.compile(r"[\w.,:;=+%~^ -]{0,60}")
PROGRAM_SECONDS = 20
MISSING = "is not installed"


def environment_report() -> Iterator[str]:
    """The report, line by line. No communication; starts nvidia-smi or rocm-smi where there is one."""
    yield VERSION
    yield f"python {platform.python_version()}, {platform.system()} {platform.release()}, {platform.machine()}"
    for name in PACKAGES:
        yield f"{name} {installed_version(name)}"
    yield from _unmet()
    if os.environ.get(SWITCH) == "0":
        yield f"releases that are not proven are let pass by {SWITCH}=0"
    yield f"launch hook: {_hook()}"
    yield f"processor: {_processor()}"
    yield from _torch()
    yield from _links()
    yield from variables(os.environ)


def installed_version(package: str) -> str:
    """Return the version of a package, or MISSING."""
    try:
        return version(package)
    except PackageNotFoundError:
        return MISSING


def _unmet() -> Iterator[str]:
    """Yield requirements of this package that the environment does not meet; those of peft and trl if installed."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in requires("hf_axonn") or ()]
    except PackageNotFoundError:
        yield "hf_axonn is not installed, but imported from a folder: `accelerate launch --config` does not know it"
        return
    for requirement in requirements:
        name, specifier = requirement.name, bounds(requirement)
        needed = requirement.marker is None or requirement.marker.evaluate()
        if needed and installed_version(name) == MISSING:
            yield f"NOT MET: {name}{specifier}: {name} {MISSING}"
        elif (needed or name in OPTIONAL) and (found := outside(requirement)):
            yield f"NOT MET: {name}{specifier}: there is {found}"


def _hook() -> str:
    found = any(entry.value.startswith("hf_axonn") for entry in entry_points(group="torch.backends"))
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return "switched off by TORCH_DEVICE_BACKEND_AUTOLOAD=0"
    return "registered" if found else "not registered; use axonn-launch"


def _processor() -> str:
    import psutil

    model = platform.processor() or platform.machine()
    listing = Path("/proc/cpuinfo")
    if listing.is_file():
        names = re.findall(r"^model name\s*:\s*(.+)$", listing.read_text(), flags=re.MULTILINE)
        model = names[0] if names else model
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {allowed} of {os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB"


def _torch() -> Iterator[str]:
    import torch
    import torch.distributed as dist

    versions = {"CUDA": torch.version.cuda, "HIP": torch.version.hip}
    built = [f"{name} {number}" for name, number in versions.items() if number]
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if _has_backend(dist, name)]
    yield f"torch is built for {' and '.join(built) or 'the CPU'}, {torch.get_num_threads()} threads"
    yield f"torch.distributed backends: {', '.join(backends)}"
    count = torch.cuda.device_count()
    if count and "nccl" in backends:
        yield f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    kinds: Counter[str] = Counter()
    for index in range(count):
        card = torch.cuda.get_device_properties(index)
        kinds[f"{card.name}, {card.total_memory / 2**30:.0f} GiB, capability {card.major}.{card.minor}"] += 1
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if not count and accelerator is not None:
        kinds[f"{accelerator.type}"] = torch.accelerator.device_count()
    yield "devices: " + ("; ".join(f"{number} x {kind}" for kind, number in kinds.items()) or "CPU only")


def _has_backend(dist, name: str) -> bool:
    return getattr(dist, f"is_{name}_available", lambda: False)()


def _links() -> Iterator[str]:
    """Yield lines on the links between the devices of a node, and between nodes."""
    for program, *words in (
        ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        ("nvidia-smi", "topo", "-m"),
        ("rocm-smi", "--showdriverversion"),
        ("rocm-smi", "--showtopotype"),
    ):
        if shutil.which(program):
            yield f"{program} {' '.join(words)}:"
            yield from (f"    {line}" for line in dict.fromkeys(_output(program, *words)) if line.strip())
    speeds = []
    for path in sorted(Path("/sys/class/net").glob("*")):
        if path.name != "lo" and _text(path / "operstate") == "up":
            name = re.sub(r"^(enx).*", r"\1*", path.name)  # it is followed by the card's own number
            speed = _text(path / "speed")
            speeds.append(f"{name} ({int(speed) / 1000:g} Gb/s)" if speed.isdigit() and speed != "0" else name)
    for path in sorted(Path("/sys/class/infiniband").glob("*/ports/*/rate")):
        speeds.append(f"{path.parts[-4]} ({_text(path)})")
    speeds += [path.name for path in sorted(Path("/sys/class/cxi").glob("*"))]
    yield f"network: {', '.join(speeds) or 'unknown'}"


def _output(program: str, *words: str) -> list[str]:
    try:
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=PROGRAM_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ["gave no answer"]
    # Colours of a terminal are no use in a report.
    return [re.sub(r"\x1b\[[0-9;]*m", "", line.rstrip()) for line in done.stdout.splitlines()] or ["gave no answer"]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # an interface that is down has no speed
        return ""


def variables(environment) -> Iterator[str]:
    """The settings among environment variables; `set` where a value could be a path, a name or a secret."""
    for name in sorted(environment):
        if VARIABLES.match(name):
            value = environment[name]
            shown = SHOWN.fullmatch(value) and not SECRET.search(name)
            yield f"{name}={value}" if shown else f"{name} is set"
