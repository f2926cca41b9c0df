"""Mixture of experts: the experts of one layer, divided among the ranks.

Transformers keeps the experts of a layer in one module, whose parameters [E, ., .] have a leading dim of experts and
whose forward takes (hidden states, index of the chosen experts, their weights). It does the work here, too, on the
(token, choice) pairs of this rank's experts and no others. Experts and tokens meet in one of two ways
(architectures/expert_choice.py):

    gather   E is sharded over y, then x; z shards the last dim of what is left, which is gathered for use
             residual stream sharded   every rank gathers tokens and choices over (x, y), and the sums go back to the
                                       tokens' owners in a reduce-scatter
             activations full          every rank of (x, y) has all tokens: an all-reduce adds up the experts' sums

    move     E is sharded over y, x and z: an expert lies whole on one rank. A token goes once to each rank that has
             experts which it chose, and one sum comes back (token_routes.py)
             activations full          each rank of (x, y) sends its share of the tokens, and gathers the sums of all

How many pairs there are the host has to read, for which it waits for a GPU. Where weights are gathered and the pairs
of other ranks' experts are few, in bfloat16, it does not: the device sorts all pairs, the others last, and the grouped
matmul of Transformers stops before them.

Source: expert parallelism, Lepikhin et al. 2020 (arXiv 2006.16668): `move` with its all-to-alls, without padding and
capacity; `gather` with an all-gather and a reduce-scatter in their place; z as in engine/matmul3d.py.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hf_axonn.compat.torch import UnreadHistogram
from hf_axonn.compat.transformers import in_groups, multiplies_in_groups
from hf_axonn.distributed.collectives import (
    all_gather,
    all_reduce,
    all_reduce_backward,
    all_to_all,
    gather_replicated,
    reduce_scatter,
    take_replicated,
)
from hf_axonn.engine.activation_layouts import bounds, ceil_div, pad_dim
from hf_axonn.engine.dtensors import replicated_local
from hf_axonn.engine.matmul3d import Product
from hf_axonn.engine.state import ParallelState
from hf_axonn.engine.weight_layout import expert_layout
from hf_axonn.layers.base import patch_forward, replaced
from hf_axonn.layers.computed_ahead import ComputedAhead
from hf_axonn.layers.expert_weights import call_with_gathered
from hf_axonn.layers.token_routes import Dispatch, find_routes
from hf_axonn.topology.experts import DISPATCH, expert_owners, own_experts
from hf_axonn.topology.weight_kind import WeightKind


# Hidden states of pairs that are for other ranks' experts and are taken along rather than read about: some forty
# passes of reading and writing them, a step's, take a GPU with 3 TB/s half a millisecond. An assumption.
FOREIGN_BYTES = 2**25

_CHOICES = ("top_k_index", "router_indices", "selected_experts")
_WEIGHTS = ("top_k_weights", "routing_weights")


def is_experts(module: nn.Module) -> bool:
    """Return whether a module holds experts in parameters [E, ., .] and is called as the head of this file says."""
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    experts = getattr(module, "num_experts", None)
    if not any(parameter.dim() == 3 for parameter in own) or module._buffers:
        return False
    if any(parameter.dim() < 2 or parameter.shape[0] != experts for parameter in own):
        return False
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return (len(names) == 3 and names[1] in _CHOICES and names[2] in _WEIGHTS) or is_called_sorted(module)


def is_called_sorted(module: nn.Module) -> bool:
    """Return whether the hidden states of an experts module are [E * T, H]: all tokens for the first expert, and so
    on."""
    return type(module).__name__ == "Llama4TextExperts"


def expert_weights(module: nn.Module) -> list[str]:
    """Names of the parameters of an experts module that are sharded; the biases [E, N] are small and replicated."""
    own = module._parameters.items()
    return [name for name, parameter in own if parameter is not None and parameter.dim() == 3]


class Experts:
    """The experts of one layer, gathered over z. Hidden states [T, H], or [B, S, H], and choices [T, K] -> what they
    were given.

    Attributes:
        range: the experts of this rank.
        added: what adapters do to a parameter, by name.

    Collectives: all-gather over z of each weight, forward and backward, and reduce-scatter of its gradient; where the
    residual stream is sharded an all-gather over (x, y) of hidden states, choices and their weights and a
    reduce-scatter of the result, else an all-reduce of the result; backward: the conjugate of each.
    """

    whole = False  # whether an expert lies whole on one rank

    def __init__(self, state: ParallelState, module: nn.Module) -> None:
        self.state = state
        self.module = module
        self.range = own_experts(cast(int, module.num_experts), state.grid_mesh, over_z=self.whole)
        self.signature = inspect.signature(module.forward)
        self.products = {}
        self.added: dict[str, Callable[[Tensor], Tensor]] = {}
        state.add_layer(module, self)
        for name in expert_weights(module):
            layout = expert_layout(module._parameters[name].shape, state.grid_mesh, over_z=self.whole)
            # One product for each, so that no weight has to be copied out of a gather of several.
            self.products[name] = Product(state, [state.weight_of(module, name, stays=self.whole)], [layout])
        patch_forward(module, self._forward)

    def _forward(self, original: Callable, *args: Tensor, **kwargs: Tensor) -> Tensor:
        hidden, choices, weights = self.signature.bind(*args, **kwargs).args
        group = self.state.grid_mesh.group("x", "y")
        flat = hidden.reshape(-1, hidden.shape[-1]).to(self.state.compute_dtype(hidden))
        if group.size() > 1:
            flat, choices, weights = self._enter(flat, choices, weights, group)
        chosen = self._unread if self._few_foreign(flat, choices) else functools.partial(self._chosen, original, None)
        total = self._with_weights(functools.partial(chosen, choices), flat, weights)
        if self._sharded:
            total = reduce_scatter(total.unflatten(0, (group.size(), -1)), group)
        else:
            total = all_reduce(total, group)
        return total.view(hidden.shape).to(hidden.dtype)

    def _enter(
        self, hidden: Tensor, choices: Tensor, weights: Tensor, group: ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, choices and their weights of the tokens of all ranks that divide the experts."""
        enter = _gather if self._sharded else all_reduce_backward
        if self._sharded:
            choices = _gather(choices.to(torch.int32), group).to(choices.dtype)
        return enter(hidden, group), choices, enter(_wide(weights), group).to(weights.dtype)

    @property
    def _sharded(self) -> bool:
        return self.state.context.tokens is not None and self.state.context.tokens.sharded

    def _with_weights(self, work: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """`work(*inputs)` with this rank's experts in place."""

        def with_gathered(gathered: Sequence[Tensor], *inputs: Tensor) -> Tensor:
            with self._parameters(gathered):
                return work(*inputs)

        return call_with_gathered(list(self.products.values()), with_gathered, *inputs)

    def _few_foreign(self, hidden: Tensor, choices: Tensor) -> bool:
        """Return whether to take pairs of other ranks' experts along, [T, H] and [T, K] on a GPU, by sizes alone."""
        own, experts = len(self.range), cast(int, self.module.num_experts)
        if hidden.device.type == "cpu" or hidden.dtype != torch.bfloat16 or not own:
            return False
        foreign = choices.numel() * (1 - own / experts)
        return foreign * hidden.shape[1] * hidden.element_size() <= FOREIGN_BYTES and multiplies_in_groups(self.module)

    def _unread(self, choices: Tensor, hidden: Tensor, weights: Tensor) -> Tensor:
        """Same as `_chosen`, and the host reads nothing: of T * K rows, whatever was chosen."""
        own = (choices >= self.range.start) & (choices < self.range.stop)
        return in_groups(self.module, hidden, torch.where(own, choices - self.range.start, len(self.range)), weights)

    def _chosen(
        self, original: Callable, counts: list[int] | None, choices: Tensor, hidden: Tensor, weights: Tensor
    ) -> Tensor:
        """The sum over this rank's experts, for all tokens [T, H].

        `counts` is the number of pairs by the place of the choice; None: the host reads it.
        """
        if not self.range:
            return torch.zeros_like(hidden)
        own = (choices >= self.range.start) & (choices < self.range.stop)
        # Ordered by the place of the choice, so that in one place every token occurs once: the sum is then taken in
        # the same order each time, on a GPU too.
        counts = own.sum(dim=0).tolist() if counts is None else counts
        places, tokens = own.t().nonzero_static(size=sum(counts)).unbind(1)
        total = hidden.new_zeros(hidden.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
        if len(tokens):
            chosen = (tokens, places)
            output = original(hidden[tokens], (choices[chosen] - self.range.start)[:, None], weights[chosen][:, None])
            parts = output.reshape(len(tokens), -1).split(counts)
            for part, at in zip(parts, tokens.split(counts), strict=True):
                total.index_add_(0, at, part.to(total.dtype))  # of one place at a time: all take much memory
        return total.to(hidden.dtype)

    @contextlib.contextmanager
    def _parameters(self, gathered: Sequence[Tensor]) -> Iterator[None]:
        """Let the module see plain tensors of its own experts, and only as many experts as it has here."""
        module, mesh = self.module, self.state.grid_mesh
        local = dict(zip(self.products, gathered, strict=True))
        for name, parameter in module._parameters.items():
            if parameter is not None and name not in local:
                full = replicated_local(parameter, mesh, ("x", "y"))
                local[name] = full[self.range.start : self.range.stop] if parameter.dim() > 1 else full
        local |= {name: add(local[name]) for name, add in self.added.items()}
        own = {**local, "num_experts": len(self.range)}
        with replaced(module.__dict__, own), UnreadHistogram() if len(self.range) == 1 else contextlib.nullcontext():
            yield


def _gather(block: Tensor, group) -> Tensor:
    """[T/(x*y), ...] -> [T, ...]. All-gather; backward: reduce-scatter."""
    return all_gather(block, group).flatten(0, 1)


class MovingExperts(Experts):
    """The experts of one layer, each whole on one rank of DISPATCH, to which tokens travel. As `Experts`.

    Modules beside the experts, as shared ones, are computed while tokens travel (computed_ahead.py), and in backward
    while the gradients of tokens do.

    Collectives: over DISPATCH an all-to-all of sizes, which the host reads (not again in a checkpointed layer that is
    recomputed), exchanges of hidden states and of choices with their weights, and one of results; backward: the
    conjugate of each exchange. Where activations are full an all-gather over (x, y) of the results; backward: of the
    gradients of hidden states and weights.
    """

    whole = True

    def __init__(self, state: ParallelState, module: nn.Module) -> None:
        super().__init__(state, module)
        owners = expert_owners(cast(int, module.num_experts), state.grid)
        rank_of = {expert: rank for rank, experts in enumerate(owners) for expert in experts}
        self.owners = torch.tensor([rank_of[expert] for expert in sorted(rank_of)], device=state.grid_mesh.device)
        self.meanwhile: ComputedAhead | None = None

    def compute_meanwhile(self, meanwhile: ComputedAhead) -> None:
        """Let modules beside the experts be computed while tokens travel."""
        self.meanwhile = meanwhile

    def _forward(self, original: Callable, *args: Tensor, **kwargs: Tensor) -> Tensor:
        hidden, choices, weights = self.signature.bind(*args, **kwargs).args
        flat = hidden.reshape(-1, hidden.shape[-1]).to(self.state.compute_dtype(hidden))
        if self._sharded:
            total = self._move(original, hidden, flat, choices, weights)
        else:
            group = self.state.grid_mesh.group("x", "y")
            count = len(flat)
            start, stop = bounds(count, group.size(), group.rank())
            share = ceil_div(count, group.size())
            flat, wide = (_take_share(value, share, group)[: stop - start] for value in (flat, _wide(weights)))
            total = self._move(original, hidden, flat, choices[start:stop], wide.to(weights.dtype))
            total = gather_replicated(pad_dim(total, 0, share), group).flatten(0, 1)[:count]
        return total.view(hidden.shape).to(hidden.dtype)

    def _move(self, original: Callable, given: Tensor, hidden: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        """The sum over all experts of each of this rank's tokens, [T, H]; `given`: the module's input."""
        group = self.state.grid_mesh.group(*DISPATCH)
        routes = self.state.context.once(lambda: find_routes(choices, self.owners, group))
        wide = _wide(weights)
        both = torch.cat([wide, routes.choices.to(wide.dtype)], dim=1)  # float32 has numbers up to E exactly
        overlap = self.state.config.overlap.all_to_all
        dispatches = [Dispatch(values, routes, group, overlap=overlap) for values in (hidden, both)]
        try:
            if self.meanwhile is not None:
                self.meanwhile.compute(given)
        finally:  # a layer that is recomputed may end in there
            hidden, both = [dispatch.wait() for dispatch in dispatches]
        arrived, chosen = both.tensor_split(2, dim=1)
        work = functools.partial(self._chosen, original, routes.pairs, chosen.detach().to(choices.dtype))
        return routes.send_back(self._with_weights(work, hidden, arrived.to(weights.dtype)), group)


def _wide(weights: Tensor) -> Tensor:
    """Routing weights as they are sent: in float32 at least, whatever the router returns."""
    return weights.to(torch.promote_types(weights.dtype, torch.float32))


def _take_share(value: Tensor, share: int, group: ProcessGroup) -> Tensor:
    """[T, ...], the same on all ranks -> `share` rows for this rank, zeros behind the last. Backward: all-gather."""
    return take_replicated(pad_dim(value, 0, share * group.size()).unflatten(0, (group.size(), share)), group)


class SortedExperts(Experts):
    """Experts that get all tokens, one expert after another, as Llama 4 has them. [E * T, H] -> [E * T, H].

    Collectives: those of the weights as in `Experts`; where the residual stream is sharded an all-to-all over (x, y)
    that takes tokens to their experts and one that takes them back, else an all-gather of the results over (x, y).
    """

    def _forward(self, original: Callable, hidden: Tensor) -> Tensor:
        mesh, experts = self.state.grid_mesh, cast(int, self.module.num_experts)
        group, own = mesh.group("x", "y"), slice(self.range.start, self.range.stop)
        # Ranks of (x, y) are numbered with y innermost, experts are sharded over y first.
        owners = [
            own_experts(experts, mesh.move(("x", "y"), place), over_z=False) for place in range(mesh.size("x", "y"))
        ]
        most = max(map(len, owners))
        flat = hidden.view(experts, -1, hidden.shape[-1]).to(self.state.compute_dtype(hidden))
        if self._sharded:
            blocks = torch.stack([pad_dim(flat[owner.start : owner.stop], 0, most) for owner in owners])
            own_blocks = all_to_all(blocks, group)[:, : len(self.range)].transpose(0, 1)  # [e, p, T, H]
        else:
            own_blocks = all_reduce_backward(flat, group)[own].unsqueeze(1)
        own_blocks = self._with_weights(functools.partial(self._all, original), own_blocks)
        if self._sharded:
            blocks = all_to_all(pad_dim(own_blocks.transpose(0, 1), 1, most), group)
        else:
            blocks = gather_replicated(pad_dim(own_blocks.squeeze(1), 0, most), group)
        in_order = sorted(zip(owners, blocks, strict=True), key=lambda pair: pair[0].start)
        return torch.cat([block[: len(owner)] for owner, block in in_order]).view(hidden.shape).to(hidden.dtype)

    def _all(self, original: Callable, hidden: Tensor) -> Tensor:
        if not hidden.numel():
            return hidden.clone()
        return original(hidden.reshape(-1, hidden.shape[-1])).view(hidden.shape)


def experts_layer(module: nn.Module, kind: WeightKind) -> type[Experts]:
    """The sharded layer of a module that `is_experts`, whose weights are of this kind."""
    if kind == WeightKind.WHOLE_EXPERTS:
        return MovingExperts
    return SortedExperts if is_called_sorted(module) else Experts
