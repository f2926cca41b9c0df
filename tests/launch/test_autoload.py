"""The hook that torch runs on import: which processes it acts in, what it costs, and the post-import hook."""

import os
import subprocess
import sys
import textwrap
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from hf_axonn.compat import post_import as importing
from hf_axonn.launch import autoload as _autoload
from tests.helpers.launching import forked


def run_python(code, *arguments, **environment):
    """A fresh interpreter that sees this one's packages."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("argv", "orig_argv", "start"),
    [
        (["/usr/bin/accelerate", "launch", "--config", "a.yaml", "t.py"], None, 2),
        (["/usr/bin/accelerate-launch", "--config", "a.yaml", "t.py"], None, 1),
        (["-m", "--config", "a.yaml"], ["python", "-u", "-m", "accelerate.commands.launch", "--config", "a.yaml"], 1),
        (["-m", "--config", "a.yaml"], ["python", "-maccelerate.commands.launch", "--config", "a.yaml"], 1),
        (["-m", "launch", "t.py"], ["python", "-m", "accelerate.commands.accelerate_cli", "launch", "t.py"], 2),
        (["/site/accelerate/commands/launch.py", "--config", "a.yaml"], None, 1),
        (["/site/accelerate/commands/accelerate_cli.py", "launch"], None, 2),
        (["/usr/bin/accelerate", "config", "launch"], None, None),
        (["/usr/bin/accelerate"], None, None),
        (["-m", "launch", "t.py"], ["python", "-m", "mine.tool", "launch", "t.py"], None),
        (["train.py", "--config", "a.yaml"], None, None),
        (["/home/me/launch.py", "--config", "a.yaml"], None, None),
        (["-c"], None, None),
        ([""], None, None),
        ([], None, None),
    ],
)
def test_only_accelerate_launch_is_taken_for_a_launcher(monkeypatch, argv, orig_argv, start):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig_argv or ["python", *argv])
    assert _autoload._launch_arguments_start(_autoload._program()) == start


@pytest.mark.parametrize("name", ["accelerate-launch", "accelerate", "axonn-launch"])
def test_a_script_of_that_name_is_no_launcher(monkeypatch, tmp_path, name):
    script = tmp_path / name
    script.write_text("from accelerate import Accelerator\n")
    monkeypatch.setattr(sys, "argv", [str(script), "launch", "--config", "a.yaml"])
    assert _autoload._launch_arguments_start(_autoload._program()) is None
    assert _autoload._program() not in _autoload.OWN_LAUNCHERS
    command = Path(sys.executable).with_name(name)
    monkeypatch.setattr(sys, "argv", [str(command), "launch", "--config", "a.yaml"])
    assert _autoload._program() == name


@pytest.mark.parametrize(
    ("argv", "orig_argv"),
    [(["/usr/bin/axonn-launch", "t.py"], None), (["-m", "t.py"], ["python", "-m", "hf_axonn.launch", "t.py"])],
)
def test_our_own_launcher_is_left_alone(monkeypatch, argv, orig_argv):
    monkeypatch.setattr(sys, "argv", list(argv))
    monkeypatch.setattr(sys, "orig_argv", orig_argv or ["python", *argv])
    monkeypatch.setenv("AXONN_CONFIG", '{"grid": {"x": 2}}')
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = list(sys.meta_path)
    _autoload.autoload()
    assert sys.argv == argv
    assert sys.meta_path == before


def test_importing_torch_loads_the_hook_and_nothing_heavy():
    """Nor does a process that is no worker get the plugin when it imports accelerate."""
    result = run_python(
        """
        import sys
        import torch
        loaded = {name.partition(".")[0] for name in sys.modules}
        assert "hf_axonn.launch.autoload" in sys.modules, "the entry point was not called: is the package installed?"
        assert not loaded & {"transformers", "accelerate", "peft", "datasets", "yaml"}, loaded
        own = {name for name in sys.modules if name.startswith("hf_axonn.")}
        assert own == {"hf_axonn.compat", "hf_axonn.compat.facade", "hf_axonn.launch", "hf_axonn.launch.autoload"}, own
        import types
        sys.modules["hf_axonn.plugin"] = plugin = types.ModuleType("hf_axonn.plugin")
        plugin.install_default = lambda: sys.exit("no worker gets the plugin")
        import accelerate.parallelism_config
        """,
        AXONN_CONFIG="",
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("worker", ["", '{"grid": {"x": 2}}'])
def test_the_hook_itself_imports_next_to_nothing(worker):
    """It runs in every process that imports torch, so it may cost next to no time either."""
    code = """
        import sys
        from importlib.metadata import EntryPoint
        hook = EntryPoint(name="hf_axonn", group="torch.backends", value="hf_axonn.launch.autoload:autoload")
        before = set(sys.modules)
        hook.load()()
        print(*(name for name in set(sys.modules) - before))
        """
    found = set(run_python(code, AXONN_CONFIG=worker).stdout.split())
    own = {name for name in found if name.partition(".")[0] == "hf_axonn"}
    needed = {"hf_axonn", "hf_axonn.compat", "hf_axonn.compat.facade", "hf_axonn.launch", "hf_axonn.launch.autoload"}
    if worker:
        needed |= {"hf_axonn.compat", "hf_axonn.compat.post_import"}  # the plugin comes with accelerate
        needed |= {f"hf_axonn.distributed{name}" for name in ("", ".watchdog", ".watchdog.signals")}
    assert own == needed
    assert {name.partition(".")[0] for name in found - own} <= sys.stdlib_module_names


def test_whatever_goes_wrong_does_not_reach_torch(monkeypatch, capsys):
    def broken():
        raise RuntimeError("on purpose")

    monkeypatch.setattr(_autoload, "_program", broken)
    _autoload.autoload()
    assert "on purpose" in capsys.readouterr().err


@pytest.fixture
def target(tmp_path, monkeypatch):
    """A package with a module that nobody has imported yet."""
    (tmp_path / "fake_target").mkdir()
    (tmp_path / "fake_target" / "__init__.py").write_text("")
    (tmp_path / "fake_target" / "part.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield "fake_target.part"
    for name in ("fake_target", "fake_target.part"):
        sys.modules.pop(name, None)


def test_the_callback_runs_once_right_after_the_module(target):
    seen = []
    before = list(sys.meta_path)
    importing.after_import(target, lambda: seen.append(sys.modules[target].VALUE))
    import fake_target

    assert seen == []
    from fake_target import part

    assert seen == [1]
    assert sys.meta_path == before
    assert part.__loader__ is part.__spec__.loader
    assert type(part.__loader__) is type(fake_target.__loader__)
    assert part.__loader__.get_source(target) == "VALUE = 1\n"


def test_a_module_that_is_already_there_calls_at_once(target):
    import fake_target.part  # noqa: F401

    seen = []
    importing.after_import(target, lambda: seen.append(1))
    assert seen == [1]


def test_an_error_of_the_callback_surfaces_at_every_import_until_it_succeeds(target):
    problems = [RuntimeError("first"), RuntimeError("second")]

    def callback():
        if problems:
            raise problems.pop(0)

    importing.after_import(target, callback)
    for message in ("first", "second"):
        with pytest.raises(RuntimeError, match=message):
            __import__(target)
        assert target not in sys.modules
    __import__(target)
    assert sys.modules[target].VALUE == 1


def test_a_module_that_is_being_imported_calls_when_it_has_been(target, tmp_path, monkeypatch):
    seen = []
    of_part = lambda word: lambda: seen.append((word, sys.modules[target].VALUE))  # noqa: E731
    monkeypatch.setattr(importing, "of_part", of_part, raising=False)
    part = tmp_path / "fake_target" / "part.py"
    begin = "from hf_axonn.compat import post_import as importing\n"
    begin += "".join(f"importing.after_import(__name__, importing.of_part({word!r}))\n" for word in "ab")
    part.write_text(begin + "1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        __import__(target)
    assert seen == []
    part.write_text("VALUE = 'after a failure'\n")
    os.utime(part, (0, 0))  # another time, or the bytecode of the file before is taken
    __import__(target)
    assert sorted(seen) == [("a", "after a failure"), ("b", "after a failure")]
    del sys.modules[target], seen[:]
    part.write_text(begin + "VALUE = 'at the end'\n")
    __import__(target)
    assert sorted(seen) == [("a", "at the end"), ("b", "at the end")]
    assert type(sys.modules[target].__spec__) is ModuleSpec


def test_what_is_awaited_twice_is_called_once(target):
    seen = []
    before = list(sys.meta_path)
    callback = lambda: seen.append(1)  # noqa: E731
    importing.after_import(target, callback)
    importing.after_import(target, callback)
    __import__(target)
    assert seen == [1] and sys.meta_path == before


def test_two_hooks_on_one_module_both_run(target):
    seen = []
    importing.after_import(target, lambda: seen.append("inner"))
    importing.after_import(target, lambda: seen.append("outer"))
    __import__(target)
    assert seen == ["inner", "outer"]


def test_other_modules_are_left_to_the_other_finders(target):
    importing.after_import("fake_target.absent", lambda: None)
    with pytest.raises(ModuleNotFoundError):
        __import__("fake_target.absent")
    __import__(target)


def test_a_worker_gets_the_plugin_when_accelerate_is_imported():
    """And no other process: test_importing_torch_loads_the_hook_and_nothing_heavy."""
    code = """
        import sys
        import types
        calls = []
        plugin = types.ModuleType("hf_axonn.plugin")
        plugin.install_default = lambda: calls.append("accelerate.parallelism_config" in sys.modules)
        sys.modules["hf_axonn.plugin"] = plugin
        import torch
        assert calls == []
        import accelerate
        print(calls)
        """
    assert run_python(code, AXONN_CONFIG='{"grid": {"x": 2}}').stdout.strip() == "[True]"


@pytest.mark.parametrize(
    "first",
    [
        "Trainer",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("TrainingArguments", "AutoModelForCausalLM")),
    ],
)
def test_a_worker_gets_its_hooks_of_trainer_whatever_it_imports_first(first, tmp_path):
    """Each of these imports accelerate while another part of Transformers is half imported.

    In a fork, with torch imported already, which then calls the hook once more.
    """
    code = f"""
        import os
        import torch
        from tests.helpers.launching import forget
        forget("accelerate", "hf_axonn", "transformers")
        os.environ["AXONN_CONFIG"] = '{{"grid": {{"x": 2}}}}'
        torch._import_device_backends()
        from transformers import {first}
        from transformers import Trainer, TrainingArguments
        assert "axonn_wrapped" in vars(Trainer)
        assert hasattr(vars(TrainingArguments)["_setup_devices"].func, "__wrapped__")
        """
    (tmp_path / "code.py").write_text(textwrap.dedent(code))
    ended = forked(tmp_path, None, "code.py")
    assert ended.code == 0, ended.output
