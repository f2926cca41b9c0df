"""Kinds of files and directories, recognized by their first line or the files in them: one that is given in the place
of another is named before anything is read. Each option declares the kind it takes (cli/common.py, `command`).
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


# In the order in which they are looked for.
_FOLDERS = {
    "run": ("run.json",),
    "report": ("report.html",),
    "canaries": ("canaries.json",),
    "export": ("export.json",),
    "documents": ("state.json", "dataset_dict.json"),
    "model": ("config.json", "adapter_config.json"),
    "tokenizer": ("tokenizer.json", "tokenizer_config.json"),
}
_LINES = {
    "result": {"sample_id", "divergence_point"},
    "sample": {"sample_id", "prefix", "suffix"},
    "document": {"text"},
    "tokenized document": {"input_ids"},
}
_FILES = {
    "record": {"identity", "settings", "versions"},
    "about": {"sha256", "left_out", "not_round_trip"},
    "canaries file": {"candidates_sha256"},
    "overlaps": {"by_buckets", "drop"},
    "summary": {"all", "buckets"},
    "checks": {"checks", "exit_code"},
    "ranks": {"by_insertions", "highest_exposure"},
}
_KIND_OF_LINE = {"result": "results", "sample": "samples", "document": "documents", "tokenized document": "documents"}
_WHAT = {
    "run": "the output of an `extract` run",
    "report": "a report",
    "canaries": "a directory of `canaries make`",
    "export": "the output of `export`",
    "documents": "documents",
    "model": "a model",
    "tokenizer": "a tokenizer without a model",
    "results": "results of an `extract` run",
    "samples": "samples",
    "record": "the record of an `extract` run",
    "about": "the file beside samples that says how they were made",
    "canaries file": "a file of `canaries make`",
    "overlaps": "the output of `overlaps`",
    "summary": "the summary of a run",
    "checks": "the output of `verify`",
    "ranks": "the output of `canaries rank`",
    "comparison": "a comparison",
    "tokens": "a file of tokens",
    "bundle": "an audit bundle",
    "key": "the key of audit bundles",
    "ids": "ids of documents, one a line",
}
_INSIDE_A_RUN = ("results", "record", "summary")
_LARGEST = 2**24  # bytes of a JSON file that is read to know it


class Found(NamedTuple):
    """A kind of _WHAT, and the words for where it was seen: `, line 1`, or nothing."""

    kind: str
    where: str = ""


def kind_of(path: str | os.PathLike[str]) -> Found | None:
    """Return what is at a path, or None if nothing is, or nothing of ours."""
    path = Path(path)
    if path.is_dir():
        for kind, names in _FOLDERS.items():
            if any((path / name).is_file() for name in names):
                return Found(kind)
        return None
    if not path.is_file():
        return None
    with open(path, "rb") as file:
        head = file.read(512)
        if head.startswith(b"manifest.json\0") and head[257:262] == b"ustar":
            return Found("bundle")
        file.seek(0)
        number, line = 1, file.readline(_LARGEST)
        while line and not line.strip():
            number, line = number + 1, file.readline(_LARGEST)
    keys = _keys(line)
    for kind, fields in _LINES.items():
        if fields <= keys:
            return Found(_KIND_OF_LINE[kind], f", line {number}")
    if line.lstrip().startswith(b"{") and not keys and path.stat().st_size < _LARGEST:
        keys = _keys(path.read_bytes())
    for kind, fields in _FILES.items():
        if fields <= keys:
            return Found(kind)
    is_key = len(line.strip()) == 64 and not set(line.strip()) - set(b"0123456789abcdef")
    return Found("key") if is_key else None


def check_kind(path: str | os.PathLike[str], expected: str, option: str) -> None:
    """Refuse what is certainly something else.

    Args:
        path: what was given; nothing there, or nothing that is known, is left to the reader.
        expected: a kind of _WHAT.
        option: for which it was given.
    Raises:
        ValueError: it is of another kind. One sentence: what it is, what the option takes, and what to do.
    """
    found = kind_of(path)
    if found is not None and found.kind not in _ACCEPTED.get(expected, (expected,)):
        raise ValueError(
            f"{path}{found.where} looks like {_WHAT[found.kind]}, but {option} takes {_WHAT[expected]}: "
            f"{_remedy(Path(path), found.kind, expected)}."
        )


def check_output(path: str | os.PathLike[str], expected: str, option: str) -> None:
    """Refuse to write over something else.

    Args:
        path: where a command will write.
        expected: the kind of what it writes.
        option: which names the path.
    Raises:
        ValueError: what is there is of another kind, or a file where a directory is written, or the other way round.
    """
    found = kind_of(path)
    if found is not None and found.kind != expected:
        raise ValueError(
            f"{path}{found.where} looks like {_WHAT[found.kind]}, and {option} would write {_WHAT[expected]} there: "
            "name another place."
        )
    if os.path.exists(path) and os.path.isdir(path) != (expected in _FOLDERS):
        there, needed = ("file", "directory") if expected in _FOLDERS else ("directory", "file")
        raise ValueError(
            f"{path} is a {there}, and {option} would write {_WHAT[expected]} there, a {needed}: name another place."
        )


# A directory of texts may hold the files of a model, too.
_ACCEPTED = {"tokenizer": ("tokenizer", "model"), "documents": ("documents", "model", "tokenizer")}
_REMEDIES: Mapping[str, str] = {
    "samples": "name the file that `hf-axonn-eval samples` wrote",
    "documents": "name the file that the samples were made of",
    "run": "name the output directory of `hf-axonn-eval extract`",
    "model": "name the directory of a model, or its name on the Hub",
    "tokenizer": "name the directory of the model, or of its tokenizer",
    "canaries": "name the directory that `hf-axonn-eval canaries make` wrote",
    "bundle": "name the file that `hf-axonn-eval bundle` wrote",
    "key": "name the file that `hf-axonn-eval bundle --key` made",
    "ids": "name the file that `hf-axonn-eval overlaps --drop` wrote",
}


def _remedy(path: Path, found: str, expected: str) -> str:
    if (found, expected) == ("documents", "samples"):
        return (
            f"`hf-axonn-eval samples --documents {path} --tokenizer MODEL --output samples.jsonl` makes samples of it"
        )
    if expected == "run" and found in ("samples", "model"):
        example = {"samples": "MODEL", "model": path}[found], {"samples": path, "model": "samples.jsonl"}[found]
        return f"`hf-axonn-eval extract --model {example[0]} --samples {example[1]} --output runs/NAME` makes a run"
    if (expected == "run" and found in _INSIDE_A_RUN) or (expected == "canaries" and found == "canaries file"):
        return f"name the directory that it is in, {path.parent}"
    if expected == "samples" and found in ("run", *_INSIDE_A_RUN):
        return "name the samples that the run was asked"
    if expected == "samples" and found == "about":
        return f"name the samples, {path.with_name(path.name.removesuffix('.about.json'))}"
    return _REMEDIES[expected]


def _keys(text: bytes) -> set[str]:
    try:
        value = json.loads(text.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError):
        return set()
    return set(value) if isinstance(value, dict) else set()
