"""Private names and habits of Transformers."""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

from packaging.version import Version
from torch import Tensor, nn

from hf_axonn.compat.replaced import replace_attributes
from hf_axonn.compat.sources import parse_source
from hf_axonn.compat.torch import groups_with_timeout


if TYPE_CHECKING:
    from transformers import PreTrainedModel


def progress_bars(shown: bool) -> contextlib.AbstractContextManager[None]:
    """Let Transformers draw its progress bars inside only if `shown`: those of several ranks are one muddle."""
    from transformers.utils import logging

    return contextlib.nullcontext() if shown else replace_attributes({(logging, "_tqdm_active"): False})


def adafactor_rate(optimizer: Any, group: dict[str, Any], state: dict[str, Any]) -> float:
    """Return the learning rate of a parameter of an Adafactor, which may grow with `RMS` of its `state`."""
    return optimizer._get_lr(group, state)


def input_embedding(model: nn.Module) -> nn.Module | None:
    """`get_input_embeddings()`, None where a model does not have one."""
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None


def output_embedding(model: nn.Module) -> nn.Module | None:
    """`get_output_embeddings()`, None where a model does not have one."""
    try:
        return model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def text_config(model: nn.Module):
    """The config of a model's decoder: its own, or that of its language part."""
    config = model.config
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def configured_head_counts(config, attention: nn.Module) -> tuple[int, int]:
    """Numbers of query and kv heads of an attention module: its own, or else the config's; 0 unknown."""

    def first(*names: str) -> int:
        for owner in (attention, config):
            for name in names:
                # A config whose layers differ refuses to name one number.
                with contextlib.suppress(AttributeError, RuntimeError, ValueError):
                    if isinstance(getattr(owner, name), int):
                        return getattr(owner, name)
        return 0

    query = first("num_heads", "num_attention_heads", "n_heads", "n_head", "decoder_attention_heads")
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return query, 1
    return query, first("num_key_value_heads", "num_kv_heads") or query


def without_report(model: nn.Module, elsewhere: set[str]) -> None:
    """Let the loader pass over the weights of modules that a stage of a pipeline does not have: a checkpoint of the
    whole model holds them, and would be reported to have them in excess; nor are they tied to others here."""
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    model._keys_to_ignore_on_load_unexpected = {*ignored, *map(re.escape, elsewhere)}  # type: ignore[assignment]
    tied = getattr(model, "all_tied_weights_keys", {})
    here = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    model.all_tied_weights_keys = {  # type: ignore[assignment]
        name: other for name, other in tied.items() if name in here and other in here
    }


def record_outputs(model: nn.Module) -> None:
    """Let a model that records outputs of its modules on demand do so with all modules that it has now. By itself it
    would take those that it has when such an output is first asked for."""
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    maybe_install_capturing_hooks(cast("PreTrainedModel", model))


