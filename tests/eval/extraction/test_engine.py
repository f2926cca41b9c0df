"""One pass, kept keys and values, padding, refilled batches: on every family and grid what `generate` answers."""

import dataclasses
import functools
import logging
from unittest import mock

import pytest
import torch

import hf_axonn
from hf_axonn import Grid
from hf_axonn.layers.vocabulary import Head
from hf_axonn_eval import Sample, extract
from hf_axonn_eval.extraction import batching as batches
from hf_axonn_eval.extraction.kv_cache import can_be_kept
from hf_axonn_eval.extraction.near_copies import NearCopySearch
from hf_axonn_eval.extraction.recite import Recital
from hf_axonn_eval.extraction.scoring import document_nll, near_tie_below, score_suffixes
from hf_axonn_eval.metrics import membership
from hf_axonn_eval.metrics import text as metrics
from hf_axonn_eval.metrics.discoverability import Sampler
from tests.helpers.eval_families import FAMILIES, family, fed_shapes, generated, parting_samples, samples_and_answers
from tests.helpers.eval_support import samples, tiny_llama, topics_tokenizer
from tests.helpers.float64 import Float64
from tests.helpers.ranks import refused, run_ranks


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_answers_as_generate_does(name):
    # eager attention, which soft caps need, does not pad in float64
    model = family(name, torch.float32 if name == "gemma2" else torch.float64)
    questions, expected = samples_and_answers(model, 17)
    assert can_be_kept(model) == (name != "mamba")
    # Rows of one, of all, and of some that the last batch is short of.
    sizes = ((1, True), (17, True), (4, False), (17, False)) if name == "llama" else ((4, True), (17, False))
    for batch_size, early in sizes:
        results = extract(model, None, questions, batch_size=batch_size, stop_early=early, progress=False)
        assert [result.generated for result in results] == expected
    for sample, answer, result in zip(questions, expected, results, strict=True):
        hits = [token == true for token, true in zip(answer, sample.suffix, strict=True)]
        assert result.exact_match == all(hits) and result.divergence_point == metrics.first_miss(hits)
        assert not result.near_tie
    assert len({result.divergence_point for result in results}) > 5 and any(result.exact_match for result in results)


SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
# The caches of two of them are those of llama, and all stop early in the test above.
ALIKE = ("qwen3", "gpt_neox")
REST = (*ALIKE, "gpt2", "mamba")


@pytest.mark.parametrize("name", [SLOW(name) if name in REST else name for name in FAMILIES])
def test_dropping_samples_early_changes_no_answer(name):
    model = family(name, torch.float32 if name == "gemma2" else torch.float64)
    questions = parting_samples(model, 16, suffixes=(5, 40))
    whole = extract(model, None, questions, batch_size=8, progress=False)
    decoded = extract(model, None, questions, batch_size=8, stop_early=True, progress=False)
    fields = ("exact_match", "divergence_point", "near_tie", "generated", "edit_distance", "longest_run")
    for one, other in zip(whole, decoded, strict=True):
        assert [getattr(one, field) for field in fields] == [getattr(other, field) for field in fields]
        assert other.logprob is other.hits is None
    scores = [score_suffixes(model, [sample])[0] for sample in questions]
    fed = fed_shapes(model)
    early = extract(model, None, questions, batch_size=8, generate=False, stop_early=True, progress=False)
    for score, one, other in zip(scores, whole, early, strict=True):
        assert (one.exact_match, one.divergence_point) == (other.exact_match, other.divergence_point)
        at_the_miss = score.margin if one.exact_match else -score.leads[one.divergence_point]
        rounding = 1e-5 if name == "gemma2" else 1e-10  # in float32, or in float64
        assert (one.margin, other.margin) == pytest.approx((score.margin, at_the_miss), abs=rounding)
        assert other.logprob is other.hits is other.token_accuracy is other.extraction_strength is None
        assert other.generated is None
    if name != "mamba":
        assert sum(rows * tokens for rows, tokens in fed) < sum(len(s.prefix + s.suffix) for s in questions)


