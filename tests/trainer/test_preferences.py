"""TRL's trainers of preferences over a grid: every logged number, gradient and weight equals one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_axonn import Grid
from tests.helpers.chats import ExactLogProbs
from tests.helpers.float64 import relative_errors
from tests.helpers.preferences import fit, lora, make_dpo, make_groups, make_kto, make_reward, write_preferences
from tests.helpers.ranks import run_ranks
from tests.helpers.training import worst_difference


TOLERANCE = 1e-10
# Rewards of a model that is its own reference begin at 0: a difference counts relative to a thousandth.
FLOOR = 1e-3

CASES = {
    "a reference model": dict(make=make_dpo, reference=True, evaluate=True),
    "adapters": dict(make=make_dpo, peft_config=lora()),
    "precomputed": dict(make=make_dpo, precompute_ref_log_probs=True, evaluate=True),
    "a reference that follows": dict(
        make=make_dpo, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.6
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
    "KTO": dict(make=make_kto, reference=True, desirable_weight=0.7, evaluate=True),
    "KTO, adapters": dict(make=make_kto, peft_config=lora()),
    "KTO, precomputed": dict(make=make_kto, precompute_ref_log_probs=True),
    "KTO without KL": dict(make=make_kto, loss_type="apo_zero_unpaired"),
    "rewards": dict(make=make_reward, center_rewards_coefficient=0.1, evaluate=True),
    "GRPO": dict(make=make_groups),
    "GRPO, adapters, twice": dict(
        make=make_groups,
        peft_config=lora(),
        loss_type="grpo",
        num_iterations=2,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=4,
    ),
    "RLOO": dict(make=make_groups, kind="RLOO"),
    "rewards, adapters": dict(make=make_reward, peft_config=lora(task_type="SEQ_CLS", modules_to_save=["score"])),
}
TWICE = "GRPO, adapters, twice"  # what is in a micro-batch depends on the data-parallel ranks, also in TRL
KL = ("KTO", "KTO, adapters", "KTO, precomputed")  # TRL pairs prompts and answers within the batch of a process


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("preferences")
    write_preferences(folder)
    return folder


@pytest.fixture(scope="module")
def truths(folder) -> Callable:
    """What a case is on one process, with TRL's own head; with KL terms it depends on the data-parallel ranks."""
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


def test_the_runs_are_worth_comparing(truths):
    for case in CASES:
        history, gradients, parameters = truths(case, Grid())
        steps = [entry for entry in history if "loss" in entry]
        assert len(steps) == 3 and gradients and set(gradients) <= set(parameters)
        if "GRPO" in case or "RLOO" in case:
            assert steps[0]["reward_std"] > 0.05 and abs(steps[-1]["kl"]) > 1e-4
            assert 0 < sum(entry["completions/clipped_ratio"] for entry in steps) < 3
            continue
        if "rewards" in case:
            assert abs(steps[-1]["margin"]) > 1e-2 and steps[-1]["min_reward"] < steps[-1]["max_reward"]
            continue
        assert steps[0]["entropy"] > 1 and steps[-1]["logps/chosen"] < -1
        assert abs(steps[-1]["rewards/margins"]) > 1e-2 and steps[-1]["logits/chosen"] != steps[-1]["logits/rejected"]
    history = truths("a reference model", Grid())[0]
    assert 0 < history[0]["rewards/accuracies"] < 1 and "eval_rewards/margins" in history[-1]
    assert max(entry.get("kl", 0) for entry in truths("KTO", Grid())[0]) > 0


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
    quick = {
        Grid(x=2): ("a reference model", "KTO, adapters"),
        Grid(z=2): ("adapters", "rewards"),
        Grid(data=2): ("precomputed", "KTO"),
    }
    check(folder, truths, [(grid, case) for grid, cases in quick.items() for case in cases])


def test_four_ranks_equal_one_process(folder, truths):
    quick = ("a reference that follows", "a copied adapter", "several losses, weighted", "KTO", "rewards, adapters")
    check(folder, truths, [(Grid(z=2, x=2), case) for case in quick])


def test_groups_of_completions_equal_one_process(folder, truths):
    pairs = [(Grid(x=2), TWICE), (Grid(z=2), "GRPO"), (Grid(data=2), "RLOO")]
    check(folder, truths, pairs)
    check(folder, truths, [(Grid(z=2, x=2), "GRPO")])


@pytest.mark.slow
@pytest.mark.parametrize("grid", [Grid(x=2), Grid(y=2), Grid(z=2), Grid(data=2), Grid(z=2, x=2)], ids=str)
def test_every_case_equals_one_process(folder, truths, grid):
    check(folder, truths, [(grid, case) for case in CASES if case != TWICE or grid.dp_size == 1])
