"""How functions and records of this folder are called."""

from tests.eval.conventions import defaults_of, not_to_be_named, records_of


def test_arguments_may_be_given_by_name():
    assert not_to_be_named("canaries") == []


def test_records_stay_as_they_were_made_and_long_ones_take_names():
    assert records_of("canaries") == {
        "Canary": {"stays", "by name"},
        "CanarySet": {"stays", "by name"},
        "CanaryRank": {"stays", "by name"},
    }


def test_what_is_meant_where_nothing_is_said():
    assert defaults_of("canaries") == {
        "make_canaries": {"each": 1, "candidates": 10000, "seed": 0},
        "insert_canaries": {"id_key": "id", "text_key": "text"},
        "rank_canaries": {"add_special_tokens": False, "batch_size": 8, "progress": True},
    }
