"""TRL's trainers with a parallelized model, or with the goldfish loss; with others nothing changes.

All of them but RewardTrainer replace `model.forward` by one that multiplies the full `lm_head.weight` itself
(`add_fused_lm_head`). For a DTensor it takes `full_tensor()`, a weight that is full on every rank and whose gradient
is not summed over z. Here that function puts our statistics in the place of its own wherever the model's loss is ours,
and leaves all others as they are. Each label of a batch gets, without logits (TRL's FusedCausalLMOutput):

    log_probs          log-probability of the label, differentiable
    entropy            entropy of the distribution that the label is drawn from, differentiable
    is_top1            whether the label is the first of the most likely tokens
    mean_logits        mean of the logits over the vocabulary
    log_sum_sq_probs   logarithm of the sum of squared probabilities

A parallelized model runs as it does for its own loss, up to the head; losses/label_statistics.py does the rest,
without forming or gathering a full tensor. A plain model keeps TRL's own head, which is asked here for more labels.
A reference model is sharded before it gets the head, which then stands around the sharded forward.

Trainers that generate need more than the head (rollouts.py).

Checked with trl 1.15 and 1.16 (trainer/utils.py, sft_trainer.py, dpo_trainer.py, kto_trainer.py, reward_trainer.py).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_axonn.accelerator.prepare import shard_plain_model
from hf_axonn.compat.accelerate import parallelism_in_use
from hf_axonn.compat.post_import import after_import
from hf_axonn.compat.replaced import around_method, replace_attributes
from hf_axonn.compat.versions import check_versions
from hf_axonn.distributed.consistency import gather_texts
from hf_axonn.distributed.mesh import ROWS
from hf_axonn.engine.dtensors import local
from hf_axonn.engine.state import is_parallelized, parallel_state
from hf_axonn.losses.causal_lm import CausalLMLoss, Targets
from hf_axonn.losses.label_statistics import ALWAYS, MORE, label_statistics
from hf_axonn.losses.vocab_parallel import ShardedCausalLMLoss
from hf_axonn.topology.grid import Grid
from hf_axonn.trainer import rollouts


MODULE = "trl.trainer.utils"
TRAINERS = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer", *rollouts.TRAINERS)  # that train over a grid
CALLBACKS = "trl.trainer.callbacks"
COMPLETING = {"LogCompletionsCallback": "on_step_end", "WeaveCallback": "on_evaluate"}  # methods that generate
PRECOMPUTING = {f"trl.trainer.{name.lower()}_trainer": f"{name}Trainer" for name in ("DPO", "KTO")}  # by module
REFUSED = {"DistillationTrainer": "it multiplies by the whole heads of student and teacher"}


def install() -> None:
    """Wrap two functions in all modules of TRL that have them, and a method of trainers with references and of
    callbacks that generate, once. TRL has been imported."""
    for name, ours in {"add_fused_lm_head": _add_fused_lm_head, "hash_module": _hash_module}.items():
        original = getattr(sys.modules[MODULE], name, None)
        if original is not None and not hasattr(original, "of_trl"):
            wrapped: Any = functools.wraps(original)(functools.partial(ours, original))
            wrapped.of_trl = original
            for path, module in list(sys.modules.items()):
                if path.partition(".")[0] == "trl" and vars(module).get(name) is original:
                    setattr(module, name, wrapped)
    for place, trainer in PRECOMPUTING.items():
        method = _precompute_ref_logps.__name__
        after_import(place, functools.partial(_wrap_method, place, trainer, method, _precompute_ref_logps))
    for callback, method in COMPLETING.items():
        after_import(CALLBACKS, functools.partial(_wrap_method, CALLBACKS, callback, method, _complete))


def check_trainer(trainer: object, grid: Grid) -> None:
    """Refuse a trainer of TRL, over a grid, that has not been compared with one process; others pass.

    Raises:
        ValueError: it is not one of `TRAINERS`, the grid has pipe, or the release of TRL is not proven.
    """
    names = [base.__name__ for base in type(trainer).__mro__ if base.__module__.partition(".")[0] == "trl"]
    for name in names:
        if name not in (*TRAINERS, "_BaseTrainer"):
            why = REFUSED.get(name, "nobody has compared it with one process")
            raise ValueError(
                f"{name} of TRL is not supported over a grid ({grid}): {why}. Of its trainers "
                f"{', '.join(TRAINERS)} are."
            )
    if names and grid.pipe > 1:
        raise ValueError(
            f"{names[0]} of TRL is not supported over a grid with pipe ({grid}): it gathers what it logs "
            "in the middle of a pass. Use Transformers' Trainer or GoldfishTrainer, or a grid without pipe."
        )
    if names:
        check_versions("trl")
        rollouts.check_rollouts(trainer, grid)


def freeze_references(trainer: object) -> None:
    """Freeze parallelized models of references and rewards, so that no gradients of theirs are averaged: TRL leaves
    them trainable, and never trains them. No communication."""
    model: Any
    for model in (getattr(trainer, "ref_model", None), *getattr(trainer, "reward_funcs", ())):
        if parallel_state(model) is not None:
            model.requires_grad_(False)


def _wrap_method(module: str, name: str, method: str, wrapper: Callable) -> None:
    owner = getattr(sys.modules[module], name)
    original = getattr(owner, method)
    if not hasattr(original, "of_trl"):
        wrapped: Any = around_method(original, wrapper)
        wrapped.of_trl = original
        setattr(owner, method, wrapped)


def _complete(self, original: Callable, *args, **kwargs):
    """Let every rank complete all prompts: all call `generate` as often, and no completion is logged twice."""
    accelerator = self.trainer.accelerator
    plugin = getattr(accelerator, "axonn_plugin", None)
    values: dict[tuple[Any, str], Any] = {}
    if plugin is not None and plugin.grid.size > 1:
        values[accelerator, "split_between_processes"] = contextlib.nullcontext
        values[sys.modules[CALLBACKS], "gather_object"] = list
    with replace_attributes(values):
        return original(*args, **kwargs)


def _precompute_ref_logps(self, original: Callable, dataset: Any, name: str, *args, **kwargs):
    """Refuse what rank 0 would write into a temporary directory of its own, where no other rank finds it.

    Raises:
        ValueError: the data set is in memory, or the caching of datasets is off.
    """
    from datasets import Dataset, is_caching_enabled

    grid = getattr(parallelism_in_use()[0], "grid", None)
    in_memory = isinstance(dataset, Dataset) and not (dataset.cache_files and is_caching_enabled())
    if grid is not None and grid.size > 1 and in_memory:
        raise ValueError(
            f"precompute_ref_log_probs is not possible over a grid ({grid}) with a {name} data set in memory, or "
            "without the cache of datasets: rank 0 writes the log-probabilities beside its file, from which all ranks "
            "read them. Save it with save_to_disk and load it with datasets.load_from_disk."
        )
    return original(dataset, name, *args, **kwargs)


def _hash_module(original: Callable, module: nn.Module) -> str:
    """Wrap TRL's function, by which it finds log-probabilities of a reference model that it has computed before.

    Of a parallelized model every rank hashes its shards, and all have the hash of these. Collectives: `gather_texts`.
    """
    state = parallel_state(module)
    if state is None:
        return original(module)
    shards = {name: local(value.detach()) for name, value in module.state_dict().items()}
    digest = original(types.SimpleNamespace(state_dict=lambda: shards))
    return hashlib.sha256(json.dumps(gather_texts(digest, state.grid_mesh.device)).encode()).hexdigest()


def _add_fused_lm_head(
    original: Callable,
    model: nn.Module,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
) -> None:
    """Wrap TRL's function, whose forward on the model then asks at each call whose loss the model has.

    In a process that trains over a grid, a model that is still plain is sharded first: a reference model, which TRL
    prepares when it has the head. Collectives: those of `parallelize` then.

    Raises:
        ValueError: the model is parallelized and something is asked for that is not served.
    """
    plugin, device = parallelism_in_use()
    if hasattr(plugin, "grid"):
        shard_plain_model(model, plugin, device)
    if is_parallelized(model):
        _check(model, cast_lm_head_to_fp32, outputs)
    own = model.forward
    original(model, temperature=temperature, cast_lm_head_to_fp32=cast_lm_head_to_fp32, outputs=outputs)
    theirs = model.forward

    # Under the signature of the model's class, like the forward that it stands for.
    @functools.wraps(type(model).forward)
    def forward(self, *args, fused_lm_head: bool = False, **kwargs):
        loss = getattr(self, "loss_function", None) if fused_lm_head else None
        if fused_lm_head and is_parallelized(self):
            _check(self, cast_lm_head_to_fp32, outputs)
            more = tuple(name for name in MORE if name in outputs)
            ask = functools.partial(sharded_label_statistics, self, functools.partial(own, *args))
            return _output(self, kwargs, functools.partial(ask, temperature=temperature, more=more))
        if isinstance(loss, CausalLMLoss) and set(ALWAYS) == set(outputs):
            fused = functools.partial(theirs, *args, fused_lm_head=True)
            return _output(self, kwargs, functools.partial(plain_label_statistics, loss, fused))
        return theirs(*args, fused_lm_head=fused_lm_head, **kwargs)

    model.forward = types.MethodType(forward, model)


def _check(model: nn.Module, cast_lm_head_to_fp32: bool, outputs: tuple[str, ...]) -> None:
    more = sorted(set(outputs) - {*ALWAYS, *MORE})
    for name, refused in {f"outputs={more}": more, "cast_lm_head_to_fp32=True": cast_lm_head_to_fp32}.items():
        if refused:
            raise ValueError(
                f"TRL's fused head with {name} is not supported for a model that is sharded over a grid: omit it."
            )
    if not isinstance(getattr(model, "loss_function", None), ShardedCausalLMLoss):
        raise ValueError(
            f"{type(model).__name__} does not take Transformers' loss of causal language models, so TRL cannot train "
            "it over a grid."
        )


def _output(model: nn.Module, inputs: dict[str, Any], statistics: Callable):
    """Return the output that TRL's own forward would."""
    from trl.trainer.utils import FusedCausalLMOutput

    inputs = {"use_cache": False, **inputs}
    items = inputs.get("num_items_in_batch")
    config = model.config.get_text_config()
    wants_aux = inputs.get("output_router_logits", getattr(config, "output_router_logits", False))
    found = statistics(inputs.pop("labels", None), inputs.pop("shift_labels", None), **inputs)
    loss = -found.log_probs.sum() / (found.mask.sum().clamp(min=1) if items is None else items)
    if wants_aux:
        if found.aux_loss is None:
            raise ValueError(
                f"{type(model).__name__} returns no auxiliary loss of its router: set router_aux_loss_coef=0.0."
            )
        state = parallel_state(model)
        shares = state.grid_mesh.size(*ROWS) if state is not None and items is not None else 1
        loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * found.aux_loss / shares
    return FusedCausalLMOutput(
        loss=loss,
        log_probs=found.log_probs,
        entropy=found.entropy,
        is_top1=found.is_top1,
        **found.more,
        label_mask=found.mask,
        aux_loss=found.aux_loss if wants_aux else None,
    )


