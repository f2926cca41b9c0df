"""What a Trainer on a grid makes sure of: ranks with the same arguments, and a step that failures can name.

Each function wraps the method of Trainer that has its name (hooks.py).

Checked with transformers 5.23.0 (goldfish/trainer.py).
"""

from __future__ import annotations

from collections.abc import Callable

from hf_axonn.distributed.consistency import require_alike
from hf_axonn.distributed.facts import argument_facts
from hf_axonn.distributed.watchdog.progress import HERE


def train(self, original: Callable, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
    """All ranks must have the same arguments. Collectives: those of `require_alike`, then Trainer's."""
    plugin = getattr(self.accelerator, "axonn_plugin", None)
    if plugin is not None and plugin.grid.size > 1:
        facts = argument_facts(self.args) | {"resume_from_checkpoint": resume_from_checkpoint}
        require_alike(facts, self.args.device, "Give every rank the same arguments of Trainer.")
    return original(resume_from_checkpoint, *args, **kwargs)


def training_step(self, original: Callable, *args, **kwargs):
    """Note the step, which a resumed run does not count from one."""
    HERE.done = self.state.global_step
    return original(*args, **kwargs)


WRAPPERS = (train, training_step)
