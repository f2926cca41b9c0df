"""The common code of sharded layers, and layers that need no neighbours.

    FullLinear   a Linear on its own: full activations in, full activations out (AxoNN's easy API)
    Replicated   parameters that every rank holds: norms, biases, and what nothing is known about
    Reading      a module whose own code uses the parameters of others (architectures/parameter_reads.py)

Layers of attention and MLP blocks are in block.py, embedding and head in vocabulary.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hf_axonn.distributed.collectives import all_reduce, all_reduce_backward
from hf_axonn.distributed.mesh import GridMesh
from hf_axonn.engine.activation_layouts import gather_features, pad_dim, take_features
from hf_axonn.engine.dtensors import replicated_local
from hf_axonn.engine.linears import is_conv1d, linear_size
from hf_axonn.engine.matmul3d import Product, gathered_weight
from hf_axonn.engine.state import ParallelState
from hf_axonn.engine.weight_layout import weight_layout
from hf_axonn.topology.heads import feature_slice
from hf_axonn.topology.weight_kind import WeightKind


class PatchedForward(functools.partial):
    """A forward (or another method) that runs in place of a module's own: `outer(inner, *args, **kwargs)`, under the
    signature of `inner`.

    A subclass of partial, so a call costs no Python frame of its own.

    Attributes:
        outer: the code that runs.
        inner: the method that it may call: the module's own, or an earlier patch.
    """

    outer: Callable
    inner: Callable

    def __new__(cls, outer: Callable, inner: Callable) -> PatchedForward:
        patched = super().__new__(cls, outer, inner)
        functools.update_wrapper(patched, inner)
        patched.outer, patched.inner = outer, inner
        return patched

    def __reduce__(self):
        return PatchedForward, (self.outer, self.inner)

    @property
    def innermost(self) -> Callable:
        """The method that the first patch has found."""
        return self.inner.innermost if isinstance(self.inner, PatchedForward) else self.inner

    def around(self, innermost: Callable) -> PatchedForward:
        """Return the same patches around another method."""
        inner = self.inner.around(innermost) if isinstance(self.inner, PatchedForward) else innermost
        return PatchedForward(self.outer, inner)


def patch_forward(module: nn.Module, forward: Callable, *, method: str = "forward") -> None:
    """Let `forward(original, *args, **kwargs)` run in place of the module's forward, or of another method."""
    setattr(module, method, PatchedForward(forward, getattr(module, method)))


def innermost(module: nn.Module) -> Callable:
    """Return the forward of a module inside of everything that has been patched."""
    forward = module.forward
    return forward.innermost if isinstance(forward, PatchedForward) else forward


def patch_innermost(module: nn.Module, forward: Callable) -> None:
    """Patch the forward of a module inside of everything that has been patched before."""
    patched = PatchedForward(forward, innermost(module))
    outer = module.forward
    module.forward = outer.around(patched) if isinstance(outer, PatchedForward) else patched


@contextlib.contextmanager
def moved_inside(model: nn.Module) -> Iterator[None]:
    """Let a forward that is set on a module in here take the place of the module's own, inside of everything that has
    been patched before."""
    before = {module: module.__dict__.get("forward") for module in model.modules()}
    yield
    for module, outer in before.items():
        if isinstance(outer, PatchedForward) and module.forward is not outer:
            module.forward = outer.around(module.forward)


class replaced:  # noqa: N801 (a context manager without a generator, which every norm of every layer would resume)
    """Give a dictionary of a module these entries inside; afterwards it has what it had, and lacks what it lacked."""

    def __init__(self, entries: MutableMapping[str, Any], values: Mapping[str, Any]) -> None:
        self._entries, self._values = entries, values

    def __enter__(self) -> None:
        self._before = {name: self._entries[name] for name in self._values if name in self._entries}
        self._entries.update(self._values)

    def __exit__(self, *_: object) -> None:
        for name in self._values:
            if name in self._before:
                self._entries[name] = self._before[name]
            else:
                self._entries.pop(name, None)


def split_hidden_states(args: tuple, kwargs: dict) -> tuple[Tensor, tuple, dict]:
    """The hidden states among a call's arguments, which come first or by name, and the other arguments."""
    if args:
        return args[0], args[1:], kwargs
    return kwargs["hidden_states"], (), {name: value for name, value in kwargs.items() if name != "hidden_states"}


def take_slice(parameter: Tensor, size: int, mesh: GridMesh, *axes: str) -> Tensor:
    """This rank's rows of a tensor that every rank holds, zero-padded."""
    own, padded = feature_slice(size, mesh, *axes)
    return pad_dim(parameter[own], 0, padded)


