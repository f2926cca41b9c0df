"""Named protocols: the published numbers, and what may be changed."""

import json

import pytest

from hf_axonn_eval import PROTOCOLS, build_samples, protocol


def tokens(length):
    return [{"id": "d", "bucket": 0, "input_ids": list(range(length))}]


def pieces(name, length, **settings):
    """(first token, prefix length, suffix length, last token) of each sample of a document of so many tokens."""
    samples = build_samples(tokens(length), sampling=protocol(name, **settings).sampling)
    return [(some.prefix[0], len(some.prefix), len(some.suffix), some.suffix[-1]) for some in samples]


@pytest.mark.parametrize("name", ["sc24", "goldfish"])
def test_the_last_50_of_up_to_2048(name):
    assert pieces(name, 3000) == [(0, 1998, 50, 2047)]
    assert pieces(name, 60) == [(0, 10, 50, 59)]
    with pytest.raises(ValueError, match="fewer than 51 tokens"):
        pieces(name, 50)


def test_the_goldfish_paper_looks_at_500_documents():
    assert protocol("goldfish").sampling.max_documents == 500
    assert protocol("sc24").sampling.max_documents is None


def test_one_suffix_with_more_and_more_context():
    found = pieces("carlini50", 500)
    assert [prefix for _, prefix, _, _ in found] == list(range(50, 451, 50))
    assert {(suffix, last) for _, _, suffix, last in found} == {(50, 499)}
    with pytest.raises(ValueError, match="fewer than 500 tokens"):
        pieces("carlini50", 499)


def test_windows_of_100_tokens():
    chosen = protocol("cooper100")
    assert (chosen.sampling.stride, chosen.sampling.stride_unit) == (10, "characters")
    assert chosen.extract["sampler"] == {"temperature": 1.0, "top_k": 40, "top_p": None}
    over_tokens = pieces("cooper100", 131, stride_unit="tokens")
    assert over_tokens == [(begin, 50, 50, begin + 99) for begin in (0, 10, 20, 30)]


def test_grids_over_prefixes_and_offsets():
    found = pieces("apertus", 5500)
    assert len(found) == 9 + 12 - 1
    assert [first for first, prefix, _, _ in found if prefix == 500] == [
        0,
        1,
        2,
        *(4 * 4**0,),
        *(2**n for n in range(4, 12)),
    ]
    assert sorted(prefix for first, prefix, _, _ in found if first == 0) == [
        50,
        100,
        250,
        500,
        1000,
        2000,
        3000,
        4000,
        5000,
    ]
    longer = pieces("apertus", 7500, suffix_length=(500, 7000))
    assert (0, 500, 7000, 7499) in longer and len(longer) == 21


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_protocol_names_its_source_and_is_recorded(name):
    chosen = protocol(name)
    assert "arXiv" in chosen.source and chosen.name == name
    assert json.loads(json.dumps(chosen.record())) == chosen.record()
    assert chosen.record()["changed"] == []
    assert json.loads(json.dumps(dict(chosen.extract))) == chosen.extract
    other = protocol(name, suffix_length=7, max_documents=3)
    assert other.changed == ("suffix_length", "max_documents") and other.sampling.suffix_length == (7,)
    assert protocol(name).changed == ()  # the published one stays as it is


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("sc23", {}, "no protocol 'sc23'; there are sc24, goldfish"),
        ("sc24", {"stride": 5}, "protocol sc24 cuts by 'first', which has no stride"),
        ("sc24", {"prefix_length": 5}, "which has no prefix_length"),
        ("cooper100", {"length": 5}, "knows no setting 'length'"),
        ("cooper100", {"kind": "first"}, "cuts by 'sliding', which has no kind"),
        ("apertus", {"offset": -1}, "different numbers of at least 0"),
    ],
)
def test_what_cannot_be_changed_is_named(name, settings, message):
    with pytest.raises(ValueError, match=message):
        protocol(name, **settings)


def test_the_published_settings():
    """The numbers of the papers, each once more."""
    settings = {name: protocol(name).sampling.settings() for name in PROTOCOLS}
    for name in ("sc24", "goldfish"):
        assert settings[name]["kind"] == "first" and settings[name]["add_special_tokens"] is True
        assert (settings[name]["max_tokens"], settings[name]["suffix_length"]) == (2048, [50])
    assert settings["carlini50"] | {"prefix_length": 0} == {
        "kind": "offsets", "prefix_length": 0, "suffix_length": [50], "offset": [0], "combine": "product",
        "shared_suffix": True, "min_document_tokens": 500, "max_document_tokens": None, "max_documents": None,
        "add_special_tokens": False, "deduplicate": False,
    }  # fmt: skip
    assert settings["cooper100"] == {
        "kind": "sliding", "prefix_length": [50], "suffix_length": [50], "stride": 10, "stride_unit": "characters",
        "min_document_tokens": None, "max_document_tokens": None, "max_documents": None, "add_special_tokens": True,
        "deduplicate": True,
    }  # fmt: skip
    assert settings["apertus"]["prefix_length"] == [500, 50, 100, 250, 1000, 2000, 3000, 4000, 5000]
    assert settings["apertus"]["offset"] == [0, 1, 2, 4, 16, 32, 64, 128, 256, 512, 1024, 2048]
    assert {name: dict(protocol(name).extract) for name in PROTOCOLS} == {
        "sc24": {"generate": True},
        "goldfish": {"generate": True},
        "carlini50": {"generate": False},
        "cooper100": {"generate": False, "sampler": {"temperature": 1.0, "top_k": 40, "top_p": None}},
        "apertus": {"generate": True, "sampler": {"temperature": 1.0, "top_k": None, "top_p": 0.9}},
    }
    with pytest.raises(AttributeError):
        protocol("sc24").name = "mine"
