"""The one visible step: a plain Hugging Face model becomes a sharded one.

    model, report = parallelize(model, grid)           a model in memory, in place
    model = from_pretrained(name, grid=grid)           every rank reads only its own slices from disk

Parameters become DTensors on the storage mesh (y, x, z); modules get the forward of their sharded
layer. This is the only place where a model is changed.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hf_axonn.architectures.expert_choice import ExpertChoice, choose_experts
from hf_axonn.architectures.feature_layout import LayoutChoice, choose_layout
from hf_axonn.architectures.plan import ShardingPlan, plan_for
from hf_axonn.architectures.weight_kinds import weight_kinds
from hf_axonn.checkpoint.full_state import install_save_pretrained
from hf_axonn.checkpoint.hf_loader import let_ranks_read_alone
from hf_axonn.compat.dtensor_numbers import draw_alike, meet_plain_tensors, total_norm_by
from hf_axonn.compat.dtensor_parts import write_to_parts
from hf_axonn.compat.messages import get_logger
from hf_axonn.compat.peft import without_peft, wrapped_modules
from hf_axonn.compat.torch import (
    backend_of,
    default_device_type,
    quiet_redistribution,
    read_whole_values,
    set_shards_by_data,
)
from hf_axonn.compat.torch_checkpoint import refuse_saves_by_threads_on_default_group, refuse_whole_states
from hf_axonn.compat.versions import check_versions
from hf_axonn.config import AxonnConfig
from hf_axonn.distributed.collectives import broadcast_all, world_rank
from hf_axonn.distributed.consistency import assert_same_on_all_ranks, model_facts, versions
from hf_axonn.distributed.mesh import HEADS, grid_mesh
from hf_axonn.distributed.watchdog.watchdog import watch
from hf_axonn.engine.dtensors import shard_like, take_shards, whole_number
from hf_axonn.engine.loss_scaling import check_gradients_together
from hf_axonn.engine.optimizer_steps import step_on_shards
from hf_axonn.engine.parameter_counts import get_memory_footprint, num_parameters
from hf_axonn.engine.report import Report
from hf_axonn.engine.state import is_parallelized, parallel_state
from hf_axonn.losses.router_aux import check_routers
from hf_axonn.parallel.adapters.checks import check_adapters, check_plan
from hf_axonn.parallel.adapters.install import install_adapters, without_wrappers
from hf_axonn.parallel.adapters.peft_hooks import watch_peft
from hf_axonn.parallel.batch_check import install_batch_check
from hf_axonn.parallel.compiled import compile_regions
from hf_axonn.parallel.context_parallel import RowsChoice, choose_rows, install_context
from hf_axonn.parallel.documents import install_documents
from hf_axonn.parallel.four_bit import check_four_bit, four_bit_modules, pack_four_bit, refuse_quantized
from hf_axonn.parallel.images import install_images
from hf_axonn.parallel.install import install_layers, shard_parameters
from hf_axonn.parallel.pipeline.forward import install_pipeline
from hf_axonn.parallel.pipeline.norms import norm_of_all
from hf_axonn.parallel.pipeline.pipeline import Pipeline
from hf_axonn.parallel.pipeline.stages import divide
from hf_axonn.parallel.sharded_model import ShardedModel
from hf_axonn.topology.experts import DISPATCH
from hf_axonn.topology.grid import Grid


logger = get_logger(__name__)

KERNELS = (
    "use_kernels=True and kernel_config replace the forwards of norms, MLPs and experts by kernels that read whole "
    "weights and activations, which no rank of a grid has: omit them. attn_implementation may be a kernel."
)


def parallelize(
    model: nn.Module, grid: Grid | None = None, *, config: AxonnConfig | None = None
) -> tuple[nn.Module, Report]:
    """Shard a model over a grid, in place.

    Every rank must call it with the same model class and grid. The weights of rank 0 are the ones that count, as in
    DistributedDataParallel: they are broadcast before they are sharded. A model on the meta device is only prepared,
    its weights are for a loader to read. On a grid of one rank the model is left untouched.

    Args:
        model: a Transformers model, with or without PEFT adapters, or any nn.Module.
        grid: sizes of the axes; their product is the number of ranks. None takes those of `config`, or of the launch
            file.
        config: overlap switches and reduce_dtype, beside those of the launch file.
    Returns:
        (the model itself, a report of what was sharded and what was not and why).
    Raises:
        ValueError: there is no grid, or the launch file has another (`AxonnConfig.with_launch`); the grid is not the
            size of the world, the model is sharded already, quantized otherwise than in
            bitsandbytes' 4 bits, or has adapters or 4-bit weights that cannot be sharded; ranks have other models,
            settings or versions; a library has a release that is not proven (`check_versions`); the process group has
            no backend for the device that the model is on, or the model is on the CPU in a world that trains on GPUs.
        RuntimeError: torch.distributed is not initialized.
    Collectives: those of `assert_same_on_all_ranks`, creation of the process groups, and `broadcast_all` of
        parameters and buffers.
    """
    config = join_settings("parallelize", grid, config)
    if config.grid.size == 1:
        return model, Report(str(config.grid), "one rank, the model is untouched")
    inner = without_peft(model)
    device_type = _check(model, inner, config)
    state = _apply(inner, _plan(inner, config), config, device_type)
    for either in (inner, model):
        vars(either)["compile"] = functools.partial(compile_regions, state, inner)
    return model, state.report


def _check(model: nn.Module, inner: nn.Module, config: AxonnConfig) -> str:
    """First phase: refuse what cannot be sharded, whatever the plan. Changes nothing; returns the type of the device.

    Args:
        inner: the model without PEFT's wrapper around it.
    Raises, collectives: as `parallelize`; of collectives those of `assert_same_on_all_ranks`.
    """
    check_versions()
    if is_parallelized(inner):
        raise ValueError(f"this model is sharded over the grid {inner.axonn.grid} already.")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError(
            "the parameters of this model are DTensors already, as of from_pretrained(tp_plan=...), FSDP or a part of "
            "a model on a grid: load the model without tp_plan, the grid shards it."
        )
    refuse_quantized(inner)
    if getattr(inner, "use_kernels", False):
        raise ValueError(KERNELS)
    check_adapters(model)
    if config.grid.pipe > 1:
        _check_pipe(model, config.grid)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    device_type = default_device_type() if device.type == "meta" else device.type
    if dist.is_initialized():
        _check_device(device_type, backend_of(device=torch.device(device_type)))
    watch()
    facts = config.to_facts() | versions() | model_facts(model)
    assert_same_on_all_ranks(facts, device_type, "Start every rank with the same program and settings.")
    return device_type


class _Decisions(NamedTuple):
    """All that the second phase decides and the third one does."""

    plan: ShardingPlan
    layout: LayoutChoice
    experts: ExpertChoice
    rows: RowsChoice


def _plan(model: nn.Module, config: AxonnConfig) -> _Decisions:
    """Second phase: decide how the model is sharded, and refuse what does not fit. Changes and communicates nothing.

    Raises:
        ValueError: one of `check_plan`, `choose_rows`, `check_four_bit`, `choose_experts` and `choose_layout`;
            residual_dtype of a model whose layers are not known.
    """
    with without_wrappers(model):  # adapters follow what is done to the model that they adapt
        plan = plan_for(model, divided_rows=config.grid.context > 1, allow_untested=config.allow_untested)
    if plan.untested and world_rank() == 0:
        logger.warning(
            f"nobody has compared {type(model).__name__} on a grid with one process: with allow_untested it is "
            "sharded by general rules all the same. Compare it, small, before you train: hf-axonn survey MODEL, or "
            "hf-axonn certify --config FILE --model DIR with this launch file."
        )
    check_plan(model, plan)
    adapted = {inner for _, _, inner in wrapped_modules(model)}
    with without_wrappers(model):
        rows = choose_rows(model, plan, config, adapted)
    if config.residual_dtype != "model" and plan.decoder is None:
        raise ValueError(
            f"residual_dtype is {config.residual_dtype}, but {type(model).__name__} is sharded Linear by Linear, and "
            f"its layers are not known ({plan.reason}): omit residual_dtype."
        )
    with without_wrappers(model):
        if any(True for _ in four_bit_modules(model)):
            check_four_bit(model, weight_kinds(model, plan), config.grid)
        experts = choose_experts(model, config.grid, requested=config.experts)
        layout = choose_layout(model, plan, y=config.grid.y, requested=config.layout)
    idle = config.idle_settings()
    if config.experts != "auto" and not experts.reason:
        idle.append(f"experts={config.experts} (the model has none)")
    if idle and world_rank() == 0:
        logger.warning(f"settings without effect on the grid {config.grid}: {', '.join(idle)}. Leave them out.")
    return _Decisions(plan, layout, experts, rows)


def _apply(model: nn.Module, decided: _Decisions, config: AxonnConfig, device_type: str) -> ShardedModel:
    """Third phase: change the model. Collectives: as `parallelize`, but for those of `_check`."""
    _prepare_process()
    mesh = grid_mesh(config.grid, device_type)
    plan, layout, experts, rows = decided
    if experts.moves:
        mesh.open_group(DISPATCH)
    if rows.exchanging:
        mesh.open_group(HEADS)
    second_scales = pack_four_bit(model)
    broadcast_all([*model.parameters(), *model.buffers(), *second_scales])
    before = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
    report = Report(str(config.grid), plan.summary(), layout.reason, rows.reason, experts.reason)
    state = ShardedModel(
        mesh,
        config,
        model,
        report=report,
        features=layout.features,
        copies_first=plan.copies == "first",
        names=list(before),
    )
    with without_wrappers(model):
        _shard(model, decided, state)
    model.axonn = state
    after = set(model.parameters())
    for parameter in [reference() for reference in before.values()]:
        if parameter is not None and parameter not in after and not hasattr(parameter, "sharded_as"):
            cast(Any, parameter).of_other_stage = True  # for an optimizer that has it already
    install_adapters(state, model)
    if state.pipeline is not None:
        state.pipeline.update_modules()
    _replace_methods(model, state)
    return state


def _prepare_process() -> None:
    """Let torch, optimizers and PEFT of this process meet sharded parameters. Changes no model."""
    quiet_redistribution()
    read_whole_values()
    set_shards_by_data(shard_like)
    write_to_parts(shard_like)
    draw_alike(shard_like)
    refuse_saves_by_threads_on_default_group()
    meet_plain_tensors(whole_number)
    total_norm_by(norm_of_all)
    check_gradients_together()
    step_on_shards()
    watch_peft()


def _shard(model: nn.Module, decided: _Decisions, state: ShardedModel) -> None:
    """Divide the model into stages, shard its parameters and install the sharded layers. No communication."""
    plan, layout, experts, rows = decided
    kinds, stages = weight_kinds(model, plan, experts=experts.kind), None
    if state.grid.pipe > 1:
        plan, stages = divide(model, plan, state)
        layout = layout.restrict_to(model)
        kinds = {id(each): kinds[id(each)] for each in model.parameters() if id(each) in kinds}
    shard_parameters(model, kinds, state)
    install_layers(model, plan, kinds, state, layout, rows.exchanging)
    if state.grid.context > 1:
        install_context(state, model, plan, rows)
    install_documents(model, state.grid)
    if stages is not None:
        pipeline = Pipeline(state, stages, model)
        state.set_pipeline(pipeline)
        install_pipeline(model, pipeline)
        refuse_whole_states(_has_stages)
    install_images(state, model)
    install_batch_check(state.check_batch, state.context)


def _replace_methods(model: nn.Module, state: ShardedModel) -> None:
    """Replace methods of the model that would see shards: loading, saving, counting, resizing, serving."""
    model.register_load_state_dict_pre_hook(take_shards)
    if state.pipeline is not None or state.four_bit:  # else the method of the class counts right
        for count in (num_parameters, get_memory_footprint):
            if hasattr(model, count.__name__):
                vars(model)[count.__name__] = functools.partial(count, model)
    if hasattr(model, "resize_token_embeddings"):
        model.resize_token_embeddings = functools.partial(_refuse_resize, model)
    if hasattr(model, "set_use_kernels"):
        vars(model)["set_use_kernels"] = _refuse_kernels
    if hasattr(model, "init_continuous_batching"):
        vars(model)["init_continuous_batching"] = functools.partial(_refuse_continuous_batching, state.grid)
    install_save_pretrained(model)
    if hasattr(model, "from_pretrained"):
        let_ranks_read_alone()


def _refuse_continuous_batching(grid: Grid, *_: Any, **__: Any) -> None:
    """`init_continuous_batching` of a sharded model, to which `generate_batch` comes, too."""
    raise ValueError(
        f"generate_batch (continuous batching) is not supported over the grid {grid}: its cache has room for all "
        "heads of the model, and each rank would choose its requests by itself. Call generate, or load the model, or "
        "its checkpoint, on one process."
    )


def _refuse_kernels(use_kernels: bool, *_: Any, **__: Any) -> None:
    """`set_use_kernels` of a sharded model."""
    if use_kernels:
        raise ValueError(KERNELS)


def _check_device(device_type: str, backend: str) -> None:
    """Refuse a model that was left on the CPU by mistake. Where `init_process_group` gets no backend, torch makes a
    world with gloo for CPUs and NCCL for GPUs; the model would train in it, slowly, on the CPU.

    Raises:
        ValueError: it is on the CPU, and the process trains on another device, by another backend.
    """
    here = default_device_type()
    try:
        other = backend_of(device=torch.device(here))
    except ValueError:  # a world of CPUs, on a machine that has GPUs
        return
    if device_type == "cpu" and backend != other:
        raise ValueError(
            f"this model is on the CPU, but the process trains on {here}, by {other}: move the model first, with "
            f"model.to('{here}'), or read it with hf_axonn.from_pretrained(name, grid=...). To train on CPUs call "
            "torch.distributed.init_process_group('gloo'), or Accelerator(cpu=True), before."
        )


def _check_pipe(model: nn.Module, grid: Grid) -> None:
    """Refuse what a pipeline cannot have. Changes nothing.

    Raises:
        ValueError: its training loss has a part that stages cannot make together (`check_routers`).
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "output_router_logits", False):
        check_routers(without_peft(model), grid)


