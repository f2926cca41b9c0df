"""`load: sharded`: Transformers' own from_pretrained reads a rank's slices alone, in scripts that know of no grid.

One hook for the process, on `PreTrainedModel.from_pretrained`, to which the Auto classes lead as well. Causal language
models, with images or without, go to `hf_axonn.from_pretrained`; other models, and what that loads itself, go to the
stock method.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hf_axonn.compat.replaced import replace_attributes
from hf_axonn.parallel.distributed_config import config_of_distributed
from hf_axonn.parallel.from_pretrained import NO_LOADING_INFO, is_loading, load_shards
from hf_axonn.parallel.parallelize import join_settings


if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Arguments of Transformers' method that cannot be passed on, and why.
REFUSED = {
    "state_dict": "weights that are in memory are whole on every rank",
    "output_loading_info": NO_LOADING_INFO,
}
_hook = contextlib.ExitStack()


def install_sharded_loading() -> None:
    """Let Transformers' from_pretrained of this process read slices over the grid of the launch file. Once."""
    from transformers import PreTrainedModel

    remove_sharded_loading()
    stock = vars(PreTrainedModel)["from_pretrained"].__func__
    ours = functools.wraps(stock)(functools.partial(_load, stock))
    _hook.enter_context(replace_attributes({(PreTrainedModel, "from_pretrained"): classmethod(ours)}))


def remove_sharded_loading() -> None:
    """Give Transformers its own from_pretrained back."""
    _hook.close()


def _load(stock: Callable[..., Any], cls: type[PreTrainedModel], name: Any, *args: Any, **kwargs: Any) -> Any:
    """Load a causal language model as `hf_axonn.from_pretrained` does, and any other as `stock` does.

    Raises:
        ValueError: an argument that only a whole model can have, or what `hf_axonn.from_pretrained` refuses.
    Collectives: those of `hf_axonn.from_pretrained`; before it, the ranks meet if they have not.
    """
    if is_loading() or not _is_causal(cls):
        return stock(cls, name, *args, **kwargs)
    refused = {key: why for key, why in REFUSED.items() if kwargs.get(key)}
    if args:
        refused |= {"positional arguments after the name": "the model is built before they are read"}
    if name is None:
        refused |= {"a model without a name": REFUSED["state_dict"]}
    for what, why in refused.items():
        raise ValueError(
            f"{cls.__name__}.from_pretrained with {what} cannot read slices, as load: sharded asks for: {why}. "
            "Omit it, or write load: whole under axonn_config."
        )
    if _is_one_device(kwargs.get("device_map")):
        kwargs["device_map"] = None  # that of the process, which is where its shards lie
    _meet()
    given = kwargs.pop("distributed_config", None)
    config = config_of_distributed(given, None, None) if given is not None else None
    return load_shards(name, join_settings("from_pretrained", None, config), cls, kwargs)


def _is_one_device(device_map: Any) -> bool:
    """Return whether a device_map puts all of a model on one device, and is no name of a way to divide it."""
    if isinstance(device_map, Mapping):
        return set(device_map) == {""}
    try:
        torch.device(device_map)
    except (RuntimeError, TypeError):  # "auto", or None
        return False
    return True


def _is_causal(cls: type[PreTrainedModel]) -> bool:
    """Return whether it is a class of causal language models, with images or without; remote code by its name."""
    from transformers.models.auto import modeling_auto

    known = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    name = cls.__name__
    return name.endswith("ForCausalLM") or any(name in mapping.values() for mapping in known)


def _meet() -> None:
    """Make the process group of a launched script that loads its model before its Accelerator or arguments."""
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    if not dist.is_initialized() and "RANK" in os.environ:
        PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
