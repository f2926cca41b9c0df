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


def test_some_buckets_with_all_prefix_lengths():
    sampling = Sampling(prefix_length=(4, 9), suffix_length=3, offset=(0, 5), combine="axes", prefix_buckets=(8,))
    all_of_them = ["0+4+3", "5+4+3", "0+9+3"]
    assert [window.name for window in sampling.windows(99, 8)] == all_of_them
    assert [window.name for window in sampling.windows(99)] == all_of_them
    assert [window.name for window in sampling.windows(99, 0)] == ["0+4+3", "5+4+3"], "named alike in every bucket"
    assert (sampling.needed, sampling.needed_in(8), sampling.needed_in(0)) == (12, 12, 12)
    longer = Sampling(prefix_length=(4, 50), suffix_length=3, combine="axes", prefix_buckets=8)
    assert (longer.needed, longer.needed_in(8), longer.needed_in(0)) == (53, 53, 7)


def test_all_that_follows():
    sampling = Sampling(kind="rest", prefix_length=(2, 6))
    assert sampling.windows(9) == [Window("0+2", 0, 2, 9), Window("0+6", 0, 6, 9)] and sampling.needed == 7
    assert Sampling(kind="rest", prefix_length=6, append_eos=True).needed == 6
    assert Sampling(kind="rest", prefix_length=6).windows(7) == [Window("0", 0, 6, 7)]


def test_settings_are_those_that_matter():
    assert Sampling(kind="last", suffix_length=5).settings() == {
        "kind": "last",
        "suffix_length": [5],
        "max_tokens": None,
        "min_document_tokens": None,
        "max_document_tokens": None,
        "max_documents": None,
        "add_special_tokens": False,
        "bos": "tokenizer",
        "deduplicate": False,
        "min_type_token_ratio": None,
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "middle"}, "kind is 'middle', but it must be one of offsets, sliding, first, last, rest"),
        ({"combine": "all"}, "combine is 'all'"),
        ({"stride_unit": "words"}, "stride_unit is 'words'"),
        ({"stride": 0}, "stride is 0"),
        ({"stride": None}, "stride is None"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"min_document_tokens": -1}, "min_document_tokens is -1"),
        ({"max_documents": 0}, "max_documents is 0"),
        ({"deduplicate": 1}, "deduplicate is 1"),
        ({"append_eos": 1}, "append_eos is 1"),
        ({"bos": "last"}, "bos is 'last', but it must be one of tokenizer, prefix, window"),
        ({"bos": "window"}, "bos is 'window', which is of windows over characters, but kind is 'offsets'"),
        ({"slice_characters": 9}, "slice_characters is 9, but kind is 'offsets' with stride_unit 'tokens'"),
        ({"kind": "sliding", "stride_unit": "characters", "slice_characters": 0}, "slice_characters is 0"),
        ({"prefix_buckets": (-1,)}, "prefix_buckets are .*different numbers"),
        ({"prefix_buckets": ()}, "prefix_buckets are"),
        ({"min_type_token_ratio": 0}, "min_type_token_ratio is 0"),
        ({"min_type_token_ratio": True}, "min_type_token_ratio is True"),
        ({"min_type_token_ratio": float("nan")}, "min_type_token_ratio is nan"),
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


def test_what_is_asked_by_default():
    plain = Sampling()
    assert plain.windows(64) == [Window("0", 0, 32, 64)] and plain.needed == 64
    sliding = Sampling(kind="sliding")
    assert [window.offset for window in sliding.windows(84)] == [0, 10, 20] and sliding.needed == 64
    assert plain.settings() == {
        "kind": "offsets", "prefix_length": [32], "suffix_length": [32], "offset": [0], "combine": "product",
        "shared_suffix": False, "prefix_buckets": None, "min_document_tokens": None, "max_document_tokens": None,
        "max_documents": None, "add_special_tokens": False, "bos": "tokenizer", "deduplicate": False,
        "min_type_token_ratio": None,
    }  # fmt: skip
    assert (sliding.settings()["stride"], sliding.settings()["stride_unit"]) == (10, "tokens")


