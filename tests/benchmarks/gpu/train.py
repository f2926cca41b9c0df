"""A contender trains ten steps, the last eight of which count: seconds, losses and the peak of memory.

    torchrun --nproc-per-node N -m tests.benchmarks.gpu.train --contender FSDP2 --folder WEIGHTS --result FILE

The contenders are those of peers/contenders.py, and `one rank`: the engine's layers, loss and products without other
ranks (on a grid of one `parallelize` leaves a model alone). float32 weights and AdamW, activations in bfloat16 by
autocast; FSDP2 casts by its own policy and adds gradients in float32. All start from the same weights on the same
batches, so that losses agree within what bfloat16 rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hf_axonn.config import AxonnConfig, Overlap
from hf_axonn.engine.gradient_sync import syncing
from hf_axonn.profiling.timings import slowest
from tests.benchmarks.gpu.settings import BATCHES, COUNTED, ONE_RANK, STEPS
from tests.benchmarks.kernels.gpu_loss import engine_on_one_rank
from tests.benchmarks.peers import ranks
from tests.benchmarks.peers.contenders import PEERS, Training, build, fully_sharded, parse_grid


COMPILED = " + compile"


def make(name: str, folder: Path, options: argparse.Namespace) -> Training:
    """A contender on this rank, on torch's default device.

    Raises:
        RuntimeError: its weights are not float32: it could not be compared.
    """
    plain = name.removesuffix(COMPILED)
    if plain == "FSDP2":
        policy = torch.distributed.fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        model = fully_sharded(AutoModelForCausalLM.from_pretrained(folder), mp_policy=policy)
        training = Training(model, parts=dist.get_world_size(), part=dist.get_rank())
    elif plain == ONE_RANK:
        model = engine_on_one_rank(AutoModelForCausalLM.from_pretrained(folder))
        training = Training(model, around_backward=partial(syncing, model))
    else:
        if plain not in ("plain", *PEERS):
            switches = Overlap(**dict.fromkeys(options.without, False))
            # As a launch file would say it.
            os.environ["AXONN_CONFIG"] = AxonnConfig(grid=parse_grid(plain), overlap=switches).to_json()
        training = build(plain, folder)
    model = getattr(training.model, "module", training.model)  # inside of DDP's wrapper
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if dtypes != {torch.float32}:
        raise RuntimeError(f"{name} has weights in {dtypes}, but all contenders train float32 weights.")
    if plain != "FSDP2":
        training.around_forward = partial(torch.autocast, torch.get_default_device().type, torch.bfloat16)
    if options.checkpointing:
        model.gradient_checkpointing_enable()
    if name.endswith(COMPILED):
        _compile(plain, training.model, model, options.backend)
    return training


def _compile(name: str, outer: nn.Module, model: nn.Module, backend: str) -> None:
    """All of it, as Trainer does; of models of DTensors each layer without the hooks around it, as torchtitan does."""
    if name in ("plain", "DDP"):
        outer.compile(backend=backend)
        return
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend=backend)


def train(training: Training, batches: Tensor, device: torch.device) -> tuple[float, list[float]]:
    """Seconds of a step, of the slowest rank and the mean of the last COUNTED; the losses of all, this rank's."""
    losses = []
    for step in range(STEPS):
        if step == STEPS - COUNTED:
            _synchronize(device)
            dist.barrier()
            begin = time.perf_counter()
        losses.append(training.step(batches[step % len(batches)]))
    _synchronize(device)
    seconds = (time.perf_counter() - begin) / COUNTED
    return slowest(seconds, device), torch.stack(losses).double().tolist()


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _forget_peak(device: torch.device) -> None:
    ranks._forget_peak() if device.type == "cpu" else torch.accelerator.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int:
    """Bytes: allocated on the device at most; on a CPU resident, with the libraries."""
    return ranks._peak_bytes() if device.type == "cpu" else torch.accelerator.max_memory_allocated(device)


def start() -> torch.device:
    """Initialize torch.distributed, with torch's own backend for this rank's device; returns the device."""
    rank = int(os.environ["LOCAL_RANK"])
    kind = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu") if kind is None else torch.device(kind.type, rank)
    if kind is None:
        torch.set_num_threads(1)
    else:
        torch.accelerator.set_device_index(rank)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, device_id=None if kind is None else device)
    return device


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """What the contender does; the same on every rank. Collective over the world."""
    torch.manual_seed(0)
    with device:
        training = make(options.contender, options.folder, options)
    batches = torch.load(options.folder / BATCHES).to(device)
    _forget_peak(device)
    seconds, losses = train(training, batches, device)
    mean = torch.tensor(losses, dtype=torch.float64, device=device)
    dist.all_reduce(mean)
    world = dist.get_world_size()
    return {
        "contender": options.contender,
        "without": options.without,
        "world": world,
        "backend": dist.get_backend(),
        "seconds": seconds,
        "tokens": batches[0].numel(),
        "losses": (mean / world).tolist(),
        "peak_bytes": int(slowest(_peak(device), device)),
    }


def main() -> None:
    """Measure one contender; rank 0 writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contender", required=True, help="a name of peers/contenders.py, or `one rank`")
    parser.add_argument("--folder", type=Path, required=True, help="of the weights and batches")
    parser.add_argument("--checkpointing", action="store_true", help="layers run again in backward")
    parser.add_argument("--without", nargs="*", default=[], help="switches of overlap to turn off, of a grid")
    parser.add_argument("--backend", default="inductor", help="of torch.compile (inductor)")
    parser.add_argument("--result", type=Path, required=True, help="the JSON file to write")
    options = parser.parse_args()
    found = measure(options, start())
    if dist.get_rank() == 0:
        options.result.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
