"""The auxiliary loss of mixture-of-experts models, over the tokens of all ranks.

Transformers computes it in `load_balancing_loss_func` of the model's file, from the router logits of one process. It
is no mean over tokens but a product of two, so that of all samples is not the mean of those of the ranks. The base
model of a parallelized model therefore marks its router logits, and the function, which is wrapped once, takes marked
ones together with those of the other (data, z):

    the loss of Switch Transformers    the sums over tokens are reduced: two short all-reduces
    anything else                      the logits of all real tokens are gathered, and the function is called on them

Which it is a probe decides: the function is called on random logits, with a mask. Gradients are averaged over (data,
z) afterwards, so each rank's own share is multiplied by their number. Nothing is marked in a pass that has neither
gradients nor labels: ranks that generate do not wait for each other, and have the loss of their own samples.

Over pipe a stage has the routers of its own layers. It adds their sums to those that the stage before has sent
with the residual stream, hands them on, and the last one makes the loss of them: that of Switch Transformers is the
only one that is known to be made of sums, so a model with another one is refused. Gradients go back the same way.

Source: Switch Transformers (arXiv 2101.03961), equations 4 to 6.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_axonn.compat.messages import get_logger
from hf_axonn.compat.transformers import text_config
from hf_axonn.distributed.collectives import all_reduce, gather_replicated, reduce_, start_all_gather, world_rank
from hf_axonn.distributed.mesh import TOKENS, GridMesh
from hf_axonn.engine.activation_layouts import Tokens, gather_tokens, pad_dim
from hf_axonn.engine.context import StagePass
from hf_axonn.engine.dtensors import scale_gradient
from hf_axonn.engine.state import ParallelState
from hf_axonn.layers.base import patch_forward


if TYPE_CHECKING:
    from hf_axonn.topology.grid import Grid


logger = get_logger(__name__)

FUNCTION = "load_balancing_loss_func"
ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


def carried_experts(model: nn.Module) -> int:
    """E of a model whose auxiliary loss stages of a pipeline can make together; 0 of others. No communication."""
    functions = [names[FUNCTION] for names in _names_with_function(model)]
    if not functions or not all(_is_of_switch(getattr(each, "of_one_process", each)) for each in functions):
        return 0
    owners, names = (model, text_config(model)), ("num_experts", "num_local_experts")
    found = (getattr(owner, name, None) for owner in owners for name in names)
    return next((number for number in found if isinstance(number, int)), 0)


def check_routers(model: nn.Module, grid: Grid) -> None:
    """Refuse an auxiliary loss that stages of a pipeline cannot make together. No communication.

    Raises:
        ValueError: it is not known to be made of sums over layers and tokens.
    """
    if not carried_experts(model):
        raise ValueError(
            f"output_router_logits=True is not possible for {type(model).__name__} over a grid with pipe ({grid}): no "
            "rank has the routers of all layers, and its auxiliary loss is not known to be made of sums over layers, "
            "as that of Switch Transformers is. Set it to False, which omits the auxiliary loss, or use a grid "
            "without pipe."
        )


def empty_routing(experts: int, device: torch.device | str) -> Tensor:
    """Room for the sums of routers that travel between stages: choices of each expert, tokens, probability of each
    expert. In float64, which counts exactly. [2 * E + 1]."""
    return torch.empty(2 * experts + 1, dtype=torch.float64, device=device)


class RouterLogits(tuple):
    """Router logits [B * S, E] of each layer, of this rank's samples, and the `RouterLoss` of their model.

    What Accelerate and Trainer make of an output's tuples (`type(logits)(...)`) has none, as any other tuple.
    """

    def __new__(cls, logits: Iterable[Tensor], router_loss: RouterLoss | None = None):
        self = super().__new__(cls, logits)
        self.router_loss = router_loss
        return self


def full_router_logits(logits: Tensor, tokens: Tokens, mesh: GridMesh) -> Tensor:
    """Router logits of this rank's tokens, [T/(x*y), E] or [1, T/(x*y), E] -> [B * S, E] or [B, S, E] on all (x, y).

    Those of a router that saw all tokens stay as they are. All-gather over (x, y). Backward: this rank's tokens.
    """
    if logits.numel() == tokens.count * logits.shape[-1]:
        return logits
    full = gather_tokens(logits.reshape(1, -1, logits.shape[-1]), tokens, mesh)
    return full.flatten(0, 1) if logits.dim() == 2 else full


def install_router_loss(state: ParallelState, model: nn.Module) -> None:
    """Make the auxiliary loss of a model that has one that of all ranks."""
    found = _names_with_function(model)
    if not found:
        return
    extends = FUNCTION not in getattr(inspect.unwrap(type(model).forward), "__globals__", {})
    RouterLoss(state, model, getattr(model, model.base_model_prefix), extends=extends)
    for names in found:
        if not hasattr(names[FUNCTION], "of_one_process"):
            names[FUNCTION] = _join_ranks(names[FUNCTION])


def _names_with_function(model: nn.Module) -> list[dict[str, Any]]:
    """Return the global names, `load_balancing_loss_func` among them, of each forward of a model with a base model:
    that of its class, and those of the classes that it is derived from, which it may call."""
    base = getattr(model, getattr(model, "base_model_prefix", None) or "", None)
    if not isinstance(base, nn.Module) or base is model:
        return []
    forwards = (vars(each)["forward"] for each in type(model).__mro__ if "forward" in vars(each))
    found = (getattr(inspect.unwrap(forward), "__globals__", {}) for forward in forwards)
    return [names for names in found if FUNCTION in names]


def _join_ranks(original: Callable) -> Callable:
    @functools.wraps(original)
    def function(gate_logits, *args, **kwargs):
        router_loss = getattr(gate_logits, "router_loss", None)
        if router_loss is None:
            return original(gate_logits, *args, **kwargs)
        arguments = inspect.signature(original).bind(gate_logits, *args, **kwargs).arguments
        return router_loss.compute(original, arguments)

    function.of_one_process = original
    return function


@functools.cache
def _warn_of_own_means(name: str, ranks: int) -> None:
    if world_rank() == 0:
        logger.warning(
            f"{name}.forward gets the router logits of one of {ranks} ranks with other tokens. A mean over them, such "
            "as a z loss, is that over all ranks only where these have equally many tokens, padding included: pad all "
            f"batches to one length, or compute it by a function {FUNCTION} in the module of {name}, which gets the "
            "logits of all ranks."
        )


class RouterLoss:
    """The auxiliary loss of one model. Marks what its base model returns as `router_logits`.

    Args:
        extends: whether the model's class adds to a forward that has the loss, without the function's name: the logits
            of one rank are all that its own code gets.
    """

    def __init__(self, state: ParallelState, model: nn.Module, base: nn.Module, *, extends: bool) -> None:
        self.state = state
        self._has_labels = False
        self._extended = type(model).__name__ if extends else ""
        patch_forward(model, functools.partial(self._model, inspect.signature(model.forward)))
        patch_forward(base, self._base)

    def _model(self, signature: inspect.Signature, original: Callable, *args, **kwargs):
        self._has_labels = signature.bind_partial(*args, **kwargs).arguments.get("labels") is not None
        try:
            return original(*args, **kwargs)
        finally:
            self._has_labels = False

    def _is_of_all(self) -> bool:
        """Return whether all ranks of (data, z) are in the pass that is under way."""
        return torch.is_grad_enabled() or self._has_labels

    def _base(self, original: Callable, *args, **kwargs):
        output = original(*args, **kwargs)
        if not isinstance(output, dict):
            return output
        if self.state.context.stage is not None:  # which may have no router
            output["router_logits"] = RouterLogits(output.get("router_logits") or (), self)
        elif self._is_of_all() and output.get("router_logits"):
            output["router_logits"] = RouterLogits(output["router_logits"], self)
            ranks = self.state.grid_mesh.size(*TOKENS)
            if self._extended and ranks > 1:
                _warn_of_own_means(self._extended, ranks)
        return output

    def compute(self, original: Callable, arguments: dict) -> Tensor:
        """The loss of all (data, z). Collectives: those of `switch_loss`, or an all-gather of the logits."""
        mesh, rows = self.state.grid_mesh, self.state.context.rows
        if rows is not None and not rows.divided:  # the model has whole rows, its routers had this rank's positions
            arguments["attention_mask"] = rows.take_mask(arguments.get("attention_mask"))
        if self.state.context.stage is not None:
            return self._stage_loss(self.state.context.stage, **arguments)
        if mesh.size(*TOKENS) == 1:
            return original(**arguments)
        if _is_of_switch(original):
            return switch_loss(**arguments, mesh=mesh)
        return original(**_gather_tokens(arguments, mesh))

    def _stage_loss(
        self,
        stage: StagePass,
        gate_logits: tuple[Tensor, ...],
        num_experts: int,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """The loss of the routers of all stages in the last one; elsewhere 0, and `stage.routing` is sent on.

        Collectives: as `switch_loss`, in the last stage.
        """
        mesh, size = self.state.grid_mesh, len(empty_routing(num_experts, "meta"))
        if stage.routing is not None and len(stage.routing) != size:
            raise ValueError(
                f"the auxiliary loss is of {num_experts} experts, but the stage before has sent sums of "
                f"{len(stage.routing) // 2}: every layer of a pipeline needs the same number of experts."
            )
        counts, probability = _sums(gate_logits, num_experts, top_k, self._real(stage, attention_mask), mesh.device)
        stage.add_routing(torch.cat([counts.double(), probability.double()]))
        assert stage.routing is not None
        if not stage.last:
            return stage.routing.new_zeros((), dtype=torch.float32)
        sums, probability = stage.routing.split([num_experts + 1, num_experts])
        counts, probability = sums.detach().to(torch.int64), probability.to(torch.float32)
        if self._is_of_all():
            counts, probability = _sum_over_samples(counts, probability, mesh)
        return _switch_loss(counts, probability)

    def _real(self, stage: StagePass, attention_mask: Tensor | None) -> Tensor | None:
        """The mask of a batch whose last rows and columns may only have filled it up; of this rank's positions."""
        tokens, divided = stage.tokens, self.state.context.rows
        if stage.real is None or tokens is None:
            return attention_mask
        length = tokens.seq if divided is None else divided.length
        if stage.real == (tokens.batch, length):
            return attention_mask
        rows, columns = stage.real
        mask = torch.zeros(tokens.batch, length, dtype=torch.int64)
        mask[:rows, :columns] = 1
        mask = mask if divided is None else divided.take(mask)
        return mask if attention_mask is None else mask.to(attention_mask.device) * attention_mask.to(torch.int64)


