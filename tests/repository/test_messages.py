"""How hf_axonn speaks in a run is one rule (hf_axonn/compat/messages.py); here, that all files hold to it."""

from __future__ import annotations

import ast

from tests.helpers import ROOT


# Launchers and commands, what ends a run, and programs that are started by `python -m`.
PRINTS = (
    "hf_axonn/cli/",
    "hf_axonn/kit/try_imports.py",
    "hf_axonn/launch/",
    "hf_axonn/compat/completion.py",
    "hf_axonn/distributed/watchdog/watchdog.py",
    "hf_axonn/goldfish/table.py",
    "hf_axonn/profiling/bench_links.py",
)
# The user has switched off what guards results; that is told where Python tells such things.
WARNS = ("hf_axonn/compat/versions.py",)


def calls(text: str) -> set[str]:
    """The functions that a file calls, as they are written."""
    return {ast.unparse(node.func) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)}


def test_a_run_speaks_through_its_loggers():
    found: dict[str, set[str]] = {
        "print": set(),
        "warnings.warn": set(),
        "logging.getLogger": set(),
        "get_logger": set(),
    }
    for path in sorted((ROOT / "hf_axonn").rglob("*.py")):
        name, called = str(path.relative_to(ROOT)), calls(path.read_text(encoding="utf-8"))
        for function in found.keys() & called:
            found[function].add(name)
    assert not [name for name in found["print"] if not name.startswith(PRINTS)]
    assert found["warnings.warn"] == set(WARNS)
    # torch.distributed's logger, of which one message is left out, and the one behind get_logger
    assert found["logging.getLogger"] == {"hf_axonn/compat/torch.py", "hf_axonn/compat/messages.py"}
    assert len(found["get_logger"]) > 5
