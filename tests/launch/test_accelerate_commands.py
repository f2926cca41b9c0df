"""Accelerate's other commands over a launch file with `axonn_config`, each by the real command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from hf_axonn import Grid
from hf_axonn.launch import accelerate_commands, autoload, self_test
from tests.helpers.launching import assert_quiet, launch_file, run
from tests.helpers.ranks import run_ranks


def accelerate(folder, *words, **options):
    """`accelerate` with these words, in `folder`."""
    return run(folder, Path(sys.executable).with_name("accelerate"), *words, **options)


@pytest.mark.slow  # it reads the file as `config update` does, which is next
def test_env_shows_the_section(tmp_path):
    path = launch_file(tmp_path, Grid(x=2))
    ended = accelerate(tmp_path, "env", "--config_file", path)
    assert_quiet(ended)
    assert "- axonn_config: {'grid': {'data': 1, 'x': 2, 'y': 1, 'z': 1}}" in ended.output
    assert "- num_processes: 2" in ended.output


def test_config_update_keeps_the_section_and_what_the_machine_decides(tmp_path):
    """Without use_cpu the launch sees whether there are GPUs; stock accelerate would write false."""
    path = launch_file(tmp_path, Grid(x=2))
    settings = yaml.safe_load(path.read_text())
    del settings["use_cpu"]
    settings["axonn_config"] |= {"overlap": {}, "order": ["x", "y", "z", "data"]}
    path.write_text(yaml.safe_dump(settings))
    assert_quiet(accelerate(tmp_path, "config", "update", "--config_file", path))
    updated = yaml.safe_load(path.read_text())
    assert updated["axonn_config"] == settings["axonn_config"]
    assert "use_cpu" not in updated and "rdzv_backend" in updated  # what stock accelerate adds


@pytest.mark.slow  # its checks pass, and see what is wrong, in the quick tests below
def test_accelerate_test_passes_on_a_grid(tmp_path):
    ended = accelerate(tmp_path, "test", "--config_file", launch_file(tmp_path, Grid(x=2)))
    assert_quiet(ended)
    assert "grid data=1,z=1,y=1,x=2: 2 process(es), gloo, cpu" in ended.output
    assert "as on one process" in ended.output and "Test is a success!" in ended.output


@pytest.mark.slow
def test_accelerate_test_says_what_is_wrong_in_a_sentence(tmp_path):
    path = launch_file(tmp_path, Grid(x=2))
    path.write_text(path.read_text().replace("num_processes: 2", "num_processes: 4"))
    ended = accelerate(tmp_path, "test", "--config_file", path)
    assert ended.code == 2 and "Traceback" not in ended.output and "Test is a success!" not in ended.output
    assert "nothing was started" in ended.output and "but 4 process(es) are to run" in ended.output


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["/usr/bin/accelerate", "env"], "accelerate"),
        (["/usr/bin/accelerate-config", "update"], "accelerate-config"),
        (["/site/accelerate/commands/env.py"], "accelerate.commands.env"),
    ],
)
def test_the_commands_are_known_and_start_nothing(monkeypatch, words, program):
    monkeypatch.setattr(sys, "argv", words)
    awaited = []
    monkeypatch.setattr("hf_axonn.compat.post_import.after_import", lambda name, callback: awaited.append(name))
    assert autoload._program() == program
    autoload.autoload()
    assert awaited == ["accelerate.commands.config.config_args", "accelerate.commands.test"] and sys.argv == words


def test_the_command_of_trl_launches_a_grid(monkeypatch):
    """It hands accelerate's parser what it was given; `prepare` is what any launch does with that."""
    import accelerate.commands.launch as stock

    monkeypatch.setattr(sys, "argv", ["/usr/bin/trl", "sft"])
    awaited = {}
    monkeypatch.setattr("hf_axonn.compat.post_import.after_import", awaited.__setitem__)
    monkeypatch.setattr(stock, "launch_command_parser", stock.launch_command_parser)  # put back at the end
    monkeypatch.setattr(accelerate_commands, "prepare_or_exit", lambda words: ["--num_processes=2", *words[2:]])
    autoload.autoload()
    (when, callback) = awaited.popitem()
    callback()
    parsed = stock.launch_command_parser().parse_args(["--config_file", "axonn.yaml", "sft.py", "--max_steps", "1"])
    assert when == stock.__name__ and parsed.num_processes == 2 and parsed.config_file is None
    assert [parsed.training_script, *parsed.training_script_args] == ["sft.py", "--max_steps", "1"]


def right_and_wrong_losses():
    from accelerate import Accelerator

    from hf_axonn import AxonnPlugin

    accelerator = Accelerator(cpu=True, parallelism_config=AxonnPlugin(grid=Grid(x=2)))
    self_test.check_loader(accelerator)
    self_test.check_operations(accelerator)
    assert len(self_test.check_training(accelerator, accelerator.parallelism_config)) == self_test.STEPS
    made, models = self_test.new_model, []

    def another(device):
        model, optimizer = made(device)
        models.append(model)
        if len(models) > 1:  # the first is the one that the grid is compared with
            model.lm_head.weight.data *= 10
        return model, optimizer

    self_test.new_model = another
    with pytest.raises(RuntimeError, match="the grid does not work on these processes: the losses are"):
        self_test.check_training(accelerator, accelerator.parallelism_config)


def test_the_self_test_passes_and_sees_wrong_losses():
    run_ranks(right_and_wrong_losses, 2)
