"""Marks in texts: what agrees from the first token on, and the longest run elsewhere."""

from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_axonn_eval import Sample
from hf_axonn_eval.report.texts import OTHER, RUN, START, Span, examples, passage, text_examples, token_texts
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


@pytest.mark.parametrize(
    ("count", "points"),
    [(1, [4]), (2, [4, 0]), (3, [4, 2, 0]), (4, [4, 3, 1, 0]), (5, [4, 3, 2, 1, 0]), (9, [4, 3, 2, 1, 0])],
)
def test_so_many_examples_with_the_first_and_the_last(count, points):
    runs = {"only": [result(f"s{place}", divergence_point=place) for place in (3, 0, 4, 1, 2)]}
    chosen = examples(runs, count=count)
    assert [some["only"].divergence_point for some in chosen[0]] == points


def test_examples_that_agree_as_far_are_in_the_order_of_their_probability():
    runs = {
        "base": [result("a", logprob=-9.0), result("b", logprob=-1.0), result("c", logprob=None)],
        "other": [result("a", logprob=-0.5), result("b", logprob=-7.0), result("c", logprob=-8.0, divergence_point=0)],
    }
    assert [some["base"].sample_id for some in examples(runs, count=3)[0]] == ["c", "a", "b"], "None is as good as 0"
    assert list(examples({"one": [result("a", bucket=2), result("b", bucket=10), result("c")]}, count=1)) == [10, 2, 0]


def test_a_run_of_two_is_marked_and_the_start_is_marked_first():
    found = passage(result("a", suffix_text="a b c d x", generated_text="q c d y"))
    assert [span.mark for span in found.true] == [OTHER, RUN, OTHER] and found.true[1].text == " c d"
    found = passage(result("a", suffix_text="a b c", generated_text="a b c d"))
    assert found.true == [Span("a b c", START)] and found.generated == [Span("a b c", START), Span(" d", OTHER)]
    found = passage(result("a", suffix_text="", generated_text=" "))
    assert found == ([], [Span(" ", OTHER)])


@pytest.mark.parametrize(("length", "label"), [(199, "Prefix, 199 tokens"), (200, "Prefix, 200 tokens")])
def test_a_prefix_of_up_to_200_tokens_is_shown_whole(length, label):
    tokenizer = topics_tokenizer()
    ids = tuple(60 + place % 2 for place in range(length))
    sample = Sample(sample_id="x", document_id="d", bucket=0, offset=7, prefix=ids, suffix=(5, 6))
    answer = result("x", document_id="d", offset=7, prefix_length=length, exact_match=True)
    [shown] = text_examples({"only": [answer]}, samples=[sample], tokenizer=tokenizer, count=4)[0]
    assert shown["prefix_label"] == label and shown["prefix"] == [Span(tokenizer.decode(ids), OTHER)]
    assert shown["heading"] == "d, tokens from 7 on"
    assert [some["verdict"] for some in shown["answers"]] == ["all 2 tokens right"]
    longer = replace(sample, prefix=(59,) * 1000 + ids[-199:])
    answer = replace(answer, prefix_length=1199, exact_match=False)
    [shown] = text_examples({"only": [answer]}, samples=[longer], tokenizer=tokenizer, count=4)[0]
    assert shown["prefix_label"] == "Prefix, the last 200 of 1,199 tokens"
    assert shown["prefix"] == [Span(tokenizer.decode((59, *ids[-199:])), OTHER)]
    assert shown["answers"][0]["verdict"] == "first 1 of 2 tokens right"


def test_without_anything_to_show_there_are_no_examples():
    runs = {"only": [result("x")]}
    sample = Sample(sample_id="x", document_id="d", bucket=0, offset=0, prefix=(5,), suffix=(6, 7))
    for given in ({"samples": None, "tokenizer": None}, {"samples": [sample], "tokenizer": None}):
        assert text_examples(runs, **given, count=4) == {}
    assert text_examples(runs, samples=None, tokenizer=topics_tokenizer(), count=4) == {}
    assert list(text_examples(runs, samples=[sample], tokenizer=topics_tokenizer(), count=4)) == [0]
    [shown] = text_examples({"only": [result("x", suffix_text="a")]}, samples=None, tokenizer=None, count=4)[0]
    assert shown["prefix"] is None and shown["prefix_label"] == "Prefix, 2 tokens"
