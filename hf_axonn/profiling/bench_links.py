"""Measures a machine for the planner: links, latency, matrix products and memory, written as a machine file.

    torchrun --nproc-per-node 8 -m hf_axonn bench-links --output this.json      (one process a GPU, on every node)

All groups of one kind run at once, as they do in training and as the paper measured them: every ring of p ranks,
`stride` apart, inside a node; then one ring through all nodes. NCCL (or RCCL) where there are GPUs, gloo on CPUs.
In training a rank comes to a collective from work of its own, and where ranks share cores they wait for each other; so
what counts is what a collective adds to a product before it. Two sizes make a line: latency, and bytes over bandwidth.
Collective over the world; rank 0 writes the file. Numbers are medians, of the slowest rank (timings.py).

Source: AxoNN (arXiv 2502.08145), section on the performance model, for which groups are measured and how.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention

from hf_axonn.distributed.collectives import exchange, reduce_, start_all_gather, start_reduce_scatter, world_group
from hf_axonn.planner.machine import machine_from_mapping, peak_tflops
from hf_axonn.planner.time.compute import ATTENTION_BACKWARD
from hf_axonn.profiling.timings import UNMEASURED, Line, Timings
from hf_axonn.topology.grid import divisors


PASSES = 11
# Bytes of a gathered tensor, a short one and a long one. AxoNN's authors took a gigabyte. On gloo large blocks travel
# in another way than small ones (distributed/gloo.py), and steps are made of large ones, so there the short one is not
# tiny.
PAYLOADS = {"nccl": (2**10, 2**28), "gloo": (2**21, 2**23)}
SIZES = {"cuda": (256, 512, 1024, 2048, 4096, 8192), "cpu": (64, 128, 256, 512, 1024)}
BETWEEN = {"cuda": 2048, "cpu": 512}  # size of the product before a collective
COPIED = {"cuda": 2**30, "cpu": 2**26}  # bytes of a tensor that is copied, and of the weights of products: no cache
TINY = 64  # numbers
HEADS = {"cuda": (16, 8192, 128), "cpu": (4, 512, 64)}  # of the attention that is timed: heads, tokens, head size


# By kind of collective, on blocks [ranks, elements of a rank's block] of float32.
COLLECTIVES: dict[str, Callable[[Tensor, ProcessGroup], Tensor]] = {
    "all_gather": lambda blocks, group: start_all_gather(blocks[0], group).wait(),
    "reduce_scatter": lambda blocks, group: start_reduce_scatter(blocks, group).wait(),
    "all_to_all": exchange,
    "all_reduce": reduce_,
}


def bench_links(output: str, *, seconds: float = 60.0, peak: float | None = None) -> int:
    """Measure and write; returns the exit code.

    Args:
        output: the file that rank 0 writes.
        seconds, peak: as `measure`; the file names what is missing.
    Raises:
        ValueError: not started by torchrun, or nodes differ in their number of processes.
    """
    if "RANK" not in os.environ:
        raise ValueError("no process group: start it as torchrun --nproc-per-node N -m hf_axonn bench-links ...")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    ours = not dist.is_initialized()
    if ours:
        here = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else None
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", device_id=here)
    try:
        if dist.get_world_size() % local:
            raise ValueError(
                f"{dist.get_world_size()} processes are not nodes of {local}: start as many on every node."
            )
        found = measure(local, torch.device(kind), seconds=seconds, peak=peak)
        if dist.get_rank() == 0:
            machine_from_mapping(found)  # what cannot be read is not written
            Path(output).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
            print(f"{output} describes this machine: hf-axonn plan --machine {output}")
    finally:
        if ours:
            dist.destroy_process_group()
    return 0


def measure(local: int, device: torch.device, *, seconds: float, peak: float | None = None) -> dict[str, Any]:
    """Measure the contents of a machine file. Collective over the world; all ranks get the same.

    Args:
        local: processes of a node; every node has as many.
        device: where.
        seconds: when they are over nothing is measured again, and rings of fewer ranks than a node not at all.
        peak: advertised TFLOP/s of a GPU; by default those of its name, or the fastest product where that is unknown.
    """
    payloads = PAYLOADS.get(dist.get_backend(), PAYLOADS["gloo"])
    full = "world" if dist.get_world_size() > local else f"1x{local}"
    timings = _time_all(local, full, payloads, device, seconds)
    links = _link_figures(timings, local, full, payloads)
    costs, latencies = _relative(timings, full, payloads)
    overlap = _overlap(timings, full, payloads, device, seconds=seconds)
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    how = (
        f"measured by hf-axonn bench-links: {dist.get_backend()}, torch {torch.__version__}, {local} processes a node"
    )
    how_peak = "given as --peak-tflops"
    if peak is None and properties:
        peak, how_peak = peak_tflops(properties.name), f"data sheet of {properties.name}, dense bf16"
    if peak is None:
        how_peak = (
            f"{how}; the fastest product, not an advertised rate (--peak-tflops), so utilisation is a share of that"
        )
    sizes = SIZES[device.type]
    products = {size: 6 * size * sizes[-1] ** 2 / timings.seconds(f"product {size}") / 1e12 for size in sizes}
    best = max(products.values())
    return {
        "name": "this",
        "description": properties.name if properties else f"CPU, {torch.get_num_threads()} thread(s) a process",
        **({"gpu": properties.name} if properties else {}),
        "gpus_per_node": local,
        "peak_tflops": peak or best,
        "gemm_tflops": best,
        "gemm_fraction": 1.0,
        "gemm_by_size": {str(size): rate / best for size, rate in products.items()},
        "attention_tflops": {"sdpa": _attention_rates(timings, device)},
        "memory_gib": (properties.total_memory if properties else _host_memory() / local) / 2**30,
        "memory_gbs": 2 * COPIED[device.type] / timings.seconds("copy") / 1e9,
        "memory_fraction": 1.0,
        "kernel_us": timings.seconds("shortest") * 1e6,
        "overlap": overlap,
        "relative_cost": costs,
        "relative_latency": latencies,
        "units": properties.multi_processor_count if properties else 1,
        "intra_gbs": links.inside or 1.0,
        "inter_gbs": links.between,
        "latency_us": {name: latency * 1e6 for name, latency in links.latency.items()},
        "sources": _sources(device, local, payloads, how, how_peak, links),
    }


def _rings(local: int) -> list[tuple[int, int]]:
    """(stride, ranks) of every ring inside a node."""
    return [(stride, ranks) for ranks in divisors(local)[1:] for stride in divisors(local // ranks)]


def _time_all(local: int, full: str, payloads: tuple[int, int], device: torch.device, seconds: float) -> Timings:
    """Time products, attention, copies and collectives. `full`: name of the ring of all ranks."""
    timings = Timings(device)
    _add_compute(timings, device)
    if full == "world":
        _add_collectives(timings, "all_gather", full, world_group(), payloads, device)
    # What latency and relative costs are made of comes first.
    for stride, ranks in sorted(_rings(local), key=lambda ring: (ring[0] > 1, -ring[1])):
        name, group = f"{stride}x{ranks}", _siblings(stride, ranks)
        _add_collectives(timings, "all_gather", name, group, payloads, device, optional=name != f"1x{local}")
    for kind in ("reduce_scatter", "all_to_all", "all_reduce") if dist.get_world_size() > 1 else ():
        _add_collectives(timings, kind, full, world_group(), payloads, device)
    timings.run(PASSES, seconds)
    return timings


class _LinkFigures(NamedTuple):
    """Figures of the links: GB/s by ring inside a node, GB/s between nodes, seconds of start-up and steps by key of
    latency_us, and how those between nodes were found; names of rings that there was no time for."""

    inside: dict[str, float]
    between: float
    latency: dict[str, float]
    how_between: str
    skipped: list[str]


def _link_figures(timings: Timings, local: int, full: str, payloads: tuple[int, int]) -> _LinkFigures:
    """Figures of the links from the timings of gathers."""
    skipped = sorted({name.split()[1] for name in timings.missing})
    lines = {
        (stride, ranks): _line(timings, "all_gather", f"{stride}x{ranks}", ranks, payloads)
        for stride, ranks in sorted(_rings(local))
        if f"{stride}x{ranks}" not in skipped
    }
    inside = {f"{stride}x{ranks}": line.bandwidth / 1e9 for (stride, ranks), line in lines.items()}
    base, step = _latency({ranks: line.latency for (stride, ranks), line in lines.items() if stride == 1})
    if full != "world":
        how = "not measured, there is one node: the fastest ring in it"
        latency = {"base": base, "intra": step, "inter": step}
        return _LinkFigures(inside, max(inside.values(), default=1.0), latency, how, skipped)
    world, nodes = dist.get_world_size(), dist.get_world_size() // local
    through = _line(timings, "all_gather", full, world, payloads)
    between = max(UNMEASURED, (through.latency - base - (world - nodes) * step) / (nodes - 1))
    latency = {"base": base, "intra": step, "inter": between}
    return _LinkFigures(inside, through.bandwidth / 1e9, latency, f"measured: one ring through {nodes} nodes", skipped)


def _attention_rates(timings: Timings, device: torch.device) -> dict[str, float]:
    """TFLOP/s of attention, forward and backward."""
    heads, tokens, width = HEADS[device.type]
    flops = 2 * heads * tokens**2 * width  # of the causal half
    return {
        "forward": flops / timings.seconds("attention") / 1e12,
        "backward": ATTENTION_BACKWARD * flops / timings.beyond("attention and backward", "attention") / 1e12,
    }


def _sources(
    device: torch.device, local: int, payloads: tuple[int, int], how: str, how_peak: str, links: _LinkFigures
) -> dict[str, str]:
    """Say where each number of the file comes from."""
    how_inside = how + (f"; not measured for want of time: {', '.join(links.skipped)}" if links.skipped else "")
    how_line = f"{how}; what collectives of {payloads[0]} and {payloads[1]} bytes add to a product"
    on_gpu, width = device.type == "cuda", SIZES[device.type][-1]
    return {
        "gpus_per_node": how,
        "peak_tflops": how_peak,
        "gemm_tflops": f"{how}; products of Linears, {width} wide, on the best number of tokens",
        "gemm_fraction": "1: gemm_by_size is measured",
        "gemm_by_size": f"{how}; products of Linears, {width} wide, by tokens, all processes at once",
        "attention_tflops": f"{how}; scaled_dot_product_attention, causal, {HEADS[device.type][1]} tokens, heads of "
        f"{HEADS[device.type][2]}",
        "memory_gib": "torch" if on_gpu else "the host's memory, divided by its processes",
        "memory_gbs": f"{how}; a copy, read and written",
        "memory_fraction": "1: memory_gbs is measured",
        "kernel_us": f"{how}; adding one to {TINY} numbers",
        "overlap": f"{how}; products and a gather, one after the other and at once",
        "relative_cost": f"{how_line}, in a ring of all ranks: bytes, over those of an all-gather",
        "relative_latency": f"{how_line}, in a ring of all ranks: the rest, over that of an all-gather",
        "units": "torch" if on_gpu else "1: gemm_by_size is measured",
        "intra_gbs": how_inside if links.inside else "not measured, a node has one process: 1 stands for nothing",
        "inter_gbs": f"{links.how_between}; {how}",
        "latency_us": f"{how_line}: the part that is not bytes, of gathers by 2 and by {local} ranks",
    }


def _siblings(stride: int, ranks: int) -> ProcessGroup:
    """This rank's group of `ranks` ranks, `stride` apart; every rank is in one. Collective over the world."""
    groups = []
    for block in range(0, dist.get_world_size(), stride * ranks):
        for first in range(block, block + stride):
            groups.append(list(range(first, first + stride * ranks, stride)))
    group: ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration(groups)
    return group


