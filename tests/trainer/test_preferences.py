"""TRL's trainers of preferences over a grid: every logged number, gradient and weight equals one process."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from datasets import load_from_disk
from torch.distributed.tensor import DTensor

from hf_axonn import AxonnPlugin, Grid, parallelize
from hf_axonn.distributed.collectives import observe
from hf_axonn.distributed.consistency import gather_texts
from hf_axonn.trainer import trl as trl_over_a_grid
from hf_axonn.trainer.hooks import install_when_imported
from tests.helpers.chats import ExactLogProbs, without_counts
from tests.helpers.float64 import Float64, relative_errors
from tests.helpers.models import tiny_model
from tests.helpers.preferences import (
    fit,
    lora,
    make_dpo,
    make_groups,
    make_kto,
    make_reward,
    preferences,
    write_preferences,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.training import worst_difference


TOLERANCE = 1e-10
# A mean logit or a reward may be next to 0: a difference counts relative to a thousandth.
FLOOR = 1e-3
RESUMED = 1e-9  # after more AdamW steps, which carry the rounding of two orders of summation on

CASES = {
    "a reference model": dict(make=make_dpo, reference=True, evaluate=True),
    "adapters": dict(make=make_dpo, peft_config=lora()),
    "precomputed": dict(make=make_dpo, reference=True, precompute_ref_log_probs=True, evaluate=True),
    "a reference that follows": dict(
        make=make_dpo, reference=True, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.6
    ),
    "a copied adapter": dict(make=make_dpo, adapted=True),
    "precomputed by the base of adapters": dict(make=make_dpo, peft_config=lora(), precompute_ref_log_probs=True),
    "several losses, weighted": dict(
        make=make_dpo,
        reference=True,
        loss_type=["ipo", "robust", "discopop"],
        loss_weights=[0.2, 0.5, 0.7],
        label_smoothing=0.1,
        use_weighting=True,
        ld_alpha=0.6,
        f_divergence_type="js_divergence",
    ),
    "experts with auxiliary loss": dict(make=make_dpo, experts=True, peft_config=lora(target_modules=["q_proj"])),
    "KTO": dict(make=make_kto, reference=True, desirable_weight=0.7, evaluate=True),
    "KTO, adapters": dict(make=make_kto, peft_config=lora()),
    "KTO, precomputed": dict(make=make_kto, precompute_ref_log_probs=True),
    "KTO without KL": dict(make=make_kto, loss_type="apo_zero_unpaired"),
    "rewards": dict(make=make_reward, center_rewards_coefficient=0.1, evaluate=True),
    "GRPO": dict(make=make_groups, num_generations=8),  # the completions of a prompt lie on several ranks
    "GRPO, adapters, twice": dict(
        make=make_groups,
        peft_config=lora(),
        loss_type="grpo",
        num_iterations=2,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=4,
    ),
    "GRPO, experts": dict(make=make_groups, experts=True, peft_config=lora(target_modules=["q_proj"])),
    "RLOO": dict(make=make_groups, kind="RLOO"),
    "RLOO, adapters, a model's rewards": dict(make=make_groups, kind="RLOO", peft_config=lora(), judge=True),
    "rewards, adapters": dict(make=make_reward, peft_config=lora(task_type="SEQ_CLS", modules_to_save=["score"])),
    "GRPO, a server": dict(make=make_groups, server=True, num_generations=8),
    "RLOO, adapters, a server": dict(make=make_groups, kind="RLOO", server=True, peft_config=lora()),
}
# Cases that the quick tests below run on grids.
QUICK = {
    Grid(x=2): ("RLOO, adapters, a server",),
    Grid(z=2): ("rewards", "GRPO"),
    Grid(data=2): ("KTO",),
    Grid(z=2, context=2): ("a reference model",),
}
PAIRS = [(grid, case) for grid, cases in QUICK.items() for case in cases]
TWICE = "GRPO, adapters, twice"  # what is in a micro-batch depends on the data-parallel ranks, also in TRL
KL = ("KTO", "KTO, adapters", "KTO, precomputed")  # TRL pairs prompts and answers within the batch of a process


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("preferences")
    write_preferences(folder)
    return folder


@pytest.fixture(scope="module")
def truths(folder) -> Callable:
    """Train a case on one process, with TRL's own head; with KL terms it depends on the data-parallel ranks."""
    import trl.trainer.utils as utils

    @functools.cache
    def truth(case: str, dp_size: int) -> tuple:
        options = dict(CASES[case])
        if case in KL:
            options["pairs_of"] = 4 // dp_size
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(utils, "_ChunkedLogProbFunction", ExactLogProbs)
            return fit(options.pop("make"), folder, folder / "one", None, **options)

    return lambda case, grid: truth(case, grid.dp_size if case in KL else 1)


