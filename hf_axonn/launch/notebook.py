"""A grid from a notebook: the processes are started from a cell, and a function of the notebook runs in each.

    def train():
        trainer = GoldfishTrainer(...)      # everything is made inside: model, arguments, trainer
        return trainer.train().training_loss

    loss = hf_axonn.notebook_launcher(train, grid=Grid(z=2))

On GPUs accelerate's own `notebook_launcher` starts the processes; it has no CPU processes, which are forked here. What
is added is what `accelerate launch --config axonn.yaml` does for a script: the grid is there in every process, and a
bare `Accelerator()` or `Trainer` uses it.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_axonn.compat.messages import get_logger
from hf_axonn.compat.post_import import after_import
from hf_axonn.config import LAUNCH_FILE, NOTEBOOK, PRECISIONS, VARIABLE, AxonnConfig
from hf_axonn.launch.gpu_settings import gpu_settings, has_nvidia
from hf_axonn.topology.grid import Grid


logger = get_logger(__name__)

LEAVING = 3.0  # seconds in which ranks may end by themselves after an interrupt


def notebook_launcher(
    function: Callable,
    args: tuple = (),
    *,
    grid: Grid | Mapping[str, int] | AxonnConfig,
    mixed_precision: str = "no",
    use_cpu: bool | None = None,
) -> Any:
    """Run a function in as many processes as a grid has ranks, on this machine.

    Where torch finds GPUs, nothing may have used CUDA or gone backward in the notebook before. On CPUs every process
    has one thread.

    Args:
        function: called in every process; what it prints is seen here.
        args: its arguments.
        grid: sizes of the axes, or all settings of `axonn_config`.
        mixed_precision: no, bf16 or, on GPUs, fp16.
        use_cpu: whether to run on CPUs; None: where the machine has no GPU.
    Returns:
        What the function returned on rank 0; None, with a warning, if that cannot be pickled. With a grid of one rank
        the function is called in this process.
    Raises:
        ValueError: an argument is out of range, or would have no effect on one rank, there are fewer GPUs than ranks,
            torch.distributed is in use here, or autograd has threads here, as after a backward pass where torch finds
            GPUs.
        Exception: a process failed; the others are ended, as they are by an interrupt.
    """
    config = _config(grid)
    if mixed_precision not in PRECISIONS:
        raise ValueError(f"mixed_precision is {mixed_precision!r}, but it is one of {', '.join(PRECISIONS)}.")
    if not isinstance(args, tuple):
        raise ValueError(f"args is {args!r}, but it is a tuple: write args=(value,).")
    ranks = config.grid.size
    import torch
    from accelerate import notebook_launcher as accelerate_launcher

    if ranks == 1:
        idle = [f"mixed_precision={mixed_precision!r}"] if mixed_precision != "no" else []
        idle += ["use_cpu=True"] if use_cpu and torch.cuda.device_count() else []
        idle += ["a setting of axonn_config"] if config != AxonnConfig(grid=config.grid) else []
        if idle:
            raise ValueError(
                f"a grid of one rank calls the function in this process, where {' and '.join(idle)} would have no "
                "effect: give it to the Accelerator or Trainer in the function, and not to notebook_launcher."
            )
        return function(*args)
    if torch.distributed.is_initialized():
        raise ValueError("torch.distributed is initialized in this process: restart the notebook, and launch first.")
    if _has_autograd_threads():
        raise ValueError(
            "a backward pass in this process has started threads of torch for GPUs, and ranks that are forked from it "
            "could not go backward: restart the notebook, and launch first."
        )
    gpus = torch.cuda.device_count()
    use_cpu = not gpus if use_cpu is None else use_cpu
    if not use_cpu and gpus < ranks:
        raise ValueError(
            f"the grid {config.grid} needs {ranks} GPUs, but this machine has {gpus}: take a smaller grid, or try it "
            "on CPUs with use_cpu=True."
        )
    if use_cpu and mixed_precision == "fp16":
        raise ValueError("mixed_precision is 'fp16', which accelerate ignores on CPUs: write bf16 or no.")
    with tempfile.TemporaryDirectory(prefix="axonn-") as folder:
        result = Path(folder) / "result"
        environment = {VARIABLE: config.to_json(), LAUNCH_FILE: NOTEBOOK}
        environment["ACCELERATE_MIXED_PRECISION"] = mixed_precision
        if not use_cpu and has_nvidia():
            chosen, notes = gpu_settings(config.grid, os.environ)
            environment |= chosen
            for note in notes:
                print(f"hf_axonn: {note}", file=sys.stderr)
        worker = _Worker(function, environment, result)
        sys.stdout.flush()
        if use_cpu:
            _run_forked(worker.on_cpu, (ranks, *args), ranks)
        else:
            accelerate_launcher(
                worker, args, num_processes=ranks, mixed_precision=mixed_precision, use_port=str(_free_port())
            )
        value = pickle.loads(result.read_bytes())
        if isinstance(value, _Lost):
            logger.warning(f"{value.text} Return numbers, strings, tensors of the CPU, or lists and dicts of them.")
            return None
        return value


def _has_autograd_threads() -> bool:
    """Return whether autograd has started threads in this process, as far as Linux shows their names."""
    for file in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread has ended
            if file.read_text().startswith("pt_autograd"):
                return True
    return False


def _run_forked(function: Callable, args: tuple, ranks: int) -> None:
    """Run a function in forked processes, none of which outlives this call, be it interrupted."""
    from torch.multiprocessing import start_processes

    context: Any = start_processes(function, args, nprocs=ranks, join=False, start_method="fork")
    try:
        while not context.join():
            pass
    finally:  # an interrupt of the notebook may have reached them, too, or this process alone
        end = time.monotonic() + LEAVING
        try:
            for process in context.processes:
                process.join(max(0.0, end - time.monotonic()))
        finally:  # a second interrupt ends the waiting
            for process in context.processes:
                process.kill()
            for process in context.processes:
                process.join()


class _Worker:
    """Runs the function on its grid, in every process. Can be pickled where the function can."""

    def __init__(self, function: Callable, environment: dict[str, str], result: Path) -> None:
        self.function = function
        self.environment = environment
        self.result = result

    def on_cpu(self, rank: int, ranks: int, *args: Any) -> None:
        """One of `ranks` processes that were forked; they meet through a file beside the result."""
        import torch

        torch.set_num_threads(1)  # threads of the notebook did not come along when it was forked
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        # accelerate asks for these two, though the process group is there already.
        os.environ.update(ACCELERATE_USE_CPU="true", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
        meeting = self.result.with_name("rendezvous")
        torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
        self(*args)

    def __call__(self, *args: Any) -> None:
        import torch

        from hf_axonn.distributed.watchdog.watchdog import failures_reported, note_end

        os.environ.update(self.environment)
        _use_grid()
        if os.environ["RANK"] != "0":
            after_import("transformers.trainer", _no_table)
        if not isinstance(sys.stdout, io.TextIOWrapper):  # a kernel's streams
            sys.stdout, sys.stderr = _WholeLines(sys.stdout), _WholeLines(sys.stderr)
        with failures_reported():
            value = self._call(args)
        if os.environ["RANK"] == "0":
            self.result.write_bytes(_pickle_result(value))
        note_end()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def _call(self, args: tuple) -> Any:
        try:
            return self.function(*args)
        except SystemExit as end:
            if end.code:
                raise
            return _Lost("the function ended by sys.exit(), so that nothing comes back: None is.")
        except AttributeError as error:
            if "_reset_state()" in str(error):  # Accelerate's words for a state that was forgotten
                error.add_note("An Accelerator or Trainer from before notebook_launcher: make it in the function.")
            raise


class _WholeLines:
    """A stream of Jupyter's kernel in a forked process, where it sends each write by itself: without this, the words
    of several ranks would mix within a line."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.begun = ""
        self.lock = threading.RLock()

    def write(self, text: str) -> int:
        with self.lock:
            lines, end, self.begun = (self.begun + text).rpartition("\n")
            if end:
                self.stream.write(lines + end)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        with self.lock:
            rest, self.begun = self.begun, ""
            if rest:
                self.stream.write(rest)
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _use_grid() -> None:
    """Make accelerate see the grid, as in a process that was launched with a file and imports it after this."""
    from hf_axonn.compat.accelerate import forget_state
    from hf_axonn.plugin import install_default

    forget_state()
    install_default()


def _no_table() -> None:
    """A Trainer made after this shows no table of its progress in the notebook, where that of rank 0 is."""
    from transformers import ProgressCallback, trainer

    trainer.DEFAULT_PROGRESS_CALLBACK = ProgressCallback


def _config(grid: Grid | Mapping[str, int] | AxonnConfig) -> AxonnConfig:
    if isinstance(grid, AxonnConfig):
        return grid
    return AxonnConfig.from_mapping({"grid": grid.as_dict() if isinstance(grid, Grid) else grid})


@dataclass(frozen=True)
class _Lost:
    """Stands for a result that cannot be pickled, and says so to the user."""

    text: str


def _pickle_result(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as problem:  # whatever a class's own __reduce__ raises
        kind = type(value).__name__
        return pickle.dumps(_Lost(f"the function returned a {kind}, which does not come back ({problem}): None is."))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
