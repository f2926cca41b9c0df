"""TRL's SFTTrainer, with and without the goldfish loss, on chat data: every grid equals one process."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, HfArgumentParser
from trl import SFTConfig

from hf_axonn import GoldfishConfig, GoldfishSFTConfig, GoldfishSFTTrainer, Grid, from_pretrained
from hf_axonn.distributed.collectives import observe
from hf_axonn.trainer.trl import check_trainer
from tests.helpers.chats import (
    EXPERTS,
    ExactLogProbs,
    chat_tokenizer,
    chats,
    fine_tune,
    logged,
    make_sft,
    run_chat_script,
    without_counts,
)
from tests.helpers.float64 import relative_errors
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import worst_difference


TOLERANCE = 1e-10
# Three AdamW steps carry the rounding of two orders of summation to 1e-12; resumed runs take more of them.
RESUMED = 1e-9


def lora(**changes) -> LoraConfig:
    options = dict(r=3, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return LoraConfig(**(options | changes))


CASES = {
    # One row of odd length without attention_mask; prompts are left out of the loss.
    "packed goldfish": dict(packing=True, evaluate=True),
    "padded stock": dict(goldfish=False),
    "packed goldfish with peft_config": dict(packing=True, peft_config=lora()),
    "padding-free goldfish": dict(padding_free=True, max_length=None, completions=False, evaluate=True),
    "packed stock, answers only, dft": dict(
        goldfish=False, packing=True, loss_type="dft", completions=False, assistant_only_loss=True
    ),
    "wrapped goldfish, full sequences": dict(packing=True, packing_strategy="wrapped", completions=False),
    "experts with auxiliary loss": dict(
        goldfish=False, kind="qwen3_moe", sizes=EXPERTS, packing=True, evaluate=True, eval_packing=False, eval_rows=8
    ),
    # Both need whole logits for the loss, and have a second pass for the metrics.
    "stock with label smoothing": dict(goldfish=False, label_smoothing_factor=0.1),
    # The head is then one that PEFT has wrapped, and whose logits are formed.
    "a saved head beside LoRA": dict(packing=True, peft_config=lora(modules_to_save=["lm_head"])),
}
# On one grid, and slow.
MORE = {"goldfish of experts": dict(kind="qwen3_moe", sizes=EXPERTS, packing=True)}
FIRST, REST = list(CASES)[:3], list(CASES)[3:]
QUICK = ["packed stock, answers only, dft", "experts with auxiliary loss", "a saved head beside LoRA"]
OVER_CONTEXT = "padding-free goldfish"


def run(output: Path, grid: Grid | None, case: str):
    options = dict((CASES | MORE)[case])
    if "eval_rows" in options:  # one batch, as TRL takes means of batches
        options["per_device_eval_batch_size"] = options["eval_rows"] // (grid.dp_size if grid else 1)
    sizes = options.pop("sizes", None)
    model = tiny_model(options.pop("kind"), **sizes) if sizes else None
    history, *found = fine_tune(output, grid, model=model, **options)
    if "eval_rows" in (CASES | MORE)[case]:
        history[-1].pop("eval_loss")  # of the tokens of each rank a mean, of which TRL takes the mean
    return history, *found


@pytest.fixture(scope="module")
def truths(tmp_path_factory) -> Callable:
    """Train a case on one process, with TRL's own head and goldfish where there is one."""
    import trl.trainer.utils as utils

    folder = tmp_path_factory.mktemp("truths")

    @functools.cache
    def truth(case: str) -> tuple:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(utils, "_ChunkedLogProbFunction", ExactLogProbs)
            return run(folder / case, None, case)

    return truth


