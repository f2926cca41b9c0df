"""Predicted beside published: every training run of published.csv and AxoNN's own, and the error by class.

    python -m tests.benchmarks.planner.published                 the classes
    python -m tests.benchmarks.planner.published --spread        what hf_axonn/planner/confidence.py says of them
    python -m tests.benchmarks.planner.published --output FILE   and every run, as Markdown: docs/results/published.md

A run is predicted on the grid that its framework used (FSDP shards as z does, tensor parallelism as x) with its own
micro-batches and attention kernel. AxoNN's grids are not published, so the best that is predicted stands for them
(planning.py). Runs of the sources in CHOSEN had a part in a constant of the planner and are not counted.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from hf_axonn.planner import confidence
from hf_axonn.planner.dense import DenseShape
from hf_axonn.planner.job import Job
from hf_axonn.planner.machine import load_machine
from hf_axonn.planner.predict import predict
from hf_axonn.topology.grid import Grid
from tests.benchmarks.peers.contenders import grid_name, parse_grid
from tests.benchmarks.planner import planning


RUNS = Path(__file__).with_suffix(".csv")
BYTES = {"fp32": 4, "bf16": 2}

CHOSEN = {"apertus": "gemm_fraction of alps", "megatron-2022": "gemm_fraction of all other machines"}
SOURCES = {
    "llm-foundry": "mosaicml/llm-foundry, scripts/train/benchmarking/README.md at 8c8dd48: MPT under FSDP, attention "
    "attn_impl: triton (submit_benchmarks.py's default)",
    "torchtitan-2024": "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md at b5bcd76, rows without "
    "Float8 and with torch.compile; H100 of 500 W with 2.4 TB/s",
    "torchtitan-2025": "pytorch/torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md at b5bcd76, vanilla "
    "TP in bf16; H100 of 500 W with 2.4 TB/s",
    "kempnerforge": "KempnerInstitute/KempnerForge, benchmarks/mfu_scaling/mfu_scaling.md and mfu_bench.sh at "
    "5666d0d: Llama 3 under FSDP and tensor parallelism; weights in bf16 where there is no FSDP, by the memory that "
    "it reports",
    "apertus": "Apertus (arXiv 2509.14233), table 5: Megatron-LM, data and tensor parallelism; gradients taken to be "
    "reduced in bf16, as in fp32 they alone would need the time of a step",
    "megatron-2021": "NVIDIA/Megatron-LM, images/cases_april2021.png at 50a4b5f and run_table_1.sh of "
    "examples/academic_paper_scripts/sc21 at 9375718, which is table 1 of arXiv 2104.04473: micro-batches and stages "
    "of a rank are the script's. Tokens by equation (3) of the paper, 96 * layers * hidden^2 * (1 + seq / (6 * "
    "hidden) + vocab / (16 * layers * hidden)) a token",
    "megatron-2022": "Korthikanti et al., arXiv 2205.05198, tables 3 and 5: seconds of an iteration with full "
    "recomputation and with the paper's, which makes attention's scores again and is planned without recomputation; "
    "recalled",
    "mt-nlg": "Smith et al., arXiv 2201.11990, section 2.4: seconds of an iteration on 280, 350 and 420 nodes. "
    "Assumed: micro-batches of one sequence, 1f1b as in DeepSpeed, all recomputed",
    "llama-3": "arXiv 2407.21783, table 4: 430, 400 and, with sequences divided over 16 GPUs, 380 TFLOP/s of a GPU, "
    "recalled; 6 FLOP a weight and token and full squares of attention (if only the causal halves were counted, the "
    "last would be 94 tokens). Assumed, as it is not said: micro-batches of one sequence, interleaved with 4 stages a "
    "rank, averages of fp32 once a step, nothing recomputed; over context keys are gathered, as the paper does, and "
    "weights over z, where it divides gradients and moments alone",
    "bloom": "arXiv 2211.05100: the fastest, 156 TFLOP/s of a GPU, recalled, by the formula of "
    "megatron-2021; four links of 100 Gb/s a node",
    "gpt-neox": "GPT-NeoX-20B, arXiv 2204.06745: 117 TFLOP/s of a GPU, recalled, by the formula of "
    "megatron-2021. Its attention and MLP run side by side, which is not planned",
    "megatron-2024": "NVIDIA/Megatron-LM, images/model_table.png and README.md at 9375718. Tokens by "
    "num_floating_point_operations of its training.py, 12 * layers * hidden^2 * (6 + seq / hidden + vocab / (2 * "
    "layers * hidden)) a token. Assumed, as it is not said: the four sequences of a GPU are one micro-batch, nothing "
    "is recomputed, FlashAttention-2; z stands for its distributed optimizer. With pipelines micro-batches of one "
    "sequence, interleaved with 4 stages a rank, averages once a step. It hides tensor-parallel communication behind "
    "products (--tp-comm-overlap), which this engine does not",
    "axonn": "AxoNN (arXiv 2502.08145): see planning.py",
}

# layers, hidden, heads of the MPT models: scripts/train/yamls/pretrain of mosaicml/llm-foundry at 8c8dd48.
MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
# layers, hidden, heads, vocabulary of Megatron-LM's GPTs and of others like them, see SOURCES; with a head of their
# own those of 2024 have the size that is given. GPT-NeoX-20B has one, too.
GPT = {
    "gpt-1.7b": (24, 2304, 24, 51200),
    "gpt-3.6b": (30, 3072, 32, 51200),
    "gpt-7.5b": (36, 4096, 32, 51200),
    "gpt-18b": (40, 6144, 48, 51200),
    "gpt-22b": (48, 6144, 64, 51200),
    "gpt-39b": (48, 8192, 64, 51200),
    "gpt-76b": (60, 10240, 80, 51200),
    "gpt-145b": (80, 12288, 96, 51200),
    "gpt-175b": (96, 12288, 96, 51200),
    "gpt-310b": (96, 16384, 128, 51200),
    "gpt-530b": (105, 20480, 128, 51200),
    "gpt-1008b": (128, 25600, 160, 51200),
    "bloom-176b": (70, 14336, 112, 250880),
    "neox-20b": (44, 6144, 64, 50432),
    "megatron-1.7b": (24, 2048, 16, 131072),
    "megatron-7.1b": (30, 4096, 32, 131072),
    "megatron-16b": (32, 6144, 48, 131072),
    "megatron-32b": (48, 7168, 56, 131072),
    "megatron-70b": (84, 8192, 64, 131072),
    "megatron-119b": (92, 10240, 80, 131072),
    "megatron-177b": (96, 12288, 96, 131072),
    "megatron-314b": (96, 16384, 128, 131072),
    "megatron-462b": (112, 18432, 144, 131072),
}
# layers, hidden, heads, MLP: Llama 3 (arXiv 2407.21783); 7b and 13b of KempnerForge have an MLP of 1.3 * 8/3 * hidden,
# rounded up to 256.
LLAMA = {
    "llama-3-8b": (32, 4096, 32, 14336),
    "llama-3-70b": (80, 8192, 64, 28672),
    "llama-3-405b": (126, 16384, 128, 53248),
    "llama-7b": (32, 4096, 32, 14336),
    "llama-13b": (40, 5120, 40, 17920),
    "llama-70b": (80, 8192, 64, 28672),
}


class Run(NamedTuple):
    """A line of published.csv; `tokens` are those of a GPU in a second."""

    source: str
    model: str
    machine: str
    grid: Grid
    seq: int
    sequences: int
    micro_batches: int
    weights: str
    reduce: str
    checkpointing: str
    kept: str
    attention: str
    tokens: float
    pipeline: str
    stages_per_rank: int | None

    @property
    def kind(self) -> str:
        """The class that its error belongs to."""
        if self.grid.context > 1:
            return "with pipelines, over context"
        if self.grid.pipe > 1:
            return "with pipelines"
        parallel = "FSDP and TP" if self.grid.x > 1 else "FSDP"
        return f"{parallel}, {'up to' if self.seq <= confidence.LONG else 'beyond'} {confidence.LONG:,} tokens"


@dataclass(frozen=True)
class Outcome:
    """A run, and its predicted tokens of a GPU in a second."""

    run: Run
    tokens: float

    @property
    def error(self) -> float:
        """Predicted over published speed, minus 1."""
        return self.tokens / self.run.tokens - 1


def runs() -> list[Run]:
    """Every published run."""
    with RUNS.open(newline="") as lines:
        return [_run(line) for line in csv.DictReader(lines)]


def _run(line: dict[str, str]) -> Run:
    numbers = {key: int(line[key]) for key in ("seq", "sequences", "micro_batches")}
    others = {"grid": parse_grid(line["grid"]), "tokens": float(line["tokens"])}
    stages = int(line["stages_per_rank"]) if line["stages_per_rank"] else None
    return Run(**line | numbers | others | {"stages_per_rank": stages})  # type: ignore[arg-type]


@cache
def shape(model: str, seq: int) -> DenseShape:
    """The model of a run; MPT and GPT have as many learned positions as tokens of a sequence."""
    if model.startswith("mpt-") or model in GPT:
        layers, hidden, heads, vocab = GPT[model] if model in GPT else (*MPT[model[4:]], 50368)
        biases = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
        sizes = {"layers": layers, "hidden": hidden, "heads": heads, "intermediate": 4 * hidden, "vocab": vocab}
        return DenseShape(
            **sizes,
            **biases,
            gated=False,
            tied=not model.startswith(("megatron", "neox")),
            layer_norm=True,
            packed_qkv=True,
            positions=0 if model.startswith(("bloom", "neox")) else seq,
        )
    if model == "apertus-8b":
        return DenseShape(
            layers=32, hidden=4096, heads=32, kv_heads=8, intermediate=21504, vocab=131072, gated=False, qk_norm=True
        )
    layers, hidden, heads, intermediate = LLAMA[model]
    return DenseShape(layers=layers, hidden=hidden, heads=heads, kv_heads=8, intermediate=intermediate, vocab=128256)


def outcome(run: Run) -> Outcome:
    """A run and its prediction."""
    model = shape(run.model, run.seq)

    def seconds(checkpointing: bool) -> float:
        job = Job(
            shape=model,
            machine=load_machine(run.machine),
            sequences=run.sequences,
            seq=run.seq,
            param_bytes=BYTES[run.weights],
            reduce_bytes=BYTES[run.reduce],
            checkpointing=checkpointing,
            keep_gathered="all" if run.kept == "all" else "recomputed",
            micro_batches=run.micro_batches,
            attention=run.attention,
            pipeline=run.pipeline or None,
            stages_per_rank=run.stages_per_rank,
            context_attention="keys",
        )
        return predict(job, run.grid).total

    # Where about half of the products run again (selective checkpointing by operator), the mean of both.
    cases = {"all": [True], "none": [False], "half": [True, False]}[run.checkpointing]
    step = statistics.mean(map(seconds, cases))
    return Outcome(run, run.sequences * run.seq / step / run.grid.size)


def by_class(outcomes: list[Outcome]) -> dict[str, list[Outcome]]:
    """Those that count, by class."""
    found: dict[str, list[Outcome]] = defaultdict(list)
    for each in outcomes:
        if each.run.source not in CHOSEN:
            found[each.run.kind].append(each)
    return dict(found)


def axonn() -> list[tuple[planning.Point, float]]:
    """AxoNN's runs that count, and their errors."""
    return [(point, planning.error(point, planning.predicted(point))) for point in planning.POINTS if point.counts]


