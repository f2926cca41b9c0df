"""Checks before a study starts: packages, the disk, and whose directory it is."""

import json
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from hf_axonn_scripts.demo.pipeline import Stamps
from hf_axonn_scripts.study.recipe.cost import cost_of
from hf_axonn_scripts.study.recipe.definition import MACHINE, Recipe
from hf_axonn_scripts.study.recipe.steps import Step
from hf_axonn_scripts.study.running.listing import size
from hf_axonn_scripts.study.running.work import is_done


EXTRA = "hf_axonn[demo]"
# Packages that each kind of step imports, beside those that hf_axonn itself needs.
NEEDS = {
    "data": ("datasets", "rapidfuzz"),
    "base": ("datasets", "gguf"),
    "pilot": ("datasets", "rapidfuzz"),
    "ask": ("rapidfuzz",),
    "train": ("datasets", "rapidfuzz"),
    "utility": ("rapidfuzz", "scipy"),
    "report": ("jinja2", "matplotlib", "rapidfuzz", "scipy"),
}
HARNESS = "lm_eval"


def prepare(recipe: Recipe, output: Path, steps: Sequence[Step]) -> None:
    """Make the directory of a study and note whose it is, once nothing speaks against a start.

    Args:
        recipe, output: the study and its directory, which need not be there.
        steps: those to be done.
    Raises:
        ValueError: packages are missing, the disk is too small, or the directory holds another study.
    """
    owner = output / ".stamps" / "study"
    if owner.exists() and (other := json.loads(owner.read_text(encoding="utf-8"))["study"]) != recipe.name:
        raise ValueError(f"{output} holds the study {other}, not {recipe.name}: give another --output")
    stamps = Stamps(output.resolve()) if owner.exists() else None
    left = [step for step in steps if stamps is None or not is_done(step, stamps)]
    check_packages(recipe, left)
    check_disk(recipe, output, left)
    if not owner.exists():
        owner.parent.mkdir(parents=True, exist_ok=True)
        owner.write_text(json.dumps({"study": recipe.name}) + "\n", encoding="utf-8")
    # What was done by which recipe is in the stamps; this is for people who find the directory.
    (output / "recipe.yaml").write_bytes(recipe.path.read_bytes())


def check_packages(recipe: Recipe, steps: Sequence[Step]) -> None:
    """Raise ValueError unless every package is here that the steps import; the message names them all."""
    kinds = {step.kind for step in steps}
    missing = sorted({name for kind in kinds for name in NEEDS[kind] if find_spec(name) is None})
    if missing:
        raise ValueError(f"{', '.join(missing)} cannot be imported: pip install '{EXTRA}'")
    if recipe.evaluation.tasks and "utility" in kinds and find_spec(HARNESS) is None:
        print(f"{HARNESS} is not installed, so that its tasks are left out of the utility: pip install {HARNESS}")


def check_disk(recipe: Recipe, output: Path, steps: Sequence[Step]) -> None:
    """Raise ValueError unless the files of the steps fit the disk; the message has both sizes."""
    folder = output.resolve()
    while not folder.exists():
        folder = folder.parent
    needed, free = sum(cost_of(step, recipe).disk_bytes for step in steps), shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"{len(steps)} steps are left and write about {size(needed)}, but {folder} has {size(free)} free: give "
            "--output a place on another disk"
        )


def check_processes(recipe: Recipe, steps: Sequence[Step]) -> None:
    """Raise ValueError unless this machine has a GPU for each rank of the steps, or the recipe is for its CPU."""
    if recipe.machine == MACHINE:
        return
    import torch

    ranks, here = max((step.processes for step in steps if step.launched), default=0), torch.cuda.device_count()
    if ranks > here:
        raise ValueError(
            f"{recipe.path} is for {recipe.machine}: it has steps of {ranks} ranks, but there are {here} GPUs here; "
            "--slurm writes batch scripts"
        )
