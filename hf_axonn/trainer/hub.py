"""Uploads of a Trainer on a grid: an ordinary model repository, as from one process.

The stock methods upload the output directory. On a grid that holds shards and their manifest, which
`AutoModelForCausalLM.from_pretrained("user/name")` does not look for on the hub. So the shards become ordinary
safetensors files first, on rank 0 and tensor by tensor (checkpoint/export.py). Checkpoints beside the model, which
`hub_strategy="checkpoint"` uploads to resume from, stay as they are.

Each function wraps the method of Trainer that has its name (hooks.py). Checked with transformers 5.20 to 5.24.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from hf_axonn.checkpoint.export import export_hf, remove_ordinary
from hf_axonn.checkpoint.manifest import MANIFEST, SHARDS, is_sharded_checkpoint, read_manifest
from hf_axonn.compat.replaced import replace_attributes
from hf_axonn.compat.transformers import save_on_every_rank
from hf_axonn.distributed.collectives import barrier, broadcast_text, world_rank
from hf_axonn.distributed.consistency import first_problem, raise_on_all_ranks
from hf_axonn.distributed.mesh import SAME_SAMPLES
from hf_axonn.distributed.watchdog.progress import PROGRESS
from hf_axonn.engine.state import parallel_state
from hf_axonn.trainer.model_card import CARD, add_run


EXPORTED = "_axonn-hub"  # what begins with _ is never uploaded
TOTAL = re.compile(r"(total_(?:train|eval)_batch_size: )(\d+)")


def init_hf_repo(self, original: Callable, *args, **kwargs) -> None:
    """Make the repository on rank 0, and tell all ranks its name, or that it cannot be made.

    Raises:
        ValueError: the hub refused, or cannot be reached; on every rank.
    Collectives: those of `raise_on_all_ranks`, and a broadcast over the world.
    """
    if parallel_state(self.model) is None:
        return original(*args, **kwargs)
    with raise_on_all_ranks(self.args.device):
        original(*args, **kwargs)
    self.hub_model_id = broadcast_text(self.hub_model_id or "", self.args.device)


def push_to_hub(self, original: Callable, *args, **kwargs):
    """Upload the output directory, in which the model is saved as ordinary files.

    An upload that fails is an error on rank 0 alone, as without a grid: a script may go on after it.
    """
    try:
        with replace_attributes({(self, "_axonn_ordinary"): True, (PROGRESS, "work"): ""}):
            return original(*args, **kwargs)
    finally:
        _wait_for_rank_0(self)


def save_model(self, original: Callable, output_dir: str | None = None, _internal_call: bool = False) -> None:
    """Save on every rank; within `push_to_hub` the shards become ordinary files.

    Raises:
        ValueError: rank 0 could not write or remove files; on every rank.
    Collectives: those of the save, and then those of `first_problem`.
    """
    if parallel_state(self.model) is None:
        return original(output_dir, _internal_call=_internal_call)
    directory = Path(output_dir or self.args.output_dir)
    save_on_every_rank(self, str(directory), functools.partial(original, output_dir, _internal_call=_internal_call))
    if getattr(self, "_axonn_save", None) is not None:  # part of a checkpoint
        return
    problem = ""
    if world_rank() == 0 and is_sharded_checkpoint(directory):
        try:
            if getattr(self, "_axonn_ordinary", False):
                make_ordinary(directory)
            else:
                remove_ordinary(directory, keep=read_manifest(directory).files)
        except (OSError, ValueError) as error:
            problem = f"the model could not be made ready for the hub: {error}"
    problem = first_problem(problem, self.args.device)
    if problem:
        raise ValueError(problem)
    if getattr(self, "_axonn_ordinary", False):
        PROGRESS.work = "uploads to the hub"  # the next that `push_to_hub` does


def create_model_card(self, original: Callable, *args, **kwargs) -> None:
    """Add the run to the card that Trainer or TRL writes, on rank 0: for parallelized models, and for trainers that
    keep a training record. Batch sizes are corrected: Trainer takes every rank for a reader of its own samples."""
    original(*args, **kwargs)
    state, directory = parallel_state(self.model), Path(self.args.output_dir)
    recording = hasattr(self, "save_training_record")
    path = directory / CARD
    if not (state is not None or recording) or not self.is_world_process_zero() or not path.is_file():
        return
    if state is not None:
        model = self.accelerator.unwrap_model(self.model)
        if hasattr(model, "peft_config"):
            model.create_or_update_model_card(str(directory))
        copies = state.grid_mesh.size(*SAME_SAMPLES)
        text = TOTAL.sub(lambda found: f"{found[1]}{int(found[2]) // copies}", path.read_text(encoding="utf-8"))
        path.write_text(text, encoding="utf-8")
    add_run(self, directory)


def _push_from_checkpoint(self, original: Callable, checkpoint_folder: str) -> None:
    """Put the model of a sharded checkpoint into the output directory, as ordinary files, before the upload."""
    if self.is_world_process_zero() and self.args.hub_strategy != "end":
        busy = self.push_in_progress is not None and not self.push_in_progress.is_done()
        if (self.args.hub_always_push or not busy) and is_sharded_checkpoint(checkpoint_folder):
            if read_manifest(checkpoint_folder).model:
                place_exported(Path(checkpoint_folder), Path(self.args.output_dir))
    original(checkpoint_folder)
    _wait_for_rank_0(self)


def _finish_current_push(self, original: Callable) -> None:
    """Finish the upload; at the end of training every rank calls this, and waits for rank 0."""
    with replace_attributes({(PROGRESS, "work"): "uploads to the hub"}):
        original()
    if not getattr(self, "_axonn_ordinary", False):
        _wait_for_rank_0(self)


def _wait_for_rank_0(trainer) -> None:
    """Wait without a limit for rank 0, which exports and uploads alone. Collectives: `barrier`, if parallelized."""
    if parallel_state(trainer.model) is not None:
        barrier()


def make_ordinary(directory: Path) -> None:
    """Replace the shards in a directory by ordinary files, and leave everything else. On one process.

    If it is interrupted, either the shards or the ordinary files are complete.

    Raises:
        OSError, ValueError: it is no complete checkpoint, or cannot be written.
    """
    manifest = read_manifest(directory)
    if manifest.model:
        place_exported(directory, directory)
    (directory / MANIFEST).unlink()
    for shard in directory.glob(SHARDS):
        shard.unlink()


def place_exported(source: Path, directory: Path) -> None:
    """Write the model of a sharded checkpoint into a directory as ordinary files, in place of earlier ones."""
    stage = directory / EXPORTED
    shutil.rmtree(stage, ignore_errors=True)
    export_hf(source, stage)
    new = {path.name for path in stage.iterdir()}
    remove_ordinary(directory, keep=new)
    for name in new:
        os.replace(stage / name, directory / name)
    stage.rmdir()


WRAPPERS = (init_hf_repo, push_to_hub, save_model, create_model_card, _push_from_checkpoint, _finish_current_push)
