"""All-gathers on gloo: torch's own against messages between pairs of ranks (hf_axonn/distributed/gloo.py).

    OMP_NUM_THREADS=1 python -m tests.benchmarks.kernels.gather

Prints, for several block sizes, wall-clock time and processor time of a rank, as ratios of the two ways in one run.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time


os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

from hf_axonn.distributed import gloo  # noqa: E402


def theirs(block: torch.Tensor) -> torch.Tensor:
    """[n] -> [p, n] with one call of torch."""
    result = block.new_empty(dist.get_world_size(), len(block))
    dist.all_gather_single(result.view(-1), block)
    return result


def ours(block: torch.Tensor) -> torch.Tensor:
    """[n] -> [p, n] by messages."""
    result = block.new_empty(dist.get_world_size(), len(block))
    gloo.start_all_gather(block, result, dist.group.WORLD).wait()
    return result


def measure(function, block: torch.Tensor, repeats: int) -> tuple[float, float]:
    """Wall-clock and processor seconds of one call on this rank."""
    dist.barrier()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        function(block)
    dist.barrier()
    return (time.perf_counter() - begin) / repeats, (time.process_time() - begin_cpu) / repeats


def _rank(rank: int, world: int, meeting: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    for elements in (2**12, 2**16, 2**18, 2**20, 2**22):
        block = torch.full((elements,), float(rank))
        assert torch.equal(ours(block), theirs(block))
        repeats = max(2, min(100, 2**23 // (elements * world)))
        both = [(measure(theirs, block, repeats), measure(ours, block, repeats)) for _ in range(rounds)]
        wall, cpu = (sorted(mine[i] / other[i] for other, mine in both)[rounds // 2] for i in (0, 1))
        if rank == 0:
            print(f"| {world} | {elements * 4 // 1024} | {wall:.2f} | {cpu:.2f} |", flush=True)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=9, help="of which the median counts (9)")
    args = parser.parse_args()
    print(
        "| ranks | KiB a block | time, ours / torch's | processor time, ours / torch's |\n|---:|---:|---:|---:|",
        flush=True,
    )
    for world in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            context = mp.get_context("fork")
            arguments = (world, f"{folder}/meeting", args.rounds)
            ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(world)]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()


if __name__ == "__main__":
    main()
