"""`notebook_launcher`, and the notebook of docs/ from its first cell to its last."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from pathlib import Path

import nbformat
import pytest
import torch
import torch.distributed as dist
from transformers import PrinterCallback, ProgressCallback, trainer

import hf_axonn
from hf_axonn import AxonnConfig, Grid
from hf_axonn.launch import notebook
from tests.helpers import ROOT
from tests.helpers.models import tiny_batch, tiny_model


NOTEBOOK = ROOT / "docs" / "goldfish_in_ten_minutes.ipynb"


def shows_what_it_says(cells_of) -> None:
    code = [cell for cell in cells_of.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    printed = "".join(output["text"] for cell in code for output in cell.outputs if output.get("name") == "stdout")
    table = dict(re.findall(r"^ *(ordinary +40|ordinary +0|goldfish +40|goldfish +0) +(\d+) of 6", printed, re.M))
    counts = {" ".join(key.split()): int(value) for key, value in table.items()}
    assert counts["ordinary 40"] >= 4 and counts["goldfish 40"] <= 1, printed
    assert counts["ordinary 0"] == counts["goldfish 0"] == 0, printed


def test_what_is_stored_in_the_notebook_of_the_documents():
    shows_what_it_says(nbformat.read(NOTEBOOK, as_version=4))
    assert not re.search(r"/(tmp|home|root|work)/", NOTEBOOK.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_notebook_of_the_documents_runs(tmp_path):
    from nbclient import NotebookClient

    fresh = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        fresh, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shows_what_it_says(fresh)


def what_is_there(folder, word):
    """What a cell's function finds: a plain Accelerator() that uses the grid."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    plugin = accelerator.parallelism_config
    Path(folder, f"rank-{dist.get_rank()}").write_text(word)
    return str(plugin.grid), plugin.config.layout, accelerator.mixed_precision, accelerator.state.num_processes


def test_a_function_runs_on_every_rank_and_the_grid_is_there(tmp_path):
    settings = AxonnConfig(grid=Grid(z=2), layout="token")
    before = dict(os.environ)
    found = hf_axonn.notebook_launcher(
        what_is_there, (tmp_path, "here"), grid=settings, mixed_precision="bf16", use_cpu=True
    )
    assert found == ("data=1,z=2,y=1,x=1", "token", "bf16", 2)
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["here", "here"]
    assert dict(os.environ) == before and not dist.is_initialized()


def fails_on_rank_1():
    if dist.get_rank() == 1:
        raise RuntimeError("a bad cell")
    dist.barrier()


def test_a_process_that_fails_is_reported_and_the_others_end():
    with pytest.raises(Exception, match="a bad cell"):
        hf_axonn.notebook_launcher(fails_on_rank_1, grid={"x": 2}, use_cpu=True)


def fails_in_a_step(how):
    model, _ = hf_axonn.parallelize(tiny_model("llama"), Grid(x=2))
    for step in range(1, 4):
        if dist.get_rank() == 1 and step == 2:
            if how == "raises":
                raise RuntimeError("a bad cell")
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            return
        model(**tiny_batch(2, 8)).loss.backward()
        hf_axonn.sync_gradients(model)


@pytest.mark.parametrize(
    ("how", "raised", "said"),
    [
        ("raises", "a bad cell", "rank 1 .* raised in step 2: RuntimeError: a bad cell"),
        pytest.param("killed", "SIGKILL", "rank 1 .* died or froze in step 2", marks=pytest.mark.slow),
        ("returns", "RuntimeError: ended before the others", "rank 1 .* ended its script, 1 steps done"),
    ],
)
def test_who_failed_in_a_step_is_told_as_in_a_script(capfd, how, raised, said):
    with pytest.raises(Exception, match=raised):
        hf_axonn.notebook_launcher(fails_in_a_step, (how,), grid={"x": 2}, use_cpu=True)
    told = capfd.readouterr().err
    assert told.count("hf_axonn: the run ends") == 1 and re.search(said, told), told[-3000:]
    assert not multiprocessing.active_children()


def test_one_rank_needs_no_process_and_what_cannot_be_sent_is_none(caplog):
    assert hf_axonn.notebook_launcher(lambda value: value + 1, (1,), grid=Grid()) == 2
    assert hf_axonn.notebook_launcher(lambda: lambda: 0, grid=Grid(data=2), use_cpu=True) is None
    (record,) = caplog.records
    assert re.match("the function returned a function, which does not come back .*Return numbers", record.message)


def progress_and_precision(folder):
    """Which progress a Trainer would show here, and whether its arguments take bf16."""
    from transformers import TrainingArguments, trainer

    arguments = TrainingArguments(str(folder), bf16=True)
    return gathered([trainer.DEFAULT_PROGRESS_CALLBACK, arguments.use_cpu, arguments.mixed_precision])


def gathered(own):
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every


def test_rank_0_alone_shows_a_table_and_bf16_needs_no_use_cpu(tmp_path, monkeypatch):
    """In a notebook Transformers' default is a table that it would show once for each rank."""
    monkeypatch.setattr(trainer, "DEFAULT_PROGRESS_CALLBACK", PrinterCallback)  # stands for the notebook's
    found = hf_axonn.notebook_launcher(progress_and_precision, (tmp_path,), grid=Grid(x=2), use_cpu=True)
    assert found == [[PrinterCallback, True, "bf16"], [ProgressCallback, True, "bf16"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ({"grid": {"x": 2, "w": 2}}, "unknown key 'w'"),
        ({"grid": Grid(x=2), "mixed_precision": "fp8"}, "one of bf16, fp16, no"),
        ({"grid": Grid(x=2), "mixed_precision": "fp16", "use_cpu": True}, "leaves away on CPUs"),
        ({"grid": Grid(x=4096), "use_cpu": False}, "needs 4096 GPUs"),
        ({"grid": Grid(x=2), "args": 3}, "args=\\(value,\\)"),
    ),
)
def test_what_cannot_be_right_is_refused_before_a_process_starts(arguments, message):
    with pytest.raises(ValueError, match=message):
        hf_axonn.notebook_launcher(what_is_there, **arguments)


def test_on_gpus_processes_get_what_fits_the_grid(monkeypatch, capsys):
    def launch(worker, args, **options):
        worker.result.write_bytes(notebook._pickled(worker.environment))

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(notebook, "has_nvidia", lambda: True)
    monkeypatch.setattr("accelerate.notebook_launcher", launch)
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    environment = hf_axonn.notebook_launcher(what_is_there, grid=Grid(z=2, x=2))
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "32" and "NCCL_LAUNCH_ORDER_IMPLICIT" not in environment
    assert capsys.readouterr().err == "hf_axonn: set for the GPUs: CUDA_DEVICE_MAX_CONNECTIONS=32.\n"
