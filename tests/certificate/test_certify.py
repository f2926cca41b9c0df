"""Certificates from end to end: what is equal is found equal, and errors that are planted are found and named."""

from __future__ import annotations

import json

import pytest

from hf_axonn.certificate.compare import BOUND, KINDS
from hf_axonn.cli.main import main
from tests.certificate.runs import assert_named, launch_file, many_processes, one_process, plan_of


OURS = {"axonn_config": {"grid": {"x": 2}}}
FSDP = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_state_dict_type": "FULL_STATE_DICT",
}
TENSOR = {f"parallelism_config_{name}": 1 for name in ("dp_replicate_size", "dp_shard_size", "cp_size")}


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    """A job for two ranks of DistributedDataParallel, run on one process, and its plan."""
    folder = tmp_path_factory.mktemp("ddp")
    plan = plan_of(folder, 2)
    return one_process(folder / "alone", plan, "gpt2", max_grad_norm=0.5), plan


def test_a_grid_of_two_is_equal(tmp_path):
    plan = plan_of(tmp_path, 2, **OURS)
    job = one_process(tmp_path / "alone", plan, "gpt2")
    result = many_processes(job, tmp_path / "certificate", plan)
    assert result.equal and result.groups == [[0, 1]]
    assert set(result.worst) == set(KINDS) - {"copy"} and all(error.size <= BOUND for error in result.worst.values())


def test_a_scaled_loss_is_found_and_named(ddp, tmp_path):
    result = many_processes(ddp[0], tmp_path / "certificate", ddp[1], "scaled_loss")
    assert result.first is not None and result.first[0] == "loss" and result.first[1].step == 1
    assert not result.documented
    assert result.cause.startswith("gradients are the mean over the tokens of a step times 2 (the number of ranks = ")


@pytest.mark.slow
def test_accelerate_fills_the_last_batch_which_is_documented(ddp, tmp_path):
    result = many_processes(ddp[0], tmp_path / "certificate", ddp[1])
    assert not result.equal and result.first[0] == "samples" and result.first[1].step == 2
    assert result.documented and "even_batches" in result.cause
    assert result.worst["gradient"].size <= BOUND and result.worst["parameter"].size <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        ("forgotten_average", "gradient", "own samples alone: nothing is averaged over the ranks (times 2 ("),
        ("duplicated_sample", "samples", "were seen by no rank; samples"),
        ("unclipped_rank", "parameter", "rank 1 does not clip in step 1, though the norm is"),
        ("dropped_bias", "gradient", "transformer.h.0.attn.c_attn.bias missing on rank(s) 0"),
    ],
)
def test_planted_errors_are_found_and_named(ddp, tmp_path, error, kind, said):
    assert_named(*ddp, tmp_path / "certificate", error, kind, said)


@pytest.fixture(scope="module")
def divided(tmp_path_factory):
    """A job of packed rows for two ranks that divide their positions, run on one process, and a plan for each way of
    attention."""
    folder = tmp_path_factory.mktemp("divided")
    sections = {way: {"grid": {"z": 2, "context": 2}, "context_attention": way} for way in ("heads", "keys")}
    plans = {way: plan_of(folder, 2, axonn_config=section) for way, section in sections.items()}
    return one_process(folder / "alone", plans["heads"], "llama", packing=True), plans


@pytest.mark.parametrize(
    ("way", "error", "said"),
    [
        ("heads", "label_lost_at_the_cut", "lose the label after each cut"),
        ("keys", "stripes_in_wrong_order", "numbered as if the stripes of context came in the order 0, 1, 3, 2"),
        *(
            pytest.param(*error, marks=pytest.mark.slow)
            for error in (
                ("heads", "positions_in_wrong_order", "numbered as if the ranks of context came in the order 1, 0"),
                ("heads", "document_that_sees_its_neighbour", "documents see each other"),
                ("keys", "label_lost_at_the_cut", "are shifted in stripes"),
                ("keys", "document_that_sees_its_neighbour", "documents see each other"),
            )
        ),
    ],
)
def test_rows_that_are_divided_wrongly_are_found_and_named(divided, tmp_path, way, error, said):
    job, plans = divided
    assert_named(job, plans[way], tmp_path / "certificate", error, "loss", said)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["heads", "keys"])
