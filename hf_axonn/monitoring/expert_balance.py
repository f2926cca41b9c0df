"""Balance of a mixture of experts in training: `ExpertBalance` counts choices where routers make them.

    experts/load_imbalance   tokens that choose an expert: the most of a layer over the mean of its experts
    experts/rank_imbalance   pairs of token and expert on which a rank of a grid works: the most over the mean of ranks
    experts/router_entropy   entropy of the softmax of a router's logits, in nats: mean over tokens and layers

The first two are of all steps since the last log together, and of the layer in which they are largest. Passes with
gradients count, what runs again in backward does not. Each token counts once on any grid, padding of its batch too,
as experts work on it; positions that only fill up a shard, a row over context or a batch over pipe do not.

Counts stay on the device between logs: no rank reads them, and none communicates.
"""

from __future__ import annotations

import inspect
import weakref
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_axonn.compat.messages import get_logger
from hf_axonn.compat.torch import in_backward
from hf_axonn.compat.transformers import find_routers
from hf_axonn.distributed.collectives import reduce_, world_rank
from hf_axonn.distributed.mesh import TOKENS
from hf_axonn.engine.state import ParallelState, parallel_state
from hf_axonn.layers.moe import Experts, is_called_sorted, is_experts
from hf_axonn.losses.causal_lm import widest_float
from hf_axonn.topology.experts import DISPATCH


logger = get_logger(__name__)

FULL = 4.0  # times the mean of the ranks that one rank may have before it is warned of
STEPS = 50  # for so many steps in a row


class Imbalance(NamedTuple):
    """Numbers of one rank since the last log, for the reductions over the world that follow.

    sums: entropy of the routers' choices, and how many they are.
    most: the largest `load_imbalance` of the layers here, and the `rank_imbalance` of this rank; 0 for none.
    layer: name of the experts of the second.
    """

    sums: tuple[float, float]
    most: tuple[float, float] = 0.0, 0.0
    layer: str = ""


def balance_numbers(expert: float, rank: float, entropy: float, tokens: float) -> dict[str, float]:
    """Return what is logged of the largest `Imbalance.most` and the added up `Imbalance.sums` of all ranks."""
    found = {"experts/load_imbalance": expert, "experts/rank_imbalance": rank}
    found = {name: value for name, value in found.items() if value}
    return found | ({"experts/router_entropy": entropy / tokens} if tokens else {})


