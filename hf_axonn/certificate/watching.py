"""The processes of a run while they are waited for: which case they are at, and whether they stand still.

Ranks of which some left a collective out wait for each other until its timeout, which is half an hour. Waiting takes
no time of a core: where no rank computes for a while, every rank writes down where it stands.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil


LOOK = 0.5  # seconds between two looks
STILL = 20.0  # seconds in which no rank computes
IDLE = 0.02  # of a core, by which a rank that waits may be busy
STANDS_STILL = "stands still"
INNERMOST = 12  # frames of a stack, in which a collective is looked for
FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)')
# Where ranks wait, and who stands between that and the line of the user.
COLLECTIVES = tuple(
    os.sep.join(("", "torch", *words, "")) for words in (("distributed",), ("autograd",), ("nn", "parallel"))
)
PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}torch{os.sep}", str(Path(__file__).parent), "<frozen", "runpy")
NO_NAMES = ("wrapper", "wait", "__torch_function__", "handle_torch_function", "_engine_run_backward")


def be_watched(folder: Path, rank: int) -> None:
    """Let the process that waits for this one find it, and ask where it stands."""
    (folder / f"pid-rank{rank}.txt").write_text(str(os.getpid()), encoding="utf-8")
    stack = open(folder / f"stack-rank{rank}.txt", "w", encoding="utf-8")  # noqa: SIM115, open until the process ends
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)


def wait_for(process: subprocess.Popen[bytes], folder: Path, limit: float, began: Callable[[str], None]) -> str:
    """Wait until a launch has ended, which is ended where its ranks stand still.

    Args:
        process: one process, or the launcher of ranks that call `be_watched`.
        folder: theirs.
        limit: seconds after which it is ended.
        began: is called with the name of each case that begins.
    Returns:
        Why it was ended; empty where it ended by itself.
    """
    try:
        return _watch(process, folder, limit, began)
    except BaseException:  # of who waits
        _end(process, _ranks(folder))
        raise


def _watch(process: subprocess.Popen[bytes], folder: Path, limit: float, began: Callable[[str], None]) -> str:
    begin = mark = time.monotonic()
    used, shown = 0.0, 0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LOOK)
        begun = cases_begun(folder)
        for case in begun[shown:]:
            began(case)
        shown = len(begun)
        if process.poll() is not None:
            return ""
        now, ranks = time.monotonic(), _ranks(folder)
        total = sum(_seconds(rank) for rank in ranks.values())
        if len(ranks) < 2 or abs(total - used) > LOOK * IDLE + IDLE * (now - mark) * len(ranks):
            mark, used = now, total
        why = f"took more than {limit:.0f} s" if now - begin > limit else ""
        if now - mark > STILL:
            why = why or _standing(folder, ranks)
            mark = now
        if why:
            _end(process, ranks)
            return why


def cases_begun(folder: Path) -> list[str]:
    """Return the cases that rank 0 has begun, in their order."""
    begun = folder / "begun-rank0.txt"
    return begun.read_text(encoding="utf-8").splitlines() if begun.exists() else []


def _ranks(folder: Path) -> dict[int, psutil.Process]:
    found = {}
    for path in folder.glob("pid-rank*.txt"):
        with contextlib.suppress(psutil.Error, ValueError):
            found[int(path.stem.removeprefix("pid-rank"))] = psutil.Process(int(path.read_text(encoding="utf-8")))
    return dict(sorted(found.items()))


def _seconds(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def _end(process: subprocess.Popen[bytes], ranks: Mapping[int, psutil.Process]) -> None:
    process.terminate()  # a launcher ends its ranks
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    for rank in ranks.values():
        with contextlib.suppress(psutil.Error):
            rank.kill()
    process.kill()
    process.wait()


def _standing(folder: Path, ranks: Mapping[int, psutil.Process]) -> str:
    """Return where ranks wait for each other; empty where none is in a collective."""
    for process in ranks.values():
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGUSR1)
    time.sleep(2 * LOOK)
    parts, waits = [], False
    for rank in ranks:
        path = folder / f"stack-rank{rank}.txt"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        what, where = place(text.rpartition("(most recent call first)")[2])
        waits = waits or bool(what)
        parts.append(f"rank {rank} in {what or 'no collective'} ({where})")
    if not waits:
        return ""
    return (
        f"{STANDS_STILL}: the ranks wait for each other, and none of them has computed for {STILL:.0f} s: "
        f"{', '.join(parts)}. A collective is called by some ranks only, or in another order"
    )


def place(stack: str) -> tuple[str, str]:
    """Return the collective in which a rank stands, if in any, and where it was called, from faulthandler's stack."""
    frames = [match.groupdict() for match in FRAME.finditer(stack)]
    inner = [frame for frame in frames[:INNERMOST] if any(part in frame["file"] for part in COLLECTIVES)]
    names = [frame["name"] for frame in inner if frame["name"] not in NO_NAMES]
    outer = [frame for frame in frames if not any(part in frame["file"] for part in PACKAGES)]
    where = (outer or [frame for frame in frames if frame not in inner] or [{"file": "unknown", "line": "0"}])[0]
    return (names[0] if names else "", f"{os.sep.join(Path(where['file']).parts[-2:])}, line {where['line']}")
