"""How far choices agree with a suffix, and how little is fed to find out."""

import functools

import pytest
import torch

from hf_axonn_eval import Sample
from hf_axonn_eval.extraction.prefix_matching import Match, match_choices, match_suffixes
from hf_axonn_eval.extraction.scoring import score_suffixes
from tests.helpers.eval_families import family, fed_shapes, generated, parting_samples


@pytest.mark.parametrize(
    ("choices", "leads", "match"),
    [
        ([5, 6, 7], [0.3, 0.1, 0.2], Match(3, 0.1, [5, 6, 7])),
        ([5, 6, 8], [0.1, 0.2, -0.3], Match(2, 0.3, [5, 6, 8])),  # a token that was right does not count
        ([5, 8, 9], [0.1, -0.2, -0.3], Match(1, 0.2, [5, 8])),  # nor does one after the first miss
        ([8, 6, 7], [-0.4, 0.2, 0.1], Match(0, 0.4, [8])),
    ],
)
def test_a_match_by_hand(choices, leads, match):
    assert match_choices(choices, [5, 6, 7], leads) == match


def test_leads_of_tokens_after_the_suffix_do_not_count():
    """A short suffix in a batch of longer ones is filled up, and what the model says there is nobody's."""
    assert match_choices([5, 6], [5, 6], [0.3, 0.2, 0.1]) == Match(2, 0.2, [5, 6])


PROMPT = tuple(range(3, 12))


@functools.cache
def continuation() -> tuple[int, ...]:
    """What the Llama says after PROMPT."""
    return tuple(generated(family("llama"), PROMPT, 40))


def known(suffix: int, *, miss: int | None = None) -> Sample:
    """A sample that the Llama gives back, or misses at one place."""
    tokens = list(continuation()[:suffix])
    if miss is not None:
        tokens[miss] = (tokens[miss] + 1) % 96
    name = f"{suffix} {miss}"
    return Sample(sample_id=name, document_id="d", bucket=0, offset=0, prefix=PROMPT, suffix=tuple(tokens))


@pytest.mark.parametrize(
    ("count", "suffix", "shapes"),
    [
        (1, 3, [(1, 9 + 3 - 1)]),
        (1, 4, [(1, 9 + 3)]),
        (1, 5, [(1, 9 + 3), (1, 1)]),
        (1, 40, [(1, 9 + 3), (1, 36)]),  # alone, up to 64 tokens are one pass
        (16, 40, [(16, 9 + 3), (16, 12), (16, 24)]),  # else four times as many as so far
        (3, 40, [(3, 9 + 3), (3, 21), (3, 15)]),  # 64 tokens by three rows
    ],
)
def test_a_suffix_is_checked_in_growing_chunks(count, suffix, shapes):
    model = family("llama")
    batch = [known(suffix)] * count
    fed = fed_shapes(model)
    assert [match.tokens for match in match_suffixes(model, batch)] == [suffix] * count
    assert fed == shapes


@pytest.mark.parametrize("miss", [0, 2, 3, 4, 5, 15, 16, 39])
def test_a_sample_that_missed_is_dropped(miss):
    model = family("llama")
    batch = [known(40, miss=miss)] + [known(40)] * 15
    whole = score_suffixes(model, batch)
    fed, reported = fed_shapes(model), []
    found = match_suffixes(model, batch, missed=lambda place, match, row: reported.append((place, match, row)))
    assert [match.tokens for match in found] == [miss] + [40] * 15
    assert [rows for rows, _ in fed] == [16, 15 if miss < 4 else 16, 15 if miss < 16 else 16]
    for match, score in zip(found, whole, strict=True):
        missed = match.tokens < 40
        at_the_miss = -score.leads[match.tokens] if missed else score.margin
        assert match.margin == pytest.approx(at_the_miss, abs=1e-10) and match.margin <= score.margin + 1e-10
        assert match.known == score.choices[: match.tokens + 1]
    if miss == 39:
        assert reported == [], "its continuation is known to the end"
        return
    [(place, match, row)] = reported
    assert (place, match) == (0, found[0]) and (row.row, row.start, row.length) == (0, 0, 9 + miss)
    # what the row holds are the keys of the tokens before the miss
    with torch.no_grad():
        tokens = torch.tensor([batch[0].prefix + batch[0].suffix[:miss]])
        wanted = model(tokens, use_cache=True).past_key_values
    keys = row.cache.layers[1].keys[row.row, :, row.start : row.start + row.length]
    torch.testing.assert_close(keys, wanted.layers[1].keys[0])


@pytest.mark.parametrize(("missed", "copied"), [(1, True), (7, True), (8, False), (15, False), (16, False)])
def test_where_most_rows_are_gone_only_the_others_are_copied(missed, copied):
    model = family("llama")
    batch = [known(40)] * (16 - missed) + [known(40, miss=1)] * missed
    reported = {}
    found = match_suffixes(model, batch, missed=lambda place, match, row: reported.update({place: row}))
    assert [match.tokens for match in found] == [40] * (16 - missed) + [1] * missed
    rows = list(reported.values())
    assert list(reported) == [*range(16 - missed, 16)] and len({id(row.cache) for row in rows}) == 1
    assert [row.row for row in rows] == [*range(missed)] if copied else [*reported]
    keys = rows[0].cache.layers[0].keys
    assert len(keys) == (missed if copied else 16)
    # what the others were fed later is not in it
    assert rows[0].cache.get_seq_length() == len(PROMPT) + 3
    with torch.no_grad():
        wanted = model(torch.tensor([PROMPT + batch[-1].suffix[:1]]), use_cache=True).past_key_values
    for row in rows:
        torch.testing.assert_close(row.cache.layers[1].values[row.row, :, :10], wanted.layers[1].values[0])


def test_rows_of_different_lengths_begin_after_their_padding():
    model = family("llama")
    batch = parting_samples(model, 12)
    reported = {}
    match_suffixes(model, batch, missed=lambda place, match, row: reported.update({place: (match, row)}))
    longest = max(len(sample.prefix) for sample in batch)
    assert len(reported) > 5
    for place, (match, row) in reported.items():
        assert row.start == longest - len(batch[place].prefix)
        assert row.length == len(batch[place].prefix) + match.tokens


def test_a_model_without_a_cache_is_scored_and_says_the_same():
    model = family("mamba")
    batch = [sample for sample in parting_samples(model, 9, prefixes=(9, 9), suffixes=(6, 6))]
    reported = []
    found = match_suffixes(model, batch, missed=lambda place, match, row: reported.append((place, row)))
    for sample, match in zip(batch, found, strict=True):
        tokens = generated(model, sample.prefix, 6)
        assert match.known == tokens[: match.tokens + 1]
    unknown = [place for place, match in enumerate(found) if match.tokens < 5]
    assert reported == [(place, None) for place in unknown] and 0 < len(unknown) < 9
    assert match_suffixes(model, batch) == found


def test_nan_is_an_error_and_not_a_miss():
    model = family("llama")
    batch = parting_samples(model, 2)
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN"):
        match_suffixes(model, batch)
