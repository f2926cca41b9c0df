"""Certificates of experts to which tokens travel: equal to one process, and errors on their way are found."""

from __future__ import annotations

import pytest

from tests.certificate.runs import assert_named, many_processes, one_process, plan_of


@pytest.fixture(scope="module")
def moving(tmp_path_factory):
    """The run of a mixture on one process, and the launch file of a grid on which every expert lies on one rank."""
    folder = tmp_path_factory.mktemp("moving")
    plan = plan_of(folder, 4, axonn_config={"grid": {"z": 2, "x": 2}, "experts": "move"})
    return one_process(folder / "one", plan, "mixtral"), plan


def test_experts_to_which_tokens_travel_equal_one_process(moving, tmp_path):
    """Up to where the loader fills up the end of an epoch."""
    job, plan = moving
    result = many_processes(job, tmp_path / "ranks", plan)
    assert result.documented and result.first[0] == "samples" and result.first[1].step == 2, result
    assert not any(error.wrong for kind, error in result.errors if error.step == 1)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        ("lost_token", "loss", "rank 1 (micro-batch 1) is not that of its samples"),
        pytest.param("weight_applied_twice", "loss", "model.embed_tokens.weight other values", marks=SLOW),
        pytest.param("undivided_expert_gradient", "gradient", "mlp.experts.gate_up_proj times 2 (", marks=SLOW),
        ("experts_mixed_over_z", "gradient", "mlp.experts.gate_up_proj other values on rank(s) 0, 1, 2, 3"),
    ],
)
def test_errors_on_the_way_to_experts_are_found(moving, tmp_path, error, kind, said):
    job, plan = moving
    assert_named(job, plan, tmp_path / error, error, kind, said)
