"""Probes the order in which the parts of a decoder layer run, by running the model without values.

A checkpointed layer runs again in backward, but only up to the last tensor that backward needs: where the last part
of a layer is followed by nothing that saves one, the collectives after its last product are not repeated. That is a
matter of the layer's own code, so hooks watch it run, on the meta device. No communication, no memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from hf_axonn.architectures.plan import ShardingPlan
from hf_axonn.compat.transformers import output_embedding
from hf_axonn.engine.linears import linear_size
from hf_axonn.layers.base import split_hidden_states
from hf_axonn.layers.moe import is_experts


ROWS, TOKENS = 2, 8
# Answers to questions about values.
ANSWERS = {Tensor.item: 1, Tensor.__int__: 1, Tensor.__bool__: True, Tensor.__contains__: False}
# Functions, and methods of tensors, whose inputs autocast narrows.
PRODUCTS = set("linear matmul __matmul__ mm addmm bmm baddbmm einsum conv1d scaled_dot_product_attention".split())


@dataclass
class LayerTrace:
    """Trace of one layer, or of what runs outside of all of them.

    Attributes:
        parts: names of rows (each stands for its block), of experts, and of Linears on their own, in the order in
            which they ended.
        saved: whether anything was saved for backward after the last of them.
        chosen: name of experts -> number of choices of a token.
        calls: name of a Linear on its own -> its inputs for each token of the batch, and whether they were bfloat16.
        unsharded: name of a module that gets full sequences -> how many tensors of tokens it is given, and whether its
            output was bfloat16.
    """

    parts: list[str] = field(default_factory=list)
    saved: bool = False
    chosen: dict[str, int] = field(default_factory=dict)
    calls: dict[str, tuple[Fraction, bool]] = field(default_factory=dict)
    unsharded: dict[str, tuple[int, bool]] = field(default_factory=dict)


class _OnMeta(TorchFunctionMode):
    """Adds what the meta device lacks: autocast (inputs of products become bfloat16), and values (every number is 1,
    and one element of a tensor is not zero)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ANSWERS:
            return ANSWERS[func]
        if func in (torch.nonzero, Tensor.nonzero) or (func is torch.where and len(args) == 1):
            found = args[0].new_zeros(1, args[0].dim(), dtype=torch.int64)
            return found if func is not torch.where and not (kwargs or {}).get("as_tuple") else found.unbind(1)
        if getattr(func, "__name__", "") in PRODUCTS:
            args, kwargs = map(_narrow, args), {name: _narrow(value) for name, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _narrow(value: Any) -> Any:
    floats = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(torch.bfloat16) if floats else value


def probe_layers(model: PreTrainedModel, plan: ShardingPlan, layers: list[str], alone: set[str]) -> LayerProbe:
    """Trace each of `layers`, and what runs outside of them.

    Args:
        model: on the meta device; it is unchanged afterwards.
        plan: its plan.
        layers: names of the layers that are watched.
        alone: names of Linears on their own.
    Raises:
        ValueError: the model does not run without values, or runs a block, experts or a Linear more than once.
    """
    probe = LayerProbe(model, plan, layers, alone)
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64, device="meta")
    training, loss = model.training, model.loss_function
    shared: list[bool] = []

    def stand_in(logits: Tensor, *_: Any, **__: Any) -> Tensor:
        shared.append(True)
        return logits.sum()

    try:
        model.loss_function = stand_in
        with probe.watching(), _OnMeta():
            model.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    except ValueError:
        raise
    except Exception as error:  # whatever its code does with values
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"it does not run on the meta device ({why.splitlines()[0]}).") from None
    finally:
        probe.trained |= {id(parameter) for parameter in model.parameters() if parameter.grad is not None}
        model.zero_grad()
        model.loss_function = loss
        model.train(training)
    if not shared:
        raise ValueError("it computes its loss by code of its own.")
    seen = [part for trace in (*probe.layers.values(), probe.outside) for part in trace.parts]
    twice = sorted({part for part in seen if seen.count(part) > 1})
    if twice:
        raise ValueError(f"it runs {twice[0]} more than once.")
    return probe


