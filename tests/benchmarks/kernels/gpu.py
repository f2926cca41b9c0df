"""One GPU: what GoldfishTrainer costs beside the stock Trainer, what the wrapper costs, what the chunked loss saves.

    python -m tests.benchmarks.kernels.gpu --output docs/results/gpu.md
    python -m tests.benchmarks.kernels.gpu --smoke          the same on tiny sizes and a CPU: does it run?

Models of the shapes of SmolLM2-135M and Llama-3.2-1B with random weights, bfloat16 autocast on float32 weights, 4,096
tokens a row. The contenders take turns of --steps steps in one process, so that the clocks of the GPU hit all alike;
the first steps of a turn do not count. Ratios are taken within a round.

    Trainer, compiled            stock, without and with torch.compile
    grid of one rank             stock, under AxonnPlugin(grid=Grid()): must cost under 1%
    GoldfishTrainer, compiled    hash-table, k = 4

Utilization is model FLOPs over the dense bfloat16 peak of the GPU, both as gpu/figures.py has them. Memory is what
torch has allocated at most beyond what it held before the model was made.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainerCallback, TrainingArguments

from hf_axonn import AxonnPlugin, GoldfishConfig, GoldfishTrainer, Grid
from tests.benchmarks.gpu.figures import advertised_peak, flops_per_token
from tests.benchmarks.gpu.settings import MODELS
from tests.benchmarks.kernels.gpu_loss import loss_table, peak_bytes
from tests.benchmarks.peers.peers import text_batches


WARMUP = 3
WRAPPER_COST = 0.01


class Clock(TrainerCallback):
    """Seconds a step of the last `train`, without its first steps."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == WARMUP:
            self._begin = self._now()
        if state.global_step == state.max_steps:
            self.seconds = (self._now() - self._begin) / (state.max_steps - WARMUP)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