def _add_compute(timings: Timings, device: torch.device) -> None:
    """Products of Linears (bf16 on GPUs, float32 on CPUs), attention, a copy, and an operation on next to nothing.

    Linears have the largest of SIZES in and out, and as many tokens as each of them: forward, dI and dW, with operands
    as the engine hands them to the library. They take turns, so that weights come from memory as they do in a step.
    """
    dtype, width = torch.bfloat16 if device.type == "cuda" else torch.float32, SIZES[device.type][-1]
    count = max(1, COPIED[device.type] // (width * width * dtype.itemsize))
    weights = itertools.cycle([torch.randn(width, width, device=device).to(dtype) for _ in range(count)])

    def products(input_: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight = next(weights)
        return input_ @ weight.t(), grad @ weight, grad.t() @ input_

    for size in SIZES[device.type]:
        operands = [torch.randn(size, width, device=device).to(dtype) for _ in range(2)]
        timings.add(f"product {size}", partial(products, *operands))
    timings.add("between", _between(device))
    _add_attention(timings, device, dtype)
    source: Tensor = torch.zeros(COPIED[device.type] // 4, device=device)
    target = torch.empty_like(source)
    timings.add("copy", lambda: target.copy_(source))
    value = torch.zeros(TINY, device=device)
    timings.add("shortest", lambda: value.add(1))


def _add_attention(timings: Timings, device: torch.device, dtype: torch.dtype) -> None:
    """Causal attention of one sequence, as Transformers' sdpa runs it: forward, and with backward."""
    shape = (1, *HEADS[device.type])
    query, key, value = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape, device=device, dtype=dtype)

    def forward() -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True)

    timings.add("attention", forward)
    timings.add("attention and backward", lambda: torch.autograd.grad(forward(), (query, key, value), grad))


def _between(device: torch.device) -> Callable[[], Tensor]:
    """The product that comes before a collective."""
    left, right = (torch.randn(BETWEEN[device.type], BETWEEN[device.type], device=device) for _ in range(2))
    return lambda: left @ right


def _add_collectives(
    timings: Timings,
    kind: str,
    name: str,
    group: ProcessGroup,
    payloads: tuple[int, int],
    device: torch.device,
    *,
    optional: bool = False,
) -> None:
    """A product and then a collective over `group`, of a short and of a long tensor."""
    product = _between(device)

    def product_and(collective: Callable[[Tensor, ProcessGroup], Tensor], blocks: Tensor) -> None:
        product()
        collective(blocks, group)

    for payload in payloads:
        blocks = torch.zeros(group.size(), _elements(payload, group.size()), device=device)
        timings.add(f"{kind} {name} {payload}", partial(product_and, COLLECTIVES[kind], blocks), optional=optional)


def _elements(payload: int, ranks: int) -> int:
    """Elements of a rank's block of float32."""
    return max(1, payload // 4 // ranks)


def _line(timings: Timings, kind: str, name: str, ranks: int, payloads: tuple[int, int]) -> Line:
    """The line of a collective through its short and its long payload.

    Of p blocks an all-gather, a reduce-scatter and an all-to-all send p - 1, an all-reduce twice that.
    """
    times = 2 if kind == "all_reduce" else 1
    points = [
        (4 * times * (ranks - 1) * _elements(payload, ranks), timings.beyond(f"{kind} {name} {payload}", "between"))
        for payload in payloads
    ]
    return Line.through(*points)


def _latency(steps: dict[int, float]) -> tuple[float, float]:
    """Start-up and step, from the times of tiny gathers by number of ranks: time = base + (ranks - 1) step."""
    if not steps:
        return UNMEASURED, UNMEASURED
    few, many = min(steps), max(steps)
    step = (steps[many] - steps[few]) / (many - few) if many > few else steps[few] / few
    step = max(UNMEASURED, step)
    return max(UNMEASURED, steps[few] - (few - 1) * step), step


def _relative(timings: Timings, full: str, payloads: tuple[int, int]) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds a byte, and latency, of each kind over all ranks, over those of an all-gather."""
    world = dist.get_world_size()
    if world == 1:
        return {}, {}
    gather = _line(timings, "all_gather", full, world, payloads)
    kinds = ("reduce_scatter", "all_to_all", "all_reduce")
    lines = {kind: _line(timings, kind, full, world, payloads) for kind in kinds}
    costs = {kind: gather.bandwidth / line.bandwidth for kind, line in lines.items()}
    return costs, {kind: line.latency / gather.latency for kind, line in lines.items()}


def _overlap(timings: Timings, full: str, payloads: tuple[int, int], device: torch.device, *, seconds: float) -> float:
    """Share of a gather that goes on beside products of about as many seconds, 0 to 1. Collective over the world."""
    world = dist.get_world_size()
    if world == 1:
        return 1.0
    multiply = _between(device)
    gather = timings.beyond(f"all_gather {full} {payloads[1]}", "between")
    block = torch.zeros(_elements(payloads[1], world), device=device)
    times = max(1, round(gather / timings.seconds("between")))  # the same on all ranks, as the slowest's seconds are

    def products() -> None:
        for _ in range(times):
            multiply()

    def apart() -> None:
        products()
        start_all_gather(block, world_group()).wait()

    def at_once() -> None:
        pending = start_all_gather(block, world_group())
        products()
        pending.wait()

    both = Timings(device)
    for name, action in (("products", products), ("apart", apart), ("at once", at_once)):
        both.add(name, action)
    both.run(PASSES, seconds)
    alone = both.seconds("products")
    hidden = both.beyond("apart", "at once")
    return min(1.0, hidden / max(UNMEASURED, min(alone, both.seconds("apart") - alone)))


def _host_memory() -> int:
    import psutil

    return int(psutil.virtual_memory().total)
