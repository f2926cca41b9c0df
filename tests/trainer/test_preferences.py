"""TRL's trainers of preferences over a grid: every logged number, gradient and weight equals one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_axonn import Grid
from tests.helpers.chats import ExactLogProbs
from tests.helpers.float64 import relative_errors
from tests.helpers.models import tiny_model
from tests.helpers.preferences import fit, lora, make_dpo, write_preferences
from tests.helpers.ranks import run_ranks
from tests.helpers.training import worst_difference


TOLERANCE = 1e-10
# Rewards of a model that is its own reference begin at 0: a difference counts relative to a thousandth.
FLOOR = 1e-3

DPO = {
    "a reference model": dict(reference=True, evaluate=True),
    "adapters": dict(peft_config=lora()),
    "precomputed": dict(precompute_ref_log_probs=True, evaluate=True),
    "a reference that follows": dict(sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.6),
    "a copied adapter": dict(adapted=True),
    "precomputed by the base of adapters": dict(peft_config=lora(), precompute_ref_log_probs=True),
    "several losses, weighted": dict(
        reference=True,
        loss_type=["ipo", "robust", "discopop"],
        loss_weights=[0.2, 0.5, 0.7],
        label_smoothing=0.1,
        use_weighting=True,
        ld_alpha=0.6,
        f_divergence_type="js_divergence",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("preferences")
    write_preferences(folder)
    return folder


@pytest.fixture(scope="module")
def truths(folder) -> dict:
    """Each case on one process, with TRL's own head."""
    import trl.trainer.utils as utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "_ChunkedLogProbFunction", ExactLogProbs)
        return {case: fit(make_dpo, folder, folder / "one", None, **options) for case, options in DPO.items()}


def test_the_runs_are_worth_comparing(truths):
    for history, gradients, parameters in truths.values():
        steps = [entry for entry in history if "loss" in entry]
        assert len(steps) == 3 and steps[0]["entropy"] > 1 and steps[-1]["logps/chosen"] < -1
        assert abs(steps[-1]["rewards/margins"]) > 1e-2 and steps[-1]["logits/chosen"] != steps[-1]["logits/rejected"]
        assert gradients and set(gradients) <= set(parameters)
    history = truths["a reference model"][0]
    assert 0 < history[0]["rewards/accuracies"] < 1 and "eval_rewards/margins" in history[-1]


def _equal(folder: Path, pairs: list[tuple[Grid, str]], truths: dict) -> None:
    for grid, case in pairs:
        history, gradients, parameters = fit(make_dpo, folder, folder / f"{grid} {case}", grid, **DPO[case])
        expected = truths[case]
        assert worst_difference(history, expected[0], floor=FLOOR) < TOLERANCE, (grid, case, history, expected[0])
        for ours, theirs in ((gradients, expected[1]), (parameters, expected[2])):
            errors = relative_errors(ours, theirs)
            worst = max(errors, key=errors.get)
            assert errors[worst] < TOLERANCE, (grid, case, worst, errors[worst])


def test_two_ranks_equal_one_process(folder, truths):
    reference, adapters, precomputed = list(DPO)[:3]
    pairs = [(Grid(x=2), reference), (Grid(z=2), adapters), (Grid(data=2), precomputed)]
    run_ranks(_equal, 2, folder, pairs, truths)


def test_four_ranks_equal_one_process(folder, truths):
    run_ranks(_equal, 4, folder, [(Grid(z=2, x=2), case) for case in list(DPO)[2:]], truths)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [Grid(x=2), Grid(y=2), Grid(z=2), Grid(data=2), Grid(data=2, y=2)], ids=str)
def test_every_case_equals_one_process(folder, truths, grid):
    run_ranks(_equal, grid.size, folder, [(grid, case) for case in DPO], truths)
