"""One rank fails in the middle of a step: the others end in time, one message names it, nothing is left running."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import re
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hf_axonn
from hf_axonn import Grid
from hf_axonn.distributed.collectives import barrier
from hf_axonn.distributed.watchdog.diagnosis import diagnose, diagnose_early, ranks_in_words, who_works
from hf_axonn.distributed.watchdog.progress import PROGRESS, WAITING, Account, waits_for_others
from hf_axonn.distributed.watchdog.signals import Termination
from hf_axonn.distributed.watchdog.watchdog import failures_reported, is_symptom
from tests.helpers import ROOT
from tests.helpers.launching import TORCHRUN, Ended, forked, launch
from tests.helpers.launching import run as run_script
from tests.helpers.models import tiny_batch, tiny_model


WORLD = 4
GRID = Grid(z=2, x=2)
# Of the process group, in seconds: how long the others wait for such a rank.
TIMEOUTS = {"hangs": 8, "frozen": 8, "works": 8}
LONG = 3600  # where nobody has to wait for the timeout: a run that did so would not end before the limit of `run`


def fail(how: str):
    """What a module does in the middle of a forward pass."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "hangs":
        time.sleep(1000)
    if how == "ends":
        dist.destroy_process_group()
    if how in ("leaves", "ends"):
        sys.exit(0)
    if how == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    if how == "nan":
        raise FloatingPointError("the loss is nan")


def loop(how: str, failing: list[int], step: int, grid: Grid = GRID) -> None:
    """A bare training loop on four ranks, in which ranks fail in a step."""
    torch.set_num_threads(1)
    model, _ = hf_axonn.parallelize(tiny_model("llama"), grid)
    model.train()
    me = dist.get_rank()
    for number in range(1, 1000):
        if me in failing and number == step:
            model.model.layers[1].mlp.act_fn.register_forward_pre_hook(lambda *_: fail(how))
        batch = tiny_batch(2, 8, seed=number + 1000 * grid.coordinates(me)["z"])
        if how == "sample" and me in failing and number == step:
            batch["input_ids"][0, 3] = 131
        if how == "alone" and number == step:
            if me in failing:
                sys.exit(0)
            model.save_pretrained("nowhere")
        if how == "works" and number == step:
            end = time.monotonic() + 2 * TIMEOUTS["works"]
            while me in failing and time.monotonic() < end:
                time.sleep(0.1)
            barrier()
            sys.exit(0)
        model(**batch).loss.backward()
        hf_axonn.sync_gradients(model)