@dataclass(frozen=True)
class LabelStatistics:
    """Statistics of each label, in the shape of the labels; zero where one is ignored.

    Args:
        log_probs: nats, at least float32.
        entropy: nats.
        is_top1: bool; of equally likely tokens the first counts, as with argmax.
        mask: bool, whether there is a label.
        more: other statistics that were requested, by name (`label_statistics`).
        aux_loss: 0-d, of a mixture of experts, if requested.
    """

    log_probs: Tensor
    entropy: Tensor
    is_top1: Tensor
    mask: Tensor
    more: dict[str, Tensor]
    aux_loss: Tensor | None = None


def sharded_label_statistics(
    model: nn.Module,
    forward: Callable[..., Any],
    labels: Tensor | None,
    shift_labels: Tensor | None,
    *,
    temperature: float = 1.0,
    more: tuple[str, ...] = (),
    **inputs: Any,
) -> LabelStatistics:
    """Statistics of a parallelized model, whose own forward pass runs up to the head.

    Args:
        model: its `loss_function` is a `ShardedCausalLMLoss`.
        forward: the model's forward.
        labels: [B, S], -100 where ignored; or
        shift_labels: [B, S], shifted already.
        temperature, more: as `label_statistics`.
        inputs: whatever else the model takes.
    Returns:
        [B, S-1] of what labels[:, 1:] are, or [B, S] of shift_labels; the same on all ranks of (x, y).
    Raises:
        ValueError: the model did not call its loss function, or called it more than once.
    Collectives: those of the forward pass and of `label_statistics`.
    """
    loss: ShardedCausalLMLoss = model.loss_function
    with loss.hand_over() as handed:
        output = forward(labels=shift_labels if labels is None else labels, **inputs)
    if len(handed) != 1:
        raise ValueError(
            f"{type(model).__name__} computed its loss {len(handed)} times in a forward pass, not once: TRL cannot "
            "train it over a grid."
        )
    targets = loss.targets(labels, shift_labels)
    found = label_statistics(handed[0], targets.tokens, temperature=temperature, more=more)
    return _note(loss, targets, found, output.get("aux_loss"), shifted=shift_labels is not None)


