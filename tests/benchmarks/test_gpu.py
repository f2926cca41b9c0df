"""tests/benchmarks/gpu: what is run on which machine, jobs that go on where they stopped, figures and the page.

The last test runs all of it in its smoke size.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
from pathlib import Path

import pytest
import torch

from tests.benchmarks.gpu import __main__ as command
from tests.benchmarks.gpu import figures, jobs, work
from tests.benchmarks.gpu.jobs import DONE, FAILED, LEFT_OUT, RESULT, STOPPED, WAITING, Job, Outcome, Part, Results
from tests.benchmarks.gpu.page import page, record
from tests.benchmarks.gpu.parts import SMOKE_FILE, make_parts
from tests.benchmarks.gpu.settings import MODELS, Machine, choose, grids, llama, overlap_grids, parameters
from tests.benchmarks.gpu.train import measure
from tests.helpers import ROOT, devices
from tests.helpers.ranks import run_ranks


GIB = 2**30


def gpus(count: int, gib: float = 80, *, name: str = "NVIDIA H100 80GB HBM3", compiler: bool = True) -> Machine:
    return Machine("cuda", count, name, int(gib * GIB), compiler, {"torch": "2.13.0"})


def parts_of(machine: Machine, folder: Path, size: str = "full") -> dict[str, list[Job]]:
    settings = choose(size, machine)
    return {part.name: list(part.jobs()) for part in make_parts(settings, Results(folder, settings))}


@pytest.mark.parametrize(
    ("count", "gib", "model", "rows", "sequence"),
    [
        (1, 80, "Llama-3.2-1B", 2, 4096),
        (8, 80, "Llama-3.1-8B", 8, 4096),
        (2, 141, "Llama-3.2-1B", 4, 4096),
        (1, 16, "SmolLM2-135M", 4, 2048),
    ],
)
def test_the_model_is_the_largest_whose_states_leave_room(count, gib, model, rows, sequence):
    settings = choose("full", gpus(count, gib))
    assert (settings.model, settings.rows, settings.sequence, settings.ranks) == (model, rows, sequence, count)
    assert choose("full", gpus(count, gib), 512).sequence == 512


def test_a_gpu_that_is_too_small_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match="has 4.0 GiB; of 1 of them the smallest model needs .* GiB each"):
        choose("full", gpus(1, 4))


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_counted_as_the_model_has_them(model):
    shape, _, sequence, _ = MODELS[model]
    with torch.device("meta"):
        built = work_model(shape, sequence)
    assert parameters(shape) == sum(parameter.numel() for parameter in built.parameters())


def work_model(shape: dict[str, int], sequence: int) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(llama(shape, sequence))


def test_parts_are_below_ten_minutes_and_together_below_forty(tmp_path):
    settings = choose("full", gpus(8))
    limits = [part.limit for part in make_parts(settings, Results(tmp_path, settings))]
    assert max(limits) < 600 and sum(limits) < 2400
    text = (ROOT / "docs" / "gpu.md").read_text()
    assert f"All limits together are {sum(limits) / 60:.1f} minutes." in text
    assert [float(limit) for limit in re.findall(r"^\| \w+ \| (\d+) \|", text, re.MULTILINE)] == limits


def test_what_runs_on_eight_gpus(tmp_path):
    found = parts_of(gpus(8), tmp_path)
    left_out = {job.name: job.left_out for of_part in found.values() for job in of_part if job.left_out}
    assert set(left_out) == {
        "plain",
        "plain + compile",
        "one rank",
        "DDP",
        "DDP + compile",
        "native TP + compile",
        "data=8",
    }
    assert left_out["DDP"] == "does not fit: 119.7 GiB of weights, gradients and moments on each rank, of 80.0 GiB"
    assert [job.name for job in found["grids"]] == ["weights", *grids(8)]
    assert [job.name for job in found["overlap"]] == [
        "weights",
        "z=4 x=2 without all_gather",
        "z=4 x=2 without reduce_scatter",
        "z=4 x=2 without all_reduce",
        "z=4 x=2 without all_gather, reduce_scatter, all_reduce",
    ]
    launched = next(job for job in found["peers"] if job.name == "FSDP2").command
    assert launched[launched.index("--nproc-per-node") + 1] == "8" and "--checkpointing" in launched
    # Those of one weights folder are compared: it has the batch in its name.
    folders = {job.command[job.command.index("--folder") + 1] for job in found["grids"] if not job.left_out}
    assert folders == {str(tmp_path / "weights-Llama-3.1-8B-8x4096")}


def test_what_runs_on_one_gpu(tmp_path):
    found = parts_of(gpus(1, compiler=False), tmp_path)
    assert [job.name for job in found["peers"] if not job.left_out] == ["weights", "plain", "one rank"]
    assert "no compiler" in next(job for job in found["peers"] if job.name == "plain + compile").left_out
    for part in ("grids", "overlap"):
        (left_out,) = found[part]
        assert "needs two GPUs" in left_out.left_out
    assert overlap_grids(1) == {} and overlap_grids(2) == {
        "all_gather": "z=2",
        "reduce_scatter": "z=2",
        "all_reduce": "x=2",
    }
    assert grids(3) == ["x=3", "z=3", "data=3"]


@pytest.fixture
def results(tmp_path) -> Results:
    return Results(tmp_path / "results", choose("full", gpus(2)))


def python(code: str) -> tuple[str, ...]:
    return ("-c", f"import json, sys, time; {code}", RESULT)


WRITES = "open(sys.argv[1], 'w').write(json.dumps({'runs': len(open('count', 'a').write('x') * [0])}))"


def test_a_job_that_is_done_is_not_run_again(results):
    job = Job("it's / done", python(WRITES), 60)
    assert results.look("part", job).state == WAITING
    first = results.run_job("part", job, 60)
    assert (first.state, first.result) == (DONE, {"runs": 1})
    assert results.run_job("part", job, 60) == first == results.look("part", job)
    assert (results.place("part", job) / "count").read_text() == "x"
    # Another command, or another machine, is another job.
    changed = Job(job.name, (*job.command, "more"), 60)
    assert results.look("part", changed).state == WAITING
    elsewhere = Results(results.folder, choose("full", gpus(2, name="NVIDIA A100")))
    assert elsewhere.look("part", job).state == WAITING
    # One whose end was not written, because the machine went, is run again.
    (results.place("part", job) / "job.json").write_text('{"name"')
    assert results.run_job("part", job, 60).state == DONE
    assert (results.place("part", job) / "count").read_text() == "xx"


def test_what_a_job_makes_has_to_be_there_for_every_part(results):
    made = results.folder / "made"
    job = Job("weights", python(f"import os; os.makedirs({str(made)!r}); {WRITES}"), 60, makes=made)
    assert results.run_job("peers", job, 60).state == DONE and results.look("grids", job).state == DONE
    made.rmdir()
    assert results.look("grids", job).state == WAITING


def test_a_job_that_fails_tells_its_error_and_is_run_again(results):
    job = Job("bad", python("print('\\n' * 50, file=sys.stderr); raise KeyError('which')"), 60)
    outcome = results.run_job("part", job, 60)
    assert outcome.state == FAILED and "KeyError: 'which'" in outcome.told and outcome.told.endswith("code 1")
    empty = Job("bad", python("pass"), 60)
    assert results.run_job("part", empty, 60).state == FAILED  # ended well, without a result
    assert results.run_job("part", Job("bad", python(WRITES), 60), 60).state == DONE


def test_a_file_with_a_test_that_failed_is_run_again_and_shown(results):
    job = Job(
        "a.py", python("open(sys.argv[1], 'w').write(json.dumps({'failed': 1, 'failures': ['a.py::test']}))"), 60
    )
    outcome = results.run_job("equality", job, 60)
    assert (outcome.state, outcome.told, outcome.result["failed"]) == (FAILED, "a.py::test", 1)


def test_tests_that_were_stopped_come_last(tmp_path):
    settings = choose("full", gpus(1))
    results = Results(tmp_path, settings)
    equality = make_parts(settings, results)[0]
    files = [f"tests/{name}.py" for name in "abc"]
    for file, code in (
        ("collect", f"open(sys.argv[1], 'w').write(json.dumps({{'files': {files}, 'gpu': ['tests/b.py']}}))"),
        ("a.py", "1/0"),
    ):
        place = tmp_path / "equality" / file
        job = next(job for job in equality.jobs() if job.name == file)
        results.run_job("equality", dataclasses.replace(job, command=python(code)), 60)
        known = json.loads((place / "job.json").read_text())
        known |= {"identity": results._identity(job), "state": DONE if file == "collect" else STOPPED}
        (place / "job.json").write_text(json.dumps(known))
    assert [job.name for job in equality.jobs()] == ["collect", "b.py", "c.py", "b.py, marked gpu", "a.py"]


def test_the_first_errors_stand_before_a_launchers_summary():
    log = ["[rank1]: torch.OutOfMemoryError: CUDA out of memory", "x.y.ChildFailedError: ", *map(str, range(40))]
    last = jobs.last_lines("\n".join(log))
    assert last[0] == "torch.OutOfMemoryError: CUDA out of memory" and last[-1] == "39"
    assert len(last) == 2 + jobs.LAST_LINES


def test_a_job_is_stopped_at_its_limit_and_a_part_at_its(results):
    part = Part("part", "", 2.0, lambda: iter([sleeping, next_, gone]), "")
    sleeping = Job("sleeps", python("time.sleep(300)"), 1.5)
    next_, gone = Job("next", python(WRITES), 60), Job("gone", (), left_out="because")
    outcomes = list(results.run(part))
    assert [outcome.state for outcome in outcomes] == [STOPPED, WAITING, LEFT_OUT]
    assert outcomes[0].told.endswith("stopped after its 2 seconds") and "of the part were over" in outcomes[1].told
    assert [outcome.state for outcome in results.look_at(part)] == [STOPPED, WAITING, LEFT_OUT]


def test_model_flops_give_the_utilisation_that_torchtitan_publishes():
    """33 to 39% without and with torch.compile, of 989 TFLOP/s."""
    compiled, plain, *_ = figures.published()
    assert 0.38 < compiled["tflops"] / 989 < 0.40 and 0.33 < plain["tflops"] / 989 < 0.35
    assert [round(entry["tflops"], 1) for entry in figures.published()[3:]] == [151.4, 42.1, 231.6]


def test_peaks_are_those_of_the_planners_machines():
    peaks = {name: figures.advertised_peak(name) for name in ("NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA H100 PCIe")}
    assert peaks == {"NVIDIA H200": 989e12, "NVIDIA GH200 480GB": 989e12, "NVIDIA H100 PCIe": None}


def trained(name: str, seconds: float, *losses: float, without: tuple[str, ...] = ()) -> Outcome:
    title = name + (f" without {', '.join(without)}" if without else "")
    result = dict(contender=name, without=list(without), world=8, backend="nccl", seconds=seconds, tokens=32768)
    return Outcome(title, DONE, result | dict(losses=list(losses), peak_bytes=20 * GIB), 50.0, "abc1234")


def example(settings, **changed: list[Outcome]) -> dict[str, list[Outcome]]:
    machine = json.loads((ROOT / "hf_axonn/planner/machines/dgx-h100.json").read_text())
    measured = dict(gemm_by_size={"4096": 1.0}, kernel_us=5.0, overlap=0.5, relative_cost={"all_reduce": 1.0})
    sources = machine["sources"] | dict.fromkeys(measured, "made up")
    outcomes = {part.name: [] for part in make_parts(settings, Results(Path("nowhere"), settings))}
    outcomes["links"] = [Outcome("bench-links", DONE, machine | measured | {"sources": sources}, 60.0, "abc1234")]
    outcomes["peers"] = [trained("FSDP2", 1.0, 2.0, 1.9), trained("one rank", 1.0, 2.0, 1.9)]
    outcomes["grids"] = [trained("z=4 x=2", 0.8, 2.0, 1.901), trained("x=8", 1.6, 2.0, 1.9)]
    outcomes["overlap"] = [trained("z=4 x=2", 1.0, 2.0, 1.9, without=("all_gather",))]
    return outcomes | changed


def made(**changed: list[Outcome]) -> tuple[dict, str]:
    settings = choose("full", gpus(8))
    outcomes = example(settings, **changed)
    found = record(settings, make_parts(settings, Results(Path("nowhere"), settings)), outcomes)
    found = json.loads(json.dumps(found))  # the page is made of what the file has
    return found, page(found)


def test_the_page_has_the_figures_of_the_results():
    found, text = made()
    first = found["training"][0]
    assert first["tokens_per_second_per_gpu"] == 4096 and found["losses_agree"]
    # 8.03G less the embedding's rows, and 32 layers of attention on 4,096 tokens, full squares.
    flops = 6 * (8.0303e9 - 128256 * 4096) + 12 * 32 * 4096 * 4096
    assert first["model_tflops"] == pytest.approx(4096 * flops / 1e12, rel=1e-4)
    assert first["mfu"] == pytest.approx(first["model_tflops"] / 989) and first["predicted_seconds"] is None
    assert first["of_gemm"] == pytest.approx(first["model_tflops"] / 813)
    alone, grid = found["training"][1:3]
    assert alone["predicted_seconds"] > 4 * grid["predicted_seconds"]
    assert 0.3 < grid["predicted_seconds"] < 3 and 10 * GIB < grid["predicted_bytes"] < 60 * GIB
    assert "| FSDP2 | 8 | 1.000 | 4096 |" in text and "| 20.00 | - | - | 0.0e+00 |" in text
    assert "The fastest grid, z=4 x=2, is 1.25 times as fast as FSDP2." in text
    assert "The plan puts z=4 x=2 first, which is 0.0% slower than the fastest, z=4 x=2." in text
    assert "| z=4 x=2 without all_gather | 1.000 | 1.250 |" in text
    assert "What failed" not in text and "abc1234" in text


def test_losses_that_differ_are_marked():
    for losses in ((2.0, 1.95), (2.0, float("nan"))):
        found, text = made(grids=[trained("z=4 x=2", 0.8, *losses)])
        assert not found["losses_agree"] and "**WRONG**" in text


def test_the_page_says_what_failed_and_what_to_do():
    failed = Outcome("x=8", FAILED, None, 12.0, "abc1234", "RuntimeError: NCCL\nended with code 1")
    left_out = Outcome("data=8", LEFT_OUT, told="does not fit")
    counts = dict(passed=3, failed=1, skipped=2, failures=["a.py::test"])
    tests = Outcome("a.py", FAILED, counts, 9.0, "abc1234", "a.py::test")
    _, text = made(grids=[failed, left_out, Outcome("z=8", WAITING)], equality=[tests], links=[])
    assert "x=8: failed after 12 s\n\n```text\nRuntimeError: NCCL\nended with code 1\n```" in text
    assert "The log names the rank" in text and "Not begun, run again to go on: z=8." in text
    assert "- data=8: does not fit" in text and "- a.py::test" in text and "| all | 3 | 1 | 2 |" in text
    assert not command.complete([tests]) and not command.complete([failed]) and command.complete([left_out])


@pytest.fixture
def environment(monkeypatch) -> None:
    """What the command sets in it for its jobs is as before afterwards."""
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv(devices.CHOICE, "cpu")


def test_without_a_gpu_it_says_so_in_one_line(environment, monkeypatch, capsys):
    monkeypatch.setattr(command, "find_machine", lambda: Machine("cpu", 0, "CPU", 16 * GIB, True, {}))
    assert command.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "torch sees none" in line and "--size smoke" in line
    with pytest.raises(SystemExit):
        command.main(["--size", "smoke", "--parts", "links,nothing"])
    assert "--parts: nothing: there are equality, links" in capsys.readouterr().err


def test_the_machine_is_looked_at():
    found = Machine(**work.machine(argparse.Namespace()))
    assert found.memory > GIB and set(found.versions) >= set(work.PACKAGES)
    assert (found.count == 0) == (found.kind == "cpu")


@pytest.mark.slow
def test_a_part_runs_and_is_done(environment, tmp_path, monkeypatch, capsys):
    machine = Machine(**work.machine(argparse.Namespace()))
    monkeypatch.setattr(command, "find_machine", lambda: machine)
    arguments = ["--size", "smoke", "--parts", "tuning", "--folder", str(tmp_path)]
    pages = []
    for _ in range(2):
        assert command.main(arguments) == 0, capsys.readouterr()
        pages.append((tmp_path / "smoke" / "page.json").read_text())
    assert pages[0] == pages[1]  # with the seconds of the first run: there was no second
    parts = {part["name"]: part["jobs"][0] for part in json.loads(pages[0])["parts"]}
    assert parts["tuning"]["result"]["shapes"] > 9 and parts["links"]["state"] == WAITING
    text = (tmp_path / "smoke" / "page.md").read_text()
    assert "these are no figures" in text and "| SmolLM2-135M | bfloat16 | 1, 1 | dinput |" in text


def _train(folder: Path) -> list[dict]:
    names = ("plain", "FSDP2", "x=2")
    given = dict(folder=folder, checkpointing=True, backend="aot_eager")
    return [
        measure(argparse.Namespace(contender=name, without=["all_reduce"], **given), torch.device("cpu"))
        for name in names
    ]


def test_contenders_train_alike_on_two_ranks(tmp_path):
    options = dict(model="tiny", rows=4, sequence=32, folder=tmp_path)
    assert work.weights(argparse.Namespace(**options)) == {"parameters": parameters(MODELS["tiny"][0])}
    plain, *others = run_ranks(_train, 2, tmp_path)[0]
    for found in others:
        assert figures._apart(found["losses"], plain["losses"]) < figures.LOSS_TOLERANCE
        assert found["world"] == 2 and found["tokens"] == 128 and found["seconds"] > 0 < found["peak_bytes"]
    assert len(set(plain["losses"])) > 1  # it does train


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_everything_runs_in_its_smoke_size(environment, tmp_path):
    """Real launches on CPUs: every job of every part."""
    arguments = ["--size", "smoke", "--folder", str(tmp_path)]
    # Where a machine is slow the time of a part is over before its jobs are, and the next run goes on.
    ended = any(command.main(arguments) == 0 for _ in range(4))
    assert ended, (tmp_path / "smoke" / "page.md").read_text()
    found = json.loads((tmp_path / "smoke" / "page.json").read_text())
    text = (tmp_path / "smoke" / "page.md").read_text()
    ended = {part["name"]: {job["name"]: job for job in part["jobs"]} for part in found["parts"]}
    for part, of_part in ended.items():
        assert {job["state"] for job in of_part.values()} <= {DONE, LEFT_OUT}, part
    assert ended["equality"][SMOKE_FILE.removeprefix("tests/")]["result"]["passed"] >= 5
    assert {line["name"] for line in found["training"]} >= {
        "plain",
        "one rank",
        "DDP",
        "FSDP2",
        "native TP",
        *grids(2),
    }
    assert all(line["predicted_seconds"] for line in found["training"] if line["part"] != "peers")
    for heading in (
        "Training",
        "Overlaps",
        "Links and products",
        "Kernel tuner",
        "Host time of a layer",
        "Extraction",
    ):
        assert f"\n## {heading}\n" in text
    assert "these are no figures" in text and "What failed" not in text