class LayerProbe:
    """Hooks on everything that a `LayerTrace` reports.

    Attributes:
        layers: what each layer does, by its name.
        outside: what runs outside of them.
        narrow: whether the head's input was bfloat16.
        ran: names of modules that ran, with the number of elements of their first input.
        outputs, inputs: names of Linears on their own whose output, and whose input, backward came to.
        trained: ids of the parameters that got a gradient, or are experts'.
    """

    def __init__(self, model: PreTrainedModel, plan: ShardingPlan, layers: list[str], alone: set[str]) -> None:
        self.model, self.plan, self.alone = model, plan, alone
        self.rows = {block.row for block in plan.blocks}
        self.layers = {name: LayerTrace() for name in layers}
        self.outside = self.current = LayerTrace()
        self.narrow = False
        self.ran: dict[str, int] = {}
        self.outputs: set[str] = set()
        self.inputs: set[str] = set()
        self.trained: set[int] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Hook the modules until the end of the context."""
        handles: list[RemovableHandle] = []
        stubbed: list[nn.Module] = []
        head = output_embedding(self.model)
        try:
            for name, module in self.model.named_modules():
                handles.append(module.register_forward_hook(partial(self._note_run, name)))
                if name in self.layers:
                    handles.append(module.register_forward_pre_hook(partial(self._begin, name)))
                    handles.append(module.register_forward_hook(self._end))
                if name in self.rows:
                    handles.append(module.register_forward_hook(partial(self._end_part, name)))
                if name in self.alone:
                    handles.append(module.register_forward_hook(partial(self._note_call, name)))
                if name in self.plan.full_sequence:
                    handles.append(module.register_forward_hook(partial(self._note_module, name), with_kwargs=True))
                if is_experts(module):
                    stubbed.append(module)
                    self.trained |= {id(parameter) for parameter in module.parameters()}
                    module.forward = partial(self._stub, name)
            if head is not None:
                handles.append(head.register_forward_hook(self._head))
            with torch.autograd.graph.saved_tensors_hooks(self._note_saved, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()
            for module in stubbed:
                del module.forward

    def _note_run(self, name: str, _module: nn.Module, args: tuple[Any, ...], _output: Any) -> None:
        self.ran[name] = args[0].numel() if args and isinstance(args[0], Tensor) else 0

    def _begin(self, name: str, *_: Any) -> None:
        started = any(trace.parts for trace in self.layers.values())
        if self.current is self.outside and self.outside.parts and not started:
            raise ValueError(f"it runs {self.outside.parts[0]} before its layers.")
        self.current = self.layers[name]

    def _end(self, *_: Any) -> None:
        self.current = self.outside

    def _end_part(self, name: str, *_: Any) -> None:
        self.current.parts.append(name)
        self.current.saved = False

    def _head(self, _module: nn.Module, args: tuple[Tensor, ...], _output: Tensor) -> None:
        self.narrow = args[0].dtype == torch.bfloat16

    def _note_saved(self, tensor: Tensor) -> Tensor:
        self.current.saved = True
        return tensor

    def _note_call(self, name: str, linear: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        (given,) = args
        inputs = Fraction(given.numel() // linear_size(linear)[1], ROWS * TOKENS)
        self.current.calls[name] = (inputs, given.dtype == torch.bfloat16)
        for tensor, reached in ((output, self.outputs), (given, self.inputs)):
            if tensor.requires_grad:
                tensor.register_hook(partial(_note, reached, name))
        self._end_part(name)

    def _note_module(
        self, name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        shape = split_hidden_states(args, kwargs)[0].shape
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.shape == shape]
        output = output if isinstance(output, Tensor) else output[0]
        self.current.unsharded[name] = (len(given), output.dtype == torch.bfloat16)

    def _stub(self, name: str, hidden: Tensor, *routing: Tensor, **named: Tensor) -> Tensor:
        """Stand in for experts, which look at values: let hidden states pass, and note how they are routed."""
        routing = (*routing, *named.values())
        if len(routing) == 2:
            self.current.chosen[name] = min(routing, key=Tensor.is_floating_point).shape[-1]
        # Backward comes to the router by the sum.
        output = sum((tensor.sum() for tensor in routing if tensor.is_floating_point()), hidden.clone())
        self._end_part(name)
        return output


def _note(names: set[str], name: str, _grad: Tensor) -> None:
    names.add(name)
