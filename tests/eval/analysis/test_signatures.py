"""How functions and records of this folder are called."""

from tests.eval.conventions import defaults_of, not_to_be_named, records_of


def test_arguments_may_be_given_by_name():
    assert not_to_be_named("analysis") == []


def test_records_stay_as_they_were_made_and_long_ones_take_names():
    assert records_of("analysis") == {
        "Table": {"stays"},
    }


def test_what_is_meant_where_nothing_is_said():
    assert defaults_of("analysis") == {
        "wilson": {"confidence": 0.95},
        "bootstrap": {"confidence": 0.95, "resamples": 2000, "seed": 0},
        "bootstrap_columns": {"confidence": 0.95, "resamples": 2000, "seed": 0},
        "share_intervals": {"confidence": 0.95},
        "difference_interval": {"confidence": 0.95},
        "wilson_of_difference": {"confidence": 0.95},
        "attack": {"rates": (0.001, 0.01), "confidence": 0.95, "resamples": 2000, "seed": 0},
        "summarize": {
            "lengths": (),
            "tries": (1, 10, 100, 1000, 10000, 100000, 1000000),
            "confidence": 0.95,
            "resamples": 2000,
            "seed": 0,
        },
        "compare": {
            "lengths": (),
            "tries": (1, 10, 100, 1000, 10000, 100000, 1000000),
            "confidence": 0.95,
            "resamples": 2000,
            "seed": 0,
        },
    }
