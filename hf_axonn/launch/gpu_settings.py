"""Variables of CUDA and NCCL that fit a grid, for processes on NVIDIA GPUs, where the user has set none.

    NCCL_LAUNCH_ORDER_IMPLICIT=1     every grid. Several communicators are under way on one GPU at once. Kernels that
                                     wait for each other on two GPUs in opposite order hang; with it devices start them
                                     in the order of the hosts' launches, which is one on all ranks. NCCL 2.26 and
                                     later; with CUDA 12.3 and later they overlap all the same.
    CUDA_DEVICE_MAX_CONNECTIONS=32   z > 1 with x or y > 1. More streams than the default of 8 hardware queues share
                                     queues, and wait for each other: of computation, two over z, x, y, (x, y), data,
                                     (data, z) and the world.

NVIDIA's Megatron-LM wants 1 connection for tensor parallelism alone, and refuses it for sharded weights: a reduction
that waits in its communicator would hold up the products behind it in the one queue. On other grids it is not set.

Sources: NCCL's user guide, "Using multiple NCCL communicators concurrently"; Megatron-FSDP's user guide, "Disable
CUDA_DEVICE_MAX_CONNECTIONS"; torchtitan's docs/composability.md (16 or 32 for FSDP2 with tensor parallelism).
"""

from __future__ import annotations

from collections.abc import Mapping

from hf_axonn.topology.grid import Grid


def gpu_settings(grid: Grid, environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Variables for the processes of a grid on NVIDIA GPUs, and what to tell the user.

    Args:
        environ: where the user may have set them: those are left alone.
    """
    fitting = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
    if grid.z > 1 and grid.x * grid.y > 1:
        fitting["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    chosen = {name: value for name, value in fitting.items() if name not in environ}
    notes = []
    if chosen:
        notes.append("set for the GPUs: " + " ".join(f"{name}={value}" for name, value in chosen.items()) + ".")
    if grid.z > 1 and environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        notes.append(
            f"CUDA_DEVICE_MAX_CONNECTIONS is 1, but z is {grid.z}: gathers and reductions of weights hold up the "
            "products behind them in the one queue. Unset it."
        )
    return chosen, notes


def has_nvidia() -> bool:
    """True if this torch is built for NVIDIA's GPUs, and not for AMD's."""
    import torch

    return torch.version.cuda is not None
