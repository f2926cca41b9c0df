"""A call that every rank has to make is made by one alone: the message names what each rank is in, within seconds.

With the default timeout of process groups, 30 minutes. All cases run at the same time, two ranks each.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import hf_axonn
from hf_axonn import Grid
from hf_axonn.distributed.collectives import barrier
from hf_axonn.distributed.watchdog import crashes, watchdog
from hf_axonn.distributed.watchdog.crashes import Crash, CrashFile, crashes_in, parse
from hf_axonn.distributed.watchdog.diagnosis import diagnose, diagnose_early
from hf_axonn.distributed.watchdog.progress import PROGRESS
from tests.distributed.test_watchdog import _account, message
from tests.helpers import ROOT
from tests.helpers.launching import launch
from tests.helpers.models import tiny_batch, tiny_model


TOGETHER = 5  # cases at once


def shard(model) -> DTensor:
    return next(its for its in model.parameters() if isinstance(its, DTensor))


# By the name that the message has to have: one of each kind of call first, then others, which are slow.
CALLS: dict[str, Callable] = {
    "model.generate(": lambda model, batch: model.generate(batch["input_ids"], max_new_tokens=2, do_sample=False),
    ".full_tensor()": lambda model, batch: shard(model).full_tensor(),
    "hf_axonn.save_sharded(": lambda model, batch: hf_axonn.save_sharded(model, "nowhere"),
    "hf_axonn.sync_gradients(": lambda model, batch: hf_axonn.sync_gradients(model),
    "dist.all_gather_object(": lambda model, batch: dist.all_gather_object([None, None], str(batch)),
    "model(**batch).logits": lambda model, batch: model(**batch).logits,
    "model.save_pretrained(": lambda model, batch: model.save_pretrained("nowhere"),
    "clip_grad_norm_(": lambda model, batch: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "barrier()": lambda model, batch: barrier(),
    "dist.all_reduce(": lambda model, batch: dist.all_reduce(torch.ones(3)),
}


def train(call: str) -> None:
    torch.set_num_threads(1)
    model, _ = hf_axonn.parallelize(tiny_model("llama").train(), Grid(z=2))
    for step in range(1, 1000):
        batch = tiny_batch(2, 8, seed=step)
        model(**batch).loss.backward()
        if step == 3 and dist.get_rank() == 0:
            CALLS[call](model, batch)
        hf_axonn.sync_gradients(model)


def _rank(rank: int, port, listening, log: str, call: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")
    faulthandler.disable()  # pytest's
    tempfile.tempdir = str(Path(log).parent)
    watchdog.EARLY = 4.0
    PROGRESS.begin()
    listening.wait()
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port.value), rank=rank, world_size=2)
    try:
        train(call)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    watchdog.note_end()
    sys.stderr.flush()
    os._exit(1)


def run(tmp_path: Path, calls: list[str]) -> dict[str, str]:
    """What the ranks of each case have printed; a case that does not end in time is ended."""
    context = multiprocessing.get_context("fork")
    cases = [
        (call, context.Value("i", 0), context.Event(), str(tmp_path / f"{number}.log"))
        for number, call in enumerate(calls)
    ]
    ranks = [
        context.Process(target=_rank, args=(rank, port, listening, log, call))
        for call, port, listening, log in cases
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    servers = []
    for _, port, listening, _ in cases:
        servers.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        port.value = servers[-1].port
        listening.set()
    end = time.monotonic() + 120
    try:
        while time.monotonic() < end and any(its.is_alive() for its in ranks):
            time.sleep(0.1)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return {call: Path(log).read_text() for call, _, _, log in cases}


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_each_rank_is_in_is_told(tmp_path, part):
    for call, output in run(tmp_path, list(CALLS)[part * TOGETHER : (part + 1) * TOGETHER]).items():
        text = message(output)
        assert re.search(
            r"died in step 3: gloo aborts|all ranks have waited \d+ s for each other in step [34]", text
        ), text
        lines = [line.strip() for line in text.splitlines() if re.match(r"    rank \d: ", line)]
        assert len(lines) == 2 and all("test_lone_calls.py:" in line for line in lines), text
        assert call in next(line for line in lines if line.startswith("rank 0")), text
        assert re.search(r"backward\(\)|sync_gradients", next(line for line in lines if line.startswith("rank 1"))), (
            text
        )
        assert "Every rank has to make the same calls" in text and "out of memory" not in text
    assert not list(tmp_path.glob("hf_axonn-watch-*"))


GENERATES = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from hf_axonn.distributed.watchdog import watchdog
from tests.helpers.models import tiny_model
from tests.helpers.training import collate, token_data

watchdog.EARLY = 5.0

class Shows(TrainerCallback):
    def on_step_end(self, args, state, control, model, **kwargs):
        if state.is_world_process_zero:
            model.generate(torch.tensor([data[0]["input_ids"]]), max_new_tokens=3)

arguments = TrainingArguments(output_dir="out", use_cpu=True, report_to="none", save_strategy="no", max_steps=1000)
data = token_data(64, seed=0)
Trainer(tiny_model("llama"), arguments, collate, data, callbacks=[Shows()]).train()
"""