def find_routers(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Yield the modules whose logits a model can record as `router_logits`, each with their place in its output."""
    recorders: list[Any] = []
    for module in model.modules():
        found = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits", [])
        recorders += found if isinstance(found, list) else [found]
    for module in model.modules():
        for recorder in recorders:
            kind = getattr(recorder, "target_class", recorder)
            if isinstance(kind, type) and isinstance(module, kind):
                yield module, getattr(recorder, "index", 1)
                break


def is_read(module: nn.Module) -> None:
    """Tell the loader that the parameters of a module have their values."""
    module._is_hf_initialized = True  # type: ignore[assignment]


def note_what_is_read(model: nn.Module) -> None:
    """Tell the loader which modules have all of their values, inside of them too. It passes over parameters that have
    theirs, but lets a module's class compute what it would begin with, in shards as HY-V4's does, which torch cannot.
    """
    for module in model.modules():
        values = [*module.parameters(), *module.buffers()]
        if values and all(getattr(value, "_is_hf_initialized", False) for value in values):
            is_read(module)


def wrap_checkpointing(layer: nn.Module, wrap: Callable[[Callable], Callable]) -> None:
    """Replace the function with which a layer under gradient checkpointing runs its forward."""
    layer._gradient_checkpointing_func = wrap(layer._gradient_checkpointing_func)


def multiplies_in_groups(experts: nn.Module) -> bool:
    """Return whether `in_groups` may be an experts module's forward: its config asks for one matmul for all experts.

    "batched_mm" is what `generate` makes of "grouped_mm" for a while, on GPUs.
    """
    name = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    return hasattr(experts, "_is_expert_parallel") and name in ("grouped_mm", "batched_mm")


def in_groups(experts: nn.Module, hidden: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
    """Transformers' grouped matmul on a part of the experts: choices from num_experts on are not of this rank.

    They are sorted behind the last group, where nothing is multiplied, and count as zero. The host reads nothing, of
    one expert inside of `UnreadHistogram`. [T, H], [T, K], [T, K] -> [T, H].
    """
    from transformers.integrations.moe import grouped_mm_experts_forward

    with replace_attributes({(experts, "_is_expert_parallel"): True}):
        return grouped_mm_experts_forward(experts, hidden, choices, weights)


@functools.cache
def checkpoints_in_forward() -> bool:
    """Return whether a layer's forward makes the checkpoint; up to 5.22 its call does, around any forward."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return "__call__" not in vars(GradientCheckpointingLayer)


def checkpointed_forward(layer: nn.Module) -> Callable | None:
    """The function, of the layer and its arguments, that a checkpoint in the layer's forward runs; None where there
    is none: its class leaves checkpoints to its model, or to its call."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    if not (isinstance(layer, GradientCheckpointingLayer) and checkpoints_in_forward()):
        return None
    return getattr(type(layer).forward, "__wrapped__", None)


@functools.cache
def collected_tensors_are_numbered() -> bool:
    """Return whether the loader numbers every tensor that a converter collects; up to 5.20 those that it stacks."""
    from transformers import __version__

    return Version(__version__) >= Version("5.21.dev0")


def pass_on_ddp_timeout() -> None:
    """Let `ddp_timeout` of TrainingArguments be the timeout of process groups on CPUs, too. Once."""
    from transformers import training_args

    devices = vars(training_args.TrainingArguments)["_setup_devices"]  # a cached_property
    if hasattr(devices.func, "__wrapped__"):
        return
    original = devices.func

    @functools.wraps(original)
    def set_up(arguments):
        with groups_with_timeout(arguments.ddp_timeout):
            return original(arguments)

    devices.func = set_up


def compute_where_launched() -> None:
    """Let TrainingArguments know of `use_cpu: true` of a launch file, without which bf16 is refused. Once."""
    from transformers import training_args
    from transformers.utils.generic import strtobool

    original = training_args.TrainingArguments._validate_args
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def validate(arguments):
        if strtobool(os.environ.get("ACCELERATE_USE_CPU", "false")):
            arguments.use_cpu = True
        return original(arguments)

    training_args.TrainingArguments._validate_args = validate  # type: ignore[method-assign]


def save_on_every_rank(trainer, directory: str, save_model: Callable[[], None]) -> None:
    """Trainer's `_save`, then what else its `save_model` does, which up to 5.22 saves on one rank alone."""
    type(trainer)._save(trainer, directory)  # not that of the instance: to push, `save_model` comes here once more
    with replace_attributes({(trainer, "_save"): lambda *_, **__: None}):
        save_model()


def has_causal_lm_loss(model: nn.Module) -> bool:
    """Return whether the model takes Transformers' causal LM loss, which ours may then replace."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    try:
        return model.loss_function is ForCausalLMLoss
    except (AttributeError, KeyError, ValueError):
        return False


def masks_read_positions(model: nn.Module) -> bool:
    """Return whether a model's own code passes `position_ids` to the functions that make its attention masks. A model
    without source code, or of another library, is taken to do so."""
    from transformers import PreTrainedModel

    files = {type(each).__module__ for each in model.modules() if isinstance(each, PreTrainedModel)}
    return not files or any(map(_masks_read_positions, files))


@functools.cache
def _masks_read_positions(module: str) -> bool:
    try:
        tree = parse_source(sys.modules[module])
    except (KeyError, OSError, TypeError, SyntaxError):
        return True
    for node in ast.walk(tree):
        names: set[Any] = set()
        if isinstance(node, ast.Call):
            names = {keyword.arg for keyword in node.keywords}
        elif isinstance(node, ast.Dict):
            names = {key.value for key in node.keys if isinstance(key, ast.Constant)}
        if {"config", "attention_mask", "position_ids"} <= names:
            return True
    return False


def from_config_of(kind: type[PreTrainedModel]) -> Callable[..., PreTrainedModel]:
    """Return the function that `from_config` of an Auto class calls for a class of models."""
    found: Callable[..., PreTrainedModel] = kind._from_config
    return found


def as_saved(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return full tensors of a model under the names and in the shapes in which `save_pretrained` writes them.

    Args:
        model: of Transformers, without PEFT.
        tensors: by their names in the model; with each tensor those that are saved together with it as one. Tensors on
            the meta device give shapes alone.
    """
    from transformers.core_model_loading import revert_weight_conversion

    saved: dict[str, Tensor] = revert_weight_conversion(cast("PreTrainedModel", model), tensors)
    return saved


def never_compile_in_generate(model: Any) -> None:
    """Keep `generate` from compiling a model, as it does by itself with a static cache on GPUs, and from making such a
    cache before the first pass, with the heads of the config."""
    model._valid_auto_compile_criteria = lambda *_: False
    model._get_static_cache_init_shape = lambda: None


def reads_clock(criteria: Iterable[object] | None) -> bool:
    """Return whether one of the stopping criteria that `generate` gets ends it by the time."""
    from transformers import MaxTimeCriteria

    return any(isinstance(each, MaxTimeCriteria) for each in criteria or ())


def is_static_cache(implementation: str | None, cache: object) -> bool:
    """Return whether `generate` gets a cache that has room for a number of tokens, by its name or made."""
    from transformers import StaticCache
    from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS

    return implementation in ALL_STATIC_CACHE_IMPLEMENTATIONS or isinstance(cache, StaticCache)