def test_rows_that_are_filled_up_stay_in_the_window():
    model = family("gpt2")  # has a weight for each of its 64 positions, and no other
    questions = parting_samples(model, 4, prefixes=(40, 40), suffixes=(24, 24))
    short = parting_samples(model, 4, prefixes=(46, 46), suffixes=(18, 18))
    questions += [dataclasses.replace(sample, sample_id=f"short {sample.sample_id}") for sample in short]
    fed = fed_shapes(model)
    results = extract(model, None, questions, batch_size=8, stop_early=True, progress=False)
    assert fed[0][0] == 8
    assert any(result.exact_match for result in results[4:])
    for sample, result in zip(questions, results, strict=True):
        assert result.generated == generated(model, sample.prefix, len(sample.suffix))


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        # 9 + 11 tokens of 12 samples are 240: four passes
        ({}, [(3, 20)] * 4),
        ({"generate": False}, [(3, 20)] * 4),
        # 9 + 3 tokens of 12 samples are 144: three passes for the first four tokens of the suffix
        ({"stop_early": True}, [(4, 12)] * 3),
    ],
)
def test_a_large_batch_is_several_passes_and_is_decoded_together(monkeypatch, options, passes):
    monkeypatch.setitem(batches._IN_A_PASS, "cpu", 66)
    model = family("llama")
    questions, expected = samples_and_answers(model, 12, prefixes=(9, 9), suffixes=(12, 12))
    fed = fed_shapes(model)
    results = extract(model, None, questions, batch_size=12, progress=False, **options)
    assert [shape for shape in fed if shape[1] >= 11] == passes
    if "generate" in options:
        assert [result.exact_match for result in results] == [
            list(sample.suffix) == answer for sample, answer in zip(questions, expected, strict=True)
        ]
        return
    assert [result.generated for result in results] == expected
    steps = [rows for rows, tokens in fed if tokens == 1]
    assert max(steps) > passes[0][0] and len(steps) <= 12, "rows of all passes go together"


@functools.cache
def missed_samples() -> list[Sample]:
    return [each for each in parting_samples(family("llama"), 40, suffixes=(12, 12)) if int(each.sample_id) % 4]


@pytest.mark.parametrize("early", [False, True])
def test_the_batch_that_is_decoded_stays_full(early):
    model = family("llama")
    questions = missed_samples()
    fed = fed_shapes(model)
    results = extract(model, None, questions, batch_size=2, stop_early=early, progress=False)
    steps = [rows for rows, tokens in fed if tokens == 1]
    needed = sum(len(result.generated) - result.divergence_point - 1 for result in results)
    assert needed <= sum(steps) < 1.3 * needed
    assert max(steps) == 8


# None: a plain model on every process
GRIDS = {
    2: {"x2": Grid(x=2), "z2": Grid(z=2), "data2": Grid(data=2), "plain2": None},
    4: {"z2x2": Grid(z=2, x=2), "y2z2": Grid(y=2, z=2)},
}
OPTIONS = [
    {},
    {"stop_early": True},
    {"generate": False, "sampler": Sampler(top_k=20)},
    {"generate": False, "stop_early": True},
    {"recite": Recital(step=4, context=16)},
    {"generate": False, "sampler": Sampler(top_k=20), "near_copies": NearCopySearch(edits=2, beams=4)},
]


def on_grids(questions, grids, options, left_out=()) -> dict:
    """Answers by family, grid and number of the options; `options` has those of each family.

    `left_out`: pairs of a grid and a number of the options.
    """
    answers = {}
    for name in questions:
        for grid_name, grid in grids.items():
            model = family(name) if grid is None else hf_axonn.parallelize(family(name), grid)[0]
            with Float64(), mock.patch.dict(batches._IN_A_PASS, cpu=40):  # a batch of three is two passes
                for number, some in enumerate(options[name]):
                    if (grid_name, number) not in left_out:
                        answers[name, grid_name, number] = extract(
                            model, None, questions[name], batch_size=3, progress=False, **some
                        )
    return answers


def with_beginnings(some: list[Sample]) -> list[Sample]:
    """Let a second sample, which asks for less of the same text, follow some: both are read in one row."""
    shorter = [
        dataclasses.replace(
            one, sample_id=f"{one.sample_id} less", prefix=one.prefix[:-3], suffix=one.prefix[-3:] + one.suffix[:2]
        )
        for one in some
    ]
    return [
        each for number, pair in enumerate(zip(some, shorter, strict=True)) for each in pair[: 1 + (number % 3 == 0)]
    ]


