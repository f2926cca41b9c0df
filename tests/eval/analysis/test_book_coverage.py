"""Coverage of a book in characters, against a count character by character."""

import functools
from dataclasses import replace
from math import inf, log

import numpy as np
import pytest

from hf_axonn_eval import Sampling, build_samples
from hf_axonn_eval.analysis.coverage import FULL, SAMPLED, THRESHOLDS, Book, Passage, book_coverage, books
from hf_axonn_eval.data.characters import suffix_spans
from tests.helpers.eval_support import documents, result, topics_tokenizer


TEXT = documents()[0]["text"][:1200]
DOCUMENT = {"id": "book", "bucket": 3, "text": TEXT}


@functools.cache
def windows(unit="characters", stride=25):
    sampling = Sampling(
        kind="sliding", prefix_length=12, suffix_length=8, stride=stride, stride_unit=unit, add_special_tokens=True
    )
    return build_samples([DOCUMENT], tokenizer=topics_tokenizer(), sampling=sampling)


def answer(sample, chance, *, known=False, sampled=True, **changes):
    logprob = log(chance) if chance else -inf
    fields = {"logprob": logprob / 2, "sampled_logprob": logprob} if sampled else {"logprob": logprob}
    return result(
        sample.sample_id,
        document_id=sample.document_id,
        bucket=3,
        offset=sample.offset,
        prefix_length=len(sample.prefix),
        suffix_length=len(sample.suffix),
        exact_match=known,
        logprobs=None,
        hits=None,
        **{**fields, **changes},
    )


def measured(results, samples, **options):
    return books({"m": results}, samples, [DOCUMENT], tokenizer=topics_tokenizer(), **options)["m"]


def random_answers(samples, *, seed=0):
    generator = np.random.default_rng(seed)
    return [answer(each, 10 ** -generator.exponential(1.5), known=generator.random() < 0.2) for each in samples]


@pytest.mark.parametrize("unit", ["characters", "tokens"])
@pytest.mark.parametrize("seed", range(3))
def test_character_by_character(unit, seed):
    samples = windows(unit)
    results = random_answers(samples, seed=seed)
    (book,) = measured(results, samples)
    spans = suffix_spans(TEXT, samples, topics_tokenizer())
    covering = [
        [each for each, span in zip(results, spans, strict=True) if span.begin <= place < span.end]
        for place in range(len(TEXT))
    ]
    chances = [max((np.exp(each.sampled_logprob) for each in some), default=0.0) for some in covering]
    greedy = [any(each.exact_match for each in some) for some in covering]
    assert book.asked == sum(map(bool, covering)) > 300
    assert (book.characters, book.windows, book.bucket) == (len(TEXT), len(samples), 3)
    assert book.greedy_windows == sum(each.exact_match for each in results)
    assert book.count_covered(None) == sum(greedy) > 0
    for threshold in THRESHOLDS:
        covered = [chance >= threshold for chance in chances]
        assert book.count_covered(threshold) == sum(covered)
        with pytest.warns(FutureWarning, match="Book.count_covered"):
            assert book.covered(threshold) == sum(covered)
        found = book.passages(threshold)
        assert sum(end - begin for begin, end, _ in found) == sum(covered)
        for begin, end, most in found:
            assert all(covered[begin:end]) and not any(
                covered[place] for place in (begin - 1, end) if 0 <= place < len(TEXT)
            )
            assert most == pytest.approx(max(chances[begin:end]))


def as_published(sequences, suffix_start, length):
    """The definition of the released code: of each window [start + suffix_start, end), end its last character."""
    best = [0.0] * length
    for start, characters, chance in sequences:
        for place in range(start + suffix_start, min(start + characters - 1, length)):
            best[place] = max(best[place], chance)
    return best


def test_the_ranges_of_the_published_code():
    samples = windows()
    results = random_answers(samples)
    (book,) = measured(results, samples)
    decoded = [
        len(topics_tokenizer().decode([*sample.prefix, *sample.suffix], skip_special_tokens=True))
        for sample in samples
    ]
    starts = [int(sample.sample_id.removeprefix("book@")[:-1]) for sample in samples]
    chances = [float(np.exp(each.sampled_logprob)) for each in results]
    best = as_published(zip(starts, decoded, chances, strict=True), 12, len(TEXT))
    for threshold in THRESHOLDS:
        assert book.count_as_released(threshold) == sum(chance >= threshold for chance in best)
        assert book.count_as_released(threshold) != book.count_covered(threshold)


