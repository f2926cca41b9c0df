"""A model divided into stages: what a rank keeps, and how the model's own forward runs one of its stages.

Stage s lies on the ranks with pipe = s % P; with several stages a rank they go around. The first has the embeddings,
the last one the final norm and the head. A weight that embedding and head share lies on both.

A list of layers has all of its places on every rank, under the numbers of the whole model: those of other stages hold
stand-ins (stand_ins.py). So names in a state dict are those of the whole model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_axonn.architectures.divided_layers import beside_layers, why_layers_stay
from hf_axonn.architectures.plan import ShardingPlan, is_inside
from hf_axonn.compat.transformers import input_embedding, output_embedding, text_config, without_report
from hf_axonn.engine.context import StagePass
from hf_axonn.engine.four_bit import elements_of
from hf_axonn.engine.state import ParallelState
from hf_axonn.layers.dropout import mix
from hf_axonn.layers.moe import is_experts
from hf_axonn.losses.router_aux import empty_routing
from hf_axonn.parallel.pipeline.stand_ins import Arrival, Departure, ElsewhereEmbedding, ElsewhereHead, ElsewhereLayer
from hf_axonn.topology.stages import as_listed, divide_layers


@dataclass
class Stage:
    """One stage of this rank.

    Args:
        index: among all stages.
        layers: numbers of its layers.
        first, last: whether it is the first or the last of all.
        places: the list of layers as the model's forward sees it while the stage runs.
    """

    index: int
    layers: range
    first: bool
    last: bool
    places: list[nn.Module]


@dataclass(eq=False)
class Stages:
    """The stages of this rank.

    Args:
        state: of the model.
        decoder: the module that has the list of layers.
        layers: that list.
        own: this rank's, in order.
        total: the number of all stages.
        hidden: H.
        vocabulary: number of tokens that the embedding knows.
        dtype: of what the embedding gives.
        drops: whether any module of the whole model has dropout.
        tied: the embedding, where this rank has the first or the last stage, which both have its weight.
    """

    state: ParallelState
    decoder: nn.Module
    layers: nn.ModuleList
    own: list[Stage]
    total: int
    hidden: int
    vocabulary: int
    dtype: torch.dtype
    drops: bool = False
    tied: nn.Module | None = None

    def take_dtype(self, dtype: torch.dtype) -> None:
        """Have hidden states of the dtype that the embedding has now."""
        self.dtype = dtype
        for module in self.decoder.modules():
            if isinstance(module, ElsewhereEmbedding):
                module.dtype = dtype

    @contextlib.contextmanager
    def running(self, stage: Stage, received: Sequence[Tensor], seed: int | None = None) -> Iterator[StagePass]:
        """Let the forward of the model inside be that of a stage.

        Args:
            received: what the stage before has sent (`outlines`); nothing in the first.
            seed: of what is dropped inside, one of `seeds`.
        """
        context, modules = self.state.context, self.layers._modules
        before = dict(modules)
        modules.update(zip(before, stage.places, strict=True))
        stream, routing = (*received, None, None)[:2]
        passing = StagePass(stream, last=stage.last, routing=routing)
        try:
            with context.running(passing), context.with_seed(seed, 0):
                yield passing
        finally:
            modules.update(before)

    def seeds(self, *, training: bool) -> Callable[[Stage, int], int | None]:
        """Return a seed for each stage and micro-batch of a pass that begins now.

        All stages draw the same number from their global generators, which stay alike although stages have other
        layers. A model without dropout draws nothing.
        """
        if not (self.drops and training):
            return lambda stage, micro_batch: None
        drawn = int(torch.randint(2**62, (), device="cpu"))
        return lambda stage, micro_batch: mix(drawn, stage.index, micro_batch)

    def stream_dtype(self) -> torch.dtype:
        """The dtype of the residual stream between two stages in a pass that begins now."""
        return self.state.as_residual(torch.empty((), dtype=self.dtype, device=self.state.grid_mesh.device)).dtype

    def outlines(self, batch: int, seq: int, experts: int) -> tuple[Tensor, ...]:
        """Return what travels between two stages in a pass of [batch, seq] tokens that begins now, on the meta device.

        The residual stream, and with the auxiliary loss of this number of experts the sums of their routers.
        """
        stream = torch.empty(self.block_shape(batch, seq), dtype=self.stream_dtype(), device="meta")
        return (stream, empty_routing(experts, "meta")) if experts else (stream,)

    def to_send(self, passing: StagePass) -> tuple[Tensor, ...]:
        """Return what a stage sends to the next, as `outlines` describes it.

        Raises:
            ValueError: it has another dtype than the next stage expects.
        """
        stream = self._check_dtype(passing.handed)
        return (stream,) if passing.routing is None else (stream, passing.routing)

    def _check_dtype(self, handed: Tensor | None) -> Tensor:
        assert handed is not None, "the model's forward has not come to the end of its stage"
        if handed.dtype != self.stream_dtype():
            raise ValueError(
                f"a stage hands on {handed.dtype}, but its embedding gives {self.stream_dtype()}: give all parameters "
                "of the model one dtype."
            )
        return handed.contiguous()

    def block_shape(self, batch: int, seq: int) -> tuple[int, ...]:
        """The local shape of the residual stream of whole rows [B, S, H] between two stages, in training."""
        seq = self.state.grid.positions(seq)
        tokens, mesh = self.state.tokens_of(torch.empty(batch, seq, self.hidden, device="meta")), self.state.grid_mesh
        if not tokens.sharded:
            return batch, seq, self.hidden
        padded, x, y = tokens.padded_count(mesh), mesh.size("x"), mesh.size("y")
        if tokens.features:
            return 1, padded // x, -(-self.hidden // y)
        return 1, padded // (x * y), self.hidden


def divide(model: nn.Module, plan: ShardingPlan, state: ParallelState) -> tuple[ShardingPlan, Stages]:
    """Replace what other stages have by stand-ins, in place; returns the plan of what is left. No communication.

    Raises:
        ValueError: the layers of the model are not known, or fewer than stages; or a module before or after them
            cannot be given to one stage.
    """
    mesh, grid = state.grid_mesh, state.grid_mesh.grid
    count = grid.pipe * state.config.stages_per_rank
    if problem := why_layers_stay(model, plan):
        raise ValueError(
            f"pipe={grid.pipe} divides the decoder layers of a model, but {problem}: use a grid without pipe for "
            f"{type(model).__name__}."
        )
    assert plan.decoder is not None
    listed = state.config.stage_layers
    costs, head_cost = _costs(model, plan)
    ranges = as_listed(listed, len(costs)) if listed else divide_layers(costs, count, last=head_cost)
    decoder = model.get_submodule(plan.decoder) if plan.decoder else model
    layers = model.get_submodule(plan.layers[0].rpartition(".")[0])
    assert isinstance(layers, nn.ModuleList)
    own_stages = range(mesh.index("pipe"), count, grid.pipe)
    if hasattr(model, "tie_weights"):
        cast(Any, model).tie_weights()  # which the loader does later on the meta device
    embedding = cast(nn.Embedding, input_embedding(model))
    hidden, vocabulary, dtype = embedding.embedding_dim, embedding.num_embeddings, embedding.weight.dtype
    head = output_embedding(model)
    tied = head is not None and head.weight is embedding.weight
    before = {name.rpartition(".")[0] for name in model.state_dict()}
    _keep_ends(model, plan, first=0 in own_stages, last=count - 1 in own_stages, tied=tied)
    kept = {index for number in own_stages for index in ranges[number]}
    originals = list(layers)
    for index in range(len(originals)):
        if index not in kept:
            layers[index] = ElsewhereLayer(originals[index])
    after = {name.rpartition(".")[0] for name in model.state_dict()}
    without_report(model, before - after)
    own = []
    for number in own_stages:
        here = ranges[number]
        places = [layer if index in here else ElsewhereLayer(layer) for index, layer in enumerate(originals)]
        if here.start > 0:
            places[here.start - 1] = Arrival(originals[here.start - 1], state)
        if here.stop < len(places):
            places[here.stop] = Departure(originals[here.stop], state)
        own.append(Stage(number, here, first=number == 0, last=number == count - 1, places=places))
    stages = Stages(state, decoder, layers, own, count, hidden=hidden, vocabulary=vocabulary, dtype=dtype)
    if tied and (0 in own_stages or count - 1 in own_stages):
        stages.tied = input_embedding(model)
    return _own_plan(plan, kept, first=0 in own_stages, last=count - 1 in own_stages), stages


def _own_plan(plan: ShardingPlan, kept: set[int], *, first: bool, last: bool) -> ShardingPlan:
    """The plan of the layers of this rank."""
    names = [plan.layers[index] for index in sorted(kept)]
    return replace(
        plan,
        layers=names,
        blocks=[block for block in plan.blocks if is_inside(block.row, names)],
        full_sequence={name: why for name, why in plan.full_sequence.items() if is_inside(name, names)},
        final=plan.final if last or plan.final is None else [],
        begins=first,
        ends=last,
    )


def _costs(model: nn.Module, plan: ShardingPlan) -> tuple[list[float], float]:
    """Return the cost of each layer and of the head, in multiplications a token.

    Attention is not counted: it is alike in all layers of most models.
    """
    chosen = getattr(text_config(model), "num_experts_per_tok", 1)
    layers = [
        sum(_multiplications(module, chosen) for module in model.get_submodule(name).modules()) for name in plan.layers
    ]
    head = cast("nn.Linear | None", output_embedding(model))
    return layers, 0.0 if head is None else float(head.weight.numel())


def _multiplications(module: nn.Module, chosen: int) -> float:
    """Count those of a token with the module's own weights; of experts it uses `chosen`."""
    matrices = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() > 1]
    if is_experts(module):
        return float(sum(chosen * matrix.numel() / len(matrix) for matrix in matrices))
    return float(sum(elements_of(matrix) for matrix in matrices))


def _keep_ends(
    model: nn.Module,
    plan: ShardingPlan,
    *,
    first: bool,
    last: bool,
    tied: bool,
) -> None:
    """Replace what stands before the layers, unless this rank has the first stage, and what comes after them, unless
    it has the last one."""
    names = {module: name for name, module in model.named_modules()}
    head, embedding = cast("nn.Linear | None", output_embedding(model)), input_embedding(model)
    final = {model.get_submodule(name) for name in plan.final or ()}
    for module, after in beside_layers(model, plan):
        ends = after or module in final or "final" in names[module].rpartition(".")[2]  # OPT names it first
        if last if ends else first:
            continue
        if isinstance(module, nn.Embedding):
            shared = tied and last and module is embedding
            model.set_submodule(names[module], ElsewhereEmbedding(module, shared=shared))
        else:
            model.set_submodule(names[module], ElsewhereLayer(module))
    if head is not None and not last:
        model.set_submodule(names[head], ElsewhereHead(head))
