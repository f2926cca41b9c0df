"""tests/benchmarks/gpu/rehearsal.py: its machine has no network, git and make, and cannot be written to."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.benchmarks.gpu import rehearsal
from tests.benchmarks.gpu.rehearsal import Machine, Step, check_out, copy_clone, make_table


LOOK = """
command -v git make
touch "$MACHINE/bin/new" && echo written
touch "$HOME/new" "$TRITON_CACHE_DIR/new" "$OUT/new" new || exit 4
python3 -c 'import socket; socket.create_connection(("192.0.2.1", 80), 5)' 2>/dev/null && echo connected
python3 -c 'import socket; socket.create_server(("127.0.0.1", 0))' || exit 5
env | cut -d = -f 1
echo "equality, one: done, 1 s"
echo "equality, two: done, 1 s"
exit 3
"""


@pytest.fixture
def machine(tmp_path):
    namespaces = ["unshare", "--map-root-user", "--net", "--mount", "true"]
    if shutil.which("unshare") is None or subprocess.run(namespaces, capture_output=True).returncode:
        pytest.skip("this machine makes no namespaces")
    (tmp_path / "machine" / "bin").mkdir(parents=True)
    (tmp_path / "place").mkdir()
    return Machine(tmp_path / "machine", tmp_path / "place")


def test_the_machine_has_no_network_and_no_git_and_keeps_its_packages(machine, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    step = machine.run("look", "bash", "-c", LOOK)
    assert step.code == 3 and list(step.parts) == ["equality"]
    log = (machine.logs / "look.log").read_text().splitlines()
    assert not {"written", "connected", "HF_TOKEN"} & set(log) and not [line for line in log if line.startswith("/")]
    assert {"HOME", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "OUT"} <= set(log)
    assert (machine.clone / "new").exists() and (machine.out / "new").exists()


def test_the_clone_has_the_files_that_git_tracks(tmp_path):
    copy_clone(tmp_path)
    assert (tmp_path / "tests" / "benchmarks" / "gpu" / "__main__.py").is_file() and (tmp_path / "setup.cfg").is_file()
    assert not (tmp_path / ".git").exists() and not (tmp_path / ".venv").exists()


def test_what_does_not_come_back_is_named(tmp_path):
    assert check_out(tmp_path) == []
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / "a" / "b" / "page.json").write_text("{}")
    assert check_out(tmp_path) == []
    (tmp_path / "a" / "b" / "c" / "log").write_text("")
    with open(tmp_path / "logs.tar", "wb") as file:
        file.truncate(17 * 2**20)
    assert sorted(check_out(tmp_path)) == [
        "$OUT/a/b/c/log does not come back: 0.0 MiB, 3 folders deep",
        "$OUT/logs.tar does not come back: 17.0 MiB, 0 folders deep",
    ]
    for number in range(9):
        (tmp_path / str(number)).touch()
    assert "$OUT has 12 files, at most 8 come back" in check_out(tmp_path)


def test_times_are_a_table():
    assert make_table([Step("smoke", 1, 9.6, {"links": 4.2})]).splitlines()[2:] == [
        "| smoke | 10 | failed |",
        "| smoke, links | 4 | |",
    ]


def test_another_python_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        rehearsal.main(["--python", "3.99"])
    assert ended.value.code == 2 and "there is no Python 3.99 here: give --interpreter" in capsys.readouterr().err
