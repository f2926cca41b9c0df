"""How functions and records of this folder are called."""

from tests.eval.conventions import defaults_of, not_to_be_named, records_of


def test_arguments_may_be_given_by_name():
    assert not_to_be_named("extraction") == []


def test_records_stay_as_they_were_made_and_long_ones_take_names():
    assert records_of("extraction") == {
        "_Request": set(),
        "Row": {"stays"},
        "LoadedModel": {"stays", "by name"},
        "Runner": {"by name"},
        "WorkSplit": {"stays", "by name"},
    }


def test_what_is_meant_where_nothing_is_said():
    assert defaults_of("extraction") == {
        "ExtractionCallback": {"at_start": False, "generate": False, "batch_size": 8},
        "extract": {
            "batch_size": 8,
            "generate": True,
            "stop_early": False,
            "membership": False,
            "confidence": 0.95,
            "seed": 0,
            "progress": True,
        },
        "rows_of": {"room": 0},
        "load_model": {"dtype": "auto", "trust_remote_code": False},
        "document_nll": {"batch_size": 1, "progress": False},
        "WorkSplit": {"index": 0, "count": 1, "reports": True, "rank": 0, "world_size": 1},
    }