def switch_loss(
    gate_logits: tuple[Tensor, ...],
    num_experts: int,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
    mesh: GridMesh | None = None,
) -> Tensor:
    """num_experts * sum over experts of (choices per token) * (mean probability), over all layers and real tokens.

    Args:
        gate_logits: [T, E] for each layer.
        num_experts, top_k: E, and experts a token.
        attention_mask: [B, S], 0 where a token is padding.
        mesh: whose (data, z) hold other tokens; None on one process. Two all-reduces.
    """
    counts, probability = _sums(gate_logits, num_experts, top_k, attention_mask, gate_logits[0].device)
    if mesh is not None:
        counts, probability = _sum_over_samples(counts, probability, mesh)
    return _switch_loss(counts, probability)


def _sums(
    gate_logits: tuple[Tensor, ...], num_experts: int, top_k: int, attention_mask: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Sum over layers and real tokens: (choices of each expert, and last the tokens [E + 1], probabilities [E])."""
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    probability = torch.zeros(num_experts, dtype=torch.float32, device=device)
    for logits in gate_logits:
        probabilities = logits.to(device).softmax(dim=-1)
        if attention_mask is None:
            real = torch.ones(len(probabilities), dtype=torch.int64, device=device)
        else:
            real = attention_mask.reshape(-1).to(device, torch.int64)
        chosen = probabilities.topk(top_k, dim=-1).indices.flatten()
        counts.index_add_(0, chosen, real.repeat_interleave(top_k))
        counts[-1] += real.sum()
        probability = probability + (probabilities.float() * real[:, None]).sum(dim=0)
    return counts, probability


def _sum_over_samples(counts: Tensor, probability: Tensor, mesh: GridMesh) -> tuple[Tensor, Tensor]:
    """Return the sums over the samples of all (data, z), in two all-reduces."""
    group = mesh.group(*TOKENS)
    return reduce_(counts, group), all_reduce(scale_gradient(probability, group.size()), group)


def _switch_loss(counts: Tensor, probability: Tensor) -> Tensor:
    """The loss of sums; 0 of no tokens, as of a batch that fills up a step."""
    # Whole numbers while they are summed: float32 counts no further than 2**24.
    chosen, tokens = counts.to(torch.float32).split([len(probability), 1])
    tokens = tokens.clamp(min=1)
    return (chosen / tokens * (probability / tokens)).sum() * len(probability)


@functools.cache
def _is_of_switch(function: Callable) -> bool:
    """Return whether a function computes `switch_loss`, by a probe."""
    if list(inspect.signature(function).parameters) != ARGUMENTS:
        return False
    generator = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(12, 5, generator=generator, device="cpu") for _ in range(2))
    mask = torch.ones(3, 4, dtype=torch.int64, device="cpu")
    mask[1, 2:] = 0
    with torch.no_grad():
        pairs = [
            (function(logits, 5, k, some), switch_loss(logits, 5, k, some)) for k in (1, 3) for some in (None, mask)
        ]
    return all(torch.allclose(theirs, ours, rtol=1e-5) for theirs, ours in pairs)


def _gather_tokens(arguments: dict, mesh: GridMesh) -> dict:
    """Return the arguments of a loss with the logits [..., T, E] of the real tokens of all (data, z), and without a
    mask."""
    group = mesh.group(*TOKENS)
    logits, mask = arguments["gate_logits"], arguments.get("attention_mask")
    if mask is not None:
        real = mask.reshape(-1).bool().nonzero().squeeze(-1).to(logits[0].device)
        logits = tuple(layer.index_select(-2, real) for layer in logits)
    own = torch.tensor([logits[0].shape[-2]], device=logits[0].device)
    sizes = start_all_gather(own, group).wait().flatten().tolist()

    def gather(layer: Tensor) -> Tensor:
        blocks = gather_replicated(pad_dim(scale_gradient(layer, len(sizes)), -2, max(sizes)), group)
        return torch.cat([block.narrow(-2, 0, size) for block, size in zip(blocks, sizes, strict=True)], dim=-2)

    return arguments | {"gate_logits": tuple(map(gather, logits)), "attention_mask": None}
