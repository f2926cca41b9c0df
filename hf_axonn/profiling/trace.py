"""Traces the planner's numbers of a built model: its sharding plan, its parameters, and what runs in which order.

    trace_shape(model)   -> the ModelShape (planner/shapes.py) of a model on the meta device

The shape is taken only where it has as many parameters as the model, so that what it cannot express is refused and not
guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, takewhile
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_axonn.architectures.divided_layers import why_layers_stay
from hf_axonn.architectures.divided_rows import gathering_attentions, latent_features, why_rows_stay_whole
from hf_axonn.architectures.feature_layout import choose_layout
from hf_axonn.architectures.parameter_reads import find_readers
from hf_axonn.architectures.plan import BlockPlan, ShardingPlan, is_inside, plan_for
from hf_axonn.architectures.shared_experts import find_beside
from hf_axonn.architectures.weight_kinds import weight_kinds
from hf_axonn.compat.transformers import has_causal_lm_loss, input_embedding, output_embedding, text_config
from hf_axonn.engine.linears import is_linear, linear_size
from hf_axonn.layers.computed_ahead import Beside
from hf_axonn.layers.moe import expert_weights, is_experts
from hf_axonn.planner.shapes import (
    BlockShape,
    ExpertsShape,
    GatheredShape,
    LayerPart,
    LayerShape,
    LinearCall,
    LinearShape,
    ModelShape,
    TableShape,
    UnshardedModule,
    WeightShape,
)
from hf_axonn.profiling.layer_probe import TOKENS, LayerProbe, LayerTrace, probe_layers
from hf_axonn.topology.weight_kind import WeightKind


def trace_shape(model: PreTrainedModel, *, allow_untested: bool = False) -> ModelShape:
    """Trace the shape of a model on the meta device, which is unchanged.

    Args:
        allow_untested: as of `plan_for`.
    Raises:
        ValueError: the model cannot be run without values, or does what no shape can say.
    """
    embedding, head = input_embedding(model), output_embedding(model)
    plan = plan_for(model, allow_untested=allow_untested)
    kinds = weight_kinds(model, plan)
    table, projection = _weight(embedding), _weight(head)
    both = {kinds.get(id(table)), kinds.get(id(projection))}
    if table is None or projection is None or both != {WeightKind.VOCABULARY}:
        raise ValueError("its embedding or its head is not a plain one.")
    if not has_causal_lm_loss(model):
        raise ValueError("its loss is not that of Transformers' causal LMs.")
    layers = plan.layers if not plan.reason else _find_checkpointed(model)
    if not layers:
        raise ValueError("it has no decoder layers.")
    if plan.copies == "last":
        raise ValueError("its layers pass on several copies of the hidden states, of which a shape has one.")
    layout = choose_layout(model, plan, y=2, requested="auto")
    alone = _alone(model, plan, kinds)
    mixers = any(block.mixer for block in plan.blocks)
    whole = alone or plan.full_sequence or mixers or gathering_attentions(model, plan)
    probe = probe_layers(model, plan, layers, alone)
    finder = _Finder(model, plan, kinds, set(layout.norms), probe, alone)
    vocab, hidden = table.shape
    shape = ModelShape(
        runs=tuple(_runs([finder.layer(name, probe.layers[name]) for name in layers])),
        hidden=hidden,
        vocab=vocab,
        tied=projection is table,
        head_bias=getattr(head, "bias", None) is not None,
        max_positions=getattr(text_config(model), "max_position_embeddings", None) or 0,
        divides_layers=not why_layers_stay(model, plan),
        divides_rows=not (whole or why_rows_stay_whole(model, plan)),
        centered=any(kind.centered for kind in layout.norms.values()),
        final=(),
        tables=tuple(finder.tables(hidden)),
        features=bool(layout.features),
        ends_full=plan.final is None or bool(plan.reason),
        ends_narrow=probe.narrow,
        loose=bool(plan.reason),
        outside=finder.outside(probe.outside),
        idle=tuple(finder.idle),
        notes=tuple(_notes(model, plan, kinds, alone)),
    )
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if shape.parameters() != count:
        raise ValueError(f"{shape.parameters():,} of its parameters are accounted for, but it has {count:,}.")
    return shape


def _weight(module: nn.Module | None) -> Tensor | None:
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, Tensor) else None


def _alone(model: nn.Module, plan: ShardingPlan, kinds: dict[int, WeightKind]) -> set[str]:
    """Names of Linears on their own, but for those that make latents."""
    latent = {name for block in plan.blocks for name in block.latent}
    return {
        name
        for name, module in model.named_modules()
        if is_linear(module) and kinds.get(id(module.weight)) == WeightKind.LINEAR and name not in latent
    }


def _notes(model: nn.Module, plan: ShardingPlan, kinds: dict[int, WeightKind], alone: set[str]) -> Iterator[str]:
    """Yield notes on what a plan only estimates of a model, or leaves out."""
    names = {module: name for name, module in model.named_modules()}
    read = sorted({names[linear].rpartition(".")[2] for reader in find_readers(model)[0] for linear in reader.read})
    read = [name for name in read if any(path.endswith(f".{name}") for path in alone)]
    if read:
        yield f"its code reads the weights of {', '.join(read)}: the plan leaves out that they are gathered for it"
    frozen = [
        name
        for module, name in names.items()
        if isinstance(module, nn.Embedding)
        and not module.weight.requires_grad
        and kinds.get(id(module.weight)) == WeightKind.GATHERED
    ]
    if frozen:
        yield f"its frozen tables ({', '.join(frozen)}) are gathered in each pass: the plan leaves that out"
    if plan.reason:
        yield (
            "it is sharded Linear by Linear, with full activations on every rank of (x, y): the plan counts them, but "
            "takes the rest of its code to read and write the results of its Linears and to send nothing"
        )
        return
    if mixers := sorted({block.entry.rpartition(".")[2] for block in plan.blocks if block.mixer}):
        yield (
            f"mixers ({', '.join(mixers)}) are estimated by their projections: the plan takes the rest of their code "
            "to read and write the results of those"
        )
    if plan.full_sequence:
        modules = sorted({name.rpartition(".")[2] for name in plan.full_sequence})
        yield (
            f"modules that need full sequences ({', '.join(modules)}) are estimated by their Linears: the plan takes "
            "the rest of their code to read and write the results of those and to send nothing"
        )


def _find_checkpointed(model: nn.Module) -> list[str]:
    """Names of the layers that gradient checkpointing runs again, where a plan knows of none."""
    found: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer) and not is_inside(name, found):
            found.append(name)
    return found


def _runs(layers: list[LayerShape]) -> list[tuple[LayerShape, int]]:
    runs: list[tuple[LayerShape, int]] = []
    for layer in layers:
        if runs and runs[-1][0] == layer:
            runs[-1] = (layer, runs[-1][1] + 1)
        else:
            runs.append((layer, 1))
    return runs


class _Finder:
    """Finds the shapes of a model's layers.

    Attributes:
        idle: parameters that are sharded and get no gradient.
        seen: ids of parameters that have been counted: those of several modules count once, and those of head and
            embedding are the vocabulary's.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plan: ShardingPlan,
        kinds: dict[int, WeightKind],
        norms: set[nn.Module],
        probe: LayerProbe,
        alone: set[str],
    ) -> None:
        self.model, self.plan, self.kinds, self.norms, self.probe, self.alone = model, plan, kinds, norms, probe, alone
        self.modules = dict(model.named_modules())
        self.blocks = {block.row: block for block in plan.blocks}
        self.entries = {block.entry for block in plan.blocks} | set(self.blocks)
        self.linears = {id(module.weight): linear_size(module) for module in model.modules() if is_linear(module)}
        self.idle: list[WeightShape] = []
        self.within = {name for name in self.modules if is_inside(name, probe.layers)}
        outer = [module for module in (input_embedding(model), output_embedding(model)) if module is not None]
        self.seen = {id(parameter) for module in outer for parameter in module.parameters()}

    def layer(self, name: str, trace: LayerTrace) -> LayerShape:
        """One decoder layer."""
        parts = self._parts(trace)
        names = [path for path in self.modules if path == name or path.startswith(f"{name}.")]
        return replace(self._weights(names), parts=tuple(parts), ends=None if trace.saved else len(parts) - 1)

    def tables(self, hidden: int) -> Iterator[TableShape]:
        """Embeddings [rows, hidden] beside that of tokens."""
        for name, module in self.modules.items():
            if not isinstance(module, nn.Embedding):
                continue
            weight = module.weight
            if not weight.requires_grad or id(weight) in self.seen:
                continue
            self.seen.add(id(weight))
            kind, (rows, cols) = self.kinds.get(id(weight), WeightKind.REPLICATED), weight.shape
            if kind != WeightKind.REPLICATED and id(weight) not in self.probe.trained:
                self.idle.append(WeightShape(kind, rows, cols))
            elif cols != hidden:
                raise ValueError(f"{name} is an embedding of {cols} features.")
            else:
                yield TableShape(kind, rows, self.probe.ran.get(name) == TOKENS)

    def outside(self, trace: LayerTrace) -> LayerShape | None:
        """Modules with parameters outside of the layers, but for vocabulary, head and the table of positions."""
        names = [
            path
            for path, module in self.modules.items()
            if path not in self.within and not isinstance(module, nn.Embedding)
        ]
        # The norms there are not counted: the last one works on full tokens.
        found = replace(self._weights(names), parts=tuple(self._parts(trace)), norms=0)
        return found if found.weights or found.replicated or found.parts else None

    def _weights(self, names: list[str]) -> LayerShape:
        """The parameters of modules."""
        weights: list[WeightShape] = []
        replicated: list[int] = []
        gathered: list[GatheredShape] = []
        norms = routed = 0
        for path in names:
            module = self.modules[path]
            trained = [parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad]
            own = [parameter for parameter in trained if id(parameter) not in self.seen]
            self.seen |= {id(parameter) for parameter in own}
            on_stream = not is_inside(path, self.entries) and not is_inside(path, self.plan.full_sequence)
            # Those that may work on features are known; others matter for memory alone.
            norms += module in self.norms if self.norms else on_stream and "Norm" in type(module).__name__
            for parameter in own:
                kind = self.kinds.get(id(parameter), WeightKind.REPLICATED)
                if kind == WeightKind.REPLICATED:
                    replicated.append(parameter.numel())
                elif id(parameter) not in self.probe.trained:
                    self.idle.append(self._weight_shape(parameter, kind))
                elif kind != WeightKind.VOCABULARY:
                    weights.append(self._weight_shape(parameter, kind))
                if kind == WeightKind.GATHERED and id(parameter) in self.probe.trained:
                    partial = path in self.within and not self.plan.is_full(path)
                    gathered.append(GatheredShape(*weights[-1][1:3], partial, self._heads_around(path)))
                if kind in (WeightKind.GATHERED, WeightKind.REPLICATED) and on_stream and parameter.dim() == 2:
                    routed += 0 if is_experts(module) else parameter.shape[0]
        return LayerShape(
            parts=(),
            norms=norms,
            weights=tuple(weights),
            replicated=tuple(replicated),
            gathered=tuple(gathered),
            routed=routed,
        )

    def _weight_shape(self, parameter: nn.Parameter, kind: WeightKind) -> WeightShape:
        """Return the shape of a parameter that is sharded."""
        if kind == WeightKind.EXPERTS:
            experts, rows, cols = parameter.shape
            return WeightShape(kind, rows, cols, experts)
        rows, cols = self.linears.get(id(parameter), (parameter.shape[0], parameter[0].numel()))
        return WeightShape(kind, rows, cols)

    def _heads_around(self, path: str) -> int:
        """Query heads of the block that a module lies in; 0 for none."""
        return next((block.query for block in self.plan.blocks if is_inside(path, [block.entry])), 0)

    def _parts(self, trace: LayerTrace) -> list[LayerPart]:
        """Blocks, experts and groups of Linears on their own, in the order in which they ended."""
        parts: list[tuple[str, LayerPart]] = []
        for around, names in groupby(trace.parts, self._around):
            if around is None:
                parts += [(name, self._part(name, trace)) for name in names]
                continue
            calls = tuple(self._call(name, trace) for name in names)
            taken, narrow = trace.unsharded.get(around, (0, True))
            parts.append((around, UnshardedModule(calls=calls, taken=taken, narrow=narrow)))
        order = [name for name, _ in parts]
        return [
            self._with_beside(part, name, order) if isinstance(part, ExpertsShape) else part for name, part in parts
        ]

    def _with_beside(self, experts: ExpertsShape, name: str, order: list[str]) -> ExpertsShape:
        """Return experts that know how many of the parts before and after them are computed while tokens travel."""
        found = {
            f"{around}.{child}": beside
            for around, children in find_beside(self.model, name).items()
            for child, beside in children.items()
        }
        waiting = [child for child, beside in found.items() if beside is Beside.BEFORE]
        ahead = [child for child, beside in found.items() if beside is not Beside.BEFORE]
        place = order.index(name)
        return replace(
            experts,
            waiting=len(list(takewhile(lambda part: is_inside(part, waiting), reversed(order[:place])))),
            ahead=len(list(takewhile(lambda part: is_inside(part, ahead), order[place + 1 :]))),
        )

    def _around(self, name: str) -> str | None:
        """The module on full sequences that a Linear on its own lies in, or nothing for another part."""
        if name not in self.alone:
            return None
        return next((path for path in self.plan.full_sequence if is_inside(name, [path])), "")

    def _call(self, name: str, trace: LayerTrace) -> LinearCall:
        backward = (name in self.probe.outputs, name in self.probe.inputs)
        return LinearCall(LinearShape(*self.linears[id(self.modules[name].weight)]), *trace.calls[name], backward)

    def _part(self, name: str, trace: LayerTrace) -> BlockShape | ExpertsShape:
        if name in self.blocks:
            return self._block(self.blocks[name])
        # Llama 4's experts do not get the choices.
        chosen = getattr(text_config(self.model), "num_experts_per_tok", 1)
        return _experts(self.modules[name], trace.chosen.get(name), chosen)

    def _window(self, module: nn.Module) -> int:
        """Sliding window of attention: its own, or that of all layers where the config has but one; 0 for none."""
        config = text_config(self.model)
        everywhere = None if getattr(config, "layer_types", None) else getattr(config, "sliding_window", None)
        return getattr(module, "sliding_window", everywhere) or 0

    def _block(self, plan: BlockPlan) -> BlockShape:
        def linear(name: str) -> LinearShape:
            module = self.modules[name]
            return LinearShape(*linear_size(module), module.bias is not None)

        inner = plan.mixer.linears if plan.mixer else ()
        down = [name for name in plan.latent if is_linear(self.modules[name])]
        latent = bool(down) and plan.is_attention
        return BlockShape(
            columns=tuple(linear(name) for name in plan.columns),
            segments=plan.segments,
            row=linear(plan.row),
            query=plan.query,
            kv=plan.kv,
            inner_norms=tuple(
                (None if name == plan.row else plan.columns.index(name), kind.centered)
                for kind, name in plan.inner_norms.values()
            ),
            down=tuple(linear(name) for name in down),
            rotary=getattr(self.modules[plan.entry], "qk_rope_head_dim") if latent else 0,  # noqa: B009
            latent=latent_features(self.modules[plan.entry], self.modules[plan.columns[-1]]) if latent else 0,
            window=self._window(self.modules[plan.entry]) if plan.is_attention else 0,
            mixes=plan.mixer is not None,
            inner=tuple(linear(f"{plan.entry}.{name}") for name in inner),
            sums=sum(linear(f"{plan.entry}.{name}").rows for name in (plan.mixer.sums if plan.mixer else ())),
            norm_groups=linear(plan.row).cols // plan.mixer.gate.width if plan.mixer and plan.mixer.gate else 0,
        )


def _experts(module: Any, chosen: int | None, configured: int) -> ExpertsShape:
    return ExpertsShape(
        number=module.num_experts,
        chosen=chosen or configured,
        weights=tuple(LinearShape(*getattr(module, name).shape[1:]) for name in expert_weights(module)),
        sorted=chosen is None,
    )
