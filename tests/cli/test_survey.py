"""`hf-axonn survey`: the plan that it prints, its certificates, what it refuses; and code that comes with a model."""

from __future__ import annotations

import inspect
import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from transformers import CONFIG_MAPPING, AutoConfig, dynamic_module_utils
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from hf_axonn.certificate import certify as certificates
from hf_axonn.cli.main import main
from hf_axonn.cli.survey import GRIDS
from tests.helpers.own_type import OwnConfig, OwnForCausalLM, ReadingForCausalLM


def test_it_prints_the_plan_and_what_each_grid_gave(tmp_path, capsys, monkeypatch):
    calls = []

    def certify(config, model, *, output, **_):
        calls.append((config.read_text(encoding="utf-8"), model, output))
        if "y2" in str(output):
            raise RuntimeError("the run on one process failed")
        if "z2" in str(output):
            return 1, ["axonn, z=2: DOES NOT RUN in 1 of 1 runs.", "  loop sgd: the run under the launch file failed"]
        return int("x2y2" in str(output)), ["lines", "  loop sgd: from step 1: off. cause: a bias times 0.5"]

    monkeypatch.setattr(certificates, "certify", certify)
    config = AutoConfig.for_model("xmod", num_hidden_layers=2, hidden_size=48, num_attention_heads=4, is_decoder=True)
    config.save_pretrained(tmp_path / "model")
    command = ["survey", str(tmp_path / "model"), "--output", str(tmp_path / "out"), "--grids", "x2,y2,z2"]
    assert main(command) == 2
    printed = capsys.readouterr().out
    assert printed.startswith("xmod: 2 decoder layers sharded as 4 blocks by rules that are untested")
    assert "  intermediate.dense -> output.dense\n" in printed
    assert "-> attention.output.dense (4 query and 4 kv heads)" in printed
    assert "  output.adapter_modules gets full sequences: not known as a block" in printed
    assert "  x2      equal" in printed and "  y2      not compared  the run on one process failed" in printed
    assert "  z2      does not run  loop sgd: the run under the launch file failed" in printed
    assert "equal to one process on 1 of 3 grids" in printed
    assert "allow_untested: true" in calls[0][0] and "num_processes: 2" in calls[0][0]
    assert main(command) == 2 and "is not empty" in capsys.readouterr().err


def test_a_file_in_the_place_of_the_folder_is_refused_before_a_model_is_read(tmp_path, capsys):
    launch, file = tmp_path / "axonn.yaml", tmp_path / "file"
    settings = {"distributed_type": "MULTI_GPU", "num_processes": 2, "use_cpu": True}
    launch.write_text(yaml.safe_dump({**settings, "axonn_config": {"grid": {"x": 2}}}))
    file.write_text("kept")
    for output in (file, file / "folder"):
        for command in (["survey", "no_model"], ["certify", "--config", str(launch), "--model", "no_model"]):
            assert main([*command, "--output", str(output)]) == 2
            assert f"--output: {output} is a file, or within one: give a folder" in capsys.readouterr().err
    assert file.read_text() == "kept"


def test_a_type_without_blocks_has_no_certificate(capsys):
    assert main(["survey", "xlnet"]) == 1
    assert "xlnet: no list of decoder layers with a block was found" in capsys.readouterr().out
    for grids, message in (("x4", "--grids: x4 is none of x2, y2"), ("x2,y2,x2", "--grids: x2 is given twice")):
        assert main(["survey", "xlnet", "--grids", grids]) == 2
        assert message in capsys.readouterr().err


