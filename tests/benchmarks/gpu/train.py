"""A contender trains ten steps, the last eight of which count: seconds, losses and the peak of memory.

    python -m tests.benchmarks.gpu.train --contender plain --model tiny --rows 2 --sequence 32 --result FILE
    torchrun --nproc-per-node N -m tests.benchmarks.gpu.train --contender FSDP2 ...

The contenders are those of peers/contenders.py, and `one rank`: the engine's layers, loss and products without other
ranks (on a grid of one `parallelize` leaves a model alone). float32 weights and AdamW, activations in bfloat16 by
autocast; FSDP2 casts by its own policy and adds gradients in float32. `LoRA ` before a name: frozen bfloat16 weights
under adapters. All draw the same weights on the device and see the same batches, so that losses agree within what
bfloat16 rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hf_axonn import parallelize
from hf_axonn.config import AxonnConfig, Overlap
from hf_axonn.engine.gradient_sync import syncing
from hf_axonn.profiling.timings import slowest
from tests.benchmarks.gpu.settings import COUNTED, MODELS, ONE_RANK, STEPS, llama
from tests.benchmarks.kernels.gpu_loss import engine_on_one_rank
from tests.benchmarks.peers import ranks
from tests.benchmarks.peers.contenders import Training, build, fully_sharded, parse_grid


COMPILED, LORA = " + compile", "LoRA "
ADAPTERS = dict(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def make(name: str, options: argparse.Namespace) -> Training:
    """A contender on this rank, on torch's default device.

    Raises:
        RuntimeError: its weights are not float32: it could not be compared.
    """
    lora, plain = name.startswith(LORA), name.removesuffix(COMPILED).removeprefix(LORA)
    model = draw(options, torch.bfloat16 if lora else torch.float32)
    world, rank = dist.get_world_size(), dist.get_rank()
    if lora:
        model = adapt(model)
    if plain == "plain":
        training = Training(model)
    elif plain == ONE_RANK:
        engine_on_one_rank(model)
        training = Training(model, around_backward=partial(syncing, model))
    elif plain == "DDP":
        training = Training(nn.parallel.DistributedDataParallel(model), parts=world, part=rank)
    elif plain == "FSDP2":
        policy = torch.distributed.fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        training = Training(fully_sharded(model, mp_policy=policy), parts=world, part=rank)
    elif plain == "native TP":
        training = from_checkpoint(plain, model)
    else:
        grid = parse_grid(plain)
        switches = Overlap(**dict.fromkeys(options.without, False))
        model, _ = parallelize(model, grid, config=AxonnConfig(grid=grid, overlap=switches))
        part = model.axonn.grid_mesh.index("data", "z")
        training = Training(model, parts=grid.dp_size, part=part, around_backward=partial(syncing, model))
    model = getattr(training.model, "module", training.model)  # inside of DDP's wrapper
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if dtypes != {torch.bfloat16 if lora else torch.float32}:
        raise RuntimeError(
            f"{name} has weights in {dtypes}, but contenders train float32 weights, or bfloat16 by LoRA."
        )
    if plain != "FSDP2" and not lora:
        training.around_forward = partial(torch.autocast, torch.get_default_device().type, torch.bfloat16)
    if options.checkpointing:
        model.gradient_checkpointing_enable()
    if name.endswith(COMPILED):
        _compile(plain, training.model, model, options.backend)
    return training


def draw(options: argparse.Namespace, dtype: torch.dtype) -> nn.Module:
    """The model with its random weights, drawn on the default device: the same on every rank."""
    torch.manual_seed(0)
    config = llama(MODELS[options.model][0], options.sequence)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def adapt(model: nn.Module) -> nn.Module:
    """The model with adapters in its own dtype, the same on every rank."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(**ADAPTERS), autocast_adapter_dtype=False)


