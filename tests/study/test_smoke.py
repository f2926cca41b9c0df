"""training_scripts/study: the smoke recipe from its texts to its page, by real launches, and a run that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_axonn_scripts.study.recipe.reader import read_recipe
from hf_axonn_scripts.study.recipe.steps import steps_of
from tests.study.conftest import FOLDER
from tests.study.smoke import write_smoke


pytestmark = pytest.mark.slow

KILLED = "train-0.15M-k2-s0"


def command(folder: Path, *words: str) -> list[str]:
    recipe = folder / "smoke.yaml"
    return [sys.executable, str(FOLDER / "study.py"), str(recipe), "--output", str(folder / "out"), *words]


def call(folder: Path, *words: str, timeout: float = 1200) -> str:
    """study.py to its end; what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command(folder, *words), env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a study that was done from start to end; what it printed is in the file `printed`."""
    folder = tmp_path_factory.mktemp("smoke")
    write_smoke(folder)
    (folder / "printed").write_text(call(folder))
    return folder


def stamps(folder: Path) -> dict[str, int]:
    """When each step was stamped as done, in nanoseconds."""
    return {path.stem: path.stat().st_mtime_ns for path in (folder / "out" / ".stamps").glob("*.json")}


@pytest.mark.timeout(1500)
def test_from_texts_to_the_page(finished):
    recipe = read_recipe(finished / "smoke.yaml")
    steps = steps_of(recipe, finished / "out")
    assert stamps(finished).keys() == {step.name for step in steps}
    assert (
        f"== {len(steps)} of {len(steps)} steps, 100% of the predicted work, 0 s left"
        in (finished / "printed").read_text()
    )
    out = finished / "out"
    chosen = json.loads((out / "pilot" / "chosen.json").read_text())
    assert chosen["learning_rate"] == 3e-3 and chosen["suffix"] == 16
    for run in recipe.runs:
        results = out / "runs" / run.model / run.name / "extraction" / "results.jsonl"
        rows = [json.loads(line) for line in results.read_text().splitlines()]
        assert len(rows) == 24 and {row["bucket"] for row in rows} == {0, 1, 4}
        assert (out / "runs" / run.model / run.name / "canaries.json").is_file()
    assert json.loads((out / "report" / "study.json").read_text())
    page = (out / "report" / "study.html").read_text()
    assert page.startswith("<!doctype html>") and "0.15M" in page
    for model in recipe.models:
        utility = json.loads((out / "utility" / f"{model.name}.json").read_text())
        assert {run.name for run in recipe.runs if run.model == model.name} <= utility.keys()
    assert list((out / "report").rglob("*.png")) and (out / "report" / "study.md").is_file()


@pytest.mark.timeout(300)
def test_a_second_call_does_nothing(finished):
    before = stamps(finished)
    printed = call(finished, timeout=120)
    assert "$ " not in printed and stamps(finished) == before


def gain(folder: Path, run: str, bucket: int) -> float:
    """Mean gain in log-probability over the base of passages in a bucket."""
    runs = folder / "out" / "runs" / "0.15M"
    then, now = (
        {row["document_id"]: row for row in map(json.loads, (runs / name / "extraction" / "results.jsonl").open())}
        for name in ("base", run)
    )
    gains = [row["logprob"] - then[name]["logprob"] for name, row in now.items() if row["bucket"] == bucket]
    return sum(gains) / len(gains)


@pytest.mark.timeout(300)
def test_what_was_seen_is_likelier(finished):
    assert gain(finished, "ordinary-s0", 4) > gain(finished, "ordinary-s0", 0) + 0.5


@pytest.mark.timeout(600)
def test_a_study_that_is_killed_goes_on(finished):
    """SIGKILL in the middle of a training: what is done stays, and the run ends with the same numbers."""
    out = finished / "out"
    results = out / "runs" / "0.15M" / "k2-s0" / "extraction" / "results.jsonl"
    whole, before = results.read_text(), stamps(finished)
    log = out / "logs" / f"{KILLED}.log"
    read = log.stat().st_size
    with open(finished / "killed", "w") as printed:
        process = subprocess.Popen(
            command(finished, "--again", KILLED),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    end = time.monotonic() + 240
    try:
        while "'loss'" not in log.read_text()[read:]:
            assert process.poll() is None and time.monotonic() < end, (finished / "killed").read_text()[-3000:]
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
    assert not results.exists() and KILLED not in stamps(finished)
    status = call(finished, "--status", timeout=60)
    assert f"begun and not done: {KILLED}" in status and "15 of 16 steps" in status

    printed = call(finished, timeout=300)
    assert printed.count("$ ") == 1 and "k2-s0" in printed
    assert results.read_text() == whole
    after = stamps(finished)
    assert after.pop(KILLED) != before.pop(KILLED) and after == before
    stamp = json.loads((out / ".stamps" / f"{KILLED}.json").read_text())
    assert stamp["attempts"] == 2
