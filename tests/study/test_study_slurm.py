"""training_scripts/study/running/slurm.py and task.sh: which arrays there are, what they wait for, what a task does.

Slurm's programs have stand-ins, as in tests/end_to_end/test_slurm.py: `sbatch` starts each task of an array at once,
in the order of submission, and does not start one whose dependency says no.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from hf_axonn_scripts.study.recipe.reader import read_recipe
from hf_axonn_scripts.study.recipe.steps import steps_of
from hf_axonn_scripts.study.running.slurm import arrays_of, dependencies, gpus_of, write_scripts
from tests.helpers import ROOT
from tests.study.conftest import FOLDER
from tests.study.smoke import write_smoke


SITES = ("alps", "cluster", "frontier", "perlmutter")
BIN = Path(sys.executable).parent
# Jobs are folders: JOBS/NUMBER has the script, its dependency, and for each task its exit code.
SBATCH = """\
#!{python}
import os, pathlib, re, subprocess, sys

jobs = pathlib.Path(os.environ["JOBS"])
number = len(list(jobs.iterdir())) + 1
folder = jobs / str(number)
folder.mkdir()
script = pathlib.Path(sys.argv[-1])
(folder / "words").write_text("\\n".join(sys.argv[1:]))
asked = dict(re.findall(r"^#SBATCH --([\\w-]+)=(.*)$", script.read_text(), flags=re.MULTILINE))
first, last = map(int, asked["array"].split("-"))
waits = next((word.split("=", 1)[1] for word in sys.argv if word.startswith("--dependency=")), "")

def code(job, task):
    return int((jobs / job / f"task{{task}}").read_text())

def allowed(task):
    for wait in filter(None, waits.split(",")):
        kind, _, on = wait.partition(":")
        job, _, one = on.partition("_")
        tasks = [one] if one else [path.name[4:] for path in (jobs / job).glob("task*")]
        if kind == "afterok" and any(code(job, each) for each in tasks):
            return False
        if kind == "aftercorr" and code(job, task):
            return False
        assert kind in ("afterok", "aftercorr", "afterany") and tasks
    return True

for task in range(first, last + 1):
    if not allowed(task):
        (folder / f"task{{task}}").write_text("-1")
        continue
    slurm = {{"SLURM_ARRAY_TASK_ID": task, "SLURM_JOB_ID": 1000 * number + task, "SLURM_NNODES": asked["nodes"]}}
    slurm |= {{"SLURM_SUBMIT_DIR": os.getcwd(), "SLURM_JOB_NODELIST": "nid[001-002]"}}
    with open(folder / f"out{{task}}", "w") as out:
        done = subprocess.run(
            ["bash", str(script)], env=os.environ | {{k: str(v) for k, v in slurm.items()}}, stdout=out, stderr=out
        )
    (folder / f"task{{task}}").write_text(str(done.returncode))
print(f"{{number}};cluster")
"""
SRUN = """\
#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for ((node = 0; node < SLURM_NNODES; node++)); do
    SLURM_NODEID=$node SLURM_PROCID=$node "$@" || failed=$?
done
exit "${failed:-0}"
"""
SCONTROL = "#!/bin/bash\necho nid001\necho nid002\n"
# In place of the launcher: what program.py would leave, and a line for each launch. FAIL names a step that fails.
ACCELERATE = """\
#!/bin/bash
[[ $SLURM_NODEID == 0 ]] || exit 0
echo "$*" >> "$JOBS/../launched"
echo "the launcher was here"
[[ -z ${FAIL:-} || "$*" != *$FAIL* ]] || exit 7
while [[ $1 != *.program ]]; do shift; done
out=$3 model=0.05M run=${4##*$model-}
case $4 in
    base-*) made=base/$model ;;
    ask-*) made=runs/$model/base ;;
    train-*) made="runs/$model/$run/checkpoint runs/$model/$run/extraction"
         mkdir -p "$out/runs/$model/$run"
         echo made > "$out/runs/$model/$run/canaries.json" ;;
esac
for folder in $made; do
    mkdir -p "$out/$folder"
    echo made > "$out/$folder/file"
done
"""
# In place of python: study.py with stand-ins for what needs no launch, and without a look at the arguments of
# training, which imports transformers and torch.
WITHOUT_WORK = """\
import sys, types
name = "hf_axonn_scripts.study.recipe.argument_checks"
sys.modules[name] = types.SimpleNamespace(check_arguments=lambda *_: None, is_of_loss=lambda _: True)
from hf_axonn_scripts.study import study
from hf_axonn_scripts.study.running import work

