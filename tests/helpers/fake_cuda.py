"""A GPU without a GPU: tensors that say they are on CUDA, one rank of a world that is not there, and what it reads.

PyTorch's fake tensors have a shape, a dtype and a device, but no memory, so a whole training step runs on them in
seconds; where tensors of two devices meet, it raises, as CUDA would. On a build without CUDA autograd refuses such
tensors. `guard()` compiles what it lacks (fake_cuda_guard.cpp), once for each PyTorch, and `run()` starts a process
that has it from the beginning. In that process:

    with fake_gpu(grid) as reads:       this is a rank of `grid`
        with reads.phase("forward"):    where the host has waited for a value of the device is kept by phase

A host read is what makes the host wait for all that it has asked of the GPU so far: `.item()`, `nonzero`, an index of
bools, copies from the device that are not asynchronous to pinned memory, and copies to it that are not asynchronous.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest import mock
from weakref import WeakKeyDictionary, WeakSet

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hf_axonn
from hf_axonn.architectures import feature_layout, norm_probe
from hf_axonn.compat.accelerate import forget_state
from hf_axonn.distributed.mesh import grid_mesh
from hf_axonn.topology.grid import Grid
from tests.helpers import ROOT, fake_collectives  # noqa: F401


NEEDED = "HF_AXONN_TEST_COMPILER"  # set to 1 (.ci/run does): a missing compiler fails, and is no reason to skip
SOURCE = Path(__file__).with_name("fake_cuda_guard.cpp")


def guard() -> Path:
    """The compiled guard. Made once for a PyTorch, by whichever of several processes comes first.

    Skips the test where there is no C++ compiler, and with a PyTorch for GPUs, which has a guard of its own.
    """
    if torch.version.cuda or torch.version.hip:
        pytest.skip("fake CUDA tensors need a PyTorch for CPUs: this one would ask its own driver")
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        if os.environ.get(NEEDED) == "1":
            pytest.fail(f"{NEEDED}=1, but there is no C++ compiler: install g++")
        pytest.skip("fake CUDA tensors need a C++ compiler, and there is none")
    package = Path(torch.__file__).parent
    text = f"{torch.__version__} {package} {compiler} {SOURCE.read_text(encoding='utf-8')}"
    cache = Path(tempfile.gettempdir()) / f"hf_axonn-fake-cuda-{os.getuid()}"
    library = cache / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        cache.mkdir(mode=0o700, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        include, lib = package / "include", package / "lib"
        command = [compiler, "-shared", "-fPIC", "-std=c++17", f"-isystem{include}", str(SOURCE), f"-L{lib}"]
        command += [f"-Wl,-rpath,{lib}", "-lc10", "-ltorch_cpu", "-o", str(unfinished)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        os.replace(unfinished, library)
    return library


def run(module: str, *arguments: str, timeout: float = 500) -> dict[str, dict]:
    """Run `python -m module arguments` with a fake GPU; returns what it printed, a line of JSON for each name."""
    environment = os.environ | {"LD_PRELOAD": str(guard()), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    return {line["name"]: line for line in lines}


def pretend() -> None:
    """Let torch.cuda say that there is one GPU. For the whole process: nothing puts this back."""
    os.environ.pop("LD_PRELOAD", None)  # children of this process shall not have it
    FakeTensorMode.avoid_device_init = True
    answers = {
        "current_device": 0,
        "device_count": 1,
        "get_device_capability": (9, 0),
        "get_device_name": "fake",
        "get_device_properties": mock.Mock(major=9, minor=0, multi_processor_count=132, total_memory=80 * 2**30),
        "get_rng_state_all": [],
        "is_available": True,
        "is_bf16_supported": True,
        "is_initialized": True,
        "manual_seed": None,
        "manual_seed_all": None,
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
        "reset_peak_memory_stats": None,
        "set_device": None,
        "set_rng_state": None,
        "set_rng_state_all": None,
        "synchronize": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8, device="cpu")
    torch.cuda.Event = _Event
    torch.cuda.current_stream = lambda *_: torch.Stream(stream_id=current_stream(), device_index=0, device_type=1)
    torch.cuda.Stream = lambda *_: torch.Stream(stream_id=7, device_index=0, device_type=1)
    torch.cuda.stream = lambda chosen: stream(chosen.stream_id)
    FOR_FAKES.impl("record_stream", lambda *_: None, "Meta")
    for module in (norm_probe, feature_layout):
        module.isolate = _really_isolated
    torch.nn.Module.to = _to
    # Who asks whether two tensors share their memory is told, though there is none.
    torch.UntypedStorage.data_ptr = lambda storage: storage._cdata
    FakeTensor.data_ptr = lambda tensor: (tensor.untyped_storage()._cdata << 40) + tensor.storage_offset()


def current_stream() -> int:
    """The number of the current stream of this thread; 0 is the default one."""
    return int(ctypes.CDLL(None).fake_cuda_stream())


@contextlib.contextmanager
def stream(number: int) -> Iterator[None]:
    """The current stream of this thread is this one inside."""
    before, library = current_stream(), ctypes.CDLL(None)
    library.set_fake_cuda_stream(ctypes.c_int64(number))
    try:
        yield
    finally:
        library.set_fake_cuda_stream(ctypes.c_int64(before))


class _Event:
    """An event of a stream on which nothing takes time."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.recorded = False

    def record(self) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded

    def elapsed_time(self, end: _Event) -> float:
        assert self.recorded and end.recorded
        return 0.0


