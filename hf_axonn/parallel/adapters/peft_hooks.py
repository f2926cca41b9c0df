"""Adapters that PEFT puts into a model after it was sharded: get_peft_model, add_adapter, PeftModel.from_pretrained.

PEFT has no place to plug this in, so four methods of its classes are wrapped as soon as it is imported. For a model
that is not sharded each calls PEFT's own and nothing else. Checked with peft 0.20 and 0.21.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import nn

from hf_axonn.checkpoint.adapter_files import full_tensors
from hf_axonn.checkpoint.full_state import push_to_hub
from hf_axonn.compat.peft import HOTSWAP, SWAPPING, after_peft, let_load_state_dict_shard, sized_by_full_weights
from hf_axonn.compat.post_import import after_import
from hf_axonn.compat.replaced import around_method, replace_attributes
from hf_axonn.distributed.collectives import world_rank
from hf_axonn.distributed.consistency import gather_json, raise_on_all_ranks
from hf_axonn.engine.linears import is_conv1d
from hf_axonn.engine.parameter_counts import num_parameters
from hf_axonn.engine.state import is_parallelized
from hf_axonn.layers.dropout import mix
from hf_axonn.parallel.adapters.checks import check_adapters, check_config, saved_modules
from hf_axonn.parallel.adapters.install import install_adapters
from hf_axonn.parallel.sharded_model import ShardedModel


def watch_peft() -> None:
    """Wrap PEFT's methods, once, all or none: now if it has been imported, else as soon as it is.

    Raises:
        AttributeError: this release of PEFT has no such method.
    """
    if not _watching:
        after_peft(_install)
        after_import(HOTSWAP, _install_hotswap)
        _watching.append(True)


_watching: list[bool] = []


def _install() -> None:
    from peft.peft_model import PeftModel  # `peft` itself may be in the middle of its import
    from peft.tuners.tuners_utils import BaseTuner

    of_model = (add_adapter, save_pretrained, push_to_hub, get_nb_trainable_parameters)
    wrappers = ((BaseTuner, inject_adapter), *((PeftModel, wrapper) for wrapper in of_model))
    originals = [(owner, wrapper, getattr(owner, wrapper.__name__)) for owner, wrapper in wrappers]
    let_load_state_dict_shard()
    for owner, wrapper, original in originals:
        setattr(owner, wrapper.__name__, around_method(original, wrapper))


def _install_hotswap() -> None:
    hotswap = sys.modules[HOTSWAP]
    for name in SWAPPING:
        original = getattr(hotswap, name)
        setattr(hotswap, name, functools.wraps(original)(functools.partial(_hotswap, original)))


def _hotswap(original: Callable, model: nn.Module, *args, **kwargs):
    """Swap as PEFT does, but not in a sharded model: it would put whole tensors in the place of what is divided."""
    if sharded_parts(model):
        raise ValueError(
            "PEFT's hot-swapping of adapters is not supported over a grid: call load_adapter with another name, then "
            "set_adapter, and delete_adapter with the name of the first."
        )
    return original(model, *args, **kwargs)


def sharded_parts(model: nn.Module) -> list[tuple[nn.Module, ShardedModel]]:
    """The parallelized models in a module, itself or some of its children, with how each lies on the grid."""
    return [(module, cast(ShardedModel, module.axonn)) for module in model.modules() if is_parallelized(module)]


def inject_adapter(self, original: Callable, model: nn.Module, adapter_name: str, *args, **kwargs) -> None:
    """Inject as PEFT does, then shard the new adapters. Over pipe each stage fills its own, with other numbers than
    one process would.

    Raises:
        ValueError: one of `check_config`, or over pipe a stage has no module that is to be adapted; on every rank.
    Collectives: those of `install_adapters`; with pipe those of `Pipeline.update_modules` and one before.
    """
    parts = sharded_parts(model)
    for part, state in parts:
        check_config(state, part, self.peft_config[adapter_name])
    with contextlib.ExitStack() as stack:
        for part, state in parts:
            stack.enter_context(_copyable(part, self.peft_config[adapter_name]))
            if state.pipeline is not None:
                stack.enter_context(_keep_stage(state, part))
        if parts:
            stack.enter_context(_mark_unmeasured())
            stack.enter_context(sized_by_full_weights())
        original(model, adapter_name, *args, **kwargs)
    for part, state in parts:
        check_adapters(part)
        install_adapters(state, part)
        if state.pipeline is not None:
            state.pipeline.update_modules()
    if parts and hasattr(type(self), "add_weighted_adapter"):
        self.add_weighted_adapter = _refuse_weighted


def _refuse_weighted(*args, **kwargs):
    raise ValueError(
        "add_weighted_adapter is not supported over a grid: save the adapters, combine them on one process, and load "
        "the result with load_adapter."
    )


@contextlib.contextmanager
def _copyable(model: nn.Module, config) -> Iterator[None]:
    """Give modules that PEFT is going to copy their own forward inside: ours must not be copied."""
    taken = []
    for _, module in saved_modules(model, config):
        for inner in module.modules():
            for name, value in list(vars(inner).items()):
                if hasattr(value, "__wrapped__") and inspect.isfunction(getattr(type(inner), name, None)):
                    taken.append((inner, name, value))
                    del vars(inner)[name]
    try:
        yield
    finally:
        for module, name, value in taken:
            vars(module)[name] = value


@contextlib.contextmanager
def _keep_stage(state: ShardedModel, model: nn.Module) -> Iterator[None]:
    """Leave a model on pipe only the modules of this stage inside, and let new numbers be the stage's own: the
    generators of all ranks have drawn the same afterwards.

    Raises:
        ValueError: PEFT refuses the adapters of any stage; on every rank.
    Collectives: one of `gather_texts` over pipe.
    """
    mesh, problem = state.grid_mesh, ""

    def named_modules(*args, **kwargs):  # where PEFT looks for what to adapt
        named = type(model).named_modules(model, *args, **kwargs)
        return ((name, module) for name, module in named if not getattr(module, "elsewhere", False))

    seed = int(torch.randint(2**62, (), device="cpu"))
    devices = [mesh.device] if mesh.device.type != "cpu" else []
    vars(model)["named_modules"] = named_modules
    try:
        with torch.random.fork_rng(devices, device_type=mesh.device.type if devices else "cuda"):
            torch.manual_seed(mix(seed, mesh.index("pipe"), 0))
            yield
    except ValueError as error:
        problem = str(error)
    finally:
        del vars(model)["named_modules"]
    problems = gather_json(problem, mesh.device, mesh.group("pipe"))
    for pipe, problem in enumerate(problems):
        if problem:
            raise ValueError(f"at pipe={pipe} of {state.grid}: {problem}")


def _mark_unmeasured() -> contextlib.AbstractContextManager[None]:
    """Keep PEFT from measuring new DoRA layers inside, which would need full weights, and mark them."""
    from peft.tuners.lora import dora

    def update_layer(self, *, base_layer, **_) -> None:
        weight = base_layer.weight
        size = weight.shape[1 if is_conv1d(base_layer) or isinstance(base_layer, nn.Embedding) else 0]
        self.weight = nn.Parameter(torch.ones(size, dtype=weight.dtype, device=weight.device))
        self.unmeasured = True

    return replace_attributes({(dora.DoraLinearLayer, "update_layer"): update_layer})


def add_adapter(self, original: Callable, adapter_name: str, peft_config, *args, **kwargs) -> None:
    """Check, then add as PEFT does: what lies outside of the model does not come by `inject_adapter`."""
    for part, state in sharded_parts(self):
        check_config(state, part, peft_config)
    return original(adapter_name, peft_config, *args, **kwargs)


def get_nb_trainable_parameters(self, original: Callable) -> tuple[int, int]:
    """Count as PEFT does, for the whole model: weights of 4 bits, and all stages over pipe. No communication."""
    if not sharded_parts(self):
        return original()
    return num_parameters(self, only_trainable=True), num_parameters(self)


def save_pretrained(self, original: Callable, *args, **kwargs) -> None:
    """Save as PEFT does, with full tensors; rank 0 writes, and all wait for it. Every rank must call it.

    Raises:
        ValueError: rank 0 cannot write, on every rank; or adapters are to be converted, for which PEFT loads the
            first ones into the model, on rank 0 alone.
    Collectives: `full_tensors` of what is saved, and those of `raise_on_all_ranks`.
    """
    parts = sharded_parts(self)
    if not parts:
        return original(*args, **kwargs)
    if kwargs.get("path_initial_model_for_weight_conversion") is not None:
        raise ValueError(
            "path_initial_model_for_weight_conversion is not supported over a grid: save the adapters without it, and "
            "convert them on one process, where PeftModel.from_pretrained reads them."
        )
    module = sys.modules["peft.peft_model"]
    select = module.get_peft_model_state_dict

    def gather(*inner, **options):
        return full_tensors(select(*inner, **options), self)

    kwargs.setdefault("is_main_process", world_rank() == 0)
    gathering = replace_attributes({(module, "get_peft_model_state_dict"): gather})
    with raise_on_all_ranks(parts[0][1].grid_mesh.device), gathering:
        original(*args, **kwargs)
