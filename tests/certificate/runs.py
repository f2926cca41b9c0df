"""Certificates of small models, by forks: what these tests import is imported already in the processes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import yaml

from hf_axonn.certificate import worker
from hf_axonn.certificate.certify import conclude, prepare, prepare_script
from hf_axonn.certificate.compare import CaseResult
from hf_axonn.certificate.deepspeed import on_cpus
from hf_axonn.certificate.job import FLOAT64, Job
from hf_axonn.certificate.launch_plan import LaunchPlan, read_launch_plan
from hf_axonn.config import VARIABLE, AxonnConfig
from hf_axonn.launch import notebook
from tests.certificate.planted import ERRORS
from tests.helpers.launching import forked
from tests.helpers.ranks import run_ranks


SCRIPTS = Path(__file__).parent / "scripts"
BASE = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "mixed_precision": "no"}


def launch_file(folder: Path, ranks: int, **settings) -> Path:
    """A launch file as Accelerate has them."""
    path = folder / "accelerate.yaml"
    path.write_text(yaml.safe_dump({**BASE, "num_processes": ranks, **settings}))
    return path


def one_process(folder: Path, plan: LaunchPlan, model: str, *, steps: int = 2, dtype: str = FLOAT64, **trainer) -> Job:
    """A job of one case, run on one process."""
    folder.mkdir()
    job = prepare(folder, plan, model, steps=steps, trainer=trainer, dtype=dtype)
    job.cases = [("trainer", "sgd")]
    job.save()
    _run_alone(folder)
    return job


def script_on_one_process(folder: Path, plan: LaunchPlan, *script: object, steps: int = 2) -> Job:
    """A job of a script with its arguments, run on one process."""
    folder.mkdir()
    job = prepare_script(folder, plan, [str(word) for word in script], steps=steps)
    _run_alone(folder)
    return job


def _run_alone(folder: Path) -> None:
    ended = forked(folder, None, "-m", "hf_axonn.certificate.worker", folder / "job.json", timeout=500)
    assert ended.code == 0, ended.output[-4000:]


def certified(job: Job, plan: LaunchPlan) -> list[CaseResult]:
    """What becomes of all cases of a job that nothing has run yet."""
    _run_alone(Path(job.folder))
    run_ranks(_rank, job.ranks, job, plan, "", timeout=500)
    if resumed := [f"{path}-{optimizer}" for path, optimizer in job.cases if path == "resumed"]:
        run_ranks(_rank, job.ranks, job, plan, "", resumed, timeout=500)  # by new processes
    return conclude(job, plan)


def many_processes(job: Job, folder: Path, plan: LaunchPlan, planted: str = "") -> CaseResult:
    """What becomes of a job on the ranks of its launch file, whose run on one process is there, in another folder."""
    shutil.copytree(job.folder, folder)
    here = Job.load(folder / "job.json")
    here.folder = str(folder)
    here.save()
    run_ranks(_rank, here.ranks, here, plan, planted, timeout=500)
    (result,) = conclude(here, plan)
    return result


def assert_named(job: Job, plan: LaunchPlan, folder: Path, error: str, kind: str, said: str) -> None:
    """An error that is planted on the ranks is found in the first step, as a difference of a kind, and the cause says
    so; the job's run on one process is there."""
    result = many_processes(job, folder, plan, error)
    assert result.first is not None and result.first[0] == kind and result.first[1].step == 1, result.first
    assert not result.documented and said in result.cause, result.cause


def _rank(job: Job, plan: LaunchPlan, planted: str, cases: Sequence[str] = ()) -> None:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    os.environ["ACCELERATE_MIXED_PRECISION"] = plan.settings["mixed_precision"]
    if plan.own:
        section = {key: value for key, value in plan.settings["axonn_config"].items()}
        os.environ[VARIABLE] = AxonnConfig.from_mapping(section).to_json()
        notebook._use_grid()
    if plan.fsdp:
        of_file = {name.upper(): str(value) for name, value in plan.settings["fsdp_config"].items()}
        os.environ |= {"ACCELERATE_USE_FSDP": "true", **of_file}
    if plan.zero is not None:  # what accelerate launch leaves in the environment
        os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(plan.zero.stage)}
        on_cpus()
    if planted:
        ERRORS[planted]()
    worker.run(job, cases)


def plan_of(folder: Path, ranks: int, dtype: str = FLOAT64, **settings) -> LaunchPlan:
    """What a launch file comes down to."""
    return read_launch_plan(launch_file(folder, ranks, **settings), dtype)
