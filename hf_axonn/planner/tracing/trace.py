"""The planner's numbers of a model that is there: its plan, its parameters, and what it does when it runs.

    found_shape(model)     the FoundShape (planner/model/shapes.py) of a model on the meta device

The shape is taken only where it has as many parameters as the model, so that what it cannot express is refused and not
guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_axonn.architectures.feature_layout import choose_layout
from hf_axonn.architectures.parameter_reads import find_readers
from hf_axonn.architectures.plan import BlockPlan, ShardingPlan, is_inside, plan_for
from hf_axonn.architectures.weight_kinds import weight_kinds
from hf_axonn.compat.transformers import has_causal_lm_loss, input_embedding, output_embedding, text_config
from hf_axonn.engine.linears import is_linear, linear_size
from hf_axonn.layers.moe import expert_weights, is_experts
from hf_axonn.planner.model.shapes import FoundShape
from hf_axonn.planner.model.stack import Block, Call, Experts, Layer, LinearShape, Table, Weight, Whole
from hf_axonn.planner.tracing.layer_probe import TOKENS, Order, Watch, orders
from hf_axonn.topology.weight_kind import WeightKind


def found_shape(model: nn.Module) -> FoundShape:
    """The shape of a model on the meta device, which is unchanged.

    Raises:
        ValueError: the model cannot be run without values, or does what no shape can say.
    """
    embedding, head = input_embedding(model), output_embedding(model)
    plan = plan_for(model)
    kinds = weight_kinds(model, plan)
    if {kinds.get(id(getattr(its, "weight", None))) for its in (embedding, head)} != {WeightKind.VOCABULARY}:
        raise ValueError("its embedding or its head is not a plain one.")
    if not has_causal_lm_loss(model):
        raise ValueError("its loss is not that of Transformers' causal LMs.")
    layers = plan.layers if not plan.reason else _checkpointed(model)
    if not layers:
        raise ValueError("it has no decoder layers.")
    layout = choose_layout(model, plan, y=2, wanted="auto")
    alone = _alone(model, plan, kinds)
    watch = orders(model, plan, layers, alone)
    finder = _Finder(model, plan, kinds, set(layout.norms), watch, alone)
    vocab, hidden = embedding.weight.shape
    shape = FoundShape(
        runs=tuple(_runs([finder.layer(name, watch.layers[name]) for name in layers])),
        hidden=hidden,
        vocab=vocab,
        tied=head.weight is embedding.weight,
        head_bias=head.bias is not None,
        centered=any(kind.centered for kind in layout.norms.values()),
        final=(),
        tables=tuple(finder.tables()),
        features=bool(layout.features),
        ends_whole=plan.final is None or bool(plan.reason),
        ends_narrow=watch.narrow,
        loose=bool(plan.reason),
        outside=finder.outside(watch.outside),
        idle=tuple(finder.idle),
        notes=tuple(_notes(model, plan, alone)),
    )
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if shape.parameters() != count:
        raise ValueError(f"{shape.parameters():,} of its parameters are accounted for, but it has {count:,}.")
    return shape


def _alone(model: nn.Module, plan: ShardingPlan, kinds: dict[int, WeightKind]) -> set[str]:
    """Names of Linears on their own, but for those that make latents."""
    latent = {name for block in plan.blocks for name in block.latent}
    return {
        name
        for name, module in model.named_modules()
        if is_linear(module) and kinds.get(id(module.weight)) == WeightKind.LINEAR and name not in latent
    }


def _notes(model: nn.Module, plan: ShardingPlan, alone: set[str]) -> Iterator[str]:
    """What of a model is reckoned roughly."""
    names = {module: name for name, module in model.named_modules()}
    read = sorted({names[its].rpartition(".")[2] for reader in find_readers(model)[0] for its in reader.read})
    read = [name for name in read if any(its.endswith(f".{name}") for its in alone)]
    if read:
        yield f"its code reads the weights of {', '.join(read)}, which are then gathered whole: that is not reckoned"
    if plan.reason:
        yield (
            "it is cut Linear by Linear: activations are whole on every rank of (x, y), as reckoned, but what its "
            "code does beside its Linears is reckoned as reading and writing their results, and as sending nothing"
        )
    elif plan.full_sequence:
        kinds = sorted({name.rpartition(".")[2] for name in plan.full_sequence})
        yield (
            f"modules that need whole sequences ({', '.join(kinds)}) are reckoned as their Linears, and what else "
            "they do as reading and writing their results, and as sending nothing"
        )


def _checkpointed(model: nn.Module) -> list[str]:
    """Names of the layers that gradient checkpointing runs again, where a plan knows of none."""
    found: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer) and not any(name.startswith(f"{its}.") for its in found):
            found.append(name)
    return found


def _runs(layers: list[Layer]) -> list[tuple[Layer, int]]:
    runs: list[tuple[Layer, int]] = []
    for layer in layers:
        if runs and runs[-1][0] == layer:
            runs[-1] = (layer, runs[-1][1] + 1)
        else:
            runs.append((layer, 1))
    return runs


class _Finder:
    """What is found of a model's layers.

    Attributes:
        idle: elements of parameters that are cut and get no gradient.
        seen: ids of parameters that have been counted: those of several modules count once, and those of head and
            embedding are the vocabulary's.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ShardingPlan,
        kinds: dict[int, WeightKind],
        norms: set[nn.Module],
        watch: Watch,
        alone: set[str],
    ) -> None:
        self.model, self.plan, self.kinds, self.norms, self.watch, self.alone = model, plan, kinds, norms, watch, alone
        self.modules = dict(model.named_modules())
        self.blocks = {block.row: block for block in plan.blocks}
        self.entries = {block.entry for block in plan.blocks} | set(self.blocks)
        self.linears = {id(its.weight): linear_size(its) for its in model.modules() if is_linear(its)}
        self.idle: list[int] = []
        self.within = {name for name in self.modules if is_inside(name, watch.layers)}
        outer = (output_embedding(model), model.get_input_embeddings())
        self.seen = {id(its) for module in outer for its in module.parameters()}

    def layer(self, name: str, order: Order) -> Layer:
        """One decoder layer."""
        parts = self._parts(order)
        names = [path for path in self.modules if path == name or path.startswith(f"{name}.")]
        return replace(self._weights(names), parts=tuple(parts), ends=None if order.saved else len(parts) - 1)

    def tables(self) -> Iterator[Table]:
        """Embeddings beside that of tokens."""
        hidden = self.model.get_input_embeddings().weight.shape[1]
        for name, module in self.modules.items():
            weight = getattr(module, "weight", None)
            if not isinstance(module, nn.Embedding) or not weight.requires_grad or id(weight) in self.seen:
                continue
            self.seen.add(id(weight))
            kind, (rows, cols) = self.kinds.get(id(weight), WeightKind.REPLICATED), weight.shape
            if kind != WeightKind.REPLICATED and id(weight) not in self.watch.trained:
                self.idle.append(weight.numel())
            elif cols != hidden:
                raise ValueError(f"{name} is an embedding of {cols} features.")
            else:
                yield Table(kind, rows, self.watch.ran.get(name) == TOKENS)

    def outside(self, order: Order) -> Layer | None:
        """What has parameters outside of the layers, but for the vocabulary, the head and the table of positions."""
        names = [
            path
            for path, module in self.modules.items()
            if path not in self.within and not isinstance(module, nn.Embedding)
        ]
        # The norms there are not counted: the last one works on whole tokens.
        found = replace(self._weights(names), parts=tuple(self._parts(order)), norms=0)
        return found if found.weights or found.replicated or found.parts else None

    def _weights(self, names: list[str]) -> Layer:
        """The parameters of modules."""
        weights, replicated, gathered, norms, routed = [], [], [], 0, 0
        for path in names:
            module = self.modules[path]
            own = [its for its in module._parameters.values() if its is not None and its.requires_grad]
            own = [its for its in own if id(its) not in self.seen]
            self.seen |= {id(its) for its in own}
            on_stream = not is_inside(path, self.entries) and not is_inside(path, self.plan.full_sequence)
            # Those that may work on features are known; others matter for memory alone.
            norms += module in self.norms if self.norms else on_stream and "Norm" in type(module).__name__
            for parameter in own:
                kind = self.kinds.get(id(parameter), WeightKind.REPLICATED)
                if kind != WeightKind.REPLICATED and id(parameter) not in self.watch.trained:
                    self.idle.append(parameter.numel())
                elif kind == WeightKind.EXPERTS:
                    experts, rows, cols = parameter.shape
                    weights.append(Weight(kind, rows, cols, experts))
                elif kind in (WeightKind.COLUMN, WeightKind.ROW, WeightKind.LINEAR):
                    weights.append(Weight(kind, *self.linears[id(parameter)]))
                elif kind == WeightKind.GATHERED:
                    rows, cols = parameter.shape[0], parameter[0].numel()
                    gathered.append((rows, cols, path in self.within and not self.plan.is_full(path)))
                    weights.append(Weight(kind, rows, cols))
                elif kind != WeightKind.VOCABULARY:
                    replicated.append(parameter.numel())
                if kind in (WeightKind.GATHERED, WeightKind.REPLICATED) and on_stream and parameter.dim() == 2:
                    routed += 0 if is_experts(module) else parameter.shape[0]
        return Layer(
            parts=(),
            norms=norms,
            weights=tuple(weights),
            replicated=tuple(replicated),
            gathered=tuple(gathered),
            routed=routed,
        )

    def _parts(self, order: Order) -> list[Block | Experts | Whole]:
        """Blocks, experts and groups of Linears on their own, in the order in which they ended."""
        parts: list[Block | Experts | Whole] = []
        for around, names in groupby(order.parts, self._around):
            if around is None:
                parts += [self._part(name, order) for name in names]
                continue
            calls = tuple(self._call(name, order) for name in names)
            taken, narrow = order.whole.get(around, (0, True))
            parts.append(Whole(calls=calls, taken=taken, narrow=narrow))
        return parts

    def _around(self, name: str) -> str | None:
        """The module on whole sequences that a Linear on its own lies in, or nothing for another part."""
        if name not in self.alone:
            return None
        return next((whole for whole in self.plan.full_sequence if name == whole or name.startswith(f"{whole}.")), "")

    def _call(self, name: str, order: Order) -> Call:
        backward = (name in self.watch.outputs, name in self.watch.inputs)
        return Call(LinearShape(*self.linears[id(self.modules[name].weight)]), *order.calls[name], backward)

    def _part(self, name: str, order: Order) -> Block | Experts:
        if name in self.blocks:
            return self._block(self.blocks[name])
        # Llama 4's experts are not told who chose them.
        chosen = getattr(text_config(self.model), "num_experts_per_tok", 1)
        return _experts(self.modules[name], order.routing.get(name), chosen)

    def _block(self, plan: BlockPlan) -> Block:
        def linear(name: str) -> LinearShape:
            module = self.modules[name]
            return LinearShape(*linear_size(module), module.bias is not None)

        down = [name for name in plan.latent if is_linear(self.modules[name])]
        return Block(
            columns=tuple(linear(name) for name in plan.columns),
            segments=plan.segments,
            row=linear(plan.row),
            query=plan.query,
            kv=plan.kv,
            head_norms=tuple((index, kind.centered) for kind, index in plan.head_norms.values()),
            down=tuple(linear(name) for name in down),
            rotary=self.modules[plan.entry].qk_rope_head_dim if down else 0,
        )


def _experts(module: nn.Module, routing: tuple[int, str] | None, unless_told: int) -> Experts:
    chosen, dtype = routing or (unless_told, "wide")
    return Experts(
        number=module.num_experts,
        chosen=chosen,
        weights=tuple(LinearShape(*module._parameters[name].shape[1:]) for name in expert_weights(module)),
        routing=dtype,
        sorted=routing is None,
    )