@pytest.mark.parametrize("cases", [[OVER_CONTEXT, *QUICK], pytest.param([*CASES], marks=pytest.mark.slow)], ids=len)
def test_the_runs_are_worth_comparing(truths, cases):
    for case in cases:
        history, gradients, parameters = truths(case)
        steps = [entry for entry in history if "loss" in entry]
        assert len(steps) == 3 and steps[-1]["mean_token_accuracy"] > 0 and steps[0]["entropy"] > 1
        assert gradients and set(gradients) <= set(parameters)
        if "goldfish" in case:
            assert 0.1 < steps[0]["goldfish_dropped_fraction"] < 0.5
            assert steps[0]["loss"] == pytest.approx(steps[0]["loss_kept"], rel=3e-7)
            assert abs(steps[0]["loss_kept"] - steps[0]["loss_all"]) > 1e-4
        if CASES[case].get("evaluate"):
            assert "eval_mean_token_accuracy" in history[-1]
        if "auxiliary" in case:
            assert {"aux_loss", "eval_aux_loss"} <= set().union(*history)


def _equal(folder: Path, wanted: list[tuple[Grid, str, tuple]]) -> None:
    for grid, case, expected in wanted:
        history, gradients, parameters = run(folder / f"{grid} {case}", grid, case)
        assert worst_difference(history, expected[0]) < TOLERANCE, (grid, case, history, expected[0])
        for ours, theirs in ((gradients, expected[1]), (parameters, expected[2])):
            errors = relative_errors(ours, theirs)
            worst = max(errors, key=errors.get)
            assert errors[worst] < TOLERANCE, (grid, case, worst, errors[worst])


def check(folder: Path, truths: Callable, pairs: list[tuple[Grid, str]]) -> None:
    """Each case on its grid, in one start of the ranks."""
    run_ranks(_equal, pairs[0][0].size, folder, [(grid, case, truths(case)) for grid, case in pairs])


@pytest.mark.slow
def test_two_ranks_equal_one_process(tmp_path, truths):
    packed, padded, adapters = FIRST
    pairs = [(grid, case) for grid in (Grid(x=2), Grid(y=2), Grid(z=2), Grid(data=2)) for case in (packed, adapters)]
    pairs += [(Grid(z=2), padded), (Grid(data=2), padded)]
    check(tmp_path, truths, pairs)


@pytest.mark.slow
def test_four_ranks_equal_one_process(tmp_path, truths):
    packed, padded, adapters = FIRST
    z2x2, z2y2 = Grid(z=2, x=2), Grid(z=2, y=2)
    pairs = [(z2x2, packed), (z2x2, adapters), (z2y2, padded), (z2x2, "goldfish of experts")]
    check(tmp_path, truths, pairs)


TWO = [Grid(x=2), Grid(z=2)]


@pytest.mark.parametrize(
    ("grids", "cases"),
    [
        (TWO, QUICK),
        pytest.param(TWO, REST, marks=pytest.mark.slow),
        pytest.param([Grid(data=2, y=2), Grid(z=2, x=2), Grid(y=2, x=2)], REST, marks=pytest.mark.slow),
    ],
    ids=["some on two", "two", "four"],
)
def test_every_mode_equals_one_process(tmp_path, truths, grids, cases):
    check(tmp_path, truths, [(grids[index % len(grids)], case) for index, case in enumerate(cases)])


def test_documents_of_rows_that_are_cut_equal_one_process(tmp_path, truths):
    check(tmp_path, truths, [(Grid(z=2, context=2), OVER_CONTEXT)])


@pytest.mark.slow
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("grid", [Grid(z=2, context=2), Grid(z=4, context=2), Grid(z=2, x=2, context=2)], ids=str)
def test_every_mode_over_context_equals_one_process(tmp_path, truths, grid):
    check(tmp_path, truths, [(grid, case) for case in CASES])


