"""Float32 weights in host memory, each with a rounded copy on the device (`offload: optimizer` in mixed precision).

Products in bf16 or fp16 read a shard rounded, and only the optimizer's step reads its float32 values. So these lie in
host memory, which is pinned on CUDA, and come to the device with their moments (host_moments.py). The parameter stays
the float32 DTensor that it was, on the device by what it says, and so is its gradient; but its shard is the one in
host memory. Whatever saves, loads or changes weights finds the float32 values there.

A step leaves the rounded copy that fits its values. Changes by others are counted (compat/host_dtensor.py), and the
next product finds that the copy is old. What is not counted, as of `to_local().data`, is found by the next step, which
compares the copy with the values that come to it.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_axonn.compat.host_dtensor import move_shard
from hf_axonn.compat.torch import shard_in, version_of


def to_host(value: Tensor) -> Tensor:
    """Return room in host memory for a tensor."""
    return torch.empty_like(value, device="cpu", pin_memory=value.device.type != "cpu")


class HostWeight:
    """The shard of one parameter in host memory, and its copy on the device.

    Args:
        parameter: a float32 DTensor; its shard moves to host memory.
        dtype: of the copy.

    Attributes:
        home: the shard, as stored.
        outline: a tensor of its shape and dtype on the device that holds no values (NaN) and no memory.
    """

    def __init__(self, parameter: DTensor, dtype: torch.dtype) -> None:
        shard = shard_in(parameter)
        self.home = to_host(shard).copy_(shard)
        self.outline = shard.new_full((), math.nan).expand(shard.shape)
        self._copy = shard.to(dtype)
        move_shard(parameter, self.home)
        self._version = version_of(parameter)  # of the values that the copy has
        self._stepped = False  # whether a step has made the copy, and has not been counted as a change yet

    def values(self, version: int, dtype: torch.dtype | None) -> Tensor:
        """Return the shard on the device: the copy if it has this dtype, else in float32, copied there for this call.

        Args:
            version: `version_of` the parameter.
        """
        if dtype != self._copy.dtype:
            return self.home.to(self._copy.device)
        if self._version != version or self._stepped:
            with torch.inference_mode(False):  # or no step could change it
                # Another tensor: a graph may hold the one before.
                self._copy = self.home.to(self._copy.device, self._copy.dtype)
            self._version, self._stepped = version, False
        return self._copy

    def stand_in(self, parameter: DTensor) -> Tensor:
        """Return what an optimizer is given for the parameter, to which `HostMoments` lends memory and values."""
        stand_in: Any = self.outline.detach()
        stand_in.host_weight = self
        stand_in.copy_is_fresh = self._version == version_of(parameter) and not self._stepped
        return stand_in

    def compare(self, stand_in: Tensor) -> Tensor | None:
        """Return, on the device, whether the copy is that of the values that have arrived; None if it need not be, as
        after a change that torch has counted."""
        if not cast(Any, stand_in).copy_is_fresh:
            return None
        return ((stand_in.to(self._copy.dtype) == self._copy) | self._copy.isnan()).all()

    def take(self, stand_in: Tensor) -> None:
        """Make the copy that of what a step has left. The way home is the caller's."""
        self._copy.copy_(stand_in)
        self._stepped = True

    def count_step(self, version: int) -> None:
        """Note the version that the step's values have, after it was counted as a change."""
        if self._stepped:
            self._version, self._stepped = version, False


def host_weight_of(tensor: Tensor) -> HostWeight | None:
    """Return the record of a parameter, or of its stand-in, whose shard lies in host memory; None of others."""
    found: HostWeight | None = vars(tensor).get("host_weight")
    if found is not None and isinstance(tensor, DTensor) and shard_in(tensor) is not found.home:
        return None  # it was given another shard, as by `module.to`
    return found
