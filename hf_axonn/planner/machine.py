"""Machines in numbers, read from JSON with a source for every number.

    load_machine("frontier")      a file of machines/, or the path of another, as `hf-axonn bench-links` writes it
    load_machine("dgx-h100@400")  the same nodes, joined by 400 Gb/s

Units in the files are those of data sheets (TFLOP/s, GB/s = 10**9 bytes/s, GiB, microseconds); a `Machine` has FLOP/s,
bytes/s, bytes and seconds. A *node* is where the intra-node links reach. Bandwidths are those of a ring: what one
rank sends in a second while every group of the same kind in the node, or in the machine, is at work too.

Source: AxoNN (arXiv 2502.08145), section on the performance model, for what is measured and how it is looked up.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from hf_axonn.planner.traffic.ledger import KINDS


Made = TypeVar("Made")
FOLDER = Path(__file__).with_name("machines")
NUMBERS = ("gpus_per_node", "peak_tflops", "gemm_tflops", "memory_gib", "memory_gbs", "units", "inter_gbs")
REQUIRED = (*NUMBERS, "intra_gbs", "latency_us")
TEXTS = ("description", "gpu")
OPTIONAL = ("gemm_fraction", "gemm_by_size", "memory_fraction", "kernel_us", "overlap", "slowdown", "attention_tflops")
FACTORS = ("relative_cost", "relative_latency")  # by kind of collective; optional too
LATENCIES = ("base", "intra", "inter")
# Share of the best product measured that products in a training step reach: docs/planning.md derives it from
# Megatron-LM's published runs on A100.
GEMM_FRACTION = 0.72
MEMORY_FRACTION = 0.8  # of the advertised memory bandwidth that simple kernels reach: an assumption, usual for STREAM
KERNEL_US = 5.0  # microseconds that no kernel undercuts: an assumption, launch and tail
# Shares of gemm_flops that attention reaches forward and backward where the file names no kernel: FlashAttention-2 on
# A100 with a causal mask, as in machines/dgx-a100.json.
ATTENTION = (0.71, 0.62)
LINK_FRACTION = 0.8  # of the links between nodes that collectives reach: an assumption, as in the files of machines/
# Seconds by which a second of communication beside it slows computation, where other hardware moves the data: it takes
# multiprocessors, memory bandwidth and power. Measured on 4 A100, H100, MI250 and MI210, in FSDP and pipelines: 0.189
# of the computation's time in the mean, 0.4 at most (arXiv 2507.03114).
SLOWDOWN = 0.189
DIRECTIONS = ("forward", "backward")
# Dense bf16 TFLOP/s of the makers' data sheets; of several that match a name the first counts.
PEAKS = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("GH200", 989.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("MI250X", 191.5),  # a GCD, which is a GPU to torch
    ("MI300X", 1307.0),
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine of equal nodes.

    Args:
        name, description: for people.
        gpu: how the name of the GPU ends by which torch knows it; empty: not known.
        gpus_per_node: ranks that the intra-node links join.
        peak_flops: advertised dense bf16 FLOP/s of a GPU; utilisation is a share of it.
        gemm_flops: FLOP/s of the best matrix product.
        gemm_fraction: share of gemm_flops that the products of a training step reach.
        gemm_by_size: pairs (smallest dim of a product, share of gemm_flops), ascending; empty: shares follow from
            `units` by the number of waves.
        memory: bytes of a GPU.
        memory_bandwidth: bytes/s of a GPU's memory.
        memory_fraction: share of it that simple kernels reach.
        kernel: seconds that no kernel undercuts.
        attention: by name of a kernel, the FLOP/s that it reaches forward and backward under a causal mask, of which
            half of the square is counted, and backward 2.5 times forward. The first is taken unless a job names one;
            empty: shares of gemm_flops.
        overlap: share of a collective that can go on beside compute: 1 where other hardware moves the data, towards 0
            where the cores that compute move it.
        slowdown: seconds that a second of hidden communication adds to the computation beside it. Where `overlap` is
            below 1 it has been measured with it, so that it is 0.
        relative_cost: by kind of collective, its time over that of an all-gather in which a rank sends as much; 1 for
            kinds that are not in it.
        relative_latency: by kind of collective, its start-up and steps over those of an all-gather by as many ranks;
            planner/time/links.py says what holds for kinds that are not in it.
        units: multiprocessors of a GPU.
        intra: bytes/s by (stride between neighbours of a ring, ranks of a ring); or
        intra_any: bytes/s of every ring in a node, where a switch joins all.
        inter: bytes/s that leave a node one way.
        base, intra_step, inter_step: seconds to start a collective, and of one ring step inside and between nodes.
        sources: where each number of the file comes from.
    """

    name: str
    description: str = ""
    gpu: str = ""
    gpus_per_node: int
    peak_flops: float
    gemm_flops: float
    gemm_fraction: float = GEMM_FRACTION
    gemm_by_size: tuple[tuple[int, float], ...] = ()
    memory: float
    memory_bandwidth: float
    memory_fraction: float = MEMORY_FRACTION
    kernel: float = KERNEL_US * 1e-6
    attention: dict[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    overlap: float = 1.0
    slowdown: float = SLOWDOWN
    relative_cost: dict[str, float] = field(default_factory=dict, hash=False)
    relative_latency: dict[str, float] = field(default_factory=dict, hash=False)
    units: int
    intra: dict[tuple[int, int], float] = field(default_factory=dict, hash=False)
    intra_any: float | None = None
    inter: float
    base: float
    intra_step: float
    inter_step: float
    sources: dict[str, str] = field(default_factory=dict, hash=False)

    def within(self, stride: int, ranks: int) -> bool:
        """True if all rings of `ranks` ranks, `stride` apart, lie inside nodes."""
        return self.gpus_per_node % (stride * ranks) == 0

    def bandwidth(self, stride: int, ranks: int) -> float:
        """Bytes/s of a ring: the measured table inside a node, equation (7) of the paper between nodes.

        (7)  beta = inter / min(gpus_per_node, stride): that many sibling rings leave a node at once.

        A ring inside a node that is not in the table gets the lowest of the entries with as many ranks, else of all.
        """
        if not self.within(stride, ranks):
            return self.inter / min(self.gpus_per_node, stride)
        if self.intra_any is not None:
            return self.intra_any
        if (stride, ranks) in self.intra:
            return self.intra[stride, ranks]
        alike = [value for (_, size), value in self.intra.items() if size == ranks]
        return min(alike or self.intra.values())

    def attention_rates(self, kernel: str | None) -> tuple[float, float]:
        """FLOP/s of an attention kernel, forward and backward.

        Raises:
            ValueError: the machine's file has other kernels, or none.
        """
        if kernel is None and not self.attention:
            return self.gemm_flops * ATTENTION[0], self.gemm_flops * ATTENTION[1]
        if kernel is not None and kernel not in self.attention:
            known = ", ".join(self.attention) or "none"
            raise ValueError(f"{self.name} has no speed of the attention kernel {kernel!r}; its file knows {known}.")
        return self.attention[kernel or next(iter(self.attention))]

    @property
    def fastest_link(self) -> float:
        """Bytes/s of the fastest ring in a node, which no ring through nodes exceeds."""
        return self.intra_any if self.intra_any is not None else max(self.intra.values(), default=math.inf)

    def scale(self, *, bandwidth: float = 1.0, gemm: float = 1.0) -> Machine:
        """Return the same machine with all links, or all matrix products and attention, faster by a factor."""
        return replace(
            self,
            intra={key: value * bandwidth for key, value in self.intra.items()},
            intra_any=None if self.intra_any is None else self.intra_any * bandwidth,
            inter=self.inter * bandwidth,
            gemm_flops=self.gemm_flops * gemm,
            attention={name: (there * gemm, back * gemm) for name, (there, back) in self.attention.items()},
        )


def known_machines() -> list[str]:
    """Names of the machines that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def machine_of_gpus(gpu: str, count: int) -> str | None:
    """Find the machine whose nodes have these GPUs; None if there is none.

    Args:
        gpu: a GPU's name, as torch has it.
        count: GPUs of a node. Of several machines the one with nodes of that size is taken, else the next larger.
    """
    machines = [load_machine(name) for name in known_machines()]
    same = [each for each in machines if f" {gpu}".endswith(f" {each.gpu}") and each.gpus_per_node >= count]
    return min(same, key=lambda each: (each.gpus_per_node, each.name)).name if same else None


def peak_tflops(name: str) -> float | None:
    """The advertised dense bf16 TFLOP/s of a GPU of this name, None if it is not known."""
    return next((peak for part, peak in PEAKS if part in name), None)


def load_machine(name: str) -> Machine:
    """Load the machine of a name or a JSON file; NAME@GBITS has GBITS Gb/s a node, of which LINK_FRACTION are reached.

    Raises:
        ValueError: there is no such machine, or the file does not describe one; the message says what is wrong.
    """
    if "@" in name and not name.endswith(".json"):
        name, _, gbits = name.rpartition("@")
        if not gbits.isdigit() or not int(gbits):
            raise ValueError(f"{name}@{gbits} is no machine: write the Gb/s of a node after @, as in dgx-h100@3200.")
        return replace(load_machine(name), name=f"{name}@{gbits}", inter=LINK_FRACTION * int(gbits) * 1e9 / 8)
    path = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
    if not path.is_file():
        raise ValueError(
            f"there is no machine {name!r}: choose one of {', '.join(known_machines())}, or give a JSON file, which "
            "`hf-axonn bench-links` writes for the machine it runs on."
        )
    return read_json(path, "machine file", machine_from_mapping)


def read_json(path: Path, kind: str, make: Callable[[Any], Made]) -> Made:
    """Return what `make` makes of the contents of a JSON file.

    Raises:
        ValueError: the file cannot be read, or `make` refuses it; the message names the kind of file and its path.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"the {kind} {path} cannot be read: {error}") from None
    try:
        return make(content)
    except ValueError as error:
        raise ValueError(f"the {kind} {path}: {error}") from None