def spreads(outcomes: list[Outcome]) -> dict[str, tuple[float, float, int]]:
    """By the keys of confidence.SPREADS: the middle 80% of published over predicted step time, and how many runs."""
    found: dict[str, list[float]] = {key: [] for key in confidence.SPREADS}
    for each in outcomes:
        if each.run.source not in CHOSEN and each.run.grid.context == 1:
            key = (
                "pipeline"
                if each.run.grid.pipe > 1
                else "tensor"
                if each.run.grid.x > 1
                else "long"
                if each.run.seq > confidence.LONG
                else "short"
            )
            found[key].append(1 + each.error)
    found["many"] = [1 + error for _, error in axonn()]
    return {key: (*_middle(values), len(values)) for key, values in found.items()}


def _middle(values: list[float]) -> tuple[float, float]:
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return tenths[0], tenths[-1]


def margins(outcomes: list[Outcome]) -> tuple[float, float]:
    """By how much 80% of pairs of runs of one model on one machine differ in their errors, at most: those of the same
    tensor degree, and the others. Without pipelines: the same model has no two grids that differ in more than data."""
    same, other = [], []
    counted = [each for each in outcomes if each.run.source not in CHOSEN and each.run.grid.pipe == 1]
    for one, two in itertools.combinations(counted, 2):
        alike = all(getattr(one.run, key) == getattr(two.run, key) for key in ("source", "model", "machine", "seq"))
        if alike and one.run.grid != two.run.grid:
            ratio = (1 + one.error) / (1 + two.error)
            (same if one.run.grid.x == two.run.grid.x else other).append(max(ratio, 1 / ratio) - 1)
    return tuple(statistics.quantiles(values, n=5, method="inclusive")[-1] for values in (same, other))


