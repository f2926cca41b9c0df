"""What the page says of the results: utilisation, ratios, and predictions beside what was measured.

model FLOPs     6 a weight and token, and full squares of attention: `Job.model_flops` of the planner
utilisation     of the advertised peak of the planner's machine files (MFU), and of the fastest product measured
predicted       seconds and bytes of `predict` for the measured machine file
"""

from __future__ import annotations

from typing import Any

from hf_axonn import Grid
from hf_axonn.planner.dense import shape_from_config
from hf_axonn.planner.job import Job
from hf_axonn.planner.machine import Machine, load_machine, machine_from_mapping
from hf_axonn.planner.predict import predict
from tests.benchmarks.gpu.jobs import DONE, Outcome
from tests.benchmarks.gpu.settings import LLAMA_8B, LLAMA_70B, ONE_RANK, Settings, llama
from tests.benchmarks.peers.contenders import PEERS, parse_grid


# The largest relative difference of a loss from that of the first contender: bfloat16 has 8 bits, and ten steps make
# such differences grow. A wrong gradient shows as more.
LOSS_TOLERANCE = 2e-2
# A part of what torch calls a GPU -> the planner's machine that has it; the first that fits counts.
ADVERTISED = {
    "GH200": "alps", "H200": "dgx-h200", "H100": "dgx-h100", "B200": "b200-nvl72", "A100": "perlmutter",
    "MI250X": "frontier",
}  # fmt: skip
SLOWER = ("PCIe", "NVL", "MIG")  # cards of the same name with other rates
PUBLISHED: tuple[dict[str, Any], ...] = (
    {
        "what": "FSDP2 and torch.compile, Llama 3.1 8B, bf16, selective checkpointing, 2 rows a GPU",
        "gpus": "8 H100", "tokens": 6667, "shape": LLAMA_8B, "sequence": 8192,
        "source": "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md at 31a17bf, table 1; 8,192 tokens a row by "
        "its llama3_8b.toml",
    },
    {
        "what": "the same without torch.compile",
        "gpus": "8 H100", "tokens": 5762, "shape": LLAMA_8B, "sequence": 8192,
        "source": "the same",
    },
    {
        "what": "Llama 3 70B",
        "gpus": "64 H100", "tokens": 867, "shape": LLAMA_70B, "sequence": 8192,
        "source": "taken over without its source, which was looked for and not found; 8,192 tokens a row are assumed",
    },
    {
        "what": "AxoNN, 40B GPT on Perlmutter, 620.1 PFLOP/s with recomputation",
        "gpus": "4096 A100", "pflops": 620.1, "count": 4096,
        "source": "arXiv 2502.08145, abstract; size of the model recalled",
    },
    {
        "what": "AxoNN, 320B GPT on Frontier, 1.381 EFLOP/s with recomputation",
        "gpus": "32768 MI250X GCDs", "pflops": 1381.0, "count": 32768,
        "source": "arXiv 2502.08145, abstract; size of the model recalled",
    },
    {
        "what": "AxoNN, 60B GPT on Alps, 1.423 EFLOP/s with recomputation",
        "gpus": "6144 H100", "pflops": 1423.0, "count": 6144,
        "source": "arXiv 2502.08145, abstract; size of the model recalled",
    },
)  # fmt: skip


