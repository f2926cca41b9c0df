"""Place of this rank: its step, its collectives, what its main thread does. Asked for when a run fails.

The engine notes its steps and collectives in `PROGRESS`; everything else is looked up when somebody asks
(watchdog.py).
"""

from __future__ import annotations

import linecache
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from types import FrameType


# Files in which a thread that goes no further is waiting for other ranks.
WAITING = tuple(f"hf_axonn/distributed/{name}.py" for name in ("collectives", "gloo", "meeting"))
WAITING += ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
# Where files are that the user has not written; others are the program's.
LIBRARIES = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[2]), "<frozen")
WAITING_FUNCTION = "_wait_batch_p2p"  # of torch's pipeline schedules, which compute in the same file
FRAMES = 12  # of a stack are reported, the innermost


@dataclass(eq=False)
class Progress:
    """Notes that a rank takes while it trains.

    Attributes:
        passes: forward passes of parallelized models that began.
        done: optimizer steps whose gradients have been averaged.
        collectives: those that the engine issued; ranks that run the same program issue the same number.
        last: the kind of the last one.
        batch: names and shapes of the last batch.
        work: what other code does for long in the main thread, which stands meanwhile: an upload, in words.
        pipe: this rank's place on the axis pipe.
        passing: the pass of a stage that is under way, or was the last to begin, in words; empty without a pipeline.
    """

    passes: int = 0
    done: int = 0
    collectives: int = 0
    last: str = ""
    batch: dict[str, tuple[int, ...]] = field(default_factory=dict)
    work: str = ""
    pipe: int = 0
    passing: str = ""

    def begin(self) -> None:
        """Begin a run; an earlier one of this process, or of the one that it was forked from, is over."""
        self.__init__()

    def count(self, kind: str, payload: int, group) -> None:
        """Count a collective; an observer for `collectives.observe`."""
        self.collectives += 1
        self.last = kind

    @property
    def when(self) -> str:
        """The step under way, in words."""
        return f"in step {self.done + 1}" if self.passes or self.done else "before the first step"

    def enters(self, kind: str, stage: int, micro_batch: int) -> None:
        """Note that a pass of a stage begins: forward, backward or backward_weight."""
        self.passing = f"{kind} of micro-batch {micro_batch} in stage {stage}"


PROGRESS = Progress()


@dataclass(frozen=True)
class Account:
    """A rank's answer to the question where it is.

    Args:
        rank: of the world.
        place: coordinates, host and process, in words.
        when: as `Progress.when`.
        done, collectives, last, batch: as in Progress; the batch in words.
        waiting: whether it waits for other ranks.
        patient: whether it waits in `collectives.barrier`, which has no limit of time.
        still: for how long its main thread has been in the same place, in seconds.
        idle: for how long its main thread has not used the processor, in seconds; 0 while `work` is under way.
        used: processor time of the whole process since its main thread stands, in seconds: data that arrive cost some.
        stack: the innermost frames of its main thread, the innermost last.
        call: the line of the user's program on which that is, empty if there is none.
        work, pipe, passing: as in Progress.
    """

    rank: int
    place: str
    when: str
    done: int
    collectives: int
    last: str
    batch: str
    waiting: bool
    patient: bool
    still: float
    idle: float
    used: float
    stack: tuple[str, ...]
    call: str = ""
    work: str = ""
    pipe: int = 0
    passing: str = ""

    def to_dict(self) -> dict:
        """Return it for JSON; `Account(**...)` reads it back."""
        return asdict(self)


def main_frames() -> list[FrameType]:
    """Return the frames of this process' main thread, the innermost first."""
    return _outwards(sys._current_frames().get(_main_thread()))  # noqa: SLF001  (documented by Python)


def _main_thread() -> int:
    number = threading.main_thread().ident
    assert number is not None, "a main thread has begun"
    return number


def _outwards(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def footprint() -> tuple:
    """Return a value that changes whenever this rank moves: the collectives issued, and its main thread's place.

    Within a file that waits for others, a meeting looks again and again: that is no movement.
    """
    places = tuple((id(frame), not _is_waiting(frame) and frame.f_lasti) for frame in main_frames()[:FRAMES])
    return (PROGRESS.collectives, PROGRESS.done, places)


def used_seconds() -> float:
    """Return the processor time of the main thread; where the system does not tell, that of the process."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.process_time()
    return time.clock_gettime(time.pthread_getcpuclockid(_main_thread()))


def _is_waiting(frame: FrameType, files: tuple[str, ...] = WAITING) -> bool:
    code = frame.f_code
    return code.co_name == WAITING_FUNCTION or is_waiting_file(code.co_filename, files)


def is_waiting_file(name: str, files: tuple[str, ...] = WAITING) -> bool:
    """Return whether a thread that goes no further in this file is waiting for other ranks."""
    return PurePath(name).as_posix().endswith(files)


def waits_for_others() -> bool:
    """Return whether a thread stands inside of a collective, our Python code or torch's.

    Any thread: autograd runs the backward pass of a GPU on one of its own, for which the main thread waits.
    """
    return any(
        _is_waiting(frame)
        for innermost in sys._current_frames().values()  # noqa: SLF001
        for frame in _outwards(innermost)[:FRAMES]
    )


def program_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the line of the user's program in frames, the innermost first; empty if all are libraries'."""
    return source_line((frame.f_code.co_filename, line) for frame, line in frames)


def source_line(places: Iterable[tuple[str, int]]) -> str:
    """Return the line of the user's program in places, files and lines, the innermost first."""
    for name, line in places:
        if not name.startswith(LIBRARIES) and "-packages/" not in name:
            return f"{name}:{line} `{linecache.getline(name, line).strip()}`"
    return ""


def account(
    rank: int, place: str, *, still: float, idle: float, used: float, raised: BaseException | None = None
) -> Account:
    """Return this rank's answer. Times are those of Account; `raised` is what has ended its program, if any."""
    frames = main_frames()
    lines = [(frame, frame.f_lineno) for frame in frames]
    if raised is not None:
        lines = list(traceback.walk_tb(raised.__traceback__))[::-1]
    summary = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames[:FRAMES])
    return Account(
        rank=rank,
        place=place,
        when=PROGRESS.when,
        done=PROGRESS.done,
        collectives=PROGRESS.collectives,
        last=PROGRESS.last,
        batch=", ".join(f"{name} {list(shape)}" for name, shape in PROGRESS.batch.items()),
        waiting=waits_for_others(),
        patient=any(_is_waiting(frame, WAITING[:1]) and frame.f_code.co_name == "barrier" for frame in frames),
        still=still,
        idle=0.0 if PROGRESS.work else idle,
        used=used,
        stack=tuple(f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in reversed(summary)),
        call=program_line(lines),
        work=PROGRESS.work,
        pipe=PROGRESS.pipe,
        passing=PROGRESS.passing,
    )
