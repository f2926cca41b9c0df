"""LoRA on a grid, put into the model before it is sharded or after: every gradient of A and B as on one process."""

from __future__ import annotations

import functools

import pytest
import torch
from peft import LoraConfig, PeftModel

from hf_axonn import parallelize
from hf_axonn.checkpoint.sharded import load_sharded, save_sharded
from hf_axonn.engine.gradient_sync import sync_gradients
from hf_axonn.layers.vocabulary import DeferredLogits
from hf_axonn.topology.grid import Grid
from tests.helpers.adapting import ONE_OF_EACH, SIX_HEADS, Adapted, adapt, adapted_model, drawing, two_adapters
from tests.helpers.equality import compare, exact, fit, full, rows_of, too_large
from tests.helpers.float64 import recompute_in_float64, relative_errors
from tests.helpers.models import tiny_batch, tiny_model, unplanned_model
from tests.helpers.ranks import all_grids, run_ranks


def checkpointed(model, *, reentrant):
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    for layer in model.get_base_model().model.layers:
        for child in layer.children():
            recompute_in_float64(child)


def case(name, kind, sizes=(), layers=1, **options):
    sizes = dict(sizes, num_hidden_layers=layers)
    base = unplanned_model if kind == "unlisted" else functools.partial(tiny_model, kind, **sizes)
    steps = 2 if "modules_to_save" in options else 1
    return Adapted(name, base=base, adapter=functools.partial(adapt, **options), steps=steps)


LLAMA = functools.partial(tiny_model, "llama")
# What the heads do differs from grid to grid with these two, so they run on all of them.
ON_EVERY_GRID = [
    case("llama, rsLoRA", "llama", layers=2, use_rslora=True),
    case("smollm2", "smollm2", layers=2),
]
SITUATIONS = [
    case("six heads", "llama", SIX_HEADS),
    case("six heads, DoRA", "llama", SIX_HEADS, use_dora=True),
    case("trained biases", "qwen2", bias="all"),
    case("biases of adapters", "qwen2", lora_bias=True, target_modules=["q_proj", "k_proj", "v_proj"]),
    case("biases and DoRA", "qwen2", use_dora=True),
    # So few are dropped that none is: what is left is the way that is taken.
    case("dropout", "llama", lora_dropout=1e-14),
    case("dropout, DoRA", "qwen2", lora_dropout=1e-14, use_dora=True),
    case("some layers", "llama", target_modules=["q_proj", "v_proj", "down_proj"]),
    case("the head too", "llama", target_modules=["q_proj", "lm_head"]),
    case("the head too, with dropout", "llama", target_modules=["q_proj", "lm_head"], lora_dropout=1e-14),
    case("the head too, no block plan", "unlisted", target_modules=["q_proj", "lm_head"]),
    case("the embedding too", "llama", target_modules=["q_proj", "embed_tokens"]),
    case("embedding and head, tied", "smollm2", target_modules=["q_proj", "embed_tokens", "lm_head"]),
    case("embedding and head, DoRA", "llama", use_dora=True, target_modules=["o_proj", "embed_tokens", "lm_head"]),
    case("embedding and head saved whole", "llama", modules_to_save=["embed_tokens", "lm_head"]),
    case("norms saved whole", "qwen3", modules_to_save=["norm", "input_layernorm", "q_norm"]),
    case("a projection saved whole", "llama", target_modules=["q_proj"], modules_to_save=["up_proj"]),
    case("projections saved whole", "llama", target_modules=["v_proj"], modules_to_save=["o_proj", "k_proj"]),
    case("a tied head saved whole", "smollm2", target_modules=["v_proj"], modules_to_save=["lm_head"]),
    Adapted("checkpointing", base=LLAMA, before=functools.partial(checkpointed, reentrant=False)),
    Adapted("reentrant checkpointing", base=LLAMA, before=functools.partial(checkpointed, reentrant=True)),
    Adapted("two adapters", base=LLAMA, adapter=two_adapters, steps=2),
    case("no block plan", "unlisted"),
    case("no block plan, DoRA", "unlisted", use_dora=True, target_modules=["q_proj", "down_proj"]),
    case("no block plan, saved whole", "unlisted", target_modules=["q_proj"], modules_to_save=["up_proj"]),
]


# Quick over context; the others with heads that 2 divides are slow.
OF_CUT_ROWS = {"six heads, DoRA", "dropout", "the head too", "norms saved whole", "reentrant checkpointing"}


def _of_cut_rows(cases, after):
    for each, _ in cases:
        each.after = after
    return compare(cases, [Grid(z=2, context=2)])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "every"])
