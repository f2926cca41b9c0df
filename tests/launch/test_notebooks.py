"""`notebook_launcher`, and the notebooks of docs/ from their first cell to their last."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import nbformat
import psutil
import pytest
import torch
import torch.distributed as dist
from accelerate.state import PartialState
from transformers import PrinterCallback, ProgressCallback, trainer

import hf_axonn
from hf_axonn import AxonnConfig, Grid
from hf_axonn.launch import notebook
from tests.helpers import ROOT
from tests.helpers.models import tiny_batch, tiny_model


def goldfish(printed: str) -> None:
    table = dict(re.findall(r"^ *(ordinary +40|ordinary +0|goldfish +40|goldfish +0) +(\d+) of 6", printed, re.M))
    counts = {" ".join(key.split()): int(value) for key, value in table.items()}
    assert counts["ordinary 40"] >= 4 and counts["goldfish 40"] <= 1, printed
    assert counts["ordinary 0"] == counts["goldfish 0"] == 0, printed


def over_a_grid(printed: str) -> None:
    """The same losses, every Linear sharded, half of the parameters on each rank, and the same model afterwards."""
    losses = re.findall(r"^ +\d+ +(\d+\.\d+) +(\d+\.\d+)$", printed, re.M)
    assert len(losses) == 3 and float(losses[0][0]) > float(losses[-1][0]), printed
    assert all(abs(float(two) - float(one)) < 1e-3 for two, one in losses), printed
    assert "grid data=1,z=1,y=1,x=2: 2 decoder layers sharded as 4 blocks" in printed
    (whole,) = (int(text.replace(",", "")) for text in re.findall(r"^one process: (\S+) parameters$", printed, re.M))
    held = [int(text.replace(",", "")) for text in re.findall(r"^rank \d of two: (\S+)$", printed, re.M)]
    assert len(held) == 2 and whole <= sum(held) < 1.01 * whole, printed
    assert len(re.findall(r"^shard-\S+\.safetensors$", printed, re.M)) == 2
    shared, alone = (float(loss) for loss in re.findall(r"^(?:shared|alone): +loss (\S+)$", printed, re.M))
    assert abs(shared - alone) < 2e-3, printed


def measured(printed: str) -> None:
    found = re.findall(r"^ *(base|trained) +(30|0) +(\d) of 6 +\S+ +(\S+)$", printed, re.M)
    counts = {(name, int(bucket)): int(exact) for name, bucket, exact, _ in found}
    assert counts["trained", 30] >= 5 and len(counts) == 4, printed
    assert counts["trained", 0] == counts["base", 30] == counts["base", 0] == 0, printed
    likely = {(name, int(bucket)): float(most) for name, bucket, _, most in found}
    assert likely["trained", 30] > 0.1 and likely["trained", 0] < 1e-6, printed
    assert f"{counts['trained', 30]} of 6 texts: the 95% interval" in printed and "report.html" in printed
    assert f"| 30x | trained | {counts['trained', 30]} of 6 [" in printed


# What the output of each has to say.
NOTEBOOKS = {"goldfish_in_ten_minutes": goldfish, "train_over_a_grid": over_a_grid, "measure_memorization": measured}


def shows_what_it_says(name: str, cells_of) -> None:
    code = [cell for cell in cells_of.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    printed = "".join(output["text"] for cell in code for output in cell.outputs if output.get("name") == "stdout")
    NOTEBOOKS[name](printed)


def path_of(name: str) -> Path:
    return ROOT / "docs" / f"{name}.ipynb"


def test_every_notebook_is_tested():
    assert {path.stem for path in (ROOT / "docs").glob("*.ipynb")} == set(NOTEBOOKS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_is_stored_in_the_notebooks_of_the_documents(name):
    shows_what_it_says(name, nbformat.read(path_of(name), as_version=4))
    assert not re.search(r"/(tmp|home|root|work)/", path_of(name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", [name for name in NOTEBOOKS if name != "goldfish_in_ten_minutes"])
def test_the_first_cell_installs_the_package_where_it_is_not(name, monkeypatch):
    """As on Colab; the extra is one that setup.cfg has."""
    from importlib import metadata, util

    from IPython.core.inputtransformer2 import TransformerManager

    first = next(cell for cell in nbformat.read(path_of(name), as_version=4).cells if cell.cell_type == "code")
    ran = []
    shell = SimpleNamespace(run_line_magic=lambda magic, line: ran.append((magic, line)))
    code = compile(TransformerManager().transform_cell(first.source), name, "exec")
    exec(code, {"get_ipython": lambda: shell})
    assert not ran
    monkeypatch.setattr(util, "find_spec", lambda package: None)
    exec(code, {"get_ipython": lambda: shell})
    ((magic, line),) = ran
    (extra,) = re.findall(r'"hf_axonn\[(\w+)\]"', line)
    assert magic == "pip" and extra in metadata.metadata("hf_axonn").get_all("Provides-Extra")


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_notebooks_of_the_documents_run(tmp_path, name):
    from nbclient import NotebookClient

    fresh = nbformat.read(path_of(name), as_version=4)
    NotebookClient(
        fresh, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shows_what_it_says(name, fresh)


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
    assert hf_axonn.notebook_launcher(lambda value: value + 1, (1,), grid=Grid(), use_cpu=True) == 2
    assert hf_axonn.notebook_launcher(lambda: lambda: 0, grid=Grid(data=2), use_cpu=True) is None
    (record,) = caplog.records
    assert re.match("the function returned a function, which does not come back .*Return numbers", record.message)


def works_on(folder):
    Path(folder, f"rank-{os.getpid()}").touch()
    signal.pause()


def launch_in_a_kernel(folder):
    """Started in a process of its own, as a notebook's kernel is, which alone gets the signal."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        hf_axonn.notebook_launcher(works_on, (folder,), grid=Grid(x=2), use_cpu=True)
    except KeyboardInterrupt:
        Path(folder, "interrupted").touch()
        signal.pause()  # the kernel lives on


