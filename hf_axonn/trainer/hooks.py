"""Methods that Transformers' Trainer runs otherwise for a parallelized model, and for no other.

Trainer saves and loads on rank 0 and has no place to plug this in, so a few methods of the class are wrapped. With a
plain model and a plain checkpoint each wrapper calls the stock method; engine/master_weights.py adds to that.

Checked with transformers 5.20 to 5.24 (trainer.py, trainer_pt_utils.py).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from hf_axonn.accelerator.prepare import shard_plain_model
from hf_axonn.compat.peft import without_peft
from hf_axonn.compat.post_import import after_import
from hf_axonn.compat.replaced import around_method, replace_attributes
from hf_axonn.compat.transformers import compute_where_launched, pass_on_ddp_timeout
from hf_axonn.distributed.collectives import reduce_
from hf_axonn.distributed.consistency import argument_facts, assert_same_on_all_ranks
from hf_axonn.distributed.mesh import ROWS, SAME_SAMPLES
from hf_axonn.distributed.watchdog.progress import PROGRESS
from hf_axonn.engine.dtensors import whole
from hf_axonn.engine.parameter_counts import num_parameters
from hf_axonn.engine.state import parallel_state
from hf_axonn.losses.vocab_parallel import ShardedCausalLMLoss
from hf_axonn.trainer import accumulation, hub, liger, restarts, resume, rollouts, saving, smoothing, trl, watching


TRL_BASE = "trl.trainer.base_trainer"
SCHEDULE_FREE = ("schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd")
LOW_BIT = ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit")
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop", *SCHEDULE_FREE, *LOW_BIT)


def install_when_imported() -> None:
    """Wrap Trainer, its arguments and TRL's head, each as soon as it is imported; what has been is wrapped now."""
    after_import("transformers.training_args", pass_on_ddp_timeout)
    after_import("transformers.training_args", compute_where_launched)
    after_import("transformers.trainer", _install_trainer)
    after_import(trl.MODULE, trl.install)
    install_cards_of_trl()
    rollouts.install_when_imported()


def install_cards_of_trl() -> None:
    """Wrap the method by which TRL's trainers write model cards, as soon as it is imported: it replaces Trainer's."""
    after_import(TRL_BASE, _install_cards)


def _install_cards() -> None:
    _wrap(vars(sys.modules[TRL_BASE])["_BaseTrainer"], (hub.create_model_card,))


def _install_trainer() -> None:
    install(sys.modules["transformers.trainer"].Trainer)


def install(trainer_class: type) -> None:
    """Wrap the methods of Trainer, once; all of them, or none if one is missing.

    Raises:
        AttributeError: this release of Transformers has no such method.
    """
    if "axonn_wrapped" in vars(trainer_class):
        return
    _wrap(trainer_class, WRAPPERS)
    _install_functions()


def _wrap(trainer_class: type, wrappers: Iterable[Callable]) -> None:
    if "axonn_wrapped" in vars(trainer_class):
        return
    methods = {wrapper.__name__: getattr(trainer_class, wrapper.__name__) for wrapper in wrappers}
    for wrapper in wrappers:  # some methods have two, the later one around the earlier
        original = methods[wrapper.__name__]
        methods[wrapper.__name__] = around_method(original, wrapper)
    for name, method in methods.items():
        setattr(trainer_class, name, method)
    trainer_class.axonn_wrapped = True


def _install_functions() -> None:
    """Replace functions that Trainer calls, and scripts, too: for the last checkpoint, and to count parameters."""
    from transformers import trainer, trainer_pt_utils, trainer_utils

    within: Any = trainer
    find, patch = trainer_utils.get_last_checkpoint, within.apply_liger_kernel
    ours = functools.wraps(find)(functools.partial(resume.get_last_checkpoint, find))
    trainer_utils.get_last_checkpoint = within.get_last_checkpoint = ours
    count = within.get_model_param_count
    counting = functools.wraps(count)(functools.partial(_get_model_param_count, count))
    trainer_pt_utils.get_model_param_count = within.get_model_param_count = counting
    within.apply_liger_kernel = functools.wraps(patch)(functools.partial(liger.apply_liger_kernel, patch))


def _get_model_param_count(original: Callable, model: nn.Module, trainable_only: bool = False) -> int:
    return num_parameters(model, trainable_only) if parallel_state(model) else original(model, trainable_only)


def _plugin(trainer):
    """Return the AxonnPlugin of this Trainer, where its grid has more than one rank."""
    plugin = getattr(trainer.accelerator, "axonn_plugin", None)
    return plugin if plugin is not None and plugin.grid.size > 1 else None


def create_accelerator_and_postprocess(self, original: Callable) -> None:
    """Shard a plain model before anything else looks at it."""
    original()
    _make_ready(self)


