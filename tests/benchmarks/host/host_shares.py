"""Whose the host time of a grid is: shares of the processor's time by the module of ours that spends it.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.host.host_shares --output docs/results/host_shares.md

Samples of a training pass of host_time.py's deeper model, taken by processor time (SIGPROF) and not by counting calls,
so that small functions do not look dearer than they are. A sample belongs to the innermost frame of hf_axonn or
Transformers; what torch does for it counts with it. Samples without such a frame are autograd's own nodes.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from collections import Counter
from pathlib import Path
from types import FrameType


os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

import hf_axonn  # noqa: E402
from hf_axonn.compat.torch import fake_world  # noqa: E402
from tests.benchmarks.host import host_time  # noqa: E402


OURS = Path(hf_axonn.__file__).parent
TORCH, STOCK = "autograd and torch", "the model's own code (Transformers)"
INTERVAL = 0.001  # seconds of processor time between samples


def owner(frame: FrameType | None) -> str:
    """Whose a stack is, by its innermost frame of ours or of Transformers."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(str(OURS)):
            return str(Path(file).relative_to(OURS))
        if f"{os.sep}transformers{os.sep}" in file:
            return STOCK
        frame = frame.f_back
    return TORCH


def shares(name: str, samples: int) -> Counter[str]:
    """Samples of training passes of a contender of host_time.py, by owner."""
    found: Counter[str] = Counter()

    def note(_: int, frame: FrameType | None) -> None:
        found[owner(frame)] += 1

    with fake_world(host_time.world_of(name)):
        step = host_time.training(host_time.contender(name, host_time.LAYERS[1]))
        for _ in range(3):
            step()
        before = signal.signal(signal.SIGPROF, note)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL, INTERVAL)
        try:
            while found.total() < samples:
                step()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)
    return found


def table(found: dict[str, Counter[str]], least: float = 0.01) -> str:
    """A row for each owner that has `least` of some contender's samples; the rest together."""
    part = {name: {owner: count / counts.total() for owner, count in counts.items()} for name, counts in found.items()}
    most = Counter({owner: max(of.get(owner, 0) for of in part.values()) for of in part.values() for owner in of})
    rows = [owner for owner, share in most.most_common() if share >= least]
    lines = ["| | " + " | ".join(found) + " |", "|---|" + "---:|" * len(found)]
    lines += [f"| {owner} | " + " | ".join(f"{of.get(owner, 0):.0%}" for of in part.values()) + " |" for owner in rows]
    rest = [1 - sum(of.get(owner, 0) for owner in rows) for of in part.values()]
    return "\n".join([*lines, "| others | " + " | ".join(f"{share:.0%}" for share in rest) + " |"])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=5000, help="samples of each grid, at least (5000)")
    parser.add_argument("--output", type=Path, help="file of the table; without it the table is only printed")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")
    text = table({name: shares(name, args.samples) for name, grid in host_time.GRIDS.items() if grid.size > 1})
    print(text)
    if args.output:
        command = "python -m tests.benchmarks.host.host_shares " + " ".join(arguments or sys.argv[1:])
        args.output.write_text(f"# Whose the host time is\n\n`{command}`, torch {torch.__version__}.\n\n{text}\n")


if __name__ == "__main__":
    main()