@pytest.mark.slow
def test_generate_in_a_callback_on_rank_0_is_told_under_accelerate_launch(tmp_path):
    (tmp_path / "train.py").write_text(GENERATES)
    ended = launch(tmp_path, Grid(z=2), "train.py", ROOT)
    assert ended.code == 1 and not ended.left, ended.output[-3000:]
    text = message(ended.output)
    assert re.search(r"rank 0: \S+train.py:\d+ `model.generate\(", text) and re.search(
        r"rank 1: \S+train.py:\d+ `", text
    ), text
    assert "Every rank has to make the same calls" in text and "out of memory" not in text


def test_an_abort_in_a_collective_is_told_with_both_calls():
    crash = Crash("Aborted", "train.py:9 `loss.backward()`", True, ("x.py:1 in f",))
    generates = _account(0, call="train.py:7 `model.generate(ids)`")
    text = judge(generates, silent={1: "host b"}, crashes={1: crash})
    assert "rank 1 (host b) died in step 5: gloo aborts a process that receives another number of bytes" in text
    assert "the ranks are in different calls" in text
    assert "    rank 0: train.py:7 `model.generate(ids)`, after all_gather\n    rank 1: train.py:9 `loss.back" in text
    same = judge(_account(0, call=crash.call), silent={1: "host b"}, crashes={1: crash})
    assert "their tensors differ in size" in same
    fault = judge(generates, silent={1: "host b"}, crashes={1: replace(crash, reason="Segmentation fault")})
    assert "rank 1 (host b) died in step 5: Segmentation fault. The ranks are at" in fault and "x.py:1 in f" in fault
    assert "no answer (killed, out of memory" in judge(generates, silent={1: "host b"}, crashes={})


def test_when_ranks_that_wait_apart_are_told_early():
    saves, trains = _account(0, call="a.py:9 `save()`"), _account(1, call="a.py:5 `train()`")
    text = diagnose_early([saves, trains], still=20.0)
    assert text.startswith("all ranks have waited 27 s for each other in step 5") and "Every rank has to make" in text
    assert "rank 0: a.py:9 `save()`, after all_gather\n    rank 1: a.py:5 `train()`" in text
    for other in (
        replace(trains, waiting=False),  # reads data
        replace(trains, still=3.0),  # has just come
        replace(trains, used=9.0),  # receives data
        replace(trains, call=saves.call),  # all are in one call, whose data may be under way
        replace(trains, call=""),
    ):
        assert diagnose_early([saves, other], still=20.0) is None, other


DUMP = """main 0x00007f0000000001
Fatal Python error: Aborted

Thread 0x00007f0000000002 (most recent call first):
  File "/lib/python3.11/threading.py", line 5 in wait

Thread 0x00007f0000000001 (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 77 in all_reduce
  File "/home/user/train.py", line 9 in <module>

Extension modules: numpy
"""


def test_what_a_rank_leaves_that_a_signal_ends(tmp_path):
    crash = parse(DUMP)
    assert crash.reason == "Aborted" and crash.waiting and crash.call.startswith("/home/user/train.py:9 ")
    assert crash.stack[-1].endswith("distributed_c10d.py:77 in all_reduce") and len(crash.stack) == 2
    assert parse("main 0x00007f0000000001\n") is None and parse("") is None
    (tmp_path / "3").write_text(DUMP)
    (tmp_path / "4").write_text("main 0x1\n")
    assert dict(crashes_in(str(tmp_path))) == {3: crash}
    assert dict(crashes_in(str(tmp_path / "none"))) == {}


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="this system has no /dev/full, which is a disk without room"
)
def test_ranks_end_where_disks_are_full(tmp_path, monkeypatch):
    """An error of a crash file that is closed, or of a message in the log, kept a process that had to end."""
    folder, real = tmp_path / "watch", os.open
    monkeypatch.setattr(crashes.faulthandler, "is_enabled", lambda: False)
    monkeypatch.setattr(crashes.os, "open", lambda path, flags, mode: real("/dev/full", os.O_WRONLY))
    CrashFile(str(folder), 0).close()
    assert not folder.exists()
    monkeypatch.setattr(sys, "stderr", open("/dev/full", "w", buffering=1))
    watchdog._say("a rank died")
    with pytest.raises(OSError, match="No space left"):
        sys.stderr.close()


def judge(*accounts, **options) -> str:
    return diagnose(accounts, ended={}, limit=20.0, broken=True, **options)