def _rank(rank: int, port, listening, log: str, how: str, failing: list[int], step: int, grid: Grid) -> None:
    """A process as torchrun would start it: its store lives elsewhere, and exceptions come to sys.excepthook."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_ERROR_FILE=f"{log}-{rank}.json")
    import atexit

    atexit._clear()  # what the process of the tests would do at its end is not this rank's to do
    listening.wait()
    store = dist.TCPStore("127.0.0.1", port.value, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=TIMEOUTS.get(how, LONG))
    )
    code = 0
    try:
        loop(how, failing, step, grid)
    except SystemExit as exit_:
        code = exit_.code
        atexit._run_exitfuncs()
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
    sys.stderr.flush()
    os._exit(code)


def run(tmp_path: Path, how: str, *failing: int, step: int = 3, grid: Grid = GRID) -> tuple[list[int | None], str]:
    """Exit codes (None of one that had to be killed) and all output."""
    log = tmp_path / "log"
    context = multiprocessing.get_context("fork")
    port, listening = context.Value("i", 0), context.Event()
    arguments = (port, listening, str(log), how, list(failing), step, grid)
    ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(WORLD)]
    with pytest.MonkeyPatch.context() as patch:  # as in a notebook that has trained before
        patch.setattr(PROGRESS, "done", 4)
        for process in ranks:
            process.start()
    # Only now: a process that is forked while the thread of a store holds a lock waits for that lock for ever.
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.value = server.port
    listening.set()
    end = time.monotonic() + 240
    try:
        while time.monotonic() < end and any(its.is_alive() for its in ranks):
            if how == "frozen" and all(not its.is_alive() for rank, its in enumerate(ranks) if rank not in failing):
                break
            time.sleep(0.05)
    finally:
        codes = [its.exitcode for its in ranks]
        for process in ranks:
            process.kill()
            process.join()
    return codes, log.read_text()


def message(output: str) -> str:
    """The one message, with the lines that belong to it."""
    assert output.count("hf_axonn: the run ends") == 1, output[-5000:]
    return output[output.index("hf_axonn: the run ends") :]


@pytest.mark.parametrize(
    ("how", "failing", "said"),
    [
        pytest.param(  # raised by a stage below, and by two ranks in the next
            "memory",
            [3],
            r"rank 3 .* raised in step 3: OutOfMemoryError: CUDA out of memory. Tried to allocate 20",
            marks=pytest.mark.slow,
        ),
        pytest.param(  # raised as the one above, and by a stage below
            "nan",
            [0],
            r"rank 0 .* raised in step 3: FloatingPointError: the loss is nan",
            marks=pytest.mark.slow,
        ),
        ("sample", [2, 3], r"raised in step 3: ValueError: ranks 2 and 3 got the token id 131 at \[0, 3\]"),
        pytest.param(
            "memory",
            [0, 1, 2, 3],
            r"rank [0123] .* raised in step 3: OutOfMemoryError",
            marks=pytest.mark.slow,
        ),
        ("killed", [2], r"rank 2 .* died or froze in step 3: no answer .*; ranks 0, 1 and 3 waited for it"),
        pytest.param(
            "frozen",
            [1],
            r"rank 1 .* died or froze in step 3: no answer .*; ranks 0, 2 and 3 waited for it",
            marks=pytest.mark.slow,
        ),
        pytest.param(  # as the one below, whose message says more
            "leaves",
            [1],
            r"ended before the others, which are in step 3: rank 1 .* ended its script, 2 steps done",
            marks=pytest.mark.slow,
        ),
        (
            "alone",
            [1, 2, 3],
            r"rank 1 .* ended its script, 2 steps done; .* Waiting at .*test_watchdog.py:\d+ "
            r'`model.save_pretrained\("nowhere"\)`: rank 0. Every rank has to make this call',
        ),
        pytest.param(
            "ends",
            [1],
            r"ended before the others, which are in step 3: rank 1 .* ended its script, 2 steps done",
            marks=pytest.mark.slow,
        ),
        pytest.param(  # waits for a timeout; what is said of it is tested below without ranks
            "hangs",
            [2],
            r"(?s)rank 2 .* hangs in step 3: .* ranks 0, 1 and 3 waited .* in fail: time.sleep\(1000\)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rank_that_fails_in_a_step_is_named_and_all_end(tmp_path, how, failing, said):
    codes, output = run(tmp_path, how, *failing)
    assert re.search(said, message(output)), message(output)
    expected = {"killed": -signal.SIGKILL, "frozen": None, "leaves": 0, "ends": 0, "alone": 0}.get(how, 1)
    assert codes == [expected if rank in failing else 1 for rank in range(WORLD)]
    tracebacks = output.count("Traceback (most recent call last)")
    assert tracebacks == (how in ("memory", "nan", "sample")), "of the rank that failed, and no other"
    assert "closed by peer" not in output
    # What torchrun prints at the end: every rank that ended by an error knows the cause.
    told = [(tmp_path / f"log-{rank}.json").is_file() for rank in range(WORLD)]
    assert sum(told) >= WORLD - len(failing) - 1, told


@pytest.mark.parametrize(
    ("how", "failing", "said"),
    [
        (
            "nan",
            2,
            r"rank 2 \(.*stage 1 of 2\) raised in step 3, forward of micro-batch 0 in stage 1: FloatingPointError",
        ),
        pytest.param(
            "killed",
            3,
            r"rank 3 \(.*pipe=1, stage 1 of 2\) died or froze in step 3: .* ranks 0, 1 and 2 waited for it .*"
            r"ranks 0 and 1 after forward of micro-batch 1 in stage 0; rank 2 after forward of micro-batch 0 in stage",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "hangs",
            3,
            r"(?s)rank 3 .* hangs in step 3, forward of micro-batch 0 in stage 1: .* ranks 0, 1 and 2 waited .*"
            r"ranks 0 and 1 after forward of micro-batch 1 in stage 0.* in fail: time.sleep\(1000\)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_stage_that_fails_is_named_with_the_micro_batch(tmp_path, how, failing, said):
    _, output = run(tmp_path, how, failing, grid=Grid(pipe=2, x=2))
    assert re.search(said, message(output)), message(output)


LAUNCHED = """
import datetime, sys
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
from tests.distributed.test_watchdog import loop

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
loop(sys.argv[2], [2], 3)
"""

STOCK_TRAINER = """
import sys
sys.path.insert(0, sys.argv[1])
from transformers import Trainer, TrainerCallback, TrainingArguments
from hf_axonn.compat.torch import world_timeout
from tests.helpers.models import tiny_model
from tests.distributed.test_watchdog import fail
from tests.helpers.training import collate, token_data

