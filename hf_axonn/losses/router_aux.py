"""The auxiliary loss of mixture-of-experts models, over the tokens of all ranks.

Transformers computes it in `load_balancing_loss_func` of the model's file, from the router logits of one process. It
is no mean over tokens but a product of two, so that of all samples is not the mean of those of the ranks. The base
model of a parallelized model therefore marks its router logits, and the function, which is wrapped once, takes marked
ones together with those of the other (data, z):

    the loss of Switch Transformers    the sums over tokens are reduced: two short all-reduces
    anything else                      the logits of all real tokens are gathered, and the function is called on them

Which it is a probe decides: the function is called on random logits, with a mask. Gradients are averaged over (data,
z) afterwards, so each rank's own share is multiplied by their number. Without gradients (evaluation) nothing is
marked: as with every loss there, a rank computes that of its own samples.

Source: Switch Transformers (arXiv 2101.03961), equations 4 to 6.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from hf_axonn.distributed.collectives import all_reduce, gather_replicated, reduce_, start_all_gather
from hf_axonn.distributed.mesh import GridMesh
from hf_axonn.engine.activation_layouts import Tokens, gather_tokens, pad_dim
from hf_axonn.engine.dtensors import scale_gradient
from hf_axonn.engine.state import ParallelState
from hf_axonn.layers.base import patch_forward


FUNCTION = "load_balancing_loss_func"
ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


class RouterLogits(tuple):
    """Router logits [B * S, E] of each layer, of this rank's samples, and the `RouterLoss` of their model."""

    def __new__(cls, logits: Iterable[Tensor], router_loss: RouterLoss):
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
    names = getattr(inspect.unwrap(type(model).forward), "__globals__", {})
    base = getattr(model, getattr(model, "base_model_prefix", None) or "", None)
    if FUNCTION not in names or not isinstance(base, nn.Module) or base is model:
        return
    RouterLoss(state, model, base)
    if not hasattr(names[FUNCTION], "of_one_process"):
        names[FUNCTION] = _of_all_ranks(names[FUNCTION])


def _of_all_ranks(original: Callable) -> Callable:
    @functools.wraps(original)
    def function(gate_logits, *args, **kwargs):
        if not isinstance(gate_logits, RouterLogits):
            return original(gate_logits, *args, **kwargs)
        arguments = inspect.signature(original).bind(gate_logits, *args, **kwargs).arguments
        return gate_logits.router_loss.compute(original, arguments)

    function.of_one_process = original
    return function


class RouterLoss:
    """The auxiliary loss of one model. Marks what its base model returns as `router_logits`."""

    def __init__(self, state: ParallelState, model: nn.Module, base: nn.Module) -> None:
        self.state = state
        self._is_share = False
        patch_forward(model, self._model)
        patch_forward(base, self._base)

    def _model(self, original: Callable, *args, **kwargs):
        self._is_share = kwargs.get("num_items_in_batch") is not None
        return original(*args, **kwargs)

    def _base(self, original: Callable, *args, **kwargs):
        output = original(*args, **kwargs)
        if torch.is_grad_enabled() and isinstance(output, dict) and output.get("router_logits"):
            output["router_logits"] = RouterLogits(output["router_logits"], self)
        return output

    def compute(self, original: Callable, arguments: dict) -> Tensor:
        """The loss of all (data, z), or this rank's share of it where the losses of the ranks are to be added up."""
        mesh = self.state.mesh
        samples = mesh.size("data", "z")
        if samples == 1:
            value = original(**arguments)
        elif _is_of_switch(original):
            value = switch_loss(**arguments, mesh=mesh)
        else:
            value = original(**_of_all_tokens(arguments, mesh))
        return value / samples if self._is_share else value


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
    device = gate_logits[0].device
    real = torch.ones(gate_logits[0].shape[0], dtype=torch.int64, device=device)
    if attention_mask is not None:
        real = attention_mask.reshape(-1).to(device, torch.int64)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)  # of choices, and last of tokens
    probability = 0
    for logits in gate_logits:
        probabilities = logits.to(device).softmax(dim=-1)
        chosen = probabilities.topk(top_k, dim=-1).indices.flatten()
        counts.index_add_(0, chosen, real.repeat_interleave(top_k))
        counts[-1] += real.sum()
        probability = probability + (probabilities.float() * real[:, None]).sum(dim=0)
    if mesh is not None:
        group = mesh.group("data", "z")
        counts = reduce_(counts, group)
        probability = all_reduce(scale_gradient(probability, group.size()), group)
    # Whole numbers while they are summed: float32 counts no further than 2**24.
    chosen, tokens = counts.to(torch.float32).split([num_experts, 1])
    return (chosen / tokens * (probability / tokens)).sum() * num_experts


@functools.cache
def _is_of_switch(function: Callable) -> bool:
    """Whether a function computes `switch_loss`, by a probe."""
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


def _of_all_tokens(arguments: dict, mesh: GridMesh) -> dict:
    """The arguments of a loss with the logits [..., T, E] of the real tokens of all (data, z), and without a mask."""
    group = mesh.group("data", "z")
    logits, mask = arguments["gate_logits"], arguments.get("attention_mask")
    if mask is not None:
        real = mask.reshape(-1).bool().nonzero().squeeze(-1).to(logits[0].device)
        logits = tuple(layer.index_select(-2, real) for layer in logits)
    own = torch.tensor([logits[0].shape[-2]], device=logits[0].device)
    sizes = start_all_gather(own, group).wait().flatten().tolist()

    def gathered(layer: Tensor) -> Tensor:
        blocks = gather_replicated(pad_dim(scale_gradient(layer, len(sizes)), -2, max(sizes)), group)
        return torch.cat([block.narrow(-2, 0, size) for block, size in zip(blocks, sizes, strict=True)], dim=-2)

    return arguments | {"gate_logits": tuple(map(gathered, logits)), "attention_mask": None}
