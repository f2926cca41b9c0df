"""Measuring a machine for the planner: links, latency, matrix products and memory, written as a machine file.

    torchrun --nproc-per-node 8 -m hf_axonn.cli bench-links --output this.json      (one process a GPU, on every node)

All groups of one kind run at once, as they do in training and as the paper measured them: every ring of p ranks,
`stride` apart, inside a node; then one ring through all nodes. NCCL (or RCCL) where there are GPUs, gloo on CPUs.
Collective over the world; rank 0 writes the file. Numbers are medians, of the slowest rank.

Source: AxoNN (arXiv 2502.08145), section on the performance model, for which groups are measured and how.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_axonn.collectives import barrier, exchange, reduce_, start_all_gather, start_reduce_scatter
from hf_axonn.perf.machines import from_mapping
from hf_axonn.perf.planner import divisors


ROUNDS = 5  # timings of which the median counts, after one that does not
LONG = (
    0.05  # seconds that a timing of something short lasts at least, by repeating it: processes that share cores take
)
# turns of some milliseconds, and what is shorter than a turn would seem to have a core to itself
MOST_REPEATS = 10_000
PAYLOADS = {"nccl": 2**28, "gloo": 2**23}  # bytes of a gathered tensor; AxoNN's authors took a gigabyte
SMALL = 64  # bytes of a block whose gather is all latency
SIZES = {"cuda": (256, 512, 1024, 2048, 4096, 8192), "cpu": (64, 128, 256, 512, 1024)}
BETWEEN = {"cuda": 2048, "cpu": 512}  # size of the product before a gather that is all latency
COPIED = {"cuda": 2**30, "cpu": 2**26}  # bytes of a tensor that is copied to measure memory
TINY = 64  # numbers
UNMEASURED = 1e-6  # seconds for a latency that came out below what a clock can tell


def bench_links(output: str, *, seconds: float = 60.0) -> int:
    """Measure and write; returns the exit code.

    Args:
        output: the file that rank 0 writes.
        seconds: when this is over no further kind of group is measured; the file names what is missing.
    Raises:
        ValueError: not started by torchrun, or nodes differ in their number of processes.
    """
    if "RANK" not in os.environ:
        raise ValueError("no process group: start it as torchrun --nproc-per-node N -m hf_axonn.cli bench-links ...")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        if dist.get_world_size() % local:
            raise ValueError(
                f"{dist.get_world_size()} processes are not nodes of {local}: start as many on every node."
            )
        found = measure(local, torch.device(kind), seconds=seconds)
        if dist.get_rank() == 0:
            from_mapping(found)  # what cannot be read is not written
            Path(output).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
            print(f"{output} describes this machine: hf-axonn plan --machine {output}")
    finally:
        if ours:
            dist.destroy_process_group()
    return 0


def measure(local: int, device: torch.device, *, seconds: float) -> dict[str, Any]:
    """The contents of a machine file. Collective over the world; all ranks get the same.

    Args:
        local: processes of a node; the world is nodes of as many.
        device: where.
        seconds: most to spend on groups inside a node.
    """
    world, backend = dist.get_world_size(), dist.get_backend()
    payload = PAYLOADS.get(backend, PAYLOADS["gloo"])
    start = time.perf_counter()
    table: dict[str, float] = {}
    steps: dict[int, float] = {}
    skipped = []
    pairs = [(stride, ranks) for ranks in divisors(local)[1:] for stride in divisors(local // ranks)]
    for stride, ranks in pairs:
        # The clock of the slowest decides, so that all ranks measure the same groups.
        if table and _slowest(time.perf_counter() - start, device) > seconds:
            skipped.append(f"{stride}x{ranks}")
            continue
        group = _siblings(stride, ranks)
        if stride == 1:
            steps[ranks] = _latency_seconds(group, device)
        table[f"{stride}x{ranks}"] = _ring_bandwidth(payload, group, device) / 1e9
    base, intra_step = _latency(steps)
    inter, inter_step, how_inter = max(table.values(), default=1.0), intra_step, "not measured, there is one node: "
    how_inter += "the fastest ring in it"
    if world > local:
        inter = _ring_bandwidth(payload, dist.group.WORLD, device) / 1e9
        nodes = world // local
        through = _latency_seconds(dist.group.WORLD, device)
        inter_step = max(UNMEASURED, (through - base - (world - nodes) * intra_step) / (nodes - 1))
        how_inter = f"measured: one ring through {nodes} nodes"
    products = _products(device)
    best = max(products.values())
    costs, overlap = _relative_costs(payload, device), _overlap(payload, device)
    how = f"measured by hf-axonn bench-links: {backend}, torch {torch.__version__}, {local} processes a node"
    how_intra = how + (f"; not measured for want of time: {', '.join(skipped)}" if skipped else "")
    on_gpu = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if on_gpu else None
    return {
        "name": "this",
        "description": properties.name if properties else f"CPU, {torch.get_num_threads()} thread(s) a process",
        "gpus_per_node": local,
        "peak_tflops": best,
        "gemm_tflops": best,
        "gemm_fraction": 1.0,
        "gemm_by_size": {str(size): rate / best for size, rate in products.items()},
        "memory_gib": (properties.total_memory if properties else _host_memory() / local) / 2**30,
        "memory_gbs": _copy_bandwidth(device) / 1e9,
        "memory_fraction": 1.0,
        "kernel_us": _shortest(device) * 1e6,
        "overlap": overlap,
        "relative_cost": costs,
        "units": properties.multi_processor_count if properties else 1,
        "intra_gbs": table or 1.0,
        "inter_gbs": inter,
        "latency_us": {"base": base * 1e6, "intra": intra_step * 1e6, "inter": inter_step * 1e6},
        "sources": {
            "gpus_per_node": how,
            "peak_tflops": f"{how}; the fastest product, not an advertised rate, so utilisation is a share of that",
            "gemm_tflops": f"{how}; the fastest square product",
            "gemm_fraction": "1: gemm_by_size is measured",
            "gemm_by_size": f"{how}; square products, all processes at once",
            "memory_gib": "torch" if on_gpu else "the host's memory, divided by its processes",
            "memory_gbs": f"{how}; a copy, read and written",
            "memory_fraction": "1: memory_gbs is measured",
            "kernel_us": f"{how}; adding one to {TINY} numbers",
            "overlap": f"{how}; a product and a gather alone and at once",
            "relative_cost": f"{how}; of {payload} bytes in a ring of all ranks, beside an all-gather",
            "units": "torch" if on_gpu else "1: gemm_by_size is measured",
            "intra_gbs": how_intra if table else "not measured, a node has one process: 1 stands for nothing",
            "inter_gbs": f"{how_inter}; {how}",
            "latency_us": f"{how}; what gathers of {SMALL} bytes by 2 and by {local} ranks of a node add to a product",
        },
    }


def _siblings(stride: int, ranks: int):
    """This rank's group of `ranks` ranks, `stride` apart; every rank is in one. Collective over the world."""
    world, groups = dist.get_world_size(), []
    for block in range(0, world, stride * ranks):
        for first in range(block, block + stride):
            groups.append(list(range(first, first + stride * ranks, stride)))
    group, _ = dist.new_subgroups_by_enumeration(groups)
    return group


