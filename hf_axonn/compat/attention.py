"""Attention of Transformers' models: the way to its function, and to the functions that make its masks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn


Route = Callable[..., Any]  # called as (attention function, module, query, key, value, mask, **options)
ATTENTION = "ALL_ATTENTION_FUNCTIONS"


def _forward_of(module: nn.Module) -> Any:
    return inspect.unwrap(type(module).forward)


def _names_in(module: nn.Module) -> tuple[str, ...]:
    """Names that the code of a module's forward reads: globals, attributes and methods."""
    return getattr(getattr(_forward_of(module), "__code__", None), "co_names", ())


def finds_attention_function(module: nn.Module) -> bool:
    """Return whether a module's forward finds its attention function by name, among those of Transformers."""
    return ATTENTION in _names_in(module) and ATTENTION in _forward_of(module).__globals__


def numbers_positions(module: nn.Module) -> bool:
    """Return whether a module's forward numbers the positions that it is given by itself, from 0 on."""
    return "arange" in _names_in(module)


def route_attention(module: nn.Module, route: Route) -> None:
    """Let a module call `route` with the attention function that it has found, in place of that function.

    The module has to be one that `finds_attention_function`. Other modules of its file call what they find.
    """
    names = _forward_of(module).__globals__
    if not isinstance(names[ATTENTION], _Functions):
        names[ATTENTION] = _Functions(names[ATTENTION])
    names[ATTENTION].routes[module] = route


class _Functions:
    """Stands for Transformers' table of attention functions in one of its files."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self.routes: WeakKeyDictionary[nn.Module, Route] = WeakKeyDictionary()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def __getitem__(self, name: str) -> Callable:
        return functools.partial(self._call, self._table[name])

    def get_interface(self, *args: Any) -> Callable:
        return functools.partial(self._call, self._table.get_interface(*args))

    @torch.compiler.disable  # collectives on both ways, which no graph may hold
    def _call(self, function: Callable, module: nn.Module, *args: Any, **options: Any) -> Any:
        route = self.routes.get(module)
        return function(module, *args, **options) if route is None else route(function, module, *args, **options)


def mask_functions(model: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Return where the code of a model finds the functions that make its attention masks: (names of a file, name)."""
    from transformers import PreTrainedModel, masking_utils

    makers = {
        function
        for name, function in vars(masking_utils).items()
        if name.startswith("create_") and "mask" in name and inspect.isfunction(function)
    }
    files = {
        id(names): names
        for each in model.modules()
        if isinstance(each, PreTrainedModel)
        for names in [getattr(_forward_of(each), "__globals__", {})]
    }
    return [
        (names, name)
        for names in files.values()
        for name, value in names.items()
        if inspect.isfunction(value) and value in makers
    ]


def counts_positions(model: nn.Module) -> bool:
    """Return whether a model that is given no positions counts them from its ids or its mask, as RoBERTa and OPT do,
    and not from 0 to the end of the row."""
    from transformers import PreTrainedModel

    counting = {"create_position_ids_from_input_ids", "cumsum"}
    return any(
        not counting.isdisjoint(_names_in(module))
        for module in model.modules()
        if isinstance(module, PreTrainedModel) or "Embedding" in type(module).__name__
    )