def machine_from_mapping(text: Any) -> Machine:
    """Make a Machine of the contents of a machine file.

    Raises:
        ValueError: a key is missing or unknown, a number is not positive, or a number has no source.
    """
    if not isinstance(text, dict):
        raise ValueError("it holds no keys: write the keys of hf_axonn/planner/machines/frontier.json.")
    missing = [key for key in ("name", *REQUIRED) if key not in text]
    unknown = [key for key in text if key not in ("name", *TEXTS, "sources", *REQUIRED, *OPTIONAL, *FACTORS)]
    if missing or unknown:
        wrong = [f"{key} is missing" for key in missing] + [f"{key} is unknown" for key in unknown]
        raise ValueError(f"{', '.join(wrong)}: it needs the keys name, {', '.join(REQUIRED)}.")
    for key in NUMBERS:
        _positive(key, text[key])
    for key in ("gpus_per_node", "units"):
        if not isinstance(text[key], int):
            raise ValueError(f"{key} is {text[key]!r}, but it is a whole number.")
    sources = text.get("sources") or {}
    if not isinstance(sources, dict):
        raise ValueError(f"sources is {sources!r}, but it maps keys to where their numbers come from.")
    unsourced = [key for key in (*REQUIRED, *OPTIONAL, *FACTORS) if key in text and not sources.get(key)]
    if unsourced:
        raise ValueError(f"sources says nothing of {', '.join(unsourced)}: write where each number comes from.")
    latency = text["latency_us"]
    if not isinstance(latency, dict) or set(latency) != set(LATENCIES):
        raise ValueError(f"latency_us is {latency!r}, but it has the keys {', '.join(LATENCIES)}.")
    for key in LATENCIES:
        _positive(f"latency_us.{key}", latency[key])
    measured = {"gemm_fraction": GEMM_FRACTION, "memory_fraction": MEMORY_FRACTION, "kernel_us": KERNEL_US}
    for key in measured:
        measured[key] = text.get(key, measured[key])
        _positive(key, measured[key], 1 if key.endswith("fraction") else math.inf)
    overlap = text.get("overlap", 1.0)
    if isinstance(overlap, bool) or not isinstance(overlap, (int, float)) or not 0 <= overlap <= 1:
        raise ValueError(f"overlap is {overlap!r}, but it is a share from 0 to 1.")
    slowdown = text.get("slowdown", SLOWDOWN if overlap == 1 else 0.0)
    if isinstance(slowdown, bool) or not isinstance(slowdown, (int, float)) or not 0 <= slowdown <= 1:
        raise ValueError(f"slowdown is {slowdown!r}, but it is a share from 0 to 1.")
    return Machine(
        name=str(text["name"]),
        description=str(text.get("description", "")),
        gpu=str(text.get("gpu", "")),
        gpus_per_node=text["gpus_per_node"],
        peak_flops=text["peak_tflops"] * 1e12,
        gemm_flops=text["gemm_tflops"] * 1e12,
        gemm_fraction=measured["gemm_fraction"],
        memory_fraction=measured["memory_fraction"],
        kernel=measured["kernel_us"] * 1e-6,
        attention=_attention(text.get("attention_tflops", {})),
        overlap=float(overlap),
        slowdown=float(slowdown),
        relative_cost=_factors("relative_cost", text.get("relative_cost", {})),
        relative_latency=_factors("relative_latency", text.get("relative_latency", {})),
        gemm_by_size=_by_size(text.get("gemm_by_size", {})),
        memory=text["memory_gib"] * 2**30,
        memory_bandwidth=text["memory_gbs"] * 1e9,
        units=text["units"],
        inter=text["inter_gbs"] * 1e9,
        base=latency["base"] * 1e-6,
        intra_step=latency["intra"] * 1e-6,
        inter_step=latency["inter"] * 1e-6,
        sources=dict(sources),
        **_intra(text["intra_gbs"], text["gpus_per_node"]),
    )


