"""A model's pass through all of its stages.

    schedule            training with labels: micro-batches, forward and backward, in an order of
                        torch.distributed.pipelining; the gradients wait until backward is called on the loss
    one after another   anything else: each stage waits for the one before, and all ranks of pipe have the output.
                        Right for any use of the logits, with gradients too; P times slower than a full pipeline

Stages send the residual stream in its own layout, point to point between equal coordinates: nothing is gathered.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_axonn.compat.pipelining import pipeline_schedule, run_schedule
from hf_axonn.compat.torch import at_end_of_backward, autocast_settings
from hf_axonn.compat.transformers import input_embedding, output_embedding, record_outputs
from hf_axonn.distributed.collectives import broadcast_over, reduce_, swap, waiting
from hf_axonn.distributed.consistency import gather_json
from hf_axonn.distributed.watchdog.progress import PROGRESS
from hf_axonn.distributed.watchdog.watchdog import note_stages
from hf_axonn.engine.dtensors import local
from hf_axonn.engine.gradient_sync import watch_backward
from hf_axonn.engine.matmul3d import finish_deferred
from hf_axonn.engine.parameter_counts import own_counts
from hf_axonn.engine.stage_tensors import Counted
from hf_axonn.engine.state import ParallelState
from hf_axonn.layers.dropout import dropout_names, probability
from hf_axonn.losses.router_aux import carried_experts
from hf_axonn.parallel.pipeline.norms import watch_norms
from hf_axonn.parallel.pipeline.stages import Stage, Stages
from hf_axonn.parallel.pipeline.stand_ins import ElsewhereEmbedding, ElsewhereWrapper
from hf_axonn.parallel.pipeline.transfers import receive, send, share


SHARED = ("loss", "logits", "aux_loss")  # of an output, which all ranks of pipe have


class Pipeline:
    """The pipeline of one model.

    Args:
        state: of the model.
        stages: of this rank.
        model: with the modules of this rank.
    """

    def __init__(self, state: ParallelState, stages: Stages, model: nn.Module) -> None:
        self.state = state
        self.mesh = state.grid_mesh
        self.stages = stages
        self.model = model
        self.group = state.grid_mesh.group("pipe")
        if len(stages.own) > 1:
            record_outputs(stages.decoder)
        self._schedules: dict[tuple[Any, ...], tuple[Any, list[_StageModule]]] = {}
        watch_norms(self)
        PROGRESS.pipe = self.here
        note_stages(
            f"pipe={self.here}, stage {' and '.join(str(stage.index) for stage in stages.own)} of {stages.total}"
        )

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters of this rank's stages, with those of adapters."""
        return list(self.model.parameters())

    def experts_of(self, given: Mapping[str, Any]) -> int:
        """Return the number of experts if a call of the model has the auxiliary loss of routers; 0 if it has none."""
        routers = given.get("output_router_logits")
        if routers is None:
            routers = getattr(self.model.config, "output_router_logits", False)
        return carried_experts(self.model) if routers else 0

    def update_modules(self) -> None:
        """Look at the model once it has its modules, and again when adapters have come or its weights have another
        dtype. Collectives over pipe: those of `gather_texts`.

        Raises:
            ValueError: some stages have parameters to train, and others none; on every rank.
        """
        facts = [
            any(parameter.requires_grad for parameter in self.parameters),
            any(probability(module, *dropout_names(module))() for module in self.model.modules()),
            [stage.index for stage in self.stages.own],
            [hasattr(module, "base_layer") for module in (input_embedding(self.model), output_embedding(self.model))],
            str(cast(nn.Embedding, input_embedding(self.model)).weight.dtype)[6:] if self.here == 0 else "",
        ]
        every = gather_json(facts, self.mesh.device, self.group)
        self.stages.drops = any(drops for _, drops, *_ in every)
        self._adapted_ends(embedding=any(ends[0] for *_, ends, _ in every), head=any(ends[1] for *_, ends, _ in every))
        if dtype := every[0][-1]:  # which a fake world of another rank does not know
            self.stages.take_dtype(getattr(torch, dtype))
        idle = sorted(stage for trains, _, stages, *_ in every for stage in stages if not trains)
        if idle and len(idle) < self.stages.total:
            raise ValueError(
                f"of {self.stages.total} stages over pipe, {', '.join(map(str, idle))} would have nothing to train, "
                "and an optimizer wants parameters: let each stage train some (stage_layers says which layers it "
                "has), or use a grid without pipe."
            )
        self.update_counts()

    def update_counts(self) -> None:
        """Note what other stages have, for numbers that one rank alone returns (`num_parameters`). Collectives over
        pipe: those of `gather_texts`."""
        own = own_counts(self.model)
        every = gather_json(own, self.mesh.device, self.group)
        self.state.set_elsewhere(
            {name: Counted(*fields) for counts in every for name, fields in counts.items() if name not in own}
        )

    def _adapted_ends(self, *, embedding: bool, head: bool) -> None:
        """Give a weight that both ends have the name that an adapter around the embedding gives it on one process, and
        refuse to merge an adapter into the half of it that one stage has."""
        tied = self.stages.tied
        if tied is None or not (embedding or head):
            return
        if embedding and isinstance(tied, ElsewhereEmbedding) and input_embedding(self.model) is tied:
            name = next(name for name, module in self.model.named_modules() if module is tied)
            self.model.set_submodule(name, ElsewhereWrapper(tied))
        for module in (input_embedding(self.model), output_embedding(self.model)):
            if hasattr(module, "base_layer"):
                vars(module)["merge"] = _refuse_merge

    @torch.no_grad()
    def _add_up_tied(self) -> None:
        """Let the first and the last stage have the sum of their gradients of a weight that both have."""
        if self.stages.tied is None or not self.stages.tied.weight.requires_grad:
            return
        parameter = cast(nn.Parameter, self.stages.tied.weight)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        own = local(parameter.grad)
        own.add_(swap(own, self.mesh.size("pipe") - 1 - self.here, self.group))

    def _watch_tied(self, output: Any) -> None:
        """Let a backward pass through an output end with `_add_up_tied`, of what it has brought."""
        if self.stages.tied is None:
            return
        parameter = cast(nn.Parameter, self.stages.tied.weight)
        before: list[Tensor | None] = []

        def begins(_: Tensor) -> None:
            if not before:
                before.append(parameter.grad)
                parameter.grad = None
                at_end_of_backward(ends)

        @torch.no_grad()
        def ends() -> None:
            self._add_up_tied()
            grad = before.pop()
            if grad is not None:
                assert parameter.grad is not None
                local(grad).add_(local(parameter.grad))
                parameter.grad = grad

        for name in SHARED:
            if isinstance(output.get(name), Tensor) and output[name].requires_grad:
                output[name].register_hook(begins)

    def counted_elsewhere(self) -> list[nn.Parameter]:
        """Parameters of this rank's last stage that the first one has, too."""
        if self.stages.tied is None or self.here != self.source:
            return []
        return [cast(nn.Parameter, self.stages.tied.weight)]

    def takes(self, micro_batches: int) -> bool:
        """Return whether the schedule can run this number of micro-batches."""
        pipe = self.mesh.size("pipe")
        if self.state.config.schedule == "gpipe":
            return True
        return micro_batches >= pipe and micro_batches % max(1, micro_batches // pipe) == 0

    @property
    def here(self) -> int:
        """This rank's place on pipe."""
        return self.mesh.index("pipe")

    @property
    def source(self) -> int:
        """The place on pipe of the last stage."""
        return (self.stages.total - 1) % self.mesh.size("pipe")

    def train(
        self, calls: Sequence[Callable[[], Tensor]], batch: int, seq: int, experts: int = 0
    ) -> tuple[Tensor, Gradients]:
        """Run micro-batches forward and backward.

        Args:
            calls: one for each micro-batch, which calls the model with it and returns its loss, or anything in stages
                that have none. All of [batch, seq] tokens; the same number on every rank.
            experts: as `experts_of` says, the same for all.
        Returns:
            (the losses of the micro-batches [m] on all ranks of pipe, the gradients of their sum on this rank).
        Raises:
            ValueError: under autocast in float16.
        Collectives: those of the stages; point to point between neighbours of pipe the residual stream of each
            micro-batch and its gradient, and sums of routers; one all-reduce of the losses over pipe.
        """
        device_type = self.mesh.device.type
        if torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) == torch.float16:
            raise ValueError(
                "autocast in float16 is not possible over a grid with pipe: a pipeline makes its gradients in the "
                "forward pass, before a GradScaler has scaled the loss. Use bfloat16."
            )
        schedule, modules = self._schedule(len(calls), batch, seq, experts)
        autocast = torch.autocast(**autocast_settings(device_type))
        seeds = self.stages.seeds(training=True)
        for module in modules:
            module.calls, module.autocast, module.seeds = calls, autocast, seeds
        parameters = self.parameters
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        # What a layer that runs again has gathered is let go in backward; other kept weights serve all micro-batches.
        context = self.state.context
        kept = contextlib.nullcontext() if self.state.keeps_recomputed else context.gather_cache.through_passes()
        later = context.deferring() if self.state.config.schedule == "zero_bubble" else contextlib.nullcontext()
        try:
            with kept, later, torch.autocast(self.mesh.device.type, enabled=False):
                losses = run_schedule(schedule, len(calls), functools.partial(waiting, "send", self.group))
            PROGRESS.passing = ""
            self._add_up_tied()
            found = [parameter.grad for parameter in parameters]
        except RuntimeError as error:  # torch wraps what a stage raises
            cause = error.__cause__
            if isinstance(cause, Exception) and hasattr(cause, "__notes__"):
                raise cause from None
            raise
        finally:
            for parameter, grad in zip(parameters, before, strict=True):
                parameter.grad = grad
            for module in modules:
                module.calls = ()
        shared = torch.zeros(len(calls), dtype=torch.float64, device=self.mesh.device)
        if losses:
            shared += torch.stack([loss.detach() for loss in losses])
        reduce_(shared, self.group)
        dtype = torch.promote_types(self.stages.dtype, torch.float32)
        return shared.to(dtype), Gradients(parameters, found)

    def _schedule(self, micro_batches: int, batch: int, seq: int, experts: int) -> tuple[Any, list[_StageModule]]:
        key = micro_batches, batch, seq, experts, self.stages.stream_dtype()
        if key not in self._schedules:
            travels = tuple(each.requires_grad_() for each in self.stages.outlines(batch, seq, experts))
            loss = torch.empty((), dtype=torch.promote_types(self.stages.dtype, torch.float32), device="meta")
            modules = [_StageModule(self.stages, stage) for stage in self.stages.own]
            ends = [
                (stage.index, () if stage.first else travels, (loss,) if stage.last else travels)
                for stage in self.stages.own
            ]
            self._schedules[key] = (
                pipeline_schedule(
                    self.state.config.schedule,
                    list(zip(modules, ends, strict=True)),
                    self.stages.total,
                    micro_batches,
                    self.mesh.device,
                    self.group,
                    self._left_for_later,
                    PROGRESS.enters,
                ),
                modules,
            )
        return self._schedules[key]

    def _left_for_later(self) -> Callable[[], None]:
        """Return what computes the weight gradients that the backward pass before has left."""
        return functools.partial(finish_deferred, self.state, self.state.context.take_deferred())

    def one_after_another(self, call: functools.partial[Any]) -> Any:
        """Call the model, one stage after the other. The loss, the logits and the auxiliary loss of routers
        are on all ranks of pipe; of router logits a rank has those of its own layers only, so they are omitted.

        Collectives: those of the stages; point to point between neighbours of pipe the residual stream, and in
        backward its gradient; broadcasts over pipe of loss, logits and the auxiliary loss.
        """
        sent: list[Tensor] = []
        output, seeds = None, self.stages.seeds(training=self.model.training)
        for stage in self.stages.own:
            received: tuple[Tensor, ...] = ()
            if not stage.first:
                outlines = self.stages.outlines(*self._shape_of(call), self.experts_of(call.keywords))
                received = receive(outlines, self.mesh, stage.index - 1)
            PROGRESS.enters("forward", stage.index, 0)
            with self.stages.running(stage, received, seeds(stage, 0)) as passing:
                output = call()
            if not stage.last:
                sent.append(send(self.stages.to_send(passing), self.mesh, stage.index + 1))
        PROGRESS.passing = ""
        return self._share_output(output, sent)

    def from_last(self, value: Tensor | None) -> Tensor | None:
        """Return what the ranks with the last stage have, on all ranks of pipe.

        Collectives over pipe: those of `gather_texts`, and a broadcast.
        """
        facts = self._facts_of_last({"value": value})
        if not facts:
            return None
        return broadcast_over(self._like_last(value, facts["value"]).detach().contiguous(), self.source, self.group)

    def _shape_of(self, call: functools.partial[Any]) -> tuple[int, int]:
        ids = call.keywords["input_ids"]
        return ids.shape[0], ids.shape[1]

    def _share_output(self, output: Any, sent: list[Tensor]) -> Any:
        """Return the output of the last stage, on all ranks of pipe."""
        values, source = {name: output.get(name) for name in SHARED}, self.source
        facts = self._facts_of_last(values)
        for name, value in values.items():
            if name not in facts:
                if self.here != source:
                    values[name] = None
                continue
            value = self._like_last(value, facts[name])
            if facts[name][2]:
                values[name] = share(value, self.group, self.source, sent)
            else:
                values[name] = broadcast_over(value.detach().contiguous(), source, self.group)
        # Of router logits a stage has those of its own layers. What is None is omitted, as Transformers does.
        found = {name: value for name, value in (dict(output) | values).items() if name != "router_logits"}
        output = type(output)(**{name: value for name, value in found.items() if value is not None})
        self._watch_tied(output)
        watch_backward(self.model, self.state, output)
        return output

    def _facts_of_last(self, values: dict[str, Any]) -> dict[str, tuple[list[int], str, bool]]:
        """Shape, dtype and requires_grad of each tensor that the ranks with the last stage have."""
        facts = {
            name: (list(value.shape), str(value.dtype).removeprefix("torch."), value.requires_grad)
            for name, value in values.items()
            if isinstance(value, Tensor)
        }
        every = gather_json(facts, self.mesh.device, self.group)
        return cast("dict[str, tuple[list[int], str, bool]]", every[self.source])

    def _like_last(self, value: Any, facts: tuple[list[int], str, bool]) -> Tensor:
        """The value where the last stage is, elsewhere room for it."""
        shape, dtype, _ = facts
        if self.here != self.source:
            return torch.empty(shape, dtype=getattr(torch, dtype), device=self.mesh.device)
        assert isinstance(value, Tensor)
        return value


