"""What text from outside looks like where it must not act."""

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from hf_axonn_eval.data.visible import PAGE, visible
from tests.helpers.fuzzing import fuzz


@fuzz(200)
@given(text=st.text(st.characters()))
def test_nothing_acts_and_nothing_else_changes(text):
    shown = visible(text)
    shown.encode()
    assert not any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in shown)
    assert shown == "".join(visible(character) for character in text) and visible(shown) == shown
    assert all(len(visible(character)) == 1 for character in text if character.isprintable())


def test_escapes_are_those_of_python():
    assert visible("a\x1b[0m\x00\x9b\ud83d\n\u202e\u4e2d\U0001f600 \xa0\u200d") == (
        "a\\x1b[0m\\x00\\x9b\\ud83d\\n\\u202e\u4e2d\U0001f600 \xa0\u200d"
    )
    assert visible("a\nb\r", keep="\n") == "a\nb\\r"
    assert visible(PAGE, keep=PAGE) == PAGE
