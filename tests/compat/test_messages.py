"""What our packages say in a run: as loud as Transformers or Accelerate is set to, and where the program wants it."""

from __future__ import annotations

import logging

import pytest
from transformers.utils import logging as theirs

from hf_axonn.compat.messages import get_logger
from tests.helpers import ROOT


@pytest.fixture(params=["hf_axonn", "hf_axonn_eval"])
def package(request):
    return request.param


@pytest.fixture
def logger(monkeypatch, package):
    """A logger of a module, with all settings as they were at the end."""
    monkeypatch.delenv("ACCELERATE_LOG_LEVEL", raising=False)
    before = theirs.get_verbosity()
    yield get_logger(f"{package}.somewhere")
    theirs.set_verbosity(before)
    logging.getLogger(package).setLevel(logging.NOTSET)


def heard(logger) -> list[str]:
    """The levels that are not dropped."""
    return [name for name in ("DEBUG", "INFO", "WARNING", "ERROR") if logger.isEnabledFor(getattr(logging, name))]


def test_the_verbosity_of_transformers_is_ours(logger):
    theirs.set_verbosity_warning()
    assert heard(logger) == ["WARNING", "ERROR"]
    theirs.set_verbosity_error()
    assert heard(logger) == ["ERROR"]
    theirs.set_verbosity_info()
    assert heard(logger) == ["INFO", "WARNING", "ERROR"]


def test_accelerates_level_counts_more_and_a_level_of_our_own_most(logger, package, monkeypatch):
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "error")
    theirs.set_verbosity_info()
    assert heard(logger) == ["ERROR"]
    logging.getLogger(package).setLevel(logging.DEBUG)
    assert heard(logger) == ["DEBUG", "INFO", "WARNING", "ERROR"]
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "no level")
    logging.getLogger(package).setLevel(logging.NOTSET)
    assert heard(logger) == ["INFO", "WARNING", "ERROR"]


def test_without_handlers_it_is_printed_on_stderr_once_and_else_they_get_it(logger, package, monkeypatch, capsys):
    theirs.set_verbosity_info()
    get_logger(package)  # a second call adds nothing
    monkeypatch.setattr(logging.root, "handlers", [])
    logger.info("well")
    assert capsys.readouterr().err == f"[{package}] well\n"
    got = []
    handler = logging.Handler()
    handler.emit = lambda record: got.append(record.getMessage())
    monkeypatch.setattr(logging.root, "handlers", [handler])
    logger.info("well")
    assert got == ["well"] and capsys.readouterr().err == ""


def test_every_module_asks_for_its_logger_here():
    """`logging.getLogger` would have a level of its own."""
    for folder in ("hf_axonn", "eval"):
        for file in (ROOT / folder).rglob("*.py"):
            assert "logging.getLogger(__name__)" not in file.read_text(), file
