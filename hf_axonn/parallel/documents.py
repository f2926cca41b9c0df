"""Packed documents of a batch do not see each other in the forward pass of a sharded model."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from hf_axonn.compat.messages import get_logger
from hf_axonn.compat.transformers import text_config
from hf_axonn.distributed.collectives import world_rank
from hf_axonn.engine.documents import MASKED_LAYERS, separate_documents
from hf_axonn.layers.attention_chunks import LARGEST
from hf_axonn.layers.base import patch_forward
from hf_axonn.topology.grid import Grid


logger = get_logger(__name__)


def install_documents(model: nn.Module, grid: Grid) -> None:
    """Let a model's forward pass separate the documents of its batch (`separate_documents`), and say in the first one
    how large a mask that takes."""
    names = list(inspect.signature(model.forward).parameters)
    # Over context masks are made for a range at a time (layers/attention_chunks.py).
    done = grid.context > 1

    def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal done
        given = dict(zip(names, args, strict=False)) | kwargs
        separated = separate_documents(model, given)
        if separated is given:
            return original(*args, **kwargs)
        if not done:
            _say_mask(model, *separated["position_ids"].shape)
            done = True
        return original(**separated)

    patch_forward(model, forward)


def count_mask_bytes(model: Any, rows: int, length: int) -> int:
    """Return the bytes of the masks that packed rows need, [rows, 1, length, length] for each kind of attention among
    the layers: bools for sdpa, numbers of the weights' dtype for eager attention. 0 for implementations without."""
    config = text_config(model)
    size = {"sdpa": 1, "eager": model.dtype.itemsize}.get(_implementation(model), 0)
    kinds = MASKED_LAYERS.intersection(getattr(config, "layer_types", None) or ())
    return max(1, len(kinds)) * rows * length * length * size


def describe_large_mask(model: nn.Module, rows: int, length: int) -> str:
    """Return how large the masks of packed rows are, in words; empty up to `LARGEST`."""
    return _describe_mask(model, rows, length) if count_mask_bytes(model, rows, length) > LARGEST else ""


def _describe_mask(model: nn.Module, rows: int, length: int) -> str:
    size = count_mask_bytes(model, rows, length) / 2**20
    return (
        f"{_implementation(model)} attends in {rows} packed row(s) of {length:,} tokens with a mask of {size:,.1f} "
        "MiB; flash_attention_2 needs none"
    )


def _say_mask(model: nn.Module, rows: int, length: int) -> None:
    size = count_mask_bytes(model, rows, length)
    if size and world_rank() == 0:
        level = logging.WARNING if size > LARGEST else logging.INFO
        logger.log(level, f"{_describe_mask(model, rows, length)}.")


def _implementation(model: nn.Module) -> str:
    return getattr(text_config(model), "_attn_implementation", None) or "eager"
