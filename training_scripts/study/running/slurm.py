"""Batch scripts that do a study on a cluster: an array for the steps of a kind that need the same number of nodes.

    hf-axonn study RECIPE --slurm SITE      writes OUTPUT/slurm/*.sh and submit.sh, which submits them in order

Each task does one step by task.sh, which looks first whether the step is done and whether what it reads is there. So a
task that fails does not hold back the rest: an array waits for the tasks that its own read from, whether they succeed
or not (`afterany`), and each of its tasks decides for itself. Only where all of an array reads from one task, or each
task from the one at its own place of another array, Slurm decides (`afterok`, `aftercorr`), and removes what can no
longer run. The next call writes scripts for what is left.
"""

import argparse
import math
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_axonn_scripts.demo.pipeline import Stamps
from hf_axonn_scripts.study.recipe.cost import cost_of
from hf_axonn_scripts.study.recipe.definition import MACHINE, Recipe
from hf_axonn_scripts.study.recipe.steps import Step, steps_of
from hf_axonn_scripts.study.running.work import is_done, program_of, write_launch_file


TASK = Path(__file__).resolve().with_name("task.sh")
SCRIPTS = TASK.parents[2] / "slurm"
SITES = tuple(sorted(path.stem for path in SCRIPTS.glob("*.sh") if path.stem != "node"))
MARGIN = 1.5  # times the predicted time, and then
SPARE_HOURS = 0.25  # for a queue's start, modules, and file systems that are slow
LONGEST_HOURS = 24.0


@dataclass(frozen=True)
class Array:
    """Steps that are submitted together.

    Attributes:
        name: of its batch script.
        steps: a task for each.
        nodes: of each task.
        hours: that a task asks for.
    """

    name: str
    steps: tuple[Step, ...]
    nodes: int
    hours: float


def main(recipe: Recipe, output: Path, steps: Sequence[Step], options: argparse.Namespace) -> int:
    """Write the scripts, and submit them where that is asked for; return the exit code.

    Raises:
        ValueError: a grid does not fill whole nodes, or the number of processes of a node is not known.
    """
    arrays = arrays_of(recipe, output, steps, gpus_per_node=gpus_of(options.slurm, options.gpus_per_node),
                       longest=options.hours or LONGEST_HOURS)  # fmt: skip
    if not arrays:
        print("every step is done")
        return 0
    file = write_scripts(recipe, output, arrays, site=options.slurm, gpus_per_node=options.gpus_per_node)
    for array in arrays:
        about = f"{len(array.steps)} tasks" if len(array.steps) > 1 else "1 task"
        print(f"{array.name}: {about} of {array.nodes} nodes, at most {clock(array.hours)} each")
    command = ["bash", str(file), *options.sbatch]
    if not options.submit:
        print(f"submit with: VENV=path/to/environment {shlex.join(command)} -A PROJECT")
        return 0
    return subprocess.run(command, check=False).returncode


