"""The batch scripts under a real Slurm of two nodes, both on this machine (tests/helpers/slurm.py).

test_slurm.py and tests/study/test_study_slurm.py look at the same scripts with stand-ins for Slurm's programs; what
only Slurm can say is here: what it makes of `#SBATCH` lines and of dependencies, requeue, nodes that fail, signals.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from hf_axonn import Grid
from hf_axonn.checkpoint.manifest import read_manifest
from hf_axonn_scripts import finetune
from tests.end_to_end.test_finetune_data import command, tiny_llama, tokenizer  # noqa: F401  (a fixture)
from tests.end_to_end.test_slurm import ACCELERATE, BIN, FOLDER, SITES, YAML, program
from tests.helpers import ROOT
from tests.helpers.slurm import slurm, wait_for, why_not
from tests.study.test_study_slurm import ACCELERATE as LAUNCHER
from tests.study.test_study_slurm import WITHOUT_WORK, recipe_for, study_py, without_pilot


pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
# Not at once: in the second in which nodes forget a job they refuse it.
SOON = "StartTime=now+5"
# finetune.py that waits, two steps after where it began, to be ended: who looks knows where it is. With a file
# `release` it waits for a signal that asks it to stop, and goes on.
HOLDING = """\
import time
from pathlib import Path
import transformers.trainer
from transformers import TrainerCallback
from hf_axonn.distributed.watchdog.signals import stop_requested
from hf_axonn_scripts import finetune

class Hold(TrainerCallback):
    def on_train_begin(self, args, state, control, **_):
        self.until = state.global_step + 2

    def on_step_begin(self, args, state, control, **_):
        release = Path(args.output_dir, "release")
        while state.global_step == self.until and not (release.exists() and stop_requested.is_set()):
            Path(args.output_dir, f"rank{args.process_index}-holds{state.global_step}").touch()
            time.sleep(0.1)

transformers.trainer.DEFAULT_CALLBACKS.append(Hold)
finetune.main()
"""
# In place of the launcher of a study: the first launch of the step that HOLD names waits to be ended.
HOLDING_LAUNCHER = """\
#!/bin/bash
if [[ -n ${HOLD:-} && "$*" == *" $HOLD" && ! -e $JOBS/held ]]; then
    touch "$JOBS/held"
    exec sleep 3000
