"""Everything of peft that is private or may change. Checked with peft 0.20 and 0.21."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from packaging.version import Version
from torch import nn
from torch.distributed.tensor import DTensor

from hf_axonn.compat.post_import import after_import
from hf_axonn.compat.replaced import replace_attributes


def without_peft(model: nn.Module) -> nn.Module:
    """The Transformers model inside of a PeftModel; any other model as it is."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def trained_beside_adapters(model: Any) -> list[str]:
    """Return the names of trained parameters that a PeftModel also uses with its adapters off, such as biases."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    with model.disable_adapter():
        return [name for name, parameter in model.named_parameters() if parameter.requires_grad and name in trained]


def adapter_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """PEFT's layers in a model: name, layer and a short name of its class, as in lora.Linear or ia3.Linear."""
    if "peft" not in sys.modules:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name, module, f"{type(module).__module__.split('.')[-2]}.{type(module).__name__}"


def wrapped_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Modules of a model that PEFT has put around others: name, wrapper, and what is innermost in it."""
    if "peft" not in sys.modules:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and "base_layer" in module._modules:
            yield name, module, module.get_base_layer()
        elif isinstance(module, ModulesToSaveWrapper):
            yield name, module, module.original_module


def active_copies(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The copies of `modules_to_save` that a model uses, with the names of the modules in whose place they are."""
    wrapped: Iterator[tuple[str, Any, nn.Module]] = wrapped_modules(model)
    for name, wrapper, _ in wrapped:
        if "modules_to_save" in wrapper._modules:
            for adapter in wrapper.active_adapters:
                yield name, wrapper.modules_to_save[adapter]


def variant_names(layer: nn.Module) -> list[str]:
    """Class names of the variants of LoRA in a layer, DoRA among them."""
    return [type(variant).__name__ for variant in getattr(layer, "lora_variant", {}).values()]


def after_peft(callback: Callable[[], None]) -> None:
    """Call `callback()` when PEFT has been imported, at once if it is."""
    after_import("peft.peft_model", callback)


def let_load_state_dict_shard() -> None:
    """Keep PEFT from sharding what it loads by the names of mesh axes; `load_state_dict` does (dtensors.take_shards).

    PEFT does so since 0.21 for Transformers' own tensor parallelism, whose meshes have names; ours have none.
    """
    from peft import __version__
    from peft.utils import save_and_load

    if Version(__version__) < Version("0.21.dev0"):
        return
    original = save_and_load._reshard_dtensor_values_for_load

    def reshard(model: nn.Module, state_dict: dict) -> dict:
        sharded = {name: parameter for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)}
        named = {name for name, parameter in sharded.items() if parameter.device_mesh.mesh_dim_names}
        loaded = original(model, {key: value for key, value in state_dict.items() if key in named})
        return {key: loaded.get(key, value) for key, value in state_dict.items()}

    save_and_load._reshard_dtensor_values_for_load = reshard


def sized_by_full_weights() -> contextlib.AbstractContextManager[None]:
    """Give LoRA of a Linear the sizes of its full weight inside; PEFT 0.20 takes those of a shard."""
    from peft.tuners.lora.layer import LoraLayer

    original = LoraLayer._get_in_out_features

    def sizes(self, module: nn.Module) -> tuple[int, int] | tuple[None, None]:
        return (module.in_features, module.out_features) if isinstance(module, nn.Linear) else original(self, module)

    return replace_attributes({(LoraLayer, "_get_in_out_features"): sizes})


def output_comes_first(layer: nn.Module) -> bool:
    """Return whether a parameter that PEFT adapts by itself is [out, in] or [E, out, in], and not [E, in, out]."""
    return layer.num_experts == 1 or layer._did_swap_in_out_features


# Methods of PEFT's layers that are replaced on single ones.
WHILE_ACTIVE = "_activate_lora"  # of ParamWrapper: (adapter names) -> context in which the parameter has them
MIXED_BATCH = "_mixed_batch_forward"  # of every LoRA layer: forward with an adapter for each row
# The module that swaps adapters in place, and its functions of (model, ...) that any way into it comes to.
HOTSWAP = "peft.utils.hotswap"
SWAPPING = ("hotswap_adapter_from_state_dict", "_pad_lora_weights")
