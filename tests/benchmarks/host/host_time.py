"""Host time: how long the processor needs to launch a layer, whatever the device then makes of it.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.host.host_time --output docs/results/host_time.md

A tiny Llama in float32 on the CPU, so small that its arithmetic costs nothing beside the calls; collectives are those
of torch's `fake` backend, which return at once. The time of a layer is the difference between a deep and a shallow
model, divided by the layers between them: what a pass costs once is left out. All contenders take turns in one
process, and its processor time counts, of several turns the least; so other programs hardly change the ratios.

    training    forward with labels and backward; nodes are those of autograd's graph that a layer adds
    decoding    one token, with a cache of those before it

Figures on a GPU's host differ, as CUDA's launches come on top for all alike; nothing here has run on one.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path


os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402
from transformers.cache_utils import DynamicCache  # noqa: E402

from hf_axonn import Grid, parallelize  # noqa: E402
from hf_axonn.compat.torch import fake_world  # noqa: E402


LAYERS = (2, 8)
ROWS, SEQ = 2, 16
TRAINING, DECODING = "training", "decoding"
# What a grid may cost beside the stock model.
GOALS = {
    TRAINING: {
        "grid of one": 1.05,
        "x=2": 2.0,
        "z=2": 2.0,
        "y=2": 2.5,
        "z=2, y=2, x=2": 3.2,
    },
    DECODING: {"x=2": 1.5, "z=2": 1.5},
}
GRIDS = {
    "grid of one": Grid(),
    "x=2": Grid(x=2),
    "z=2": Grid(z=2),
    "y=2": Grid(y=2),
    "z=2, y=2, x=2": Grid(z=2, y=2, x=2),
}
DDP, FSDP2, STOCK = "DDP, 2 ranks", "FSDP2, 2 ranks", "stock"


def tiny(layers: int) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=True,
    )
    return LlamaForCausalLM(config).train()


@contextlib.contextmanager
def contender(name: str, layers: int) -> Iterator[nn.Module]:
    """The model of a contender, in a world of its own that is gone afterwards."""
    model = tiny(layers)
    if name == STOCK:
        yield model
        return
    grid = GRIDS.get(name)
    with fake_world(2 if grid is None else grid.size):
        if grid is not None:
            yield parallelize(model, grid)[0]
        elif name == DDP:
            model = DistributedDataParallel(model)
            model.register_comm_hook(None, _sent)
            yield model
        else:
            mesh = init_device_mesh("cpu", (2,))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            yield model


def _sent(_, bucket):  # DDP compares annotations, which are text here
    """In place of the average over ranks, whose result the fake backend does not give."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def training(model: nn.Module) -> Callable[[], None]:
    ids = torch.arange(ROWS * SEQ).view(ROWS, SEQ) % 64
    parameters = list(model.parameters())

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        for parameter in parameters:
            parameter.grad = None

    return step


def decoding(model: nn.Module) -> Callable[[], None]:
    model.eval()
    ids = torch.zeros(1, 1, dtype=torch.long)
    inner = getattr(model, "module", model)
    cache = DynamicCache(config=inner.config)

    def step() -> None:
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache, use_cache=True)

    with torch.no_grad():
        model(input_ids=ids.expand(1, SEQ), past_key_values=cache, use_cache=True)
    return step


PHASES = {TRAINING: training, DECODING: decoding}


def seconds(step: Callable[[], None], repeats: int, turns: int) -> float:
    """Processor seconds of one step, in the quickest of several turns."""
    for _ in range(3):  # the order of gathers is learned, kernels are found
        step()
    best = float("inf")
    gc.collect()
    gc.disable()
    try:
        for _ in range(turns):
            begin = time.process_time()
            for _ in range(repeats):
                step()
            best = min(best, (time.process_time() - begin) / repeats)
    finally:
        gc.enable()
    return best


def nodes_of_a_layer(name: str) -> int:
    """Nodes of autograd's graph that one more layer adds, where gradients of parameters end included."""
    counts = []
    for layers in LAYERS:
        with contender(name, layers) as model:
            ids = torch.arange(ROWS * SEQ).view(ROWS, SEQ) % 64
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            seen, waiting = set(), [loss.grad_fn]
            while waiting:
                node = waiting.pop()
                if node is not None and node not in seen:
                    seen.add(node)
                    waiting += [following for following, _ in node.next_functions]
            counts.append(len(seen))
    return (counts[1] - counts[0]) // (LAYERS[1] - LAYERS[0])


def of_a_layer(name: str, phase: str, repeats: int, turns: int) -> float:
    """Processor seconds that one more layer costs."""
    times = []
    for layers in LAYERS:
        with contender(name, layers) as model, _cached_weights(model, phase):
            times.append(seconds(PHASES[phase](model), repeats, turns))
    return (times[1] - times[0]) / (LAYERS[1] - LAYERS[0])


def _cached_weights(model: nn.Module, phase: str) -> contextlib.AbstractContextManager:
    """What `generate` of a grid with z does: weights are gathered once."""
    state = getattr(model, "axonn", None)
    return state.gather_cache.keep_everything() if state and phase == DECODING else contextlib.nullcontext()


def contenders(phase: str) -> list[str]:
    return [STOCK, DDP, FSDP2, *GRIDS] if phase == TRAINING else [STOCK, *GRIDS]


def measure(phase: str, rounds: int, repeats: int, turns: int) -> dict[str, list[float]]:
    """Seconds a layer of each contender, by round."""
    found: dict[str, list[float]] = {name: [] for name in contenders(phase)}
    for _ in range(rounds):
        for name in found:
            found[name].append(of_a_layer(name, phase, repeats, turns))
    return found


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """Ratios to the stock model of the same round, and what they are to be at most."""
    lines = ["| | layer of | nodes | host time, us | beside stock | goal |", "|---|---|---:|---:|---:|---:|"]
    for phase, of in found.items():
        for name, times in of.items():
            ratio = statistics.median(mine / stock for mine, stock in zip(times, of[STOCK], strict=True))
            goal = GOALS[phase].get(name)
            allowed = "" if goal is None else f"{goal:.2f}"
            nodes = nodes_of_a_layer(name) if phase == TRAINING else ""
            microseconds = f"{statistics.median(times) * 1e6:.0f}"
            lines.append(f"| {phase} | {name} | {nodes} | {microseconds} | {ratio:.2f} | {allowed} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds, of whose ratios the median counts (5)")
    parser.add_argument("--turns", type=int, default=5, help="turns of a contender, of which the quickest counts (5)")
    parser.add_argument("--repeats", type=int, default=10, help="passes of a turn (10)")
    parser.add_argument("--output", type=Path, help="file of the table; without it the table is only printed")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")
    found = {phase: measure(phase, args.rounds, args.repeats, args.turns) for phase in PHASES}
    text = table(found)
    print(text)
    if args.output:
        command = "python -m tests.benchmarks.host.host_time " + " ".join(arguments or sys.argv[1:])
        args.output.write_text(f"# Host time\n\n`{command}`, torch {torch.__version__}.\n\n{text}\n")


if __name__ == "__main__":
    main()
