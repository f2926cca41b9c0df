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
        once, first = extraction.measure(contenders, asked, {}, 1, time.perf_counter)
        twice, fed = extraction.measure(contenders, asked, once, 1, time.process_time)
    assert set(twice) == {"0.0", "0.5", "1.0"}
    for share, names in twice.items():
        assert set(names) == {*extraction.NAMES, "batched_with_rouge"}
        assert all(values[0] == once[share][name][0] for name, values in names.items())
        rounds = {name: len(values) for name, values in names.items()}
        assert rounds == {name: 1 if name == "one_by_one" else 2 for name in rounds}
        # the rouge of what one way said is of what it said in this round
        for both, one, other in zip(
            names["batched_with_rouge"], names["batched"], names["rouge_of_batched"], strict=True
        ):
            assert both == one + other > 0
    # by hand: 12 + 12 tokens, of which the last is not fed; `generate` and a pass feed 23, in batches of at most four
    number = len(asked[1.0])
    assert fed["1.0"]["batched"] == (-(-number // 4) * 12 / number, 23)
    assert fed["1.0"]["one_pass"] == fed["1.0"]["with_rouge"] == (-(-number // 4) / number, 23)
    assert first["0.0"]["one_by_one"] == (12, 23) and "one_by_one" not in fed["0.0"]
    assert fed["0.0"]["rouge_of_batched"] == (0, 0)
    assert fed["0.0"]["stop_early"][1] < 23 < fed["0.0"]["with_rouge"][1]


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


def test_the_report_gives_ratios_of_the_fastest_and_their_range(contenders, asked, monkeypatch):
    ours, theirs = [1.0, 2.0, 4.0], [2.0, 6.0, 10.0]  # ratios 2, 3, 2.5
    names = {name: ours for name in extraction.NAMES} | {"batched": theirs, "batched_with_rouge": theirs}
    names["one_by_one"] = [12.0]
    with torch.no_grad():
        profiled = extraction.profile(contenders.model, asked[0.0], 4)
    seconds = {str(share): names for share in extraction.SHARES}
    fed = {str(share): dict.fromkeys(extraction.NAMES, (0.25, 23.5)) for share in extraction.SHARES}
    text = extraction.report(
        {6: (seconds, fed), 12: (seconds, fed)},
        profiled,
        argparse.Namespace(tokens=12, batch_size=4, clock="wall"),
    )
    cell = " 2.00 (2.00 to 3.00) |"
    assert text.count(f"| all metrics / batched with rouge-score |{3 * cell}") == 2 and "rounds: 3." in text
    alone = " 12.00 (3.00 to 12.00) |"  # its one time counts in every round
    assert text.count(f"| all metrics / one by one with rouge-score |{3 * alone}") == 2
    assert "## 6 samples" in text and "## 12 samples" in text and "| one_pass | 23.5 in 0.25 |" in text
    assert "| batched | 2.0000 (6.0000) | 2.0000 (6.0000) |" in text
    assert any(line.startswith("| aten::") for line in profiled)
    # the medians are 2.5
    missed = {name: (3.0, 2.5, 2.6) for name in extraction.GOALS}
    monkeypatch.setattr(extraction, "GOALS", missed)
    lines = extraction.against_goals({6: (seconds, fed)})
    cells = "2.50, goal 3: missed | 2.50, goal 2.5: met | 2.50, goal 2.6: missed |"
    assert sum(line.endswith(f"| 6 | {cells}") for line in lines) == 2
    assert "2.000 to 10.000 s a sample with 6 samples" in lines[-1]


def test_a_page_keeps_its_notes_and_names_no_folder_of_the_machine(tmp_path):
    page = tmp_path / "page.md"
    assert extraction.notes_of(None) == extraction.notes_of(page) == ""
    page.write_text("# Title\n\nfigures\n\n## Notes\n\nby hand\n\n## More\n\nby hand too\n")
    assert extraction.notes_of(page) == "\n## Notes\n\nby hand\n\n## More\n\nby hand too\n"
    page.write_text("# Title\n\n### Notes\n")
    assert extraction.notes_of(page) == ""
    typed = ["--kept", str(tmp_path / "rounds.json"), f"--output={page}", "--rounds", "1"]
    shown = "python -m tests.benchmarks.eval.extraction --kept rounds.json --output=page.md --rounds 1"
    assert extraction.command_line(typed) == shown
    assert extraction.command_line(["--output", "docs/a.md"]).endswith(" --output docs/a.md")
