"""How functions and records of this folder are called."""

from tests.eval.conventions import defaults_of, not_to_be_named, records_of


def test_arguments_may_be_given_by_name():
    assert not_to_be_named("data") == []


def test_records_stay_as_they_were_made_and_long_ones_take_names():
    assert records_of("data") == {
        "Protocol": {"stays", "by name"},
        "SampleResult": {"stays", "by name"},
        "Sample": {"stays", "by name"},
        "Tally": set(),
        "Sampling": {"stays", "by name"},
    }


def test_what_is_meant_where_nothing_is_said():
    assert defaults_of("data") == {
        "iter_documents": {"id_key": "id", "text_key": "text", "bucket_key": "bucket"},
        "decoded": {"before": 0},
        "is_count": {"least": 0},
        "Protocol": {"changed": ()},
        "Tally": {
            "documents": 0,
            "samples": 0,
            "empty": 0,
            "short": 0,
            "long": 0,
            "beyond": 0,
            "duplicates": 0,
            "duplicates_of_other_buckets": 0,
            "not_round_trip": 0,
        },
        "build_samples": {"offsets": (0,), "add_special_tokens": False},
        "Sampling": {
            "kind": "offsets",
            "prefix_length": 32,
            "suffix_length": 32,
            "offset": 0,
            "combine": "product",
            "shared_suffix": False,
            "stride": 10,
            "stride_unit": "tokens",
            "add_special_tokens": False,
            "deduplicate": False,
        },
    }