def classes(outcomes: list[Outcome]) -> list[str]:
    """Lines of the table of errors by class."""
    rows = [
        (kind, [each.run.grid.size for each in found], [each.error for each in found])
        for kind, found in by_class(outcomes).items()
    ]
    points = axonn()
    rows.append(("AxoNN, the best grid", [point.gpus for point, _ in points], [error for _, error in points]))
    lines = ["| class | runs | GPUs | median of predicted / published | mean error | worst |"]
    lines.append("| --- | --: | --- | --: | --: | --: |")
    for kind, sizes, errors in rows:
        lines.append(
            f"| {kind} | {len(errors)} | {min(sizes):,} to {max(sizes):,} | {1 + statistics.median(errors):.2f} | "
            f"{statistics.mean(map(abs, errors)):.1%} | {max(errors, key=abs):+.0%} |"
        )
    return lines


def every_run(outcomes: list[Outcome]) -> list[str]:
    """Lines of the table of runs."""
    titles = (
        *("source", "model", "machine", "grid", "pipeline", "sequence", "batch", "micro-batches"),
        *("recomputed", "attention"),
    )
    lines = [f"| {' | '.join(titles)} | published | predicted | error |"]
    lines.append("| --- | --- | --- | --- | --- | --: | --: | --: | --- | --- | --: | --: | --: |")
    for each in outcomes:
        run = each.run
        lines.append(
            f"| {run.source} | {run.model} | {run.machine} | {grid_name(run.grid) or 'one GPU'} | "
            f"{run.pipeline} {run.stages_per_rank if run.pipeline == 'interleaved' else ''}".rstrip()
            + f" | {run.seq:,} | "
            f"{run.sequences:,} | {run.micro_batches} | {run.checkpointing} | {run.attention} | "
            f"{run.tokens:,.0f} | {each.tokens:,.0f} | {each.error:+.1%} |"
        )
    return lines


