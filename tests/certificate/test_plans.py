"""Launch files and arguments: what is run, and a sentence for what is not."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import torch

from hf_axonn.certificate import certify as certificates
from hf_axonn.certificate import deepspeed, launch_plan
from hf_axonn.certificate.job import Job, make_job, read_arguments
from hf_axonn.certificate.launch_plan import divide_plan, read_launch_plan, smaller_grid
from hf_axonn.certificate.progress import Progress
from hf_axonn.certificate.worker import ALONE
from hf_axonn.cli.main import main
from hf_axonn.topology.grid import Grid
from tests.certificate.runs import launch_file, plan_of


def refusal(folder, ranks: int = 2, **settings) -> str:
    """What is said about a launch file."""
    with pytest.raises(ValueError) as error:
        read_launch_plan(launch_file(folder, ranks, **settings))
    return str(error.value)


def test_positions_are_ranks_with_samples_of_their_own(tmp_path):
    assert plan_of(tmp_path, 4).positions == 4
    ours = plan_of(tmp_path, 8, axonn_config={"grid": {"data": 2, "z": 2, "x": 2}})
    assert (ours.positions, ours.own, ours.factors["x * y"]) == (4, True, 2)
    tensor = {"parallelism_config_tp_size": 2, "parallelism_config_dp_shard_size": 2}
    both = plan_of(tmp_path, 4, parallelism_config=tensor)
    assert (both.positions, both.loading["tp_size"], both.loading["fsdp_size"]) == (2, 2, 2)
    assert both.title == "FSDP2 x tensor parallelism of 2, 4 ranks"
    assert plan_of(tmp_path, 2).title == "DDP, 2 ranks"
    assert plan_of(tmp_path, 4, axonn_config={"grid": {"pipe": 4}}).stages == 4


def test_what_is_left_away_is_said(tmp_path):
    plan = plan_of(tmp_path, 2, mixed_precision="bf16", num_machines=2, dynamo_config={"dynamo_backend": "INDUCTOR"})
    assert len(plan.notes) == 3 and "mixed_precision (bf16) is off" in plan.notes[0]
    assert plan.settings["mixed_precision"] == "no" and plan.settings["num_machines"] == 1


def test_what_cannot_be_certified_is_refused(tmp_path, monkeypatch):
    assert "Megatron-LM cannot be certified yet" in refusal(tmp_path, distributed_type="MEGATRON_LM")
    assert "fsdp_version: 2" in refusal(tmp_path, distributed_type="FSDP", fsdp_config={"fsdp_version": 1})
    assert "unknown key 'num_procesess'" in refusal(tmp_path, num_procesess=2)
    assert "context parallelism" in refusal(tmp_path, parallelism_config={"parallelism_config_cp_size": 2})
    assert "nothing to compare" in refusal(tmp_path, 1)
    assert "nothing to compare" in refusal(tmp_path, 1, axonn_config={"grid": {"x": 1}})
    assert "LOCAL_MACHINE" in refusal(tmp_path, compute_environment="AMAZON_SAGEMAKER")
    assert "ranks, num_processes is 4" in refusal(tmp_path, 4, parallelism_config={"parallelism_config_tp_size": 2})
    monkeypatch.setattr(launch_plan, "core_count", lambda: 2)
    assert "certify it with num_processes: 8" in refusal(tmp_path, 16)
    assert "certify the grid data=2,z=2,y=1,x=2" in refusal(
        tmp_path, 64, axonn_config={"grid": {"data": 4, "z": 4, "x": 4}}
    )


def zero_plan(folder, monkeypatch, dtype: str = "fp32", **section):
    """What a launch file of DeepSpeed comes down to where it is installed."""
    monkeypatch.setattr(deepspeed, "find_spec", lambda name: name)
    return plan_of(folder, 2, dtype, distributed_type="DEEPSPEED", deepspeed_config=section)


def test_what_a_file_of_deepspeed_says_the_arguments_say_too(tmp_path, monkeypatch):
    section = {"zero_stage": 3, "gradient_clipping": 0.5, "gradient_accumulation_steps": 8}
    plan = zero_plan(
        tmp_path, monkeypatch, **section, offload_param_device="none", deepspeed_multinode_launcher="pdsh"
    )
    assert (plan.title, plan.positions, plan.settings["distributed_type"]) == (
        "DeepSpeed ZeRO-3, 2 ranks",
        2,
        "DEEPSPEED",
    )
    assert plan.settings["deepspeed_config"] == {**section, "gradient_accumulation_steps": 4}
    assert len(plan.notes) == 2 and "zero3_save_16bit_model" in plan.notes[1]
    job = make_job(tmp_path, plan, steps=3, vocabulary=160, trainer={}, dtype="fp32")
    assert (job.zero, job.saves, job.norms, job.accumulation) == (True, False, True, 4)
    whole = zero_plan(tmp_path, monkeypatch, "bf16", **section, zero3_save_16bit_model=True)
    saving = make_job(tmp_path, whole, steps=3, vocabulary=160, trainer={}, dtype="bf16")
    assert saving.saves and (job.numbers, saving.numbers) == (torch.float32, torch.bfloat16)
    assert job.trainer == {"max_grad_norm": 0.5} and {path for path, _ in job.cases} == {"trainer", "loop"}
    plain = zero_plan(tmp_path, monkeypatch, zero_stage=0)
    assert plain.title == "DeepSpeed without ZeRO, 2 ranks" and "no norm is compared" in plain.notes[0]
    assert not make_job(tmp_path, plain, steps=3, vocabulary=160, trainer={}, dtype="fp32").norms


def test_a_file_of_deepspeeds_own(tmp_path, monkeypatch):
    path = tmp_path / "zero.json"
    zero = {"stage": 1, "overlap_comm": True, "offload_optimizer": {"device": "none"}}
    own = {
        "train_batch_size": 64,
        "optimizer": {"type": "AdamW"},
        "bf16": {"enabled": False},
        "zero_optimization": zero,
    }
    path.write_text(json.dumps(own))
    plan = zero_plan(tmp_path, monkeypatch, "bf16", deepspeed_config_file=str(path))
    assert plan.title == "DeepSpeed ZeRO-1, 2 ranks" and "optimizer of" in plan.notes[0]
    assert "mixed_precision" not in plan.settings
    given = json.loads(base64.urlsafe_b64decode(plan.settings["deepspeed_config"]["deepspeed_config_file"]))
    assert given == {
        "bf16": {"enabled": True},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": 1, "overlap_comm": True},
    }
    path.write_text(json.dumps({"zero_optimization": {}}))
    assert zero_plan(tmp_path, monkeypatch, deepspeed_config_file=str(path)).zero.stage == 0
    for wrong, said in (
        (
            {"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 2}},
            "zero_hpz_partition_size cannot be certified",
        ),
        ({"zero_optimization": {"round_robin_gradients": True}}, "round_robin_gradients cannot be certified"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "offload_param: runs with offloading cannot"),
        ({"zero_optimization": {}, "tensor_parallel": {}}, "tensor_parallel cannot be certified yet"),
        ([], "has no section zero_optimization"),
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=said):
            zero_plan(tmp_path, monkeypatch, deepspeed_config_file=str(path))
    with pytest.raises(ValueError, match=r"missing\.json cannot be read"):
        zero_plan(tmp_path, monkeypatch, deepspeed_config_file=str(tmp_path / "missing.json"))


def test_what_of_deepspeed_cannot_be_certified_is_refused(tmp_path, monkeypatch):
    def said(dtype: str = "fp32", **section) -> str:
        with pytest.raises(ValueError) as error:
            zero_plan(tmp_path, monkeypatch, dtype, **section)
        return str(error.value)

    assert "float32 at most: certify it with --dtype fp32" in said("float64", zero_stage=2)
    assert "offload_optimizer_device is cpu: runs with offloading" in said(
        zero_stage=2, offload_optimizer_device="cpu"
    )
    assert "deepspeed_moe_layer_cls_names cannot be" in said(zero_stage=3, deepspeed_moe_layer_cls_names="A")
    assert "zero_stage is 4: write 0, 1, 2 or 3" in said(zero_stage=4)
    assert "or write zero_stage: 1" in said("bf16", zero_stage=0)
    monkeypatch.setattr(deepspeed, "find_spec", lambda name: None)
    file = launch_file(tmp_path, 2, distributed_type="DEEPSPEED", deepspeed_config={"zero_stage": 2})
    with pytest.raises(ValueError, match="DeepSpeed is not installed: pip install deepspeed"):
        read_launch_plan(file, "fp32")


def test_the_largest_smaller_grid():
    assert smaller_grid(Grid(data=4, z=4, x=4), 8) == Grid(data=2, z=2, x=2)
    assert smaller_grid(Grid(pipe=3, x=8), 8) == Grid(pipe=3, x=2)
    assert smaller_grid(Grid(x=5, z=7), 8) == Grid(z=7)
    assert smaller_grid(Grid(z=16, x=2, context=8), 8) == Grid(z=4, x=2, context=2)


def test_arguments_of_the_user_are_kept_or_refused(tmp_path):
    plan = plan_of(tmp_path, 2)

    def job(**arguments):
        return make_job(tmp_path, plan, steps=3, vocabulary=160, trainer=arguments)

    kept = job(
        gradient_accumulation_steps=8, max_grad_norm=0.3, bf16=False, output_dir="/elsewhere", optim="adafactor"
    )
    assert (kept.accumulation, kept.trainer) == (4, {"max_grad_norm": 0.3})
    assert kept.cases[:2] == [("trainer", "sgd"), ("trainer", "adafactor")]
    assert "gradient_accumulation_steps is 4 and not 8." in kept.notes
    assert job(fp16=True).notes == ["fp16 is off: it is compared in float64."]
    assert len(kept.rows) == (3 * 4 - 1) * 4 + 1
    with pytest.raises(ValueError, match="no argument 'max_grad_nrom': did you mean max_grad_norm"):
        job(max_grad_nrom=1.0)
    with pytest.raises(ValueError, match="deepspeed is said in the launch file"):
        job(deepspeed="ds.json")
    with pytest.raises(ValueError, match="--trainer-args: "):
        job(lr_scheduler_type="sideways")
    with pytest.raises(ValueError, match="cannot be read"):
        read_arguments(tmp_path / "missing.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ValueError, match="holds no arguments"):
        read_arguments(tmp_path / "list.yaml")


def test_certificates_of_one_model_rows_and_cases_share_the_run_on_one_process(tmp_path, monkeypatch):
    ran = []

    def run(job, name, cases, progress):
        ran.append(Path(job.folder).name)
        Path(job.folder, ALONE, "trained").write_text(ran[-1])

    monkeypatch.setattr(certificates, "_run", run)
    jobs = {
        "first": {"ranks": 2, "positions": 1, "seed": 0},
        "more ranks": {"ranks": 4, "positions": 1, "seed": 0},
        "other rows": {"ranks": 2, "positions": 2, "seed": 0},
        "other seed": {"ranks": 2, "positions": 1, "seed": 1},
        "other weights": {"ranks": 2, "positions": 1, "seed": 0},
        "again": {"ranks": 8, "positions": 2, "seed": 0},
    }
    found = {}
    for name, about in jobs.items():
        for folder in (ALONE, "model"):
            Path(tmp_path, name, folder).mkdir(parents=True)
        Path(tmp_path, name, "model", "weights").write_text("others" if name == "other weights" else "some")
        job = Job(str(tmp_path / name), steps=2, vocabulary=9, cases=[("loop", "sgd")], notes=[name], **about)
        certificates._run_alone(job, ["loop-sgd"], Progress(job), tmp_path / "truths")
        found[name] = Path(tmp_path, name, ALONE, "trained").read_text()
    assert ran == ["first", "other rows", "other seed", "other weights"]
    assert found == {name: name for name in ran} | {"more ranks": "first", "again": "other rows"}


def test_the_command_says_why_nothing_was_started(tmp_path, capsys):
    file = launch_file(tmp_path, 2)
    assert main(["certify", "--config", str(tmp_path / "none.yaml"), "--model", "llama"]) == 2
    assert main(["certify", "--config", str(file), "--model", "t5"]) == 2
    assert main(["certify", "--config", str(file), "--model", "llama", "--steps", "1"]) == 2
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert main(["certify", "--config", str(file), "--model", "llama", "--output", str(tmp_path / "full")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 4 and all(line.startswith("hf-axonn certify: ") for line in said)


def test_a_trainers_model_that_transformers_divides(tmp_path):
    plan = divide_plan(plan_of(tmp_path, 4), {"fsdp_size": 2, "tp_size": 2, "ep_size": 2})
    assert plan.title == "Transformers' DistributedConfig(fsdp_size=2, tp_size=2, ep_size=2), 4 ranks"
    assert (plan.positions, plan.factors["ranks of expert parallelism"]) == (2, 2)
    given = {"distributed_config": plan.loading, "packing": True}
    job = make_job(tmp_path, plan, steps=3, vocabulary=160, trainer=given)
    assert {path for path, _ in job.cases} == {"trainer"} and job.packing and len(job.notes) == 2
    with pytest.raises(ValueError, match=r"tp_size 1 x data parallelism of 2 are not the 4 processes"):
        divide_plan(plan_of(tmp_path, 4), {"fsdp_size": 2})
    with pytest.raises(ValueError, match="distributed_config: .*tp_sise"):
        divide_plan(plan_of(tmp_path, 4), {"tp_sise": 2})
    with pytest.raises(ValueError, match="the launch file divides the model"):
        divide_plan(plan_of(tmp_path, 2, axonn_config={"grid": {"x": 2}}), {"tp_size": 2})


def test_adapters_are_said_as_in_a_lora_config(tmp_path):
    plan = plan_of(tmp_path, 2)
    fields = {"r": 4, "target_modules": "all-linear"}
    job = make_job(tmp_path, plan, steps=3, vocabulary=160, trainer={"peft": fields})
    assert job.peft == fields and job.trainer == {} and ("resumed", "adamw_torch") in job.cases and job.saved_at == 1
    assert make_job(tmp_path, plan, steps=1, vocabulary=160, trainer={}).saved_at == 0
    with pytest.raises(ValueError, match="--trainer-args: peft: .*rank"):
        make_job(tmp_path, plan, steps=3, vocabulary=160, trainer={"peft": {"rank": 4}})