def test_a_type_can_stand_in_the_table_where_all_grids_are_equal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(certificates, "certify", lambda *_, **__: (0, ["equal"]))
    config = AutoConfig.for_model("xmod", num_hidden_layers=2, hidden_size=48, num_attention_heads=4, is_decoder=True)
    config.save_pretrained(tmp_path / "model")
    for grids, all_of_them in (("x2,z2", False), (",".join(GRIDS), True)):
        assert main(["survey", str(tmp_path / "model"), "--output", str(tmp_path / grids), "--grids", grids]) == 0
        printed = capsys.readouterr().out
        assert "write allow_untested: true into axonn_config" in printed
        assert ("It can stand among CHECKED" in printed) == all_of_them


def test_a_folder_of_adapters_is_refused_with_the_base_model(tmp_path, capsys):
    launch, folder = tmp_path / "axonn.yaml", tmp_path / "adapter"
    settings = {"distributed_type": "MULTI_GPU", "num_processes": 2, "use_cpu": True}
    launch.write_text(yaml.safe_dump({**settings, "axonn_config": {"grid": {"x": 2}}}))
    folder.mkdir()
    for base, named in (("some/base", "give its base model, some/base."), (None, "give its base model.")):
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        for command in (["survey", str(folder)], ["certify", "--config", str(launch), "--model", str(folder)]):
            assert main(command) == 2
            assert f"{folder} has no config.json, it holds an adapter: {named}\n" in capsys.readouterr().err


@pytest.mark.slow
def test_a_certificate_of_a_grid(tmp_path, capsys):
    assert main(["survey", "olmo2", "--grids", "x2", "--output", str(tmp_path / "out")]) == 0
    assert "  x2      equal" in capsys.readouterr().out
    found = json.loads((tmp_path / "out/x2/report/certificate.json").read_text(encoding="utf-8"))
    assert found


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """Keep code that comes with models out of the user's cache, and its classes out of what later tests know."""
    cache = str(tmp_path / "modules")
    monkeypatch.setenv("HF_MODULES_CACHE", cache)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", cache)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for mapping in (CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        monkeypatch.setattr(mapping, "_extra_content", dict(mapping._extra_content))


def own_folder(folder: Path, kind: type[OwnForCausalLM]) -> str:
    """Write a model of a type of one's own: its configuration, and the code that `trust_remote_code` runs."""
    sizes = {"hidden_size": 96, "intermediate_size": 90, "num_hidden_layers": 2, "vocab_size": 131, "head_dim": 24}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 5}
    config = OwnConfig(**sizes, **heads, layer_types=["sliding_attention", "full_attention"], pad_token_id=0)
    names = {"AutoConfig": OwnConfig.__name__, "AutoModelForCausalLM": kind.__name__}
    config.auto_map = {auto: f"own_type.{name}" for auto, name in names.items()}
    config.save_pretrained(folder)
    shutil.copy(inspect.getfile(kind), folder)
    return str(folder)


def certified(monkeypatch) -> list[bool]:
    """Let every certificate say that a grid is equal; returns a list of whether own code was to run."""
    calls = []

    def certify(*_, own_code, **__):
        calls.append(own_code)
        return 0, ["equal"]

    monkeypatch.setattr(certificates, "certify", certify)
    return calls


def test_a_type_of_own_making_is_planned_where_its_code_may_run(tmp_path, capsys, monkeypatch):
    calls, own = certified(monkeypatch), own_folder(tmp_path / "own", OwnForCausalLM)
    command = ["survey", own, "--grids", "x2", "--output", str(tmp_path / "out")]
    assert main(command) == 2 and not calls
    assert "comes with code of its own: read it, and give --trust-remote-code" in capsys.readouterr().err
    assert main([*command, "--trust_remote_code"]) == 0 and calls == [True]
    printed = capsys.readouterr().out
    assert printed.startswith("of_own_making: 2 decoder layers sharded as 4 blocks by rules that are untested")
    assert "self_attn.k_proj self_attn.v_proj -> self_attn.o_proj (4 query and 2 kv heads)\n" in printed
    assert "equal to one process on 1 of 1 grids\n" in printed
    assert "write allow_untested: true into axonn_config" in printed and "CHECKED" not in printed


