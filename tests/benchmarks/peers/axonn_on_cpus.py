"""AxoNN's own source (github.com/axonn-ai/axonn) on CPUs with gloo, unchanged: what stands in for CUDA and NCCL.

    load(folder)                        once, before the ranks are forked; makes no process group
    axonn = loaded()                    on a rank, after init_process_group("gloo")
    axonn.axonn.init(G_intra_r=2, gpus_per_node=2)

AxoNN's modules name `torch` and `dist`; here these names get stand-ins, in its modules alone, so torch is as it was
for everybody else. Collectives are reported to the observers of hf_axonn's, so count_traffic counts both alike.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from hf_axonn.distributed import collectives


GET_IT = "git clone https://github.com/axonn-ai/axonn FOLDER, or pip install --no-deps --target FOLDER axonn"


def load(folder: Path) -> None:
    """Import AxoNN from a checkout, or from what `pip install --target` made, and make it fit for CPUs.

    Raises:
        ValueError: the folder has no AxoNN, or another one is imported already.
    """
    package = folder.resolve() / "axonn"
    if not (package / "intra_layer" / "__init__.py").is_file():
        raise ValueError(f"{folder} has no axonn/intra_layer: {GET_IT}.")
    if "axonn" in sys.modules:
        raise ValueError(f"axonn is imported from {sys.modules['axonn'].__file__} already: start a new process.")
    spec = importlib.util.spec_from_file_location("axonn", package / "__init__.py")
    sys.modules["axonn"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["axonn"])
    overlap = importlib.import_module("axonn.intra_layer").overlap_communication
    for name, module in list(sys.modules.items()):
        if name.startswith("axonn."):
            names = {"torch": TORCH, "dist": DIST}
            vars(module).update({given: stand_in for given, stand_in in names.items() if given in vars(module)})
    overlap.clear_handles = partial(_wait_for_handles, overlap)


def loaded() -> ModuleType:
    """The package that `load` made."""
    if "axonn" not in sys.modules:
        raise RuntimeError(f"AxoNN is not loaded: {GET_IT}, and give --axonn FOLDER.")
    return sys.modules["axonn"]


def version(folder: Path) -> str:
    """The commit of a checkout, else the version that pip installed."""
    if (folder / ".git").exists():
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    found = importlib.metadata.distributions(name="axonn", path=[str(folder)])
    return next((distribution.version for distribution in found), "of unknown version")


class StandIn(ModuleType):
    """A module with other objects under some of its names."""

    def __init__(self, module: ModuleType, **names: object) -> None:
        super().__init__(module.__name__)
        self._module = module
        vars(self).update(names)

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)


def _on_cpu(make, *args, device=None, **kwargs) -> Tensor:
    return make(*args, **kwargs)


def _report(kind: str, payload: int, group: dist.ProcessGroup | None) -> None:
    collectives._report(kind, payload, group or dist.group.WORLD)


def new_group(ranks, backend) -> dist.ProcessGroup:
    """A group of the default backend, where AxoNN asks for NCCL."""
    return dist.new_group(ranks)


def all_reduce(tensor, group=None, async_op=False):
    _report("all_reduce", tensor.nbytes, group)
    return dist.all_reduce(tensor, group=group, async_op=async_op)


def all_gather(tensors, tensor, group=None):
    """AxoNN's list has the input itself at this rank's place, which gloo writes: autograd sees a changed weight."""
    _report("all_gather", tensor.nbytes, group)
    apart = [torch.empty_like(tensor) if given is tensor else given for given in tensors]
    dist.all_gather(apart, tensor, group=group)


def all_gather_into_tensor(output, tensor, group=None, async_op=False):
    """Of parameters outside of no_grad too, and of a number without a dim, both of which gloo does not take."""
    _report("all_gather", tensor.nbytes, group)
    return collectives._all_gather_single(output, tensor.detach().reshape(-1), group=group, async_op=async_op)


def reduce_scatter_tensor(output, tensor, group=None, async_op=False):
    _report("reduce_scatter", output.nbytes, group)
    return collectives._reduce_scatter_single(output, tensor, group=group, async_op=async_op)


def all_to_all(outputs, inputs, group=None):
    """Tensors of one size, all that gloo can do; equal batches on all ranks are enough for that."""
    _report("all_to_all", sum(tensor.nbytes for tensor in inputs), group)
    dist.all_to_all(outputs, inputs, group=group)


def _wait_for_handles(overlap: ModuleType) -> None:
    for handle in overlap.handles:
        handle.wait()
    overlap.handles = []


DIST = StandIn(
    dist,
    new_group=new_group,
    all_reduce=all_reduce,
    all_gather=all_gather,
    all_gather_into_tensor=all_gather_into_tensor,
    reduce_scatter_tensor=reduce_scatter_tensor,
    all_to_all=all_to_all,
)
CUDA = StandIn(torch.cuda, set_device=lambda device: None, current_device=lambda: "cpu")
TORCH = StandIn(
    torch, cuda=CUDA, distributed=DIST, empty=partial(_on_cpu, torch.empty), tensor=partial(_on_cpu, torch.tensor)
)
