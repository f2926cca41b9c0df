"""A watchdog: when one rank fails, all end, with one message that says which, in which step, and why.

Every process has a thread that looks once a second into the store through which torch.distributed was set up. Nothing
is written there while all goes well.

    an exception ends a script     its rank writes the cause; the others read it and end
    a rank dies, or its script     the others' collectives fail or wait: one of them asks every rank where it is, and
    ends early                     surviving ranks report the unresponsive one
    a rank hangs                   a rank whose main thread has not moved for nine tenths of the process group's
                                   timeout asks. The rank that issued the fewest collectives is reported, with its
                                   stack, unless it is at work and the others wait in a barrier without a limit
    ranks wait in different calls  a call that only some ranks make: after a minute without any movement it is certain,
                                   and both calls are reported. Where gloo aborts a rank before, because the calls
                                   send other sizes, it leaves its stack in a file (crashes.py)
    Ctrl-C                         ends a rank that waits in a collective, too: it does not come to Python there
    a launcher is killed           its ranks see that torchrun or accelerate launch is no longer their parent, and end

The timeout is the one of `init_process_group` (accelerate's InitProcessGroupKwargs, Trainer's ddp_timeout): torch's
own watchdogs come later. Processes are ended by os._exit(1), since nothing else ends a thread that waits in a
collective. Started by torchrun or accelerate launch, the message stands in its error report, too. They send SIGTERM to
the others a tenth of a second after a rank has died: a rank that gets it answers first (signals.py), and ends
within seconds. AXONN_WATCH=0 turns all of this off.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from types import TracebackType

import torch.distributed as dist

from hf_axonn.compat.torch import backend_of, store_outlives_ranks, watch_store, world_timeout
from hf_axonn.distributed.collectives import observe
from hf_axonn.distributed.watchdog.crashes import Crash, CrashFile, crashes_in
from hf_axonn.distributed.watchdog.diagnosis import diagnose, diagnose_early, who_works
from hf_axonn.distributed.watchdog.progress import (
    PROGRESS,
    Account,
    account,
    footprint,
    used_seconds,
    waits_for_others,
)
from hf_axonn.distributed.watchdog.signals import Termination


INTERVAL = 1.0  # seconds between two looks; longer in worlds of more than 2,000 ranks, which share one store
PATIENCE = 4.0  # seconds for answers to a roll call
HASTE = 1.5  # seconds for ranks that know the cause to say it, when all have answered
LEAVING = 1.5  # seconds after Ctrl-C in which the main thread may leave a collective
GRACE = 5.0  # seconds in which a rank that was asked to end may end by itself; a fifth if it waits for others
SHARE = 0.9  # of the process group's timeout
EARLY = 60.0  # seconds after which ranks that wait are asked whether they wait in different calls; then twice as long
SILENCE = 0.05  # of that timeout may pass without an answer of a rank that does not let its threads run for a while
SWITCH = "AXONN_WATCH"
LONGEST_CAUSE = 2000
# What a collective raises because of another rank.
SYMPTOMS = re.compile(
    "connection closed by peer|connection reset|connection was likely closed|broken pipe|socket closed|"
    "timed out waiting|application timeout caused pair closure|no error or timeout|NCCL|remote process has terminated|"
    "read error|write error",
    re.IGNORECASE,
)

_watch: Watchdog | None = None


def watch() -> None:
    """Watch over this run from now on; once for each world, and nothing on one process. No communication."""
    global _watch
    if os.environ.get(SWITCH) == "0" or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if dist.get_backend() == "fake":
        return
    if _watch is not None:
        if _watch.world is dist.group.WORLD and _watch.process == os.getpid():
            return
        _watch.stop()
    _watch = Watchdog()


@contextlib.contextmanager
def failures_reported():
    """Tell the other ranks of an exception that leaves the block; one that they have caused becomes their message. For
    programs whose exceptions never reach Python's sys.excepthook: functions that multiprocessing runs, notebooks."""
    try:
        yield
    except Exception as error:
        if (
            _watch is not None
            and _watch.process == os.getpid()
            and not _watch.report_failure(error)
            and is_symptom(error)
        ):
            raise RuntimeError(_watch.result()["text"]) from None
        raise


def note_end() -> None:
    """Note that this rank's program ends here, as the others should. Scripts need no call: leaving Python notes it."""
    if _watch is not None and _watch.process == os.getpid():
        _watch.at_exit()


