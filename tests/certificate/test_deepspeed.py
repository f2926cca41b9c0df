"""Certificates of DeepSpeed, where it is installed: equal runs are found equal, planted errors are found and named."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from hf_axonn.cli.main import main
from tests.certificate.runs import assert_named, launch_file, one_process, plan_of


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install deepspeed"),
]


@pytest.fixture(scope="module")
def zero(tmp_path_factory):
    """A job for two ranks of ZeRO-2, run on one process, and its plan."""
    folder = tmp_path_factory.mktemp("zero")
    plan = plan_of(folder, 2, "fp32", distributed_type="DEEPSPEED", deepspeed_config={"zero_stage": 2})
    return one_process(folder / "alone", plan, "llama", dtype="fp32", max_grad_norm=0.5), plan


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        ("scaled_loss", "loss", "gradients are the mean over the tokens of a step times 2 (the number of ranks = "),
        ("unreduced_by_deepspeed", "gradient", "own samples alone: nothing is averaged over the ranks (times 1"),
        ("ungathered_by_deepspeed", "copy", ""),
    ],
)
def test_planted_errors_are_found_and_named(zero, tmp_path, error, kind, said):
    assert_named(*zero, tmp_path / "certificate", error, kind, said)


@pytest.mark.parametrize(("stage", "dtype"), [(1, "fp32"), (3, "fp32"), (2, "bf16")])
def test_the_command(tmp_path, capsys, stage, dtype):
    """Parts and copies of the parameters, with accumulation, clipping and recomputed layers."""
    (tmp_path / "arguments.yaml").write_text("{gradient_accumulation_steps: 2, gradient_checkpointing: true}")
    section = {"zero_stage": stage, "gradient_clipping": 0.5, "zero3_save_16bit_model": True}
    config = launch_file(tmp_path, 2, distributed_type="DEEPSPEED", deepspeed_config=section)
    words = ["certify", "--config", str(config), "--model", "llama", "--dtype", dtype, "--steps", "2"]
    words += ["--trainer-args", str(tmp_path / "arguments.yaml"), "--output", str(tmp_path / "certificate")]
    found = main(words)
    screen = capsys.readouterr()
    assert found == 0, screen.out + screen.err
    written = json.loads((tmp_path / "certificate" / "certificate.json").read_text())
    assert [case["path"] for case in written["cases"]] == ["trainer", "loop"] and written["trainer"][
        "max_grad_norm"
    ] == 0.5
    for case in written["cases"]:
        assert case["worst"]["copy"]["error"] == 0, case["worst"]
        for kind in ("gradient", "norm", "parameter"):
            assert 0 < case["worst"][kind]["error"] <= case["worst"][kind]["bound"], (kind, case["worst"])
