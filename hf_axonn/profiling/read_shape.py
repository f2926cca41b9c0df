"""Reads the planner's numbers of any model: by its config, or from its modules, built without weights.

    read_shape("DIR")          load_shape of planner/dense.py; a type that is not in its FAMILIES is built
    read_shape("org/model")    the config of a model on the hub

The model is built on the meta device, which takes no memory, and its shape is found there (trace.py).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from hf_axonn.compat.own_code import refuse_own_code
from hf_axonn.planner.dense import FAMILIES, load_shape, shape_from_config
from hf_axonn.planner.shapes import ModelShape


HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def read_shape(model: str) -> ModelShape:
    """Read the shape of a model, by a name of the paper, a config.json or its directory, or its name on the hub.

    Raises:
        ValueError: there is no such model, or a shape cannot describe it; the message says why.
    """
    try:
        return load_shape(model)
    except ValueError:
        path = Path(model)
        if HUB_NAME.fullmatch(model) and not path.exists():
            return shape_of(_hub_config(model), model)
        path = path / "config.json" if path.is_dir() else path
        config = _config(path)
        if config is None or config.get("model_type") in (None, *FAMILIES):
            raise
    return build_shape(config, str(path))


def _hub_config(name: str) -> dict[str, Any]:
    """Read the config.json of a model on the hub, or in its cache."""
    from huggingface_hub import hf_hub_download

    try:
        config = _config(Path(hf_hub_download(name, "config.json")))
    except (OSError, ValueError) as problem:
        raise ValueError(f"{name} is no model: {str(problem).partition(chr(10))[0]}") from None
    if config is None or "model_type" not in config:
        raise ValueError(f"{name} is no model: its config.json has no model_type.")
    return config


def _config(path: Path) -> dict[str, Any] | None:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def shape_of(config: dict[str, Any], name: str = "config", *, allow_untested: bool = False) -> ModelShape:
    """Read the shape of a config's contents, of any type; arguments as of `build_shape`.

    Raises:
        ValueError: as `read_shape`.
    """
    known = config.get("model_type") in FAMILIES
    return shape_from_config(config) if known else build_shape(config, name, allow_untested=allow_untested)


def build_shape(config: dict[str, Any], name: str = "config", *, allow_untested: bool = False) -> ModelShape:
    """Build a model of a config's contents on the meta device, and trace its shape.

    Args:
        name: of the model, for messages.
        allow_untested: as of `plan_for`.
    Raises:
        ValueError: it comes with code of its own, Transformers does not know the type, the model is not sharded by
            blocks, or a shape cannot describe it.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    from hf_axonn.profiling.trace import trace_shape

    kind = config["model_type"]
    if config.get("auto_map") and kind not in CONFIG_MAPPING:
        refuse_own_code(name)
    try:
        settings = AutoConfig.for_model(kind, **{key: value for key, value in config.items() if key != "model_type"})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(settings)
    except (ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise ValueError(f"the config {name}: model_type is {kind!r}, which cannot be built: {error}") from None
    try:
        return trace_shape(model, allow_untested=allow_untested)
    except ValueError as error:
        raise ValueError(
            f"the config {name}: model_type is {kind!r}, which the planner cannot describe: {error} For a rough plan "
            f"take the config of one of {', '.join(FAMILIES)} with like sizes."
        ) from None
