"""The planner's numbers of a model whose type it does not know by name: read from its modules, built without weights.

    read_shape("DIR")      perf.models.load, and for a type that is not in its FAMILIES what is said here

The model is built on the meta device and planned as `parallelize` would; its attention and MLP blocks give the
sizes. The shape is taken only where it has as many parameters as the model, so that what a `ModelShape` cannot express
(mixtures of experts, latent attention, layers that differ) is refused and not guessed.
"""

from __future__ import annotations

import json
from pathlib import Path

from hf_axonn.perf import models
from hf_axonn.perf.shapes import ModelShape


def read_shape(model: str) -> ModelShape:
    """The shape of a model, by a name of the paper, a config.json or its directory.

    Raises:
        ValueError: there is no such model, or a `ModelShape` cannot describe it; the message says why.
    """
    try:
        return models.load(model)
    except ValueError:
        path = Path(model)
        path = path / "config.json" if path.is_dir() else path
        config = _config(path)
        if config is None or config.get("model_type") in (None, *models.FAMILIES):
            raise
    return built_shape(config, str(path))


def _config(path: Path) -> dict | None:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def built_shape(config: dict, name: str = "config") -> ModelShape:
    """The shape of a config's contents, of a model that Transformers can build.

    Raises:
        ValueError: Transformers does not know the type, the model is not cut by blocks, or a `ModelShape` cannot
            describe it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = config["model_type"]
    try:
        settings = AutoConfig.for_model(kind, **{key: its for key, its in config.items() if key != "model_type"})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(settings)
    except (ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise ValueError(f"the config {name}: model_type is {kind!r}, which cannot be built: {error}") from None
    try:
        return _shape(model)
    except ValueError as error:
        raise ValueError(
            f"the config {name}: model_type is {kind!r}, which the planner cannot describe: {error} For a rough plan "
            f"take the config of one of {', '.join(models.FAMILIES)} with like sizes."
        ) from None


def _shape(model) -> ModelShape:
    from torch import nn

    from hf_axonn import compat
    from hf_axonn.plans import plan_for
    from hf_axonn.state import linear_size

    plan = plan_for(model)
    if plan.reason or plan.whole or any(block.latent for block in plan.blocks):
        raise ValueError(f"it is not cut into attention and MLP blocks ({plan.reason or 'some modules stay whole'}).")
    if any(block.head_norms for block in plan.blocks):
        raise ValueError("its norms of q and k span all heads, and what travels for them is not reckoned.")
    modules = dict(model.named_modules())

    def sizes(block) -> tuple:
        linears = [modules[name] for name in (*block.columns, block.row)]
        return tuple((linear_size(its), its.bias is not None) for its in linears), block.query, block.kv

    attention = {sizes(block) for block in plan.blocks if block.query}
    mlp = {sizes(block) for block in plan.blocks if not block.query}
    layers = len(plan.layers)
    if len(attention) != 1 or len(mlp) != 1 or len(plan.blocks) != 2 * layers:
        raise ValueError("its layers are not one attention and one MLP each, all alike.")
    (((*columns, row), heads, kv),) = attention
    (((*inner, down), _, _),) = mlp
    (hidden, width), intermediate = row[0], down[0][1]
    gated = sum(size for (size, _), _ in inner) == 2 * intermediate
    own = [its for name, its in modules.items() if name.startswith(f"{plan.layers[0]}.")]
    norms = [its for its in own if "Norm" in type(its).__name__ and getattr(its, "weight", None) is not None]
    on_stream = [its for its in norms if its.weight.numel() == hidden]
    if not on_stream:
        raise ValueError("its norms have no weights.")
    embedding, head = model.get_input_embeddings(), compat.output_embedding(model)
    tables = [its for its in modules.values() if isinstance(its, nn.Embedding) and its is not embedding]
    shape = ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv,
        head_dim=width // heads,
        intermediate=intermediate,
        vocab=embedding.weight.shape[0],
        gated=gated,
        tied=head.weight is embedding.weight,
        qkv_bias=columns[0][1],
        out_bias=row[1],
        mlp_bias=down[1],
        head_bias=head.bias is not None,
        packed_qkv=len(columns) == 1,
        packed_mlp=gated and len(inner) == 1,
        layer_norm=getattr(on_stream[0], "bias", None) is not None,
        norms_per_layer=len(on_stream),
        qk_norm=any(its.weight.numel() == width // heads != hidden for its in norms),
        positions=sum(its.weight.shape[0] for its in tables if its.weight.shape[1] == hidden),
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    if shape.parameters() != count:
        raise ValueError(f"its Linears and norms come to {shape.parameters():,} parameters, but it has {count:,}.")
    return shape
