"""Where documents are cut, what is left out, and what is said of it."""

import logging

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_axonn_eval import Sample, Sampling, build_samples, iter_samples
from hf_axonn_eval.data.sampling import Tally
from tests.helpers.eval_support import documents as topics_documents
from tests.helpers.eval_support import topics_tokenizer


TEXT = "for statement, while statement and generator expressions"


def document(name="a", *, length=20, bucket=0, start=100):
    return {"id": name, "bucket": bucket, "input_ids": list(range(start, start + length))}


def cut(documents, **settings):
    """What comes out, as (sample id, prefix, suffix), and the tally."""
    tally = Tally()
    samples = list(iter_samples(documents, sampling=Sampling(**settings), tokenizer=topics_tokenizer(), tally=tally))
    return [(sample.sample_id, sample.prefix, sample.suffix) for sample in samples], tally


def test_prefix_and_suffix_are_neighbours_at_the_offset():
    samples = build_samples([document(bucket=4)], prefix_length=3, suffix_length=2, offsets=(0, 5))
    assert samples == [
        Sample(sample_id="a@0", document_id="a", bucket=4, offset=0, prefix=(100, 101, 102), suffix=(103, 104)),
        Sample(sample_id="a@5", document_id="a", bucket=4, offset=5, prefix=(105, 106, 107), suffix=(108, 109)),
    ]


def test_a_document_that_just_fits_is_used_and_a_shorter_one_is_reported(caplog):
    documents = [document("fits", length=10), document("short", length=9), document("empty", length=0)]
    with caplog.at_level(logging.WARNING):
        samples = build_samples(documents, prefix_length=4, suffix_length=4, offsets=(0, 2))
    assert [sample.document_id for sample in samples] == ["fits", "fits"]
    assert "2 of 3 documents have fewer than 10 tokens (1 of them none at all)" in caplog.text


def test_length_filter():
    documents = [document(str(length), length=length) for length in (5, 10, 15, 20)]
    samples = build_samples(
        documents, prefix_length=2, suffix_length=2, min_document_tokens=10, max_document_tokens=15
    )
    assert [sample.document_id for sample in samples] == ["10", "15"]


def test_text_is_tokenized_as_a_whole_and_then_cut():
    tokenizer = topics_tokenizer()
    whole = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    documents = [{"id": "d", "bucket": 1, "text": TEXT}]
    [sample] = build_samples(documents, tokenizer=tokenizer, prefix_length=5, suffix_length=4)
    assert [*sample.prefix, *sample.suffix] == whole[:9]
    [special] = build_samples(
        documents, tokenizer=tokenizer, prefix_length=5, suffix_length=4, add_special_tokens=True
    )
    assert special.prefix == (tokenizer.bos_token_id, *whole[:4])


def test_a_window_over_tokens():
    found, _ = cut([document(length=12)], kind="sliding", prefix_length=4, suffix_length=2, stride=3)
    assert [name for name, _, _ in found] == ["a@0", "a@3", "a@6"]
    assert found[2] == ("a@6", (106, 107, 108, 109), (110, 111))


def test_the_beginning_and_the_end():
    documents = [document("long", length=12), document("short", length=3), document("shortest", length=2)]
    first, tally = cut(documents, kind="first", suffix_length=2, max_tokens=6)
    assert first == [("long@0", (100, 101, 102, 103), (104, 105)), ("short@0", (100,), (101, 102))]
    assert tally.left_out() == {"too_short": 1}
    last, _ = cut(documents, kind="last", suffix_length=2, max_tokens=6)
    assert last == [("long@6", (106, 107, 108, 109), (110, 111)), ("short@0", (100,), (101, 102))]
    [whole], _ = cut(documents[:1], kind="first", suffix_length=1)
    assert whole == ("long@0", tuple(range(100, 111)), (111,))


@pytest.mark.parametrize("ends", [0, 1])
def test_an_eos_that_ends_a_document_is_not_put_there_twice(ends):
    tokenizer = topics_tokenizer()
    eos = tokenizer.eos_token_id
    documents = [{"id": str(size), "bucket": 1, "input_ids": [5, 6, 7, 8][:size] + [eos] * ends} for size in (4, 2, 1)]
    found = build_samples(
        documents, tokenizer=tokenizer, sampling=Sampling(kind="rest", prefix_length=2, append_eos=True)
    )
    assert [(sample.prefix, sample.suffix) for sample in found] == [((5, 6), (7, 8, eos)), ((5, 6), (eos,))]


