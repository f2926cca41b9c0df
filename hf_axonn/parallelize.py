"""The one visible step: a plain Hugging Face model becomes a sharded one.

    model, report = parallelize(model, grid)           a model in memory, in place
    model = from_pretrained(name, grid=grid)           every rank reads only its own slices from disk

Parameters become DTensors on the storage mesh (y, x, z); modules get the forward of their style. This is the only
place where a model is changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from hf_axonn import compat
from hf_axonn.blocks import Block, Column, Heads, Row
from hf_axonn.collectives import broadcast_
from hf_axonn.config import AxonnConfig
from hf_axonn.decoder import install_causal_lm, install_decoder
from hf_axonn.grid import Grid, GridMesh, grid_mesh
from hf_axonn.layouts import bounds
from hf_axonn.lora import ColumnLora, RowLora, lora_parts
from hf_axonn.loss import ShardedCausalLMLoss
from hf_axonn.plans import Plan, adapted, plan_for
from hf_axonn.report import Entry, Report
from hf_axonn.state import ModelState, is_parallelized, shard_placements
from hf_axonn.styles import FullLinear, Replicated
from hf_axonn.vocabulary import Embedding, Head


def parallelize(model: nn.Module, grid: Grid, *, config: AxonnConfig | None = None) -> tuple[nn.Module, Report]:
    """Shard a model over a grid, in place.

    Every rank must call it with the same model class and grid. The weights of rank 0 are the ones that count, as in
    DistributedDataParallel: they are broadcast while they are cut. A model on the meta device is only prepared, its
    weights are for a loader to read. On a grid of one rank the model is left untouched.

    Args:
        model: a Transformers model, with or without PEFT adapters, or any nn.Module.
        grid: sizes of the axes; their product is the number of ranks.
        config: overlap switches and reduce_dtype; defaults if None.
    Returns:
        (the model itself, a report of what was sharded and what was not and why).
    Raises:
        ValueError: the grid is not the size of the world, the model is sharded already, quantized, or has adapters
            that cannot be sharded.
        RuntimeError: torch.distributed is not initialized.
    Collectives: creation of the process groups and one broadcast of each parameter and buffer, over the world.
    """
    config = config or AxonnConfig(grid=grid)
    if grid.size == 1:
        return model, Report(str(grid), "one rank, the model is untouched")
    inner = compat.without_peft(model)
    if is_parallelized(inner):
        raise ValueError(f"this model is sharded over the grid {inner.axonn.grid} already.")
    if getattr(inner, "is_quantized", False) or getattr(inner, "hf_quantizer", None) is not None:
        raise ValueError("a quantized model cannot be sharded over a grid: load it without quantization_config.")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    device_type = compat.default_device_type() if device.type == "meta" else device.type
    state = ModelState(grid_mesh(grid, device_type), config)
    compat.quiet_redistribution()
    plan = plan_for(inner)
    report = Report(str(grid), plan.reason or f"{len(plan.layers)} decoder layers cut by blocks")
    kinds = _kinds(inner, plan)
    _shard_parameters(inner, kinds, state)
    _install(inner, plan, kinds, state, report)
    state.report = report
    inner.axonn = state
    return model, report


def from_pretrained(
    name_or_path: str, *, grid: Grid, config: AxonnConfig | None = None, auto_class: type | None = None, **kwargs: Any
) -> nn.Module:
    """Load a causal LM so that every rank reads only its own slices of the weights.

    The model is built on the meta device, parallelized, and filled by Transformers' own loader, from an ordinary HF
    directory, the hub, or a sharded checkpoint of any grid. `model.axonn.report` says what was sharded.

    Args:
        name_or_path: what `AutoModelForCausalLM.from_pretrained` takes.
        grid: sizes of the axes. A grid of one rank gives the plain model.
        config: overlap switches and reduce_dtype; defaults if None.
        auto_class: AutoModelForCausalLM if None.
        kwargs: for `from_pretrained`: dtype, attn_implementation, revision and so on.
    Returns:
        The model, in eval mode as from_pretrained leaves it, on this rank's device.
    Raises:
        ValueError: GGUF or quantized weights, device_map or tp_plan among the arguments, or weights are missing in the
            checkpoint (they could only be filled with numbers that differ from rank to rank).
    Collectives: creation of the process groups; those of torch.distributed.checkpoint for a sharded checkpoint.
    """
    from transformers import AutoModelForCausalLM

    auto_class = auto_class or AutoModelForCausalLM
    refused = [
        key for key in ("device_map", "tp_plan", "tp_size", "distributed_config") if kwargs.get(key) is not None
    ]
    if refused:
        raise ValueError(f"{', '.join(refused)}: the grid decides where weights lie; leave {refused[0]} away.")
    if grid.size == 1:
        return auto_class.from_pretrained(name_or_path, **kwargs)
    if kwargs.get("gguf_file") or kwargs.get("quantization_config") is not None:
        raise ValueError(
            "GGUF and quantized weights cannot be read slice by slice: convert them once, with "
            "AutoModelForCausalLM.from_pretrained(..., gguf_file=..., quantization_config=GgufConfig(dequantize=True))"
            ".save_pretrained(DIR) on one process, and load DIR."
        )
    device = torch.device(compat.default_device_type())
    if device.type != "cpu":
        kwargs["device_map"] = {"": torch.get_device_module(device).current_device()}

    def distribute(model: nn.Module) -> None:
        parallelize(model, grid, config=config)

    with compat.distribute_when_built(distribute) as extra:
        model, info = auto_class.from_pretrained(name_or_path, output_loading_info=True, **extra, **kwargs)
    missing = sorted(set(info["missing_keys"]) - set(getattr(model, "all_tied_weights_keys", {})))
    if missing:
        raise ValueError(
            f"{name_or_path} has no weights for {len(missing)} parameters, among them {', '.join(missing[:3])}: load it "
            "with AutoModelForCausalLM.from_pretrained and shard the result with hf_axonn.parallelize."
        )
    return model


def _kinds(model: nn.Module, plan: Plan) -> dict[int, str]:
    """How each weight is cut, by id of the parameter: those not named here are replicated."""
    modules = dict(model.named_modules())
    kinds: dict[int, str] = {}
    for block in plan.blocks:
        for name in block.columns:
            kinds[id(adapted(modules[f"{block.name}.{name}"]).weight)] = "column"
        kinds[id(adapted(modules[f"{block.name}.{block.row}"]).weight)] = "row"
    vocabulary = _vocabulary(model)
    if plan.reason:
        for module in modules.values():
            if type(module) is nn.Linear and module not in vocabulary:
                # A weight that two modules use in different ways can only be held whole.
                kinds[id(module.weight)] = "replicated" if id(module.weight) in kinds else "full"
        embedded = {id(module.weight) for module in modules.values() if isinstance(module, nn.Embedding)}
        kinds = {key: "replicated" if key in embedded else kind for key, kind in kinds.items()}
    for module in vocabulary:
        kinds[id(module.weight)] = "vocabulary"
    return kinds


def _vocabulary(model: nn.Module) -> list[nn.Module]:
    """The token embedding and the head, where they are of the plain kind."""
    if not hasattr(model, "get_input_embeddings"):
        return []
    embedding, head = compat.input_embedding(model), compat.output_embedding(model)
    found = []
    if type(embedding) is nn.Embedding and embedding.max_norm is None and not embedding.sparse:
        if not embedding.scale_grad_by_freq:
            found.append(embedding)
    if type(head) is nn.Linear:
        if embedding in found or head.weight is not getattr(embedding, "weight", None):
            found.append(head)
    return found


def shard_of(tensor: Tensor, placements: list, mesh: GridMesh) -> Tensor:
    """This rank's piece of a full tensor, as DTensor would cut it on the storage mesh (y, x, z). No communication."""
    for axis, placement in zip(("y", "x", "z"), placements, strict=True):
        if isinstance(placement, Shard):
            start, stop = bounds(tensor.shape[placement.dim], mesh.size(axis), mesh.index(axis))
            tensor = tensor.narrow(placement.dim, start, stop - start)
    return tensor


