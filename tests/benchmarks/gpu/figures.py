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
from tests.benchmarks.gpu.settings import (
    LLAMA_8B,
    LLAMA_70B,
    LOSS_TOLERANCE,
    MODELS,
    ONE_RANK,
    Settings,
    largest_ratio,
    llama,
    parameters,
)
from tests.benchmarks.gpu.train import LORA
from tests.benchmarks.peers.contenders import PEERS, parse_grid


# A part of what torch calls a GPU -> the planner's machine that has it; the first that fits counts.
ADVERTISED = {
    "GH200": "alps", "H200": "dgx-h200", "H100": "dgx-h100", "B200": "b200-nvl72", "A100": "perlmutter",
    "MI250X": "frontier",
}  # fmt: skip
SLOWER = ("PCIe", "NVL", "MIG")  # cards of the same name with other rates
TRAINED = ("training", "lora", "grids", "overlap")  # the parts of contenders that train
PUBLISHED: tuple[dict[str, Any], ...] = (
    {
        "what": "LoRA, Llama 3 8B, bf16, Transformer Engine and Triton kernels, 16 micro-batches of 2 rows a step",
        "gpus": "1 H100", "tokens": 12473, "shape": LLAMA_8B, "sequence": 4096, "lora": True,
        "source": "NeMo AutoModel, docs/performance-summary.mdx of 2026-06-12",
    },
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


def flops_per_token(shape: dict[str, int], sequence: int, *, lora: bool = False) -> float:
    """Model FLOPs of one token in training; under LoRA without gradients of weights, and without the adapters."""
    config = llama(shape, sequence).to_dict()
    # The machine does not matter to what a model asks for.
    work = Job(shape=shape_from_config(config), machine=load_machine("dgx-h100"), sequences=1, seq=sequence)
    gradients = 2 * (parameters(shape) - shape["vocab_size"] * shape["hidden_size"])
    return work.model_flops() / work.tokens - (gradients if lora else 0)


def training(settings: Settings, outcomes: dict[str, list[Outcome]]) -> list[dict[str, Any]]:
    """A line for each contender that trained, in the order of the parts."""
    links = next((each.result for each in outcomes["links"] if each.result), None)
    machine = machine_from_mapping(links) if links else None
    peak = advertised_peak(settings.machine.name)
    lines: list[dict[str, Any]] = []
    for part in TRAINED:
        for outcome in outcomes[part]:
            result = outcome.result
            if outcome.state != DONE or result is None or "losses" not in result:
                continue
            lora = result["contender"].startswith(LORA)
            first = next((line for line in lines if (line["part"] == "lora") == lora), result)
            per_token = flops_per_token(MODELS[result["model"]][0], result["sequence"], lora=lora)
            speed = result["tokens"] / result["seconds"] / result["world"]
            keys = ("contender", "model", "without", "world", "backend", "seconds", "peak_bytes", "losses")
            line = {
                "part": part,
                "name": outcome.name,
                **{key: result[key] for key in keys},
                "tokens_per_second_per_gpu": speed,
                "model_tflops": speed * per_token / 1e12,
                "mfu": speed * per_token / peak if peak else None,
                "of_gemm": speed * per_token / machine.gemm_flops if machine else None,
                "loss_difference": largest_ratio(result["losses"], first["losses"]),
            }
            lines.append(line | _predicted(settings, machine, part, result))
    return lines


def _predicted(settings: Settings, machine: Machine | None, part: str, result: dict[str, Any]) -> dict[str, Any]:
    """Seconds and bytes that the planner says of a grid, and of our layers on one rank; nothing of others."""
    if machine is None or part == "lora" or (part == "training" and result["contender"] != ONE_RANK):
        return {"predicted_seconds": None, "predicted_bytes": None}
    work = job(settings, machine, **dict.fromkeys(result["without"], False))
    grid = Grid() if part == "training" else parse_grid(result["contender"])
    found = predict(work, grid)
    return {"predicted_seconds": found.total, "predicted_bytes": found.memory.total}


def agree(lines: list[dict[str, Any]]) -> bool:
    """Return whether all contenders had the same losses."""
    return all(line["loss_difference"] <= LOSS_TOLERANCE for line in lines)


def published() -> list[dict[str, Any]]:
    """The published figures with TFLOP/s of a GPU: model FLOPs as ours are counted; AxoNN's as published."""
    found = []
    for entry in PUBLISHED:
        kept = {key: entry[key] for key in ("what", "gpus", "source")}
        if "tokens" in entry:
            per_token = flops_per_token(entry["shape"], entry["sequence"], lora=entry.get("lora", False))
            tflops = entry["tokens"] * per_token / 1e12
        else:
            tflops = entry["pflops"] * 1e3 / entry["count"]
        kept["lora"] = entry.get("lora", False)
        found.append({**kept, "tokens_per_second_per_gpu": entry.get("tokens"), "tflops": tflops})
    return found


def best(lines: list[dict[str, Any]], *, ours: bool) -> dict[str, Any] | None:
    """The line with the most tokens a second and GPU, of our grids or of all others on as many GPUs."""
    theirs = [line for line in lines if line["contender"].split(" +")[0] in PEERS]
    own = [line for line in lines if line["part"] == "grids"]
    return max(own if ours else theirs, key=lambda line: line["tokens_per_second_per_gpu"], default=None)