def act(recipe, output, step):
    assert not step.launched
    for path in step.outputs:
        folder = path if not path.suffix else path.parent
        folder.mkdir(parents=True, exist_ok=True)
        (path / "file" if not path.suffix else path).write_text(step.name)

work.act = act
sys.argv = sys.argv[1:]
sys.exit(study.main())
"""


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def recipe_for(folder: Path, processes: int = 4) -> Path:
    path = write_smoke(folder / "a place")
    text = path.read_text().replace("processes: 2\ngrid: {x: 2}", f"processes: {processes}\ngrid: {{z: 2, x: 2}}")
    path.write_text(text.replace("grid: {z: 2, x: 2}}", "grid: {z: 4, x: 2}}"))  # of the run on another grid
    return path


def without_pilot(recipe: Path) -> str:
    text = re.sub(r"pilot:\n(  .*\n)+", "", recipe.read_text())
    recipe.write_text(text.replace("per_bucket: 8\n", "per_bucket: 8\n  suffix: 8\n"))
    return recipe.read_text()


@pytest.fixture
def cluster(tmp_path):
    """A machine with the programs of a cluster, two processes a node, where launches and steps do next to nothing."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (tmp_path / "jobs").mkdir()
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").write_text(f'PATH="{bin_folder}:{BIN}:$PATH"\nexport PATH\n')
    program(bin_folder / "sbatch", SBATCH.format(python=sys.executable))
    program(bin_folder / "srun", SRUN)
    program(bin_folder / "scontrol", SCONTROL)
    program(bin_folder / "accelerate", ACCELERATE)
    (tmp_path / "without_work.py").write_text(WITHOUT_WORK)
    python = f'#!/bin/bash\n[[ $1 == */study.py ]] && exec {sys.executable} {tmp_path}/without_work.py "$@"\n'
    program(bin_folder / "python", python + f'exec {sys.executable} "$@"\n')
    return tmp_path


def study_py(cluster: Path, recipe: Path, *words: str, **environment: str) -> subprocess.CompletedProcess:
    """study.py with the programs of the cluster."""
    inherited = {**os.environ, "PATH": f"{cluster / 'bin'}:{os.environ['PATH']}", "JOBS": str(cluster / "jobs")}
    inherited |= {"VENV": str(cluster / "venv"), "OMP_NUM_THREADS": "1", **environment}
    command = [
        str(cluster / "bin" / "python"),
        str(FOLDER / "study.py"),
        str(recipe),
        "--output",
        str(cluster / "out"),
    ]
    return subprocess.run([*command, *words], env=inherited, capture_output=True, text=True, timeout=280)


def arrays(cluster, recipe, *, gpus: int = 4, wanted=None, longest=24.0):
    known, output = read_recipe(recipe), cluster / "out"
    steps = steps_of(known, output)
    return arrays_of(known, output, wanted or steps, gpus_per_node=gpus, longest=longest)


def waits(found):
    places = {step.name: (index, at) for index, array in enumerate(found) for at, step in enumerate(array.steps)}
    return {array.name: dependencies(array, found, places) for array in found}


def test_arrays(cluster):
    recipe = recipe_for(cluster)
    found = {array.name: array for array in arrays(cluster, recipe)}
    tasks = {name: [step.name for step in array.steps] for name, array in found.items()}
    assert tasks["1-data-1n"] == ["texts"] and tasks["3-data-1n"] == ["data-study"]
    assert tasks["4-base-1n"] == ["base-0.15M", "base-0.05M"]
    assert tasks["6-ask-1n"] == ["ask-0.05M", "ask-0.15M"]
    # The run on the grid of eight needs two nodes, so that it is another array.
    assert tasks["6-train-0.05M-1n"] == ["train-0.05M-ordinary-s0", "train-0.05M-k2-s0"]
    (wide,) = (name for name in tasks if name.endswith("2n"))
    assert found[wide].nodes == 2 and [step.processes for step in found[wide].steps] == [8]
    every = [name for array in tasks.values() for name in array]
    assert sorted(every) == sorted(set(every)) and len(every) == 16
    assert all(0.25 < array.hours <= 24 for array in found.values())
    assert {array.hours for array in arrays(cluster, recipe, longest=0.1)} == {0.1}


