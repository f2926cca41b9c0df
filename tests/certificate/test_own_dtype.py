"""Certificates in the run's own dtype, with processes: what is equal within it, and errors that are planted."""

from __future__ import annotations

import json

import pytest

from hf_axonn.certificate.compare import KINDS, CaseResult, Error
from hf_axonn.certificate.explain import Cause
from hf_axonn.certificate.own_dtype import conclude
from hf_axonn.cli.main import main
from tests.certificate.runs import assert_named, launch_file, many_processes, one_process, plan_of


@pytest.fixture(scope="module", params=["bf16", "fp32"])
def ddp(tmp_path_factory, request):
    """A job for two ranks of DistributedDataParallel, run on one process, and its plan."""
    folder = tmp_path_factory.mktemp(request.param)
    plan = plan_of(folder, 2, request.param)
    return one_process(folder / "alone", plan, "gpt2", dtype=request.param, max_grad_norm=0.5), plan


@pytest.mark.slow
def test_two_ranks_are_equal_but_for_the_end_of_the_epoch(ddp, tmp_path):
    result = many_processes(ddp[0], tmp_path / "certificate", ddp[1])
    assert result.documented and result.first[0] == "samples" and "even_batches" in result.cause
    for kind in ("loss", "gradient", "norm", "parameter", "logged", "logits"):
        assert 0 < result.worst[kind].size <= result.worst[kind].bound, kind


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        ("scaled_loss", "loss", "gradients are the mean over the tokens of a step times 2 (the number of ranks = "),
        ("forgotten_average", "gradient", "own samples alone: nothing is averaged over the ranks (times 2 ("),
        ("duplicated_sample", "samples", "right for the samples that the ranks saw"),
        ("unclipped_rank", "parameter", "rank 1 does not clip in step 1, though the norm is"),
        ("dropped_bias", "gradient", "transformer.h.0.attn.c_attn.bias missing on rank(s) 0"),
    ],
)
def test_planted_errors_are_found_and_named(ddp, tmp_path, error, kind, said):
    assert_named(*ddp, tmp_path / "certificate", error, kind, said)


@pytest.mark.slow
def test_adapters_and_packed_rows_are_equal(tmp_path):
    plan = plan_of(tmp_path, 2, "bf16", axonn_config={"grid": {"x": 2}})
    adapters = {"peft": {"r": 4, "target_modules": ["q_proj", "v_proj"]}, "packing": True}
    job = one_process(tmp_path / "alone", plan, "llama", dtype="bf16", **adapters)
    result = many_processes(job, tmp_path / "certificate", plan)
    assert result.equal and result.worst["start"].size == 0 < result.worst["gradient"].size, result.cause


@pytest.mark.slow
def test_a_loss_that_is_not_known_is_refused(tmp_path):
    plan = plan_of(tmp_path, 2, "bf16")
    job = one_process(tmp_path / "alone", plan, "gpt2", dtype="bf16", label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="is not SGD's step of the mean loss"):
        many_processes(job, tmp_path / "certificate", plan)


@pytest.mark.slow
def test_the_command_in_bf16(tmp_path, capsys):
    config = launch_file(tmp_path, 2, axonn_config={"grid": {"x": 2}}, mixed_precision="bf16")
    words = ["certify", "--config", str(config), "--model", "llama", "--dtype", "bf16"]
    found = main([*words, "--output", str(tmp_path / "certificate")])
    screen = capsys.readouterr()
    assert found == 0, screen.out + screen.err
    assert "equal to one process within bf16." in screen.out
    written = json.loads((tmp_path / "certificate" / "certificate.json").read_text())
    assert written["dtype"] == "bf16" and [case["path"] for case in written["cases"]] == ["trainer", "loop"]
    for case in written["cases"]:
        assert {error["kind"] for error in case["bounds"]} <= set(KINDS)
        gradients = [error for error in case["bounds"] if error["kind"] == "gradient"]
        assert len({error["bound"] for error in gradients}) > 20
        assert all(0 <= error["error"] <= error["bound"] < 0.2 for error in gradients)


def test_a_mistake_is_the_cause_of_a_case_before_what_is_documented():
    ends, wrong = (Cause("the last batch is filled up", True), Cause("a gradient is twice as large"))
    samples, gradient = ("samples", Error(1.0, 1, "samples", 0)), ("gradient", Error(1.0, 2, "weight", 1))
    case = CaseResult("trainer", "sgd")
    conclude(case, [])
    assert case.equal and not case.cause
    conclude(case, [(ends, samples), (wrong, gradient)])
    assert (case.first, case.cause, case.documented) == (gradient, "a gradient is twice as large", False)
    conclude(case, [(ends, samples)])
    assert (case.first, case.cause, case.documented) == (samples, "the last batch is filled up", True)
