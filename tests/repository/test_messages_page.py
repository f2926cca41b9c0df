"""The pages about messages are complete, and quote messages that the code has."""

from __future__ import annotations

import re

from tests.helpers import ROOT
from tests.tools.messages_page import FOLDERS, GAP, MESSAGES, Message, literals, messages_of, module_files


QUOTED = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)


def test_a_message_is_divided_at_its_colon():
    message = Message("the grid is ..., not ...: start ... processes.", "ValueError", "file.py")
    assert (message.cause, message.remedy) == ("the grid is ..., not ...", "start ... processes.")
    assert Message("... cannot be read: ...", "ValueError", "file.py").remedy == ""


def test_every_file_with_messages_is_on_the_page_once():
    page = (ROOT / "docs" / "reference" / "messages.md").read_text(encoding="utf-8")
    modules = "".join(MESSAGES.findall(page)).splitlines()
    listed = [file for module in modules for file in module_files(module)]
    assert len(listed) == len(set(listed))
    there = {ROOT / message.file for package in FOLDERS for message in messages_of(package)}
    assert there <= {*listed, ROOT / "hf_axonn" / "__init__.py"}  # the facade has Python's own AttributeError
    assert len(messages_of("hf_axonn.config")) > 10


def pattern_of(quoted: str) -> re.Pattern[str]:
    """What a quoted message matches: anything where it has a gap, and any end."""
    return re.compile(".+".join(map(re.escape, quoted.split(GAP))))


def test_quoted_messages_are_those_of_the_code():
    pages = [ROOT / "docs" / name for name in ("troubleshooting.md", "how_to/long_rows.md")]
    quoted = [text for page in pages for text in QUOTED.findall(page.read_text(encoding="utf-8"))]
    assert len(quoted) > 30
    absent = [text for text in quoted if not any(pattern_of(text).search(message) for message in literals())]
    assert not absent, absent