def test_passages_by_hand():
    """Three windows: two that touch are one passage, at each threshold that both reach."""
    samples = [sample for sample in windows("tokens", 1) if sample.offset in (5, 13, 40)]
    first, second, third = suffix_spans(TEXT, samples, topics_tokenizer())
    assert first.end == second.begin
    chances = (0.6, 0.002, 0.75)
    (book,) = measured([answer(*pair) for pair in zip(samples, chances, strict=True)], samples)
    most = pytest.approx(0.6)
    apart = Passage(third.begin, third.end, pytest.approx(0.75))
    assert book.passages(0.001) == [Passage(first.begin, second.end, most), apart]
    assert book.passages(0.01) == [Passage(first.begin, first.end, most), apart]
    assert book.passages(0.7) == [apart] and book.passages(0.9) == [] and book.passages(None) == []


def test_the_numbers_as_json():
    samples = windows()
    results = random_answers(samples)
    found = books({"m": results}, samples, [DOCUMENT], tokenizer=topics_tokenizer())
    (book,) = found["m"]
    numbers = book_coverage(found, thresholds=(0.1,))
    entry = numbers["runs"]["m"]["book"]
    assert numbers["thresholds"] == [0.1] and list(entry["at"]) == list(entry["at_as_released"]) == ["0.1"]
    covered = book.count_covered(0.1)
    longest = max(end - begin for begin, end, _ in book.passages(0.1))
    passages = len(book.passages(0.1))
    expected = {"characters": covered, "share": covered / len(TEXT), "passages": passages, "longest": longest}
    assert entry["at"]["0.1"] == expected
    assert entry["greedy"]["characters"] == book.count_covered(None) and entry["asked"] == book.asked
    for wrong in (0, 1.5):
        with pytest.raises(ValueError, match=f"tau is {wrong}"):
            book_coverage(found, thresholds=(wrong,))


def test_of_what_the_probability_is():
    samples = windows()
    sampled, full = ([answer(sample, 0.5, sampled=some) for sample in samples] for some in (True, False))
    assert measured(sampled, samples)[0].probability == SAMPLED
    (book,) = measured(full, samples)
    assert book.probability == FULL and book.count_covered(0.5) == book.asked
    early = [answer(sample, 0.5, known=True, logprob=None, sampled_logprob=None) for sample in samples]
    (book,) = measured(early, samples)
    assert book.probability is None and book.count_covered(None) == book.asked > 0
    assert book_coverage({"m": [book]})["runs"]["m"]["book"]["at"] == {}
    with pytest.raises(ValueError, match="a sampler's probability of some samples"):
        measured([*sampled[:3], *full[3:]], samples)


def test_only_documents_with_several_places_are_books():
    others = [{**DOCUMENT, "id": "asked once"}, {**DOCUMENT, "id": "not asked"}]
    once = [replace(windows()[0], sample_id="asked once@0c", document_id="asked once")]
    samples = [*windows(), *once]
    results = [answer(sample, 0.5) for sample in samples]
    found = books({"m": results}, samples, [*others, DOCUMENT], tokenizer=topics_tokenizer())["m"]
    assert [book.document_id for book in found] == ["book"] and isinstance(found[0], Book)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"id": "another"}, "1 of 1 documents with samples at several places are not among .*'book'"),
        ({"text": None, "input_ids": [1, 2]}, "document 'book' is token ids"),
        ({"text": TEXT[1:]}, "does not give its tokens"),
    ],
)
def test_other_documents_are_refused(document, message):
    results = [answer(sample, 0.5) for sample in windows()]
    with pytest.raises(ValueError, match=message):
        books({"m": results}, windows(), [{**DOCUMENT, **document}], tokenizer=topics_tokenizer())


def test_results_of_other_samples_are_refused():
    with pytest.raises(ValueError, match="run 'm' has no result of sample 'book@0c'"):
        measured([result("other")], windows())