def _has_stages(model: nn.Module) -> bool:
    state = parallel_state(model)
    return state is not None and state.grid.pipe > 1


def _refuse_resize(
    model: nn.Module, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, **_: Any
) -> nn.Module:
    """`resize_token_embeddings` of a sharded model: the embedding as it is, if nothing would change."""
    embedding = model.get_input_embeddings()
    size = embedding.weight.shape[0]
    new_size = size if new_num_tokens is None else new_num_tokens
    new_size = -(-new_size // (pad_to_multiple_of or 1)) * (pad_to_multiple_of or 1)
    if new_size != size:
        raise ValueError(
            f"resize_token_embeddings from {size} to {new_size}: the vocabulary of this model is sharded already. "
            "Load the model with AutoModelForCausalLM.from_pretrained, resize it, and then shard it with "
            "hf_axonn.parallelize; or save the resized model once and load that with hf_axonn.from_pretrained."
        )
    return embedding


@contextlib.contextmanager
def auto_parallelize(grid: Grid | None = None, *, config: AxonnConfig | None = None) -> Iterator[None]:
    """AxoNN's easy API: the modules that are built inside are sharded when the block ends.

        with auto_parallelize(grid):
            net = MyModule()

    Every outermost module with parameters is given to `parallelize`: each Linear is sharded on its own, takes full
    activations and returns full activations, so the module's code needs no change. After backward call
    `sync_gradients(net)`. Ranks with the same (data, z) must get the same inputs.

    Args:
        grid: sizes of the axes; their product is the number of ranks. None takes those of `config`, or of the launch
            file.
        config: overlap switches and reduce_dtype, beside those of the launch file.
    Raises:
        As `parallelize`.
    Collectives: those of `parallelize`, for each such module.
    """
    config = join_settings("auto_parallelize", grid, config)
    built: list[nn.Module] = []
    initialize = nn.Module.__init__

    def recording(module: nn.Module, *args, **kwargs) -> None:
        initialize(module, *args, **kwargs)
        built.append(module)

    nn.Module.__init__ = recording
    try:
        yield
    finally:
        nn.Module.__init__ = initialize
    inside = {id(child) for module in built for child in module.modules() if child is not module}
    for module in built:
        if id(module) not in inside and any(True for _ in module.parameters()):
            parallelize(module, config=config)


def join_settings(call: str, grid: Grid | None, config: AxonnConfig | None) -> AxonnConfig:
    """The settings that a call with these arguments names, and those of the launch file.

    Raises:
        ValueError: there is no grid, or two different ones; `config` is that of a model.
    """
    if config is not None and not isinstance(config, AxonnConfig):
        raise ValueError(
            f"{call}(config=...) takes an AxonnConfig, the settings of the grid, and was given a "
            f"{type(config).__name__}. What is to be changed in the config of a model is a keyword of "
            "from_pretrained, as in num_hidden_layers=2."
        )
    if config is not None and grid not in (None, config.grid):
        raise ValueError(f"{call}() is given two grids: grid is {grid}, config.grid is {config.grid}. Omit grid.")
    return AxonnConfig.with_launch(config or (AxonnConfig(grid=grid) if grid is not None else None), call)