class Gradients:
    """The gradients of a step that has run, which wait for backward."""

    def __init__(self, parameters: list[nn.Parameter], values: list[Tensor | None]) -> None:
        self._parameters = parameters
        self._values: list[Tensor | None] | None = values

    def add(self, factor: Tensor) -> None:
        """Add them, times `factor`, to those of the parameters.

        Raises:
            RuntimeError: they were added before.
        """
        values, self._values = self._values, None
        if values is None:
            raise RuntimeError(
                "backward through the loss of a pipeline a second time: its gradients were made in the forward pass, "
                "and have been added. Call the model again."
            )
        with torch.no_grad():
            for parameter, value in zip(self._parameters, values, strict=True):
                if value is not None:
                    local(value).mul_(factor)
                    if parameter.grad is None:
                        parameter.grad = value
                    else:
                        local(parameter.grad).add_(local(value))

    def loss(self, total: Tensor) -> Tensor:
        """A loss of this value, whose backward adds the gradients."""
        anchor = torch.zeros((), device=total.device, requires_grad=True)
        return cast(Tensor, _Loss.apply(anchor, total, self))


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, total: Tensor, gradients: Gradients) -> Tensor:
        ctx.gradients = gradients
        return total.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.gradients.add(grad)
        return None, None, None


class _StageModule(nn.Module):
    """The module that torch's schedules call for a stage: with a micro-batch's number, after what the stage before has
    sent."""

    def __init__(self, stages: Stages, stage: Stage) -> None:
        super().__init__()
        self._stages = stages
        self._stage = stage
        self.calls: Sequence[Callable[[], Tensor]] = ()
        self.autocast: torch.autocast
        self.seeds: Callable[[Stage, int], int | None]

    def forward(self, *received: Tensor, micro_batch: int) -> Tensor | tuple[Tensor, ...]:
        seed = self.seeds(self._stage, micro_batch)
        with self.autocast, self._stages.running(self._stage, received, seed) as passing:
            try:
                loss = self.calls[micro_batch]()
            except Exception as error:
                error.add_note(f"in stage {self._stage.index} of {self._stages.total}, micro-batch {micro_batch}")
                raise
            return loss if self._stage.last else self._stages.to_send(passing)


def _refuse_merge(*_: Any, **__: Any) -> None:
    raise ValueError(
        "an adapter of an embedding or a head that share their weight cannot be merged over a grid with pipe: "
        "the first and the last stage both have the weight, and one of them the adapter. Save the adapters with "
        "save_pretrained, and merge them on one process or on a grid without pipe."
    )
