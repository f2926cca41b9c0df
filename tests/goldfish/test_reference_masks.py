"""Our masks beside those of the authors' code, bit for bit, by the digests in reference_masks.json.

reference_masks.py, which ran the code, says how; its rows are made again here.
"""

import collections
import json

import pytest
import torch

from hf_axonn.goldfish.mask import goldfish_mask
from tests.goldfish.reference_masks import RESULTS, SOURCES, cases, made_up, rows_of, summary


COMMITTED = json.loads(RESULTS.read_text(encoding="utf-8"))
BY_STRATEGY = collections.defaultdict(list)
for one in COMMITTED["cases"]:
    BY_STRATEGY[one["source"], one["strategy"]].append(one)
FOUND = ("bits", "dropped", "sha256", "ignored_of_each_row")


def ours(case: dict, **changes) -> dict:
    tokens, labels, ignored = rows_of(case)
    options = {
        "strategy": case["strategy"],
        "k": case["k"],
        "context_width": case["width"],
        "start_position": case["start"],
        "hash_labels": True,
        "ignored_token": ignored,
    } | changes
    if case["strategy"] == "seeded_random":
        options["generator"] = torch.Generator().manual_seed(case["seed"])
    masks = [goldfish_mask(tokens, labels, **options) for _ in range(case.get("batches", 1))]
    assert not any(mask[:, 0].any() for mask in masks)
    return summary([mask[:, 1:] for mask in masks])


def test_the_committed_digests_are_of_the_cases_of_the_script():
    asked = [{key: value for key, value in case.items() if key not in FOUND} for case in COMMITTED["cases"]]
    assert asked == list(cases())
    assert COMMITTED["sources"] == SOURCES
    assert COMMITTED["bits"] == sum(case["bits"] for case in COMMITTED["cases"]) == 4_221_973


@pytest.mark.parametrize(("source", "strategy"), list(BY_STRATEGY))
def test_masks_equal_the_authors_code(source, strategy):
    wrong = []
    for case in BY_STRATEGY[source, strategy]:
        expected = {key: case[key] for key in ("bits", "dropped", "sha256")}
        if ours(case) != expected:
            wrong.append(case)
    assert not wrong, f"{len(wrong)} of {len(BY_STRATEGY[source, strategy])} differ, first {wrong[0]}"


def test_what_a_hash_reads_where_labels_are_ignored_is_part_of_the_mask():
    """The comparison sees the difference between -1 and another number, and between labels and tokens."""
    prompts = [
        case
        for case in BY_STRATEGY["goldfish-loss", "hash-table"]
        if case["kind"] == "prompts" and case["width"] == 13
    ]
    for case in prompts:
        assert ours(case, ignored_token=2)["sha256"] != case["sha256"]
        assert ours(case, hash_labels=False)["sha256"] != case["sha256"]


def test_the_reference_drops_whole_rows_with_its_coins():
    """Why seeded_random is equal in what is drawn, and not in what the authors' code does with it."""
    for case in BY_STRATEGY["goldfish-loss", "seeded_random"]:
        predicted = case["length"] - 1
        assert case["ignored_of_each_row"] == [predicted, predicted] + [0] * (case["rows"] - 2)
        tokens, labels, _ = made_up(case["kind"], case["vocabulary"], case["rows"], case["length"], case["seed"])
        mask = goldfish_mask(tokens, labels, strategy="seeded_random", k=case["k"])
        assert mask.any(dim=1).all() and not mask[:, 1:].all(dim=1).any()
