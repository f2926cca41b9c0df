"""Marks in texts: what agrees from the first token on, and the longest run elsewhere."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_axonn_eval import Sample
from hf_axonn_eval.report.texts import OTHER, RUN, START, Span, examples, passage, token_texts
from tests.helpers.eval_support import result, samples, topics_tokenizer


def test_words_are_compared_without_a_tokenizer():
    found = passage(result("a", suffix_text="to be or not to be that is", generated_text="to be is not to be that\n"))
    assert found.true == [
        Span("to be", START),
        Span(" or", OTHER),
        Span(" not to be that", RUN),
        Span(" is", OTHER),
    ]
    assert found.generated == [
        Span("to be", START),
        Span(" is", OTHER),
        Span(" not to be that", RUN),
        Span("\n", OTHER),
    ]


def test_tokens_are_compared_with_one():
    tokenizer = topics_tokenizer()
    sample = samples()[0]
    generated = [*sample.suffix[:3], 5, *sample.suffix[4:]]
    assert generated[3] != sample.suffix[3]
    found = passage(result("a", generated=generated), sample, tokenizer)
    assert [span.mark for span in found.true] == [START, OTHER, RUN] == [span.mark for span in found.generated]
    assert found.true[0].text == found.generated[0].text == tokenizer.decode(sample.suffix[:3])
    assert "".join(span.text for span in found.generated) == tokenizer.decode(generated)


def test_one_token_in_common_is_no_run():
    found = passage(result("a", suffix_text="a b c", generated_text="d c e"))
    assert {span.mark for span in found.true + found.generated} == {OTHER}


def test_without_generation_nothing_was_said():
    assert passage(result("a")) == (None, None)
    sample = samples()[0]
    text = topics_tokenizer().decode(sample.suffix)
    assert passage(result("a"), sample, topics_tokenizer()) == ([Span(text, OTHER)], None)


@pytest.mark.parametrize("text", ["plain words", "caf\u00e9 \u2603 \U0001f600", "\u00e9\u00e9", "a  b\n\tc"])
def test_texts_of_tokens_join_to_the_text(text):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(["plain words"], trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    texts = token_texts(ids, tokenizer)
    assert len(texts) == len(ids) and "".join(texts) == tokenizer.decode(ids) == text


def test_a_tokenizer_that_cleans_up_is_decoded_token_by_token():
    class Cleaning:
        def decode(self, ids):
            return "".join(("do", " n", "'t")[token] for token in ids).replace(" n't", "n't")

    assert Cleaning().decode([0, 1]) == "do n" and Cleaning().decode([0, 1, 2]) == "don't"
    assert token_texts([0, 1, 2], Cleaning()) == ["do", " n", "'t"]


def test_examples_are_spread_from_best_to_least_known():
    runs = {
        "base": [result(f"s{place}", divergence_point=0, bucket=1) for place in range(9)],
        "trained": [result(f"s{place}", divergence_point=place, bucket=1) for place in range(9)],
    }
    runs["trained"].append(result("control"))
    runs["base"].append(result("control", divergence_point=0))
    chosen = examples(runs, count=3)
    assert list(chosen) == [1, 0] and len(chosen[0]) == 1
    assert [some["trained"].divergence_point for some in chosen[1]] == [8, 4, 0]
    assert all(set(some) == {"base", "trained"} for some in chosen[1] + chosen[0])
    assert [len(examples(runs, count=count)[1]) for count in (1, 8, 9, 100)] == [1, 8, 9, 9]


def test_a_sample_that_is_known_to_one_run_only():
    sample = Sample(sample_id="x", document_id="x", bucket=0, offset=0, prefix=(5,), suffix=(6, 7))
    found = passage(result("x", generated=[6, 7]), sample, topics_tokenizer())
    assert [span.mark for span in found.generated] == [START]
