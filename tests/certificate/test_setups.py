"""The two tables of docs/certificates.md: no right set-up is called different, planted errors are found and named.

A few rows of each, of those that were false alarms or not named before, are in every run; the others are slow.
"""

from __future__ import annotations

import json

import pytest

from hf_axonn.certificate.report import exit_code, verdict
from hf_axonn.cli.main import main
from tests.certificate import runs
from tests.certificate.runs import SCRIPTS, launch_file, many_processes, plan_of, script_on_one_process
from tests.certificate.tables import (
    PLANTED,
    RIGHT,
    Setup,
    certify_setup,
    find_planted,
    is_found,
    is_named,
    job_of_planted,
    of_script,
    over,
    words_of,
    write_inputs,
)
from tests.helpers.ranks import run_ranks


OFTEN = (
    "label_smoothing_factor",
    "group_by_length, split_batches",
    "loss.backward",
    "masked language model",
)
OFTEN_PLANTED = ("kept_gradient", "labels_of_one_rank")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """The folder of models and datasets."""
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A job in which errors are planted, run on one process, and its plan."""
    return job_of_planted(tmp_path_factory.mktemp("planted"))


def row(value, often: tuple[str, ...]):
    """A row of a table as a parameter; slow, unless it is among the frequent ones."""
    under = next(iter(value.settings), "") if hasattr(value, "settings") else ""
    marks = () if value.name in often and not under else pytest.mark.slow
    return pytest.param(value, id=f"{value.name} {under}".strip(), marks=marks)


@pytest.mark.parametrize("setup", [row(setup, OFTEN) for setup in RIGHT])
def test_a_right_setup_is_not_called_different(tmp_path, inputs, setup):
    results = certify_setup(setup, tmp_path / "run", inputs)
    assert exit_code(results) == 0, [(verdict([each]), each.path, each.first, each.cause) for each in results]


@pytest.mark.parametrize("error", [row(error, OFTEN_PLANTED) for error in PLANTED])
def test_a_planted_error_is_found_and_named(tmp_path, planted, error):
    result = find_planted(tmp_path / "run", error, *planted)
    assert is_found(result) and is_named(error, result), (result.first, result.cause)


def test_means_of_means_do_not_hide_a_row_that_is_seen_twice(tmp_path, inputs):
    """What is documented of a loop's loss is no excuse for its samples."""
    plan = plan_of(tmp_path, 2)
    job = script_on_one_process(tmp_path / "alone", plan, *words_of(of_script("accumulation"), inputs))
    right = many_processes(job, tmp_path / "right", plan)
    assert right.documented and "their means over tokens" in right.cause, (right.first, right.cause)
    wrong = many_processes(job, tmp_path / "wrong", plan, "duplicated_index")
    assert wrong.first[0] == "samples" and not wrong.documented and "were seen by no rank" in wrong.cause


@pytest.mark.slow
def test_means_of_means_do_not_hide_what_is_made_of_gradients(tmp_path, inputs):
    """The norm that clips, the rate of a step, and whether there is one, are no matter of means."""
    plan = plan_of(tmp_path, 2)
    job = script_on_one_process(tmp_path / "alone", plan, *words_of(of_script("accumulation"), inputs))
    named = {
        "norm_of_some_gradients": "the norm of rank 0",
        "schedule_that_moves_twice": "rate",
        "optimizer_that_stands_still": "no rank makes step 2",  # the rate of the first one is 0
    }
    for planted, reason in named.items():
        result = many_processes(job, tmp_path / planted, plan, planted)
        assert not result.documented and reason in result.cause, (planted, result.first, result.cause)


@pytest.mark.slow
def test_means_of_means_do_not_hide_an_optimizer_that_is_not_resumed(tmp_path, inputs, monkeypatch):
    """A resumed run is compared with the one that was not interrupted where one process has other parameters."""

    def lose_moments(rank, ranks, job, plan, planted, cases=(), **options):
        for file in tmp_path.rglob("optimizer.pt") if cases else ():
            file.unlink()
        run_ranks(rank, ranks, job, plan, planted, cases, **options)

    monkeypatch.setattr(runs, "run_ranks", lose_moments)
    setup = Setup("means", {"average_tokens_across_devices": False}, cases=("trainer", "resumed"))
    *whole, resumed = certify_setup(setup, tmp_path / "run", inputs)
    assert all(result.documented for result in whole), [(result.first, result.cause) for result in whole]
    assert not resumed.documented, (resumed.first, resumed.cause)


def test_a_script_may_load_its_model_over_the_grid(tmp_path, inputs):
    """The script calls hf_axonn.from_pretrained, which asks Transformers what was loaded."""
    (result,) = certify_setup(of_script("hf_axonn.from_pretrained", over(x=2)), tmp_path / "run", inputs)
    assert result.equal, (result.first, result.cause)


@pytest.mark.slow
def test_bert_under_trainer_has_the_gradient_times_the_number_of_ranks(tmp_path, inputs):
    """A mistake of the libraries, which is found: the loss ignores the number of tokens that Trainer has counted."""
    (result,) = certify_setup(of_script("Trainer, masked language model", model="bert"), tmp_path / "run", inputs)
    assert not result.documented and "times 2 (the number of ranks" in result.cause, (result.first, result.cause)


@pytest.mark.slow
def test_a_run_of_dispatched_batches_goes_on_with_other_rows(tmp_path, inputs):
    """A mistake of the libraries, which is found: Accelerate skips a batch where all ranks have had one."""
    dispatched = {"accelerator_config": {"dispatch_batches": True}}
    results = certify_setup(Setup("resumed", dispatched, cases=("trainer", "resumed")), tmp_path / "run", inputs)
    resumed = next(result for result in results if result.path == "resumed")
    assert not resumed.documented and resumed.first[0] == "samples", (resumed.first, resumed.cause)
    assert all(result.equal or result.documented for result in results if result is not resumed)


@pytest.mark.slow
def test_a_collective_that_some_ranks_leave_out_ends_the_run(tmp_path, capsys, inputs):
    """In seconds, and not after the half an hour of its timeout; the certificate says where the ranks wait."""
    words = ["certify", "--config", str(launch_file(tmp_path, 2)), "--steps", "2"]
    words += ["--script", f"{SCRIPTS / 'waiting_script.py'} {inputs / 'gpt2'}", "--output", str(tmp_path / "out")]
    assert main(words) == 1
    (case,) = json.loads((tmp_path / "out" / "certificate.json").read_text())["cases"]
    assert "stands still" in case["failed"] and "waiting_script.py, line" in case["failed"], case["failed"]
    assert "does not run" in capsys.readouterr().out
