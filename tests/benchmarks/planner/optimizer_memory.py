"""Bytes that optimizers keep, and costs of steps: real ranks on gloo, one model, each optimizer before and after.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.planner.optimizer_memory

Each rank of z=2, x=2 updates two layers of the Llama of peers.py with AdamW, whose moments are on the device or in
host memory, alone or with float32 weights as in bf16, and with Muon on the layers' matrices: as torch does it on
DTensors, where each rank orthogonalizes each matrix, and dealt (engine/muon.py). Bytes of weights and state are
counted by where they would lie on a GPU, and so are those that a rank sends; seconds are the median of steps on shared
CPU cores, where host and device are the same memory. A bucket has 4 MiB here, so that there are several.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from unittest import mock


os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch.optim import AdamW, Muon, Optimizer  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: E402

from hf_axonn import Grid, parallelize  # noqa: E402
from hf_axonn.compat import muon as torch_muon  # noqa: E402
from hf_axonn.distributed.collectives import observe  # noqa: E402
from hf_axonn.engine import host_moments, muon  # noqa: E402
from hf_axonn.engine.dtensors import local  # noqa: E402
from hf_axonn.engine.host_weights import host_weight_of  # noqa: E402
from hf_axonn.engine.optimizer_steps import keep_moments_on_host, keep_weights_on_host  # noqa: E402
from tests.benchmarks.peers.peers import model_config  # noqa: E402


GRID = Grid(z=2, x=2)
STEPS, MIB, BUCKET = 3, 2**20, 2**22
COLUMNS = ("weights, MiB", "device, MiB", "host, MiB", "sent a step, MiB")
OFFLOADED = "AdamW, offload: optimizer"
NAMES = ("AdamW", OFFLOADED, f"{OFFLOADED}, bf16", "Muon on DTensors", "Muon, dealt")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder,), GRID.size)


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=GRID.size)
    if rank == 0:
        print(f"| optimizer | parameters | {' | '.join(COLUMNS)} | orthogonalized | seconds |")
        print("| --- | --: | --: | --: | --: | --: | --: | --: |")
    with mock.patch.object(host_moments, "BUCKET_BYTES", BUCKET):
        for name in NAMES:
            _measure(name, rank)
    dist.destroy_process_group()


def _config() -> LlamaConfig:
    config = model_config("60m", sequence=128)
    config.num_hidden_layers = 2
    return config


def _measure(name: str, rank: int) -> None:
    torch.manual_seed(0)
    model, _ = parallelize(AutoModelForCausalLM.from_config(_config()), GRID)
    layers = [each for each in model.model.layers.parameters() if each.dim() == 2]
    trained = layers if name.startswith("Muon") else list(model.parameters())
    optimizer: Optimizer = Muon(trained) if name.startswith("Muon") else AdamW(trained, foreach=True)
    if name.startswith(OFFLOADED):
        keep_moments_on_host(optimizer, torch.device("cpu"))
    if name.endswith("bf16"):
        keep_weights_on_host(model.axonn.weights, optimizer, mixed_precision="bf16")
    moved = [parameter for parameter in trained if host_weight_of(parameter) is not None]
    torch.manual_seed(rank)
    sent, seconds, counts = 0, [], []

    def note(kind: str, payload: int, group: object) -> None:
        nonlocal sent
        sent += payload

    for _ in range(STEPS):
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
            local(parameter.grad).normal_()
        optimizer._opt_called = True
        dist.barrier()
        sent, start = 0, time.perf_counter()
        with observe(note), mock.patch.object(muon, "orthogonalize", wraps=muon.orthogonalize) as dealt:
            if name == "Muon on DTensors":
                with mock.patch.object(
                    torch_muon._muon, "_zeropower_via_newtonschulz", wraps=torch_muon.orthogonalize
                ) as dealt:
                    optimizer.step(lambda: None)
            else:
                optimizer.step()
        counts.append(dealt.call_count)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    kept = sum(
        local(value).nbytes
        for entries in optimizer.state.values()
        for key, value in entries.items()
        if isinstance(value, torch.Tensor) and key != "step"
    )
    own = sum(local(parameter).numel() for parameter in trained)
    masters = sum(local(parameter).nbytes for parameter in moved)
    device, host = (_most(trained), kept + masters) if name.startswith(OFFLOADED) else (kept, 0)
    weights = 4 * own - masters // 2
    if rank == 0:
        traffic = "not counted" if name == "Muon on DTensors" else f"{sent / MIB:.1f}"
        sizes = " | ".join(f"{size / MIB:.1f}" for size in (weights, device, host))
        print(
            f"| {name} | {own:,} | {sizes} | {traffic} | {counts[-1]} of "
            f"{len(layers) if name.startswith('Muon') else 0} | {statistics.median(seconds):.3f} |",
            flush=True,
        )


def _most(trained: list[torch.nn.Parameter]) -> int:
    """Bytes of what comes from host memory in three consecutive buckets, at most."""
    shards, weighs = [], {}
    for parameter in trained:
        host = host_weight_of(parameter)
        shard = local(parameter).detach() if host is None else host.stand_in(parameter)
        shard.grad = torch.empty_like(shard)
        shards.append(shard)
        weighs[shard] = (2 if host is None else 3) * shard.nbytes
    sizes = [sum(weighs[shard] for _, shard in bucket.members) for bucket in host_moments.divide([shards])]
    return max(sum(sizes[first : first + 3]) for first in range(len(sizes)))


if __name__ == "__main__":
    main()
