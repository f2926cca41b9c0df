"""Words that are found, and that a place is an error."""

import pytest

from tests.tools.words import find_words, main


SOURCE = '''
"""What a module has."""

class Ranks:
    """The ranks of a grid."""

    @property
    def divided(self):
        """Return whether there is more than one."""

    def _of_step(self, told):
        """Of a step."""
        its = 1

def closed(text): ...

@deprecated("closed is close now")
def opened(text): ...

def embed(text): ...

def put(text): ...
'''


def test_fragments_pronouns_and_participles_are_found():
    assert sorted(find_words(SOURCE)) == [
        (1, "docstrings", "What a module has."),
        (11, "docstrings", "Of a step."),
        (11, "functions", "_of_step"),
        (11, "variables", "told"),
        (13, "variables", "its"),
        (15, "functions", "closed"),
    ]


@pytest.mark.parametrize(
    ("source", "line", "words"),
    [
        ("# of the\n# the grid\n", 1, "the the"),
        ("step = 1  # by a a step", 1, "a a"),
        ('message = (\n    "by a step "\n    "step or in place"\n)', 2, "step step"),
        ('"""The ranks.\n\nThe grid grid."""', 3, "grid grid"),
    ],
)
def test_words_that_stand_twice_are_found(source, line, words):
    assert list(find_words(source)) == [(line, "doubled words", words)]


@pytest.mark.parametrize(
    "source",
    [
        '"""Sum.\n\n    hash            hash of tokens\n"""',
        '"""The samples\nsamples     with the sample\n"""',
        'text = f"--output output and {words} words"',
        "# of x * x\nx = 1\nx = 2",
    ],
)
def test_columns_options_and_code_are_no_doubled_words(source):
    assert list(find_words(source)) == []


def test_a_place_is_an_error(capsys, monkeypatch):
    monkeypatch.setattr("tests.tools.words.find_words", lambda source: iter([(3, "variables", "told")]))
    assert main(["hf_axonn/config.py"]) == 1
    assert capsys.readouterr().out == "hf_axonn/config.py:3: variables: told\nwords: 1 places\n"
