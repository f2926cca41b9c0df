"""Named protocols: windows counted by hand from what their authors' code does, and what may be changed."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_axonn_eval import PROTOCOLS, build_samples, iter_samples, protocol
from hf_axonn_eval.data.sampling import Tally


BOS, EOS = 0, 1


def letters_tokenizer(*, bos: bool = True, adds_it: bool = True) -> PreTrainedTokenizerFast:
    """A token for each character; ids 0 and 1 are the BOS, which texts begin with if `adds_it`, and the EOS."""
    names = ["<s>", "</s>", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if adds_it:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    special = {"eos_token": "</s>"} | ({"bos_token": "<s>"} if bos else {})
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def tokens(length, *, name="d", bucket=0):
    return {"id": name, "bucket": bucket, "input_ids": list(range(100, 100 + length))}


def cut(name, *documents, tokenizer=None, drop=(), **settings):
    """Samples, what became of the documents, and the facts that lines are compared with."""
    tally, chosen = Tally(), protocol(name, **settings)
    tokenizer = letters_tokenizer() if tokenizer is None else tokenizer
    dropped = {*chosen.drop, *drop}
    samples = list(iter_samples(documents, sampling=chosen.sampling, tokenizer=tokenizer, tally=tally, drop=dropped))
    return samples, tally, chosen.samples_facts(tally.facts(), sorted(tally.dropped_ids), tokenizer)


def pieces(samples):
    """(first token, prefix length, suffix length, last token) of each."""
    return [(some.prefix[0], len(some.prefix), len(some.suffix), some.suffix[-1]) for some in samples]


def test_sc24_asks_only_documents_of_2048_tokens():
    samples, tally, facts = cut("sc24", tokens(3000), tokens(2048, name="just"), tokens(2047, name="short"))
    assert pieces(samples) == [(100, 1998, 50, 2147), (100, 1998, 50, 2147)]
    assert tally.left_out() == {"too_short": 1}
    assert facts["prefix_tokens"] == {"least": 1998, "most": 1998}
    # the defect: with the setting taken away, the first of these prefixes has 112 tokens
    samples, _, facts = cut("sc24", tokens(162), tokens(1458, name="other"), min_document_tokens=None)
    assert pieces(samples) == [(100, 112, 50, 261), (100, 1408, 50, 1557)]
    assert facts["prefix_tokens"] == {"least": 112, "most": 1408}


def test_goldfish_takes_shorter_documents_too_and_500_of_them():
    """eval/data_extraction.py leaves out what has no more tokens than the suffix, and then counts to 500."""
    documents = [tokens(50, name="none"), tokens(51, name="one"), tokens(2100, name="long")]
    samples, tally, _ = cut("goldfish", *documents)
    assert pieces(samples) == [(100, 1, 50, 150), (100, 1998, 50, 2147)] and tally.left_out() == {"too_short": 1}
    many = [tokens(60, name=str(number)) for number in range(503)]
    samples, tally, facts = cut("goldfish", tokens(50), *many)
    assert len(samples) == 500 and tally.left_out() == {"too_short": 1, "beyond_max_documents": 3}
    assert facts["documents_used"] == {"0": 500} and samples[-1].document_id == "499"


def test_goldfish_begins_texts_with_the_bos_and_tells_of_an_eos_within_a_suffix():
    text = {"id": "t", "bucket": 3, "text": "a" * 60}
    samples, _, facts = cut("goldfish", text)
    assert pieces(samples) == [(BOS, 11, 50, 67)], "61 tokens, of which the BOS is one"
    assert (facts["begin_with_bos"], facts["eos_within_suffix"]) == (1, 0)
    for last, within in ((60, 0), (59, 1), (10, 0)):  # the last of 61 tokens ends the suffix, and the 11th no suffix
        ids = [BOS, *[67] * 60]
        ids[last] = EOS
        assert cut("goldfish", {"id": "t", "bucket": 3, "input_ids": ids})[2]["eos_within_suffix"] == within


def test_carlini50_has_one_suffix_after_more_and_more_context():
    samples, _, _ = cut("carlini50", tokens(500), tokens(499, name="short"))
    assert pieces(samples) == [(550 - context, context, 50, 599) for context in range(50, 451, 50)]


def test_cooper100_by_hand():
    """A character is a token: windows begin at 0, 10, 20, ... and need 99 characters beside their BOS."""
    text = "".join(chr(97 + place % 26) for place in range(130))
    samples, tally, facts = cut("cooper100", {"id": "book", "bucket": 1, "text": text})
    assert [some.sample_id for some in samples] == ["book@0c", "book@10c", "book@20c", "book@30c"]
    ids = letters_tokenizer(adds_it=False)(text)["input_ids"]
    for some, start in zip(samples, (0, 10, 20, 30), strict=True):
        assert (*some.prefix, *some.suffix) == (BOS, *ids[start : start + 99]) and len(some.prefix) == 50
        assert some.offset == start, "counted with the BOS of the document, the place before the first character"
    assert facts["begin_with_bos"] == facts["samples"] == 4 and tally.left_out() == {}


def test_cooper100_puts_a_bos_where_the_tokenizer_adds_none():
    text = "".join(chr(97 + place % 26) for place in range(110))
    book = {"id": "book", "bucket": 1, "text": text}
    by_itself, _, one = cut("cooper100", book)
    by_hand, _, other = cut("cooper100", book, tokenizer=letters_tokenizer(adds_it=False))
    assert by_hand == by_itself and (one["tokenizer_adds_bos"], other["tokenizer_adds_bos"]) == (True, False)
    without, _, facts = cut("cooper100", book, tokenizer=letters_tokenizer(bos=False, adds_it=False))
    assert [some.prefix[0] for some in without] == [by_hand[0].prefix[1], by_hand[1].prefix[1]]
    assert facts["has_bos"] is False and facts["begin_with_bos"] == 0


def test_cooper100_leaves_out_windows_that_800_characters_do_not_fill():
    """Words of eleven characters are a token each, other characters one for each.

    100 words and 1,100 letters: slices at 0 to 300 hold at most 73 words and no letter; the one at 310 begins with
    the last 9 characters of a word, and ends before the letters, too. From 1,100 - 800 + 27 on there would be 27
    letters and 73 words. So windows begin to be full within 330 to 1,100, where each of them is counted by its tokens.
    """
    names = {"<s>": 0, "?": 1, "abcdefghij ": 2}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("abcdefghij ", "isolated"), pre_tokenizers.Split("z", "isolated")]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    text = "abcdefghij " * 100 + "z" * 1100
    starts = range(0, 2200, 10)
    held = {start: 1 + len(tokenizer(text[start : start + 800])["input_ids"]) for start in starts}  # with the BOS
    assert held[0] == 1 + 73 and held[1100] == 801
    book, settings = {"id": "b", "bucket": 1, "text": text}, {"tokenizer": tokenizer, "deduplicate": False}
    samples, tally, _ = cut("cooper100", book, **settings)
    assert [some.sample_id for some in samples] == [f"b@{start}c" for start in starts if held[start] >= 100]
    short = [start for start in starts if held[start] < 100]
    assert tally.left_out() == {"windows_too_short": sum(start <= 1400 for start in short)}
    assert min(short) == 0 and max(short) == 2190 and 30 < tally.windows_short < 40
    filled, tally, _ = cut("cooper100", book, slice_characters=None, **settings)
    assert filled[0].sample_id == "b@0c" and len(filled) > len(samples) and tally.left_out() == {}

    # only words: those at 0, 10, ... 1400 have 800 characters, and all later ones are the end of the text
    with pytest.raises(ValueError, match="141 windows have too few tokens in 800 characters"):
        cut("cooper100", {"id": "b", "bucket": 1, "text": "abcdefghij " * 200}, **settings)


def test_cooper100_looks_for_duplicates_in_one_book():
    text = "abcdefghij" * 20  # every window begins with the same letter
    samples, tally, facts = cut("cooper100", {"id": "one", "bucket": 1, "text": text})
    assert len(samples) == 1 and tally.duplicates == 10 and facts["duplicates_of_other_documents"] == 0
    both = [{"id": name, "bucket": 1, "text": text} for name in ("one", "two")]
    samples, tally, facts = cut("cooper100", *both)
    assert len(samples) == 1 and tally.duplicates == 21 and facts["duplicates_of_other_documents"] == 11


def test_cooper100_without_bos_and_with_the_full_softmax():
    text = "abcdefghij" * 12
    samples, tally, facts = cut("cooper100-full-softmax", {"id": "book", "bucket": 1, "text": text})
    assert [some.sample_id for some in samples] == ["book@0c", "book@10c", "book@20c"], "duplicates are kept"
    ids = letters_tokenizer(adds_it=False)(text)["input_ids"]
    assert all((*some.prefix, *some.suffix) == tuple(ids[:100]) for some in samples)
    assert facts["begin_with_bos"] == 0 and protocol("cooper100-full-softmax").extract == {"generate": False}


def test_windows_over_tokens_have_neither_a_slice_nor_a_bos_of_their_own():
    changed = protocol("cooper100", stride_unit="tokens")
    assert (changed.sampling.slice_characters, changed.sampling.bos) == (None, "tokenizer")
    assert changed.changed == ("stride_unit", "slice_characters", "bos")
    samples, _, _ = cut("cooper100", tokens(131), stride_unit="tokens")
    assert [pieces([some])[0] for some in samples] == [(begin, 50, 50, begin + 99) for begin in (100, 110, 120, 130)]


def apertus(bucket, length=5500, name=None):
    return tokens(length, name=name or f"v1/{bucket}/0", bucket=bucket)


def test_apertus_asks_all_buckets_at_all_offsets_and_two_with_all_prefix_lengths():
    offsets = [0, 1, 2, 4, 16, 32, 64, 128, 256, 512, 1024, 2048]
    lengths = [50, 100, 250, 1000, 2000, 3000, 4000, 5000]
    samples, _, facts = cut("apertus", *(apertus(bucket) for bucket in (0, 4, 8, 24, 128)))
    assert facts["begin_with_bos"] == len(samples) == 5 * 12 + 2 * 8
    for bucket in (0, 4, 8, 24, 128):
        mine = [some for some in samples if some.bucket == bucket]
        at = [some for some in mine if len(some.prefix) == 501]
        assert [some.offset for some in at] == offsets
        for some in at:
            first = 100 + some.offset
            assert some.prefix == (BOS, *range(first, first + 500))
            assert some.suffix == tuple(range(first + 500, first + 1000))
        others = [some for some in mine if len(some.prefix) != 501]
        assert [len(some.prefix) - 1 for some in others] == (lengths if bucket in (8, 24) else [])
        assert all(some.offset == 0 and some.prefix[:2] == (BOS, 100) for some in others)


def test_apertus_needs_long_documents_only_where_it_asks_with_long_prefixes():
    samples, tally, _ = cut("apertus", apertus(4, 3048), apertus(8, 5499), apertus(16, 3047), apertus(24, 5500))
    assert {some.bucket for some in samples} == {4, 24} and tally.short == 2


def test_apertus_leaves_out_repetitive_suffixes_by_all_their_tokens():
    """199 different tokens of 500 are left out and 200 are not, whatever windows of 50 would say."""

    def document(different: int) -> dict:
        suffix = [*range(different), *[0] * (500 - different)]
        return {"id": str(different), "bucket": 4, "input_ids": [*range(1000, 1500), *suffix]}

    samples, tally, _ = cut("apertus", document(199), document(200), offset=0)
    assert [some.sample_id for some in samples] == ["200@0+500+500"]
    assert tally.left_out() == {"repetitive_suffixes": 1}


def test_apertus_drops_the_known_contaminations_by_name():
    known = PROTOCOLS["apertus"].drop
    assert len(known) == len(set(known)) == 21 and sum(name.startswith("v1/") for name in known) == 16
    documents = [apertus(8, name="v1/8/87"), apertus(8, name="v1/8/88"), apertus(8, name="v1/8/416")]
    samples, tally, facts = cut("apertus", *documents)
    assert {some.document_id for some in samples} == {"v1/8/88"} and tally.left_out()["dropped"] == 2
    assert facts["known_dropped"] == {"v1": 2, "v2": 0}
    _, _, facts = cut("apertus", apertus(8), apertus(4, name="mine"), drop=["mine"])
    assert facts["known_dropped"] == {"v1": 0, "v2": 0}, "one of yours is none of theirs"


def test_the_extraction_benchmark_shows_the_second_hundred():
    """Rows of 200: 100 that are not shown, 50 + 50."""
    samples, tally, _ = cut("lm-extraction-benchmark", tokens(200), tokens(199, name="a"), tokens(201, name="b"))
    assert pieces(samples) == [(200, 50, 50, 299)]
    assert tally.left_out() == {"too_short": 1, "too_long": 1}


def test_hubble_asks_for_all_the_rest_and_its_end():
    """utils.py: the first 25, 50, 75 and 100 tokens, then all others; generation ends at the EOS."""
    samples, tally, facts = cut("hubble", tokens(130), tokens(99, name="short"))
    assert pieces(samples) == [(100, prefix, 131 - prefix, EOS) for prefix in (25, 50, 75, 100)]
    assert [some.sample_id for some in samples] == ["d@0+25", "d@0+50", "d@0+75", "d@0+100"]
    assert tally.left_out() == {"too_short": 1} and facts["eos_within_suffix"] == 0
    [just] = [some for some in cut("hubble", tokens(100))[0] if len(some.prefix) == 100]
    assert just.suffix == (EOS,)
    plain, _, _ = cut("hubble", tokens(101), append_eos=False)
    assert plain[-1].suffix == (200,)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_protocol_names_its_source_and_is_recorded(name):
    chosen = protocol(name)
    assert "arXiv" in chosen.source and chosen.name == name
    assert json.loads(json.dumps(chosen.record({"samples": 1}))) == chosen.record({"samples": 1})
    assert chosen.record()["changed"] == [] and "samples" not in chosen.record()
    assert json.loads(json.dumps(dict(chosen.extract))) == chosen.extract
    other = protocol(name, deduplicate=not chosen.sampling.deduplicate, max_documents=3)
    assert set(other.changed) == {"deduplicate", "max_documents"} and other.sampling.max_documents == 3
    assert protocol(name).changed == ()  # the published one stays as it is


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("sc23", {}, "no protocol 'sc23'; there are apertus, carlini50, cooper100, cooper100-full-softmax, goldfish"),
        ("sc24", {"stride": 5}, "protocol sc24 cuts by 'first', which has no stride"),
        ("sc24", {"prefix_length": 5}, "which has no prefix_length"),
        ("cooper100", {"length": 5}, "knows no setting 'length'"),
        ("cooper100", {"kind": "first"}, "cuts by 'sliding', which has no kind"),
        ("apertus", {"offset": -1}, "different numbers of at least 0"),
        ("apertus", {"bos": "window"}, "bos is 'window', which is of windows over characters"),
    ],
)
def test_what_cannot_be_changed_is_named(name, settings, message):
    with pytest.raises(ValueError, match=message):
        protocol(name, **settings)


def test_a_bos_and_an_eos_must_be_there():
    for tokenizer, message in (
        (None, "needs a tokenizer with a BOS token; give tokenizer="),
        (letters_tokenizer(bos=False, adds_it=False), "needs the tokenizer to have a BOS token; '' has none"),
    ):
        with pytest.raises(ValueError, match=message):
            build_samples([apertus(4)], sampling=protocol("apertus").sampling, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="append_eos needs a tokenizer with a EOS token"):
        build_samples([tokens(130)], sampling=protocol("hubble").sampling)


def test_the_published_settings():
    """The numbers of the authors, each once more."""
    settings = {name: protocol(name).sampling.settings() for name in PROTOCOLS}
    for name in ("sc24", "goldfish"):
        assert settings[name]["kind"] == "first" and settings[name]["add_special_tokens"] is True
        assert (settings[name]["max_tokens"], settings[name]["suffix_length"]) == (2048, [50])
    assert settings["carlini50"] | {"prefix_length": 0} == {
        "kind": "offsets", "prefix_length": 0, "suffix_length": [50], "offset": [0], "combine": "product",
        "shared_suffix": True, "prefix_buckets": None, "min_document_tokens": 500, "max_document_tokens": None,
        "max_documents": None, "add_special_tokens": False, "bos": "tokenizer", "deduplicate": False,
        "min_type_token_ratio": None,
    }  # fmt: skip
    assert settings["cooper100"] == {
        "kind": "sliding", "prefix_length": [50], "suffix_length": [50], "stride": 10, "stride_unit": "characters",
        "slice_characters": 800, "min_document_tokens": None, "max_document_tokens": None, "max_documents": None,
        "add_special_tokens": True, "bos": "window", "deduplicate": True, "min_type_token_ratio": None,
    }  # fmt: skip
    assert settings["apertus"]["min_type_token_ratio"] == 0.4 and settings["apertus"]["prefix_buckets"] == [8, 24]
    top_40 = {"temperature": 1.0, "top_k": 40, "top_p": None}
    assert {name: dict(protocol(name).extract) for name in PROTOCOLS} == {
        "apertus": {"generate": True, "sampler": {"temperature": 1.0, "top_k": None, "top_p": 0.9}},
        "carlini50": {"generate": False},
        "cooper100": {"generate": False, "sampler": top_40},
        "cooper100-full-softmax": {"generate": False},
        "goldfish": {"generate": True},
        "hubble": {"generate": True},
        "lm-extraction-benchmark": {"generate": True, "guesses": True},
        "sc24": {"generate": True},
    }
    with pytest.raises(AttributeError):
        protocol("sc24").name = "mine"
