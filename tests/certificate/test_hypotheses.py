"""Hypotheses about gradients, without processes: of two positions, whose ranks have one each."""

from __future__ import annotations

import pytest
import torch

from hf_axonn.certificate.hypotheses import (
    BATCH_MEANS,
    OWN,
    RANK_MEANS,
    TOKENS,
    UNKNOWN,
    MicroBatch,
    add_up,
    average,
    find_fit,
    largest_error,
    length_of_difference,
    list_wrong,
    weigh,
)
from hf_axonn.certificate.shards import Shard


GROUPS = [[0], [1]]
FACTORS = {"ranks": 2}


@pytest.fixture
def positions() -> list[list[MicroBatch]]:
    """Two micro-batches of the first position, one of the second; other labels are counted than predicted."""
    generator = torch.Generator().manual_seed(0)

    def make(tokens: int, counted: int) -> MicroBatch:
        shapes = {"a": (4, 3), "b": (5,)}
        gradients = {
            name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
        }
        return MicroBatch(gradients, 1.0, tokens, counted)

    return [[make(5, 6), make(2, 3)], [make(7, 8)]]


def shards_of(gradients: dict[str, torch.Tensor]) -> list[Shard]:
    """All of each gradient."""
    return [Shard(name, tuple(whole.shape), (0,) * whole.dim(), whole) for name, whole in gradients.items()]


def find(ranks: list[list[Shard]], positions: list[list[MicroBatch]], expected: str = TOKENS):
    """The fit of gradients in float64."""
    return find_fit(ranks, positions, GROUPS, expected=expected, distance=largest_error)


@pytest.mark.parametrize("mean", [TOKENS, RANK_MEANS, BATCH_MEANS])
@pytest.mark.parametrize("distance", [largest_error, length_of_difference])
def test_a_mean_is_found_with_its_factor(positions, mean, distance):
    ranks = [shards_of({name: 2 * gradient for name, gradient in average(positions, mean).items()})] * 2
    fit = find_fit(ranks, positions, GROUPS, expected=TOKENS, distance=distance)
    assert fit.name == mean and fit.ratio == pytest.approx(2) and fit.left < 1e-8
    assert fit.describe(TOKENS, FACTORS) == f"gradients are {mean} times 2 (the number of ranks)"
    ranks = [shards_of(average(positions, mean))] * 2
    text = find_fit(ranks, positions, GROUPS, expected=TOKENS, distance=distance).describe(TOKENS, FACTORS)
    assert text == ("" if mean == TOKENS else f"gradients are {mean}, not {TOKENS}")


def test_weights_are_those_of_each_mean(positions):
    def weights(mean: str) -> list[list[float]]:
        return [[weight for _, weight in own] for own in weigh(positions, mean)]

    assert weights(TOKENS) == [[1 / 17, 1 / 17], [1 / 17]]
    assert weights(RANK_MEANS) == [[1 / 18, 1 / 18], [1 / 16]]
    assert weights(BATCH_MEANS) == [[1 / 15, 1 / 6], [1 / 21]]


def test_ranks_that_have_their_own_share_alone_are_found(positions):
    ranks = [shards_of(add_up((batch, 2 * weight) for batch, weight in own)) for own in weigh(positions, TOKENS)]
    fit = find(ranks, positions)
    assert fit.name == OWN
    assert fit.describe(TOKENS, FACTORS) == f"gradients are {OWN} (times 2 (the number of ranks))"
    assert find([ranks[0], ranks[0]], positions) is None


def test_of_means_that_are_the_same_the_expected_one_counts(positions):
    alike = [[positions[1][0]], [positions[1][0]]]
    ranks = [shards_of(average(alike, TOKENS))] * 2
    assert find(ranks, alike).name == TOKENS and find(ranks, alike, RANK_MEANS).name == RANK_MEANS


def test_gradients_of_another_shape_or_name_are_no_fit(positions):
    right = average(positions, TOKENS)
    other = shards_of({"a": torch.ones(3, dtype=torch.float64), "c": torch.ones(2, dtype=torch.float64)})
    assert find([other, other], positions) is None
    assert length_of_difference([other], right) == float("inf")
    zeros = shards_of({**right, "c": torch.zeros(2, dtype=torch.float64)})  # of a parameter that nothing uses
    assert largest_error([zeros], right) == 0.0


def test_gradients_that_differ_where_others_are_right_are_listed(positions):
    right = average(positions, TOKENS)
    ranks = [shards_of({**right, "a": 2 * right["a"]}), shards_of({**right, "b": torch.zeros_like(right["b"])})]
    text = list_wrong([(0, "a", 1e-8), (1, "b", 1e-8)], ranks, right, FACTORS, largest_error)
    assert text == (
        f"of the gradients, these are not {TOKENS}: a times 2 (the number of ranks) on rank(s) 0; "
        "b missing on rank(s) 1"
    )
    noise = shards_of({**right, "a": right["a"].flip(0)})
    assert "a other values on rank(s) 0" in list_wrong([(0, "a", 1e-8)], [noise], right, FACTORS, largest_error)
    assert list_wrong([], ranks, right, FACTORS, largest_error) == UNKNOWN
    every = [(rank, name, 1e-8) for rank in (0, 1) for name in right]
    assert list_wrong(every, ranks, right, FACTORS, largest_error) == UNKNOWN


def test_three_gradients_are_listed_and_the_others_counted():
    right = {name: torch.ones(2, dtype=torch.float64) for name in "abcde"}
    ranks = [shards_of({name: 2 * gradient for name, gradient in right.items()})]

    def list_first(count: int) -> str:
        wrong = [(0, name, 1e-8) for name in list(right)[:count]]
        return list_wrong(wrong, ranks, right, FACTORS, largest_error)

    assert list_first(3).endswith("c times 2 (the number of ranks) on rank(s) 0")
    assert list_first(4).endswith("c times 2 (the number of ranks) on rank(s) 0 and 1 more")
