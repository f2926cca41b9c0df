"""What Transformers' Trainer must do otherwise for a parallelized model, and for no other.

Trainer saves and loads on rank 0 and has no place to plug this in, so a few methods of the class are wrapped. With a
plain model and a plain checkpoint each wrapper calls the stock method and nothing else.

Checked with transformers 5.23.0 (trainer.py).
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from hf_axonn.checkpoint import is_sharded_checkpoint, load_optimizer, load_sharded, save_sharded
from hf_axonn.collectives import barrier
from hf_axonn.gradients import find_state
from hf_axonn.plain_checkpoint import load_plain_optimizer, load_plain_weights
from hf_axonn.plugin import AxonnPlugin, shard_plain_model


def install_when_imported() -> None:
    """Wrap Trainer now if it has been imported, else as soon as it is.

    A script that begins with `from transformers import Trainer` imports accelerate, and so comes here, while Trainer's
    own module is half executed. Then nothing is done: every AxonnPlugin comes here again when it is made.
    """
    from hf_axonn._autoload import after_import

    module = sys.modules.get("transformers.trainer")
    if module is None:
        after_import("transformers.trainer", lambda: install(sys.modules["transformers.trainer"].Trainer))
    elif hasattr(module, "Trainer"):
        install(module.Trainer)


def install(trainer_class: type) -> None:
    """Wrap the methods of Trainer, once."""
    if "_axonn_wrapped" in vars(trainer_class):
        return
    trainer_class._axonn_wrapped = True
    for wrapper in WRAPPERS:
        name = wrapper.__name__
        original = getattr(trainer_class, name)
        setattr(trainer_class, name, functools.wraps(original)(_bound(wrapper, original)))


def _bound(wrapper: Callable, original: Callable) -> Callable:
    def method(self, *args, **kwargs):
        return wrapper(self, functools.partial(original, self), *args, **kwargs)

    return method


def _plugin(trainer) -> AxonnPlugin | None:
    plugin = getattr(trainer.accelerator, "parallelism_config", None)
    return plugin if isinstance(plugin, AxonnPlugin) and plugin.grid.size > 1 else None


def create_accelerator_and_postprocess(self, original: Callable) -> None:
    """A plain model is sharded before anything else looks at it."""
    original()
    _make_ready(self)


def _prepare_for_training(self, original: Callable, *args, **kwargs):
    """The first Trainer of a process may have been made before this class was wrapped."""
    _make_ready(self)
    return original(*args, **kwargs)


def _make_ready(self) -> None:
    """Refuse what a grid cannot do, and shard a model that is not."""
    plugin = _plugin(self)
    if plugin is None:
        if isinstance(self.model, nn.Module) and find_state(self.model) is not None:
            raise ValueError(
                "the model is sharded over a grid, but this Trainer does not know of one: start with accelerate "
                "launch --config axonn.yaml, or pass parallelism_config=AxonnPlugin(grid=...) in its arguments."
            )
        return
    refused = {
        "torch_compile": self.args.torch_compile,
        "fp16": self.args.fp16,
        "use_liger_kernel": self.args.use_liger_kernel,
        "auto_find_batch_size": self.args.auto_find_batch_size,
        "fp16_full_eval": self.args.fp16_full_eval,
        "bf16_full_eval": self.args.bf16_full_eval,
        "fsdp": bool(self.args.fsdp),
        "deepspeed": bool(self.args.deepspeed),
        f"optim={self.args.optim}": "bit" in str(self.args.optim) or "bnb" in str(self.args.optim),
    }
    for name, asked in refused.items():
        if asked:
            raise ValueError(f"{name} is not supported over a grid ({plugin.grid}): leave it away.")
    if self.model is not None:
        shard_plain_model(self.model, plugin, self.args.device)


def call_model_init(self, original: Callable, *args, **kwargs) -> nn.Module:
    """A model that `model_init` makes is sharded like any other."""
    model = original(*args, **kwargs)
    plugin = _plugin(self)
    if plugin is not None:
        shard_plain_model(model, plugin, self.args.device)
    return model


def _get_num_items_in_batch(self, original: Callable, *args, **kwargs):
    """Trainer divides its count by the ranks that share samples; ours are counted once by `gather` already."""
    count = original(*args, **kwargs)
    return count * self.get_tp_size() if torch.is_tensor(count) and _plugin(self) is not None else count


def _save(self, original: Callable, output_dir: str | None = None, state_dict: dict | None = None) -> None:
    """Every rank writes its shards; rank 0 the tokenizer and the arguments, as the stock method does."""
    if find_state(self.model) is None:
        return original(output_dir, state_dict=state_dict)
    output_dir = output_dir if output_dir is not None else self.args.output_dir
    optimizer = None if self.args.save_only_model or not self.is_in_train else self.optimizer
    if self.args.should_save:
        os.makedirs(output_dir, exist_ok=True)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(output_dir)
        torch.save(self.args, os.path.join(output_dir, "training_args.bin"))
    barrier()
    save_sharded(self.model, output_dir, optimizer=optimizer)


def _save_optimizer_and_scheduler(self, original: Callable, output_dir: str) -> None:
    """The optimizer's shards were written with the weights, under one manifest; the scheduler is rank 0's."""
    if find_state(self.model) is None:
        return original(output_dir)
    if self.args.should_save:
        torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))


def _load_from_checkpoint(
    self, original: Callable, resume_from_checkpoint: str, model: nn.Module | None = None
) -> None:
    """All ranks read a sharded checkpoint, on whatever grid they are now; a plain one is cut while it is read."""
    model = self.model if model is None else model
    if is_sharded_checkpoint(resume_from_checkpoint):
        return load_sharded(model, resume_from_checkpoint)
    if find_state(model) is not None:
        return load_plain_weights(model, resume_from_checkpoint)
    return original(resume_from_checkpoint, model=model)


def _load_best_model(self, original: Callable) -> None:
    """As `_load_from_checkpoint`."""
    if is_sharded_checkpoint(self.state.best_model_checkpoint):
        return load_sharded(self.model, self.state.best_model_checkpoint)
    if find_state(self.model) is not None:  # training began on one process
        return load_plain_weights(self.model, self.state.best_model_checkpoint)
    return original()


def _load_optimizer_and_scheduler(self, original: Callable, checkpoint: str | None) -> None:
    """As `_load_from_checkpoint`; the scheduler is read by every rank."""
    if checkpoint is None or not (is_sharded_checkpoint(checkpoint) or find_state(self.model) is not None):
        return original(checkpoint)
    load = load_optimizer if is_sharded_checkpoint(checkpoint) else load_plain_optimizer
    load(self.model, self.optimizer, checkpoint)
    scheduler = os.path.join(checkpoint, "scheduler.pt")
    self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))


def _load_rng_state(self, original: Callable, checkpoint: str | None) -> None:
    """On another number of ranks a rank without a file of its own takes that of rank 0: all started from one seed."""
    if checkpoint is None or not (is_sharded_checkpoint(checkpoint) or find_state(self.model) is not None):
        return original(checkpoint)
    wanted = f"rng_state_{self.args.process_index}.pth" if self.args.world_size > 1 else "rng_state.pth"
    saved = [Path(checkpoint, name) for name in (wanted, "rng_state_0.pth", "rng_state.pth")]
    first = next((path for path in saved if path.is_file()), saved[0])
    if first == saved[0]:
        return original(checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, wanted).symlink_to(first.resolve())
        return original(folder)


WRAPPERS = (
    create_accelerator_and_postprocess,
    _prepare_for_training,
    call_model_init,
    _get_num_items_in_batch,
    _save,
    _save_optimizer_and_scheduler,
    _load_from_checkpoint,
    _load_best_model,
    _load_optimizer_and_scheduler,
    _load_rng_state,
)