def test_code_that_reads_a_number_of_the_whole_model_is_refused_with_its_line(tmp_path, capsys, monkeypatch):
    certified(monkeypatch)
    own = own_folder(tmp_path / "own", ReadingForCausalLM)
    assert main(["survey", own, "--trust-remote-code", "--grids", "x2", "--output", str(tmp_path / "out")]) == 0
    lines = (tmp_path / "own/own_type.py").read_text(encoding="utf-8").splitlines()
    line = 1 + next(place for place, text in enumerate(lines) if "self.config.num_attention_heads" in text)
    reason = f"its attention reads num_attention_heads of the whole model at own_type.py:{line}"
    assert f"  self_attn gets full sequences: {reason}\n" in capsys.readouterr().out


def test_other_commands_run_own_code_where_it_may_run(tmp_path, capsys, monkeypatch):
    own_folder(tmp_path / "own", OwnForCausalLM)
    launch = tmp_path / "axonn.yaml"
    section = {"grid": {"x": 2}, "allow_untested": True}
    launch.write_text(yaml.safe_dump({"distributed_type": "MULTI_GPU", "num_processes": 2, "axonn_config": section}))
    monkeypatch.chdir(tmp_path)
    output = {
        "doctor --config axonn.yaml --model own/config.json": "4 blocks by rules that are untested",
        "plan --machine dgx-h100 --gpus 2 --batch-tokens 8k --model own": "it is sharded Linear by Linear",
        "init --machine dgx-h100 --processes 8 --yes --force --model own": "axonn.yaml is written",
    }
    for command in output:
        assert main(command.split()) == 2, command
        refused = capsys.readouterr().err
        assert "comes with code of its own: read it, and give --trust-remote-code" in refused
    for command, expected in output.items():
        assert main([*command.split(), "--trust-remote-code"]) in (0, 1), command
        assert expected in capsys.readouterr().out, command
    assert main(["doctor", "--config", str(launch), "--trust-remote-code"]) == 2
    assert "--trust-remote-code goes with --model" in capsys.readouterr().err


def test_code_that_cannot_run_is_refused(tmp_path, capsys):
    command = ["survey", own_folder(tmp_path / "own", OwnForCausalLM), "--trust-remote-code"]
    (tmp_path / "own/own_type.py").write_text("import torch.nothing")
    assert main(command) == 2
    assert "own does not run (ModuleNotFoundError: No module named 'torch.nothing')" in capsys.readouterr().err
    config = tmp_path / "own/config.json"
    config.write_text(config.read_text().replace("AutoModelForCausalLM", "AutoModel"))
    assert main(command) == 2 and "own comes with no code of its own, as auto_map" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "names"), [(OwnForCausalLM, ["data2", "x2y2z2"]), (ReadingForCausalLM, ["x2y2"])])
def test_a_type_of_own_making_equals_one_process(tmp_path, capsys, kind, names):
    grids = {name: GRIDS[name] for name in names}
    command = ["survey", own_folder(tmp_path / "own", kind), "--trust-remote-code", "--output", str(tmp_path / "out")]
    assert main([*command, "--grids", ",".join(grids)]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name:<8}equal" in printed for name in grids)
    assert f"equal to one process on {len(grids)} of {len(grids)} grids\n" in printed
    for name in grids:  # each by a certificate of its own grid
        found = json.loads((tmp_path / f"out/{name}/report/certificate.json").read_text(encoding="utf-8"))
        assert found["verdict"].startswith("equal to one process"), name
        for case in found["cases"]:  # over data and z the last batch of an epoch is one that Accelerate fills
            assert case["equal"] or case["documented"] and grids[name].dp_size > 1, (name, case)
            assert all(worst["error"] <= 1e-10 for worst in case["worst"].values()), (name, case)
            assert case["path"] == "resumed" or {"loss", "gradient"} <= case["worst"].keys(), (name, case)
