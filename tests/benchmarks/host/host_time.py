"""Host time: how long the processor needs to launch a layer, whatever the device then makes of it.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.host.host_time --output docs/results/host_time.md

A tiny Llama in float32 on the CPU, so small that its arithmetic costs nothing beside the calls; collectives are those
of torch's `fake` backend, which return at once. The time of a layer is the difference between a deep and a shallow
model, divided by the layers between them: what a pass costs once is left out. All contenders of a world take turns in
one process every few passes, and the median of the ratios to the stock model of the same round counts: a processor's
speed changes within seconds.

    training    forward with labels and backward; nodes are those of autograd's graph that a layer adds
    decoding    one token, with a cache of those before it
    AdamW       a step of torch's AdamW with its defaults

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
from collections.abc import Callable
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
from hf_axonn.engine.gradient_sync import sync_gradients  # noqa: E402


LAYERS = (2, 8)
ROWS, SEQ = 2, 16
TRAINING, DECODING, STEPPING = "training", "decoding", "AdamW"
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
    STEPPING: {},
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


def contender(name: str, layers: int) -> nn.Module:
    """The model of a contender, in the world that there is."""
    model = tiny(layers)
    if name in GRIDS:
        return parallelize(model, GRIDS[name])[0]
    if name == DDP:
        model = DistributedDataParallel(model)
        model.register_comm_hook(None, _sent)
    elif name == FSDP2:
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


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


def stepping(model: nn.Module) -> Callable[[], None]:
    ids = torch.arange(ROWS * SEQ).view(ROWS, SEQ) % 64
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    if hasattr(model, "axonn"):
        sync_gradients(model)
    return torch.optim.AdamW(model.parameters()).step


PHASES = {TRAINING: training, DECODING: decoding, STEPPING: stepping}


def nodes_of_a_layer(name: str) -> int:
    """Nodes of autograd's graph that one more layer adds, where gradients of parameters end included."""
    counts = []
    for layers in LAYERS:
        with fake_world(world_of(name)):
            model = contender(name, layers)
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


def world_of(name: str) -> int:
    return GRIDS[name].size if name in GRIDS else 2


def contenders(phase: str) -> list[str]:
    return [STOCK, *GRIDS] if phase == DECODING else [STOCK, DDP, FSDP2, *GRIDS]


def measure(phase: str, rounds: int, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Processor seconds of one more layer of each contender and, beside it, of the stock model, by round."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders(phase)}
    for world in sorted({world_of(name) for name in found}):
        names = list(dict.fromkeys([STOCK, *(name for name in found if world_of(name) == world)]))
        with fake_world(world), contextlib.ExitStack() as stack:
            steps = {name: [_step(phase, contender(name, layers), stack) for layers in LAYERS] for name in names}
            for _ in range(3):  # the order of gathers is learned, kernels are found
                for step in [step for pair in steps.values() for step in pair]:
                    step()
            for _ in range(rounds):
                gc.collect()
                times = {name: _of_a_layer(*pair, repeats) for name, pair in steps.items()}
                for name in names if world == 2 else names[1:]:
                    found[name].append((times[name], times[STOCK]))
    return found


def _step(phase: str, model: nn.Module, stack: contextlib.ExitStack) -> Callable[[], None]:
    state = getattr(model, "axonn", None)
    if state and phase == DECODING:  # as `generate` of a grid with z does: weights are gathered once
        stack.enter_context(state.gather_cache.keep_everything())
    return PHASES[phase](model)


def _of_a_layer(shallow: Callable[[], None], deep: Callable[[], None], repeats: int) -> float:
    """Processor seconds that one more layer costs."""
    times = []
    gc.disable()
    try:
        for step in (shallow, deep):
            begin = time.process_time()
            for _ in range(repeats):
                step()
            times.append((time.process_time() - begin) / repeats)
    finally:
        gc.enable()
    return (times[1] - times[0]) / (LAYERS[1] - LAYERS[0])


def table(found: dict[str, dict[str, list[tuple[float, float]]]]) -> str:
    """Ratios to the stock model of the same round, with quartiles, and what they are to be at most."""
    lines = ["| | layer of | nodes | host time, us | beside stock | goal |", "|---|---|---:|---:|---:|---:|"]
    for phase, of in found.items():
        for name, times in of.items():
            low, ratio, high = _quartiles([mine / stock for mine, stock in times])
            goal = GOALS[phase].get(name)
            allowed = "" if goal is None else f"{goal:.2f}"
            nodes = nodes_of_a_layer(name) if phase == TRAINING else ""
            microseconds = f"{statistics.median(mine for mine, _ in times) * 1e6:.0f}"
            beside = f"{ratio:.2f} [{low:.2f}, {high:.2f}]"
            lines.append(f"| {phase} | {name} | {nodes} | {microseconds} | {beside} | {allowed} |")
    return "\n".join(lines)


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="rounds, of whose ratios the median counts (40)")
    parser.add_argument("--repeats", type=int, default=3, help="passes of a contender in a round (3)")
    parser.add_argument("--output", type=Path, help="file of the table; without it the table is only printed")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")
    found = {phase: measure(phase, args.rounds, args.repeats) for phase in PHASES}
    text = table(found)
    print(text)
    if args.output:
        command = "python -m tests.benchmarks.host.host_time " + " ".join(arguments or sys.argv[1:])
        args.output.write_text(f"# Host time\n\n`{command}`, torch {torch.__version__}.\n\n{text}\n")


if __name__ == "__main__":
    main()
