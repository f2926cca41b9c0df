"""Packed documents of a batch do not see each other in the forward pass of a sharded model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from hf_axonn.engine.documents import separate_documents
from hf_axonn.layers.base import patch_forward


def install_documents(model: nn.Module) -> None:
    """Let a model's forward pass separate the documents of its batch (`separate_documents`)."""
    names = list(inspect.signature(model.forward).parameters)

    def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        separated = separate_documents(model, given)
        return original(*args, **kwargs) if separated is given else original(**separated)

    patch_forward(model, forward)
