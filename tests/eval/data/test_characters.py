"""Where the suffixes of samples are in the text of their document."""

import itertools
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_axonn_eval import Sampling, build_samples
from hf_axonn_eval.data.characters import Span, first_character, suffix_spans
from tests.helpers.eval_support import documents, topics_tokenizer


TEXT = documents()[0]["text"][:1500]


def cut(text, *, unit, special, stride=7, prefix=6, suffix=4, tokenizer=None, **others):
    sampling = Sampling(
        kind="sliding",
        prefix_length=prefix,
        suffix_length=suffix,
        stride=stride,
        stride_unit=unit,
        add_special_tokens=special,
        **others,
    )
    document = {"id": "d@1c", "bucket": 1, "text": text}
    return build_samples([document], tokenizer=tokenizer or topics_tokenizer(), sampling=sampling)


@pytest.mark.parametrize("bos", [False, True, "before prefixes", "both"])
@pytest.mark.parametrize("unit", ["tokens", "characters"])
def test_the_characters_of_a_suffix_are_its_text(unit, bos):
    """Byte-level tokens of ASCII decode to exactly their characters."""
    others = {"bos": "prefix"} if isinstance(bos, str) else {}
    tokenizer, samples = topics_tokenizer(), cut(TEXT, unit=unit, special=bos in (True, "both"), **others)
    assert len(samples) > 50
    for sample, span in zip(samples, suffix_spans(TEXT, samples, tokenizer), strict=True):
        assert TEXT[span.begin : span.end] == tokenizer.decode(sample.suffix), sample.sample_id
        prefix = tokenizer.decode(sample.prefix, skip_special_tokens=True)
        assert TEXT[span.start : span.begin] == prefix, sample.sample_id
        if unit == "characters":
            assert span.start == first_character(sample)


def test_the_window_at_the_beginning_by_hand():
    tokenizer = topics_tokenizer()
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    (first, *_), (with_bos, *_) = (cut(TEXT, unit="tokens", special=bos) for bos in (False, True))
    middle, end = (len(tokenizer.decode(ids[:count])) for count in (6, 10))
    before, last = (len(tokenizer.decode(ids[:count])) for count in (5, 9))
    assert suffix_spans(TEXT, [first], tokenizer) == [Span(0, middle, end)]
    assert suffix_spans(TEXT, [with_bos], tokenizer) == [Span(0, before, last)], "the BOS has no characters"


def test_a_text_longer_than_what_is_tokenized_at_once_for_a_window():
    """Long words: eight characters a token are too few, and the tokens at the cut are others."""
    text = ("--------" * 40 + " ") * 3
    samples = cut(text, unit="characters", special=False, stride=11)
    for sample, span in zip(samples, suffix_spans(text, samples, topics_tokenizer()), strict=True):
        assert text[span.begin : span.end] == topics_tokenizer().decode(sample.suffix)


def test_a_character_of_several_tokens_is_in_the_suffix_that_has_its_end():
    text = "\u4e2d\u6587" * 30
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_alone)
    samples = cut(text, unit="tokens", special=False, stride=1, tokenizer=tokenizer)
    spans = suffix_spans(text, samples, tokenizer)
    assert len(tokenizer(text[:1])["input_ids"]) == 3
    # suffixes of 4 bytes that begin at byte 6, 7, 8 and 9
    assert [(span.begin, span.end) for span in spans[:4]] == [(2, 4), (2, 4), (2, 4), (3, 5)]


def test_where_a_tokenizer_counts_no_spaces_to_its_tokens_they_are_the_suffixs():
    """With trimmed offsets the space before a word is nobody's; suffixes side by side leave no gap."""
    trimming = Tokenizer.from_str(topics_tokenizer().backend_tokenizer.to_str())
    trimming.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trimming)
    samples = cut(TEXT, unit="tokens", special=False, stride=4, tokenizer=tokenizer)
    spans = suffix_spans(TEXT, samples, tokenizer)
    encoded = tokenizer(TEXT, return_offsets_mapping=True)["offset_mapping"]
    assert any(TEXT[one[1] : other[0]].isspace() for one, other in itertools.pairwise(encoded)), "they are trimmed"
    assert [span.begin for span in spans[1:]] == [span.end for span in spans[:-1]]


def test_an_eos_at_the_end_has_no_characters():
    tokenizer = topics_tokenizer()
    (sample,) = build_samples(
        [{"id": "d", "bucket": 1, "text": TEXT}],
        tokenizer=tokenizer,
        sampling=Sampling(kind="last", max_tokens=10, suffix_length=4),
    )
    shifted = replace(sample, prefix=sample.prefix[1:] + sample.suffix[:1], suffix=(*sample.suffix[1:], 1))
    assert tokenizer.eos_token_id == 1
    (plain,) = suffix_spans(TEXT, [sample], tokenizer)
    (span,) = suffix_spans(TEXT, [replace(shifted, offset=sample.offset + 1)], tokenizer)
    assert plain.end == span.end == len(TEXT)
    assert TEXT[span.begin :] == tokenizer.decode(sample.suffix[1:])


@pytest.mark.parametrize("unit", ["tokens", "characters"])
def test_another_text_is_refused(unit):
    samples = cut(TEXT, unit=unit, special=True)
    with pytest.raises(ValueError, match=r"sample 'd@1c@.*: the text of document 'd@1c' does not give its tokens"):
        suffix_spans(TEXT[3:], samples, topics_tokenizer())


def test_a_slow_tokenizer_is_refused():
    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="need a fast tokenizer"):
        suffix_spans(TEXT, cut(TEXT, unit="tokens", special=False), Slow())
    assert isinstance(topics_tokenizer(), PreTrainedTokenizerFast)
