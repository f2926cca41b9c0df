"""Cuts as numbers, and settings that contradict each other."""

import pytest

from hf_axonn_eval.data.windows import Sampling, Window


def test_offsets_and_lengths_each_with_each():
    sampling = Sampling(prefix_length=(4, 2), suffix_length=3, offset=(0, 5))
    assert sampling.windows(99) == [
        Window("0+4+3", 0, 4, 7),
        Window("0+2+3", 0, 2, 5),
        Window("5+4+3", 5, 9, 12),
        Window("5+2+3", 5, 7, 10),
    ]
    assert sampling.needed == 12


def test_one_changed_at_a_time():
    sampling = Sampling(prefix_length=(4, 2, 8), suffix_length=(3, 1), offset=(0, 5), combine="axes")
    assert [window.name for window in sampling.windows(99)] == ["0+4+3", "5+4+3", "0+2+3", "0+8+3", "0+4+1"]


def test_prefixes_that_end_at_the_same_place():
    sampling = Sampling(prefix_length=(2, 6), suffix_length=3, offset=1, shared_suffix=True)
    assert sampling.windows(99) == [Window("5+2+3", 5, 7, 10), Window("1+6+3", 1, 7, 10)]


def test_settings_are_those_that_matter():
    assert Sampling(kind="last", suffix_length=5).settings() == {
        "kind": "last",
        "suffix_length": [5],
        "max_tokens": None,
        "min_document_tokens": None,
        "max_document_tokens": None,
        "max_documents": None,
        "add_special_tokens": False,
        "deduplicate": False,
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "middle"}, "kind is 'middle', but it must be one of offsets, sliding, first, last"),
        ({"combine": "all"}, "combine is 'all'"),
        ({"stride_unit": "words"}, "stride_unit is 'words'"),
        ({"stride": 0}, "stride is 0"),
        ({"stride": None}, "stride is None"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"min_document_tokens": -1}, "min_document_tokens is -1"),
        ({"max_documents": 0}, "max_documents is 0"),
        ({"deduplicate": 1}, "deduplicate is 1"),
        ({"prefix_length": ()}, "prefix_length is .*one or more"),
        ({"prefix_length": (3, 3)}, "prefix_length is .*different"),
        ({"kind": "sliding", "prefix_length": (3, 4)}, "prefix_length has 2 numbers, but 'sliding' takes one"),
        ({"kind": "first", "suffix_length": (3, 4)}, "suffix_length has 2 numbers, but 'first' takes one"),
        ({"kind": "first", "suffix_length": 5, "max_tokens": 5}, "leaves no prefix before a suffix of 5"),
        ({"min_document_tokens": 90, "max_document_tokens": 80}, "a document needs 90 tokens"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)