fi
exec bash "$JOBS/../bin/launcher" "$@"
"""


@pytest.fixture(scope="module")
def cluster():
    if (why := why_not()) is not None:
        pytest.skip(why)
    with slurm() as started:
        yield started


def environment(folder: Path) -> Path:
    """A Python environment to activate: programs of `folder` before those of the tests."""
    (folder / "venv" / "bin").mkdir(parents=True)
    (folder / "venv" / "bin" / "activate").write_text(f'PATH="{folder}/bin:{BIN}:$PATH"\nexport PATH\n')
    (folder / "bin").mkdir()
    return folder / "venv"


@pytest.mark.parametrize("site", [*SITES, "cluster"])
def test_slurm_takes_what_a_script_asks_for(cluster, tmp_path, site):
    """Every `#SBATCH` line is one that Slurm knows, and each node runs the launcher once, with all of its GPUs."""
    venv = environment(tmp_path)
    program(tmp_path / "bin" / "accelerate", ACCELERATE.replace("FI|", "FI|SLURM|"))
    gpus = SITES.get(site, 3)
    (tmp_path / "axonn.yaml").write_text(YAML.format(processes=2 * gpus, z=2, x=gpus))
    exported = {"BASH_FUNC_module%%": "() { :\n}", "VENV": venv, "RECORD": tmp_path}
    options = ["--parsable", "--nodes=2", f"--chdir={ROOT}", f"--output={tmp_path}/out"]
    if site == "cluster":
        exported["GPUS_PER_NODE"] = gpus
        options.append(f"--gpus-per-node={gpus}")
    script = FOLDER / f"{site}.sh"
    number = cluster("sbatch", *options, script, tmp_path / "axonn.yaml", "a script.py", "--data", "a b", **exported)
    job = cluster.wait_for_state(number.strip(), "COMPLETED", "FAILED")
    assert job["JobState"] == "COMPLETED", (tmp_path / "out").read_text()
    assert job["Requeue"] == "0" and job["NumNodes"] == "2"
    for node in range(2):
        lines = (tmp_path / f"node{node}").read_text().splitlines()
        launch = " ".join(lines[:12])
        assert f"--num_machines 2 --machine_rank {node} --main_process_ip " in launch
        assert f"--main_process_port {20000 + int(job['JobId']) % 10000} --same_network" in launch
        assert lines[12:15] == ["a script.py", "--data", "a b"]
        known = dict(line.split("=", 1) for line in lines if re.match("[A-Z_]+=", line))
        assert known["SLURM_GPUS_ON_NODE"] == str(gpus) and known["SLURM_NTASKS"] == "2"
        head = re.search(r"--main_process_ip (\S+)", launch)[1]
        assert head == cluster.nodes[0] or re.fullmatch(r"[\d.]+|[\da-f:]+", head)
        # No task has a part of the cores that the job has on this node.
        asked = re.search(r"--cpus-per-task=(\d+)", script.read_text())
        assert int(known["SLURM_CPUS_ON_NODE"]) == int(asked[1] if asked else 288)


def test_a_run_that_is_requeued_and_signalled_goes_on(cluster, tmp_path, tokenizer):  # noqa: F811
    """One command on two nodes, or on one of them, a copy of the model on each: requeued by a user, by a node that is
    lost, and by its own script, when it has saved before its time limit. At last both nodes share one copy (x=2).

    Each time it goes on from its newest checkpoint, on the nodes that there are, to the losses of one process that
    nobody interrupts.
    """
    tiny_llama().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    words = command(tmp_path / "model", tmp_path, "--max_steps", "8", "--lr_scheduler_type", "constant")
    words += ["--save_strategy", "steps", "--save_steps", "1", "--learning_rate", "0.01"]
    finetune.main([*words, "--output_dir", str(tmp_path / "alone"), "--save_strategy", "no"])
    venv, out = environment(tmp_path), tmp_path / "out"
    (tmp_path / "holding.py").write_text(HOLDING)
    grid = "use_cpu: true\n" + YAML.format(processes=2, z=1, x=1).replace("{z", "{data: auto, z")
    (tmp_path / "axonn.yaml").write_text(grid)
    exported = {"VENV": venv, "GPUS_PER_NODE": 1, "OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": 1}
    exported["HF_DATASETS_CACHE"] = tmp_path / "cache"
    options = ["--parsable", "--requeue", "--nodes=1-2", f"--output={tmp_path}/log", "--time=60"]
    rest = [FOLDER / "cluster.sh", tmp_path / "axonn.yaml", tmp_path / "holding.py", *words]
    rest += ["--per_device_train_batch_size", "1", "--resume_from_checkpoint", "last"]
    node, other = cluster.nodes

    def at(step: int, ranks: int = 2) -> None:
        """Wait until all ranks stand behind a step, whose checkpoint is there."""
        files = [out / f"rank{rank}-holds{step}" for rank in range(ranks)]

        def found() -> bool:
            state = cluster.job(job)["JobState"]
            assert state in ("PENDING", "RUNNING", "COMPLETING"), (state, log())
            return all(file.exists() for file in files)

        wait_for(found, f"step {step}")
        assert (out / f"checkpoint-{step}").is_dir() and cluster.job(job)["NumNodes"] == str(ranks)

    def log() -> str:
        return (tmp_path / "log").read_text()

    def requeued(restarts: int) -> bool:
        known = cluster.job(job)
        return known["JobState"] == "PENDING" and known["Restarts"] == str(restarts)

    def begin(*nodes: str) -> None:
        """Have the job begin soon, where Slurm waits for two minutes, when it can have all of these nodes."""
        cluster.wait_until_idle(*nodes)
        cluster("scontrol", "update", f"JobId={job}", SOON)

    cluster.wait_until_idle(node, other)
    job = cluster("sbatch", *options, f"--chdir={ROOT}", *rest, **exported).strip()
    at(2)
    assert "has no checkpoint: training starts at step 0" in log()
    cluster("scontrol", "requeue", job)
    wait_for(lambda: requeued(1), "the job to be requeued")
    begin(node, other)
    at(4)
    assert "are accumulated" not in log()
    cluster.kill_node(other)
    wait_for(lambda: requeued(2), "the job to be requeued again")
    begin(node)
    at(6, ranks=1)
    assert log().count("2 batches are accumulated in place of 1") == 1, log()
    cluster.start_node(other)
    (out / "release").touch()
    minutes = int(cluster.job(job)["RunTime"].split(":")[-2]) + 4
    cluster("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
    wait_for(lambda: requeued(3), "the job to requeue itself")
    assert "step 7 is saved, exit code 75" in log() and (out / "checkpoint-7").is_dir(), log()
    # The launch file is read at each start: from here on, every layer has a half on each node.
    (tmp_path / "axonn.yaml").write_text(grid.replace("x: 1", "x: 2"))
    cluster("scontrol", "update", f"JobId={job}", "TimeLimit=60")  # no signal comes again
    begin(node, other)
    assert cluster.wait_for_state(job, "COMPLETED")["NumNodes"] == "2"
    grids = [read_manifest(out / f"checkpoint-{step}").grid for step in (4, 8)]  # that of one process has no manifest
    assert grids == [Grid(data=2), Grid(x=2)], log()
    one, two = (f"data: auto is {number} on {number} process(es)" for number in (1, 2))
    before, after = log().split(one)
    assert two in before and two not in after, log()
    # What the starts before printed is still there.
    assert log().count("has no checkpoint: training starts at step 0") == 1, log()
    # Neither one node nor two that share a copy make two samples at once.
    assert log().count("2 batches are accumulated in place of 1") == 2, log()
    histories = [
        json.loads((folder / "trainer_state.json").read_text())["log_history"] for folder in (tmp_path / "alone", out)
    ]
    alone, ours = ([(entry["step"], entry["loss"]) for entry in history if "loss" in entry] for history in histories)
    assert [step for step, _ in ours] == [step for step, _ in alone] == list(range(1, 9))
    assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in alone], rel=1e-4)
    assert alone[-1][1] < alone[0][1]
    assert (out / "config.json").exists() and not list(out.glob("*stage*"))


def test_a_study_in_arrays(cluster, tmp_path):
    """Every step is done by a task of an array, in a folder with a space; what fails costs what reads from it alone.

    A task that is requeued is done at its second attempt. While jobs are in the queue, no other call begins.
    """
    environment(tmp_path)
    (tmp_path / "jobs").mkdir()
    folder = tmp_path / "bin"
    program(folder / "accelerate", HOLDING_LAUNCHER)
    program(folder / "launcher", LAUNCHER)
    (tmp_path / "without_work.py").write_text(WITHOUT_WORK)
    python = f'#!/bin/bash\n[[ $1 == */study.py ]] && exec {sys.executable} {tmp_path}/without_work.py "$@"\n'
    program(folder / "python", python + f'exec {sys.executable} "$@"\n')
    recipe = recipe_for(tmp_path)
    recipe.write_text(re.sub(r"  0.15M:\n.*\n", "", without_pilot(recipe)).replace("[0.05M, 0.15M]", "[0.05M]"))
    words = ("--slurm", "cluster", "--gpus-per-node", "4", "--submit", "--sbatch", "--comment", "some words")
    variables = {"SLURM_CONF": cluster.environment["SLURM_CONF"]}
    done = study_py(tmp_path, recipe, *words, **variables, FAIL="train-0.05M-k2-s0", HOLD="train-0.05M-ordinary-s0")
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = dict(re.findall(r"^job (\d+): (\S+)$", done.stdout, flags=re.MULTILINE))
    arrays = {name: number for number, name in jobs.items()}
    train = arrays["5-train-0.05M-1n"]

    def tasks() -> dict[str, dict[str, str]]:
        """What Slurm knows of each task, by the numbers of its array and in it."""
        lines = cluster("scontrol", "--oneliner", "show", "job").splitlines()
        known = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]
        return {f"{job['ArrayJobId']}_{job['ArrayTaskId']}": job for job in known if job.get("ArrayJobId") in jobs}

    def over() -> bool:
        return all(job["JobState"] not in ("PENDING", "RUNNING", "COMPLETING") for job in tasks().values())

    held = tmp_path / "jobs" / "held"
    wait_for(lambda: held.exists() or over(), "the run that holds")
    assert held.exists(), (tmp_path / "launched").read_text()  # else no launch has the name of that step
    refused = study_py(tmp_path, recipe, **variables)
    assert refused.returncode == 2
    assert train in re.search(r"jobs (.*) of this study wait", refused.stderr)[1].split(", ")
    cluster("scontrol", "requeue", f"{train}_0")
    wait_for(lambda: tasks()[f"{train}_0"]["JobState"] == "PENDING", "the requeued task")
    cluster("scontrol", "update", f"JobId={train}_0", SOON)

    wait_for(over, "all arrays")
    printed = "\n".join(path.read_text() for path in sorted((tmp_path / "out" / "slurm").glob("*.out")))
    codes = {name: job["ExitCode"] for name, job in tasks().items() if job["JobState"] != "COMPLETED"}
    assert codes == {f"{train}_1": "7:0"}, (codes, printed)
    assert len(tasks()) == len(list((tmp_path / "out" / "slurm").glob("*.out")))
    assert tasks()[f"{train}_0"]["Restarts"] == "1"
    stamp = json.loads((tmp_path / "out" / ".stamps" / "train-0.05M-ordinary-s0.json").read_text())
    assert stamp["attempts"] == 2
    launched = (tmp_path / "launched").read_text().splitlines()
    wide = next(line for line in launched if "z4x2" in line)
    assert "--num_machines 2" in wide and f"--main_process_ip {cluster.nodes[0]}" in wide

    before = set(jobs)
    done = study_py(tmp_path, recipe, *words, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = dict(re.findall(r"^job (\d+): (\S+)$", done.stdout, flags=re.MULTILINE))
    assert len(jobs) == 3 and not before & set(jobs)  # the run that failed, the utility, the report
    wait_for(over, "what is left")
    assert {job["JobState"] for job in tasks().values()} == {"COMPLETED"}
    assert "every step is done" in study_py(tmp_path, recipe, *words, **variables).stdout