# Quick are fewer samples, and of one family recitals and near copies, each on one grid where a model is divided: they
# take as long as all other options together. To stop early on whole models is left out, too.
RECITAL, NEAR_COPIES = 4, 5
WHOLE = [(grid, number) for grid in ("plain2", "data2") for number in (RECITAL, NEAR_COPIES)]
QUICK = [*WHOLE, ("x2", RECITAL), ("z2", NEAR_COPIES)]
QUICK += [(grid, number) for grid in ("plain2", "data2") for number in (1, 3)]


@pytest.mark.parametrize(
    ("world", "count", "options", "left_out"),
    [
        (2, 5, {"llama": OPTIONS}, QUICK),
        *(SLOW(world, 13, dict.fromkeys(("llama", "gemma2"), OPTIONS), []) for world in (2, 4)),
        *(SLOW(world, 7, {"qwen3_moe": OPTIONS}, WHOLE) for world in (2, 4)),  # whose tokens travel
    ],
    ids=["2", "2 with all", "4 with all", "2 of experts", "4 of experts"],
)
def test_every_grid_answers_as_one_process_does(world, count, options, left_out):
    samples = {name: with_beginnings(parting_samples(family(name), count)) for name in options}
    [alone] = run_ranks(on_grids, 1, samples, {"alone": None}, options)
    first, *others = run_ranks(on_grids, world, samples, GRIDS[world], options, left_out)
    assert all(answer == [] for other in others for answer in other.values())
    for (name, grid, number), results in first.items():
        answer = alone[name, "alone", number]
        # the same numbers are added in the same order, but by experts to which tokens travel: the same bits
        if grid == "plain2" and "near_copies" not in options[name][number]:  # beams of other samples go along
            assert results == answer
        if grid == "z2" and name != "qwen3_moe" and ("data2", number) not in left_out:
            assert results == first[name, "data2", number]
        for result, expected in zip(results, answer, strict=True):
            for field in ("sample_id", "exact_match", "divergence_point", "generated", "hits", "near_tie"):
                assert getattr(result, field) == getattr(expected, field), (name, grid, field)
            for field in ("margin", "logprobs", "sampled_logprob", "near_copies"):
                value = getattr(expected, field)
                assert getattr(result, field) == (value and pytest.approx(value, abs=1e-10, rel=0)), (name, grid)


def scored_and_refused(samples) -> tuple[list, list[str], float]:
    """Return the scores of a grid with context, its refusals to decode, and the loss of documents."""
    model = hf_axonn.parallelize(family("llama"), Grid(z=2, context=2))[0]
    options = dict(batch_size=3, progress=False)
    with Float64():
        scored = extract(model, None, samples, generate=False, sampler=Sampler(top_k=20), **options)
        loss = document_nll(model, documents(samples), batch_size=2).mean
    decodes = (
        {},
        {"generate": False, "stop_early": True},
        {"generate": False, "near_copies": NearCopySearch(edits=2)},
    )
    return scored, [refused(extract, model, None, samples, **options, **more) for more in decodes], loss


class Decimals:
    """A tokenizer whose texts are the ids."""

    @staticmethod
    def decode(ids) -> str:
        return " ".join(map(str, ids))


def membership_of(grid, samples) -> tuple[list, int]:
    """Return membership scores, and the most positions of a row of which logits were formed at once."""
    model = family("llama") if grid is None else hf_axonn.parallelize(family("llama"), grid)[0]
    with Float64(), mock.patch.object(Head, "full_logits", autospec=True, side_effect=Head.full_logits) as full:
        scores = score_suffixes(model.eval(), samples, tokenizer=Decimals)
    return [score.membership for score in scores], max(
        (call.args[1].shape[1] for call in full.call_args_list), default=0
    )


