"""From files to a verdict: `prepare` makes the job, `run_both` trains on one process and under the file, `conclude`
compares.

    folder/model        the small model           folder/launch.yaml   the file that is launched
    folder/one, many    what the processes wrote  folder/certificate.json, certificate.html
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from transformers.utils import logging

from hf_axonn.certificate.compare import CaseResult, compare, read_runs
from hf_axonn.certificate.explain import explain
from hf_axonn.certificate.job import Job, make_job, read_arguments
from hf_axonn.certificate.launch_plan import LaunchPlan, read_launch_plan
from hf_axonn.certificate.recording import Record
from hf_axonn.certificate.report import certificate, exit_code, lines, page
from hf_axonn.certificate.shrinking import config_of, shrunk
from hf_axonn.certificate.worker import ALONE, TOGETHER


WORKER = "hf_axonn.certificate.worker"
LIMIT = 1800  # seconds of one run
LINES = 12  # of a log in an error


def prepare(folder: Path, plan: LaunchPlan, model: str, *, steps: int, trainer: dict[str, Any], seed: int = 0) -> Job:
    """Make the small model and the job in an empty folder.

    Raises:
        ValueError: the model cannot be made small, an argument is wrong, or `steps` is below 1.
    """
    if steps < 1:
        raise ValueError(f"--steps is {steps}: give a number of at least 1.")
    small = shrunk(config_of(model), ranks=plan.ranks, layers=max(2, plan.stages), seed=seed)
    job = make_job(folder, plan, steps=steps, vocabulary=small.config.vocab_size, trainer=trainer, seed=seed)
    for name in (ALONE, TOGETHER):
        (folder / name).mkdir()
    small.save_pretrained(job.model)
    (folder / "launch.yaml").write_text(yaml.safe_dump(plan.settings), encoding="utf-8")
    job.save()
    return job


def run_both(job: Job) -> None:
    """Train on one process, then under the launch file.

    Raises:
        RuntimeError: a process failed, or the time is up; the message has its last lines.
    """
    for name in (ALONE, TOGETHER):
        _run(job, name)


def command(job: Job, name: str) -> list[str]:
    """The command line of one of the two runs."""
    file = str(Path(job.folder) / "job.json")
    if name == ALONE:
        return [sys.executable, "-m", WORKER, file]
    launch = ["-m", "hf_axonn.launch", "--config_file", str(Path(job.folder) / "launch.yaml")]
    return [sys.executable, *launch, "-m", WORKER, file]


def _run(job: Job, name: str) -> None:
    folder = Path(job.folder) / name
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "AXONN_CONFIG"))
    }
    # Gloo's set-up does not wait for all ranks: one that goes on at once would be an error in another's set-up.
    environment |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "TORCH_DIST_INIT_BARRIER": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    with open(folder / "log.txt", "w", encoding="utf-8") as log:
        try:
            code = subprocess.run(
                command(job, name), cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=LIMIT
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    if code != 0:
        raise RuntimeError(_why(folder, code))


def _why(folder: Path, code: int | None) -> str:
    """The first failure that a process has left, else the end of the log."""
    what = "the run on one process" if folder.name == ALONE else "the run under the launch file"
    failed = sorted(folder.glob("failed-rank*.txt"), key=lambda path: path.stat().st_mtime)
    if failed:
        first = failed[0].read_text(encoding="utf-8").partition("\nTraceback")[0]
        return f"{what} failed on {failed[0].stem.removeprefix('failed-')}: {first} (all of it: {folder / 'log.txt'})"
    end = f"took more than {LIMIT} s" if code is None else f"ended with {code}"
    lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()[-LINES:]
    return "\n".join([f"{what} {end}: {folder / 'log.txt'}", *lines])


def conclude(job: Job, plan: LaunchPlan) -> list[CaseResult]:
    """Compare all cases, and find the causes of what differs."""
    results = []
    with _quiet():
        for path, optimizer in job.cases:
            result = compare(job, path, optimizer)
            explain(job, read_runs(job, path, optimizer), result, plan.factors)
            results.append(result)
    return results


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Inside, Transformers says nothing of the small models that are loaded again and again."""
    verbosity, shows_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_bars:
            logging.enable_progress_bar()


def certify(
    config: Path, model: str, *, trainer_args: Path | None, steps: int, output: Path, command_line: list[str]
) -> tuple[int, list[str]]:
    """Certify a launch file.

    Args:
        config: any launch file of Accelerate.
        model: a directory, a config.json, a model type or a name on the Hub.
        trainer_args: a YAML or JSON file of TrainingArguments.
        steps: optimizer steps.
        output: a new folder, for the certificate and what the runs wrote.
        command_line: what the certificate says that it was made by.
    Returns:
        The exit code, and the lines of the screen.
    Raises:
        ValueError: nothing was started; the message says why.
        RuntimeError: a run failed.
    """
    plan = read_launch_plan(config)
    arguments = read_arguments(trainer_args) if trainer_args else {}
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"--output: {output} is not empty: give another folder.")
    output.mkdir(parents=True, exist_ok=True)
    job = prepare(output.resolve(), plan, model, steps=steps, trainer=arguments)
    run_both(job)
    results = conclude(job, plan)
    small = json.loads((job.model / "config.json").read_text(encoding="utf-8"))
    about = {"asked": model, "type": small["model_type"], "parameters": _parameters(job), "config": small}
    screen = lines(job, plan.title, results, f"{model}, made small: {about['parameters']:,} parameters, float64")
    files = {"launch file": config, "config of the small model": job.model / "config.json"}
    files |= {"trainer arguments": trainer_args} if trainer_args else {}
    found = certificate(job, plan.title, results, about, command_line, files)
    (output / "certificate.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    (output / "certificate.html").write_text(page(found, screen), encoding="utf-8")
    for name in (ALONE, TOGETHER):  # gigabytes of tensors, which have been compared
        for path in (output / name).rglob("*.pt"):
            path.unlink()
    return exit_code(results), [*screen, f"  {output / 'certificate.json'}, certificate.html"]


def _parameters(job: Job) -> int:
    folder = Path(job.folder) / ALONE / "-".join(job.cases[0])
    return sum(piece.values.numel() for piece in Record(folder, 0).parameters(0))