class ExpertBalance:
    """Counts the choices of the routers of a model, until it is no longer referred to.

    Experts that are handed all tokens (Llama 4) make no choices that could be counted: their routers' entropy is.

    Args:
        model: over a grid a parallelized one.
        device: of the counts.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._state = parallel_state(model)
        found = {name: module for name, module in model.named_modules() if is_experts(module)}
        self._layers = {name: module for name, module in found.items() if not is_called_sorted(module)}
        numbers: list[int] = [module.num_experts for module in self._layers.values()]
        self._numbers = torch.tensor(numbers, dtype=torch.int64, device=device)
        self._counts = torch.zeros(len(numbers), max(numbers, default=0), dtype=torch.int64, device=device)
        self._entropy = torch.zeros(2, dtype=widest_float(device), device=device)  # sum, tokens
        self._steps = 0  # in a row, with a rank that is too full
        handles = [
            module.register_forward_pre_hook(
                torch.compiler.disable(
                    partial(_count_choices, self._state, counts, inspect.signature(module.forward))
                ),
                with_kwargs=True,
            )
            for module, counts in zip(self._layers.values(), self._counts, strict=True)
        ]
        handles += [
            router.register_forward_hook(
                torch.compiler.disable(partial(_add_entropy, self._state, self._entropy, index))
            )
            for router, index in find_routers(model)
        ]
        self._counting = bool(handles)
        for handle in handles:  # the hooks refer to counts, not to this object
            weakref.finalize(self, handle.remove)

    def take(self, world: torch.distributed.ProcessGroup | None) -> Imbalance:
        """Return the numbers since the last call, which begin again from zero; a dense model has none.

        Collectives, where layers of this rank have experts: over a grid an all-reduce of their counts over the ranks
        that work on the same tokens, (x, y) or DISPATCH, and one over the others; else one over `world`.
        """
        if not self._counting:
            return Imbalance((0.0, 0.0))
        entropy, tokens = self._entropy.tolist()
        self._entropy.zero_()
        if not self._layers:
            return Imbalance((entropy, tokens))
        counts = self._counts.clone()
        self._counts.zero_()
        if self._state is None:
            counts = counts if world is None else reduce_(counts, world)
            pairs = counts.sum(dim=1).clamp(min=1)
            return Imbalance((entropy, tokens), ((counts.amax(dim=1) * self._numbers / pairs).max().item(), 0.0))
        mesh, layers = self._state.grid_mesh, [self._state.sharded_layers[module] for module in self._layers.values()]
        experts = [layer for layer in layers if isinstance(layer, Experts)]
        together, others = (DISPATCH, ("data",)) if experts[0].whole else (("x", "y"), TOKENS)
        counts = reduce_(counts, mesh.group(*together))
        ranges = [slice(layer.range.start, layer.range.stop) for layer in experts]
        own = torch.stack([of_layer[here].sum() for of_layer, here in zip(counts, ranges, strict=True)])
        counts = reduce_(counts, mesh.group(*others))
        pairs = counts.sum(dim=1).clamp(min=1)
        fullest = counts.amax(dim=1) * self._numbers / pairs
        rank, at = (own * mesh.size(*TOKENS, "x", "y") / pairs).max(dim=0)
        return Imbalance((entropy, tokens), (fullest.max().item(), rank.item()), list(self._layers)[int(at)])

    def warn(self, own: Imbalance, most: float, steps: int) -> None:
        """Warn once when a rank had more than FULL times the mean in logs of STEPS steps in a row.

        Args:
            own: of this rank; the fullest one warns.
            most: the `rank_imbalance` of all.
            steps: since the last log.
        """
        before, self._steps = self._steps, self._steps + steps if most > FULL else 0
        if before < STEPS <= self._steps and own.most[1] >= most:
            logger.warning(
                f"one rank has had more than {FULL:.0f} times the mean work on experts for {self._steps} steps: since "
                f"the last log rank {world_rank()} has had {most:.1f} times the mean of the ranks in {own.layer}, and "
                "the others wait for it. Raise router_aux_loss_coef (with output_router_logits=True), which evens out "
                "the choices of routers, or divide the experts among fewer ranks."
            )


def _is_counted(state: ParallelState | None, module: nn.Module) -> bool:
    return not in_backward() and (module.training if state is None else state.context.wants_gradients)


def _count_choices(
    state: ParallelState | None,
    counts: Tensor,
    signature: inspect.Signature,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    if _is_counted(state, module):
        choices = signature.bind(*args, **kwargs).args[1]
        counted = _counted_tokens(state, len(choices), choices.device)
        ones = torch.ones_like(choices) if counted is None else counted[:, None].expand_as(choices).to(choices)
        counts.index_add_(0, choices.flatten(), ones.flatten())


def _add_entropy(
    state: ParallelState | None, sums: Tensor, index: int, module: nn.Module, args: tuple[Any, ...], output: Any
) -> None:
    if _is_counted(state, module):
        logits = (output[index] if isinstance(output, tuple) else output).detach()
        logs = logits.reshape(-1, logits.shape[-1]).float().log_softmax(dim=-1)
        counted = _counted_tokens(state, len(logs), logs.device)
        entropy = -(logs.exp() * logs).sum(dim=-1)
        if counted is None:
            sums += torch.stack([entropy.sum(), torch.ones_like(entropy).sum()])
        else:
            sums += torch.stack([(entropy * counted).sum(), counted.sum()])


def _counted_tokens(state: ParallelState | None, count: int, device: torch.device) -> Tensor | None:
    """[count], True for those of the tokens at hand that fill nothing up and that no other rank counts; None: all."""
    if state is None:
        return None
    mesh, tokens, rows, stage = state.grid_mesh, state.context.tokens, state.context.rows, state.context.stage
    parts, here = mesh.size("x", "y"), mesh.index("x", "y")
    if tokens is None or (parts > 1 and count == tokens.count):  # every rank of (x, y) has all of them
        if here:
            return torch.zeros(count, dtype=torch.bool, device=device)
        parts = 1
    real = stage.real if stage is not None else None
    if tokens is None or not (real or count * parts > tokens.count or (rows is not None and rows.filled)):
        return None
    place = torch.arange(here * count, (here + 1) * count, device=device)
    row, position = place // tokens.seq, place % tokens.seq
    whole = tokens.seq
    if rows is not None:
        own = rows.take(torch.arange(rows.length, device=device).unsqueeze(0), fill=rows.length)[0]
        position, whole = own[position], rows.length
    height, width = real or (tokens.batch, whole)
    return (row < height) & (position < width)