def test_membership_over_context_forms_logits_of_a_ranks_positions_alone():
    samples = parting_samples(family("llama"), 3, prefixes=(20, 30), suffixes=(5, 5))
    truth, _ = membership_of(None, samples)
    grid, longest = Grid(z=2, context=2), max(map(len, documents(samples)))
    for found, positions in run_ranks(membership_of, 2, grid, samples):
        assert positions <= grid.positions(longest) < 0.6 * longest
        for scores, expected in zip(found, truth, strict=True):
            assert scores == pytest.approx(expected, abs=1e-10, rel=0)


def asked_without_full_logits(grid, samples) -> list:
    """Return answers over a grid on which no rank may form all logits."""
    model = hf_axonn.parallelize(family("llama"), grid)[0]
    with Float64(), mock.patch.object(Head, "full_logits", side_effect=AssertionError("full logits")):
        for options in ({"sampler": Sampler(top_k=20)}, {"stop_early": True}):
            answers = extract(model, None, samples, batch_size=3, progress=False, **options)
    return answers


def test_ranks_of_x_read_logits_of_a_share_of_the_places():
    samples = parting_samples(family("llama"), 5)
    answers, others = run_ranks(asked_without_full_logits, 2, Grid(x=2), samples)
    assert len(answers) == 5 and others == []


def documents(samples) -> list[list[int]]:
    return [[*sample.prefix, *sample.suffix] for sample in samples]


def test_rows_that_are_cut_are_scored_and_not_decoded():
    model = family("llama")
    samples = parting_samples(model, 7)
    with Float64():
        truth = extract(model, None, samples, batch_size=3, progress=False, generate=False, sampler=Sampler(top_k=20))
        loss = document_nll(model, documents(samples), batch_size=2).mean
    for rank, (found, messages, mean) in enumerate(run_ranks(scored_and_refused, 2, samples)):
        assert mean == pytest.approx(loss, rel=1e-10)
        for name, message in zip(("generate", "stop_early", "near_copies"), messages, strict=True):
            assert message.startswith(f"{name} over a grid with context (data=1,z=2,y=1,x=1,context=2)"), message
        assert len(found) == (0 if rank else len(truth))
        for result, expected in zip(found, truth if found else (), strict=True):
            for field in ("sample_id", "exact_match", "divergence_point", "hits", "near_tie"):
                assert getattr(result, field) == getattr(expected, field), field
            for field in ("margin", "logprobs", "sampled_logprob"):
                assert getattr(result, field) == pytest.approx(getattr(expected, field), abs=1e-10, rel=0), field


# Ranks of data and of z have the same bits, as the test above has it. Quick is each option on one grid.
@pytest.mark.parametrize(
    ("world", "names", "left_out", "kinds"),
    [
        (2, ["x2", "z2"], [("x2", 1), ("z2", 0)], ("gpt2", "mamba")),
        *(SLOW(world, [*GRIDS[world]], [], ("gpt2", "mamba", *ALIKE)) for world in GRIDS),
    ],
    ids=["2", "2 with all", "4 with all"],
)
def test_every_family_on_every_grid_answers_as_generate_does(world, names, left_out, kinds):
    """The two families of the test above are left out; mamba, which is decoded with `generate`, is here."""
    families = {name: samples_and_answers(family(name), 7) for name in kinds}
    questions = {name: made for name, (made, _) in families.items()}
    grids = {name: GRIDS[world][name] for name in names if GRIDS[world][name] is not None}
    options = dict.fromkeys(questions, [{}, {"stop_early": True}])
    first, *_ = run_ranks(on_grids, world, questions, grids, options, left_out)
    assert len(first) == (2 * len(grids) - len(left_out)) * len(questions)
    for name, (_, answer) in families.items():
        for (of, grid, number), results in first.items():
            if of == name:
                assert [result.generated for result in results] == answer, (name, grid, number)


def test_the_chance_under_a_sampler_and_membership_come_from_the_same_pass():
    model, sampler = tiny_llama().double(), Sampler(temperature=0.7, top_k=400, top_p=0.9)
    uneven = [*samples()[:4], *(Sample(**{**vars(s), "suffix": s.suffix[:11]}) for s in samples()[4:7])]
    tokenizer = topics_tokenizer()
    fed = fed_shapes(model)
    options = {"sampler": sampler, "membership": True, "generate": False, "progress": False}
    results = extract(model, tokenizer, uneven, batch_size=7, **options)
    assert len(fed) == 1
    for sample, result in zip(uneven, results, strict=True):
        ids = torch.tensor([*sample.prefix, *sample.suffix])
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1]
        each = sampler.logprobs(logits, ids[1:])[-len(sample.suffix) :]
        assert result.sampled_logprob == pytest.approx(each.sum().item(), abs=1e-9)
        statistics = [column.tolist() for column in membership.token_statistics(logits, ids[1:])]
        assert result.membership == pytest.approx(membership.scores(*statistics, tokenizer.decode(ids.tolist())))
    assert any(result.sampled_logprob == -torch.inf for result in results)


