"""The processes of peers.py: a contender is a process group of its own that stays alive and works when it is its turn.

Ranks are forked from one parent that has imported everything, meet through a file, and wait on a pipe between turns,
so that contenders can alternate in one run and what disturbs the machine disturbs all alike.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from tests.benchmarks.peers.contenders import Training, build


SECONDS_TO_ANSWER = 600


@dataclass
class Turn:
    """What a contender did when it was its turn, all ranks together.

    Args:
        seconds: wall-clock seconds a step, of the slowest rank.
        cpu_seconds: processor seconds a step, summed over ranks; other programs on the machine hardly change it.
        losses: the loss of each step, averaged over ranks.
        peak_bytes: the most resident memory that a rank had so far beyond what it had before its model was made.
        others: the part of the machine's processor time that other programs took meanwhile, 0 to 1.
    """

    seconds: float
    cpu_seconds: float
    losses: list[float]
    peak_bytes: int
    others: float


class Traffic(NamedTuple):
    """What one step communicates, of the rank with most of it.

    Args:
        calls: collectives of more than one rank.
        sent: bytes that the rank sends for them, by rings and pairwise exchanges (planner/traffic/ledger.py).
    """

    calls: int
    sent: int


class Ranks:
    """A contender's processes.

    Args:
        name: of the contender, see contenders.build.
        world: number of processes.
        threads: threads of each.
        weights: folder of the initial weights.
        batches: [N, B, S] ids, step i takes batch i modulo N.
        folder: for the file by which the ranks meet.
    """

    def __init__(self, name: str, world: int, threads: int, weights: Path, batches: Tensor, folder: Path) -> None:
        context = mp.get_context("fork")
        meeting = folder / f"meeting-{name.replace(' ', '-')}-{world}"
        meeting.unlink(missing_ok=True)
        self.name = name
        self._done = 0
        self._pipes, self._processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            args = (name, rank, world, threads, weights, batches, meeting, theirs)
            process = context.Process(target=_rank, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers()

    def turn(self, steps: int) -> Turn:
        """Train for `steps` steps.

        Raises:
            RuntimeError: a rank failed; the message is its traceback.
        """
        begin, busy = time.perf_counter(), busy_seconds()
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # a rank that has ended says so when it is asked for its answer
                pipe.send((self._done, steps, False))
        self._done += steps
        seconds, cpu_seconds, losses, peaks = zip(*self._answers(), strict=True)
        others = busy_seconds() - busy - sum(cpu_seconds)
        share = max(0.0, others / (time.perf_counter() - begin) / os.cpu_count())
        mean_losses = [sum(of_ranks) / len(of_ranks) for of_ranks in zip(*losses, strict=True)]
        return Turn(max(seconds) / steps, sum(cpu_seconds) / steps, mean_losses, max(peaks), share)

    def traffic(self) -> Traffic | None:
        """Train one step and count its collectives; None, without a step, for one that cannot count them.

        Raises:
            RuntimeError: a rank failed; the message is its traceback.
        """
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send((self._done, 1, True))
        self._done += 1
        counts = self._answers()
        return None if counts[0] is None else Traffic(*map(max, zip(*counts, strict=True)))

    def stop(self) -> None:
        """End the processes, whatever they are doing."""
        for process in self._processes:
            process.kill()
            process.join()

    def _answers(self) -> list:
        answers = []
        for rank, pipe in enumerate(self._pipes):
            try:
                answer = pipe.recv() if pipe.poll(SECONDS_TO_ANSWER) else f"no answer in {SECONDS_TO_ANSWER} s"
            except (EOFError, ConnectionError):
                answer = "it ended without a word, perhaps for memory: take fewer --others, or a smaller --together"
            if isinstance(answer, str):
                self.stop()
                raise RuntimeError(f"{self.name}, rank {rank}: {answer}")
            answers.append(answer)
        return answers


def busy_seconds() -> float:
    """Processor seconds that all programs of the machine have taken since it started; 0 where nothing says so."""
    try:
        user, nice, system, _, _, irq, softirq, steal = Path("/proc/stat").read_text().split()[1:9]
    except (OSError, ValueError):  # not Linux
        return 0.0
    return sum(map(int, (user, nice, system, irq, softirq, steal))) / os.sysconf("SC_CLK_TCK")


def wait_for_quiet(patience: float, share: float) -> None:
    """Wait until other programs take at most `share` of the processors, but not longer than `patience` seconds."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        busy = busy_seconds()
        time.sleep(0.3)
        if (busy_seconds() - busy) / 0.3 / os.cpu_count() <= share:
            return


def _return_free_memory() -> None:
    """Give free memory back to the system: a contender that waits holds no activations of its last turn."""
    with contextlib.suppress(AttributeError):  # malloc_trim is glibc's
        ctypes.CDLL(None).malloc_trim(0)


def _rank(name: str, rank: int, world: int, threads: int, weights: Path, batches: Tensor, meeting: Path, pipe) -> None:
    try:
        with contextlib.suppress(OSError):  # where memory runs out a contender is to go, not another program
            Path("/proc/self/oom_score_adj").write_text("1000")
        torch.set_num_threads(threads)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
        dist.barrier()
        torch.manual_seed(0)
        before = _resident_bytes()
        training = build(name, weights)
        _forget_peak()  # of building: it is training that is compared
        pipe.send(())
        while _wait_for_turn(pipe):
            first, steps, counted = pipe.recv()
            dist.barrier()
            if counted:
                counts = _count(training, batches[first % len(batches)])
                _return_free_memory()
                pipe.send(counts)
                continue
            begin, begin_cpu = time.perf_counter(), time.process_time()
            losses = [training.step(batches[step % len(batches)]) for step in range(first, first + steps)]
            seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
            peak = _peak_bytes() - before
            _return_free_memory()
            pipe.send((seconds, cpu_seconds, [float(loss) for loss in losses], peak))
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send(traceback.format_exc())
    finally:
        os._exit(0)  # not through clean-up: the other ranks may be waiting in a collective


def _count(training: Training, batch: Tensor) -> tuple[int, int] | None:
    if training.counting is None:
        return None
    with training.counting() as counter:
        training.step(batch)
    return counter.ledger.calls(), int(counter.ledger.bytes_sent())


def _wait_for_turn(pipe) -> bool:
    """Whether there will be another turn: not where the parent has gone, whose end of the pipe siblings hold open."""
    parent = mp.parent_process()
    while not pipe.poll(2):
        if not parent.is_alive():
            return False
    return True


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def _resident_bytes() -> int:
    try:
        return _status_bytes("VmRSS")
    except OSError:  # not Linux
        return 0


def _forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    try:
        return _status_bytes("VmHWM")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
