"""Does another operand layout make a decoder layer's matmuls faster? The table behind the default of `tune_matmuls`.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.kernels.tuning --output docs/results/tuning.md

For each model, dtype and grid the engine's own three products (forward, dI, dW) run once on operands as large as one
rank's, then everything they met is timed as `hf_axonn.engine.matmul_tuning` times it. That is done twice: what the
first timing chooses is also judged by the second one, as the smallest of several noisy numbers always looks like a
gain.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch

from hf_axonn.engine.matmul3d import input_gradient, multiply, weight_gradient
from hf_axonn.engine.matmul_tuning import AS_IS, MARGIN, Key, MatmulTuner, Trials, fastest


# name: hidden, intermediate, and features of q and of k and v
MODELS = {"SmolLM2-135M": (576, 1536, 576, 192), "Llama-3.2-1B": (2048, 8192, 2048, 512)}
GRIDS = [(1, 1), (2, 2)]  # (y, x)


def layer(model: str) -> list[tuple[str, int, list[int]]]:
    """The products of a decoder layer: column or row, K, and N of each weight of the group."""
    hidden, intermediate, query, key_value = MODELS[model]
    return [
        ("column", hidden, [query, key_value, key_value]),
        ("row", query, [hidden]),
        ("column", hidden, [intermediate, intermediate]),
        ("row", intermediate, [hidden]),
    ]


def run_layer(tuner: MatmulTuner, model: str, tokens: int, y: int, x: int, options: dict) -> None:
    """Forward, dI and dW of one layer on one rank of a grid (1, 1, y, x), through `tuner`; shapes as in matmul3d."""
    for kind, in_features, out_features in layer(model):
        out_blocks, in_blocks = (y, 1) if kind == "column" else (1, y)
        k = in_features // (y if kind == "column" else x * y)
        sizes = [size // (x * y if kind == "column" else y) for size in out_features]
        input_ = torch.randn(in_blocks, tokens, k, **options)
        weights = [torch.randn(out_blocks, size, in_blocks, k, **options) for size in sizes]
        outputs = multiply(input_, weights, tuner)
        grads = outputs[0].split(sizes, dim=2) if out_blocks > 1 else outputs
        input_gradient(list(grads), weights, tuner)
        for grad in grads:
            weight_gradient(grad, input_, tuner)


def compare(model: str, tokens: int, y: int, x: int, options: dict) -> tuple[list[str], list[str], int, float]:
    """Lines of the table (one each for forward, dI, dW), about the shapes that gain; how many shapes, and seconds."""
    tuner = MatmulTuner()
    run_layer(tuner, model, tokens, y, x, options)
    calls = tuner.counts
    begin = time.perf_counter()
    first = tuner.time_layouts()
    overhead = time.perf_counter() - begin
    second = tuner.time_layouts()
    place = f"| {model} | {str(options['dtype'])[6:]} | {y}, {x} "
    rows, gains = [], []
    by_kind: dict[str, list[Key]] = defaultdict(list)
    for key in first:
        by_kind[key.which].append(key)
    for which, keys in by_kind.items():
        chosen = {key: fastest(first[key]) for key in keys}
        as_is = sum(calls[key] * statistics.median(first[key][AS_IS]) for key in keys)
        flops = sum(2 * key.m * key.n * key.k * calls[key] for key in keys)
        better = [key for key in keys if chosen[key] != AS_IS]
        promised, kept = (
            1 - total(trials, calls, chosen) / total(trials, calls, dict.fromkeys(keys, AS_IS))
            for trials in (first, second)
        )
        closest = min(ratio(first[key], layout) for key in keys for layout in key.layouts()[1:])
        rows.append(
            f"{place}| {which} | {1e3 * as_is:.2f} | {flops / as_is / 1e12:.2f} | {closest:.2f} | "
            f"{len(better)} of {len(keys)} | {100 * promised:.1f} % | {100 * kept:.1f} % |"
        )
        for key in better:
            now, then = ratio(first[key], chosen[key]), ratio(second[key], chosen[key])
            gains.append(
                f"{place}| {which}{' +=' if key.accumulate else ''} | {key.m} x {key.n} x {key.k} | {key.orders} | "
                f"{chosen[key]} | {now:.2f} | {then:.2f} |"
            )
    return rows, gains, len(first), overhead


def ratio(trials: Trials, layout: str) -> float:
    """The time of a layout as a part of the time as is: median over the rounds that both were timed in."""
    pairs = zip(trials[layout], trials[AS_IS], strict=False)
    return statistics.median(mine / as_is for mine, as_is in pairs)


def total(trials: dict[Key, Trials], calls: dict[Key, int], layouts: dict[Key, str]) -> float:
    """Seconds of all calls in these layouts."""
    return sum(
        calls[key] * statistics.median(trials[key][AS_IS]) * ratio(trials[key], layout)
        for key, layout in layouts.items()
    )


def machine(device: str) -> str:
    """The device, threads and versions."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{processor()}, {torch.get_num_threads()} threads"
    return f"{name}; Python {platform.python_version()}, torch {torch.__version__}"


def processor() -> str:
    """The name of the processor, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024, help="tokens a rank (default 1024)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--output", type=Path, help="where to write the tables too")
    args = parser.parse_args()
    rows, gains, notes, shapes = [], [], [], 0
    for model in args.models:
        for dtype in args.dtypes:
            for y, x in GRIDS:
                options = {"dtype": getattr(torch, dtype), "device": args.device}
                its_rows, its_gains, count, overhead = compare(model, args.tokens, y, x, options)
                rows += its_rows
                gains += its_gains
                shapes += count
                notes.append(f"{model} {dtype} {y}, {x}: {overhead:.1f} s")
                print("\n".join(its_rows), flush=True)
    command = shlex.join(["python", "-m", "tests.benchmarks.kernels.tuning", *sys.argv[1:]])
    text = "\n".join(
        [
            "# Kernel tuning: operand layouts of the matmuls of one decoder layer",
            "",
            f"    OMP_NUM_THREADS={torch.get_num_threads()} {command}",
            "",
            machine(args.device) + ".",
            "",
            f"{args.tokens} tokens a rank. as is: ms of all calls of one layer on one rank, and TFLOP/s. closest: the "
            "least time of any other layout of",
            "any shape, copies included, as a part of the time as is. chosen: shapes where one takes less than "
            f"{MARGIN} of it in nine",
            "of ten rounds. gain: of the layer, by the timing that chose, and by a second one."
            + (" Times are CPU time." if args.device == "cpu" and torch.get_num_threads() == 1 else ""),
            "",
            "| model | dtype | y, x | matmul | as is ms | TFLOP/s | closest | chosen | gain promised | gain kept |",
            "|---|---|---|---|---:|---:|---:|---:|---:|---:|",
            *rows,
            "",
            f"Shapes where a layout was chosen: {len(gains)} of {shapes}.",
            *(
                ["", "| model | dtype | y, x | matmul | M x N x K | lies | chosen | part of the time | again |",
                 "|---|---|---|---|---|---|---|---:|---:|", *gains] if gains else []
            ),
            "",
            "Timing took, wall time of all shapes: " + "; ".join(notes) + ".",
            "",
        ]
    )  # fmt: skip
    print(text)
    if args.output is not None:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
