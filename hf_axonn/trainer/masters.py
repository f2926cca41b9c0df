"""A Trainer trains float32 weights (engine/master_weights.py), also one that resumes, on a grid and on one process.

Each function wraps the method of Trainer that has its name (hooks.py). Checked with transformers 5.20 to 5.24.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from hf_axonn.engine.master_weights import make_masters


def keep(trainer) -> None:
    """Make what this Trainer trains float32, under mixed precision; DeepSpeed and FSDP see to that themselves."""
    if not (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled):
        make_masters(trainer.model.parameters(), mixed_precision=trainer.accelerator.mixed_precision)


def _load_from_checkpoint(
    self, original: Callable, resume_from_checkpoint: str, model: nn.Module | None = None
) -> None:
    """A checkpoint is read into the float32 weights that it was saved from: in bfloat16 they would be rounded."""
    if self.is_in_train:
        keep(self)
    return original(resume_from_checkpoint, model)


WRAPPERS = (_load_from_checkpoint,)