@pytest.mark.parametrize(
    "pairs", [PAIRS, pytest.param([(Grid(), case) for case in CASES], marks=pytest.mark.slow)], ids=len
)
def test_the_runs_are_worth_comparing(truths, pairs):
    for grid, case in pairs:
        history, gradients, parameters = truths(case, grid)
        steps = [entry for entry in history if "loss" in entry]
        assert len(steps) == 3 and gradients and set(gradients) <= set(parameters)
        if "GRPO" in case or "RLOO" in case:
            assert steps[0]["reward_std"] > 0.05 and abs(steps[-1]["kl"]) > 1e-4
            assert 0 < sum(entry.get("completions/clipped_ratio", 0) for entry in steps) < 3
            continue
        if case.startswith("rewards"):
            assert abs(steps[-1]["margin"]) > 1e-2 and steps[-1]["min_reward"] < steps[-1]["max_reward"]
            continue
        assert steps[0]["entropy"] > 1 and steps[-1]["logps/chosen"] < -1
        assert abs(steps[-1]["rewards/margins"]) > 1e-2 and steps[-1]["logits/chosen"] != steps[-1]["logits/rejected"]
    history = truths("a reference model", Grid())[0]
    assert 0 < history[0]["rewards/accuracies"] < 1 and "eval_rewards/margins" in history[-1]
    (grid,) = {grid for grid, case in pairs if case == "KTO"}
    assert max(entry.get("kl", 0) for entry in truths("KTO", grid)[0]) > 0


def _equal(folder: Path, wanted: list[tuple[Grid, str, tuple]]) -> None:
    for grid, case, expected in wanted:
        options = dict(CASES[case])
        history, gradients, parameters = fit(options.pop("make"), folder, folder / f"{grid} {case}", grid, **options)
        assert worst_difference(history, expected[0], floor=FLOOR) < TOLERANCE, (grid, case, history, expected[0])
        for ours, theirs in ((gradients, expected[1]), (parameters, expected[2])):
            errors = relative_errors(ours, theirs)
            worst = max(errors, key=errors.get)
            assert errors[worst] < TOLERANCE, (grid, case, worst, errors[worst])


def check(folder: Path, truths: Callable, pairs: list[tuple[Grid, str]]) -> None:
    """Each case on its grid, in one start of the ranks."""
    wanted = [(grid, case, truths(case, grid)) for grid, case in pairs]
    run_ranks(_equal, pairs[0][0].size, folder, wanted, timeout=600)


def test_two_ranks_equal_one_process(folder, truths):
    check(folder, truths, PAIRS)


@pytest.mark.slow
@pytest.mark.usefixtures("way")
def test_rows_that_are_cut_equal_one_process(folder, truths):
    cases = [case for case, options in CASES.items() if options["make"] in (make_dpo, make_kto)]
    check(folder, truths, [(Grid(z=2, context=2), case) for case in cases])


@pytest.mark.slow
def test_four_ranks_equal_one_process(folder, truths):
    some = ("a reference that follows", "a copied adapter", "several losses, weighted", "KTO", "rewards, adapters")
    check(folder, truths, [(Grid(z=2, x=2), case) for case in (*some, "GRPO")])


def _sampled(folder: Path, grid: Grid) -> tuple[list, list[str]]:
    trainer = make_groups(folder, folder / "sampled", grid, by_quantiles=False, max_steps=1)
    generate, completions = trainer._generate_single_turn, []

    def noted(*args):
        result = generate(*args)
        completions.extend(result[0])
        return result

    trainer._generate_single_turn = noted
    trainer.train()
    return completions, list(trainer._logs["completion"])


def test_ranks_that_share_samples_sample_the_same_tokens(folder):
    grid = Grid(z=2, x=2)
    found = run_ranks(_sampled, 4, folder, grid)
    completions = [own for own, _ in found]
    assert completions[0] == completions[1] != completions[2] == completions[3]
    assert all(len(own) == 4 for own in completions)
    assert all(len(gathered) == 8 and gathered == found[0][1] for _, gathered in found)  # of one generation, each once


@pytest.mark.slow
@pytest.mark.parametrize("grid", [Grid(x=2), Grid(y=2), Grid(z=2), Grid(data=2), Grid(z=2, x=2)], ids=str)
def test_every_case_equals_one_process(folder, truths, grid):
    check(folder, truths, [(grid, case) for case in CASES if case != TWICE or grid.dp_size == 1])