def test_an_interrupted_cell_leaves_no_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(notebook, "LEAVING", 0.2)
    kernel = multiprocessing.get_context("fork").Process(target=launch_in_a_kernel, args=(tmp_path,))
    kernel.start()
    try:
        wait_until(lambda: len(list(tmp_path.glob("rank-*"))) == 2)
        ranks = [psutil.Process(int(path.name.removeprefix("rank-"))) for path in tmp_path.glob("rank-*")]
        os.kill(kernel.pid, signal.SIGINT)
        wait_until((tmp_path / "interrupted").exists)
        assert not psutil.wait_procs(ranks, timeout=0)[1] and kernel.is_alive()
    finally:
        for process in psutil.Process(kernel.pid).children():
            process.kill()
        kernel.kill()
        kernel.join()


def test_a_second_interrupt_ends_the_waiting(monkeypatch):
    def interrupted(timeout=None):
        if timeout is not None:
            raise KeyboardInterrupt

    killed = []
    ranks = [SimpleNamespace(join=interrupted, kill=lambda rank=rank: killed.append(rank)) for rank in range(2)]
    context = SimpleNamespace(processes=ranks, join=lambda: interrupted(0))
    monkeypatch.setattr("torch.multiprocessing.start_processes", lambda *_, **__: context)
    with pytest.raises(KeyboardInterrupt):
        notebook._run_forked(print, (), 2)
    assert killed == [0, 1]


def test_how_a_function_leaves(tmp_path):
    """As a script may, or by an object of Accelerate from before the launch, whose state was forgotten."""

    def leave(function, *args):
        return notebook._Worker(function, {}, tmp_path)._call(args)

    assert "ended by sys.exit()" in leave(sys.exit, 0).text
    with pytest.raises(SystemExit):
        leave(sys.exit, 3)
    with pytest.raises(AttributeError) as raised:
        leave(lambda: object.__new__(PartialState).process_index)
    assert "make it in the function" in raised.value.__notes__[0]


def test_a_kernels_stream_gets_whole_lines():
    written = []
    stream = notebook._WholeLines(SimpleNamespace(write=written.append, flush=lambda: None, encoding="UTF-8"))
    print("rank", 0, file=stream)
    stream.writelines(["a\n", "b\nc"])
    assert written == ["rank 0\n", "a\nb\n"] and stream.encoding == "UTF-8"
    print(end="", file=stream, flush=True)
    assert written[2:] == ["c"]


CELL = """
import os
import hf_axonn
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments("out", use_cpu=True, report_to="none")

def train():
    for line in range(200):
        print("rank", os.environ["RANK"], "line", line)
    try:
        Trainer("model", arguments)
    except ValueError as error:
        return str(error)

hf_axonn.notebook_launcher(train, grid={"x": 2}, use_cpu=True, mixed_precision="bf16")
"""


@pytest.mark.slow
def test_what_ranks_print_reaches_a_kernel_in_whole_lines(tmp_path):
    from nbclient import NotebookClient

    cells = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    NotebookClient(
        cells, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = cells.cells[0].outputs
    lines = "".join(output["text"] for output in outputs if output.get("name") == "stdout").splitlines()
    assert sorted(lines) == sorted(f"rank {rank} line {line}" for rank in range(2) for line in range(200))
    assert "make TrainingArguments in the function" in outputs[-1]["data"]["text/plain"]


def wait_until(come, seconds=240):
    end = time.monotonic() + seconds
    while not come():
        assert time.monotonic() < end
        time.sleep(0.05)


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
        ({"grid": Grid(x=2), "mixed_precision": "fp16", "use_cpu": True}, "ignores on CPUs"),
        ({"grid": Grid(x=4096), "use_cpu": False}, "needs 4096 GPUs"),
        ({"grid": Grid(x=2), "args": 3}, "args=\\(value,\\)"),
        ({"grid": Grid(), "mixed_precision": "bf16"}, "one rank .* mixed_precision='bf16' would have no effect: give"),
        (
            {"grid": AxonnConfig(grid=Grid(), offload="optimizer")},
            "one rank .* a setting of axonn_config would have no",
        ),
    ),
)
def test_what_cannot_be_right_is_refused_before_a_process_starts(arguments, message):
    with pytest.raises(ValueError, match=message):
        hf_axonn.notebook_launcher(what_is_there, **arguments)


def test_a_process_with_threads_of_autograd_is_refused():
    begun, end = threading.Event(), threading.Event()

    def be_of_autograd():
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_autograd_0")  # as torch names its own
        begun.set()
        end.wait()

    thread = threading.Thread(target=be_of_autograd)
    thread.start()
    try:
        begun.wait()
        with pytest.raises(ValueError, match="has started threads of torch for GPUs, and ranks that are forked"):
            hf_axonn.notebook_launcher(what_is_there, grid=Grid(x=2), use_cpu=True)
    finally:
        end.set()
        thread.join()


def test_on_gpus_processes_get_what_fits_the_grid(monkeypatch, capsys):
    def launch(worker, args, **options):
        worker.result.write_bytes(notebook._pickle_result(worker.environment))

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(notebook, "has_nvidia", lambda: True)
    monkeypatch.setattr("accelerate.notebook_launcher", launch)
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    environment = hf_axonn.notebook_launcher(what_is_there, grid=Grid(z=2, x=2))
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "32" and "NCCL_LAUNCH_ORDER_IMPLICIT" not in environment
    assert capsys.readouterr().err == "hf_axonn: set for the GPUs: CUDA_DEVICE_MAX_CONNECTIONS=32.\n"