def test_what_arrays_wait_for(cluster):
    found = arrays(cluster, recipe_for(cluster))
    numbers = {array.name: index for index, array in enumerate(found)}
    waiting = waits(found)
    assert waiting["1-data-1n"] == []
    assert waiting["2-data-1n"] == [f"afterok:${{job{numbers['1-data-1n']}}}"]
    base, data, pilot = (numbers[name] for name in ("4-base-1n", "3-data-1n", "5-pilot-1n"))
    assert waiting["4-base-1n"][-1] == f"afterok:${{job{data}}}"
    # The pilot's base is one task of the array, and nobody else's base matters to it.
    assert f"afterok:${{job{base}}}_0" in waiting["5-pilot-1n"]
    # Asked is each base that is there, by itself; continued as well.
    assert f"aftercorr:${{job{base}}}" not in waiting["6-ask-1n"]  # they stand in another order there
    assert f"afterany:${{job{base}}}" in waiting["6-ask-1n"]
    assert f"afterok:${{job{base}}}_1" in waiting["6-train-0.05M-1n"]
    assert f"afterok:${{job{pilot}}}" in waiting["6-train-0.05M-1n"]
    report = found[-1]
    assert [step.name for step in report.steps] == ["report"]
    # The report is made of what is there, whatever failed.
    assert waiting[report.name] and all(wait.startswith("afterany:") for wait in waiting[report.name])


def test_each_task_after_the_one_at_its_place(cluster):
    recipe = recipe_for(cluster)
    without_pilot(recipe)
    found = arrays(cluster, recipe)
    waiting = waits(found)
    (base,) = (index for index, array in enumerate(found) if array.steps[0].kind == "base")
    (ask,) = (array.name for array in found if array.steps[0].kind == "ask")
    assert f"aftercorr:${{job{base}}}" in waiting[ask]


def test_a_grid_that_fills_no_nodes_is_refused(cluster):
    done = study_py(cluster, recipe_for(cluster), "--slurm", "frontier")
    assert done.returncode == 2
    assert "has 4 processes, but a node runs 8: write a multiple of 8" in done.stderr
    with pytest.raises(ValueError, match="a node of --slurm frontier runs 8 processes: leave --gpus-per-node 4 out"):
        gpus_of("frontier", 4)
    done = study_py(cluster, recipe_for(cluster), "--slurm", "cluster")
    assert done.returncode == 2 and "does not know the processes of a node: give --gpus-per-node" in done.stderr
    assert not list((cluster / "jobs").iterdir())


