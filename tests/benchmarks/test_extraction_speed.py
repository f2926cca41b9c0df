"""The comparisons of extraction over grids and with vLLM: what they count, what they refuse, and their pages."""

from argparse import Namespace
from types import SimpleNamespace

import pytest

from tests.benchmarks.eval import extraction_grids as grids
from tests.benchmarks.eval import extraction_vllm as vllm


def answers(*results) -> dict:
    return {kind: (1.0, list(results)) for kind in grids.WORK}


def test_answers_of_a_grid_are_those_of_one_process():
    truth = answers(("a", True, False, -1.0), ("b", False, True, None))
    grids.check_same(answers(("a", True, False, -1.0005), ("b", True, False, None)), truth, "x=2")  # b is a near tie
    with pytest.raises(ValueError, match="x=2 answers every probability"):
        grids.check_same(answers(("a", False, False, -1.0), ("b", False, True, None)), truth, "x=2")
    with pytest.raises(ValueError, match="x=2"):
        grids.check_same(answers(("a", True, False, -1.1), ("b", False, True, None)), truth, "x=2")


@pytest.mark.parametrize("clock", grids.HOW)
def test_the_page_of_grids_has_the_fastest_rounds_and_the_parts(clock):
    seconds = {
        2: {
            grids.ALONE: {kind: [2.0, 4.0] for kind in grids.WORK},
            "x=2": {kind: [5.0, 4.0] for kind in grids.WORK},
        }
    }
    shares = {name: {kind: ({"attention": 0.5}, []) for kind in grids.WORK} for name in (grids.ALONE, "x=2")}
    args = Namespace(name="A model", samples=10, tokens=5, batch_size=4, rounds=2, cores=2, clock=clock)
    page = grids.report(seconds, shares, args)
    assert "| x=2 | 0.50 (0.40 to 1.00) |" in page
    assert "| one process | 1 (0.2000 s; median 0.3000 s) |" in page
    assert page.count("| attention | 50.00 | 50.00 |") == len(grids.WORK)


def test_samples_of_the_grids_are_the_same_in_every_process():
    made = grids.make_samples(3, 4, 100)
    assert made == grids.make_samples(3, 4, 100) and len({sample.prefix for sample in made}) == 3
    assert all(len(sample.prefix) == len(sample.suffix) == 4 for sample in made)


def test_shorter_prefixes_are_followed_by_what_came_next():
    [sample] = grids.make_samples(1, 8, 100)
    short, whole = vllm.with_shorter([sample], (0.5, 1.0))
    assert whole.suffix == sample.suffix and whole.prefix == sample.prefix
    assert short.prefix == sample.prefix[:4] and short.suffix == (*sample.prefix[4:], *sample.suffix[:4])


def test_differences_from_vllm_are_counted():
    samples = grids.make_samples(2, 2, 100)
    results = [
        SimpleNamespace(exact_match=True, near_tie=True, generated=list(samples[0].suffix), logprobs=[-1.0, -2.0]),
        SimpleNamespace(exact_match=False, near_tie=False, generated=[1, 2], logprobs=[-3.0, -4.0]),
    ]
    found = {"continuations": [[0, 0], [1, 2]], "logprobs": [[-1.0, -2.25], [-3.0, -4.0]]}
    assert vllm.differences(results, found, samples) == {
        "exact matches": 1,
        "of them near ties": 1,
        "continuations": 1,
        "nats": 0.25,
    }


def test_the_page_beside_vllm_names_ratios_and_differences():
    seconds = {"shared": {work: {"ours": [1.0, 2.0], "vllm": [3.0, 2.0]} for work in vllm.WORK}}
    different = {"shared": {work: {"continuations": 2} for work in vllm.WORK}}
    args = Namespace(samples=8, tokens=5, rounds=2, threads=1, clock="wall", vllm_version="0.32.0", note="Ready.")
    page = vllm.report(seconds, different, {"shared": 8}, {}, args)
    assert page.count("| 2.00 (1.00 to 3.00) |") == len(vllm.WORK)
    assert page.count("| continuations: 2 |") == len(vllm.WORK)