def test_a_window_over_characters_is_tokenized_on_its_own():
    tokenizer = topics_tokenizer()
    text = " ".join(topic["text"] for topic in topics_documents())[:1200]
    sampling = Sampling(
        kind="sliding",
        prefix_length=6,
        suffix_length=4,
        stride=7,
        stride_unit="characters",
        add_special_tokens=True,
        deduplicate=True,
    )
    tally = Tally()
    found = list(
        iter_samples([{"id": "d", "bucket": 0, "text": text}], sampling=sampling, tokenizer=tokenizer, tally=tally)
    )
    # the whole rest of the text is tokenized here: what is cut off behind the window must not matter
    expected, seen = [], set()
    for start in range(0, len(text), 7):
        ids = tuple(tokenizer(text[start:])["input_ids"][:10])
        if len(ids) == 10 and ids not in seen:
            expected.append((f"d@{start}c", ids[:6], ids[6:]))
        seen.add(ids)
    assert [(sample.sample_id, sample.prefix, sample.suffix) for sample in found] == expected
    assert all(sample.prefix[0] == tokenizer.bos_token_id for sample in found)
    # offsets are those of the document's own tokens: the window's first one, after its BOS, is where it begins
    spans = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    for sample in found:
        begin, end = spans[sample.offset + 1]
        assert begin <= int(sample.sample_id[2:-1]) < max(end, spans[sample.offset + 2][0])


def test_a_window_of_long_tokens_is_filled():
    """A piece of the text that is long enough for most windows is too short for this one; more of it is taken."""
    text = "=" * 2000
    assert len(topics_tokenizer()(text, add_special_tokens=False)["input_ids"]) == 125  # 16 characters a token
    settings = {"kind": "sliding", "prefix_length": 20, "suffix_length": 10, "stride_unit": "characters"}
    found, _ = cut([{"id": "d", "bucket": 0, "text": text}], stride=400, **settings)
    assert [name for name, _, _ in found] == ["d@0c", "d@400c", "d@800c", "d@1200c"]
    assert len(found[0][1]) == 20 and len(set(found)) == 4 and len({prefix for _, prefix, _ in found}) == 1