def _no_head_travels(folder: Path) -> None:
    largest = {"whole": 0}
    vocabulary = 4001
    head = vocabulary * 48
    whole = DTensor.full_tensor

    def note_whole(tensor, **options):
        largest["whole"] = max(largest["whole"], tensor.numel())
        return whole(tensor, **options)

    def note(kind, payload, group):
        largest[kind] = max(largest.get(kind, 0), payload // 8)

    trainer = make_sft(folder, Grid(z=2, x=2), model=tiny_model("llama", vocab_size=vocabulary), max_steps=1)
    with pytest.MonkeyPatch.context() as patch, observe(note):
        patch.setattr(DTensor, "full_tensor", note_whole)
        trainer.train()
    # Over z its shards are gathered on the ranks that share a part of the vocabulary, here a half.
    assert largest["whole"] < 48 and largest["all_gather"] <= head // 4 + 48
    assert largest["all_reduce"] < head // 4


@pytest.mark.slow  # test_preferences.py has it of DPO
def test_the_head_is_never_gathered(tmp_path):
    run_ranks(_no_head_travels, 4, tmp_path)


def saved_run(output: Path, grid: Grid | None, *, resume: Path | None = None, **options):
    return fine_tune(output, grid, resume=resume, max_steps=4, save_strategy="steps", save_steps=2, **options)


def _resumed(folder: Path, truth: list[dict], adapters: list[dict]) -> None:
    history, _, _ = saved_run(folder / "z2x2", Grid(z=2, x=2), packing=True)
    assert worst_difference(history, truth) < TOLERANCE
    history, _, _ = saved_run(folder / "y2", Grid(data=2, y=2), packing=True, resume=folder / "z2x2" / "checkpoint-2")
    assert worst_difference(without_counts(history), without_counts(truth)) < RESUMED
    history, _, _ = saved_run(folder / "lora", Grid(z=2, y=2), packing=True, peft_config=lora())
    assert worst_difference(history, adapters) < TOLERANCE


@pytest.mark.slow
def test_checkpoints_resume_on_another_grid(tmp_path):
    import trl.trainer.utils as utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "_ChunkedLogProbFunction", ExactLogProbs)
        truth, _, _ = saved_run(tmp_path / "one", None, packing=True)
        adapters, _, trained = saved_run(tmp_path / "one-lora", None, packing=True, peft_config=lora())
        run_ranks(_resumed, 4, tmp_path, truth, adapters)
        again, _, _ = saved_run(tmp_path / "again", None, packing=True, resume=tmp_path / "z2x2" / "checkpoint-2")
    assert worst_difference(without_counts(again), without_counts(truth)) < RESUMED
    assert len(list((tmp_path / "z2x2" / "checkpoint-4").glob("shard-*-model-*"))) > 1
    sharded = AutoModelForCausalLM.from_pretrained(tmp_path / "z2x2" / "checkpoint-4", dtype=torch.float64)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "one" / "checkpoint-4", dtype=torch.float64)
    for name, value in sharded.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-8, atol=1e-9)
    adapted = PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "lora" / "checkpoint-4", is_trainable=True)
    for name, value in adapted.named_parameters():
        if value.requires_grad:
            torch.testing.assert_close(value.double(), trained[name], rtol=1e-6, atol=1e-6)


# As TRL starts by itself: bf16 and gradient checkpointing.
DEFAULTS = dict(bf16=None, gradient_checkpointing=True, packing=True)
# In float32, as recomputation leaves the float64 mode; three AdamW steps make 1e-6 of 1e-7.
FLOAT32 = dict(gradient_checkpointing=True, packing=True, gradient_checkpointing_kwargs={"selective": True})


def _float32(output: Path, grid: Grid | None, **options) -> list[dict]:
    model = options.pop("model", None)
    trainer = make_sft(
        output, grid, model=tiny_model("llama", dtype=torch.float32) if model is None else model, **options
    )
    trainer.train()
    return logged(trainer.state.log_history)


