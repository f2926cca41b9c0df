"""AxoNN's easy API: any module built inside the block equals the same module on one process."""

from __future__ import annotations

import torch
from float64 import relative_errors
from ranks import run_ranks
from torch import nn

from hf_axonn import Grid, auto_parallelize, sync_gradients


class Net(nn.Module):
    """A residual MLP with norms, a bias-free layer and a parameter of its own; 7, 10 and 5 divide by little."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 10)
        self.norm = nn.LayerNorm(10)
        self.middle = nn.Sequential(nn.Linear(10, 10, bias=False), nn.GELU(), nn.Linear(10, 10))
        self.scale = nn.Parameter(torch.rand(10))
        self.last = nn.Linear(10, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(inputs))
        return self.last(hidden + self.scale * self.middle(hidden))


GRIDS = [Grid(x=4), Grid(y=4), Grid(y=2, x=2), Grid(z=2, x=2), Grid(z=2, y=2), Grid(data=2, z=2)]


def _equal() -> None:
    inputs, targets = torch.randn(8, 3, 7).double(), torch.randn(8, 3, 5).double()
    torch.manual_seed(1)
    truth = Net().double()
    loss = nn.functional.mse_loss(truth(inputs), targets)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in truth.named_parameters()}
    for grid in GRIDS:
        torch.manual_seed(1)
        with auto_parallelize(grid):
            net = Net().double()
            loose = nn.Linear(7, 3)
        assert net.axonn.grid == loose.axonn.grid == grid
        assert {entry.style for entry in net.axonn.report.entries} == {"full", "replicated"}
        place = grid.coordinates(net.axonn.mesh.rank)
        rows = slice((place["data"] * grid.z + place["z"]) * 8 // grid.samples_size, None)
        mine = slice(rows.start, rows.start + 8 // grid.samples_size)
        output = net(inputs[mine])
        torch.testing.assert_close(output, truth(inputs[mine]), rtol=1e-12, atol=1e-12)
        nn.functional.mse_loss(output, targets[mine]).backward()
        sync_gradients(net)
        grads = {name: parameter.grad.full_tensor() for name, parameter in net.named_parameters()}
        errors = relative_errors(grads, expected)
        assert max(errors.values()) < 1e-10, (grid, errors)
        assert loose(torch.ones(2, 7)).shape == (2, 3)


def test_any_module_on_every_grid():
    torch.manual_seed(0)
    run_ranks(_equal, 4)


def test_the_block_leaves_torch_as_it_was():
    before = nn.Module.__init__
    with auto_parallelize(Grid()):
        net = Net()
        assert nn.Module.__init__ is not before
    assert nn.Module.__init__ is before and not hasattr(net, "axonn")
    try:
        with auto_parallelize(Grid()):
            raise KeyError
    except KeyError:
        pass
    assert nn.Module.__init__ is before
