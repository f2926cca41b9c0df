"""PEFT's merge and unmerge on a sharded layer: every rank adds its own shard of scaling * B @ A to its own shard.

PEFT writes to `weight.data`, which on a DTensor does nothing or changes only one of its two halves. So while it merges
it sees plain tensors, this rank's shards, and what it leaves in them is taken over. No rank forms a full product.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_axonn.distributed.collectives import reduce_
from hf_axonn.engine.dtensors import local_of, local_slices
from hf_axonn.engine.state import ParallelState
from hf_axonn.layers.base import patch_forward, replaced
from hf_axonn.parallel.adapters.dora import ShardPlace
from hf_axonn.parallel.adapters.lora import pair_of
from hf_axonn.parallel.adapters.parameter_lora import factors


@contextlib.contextmanager
def merge_for_a_while(layers: Sequence[Any]) -> Iterator[None]:
    """Let layers of PEFT have their active adapters merged inside; afterwards weights are what they were, to the bit.

    Layers that are merged already stay so. Memory: a copy of this rank's shards of the others. Collectives: those of
    `Merging`.
    """
    layers = [layer for layer in layers if not layer.merged]
    bases = {layer.get_base_layer() for layer in layers}
    own = [local_of(parameter) for base in bases for parameter in base._parameters.values() if parameter is not None]
    copies = [shard.clone() for shard in own]
    try:
        for layer in layers:
            layer.merge()
        yield
    finally:
        for layer in layers:
            if layer.merged:
                layer.unmerge()
        for shard, copy in zip(own, copies, strict=True):
            shard.copy_(copy)


class Merging:
    """The merge of one LoRA layer. Collectives: with `safe_merge` one number over (x, y) and z; those of DoRA's
    norms."""

    def __init__(self, state: ParallelState, layer: nn.Module, base: nn.Module) -> None:
        self.state, self.layer, self.base = state, layer, base
        self._open = False
        self._find_place()
        layer.get_delta_weight = self._delta
        for name in ("merge", "unmerge"):
            patch_forward(layer, self._run, method=name)

    def _find_place(self) -> None:
        self.place = ShardPlace.in_weight(self.base, self.state)

    def _delta(self, adapter: str) -> Tensor:
        """This rank's shard of what an adapter adds to the weight, as the weight is stored."""
        a, b = (local_of(part) for part in pair_of(self.layer, adapter))
        delta = self.place.delta(a, b, self.layer.scaling[adapter])
        return delta.t() if self.place.transposed else delta

    def _list_merged(self) -> list[str]:
        """Names of the parameters of the layer that is adapted to which PEFT may write."""
        return [name for name in ("weight", "bias") if self.base._parameters.get(name) is not None]

    def _run(self, original: Callable, *args, **kwargs) -> None:
        if self._open:  # DoRA unmerges others while it merges
            return original(*args, **kwargs)
        safe = kwargs.get("safe_merge", args[0] if args else False)
        with self._show_plain():
            problem = None
            try:
                original(*args, **kwargs)
            except ValueError as error:
                if not safe:
                    raise
                problem = error
            if safe:
                self._agree(problem)

    def _agree(self, problem: ValueError | None) -> None:
        """Fail on every rank if one of them has found a value that is not finite."""
        failed = torch.tensor(float(problem is not None), device=self.state.grid_mesh.device)
        for axes in (("x", "y"), ("z",)):
            failed = reduce_(failed, self.state.grid_mesh.group(*axes), op="max")
        if failed:
            raise ValueError("merging would leave values that are not finite: the adapter is broken.") from problem

    @contextlib.contextmanager
    def _show_plain(self) -> Iterator[None]:
        """Let PEFT find plain tensors inside; what it does to weight and bias stays, unless there is an error."""
        layer, base = self.layer, self.base
        own = {name: base._parameters[name] for name in self._list_merged()}
        others = [(part, "bias", local_of(part.bias)) for part in layer.lora_B.values() if part.bias is not None]
        for magnitude in (layer.lora_magnitude_vector or {}).values():
            others.append((magnitude, "weight", local_of(magnitude.weight)[self.place.rows]))
        merged = list(layer.merged_adapters)
        with contextlib.ExitStack() as stack:
            self._open = True
            stack.callback(setattr, self, "_open", False)
            for module, name, value in others:
                shown = nn.Parameter(value, requires_grad=False)
                stack.enter_context(replaced(module._parameters, {name: shown}))
            # Copies, so that an error leaves the weight as it was.
            copies = {
                name: nn.Parameter(local_of(parameter).clone(), requires_grad=False) for name, parameter in own.items()
            }
            stack.enter_context(replaced(base._parameters, copies))
            try:
                yield
            except BaseException:
                layer.merged_adapters = merged
                raise
            for name, parameter in own.items():
                local_of(parameter).copy_(base._parameters[name].detach())


class ParameterMerging(Merging):
    """The merge of LoRA of a parameter itself: [E, P, Q] or [P, Q]."""

    def _find_place(self) -> None:
        parameter = self.base._parameters[self.layer.parameter_name]
        self.slices = local_slices(parameter.shape, parameter.placements, self.state.grid_mesh)

    def _delta(self, adapter: str) -> Tensor:
        a, b = (local_of(part) for part in pair_of(self.layer, adapter))
        *experts, rows, cols = self.slices
        left, right = factors(self.layer, a, b, experts[0] if experts else slice(None))
        delta = torch.bmm(left[:, rows], right[:, :, cols]) * self.layer.scaling[adapter]
        return delta if experts else delta.squeeze(0)

    def _list_merged(self) -> list[str]:
        return [self.layer.parameter_name]
