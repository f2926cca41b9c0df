"""Errors that a framework might make, put into the ranks of a certificate's run; the product knows nothing of them.

`worker JOB` is run in a fork (`runs.py`), after one of these functions has replaced something in it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

from hf_axonn.certificate import worker


def forgotten_average() -> None:
    """Every rank of DistributedDataParallel goes on with its own gradients."""
    made = DistributedDataParallel.__init__

    def keep(_state, bucket):  # torch looks at annotations, which are texts here
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def make(self, *args, **kwargs) -> None:
        made(self, *args, **kwargs)
        self.register_comm_hook(None, keep)

    DistributedDataParallel.__init__ = make


def scaled_loss() -> None:
    """Trainer's loss is multiplied by the number of processes."""
    stock = transformers.Trainer.compute_loss

    def scaled(self, *args, **kwargs):
        found = stock(self, *args, **kwargs)
        return (found[0] * 2, *found[1:]) if isinstance(found, tuple) else found * 2

    transformers.Trainer.compute_loss = scaled


def duplicated_sample() -> None:
    """Rank 1 has its second row of a batch twice, and not its first one."""
    stock = worker.collate
    if dist.get_rank() == 1:
        worker.collate = lambda rows: stock([rows[-1], *rows[1:]])


def unclipped_rank() -> None:
    """Rank 1 computes the norm, and leaves its gradients as they are."""
    stock = Accelerator.clip_grad_norm_
    if dist.get_rank() == 1:
        Accelerator.clip_grad_norm_ = lambda self, parameters, *_, **__: stock(self, parameters, float("inf"))


def dropped_bias() -> None:
    """The bias of the first attention's products has no gradient."""
    stock = transformers.Trainer.training_step

    def step(self, model, *args, **kwargs):
        loss = stock(self, model, *args, **kwargs)
        for name, parameter in model.named_parameters():
            if name.endswith("h.0.attn.c_attn.bias"):
                parameter.grad = None
        return loss

    transformers.Trainer.training_step = step


def unreduced_by_deepspeed() -> None:
    """Every rank of ZeRO goes on with its own gradients; only numbers, as the norm, are added up."""
    from deepspeed import comm

    for name in ("all_reduce", "reduce"):
        stock = getattr(comm, name)

        def kept(tensor, *args, stock=stock, **kwargs):
            return stock(tensor, *args, **kwargs) if tensor.numel() == 1 else None

        setattr(comm, name, kept)


def ungathered_by_deepspeed() -> None:
    """No rank of ZeRO-1 or ZeRO-2 gets what the others have made of their parts."""
    from deepspeed.runtime.zero import stage_1_and_2

    stage_1_and_2.all_gather_dp_groups = lambda **_: None


ERRORS = {
    function.__name__: function
    for function in (
        forgotten_average,
        scaled_loss,
        duplicated_sample,
        unclipped_rank,
        dropped_bias,
        unreduced_by_deepspeed,
        ungathered_by_deepspeed,
    )
}