@pytest.mark.parametrize(("tokens", "begins"), [(4, [0]), (6, [0]), (7, [0, 3]), (9, [0, 3]), (10, [0, 3, 6])])
def test_the_last_window_ends_with_the_document_or_before(tokens, begins):
    sampling = Sampling(kind="sliding", prefix_length=3, suffix_length=1, stride=3)
    assert [window.offset for window in sampling.windows(tokens)] == begins


@pytest.mark.parametrize(("tokens", "middle", "end"), [(3, 1, 3), (5, 3, 5), (6, 4, 6), (7, 4, 6)])
def test_the_first_and_the_last_tokens_of_a_document(tokens, middle, end):
    first = Sampling(kind="first", suffix_length=2, max_tokens=6)
    assert first.windows(tokens) == [Window("0", 0, middle, end)] and first.needed == 3
    last, begin = Sampling(kind="last", suffix_length=2, max_tokens=6), tokens - end
    assert last.windows(tokens) == [Window(str(begin), begin, begin + middle, tokens)] and last.needed == 3
    for kind in ("first", "last"):
        assert Sampling(kind=kind, suffix_length=2).windows(tokens) == [Window("0", 0, tokens - 2, tokens)]


def test_a_window_is_named_by_its_lengths_where_there_are_several():
    for lengths in ({"prefix_length": (1, 2)}, {"suffix_length": (1, 2)}):
        names = [window.name for window in Sampling(**{"prefix_length": 1, "suffix_length": 1, **lengths}).windows(9)]
        assert names[0] == "0+1+1" and len(set(names)) == 2
    assert [window.name for window in Sampling(offset=(0, 4)).windows(99)] == ["0", "4"]


def test_the_bounds_of_settings():
    Sampling(prefix_length=1, suffix_length=1, offset=0, stride=1, max_documents=1, min_document_tokens=0)
    assert Sampling(prefix_length=4, suffix_length=4, max_document_tokens=8).needed == 8
    Sampling(prefix_length=4, suffix_length=4, min_document_tokens=9, max_document_tokens=9)
    Sampling(kind="first", suffix_length=5, max_tokens=6)
    Sampling(kind="first", prefix_length=(3, 4), suffix_length=5)  # is not looked at
    Sampling(kind="offsets", suffix_length=5, max_tokens=5)
    for wrong, message in (
        ({"prefix_length": 4, "suffix_length": 4, "max_document_tokens": 7}, "a document needs 8 tokens"),
        ({"min_document_tokens": 90, "max_document_tokens": 89}, "a document needs 90 tokens"),
        ({"kind": "last", "suffix_length": 5, "max_tokens": 4}, "leaves no prefix before a suffix of 5"),
        ({"kind": "sliding", "suffix_length": (3, 4, 5)}, "suffix_length has 3 numbers"),
        ({"kind": "last", "suffix_length": (3, 4)}, "suffix_length has 2 numbers"),
        ({"prefix_length": (4, 0, -1)}, "prefix_length is 0"),
        ({"suffix_length": (4, 4)}, "suffix_length is .*different"),
        ({"offset": (0, -1)}, "at least 0"),
        ({"offset": ()}, "one or more different"),
        ({"max_tokens": 0}, "max_tokens is 0, but it must be a whole number of at least 1"),
        ({"min_document_tokens": -1}, "of at least 0"),
        ({"max_document_tokens": 0}, "of at least 1"),
        ({"shared_suffix": None}, "shared_suffix is None"),
        ({"add_special_tokens": "yes"}, "add_special_tokens is 'yes'"),
    ):
        with pytest.raises(ValueError, match=message):
            Sampling(**wrong)


def test_settings_are_named_and_stay():
    with pytest.raises(TypeError):
        Sampling("first")
    with pytest.raises(AttributeError):
        Sampling().kind = "first"
