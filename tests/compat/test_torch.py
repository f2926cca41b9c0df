"""hf_axonn/compat/torch.py, as far as no other test needs it."""

from __future__ import annotations

import pytest
import torch

from hf_axonn.compat.torch import UnreadHistogram


@pytest.mark.parametrize("values", [[0, 0, 0], [], [0, 1, 1], [1, 1]])
def test_a_histogram_of_one_value_counts_it(values):
    """torch itself counts all of 0 and 1 there, because it takes their range."""
    numbers = torch.tensor(values, dtype=torch.float32)
    with UnreadHistogram():
        found = torch.histc(numbers, bins=1, min=0, max=0)
        others = torch.histc(numbers, bins=2, min=0, max=1)
    assert found.dtype == numbers.dtype and found.tolist() == [values.count(0)] == others[:1].tolist()
    assert others.tolist() == torch.histc(numbers, bins=2, min=0, max=1).tolist()
