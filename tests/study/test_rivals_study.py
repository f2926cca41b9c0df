"""Rivals of goldfish in a study: a tiny cut of rivals.yaml, from its texts to its page."""

from __future__ import annotations

import json

import pytest
import yaml

from hf_axonn_scripts.study.recipe.reader import read_recipe
from tests.study.conftest import FOLDER
from tests.study.smoke import write_smoke
from tests.study.test_smoke import call


LOSSES = yaml.safe_load((FOLDER / "recipes" / "rivals.yaml").read_text())["losses"]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_rival_is_trained_asked_and_reported(tmp_path):
    """smoke.yaml with the losses of rivals.yaml, one model and one seed."""
    recipe = write_smoke(tmp_path)
    content = yaml.safe_load(recipe.read_text())
    content |= {"losses": LOSSES, "grid": {"data": 2}, "base_losses": [{"models": ["0.05M"], "losses": ["tfidf"]}]}
    content["models"].pop("0.15M")
    content["pilot"]["model"] = "0.05M"
    content["runs"] = [{"models": ["0.05M"], "losses": list(LOSSES), "seeds": [0]}]
    content["evaluation"] = {"canaries": 0, "tasks": False, "curve_points": 2}
    recipe.write_text(yaml.safe_dump(content))
    assert {run.loss for run in read_recipe(recipe).runs} == set(LOSSES)
    call(tmp_path)
    out, trained = tmp_path / "out", {}
    for loss in LOSSES:
        folder = out / "runs" / "0.05M" / f"{loss}-s0"
        (part,) = json.loads((folder / "checkpoint" / "training_record.json").read_text())["parts"]
        trained[loss] = (folder / "extraction" / "results.jsonl").read_text()
        assert part["strategy"] == {"ordinary": "none", "k4": "hash-table", "tfidf": "tf-idf"}.get(loss, loss)
    # So small a model is surer of no n-gram by the margin, and then the penalty is the ordinary loss, to the bit.
    assert trained.pop("ngram") == trained["ordinary"] and len(set(trained.values())) == len(LOSSES) - 1
    content = json.loads((out / "report" / "study.json").read_text())
    found = content["at_same_loss"]
    pairs = [(loss, "ordinary") for loss in LOSSES if loss != "ordinary"]
    pairs += [(loss, "k4") for loss in ("entrodrop", "tfidf", "ngram")]
    assert {(row["loss"], row["reference"]) for row in found["rows"]} == set(pairs)
    same = [row for row in found["rows"] if (row["loss"], row["reference"]) == ("ngram", "ordinary")]
    assert same and all(row[name]["difference"]["mean"] == 0 for row in same for name in found["bounds"])
    assert len(found["curves"]) == 3 * len(LOSSES)
    assert set(content["losses"]) == set(LOSSES) and (out / "report" / "study.html").is_file()
