"""The file of a bundle: a plain tar of a manifest and its members. The same members make the same bytes.

manifest.json names every other member with its size and sha256. What is read was written by others: only plain files
with plain names are taken out, and what does not fit is told, not repaired.
"""

import hashlib
import io
import json
import os
import re
import tarfile
from pathlib import Path
from typing import Any

from hf_axonn_eval.data.jsonl import json_text, replacing


FORMAT = "hf-axonn-eval bundle 1"
MANIFEST = "manifest.json"
_LARGEST_MANIFEST = 2**24
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}(/[A-Za-z0-9][\w.-]{0,63}){0,2}", re.ASCII)
_BLOCK = 2**20


def is_name(text: str) -> bool:
    """Test if a text can be the name of a run, and so of a folder in a bundle."""
    return "/" not in text and _NAME.fullmatch(text) is not None


def pack(directory: Path, output: str | os.PathLike[str]) -> None:
    """Write the files of a directory into an archive, sorted by name, without times, owners and modes."""
    files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    sizes = {name: files[name].stat().st_size for name in sorted(files)}
    members = {name: {"bytes": size, "sha256": _sha256(files[name])} for name, size in sizes.items()}
    manifest = json_text({"format": FORMAT, "members": members}).encode()
    with replacing(Path(output)) as file, tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        entry = tarfile.TarInfo(MANIFEST)
        entry.size = len(manifest)
        archive.addfile(entry, io.BytesIO(manifest))
        for name, size in sizes.items():
            entry = tarfile.TarInfo(name)
            entry.size = size
            with open(files[name], "rb") as content:
                archive.addfile(entry, content)


def unpack(bundle: str | os.PathLike[str], directory: Path) -> tuple[dict[str, Any], list[str]]:
    """Take the members of an archive out into an empty directory.

    Returns:
        The members as the manifest has them, and in words what does not fit it: members that are missing, too many,
        twice there, no plain files, or of another size or sha256.
    Raises:
        ValueError: it is not an archive, or there is no manifest that can be read.
    """
    if not Path(bundle).is_file():
        raise ValueError(f"{bundle} is not a file.")
    wrong: list[str] = []
    found: set[str] = set()
    try:
        with tarfile.open(bundle, mode="r:") as archive:
            for entry in archive:
                plain = entry.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not entry.issparse()
                content = archive.extractfile(entry) if plain else None
                if content is None or not _NAME.fullmatch(entry.name):
                    wrong.append(f"{entry.name!r} is not a plain file with a plain name")
                elif entry.name in found:
                    wrong.append(f"{entry.name} is there twice")
                else:
                    found.add(entry.name)
                    path = directory / entry.name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with open(path, "xb") as file:
                        while block := content.read(_BLOCK):
                            file.write(block)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ValueError(f"{bundle} is not a bundle: {error}.") from None
    members = _manifest(bundle, directory / MANIFEST)
    for name in sorted(members.keys() | (found - {MANIFEST})):
        if name not in found:
            wrong.append(f"{name} is missing")
        elif name not in members:
            wrong.append(f"{name} is not in the manifest")
        else:
            size, sha256 = (directory / name).stat().st_size, _sha256(directory / name)
            if (size, sha256) != (members[name].get("bytes"), members[name].get("sha256")):
                wrong.append(f"{name} has other bytes than the manifest says")
    return members, wrong


def _manifest(bundle: str | os.PathLike[str], file: Path) -> dict[str, Any]:
    if not file.is_file() or file.stat().st_size > _LARGEST_MANIFEST:
        raise ValueError(f"{bundle} is not a bundle: it has no {MANIFEST}.")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        version, members = content["format"], content["members"]
        if not isinstance(members, dict) or not all(isinstance(member, dict) for member in members.values()):
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{bundle} is not a bundle: its {MANIFEST} cannot be read.") from None
    if version != FORMAT:
        raise ValueError(f"{bundle} is of format {version!r}, and this version reads {FORMAT!r}.")
    return members


def _sha256(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
