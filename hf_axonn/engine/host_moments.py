"""Moments of an optimizer in host memory, on the device only while a step uses them (`offload: optimizer`).

AdamW's two moments take as many bytes as a parameter and its gradient together, and only the step reads them. Here
they lie in host memory, which is pinned on CUDA, and a step goes through the parameters in buckets:

    arrive    the moments of the next bucket are copied to the device
    step      the optimizer's own step updates the parameters and moments of this one
    leave     the moments of the one before are copied back

Copies run beside the updates, each way on a stream of its own. The device waits for the first bucket to arrive and the
last one to leave, the host for nothing, unless float32 weights lie in its memory, too (host_weights.py): they come and
leave with their moments. The device computes with the same numbers, so every bit is as without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hf_axonn.compat.low_bit_adam import NOT_MOMENTS
from hf_axonn.engine.host_weights import HostWeight, host_weight_of, to_host


BUCKET_BYTES = 2**27  # three are on the device at once; a parameter with larger moments is one by itself


def is_moment(name: str, value: Any, parameter: Tensor) -> bool:
    """Return whether an entry of a parameter's state is elementwise: no count of steps, and nothing of blocks."""
    return name not in NOT_MOMENTS and isinstance(value, Tensor) and value.shape == parameter.shape


@dataclass(eq=False)
class Bucket:
    """Parameters that are updated together, and the copies on the device of what lies in host memory.

    Args:
        members: (number of the group, parameter).
        homes: where moments lie in host memory, by parameter and name.
        weights: (parameter, its record) of those whose values lie there.
        event: after their last copy.
    """

    members: list[tuple[int, Tensor]]
    homes: dict[tuple[Tensor, str], Tensor] = field(default_factory=dict)
    weights: list[tuple[Tensor, HostWeight]] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)
    event: Any = None


class HostMoments:
    """Steps of one optimizer whose moments lie in host memory, and whose parameters are on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)  # that of CPUs has streams, too, on which nothing waits
        self._arrivals, self._departures = self._module.Stream(), self._module.Stream()

    def take_step(self, optimizer: Optimizer, step: Callable[[], object]) -> None:
        """Call the optimizer's own step, which sees plain tensors, for one bucket after the other.

        Where weights lie in host memory, too, the host waits until they have come home: what reads them is the host.

        Raises:
            RuntimeError: those of `refuse_uncounted`.
        """
        groups = [group["params"] for group in optimizer.param_groups]
        buckets = divide(groups)
        here = self._module.current_stream()
        leaving: Bucket | None = None
        compared: list[tuple[Tensor, torch.Size]] = []
        self._arrivals.wait_stream(self._departures)  # of the step before
        try:
            for bucket, following in zip(buckets, [*buckets[1:], None], strict=True):
                if leaving is None:
                    self._bring(bucket, optimizer)
                here.wait_event(bucket.event)
                for parameter, weight in bucket.weights:
                    if (same := weight.compare(parameter)) is not None:
                        compared.append((to_host(same).copy_(same, non_blocking=True), parameter.shape))
                if following is not None:
                    self._bring(following, optimizer)
                for number, group in enumerate(optimizer.param_groups):
                    group["params"] = [parameter for place, parameter in bucket.members if place == number]
                step()
                if leaving is not None:
                    here.wait_event(leaving.event)
                    leaving.copies.clear()
                self._send_home(bucket, optimizer)
                leaving = bucket
            if leaving is not None:
                here.wait_event(leaving.event)
        finally:
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters
            if any(bucket.weights for bucket in buckets):
                self.synchronize()
        refuse_uncounted(compared)

    def synchronize(self) -> None:
        """Wait, on the host, until all moments have come home: what reads them then is the host."""
        self._module.synchronize()

    def _bring(self, bucket: Bucket, optimizer: Optimizer) -> None:
        here = self._module.current_stream()
        for _, parameter in bucket.members:
            if (weight := host_weight_of(parameter)) is not None and not isinstance(parameter, DTensor):
                bucket.weights.append((parameter, weight))
                parameter.data = torch.empty_like(weight.home, device=parameter.device)
            entries = optimizer.state[parameter]
            for name, value in entries.items():
                # One that a checkpoint of one process left on the device is there.
                if is_moment(name, value, parameter) and value.device.type == "cpu":
                    bucket.homes[parameter, name] = value
                    entries[name] = torch.empty_like(value, device=parameter.device)
                    bucket.copies.append(entries[name])
        self._arrivals.wait_stream(here)  # the room may have been that of other tensors
        with self._module.stream(self._arrivals):
            for parameter, weight in bucket.weights:
                parameter.copy_(weight.home, non_blocking=True)
            for (parameter, name), home in bucket.homes.items():
                optimizer.state[parameter][name].copy_(home, non_blocking=True)
        bucket.event = self._arrivals.record_event()

    def _send_home(self, bucket: Bucket, optimizer: Optimizer) -> None:
        bucket.copies.clear()
        for parameter, weight in bucket.weights:
            weight.take(parameter)
        self._departures.wait_stream(self._module.current_stream())
        with self._module.stream(self._departures):
            for parameter, weight in bucket.weights:
                weight.home.copy_(parameter, non_blocking=True)
                bucket.copies.append(parameter.data)
                parameter.data = weight.outline
            for _, parameter in bucket.members:
                entries = optimizer.state[parameter]
                for name, value in entries.items():
                    if is_moment(name, value, parameter):
                        home = bucket.homes.get((parameter, name))
                        entries[name] = to_host(value) if home is None else home
                        entries[name].copy_(value, non_blocking=True)
                        bucket.copies.append(value)
        bucket.event = self._departures.record_event()


def divide(groups: list[list[Tensor]]) -> list[Bucket]:
    """Divide the parameters with gradients, in their order; what two moments take decides where a bucket ends, and
    what a weight takes that lies in host memory."""
    buckets: list[Bucket] = []
    room = 0
    for number, parameters in enumerate(groups):
        for parameter in parameters:
            if parameter.grad is None:
                continue
            size = (2 if host_weight_of(parameter) is None else 3) * parameter.nbytes
            if not buckets or size > room:
                buckets.append(Bucket([]))
                room = BUCKET_BYTES
            room -= size
            buckets[-1].members.append((number, parameter))
    return buckets


def refuse_uncounted(compared: list[tuple[Tensor, torch.Size]]) -> None:
    """Refuse changes of weights that products have not seen.

    Args:
        compared: whether the copy of a weight was that of its values, in host memory, and the shape of its shard.
    Raises:
        RuntimeError: one was not.
    """
    changed = [list(shape) for same, shape in compared if not bool(same)]
    if changed:
        raise RuntimeError(
            f"{len(changed)} weights in host memory (offload: optimizer) were changed since the last step in a way "
            f"that torch does not count, the first of shape {changed[0]} on this rank: forward passes have multiplied "
            "by what they were before. Change them under torch.no_grad() by parameter.copy_() or parameter.mul_(), "
            "and not by what to_local().data returns; or omit offload."
        )