def from_checkpoint(name: str, model: nn.Module) -> Training:
    """A contender that needs a checkpoint: rank 0 writes one, and it is gone when all have read it."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        if dist.get_rank() == 0:
            model.save_pretrained(folder)
        del model
        dist.barrier()
        training = build(name, Path(folders[0]))
        dist.barrier()
    return training


def read_batches(vocabulary: int, rows: int, sequence: int) -> Tensor:
    """The bytes of Python's language reference as ids [STEPS, rows, sequence], spread over the vocabulary.

    Raises:
        ValueError: the text is too short.
    """
    from pydoc_data.topics import topics

    text = "".join(topics[name] for name in sorted(topics)).encode()
    if len(text) < STEPS * rows * sequence:
        raise ValueError(
            f"{STEPS} steps of {rows} rows of {sequence} tokens are more than the {len(text)} bytes of the text: give "
            "a lower --sequence."
        )
    ids = torch.tensor(list(text[: STEPS * rows * sequence])) * max(1, vocabulary // 256) % vocabulary
    return ids.view(STEPS, rows, sequence)


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
            synchronize(device)
            dist.barrier()
            begin = time.perf_counter()
        losses.append(training.step(batches[step % len(batches)]))
    synchronize(device)
    seconds = (time.perf_counter() - begin) / COUNTED
    return slowest(seconds, device), torch.stack(losses).double().tolist()


def synchronize(device: torch.device) -> None:
    """Wait for what the device has been asked for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def forget_peak(device: torch.device) -> None:
    """Begin to count the peak of memory."""
    ranks._forget_peak() if device.type == "cpu" else torch.accelerator.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Bytes: allocated on the device at most; on a CPU resident, with the libraries."""
    return ranks._peak_bytes() if device.type == "cpu" else torch.accelerator.max_memory_allocated(device)


def start(backend: str | None = None) -> torch.device:
    """Initialize torch.distributed, by default with torch's own backend for this rank's device; returns the device.

    Without a launcher this process is the only rank.
    """
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    kind = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu") if kind is None else torch.device(kind.type, rank)
    if kind is None:
        torch.set_num_threads(1)
    else:
        torch.accelerator.set_device_index(rank)
    alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
    own = dist.get_default_backend_for_device(device)
    bound = None if backend or kind is None else device
    dist.init_process_group(backend or own, device_id=bound, **alone)
    return device


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """What the contender does; the same on every rank. Collective over the world."""
    with device:
        training = make(options.contender, options)
    batches = read_batches(MODELS[options.model][0]["vocab_size"], options.rows, options.sequence).to(device)
    forget_peak(device)
    seconds, losses = train(training, batches, device)
    mean = torch.tensor(losses, dtype=torch.float64, device=device)
    dist.all_reduce(mean)
    world = dist.get_world_size()
    return {
        "contender": options.contender,
        "model": options.model,
        "sequence": options.sequence,
        "without": options.without,
        "world": world,
        "backend": dist.get_backend(),
        "seconds": seconds,
        "tokens": batches[0].numel(),
        "losses": (mean / world).tolist(),
        "peak_bytes": int(slowest(peak_bytes(device), device)),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what says what is trained."""
    parser.add_argument("--model", choices=MODELS, default="tiny", help="the shape (tiny)")
    parser.add_argument("--rows", type=int, default=2, help="of a batch of all ranks (2)")
    parser.add_argument("--sequence", type=int, default=32, help="tokens of a row (32)")
    parser.add_argument("--checkpointing", action="store_true", help="layers run again in backward")
    parser.add_argument("--without", nargs="*", default=[], help="switches of overlap to turn off, of a grid")
    parser.add_argument("--backend", default="inductor", help="of torch.compile (inductor)")
    parser.add_argument("--result", type=Path, required=True, help="the JSON file to write")


def main() -> None:
    """Measure one contender; rank 0 writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contender", required=True, help="a name of peers/contenders.py, or `one rank`")
    parser.add_argument("--gloo", action="store_true", help="in the place of torch's own backend for the device")
    add_options(parser)
    options = parser.parse_args()
    found = measure(options, start("gloo" if options.gloo else None))
    if dist.get_rank() == 0:
        options.result.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
