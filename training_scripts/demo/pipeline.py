"""Steps that are done once: each leaves a stamp that says with which settings its files were made."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


class Pipeline:
    """Runs named steps under one directory and skips those whose files are there and up to date.

    A step is up to date if its settings and those of the steps before it are the same as when it was done, and every
    file that it wrote is there in the same size. The stamp is written after the files, so that a step that was
    interrupted is done again.

    Args:
        root: Directory of all outputs; it is made if it is not there.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.seconds: dict[str, float] = {}
        self._keys: dict[str, str] = {}
        self._stamps = root / ".stamps"
        self._stamps.mkdir(parents=True, exist_ok=True)

    def step(
        self,
        name: str,
        action: Callable[[], None],
        *,
        doing: str,
        outputs: Sequence[Path],
        settings: Mapping[str, Any],
        after: Sequence[str] = (),
    ) -> bool:
        """Does a step, unless it is done.

        Args:
            name: Name of the step; its time is in `seconds` under it, also when the step was done by an earlier call.
            action: Makes the outputs.
            doing: What the step does, for the terminal.
            outputs: Files and directories that the step makes; old ones are removed before.
            settings: What decides the outputs, JSON-ready.
            after: Names of steps whose outputs this one reads.

        Returns:
            Whether there was anything to do.

        Raises:
            ValueError: The action ended without one of its outputs.
        """
        about = json.dumps([settings, [self._keys[before] for before in after]], sort_keys=True)
        self._keys[name] = hashlib.sha256(about.encode()).hexdigest()
        stamp = self._stamps / f"{name}.json"
        done = json.loads(stamp.read_text(encoding="utf-8")) if stamp.exists() else None
        if done and done["key"] == self._keys[name] and done["files"] == self._files(outputs):
            self.seconds[name] = done["seconds"]
            print(f"== {name}: there already ({done['seconds']:.0f} s when it was made)", flush=True)
            return False
        print(f"== {name}: {doing}", flush=True)
        stamp.unlink(missing_ok=True)
        for output in outputs:
            shutil.rmtree(output) if output.is_dir() else output.unlink(missing_ok=True)
        start = time.perf_counter()
        action()
        self.seconds[name] = round(time.perf_counter() - start, 1)
        missing = [str(output) for output in outputs if not output.exists()]
        if missing:
            raise ValueError(f"the step {name} ended without {', '.join(missing)}: look at what it printed above")
        content = {"key": self._keys[name], "seconds": self.seconds[name], "files": self._files(outputs)}
        part = stamp.with_suffix(".part")
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        part.replace(stamp)
        print(f"== {name}: done in {self.seconds[name]:.0f} s", flush=True)
        return True

    def _files(self, outputs: Sequence[Path]) -> dict[str, int]:
        """Size of every file that belongs to the outputs."""
        files = [
            file
            for output in outputs
            for file in (sorted(output.rglob("*")) if output.is_dir() else [output])
            if file.is_file()
        ]
        return {str(file.relative_to(self.root)): file.stat().st_size for file in files}


def call(command: Sequence[str], *, log: Path | None = None, environment: Mapping[str, str] | None = None) -> None:
    """Runs a program, shows what it prints while it prints it, and keeps that in a log.

    Raises:
        SystemExit: The program failed; the message names it, its exit code and the log.
    """
    print("$ " + " ".join(command), flush=True)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
    ) as process:
        pieces = []
        while piece := os.read(process.stdout.fileno(), 1 << 16):
            pieces.append(piece)
            sys.stdout.buffer.write(piece)
            sys.stdout.flush()
        code = process.wait()
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"".join(pieces))
    if code:
        where = f"; its output is in {log}" if log is not None else ""
        raise SystemExit(f"{Path(command[0]).name} ended with code {code}{where}")
