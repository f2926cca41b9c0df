"""What hf_axonn says in a run: as loud as Transformers or Accelerate is set to, and where the program wants it."""

from __future__ import annotations

import logging

import pytest
from transformers.utils import logging as theirs

from hf_axonn.compat.messages import ROOT, get_logger


@pytest.fixture
def logger(monkeypatch):
    """A logger of a module, with all settings as they were at the end."""
    monkeypatch.delenv("ACCELERATE_LOG_LEVEL", raising=False)
    before = theirs.get_verbosity()
    yield get_logger(f"{ROOT}.somewhere")
    theirs.set_verbosity(before)
    logging.getLogger(ROOT).setLevel(logging.NOTSET)


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


def test_accelerates_level_counts_more_and_a_level_of_our_own_most(logger, monkeypatch):
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "error")
    theirs.set_verbosity_info()
    assert heard(logger) == ["ERROR"]
    logging.getLogger(ROOT).setLevel(logging.DEBUG)
    assert heard(logger) == ["DEBUG", "INFO", "WARNING", "ERROR"]
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "no level")
    logging.getLogger(ROOT).setLevel(logging.NOTSET)
    assert heard(logger) == ["INFO", "WARNING", "ERROR"]


def test_without_handlers_it_is_printed_on_stderr_once_and_else_they_get_it(logger, monkeypatch, capsys):
    theirs.set_verbosity_info()
    get_logger(ROOT)  # a second call adds nothing
    monkeypatch.setattr(logging.root, "handlers", [])
    logger.info("well")
    assert capsys.readouterr().err == "[hf_axonn] well\n"
    got = []
    handler = logging.Handler()
    handler.emit = lambda record: got.append(record.getMessage())
    monkeypatch.setattr(logging.root, "handlers", [handler])
    logger.info("well")
    assert got == ["well"] and capsys.readouterr().err == ""