class Contender:
    """A Trainer that is trained again and again from where it is.

    Args:
        kind: Trainer or GoldfishTrainer.
        compiled: with torch.compile.
        wrapped: under AxonnPlugin on a grid of one rank.
    """

    def __init__(
        self,
        config: LlamaConfig,
        rows: list[dict[str, Tensor]],
        args: argparse.Namespace,
        folder: str,
        *,
        kind: type[Trainer],
        compiled: bool = False,
        wrapped: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.clock = Clock(args.device)
        more = {"parallelism_config": AxonnPlugin(grid=Grid())} if wrapped else {}
        arguments = (GoldfishConfig if issubclass(kind, GoldfishTrainer) else TrainingArguments)(
            output_dir=folder,
            max_steps=WARMUP + args.steps,
            per_device_train_batch_size=args.rows,
            bf16=True,
            torch_compile=compiled,
            torch_compile_backend="eager" if compiled and args.smoke else None,  # no C++ compiler, no minutes
            use_cpu=args.device.type == "cpu",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
            **more,
        )
        model = AutoModelForCausalLM.from_config(config)
        self.trainer = kind(model=model, args=arguments, train_dataset=rows, callbacks=[self.clock])

    def turn(self) -> float:
        """Seconds a step."""
        self.trainer.train()
        return self.clock.seconds


CONTENDERS: dict[str, dict] = {
    "Trainer": dict(kind=Trainer),
    "Trainer, compiled": dict(kind=Trainer, compiled=True),
    "Trainer, grid of one rank": dict(kind=Trainer, wrapped=True),
    "GoldfishTrainer": dict(kind=GoldfishTrainer),
    "GoldfishTrainer, compiled": dict(kind=GoldfishTrainer, compiled=True),
}


def compare(name: str, args: argparse.Namespace) -> tuple[str, float]:
    """The table of one model, and what the wrapper costs as a part of a step."""
    config = LlamaConfig(**MODELS[name][0], max_position_embeddings=args.sequence, tie_word_embeddings=True)
    ids = text_batches(min(8192, config.vocab_size), 1, args.sequence).squeeze(1)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    contenders: dict[str, Contender] = {}
    peaks: dict[str, int] = {}
    seconds: dict[str, list[float]] = {label: [] for label in CONTENDERS}
    with tempfile.TemporaryDirectory() as folder:
        for label, options in CONTENDERS.items():

            def first_turn(options: dict = options) -> Contender:
                contender = Contender(config, rows, args, folder, **options)
                contender.turn()
                return contender

            contenders[label], peaks[label] = peak_bytes(first_turn, args.device)
        for number in range(args.rounds):
            for label, contender in contenders.items():
                seconds[label].append(contender.turn())
            last = ", ".join(f"{label} {of_label[-1]:.3f}" for label, of_label in seconds.items())
            print(f"{name}, round {number + 1} of {args.rounds}: {last}", file=sys.stderr, flush=True)
    tokens, flops = args.rows * args.sequence, flops_per_token(MODELS[name][0], args.sequence)
    lines = [
        f"## {name}: {args.rows} rows of {args.sequence} tokens\n",
        "| contender | tokens/s | MFU | peak GiB | speed / Trainer | speed / Trainer, compiled |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for label in CONTENDERS:
        speed = tokens / statistics.median(seconds[label])
        used = f"{speed * flops / (args.peak_tflops * 1e12):.1%}" if args.peak_tflops else "-"
        ratios = [_ratio(seconds[label], seconds[other]) for other in ("Trainer", "Trainer, compiled")]
        memory = f"{peaks[label] / 2**30:.2f}" if peaks[label] else "-"
        lines.append(f"| {label} | {speed:.0f} | {used} | {memory} | {ratios[0]:.3f} | {ratios[1]:.3f} |")
    cost = 1 / _ratio(seconds["Trainer, grid of one rank"], seconds["Trainer"]) - 1
    return "\n".join(lines) + f"\n\nThe wrapper on a grid of one rank costs {cost:.2%}.\n", cost


def _ratio(mine: list[float], others: list[float]) -> float:
    return statistics.median(other / own for own, other in zip(mine, others, strict=True))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["SmolLM2-135M", "Llama-3.2-1B"])
    parser.add_argument("--rows", type=int, default=4, help="rows of a batch (4)")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens of a row (4096)")
    parser.add_argument("--steps", type=int, default=20, help="steps of a turn that count (20)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender (5)")
    parser.add_argument("--peak-tflops", type=float, help="dense bfloat16 peak of the GPU (known for some)")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU, to see that it runs")
    parser.add_argument("--output", type=Path, help="write the report to this file too")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.models, args.rows, args.sequence, args.steps, args.rounds = ["tiny"], 2, 64, 1, 1
        args.device = torch.device("cpu")
        machine = "a CPU: these are no figures, only a sign that the script runs"
    elif not torch.cuda.is_available():
        print(
            "tests/benchmarks/kernels/gpu.py needs a GPU, and torch sees none: use --smoke to see that it runs.",
            file=sys.stderr,
        )
        return 2
    else:
        args.device = torch.device("cuda", torch.cuda.current_device())
        machine = torch.cuda.get_device_name()
        if args.peak_tflops is None:
            args.peak_tflops = (advertised_peak(machine) or 0) / 1e12
    begin = time.time()
    tables, costs = zip(*(compare(name, args) for name in args.models), strict=True)
    saved, kept = loss_table({name: MODELS[name][0] for name in args.models}, args)
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate", "hf_axonn"))
    command = " ".join(["python -m tests.benchmarks.kernels.gpu", *(sys.argv[1:] if arguments is None else arguments)])
    report = f"    {command}\n\n{(time.time() - begin) / 60:.0f} minutes on {machine}; {packages}.\n\n"
    report += "\n".join([*tables, saved])
    print(report)
    if args.output is not None:
        args.output.write_text(report)
    if args.smoke:
        return 0
    if max(costs) >= WRAPPER_COST:
        print(f"the wrapper costs {max(costs):.2%}, and it must cost under {WRAPPER_COST:.0%}.", file=sys.stderr)
    if not kept:
        print("the chunked loss needs more memory than it promises.", file=sys.stderr)
    return 0 if max(costs) < WRAPPER_COST and kept else 1


if __name__ == "__main__":
    sys.exit(main())
