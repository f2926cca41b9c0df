"""How functions and records of this folder are called."""

from tests.eval.conventions import defaults_of, not_to_be_named, records_of


def test_arguments_may_be_given_by_name():
    assert not_to_be_named("metrics") == []


def test_records_stay_as_they_were_made_and_long_ones_take_names():
    assert records_of("metrics") == {
        "Sampler": {"stays"},
        "Metric": {"stays", "by name"},
    }


def test_what_is_meant_where_nothing_is_said():
    assert defaults_of("metrics") == {
        "Sampler": {"temperature": 1.0},
        "scores": {"share": 0.2},
        "register_metric": {"mean": "number", "shown_in": "terminal"},
        "type_token_ratio": {"window": 50},
    }
