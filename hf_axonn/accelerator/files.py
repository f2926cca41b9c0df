"""Files of accelerate over a grid: full models in the ordinary format, and states that any grid resumes from.

    save_model                    gathered to rank 0 tensor by tensor, as ordinary files
    get_state_dict                gathered to rank 0, as accelerate does under FSDP
    save_state, load_state        a sharded checkpoint (checkpoint/sharded.py), which has these files, too:

        accelerator.json              steps, numbers of models, schedulers and registered objects, order of samples
        scheduler.bin, scheduler_1.bin ...       custom_checkpoint_0.pkl ...        random_states_RANK.pkl
        scaler.pt, sampler.bin, dl_state_dict.bin                 where accelerate itself writes them
        model_1-SAVE ...              further models, sharded checkpoints of their own

Everything that is loaded is compared with its checksum first, and nothing but tensors and plain values is unpickled.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.checkpointing import load_accelerator_state, save_accelerator_state
from accelerate.utils import OPTIMIZER_NAME, RNG_STATE_NAME, SAFE_WEIGHTS_NAME, SCALER_NAME
from torch import nn
from torch.distributed.tensor import DTensor

from hf_axonn.accelerator.shuffling import SampleOrder
from hf_axonn.accelerator.training import GridScheduler
from hf_axonn.checkpoint.full_state import full_state_dict, is_sharded
from hf_axonn.checkpoint.manifest import Manifest, is_sharded_checkpoint
from hf_axonn.checkpoint.safe_pickle import load_values, save_values
from hf_axonn.checkpoint.sharded import (
    add_model,
    begin_save,
    load_model,
    load_optimizer,
    save_sharded,
    verify_together,
)
from hf_axonn.checkpoint.single_process import load_plain_optimizer, load_plain_weights
from hf_axonn.checkpoint.torch_folders import find_torch_folder, name_unread
from hf_axonn.checkpoint.whole_files import save_whole
from hf_axonn.compat.accelerate import (
    prepared_loaders,
    prepared_models,
    prepared_optimizers,
    prepared_schedulers,
    registered_objects,
    state_hooks,
)
from hf_axonn.compat.replaced import replace_attributes
from hf_axonn.compat.torch import refuse_pickle, tensors_in
from hf_axonn.distributed.collectives import barrier, leave_world, world_rank
from hf_axonn.engine.state import parallel_state


STATE = "accelerator.json"


class LoadMethods:
    """Methods of Accelerator, on a grid of any size."""

    scaler: torch.amp.GradScaler | None  # of Accelerator: the one of fp16

    @functools.cached_property
    def sample_order(self) -> SampleOrder:
        """The order in which the loaders shuffle; made with the first of them."""
        return SampleOrder()

    def load_state(self, input_dir: str | None = None, load_kwargs: dict | None = None, **kwargs) -> None:
        """Load a state of any grid or of one process. Every rank must call it.

        On another number of ranks, a rank without a random state of its own takes that of rank 0.

        Raises:
            ValueError: the state is not complete, damaged, or of other models, optimizers, schedulers or registered
                objects; on every rank, before anything is changed.
        Collectives: those of `verify_together`, for each model.
        """
        directory = self._newest_state() if input_dir is None else Path(os.path.expanduser(input_dir))
        if not is_sharded_checkpoint(directory):
            return self._load_plain_state(directory, load_kwargs, kwargs)
        models = prepared_models(self)
        optimizer_of = self._optimizer_of()
        manifest = verify_together(directory)
        state = self._read_state(directory, manifest)
        places = [directory / name for name in state["models"]]
        manifests = [manifest, *(verify_together(place) for place in places[1:])]
        left = self._call_load_hooks(models, directory)
        for index, (model, place, saved) in enumerate(zip(models, places, manifests, strict=True)):
            if model in left:
                load_model(model, place, saved)
            if index in optimizer_of:
                load_optimizer(model, optimizer_of[index], place, saved)
        rank = world_rank() if random_file(world_rank()) in manifest.files else 0
        self._read_rest(directory, rank, load_kwargs)
        self._follow_schedules(state["positions"])
        if SCALER_NAME in manifest.files:
            self._load_scaler(directory)
        if "order" in state:  # not of 0.1.0
            self.sample_order.resume(state["order"], prepared_loaders(self))
        self.step = state["step"]

    def _call_load_hooks(self, models: list[nn.Module], directory: Path) -> list[nn.Module]:
        """Return the models that are still to be loaded: a hook takes those that it has loaded out of its list."""
        left = list(models)
        for hook in state_hooks(self, saving=False):
            hook(left, str(directory))
        return left

    def _newest_state(self) -> Path:
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("load_state needs an input_dir, or automatic_checkpoint_naming.")
        folder = Path(self.project_dir, "checkpoints")
        found = states_in(folder)
        if not found:
            raise ValueError(f"{folder} holds no state to load.")
        return found[-1]

    def _read_state(self, directory: Path, manifest: Manifest) -> dict[str, Any]:
        """Read accelerator.json, and refuse a state of other objects than this run has."""
        if STATE not in manifest.files:
            raise ValueError(f"{directory} was not written by accelerator.save_state: load it with load_sharded.")
        state = json.loads((directory / STATE).read_text())
        for name in state["models"][1:]:
            if not re.fullmatch(r"model_\d+-[0-9a-f]+", name) or (directory / name).is_symlink():
                raise ValueError(f"{directory / STATE} names {name}, which may lie outside of the checkpoint.")
        kinds = {"models": len(state["models"]), "schedulers": state["schedulers"], "objects": state["objects"]}
        self._refuse_other_numbers(directory, kinds)
        dp_size = self.axonn_plugin.grid.dp_size
        if self.use_stateful_dataloader and state["positions"] != dp_size:
            raise ValueError(
                f"{directory} was saved with data * z / context = {state['positions']}, and the places of stateful "
                f"data loaders are of no use with {dp_size}: use skip_first_batches, or load it on such a grid."
            )
        return state

    def _refuse_other_numbers(self, directory: Path, saved: dict[str, int]) -> None:
        """Compare how many objects of a kind a state has with how many this run has."""
        for kind, what, objects in (
            ("models", "models", prepared_models(self)),
            ("schedulers", "schedulers", prepared_schedulers(self)),
            ("objects", "registered objects", registered_objects(self)),
        ):
            if kind in saved and saved[kind] != len(objects):
                raise ValueError(f"{directory} holds {saved[kind]} {what}, but this run has {len(objects)}.")

    def _follow_schedules(self, saved: int) -> None:
        """Continue schedules that were saved where a step of the optimizer was `saved` steps of the schedule.

        A LambdaLR has its lengths from this run's script, which counts the batches of this grid: its place is
        converted. The others bring their lengths with them, so they continue in the steps of the grid they come from.
        """
        dp_size = self.axonn_plugin.grid.dp_size
        for scheduler in prepared_schedulers(self):
            if scheduler.split_batches or not scheduler.step_with_optimizer or dp_size == saved:
                continue
            if isinstance(scheduler.scheduler, torch.optim.lr_scheduler.LambdaLR):
                scheduler.scheduler.last_epoch = scheduler.scheduler.last_epoch * dp_size // saved
            else:
                scheduler.__class__, scheduler.dp_size = GridScheduler, saved

    def _load_plain_state(self, directory: Path, load_kwargs: dict | None, kwargs: dict) -> None:
        """Load a state that stock accelerate saved, on one process or by FSDP2: each rank reads its own slices."""
        if self.axonn_plugin.grid.size == 1:
            return super().load_state(str(directory), load_kwargs, **kwargs)
        models, optimizer_of = prepared_models(self), self._optimizer_of()
        weights = (directory / SAFE_WEIGHTS_NAME).is_file() or find_torch_folder(directory) is not None
        if not (weights or state_hooks(self, saving=False)):  # a hook may have left the weights out
            raise ValueError(
                f"{directory} holds no state of accelerator.save_state that is complete.{name_unread(directory)}"
            )
        if len(models) != 1:
            raise ValueError(f"{directory} was saved without a grid, which reads only one model of such a state.")
        self._refuse_other_numbers(directory, {"objects": len([*directory.glob(custom_file("*"))])})
        for model in self._call_load_hooks(models, directory):
            load_plain_weights(model, directory)
        if 0 in optimizer_of:
            load_plain_optimizer(models[0], optimizer_of[0], directory, name=f"{OPTIMIZER_NAME}.bin")
        self.step = self._read_rest(directory, 0, load_kwargs).get("step", self.step)
        self._follow_schedules(max(1, len(list(directory.glob(f"{RNG_STATE_NAME}_*.pkl")))))  # one of each process
        if (directory / SCALER_NAME).is_file():
            self._load_scaler(directory)

    def _load_scaler(self, directory: Path) -> None:
        """Load the scale of fp16; a run of another precision has no use for it."""
        if self.scaler is not None:
            self.scaler.load_state_dict(load_values(directory / SCALER_NAME))

    def _read_rest(self, directory: Path, rank: int, load_kwargs: dict | None) -> dict[str, Any]:
        """Read what `_write_rest` wrote, with the random state of `rank`; return what accelerate keeps itself."""
        attributes = load_accelerator_state(
            str(directory),
            [],
            [],
            prepared_schedulers(self),
            prepared_loaders(self),
            rank,
            None,
            "cpu",
            load_kwargs,
        )
        for index, registered in enumerate(registered_objects(self)):
            registered.load_state_dict(load_values(directory / custom_file(index)))
        return attributes

    def _optimizer_of(self) -> dict[int, torch.optim.Optimizer]:
        """Return the optimizer of each prepared model that has one, by the model's index."""
        models = prepared_models(self)
        found: dict[int, torch.optim.Optimizer] = {}
        for optimizer in prepared_optimizers(self):
            trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            owners = [i for i, model in enumerate(models) if trained & {id(one) for one in model.parameters()}]
            if len(owners) != 1 or owners[0] in found:
                raise ValueError(
                    f"save_state and load_state over a grid need one optimizer for each model, but "
                    f"{type(optimizer.optimizer).__name__} trains {len(owners)} of the {len(models)} prepared models"
                    f"{', and another one trains that, too' if len(owners) == 1 else ''}. Save each with "
                    "hf_axonn.save_sharded(model, DIR, optimizer=optimizer)."
                )
            found[owners[0]] = optimizer
        return found