class Fails(TrainerCallback):
    def on_step_begin(self, args, state, control, model, **kwargs):
        if args.process_index == 1 and state.global_step == 2:
            model.model.layers[1].mlp.act_fn.register_forward_pre_hook(lambda *_: fail(sys.argv[2]))

arguments = TrainingArguments(
    output_dir="out", use_cpu=True, report_to="none", save_strategy="no", max_steps=1000, ddp_timeout=60
)
assert world_timeout("cpu") == 60
data = token_data(64, seed=0)
Trainer(tiny_model("llama"), arguments, collate, data, callbacks=[Fails()]).train()
"""

SAID = {"killed": "died or froze in step 3", "nan": "raised in step 3: FloatingPointError: the loss is nan"}


def assert_told(ended: Ended, rank: int, how: str) -> None:
    """One message that names the rank, the step and the cause; no process is left."""
    assert ended.code == 1 and not ended.left, ended.output[-3000:]
    assert re.search(f"rank {rank} .* {SAID[how]}", message(ended.output)), message(ended.output)
    shown = len(re.findall(r"^(?:\[rank\d\]: )?Traceback", ended.output, re.M))
    assert shown <= 1 + (how == "nan"), "of the rank that raised, and of the launcher"


@pytest.mark.slow
@pytest.mark.parametrize("how", SAID)
def test_torchrun_ends_the_others_in_a_step_but_not_before_the_message(tmp_path, how):
    (tmp_path / "loop.py").write_text(LAUNCHED)
    assert_told(run_script(tmp_path, *TORCHRUN, f"--nproc_per_node={WORLD}", "loop.py", ROOT, how), 2, how)


WAITS = """
import os, signal, sys, threading, time
import torch
import torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from hf_axonn.compat.torch import watch_store
from hf_axonn.distributed.watchdog.progress import main_frames
from hf_axonn.distributed.watchdog.watchdog import watch

def kill():
    while "recv" not in [frame.f_code.co_name for frame in main_frames()[:1]]:
        time.sleep(0.1)
    store.add("waiting", 1)
    while rank == 0 or store.add("waiting", 0) < 2:
        time.sleep(0.1)
    os.kill(os.getppid() if sys.argv[2] == "launcher" else os.getpid(), getattr(signal, sys.argv[3]))