def _prepare_for_training(self, original: Callable, *args, **kwargs):
    """Set TRL's `_tp_size`, by which it divides what it gathers, to 1: `gather` counts samples once. Trained weights
    become float32 before the optimizer is made."""
    if _plugin(self) is not None and hasattr(self, "_tp_size"):
        self._tp_size = 1
        trl.freeze_references(self)
    resume.make_trained_weights_float32(self)
    return original(*args, **kwargs)


def _move_model_to_device(self, original: Callable, model: nn.Module, device: torch.device) -> None:
    """Leave shards on the CPU where they are: Trainer names it cpu:0, for which torch copies all that is on cpu."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    if parallel_state(model) is None or device.type != "cpu" or any(tensor.device.type != "cpu" for tensor in tensors):
        original(model, device)


def _make_ready(self) -> None:
    """Refuse what a grid cannot do, and shard a model that is not."""
    plugin = _plugin(self)
    if plugin is None:
        if isinstance(self.model, nn.Module) and parallel_state(self.model) is not None:
            raise ValueError(
                "the model is sharded over a grid, but this Trainer does not know of one: start with accelerate "
                "launch --config axonn.yaml, or pass parallelism_config=AxonnPlugin(grid=...) in its arguments."
            )
        return
    refused = {
        "fp16 on CPUs": self.args.fp16 and self.args.device.type == "cpu",  # accelerate would ignore it
        "auto_find_batch_size": self.args.auto_find_batch_size,  # a rank without memory leaves others in a collective
        "fp16_full_eval": self.args.fp16_full_eval,
        "bf16_full_eval": self.args.bf16_full_eval,
        "eval_use_gather_object": self.args.eval_use_gather_object,  # Trainer joins lists of rows, and loses some
        "save_on_each_node": self.args.save_on_each_node,  # a checkpoint is one directory that all nodes see
        "fsdp": bool(self.args.fsdp),
        "fsdp_config": bool(self.args.fsdp_config),
        "deepspeed": bool(self.args.deepspeed),
        "activation_offloading": getattr(self.args, "activation_offloading", False),
        # Its noise has the size and the shape of whole rows.
        "neftune_noise_alpha with context": self.args.neftune_noise_alpha is not None and plugin.grid.context > 1,
        # Another engine, which holds the whole model on each rank.
        "use_transformers_continuous_batching": getattr(self.args, "use_transformers_continuous_batching", False),
    }
    for name, requested in refused.items():
        if requested:
            raise ValueError(f"{name} is not supported over a grid ({plugin.grid}): omit it.")
    # Others keep projections or norms of a full tensor, which shards do not have, or were not compared.
    optim = getattr(self.args.optim, "value", self.args.optim)
    if optim not in OPTIMIZERS:
        raise ValueError(
            f"optim={optim} is not supported over a grid ({plugin.grid}): choose one of {', '.join(OPTIMIZERS)}."
        )
    trl.check_trainer(self, plugin.grid)
    if self.args.use_liger_kernel:
        liger.check(self.args, self.accelerator.state.dynamo_plugin.backend, self.model, plugin.grid)
    self.accelerator.counts_processes = True  # but for losses (`_count_dp_ranks`): it divides by `tp_size`
    if self.model is not None:
        shard_plain_model(self.model, plugin, self.args.device)


def call_model_init(self, original: Callable, *args, **kwargs) -> nn.Module:
    """Shard a model that `model_init` makes like any other."""
    model = original(*args, **kwargs)
    plugin = _plugin(self)
    if plugin is not None:
        shard_plain_model(model, plugin, self.args.device)
    return model


def _get_num_items_in_batch(self, original: Callable, *args, **kwargs):
    """Keep Trainer from dividing its count by the ranks that share samples, which `gather` counts once (up to 5.22 it
    divides to an integer)."""
    with replace_attributes({(self, "get_tp_size"): lambda: 1} if _plugin(self) is not None else {}):
        return original(*args, **kwargs)


def _get_train_sampler(self, original: Callable, *args, **kwargs):
    """Adapt samplers that shuffle or divide by themselves to the grid."""
    sampler, plugin = original(*args, **kwargs), _plugin(self)
    if plugin is None:
        return sampler
    from hf_axonn.trainer.samplers import for_grid

    rank, dispatched = self.args.process_index, bool(self.accelerator.dispatch_batches)
    return for_grid(sampler, plugin.grid, rank, self.args.train_batch_size, dispatched=dispatched)


def _get_dataloader(self, original: Callable, *args, **kwargs):
    """Let workers of ranks that share samples draw the same numbers: Trainer seeds them by the rank."""
    loader, plugin = original(*args, **kwargs), _plugin(self)
    if plugin is not None and (seed := loader.base_dataloader.worker_init_fn) is not None:
        rank = plugin.grid.place(self.args.process_index).index(*ROWS)
        loader.base_dataloader.worker_init_fn = functools.partial(seed, rank=rank)
    return loader


def num_examples(self, original: Callable, dataloader: Any) -> int:
    """Count rows, also where the data set of a loader has batches, as rank 0 reads for all."""
    from hf_axonn.accelerator.dispatching import rows_read

    rows = rows_read(dataloader)
    return original(dataloader) if rows is None else rows


def evaluation_loop(self, original: Callable, dataloader: Any, *args, **kwargs) -> Any:
    """Count samples as `num_examples` does: by them Trainer tells its speed."""
    from hf_axonn.accelerator.dispatching import rows_read

    output, rows = original(dataloader, *args, **kwargs), rows_read(dataloader)
    return output if rows is None else type(output)(*output[:-1], rows)


def floating_point_ops(self, original: Callable, *args, **kwargs) -> int:
    """Count on one of the ranks that share samples: Trainer adds up over all ranks."""
    plugin = _plugin(self)
    if plugin is not None:
        here = plugin.grid.place(self.args.process_index)
        if here.index(*SAME_SAMPLES):
            return 0
    return original(*args, **kwargs)


def _count_dp_ranks(self) -> contextlib.AbstractContextManager[None]:
    """Let `accelerator.num_processes` be what Trainer multiplies a loss by, as code of one's own does, too, in a
    `compute_loss` or a `compute_loss_func`."""
    counted = {(self, "get_tp_size"): lambda: 1, (self.accelerator, "counts_processes"): False}
    return replace_attributes(counted if _plugin(self) is not None else {})


def compute_loss(self, original: Callable, model: nn.Module, *args, **kwargs):
    """Divide a loss by the items of this (data, z), and take no share, without `average_tokens_across_devices`."""
    state = parallel_state(model)
    if state is None or self.args.average_tokens_across_devices:
        return original(model, *args, **kwargs)
    with state.context.own_items():
        return original(model, *args, **kwargs)


def prediction_step(
    self,
    original: Callable,
    model: nn.Module,
    inputs: dict[str, Any],
    prediction_loss_only: bool,
    ignore_keys: list[str] | None = None,
):
    """Leave logits to the loss where an evaluation returns nothing else.

    Where context divides rows, the loss is the mean over its ranks: a term that the model adds is of a rank's
    positions, and an evaluation counts these ranks once. Collective: then an all-reduce of it over context.
    """
    state = parallel_state(model)
    loss = getattr(without_peft(self.accelerator.unwrap_model(model)), "loss_function", None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_count_dp_ranks(self))
        if prediction_loss_only and isinstance(loss, ShardedCausalLMLoss):
            stack.enter_context(loss.alone())
        found, *others = original(model, inputs, prediction_loss_only, ignore_keys)
    if found is not None and state is not None and state.grid_mesh.size("context") > 1:
        found = reduce_(found.clone(), state.grid_mesh.group("context")) / state.grid_mesh.size("context")
    return found, *others


def get_num_trainable_parameters(self, original: Callable) -> int:
    """Count those of all stages over pipe."""
    return num_parameters(self.model, only_trainable=True) if parallel_state(self.model) else original()


def train(self, original: Callable, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
    """Refuse ranks with different arguments. Collectives: those of `assert_same_on_all_ranks`, then Trainer's."""
    if _plugin(self) is not None:
        facts = argument_facts(self.args) | {"resume_from_checkpoint": resume_from_checkpoint}
        assert_same_on_all_ranks(facts, self.args.device, "Give every rank the same arguments of Trainer.")
    return original(resume_from_checkpoint, *args, **kwargs)


def training_step(self, original: Callable, *args, **kwargs):
    """Note the step, which a resumed run does not count from one."""
    PROGRESS.done = self.state.global_step
    state = parallel_state(self.model)
    with contextlib.nullcontext() if state is None else state.context.run_by_trainer(), _count_dp_ranks(self):
        loss = original(*args, **kwargs)
    return whole(loss)  # a penalty may have made it a DTensor, which Trainer adds in place


WRAPPERS = (
    create_accelerator_and_postprocess,
    _move_model_to_device,
    _get_train_sampler,
    _get_dataloader,
    num_examples,
    evaluation_loop,
    floating_point_ops,
    _prepare_for_training,
    call_model_init,
    _get_num_items_in_batch,
    compute_loss,
    prediction_step,
    get_num_trainable_parameters,
    *saving.WRAPPERS,
    *resume.WRAPPERS,
    *restarts.WRAPPERS,
    train,
    *accumulation.WRAPPERS,
    training_step,
    *smoothing.WRAPPERS,
    *hub.WRAPPERS,
    *watching.WRAPPERS,
)
