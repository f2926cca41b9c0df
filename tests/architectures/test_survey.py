"""Architectures of Transformers, tiny, on grids: loss and all gradients equal one process; and the survey of them."""

from __future__ import annotations

import time

import pytest

from tests.benchmarks.architectures import survey as architectures
from tests.benchmarks.architectures.survey import BOUND, MODEL_TYPES, prepare, survey, survey_grid
from tests.benchmarks.architectures.survey_table import Row, markdown, summary
from tests.benchmarks.architectures.tiny_configs import UNTRAINABLE


# One type of each kind of structure.
KINDS = {
    "bart": "scaled embeddings, learned positions",
    "deepseek_v3": "latent attention, shared and routed experts",
    "gemma3n_text": "several streams, per-layer embeddings, weights that are clamped in place, shared keys and values",
    "gpt2": "Conv1D with packed q, k and v",
    "jetmoe": "experts with methods of their own",
    "llama": "attention and MLP by blocks",
    "longcat_flash": "a router that reads the weight of a Linear",
    "mamba": "a mixer that reads the weights of its convolution and Linears",
    "mixtral": "routed experts",
    "qwen3_next": "linear attention beside gated attention",
    "xlnet": "weights that are no Linear",
}


def problems(rows: list[Row]) -> list[str]:
    return [row.line(BOUND) for row in rows if row.verdict(BOUND) in ("wrong", "not possible")]


def test_one_of_each_kind():
    specimens = [prepare(model_type) for model_type in KINDS]
    assert not problems([item for item in specimens if isinstance(item, Row)])
    for grid in ("x2y2", "z2"):
        survey_grid(specimens, grid)
    rows = [specimen.row for specimen in specimens]
    assert not problems(rows)
    assert all(set(row.errors) == {"x2y2", "z2"} and row.sharded > 0 for row in rows)
    assert next(row for row in rows if row.model_type == "llama").planned


@pytest.mark.slow
def test_the_survey_sees_what_is_wrong_and_goes_on(monkeypatch):
    broken, unequal, late, right = (prepare(model_type) for model_type in ("llama", "gpt2", "llama", "llama"))
    broken.batch = {"input_ids": broken.batch["labels"]}  # -100 is no token
    name = max(unequal.gradients, key=lambda name: unequal.gradients[name].numel())
    unequal.gradients[name] = unequal.gradients[name] + 1e-6
    late.model.register_forward_pre_hook(lambda *_: time.sleep(3600))
    monkeypatch.setattr(architectures, "SECONDS_A_TYPE", 40)
    survey_grid([broken, unequal, late, right], "x2")
    rows = [specimen.row for specimen in (broken, unequal, late, right)]
    assert [row.verdict(BOUND) for row in rows] == ["wrong", "wrong", "wrong", "planned"]
    assert "outside of the vocabulary" in broken.row.note(BOUND) and name in unequal.row.note(BOUND)
    assert late.row.note(BOUND) == "x2: hangs"
    assert summary(rows, BOUND) == "4 model types: 3 wrong, 1 planned, 0 Linear by Linear, 0 not possible"
    table = markdown(rows, ["x2"], BOUND, 60)
    assert all(f"| {row.model_type} | {row.class_name} | {row.verdict(BOUND)} |" in table for row in rows)


@pytest.mark.slow
def test_all_of_them_on_all_axes():
    rows = [row for some in survey(list(MODEL_TYPES), ["x2y2z2"]) for row in some]
    assert [row.model_type for row in rows] == list(MODEL_TYPES)
    impossible = {row.model_type for row in rows if row.impossible}
    assert impossible <= {*UNTRAINABLE, "gemma3n"}, problems(rows)  # gemma3n needs timm
    assert not [row for row in rows if row.verdict(BOUND) == "wrong"], problems(rows)
