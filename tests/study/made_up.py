"""Texts of made-up words, a small study of them, and its files."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_axonn_scripts.study.recipe.definition import Documents, Model, Recipe, Run, Texts


NAMES = ("articles", "base", "held_out")
SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]


def prose(seed: int, characters: int) -> str:
    """Paragraphs of sentences of made-up words; two seeds share no run of words."""
    draw = random.Random(seed)
    paragraphs = []
    while sum(map(len, paragraphs)) < characters:
        words = ["".join(draw.choices(SYLLABLES, k=draw.randint(1, 3))) for _ in range(draw.randint(30, 60))]
        sentences = [" ".join(words[start : start + 9]).capitalize() + "." for start in range(0, len(words), 9)]
        paragraphs.append(" ".join(sentences))
    return "\n\n".join(paragraphs)


def recipe_of(**changes):
    """A study of 8 passages in each of 3 buckets, 24 tokens long."""
    settings = {
        "name": "small",
        "path": Path("small.yaml"),
        "machine": "cpu",
        "texts": Texts(base_tokens=6000, held_out_tokens=500),
        "documents": Documents(buckets=(0, 1, 4), per_bucket=8, length=24, suffix=8),
        "vocabulary": 400,
        "models": (Model(name="tiny", config={"hidden_size": 16}, processes=1),),
        "batch_sequences": 4,
        "base_batch_sequences": 4,
        "base_length": 32,
        "losses": {"ordinary": {}},
        "runs": tuple(Run(model="tiny", loss="ordinary", seed=seed) for seed in (0, 1, 2)),
        **changes,
    }
    return Recipe(**settings)


def lines(path: Path) -> list[dict]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read(output: Path, name: str) -> list[dict]:
    """One of the texts of a study."""
    return lines(output / "texts" / f"{name}.jsonl")


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Writes a JSONL file, and the folders that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