def _ways(folder: Path, bf16: list[dict], checkpointed: list[dict], adapted: list[dict]) -> None:
    ours = _float32(folder / "bf16", Grid(data=2, y=2), **DEFAULTS)
    for key in ("loss", "entropy"):  # 8 bits: a few parts in 1e3
        assert [its[key] for its in ours[:-1]] == pytest.approx([its[key] for its in bf16[:-1]], rel=1e-2)
    assert worst_difference(_float32(folder / "selective", Grid(z=2, x=2), **FLOAT32), checkpointed) < 1e-4
    # Each rank has read its own slices when TRL puts the adapters in.
    grid = Grid(data=2, y=2)
    model = from_pretrained(str(folder / "model"), grid=grid)
    ours = _float32(folder / "lora", grid, model=model, peft_config=lora(), gradient_checkpointing=True)
    assert worst_difference(ours, adapted) < 1e-4


@pytest.mark.slow
def test_trl_defaults_and_a_model_that_is_sharded_already(tmp_path):
    tiny_model("llama", dtype=torch.float32).save_pretrained(tmp_path / "model")
    bf16 = _float32(tmp_path / "a", None, **DEFAULTS)
    checkpointed = _float32(tmp_path / "b", None, **FLOAT32)
    adapted = _float32(tmp_path / "c", None, peft_config=lora(), gradient_checkpointing=True)
    run_ranks(_ways, 4, tmp_path, bf16, checkpointed, adapted)


def test_without_a_grid_it_is_the_stock_trainer(tmp_path):
    """With goldfish=False, and with goldfish where no document is long enough, every number is TRL's own."""
    for options in (dict(packing=True), dict(completions=False)):
        stock = make_sft(tmp_path, None, goldfish=False, **options)
        stock.train()
        for changes in (dict(goldfish_off=True), dict(goldfish_context_width=60)):
            off = changes.pop("goldfish_off", False)
            ours = make_sft(tmp_path, None, **options, **changes)
            ours.args.goldfish = not off
            ours.train()
            for entry, mine in zip(*(logged(its.state.log_history) for its in (stock, ours)), strict=True):
                assert entry == {key: value for key, value in mine.items() if key in entry}
                assert "loss" not in mine or (mine["loss_kept"] == mine["loss_all"] and "loss_dropped" not in mine)
            for (name, theirs), value in zip(stock.model.named_parameters(), ours.model.parameters(), strict=True):
                assert torch.equal(theirs, value), name


def test_evaluation_is_over_all_target_tokens(tmp_path):
    """However batches are cut, packed or not: by hand from whole logits."""
    model = tiny_model("llama", dtype=torch.float32).eval()
    sums = torch.zeros(4, dtype=torch.float64)
    tokenizer = chat_tokenizer()
    for row in chats(7, seed=1):
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
        ids = tokenizer.apply_chat_template(row["prompt"] + row["completion"])["input_ids"]
        with torch.no_grad():
            log_softmax = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(dim=-1)
        for place in range(len(prompt), len(ids)):
            its = log_softmax[place - 1]
            sums += torch.tensor([-its[ids[place]], 1, -(its.exp() * its).sum(), its.argmax() == ids[place]])
    expected = {
        "eval_loss": sums[0] / sums[1],
        "eval_entropy": sums[2] / sums[1],
        "eval_mean_token_accuracy": sums[3] / sums[1],
    }
    for options in (dict(packing=True), dict(packing=True, eval_packing=False), dict(per_device_eval_batch_size=2)):
        metrics = make_sft(tmp_path, None, model=model, **options).evaluate()
        assert {key: metrics[key] for key in expected} == pytest.approx(
            {key: value.item() for key, value in expected.items()}, rel=1e-5
        )


