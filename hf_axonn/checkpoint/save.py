"""One save, from the first file to the manifest, by all ranks together; in the foreground or behind the training.

    save = Save(directory, grid, device)       all ranks: rank 0 makes the stage
    with save.writing(): ...                   files of this rank, into save.stage; an error is kept for later
    save.add("", tensors)                      a sharded state: each rank writes its own shards of it
    save.close()                               all ranks: everything is on disk and has its place, or nothing has

No rank raises before all have heard of it, so a full disk on one machine is the same error everywhere. Ranks tell rank
0 what they wrote through small files in the stage, which on large grids others join for it. So the end of a save in
the background needs no communication, and it is a complete checkpoint as soon as the last rank has written, however
long the next step takes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_axonn.checkpoint.commit import commit, new_stage, write_manifest
from hf_axonn.checkpoint.manifest import MANIFEST, Manifest, find_problems, other_weights
from hf_axonn.checkpoint.partition import Box, SavedTensor
from hf_axonn.checkpoint.shard_files import (
    FileRecord,
    checksum_of,
    describe,
    file_name,
    shards_to_write,
    write_shards,
)
from hf_axonn.compat.messages import get_logger
from hf_axonn.distributed.collectives import broadcast_text, world_rank
from hf_axonn.distributed.consistency import first_problem
from hf_axonn.distributed.mesh import grid_mesh
from hf_axonn.engine.dtensors import local_of
from hf_axonn.engine.stage_tensors import over_stages
from hf_axonn.topology.grid import Grid


logger = get_logger(__name__)

PARTS = ".parts"
JOINED = 64  # reports of so many ranks are joined by the first of them, so that rank 0 opens few files
LONGEST_POLL = 0.5  # seconds between two looks for the parts of other ranks
LAST_WAIT = 600.0  # seconds to wait for other ranks when the training of this process is over


class SaveError(OSError):
    """A checkpoint could not be saved. Raised on every rank; what was saved before stands."""


class Save:
    """One save under way; see the docstring of this file.

    Making one waits for an earlier save in the background, so it may raise `SaveError` for that.

    Args:
        directory: of the checkpoint, which all ranks must see.
        grid: on which the tensors lie.
        device: of this rank, for the collectives.
        background: write while the training goes on; `add` copies tensors then, and `close` returns at once.
    Raises:
        SaveError: the stage cannot be made.
    Collectives: `broadcast_text` over the world.
    """

    def __init__(self, directory: str | Path, grid: Grid, device: torch.device, *, background: bool = False) -> None:
        finish_saves()
        self.directory = Path(os.path.abspath(directory))
        self.grid, self.device, self.background = grid, device, background
        self.rank = world_rank()
        self.problem = ""
        self._late_problem = ""  # of rank 0, when all others had done their part
        self.tied: list[str] = []
        self._states: dict[str, dict[str, SavedTensor]] = {}
        self._shards: dict[str, dict[str, tuple[Tensor, Box]]] = {}
        self._claimed: list[str] = []
        self._thread: threading.Thread | None = None
        self._written, self._joined, self._cancelled = threading.Event(), threading.Event(), threading.Event()
        opening = {"save": uuid.uuid4().hex, "stage": "", "problem": ""}
        if self.rank == 0:
            try:
                opening["stage"] = str(new_stage(self.directory))
            except (OSError, ValueError) as problem:
                opening["problem"] = _words(problem)
        if dist.is_initialized():
            opening = json.loads(broadcast_text(json.dumps(opening), device))
        self.save_id, self.stage = opening["save"], Path(opening["stage"])
        if opening["problem"]:
            raise SaveError(f"{self.directory} was not saved: rank 0: {opening['problem']}")

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Let this rank alone write into the stage, without collectives: `close` raises an error from inside."""
        try:
            yield
        except Exception as problem:
            logger.debug("a part of a save failed", exc_info=problem)
            self.problem = self.problem or _words(problem)

    def add(self, folder: str, tensors: Mapping[str, Tensor]) -> None:
        """Let each rank write its shards of a state, under `folder` ("" is the checkpoint itself).

        All ranks of a stage give the same names. Without `background` the tensors must stay as they are until
        `close`. Collectives: with pipe, `gather_texts` over it.
        """
        self._states[folder] = self._describe_stages({name: describe(tensor) for name, tensor in tensors.items()})
        self._shards[folder] = shards_to_write(tensors, self._states[folder], self.grid, self.rank)
        if self.background:
            with self.writing():
                copies = {
                    name: (local_of(tensor).to("cpu", copy=True), box)
                    for name, (tensor, box) in self._shards[folder].items()
                }
                self._shards[folder] = copies

    def over_stages(self, value: Any) -> list[Any]:
        """Return `value`, which is JSON, of each stage in order. Without pipe no process group is made.

        Collectives: with pipe, `gather_texts` over it.
        """
        return [value] if self.grid.pipe == 1 else over_stages(value, grid_mesh(self.grid, self.device.type))

    def _describe_stages(self, own: dict[str, SavedTensor]) -> dict[str, SavedTensor]:
        """Return what is saved of all stages, by name."""
        states = self.over_stages([_facts(name, tensor) for name, tensor in own.items()])
        return {
            name: SavedTensor(tuple(shape), dtype, tuple(dims), pipe)
            for pipe, state in reversed(list(enumerate(states)))  # of a weight that two have, the first counts
            for name, dtype, shape, dims in state
        }

    def claim(self, name: str) -> None:
        """Let this rank, and not rank 0, take the checksum of a file that it has written itself."""
        self._claimed.append(name)

    def close(self) -> None:
        """Write what was added, and give the checkpoint its place; in the background if requested.

        Raises:
            SaveError: on any rank something could not be written. On every rank alike.
        Collectives: two of `first_problem`, and on more than JOINED ranks a third; none in the background.
        """
        global _pending
        if self.background:
            self._thread = threading.Thread(target=self._work, name="hf_axonn save")
            _pending = self
            self._thread.start()
            return
        self._write_own()
        self._agree(self.problem)
        if self.grid.size > JOINED:
            self._join_reports()
            self._agree(self.problem)
        if self.rank == 0:
            self._complete()
        self._agree(self._late_problem)

    def finish(self) -> None:
        """Wait for a save in the background. Raises and communicates as `close`."""
        assert self._thread is not None
        self._written.wait()
        self._agree(self.problem)
        if self.grid.size > JOINED:
            self._joined.wait()
            self._agree(self.problem)
        self._thread.join()
        self._agree(self._late_problem)

    def _agree(self, problem: str) -> None:
        """Raise on all ranks if one has failed."""
        problem = first_problem(problem, self.device)
        if not problem:
            return
        self._cancelled.set()
        if self._thread is not None:
            self._thread.join()
        if self.rank == 0 and not (self.stage / MANIFEST).is_file():
            shutil.rmtree(self.stage, ignore_errors=True)
        raise SaveError(f"{self.directory} was not saved: {problem}. What was saved before stands.")

    def _work(self) -> None:
        """Write in the background."""
        self._write_own()
        self._written.set()
        if self.grid.size > JOINED and not self.problem:
            self._join_reports()
        self._joined.set()
        if self.rank == 0 and not self.problem:
            self._complete()
        if self.problem or self._late_problem:
            logger.error(f"{self.directory} was not saved: {self.problem or self._late_problem}")

    def _write_own(self) -> None:
        part: dict[str, object] = {"save": self.save_id, "states": self._states_digest()}
        with self.writing():
            if not self.problem:
                part["files"] = self._write_files()
        part["problem"] = self.problem
        with self.writing():
            self._report(self._part(self.rank), part)

    def _report(self, path: Path, content: Any) -> None:
        """Write a report, which is there completely or not at all."""
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".partial").write_text(json.dumps(content))
        os.replace(path.with_suffix(".partial"), path)

    def _join_reports(self) -> None:
        """Check and join, on the first of each JOINED ranks but rank 0, the reports of all of them in one file."""
        if self.rank % JOINED or self.rank == 0:
            return
        with self.writing():
            if self._wait_for(self._neighbours(), ".json"):
                self._report(self._part(self.rank, ".joined"), self._read_reports(self._neighbours()))
                for rank in self._neighbours():
                    self._part(rank).unlink()

    def _neighbours(self) -> range:
        """Return the ranks whose reports this one joins."""
        return range(self.rank, min(self.rank + JOINED, self.grid.size))

    def _read_reports(self, ranks: Iterable[int]) -> list[dict[str, Any]]:
        """Return the reports of these ranks, whose files are there as they say.

        Raises:
            OSError: a rank has failed, or this one does not see what it wrote.
        """
        parts = [json.loads(self._part(rank).read_text()) for rank in ranks]
        for rank, part in zip(ranks, parts, strict=True):
            if part["save"] != self.save_id or part["problem"]:
                raise OSError(f"rank {rank}: {part['problem'] or 'its part is of another save'}")
            for name, (size, _) in part["files"].items():
                found = None
                with contextlib.suppress(FileNotFoundError):
                    found = (self.stage / name).stat().st_size
                if found != size:
                    raise OSError(
                        f"rank {self.rank} does not see {name} as rank {rank} wrote it ({size} bytes, here {found}): "
                        "all ranks must save to a file system that they share"
                    )
        return parts

    def _write_files(self) -> dict[str, FileRecord]:
        files = {}
        for folder, shards in self._shards.items():
            if shards:
                if folder:  # a stage that has vanished is not made anew: parts of other ranks are gone with it
                    (self.stage / folder).mkdir(exist_ok=True)
                path = self.stage / folder / file_name(self.rank)
                files[self._name(path)] = write_shards(path, shards)
        self._shards.clear()
        for name in self._claimed:
            files[name] = _settle(self.stage / name)
        return files

    def _states_digest(self) -> str:
        """Return a digest of names, shapes, dtypes and layouts, equal on ranks whose shards fit together."""
        states = {folder: sorted(tensors.items()) for folder, tensors in self._states.items()}
        return hashlib.sha256(repr(sorted(states.items())).encode()).hexdigest()

    def _name(self, path: Path) -> str:
        return path.relative_to(self.stage).as_posix()

    def _part(self, rank: int, ending: str = ".json") -> Path:
        return self.stage / PARTS / f"{rank:05d}{ending}"

    def _complete(self) -> None:
        """Write, on rank 0, the manifest once all parts are there, and give the checkpoint its name."""
        try:
            if self._parts_arrived():
                files, others = self._files_of_parts()
                shutil.rmtree(self.stage / PARTS)
                for path in sorted(self.stage.rglob("*")):
                    if self._name(path) not in files and path.is_file():
                        files[self._name(path)] = _settle(path)
                model, optimizer = self._states.get("", {}), self._states.get("optimizer", {})
                manifest = Manifest(self.save_id, self.grid, files, self.tied, model, optimizer)
                if others:
                    ranks = f"rank {others[0]}" + (f" and {len(others) - 1} more" if len(others) > 1 else "")
                    found = find_problems(self.stage, manifest) or ["the tensors have other names, shapes or dtypes"]
                    raise ValueError(
                        f"{ranks} did not save the same state as rank 0: {found[0]}. Every rank has to save, with the "
                        "same model and optimizer"
                    )
                manifest.supersedes.extend(other_weights(self.directory, manifest))
                write_manifest(self.stage, manifest)
                commit(self.stage, self.directory)
        except Exception as problem:
            self._late_problem = _words(problem)

    def _parts_arrived(self) -> bool:
        """Wait, on rank 0, until every rank has written its part; False if the save is given up."""
        others = range(JOINED, self.grid.size, JOINED)
        return self._wait_for(self._neighbours(), ".json") and self._wait_for(others, ".joined")

    def _wait_for(self, ranks: Iterable[int], ending: str) -> bool:
        """Wait until these ranks have written a report with this ending; False if the save is given up."""
        awaited = set(ranks)
        pause, end = 0.005, None
        while awaited:
            awaited -= self._list_reports(ending)
            if self._cancelled.is_set() and awaited:
                return False
            if awaited and not self.stage.is_dir():
                raise FileNotFoundError(
                    f"{self.stage} has vanished with what ranks wrote into it: keep other programs from it, and two "
                    "runs from one folder"
                )
            if end is None and not threading.main_thread().is_alive():
                end = time.monotonic() + LAST_WAIT
            if awaited and end is not None and time.monotonic() > end:
                raise TimeoutError(f"rank {min(awaited)} has not written its part in {LAST_WAIT:.0f} s")
            time.sleep(pause if awaited else 0)
            pause = min(2 * pause, LONGEST_POLL)
        return True

    def _list_reports(self, ending: str) -> set[int]:
        """Return the ranks that have written a report with this ending, by one listing of their folder."""
        try:
            return {int(name[:5]) for name in os.listdir(self.stage / PARTS) if name.endswith(ending)}
        except FileNotFoundError:
            return set()

    def _files_of_parts(self) -> tuple[dict[str, FileRecord], list[int]]:
        """Return the files of all ranks, as each reports them, and the ranks that have saved another state."""
        files: dict[str, FileRecord] = {}
        others = []
        states = self._states_digest()
        parts = self._read_reports(self._neighbours())
        for first in range(JOINED, self.grid.size, JOINED):
            parts += json.loads(self._part(first, ".joined").read_text())
        for rank, part in enumerate(parts):
            if part["states"] != states:
                others.append(rank)
            files.update({name: tuple(record) for name, record in part["files"].items()})
        return files, others


def _settle(path: Path) -> FileRecord:
    """Bring a file to disk that someone else's code wrote; its bytes and checksum."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return checksum_of(path)


def _words(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}"


def _facts(name: str, tensor: SavedTensor) -> list[Any]:
    return [name, tensor.dtype, tensor.shape, tensor.sharded_dims]


# The save in the background; at most one in a process.
_pending: Save | None = None


def finish_saves() -> None:
    """Wait until the save that runs in the background, if there is one, is complete. Every rank must call it.

    Raises:
        SaveError: it failed; on every rank.
    Collectives: two of `first_problem`, if there is one.
    """
    global _pending
    pending, _pending = _pending, None
    if pending is not None:
        pending.finish()