def _nothing_whole_travels(folder: Path, grid: Grid) -> None:
    vocabulary, whole, totals = 4001, DTensor.full_tensor, Counter()

    def note_whole(tensor, **options):
        totals["whole"] = max(totals["whole"], tensor.numel())
        return whole(tensor, **options)

    def note(kind, payload, group):
        totals[kind] += payload // 8
        totals["largest " + kind] = max(totals["largest " + kind], payload // 8)

    head = vocabulary * 48
    models = [tiny_model("llama", vocab_size=vocabulary, seed=seed) for seed in (0, 5)]
    trainer = make_dpo(folder, folder / "whole", grid, model=models[0], ref_model=models[1], max_steps=1)
    with pytest.MonkeyPatch.context() as patch, observe(note):
        patch.setattr(DTensor, "full_tensor", note_whole)
        trainer.train()
    own = sum(parameter.to_local().numel() for parameter in trainer.model.parameters())
    assert trainer.ref_model.axonn.grid == grid
    # Neither logits nor a head: over z the shards of a part of the vocabulary are gathered.
    assert totals["whole"] < 48 and totals["largest all_gather"] <= head // (2 * grid.x) + 48
    if grid.data > 1:  # gradients of the policy alone are averaged
        assert own <= totals["all_reduce"] < 1.1 * own
    else:
        assert totals["largest all_reduce"] < head // 4


@pytest.mark.parametrize("grid", [Grid(data=2, z=2), pytest.param(Grid(z=2, x=2), marks=pytest.mark.slow)], ids=str)
def test_no_head_is_gathered_and_no_reference_is_averaged(folder, grid):
    run_ranks(_nothing_whole_travels, 4, folder, grid)


def test_completions_for_a_log_are_made_by_all_ranks_alike(monkeypatch):
    """Prompts are not divided: ranks of z call `generate` as often, and those of x log no completion twice."""
    from trl.trainer import callbacks

    install_when_imported()
    monkeypatch.setattr(callbacks, "_generate_completions", lambda prompts, **_: [f"{prompt}!" for prompt in prompts])
    accelerator = mock.Mock(axonn_plugin=SimpleNamespace(grid=Grid(z=2)), is_main_process=True)  # divides nothing
    trainer = SimpleNamespace(accelerator=accelerator, model_wrapped=None, eval_dataset={"prompt": ["a", "b", "c"]})
    callback = callbacks.LogCompletionsCallback(trainer, freq=1)
    args = SimpleNamespace(per_device_eval_batch_size=2, gradient_checkpointing_kwargs=None, report_to=[])
    callback.on_step_end(args, SimpleNamespace(global_step=1), None, processing_class=SimpleNamespace())
    assert callback.table == [("1", "a", "a!"), ("1", "b", "b!"), ("1", "c", "c!")]


def _hashes() -> None:
    grid = Grid(x=2)
    AxonnPlugin(grid=grid)  # which wraps TRL's functions
    from trl.trainer.utils import hash_module

    found = []
    for place in (None, None, 0, -1):
        model = tiny_model("llama")
        if place is not None:
            with torch.no_grad():
                model.lm_head.weight.view(-1)[place] += 1  # which one rank has
        parallelize(model, grid)
        found.append(hash_module(model))
    assert found[0] == found[1] and len(set(found)) == 3
    assert len(set(gather_texts(" ".join(found), "cpu"))) == 1


def test_log_probabilities_of_another_reference_are_not_taken(folder):
    """TRL finds what it has computed before by a hash of all weights, of which each rank has some."""
    run_ranks(_hashes, 2)


def test_log_probabilities_of_a_data_set_without_a_file_are_refused(folder):
    """TRL writes them into a temporary directory of rank 0, and other ranks ended with FileNotFoundError."""
    from trl import DPOTrainer, KTOTrainer

    install_when_imported()
    grid = SimpleNamespace(grid=Grid(z=2))
    for kind in (DPOTrainer, KTOTrainer):
        with mock.patch.object(trl_over_a_grid, "parallelism_in_use", lambda: (grid, None)):
            with pytest.raises(
                ValueError, match="precompute_ref_log_probs is not possible .* with a train data set in"
            ):
                kind._precompute_ref_logps(SimpleNamespace(), preferences(4, seed=0), "train", 2)
            with pytest.raises(AttributeError, match="_precompute_model_hash"):  # TRL's own method, which reads it
                kind._precompute_ref_logps(SimpleNamespace(), load_from_disk(folder / "train"), "train", 2)
        with pytest.raises(AttributeError, match="_precompute_model_hash"):
            kind._precompute_ref_logps(SimpleNamespace(), preferences(4, seed=0), "train", 2)


def eval_loss(folder: Path, grid: Grid | None, prompts: int, processes: int) -> float:
    """Loss of GRPO: four completions a prompt, in batches of 8 completions of all data-parallel ranks."""
    rows = 8 // processes
    torch.set_default_dtype(torch.float64)
    try:
        with Float64():
            options = dict(per_device_train_batch_size=rows, per_device_eval_batch_size=rows, num_generations_eval=4)
            trainer = make_groups(folder, folder / "evaluated", grid, **options)
            return trainer.evaluate(load_from_disk(folder / "eval").select_columns(["prompt"]).select(range(prompts)))[
                "eval_loss"
            ]
    finally:
        torch.set_default_dtype(torch.float32)


def _evaluated(folder: Path, prompts: list[int]) -> list[tuple[float, float]]:
    """Losses of stock TRL and Accelerate on two processes, and on z=2."""
    return [tuple(eval_loss(folder, grid, number, 2) for grid in (None, Grid(z=2))) for number in prompts]


@pytest.mark.slow
def test_the_evaluation_of_groups_is_that_of_trl_on_as_many_processes(folder):
    """One process has the same where the batch of all divides the prompts: else Accelerate cuts losses off the last
    batch, as many as divide prompts, not completions, whose number has no remainder here."""
    prompts = [8, 6]
    alone = [eval_loss(folder, None, number, 1) for number in prompts]
    for found in run_ranks(_evaluated, 2, folder, prompts):
        for number, (stock, grid), one in zip(prompts, found, alone, strict=True):
            assert grid == pytest.approx(stock, rel=TOLERANCE)
            assert (abs(grid / one - 1) < TOLERANCE) == (number == 8), (number, grid, one)


RESUMED_CASES = {
    "DPO": dict(make=make_dpo, reference=True),
    "DPO, adapters": dict(make=make_dpo, peft_config=lora()),
    "KTO": dict(make=make_kto, reference=True),
    "rewards, adapters": dict(make=make_reward, peft_config=lora(task_type="SEQ_CLS", modules_to_save=["score"])),
    "GRPO": dict(make=make_groups),
    "RLOO, adapters": dict(make=make_groups, kind="RLOO", peft_config=lora()),
}


def saved(case: str, folder: Path, output: Path, grid: Grid | None, **options) -> list[dict]:
    """What a run of four steps logs, which saves after two of them."""
    options |= RESUMED_CASES[case] | dict(max_steps=4, save_strategy="steps", save_steps=2)
    return fit(options.pop("make"), folder, output, grid, **options)[0]


def _resumed(folder: Path, truths: dict[str, list[dict]]) -> None:
    for case, truth in truths.items():
        history = saved(case, folder, folder / f"{case} z2x2", Grid(z=2, x=2))
        assert worst_difference(history, truth, floor=FLOOR) < TOLERANCE, (case, history, truth)
        middle = folder / f"{case} z2x2" / "checkpoint-2"
        history = saved(case, folder, folder / f"{case} y2", Grid(data=2, y=2), resume=middle)
        assert worst_difference(without_counts(history), without_counts(truth), floor=FLOOR) < RESUMED, (case, history)


@pytest.mark.slow
def test_a_checkpoint_resumes_on_another_grid(folder, tmp_path):
    import trl.trainer.utils as utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "_ChunkedLogProbFunction", ExactLogProbs)
        truths = {
            case: saved(case, folder, tmp_path / case, None, **({"pairs_of": 2} if case == "KTO" else {}))
            for case in RESUMED_CASES
        }
    run_ranks(_resumed, 4, folder, truths, timeout=900)


