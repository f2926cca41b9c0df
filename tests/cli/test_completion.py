"""`--print-completion`: bash completes commands, options, choices and files by what it prints."""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
import sys

import pytest

from hf_axonn.cli.main import main
from hf_axonn.compat.completion import SHELLS
from hf_axonn_eval.__main__ import main as eval_main


MAINS = {"hf-axonn": main, "hf-axonn-eval": eval_main}


def script(command: str, shell: str) -> str:
    """What a command prints for a shell."""
    pytest.importorskip("shtab", reason="completion needs the extra `completion`")
    text = io.StringIO()
    with contextlib.redirect_stdout(text), pytest.raises(SystemExit) as end:
        MAINS[command](["--print-completion", shell])
    assert not end.value.code
    return text.getvalue()


def completed(folder, command: str, *words: str) -> list[str]:
    """What bash makes of the last of the words behind a command."""
    bash = shutil.which("bash")
    assert bash, "the launch scripts of this package need bash"
    (folder / "script").write_text(script(command, "bash"))
    ask = (
        'source ./script; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; '
        'name=$(complete -p "$1" | sed "s/.*-F \\([^ ]*\\) .*/\\1/"); "$name" "$1" "${!#}" ""; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        [bash, "-c", ask, "bash", command, *words], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_bash_completes_commands_options_choices_and_files(tmp_path):
    assert completed(tmp_path, "hf-axonn", "pl") == ["plan"]
    assert completed(tmp_path, "hf-axonn", "init", "--mach") == ["--machine"]
    assert completed(tmp_path, "hf-axonn", "init", "--mixed-precision", "b") == ["bf16"]
    (tmp_path / "axonn.yaml").write_text("")
    assert completed(tmp_path, "hf-axonn", "doctor", "--config", "axo") == ["axonn.yaml"]
    assert completed(tmp_path, "hf-axonn-eval", "extr") == ["extract"]


@pytest.mark.parametrize("command", MAINS)
@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_gets_a_script_of_the_command(command, shell):
    text = script(command, shell)
    assert command in text and len(text) > 1000


def test_without_shtab_it_is_said_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as end:
        main(["--print-completion", "bash"])
    assert end.value.code == 2
    assert "pip install 'hf_axonn[completion]'" in capsys.readouterr().err