def advertised_peak(name: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by the planner's files; None where they do not have it."""
    if any(word in name for word in SLOWER):
        return None
    machine = next((machine for word, machine in ADVERTISED.items() if word in name), None)
    return load_machine(machine).peak_flops if machine else None


def job(settings: Settings, machine: Machine, **switches: bool) -> Job:
    """What contenders train, as the planner takes it."""
    return Job(
        shape=shape_from_config(settings.config.to_dict()),
        machine=machine,
        sequences=settings.rows,
        seq=settings.sequence,
        checkpointing=settings.checkpointing,
        micro_batches=1,
        **switches,
    )


def flops_per_token(shape: dict[str, int], sequence: int) -> float:
    """Model FLOPs of one token in training."""
    config = llama(shape, sequence).to_dict()
    # The machine does not matter to what a model asks for.
    work = Job(shape=shape_from_config(config), machine=load_machine("dgx-h100"), sequences=1, seq=sequence)
    return work.model_flops() / work.tokens


def training(settings: Settings, outcomes: dict[str, list[Outcome]]) -> list[dict[str, Any]]:
    """A line for each contender that trained, in the order of the parts."""
    links = next((each.result for each in outcomes["links"] if each.result), None)
    machine = machine_from_mapping(links) if links else None
    per_token = flops_per_token_of(settings)
    peak = advertised_peak(settings.machine.name)
    lines: list[dict[str, Any]] = []
    for part in ("peers", "grids", "overlap"):
        for outcome in outcomes[part]:
            result = outcome.result
            if outcome.state != DONE or result is None or "losses" not in result:
                continue
            speed = result["tokens"] / result["seconds"] / result["world"]
            line = {
                "part": part,
                "name": outcome.name,
                **{key: result[key] for key in ("contender", "without", "world", "backend", "seconds", "peak_bytes")},
                "tokens_per_second_per_gpu": speed,
                "model_tflops": speed * per_token / 1e12,
                "mfu": speed * per_token / peak if peak else None,
                "of_gemm": speed * per_token / machine.gemm_flops if machine else None,
                "loss_difference": _apart(result["losses"], lines[0]["losses"] if lines else result["losses"]),
                "losses": result["losses"],
            }
            lines.append(line | _predicted(settings, machine, part, result))
    return lines


def flops_per_token_of(settings: Settings) -> float:
    """Model FLOPs of one token of what contenders train."""
    work = job(settings, load_machine("dgx-h100"))
    return work.model_flops() / work.tokens


def _predicted(settings: Settings, machine: Machine | None, part: str, result: dict[str, Any]) -> dict[str, Any]:
    """Seconds and bytes that the planner says of a grid, and of our layers on one rank; nothing of others."""
    if machine is None or (part == "peers" and result["contender"] != ONE_RANK):
        return {"predicted_seconds": None, "predicted_bytes": None}
    work = job(settings, machine, **dict.fromkeys(result["without"], False))
    grid = Grid() if part == "peers" else parse_grid(result["contender"])
    found = predict(work, grid)
    return {"predicted_seconds": found.total, "predicted_bytes": found.memory.total}


def _apart(losses: list[float], first: list[float]) -> float:
    """The largest relative difference; NaN counts as infinite."""
    apart = [abs(loss / other - 1) for loss, other in zip(losses, first, strict=True)]
    return max(value if value == value else float("inf") for value in apart)


def agree(lines: list[dict[str, Any]]) -> bool:
    """Whether all contenders had the same losses."""
    return all(line["loss_difference"] <= LOSS_TOLERANCE for line in lines)


def published() -> list[dict[str, Any]]:
    """The published figures with TFLOP/s of a GPU: model FLOPs as ours are counted; AxoNN's as published."""
    found = []
    for entry in PUBLISHED:
        kept = {key: entry[key] for key in ("what", "gpus", "source")}
        if "tokens" in entry:
            tflops = entry["tokens"] * flops_per_token(entry["shape"], entry["sequence"]) / 1e12
        else:
            tflops = entry["pflops"] * 1e3 / entry["count"]
        found.append({**kept, "tokens_per_second_per_gpu": entry.get("tokens"), "tflops": tflops})
    return found


def best(lines: list[dict[str, Any]], *, ours: bool) -> dict[str, Any] | None:
    """The line with the most tokens a second and GPU, of our grids or of all others on as many GPUs."""
    theirs = [line for line in lines if line["contender"].split(" +")[0] in PEERS]
    own = [line for line in lines if line["part"] == "grids"]
    return max(own if ours else theirs, key=lambda line: line["tokens_per_second_per_gpu"], default=None)
