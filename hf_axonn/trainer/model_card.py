"""The model card: README.md of a model, with the run that trained it, as a section and as metadata.

    hf_axonn:       an entry of the metadata
        grid        sizes of the axes; absent on one process
        versions    of this package, torch, transformers, accelerate, and of peft and trl where they are used
        batch       samples in a step, and the `per_device` and `accumulation` that make them up
        steps       optimizer steps
        loss        of the last log of training; absent without one
        eval_loss   of the last evaluation; absent without one

Trainer and TRL write the card; this adds to it. No communication.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import metadata_load, metadata_save

from hf_axonn.engine.state import parallel_state


CARD = "README.md"
ENTRY = "hf_axonn"  # in the metadata, and the tag of every card
LIBRARIES = ("torch", "transformers", "accelerate")
USED = ("peft", "trl")  # named where they are imported


def extend_card(directory: Path, section: str, facts: Mapping[str, Any], tags: Iterable[str] = ()) -> None:
    """Add a section in Markdown to the card of a directory, and facts under `hf_axonn` and tags to its metadata."""
    path = directory / CARD
    metadata = metadata_load(path) or {}
    metadata.setdefault("library_name", "transformers")
    present = metadata.get("tags") or []
    present = [present] if isinstance(present, str) else present
    metadata["tags"] = list(dict.fromkeys([*present, ENTRY, *tags]))
    metadata[ENTRY] = {**(metadata.get(ENTRY) or {}), **facts}
    metadata_save(path, metadata)
    path.write_text(f"{path.read_text(encoding='utf-8').rstrip()}\n\n{section.strip()}\n", encoding="utf-8")


def add_run(trainer: Any, directory: Path) -> None:
    """Add the run of a Trainer to the card of a directory."""
    facts = describe_run(trainer)
    batch = facts["batch"]
    sizes = ",".join(f"{axis}={size}" for axis, size in facts.get("grid", {}).items())
    lines = [
        f"- {f'grid {sizes}' if sizes else 'no grid'}, {trainer.args.world_size} process(es)",
        f"- {batch['samples']:,} samples in a step: {batch['per_device']} on each rank that has its own, "
        f"{batch['accumulation']} batch(es) accumulated",
        f"- {facts['steps']:,} steps"
        + "".join(f", last {name} {facts[name]:.4f}" for name in ("loss", "eval_loss") if name in facts),
        f"- {', '.join(f'{name} {release}' for name, release in facts['versions'].items())}",
    ]
    extend_card(directory, "\n".join(["## Training run", "", *lines]), facts)


def describe_run(trainer: Any) -> dict[str, Any]:
    """Return grid, versions, batch, steps and losses of a Trainer's run, as the metadata has them."""
    state = parallel_state(trainer.model)
    return {
        **({"grid": state.grid.as_dict()} if state is not None else {}),
        "versions": {name: version(name) for name in ("hf_axonn", *LIBRARIES, *filter(sys.modules.get, USED))},
        "batch": describe_batch(trainer),
        "steps": trainer.state.global_step,
        **{
            name: float(entries[-1])
            for name in ("loss", "eval_loss")
            if (entries := [entry[name] for entry in trainer.state.log_history if name in entry])
        },
    }


def describe_batch(trainer: Any) -> dict[str, int]:
    """Return `samples` in a step over all ranks, and the `per_device` and `accumulation` that make them up."""
    arguments, state = trainer.args, parallel_state(trainer.model)
    ranks = state.grid.dp_size if state is not None else arguments.world_size
    per_device, accumulation = arguments.train_batch_size, arguments.gradient_accumulation_steps
    return {"samples": per_device * accumulation * ranks, "per_device": per_device, "accumulation": accumulation}
