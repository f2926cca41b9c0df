"""The smoke recipe with its two files: texts of words that do not exist, in sentences and paragraphs."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

from tests.study.conftest import FOLDER


RECIPE = FOLDER / "recipes" / "smoke.yaml"
ARTICLES, DOCUMENTS = 16, 120


def write_smoke(folder: Path) -> Path:
    """Writes the recipe and its files into a folder, and says where the recipe is."""
    rng = random.Random(0)
    sounds = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiou"]
    words = ["".join(rng.choices(sounds, k=rng.randint(1, 4))) for _ in range(600)]
    weights = [1 / (rank + 3) for rank in range(len(words))]

    def text(paragraphs: int) -> str:
        def sentence() -> str:
            return " ".join(rng.choices(words, weights, k=rng.randint(8, 18))).capitalize() + "."

        return "\n\n".join(" ".join(sentence() for _ in range(6)) for _ in range(paragraphs))

    folder.mkdir(parents=True, exist_ok=True)
    for name, count, paragraphs in (("articles", ARTICLES, 6), ("base", DOCUMENTS, 3)):
        rows = [json.dumps({"id": f"{name} {index}", "text": text(paragraphs)}) + "\n" for index in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
    return Path(shutil.copy(RECIPE, folder))
