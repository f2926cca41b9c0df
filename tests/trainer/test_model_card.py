"""Model cards of trainers of Transformers and TRL over a grid: the run in words, and in metadata for the Hub."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from peft import LoraConfig

from hf_axonn import Grid
from hf_axonn.trainer.model_card import extend_card
from tests.helpers.chats import make_sft
from tests.helpers.ranks import run_ranks
from tests.helpers.training import make_trainer


def test_metadata_of_others_stay_and_entries_add_up(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("---\nlibrary_name: peft\ntags: trl\nmodel-index: [odd]\nlicense: mit\n---\n# A model\n")
    extend_card(tmp_path, "## One\n", {"steps": 1})
    extend_card(tmp_path, "## Two\n", {"loss": 0.5}, ["goldfish-loss"])
    card = ModelCard.load(path, ignore_metadata_errors=True)
    assert card.data.to_dict()["hf_axonn"] == {"steps": 1, "loss": 0.5} and card.data.library_name == "peft"
    assert card.data.tags == ["trl", "hf_axonn", "goldfish-loss"] and card.data.license == "mit"
    assert "model-index:\n- odd\n" in path.read_text()
    assert card.text.strip() == "# A model\n\n## One\n\n## Two"
    path.write_text("# No metadata\n")
    extend_card(tmp_path, "## One", {})
    assert ModelCard.load(path).data.library_name == "transformers" and "# No metadata" in path.read_text()


def _write_cards(folder: Path, grid: Grid) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    for name, trainer in (
        ("stock", make_trainer(folder / "stock", grid, stock=True, max_steps=2, eval_strategy="no")),
        ("sft", make_sft(folder / "sft", grid, goldfish=False, max_steps=1)),
        ("lora", make_sft(folder / "lora", grid, max_steps=1, peft_config=lora)),
    ):
        trainer.train()
        trainer.save_model()
        trainer.create_model_card(model_name=name)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [Grid(z=2), Grid(x=2)], ids=str)
def test_cards_of_transformers_trl_and_adapters(tmp_path, grid):
    run_ranks(_write_cards, 2, tmp_path, grid)
    for name, library, tags in (
        ("stock", "transformers", {"generated_from_trainer"}),
        ("sft", "transformers", {"trl", "sft"}),
        ("lora", "peft", {"lora", "goldfish-loss"}),
    ):
        card = ModelCard.load(tmp_path / name / "README.md")
        entry = card.data.to_dict()["hf_axonn"]
        assert card.data.library_name == library and {"hf_axonn", *tags} <= set(card.data.tags), name
        assert entry["grid"] == grid.as_dict() and entry["batch"]["samples"] == 8, name
        assert entry["versions"].keys() >= {"hf_axonn", "torch", "transformers", "accelerate"}
        assert ("training_record" in entry) == (name == "lora")
        assert card.text.count("## Training run") == 1 and f"- grid {grid}, 2 process(es)" in card.text
