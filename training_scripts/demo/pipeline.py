"""Steps that are done once: each leaves a stamp that says with which settings its files were made."""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_axonn_eval.data.jsonl import write_json


class Stamps:
    """Notes beside the files of steps: the settings they were made with, and that they are whole.

    A stamp is written after the files of a step, so that a step that was interrupted is done again. Before, a mark
    says that the step has begun, and with which settings: its files belong to these, and it may continue from them.

    Args:
        root: directory of all outputs; it is made if it is not there.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / ".stamps"
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        """Return the place of a step's stamp."""
        return self.folder / f"{name}.json"

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the stamp of a step, or None."""
        return read_if_there(self.path(name))

    def begun(self, name: str) -> dict[str, Any] | None:
        """Return the mark that `begin` wrote, if the step has not come to its end since; else None."""
        return read_if_there(self._mark(name))

    def stamp_of(self, name: str, key: str, outputs: Iterable[Path]) -> dict[str, Any] | None:
        """Return the stamp of a step if it has this key and every file is there in the same size; else None."""
        stamp = self.read(name)
        return stamp if stamp and stamp["key"] == key and stamp["files"] == self.files(outputs) else None

    def begin(self, name: str, outputs: Mapping[Path, str], *, keep: bool = False, **about: Any) -> None:
        """Remove the stamp and old outputs, and mark the step as begun.

        Args:
            name: of the step.
            outputs: files and directories that the step makes, in the order in which it makes them -> digest of what
                decides each.
            keep: whether outputs stay that were begun or made with the same digest, up to the first that was not. The
                step continues from what it finds.
            about: more to keep in the mark, JSON-ready.
        """
        stamp, mark, keyed = self.read(name), self.begun(name), self._relative(outputs)
        last = stamp or mark or {}
        for output, key in outputs.items():
            keep = keep and last.get("outputs", {}).get(str(output.relative_to(self.root))) == key
            # Where someone removed or cut a file of what was whole, the step cannot know what is missing.
            keep = keep and (stamp is None or self._whole(stamp, output))
            if not keep:
                shutil.rmtree(output) if output.is_dir() else output.unlink(missing_ok=True)
        again = mark["attempts"] if mark and mark["outputs"] == keyed else 0
        write_json(self._mark(name), {"outputs": keyed, "attempts": again + 1, **about})
        self.path(name).unlink(missing_ok=True)

    def end(self, name: str, key: str, outputs: Mapping[Path, str], *, seconds: float, **about: Any) -> dict[str, Any]:
        """Write the stamp of a step that is done, and return it.

        Raises:
            ValueError: one of its outputs is not there.
        """
        missing = [str(output) for output in outputs if not output.exists()]
        if missing:
            raise ValueError(f"the step {name} ended without {', '.join(missing)}: look at what it printed above")
        attempts = (self.begun(name) or {}).get("attempts", 1)
        stamp = {"key": key, "seconds": seconds, "files": self.files(outputs), "outputs": self._relative(outputs)}
        stamp |= {"attempts": attempts, **about}
        write_json(self.path(name), stamp)
        self._mark(name).unlink(missing_ok=True)
        return stamp

    def forget(self, name: str) -> None:
        """Remove the stamp and the mark of a step, so that it is done from the start."""
        self.path(name).unlink(missing_ok=True)
        self._mark(name).unlink(missing_ok=True)

    def files(self, outputs: Iterable[Path]) -> dict[str, int]:
        """Return the size of every file that belongs to the outputs."""
        files = [
            file
            for output in outputs
            for file in (sorted(output.rglob("*")) if output.is_dir() else [output])
            if file.is_file()
        ]
        return {str(file.relative_to(self.root)): file.stat().st_size for file in files}

    def _mark(self, name: str) -> Path:
        return self.folder / f"{name}.begun"

    def _relative(self, outputs: Mapping[Path, str]) -> dict[str, str]:
        return {str(output.relative_to(self.root)): key for output, key in outputs.items()}

    def _whole(self, stamp: Mapping[str, Any], output: Path) -> bool:
        """Return whether every file of an output is there as it was when its step was done."""
        then = {file: size for file, size in stamp["files"].items() if (self.root / file).is_relative_to(output)}
        return then == self.files([output])


class Pipeline:
    """Named steps under one directory, of which those whose files are there and up to date are skipped.

    A step is up to date if its settings and those of the steps before it are the same as when it was done, and every
    file that it wrote is there in the same size.

    Args:
        root: directory of all outputs; it is made if it is not there.
    """

    def __init__(self, root: Path) -> None:
        self.seconds: dict[str, float] = {}
        self._keys: dict[str, str] = {}
        self._stamps = Stamps(root)

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
        """Do a step, unless it is done.

        Args:
            name: of the step; its time is in `seconds` under it, also when the step was done by an earlier call.
            action: makes the outputs.
            doing: what the step does, for the terminal.
            outputs: files and directories that the step makes; old ones are removed before.
            settings: what decides the outputs, JSON-ready.
            after: names of steps whose outputs this one reads.
        Returns:
            Whether there was anything to do.
        Raises:
            ValueError: the action ended without one of its outputs.
        """
        key = self._keys[name] = digest([settings, [self._keys[before] for before in after]])
        if stamp := self._stamps.stamp_of(name, key, outputs):
            self.seconds[name] = stamp["seconds"]
            print(f"== {name}: there already ({stamp['seconds']:.0f} s when it was made)", flush=True)
            return False
        print(f"== {name}: {doing}", flush=True)
        keyed = dict.fromkeys(outputs, key)
        self._stamps.begin(name, keyed)
        start = time.perf_counter()
        action()
        self.seconds[name] = round(time.perf_counter() - start, 1)
        self._stamps.end(name, key, keyed, seconds=self.seconds[name])
        print(f"== {name}: done in {self.seconds[name]:.0f} s", flush=True)
        return True


def digest(settings: Any) -> str:
    """Return the SHA-256 of settings, which are JSON-ready."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def call(
    command: Sequence[str],
    *,
    log: Path | None = None,
    append: bool = False,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a program, show its output as it comes, and keep that in a log.

    Raises:
        SystemExit: the program failed; the message names it, its exit code and the log.
    """
    print("$ " + " ".join(command), flush=True)
    with contextlib.ExitStack() as stack:
        kept = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            kept = stack.enter_context(log.open("ab" if append else "wb", buffering=0))
        process = stack.enter_context(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
            )
        )
        try:
            while piece := os.read(process.stdout.fileno(), 1 << 16):
                sys.stdout.buffer.write(piece)
                sys.stdout.flush()
                if kept is not None:
                    kept.write(piece)
            code = process.wait()
        except BaseException:
            process.terminate()  # an end of this process is meant for the program, too
            raise
    if code:
        where = f"; its output is in {log}" if log is not None else ""
        raise SystemExit(f"{Path(command[0]).name} ended with code {code}{where}")


def launch(launch_file: Path, words: Sequence[Any], *, log: Path, **options: Any) -> None:
    """Run a script and its options on every rank of a launch file, by stock accelerate; any free port will do.

    Args:
        launch_file: that accelerate reads.
        words: the script, or `-m` and a module, and options.
        log, options: as for `call`.
    Raises:
        SystemExit: as `call`.
    """
    accelerate = Path(sys.executable).with_name("accelerate")
    command = [accelerate, "launch", "--config", launch_file, "--main_process_port", 0, *words]
    call([str(word) for word in command], log=log, **options)


def read_if_there(path: Path) -> dict[str, Any] | None:
    """Return the contents of a JSON file; None where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
