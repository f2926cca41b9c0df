"""Releases of other libraries that are not proven are refused where a grid begins, and nowhere earlier."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution

import peft
import pytest
import transformers
from peft import LoraConfig, get_peft_model

from hf_axonn import AxonnPlugin, GoldfishTrainer, Grid, from_pretrained, parallelize
from hf_axonn.cli.main import main
from hf_axonn.compat import versions
from hf_axonn.launch.command import prepare, prepare_or_exit
from hf_axonn.parallel.adapters.checks import check_adapters, check_config
from tests.helpers.launching import forked
from tests.helpers.models import tiny_model


GRID = Grid(x=2)
OTHER = "4.0.0"


@pytest.fixture
def unproven(monkeypatch) -> str:
    """A release of Transformers that nobody tried, and what is to be said of it."""
    monkeypatch.delenv(versions.SWITCH, raising=False)
    monkeypatch.setattr(transformers, "__version__", OTHER)
    return f"transformers {OTHER} is installed, proven is "


@pytest.mark.parametrize(
    ("release", "proven"),
    [
        ("5.23.0", True),
        ("5.23.9", True),
        ("5.23.1.dev0", True),
        ("5.23.0+ours.1", True),
        ("5.22.2", False),
        ("5.23.0rc1", False),
        ("5.24.0.dev0", False),
        ("5.24.0", False),
        ("6.0", False),
        ("5.23-of our own", False),
    ],
)
def test_patch_releases_are_proven_and_other_minor_releases_are_not(monkeypatch, release, proven):
    monkeypatch.setattr(versions, "requires", lambda _: ["transformers<5.24,>=5.23", "torch>=2"])
    monkeypatch.setattr(transformers, "__version__", release)
    expected = "" if proven else f"transformers {release} is installed, proven is >=5.23,<5.24, the last is 5.23: "
    assert versions.refusal().partition("losses")[0] == expected


def test_the_message_has_the_remedies_and_the_setting_makes_it_a_warning(monkeypatch):
    monkeypatch.delenv(versions.SWITCH, raising=False)
    wanted = ["transformers>=5.23,<5.24", "torch==2.0.*", 'peft<0.1; extra == "peft"', "numpy<1"]
    monkeypatch.setattr(versions, "requires", lambda _: wanted)
    monkeypatch.setattr(transformers, "__version__", OTHER)
    with pytest.raises(ValueError, match="^transformers 4.0.0 .* and torch 2") as error:
        versions.check_versions()
    assert 'Run pip install "transformers>=5.23,<5.24" "torch==2.0.*", or set AXONN_CHECK' in str(error.value)
    with pytest.raises(ValueError, match=f"^peft {peft.__version__} is installed, proven is <0.1"):
        versions.check_versions("peft")
    monkeypatch.setenv(versions.SWITCH, "0")
    with pytest.warns(UserWarning, match="transformers 4.0.0 .*AXONN_CHECK_VERSIONS=0: going on"):
        versions.check_versions()


def test_an_extra_that_asks_for_less_of_a_needed_library_refuses_nothing(monkeypatch):
    monkeypatch.delenv(versions.SWITCH, raising=False)
    wanted = ["transformers>=5", 'peft>=0; extra == "peft"', 'transformers<5; extra == "peft"']
    monkeypatch.setattr(versions, "requires", lambda _: wanted)
    assert versions.refusal("transformers", "peft") == ""
    assert [str(item.specifier) for item in versions.requirements("transformers")] == [">=5"]


def test_what_cannot_be_known_is_refused(monkeypatch):
    def no_metadata(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "requires", no_metadata)
    with pytest.raises(ValueError, match="not installed.*pip install --no-deps --editable"):
        AxonnPlugin(grid=GRID)


def test_a_library_that_is_not_there_is_not_named(monkeypatch):
    monkeypatch.setattr(versions, "requires", lambda _: ["trl<1"])
    monkeypatch.setattr(versions, "NEEDED", ("trl",))
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.setattr(versions, "version", lambda name: distribution(f"no-{name}").version)
    assert versions.refusal() == ""


def test_every_way_to_a_grid_is_closed_and_one_process_is_not(unproven, tmp_path):
    model = tiny_model("llama")
    for enter in (
        lambda: AxonnPlugin(grid=GRID),
        lambda: parallelize(model, GRID),
        lambda: from_pretrained(str(tmp_path), grid=GRID),
        lambda: GoldfishTrainer(model),
    ):
        with pytest.raises(ValueError, match=unproven):
            enter()
    assert AxonnPlugin(grid=Grid()).grid == Grid()
    assert parallelize(model, Grid())[0] is model


def test_peft_is_refused_where_it_is_used(monkeypatch):
    monkeypatch.delenv(versions.SWITCH, raising=False)
    plain, adapted = tiny_model("llama"), get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"]))
    monkeypatch.setattr(peft, "__version__", OTHER)
    check_adapters(plain)
    AxonnPlugin(grid=GRID)
    with pytest.raises(ValueError, match=f"peft {OTHER} is installed"):
        check_adapters(adapted)
    with pytest.raises(ValueError, match=f"peft {OTHER} is installed"):
        check_config(None, plain, LoraConfig())


def test_a_launch_ends_before_a_process_starts_and_doctor_says_so(unproven, tmp_path, capsys, monkeypatch):
    file = tmp_path / "axonn.yaml"
    plain = "num_processes: 2\nuse_cpu: true\ncompute_environment: LOCAL_MACHINE\n"
    file.write_text(plain)
    assert prepare([f"--config={file}", "train.py"])[-1] == "train.py"  # it has no grid
    file.write_text(plain + "axonn_config: {grid: {x: 2}}\n")
    with pytest.raises(SystemExit) as end:
        prepare_or_exit([f"--config={file}", "train.py"])
    assert end.value.code == 2
    assert f"nothing was started. {unproven}" in capsys.readouterr().err
    assert main(["doctor", "--config", str(file)]) == 2
    assert unproven in capsys.readouterr().err
    monkeypatch.setenv(versions.SWITCH, "0")
    monkeypatch.setattr(peft, "__version__", OTHER)
    with pytest.warns(UserWarning, match=unproven):
        assert main(["doctor", "--config", str(file)]) == 1
    printed = capsys.readouterr().out
    assert f"warning: transformers {OTHER} is not proven" in printed and f"warning: peft {OTHER} is not" in printed


WORKER = """
import os
import torch
from tests.helpers.launching import forget

