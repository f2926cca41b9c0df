"""Modules that a mixture calls after its experts with an input that was there before, in the source of its class.

    residual = hidden_states                          # the input of the mixture
    hidden_states = hidden_states.view(-1, size)      # the input of the experts
    hidden_states = self.experts(hidden_states, ...)
    return hidden_states + self.shared_experts(residual)

They need no token that travels, so layers/computed_ahead.py computes them meanwhile. A module whose input is made in
its call (`self.shared_experts(hidden.view(shape))`), or that is called before the experts, is not among them.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap

from torch import nn


def find_computed_ahead(mixture: nn.Module, experts: str) -> dict[str, bool]:
    """Return the children of a mixture that can be computed while tokens travel: names -> whether the input is that of
    the mixture, else that of the experts.

    Args:
        experts: name of the child that has the experts.
    """
    found = _called_after(type(mixture).forward, experts)
    return {name: of_mixture for name, of_mixture in found if mixture._modules.get(name) is not None}


@functools.cache
def _called_after(forward, experts: str) -> tuple[tuple[str, bool], ...]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):  # made without a source
        return ()
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or len(function.args.args) < 2:
        return ()
    of_mixture, of_experts = object(), None  # which tensor a name stands for
    values = {function.args.args[1].arg: of_mixture}
    found: dict[str, bool] = {}
    for node in sorted(ast.walk(function), key=_end):
        if isinstance(node, ast.Call):
            child = _name_of_child(node.func)
            value = values.get(node.args[0].id) if node.args and isinstance(node.args[0], ast.Name) else None
            if child == experts:
                of_experts = value or object()
            elif child and of_experts and value in (of_mixture, of_experts) and not (node.args[1:] or node.keywords):
                found[child] = value is of_mixture
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
            given = None if isinstance(node, ast.AugAssign) else node.value
            same = values.get(given.id) if isinstance(given, ast.Name) else None
            names = (name for name in ast.walk(node) if isinstance(name, ast.Name))
            values |= {name.id: same or object() for name in names if isinstance(name.ctx, ast.Store)}
    return tuple(found.items())


def _end(node: ast.AST) -> tuple[int, int, bool]:
    """Return where a node ends in the source: calls come before the assignment of their result."""
    return getattr(node, "end_lineno", 0), getattr(node, "end_col_offset", 0), isinstance(node, ast.stmt)


def _name_of_child(function: ast.expr) -> str:
    """Return the name in `self.name`; empty for anything else."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "self":
        return function.attr
    return ""
