"""Architectures of Transformers, tiny, on grids: loss and all gradients equal one process; and the survey of them."""

from __future__ import annotations

import inspect
import time

import pytest
import torch

from hf_axonn.architectures.plan import plan_for
from hf_axonn.engine.documents import separate_documents, why_documents_mix
from tests.benchmarks.architectures import survey as architectures
from tests.benchmarks.architectures.survey import (
    BOUND,
    MODEL_TYPES,
    divides_both,
    in_float64,
    prepare,
    survey,
    survey_grid,
)
from tests.benchmarks.architectures.survey_table import Row, divided_rows, markdown, summary, update_page
from tests.benchmarks.architectures.tiny_configs import HIDDEN, UNTRAINABLE, tiny_model
from tests.helpers import ROOT


# One type of each kind of structure; of gpt2 and mixtral other tests have the same numbers.
KINDS = {
    "deepseek_v3": "latent attention, shared and routed experts",
    "deepseek_v4": "copies of the residual stream, compressed attention, groups of heads, experts chosen by token",
    "gemma3n_text": "several streams, per-layer embeddings, weights that are clamped in place, shared keys and values",
    "jetmoe": "experts with methods of their own",
    "llama": "attention and MLP by blocks",
    "longcat_flash": "a router that reads the weight of a Linear",
    "mamba": "a mixer of channels, whose code reads the weights of its convolution and Linears",
    "qwen3_next": "linear attention by heads beside gated attention",
}
OTHERS = {
    "bart": "scaled embeddings, learned positions",
    "gpt_neox_japanese": "a bias that the layer adds after its attention",
    "hy_v4": "copies of the residual stream, indexed attention with a gate",
    "qwen4_exp_text": "copies of the residual stream as one wide token, an indexer beside plain attention",
    "gpt2": "Conv1D with packed q, k and v",
    "mixtral": "routed experts",
    "xlnet": "weights that are no Linear",
}


def problems(rows: list[Row]) -> list[str]:
    return [row.line(BOUND) for row in rows if row.verdict(BOUND) in ("wrong", "not possible")]


