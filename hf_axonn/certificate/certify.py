"""The way from files to a verdict: `prepare` makes the job, `run_both` trains on one process and under the file,
`conclude` compares.

    folder/model        the small model           folder/launch.yaml   the file that is launched
    folder/one, many    what the processes wrote  folder/certificate.json, certificate.html
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedConfig
from transformers.utils import logging

from hf_axonn.certificate.compare import CaseResult, compare, read_runs
from hf_axonn.certificate.explain import explain
from hf_axonn.certificate.job import FLOAT64, Job, make_job, make_script_job, read_arguments
from hf_axonn.certificate.launch_plan import LaunchPlan, divide_plan, read_launch_plan
from hf_axonn.certificate.own_dtype import DTYPES, compare_in_own_dtype
from hf_axonn.certificate.progress import Progress, estimated_seconds
from hf_axonn.certificate.recording import Record
from hf_axonn.certificate.report import certificate, exit_code, lines, page, plan_lines
from hf_axonn.certificate.shrinking import config_of, shrink
from hf_axonn.certificate.watching import STANDS_STILL, cases_begun, wait_for
from hf_axonn.certificate.worker import ALONE, TOGETHER
from hf_axonn.compat.own_code import register_code


WORKER = "hf_axonn.certificate.worker"
LIMIT = 1800  # seconds of one run
LINES = 12  # of a log in an error
OF_LAUNCH = ("folder", "ranks", "notes")  # fields of a job that do not reach the run on one process
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def prepare(
    folder: Path,
    plan: LaunchPlan,
    model: str,
    *,
    steps: int,
    trainer: dict[str, Any],
    seed: int = 0,
    dtype: str = FLOAT64,
    own_code: bool = False,
) -> Job:
    """Make the small model and the job in an empty folder.

    Args:
        own_code: whether the code that comes with the model is run, here and by every process.
    Raises:
        ValueError: the model cannot be made small, an argument is wrong, or `steps` is below 2; see `register_code`.
    """
    _check_steps(steps, 2, ": the last one is the epoch's uneven end")
    if own_code:
        register_code(model)
    small = shrink(config_of(model), ranks=plan.ranks, layers=max(2, plan.stages), seed=seed)
    if dtype != FLOAT64:
        check_comparable(small.config, dtype)
    words = small.config.vocab_size
    job = make_job(folder, plan, steps=steps, vocabulary=words, trainer=trainer, seed=seed, dtype=dtype)
    if own_code:
        job.code = str(Path(model).resolve()) if Path(model).exists() else model
    with torch.no_grad():
        for tensor in filter(torch.is_floating_point, (*small.parameters(), *small.buffers())):
            tensor.copy_(tensor.to(job.numbers))
    with _quiet():
        small.save_pretrained(job.model)
    _write(job, plan)
    return job


def run_both(job: Job, progress: Progress, truths: Path | None = None) -> None:
    """Train on one process, then under the launch file. What fails there is noted in `job.failed`, and others go on.

    Args:
        truths: see `certify`.
    Raises:
        RuntimeError: the run on one process failed, or its time is up; the message has its last lines.
    """
    waiting: dict[str, list[str]] = {}
    for path, optimizer in job.cases:
        waiting.setdefault(path, []).append(f"{path}-{optimizer}")
    resumed = waiting.pop("resumed", [])
    _run_alone(job, [name for names in waiting.values() for name in names], progress, truths)
    while waiting:
        failed = _failure(job, [name for names in waiting.values() for name in names], progress)
        if not failed:
            break
        path = next(path for path, names in waiting.items() if failed in names)
        for name in waiting[path][waiting[path].index(failed) + 1 :]:
            job.failed[name] = f"not run, as {failed} does not run"
        waiting = dict(list(waiting.items())[list(waiting).index(path) + 1 :])
    for name in resumed:  # by new processes
        before = name.replace("resumed", "trainer")
        if before in job.failed:
            job.failed[name] = f"not run, as {before} does not run"
        else:
            _failure(job, [name], progress)
    job.save()


def _run_alone(job: Job, cases: list[str], progress: Progress, truths: Path | None) -> None:
    """Train on one process, or copy what an earlier certificate of the same model, rows and cases has kept."""
    folder = Path(job.folder, ALONE)
    kept = truths / _find_key(job) if truths is not None else None
    if kept is not None and kept.is_dir():
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        return
    _run(job, ALONE, cases, progress)
    if kept is not None:
        shutil.copytree(folder, kept)


def _find_key(job: Job) -> str:
    """Return a digest of what decides the run on one process: the files of the model, and the job."""
    decides = {name: value for name, value in asdict(job).items() if name not in OF_LAUNCH}
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode())
    for file in sorted(job.model.iterdir()):
        digest.update(f"{file.name}:{file.stat().st_size}:".encode() + file.read_bytes())
    return digest.hexdigest()


def _failure(job: Job, names: list[str], progress: Progress) -> str:
    """Run cases under the launch file; returns the one that failed, which is noted, or nothing."""
    try:
        _run(job, TOGETHER, names, progress)
    except RuntimeError as problem:
        progress.end("does not run")
        failed = [names[0], *cases_begun(Path(job.folder, TOGETHER))][-1]
        job.failed[failed] = str(problem)
        return failed
    return ""


def command(job: Job, name: str, cases: Sequence[str]) -> list[str]:
    """Return the command line of one of the two runs, for some cases."""
    file = str(Path(job.folder) / "job.json")
    if name == ALONE:
        return [sys.executable, "-m", WORKER, file, *cases]
    launch = ["-m", "hf_axonn.launch", "--config_file", str(Path(job.folder) / "launch.yaml")]
    return [sys.executable, *launch, "-m", WORKER, file, *cases]


def _run(job: Job, name: str, cases: list[str], progress: Progress) -> None:
    folder = Path(job.folder) / name
    for what in ("failed", "begun", "pid", "stack"):
        for path in folder.glob(f"{what}-rank*.txt"):
            path.unlink()
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "AXONN_CONFIG"))
    }
    # Gloo's set-up does not wait for all ranks: one that goes on at once would be an error in another's set-up.
    environment |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "TORCH_DIST_INIT_BARRIER": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    where = Path.cwd() if job.script else folder  # a script's data may lie where its user is
    with open(folder / "log.txt", "a", encoding="utf-8") as log:
        process = subprocess.Popen(
            command(job, name, cases), cwd=where, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        side = "one process" if name == ALONE else f"{job.ranks} ranks"
        early = wait_for(process, folder, LIMIT, lambda case: progress.begin_case(side, case))
    if early or process.returncode:
        raise RuntimeError(_why(folder, early or f"ended with {process.returncode}"))
    progress.end()


def _why(folder: Path, end: str) -> str:
    """Return the first failure that a process has left, else how the run ended and the end of the log."""
    what = "the run on one process" if folder.name == ALONE else "the run under the launch file"
    failed = sorted(folder.glob("failed-rank*.txt"), key=lambda path: path.stat().st_mtime)
    if end.startswith(STANDS_STILL):
        return f"{what} {end} (all of it: {folder / 'log.txt'})"
    if failed:
        first = failed[0].read_text(encoding="utf-8").partition("\nTraceback")[0]
        return f"{what} failed on {failed[0].stem.removeprefix('failed-')}: {first} (all of it: {folder / 'log.txt'})"
    lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()[-LINES:]
    return "\n".join([f"{what} {end}: {folder / 'log.txt'}", *lines])


def conclude(job: Job, plan: LaunchPlan) -> list[CaseResult]:
    """Compare all cases, and find the causes of what differs."""
    results = []
    with _quiet():
        for path, optimizer in job.cases:
            if problem := job.failed.get(f"{path}-{optimizer}"):
                results.append(CaseResult(path, optimizer, failed=problem))
                continue
            runs = read_runs(job, path, optimizer)
            if job.dtype == FLOAT64:
                results.append(compare(job, runs, path, optimizer))
                explain(job, runs, results[-1], plan.factors)
            else:
                results.append(compare_in_own_dtype(job, plan, runs, path, optimizer))
    return results


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Let Transformers say nothing inside of the small models that are loaded again and again."""
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
    config: Path,
    model: str | None,
    *,
    trainer_args: Path | None,
    script: Sequence[str],
    steps: int,
    output: Path,
    command_line: list[str],
    dtype: str = FLOAT64,
    own_code: bool = False,
    truths: Path | None = None,
) -> tuple[int, list[str]]:
    """Certify a launch file; the plan and a line for each run are printed while it goes on.

    Args:
        config: any launch file of Accelerate.
        model: a directory, a config.json, a model type or a name on the Hub; None: what the script loads.
        trainer_args: a YAML or JSON file of TrainingArguments.
        script: the user's script and its arguments; empty: a Trainer and a loop of ours.
        steps: optimizer steps.
        output: a new folder, for the certificate and what the runs wrote.
        command_line: what the certificate says that it was made by.
        dtype: in which the ranks compute and are compared: float64, bf16 or fp32.
        own_code: whether the code that comes with the model is run.
        truths: a folder that certificates of one model share, in which the runs of one process are kept and found;
            None: it is run here.
    Returns:
        The exit code, and the lines of the verdict.
    Raises:
        ValueError: nothing was started; the message says why.
        RuntimeError: the run on one process failed.
    """
    check_dtype(dtype, script)
    plan = read_launch_plan(config, dtype)
    arguments = read_arguments(trainer_args) if trainer_args else {}
    if loading := arguments.get("distributed_config"):
        plan = divide_plan(plan, loading)
    make_new_folder(output)
    if model is None:
        job = prepare_script(output.resolve(), plan, script, steps=steps)
    else:
        job = prepare(output.resolve(), plan, model, steps=steps, trainer=arguments, dtype=dtype, own_code=own_code)
    progress = Progress(job)
    try:
        progress.begin(plan_lines(job, plan.title, model, estimated_seconds(job)))
        run_both(job, progress, truths)
    finally:
        progress.close()
    results = conclude(job, plan)
    job.notes += _elsewhere(job)
    about, files = _about(job, model)
    small = f"{about['asked']}, made small: {about['parameters']:,} parameters, {dtype}"
    screen = lines(job, plan.title, results, small)
    files |= {"launch file": config} | ({"trainer arguments": trainer_args} if trainer_args else {})
    found = certificate(job, plan.title, results, about, command_line, files)
    (output / "certificate.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    (output / "certificate.html").write_text(page(found, screen), encoding="utf-8")
    for name in (ALONE, TOGETHER):  # gigabytes of tensors, which have been compared
        for path in (output / name).rglob("*.pt"):
            path.unlink()
    return exit_code(results), [*screen, f"  {output / 'certificate.json'}, certificate.html"]


def make_new_folder(output: Path) -> None:
    """Make the folder of --output, which may be there if it is empty.

    Raises:
        ValueError: it is a file, is within one, or is not empty.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"--output: {output} is a file, or within one: give a folder that is new.") from None
    if any(output.iterdir()):
        raise ValueError(f"--output: {output} is not empty: give another folder.")


def check_dtype(dtype: str, script: Sequence[str]) -> None:
    """Raise ValueError where no run can be made in a dtype."""
    if dtype == "fp16":
        raise ValueError(
            "--dtype fp16: a certificate's processes run on CPUs, where Accelerate ignores fp16 and its loss scaler "
            "without a word: give bf16 or fp32."
        )
    if dtype not in (FLOAT64, *DTYPES):
        raise ValueError(f"--dtype {dtype}: give {FLOAT64}, {' or '.join(DTYPES)}.")
    if script and dtype != FLOAT64:
        raise ValueError(f"--dtype {dtype}: a script is compared in {FLOAT64}: omit --dtype, or give --model.")


def check_comparable(config: PreTrainedConfig, dtype: str) -> None:
    """Raise ValueError for a model whose steps jump where numbers are rounded."""
    if dtype == "bf16" and any(getattr(config, name, None) for name in EXPERTS):
        raise ValueError(
            f"--dtype {dtype}: {config.model_type} has experts, and rounding decides which of them a token takes, so "
            f"that runs of one process differ by whole experts: certify it in fp32 or {FLOAT64}."
        )


def prepare_script(folder: Path, plan: LaunchPlan, script: Sequence[str], *, steps: int) -> Job:
    """Make the job of a user's script in an empty folder.

    Raises:
        ValueError: there is no such script, or `steps` is below 1.
    """
    _check_steps(steps, 1)
    job = make_script_job(folder, plan, steps=steps, script=script)
    _write(job, plan)
    return job


def _check_steps(steps: int, least: int, why: str = "") -> None:
    if steps < least:
        raise ValueError(f"--steps is {steps}: give a number of at least {least}{why}.")


def _write(job: Job, plan: LaunchPlan) -> None:
    for name in (ALONE, TOGETHER):
        Path(job.folder, name).mkdir()
    Path(job.folder, "launch.yaml").write_text(yaml.safe_dump(plan.settings), encoding="utf-8")
    job.save()


def _about(job: Job, name: str | None) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return the certificate's facts of the model, and the files whose sums it has."""
    one = Record(Path(job.folder, ALONE, "-".join(job.cases[0])), 0)
    model = Path(one.facts["models"][0]) if job.script else job.model
    small = json.loads((model / "config.json").read_text(encoding="utf-8"))
    parameters = sum(shard.values.numel() for shard in one.parameters(0))
    about = {"asked": name or small["model_type"], "type": small["model_type"], "parameters": parameters}
    files = {"config of the small model": model / "config.json"}
    return {**about, "config": small}, files | ({"script": Path(job.script[0])} if job.script else {})


def _elsewhere(job: Job) -> list[str]:
    """Return a note of what a script left outside of the certificate's folder; what it has removed is omitted."""
    found: set[str] = set()
    for file in Path(job.folder).glob("*/script-*/elsewhere-rank*.json"):
        found |= set(filter(os.path.exists, json.loads(file.read_text(encoding="utf-8"))))
    listed: list[str] = []
    for path in sorted(found):  # a folder that was made stands for what is in it
        if not any(path.startswith(f"{folder}{os.sep}") for folder in listed):
            listed.append(path)
    more = f" and {len(listed) - LINES} more" if len(listed) > LINES else ""
    return [f"the script wrote elsewhere: {', '.join(listed[:LINES])}{more}."] if listed else []