def test_adapters_of_rows_that_are_cut(every):
    cases = [case for case in SITUATIONS if case.name in OF_CUT_ROWS or every and "block plan" not in case.name]
    cases = [(case, case.truth()) for case in cases if "tied" not in case.name]  # smollm2 has 9 heads
    assert len(cases) >= len(OF_CUT_ROWS)
    for after in (False, True) if every else (False,):
        for table in run_ranks(_of_cut_rows, 2, cases, after, timeout=500):
            assert not too_large(table, 1e-10)


# Two of the others together, another kind of one of them, or quick over context; they run on all grids with the slow
# test.
MORE = {
    "dropout",
    "norms saved whole",
    "reentrant checkpointing",
    "a tied head saved whole",
    "biases and DoRA",
    "projections saved whole",
    "six heads, DoRA",
    "biases of adapters",
    "some layers",
    "the embedding too",
    "dropout, DoRA",
    "the head too, with dropout",
    "the head too, no block plan",
    "embedding and head, tied",
    "a projection saved whole",
    "checkpointing",  # the reentrant one is quick, over context
    "no block plan, DoRA",
    "no block plan, saved whole",
}


def _before_and_after(before, after):
    """Adapters put in before `parallelize`, and after it; pairs of cases and of the grids that they run on."""
    table = {}
    for cases, grid in before:
        table |= compare(cases, [grid])
    for cases, grid in after:
        for each, _ in cases:
            each.name, each.after = f"{each.name}, after", True
        table |= compare(cases, [grid])
    return table


def _all(every, situations):
    table = compare(every, all_grids(4)) | compare(situations, ONE_OF_EACH[:1])
    for each, _ in every + situations:
        each.name, each.after = f"{each.name}, after", True
    return table | compare(every, ONE_OF_EACH) | compare(situations, ONE_OF_EACH[1:2])


def test_one_of_each_gradient_is_as_on_one_process():
    assert {case.name for case in SITUATIONS} >= MORE
    quick = [case for case in SITUATIONS if case.name not in MORE]
    heads, (six, *others) = ([(each, each.truth()) for each in cases] for cases in (ON_EVERY_GRID, quick))
    first, second, third = ONE_OF_EACH
    on_four = [([*heads, six], first)], [(heads[:1], second), (heads[1:], third)]
    on_two = [(others[::2], Grid(y=2))], [(others[1::2], Grid(x=2))]
    for world, (before, after) in ((4, on_four), (2, on_two)):
        table = run_ranks(_before_and_after, world, before, after)[0]
        assert len(table) == sum(len(cases) for cases, _ in before + after)
        assert not too_large(table, 1e-10)


@pytest.mark.slow
def test_every_gradient_is_as_on_one_process():
    every, situations = ([(each, each.truth()) for each in cases] for cases in (ON_EVERY_GRID, SITUATIONS))
    for each, truth in every:
        adapters = [name for name in truth.gradients if "lora_" in name]
        assert len(adapters) == len(truth.gradients) == 2 * 2 * 7, each.name  # A and B, 2 layers, 7 projections
        assert all(truth.gradients[name].abs().max() > 1e-6 for name in adapters)
    table = run_ranks(_all, 4, every, situations)[0]
    assert len(table) == 2 * (10 + len(ONE_OF_EACH)) + len(SITUATIONS) * 2
    assert not too_large(table, 1e-10)


def _report_and_switching_off(batch, plain, adapted):
    model, report = parallelize(adapted_model("llama"), Grid(z=2, x=2))
    assert sum(entry.kind == "adapter" for entry in report.entries) == 2 * 2 * 7
    assert not [line for line in report.lines() if line.startswith("not sharded") and "lora" in line]
    model.eval()
    with torch.no_grad(), exact():
        torch.testing.assert_close(model(**batch).logits, adapted, rtol=1e-10, atol=1e-10)
        with model.disable_adapter():
            torch.testing.assert_close(model(**batch).logits, plain, rtol=1e-10, atol=1e-10)
    base, seen = unplanned_model(), []
    base.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *call: seen.append(call))
    model, report = parallelize(adapt(base), Grid(y=2, x=2))
    assert sum(entry.kind == "adapter" for entry in report.entries) == 2 * 2 * 7
    assert sum(entry.kind == "linear" for entry in report.entries) == 2 * 7
    with torch.no_grad():
        model(**batch)
    assert len(seen) == 1  # a user's hook on a Linear does not come to its adapter


def test_the_report_names_adapters_and_they_can_be_switched_off():
    batch = {"input_ids": tiny_batch(2, 7)["input_ids"]}
    model = adapted_model("llama").eval()
    with torch.no_grad(), exact():
        adapted = model(**batch).logits
        with model.disable_adapter():
            plain = model(**batch).logits
    assert (adapted - plain).abs().max() > 1e-3
    run_ranks(_report_and_switching_off, 4, batch, plain, adapted)