def check_queue(output: Path) -> None:
    """Refuse to go on while a job of the scripts in this directory waits or runs; without Slurm there is none.

    Raises:
        ValueError: there are some, which read the files there and do its steps.
    """
    if shutil.which("squeue") is None:
        return
    command = ["squeue", "--me", "--noheader", "--format=%A %o"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
    folder = f"{output.resolve() / 'slurm'}/"
    jobs = sorted({line.split()[0] for line in found.splitlines() if folder in line})
    if jobs:
        raise ValueError(
            f"jobs {', '.join(jobs)} of this study wait or run: let them end, or scancel {' '.join(jobs)}"
        )


def gpus_of(site: str, given: int | None) -> int:
    """Return the processes of a node: those that the site's script starts.

    Raises:
        ValueError: the script leaves it to the user, who gives no number; or it does not, and there is another.
    """
    found = re.search(r"^export GPUS_PER_NODE=(\d+)$", (SCRIPTS / f"{site}.sh").read_text(), flags=re.MULTILINE)
    if found:
        if given not in (None, int(found[1])):
            raise ValueError(f"a node of --slurm {site} runs {found[1]} processes: leave --gpus-per-node {given} out")
        return int(found[1])
    if given is None:
        raise ValueError(f"--slurm {site} does not know the processes of a node: give --gpus-per-node")
    return given


def arrays_of(
    recipe: Recipe, output: Path, chosen: Sequence[Step], *, gpus_per_node: int, longest: float
) -> list[Array]:
    """Return the steps that are left, in arrays, each behind those that it waits for.

    Continuations have an array for each model, and other steps one for each number of nodes; none reads from itself.

    Raises:
        ValueError: a grid does not fill whole nodes.
    """
    steps = {step.name: step for step in steps_of(recipe, output)}
    stamps = Stamps(output.resolve())
    left = {step.name: step for step in chosen if not is_done(step, stamps)}
    levels: dict[str, int] = {}
    for name, step in steps.items():
        levels[name] = 1 + max((levels[before] for before in step.after if before in left), default=0)
    groups: dict[tuple[int, str, str, int], list[Step]] = {}
    for step in left.values():
        nodes = nodes_of(step, gpus_per_node)
        model = step.model if step.kind == "train" else ""
        groups.setdefault((levels[step.name], step.kind, model or "", nodes), []).append(step)
    arrays = []
    for (level, kind, model, nodes), group in sorted(groups.items(), key=lambda item: item[0][0]):
        hours = MARGIN * max(cost_of(step, recipe).seconds for step in group) / 3600 + SPARE_HOURS
        parts = [str(level), kind, model, f"{nodes}n"]
        name = "-".join(re.sub(r"[^\w.]+", "_", part) for part in parts if part)
        arrays.append(Array(name, tuple(group), nodes, min(hours, longest)))
    return arrays


def nodes_of(step: Step, gpus_per_node: int) -> int:
    """Return the nodes of a step.

    Raises:
        ValueError: its grid does not fill them.
    """
    if not step.launched:
        return 1
    if step.processes % gpus_per_node:
        raise ValueError(
            f"{step.name} has {step.processes} processes, but a node runs {gpus_per_node}: write a multiple of "
            f"{gpus_per_node} as its `processes`, with a grid of that size or `grid: auto`"
        )
    return step.processes // gpus_per_node


def write_scripts(
    recipe: Recipe, output: Path, arrays: Sequence[Array], *, site: str, gpus_per_node: int | None = None
) -> Path:
    """Write a batch script for each array, the words that its tasks launch, and submit.sh, whose path is returned."""
    output = output.resolve()
    folder = output / "slurm"
    folder.mkdir(parents=True, exist_ok=True)
    (output / "logs").mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for array in arrays:
        for step in array.steps:
            if step.launched:
                launch = [str(write_launch_file(recipe, output, step)), *program_of(recipe, output, step)]
                (folder / f"{step.name}.words").write_text("".join(f"{word}\n" for word in launch), encoding="utf-8")
        text = batch_script(recipe, output, array, site=site, gpus_per_node=gpus_per_node)
        (folder / f"{array.name}.sh").write_text(text, encoding="utf-8")
    submit = folder / "submit.sh"
    submit.write_text(submit_script(folder, arrays), encoding="utf-8")
    return submit


def batch_script(recipe: Recipe, output: Path, array: Array, *, site: str, gpus_per_node: int | None = None) -> str:
    """Return the batch script of an array: the site's options of Slurm, with this array's nodes and time."""
    options = re.findall(r"^(#SBATCH .*)$", (SCRIPTS / f"{site}.sh").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [line for line in options if not re.match(r"#SBATCH --(job-name=|output=|time=|no-requeue$)", line)]
    lines.append("#SBATCH --requeue")  # a step goes on from what its first attempt left
    own = {
        "job-name": f"{recipe.name}-{array.name}",
        "output": f"{output}/slurm/%x-%A_%a.out",
        "array": f"0-{len(array.steps) - 1}",
        "nodes": array.nodes,
        "time": clock(array.hours),
    }
    # Slurm splits these lines as a shell does.
    lines += [f"#SBATCH --{name}={shlex.quote(str(value))}" for name, value in own.items()]
    if gpus_per_node is not None:
        lines += [f"#SBATCH --gpus-per-node={gpus_per_node}"] if recipe.machine != MACHINE else []
    names = "".join(f"    {shlex.quote(step.name)}\n" for step in array.steps)
    words = [TASK, site, recipe.path.resolve(), output]
    start = " ".join(shlex.quote(str(word)) for word in words)
    given = f"export GPUS_PER_NODE={gpus_per_node}\n" if gpus_per_node is not None else ""
    return (
        "#!/bin/bash\n# Written by hf-axonn study --slurm; written anew by the next call.\n"
        + "\n".join(lines)
        + f"\nset -euo pipefail\n\nsteps=(\n{names})\n{given}"
        + f'exec bash {start} "${{steps[SLURM_ARRAY_TASK_ID]}}"\n'
    )


def submit_script(folder: Path, arrays: Sequence[Array]) -> str:
    """Return the script that submits the arrays; its arguments are options of sbatch, such as `-A PROJECT`."""
    places = {step.name: (index, at) for index, array in enumerate(arrays) for at, step in enumerate(array.steps)}
    lines = [
        "#!/bin/bash",
        "# Submits the study: VENV=path/to/environment bash submit.sh -A PROJECT, with any other options of sbatch.",
        "set -euo pipefail",
        ': "${VENV:?the Python environment that has hf_axonn: VENV=path bash submit.sh ...}"',
        f"cd {shlex.quote(str(Path.cwd()))}",
        "",
    ]
    for index, array in enumerate(arrays):
        waits = dependencies(array, arrays, places)
        options = f' --dependency="{",".join(waits)}" --kill-on-invalid-dep=yes' if waits else ""
        script = shlex.quote(str(folder / f"{array.name}.sh"))
        lines.append(f'job{index}=$(sbatch --parsable{options} "$@" {script})')
        lines.append(f"job{index}=${{job{index}%%;*}} # a cluster's name may follow the number")
        lines.append(f'echo "job $job{index}: {array.name}"')
    return "\n".join(lines) + "\n"


def dependencies(array: Array, arrays: Sequence[Array], places: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return the dependencies of an array for sbatch, with `${jobN}` for the number of array N."""
    reads = [{places[name] for name in step.after if name in places} for step in array.steps]
    waits = []
    for index in sorted({index for places_read in reads for index, _ in places_read}):
        own = [sorted(at for other, at in places_read if other == index) for places_read in reads]
        partial = any(step.partial for step in array.steps)
        if not partial and len({tuple(at) for at in own}) == 1 and len(own[0]) == 1:
            one = f"_{own[0][0]}" if len(arrays[index].steps) > 1 else ""
            waits.append(f"afterok:${{job{index}}}{one}")
        elif not partial and len(own) == len(arrays[index].steps) and own == [[at] for at in range(len(own))]:
            waits.append(f"aftercorr:${{job{index}}}")
        else:
            waits.append(f"afterany:${{job{index}}}")
    return waits


def clock(hours: float) -> str:
    """Write hours for Slurm, `HH:MM:SS`, up to the next five minutes."""
    minutes = 5 * math.ceil(hours * 12)
    return f"{minutes // 60:02}:{minutes % 60:02}:00"