def test_divided_rows_are_equal(divided, tmp_path, way):
    job, plans = divided
    result = many_processes(job, tmp_path / "certificate", plans[way])
    assert result.equal and result.groups == [[0, 1]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "settings", "code"),
    [
        ("ddp", 2, {}, 0),
        ("fsdp2", 2, {"distributed_type": "FSDP", "fsdp_config": FSDP}, 0),
        # Trainer's evaluation loss counts full batches twice, as both ranks have them, and the last one once
        ("tensor", 2, {"parallelism_config": {**TENSOR, "parallelism_config_tp_size": 2}}, 1),
        ("ours", 4, {"axonn_config": {"grid": {"z": 2, "x": 2}}}, 0),
        ("context", 4, {"axonn_config": {"grid": {"z": 4, "context": 2}}}, 0),
        ("pipe", 2, {"axonn_config": {"grid": {"pipe": 2}}}, 0),
        ("y", 2, {"axonn_config": {"grid": {"y": 2}}}, 0),
        ("data", 2, {"axonn_config": {"grid": {"data": 2}}}, 0),
    ],
)
def test_the_command(tmp_path, capsys, name, ranks, settings, code):
    arguments = tmp_path / "arguments.yaml"
    arguments.write_text("{gradient_accumulation_steps: 2, gradient_checkpointing: true, max_grad_norm: 0.5}")
    words = ["certify", "--config", str(launch_file(tmp_path, ranks, **settings)), "--model", "llama"]
    words += ["--trainer-args", str(arguments), "--output", str(tmp_path / "certificate")]
    found = main(words)
    screen = capsys.readouterr()
    assert found == code, screen.out + screen.err
    written = json.loads((tmp_path / "certificate" / "certificate.json").read_text())
    page = (tmp_path / "certificate" / "certificate.html").read_text()
    assert written["exit_code"] == code and written["verdict"] in screen.out and written["verdict"] in page
    for case in written["cases"]:
        for kind in ("start", "gradient", "parameter"):
            assert case["worst"][kind]["error"] <= BOUND, case


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({"axonn_config": {"grid": {"x": 2}}}, "{peft: {r: 4, target_modules: all-linear}}"),
        ({"axonn_config": {"grid": {"z": 2}}}, "{packing: true, gradient_accumulation_steps: 2}"),
    ],
)
def test_adapters_and_packed_rows_and_what_goes_on(tmp_path, capsys, settings, arguments):
    """LoRA and packing; each with the case that goes on from what another process saved."""
    (tmp_path / "arguments.yaml").write_text(arguments)
    words = ["certify", "--config", str(launch_file(tmp_path, 2, **settings)), "--model", "llama"]
    words += ["--trainer-args", str(tmp_path / "arguments.yaml"), "--output", str(tmp_path / "certificate")]
    assert main(words) == 0, capsys.readouterr().out
    written = json.loads((tmp_path / "certificate" / "certificate.json").read_text())
    assert [case["path"] for case in written["cases"]] == ["trainer", "trainer", "resumed", "loop", "loop"]
    for case in written["cases"]:
        assert case["equal"] or case["documented"], case
        assert case["worst"]["gradient"]["step"] > (1 if case["path"] == "resumed" else 0)
        assert all(error["error"] <= BOUND for error in case["worst"].values()), case


@pytest.mark.slow
def test_experts_that_transformers_divides(tmp_path, capsys):
    """The optimizer of such a model cannot be saved: its training is compared all the same."""
    (tmp_path / "arguments.yaml").write_text("distributed_config: {tp_size: 2, ep_size: 2}")
    words = ["certify", "--config", str(launch_file(tmp_path, 2)), "--model", "mixtral", "--steps", "2"]
    words += ["--trainer-args", str(tmp_path / "arguments.yaml"), "--output", str(tmp_path / "certificate")]
    assert main(words) == 1  # the evaluation loss, as under tensor parallelism
    screen = capsys.readouterr().out
    assert "note: no run is resumed: Trainer saves no optimizer" in screen and "counts full batches 2 times" in screen
    written = json.loads((tmp_path / "certificate" / "certificate.json").read_text())
    assert [case["path"] for case in written["cases"]] == ["trainer", "trainer"]
    for case in written["cases"]:
        assert case["first"]["kind"] == "evaluation"
        assert all(error["error"] <= BOUND for kind, error in case["worst"].items() if kind != "evaluation"), case
