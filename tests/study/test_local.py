"""training_scripts/study/study.py, and running without slurm.py: what is done, in which order, and what is said.

The work of the steps has a stand-in that writes what each should leave; test_smoke.py does it for real.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
import yaml

from hf_axonn import AxonnConfig
from hf_axonn_scripts.study.recipe.cost import cost_of
from hf_axonn_scripts.study.recipe.reader import read_recipe
from hf_axonn_scripts.study.recipe.steps import steps_of
from hf_axonn_scripts.study.running import checks, listing, work
from hf_axonn_scripts.study.running.listing import Forecast, dry_run, duration
from hf_axonn_scripts.study.running.work import end_left_over, environment, write_launch_file
from hf_axonn_scripts.study.study import find, main
from tests.study.conftest import FOLDER
from tests.study.smoke import write_smoke


class Stand:
    """In place of the work of steps: what was done, and which steps are to fail, take time or be cut off."""

    def __init__(self, output, recipe) -> None:
        self.output, self.recipe = output, recipe
        self.done: list[str] = []
        self.failing: set[str] = set()
        self.cut: str | None = None
        self.lazy: str | None = None
        self.found: dict[str, list[str]] = {}

    def act(self, recipe, output, step) -> None:
        self.done.append(step.name)
        self.found[step.name] = [path.name for path in step.outputs if path.exists()]
        (output / "logs").mkdir(exist_ok=True)
        if step.name in self.failing:
            raise SystemExit(f"accelerate ended with code 1; its output is in {output / 'logs' / step.name}.log")
        for path in step.outputs:
            if step.name == self.lazy:
                return
            if path.suffix:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(step.name)
            else:
                path.mkdir(parents=True, exist_ok=True)
                (path / "file").write_text(step.name)
            if step.name == self.cut:
                signal.raise_signal(signal.SIGTERM)

    def call(self, *arguments: str) -> tuple[int, list[str]]:
        """study.py with arguments; its exit code and the steps that it did."""
        self.done = []
        code = main([str(self.recipe), "--output", str(self.output), *arguments])
        return code, self.done


@pytest.fixture
def stand(tmp_path, monkeypatch):
    found = Stand(tmp_path / "out", write_smoke(tmp_path))
    monkeypatch.setattr(work, "act", found.act)
    kept = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts what is in the background
    yield found
    signal.signal(signal.SIGINT, kept)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def names(stand) -> list[str]:
    recipe = read_recipe(stand.recipe)
    return [step.name for step in steps_of(recipe, stand.output)]


def test_every_step_is_done_once(stand, capsys):
    assert stand.call() == (0, names(stand))
    out = capsys.readouterr().out
    count = len(names(stand))
    assert f"== 0 of {count} steps, 0% of the predicted work" in out
    assert f"== {count} of {count} steps, 100% of the predicted work, 0 s left" in out
    progress = json.loads((stand.output / "progress.json").read_text())
    assert (progress["done"], progress["steps"], progress["share"], progress["failed"]) == (count, count, 1, [])
    assert progress["running"] is None and progress["seconds_left"] == 0
    stamp = json.loads((stand.output / ".stamps" / "train-0.05M-k2-s0.json").read_text())
    assert stamp["hf_axonn"] and stamp["attempts"] == 1 and stamp["processes"] == 2
    assert stamp["settings"]["loss"] == {"goldfish_k": 2}
    assert stand.call() == (0, [])


def test_a_failed_step_loses_only_what_reads_from_it(stand, capsys):
    stand.failing = {"base-0.05M"}
    code, done = stand.call()
    of_it = {name for name in names(stand) if "0.05M" in name}
    assert code == 1 and set(done) == set(names(stand)) - of_it | {"base-0.05M"}
    out = capsys.readouterr().out
    assert "FAILED base-0.05M: accelerate ended with code 1; its output is in " in out and "base-0.05M.log" in out
    lost = ", ".join(name for name in names(stand) if name in of_it and name != "base-0.05M")
    assert f"not done for want of base-0.05M: {lost}\n" in out
    assert "== report of what is there, without base-0.05M, " in out
    assert "1 step failed: the same command does them again" in out
    assert json.loads((stand.output / "progress.json").read_text())["failed"] == ["base-0.05M"]
    assert stand.call("--status") == (0, [])
    assert "failed: base-0.05M, 20" in capsys.readouterr().out
    # The report was made of a part, so that it is made again.
    stand.failing = set()
    assert stand.call() == (0, [name for name in names(stand) if name in of_it or name == "report"])
    assert stand.call("--status") == (0, [])
    assert "failed:" not in capsys.readouterr().out


def test_what_is_there_is_measured_where_a_run_failed(stand, capsys):
    stand.failing = {"train-0.05M-k2-s0"}
    assert stand.call() == (1, names(stand))
    assert "== utility-0.05M of what is there, without train-0.05M-k2-s0 (" in capsys.readouterr().out
    stand.failing = set()
    assert stand.call() == (0, ["train-0.05M-k2-s0", "utility-0.05M", "report"])


def test_nothing_is_reported_where_nothing_was_trained(stand, capsys):
    stand.failing = {"pilot"}
    code, done = stand.call()
    assert code == 1 and "report" not in done and {"base-0.05M", "base-0.15M"} <= set(done)
    assert "not done for want of pilot: ask-0.05M, train-0.05M-ordinary-s0, " in capsys.readouterr().out


def test_a_step_without_its_files_has_failed(stand, capsys):
    stand.lazy = "tokenizer"
    assert stand.call() == (1, ["texts", "tokenizer"])
    assert "FAILED tokenizer: the step tokenizer ended without" in capsys.readouterr().out


def test_a_step_that_was_cut_off_goes_on_from_what_it_left(stand, capsys):
    stand.cut = "train-0.05M-k2-s0"
    assert stand.call()[0] == 130
    assert "interrupted; the same command goes on" in capsys.readouterr().err
    assert stand.call("--status") == (0, [])
    assert "begun and not done: train-0.05M-k2-s0, 20" in capsys.readouterr().out
    stand.cut = None
    left = names(stand)[names(stand).index("train-0.05M-k2-s0") :]
    assert stand.call() == (0, left)
    assert stand.found["train-0.05M-k2-s0"] == ["checkpoint"]
    assert json.loads((stand.output / ".stamps" / "train-0.05M-k2-s0.json").read_text())["attempts"] == 2


def test_what_a_step_left_with_other_settings_is_removed(stand):
    stand.cut = "train-0.05M-k2-s0"
    assert stand.call()[0] == 130
    stand.cut = None
    text = stand.recipe.read_text()
    stand.recipe.write_text(text.replace("goldfish_k: 2", "goldfish_k: 3"))
    assert stand.call()[0] == 0
    assert stand.found["train-0.05M-k2-s0"] == []


def test_weights_stay_where_only_the_questions_change(stand):
    assert stand.call()[0] == 0
    text = stand.recipe.read_text()
    assert "top_k=40" in text
    stand.recipe.write_text(text.replace("top_k=40", "top_k=20"))
    code, done = stand.call()
    again = [name for name in names(stand) if name.startswith(("ask", "train", "utility", "report"))]
    assert (code, done) == (0, again)
    assert stand.found["train-0.05M-k2-s0"] == ["checkpoint"] and stand.found["ask-0.05M"] == []


def test_a_file_that_is_gone_or_cut_is_made_again(stand):
    assert stand.call()[0] == 0
    run = stand.output / "runs" / "0.05M" / "k2-s0"
    (run / "extraction" / "file").unlink()
    # What reads from it stays: it would read the same again.
    assert stand.call() == (0, ["train-0.05M-k2-s0"])
    assert stand.found["train-0.05M-k2-s0"] == ["checkpoint"]
    (run / "checkpoint" / "file").write_text("cut")
    assert stand.call() == (0, ["train-0.05M-k2-s0"])
    # Answers of weights that are not there any more are no answers.
    assert stand.found["train-0.05M-k2-s0"] == []


def test_only_some_steps(stand, capsys):
    assert stand.call("--only", "texts", "tok*") == (0, ["texts", "tokenizer"])
    assert stand.call("--only", "base-*") == (1, [])
    assert "not done for want of data-study: base-0.15M, base-0.05M" in capsys.readouterr().out
    assert stand.call("--only", "data-study", "base-0.05M") == (0, ["data-study", "base-0.05M"])
    assert stand.call("--only", "nothing-*") == (2, [])
    assert "no step is called nothing-*: --dry-run --all lists the names" in capsys.readouterr().err


def test_again_does_a_step_from_the_start(stand):
    assert stand.call()[0] == 0
    code, done = stand.call("--again", "train-0.05M-*-s0")
    assert (code, done) == (0, ["train-0.05M-ordinary-s0", "train-0.05M-k2-s0"])
    assert stand.found["train-0.05M-k2-s0"] == []


def test_no_step_is_begun_that_would_not_end_in_time(stand, capsys, monkeypatch):
    predicted = {"pilot": 100 * 60.0}

    def other(step, recipe):
        cost = cost_of(step, recipe)
        return SimpleNamespace(seconds=predicted.get(step.name, 1.0), flops=cost.flops, disk_bytes=cost.disk_bytes)

    monkeypatch.setattr(listing, "cost_of", other)
    # A stand-in takes no time, so that the pilot is expected to take less than was predicted; the clock is not asked.
    monkeypatch.setattr(Forecast, "seconds", lambda self, name: self.predicted[name])
    code, done = stand.call("--minutes", "60")
    assert code == 3 and "pilot" not in done and {"base-0.05M", "base-0.15M"} <= set(done)
    assert "train-0.05M-k2-s0" not in done
    assert "no time for pilot: the same command goes on" in capsys.readouterr().out
    assert stand.call("--minutes", "200")[0] == 0


def test_time_left_follows_what_steps_took():
    kinds = {"a": "train", "b": "train", "c": "train", "d": "ask", "e": "data"}
    steps = {name: SimpleNamespace(name=name, kind=kind) for name, kind in kinds.items()}
    predicted = {"a": 10.0, "b": 30.0, "c": 20.0, "d": 8.0, "e": 0.0}
    forecast = Forecast(steps, predicted, {}, [])
    assert forecast.seconds_left() == 68 and forecast.share == 0
    forecast = Forecast(steps, predicted, {"a": 20.0, "b": 60.0}, ["a", "b"])
    assert forecast.seconds("c") == 40  # twice as long as predicted, as a and b
    assert forecast.seconds("d") == 16  # no step of its kind is finished
    assert forecast.seconds_left(["c"]) == 40 and forecast.seconds_left() == 56
    assert forecast.share == pytest.approx(40 / 68)
    # A download that took long, or was not needed, says nothing of a training.
    forecast = Forecast(steps, {**predicted, "e": 1.0}, {"e": 90.0}, ["e"])
    assert forecast.seconds("c") == 20
    # The last attempt of a step that was cut off says nothing of the whole step.
    forecast = Forecast(steps, predicted, {"a": 20.0, "b": 1.0}, ["a"])
    assert forecast.seconds("c") == 40


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (99.4, "99 s"), (100, "2 min"), (5400, "90 min"), (6060, "1 h 41 min"), (200_000, "2.3 days")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_a_look_changes_nothing(stand, capsys):
    assert stand.call("--dry-run") == (0, [])
    table = capsys.readouterr().out.splitlines()
    assert table[0].startswith("smoke: 2 models, 5 continuations")
    assert table[2].split() == ["kind", "model", "steps", "done", "FLOPs", "time", "disk"]
    assert table[-1].split()[:3] == ["all", str(len(names(stand))), "0"]
    assert len(table) < 40 and max(map(len, table[1:])) < 120
    assert stand.call("--dry-run", "--all") == (0, [])
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()[3:]]
    assert listed == [*names(stand), "all"]
    assert not stand.output.exists()


def test_gpu_hours_where_there_are_gpus(tmp_path):
    recipe = read_recipe(FOLDER / "recipes" / "sc24.yaml")
    table = dry_run(recipe, tmp_path).splitlines()
    assert table[2].endswith("GPU hours") and int(table[-1].split()[-1].replace(",", "")) > 1000


def test_a_table_of_what_is_left(stand, capsys):
    stand.failing = {"base-0.05M"}
    stand.call()
    capsys.readouterr()
    assert stand.call("--dry-run") == (0, [])
    # Its base, asking it, three runs, its utility; and the report once more.
    assert "7 steps are left: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("buckets: [0, 1, 4]", "buckets: [1, 4]", r"smoke.yaml:\d+: .*buckets"),
        ("per_bucket: 8", "per_bucket: 0", r"smoke.yaml:\d+: .*per_bucket"),
        ("grid: {x: 2}", "grid: {x: 3}", r"smoke.yaml:\d+: "),
        ("name: smoke", "name: smoke\ncolour: green", r"smoke.yaml:\d+: .*colour"),
    ],
)
def test_bad_recipes_end_before_anything_starts(stand, capsys, old, new, message):
    text = stand.recipe.read_text()
    assert old in text
    stand.recipe.write_text(text.replace(old, new, 1))
    for look in ([], ["--dry-run"]):
        assert stand.call(*look) == (2, [])
        assert re.search(message, capsys.readouterr().err)
    assert not stand.output.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--submit", "--submit has no effect without --slurm: leave it out"),
        ("--begin", "--begin has no effect without --step"),
        ("--dry-run --hours 3", "--hours has no effect beside --dry-run"),
        ("--status --only base-*", "--only has no effect beside --status"),
        ("--slurm frontier --minutes 5", "--minutes has no effect beside --slurm"),
        ("--plans frontier --status", "--status stands in place of --plans: leave one of them out"),
        ("--minutes -3", "--minutes is -3.0: give a number above 0"),
    ],
)
def test_options_without_effect_are_refused(tmp_path, capsys, words, message):
    assert main(["smoke", "--output", str(tmp_path / "out"), *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_recipe_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hf-axonn study"])  # as `hf_axonn.cli.scripts` has it
    assert main(["nowhere"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("hf-axonn study: nowhere is no file and none of the recipes that come with the study: cpu")
    assert find("cpu") == find("cpu.yaml") == FOLDER / "recipes" / "cpu.yaml"


def test_missing_packages_and_a_full_disk_are_said_first(stand, capsys, monkeypatch):
    known = checks.find_spec
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name in ("matplotlib", "jinja2") else known(name))
    assert stand.call() == (2, [])
    assert "jinja2, matplotlib cannot be imported: pip install 'hf_axonn[demo]'" in capsys.readouterr().err
    # What needs them is not wanted here.
    assert stand.call("--only", "texts") == (0, ["texts"])
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "lm_eval" else known(name))
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert stand.call() == (2, [])
    printed = capsys.readouterr()
    assert "lm_eval is not installed, so that its tasks are left out" in printed.out
    assert f"{len(names(stand)) - 1} steps are left and write about " in printed.err
    assert "has 1 kB free: give --output a place on another disk" in printed.err


def test_a_study_for_a_cluster_is_not_begun_here(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert main(["sc24", "--output", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    assert "sc24.yaml is for frontier: it has steps of 256 ranks, but there are 4 GPUs here; --slurm" in printed
    assert not (tmp_path / "out").exists()


def test_a_directory_belongs_to_one_study(stand, capsys):
    assert stand.call("--only", "texts")[0] == 0
    stand.recipe.write_text(stand.recipe.read_text().replace("name: smoke", "name: other"))
    assert stand.call() == (2, [])
    assert "holds the study smoke, not other: give another --output" in capsys.readouterr().err


def lock(stand, name: str, pid: int, host: str) -> None:
    (stand.output / ".stamps").mkdir(parents=True, exist_ok=True)
    (stand.output / ".stamps" / f"{name}.lock").write_text(f"{pid}\n{host}\n")


def test_two_studies_do_not_work_in_one_directory(stand, capsys):
    assert stand.call("--only", "texts")[0] == 0
    here = socket.gethostname()
    lock(stand, "study", 1, here)  # someone who is there
    assert stand.call() == (2, [])
    assert f"the study in {stand.output} is at work already, process 1 on {here}\n" in capsys.readouterr().err
    lock(stand, "study", 7, "another-host")  # nobody here can know
    assert stand.call() == (2, [])
    file = stand.output / ".stamps" / "study.lock"
    assert f"process 7 on another-host: if it is gone, remove {file}" in capsys.readouterr().err
    gone = subprocess.Popen(["true"])
    gone.wait()
    lock(stand, "study", gone.pid, here)
    assert stand.call("--only", "tokenizer") == (0, ["tokenizer"])
    assert not file.exists()


def test_steps_have_locks_of_their_own(stand, capsys):
    """Tasks of an array work beside each other, but two never on one step."""
    here = socket.gethostname()
    lock(stand, "study", 1, here)
    assert stand.call("--step", "texts") == (0, ["texts"])
    assert stand.call("--step", "texts") == (0, [])
    assert "texts is done" in capsys.readouterr().out
    lock(stand, "tokenizer", 1, here)
    assert stand.call("--step", "tokenizer") == (1, [])
    assert f"the step tokenizer is at work already, process 1 on {here}" in capsys.readouterr().err
    assert stand.call("--step", "base-0.05M") == (1, [])
    assert "the step base-0.05M needs tokenizer, data-study, which are not done" in capsys.readouterr().err
    assert stand.call("--step", "nothing") == (2, [])


def test_launch_files(tmp_path):
    recipe = read_recipe(write_smoke(tmp_path))
    steps = {step.name: step for step in steps_of(recipe, tmp_path)}
    file = write_launch_file(recipe, tmp_path, steps["train-0.05M-ordinary-s0"])
    assert file == tmp_path / "grids" / "2_x2.yaml"
    shipped = FOLDER.parent / "grids" / "cpu_2_x2.yaml"
    assert yaml.safe_load(file.read_text()) == yaml.safe_load(shipped.read_text())
    other = write_launch_file(recipe, tmp_path, steps["train-0.05M-ordinary-s0-z2x2"])
    content = yaml.safe_load(other.read_text())
    assert other.name == "4_z2_x2.yaml" and content["num_processes"] == 4
    assert content["axonn_config"]["grid"] == {"data": 1, "z": 2, "y": 1, "x": 2}


def test_launch_files_for_a_cluster(tmp_path, monkeypatch):
    recipe = read_recipe(FOLDER / "recipes" / "sc24.yaml")
    step = next(step for step in steps_of(recipe, tmp_path) if step.kind == "train")
    content = yaml.safe_load(write_launch_file(recipe, tmp_path, step).read_text())
    assert content["use_cpu"] is False and content["mixed_precision"] == "bf16"
    assert math.prod(content["axonn_config"]["grid"].values()) == content["num_processes"] == step.processes
    assert AxonnConfig.from_mapping(content["axonn_config"]).grid.size == step.processes
    monkeypatch.setattr(work, "predict_step", lambda *_: SimpleNamespace(order=("z", "x", "data", "y")))
    file = write_launch_file(recipe, tmp_path, step)
    assert "zxdatay" in file.name
    assert yaml.safe_load(file.read_text())["axonn_config"]["order"] == ["z", "x", "data", "y"]


def test_the_environment_of_programs(tmp_path, monkeypatch):
    recipe = read_recipe(write_smoke(tmp_path))
    for name in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    found = environment(recipe, processes=2)
    assert found == {"OMP_NUM_THREADS": "4", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    assert environment(recipe, processes=16)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in environment(recipe, processes=2)


def test_the_commit_is_that_of_these_files_and_not_of_what_is_around_them(tmp_path, monkeypatch):
    def git(*words: str) -> None:
        who = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    for name in ("tracked.py", "installed.py"):
        (tmp_path / name).touch()
    git("init")
    git("add", "tracked.py")
    git("commit", "--message", "first")
    monkeypatch.setattr(work, "__file__", str(tmp_path / "tracked.py"))
    assert work.made_with()["commit"]
    monkeypatch.setattr(work, "__file__", str(tmp_path / "installed.py"))
    assert work.made_with()["commit"] is None


def test_ranks_that_a_killed_launch_left_are_ended():
    words = ["some.program", "recipe.yaml", "/a place", "train"]
    left, other = (
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", *end], start_new_session=True)
        for end in (words, [*words[:-1], "another"])
    )
    try:
        while sys.executable not in psutil.Process(left.pid).cmdline():  # it has begun
            time.sleep(0.01)
        end_left_over("train", words)
        assert not psutil.pid_exists(left.pid) and other.poll() is None
    finally:
        left.kill()
        other.kill()
        other.wait()
