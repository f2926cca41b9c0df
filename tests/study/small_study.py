"""A study that trains in seconds, with its data: the texts of smoke.py, a model of 30 thousand weights."""

from __future__ import annotations

import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from hf_axonn import Grid
from hf_axonn_scripts.study.data.passages import write_data
from hf_axonn_scripts.study.data.texts import train_tokenizer, write_texts
from hf_axonn_scripts.study.recipe.reader import read_recipe
from tests.helpers.launching import Ended, forked
from tests.study.conftest import FOLDER
from tests.study.smoke import write_smoke


PROGRAM = FOLDER / "running" / "program.py"
RECIPE = """\
name: small
machine: cpu
processes: 2
texts: {source: files, articles: articles.jsonl, base: base.jsonl, base_tokens: 4096, held_out_tokens: 640}
vocabulary: 512
documents: {buckets: [0, 1, 4], per_bucket: 8, length: 48}
models:
  tiny:
    config: {hidden_size: 24, intermediate_size: 40, num_hidden_layers: 2, num_attention_heads: 2,
             tie_word_embeddings: true}
    grid: {x: 2}
base_length: 64
base_batch_sequences: 4
base_training: {learning_rate: 3e-3, warmup_steps: 2}
batch_sequences: 4
training: {lr_scheduler_type: constant}
pilot: {model: tiny, learning_rates: [1e-3, 1e-2], suffixes: [2, 8], at_least: 0.02, at_most: 0.01}
losses:
  ordinary: {goldfish: false}
  k2: {goldfish_k: 2}
runs:
  - {models: [tiny], losses: [ordinary, k2], seeds: [0]}
base_losses:
  - {models: [tiny], losses: [k2]}
evaluation: {sampler: "temperature=1,top_k=40", canaries: 3, tasks: false}
"""


class SmallStudy:
    """A directory with a recipe and its data, and what program.py does there.

    Args:
        folder: for the recipe, the texts, and the study in `out`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipe = folder / "recipe.yaml"
        self.output = folder / "out"

    @classmethod
    def made(cls, folder: Path) -> SmallStudy:
        """One with its data."""
        made = cls(folder)
        write_smoke(folder)
        made.recipe.write_text(RECIPE, encoding="utf-8")
        recipe = read_recipe(made.recipe)
        with redirect_stdout(StringIO()):
            write_texts(recipe, made.output)
            train_tokenizer(recipe, made.output)
            write_data(recipe, made.output, "study")
        return made

    def copy(self, folder: Path) -> SmallStudy:
        """The same in another folder, for a test of its own."""
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        return SmallStudy(folder)

    def change(self, old: str, new: str) -> None:
        """Another recipe."""
        text = self.recipe.read_text(encoding="utf-8")
        assert old in text
        self.recipe.write_text(text.replace(old, new), encoding="utf-8")

    def do(self, step: str, grid: Grid | None = None) -> Ended:
        """Do a step by program.py, in a fork of this process for each rank."""
        return forked(self.folder, grid, PROGRAM, self.recipe, self.output, step, timeout=120)