def _defaults(output: Path, folder: Path, make: Callable, grid: Grid | None, **options) -> list[dict]:
    """As TRL starts by itself: bf16 and gradient checkpointing."""
    trainer = make(folder, output, grid, bf16=None, gradient_checkpointing=True, **dict(max_steps=2) | options)
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None:
            model.float()
    trainer.train()
    return trainer.state.log_history


DEFAULTS = {
    make_dpo: (dict(reference=True), ("loss", "entropy", "logps/chosen")),
    make_kto: (dict(reference=True), ("loss", "entropy", "logps/chosen")),
    make_reward: (dict(), ("loss", "max_reward")),
    # After a step in 8 bits another token may be drawn, so one step; its loss is 0 but for rounding.
    make_groups: (dict(max_steps=1), ("reward", "entropy", "completions/mean_length")),
}


def _as_trl_starts(folder: Path, truths: dict) -> None:
    for make, truth in truths.items():
        options, keys = DEFAULTS[make]
        history = _defaults(folder / f"defaults {make.__name__}", folder, make, Grid(z=2, x=2), **options)
        for key in keys:  # 8 bits: a few parts in 1e3
            mine, true = ([entry[key] for entry in its if key in entry] for its in (history, truth))
            assert len(mine) == options.get("max_steps", 2) and mine == pytest.approx(true, rel=2e-2), (make, key)


@pytest.mark.slow
def test_as_trl_starts_by_itself(folder, tmp_path):
    truths = {
        make: _defaults(tmp_path / make.__name__, folder, make, None, **options)
        for make, (options, _) in DEFAULTS.items()
    }
    run_ranks(_as_trl_starts, 4, folder, truths)