def _to(module: torch.nn.Module, *args, **kwargs) -> torch.nn.Module:
    """As torch's, which exchanges fake parameters for others even where they stay: that fails if they are known."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    tensors = [*module.parameters(), *module.buffers()]
    there = all(device is None or tensor.device.type == device.type for tensor in tensors)
    same = all(dtype is None or tensor.dtype == dtype or not tensor.is_floating_point() for tensor in tensors)
    return module if there and same else _torch_to(module, *args, **kwargs)


_torch_to = torch.nn.Module.to


@contextlib.contextmanager
def _really_isolated() -> Iterator[None]:
    """What norms do is found out by calling them, with numbers that are there."""
    with unset_fake_temporarily(), _isolated():
        yield


_isolated = norm_probe.isolate


@contextlib.contextmanager
def fake_gpu(grid: Grid, rank: int = 0) -> Iterator[HostReads]:
    """Be a rank of a grid whose other ranks are not there. Tensors that are made inside are fake."""
    environment = dict(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(grid.size), LOCAL_WORLD_SIZE="1")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=grid.size)
    try:
        mesh = grid_mesh(grid, "cuda")
        assert mesh.storage_mesh is not None and mesh.sample_mesh is not None  # made once, of tensors that are real
        reads = HostReads(chosen_by=grid.x * grid.y)
        with mock.patch.dict(os.environ, environment), FakeTensorMode(allow_non_fake_inputs=True), reads:
            yield reads
    finally:
        dist.destroy_process_group()
        forget_state()


FOR_FAKES = torch.library.Library("aten", "IMPL")  # operators that PyTorch's fake tensors lack

# Those that ProcessGroupNCCL translates.
NCCL_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
)

ANSWERED = [
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
]


class HostReads(TorchDispatchMode):
    """Counts what the host reads of the device, and answers in the place of tensors that hold nothing.

    A number is 1. Of bools one in `chosen_by` is True, in sums too: as many as a rank has of experts, or of targets,
    that are divided over so many ranks. What the host itself has put on the device comes back as it was.

    Attributes:
        found: phase -> (what, where) -> how often. Where is the innermost line that is not PyTorch's.
        yes: what a bool is that is read.
    """

    def __init__(self, chosen_by: int) -> None:
        super().__init__()
        self.chosen_by, self.yes = chosen_by, True
        self.found: dict[str, Counter[tuple[str, str]]] = {}
        self._phase = "start"
        self._values: WeakKeyDictionary[torch.UntypedStorage, list] = WeakKeyDictionary()
        self._pinned: WeakSet[torch.UntypedStorage] = WeakSet()
        self._last: tuple | None = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is read inside belongs to this phase."""
        before, self._phase = self._phase, name
        self.found.setdefault(name, Counter())
        try:
            yield
        finally:
            self._phase, self._last = before, None

    def _note(self, what: str, of: Tensor) -> None:
        where, storage = innermost_line(), of.untyped_storage()._cdata
        if self._last != (what, where, storage):  # tolist() comes here for every number
            self.found.setdefault(self._phase, Counter())[what, where] += 1
        self._last = (what, where, storage)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again with the shards
        aten = torch.ops.aten
        if not any(issubclass(kind, FakeTensor) for kind in types) and func in ANSWERED:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return self._item(args[0])
        if func in ANSWERED:
            if args[0].is_cuda:
                self._note(func.__name__.partition(".")[0], args[0])
            return self._places(args[0]) if func is aten.nonzero.default else self.yes
        if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
            return func(args[0], self._whole(args[1]), *args[2:], **kwargs)
        if func is aten.histc.default and args[0].is_cuda:
            low, high, *_ = (*args[2:], 0, 0)
            if low == high:  # the kernel takes the range from the tensor
                self._note("range of histc", args[0])
        if func.namespace in ("c10d", "_c10d_functional"):
            check_as_nccl(func, (args, kwargs))
        result = func(*args, **kwargs)
        if func._schema.is_mutable and func.namespace != "c10d":  # other ranks have what this one has
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor):
                    self._values.pop(tensor.untyped_storage(), None)
        if kwargs.get("pin_memory"):
            self._pinned.add(result.untyped_storage())
        if func in (aten._to_copy.default, aten.copy_.default):
            source, target = (args[1], args[0]) if func is aten.copy_.default else (args[0], result)
            self._copied(source, target, kwargs.get("non_blocking", len(args) > 2 and args[2]))
        elif func is aten.sum.dim_IntList and args[0].dtype == torch.bool:
            each = args[0].numel() // max(result.numel(), 1) // self.chosen_by
            self._values[result.untyped_storage()] = [each] * result.numel()
        elif func is aten.lift_fresh.default:
            self._keep(args[0], result)
        return result

    def _item(self, tensor: Tensor):
        if tensor.is_cuda:
            self._note("item", tensor)
        values = self._values.get(tensor.untyped_storage())
        if values is not None:
            return values[tensor.storage_offset()]
        return self.yes if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1

    def _places(self, mask: Tensor) -> Tensor:
        count = mask.numel() // (self.chosen_by if mask.dtype == torch.bool else 1)
        return mask.new_empty((count, mask.dim()), dtype=torch.int64)

    def _whole(self, indices: list[Tensor | None]) -> list[Tensor | None]:
        """Indices of bools as whole numbers, which have a shape before they have values."""
        whole: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                whole.append(index)
                continue
            if index.is_cuda:
                self._note("index of bools", index)
            whole += self._places(index).unbind(1)
        return whole

    def _copied(self, source: Tensor, target: Tensor, non_blocking: bool) -> None:
        if source.is_cuda and target.device.type == "cpu":
            if not (non_blocking and target.untyped_storage() in self._pinned):
                self._note("copy to the host", source)
        elif source.device.type == "cpu" and target.is_cuda and not non_blocking:
            self._note("copy to the device", source)
        values = self._values.get(source.untyped_storage())
        if values is not None and source.shape == target.shape:
            self._values[target.untyped_storage()] = values

    def _keep(self, real: Tensor, fake: Tensor) -> None:
        if type(real) is Tensor and real.device.type == "cpu" and real.numel() < 10_000:
            with torch.utils._mode_utils.no_dispatch():
                self._values[fake.untyped_storage()] = real.flatten().tolist()