def _head_of_two_adapters(dropout):
    """A model whose head has two adapters at once."""
    base = tiny_model("llama", num_hidden_layers=1)
    model = adapt(base, target_modules=["q_proj", "lm_head"], lora_dropout=dropout)
    with drawing(8):
        model.add_adapter("second", LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    return model


def _logits_and_gradients(batch, truths):
    for dropout, deferred, grid in ((0.0, True, Grid(y=2, x=2)), (1e-14, False, Grid(z=2, x=2))):
        model, _ = parallelize(_head_of_two_adapters(dropout).train(), grid)
        for of_own, truth in truths.items():
            with exact():
                output = model(**batch)
                assert isinstance(output.logits, DeferredLogits) == deferred
                (output.logits[..., 3].square().sum() if of_own else output.loss).backward()
            sync_gradients(model)
            gradients = {name: its.grad for name, its in model.named_parameters() if its.grad is not None}
            errors = relative_errors(gradients, truth)
            assert max(errors.values()) < 1e-10, (dropout, grid, of_own, errors)
            model.zero_grad()


def test_an_adapted_head_leaves_its_logits_to_the_loss():
    """With several adapters, and also where a caller takes the logits for a loss of their own."""
    batch, truths = tiny_batch(2, 7), {}
    for of_own in (False, True):
        model = _head_of_two_adapters(0.0).train()
        with exact():
            output = model(**batch)
            (output.logits[..., 3].square().sum() if of_own else output.loss).backward()
        truths[of_own] = {name: its.grad for name, its in model.named_parameters() if its.grad is not None}
        assert {"second" in name for name in truths[of_own] if "lm_head.lora" in name} == {False, True}
    run_ranks(_logits_and_gradients, 4, batch, truths)


SAVED = {
    "llama": functools.partial(adapted_model, "llama", modules_to_save=["norm", "lm_head"]),
    "unlisted": lambda: adapt(unplanned_model(), target_modules=["q_proj", "down_proj"], modules_to_save=["up_proj"]),
}


def _save_and_load(folder, name):
    saved, _ = parallelize(SAVED[name]().train(), Grid(z=2, x=2))
    with exact():
        fit(saved, [rows_of(tiny_batch(4, 7), Grid(z=2, x=2), saved.get_base_model().axonn.grid_mesh.rank)])
    save_sharded(saved, folder)
    loaded, _ = parallelize(SAVED[name](), Grid(y=2, x=2))
    load_sharded(loaded, folder)
    for (key, value), other in zip(loaded.named_parameters(), saved.parameters(), strict=True):
        assert torch.equal(full(value), full(other)), key


@pytest.mark.parametrize("name", ["llama", pytest.param("unlisted", marks=pytest.mark.slow)])
def test_adapters_saved_on_a_grid_load_on_another_and_in_plain_peft(tmp_path, name):
    run_ranks(_save_and_load, 4, tmp_path, name)
    base = tiny_model("llama") if name == "llama" else unplanned_model()
    loaded = PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
    expected = SAVED[name]().train()
    with exact():
        fit(expected, [tiny_batch(4, 7)])
    before = dict(SAVED[name]().named_parameters())
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


def gradients_of(model, batch):
    """Whole gradients of one batch, of a model that keeps none."""
    model(**batch).loss.backward()
    sync_gradients(model)
    gradients = {name: full(its.grad) for name, its in model.named_parameters() if its.grad is not None}
    model.zero_grad()
    return gradients


def _rounding(batches, truths, grids):
    errors = {}
    for grid in grids:
        errors[str(grid)] = 0.0
        model, _ = parallelize(half_model().train(), grid)
        for batch, truth in zip(batches, truths, strict=True):
            gradients = gradients_of(model, rows_of(batch, grid, model.get_base_model().axonn.grid_mesh.rank))
            assert {grad.dtype for grad in gradients.values()} == {torch.float32}
            errors[str(grid)] += squared_distance(gradients, truth)
    return errors


@pytest.mark.parametrize(
    "grids", [ONE_OF_EACH[:1], pytest.param(ONE_OF_EACH[1:], marks=pytest.mark.slow)], ids=["y and x", "others"]
)
def test_float32_adapters_on_a_bfloat16_model(grids):
    """As far from the float64 truth as one process is.

    In so small a model the distance of one batch scatters by a factor of 3 either way, so four are taken together.
    Sums over y and x add a rounding each: measured up to 2 times the distance of one process, allowed 3 times.
    """
    batches = [tiny_batch(8, 7, seed=seed) for seed in (3, 11, 12, 14)]
    truths, alone = [], 0.0
    for batch in batches:
        wide = half_model().double().train()  # the same numbers
        with exact():
            truths.append(gradients_of(wide, batch))
        alone += squared_distance(gradients_of(half_model().train(), batch), truths[-1])
    assert 1e-6 < alone < 0.04
    assert max(run_ranks(_rounding, 4, batches, truths, grids)[0].values()) <= 3**2 * alone