def page(outcomes: list[Outcome]) -> str:
    """docs/results/published.md."""
    lines = ["# Published runs, predicted", ""]
    lines += ["`python -m tests.benchmarks.planner.published --output docs/results/published.md`", ""]
    lines += [*classes(outcomes), "", "Sources:", ""]
    for source, where in SOURCES.items():
        chosen = f". Not counted: {CHOSEN[source]} was chosen on them" if source in CHOSEN else ""
        lines.append(f"- {source}: {where}{chosen}.")
    lines += [
        "",
        "Tokens of a GPU in a second; pipeline: its schedule, and stages of a rank; recomputed: layers whose "
        "activations are; batch: sequences of a step.",
        "",
    ]
    lines += every_run(outcomes)
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Predicted beside published speeds of training.")
    parser.add_argument("--spread", action="store_true", help="intervals of the classes, and margins between grids")
    parser.add_argument("--output", type=Path, help="write every run to this file, too")
    options = parser.parse_args(arguments)
    outcomes = [outcome(run) for run in runs()]
    print("\n".join(classes(outcomes)))
    if options.spread:
        for key, (low, high, count) in spreads(outcomes).items():
            print(f"{key}: {low:.2f} to {high:.2f} of the predicted time, {count} runs")
        print("margins: {:.2f} of the same tensor degree, {:.2f} of others".format(*margins(outcomes)))
    if options.output:
        options.output.write_text(page(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