def test_a_window_ends_as_the_whole_text_does_and_not_where_its_piece_was_cut_off():
    """Words of nine letters: in 56 characters lie six of them, and a rest that is a token of another kind."""
    tokenizer = Tokenizer(models.WordLevel({"unknown": 0, "ninechars": 1}, unk_token="unknown"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("ninechars", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    text = "ninechars" * 20
    sampling = Sampling(kind="sliding", prefix_length=4, suffix_length=3, stride=1000, stride_unit="characters")
    [sample] = iter_samples([{"id": "d", "bucket": 0, "text": text}], sampling=sampling, tokenizer=tokenizer)
    assert tokenizer(text[: 8 * 7])["input_ids"] == [1] * 6 + [0]
    assert [*sample.prefix, *sample.suffix] == [1] * 7


def test_same_tokens_are_one_sample_and_buckets_that_share_them_are_told(caplog):
    documents = [document("a", bucket=4), document("b", bucket=4), document("c", bucket=0), document("d", start=7)]
    with caplog.at_level(logging.WARNING):
        found, tally = cut(documents, prefix_length=3, suffix_length=2, deduplicate=True)
    assert [name for name, _, _ in found] == ["a@0", "d@0"]
    assert tally.left_out() == {"duplicate_samples": 2, "duplicates_of_other_buckets": 1}
    assert "2 samples have the same tokens as an earlier one" in caplog.text and "not disjoint" in caplog.text
    kept, _ = cut(documents, prefix_length=3, suffix_length=2)
    assert len(kept) == 4
    # the same tokens cut elsewhere are another question
    assert len(cut([document()], prefix_length=(2, 3), suffix_length=2, deduplicate=True)[0]) == 2


def test_copies_of_a_document_are_told_where_they_count_as_documents(caplog):
    documents = [document("a", bucket=4), document("b", bucket=4), document("c"), document("d", start=7)]
    with caplog.at_level(logging.WARNING):
        _, tally = cut(documents, prefix_length=3, suffix_length=2)
    assert (tally.samples, tally.copies, tally.copies_of_other_buckets, tally.about()["copies"]) == (4, 2, 1, 2)
    assert "2 documents have the tokens of an earlier one, 1 of them of one of another bucket." in caplog.text
    _, alone = cut(documents, prefix_length=3, suffix_length=2, deduplicate=True)
    assert alone.copies == 0 and "copies" not in alone.about()


def test_so_many_documents_of_each_bucket():
    documents = [document(f"{bucket}{place}", bucket=bucket) for place in range(3) for bucket in (0, 5)]
    documents.insert(0, document("short", length=2))
    found, tally = cut(documents, prefix_length=3, suffix_length=2, max_documents=2)
    assert [name for name, _, _ in found] == ["00@0", "50@0", "01@0", "51@0"]
    assert tally.left_out() == {"too_short": 1, "beyond_max_documents": 2} and tally.documents == 7
    assert dict(tally.buckets) == {0: 2, 5: 2}


def test_a_tokenizer_that_does_not_give_the_text_back_is_reported(caplog):
    texts = {"plain": TEXT, "other": TEXT + " \u4e2d", "special": "</s>" + TEXT}
    documents = [{"id": name, "bucket": 0, "text": text} for name, text in texts.items()]
    with caplog.at_level(logging.WARNING):
        _, tally = cut(documents, prefix_length=3, suffix_length=2, add_special_tokens=True)
    assert tally.not_round_trip == 2
    assert "the tokenizer does not give back 2 of 3 documents unchanged" in caplog.text


def test_ids_may_come_as_an_array():
    torch = pytest.importorskip("torch", reason="the tensors are torch's")
    [sample] = build_samples([{"id": 7, "bucket": 0, "input_ids": torch.arange(9)}], prefix_length=3, suffix_length=2)
    assert sample.document_id == "7" and sample.prefix == (0, 1, 2) and type(sample.prefix[0]) is int


CHARACTERS = Sampling(kind="sliding", stride_unit="characters")


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        ([document()], {"prefix_length": 0}, "prefix_length is 0"),
        ([document()], {"suffix_length": 1.5}, "suffix_length is 1.5"),
        ([document()], {"offsets": (1, 1)}, "different numbers"),
        ([document()], {"offsets": (-1,)}, "different numbers"),
        ([document()], {"max_document_tokens": 5}, "max_document_tokens is 5, but a document needs 8 tokens"),
        ([document(length=7)], {}, "1 of 1 documents have fewer than 8 tokens"),
        ([], {}, "no samples: 0 of 0 documents"),
        ([document(), document()], {}, "'a' occurs twice"),
        ([document(name="")], {}, "document 1 has the id ''"),
        ([document(name=None)], {}, "document 1 has the id None"),
        ([{"id": "a", "bucket": 1, "input_ids": False}], {}, "input_ids of document 'a' are bool"),
        ([document(bucket="many")], {}, "bucket 'many'"),
        ([document(bucket=-1)], {}, "bucket -1"),
        ([{"id": "a", "bucket": 1}], {}, "document 1 has no 'text'"),
        ([{"id": "a", "bucket": 1, "text": "words"}], {}, "needs tokenizer"),
        ([{"id": "a", "bucket": 1, "text": None}], {}, "text of document 'a' is NoneType"),
        ([{"id": "a", "bucket": 1, "input_ids": [1, 2, -100, 4, 5, 6, 7, 8]}], {}, "prefix must be a list"),
        ([document()], {"sampling": Sampling()}, "not both"),
        ([document()], {"prefix_length": None}, "needs prefix_length"),
        ([document()], {"sampling": CHARACTERS, "prefix_length": None, "suffix_length": None}, "give its text"),
        (
            [{"id": "a", "bucket": 1, "text": "half \ud83d of a pair"}],
            {"tokenizer": topics_tokenizer()},
            "document 'a' cannot be written as UTF-8: '.ud83d' at character 5",
        ),
    ],
)
def test_wrong_input_is_named(documents, options, message):
    with pytest.raises(ValueError, match=message):
        build_samples(documents, **{"prefix_length": 4, "suffix_length": 4, **options})


def test_what_is_left_out_is_counted_by_reason():
    documents = [
        document("none", length=0), document("short", length=4), document("fits"), document("fits too"),
        document("long", length=21), document("beyond"),
    ]  # fmt: skip
    found, tally = cut(
        documents, prefix_length=3, suffix_length=2, max_document_tokens=20, max_documents=2, deduplicate=True
    )
    assert [name for name, _, _ in found] == ["fits@0"]
    assert tally.left_out() == {
        "too_short": 2, "of_these_empty": 1, "beyond_max_documents": 2, "duplicate_samples": 1,
    }  # fmt: skip
    assert (tally.documents, tally.samples, tally.not_round_trip) == (6, 1, 0)
    _, tally = cut(documents, prefix_length=3, suffix_length=2, max_document_tokens=20)
    assert tally.left_out() == {"too_short": 2, "of_these_empty": 1, "too_long": 1}


def test_nothing_is_logged_where_nothing_is_left_out(caplog):
    with caplog.at_level(logging.WARNING):
        cut(
            [document("a", length=5), document("b", start=7, length=5)],
            prefix_length=3,
            suffix_length=2,
            deduplicate=True,
        )
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        cut(
            [document("a", length=5), document("b", length=6)], prefix_length=3, suffix_length=2, max_document_tokens=5
        )
    assert "0 of 2 documents have fewer than 5 tokens, 1 more than 5; they are left out." in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        cut([document("a"), document("b")], prefix_length=3, suffix_length=2, deduplicate=True)
    assert "1 samples have the same tokens" in caplog.text and "disjoint" not in caplog.text


def test_a_window_over_characters_begins_at_every_so_many_of_them():
    """A character a token: windows of four from every second character on, as long as four are left."""
    tokenizer = Tokenizer(models.WordLevel({letter: place for place, letter in enumerate("abcdefgh")}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    sampling = Sampling(kind="sliding", prefix_length=3, suffix_length=1, stride=2, stride_unit="characters")
    found = list(iter_samples([{"id": "d", "bucket": 0, "text": "abcdefgh"}], sampling=sampling, tokenizer=tokenizer))
    assert [(one.sample_id, one.offset, one.prefix, one.suffix) for one in found] == [
        ("d@0c", 0, (0, 1, 2), (3,)), ("d@2c", 2, (2, 3, 4), (5,)), ("d@4c", 4, (4, 5, 6), (7,)),
    ]  # fmt: skip


def test_documents_are_numbered_from_one_in_messages():
    with pytest.raises(ValueError, match="document 2 has no 'id' and no 'bucket' and no 'text'"):
        build_samples([document(), {}], prefix_length=3, suffix_length=2)


def test_after_what_is_left_out_it_goes_on():
    """A window that repeats an earlier one, a document that is too short, too long, or one too many."""
    repeating = {"id": "r", "bucket": 0, "input_ids": [1, 1, 1, 1, 2, 1, 2, 3]}
    found, tally = cut([repeating], kind="sliding", prefix_length=1, suffix_length=1, stride=1, deduplicate=True)
    assert [name for name, _, _ in found] == ["r@0", "r@3", "r@4", "r@6"] and tally.duplicates == 3
    lengths = {"long": 9, "short": 3, "fits": 6, "empty": 0, "longer": 10, "fits too": 5, "many": 6, "other": 6}
    documents = [document(name, length=length, bucket=int(name == "other")) for name, length in lengths.items()]
    found, tally = cut(documents, prefix_length=3, suffix_length=2, max_document_tokens=8, max_documents=2)
    assert [name for name, _, _ in found] == ["fits@0", "fits too@0", "other@0"]
    assert tally.left_out() == {"too_short": 2, "of_these_empty": 1, "too_long": 2, "beyond_max_documents": 1}
    assert tally.documents == 8 and dict(tally.buckets) == {0: 2, 1: 1}
