"""The members of a bundle as a verifier reads them: nothing in them is trusted before it was looked at."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hf_axonn_eval.bundle.archive import is_name
from hf_axonn_eval.bundle.numbers import COMPARISON, COVERAGE, summary_file
from hf_axonn_eval.bundle.pack import ABOUT, SAMPLES
from hf_axonn_eval.data.jsonl import is_count, json_lines
from hf_axonn_eval.data.results import SampleResult, read_run


_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


class Entry(NamedTuple):
    """A line of samples.jsonl: keyed hashes of document and tokens, and the part of each run that the sample is of."""

    document: str
    tokens: str
    parts: tuple[Any, ...]


@dataclass
class Bundle:
    """The members of a bundle; what cannot be read is not there, and `unreadable` says why.

    Args:
        about: about.json.
        records: run.json by the name of the run.
        results: results by the name of the run.
        trees: summaries, comparison and coverage by their member of the bundle.
        samples: samples.jsonl by the name of the sample.
        unreadable: sentences on members that are missing or damaged.
    """

    about: dict[str, Any] = field(default_factory=dict)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    results: dict[str, Sequence[SampleResult]] = field(default_factory=dict)
    trees: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, Entry] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, directory: Path) -> Bundle:
        """Read the members that `unpack` wrote into a directory; without about.json, none of the others."""
        bundle = cls()
        bundle.about = bundle._read(directory, ABOUT, _read_about) or {}
        if not bundle.about:
            return bundle
        runs = bundle.about["runs"]
        for name in runs:
            try:
                bundle.records[name], bundle.results[name] = read_run(directory / "runs" / name)
            except (OSError, ValueError) as error:
                bundle.unreadable.append(str(error).replace(f"{directory}{os.sep}", "").partition("; remove")[0])
        for member in [*map(summary_file, runs), COVERAGE, *([COMPARISON] if len(runs) > 1 else [])]:
            tree = bundle._read(directory, member, _read_object)
            if tree is not None:
                bundle.trees[member] = tree
        # of a damaged file, what stands before the damage
        bundle._read(directory, SAMPLES, lambda path: _read_samples(path, runs, into=bundle.samples))
        return bundle

    def _read(self, directory: Path, member: str, read: Callable[[Path], Any]) -> Any:
        try:
            return read(directory / member)
        except _UNREADABLE:
            self.unreadable.append(f"{member} cannot be read")
            return None


def _read_object(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise TypeError
    return content


def _read_about(path: Path) -> dict[str, Any]:
    """Read about.json; raise TypeError where an entry that is used is none."""
    about = _read_object(path)
    runs, options = about["runs"], about["options"]
    texts = [about[name] for name in ("base", "key", "samples_sha256")]
    has_texts = all(isinstance(text, str) for text in texts) and isinstance(about["made_by"], dict)
    has_runs = isinstance(runs, list) and all(isinstance(name, str) and is_name(name) for name in runs)
    counts = [about["samples"], *options["lengths"], *options["tries"]]
    has_options = isinstance(options["confidence"], float) and all(is_count(count, least=1) for count in counts)
    if not (has_texts and has_runs and has_options) or len(set(runs)) < len(runs) or about["base"] not in runs:
        raise TypeError
    for metric in about["metrics"].values():
        float(metric["least"]), float(metric["most"])
    return about


def _read_samples(path: Path, runs: Sequence[str], into: dict[str, Entry]) -> None:
    for line in json_lines(path):
        entry: Any = line.value
        texts = [entry[name] for name in ("sample", "document", "tokens")]
        if not all(isinstance(text, str) for text in texts) or entry["sample"] in into:
            raise TypeError
        into[texts[0]] = Entry(texts[1], texts[2], tuple(entry["parts"].get(name) for name in runs))