def test_the_arguments_are_those_of_trl_and_of_goldfish(tmp_path, caplog):
    ours, theirs = (kind(str(tmp_path), use_cpu=True) for kind in (GoldfishSFTConfig, SFTConfig))
    for name in ("learning_rate", "gradient_checkpointing", "bf16", "logging_steps", "max_length"):
        assert getattr(ours, name) == getattr(theirs, name), name
    (parsed,) = HfArgumentParser(GoldfishSFTConfig).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--use_cpu", "--packing", "--goldfish_k", "5", "--max_length", "99"]
    )
    assert (parsed.packing, parsed.goldfish_k, parsed.max_length) == (True, 5, 99)
    with pytest.raises(ValueError, match="goldfish k is 1"):
        GoldfishSFTConfig(str(tmp_path), use_cpu=True, goldfish_k=1)
    for args in (GoldfishConfig(str(tmp_path), use_cpu=True), theirs, None):
        with pytest.raises(ValueError, match="pass args=GoldfishSFTConfig"):
            GoldfishSFTTrainer(tiny_model("llama"), args, train_dataset=chats(4, seed=0))
    with pytest.raises(ValueError, match="label_smoothing_factor does not go together with the goldfish loss"):
        make_sft(tmp_path, None, label_smoothing_factor=0.1)
    with caplog.at_level(logging.WARNING):
        make_sft(tmp_path, None, goldfish_context_width=60, max_steps=1).train()
    assert "documents trained on up to step" in caplog.text


def _refused(folder: Path) -> None:
    import trl
    from trl.trainer.utils import add_fused_lm_head

    from hf_axonn import parallelize

    grid = Grid(z=2)
    other = type("Other", (trl.RLOOTrainer,), {"__module__": "trl"})
    for trainer, reason in ((trl.DistillationTrainer, "it multiplies by the whole heads"), (other, "nobody has")):
        message = f"{trainer.__name__} of TRL is not supported over a grid .*: {reason}.* Of its trainers SFTTrainer"
        with pytest.raises(ValueError, match=message):
            check_trainer(object.__new__(trainer), grid)
    rollouts = object.__new__(trl.GRPOTrainer)
    rollouts.tools = [print]
    with pytest.raises(ValueError, match="tools of GRPOTrainer is not supported over a grid"):
        check_trainer(rollouts, grid)
    for trainer in (trl.GRPOTrainer, trl.RLOOTrainer):
        message = f"{trainer.__name__} of TRL is not supported over a grid with context .*: it generates"
        with pytest.raises(ValueError, match=message):
            check_trainer(object.__new__(trainer), Grid(z=2, context=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trl.__version__", "1.0.0")
        with pytest.raises(ValueError, match="trl 1.0.0 is installed, proven is "):
            make_sft(folder, grid)
    for options, message in (
        (dict(activation_offloading=True), "activation_offloading is not supported over a grid"),
        (dict(use_liger_kernel=True), "use_liger_kernel is not supported over this grid .*: its kernels are Triton's"),
    ):
        with pytest.raises(ValueError, match=message):
            make_sft(folder, grid, goldfish=False, **options)
    model, _ = parallelize(tiny_model("llama"), grid)
    with pytest.raises(ValueError, match="TRL's fused head with cast_lm_head_to_fp32=True is not supported"):
        add_fused_lm_head(model, cast_lm_head_to_fp32=True)
    with pytest.raises(ValueError, match="median_logits"):
        add_fused_lm_head(model, outputs=("log_probs", "median_logits"))


def test_what_is_not_served_is_refused(tmp_path):
    run_ranks(_refused, 2, tmp_path)


@pytest.mark.slow
def test_the_chat_script_under_stock_accelerate(tmp_path):
    """The script as a user starts it, on one process and by a launch file: the same numbers."""
    tiny_model("llama", dtype=torch.float32).save_pretrained(tmp_path / "model")
    chat_tokenizer().save_pretrained(tmp_path / "model")
    with (tmp_path / "chats.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in chats(60, seed=0, completions=False))
    one, grid = run_chat_script(tmp_path, "--packing", "--assistant_only_loss", timeout=200, max_length=40)
    assert {"eval_loss", "eval_mean_token_accuracy"} <= set(one[-1])
    assert worst_difference(grid, one) < 1e-4
