"""Which code made a bundle: the commit of the checkout, of pip, or unknown."""

import subprocess
from types import SimpleNamespace

import pytest

from hf_axonn_eval.bundle import origin as module
from hf_axonn_eval.bundle.origin import origin


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with a file of this name, committed, in place of the package's folder."""
    monkeypatch.setattr(module, "_FOLDER", tmp_path)
    (tmp_path / "origin.py").write_text("x = 1\n")

    def git(*words) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.example", "-C", str(tmp_path), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    return SimpleNamespace(path=tmp_path, git=git)


def commit_of(checkout) -> str:
    checkout.git("add", "origin.py")
    checkout.git("commit", "--quiet", "-m", "one")
    return checkout.git("rev-parse", "HEAD")


def test_the_commit_of_a_checkout_and_whether_it_was_modified(checkout):
    commit = commit_of(checkout)
    told = origin()
    assert (told["commit"], told["modified"]) == (commit, False)
    assert told["hf_axonn"] != "unknown" and told["numpy"][0].isdecimal() and told["scipy"][0].isdecimal()
    (checkout.path / "results.json").write_text("{}")  # a file that git does not know is no change of the code
    assert origin()["modified"] is False
    (checkout.path / "origin.py").write_text("x = 2\n")
    assert origin()["modified"] is True


def test_a_package_that_lies_in_the_checkout_of_another_project_has_none_of_its_commits(checkout):
    (checkout.path / "other.py").write_text("")
    checkout.git("add", "other.py")
    checkout.git("commit", "--quiet", "-m", "one")
    assert (origin()["commit"], origin()["modified"]) == ("unknown", None)


def test_without_git_it_is_what_pip_installed_or_unknown(checkout, monkeypatch):
    commit_of(checkout)
    monkeypatch.setattr(module.subprocess, "run", lambda *words, **options: (_ for _ in ()).throw(FileNotFoundError()))
    assert origin()["commit"] == "unknown"
    for text, commit in (
        ('{"url": "x", "vcs_info": {"vcs": "git", "commit_id": "%s"}}' % ("ef" * 20), "ef" * 20),
        ('{"vcs_info": {"commit_id": "main"}}', "unknown"),
        ("[", "unknown"),
        (None, "unknown"),
    ):
        told = SimpleNamespace(version="1.0", read_text=lambda name, text=text: text)
        monkeypatch.setattr(module, "distribution", lambda package, told=told: told)
        assert origin() == {"hf_axonn": "1.0", "numpy": "1.0", "scipy": "1.0", "commit": commit, "modified": None}
