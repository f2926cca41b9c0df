"""tests/benchmarks/eval/extraction.py on a tiny model: all ways come to the same figures, and the report says what was
timed."""

import argparse
import dataclasses
import time

import pytest
import torch

from tests.benchmarks.eval import extraction
from tests.helpers.eval_support import samples, topics_tokenizer, trained_llama


@pytest.fixture(scope="module")
def asked() -> dict:
    """By the share that the model knows; of its own words it knows all."""
    learnt = [sample for sample in samples() if sample.bucket]
    unknown = [sample for sample in samples() if not sample.bucket]
    return {0.0: unknown, 0.5: learnt[:3] + unknown[:3], 1.0: learnt}


@pytest.fixture(scope="module")
def contenders():
    return extraction.Contenders(trained_llama(), topics_tokenizer(), 4, 2)


def test_all_ways_come_to_the_same_figures_and_are_timed(asked, contenders):
    with torch.no_grad():
        once = extraction.measure(contenders, asked, {}, 1, time.perf_counter)
        twice = extraction.measure(contenders, asked, once, 1, time.process_time)
    assert set(twice) == {"0.0", "0.5", "1.0"}
    for share, names in twice.items():
        assert set(names) == {*extraction.NAMES, "batched_with_rouge"}
        assert all(len(values) == 2 and values[0] == once[share][name][0] for name, values in names.items())
        # the rouge of what one way said is of what it said in this round
        for both, one, other in zip(
            names["batched_with_rouge"], names["batched"], names["rouge_of_batched"], strict=True
        ):
            assert both == one + other > 0


def test_figures_that_differ_are_an_error(asked, contenders):
    changed = [dataclasses.replace(sample, suffix=sample.suffix[::-1]) for sample in asked[1.0]]
    with torch.no_grad():
        right, wrong = contenders.with_rouge(asked[1.0]), contenders.with_rouge(changed)
    assert right == (len(asked[1.0]), pytest.approx(1)) and wrong[0] == 0
    extraction.check({"with_rouge": right, "match_and_rouge": right, "stop_early": (right[0], None)}, 1.0)
    with pytest.raises(ValueError, match="differ at 100%"):
        extraction.check({"with_rouge": right, "match_and_rouge": wrong}, 1.0)
    with pytest.raises(ValueError, match="differ at 100%"):
        extraction.check({"with_rouge": right, "stop_early": (0, None)}, 1.0)


def test_the_report_gives_ratios_of_the_fastest_and_medians(contenders, asked):
    ours, theirs = [1.0, 2.0, 4.0], [2.0, 6.0, 10.0]  # ratios 2, 3, 2.5
    names = {name: ours for name in extraction.NAMES} | {"batched": theirs, "batched_with_rouge": theirs}
    with torch.no_grad():
        profiled = extraction.profile(contenders.model, asked[0.0], 4)
    text = extraction.report(
        {str(share): names for share in extraction.SHARES},
        profiled,
        argparse.Namespace(tokens=12, samples=6, batch_size=4, clock="wall"),
    )
    assert "| all metrics / batched with rouge-score | 2.00 (2.50) | 2.00 (2.50) |" in text and "3 rounds" in text
    assert "| batched | 2.0000 (6.0000) | 2.0000 (6.0000) |" in text
    assert any(line.startswith("| aten::") for line in profiled)