def check_as_nccl(func: torch._ops.OpOverload, values: object) -> None:
    """Refuse what NCCL refuses and the `fake` backend takes: tensors of the CPU, strided ones, other dtypes."""
    if func is torch.ops.c10d.barrier.default:
        return  # its tensor only chooses the backend
    for tensor in tree_leaves(values):
        if isinstance(tensor, Tensor):
            what = f"{func} got {list(tensor.shape)} {tensor.dtype} on {tensor.device} at {innermost_line()}"
            assert tensor.is_cuda, f"NCCL takes tensors of GPUs only: {what}"
            assert tensor.is_contiguous(), f"NCCL takes contiguous tensors only: {what}, strides {tensor.stride()}"
            assert tensor.dtype in NCCL_DTYPES, f"NCCL does not know the dtype: {what}"


def innermost_line() -> str:
    """Where the caller is, without PyTorch and this file: `hf_axonn/layers/norms.py:168 self._counts()`."""
    package, torch_package = Path(hf_axonn.__file__).parent.parent, Path(torch.__file__).parent
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(torch_package) or path == Path(__file__) or path.name == "contextlib.py":
            continue
        parts = path.parts
        if "site-packages" in parts:
            path = Path(*parts[parts.index("site-packages") + 1 :])
        elif path.is_relative_to(package):
            path = path.relative_to(package)
        return f"{path}:{frame.lineno} {frame.line}"
    return "?"
