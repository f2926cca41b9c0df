"""Attention of Transformers' models: the way to its function, and to the functions that make its masks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


Route = Callable[..., Any]  # called as (attention function, module, query, key, value, mask, **options)
ATTENTION = "ALL_ATTENTION_FUNCTIONS"
ROUTE = "attention_route"  # attribute of a module whose calls are routed
ALIBI = "build_alibi_tensor"
EXPAND = "expand_kv"  # (latent, rotary key), [B, 1, S, features] each -> keys and values of all heads
COUNT = "create_position_ids_from_input_ids"


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


def expands_latents(module: nn.Module) -> bool:
    """Return whether a module's forward makes keys and values by its method `EXPAND`."""
    return EXPAND in _names_in(module) and hasattr(module, EXPAND)


def route_attention(module: nn.Module, route: Route) -> None:
    """Let a module call `route` with the attention function that it has found, in place of that function.

    The module has to be one that `finds_attention_function`. Other modules of its file call what they find.
    """
    names = _forward_of(module).__globals__
    if not isinstance(names[ATTENTION], _Functions):
        names[ATTENTION] = _Functions(names[ATTENTION])
    vars(module)[ROUTE] = torch.compiler.disable(route)  # collectives on both ways, which no graph may hold


def is_stock_sdpa(function: Callable, options: Mapping[str, Any]) -> bool:
    """Return whether an attention function is Transformers' for sdpa, in a call that it does not refuse."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return function is sdpa_attention_forward and options.get("softcap") is None


class _Functions:
    """Stands for Transformers' table of attention functions in one of its files."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def __getitem__(self, name: str) -> Callable:
        return functools.partial(_call, self._table[name])

    def get_interface(self, *args: Any) -> Callable:
        return functools.partial(_call, self._table.get_interface(*args))


def _call(function: Callable, module: nn.Module, *args: Any, **options: Any) -> Any:
    route = getattr(module, ROUTE, None)
    return function(module, *args, **options) if route is None else route(function, module, *args, **options)


def mask_functions(model: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Return where the code of a model finds the functions that make its attention masks: (names of a file, name)."""
    from transformers import masking_utils

    makers = {
        function
        for name, function in vars(masking_utils).items()
        if name.startswith("create_") and "mask" in name and inspect.isfunction(function)
    }
    return [
        (names, name)
        for names in _files_of(model)
        for name, value in names.items()
        if inspect.isfunction(value) and value in makers
    ]


def alibi_functions(model: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Return where the code of a model finds a function that makes ALiBi of an attention mask, as Bloom and Falcon do:
    (names of a file, name)."""
    return [(names, ALIBI) for names in _files_of(model) if inspect.isfunction(names.get(ALIBI))]


def uses_alibi(model: nn.Module) -> bool:
    """Return whether a model makes ALiBi in its forward: attention then knows where tokens stand by that alone, where
    the model takes no positions."""
    return any("alibi" in name for each in _models_in(model) for name in _names_in(each))


def counts_positions(model: nn.Module) -> bool:
    """Return whether the code of a model counts positions where it is given none, as OPT's counts what its mask
    keeps."""
    return any("cumsum" in _names_in(each) for each in (*_models_in(model), *_embeddings(model)))


def count_by_embeddings(model: nn.Module, tokens: Tensor) -> Tensor | None:
    """Count positions by the method of a model's embeddings that does so, as RoBERTa's, from ids [B, S] or embeddings
    [B, S, H]; None where there is no such method."""
    counting = next((each for each in _embeddings(model) if COUNT in _names_in(each)), None)
    if counting is None:
        return None
    count = getattr(counting, COUNT if tokens.dim() == 2 else "create_position_ids_from_inputs_embeds")
    return count(tokens, counting.padding_idx)


def _models_in(model: nn.Module) -> list[nn.Module]:
    from transformers import PreTrainedModel

    return [each for each in model.modules() if isinstance(each, PreTrainedModel)]


def _embeddings(model: nn.Module) -> list[nn.Module]:
    return [each for each in model.modules() if "Embedding" in type(each).__name__]


def _files_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return the global names of each file that has code of a model."""
    files = [getattr(_forward_of(each), "__globals__", {}) for each in _models_in(model)]
    return list({id(names): names for names in files}.values())