def end_as_asked() -> None:
    """End this process, as SIGTERM does without a handler. If a rank has died, say so first."""
    if _watch is not None and _watch.process == os.getpid():
        with contextlib.suppress(RuntimeError):  # the store is gone
            _watch.be_terminated()
    _leave(128 + signal.SIGTERM)


def note_stages(text: str) -> None:
    """Note which stages of a pipeline this rank has, in words."""
    if _watch is not None and _watch.process == os.getpid():
        _watch.note_stages(text)


class Watchdog:
    """The thread of this rank and what it shares with the others."""

    def __init__(self) -> None:
        self.world = dist.group.WORLD
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.process = os.getpid()
        self.limit = SHARE * world_timeout()
        self.place = self._here = f"host {socket.gethostname()}, process {os.getpid()}"
        self.round = 0  # of roll calls
        # Other parents, such as a shell, may go before their children.
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._store, self._store_outlives = watch_store("watch"), store_outlives_ranks()
        self._stopped = threading.Event()
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._answered = False
        self._raised: BaseException | None = None
        self._interrupted: float | None = None  # when Ctrl-C came
        self._terminated = False  # by SIGTERM
        self._end_in_words = "ended its script"
        self._interval = max(INTERVAL, self.size / 2000)
        self._still_since, self._footprint = time.monotonic(), None
        self._idle_since, self._used, self._process_used = time.monotonic(), 0.0, 0.0
        # Each looks at itself once in an interval: of two that stop together, one seems to have stood longer.
        self._standstill = max(self.limit - 3 * self._interval, self.limit / 2)
        self._asked = time.monotonic()  # when this rank last asked why nobody moves
        self._early = EARLY
        self._blocking = backend_of() == "gloo"
        PROGRESS.begin()
        self._counting = contextlib.ExitStack()
        self._counting.enter_context(observe(PROGRESS.count))
        self._hook_before, sys.excepthook = sys.excepthook, self._excepthook
        self._hook = sys.excepthook
        atexit.register(self.at_exit)
        self._termination = Termination()
        self._store.set(f"place/{self.rank}", self.place)
        # The same folder on every host; only its ranks look into it.
        name = self._store.compare_set("crashes", "", tempfile.mktemp(prefix="hf_axonn-watch-"))  # noqa: S306
        self._crashes = name.decode()
        self._crash_file = CrashFile(self._crashes, self.rank)
        self._thread = threading.Thread(target=self._run, name="hf_axonn-watch", daemon=True)
        self._thread.start()

    def note_stages(self, text: str) -> None:
        """See the function of this name."""
        self.place = f"{self._here}, {text}"
        self._store.set(f"place/{self.rank}", self.place)

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()
        self._counting.close()
        self._termination.close()
        self._crash_file.close()
        atexit.unregister(self.at_exit)
        if sys.excepthook is self._hook:
            sys.excepthook = self._hook_before

    def close_files(self) -> None:
        """Remove the files of all ranks: the run is over, and what ended ranks is known."""
        self._crash_file.close(of_all=True)

    def at_exit(self) -> None:
        # Also of a script that has ended its process group (`accelerator.end_training`): others may wait for it.
        if self.process == os.getpid() and not self._ending.is_set() and self._store_outlives:
            with contextlib.suppress(RuntimeError):
                text = f"({self.place}) {self._end_in_words}, {PROGRESS.done} steps done"
                self._store.set(f"ended/{self.rank}", text)
        self.stop()

    # The thread.

    def _run(self) -> None:
        while not self._stopped.is_set():
            signal_ = self._termination.wait(self._interval)
            if self._stopped.is_set():
                return
            self._look()
            terminated = signal_ == signal.SIGTERM
            if signal_ == signal.SIGINT and self._interrupted is None:
                self._interrupted = time.monotonic()
            if self._interrupted is not None and waits_for_others() and time.monotonic() - self._interrupted > LEAVING:
                _leave(128 + signal.SIGINT)
            if self._launcher is not None and os.getppid() != self._launcher:
                self._be_orphaned()
            try:
                if terminated:
                    self.be_terminated()
                if self._store.check([f"alarm/{self.round}"]):
                    self._attend()
                elif self._is_still():
                    self._call_roll(broken=False)
                    self._asked = time.monotonic()  # called off: wait as long again
                elif self._is_still(self._early) and self._blocking and waits_for_others():
                    self._early *= 2
                    self._call_roll(broken=False, early=True)
            except RuntimeError:  # the store is gone, and with it whoever kept it: the run is over or soon will be
                if terminated:
                    _leave(128 + signal.SIGTERM)
                if self._launcher is None:
                    return

    def _be_orphaned(self) -> None:
        """End this process, which nobody else would: its files could meet those of the next run in the folder."""
        self._ending.set()
        _say(f"the launcher of rank {self.rank} ({self.place}), process {self._launcher}, was killed.")
        _leave(1)

    def be_terminated(self) -> None:
        """End this process, as somebody wants. If a rank has died, say so first, and else that this one was asked."""
        self._terminated = True
        result = self.result() or self._call_roll(broken=True, ending=True)
        if result and result["text"] and result["by"] != self.rank:
            _record(RuntimeError(result["text"]))
        _leave(128 + signal.SIGTERM)

    def _look(self) -> None:
        now = footprint()
        if now != self._footprint:
            self._footprint, self._still_since = now, time.monotonic()
            self._process_used, self._early = time.process_time(), EARLY
        used = used_seconds()
        if used != self._used:
            self._used, self._idle_since = used, time.monotonic()

    def _is_still(self, seconds: float | None = None) -> bool:
        """Return whether the main thread has not moved for so long that somebody should ask why."""
        return time.monotonic() - max(self._still_since, self._asked) > (seconds or self.limit)

    def _attend(self) -> None:
        """Answer an alarm if it is a roll call, and end if there is a verdict."""
        self._answer()
        result = self.result()
        if result is None:
            return
        if result["text"]:
            self._end(result)
        else:
            self._next_round()

    def _answer(self) -> None:
        with self._lock:
            if not self._answered:
                self._answered = True
                now = time.monotonic()
                own = account(
                    self.rank,
                    self.place,
                    still=now - self._still_since,
                    idle=now - self._idle_since,
                    used=time.process_time() - self._process_used,
                    raised=self._raised,
                )
                answer = json.dumps(own.to_dict())
                for rank, crash in crashes_in(self._crashes):
                    self._store.set(f"crash/{rank}", json.dumps(crash.to_dict()))
                self._store.set(f"account/{self.round}/{self.rank}", answer)

    def _next_round(self) -> None:
        with self._lock:
            self.round, self._answered = self.round + 1, False
        if self._is_still(self._early):  # one of many ranks has asked for all
            self._early *= 2

    def result(self) -> dict | None:
        key = f"result/{self.round}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _decide(self, text: str, cause: str = "") -> bool:
        """Make this the result of the round, unless there is one; returns whether it is this rank's."""
        own = json.dumps({"text": text, "cause": cause, "by": self.rank})
        result = self._store.compare_set(f"result/{self.round}", "", own)
        self._store.set(f"alarm/{self.round}", "1")
        return result == own.encode()

    def _call_roll(self, *, broken: bool, ending: bool = False, early: bool = False) -> dict | None:
        """Ask every rank where it is; the first to ask judges. Returns the result; None if there is none in time.

        `broken`: a connection is; `ending`: all are asked to end, so that only ranks that are gone matter; `early`:
        the timeout is far, so that only ranks that wait in different calls are of interest.
        """
        number = self.round
        judging = self._store.add(f"callers/{number}", 1) == 1
        self._store.set(f"alarm/{number}", "1")
        self._answer()
        patience = PATIENCE + 2 * self._interval
        if not broken:
            patience = max(patience, self.limit / SHARE * SILENCE)
        end = time.monotonic() + (patience if judging else 3 * patience)
        while time.monotonic() < end:
            if (result := self.result()) is not None:  # another rank knew the cause
                return result
            time.sleep(self._interval / 4)
            if judging and end - time.monotonic() < patience - HASTE:
                accounts, silent, ended = self._accounts(number)
                if not silent:
                    break
        if not judging:
            return None
        accounts, silent, ended = self._accounts(number)
        if ending and not silent and not ended:
            text = None
            _say(f"rank {self.rank} ({self.place}) got SIGTERM {PROGRESS.when}, as from a launcher or a time limit")
        elif early:
            all_wait = not silent and not ended
            text = diagnose_early(accounts, still=EARLY - 3 * self._interval) if all_wait else None
        else:
            text = diagnose(
                accounts,
                silent,
                ended,
                limit=self._standstill,
                broken=broken,
                blocking=self._blocking,
                crashes=self._known_crashes(silent),
            )
            if text is None and (works := who_works(accounts)):
                _say(works, "still waiting")
        if self._decide(text or "") and text:
            _say(text)
        result = self.result()
        if result is not None and not result["text"] and self.round == number:
            self._next_round()
        return result

    def _accounts(self, number: int) -> tuple[list[Account], dict[int, str], dict[int, str]]:
        accounts, silent, ended = [], {}, {}
        for rank in range(self.size):
            if self._store.check([f"account/{number}/{rank}"]):
                accounts.append(Account(**json.loads(self._store.get(f"account/{number}/{rank}"))))
            elif self._store.check([f"ended/{rank}"]):
                ended[rank] = self._store.get(f"ended/{rank}").decode()
            else:
                known = self._store.check([f"place/{rank}"])
                silent[rank] = self._store.get(f"place/{rank}").decode() if known else "never began"
        return accounts, silent, ended

    def _known_crashes(self, silent: Iterable[int]) -> dict[int, Crash]:
        known = [rank for rank in silent if self._store.check([f"crash/{rank}"])]
        return {rank: Crash(**json.loads(self._store.get(f"crash/{rank}"))) for rank in known}

    def _end(self, result: dict) -> None:
        """End this process, which may be waiting in a collective."""
        self._ending.set()
        if result["by"] != self.rank:
            _record(RuntimeError(result["text"]))
        grace = GRACE / 5 if waits_for_others() else GRACE
        _leave(128 + signal.SIGTERM if self._termination.wait(grace) == signal.SIGTERM else 1)

    # The main thread.

    def _excepthook(self, kind: type, error: BaseException, where: TracebackType | None) -> None:
        here = os.getpid() == self.process and not self._stopped.is_set()
        if here and kind is KeyboardInterrupt:
            self._end_in_words = "was interrupted"
            if self.rank == 0:  # Ctrl-C reaches all, and one traceback says where they were
                self._hook_before(kind, error, where)
        elif not here or not issubclass(kind, Exception):
            self._hook_before(kind, error, where)
        elif self._terminated and is_symptom(error):
            self._thread.join()  # which ends this process
        elif self._interrupted is not None or self.report_failure(error):  # after Ctrl-C no cause matters
            self._hook_before(kind, error, where)

    def report_failure(self, error: BaseException) -> bool:
        """Tell the others of the exception that ends this rank's program, or learn from them why.

        Returns whether the exception is worth showing: not if it is a consequence of another rank's failure, or if
        another rank has shown the same.
        """
        cause = f"{type(error).__name__}: {error}"
        try:
            if is_symptom(error):
                self._raised = error
                while (result := self.result()) and not result["text"] and self._thread.is_alive():
                    time.sleep(self._interval / 4)  # a roll call that was called off: the thread begins a new round
                result = result or self._call_roll(broken=True)
                known = bool(result and result["text"])
                _record(RuntimeError(result["text"]) if known else error)
                return not known
            text = f"rank {self.rank} ({self.place}) raised {PROGRESS.when}"
            text += f"{PROGRESS.passing and f', {PROGRESS.passing}'}: {cause[:LONGEST_CAUSE]}"
            first = self._decide(text, cause)
            _record(error)
            if first:
                _say(text + "\n    The other ranks end with it; its traceback follows.")
            self._ending.set()
            return first or self.result()["cause"] != cause
        except RuntimeError as lost:
            _say(f"rank {self.rank} lost the store that connects the ranks, with whoever kept it ({lost}).")
            return True


def is_symptom(error: BaseException) -> bool:
    """Return whether an exception says that another rank is gone, rather than that something is wrong here."""
    kinds = tuple(getattr(dist, name) for name in ("DistBackendError", "DistNetworkError", "DistStoreError"))
    return isinstance(error, kinds) or (type(error) is RuntimeError and SYMPTOMS.search(str(error)) is not None)


def _say(text: str, what: str = "the run ends") -> None:
    with contextlib.suppress(OSError):  # a full disk, or a reader that has gone: ranks have to end all the same
        print(f"hf_axonn: {what}: {text}", file=sys.stderr, flush=True)


def _leave(code: int) -> None:
    if _watch is not None:
        _watch.close_files()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _record(error: BaseException) -> None:
    """Write into torchrun's error file, which it prints when all ranks have ended."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        where = error.__traceback__
        with contextlib.suppress(Exception):
            try:
                raise error
            except BaseException:
                get_error_handler().record_exception(error)
        error.__traceback__ = where  # without this function
