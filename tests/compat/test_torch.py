"""hf_axonn/compat/torch.py, as far as no other test needs it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from hf_axonn import Grid, parallelize
from hf_axonn.compat.torch import UnreadHistogram, fake_world


@pytest.mark.parametrize("values", [[0, 0, 0], [], [0, 1, 1], [1, 1]])
def test_a_histogram_of_one_value_counts_it(values):
    """torch itself counts all of 0 and 1 there, because it takes their range."""
    numbers = torch.tensor(values, dtype=torch.float32)
    with UnreadHistogram():
        found = torch.histc(numbers, bins=1, min=0, max=0)
        others = torch.histc(numbers, bins=2, min=0, max=1)
        every = torch.histc(numbers, bins=1, min=0, max=1)
    assert every.tolist() == [len(values)]
    assert found.dtype == numbers.dtype and found.tolist() == [values.count(0)] == others[:1].tolist()
    assert others.tolist() == torch.histc(numbers, bins=2, min=0, max=1).tolist()


def test_data_of_a_sharded_parameter_can_be_set():
    with fake_world(2):
        model, _ = parallelize(nn.Sequential(nn.Linear(4, 6)), Grid(z=2))
        weight, shard = model[0].weight, model[0].weight.to_local().detach().clone()
        weight.data = weight.data * 2
        assert torch.equal(weight.to_local(), 2 * shard)
        weight.data = weight.data.to(torch.bfloat16)
        assert weight.to_local().dtype == weight.dtype == torch.bfloat16
        full = torch.arange(24.0).view(6, 4)
        weight.data = DTensor.from_local(full, weight.device_mesh, [Replicate()], run_check=False)
        assert torch.equal(weight.to_local(), full[:3]) and weight.requires_grad
        weight.data = -full
        assert torch.equal(weight.to_local(), -full[:3]) and weight.shape == full.shape and weight.requires_grad
        with pytest.raises(ValueError, match=r"shape \[6, 4\] .* a tensor of shape \[3, 4\]: give a full tensor"):
            weight.data = full[:3]
