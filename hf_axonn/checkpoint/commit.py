"""Files become a checkpoint: written in a place of their own, then moved into theirs so that nothing is ever lost.

    NAME does not exist     the files are written in .NAME.axonn-saving beside it, which is renamed to NAME at the end
    NAME exists             they are written in NAME/.axonn-saving; when all of them and their manifest are on disk,
                            the files of the earlier checkpoint, and other weights that the manifest supersedes, are
                            removed and the new ones moved in

A stage without a manifest is what a crash left of a save: it is worth nothing. A stage with a manifest is a complete
checkpoint that was about to get its place: `recover` finishes that, as often as it takes, because each move can be
repeated. So at every moment the old checkpoint, or the new one, is complete. One process only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path, PurePosixPath

from hf_axonn.checkpoint.manifest import MANIFEST, SHARDS, STAGE, Manifest, read_manifest


OPTIMIZER = "optimizer"


def stages_of(directory: Path) -> tuple[Path, Path]:
    """Return the two places where a save to a directory may be staged: inside of it, and beside it."""
    directory = Path(os.path.abspath(directory))
    return directory / STAGE, directory.parent / f".{directory.name}{STAGE}"


def new_stage(directory: Path) -> Path:
    """Make an empty stage for a save to a directory; what an interrupted save left is finished or removed first.

    Raises:
        OSError: it cannot be made.
    """
    recover(directory)
    inside, beside = stages_of(directory)
    for left in (inside, beside):
        if os.path.lexists(left):
            shutil.rmtree(left)
    stage = inside if directory.is_dir() else beside
    stage.mkdir(parents=True)
    return stage


def write_manifest(stage: Path, manifest: Manifest) -> None:
    """Write the last file of a stage. Everything else must be on disk; afterwards the stage is a checkpoint."""
    partial = stage / (MANIFEST + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    for folder in {(stage / name).parent for name in manifest.files} | {stage}:
        sync_directory(folder)
    os.replace(partial, stage / MANIFEST)
    sync_directory(stage)


def commit(stage: Path, directory: Path) -> None:
    """Give a complete stage its place. May be called again if it was interrupted.

    Raises:
        OSError: a file cannot be moved.
        ValueError: the stage is not complete, or a symbolic link leads out of it or of the directory.
    """
    if not os.path.lexists(directory):
        os.rename(stage, directory)
        sync_directory(directory.parent)
        return
    new = read_manifest(stage)
    _remove(directory, (_names_of_earlier(directory) | set(new.supersedes)) - set(new.files))
    for name in sorted(new.files):
        source, target = _inner(stage, name), _inner(directory, name)
        if os.path.lexists(source):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(source, target)
    for folder in {(directory / name).parent for name in new.files}:
        sync_directory(folder)
    os.replace(stage / MANIFEST, directory / MANIFEST)
    sync_directory(directory)
    shutil.rmtree(stage, ignore_errors=True)


def remove_sharded(directory: Path) -> None:
    """Remove the sharded checkpoint that a directory may hold, with all files of its save, before one process writes
    an ordinary model there: readers refuse one beside the other.

    Raises:
        OSError: a file cannot be removed.
        ValueError: a symbolic link leads out of the directory.
    """
    if (directory / MANIFEST).is_file():
        _remove(directory, _names_of_earlier(directory))


def recover(directory: Path) -> bool:
    """Finish a commit that was interrupted; returns whether there was one.

    Raises:
        OSError, ValueError: it cannot be finished.
    """
    for stage in stages_of(directory):
        if not stage.is_symlink() and (stage / MANIFEST).is_file():
            commit(stage, directory)
            return True
    return False


def _names_of_earlier(directory: Path) -> set[str]:
    """Return the files of the checkpoint that a directory holds, or of what is left of it."""
    names = {path.relative_to(directory).as_posix() for path in directory.glob(SHARDS)}
    names |= {path.relative_to(directory).as_posix() for path in directory.glob(f"{OPTIMIZER}/{SHARDS}")}
    with contextlib.suppress(ValueError):
        names |= set(read_manifest(directory).files)
    return names


def _remove(directory: Path, names: set[str]) -> None:
    for name in sorted(names):
        _inner(directory, name).unlink(missing_ok=True)
    (directory / MANIFEST).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # may be empty now
        (directory / OPTIMIZER).rmdir()
    sync_directory(directory)


def _inner(directory: Path, name: str) -> Path:
    """Return a path below a directory, which no symbolic link on the way may lead elsewhere."""
    path = directory
    for part in PurePosixPath(name).parts[:-1]:
        path /= part
        if path.is_symlink():
            raise ValueError(f"{path} is a symbolic link: what is saved there would lie outside of {directory}.")
    return directory / name


def sync_directory(directory: Path) -> None:
    """Let the names in a directory survive a loss of power, where its file system can do that."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as problem:
        if problem.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