@pytest.mark.parametrize(
    "site", [pytest.param(site, marks=[] if site in ("cluster", "frontier") else pytest.mark.slow) for site in SITES]
)
def test_the_shell_finds_nothing_wrong(cluster, site):
    """In what is written for each site, in a folder whose name has a space, and in what it calls."""
    recipe = recipe_for(cluster, 4)
    known, output = read_recipe(recipe), cluster / "an output"
    steps = steps_of(known, output)
    found = arrays_of(known, output, steps, gpus_per_node=4, longest=24)
    own = 4 if site == "cluster" else None
    submit = write_scripts(known, output, found, site=site, gpus_per_node=own)
    scripts = sorted((output / "slurm").glob("*.sh"))
    assert submit in scripts and len(scripts) == len(found) + 1
    shellcheck = Path(sysconfig.get_path("scripts")) / "shellcheck"
    command = [str(shellcheck), "--enable=quote-safe-variables", "--severity=style"]
    done = subprocess.run(
        [*command, *scripts, FOLDER / "running" / "task.sh"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout
    asked = (FOLDER.parent / "slurm" / f"{site}.sh").read_text()
    for array in found:
        text = (output / "slurm" / f"{array.name}.sh").read_text()
        lines = re.findall(r"^#SBATCH (.*)$", text, flags=re.MULTILINE)
        heads = [line.split("=")[0] for line in lines]
        assert len(set(heads)) == len(heads)
        assert {f"--nodes={array.nodes}", f"--array=0-{len(array.steps) - 1}"} <= set(lines)
        # All that the site's script asks for, but a name, an output and a time of its own; and to be requeued.
        wanted = set(re.findall(r"^#SBATCH (--[\w-]+)", asked, flags=re.MULTILINE))
        assert wanted - {"--no-requeue"} <= set(heads) and "--requeue" in heads and "--no-requeue" not in heads
        assert "set -euo pipefail" in text and max(map(len, text.split("steps=(")[0].splitlines())) < 300
    assert len({array.name for array in found}) == len(found)


def outcome(cluster: Path) -> dict[str, list[int]]:
    """Exit codes of the tasks of each script; -1 for those that Slurm removed."""
    found = {}
    for job in sorted((cluster / "jobs").iterdir(), key=lambda path: int(path.name)):
        script = Path((job / "words").read_text().splitlines()[-1]).stem
        tasks = sorted(job.glob("task*"), key=lambda path: int(path.name[4:]))
        found[script] = [int(task.read_text()) for task in tasks]
    return found


@pytest.mark.slow
def test_a_study_on_a_cluster(cluster):
    """Every step is done by a task; one that fails costs what reads from it, and the next call does these alone."""
    recipe = recipe_for(cluster)
    one_model = re.sub(r"  0.15M:\n.*\n", "", without_pilot(recipe)).replace("[0.05M, 0.15M]", "[0.05M]")
    recipe.write_text(one_model)
    words = ("--slurm", "cluster", "--gpus-per-node", "4", "--submit", "--sbatch", "-A", "some project")
    done = study_py(cluster, recipe, *words, FAIL="train-0.05M-k2-s0")
    assert done.returncode == 0, done.stdout + done.stderr
    codes = outcome(cluster)
    printed = {str(path.relative_to(cluster)): path.read_text() for path in cluster.glob("jobs/*/out*")}
    # The run fails; what makes do with the others goes ahead.
    assert {script: tasks for script, tasks in codes.items() if any(tasks)} == {"5-train-0.05M-1n": [0, 7]}, printed
    assert (cluster / "out" / "report" / "file").is_file()
    log = (cluster / "out" / "logs" / "train-0.05M-ordinary-s0.log").read_text()
    assert "the launcher was here" in log
    for job in (cluster / "jobs").iterdir():
        assert (job / "words").read_text().splitlines()[-3:-1] == ["-A", "some project"]
    first = (cluster / "launched").read_text().splitlines()
    assert len(first) == len(set(first)) == 5  # the base, which is asked, and three runs
    wide = next(line for line in first if "z4x2" in line)
    assert "--num_machines 2" in wide and "8_z4_x2.yaml" in wide

    status = study_py(cluster, recipe, "--status").stdout
    assert "failed: train-0.05M-k2-s0" in status and "ended with code 7" in status
    (cluster / "jobs").rename(cluster / "jobs of the first call")
    (cluster / "jobs").mkdir()
    done = study_py(cluster, recipe, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(outcome(cluster).values()) == [[0], [0], [0]]  # the run, the utility, the report
    again = (cluster / "launched").read_text().splitlines()[5:]
    assert len(again) == 1 and "train-0.05M-k2-s0" in again[0]
    done = study_py(cluster, recipe, *words)
    assert "every step is done" in done.stdout and len(list((cluster / "jobs").iterdir())) == 3
    stamp = json.loads((cluster / "out" / ".stamps" / "train-0.05M-k2-s0.json").read_text())
    assert stamp["seconds"] >= 0 and stamp["attempts"] == 2


def test_a_study_in_the_queue_is_left_alone(cluster):
    recipe = recipe_for(cluster)
    program(cluster / "bin" / "squeue", f'#!/bin/bash\necho "77 {cluster}/out/slurm/1-data-1n.sh"\n')
    for words in ((), ("--slurm", "perlmutter")):
        done = study_py(cluster, recipe, *words)
        assert done.returncode == 2
        assert "jobs 77 of this study wait or run: let them end, or scancel 77" in done.stderr
    assert not (cluster / "out").exists()


def test_node_sh_runs_a_script_once_without_a_launcher(cluster):
    script = cluster / "some script.py"
    script.write_text("import sys; print('once', sys.argv[1:])")
    for node, printed in ((0, "once ['a b']\n"), (1, "")):
        done = subprocess.run(
            ["bash", str(ROOT / "training_scripts" / "slurm" / "node.sh"), "none", str(script), "a b"],
            env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "SLURM_NODEID": str(node), "GPUS_PER_NODE": "4"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stdout) == (0, printed), done.stderr