def _shard_parameters(model: nn.Module, kinds: dict[int, str], state: ModelState) -> None:
    """Replace every parameter by a DTensor; a parameter that several modules share stays shared."""
    mesh = state.mesh
    made: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                kind = kinds.get(id(parameter), "replicated")
                placements = shard_placements("column" if kind == "full" else kind)
                full = parameter.detach()
                if not full.is_meta:
                    full = broadcast_(full.contiguous())
                local = shard_of(full, placements, mesh)
                local = local.clone(memory_format=torch.contiguous_format) if kind != "replicated" else local
                sharded = nn.Parameter(
                    DTensor.from_local(
                        local, mesh.storage_mesh, placements, run_check=False, shape=full.shape, stride=_strides(full)
                    ),
                    requires_grad=parameter.requires_grad,
                )
                sharded.__dict__.update(parameter.__dict__)
                made[id(parameter)] = sharded
                kinds[id(sharded)] = kind
                made[id(sharded)] = sharded  # the new id must not be taken for an old one's
            module._parameters[name] = made[id(parameter)]
    for buffer in model.buffers():
        if not buffer.is_meta:
            broadcast_(buffer)


def _strides(full: Tensor) -> tuple[int, ...]:
    return torch.empty(full.shape, device="meta").stride()


def _install(model: nn.Module, plan: Plan, kinds: dict[int, str], state: ModelState, report: Report) -> None:
    """Give every module that has parameters the forward of its style, and write the report."""
    done: set[nn.Module] = set()
    names = {module: name for name, module in model.named_modules()}

    def note(module: nn.Module, style: str, reason: str = "") -> None:
        done.add(module)
        own = sum(parameter.numel() for parameter in module._parameters.values() if parameter is not None)
        report.entries.append(Entry(names[module] or "(root)", style, own, reason))

    vocabulary = _vocabulary(model)
    for module in vocabulary:
        style = Embedding if isinstance(module, nn.Embedding) else Head
        style(state, module)
        note(module, "vocabulary")
    partial_axes: dict[str, tuple[str, ...]] = {}
    for block in plan.blocks:
        heads = Heads.divide(*compat.head_counts(model.config), state.mesh) if block.is_attention else None
        parent = model.get_submodule(block.name)
        columns = [parent.get_submodule(name) for name in block.columns]
        last = parent.get_submodule(block.row)
        column = Column(state, [adapted(layer) for layer in columns], heads)
        row = Row(state, adapted(last), heads)
        for layer in columns:
            for pair in lora_parts(layer) if adapted(layer) is not layer else ():
                ColumnLora(state, column, adapted(layer), pair)
                note(pair[0], "adapter"), note(pair[1], "adapter")
        for pair in lora_parts(last) if adapted(last) is not last else ():
            RowLora(state, row, pair)
            note(pair[0], "adapter"), note(pair[1], "adapter")
        for layer in columns:
            note(adapted(layer), "column", _why(heads, state))
        note(adapted(last), "row", _why(heads, state))
        Block(state, parent, column, row)
        if heads is not None:
            compat.set_kv_groups(parent, 1 if heads.expand else None)
        partial_axes[block.name] = heads.axes if heads else ("x", "y")
    for name in (*plan.layers, *plan.final):
        partial_axes.setdefault(name, ("x", "y"))
    for name, module in model.named_modules():
        if module in done or not any(parameter is not None for parameter in module._parameters.values()):
            continue
        if type(module) is nn.Linear and kinds.get(id(module.weight)) == "full":
            FullLinear(state, module)
            note(module, "full")
            continue
        axes = next((partial_axes[part] for part in _prefixes(name) if part in partial_axes), ())
        Replicated(state, module, axes)
        note(module, "replicated", _why_replicated(module))
    if plan.decoder is not None:
        install_decoder(state, model, plan)
    install_causal_lm(state, model)
    if compat.has_causal_lm_loss(model):
        model.loss_function = ShardedCausalLMLoss(state)


def _prefixes(name: str) -> list[str]:
    """A module's name and those of the modules around it, innermost first."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _why(heads: Heads | None, state: ModelState) -> str:
    """How an attention block is cut where it is not over all of (x, y)."""
    if heads is None or (heads.axes == ("x", "y") and not heads.expand):
        return ""
    sizes = f"x*y = {state.mesh.size('x', 'y')}"
    if heads.axes == ("x", "y"):
        return f"{heads.kv} kv heads are not divisible by {sizes}: k and v are gathered, one kv head a query head"
    if heads.axes:
        return f"{heads.query} heads are divisible by x = {state.mesh.size('x')} but not by {sizes}: repeated over y"
    return f"{heads.query} heads are not divisible by x = {state.mesh.size('x')}: attention on all heads on every rank"


def _why_replicated(module: nn.Module) -> str:
    if isinstance(module, nn.Linear):
        return f"a {type(module).__name__}, whose weight is used in more than one way or that is a class of its own"
    return f"a {type(module).__name__}, whose parameters every rank holds whole"
