"""Files that other programs read: hooks of pre-commit, GitHub's workflow and issue forms."""

import os
import re

import pytest
import yaml

from tests.helpers import ROOT


FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def read(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_hooks_are_steps_of_make_lint():
    """pre-commit gives ruff the files that are committed, `make lint` all of them."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    steps = re.findall(r"^\t\$\(BIN\)/(.+)$", text[text.index("\nlint:") :].split("\n\n")[0], re.MULTILINE)
    (repository,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        program, *options = hook["entry"].removeprefix(".venv/bin/").split()
        assert any(step.startswith(program) for step in steps), hook["entry"]
        wanted = [option for option in options if option != "--force-exclude"]
        assert any(set(wanted) <= set(step.split()) for step in steps), hook["entry"]
        assert hook["language"] == "system"


def test_the_workflow_runs_what_has_to_pass():
    workflow = read(ROOT / ".github" / "workflows" / "ci.yml")
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert workflow["permissions"] == {"contents": "read"}
    setup = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    for version in job["strategy"]["matrix"]["python"]:
        assert f"Python :: {version}\n" in setup


@pytest.mark.parametrize("form", [form for form in FORMS if form.name != "config.yml"], ids=lambda form: form.stem)
def test_issue_forms_have_what_github_asks_for(form):
    content = read(form)
    assert content["name"] and content["description"]
    ids = [part["id"] for part in content["body"] if part["type"] != "markdown"]
    assert len(set(ids)) == len(ids) > 0
    for part in content["body"]:
        assert part["type"] in ("textarea", "input", "dropdown", "checkboxes", "markdown")
        assert part["attributes"]["label"]


def test_there_is_a_form_for_each_kind_of_issue():
    assert {form.stem for form in FORMS} == {"architecture", "bug", "config", "measurement"}
