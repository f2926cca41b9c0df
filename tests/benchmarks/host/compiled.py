"""torch.compile by regions beside eager: kernels of a layer, and the time of a step.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.host.compiled --output docs/results/compiled.md

A Llama of a few layers in float32 on one thread of a CPU, real tensors of one rank; collectives are those of torch's
`fake` backend, which return at once. Eager and compiled models take turns in one process, and their processor time in
a round counts as a ratio, so other programs hardly change it.

    operators    of a layer's regions, forward and backward, as eager runs them; views are not counted
    kernels      that inductor generates for the same graphs; attention's own kernel is in neither
    ratio        processor time of a step (forward with labels, backward), compiled over eager: median and quartiles

Figures on a GPU will differ; nothing here has run on one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path


os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch._functorch.aot_autograd import make_boxed_func  # noqa: E402
from torch._inductor import metrics  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from hf_axonn import Grid, parallelize  # noqa: E402
from hf_axonn.compat.torch import fake_world  # noqa: E402


LAYERS = 2
GRIDS = {"x=2": Grid(x=2), "z=2": Grid(z=2), "y=2": Grid(y=2)}
ATTENTION = "scaled_dot_product"


@dataclass(frozen=True)
class Size:
    """Features of a model, and rows and tokens a row of its batch."""

    hidden: int
    rows: int
    seq: int

    def __str__(self) -> str:
        return f"{self.hidden}, {self.rows * self.seq}"


SIZES = [Size(32, 2, 16), Size(512, 2, 256)]


def llama(size: Size) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 11 // 4,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config).train()


def step(model: nn.Module, size: Size) -> None:
    ids = torch.arange(size.rows * size.seq).view(size.rows, size.seq) % 64
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad()


def counting_backend() -> tuple[object, list[int]]:
    """A backend that runs graphs as eager does, and the numbers of operators of the graphs that it was given."""
    found: list[int] = []

    def count(graph: torch.fx.GraphModule, _inputs) -> object:
        targets = [node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        found.append(sum(not _is_view(target) and ATTENTION not in str(target) for target in targets))
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=count, bw_compiler=count), found


def _is_view(operator: torch._ops.OpOverload) -> bool:
    results = operator._schema.returns
    return all(result.alias_info is not None and not result.alias_info.is_write for result in results)


def counts(grid: Grid, size: Size) -> tuple[int, int, int]:
    """Graphs of a layer, operators that they have, and kernels that inductor makes of them; layers share graphs."""
    backend, operators = counting_backend()
    for chosen in (backend, "inductor"):
        torch.compiler.reset()
        counters.clear()
        metrics.reset()
        with fake_world(grid.size):
            model, _ = parallelize(llama(size), grid)
            model.compile(backend=chosen)
            step(model, size)
    return counters["stats"]["unique_graphs"], sum(operators), metrics.generated_kernel_count


def processor_seconds(model: nn.Module, size: Size, repeats: int) -> float:
    begin = time.process_time()
    for _ in range(repeats):
        step(model, size)
    return (time.process_time() - begin) / repeats


def times(grid: Grid, size: Size, rounds: int, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of a step of the eager and of the compiled model, by round."""
    with fake_world(grid.size):
        eager, compiled = (parallelize(llama(size), grid)[0] for _ in range(2))
        compiled.compile()
        for model in (eager, compiled) * 3:
            step(model, size)
        pairs = [tuple(processor_seconds(model, size, repeats) for model in (eager, compiled)) for _ in range(rounds)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def row(name: str, grid: Grid, size: Size, rounds: int, repeats: int) -> str:
    graphs, operators, kernels = counts(grid, size)
    eager, compiled = times(grid, size, rounds, repeats)
    low, middle, high = statistics.quantiles([mine / its for its, mine in zip(eager, compiled, strict=True)], n=4)
    mean = [f"{statistics.median(found) * 1e3:.1f}" for found in (eager, compiled)]
    return (
        f"| {name} | {size} | {graphs} | {operators} | {kernels} | {mean[0]} | {mean[1]} "
        f"| {middle:.2f} [{low:.2f}, {high:.2f}] |"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="rounds, of whose ratios the median counts (20)")
    parser.add_argument("--repeats", type=int, default=3, help="steps of a turn (3)")
    parser.add_argument("--grids", nargs="+", choices=GRIDS, default=list(GRIDS), help="grids; all by default")
    parser.add_argument("--output", type=Path, help="file of the table; without it the table is only printed")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")
    lines = [
        "| grid | hidden, tokens | graphs | operators | kernels | eager, ms | compiled, ms | ratio |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in args.grids:
        for size in SIZES:
            lines.append(row(name, GRIDS[name], size, args.rounds, args.repeats))
            print(lines[-1], flush=True)
    text = "\n".join(lines)
    print(text)
    if args.output:
        command = "python -m tests.benchmarks.host.compiled " + " ".join(arguments or sys.argv[1:])
        args.output.write_text(f"# torch.compile by regions\n\n`{command}`, torch {torch.__version__}.\n\n{text}\n")


if __name__ == "__main__":
    main()
