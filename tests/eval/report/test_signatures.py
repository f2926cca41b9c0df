"""How functions and records of this folder are called."""

from tests.eval.conventions import defaults_of, not_to_be_named, records_of


def test_arguments_may_be_given_by_name():
    assert not_to_be_named("report") == []


def test_records_stay_as_they_were_made_and_long_ones_take_names():
    assert records_of("report") == {
        "Axis": {"stays"},
        "DocumentMap": {"stays", "by name"},
    }


def test_what_is_meant_where_nothing_is_said():
    assert defaults_of("report") == {
        "Axis": {"log": False},
        "line_chart": {"log": False},
        "html_page": {"examples": 4, "title": "Extraction"},
        "maps_svg": {"alone": False},
        "estimate_text": {"interval": True},
        "write_report": {"examples": 4, "title": "Extraction"},
    }