class FullLinear:
    """A Linear on its own. Global and local [..., K] -> [..., N], the same on all ranks of (x, y).

    Collectives: all-gather over z; all-reduce over y and all-gather over x of the output; backward: all-reduce over x
    and all-gather over y of the input's gradient.
    """

    def __init__(self, state: ParallelState, linear: nn.Module) -> None:
        self.state = state
        self.linear = linear
        self.weights = [state.weight_of(linear)]
        self.out_features, self.in_features = linear_size(linear)
        self.layouts = [weight_layout(WeightKind.LINEAR, self.out_features, self.in_features, state.grid_mesh)]
        state.add_layer(linear, self)
        patch_forward(linear, self._forward)

    def _forward(self, _original: Callable, hidden: Tensor) -> Tensor:
        mesh = self.state.grid_mesh
        product = Product(self.state, self.weights, self.layouts)
        (output,) = product.run(all_reduce_backward(take_features(hidden, mesh, "y"), mesh.group("x")))
        output = all_reduce(output, mesh.group("y"))
        output = gather_features(output, self.out_features, mesh, "x")
        if self.linear.bias is not None:
            output = output + replicated_local(self.linear.bias, mesh, ()).to(output.dtype)
        return output.to(hidden.dtype) if self.state.requested_dtype(hidden, self.weights) else output

    def full_weight(self) -> Tensor:
        """The weight as its module has it, for code that every rank of (x, y) repeats. All-gathers over z, y and x;
        backward: reduce-scatter over z."""
        mesh = self.state.grid_mesh
        block = gathered_weight(Product(self.state, self.weights, self.layouts))
        rows = gather_features(block, self.in_features, mesh, "y")
        columns = gather_features(rows.t(), self.out_features, mesh, "x")
        return columns if is_conv1d(self.linear) else columns.t()


class Replicated:
    """A module whose own parameters every rank holds; its forward sees them as plain tensors. No communication.

    `partial_axes`: where the ranks do different work with them (see `replicated_local`). `own`: what takes this rank's
    part of a parameter or buffer, by name, where it does not work with all of it (a number for each head). `added`:
    what adapters do to a parameter, by name.
    """

    def __init__(
        self,
        state: ParallelState,
        module: nn.Module,
        partial_axes: tuple[str, ...],
        *,
        own: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    ) -> None:
        self.state = state
        self.module = module
        self.partial_axes = partial_axes
        self.own = {} if own is None else own
        self.added: dict[str, Callable[[Tensor], Tensor]] = {}
        state.add_layer(module, self)
        patch_forward(module, self._forward)

    def plain(self, name: str) -> Tensor:
        """This rank's part of a parameter, with what adapters do to it, as a plain tensor, in the graph."""
        full = self.full(name)
        full = self.added[name](full) if name in self.added else full
        return self.own[name](full) if name in self.own else full

    def full(self, name: str) -> Tensor:
        """A whole parameter as a plain tensor, in the graph."""
        return replicated_local(self.module._parameters[name], self.state.grid_mesh, self.partial_axes)

    def _forward(self, original: Callable, *args, **kwargs):
        with self.plain_parameters():
            return original(*args, **kwargs)

    def plain_parameters(self) -> replaced:
        """Let code inside that reads the parameters from the module find plain tensors."""
        module, values = self.module, {}
        for name, parameter in module._parameters.items():
            if parameter is not None and name not in module.__dict__:
                values[name] = self.plain(name)
        if self.own:
            values |= {name: self.own[name](module._buffers[name]) for name in self.own if name in module._buffers}
        # An entry of __dict__ is found before nn.Module looks among its parameters.
        return replaced(module.__dict__, values)


class Reading:
    """A method of a module that uses the parameters of modules inside of it: it sees them as plain tensors.

    Collectives: only where it uses a weight that is sharded, which is then gathered in full; `Linear`s that such code
    calls as usual stay as they are.
    """

    def __init__(self, state: ParallelState, reader: Reader) -> None:
        self.state = state
        self.module = reader.module
        self.read = list(reader.read)
        self.places = [
            (parent, name, child)
            for parent in reader.module.modules()
            for name, child in parent._modules.items()
            if child in reader.read
        ]
        patch_forward(reader.module, self._call, method=reader.method)

    def also(self, child: nn.Module, parent: nn.Module, name: str) -> None:
        """One more module whose parameters are used, or one more place where it is found."""
        if child not in self.read:
            self.read.append(child)
        self.places.append((parent, name, child))

    def _call(self, original: Callable, *args, **kwargs):
        with self.plain_parameters():
            return original(*args, **kwargs)

    @contextlib.contextmanager
    def plain_parameters(self) -> Iterator[None]:
        """Let the method find plain tensors inside; full weights are gathered when they are read."""
        layers = self.state.sharded_layers
        with contextlib.ExitStack() as stack:
            for child in self.read:
                if isinstance(layers.get(child), Replicated):
                    stack.enter_context(layers[child].plain_parameters())
            for parent, name, child in self.places:
                if hasattr(layers.get(child), "full_weight") and parent._modules[name] is child:
                    stand_in = _FullWeight(child, layers[child], self.state)
                    stack.enter_context(replaced(parent._modules, {name: stand_in}))
            yield


class _FullWeight:
    """A stand-in for a module while code reads its weight, which is gathered when it is read."""

    def __init__(self, module: nn.Module, layer: FullLinear, state: ParallelState) -> None:
        self._module = module
        self._layer = layer
        self._state = state

    def __getattr__(self, name: str):
        if name == "weight":
            return self._layer.full_weight()
        value = getattr(self._module, name)
        if isinstance(value, nn.Parameter):  # the bias, which every rank holds
            return replicated_local(value, self._state.grid_mesh, ())
        return value

    def __call__(self, *args, **kwargs):
        return self._module(*args, **kwargs)


@dataclass(frozen=True)
class Reader:
    """A method of a module that uses parameters of these modules (of itself only where it is not forward)."""

    module: nn.Module
    method: str
    read: tuple[nn.Module, ...]
