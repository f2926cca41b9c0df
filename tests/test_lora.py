"""PEFT's LoRA on a grid: every gradient of A and B as on one process, and a refusal by name of what is not LoRA."""

from __future__ import annotations

import functools

import pytest
import torch
from equality import Case, compare, exact, fit, full, rows_of, too_large
from models import tiny_batch, tiny_model, unplanned_model
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from ranks import all_grids, run_ranks
from torch.distributed.tensor import DTensor

from hf_axonn.checkpoint import load_sharded, save_sharded
from hf_axonn.grid import Grid
from hf_axonn.parallelize import parallelize


ONE_OF_EACH = [Grid(y=2, x=2), Grid(z=2, x=2), Grid(data=2, y=2)]
# 6 query heads divide by x = 2 and not by x * y = 4; 3 kv heads do not divide by x = 2 either.
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3}


def adapt(model, **options):
    """`model` with adapters whose B is random, because the zeros of a new one would hide the gradient of A."""
    torch.manual_seed(7)
    options = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | options
    return get_peft_model(model, LoraConfig(init_lora_weights=False, **options))


def adapted_model(kind, sizes=(), **options):
    return adapt(tiny_model(kind, **dict(sizes)), **options)


def adapted_unplanned(**options):
    return adapt(unplanned_model(), **options)


def two_adapters():
    """The second of two adapters is trained, the first is neither used nor trained."""
    model = adapted_model("llama")
    torch.manual_seed(8)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    model.set_adapter("second")
    return model


def case(name, make, *args, **options):
    return Case(name, functools.partial(make, *args, **options))


# What the heads do differs from grid to grid with these two, so they run on all of them.
ON_EVERY_GRID = [
    case("llama, rsLoRA", adapted_model, "llama", use_rslora=True),
    case("smollm2", adapted_model, "smollm2"),
]
SITUATIONS = [
    case("six heads", adapted_model, "llama", SIX_HEADS),
    case("trained biases", adapted_model, "qwen2", bias="all"),
    case("some layers", adapted_model, "llama", target_modules=["q_proj", "v_proj", "down_proj"]),
    case("the head too", adapted_model, "llama", target_modules=["q_proj", "lm_head"]),
    case("embedding and head saved whole", adapted_model, "llama", modules_to_save=["embed_tokens", "lm_head"]),
    case("norms saved whole", adapted_model, "llama", modules_to_save=["norm", "input_layernorm"]),
    case("a projection saved whole", adapted_model, "llama", target_modules=["q_proj"], modules_to_save=["up_proj"]),
    case("a tied head saved whole", adapted_model, "smollm2", target_modules=["v_proj"], modules_to_save=["lm_head"]),
    case("two adapters", two_adapters),
    case("no block plan", adapted_unplanned),
    case("no block plan, saved whole", adapted_unplanned, target_modules=["q_proj"], modules_to_save=["up_proj"]),
]


def _all(every, situations):
    return compare(every, all_grids(4)) | compare(situations, ONE_OF_EACH[:2])


def test_every_gradient_is_as_on_one_process():
    every, situations = ([(each, each.truth()) for each in cases] for cases in (ON_EVERY_GRID, SITUATIONS))
    for each, truth in every:
        adapters = [name for name in truth.gradients if "lora_" in name]
        assert len(adapters) == len(truth.gradients) == 2 * 2 * 7, each.name  # A and B, 2 layers, 7 projections
        assert all(truth.gradients[name].abs().max() > 1e-6 for name in adapters)
    table = run_ranks(_all, 4, every, situations)[0]
    assert len(table) == 2 * 10 + len(SITUATIONS) * 2
    assert not too_large(table, 1e-10)