def plain_label_statistics(
    loss: CausalLMLoss,
    fused: Callable[..., Any],
    labels: Tensor | None,
    shift_labels: Tensor | None,
    **inputs: Any,
) -> LabelStatistics:
    """Statistics of a plain model from its own fused head, for labels that goldfish dropped as well.

    Args:
        loss: the model's, which knows the labels as they were before goldfish.
        fused: takes labels or shift_labels and returns something with log_probs, entropy and is_top1.
        labels, shift_labels, inputs: see `sharded_label_statistics`.
    Returns:
        As `sharded_label_statistics`. No communication.
    """
    targets = loss.targets(labels, shift_labels)
    shifted = shift_labels is not None
    tokens = targets.tokens.view(targets.rows, -1)
    # A head that shifts labels reads no first one; what it shifts is `tokens` again.
    output = fused(**({"shift_labels": tokens} if shifted else {"labels": F.pad(tokens[:, :-1], (1, 0))}), **inputs)
    found = {name: getattr(output, name) for name in ALWAYS}
    found = {name: (value if shifted else F.pad(value, (0, 1))).reshape(-1) for name, value in found.items()}
    return _note(loss, targets, found, output.aux_loss, shifted=shifted)


def _note(
    loss: CausalLMLoss, targets: Targets, found: dict[str, Tensor], aux_loss: Tensor | None, *, shifted: bool
) -> LabelStatistics:
    """Tell the loss what tokens [B * S] cost, and put those of kept labels into rows."""
    log_probs = found["log_probs"]
    loss.note(-log_probs.detach(), targets, found["entropy"], found["is_top1"])
    mask = targets.weights.bool().to(log_probs.device)
    # Unless labels are shifted already, the last of a row predicts nothing. Contiguous, so that sums round as TRL's.
    end = None if shifted else -1
    kept = {
        name: torch.where(mask, value, 0).to(value.dtype).view(targets.rows, -1)[:, :end].contiguous()
        for name, value in {**found, "mask": mask}.items()
    }
    own = {name: kept.pop(name) for name in (*ALWAYS, "mask")}
    return LabelStatistics(**own, more=kept, aux_loss=aux_loss)