dist.init_process_group("gloo")
watch()
store, rank = watch_store("watch"), dist.get_rank()
threading.Thread(target=kill, daemon=True).start()
dist.recv(torch.empty(1), src=1 - rank)
"""


def waiting(tmp_path: Path, whom: str, by: str) -> Ended:
    """Two ranks that wait for each other, when the launcher or one of them gets a signal.

    torchrun in a fork, which spares its imports; it starts the ranks as ever.
    """
    (tmp_path / "waits.py").write_text(WAITS)
    return forked(tmp_path, None, *TORCHRUN, "--nproc_per_node=2", "waits.py", ROOT, whom, by, linger=60)


@pytest.mark.slow
def test_torchrun_ends_the_other_rank_but_not_before_the_message_of_one_that_was_killed(tmp_path):
    """It sends SIGTERM a tenth of a second after one has died."""
    ended = waiting(tmp_path, "rank", "SIGKILL")
    assert ended.code == 1 and not ended.left, ended.output[-3000:]
    assert re.search("rank 1 .* died or froze before the first step", message(ended.output)), ended.output


def test_ranks_whose_launcher_is_killed_end(tmp_path):
    ended = waiting(tmp_path, "launcher", "SIGKILL")
    assert ended.code == -signal.SIGKILL and not ended.left, ended.output[-3000:]
    assert re.search(r"the run ends: the launcher of rank \d .*, process \d+, was killed", ended.output), ended.output


def test_ctrl_c_ends_ranks_that_wait_for_each_other_before_they_are_killed(tmp_path):
    ended = waiting(tmp_path, "launcher", "SIGINT")
    assert ended.code == 1 and not ended.left, ended.output[-3000:]
    assert not re.search("the run ends|SIGKILL|forcefully", ended.output), ended.output


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["launcher", "rank"])
def test_sigterm_is_told_and_not_the_broken_connections_that_follow(tmp_path, whom):
    """SIGTERM to all ranks, or to rank 1 alone, which torchrun tells the other then."""
    ended = waiting(tmp_path, whom, "SIGTERM")
    assert ended.code != 0 and not ended.left, ended.output[-3000:]
    rank = "1" if whom == "rank" else r"\d"
    assert re.search(rf"the run ends: rank {rank} \(.*\) got SIGTERM before the first step, as from", ended.output)
    assert not re.search(r"^\[rank\d\]: ", ended.output, re.M), ended.output


@pytest.mark.slow
def test_a_rank_may_work_for_longer_than_the_timeout_where_others_meet_it(tmp_path):
    codes, output = run(tmp_path, "works", 0, step=1)  # before a collective that has a limit
    assert codes == [0] * WORLD and "the run ends" not in output, output
    assert re.search(r"ranks 1, 2 and 3 waited \d+ s; at work: rank 0 \(.* in loop: time.sleep\(0.1\)", output), output


@pytest.mark.slow
@pytest.mark.parametrize("how", SAID)
def test_accelerate_launch_with_a_stock_trainer_ends_with_the_message(tmp_path, how):
    (tmp_path / "train.py").write_text(STOCK_TRAINER)
    assert_told(launch(tmp_path, Grid(z=2), "train.py", ROOT, how), 1, how)


def _account(rank: int, **changes) -> Account:
    values = dict(place="host a", when="in step 5", done=4, collectives=100, last="all_gather")
    values.update(batch="input_ids [2, 8]", patient=False, still=27.0, idle=27.0, used=0.1)
    return Account(**{"rank": rank, **values, "waiting": True, "stack": ("a.py:1 in f: x()",), **changes})


def _judge(*accounts: Account, silent=None, ended=None, broken: bool = False, blocking: bool = True) -> str | None:
    return diagnose(accounts, silent or {}, ended or {}, limit=20.0, broken=broken, blocking=blocking)


def test_who_is_to_blame():
    behind = _account(1, collectives=99)
    assert _judge(_account(0), behind, _account(2)).startswith("rank 1 (host a) hangs in step 5: it waits elsewhere")
    busy = _account(1, waiting=False, stack=("data.py:7 in load: read()",))
    assert "data.py:7 in load" in _judge(_account(0), busy)
    assert _judge(_account(0), silent={1: "host b"}).startswith("rank 1 (host b) died or froze in step 5")
    saving = _account(0, call="a.py:9 `save()`")
    assert "waited for it at a.py:9 `save()`" in _judge(saving, silent={1: "host b"})
    assert "waited 27 s for it at a.py:9 `save()`." in _judge(saving, _account(1, collectives=99))
    assert "rank 1 left. Waiting at a.py:9 `save()`: rank 0. Every rank" in _judge(saving, ended={1: "left"})
    assert "rank 1 left" in _judge(_account(0), ended={1: "left"})


def test_of_a_pipeline_ranks_of_one_stage_are_compared():
    stages = [_account(0, collectives=70), _account(1, collectives=70)]
    behind = [_account(2, pipe=1), _account(3, pipe=1, collectives=99, passing="backward of micro-batch 2 in stage 1")]
    said = _judge(*stages, *behind)
    assert said.startswith("rank 3 (host a) hangs in step 5, backward of micro-batch 2 in stage 1: it waits elsewhere")
    busy = _account(2, pipe=1, waiting=False, stack=("data.py:7 in load: read()",))
    assert _judge(*stages, busy, _account(3, pipe=1)).startswith("rank 2 (host a) hangs in step 5: it goes no further")


def test_a_run_that_only_takes_long_is_let_go_on():
    assert _judge(*(_account(rank, waiting=False) for rank in range(4))) is None
    uploads = _account(0, waiting=False, still=27.0, idle=0.0, work="uploads")
    accounts = [uploads, _account(1, patient=True), _account(2, patient=True)]
    assert _judge(*accounts) is None
    assert who_works(accounts) == "ranks 1 and 2 waited 27 s; at work: rank 0 (host a): uploads"
    assert who_works([_account(0), _account(1)]) == ""
    for limited in (_judge(uploads, _account(1), _account(2)), _judge(*accounts, broken=True)):
        assert "rank 0 (host a) hangs in step 5: it works (uploads) for longer than the timeout" in limited
    assert "goes no further" in _judge(_account(0, waiting=False), *accounts[1:])


def test_ranks_that_all_stand_are_told_where_collectives_return_at_once():
    accounts = [_account(rank, waiting=False) for rank in range(4)]
    assert "all ranks have waited 27 s for each other" in _judge(*accounts, blocking=False)
    assert _judge(*accounts[1:], _account(0, waiting=False, still=3.0), blocking=False) is None


def test_a_backward_pass_on_another_thread_waits_for_others_too():
    names: dict = {}
    exec(compile("def wait(standing, end):\n    standing.set()\n    end.wait()", WAITING[0], "exec"), names)
    standing, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=names["wait"], args=(standing, end))
    assert not waits_for_others()
    thread.start()
    standing.wait()
    try:
        assert waits_for_others()
    finally:
        end.set()
        thread.join()


def test_ranks_that_all_wait_are_told_with_their_batches():
    text = _judge(_account(0), _account(1, batch="input_ids [2, 9]", stack=("b.py:2 in g: y()",)))
    assert "rank 0: input_ids [2, 8]; rank 1: input_ids [2, 9]" in text
    assert "rank 1: b.py:2 in g: y(), after all_gather" in text


def test_ranks_in_one_call_of_which_some_wait_at_a_barrier_never_meet():
    """As where a callback ends the training on one rank: both stand in `trainer.train()`."""
    stacks = [
        (f"/lib/{own}", f"/lib/{WAITING[0]}:3 in barrier: wait()")
        for own in ("hub.py:1 in end: z()", "b.py:2 in f: y()")
    ]
    accounts = [
        _account(rank, call="a.py:9 `train()`", stack=stack, patient=rank == 0) for rank, stack in enumerate(stacks)
    ]
    for text in (_judge(*accounts), diagnose_early(accounts, still=20.0)):
        assert "all ranks have waited 27 s for each other in step 5" in text
        assert "rank 0: a.py:9 `train()`, in /lib/hub.py:1 in end: z(), after all_gather\n" in text
        assert "rank 1: a.py:9 `train()`, in /lib/b.py:2 in f: y(), after all_gather\nEvery rank" in text
    assert diagnose_early([_account(rank, call="a.py:9 `train()`") for rank in range(2)], still=20.0) is None


def test_ranks_in_words():
    assert ranks_in_words([3]) == "rank 3" and ranks_in_words([0, 1, 5]) == "ranks 0, 1 and 5"
    assert ranks_in_words(range(20)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
    many = _judge(_account(20), ended=dict.fromkeys(range(20), "ended its script"))
    assert "rank 7 ended its script and 12 more. All ranks must" in many


def test_what_another_rank_caused_is_told_from_what_went_wrong_here():
    assert is_symptom(RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:33410"))
    assert is_symptom(dist.DistNetworkError("the client socket has timed out"))
    assert not is_symptom(RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"))
    assert not is_symptom(ValueError("connection closed by peer"))
    assert not is_symptom(torch.OutOfMemoryError("NCCL"))


def test_exceptions_pass_where_nobody_watches():
    with pytest.raises(ValueError, match="mine"), failures_reported():
        raise ValueError("mine")


def _terminated(pipe) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # another test, or a library, may have left a handler
    signal.set_wakeup_fd(-1)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for _ in range(1024):  # as many as connections of a large run
        os.dup(pipe.fileno())
    termination = Termination()
    seen = []
    thread = threading.Thread(target=lambda: seen.append(termination.wait(120)))
    thread.start()
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    child.terminate()
    child.join(60)
    unseen = thread.is_alive()
    os.kill(os.getpid(), signal.SIGTERM)
    thread.join(60)
    termination.close()
    pipe.send((child.exitcode, unseen, seen == [signal.SIGTERM], signal.getsignal(signal.SIGTERM) is signal.SIG_DFL))


def _handled(pipe) -> None:
    termination = Termination()
    seen = []
    signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    os.kill(os.getpid(), signal.SIGTERM)
    noticed = termination.wait(0.1)  # the byte is in the socket already
    termination.close()
    pipe.send((seen == [signal.SIGTERM], noticed))


@pytest.mark.parametrize(
    ("what", "expected"), [(_terminated, (-signal.SIGTERM, True, True, True)), (_handled, (True, 0))]
)
def test_a_thread_notices_sigterm_but_child_processes_and_later_handlers_have_theirs(what, expected):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=what, args=(theirs,))
    process.start()
    try:
        assert ours.poll(60)
        assert ours.recv() == expected
    finally:
        process.kill()
        process.join()