@pytest.mark.parametrize("kinds", [KINDS, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["few", "others"])
def test_one_of_each_kind(kinds):
    specimens = [prepare(model_type) for model_type in kinds]
    assert not problems([item for item in specimens if isinstance(item, Row)])
    for grid in ("x2y2", "z2"):
        survey_grid(specimens, grid)
    rows = [specimen.row for specimen in specimens]
    assert not problems(rows)
    assert all(set(row.errors) == {"x2y2", "z2"} and row.sharded > 0 for row in rows)
    assert all(row.planned for row in rows if row.model_type == "llama")


@pytest.mark.slow
def test_attention_to_states_of_an_encoder_is_divided_by_heads(monkeypatch):
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(4, 5, HIDDEN, generator=generator, dtype=torch.float64)
    batch = architectures.tiny_batch
    monkeypatch.setattr(architectures, "tiny_batch", lambda model: batch(model) | {"encoder_hidden_states": states})
    specimens = [prepare(model_type) for model_type in ("bart", "marian", "mvp")]
    assert all(name in specimens[0].gradients for name in ("model.decoder.layers.0.encoder_attn.k_proj.weight",))
    for grid in ("x2y2", "x2z2"):
        survey_grid(specimens, grid)
    rows = [specimen.row for specimen in specimens]
    assert not problems(rows) and not any(row.whole for row in rows)


def mixes_documents(model) -> bool:
    """Whether tokens of a document change logits of the next one in its row, as `separate_documents` passes them."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 120, (1, 16), generator=generator)
    other = torch.cat([(ids[:, :7] + 5) % 110 + 3, ids[:, 7:]], dim=1)
    positions = torch.tensor([[*range(7), *range(9)]])
    takes = inspect.signature(model.forward).parameters
    logits = []
    for tokens in (ids, other):
        batch = separate_documents(model, {"input_ids": tokens, "position_ids": positions})
        with in_float64(), torch.no_grad():
            given = {name: value for name, value in batch.items() if name in takes or name != "position_ids"}
            logits.append(model(**given).logits[:, 7:])
    before, after = logits
    return bool((before - after).abs().max() > 1e-12)


def unforeseen(types) -> list[str]:
    """The model types of which `why_documents_mix` says something else than what they do."""
    wrong = []
    for model_type in types:
        try:
            model = tiny_model(model_type).eval()
            mixed = mixes_documents(model)
        except (ImportError, RuntimeError, ValueError):  # no text alone, or not installed
            continue
        if mixed != bool(why_documents_mix(model)):
            wrong.append(model_type)
    return wrong


def test_which_models_mix_packed_documents():
    """One that separates them, the same with other masks, one whose masks read no positions, and other states."""
    assert unforeseen(["llama", "mistral", "gemma3_text", "granitemoe", "gpt_oss", "opt", "bloom", "mamba"]) == []


@pytest.mark.slow
def test_of_all_models_it_is_known_whether_they_mix_packed_documents():
    """But for BLT, whose patches of bytes reach across documents."""
    assert unforeseen([name for name in MODEL_TYPES if name not in UNTRAINABLE]) == ["blt"]


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
    assert summary(rows, BOUND) == (
        "4 model types: 3 wrong, 1 planned (1 with nothing on full sequences), 0 planned in part, 0 Linear by Linear, "
        "0 not possible"
    )
    table = markdown(rows, ["x2"], BOUND, 60)
    assert all(f"| {row.model_type} | {row.class_name} | {row.verdict(BOUND)} |" in table for row in rows)


@pytest.mark.slow
def test_all_of_them_on_all_axes():
    rows = [row for some in survey(list(MODEL_TYPES), ["x2y2z2"]) for row in some]
    assert [row.model_type for row in rows] == list(MODEL_TYPES)
    impossible = {row.model_type for row in rows if row.impossible}
    assert impossible <= {*UNTRAINABLE, "gemma3n"}, problems(rows)  # gemma3n needs timm
    assert not [row for row in rows if row.verdict(BOUND) == "wrong"], problems(rows)


def test_a_type_whose_rows_cannot_be_divided_is_refused_and_not_wrong():
    specimens = [prepare(model_type) for model_type in ("bart", "hy_v4", "rwkv", "openai-gpt")]
    survey_grid(specimens, "z2c2")  # starts no ranks, as nothing is left
    rows = [specimen.row for specimen in specimens]
    assert {row.verdict(BOUND) for row in rows} == {"refused"}
    assert summary(rows, BOUND).endswith("0 not possible, 4 refused")
    text = divided_rows(rows, ["z2c2"], BOUND)
    assert "layers are known | 1 | rwkv |" in text and "| its forward takes no position_ids" in text
    assert "transformers.masking_utils | 1 | openai-gpt |" in text
    assert "its attention makes latents and may be given the keys that another layer has chosen" in text


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["z2c2", "z2c2keys"])
def test_rows_of_all_of_them_are_divided_or_refused(grid):
    rows = [row for some in survey(list(MODEL_TYPES), [grid]) for row in some]
    assert not [row for row in rows if row.verdict(BOUND) == "wrong"], problems(rows)
    page = (ROOT / "docs/architectures.md").read_text(encoding="utf-8")
    assert divided_rows(rows, ["z2c2"], BOUND) in page, "the page is of another survey"


def test_a_plan_of_one_kind_of_block_is_planned_in_part_and_lines_of_the_page_can_be_replaced(tmp_path):
    rows = [Row("a", "A", planned=True, how="4 blocks"), Row("b", "B", how="no block plan for b")]
    page = tmp_path / "page.md"
    page.write_text(markdown(rows, ["x2"], BOUND, 60) + "\n## Divided rows\n\nas they were\n")
    specimens = [prepare(model_type) for model_type in ("qwen3_next", "codegen", "mixtral")]
    both = [divides_both(specimen.model, plan_for(specimen.model)) for specimen in specimens]
    assert both == [True, False, True]
    row = Row("b", "B", planned=True, part=True, whole=2, how="2 blocks, 2 modules on full sequences")
    update_page(page, [row], BOUND)
    text = page.read_text()
    assert "| b | B | planned in part | 0 | 0 | 0e+00 |  | 2 blocks, 2 modules on full sequences |" in text
    assert "2 model types: 0 wrong, 1 planned (1 with nothing on full sequences), 1 planned in part, 0 L" in text
    assert "| a | A | planned |" in text and text.endswith("\n## Divided rows\n\nas they were\n")
