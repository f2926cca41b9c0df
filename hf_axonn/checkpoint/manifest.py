"""The manifest of a checkpoint: what belongs to it, to the last bit. It is written last.

    version, save       of the format; which save this was, a random id
    grid, tied          on what it was written; names that are second names of a tied tensor
    files               bytes and SHA-256 of every other file of the checkpoint, by its name in the directory
    model, optimizer    dtype, shape and sharded dims of every tensor, and its place on pipe if not 0 (partition.py)
    supersedes          other weights that the directory held and that make place for these; may be absent
    checksum            SHA-256 of all of the above

A directory with a manifest that fits its files is a complete checkpoint; anything else is not one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from hf_axonn.checkpoint.coverage import Coverage
from hf_axonn.checkpoint.partition import SavedTensor
from hf_axonn.checkpoint.shard_files import DTYPES, FileRecord, checksum_of
from hf_axonn.topology.grid import Grid


MANIFEST = "axonn_checkpoint.json"
SHARDS = "shard-*.safetensors"
STAGE = ".axonn-saving"  # see save.py
# The names under which Transformers looks for the weights of a model, or for their index. Adapters have others.
WEIGHTS = re.compile(r"(model([-.].+)?\.safetensors|pytorch_model([-.].+)?\.bin)(\.index(\..+)?\.json)?")
VERSION = 2
MOST_BYTES = 2**28  # of a manifest: 4,096 ranks need less than 2**20


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint; see the docstring of this file."""

    save: str
    grid: Grid
    files: Mapping[str, FileRecord]
    tied: list[str] = field(default_factory=list)
    model: Mapping[str, SavedTensor] = field(default_factory=dict)
    optimizer: Mapping[str, SavedTensor] = field(default_factory=dict)
    supersedes: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _ in self.files.values())

    def to_json(self) -> str:
        """The text of the file."""
        body = {
            "version": VERSION,
            "save": self.save,
            "grid": self.grid.as_dict(),
            "tied": list(self.tied),
            "files": {name: list(self.files[name]) for name in sorted(self.files)},
            "model": _tensors_out(self.model),
            "optimizer": _tensors_out(self.optimizer),
            **({"supersedes": list(self.supersedes)} if self.supersedes else {}),
        }
        return json.dumps({**body, "checksum": _checksum(body)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read and check the text of a manifest.

        Raises:
            ValueError: it is no manifest of ours, was changed after it was written, or names a path outside.
        """
        try:
            body = json.loads(text)
            if body["version"] != VERSION:
                raise ValueError(f"version {body['version']!r}, but this program reads version {VERSION}")
            if body.pop("checksum") != _checksum(body):
                raise ValueError("its checksum does not fit it: it was changed or damaged")
            return cls(
                save=str(body["save"]),
                grid=Grid(**body["grid"]),
                files={_safe_name(name): _record(record) for name, record in body["files"].items()},
                tied=[str(name) for name in body["tied"]],
                model=_tensors_in(body["model"]),
                optimizer=_tensors_in(body["optimizer"]),
                supersedes=[_weights_name(name) for name in body.get("supersedes", [])],
            )
        except (KeyError, TypeError, AttributeError, RecursionError) as problem:
            raise ValueError(f"{type(problem).__name__}: {problem}") from None


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _tensors_out(tensors: Mapping[str, SavedTensor]) -> dict[str, list[Any]]:
    return {
        name: [tensor.dtype, list(tensor.shape), list(tensor.sharded_dims), *([tensor.pipe] if tensor.pipe else [])]
        for name, tensor in tensors.items()
    }


def _tensors_in(section: Mapping[str, Any]) -> dict[str, SavedTensor]:
    tensors = {}
    for name, (dtype, shape, sharded_dims, *pipe) in section.items():
        if dtype not in DTYPES:
            raise ValueError(f"{name} has the unknown dtype {dtype!r}")
        tensors[str(name)] = SavedTensor(tuple(shape), dtype, tuple(sharded_dims), *pipe)
    return tensors


def _record(record: Iterable[Any]) -> FileRecord:
    size, checksum = record
    if isinstance(size, bool) or not isinstance(size, int) or not isinstance(checksum, str):
        raise ValueError(f"{record!r} is no size and checksum")
    return size, checksum


def _safe_name(name: str) -> str:
    """Return a relative path without a way out, else raise ValueError."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or not name.isprintable():
        raise ValueError(f"it names {name!r}, which lies outside of the checkpoint")
    return name


def _weights_name(name: str) -> str:
    """Return the name of a file of weights in the directory itself, else raise ValueError: nothing else is removed."""
    if "/" in _safe_name(name) or not WEIGHTS.fullmatch(name):
        raise ValueError(f"it supersedes {name!r}, which is no file of weights")
    return name


def other_weights(directory: Path, manifest: Manifest) -> list[str]:
    """Return files of weights beside the shards of a model, which Transformers may read in their place."""
    if not manifest.model or not directory.is_dir():
        return []
    return sorted({path.name for path in directory.iterdir() if WEIGHTS.fullmatch(path.name)} - set(manifest.files))


def read_manifest(directory: str | Path) -> Manifest:
    """Read the manifest of a checkpoint. The files themselves are not looked at.

    Raises:
        ValueError: there is none, or it is damaged; the message names the directory and the reason.
    """
    path = Path(directory) / MANIFEST
    try:
        if path.is_symlink():
            raise ValueError("it is a symbolic link; copy the checkpoint with its files")
        kind, size = path.stat().st_mode, path.stat().st_size
        if not stat.S_ISREG(kind) or size > MOST_BYTES:  # a pipe or a device may never end
            raise ValueError(f"it is {'a file of ' + str(size) + ' bytes' if stat.S_ISREG(kind) else 'no file'}")
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        if (path.parent / STAGE / MANIFEST).is_file():
            raise ValueError(
                f"{directory} is half replaced: the save that did so was interrupted at its last step. Nothing is "
                "lost: resuming from it, or loading it with hf_axonn, finishes that."
            ) from None
        raise ValueError(
            f"{directory} is not a complete checkpoint: it has no {MANIFEST}, which is written last. If a run was "
            "stopped while it saved, resume from the checkpoint before. If save_pretrained(distributed_checkpoint="
            "True) wrote it, pass it through Transformers' consolidate_distributed_checkpoint first."
        ) from None
    except (OSError, ValueError) as problem:
        raise ValueError(f"{path} cannot be read: {problem}") from problem
    try:
        return Manifest.from_json(text)
    except ValueError as problem:
        raise ValueError(f"{path} is not a manifest of ours: {problem}") from None


def find_problems(
    directory: str | Path, manifest: Manifest, *, share: int = 0, shares: int = 1, contents: bool = True
) -> list[str]:
    """List what is wrong with the files of a checkpoint, one line each; nothing if all is well.

    Args:
        directory: of the checkpoint.
        manifest: its own.
        share, shares: look at every `shares`-th file only, from number `share` on: ranks divide the work.
        contents: whether to compare checksums and the headers of shards, for which everything is read, or names and
            sizes only.
    """
    directory = Path(directory)
    problems = []
    coverage = {"": Coverage(manifest.model, manifest.grid), "optimizer/": Coverage(manifest.optimizer, manifest.grid)}
    for name in sorted(manifest.files)[share::shares]:
        parent, _, file = name.rpartition("/")
        try:
            problem = _problem_of(directory, name, manifest.files[name], contents=contents)
            state = coverage.get(parent and f"{parent}/")
            if not problem and contents and state is not None and fnmatch(file, SHARDS):
                problem = state.problem_of(directory / name)
        except OSError as error:
            problem = f"cannot be read: {error.strerror or error}"
        if problem:
            problems.append(f"{name} {problem}")
    for prefix, state in coverage.items():
        files = {name.removeprefix(prefix) for name in manifest.files if name.startswith(prefix)}
        if missing := state.missing(files, share=share, shares=shares):
            problems.append(f"{prefix}{missing}, because not every rank saved its part")
    if share == 0:
        known = {PurePosixPath(name) for name in manifest.files}
        for folder in (directory, directory / "optimizer"):
            for path in sorted(folder.glob(SHARDS)):
                if PurePosixPath(path.relative_to(directory).as_posix()) not in known:
                    problems.append(f"{path.relative_to(directory)} is of another save: the manifest does not name it")
        problems += [
            f"{name} holds other weights, which Transformers may read in place of the shards: remove it, or the "
            f"shards and {MANIFEST}"
            for name in other_weights(directory, manifest)
        ]
    return problems


def _problem_of(directory: Path, name: str, record: FileRecord, *, contents: bool) -> str | None:
    path = directory / name
    for parent in [path, *path.parents][: len(PurePosixPath(name).parts)]:
        if parent.is_symlink():
            return f"is reached by a symbolic link ({parent.name}), which may point outside: copy the file itself"
    if not os.path.lexists(path):
        return "is missing"
    if not path.is_file():
        return "is not a file"
    size, checksum = record
    found = path.stat().st_size
    if found != size:
        return f"has {found} bytes and not {size}"
    if contents and checksum_of(path)[1] != checksum:
        return "has other content than was written (its checksum differs)"
    return None


def refuse(directory: str | Path, problems: list[str]) -> None:
    """Raise ValueError if there are problems."""
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ValueError(
            f"{directory} is a damaged checkpoint: {problems[0]}{more}. Resume from another one; hf-axonn verify "
            "lists all that is wrong."
        )


def refuse_others(directory: str | Path, names: Iterable[str]) -> None:
    """Raise ValueError if a checkpoint holds tensors, by `names`, that the model does not have."""
    if more := sorted(names):
        raise ValueError(
            f"{directory} holds {len(more)} tensors that the model does not have, among them {', '.join(more[:3])}: "
            "it is a checkpoint of another model."
        )


def check_complete(directory: str | Path, *, contents: bool = True) -> Manifest:
    """Return the manifest of a checkpoint whose files are all there and unchanged. On one process.

    Args:
        directory: of the checkpoint.
        contents: whether checksums are compared; all files are read for that.
    Raises:
        ValueError: it is not a complete checkpoint; the message names the first file that is wrong.
    """
    manifest = read_manifest(directory)
    refuse(directory, find_problems(directory, manifest, contents=contents))
    return manifest


def is_sharded_checkpoint(directory: str | Path) -> bool:
    """Return whether a directory holds weights or adapters that `save_sharded` wrote, complete or not."""
    directory = Path(directory)
    places = (directory, directory / STAGE)
    return any((place / MANIFEST).is_file() for place in places) or any(directory.glob(SHARDS))