class FileMethods(LoadMethods):
    """Methods of Accelerator."""

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return whole tensors on the CPU of rank 0, nothing on the others, as under FSDP. Every rank must call it."""
        state_dict = super().get_state_dict(model, unwrap=unwrap)
        return full_state_dict(model, state_dict) if is_sharded(state_dict) else state_dict

    def save(self, obj: Any, f: str | os.PathLike, safe_serialization: bool = False) -> None:
        """Save as the stock method.

        Raises:
            ValueError: the object holds shards, be it in lists and dicts; on every rank that has them.
        """
        if any(isinstance(tensor, DTensor) for tensor in tensors_in(obj)):
            refuse_pickle()
        super().save(obj, f, safe_serialization=safe_serialization)  # type: ignore[misc]  # of Accelerator

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model, by rank 0. Every rank must call it, and continues when the files are there.

        Of a sharded model one tensor after the other is gathered and written, but for `safe_serialization=False`,
        which needs the full model on rank 0.

        Raises:
            SaveError: rank 0 cannot write; on every rank.
        Collectives: those of `save_whole`, or of `get_state_dict` and a barrier.
        """
        if safe_serialization and parallel_state(model) is not None:
            return save_whole(model, save_directory, max_shard_size)
        super().save_model(model, save_directory, max_shard_size, safe_serialization)  # type: ignore[misc]
        barrier()

    def wait_for_everyone(self) -> None:
        """Wait for all ranks, without a limit of time: one may have worked alone before."""
        barrier()

    def end_training(self) -> None:
        """End trackers as the stock method. The ranks part at the end of the script: many a script saves its model
        after this call, as one process can, and here each rank has a part of it."""
        atexit.register(leave_world)
        with replace_attributes({(PartialState, "destroy_process_group"): lambda *_: None}):
            super().end_training()  # type: ignore[misc]  # of Accelerator

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs) -> str:
        """Save a sharded state: every rank must call it. An earlier one stays until this is complete.

        Args:
            output_dir: which all ranks must see; not used with automatic_checkpoint_naming.
            safe_serialization: weights are always safetensors.
            kwargs: of accelerate, for other engines; not used.
        Raises:
            ValueError: models and optimizers do not belong together one to one, or the directory that automatic
                naming gives exists already.
            SaveError: a rank could not write, or a registered object has a state of other things than tensors and
                plain values; on every rank.
        Collectives: those of `save_sharded`, for each model.
        """
        models = prepared_models(self)
        optimizer_of = self._optimizer_of()
        directory, older = self._place_of_state(output_dir)
        if not models or any(parallel_state(model) is None for model in models):
            raise ValueError("save_state needs models that were given to accelerator.prepare.")
        self._call_save_hooks(models, directory)
        save = begin_save(models[0], directory)
        names = [""]
        for index, model in enumerate(models[1:], start=1):
            names.append(f"model_{index}-{save.save_id[:8]}")
            save_sharded(model, directory / names[-1], optimizer=optimizer_of.get(index))
        add_model(save, models[0], optimizer=optimizer_of.get(0))
        with save.writing():
            self._write_rest(save, names)
        save.close()
        self.project_configuration.iteration += 1
        if world_rank() == 0:
            for path in [*older, *directory.glob("model_*-*")]:
                if path in older or path.name not in names:
                    shutil.rmtree(path, ignore_errors=True)
        return str(directory)

    def _call_save_hooks(self, models: list[nn.Module], directory: Path) -> None:
        hooks = state_hooks(self, saving=True)
        if hooks:
            directory.mkdir(parents=True, exist_ok=True)  # hooks may write into it
        for hook in hooks:
            hook(models, [{} for _ in models], str(directory))

    def _place_of_state(self, output_dir: str | None) -> tuple[Path, list[Path]]:
        """Return the directory of a new state, and the older ones to remove when it is complete."""
        project = self.project_configuration
        if not project.automatic_checkpoint_naming:
            if output_dir is None:
                raise ValueError("save_state needs an output_dir, or automatic_checkpoint_naming.")
            return Path(output_dir), []
        folder = Path(self.project_dir, "checkpoints")
        directory = folder / f"checkpoint_{self.save_iteration}"
        found = states_in(folder)
        barrier()  # all have looked before one makes it
        if directory.exists():
            raise ValueError(
                f"{directory} exists already: set project_configuration.iteration to the number to go on with."
            )
        keep = project.total_limit
        return directory, found[: max(0, len(found) + 1 - keep)] if keep else []

    def _write_rest(self, save, names: list[str]) -> None:
        """Write accelerate's files beside models and optimizers: each rank its random state, rank 0 the rest."""
        objects = registered_objects(self)
        states = [registered.state_dict() for registered in objects]  # on every rank: one may gather what is sharded
        save_accelerator_state(
            str(save.stage),
            [],
            [],
            prepared_schedulers(self),
            prepared_loaders(self) if save.rank == 0 else [],
            save.rank,
            self.step,
        )
        save.claim(random_file(save.rank))
        if save.rank != 0:
            return
        for index, (registered, values) in enumerate(zip(objects, states, strict=True)):
            save_values(values, save.stage / custom_file(index), what=type(registered).__name__)
        if self.scaler is not None:
            save_values(self.scaler.state_dict(), save.stage / SCALER_NAME, what="the GradScaler")
        state = {
            "step": self.step,
            "models": names,
            "schedulers": len(prepared_schedulers(self)),
            "objects": len(objects),
            "positions": save.grid.dp_size,  # the name of 0.1.0
            "order": self.sample_order.state(prepared_loaders(self)),
        }
        (save.stage / STATE).write_text(json.dumps(state, indent=1))


def random_file(rank: int) -> str:
    """Return the name of accelerate's file of the random state of a rank."""
    return f"random_states_{rank}.pkl"


def custom_file(index: int | str) -> str:
    """Return the name of accelerate's file of an object that `register_for_checkpointing` was given."""
    return f"custom_checkpoint_{index}.pkl"


def states_in(folder: Path) -> list[Path]:
    """Return the directories checkpoint_N of automatic_checkpoint_naming, the largest N last."""
    found = [path for path in folder.glob("checkpoint_*") if re.fullmatch(r"checkpoint_\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.rpartition("_")[2]))