forget("accelerate", "hf_axonn", "transformers")
os.environ["AXONN_CONFIG"] = '{"grid": {"x": 2}}'
os.environ.pop("AXONN_CHECK_VERSIONS", None)
torch._import_device_backends()
import accelerate
from accelerate import Accelerator
from transformers import Trainer, TrainingArguments, trainer_utils

stock = trainer_utils.get_last_checkpoint
for begin in (Accelerator, Accelerator, lambda: TrainingArguments("unused", use_cpu=True), Accelerator):
    try:
        made = begin()
    except ValueError as problem:
        assert "transformers" in str(problem) and "proven is >=99,<100" in str(problem), problem
    else:
        assert begin is not Accelerator, made
    assert "axonn_wrapped" not in vars(Trainer) and trainer_utils.get_last_checkpoint is stock
import warnings
from hf_axonn import AxonnPlugin
os.environ["AXONN_CHECK_VERSIONS"] = "0"
with warnings.catch_warnings(record=True) as caught:
    AxonnPlugin()
assert len(caught) == 1 and "going on" in str(caught[0].message), caught
assert "axonn_wrapped" in vars(Trainer) and trainer_utils.get_last_checkpoint is not stock
"""


def test_a_worker_is_refused_by_its_accelerator_and_not_by_imports(tmp_path):
    """As of a release that was made for another Transformers: its metadata says so.

    In a fork, with torch imported already, which then calls the hook once more.
    """
    ours = distribution("hf_axonn")
    folder = tmp_path / "hf_axonn-0.2.0.dist-info"
    folder.mkdir()
    folder.joinpath("METADATA").write_text(
        "Metadata-Version: 2.1\nName: hf_axonn\nVersion: 0.2.0\nRequires-Dist: transformers<100,>=99\n"
    )
    folder.joinpath("entry_points.txt").write_text(ours.read_text("entry_points.txt"))
    (tmp_path / "worker.py").write_text(WORKER)
    ended = forked(tmp_path, None, "worker.py", timeout=180)
    assert ended.code == 0, ended.output
    assert "its part of `import torch` failed" not in ended.output
