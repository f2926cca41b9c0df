"""How functions and records of this folder are called."""

from tests.eval.conventions import defaults_of, not_to_be_named


def test_arguments_may_be_given_by_name():
    assert not_to_be_named("cli") == []


def test_what_is_meant_where_nothing_is_said():
    assert defaults_of("cli") == {
        "from_zero": {"least": 0},
    }