def _positive(key: str, value: Any, most: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf or value > most:
        raise ValueError(f"{key} is {value!r}, but it is a number above 0{' and at most 1' if most == 1 else ''}.")


def _intra(given: Any, gpus_per_node: int) -> dict[str, Any]:
    """Read intra_gbs: a number where a switch joins the GPUs of a node, else GB/s by STRIDExRANKS."""
    if not isinstance(given, dict):
        _positive("intra_gbs", given)
        return {"intra_any": given * 1e9}
    table = {}
    for key, value in given.items():
        _positive(f"intra_gbs.{key}", value)
        stride, _, ranks = key.partition("x")
        if not (stride.isdigit() and ranks.isdigit()) or int(ranks) < 2 or int(stride) * int(ranks) > gpus_per_node:
            raise ValueError(f"intra_gbs has the key {key!r}, but keys are STRIDExRANKS inside {gpus_per_node} GPUs.")
        table[int(stride), int(ranks)] = value * 1e9
    if gpus_per_node > 1 and not table:
        raise ValueError("intra_gbs is empty: write GB/s by STRIDExRANKS, for instance 1x2.")
    return {"intra": table}


def _factors(key: str, given: Any) -> dict[str, float]:
    """Read numbers above 0 by kind of collective."""
    if not isinstance(given, dict) or set(given) - set(KINDS):
        raise ValueError(f"{key} is {given!r}, but it maps kinds of collectives ({', '.join(KINDS)}) to factors.")
    for kind, value in given.items():
        _positive(f"{key}.{kind}", value)
    return {kind: float(value) for kind, value in given.items()}


def _attention(given: Any) -> dict[str, tuple[float, float]]:
    """Read FLOP/s forward and backward by kernel."""
    if not isinstance(given, dict) or not all(
        isinstance(speeds, dict) and set(speeds) == set(DIRECTIONS) for speeds in given.values()
    ):
        raise ValueError(f"attention_tflops is {given!r}, but it maps kernels to the keys {' and '.join(DIRECTIONS)}.")
    for kernel, speeds in given.items():
        for key in DIRECTIONS:
            _positive(f"attention_tflops.{kernel}.{key}", speeds[key])
    return {kernel: (speeds["forward"] * 1e12, speeds["backward"] * 1e12) for kernel, speeds in given.items()}


def _by_size(given: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(given, dict) or not all(str(key).isdigit() and int(key) > 0 for key in given):
        raise ValueError(f"gemm_by_size is {given!r}, but it maps the smallest dim of a product to a share.")
    for key, value in given.items():
        _positive(f"gemm_by_size.{key}", value, 1)
    return tuple(sorted((int(key), float(value)) for key, value in given.items()))