REFUSED = [
    (lambda: adapted_model("llama", use_dora=True), "_proj: PEFT's DoRA cannot be sharded"),
    (lambda: adapt(unplanned_model(), use_dora=True), "_proj: PEFT's DoRA cannot be sharded"),
    (lambda: adapted_model("llama", lora_bias=True), "set lora_bias=False"),
    (lambda: adapted_model("llama", target_modules=["embed_tokens"]), "embed_tokens: PEFT's lora.Embedding"),
    (lambda: adapted_model("llama", trainable_token_indices=[5, 6]), "PEFT's trainable_tokens.TrainableTokensLayer"),
    (lambda: get_peft_model(tiny_model("llama"), IA3Config(task_type="CAUSAL_LM")), "PEFT's ia3.Linear"),
    (
        lambda: get_peft_model(tiny_model("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
        "prompt_encoder.default.embedding.weight lies outside of the model",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=range(len(REFUSED)))
def test_other_adapters_are_refused_before_the_model_is_touched(make, message):
    model = make()
    with pytest.raises(ValueError, match=message):
        parallelize(model, Grid(x=2))
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _report_and_switching_off(batch, plain, adapted):
    for grid in ONE_OF_EACH:
        model, report = parallelize(adapted_model("llama"), grid)
        assert sum(entry.style == "adapter" for entry in report.entries) == 2 * 2 * 7
        assert not [line for line in report.lines() if line.startswith("not sharded") and "lora" in line]
        model.eval()
        with torch.no_grad(), exact():
            torch.testing.assert_close(model(**batch).logits, adapted, rtol=1e-10, atol=1e-10)
            with model.disable_adapter():
                torch.testing.assert_close(model(**batch).logits, plain, rtol=1e-10, atol=1e-10)
    model, report = parallelize(adapted_unplanned(), Grid(y=2, x=2))
    assert sum(entry.style == "adapter" for entry in report.entries) == 2 * 2 * 7
    assert sum(entry.style == "full" for entry in report.entries) == 2 * 7


def test_the_report_names_adapters_and_they_can_be_switched_off():
    batch = {"input_ids": tiny_batch(2, 7)["input_ids"]}
    model = adapted_model("llama").eval()
    with torch.no_grad(), exact():
        adapted = model(**batch).logits
        with model.disable_adapter():
            plain = model(**batch).logits
    assert (adapted - plain).abs().max() > 1e-3
    run_ranks(_report_and_switching_off, 4, batch, plain, adapted)


SAVED = {
    "llama": functools.partial(adapted_model, "llama", modules_to_save=["norm", "lm_head"]),
    "bitnet": functools.partial(
        adapted_unplanned, target_modules=["q_proj", "down_proj"], modules_to_save=["up_proj"]
    ),
}


def _save_and_load(folder):
    for name, make in SAVED.items():
        saved, _ = parallelize(make().train(), Grid(z=2, x=2))
        with exact():
            fit(saved, [rows_of(tiny_batch(4, 7), Grid(z=2, x=2), saved.get_base_model().axonn.mesh.rank)])
        save_sharded(saved, folder / name)
        loaded, _ = parallelize(make(), Grid(y=2, x=2))
        load_sharded(loaded, folder / name)
        for (key, value), other in zip(loaded.named_parameters(), saved.parameters(), strict=True):
            assert torch.equal(full(value), full(other)), key


def test_adapters_saved_on_a_grid_load_on_another_and_in_plain_peft(tmp_path):
    run_ranks(_save_and_load, 4, tmp_path)
    for name, make in SAVED.items():
        base = tiny_model("llama") if name == "llama" else unplanned_model()
        loaded = PeftModel.from_pretrained(base, tmp_path / name, is_trainable=True)
        expected = make().train()
        with exact():
            fit(expected, [tiny_batch(4, 7)])
        before = dict(make().named_parameters())
        truth = dict(expected.named_parameters())
        assert any((truth[key] - value).abs().max() > 1e-3 for key, value in before.items())
        for key, value in loaded.named_parameters():
            torch.testing.assert_close(value, truth[key], rtol=1e-9, atol=1e-10)


def half_model():
    """Weights in bfloat16, adapters in float32, as PEFT makes them."""
    model = adapt(tiny_model("llama").to(torch.bfloat16))
    assert {its.dtype for name, its in model.named_parameters() if "lora_" in name} == {torch.float32}
    return model


def squared_distance(gradients, truth) -> float:
    """|difference|^2 / |truth|^2 over all gradients together."""
    difference = sum((gradients[name].double() - value).square().sum() for name, value in truth.items())
    return float(difference / sum(value.square().sum() for value in truth.values()))


def _rounding(batches, truths):
    errors = {}
    for grid in ONE_OF_EACH:
        errors[str(grid)] = 0.0
        for batch, truth in zip(batches, truths, strict=True):
            model, _ = parallelize(half_model().train(), grid)
            mine = rows_of(batch, grid, model.get_base_model().axonn.mesh.rank)
            gradients = fit(model, [mine]).gradients
            assert {grad.dtype for grad in gradients.values()} == {torch.float32}
            errors[str(grid)] += squared_distance(gradients, truth)
    return errors


def test_float32_adapters_on_a_bfloat16_model():
    """As far from the float64 truth as one process is.

    In so small a model the distance of one batch scatters by a factor of 3 either way, so four are taken together.
    Sums over y and x add a rounding each: measured up to 2 times the distance of one process, allowed 3 times.
    """
    batches = [tiny_batch(8, 7, seed=seed) for seed in (3, 11, 12, 14)]
    truths, alone = [], 0.0
    for batch in batches:
        wide = half_model().double().train()  # the same numbers
        with exact():
            truths.append(fit(wide, [batch]).gradients)
        alone += squared_distance(fit(half_model().train(), [batch]).gradients, truths[-1])
    assert 1e-6 < alone < 0.04
    assert max(run_ranks(_rounding, 4, batches, truths)[0].values()) <= 3**2 * alone
