"""Modules that use the parameters of other modules by themselves, as a mixer that reads `self.conv1d.weight`.

A parameter that is a DTensor can be used by the module that has it, whose forward is ours. Whoever else uses it
has to be shown a plain tensor, and so has a method other than forward (`self.experts.map(hidden)`). layers/base.py
does that for the readers that are found here, in the source of their classes: in forward and in the methods that it
calls. What only asks for a dtype, a device or a shape needs no care. No communication, no change to the model.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from hf_axonn.compat.bitsandbytes import is_four_bit
from hf_axonn.compat.sources import parse_source
from hf_axonn.layers.base import Reader


# What a DTensor answers by itself.
_ABOUT = {"dtype", "device", "shape", "ndim", "size", "dim", "requires_grad", "is_meta", "numel", "is_floating_point"}


@dataclass(frozen=True)
class _Use:
    """`self.path.name` in the source of a class; `changed` where it is changed in place."""

    path: tuple[str, ...]
    name: str
    changed: bool


def find_readers(model: nn.Module) -> tuple[list[Reader], set[nn.Module]]:
    """Return the readers of a model, and the modules whose parameters they change in place, to be replicated."""
    readers: list[Reader] = []
    changed: set[nn.Module] = set()
    # That of a Linear of 4 bits is replaced as a whole, as other Linears' are.
    todo = [(module, "forward") for module in model.modules() if not is_four_bit(module)]
    done = set(todo)

    def collect(module: nn.Module, method: str, read: dict[nn.Module, None]) -> None:
        for use in _uses(type(module), method):
            for child in _descend(module, use.path):
                if child._parameters.get(use.name) is not None:
                    if child is not module or method != "forward":
                        read[child] = None
                    if use.changed:
                        changed.add(child)
                elif child is not module and _function(type(child), use.name):
                    if isinstance(inspect.getattr_static(type(child), use.name), property):
                        collect(child, use.name, read)
                    elif (child, use.name) not in done:
                        done.add((child, use.name))
                        todo.append((child, use.name))

    while todo:
        module, method = todo.pop()
        # A list of parameters is a module that nobody calls.
        read = dict.fromkeys(
            child for child in module.children() if isinstance(child, (nn.ParameterList, nn.ParameterDict))
        )
        collect(module, method, read)
        if read:
            readers.append(Reader(module, method, tuple(read)))
    return readers, changed


def _descend(module: nn.Module, path: tuple[str, ...]) -> list[nn.Module]:
    """Return the modules that `self.a[...].b` may be, `path` being ("a", "[]", "b")."""
    found = [module]
    for step in path:
        if step == "[]":
            found = [child for parent in found for child in parent.children()]
        else:
            found = [parent._modules[step] for parent in found if parent._modules.get(step) is not None]
    return found


def _function(module_class: type, name: str):
    """Return a function or property of a class that nn.Module does not have."""
    found = inspect.getattr_static(module_class, name, None)
    found = found.fget if isinstance(found, property) else found
    return found if inspect.isfunction(found) and not hasattr(nn.Module, name) else None


@functools.cache
def _uses(module_class: type[nn.Module], method: str) -> tuple[_Use, ...]:
    """Return all uses of things below self, in one method of a class and in those that it calls on self."""
    found: dict[_Use, None] = {}
    todo, done = [method], set()
    while todo:
        name = todo.pop()
        done.add(name)
        for base in module_class.__mro__[: module_class.__mro__.index(nn.Module)]:  # for calls of super()
            for use in _uses_of(vars(base).get(name)):
                found[use] = None
                called = use.name == "forward" or _function(module_class, use.name)
                if not use.path and use.name not in done and called:
                    todo.append(use.name)
    return tuple(found)


@functools.cache
def _uses_of(function) -> tuple[_Use, ...]:
    function = function.fget if isinstance(function, property) else function
    if not inspect.isfunction(function):
        return ()
    try:
        tree = parse_source(function)
    except (OSError, SyntaxError):  # made without a source
        return ()
    return tuple(_uses_in(tree))


def _uses_in(tree: ast.AST) -> Iterator[_Use]:
    around = {id(node.value): node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        attribute = around.get(id(node))
        path = _path(node) if isinstance(node, ast.Attribute) and attribute not in _ABOUT else None
        if path:
            yield _Use(path[:-1], path[-1], attribute == "data")


def _path(node: ast.expr) -> tuple[str, ...] | None:
    """Return ("a", "[]", "b") for `self.a[0].b`, ("b",) for `super().b`; None for what does not begin at self."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
        return ()
    if isinstance(node, ast.Name):
        return () if node.id == "self" else None
    if isinstance(node, (ast.Attribute, ast.Subscript)):
        inner = _path(node.value)
        step = node.attr if isinstance(node, ast.Attribute) else "[]"
        return None if inner is None else (*inner, step)
    return None
