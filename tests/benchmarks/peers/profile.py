"""Where a contender of peers.py spends its time: one rank's seconds a step, by kind of work and by operator.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.peers.profile --ranks 2 DDP data=2 "native TP" x=2

Self times of torch.profiler on rank 0. Every step runs the same operators in the same order, so of each single call
the fastest over all steps counts: other programs on the machine interrupt some calls in some steps, not one call in
all. Communication is launching and waiting; what DDP waits for in C++ is in the self time of `step`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from pathlib import Path


os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.profiler import ProfilerActivity, profile, record_function  # noqa: E402

from tests.benchmarks.peers import peers  # noqa: E402
from tests.benchmarks.peers.contenders import Training, build  # noqa: E402


KINDS = {
    "matmul": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "attention"),
    "communication": (
        "c10d::",
        "gloo:",
        "_c10d_functional::",
        "wait",
        "allreduce",
        "allgather",
        "_allgather",
        "reduce_scatter",
    ),
    "optimizer": ("Optimizer", "_fused_adamw"),
    "copies": ("copy_", "aten::cat", "aten::clone", "aten::zero_", "aten::fill_", "aten::constant_pad", "split_with"),
}


def kind_of(operator: str) -> str:
    """The first of KINDS that has a word in the operator's name."""
    return next((kind for kind, words in KINDS.items() if any(word in operator for word in words)), "the rest")


def profiled(training: Training, batches: Tensor, steps: int) -> list[dict[tuple[str, int], float]]:
    """For each step: (operator, number of the call) -> seconds of its own."""
    found = []
    for step in range(steps + 2):
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            with record_function("step"):
                training.step(batches[step])
        if step > 1:
            calls: Counter[str] = Counter()
            seconds = {}
            for event in sorted(profiler.events(), key=lambda event: event.time_range.start):
                seconds[event.name, calls[event.name]] = event.self_cpu_time_total / 1e6
                calls[event.name] += 1
            found.append(seconds)
    return found


def _show_waits() -> None:
    wait = dist.Work.wait

    def shown(work, *args, **kwargs):
        with record_function("wait"):
            return wait(work, *args, **kwargs)

    dist.Work.wait = shown


def _rank(name: str, rank: int, world: int, weights: Path, batches: Tensor, steps: int, top: int, meeting: Path):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    _show_waits()
    found = profiled(build(name, weights), batches, steps)
    if rank == 0:
        print(_report(name, found, top), flush=True)
    dist.barrier()
    os._exit(0)


def _report(name: str, found: list[dict[tuple[str, int], float]], top: int) -> str:
    fastest = {call: min(step[call] for step in found) for call in found[0] if all(call in step for step in found)}
    seconds: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    calls = Counter(operator for operator, _ in fastest)
    for (operator, _), of_call in fastest.items():
        seconds[operator] += of_call
        kinds[kind_of(operator)] += of_call
    total = seconds.total()
    shares = ", ".join(f"{kind} {of_kind:.3f} s ({of_kind / total:.0%})" for kind, of_kind in kinds.most_common())
    lines = [f"{name}: {total:.3f} s a step: {shares}"]
    for operator, of_operator in seconds.most_common(top):
        lines.append(f"    {of_operator * 1e3:8.1f} ms {calls[operator]:6} x  {kind_of(operator):14} {operator}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", help="contenders: plain, floors, peers or grids")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--top", type=int, default=20, help="operators to list")
    parser.add_argument("--size", choices=peers.SIZES, default="60m")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config = peers.model_config(args.size, sequence=256)
        peers.save_weights(config, folder / "weights")
        batches = peers.text_batches(config.vocab_size, 4, 256)
        for name in args.names:
            meeting = folder / f"meeting-{name}"
            rank_args = (name, 0, args.ranks, folder / "weights", batches, args.steps, args.top, meeting)
            ranks = [
                mp.get_context("fork").Process(target=_rank, args=(name, rank, *rank_args[2:]), daemon=True)
                for rank in range(args.ranks)
            ]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()


if __name__ == "__main__":
    main()