@pytest.mark.parametrize(("asked_for", "halved"), [(8, [4, 2]), ("auto", [8, 4, 2])])
def test_where_memory_runs_out_the_batch_is_halved(asked_for, halved, caplog, monkeypatch):
    monkeypatch.setattr(batches, "_MOST_ROWS", 16)
    model = family("llama")
    questions = parting_samples(model, 20)
    expected = extract(model, None, questions, batch_size=2, progress=False)
    forward = model.forward

    @functools.wraps(forward)
    def small(input_ids, **options):
        if len(input_ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return forward(input_ids=input_ids, **options)

    model.forward = small
    with caplog.at_level(logging.WARNING):
        results = extract(model, None, questions, batch_size=asked_for, progress=False)
    assert [result.generated for result in results] == [result.generated for result in expected]
    assert [record.args for record in caplog.records] == [(rows,) for rows in halved]
    model.forward = functools.wraps(forward)(lambda input_ids, **options: small(torch.cat([input_ids] * 3), **options))
    with pytest.raises(ValueError, match="out of memory with batch_size 1"):
        extract(model, None, questions, batch_size=2, progress=False)


def test_a_batch_size_is_found():
    model = family("llama")
    questions = parting_samples(model, 9, prefixes=(9, 9), suffixes=(6, 6))
    expected = extract(model, None, questions, batch_size=9, progress=False)
    fed = fed_shapes(model)
    found = extract(model, None, questions, batch_size="auto", progress=False)
    assert [result.generated for result in found] == [result.generated for result in expected]
    assert max(rows for rows, _ in fed) > 4


def test_what_rounding_decides_is_called_a_near_tie():
    model = family("llama")
    with torch.no_grad():  # two tokens that are always equally likely, of which the first is taken
        model.lm_head.weight[1::2] = model.lm_head.weight[::2]
    questions = parting_samples(model, 16)
    for early in (False, True):
        results = extract(model, None, questions, progress=False, stop_early=early)
        assert [result.near_tie for result in results] == [result.exact_match for result in results]
        assert any(result.near_tie for result in results) and all(
            result.margin == 0 or not result.near_tie for result in results
        )
    # the second of two equal tokens is missed by nothing
    answer = [(*sample.prefix, *generated(model, sample.prefix, 1)) for sample in questions]
    missed = [
        dataclasses.replace(sample, prefix=tokens[:-1], suffix=(tokens[-1] + 1,))
        for sample, tokens in zip(questions, answer, strict=True)
    ]
    for early in (False, True):
        results = extract(model, None, missed, progress=False, stop_early=early)
        assert all(result.near_tie and result.margin == 0 and not result.exact_match for result in results)
    # bfloat16: what another batch decides otherwise is a near tie, and not everything is
    low = family("qwen3").bfloat16()
    questions = parting_samples(low, 60)
    answers = [extract(low, None, questions, batch_size=size, progress=False, generate=False) for size in (1, 60)]
    differing = [(one, other) for one, other in zip(*answers, strict=True) if one.exact_match != other.exact_match]
    assert all(one.near_tie or other.near_tie for one, other in differing)
    assert near_tie_below(low) == 0.5
    assert any(result.exact_match and not result.near_tie for result in answers[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_early": True, "membership": True}, "does not go with membership"),
        ({"stop_early": True, "sampler": Sampler()}, "does not go with sampler"),
        ({"membership": True}, "need a tokenizer"),
        ({"batch_size": "much"}, "batch_size is 'much'"),
    ],
)
def test_options_that_exclude_each_other_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        extract(tiny_llama(), None, samples()[:2], progress=False, **options)
