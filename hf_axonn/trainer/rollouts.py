"""GRPOTrainer and RLOOTrainer of TRL over a grid: the ranks that sample, and the rewards that are compared.

They generate completions, reward them and compare the rewards of a prompt's completions, which may lie on several
processes. For that they count processes; here they count data-parallel ranks:

    generation_batch_size   completions of all data-parallel ranks; ranks of (x, y) share theirs
    set_seed                another seed for each data-parallel rank, so that ranks of (x, y) sample the same tokens
    gather, gather_object   one block for each data-parallel rank; rewards are those of its first rank
    process_index, num_processes   inside the two methods that cut out a rank's own advantages and average a loss

A vLLM server (`use_vllm`, `vllm_mode="server"`) gets the weights of a sharded model as a stream (`WeightStream`), and
each prompt of the data-parallel ranks once; ranks of (x, y) share its completions.

Checked with trl 1.15 and 1.16 (trainer/grpo_config.py, grpo_trainer.py, rloo_config.py, rloo_trainer.py).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from hf_axonn.compat.accelerate import parallelism_in_use
from hf_axonn.compat.post_import import after_import
from hf_axonn.compat.replaced import replace_attributes
from hf_axonn.config import AxonnConfig
from hf_axonn.distributed.collectives import world_rank
from hf_axonn.distributed.mesh import ROWS
from hf_axonn.engine.state import parallel_state
from hf_axonn.parallel.weight_stream import WeightStream
from hf_axonn.topology.grid import Grid


TRAINERS = ("GRPOTrainer", "RLOOTrainer")
METHODS = ("_generate_and_score_completions", "_compute_loss")
GENERATION = "VLLMGeneration"  # TRL's class that speaks to vLLM
OWN_ROLLOUTS = ("tools", "environment_factories", "rollout_func")  # attributes of such a trainer


def install_when_imported() -> None:
    """Wrap methods of both trainers and of their arguments, each as soon as it is imported."""
    for name in TRAINERS:
        module = f"trl.trainer.{name.removesuffix('Trainer').lower()}"
        after_import(f"{module}_config", functools.partial(_install_config, f"{module}_config"))
        after_import(f"{module}_trainer", functools.partial(_install_trainer, f"{module}_trainer", name))


def check_rollouts(trainer: object, grid: Grid) -> None:
    """Refuse completions that come of what every rank would run for itself. Nothing for other trainers.

    Raises:
        ValueError: the trainer was given tools, environments or a rollout function, or vLLM is to run in the ranks, or
            the grid has context.
    """
    if any(base.__name__ in TRAINERS for base in type(trainer).__mro__):
        if grid.context > 1:
            raise ValueError(
                f"{type(trainer).__name__} of TRL is not supported over a grid with context ({grid}): it generates, "
                "and each rank has the keys and values of a part of a row. Use a grid without context."
            )
        args: Any = getattr(trainer, "args", None)
        if getattr(args, "use_vllm", False) and args.vllm_mode != "server":
            raise ValueError(
                f"use_vllm with vllm_mode={args.vllm_mode!r} is not supported over a grid ({grid}): each rank would "
                "have an engine with the whole model. Start a server (vllm serve), and pass vllm_mode='server'."
            )
        for name in OWN_ROLLOUTS:
            if getattr(trainer, name, None):
                raise ValueError(
                    f"{name} of {type(trainer).__name__} is not supported over a grid ({grid}): ranks that share "
                    "samples would each run it, and go on with what it tells each of them. Omit it."
                )


def _install_config(module: str) -> None:
    for name, config in list(vars(sys.modules[module]).items()):
        if f"{name.removesuffix('Config')}Trainer" in TRAINERS:
            original = config.__post_init__
            if not hasattr(original, "of_trl"):
                wrapped: Any = functools.wraps(original)(lambda self, original=original: _post_init(self, original))
                wrapped.of_trl = original
                config.__post_init__ = wrapped


def _post_init(self: Any, original: Callable) -> None:
    """Let TRL count what all processes generate together by data-parallel ranks, in place of `world_size`."""
    grid = getattr(self.parallelism_config or AxonnConfig.from_env(), "grid", None)
    counted: dict[tuple[Any, str], Any] = {}
    if grid is not None and grid.size > 1:
        counted[type(self), "world_size"] = property(lambda _: grid.dp_size)
    with replace_attributes(counted):
        original(self)


def _install_trainer(module: str, name: str) -> None:
    owner: Any = sys.modules[module]
    trainer = getattr(owner, name)
    if hasattr(owner.set_seed, "of_trl"):
        return
    for method in METHODS:
        setattr(trainer, method, _among_dp_ranks(owner, getattr(trainer, method)))
    seeded: Any = functools.wraps(owner.set_seed)(functools.partial(_set_seed, owner.set_seed))
    seeded.of_trl = owner.set_seed
    owner.set_seed = seeded
    if hasattr(owner, GENERATION):
        setattr(owner, GENERATION, functools.partial(_make_generation, getattr(owner, GENERATION)))


def _make_generation(original: type, *, model: nn.Module, accelerator: Any, **options: Any) -> Any:
    """Make TRL's object that speaks to vLLM, over a grid with the weights of a sharded model."""
    sharded = parallel_state(model) is not None
    return (_over_grid(original) if sharded else original)(model=model, accelerator=accelerator, **options)


@functools.cache
def _over_grid(original: Any) -> type:
    """Return the class over a grid, where a sharded model has the place of a full one."""

    class GridVLLMGeneration(original):
        """Sends a server all weights at the first call, then those that training changes.

        Collectives: those of `WeightStream.tensors` in `sync_weights`; in `generate` TRL's, over the world.
        """

        def __init__(self, *, model: nn.Module, **options: Any) -> None:
            self._stream = WeightStream(model)
            self._names: frozenset[str] = frozenset()
            super().__init__(model=model, **options)

        def sync_weights(self) -> None:
            names = self._stream.names(trained=bool(self._names))
            if names != self._names:
                self._names, self._weight_metadata = names, None
            super().sync_weights()

        def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
            if self._weight_metadata is None:  # TRL asks for names and shapes first
                return self._stream.outline(self._names)
            return self._stream.tensors(self._names, receive=self.accelerator.is_main_process)

        generate = _among_dp_ranks(sys.modules[original.__module__], original.generate)

    return GridVLLMGeneration


def _among_dp_ranks(module: Any, original: Callable) -> Callable:
    """Wrap a method so that processes are data-parallel ranks inside."""

    @functools.wraps(original)
    def method(self, *args, **kwargs):
        accelerator = self.accelerator
        plugin = getattr(accelerator, "axonn_plugin", None)
        if plugin is None or plugin.grid.size == 1:
            return original(self, *args, **kwargs)
        from accelerate.utils import gather_object  # an import of it may be what has imported this module

        values: dict[tuple[Any, str], Any] = {(accelerator, "counts_processes"): False}
        values[module, "gather"] = accelerator.gather
        values[module, "gather_object"] = lambda objects: gather_object(accelerator.own_objects(objects))
        with replace_attributes(values):
            return original(self, *args, **kwargs)

    return method


def _set_seed(original: Callable, seed: int, device_specific: bool = False, **options: Any) -> None:
    """Seed as accelerate's function; where each process is to have its own seed, each data-parallel rank has."""
    grid = getattr(parallelism_in_use()[0], "grid", None)
    if device_specific and grid is not None and grid.size > 1:
        here = grid.place(world_rank())
        seed, device_specific = seed + here.index(*ROWS), False
    original(seed, device_specific=device_specific, **options)
