"""Modules beside the experts of a mixture that need no token that travels, in the source of its class.

    residual = hidden_states                          # the input of the mixture
    hidden_states = hidden_states.view(-1, size)      # the input of the experts
    hidden_states = self.experts(hidden_states, ...)
    return hidden_states + self.shared_experts(residual)

    shared = self.shared_expert(hidden_states)        # nothing but other such modules
    shared = self.norm(shared)                        # uses `shared`
    routed = self.experts(hidden_states, ...)         # until here
    return routed + shared

layers/computed_ahead.py computes them while tokens travel: those that are called after the experts before their call,
those that are called before the experts after it. A module after the experts that gets a view which is made in its
call (`self.shared_experts(hidden.view(shape))`) is computed of the input of the mixture, whose view that is where it
is among them (compat/torch.py). The source decides when they are computed, never what they compute.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Sequence

from torch import nn

from hf_axonn.compat.sources import parse_source
from hf_axonn.layers.computed_ahead import Beside


VIEWS = ("view", "reshape")


def find_beside(model: nn.Module, experts: str) -> dict[str, dict[str, Beside]]:
    """Return the modules that can be computed while tokens travel: for the mixture, and for the module around it,
    which calls them with the input of the mixture, by name, the names of such children. No communication.

    Args:
        experts: name of the experts in the model.
    """
    mixture, _, child = experts.rpartition(".")
    around, _, name = mixture.rpartition(".")
    found = {mixture: _children_beside(model.get_submodule(mixture), child)}
    if name:
        outer = _children_beside(model.get_submodule(around), name)
        found[around] = {child: beside for child, beside in outer.items() if beside is Beside.OF_EXPERTS}
    return found


def _children_beside(module: nn.Module, experts: str) -> dict[str, Beside]:
    found: dict[str, Beside] = {}
    for names, beside in _called_beside(type(module).forward, experts):
        children = [module._modules.get(name) for name in names]
        # A norm alone before the experts is not worth it.
        worth = beside is not Beside.BEFORE or any(child and any(True for _ in child.children()) for child in children)
        if worth and None not in children:
            found |= dict.fromkeys(names, beside)
    return found


@functools.cache
def _called_beside(forward, experts: str) -> tuple[tuple[tuple[str, ...], Beside], ...]:
    try:
        tree = parse_source(forward)
    except (OSError, TypeError, SyntaxError):  # made without a source
        return ()
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or len(function.args.args) < 2:
        return ()
    reader = _Reader(function.args.args[1].arg, experts)
    reader.read(function.body)
    return tuple(reader.found)


class _Reader:
    """Reads statements in the order in which they run.

    Attributes:
        found: children that can be computed while tokens travel: each after the experts, and together those before
            them of which one gets the result of the other.

    Args:
        mixture: name of the input.
        experts: name of the child that has the experts.
    """

    def __init__(self, mixture: str, experts: str) -> None:
        self.found: list[tuple[tuple[str, ...], Beside]] = []
        self._experts = experts
        self._of_mixture: object = object()
        self._of_experts: object = None
        self._values: dict[str, object] = {mixture: self._of_mixture}  # which tensor a name stands for
        self._unused: dict[str, tuple[str, ...]] = {}  # names of results that nothing has used -> what made them
        self._used: dict[ast.Name, tuple[str, ...]] = {}  # first uses of such results

    def read(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            if isinstance(statement, ast.If):
                self._read_nodes(statement.test)
                before = dict(self._values)
                self.read(statement.body)
                first, self._values = self._values, before
                self.read(statement.orelse)
                names = first.keys() | self._values.keys()
                one = {name: first.get(name) is self._values.get(name) for name in names}
                self._values = {name: first[name] if one[name] else object() for name in names}
            else:
                self._read_nodes(statement)

    def _read_nodes(self, around: ast.AST) -> None:
        for node in sorted(ast.walk(around), key=_end):
            if isinstance(node, ast.Call):
                self._read_call(node)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self._used[node] = self._unused.pop(node.id, ())
            elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
                self._read_assignment(node)

    def _read_call(self, call: ast.Call) -> None:
        child, value = _name_of_child(call.func), self._values.get(_first_name(call))
        if child == self._experts:
            self._of_experts = value or object()
            self.found += [(names, Beside.BEFORE) for names in self._unused.values()]
        elif child and value in (self._of_mixture, self._of_experts) and self._of_experts and _one_name(call):
            whole = value is self._of_mixture or not isinstance(call.args[0], ast.Name)
            self.found.append(((child,), Beside.OF_MIXTURE if whole else Beside.OF_EXPERTS))

    def _read_assignment(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) -> None:
        given = None if isinstance(node, ast.AugAssign) else node.value
        same = self._values.get(given.id) if isinstance(given, ast.Name) else None
        names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
        self._values |= {name: same or object() for name in names}
        alone = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and len(names) == 1
        if alone and isinstance(given, ast.Call) and _one_name(given) and _name_of_child(given.func):
            before = self._used.get(given.args[0], ()) if isinstance(given.args[0], ast.Name) else ()
            self._unused[names[0]] = (*before, _name_of_child(given.func))


def _end(node: ast.AST) -> tuple[int, int, bool]:
    """Return where a node ends in the source: calls come before the assignment of their result."""
    return getattr(node, "end_lineno", 0), getattr(node, "end_col_offset", 0), isinstance(node, ast.stmt)


def _first_name(call: ast.Call) -> str:
    """Return the first argument of a call if it is a name or a view of one (`name.view(shape)`), else nothing."""
    first = call.args[0] if call.args else None
    if isinstance(first, ast.Call) and isinstance(first.func, ast.Attribute) and first.func.attr in VIEWS:
        first = first.func.value
    return first.id if isinstance(first, ast.Name) else ""


def _one_name(call: ast.Call) -> str:
    """Return the only argument of a call if it is a name or a view of one, else nothing."""
    return "" if call.args[1:] or call.keywords else _first_name(call)


def _name_of_child(function: ast.expr) -> str:
    """Return the name in `self.name`; empty for anything else."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "self":
        return function.attr
    return ""
