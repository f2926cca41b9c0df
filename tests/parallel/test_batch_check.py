"""In which passes batches are compared; that a difference is found: tests/distributed/test_consistency.py."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_axonn.parallel.batch_check import BatchCheck


class Mesh:
    """The sizes of a mesh, and nothing behind them."""

    device = torch.device("cpu")

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self, *axes: str) -> int:
        assert axes == ("x", "y")
        return self.ranks


class Noted(BatchCheck):
    """Notes the batches of every comparison instead of making it."""

    def __init__(self, ranks: int) -> None:
        self.compared: list[int] = []
        super().__init__(SimpleNamespace(mesh=Mesh(ranks)), nn.Linear(1, 1))

    def _compare(self, tensors, since) -> None:
        self.compared.append(since.batches)


@pytest.mark.parametrize("training", [True, False])
def test_the_first_passes_and_every_32nd_compare_all_batches_since(training):
    check = Noted(2)
    check.model.train(training)
    for number in range(100):
        check((torch.tensor([number]),), {})
    assert check.compared == [1, 1, 1, 1, 29, 32, 32]  # passes 0 to 3, 32, 64, 96


def test_evaluation_counts_for_itself():
    check = Noted(2)
    for number in range(40):
        check.model.train(number % 2 == 0)
        check((torch.tensor([number]),), {})
    assert check.compared == [1] * 8


def test_where_no_ranks_share_samples_nothing_is_compared():
    check = Noted(1)
    check((torch.tensor([1]),), {})
    assert check.compared == []