def _slowest(value: float, device: torch.device) -> float:
    """The largest of all ranks' values. One all-reduce over the world."""
    return float(reduce_(torch.tensor(value, dtype=torch.float64, device=device), dist.group.WORLD, op="max"))


def _median_seconds(action: Callable[[], Any], device: torch.device) -> float:
    """Seconds of `action`: the median of ROUNDS, each begun by all ranks together and over with the slowest.

    What is over in less than LONG is repeated.
    """

    def seconds(repeats: int) -> float:
        barrier()
        _finish(device)
        start = time.perf_counter()
        for _ in range(repeats):
            action()
        _finish(device)
        return _slowest((time.perf_counter() - start) / repeats, device)

    seconds(1)
    # The same number of repeats on all ranks.
    repeats = min(MOST_REPEATS, max(1, round(LONG / max(seconds(1), UNMEASURED))))
    return statistics.median(seconds(repeats) for _ in range(ROUNDS))


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gather_seconds(nbytes: int, group, device: torch.device) -> float:
    """Seconds to all-gather blocks of `nbytes`, in all groups at once."""
    block = torch.zeros(max(1, nbytes // 4), device=device)
    return _median_seconds(lambda: start_all_gather(block, group).wait(), device)


def _latency_seconds(group, device: torch.device) -> float:
    """What a gather of SMALL bytes adds to a product before it, in all groups at once.

    In training ranks come to a collective from work of their own, and where they share cores they wait for each other.
    """
    size = BETWEEN[device.type]
    left, right = (torch.randn(size, size, device=device) for _ in range(2))
    block = torch.zeros(SMALL // 4, device=device)

    def both() -> None:
        left @ right
        start_all_gather(block, group).wait()

    alone = _median_seconds(lambda: left @ right, device)
    return max(UNMEASURED, _median_seconds(both, device) - alone)


def _ring_bandwidth(payload: int, group, device: torch.device) -> float:
    """Bytes/s that a rank sends while a tensor of `payload` bytes is gathered in all groups at once."""
    ranks = group.size()
    block = payload // ranks
    return (ranks - 1) * block / _gather_seconds(block, group, device)


def _latency(steps: dict[int, float]) -> tuple[float, float]:
    """Start-up and step, from the times of tiny gathers by number of ranks: time = base + (ranks - 1) step."""
    if not steps:
        return UNMEASURED, UNMEASURED
    few, many = min(steps), max(steps)
    step = (steps[many] - steps[few]) / (many - few) if many > few else steps[few] / few
    step = max(UNMEASURED, step)
    return max(UNMEASURED, steps[few] - (few - 1) * step), step


def _products(device: torch.device) -> dict[int, float]:
    """TFLOP/s of square products by size: bf16 on GPUs, float32 on CPUs."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found = {}
    for size in SIZES[device.type]:
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        found[size] = 2 * size**3 / _median_seconds(lambda a=left, b=right: a @ b, device) / 1e12
    return found


def _shortest(device: torch.device) -> float:
    """Seconds of an operation on next to nothing."""
    value = torch.zeros(TINY, device=device)
    return max(UNMEASURED, _median_seconds(lambda: value.add(1), device))


def _relative_costs(payload: int, device: torch.device) -> dict[str, float]:
    """By kind, seconds of a collective over all ranks, over those of an all-gather in which a rank sends as much.

    Of p blocks a reduce-scatter and an all-to-all send p - 1, as a gather does, and an all-reduce twice that.
    """
    world = dist.get_world_size()
    if world == 1:
        return {}
    block = payload // 4 // world
    whole = torch.zeros(world, block, device=device)
    gather = _gather_seconds(4 * block, dist.group.WORLD, device)
    found = {
        "reduce_scatter": _median_seconds(lambda: start_reduce_scatter(whole, dist.group.WORLD).wait(), device),
        "all_to_all": _median_seconds(lambda: exchange(whole, dist.group.WORLD), device),
        "all_reduce": _median_seconds(lambda: reduce_(whole, dist.group.WORLD), device) / 2,
    }
    return {kind: seconds / gather for kind, seconds in found.items()}


def _overlap(payload: int, device: torch.device) -> float:
    """Share of a gather that goes on beside a product of about as many seconds, 0 to 1."""
    world, size = dist.get_world_size(), SIZES[device.type][-1]
    if world == 1:
        return 1.0
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    block = torch.zeros(payload // 4 // world, device=device)
    gather = _gather_seconds(block.nbytes, dist.group.WORLD, device)
    times = max(1, round(gather / _median_seconds(lambda: left @ right, device)))

    def multiply() -> None:
        for _ in range(times):
            left @ right

    def both() -> None:
        pending = start_all_gather(block, dist.group.WORLD)
        multiply()
        pending.wait()

    product = _median_seconds(multiply, device)
    hidden = product + gather - _median_seconds(both, device)
    return min(1.0, max(0.0, hidden / min(product, gather)))


def _copy_bandwidth(device: torch.device) -> float:
    """Bytes/s that a copy reads and writes."""
    source: Tensor = torch.zeros(COPIED[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median_seconds(lambda: target.copy_(source), device)


def _host_memory() -> int:
    import psutil

    return psutil.virtual_memory().total
