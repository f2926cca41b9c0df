"""Parameters of no Linear: stored in pieces, whole in use, right on every grid."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hf_axonn import Grid, parallelize, sync_gradients
from tests.helpers.float64 import relative_errors
from tests.helpers.ranks import run_ranks


pytestmark = pytest.mark.usefixtures("device")


class Mixed(nn.Module):
    """Three kernels of 2, 3 and 4 dims, whose first dims 5, 7 and 3 divide by nothing, and small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Parameter(torch.randn(5, 2, 6))
        self.table = nn.Parameter(torch.randn(7, 10))
        self.convolution = nn.Conv2d(1, 3, 3, padding=1)
        self.small = nn.Parameter(torch.randn(1, 1))
        self.scale = nn.Parameter(torch.randn(10))
        self.big = nn.Linear(10, 7)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.einsum("bsk,khd->bshd", inputs, self.heads)
        hidden = self.convolution(hidden.flatten(2).unsqueeze(1)).sum(1)[..., :10]
        return self.big(hidden * self.scale) @ self.table * self.small


GRIDS = [Grid(x=4), Grid(y=4), Grid(z=4), Grid(y=2, x=2), Grid(z=2, x=2), Grid(z=2, y=2), Grid(data=2, y=2)]


def _grads(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    model(inputs).pow(2).mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _equal() -> tuple[dict[str, str], list[int]]:
    inputs = torch.randn(8, 4, 5).double()
    torch.manual_seed(1)
    plain = Mixed().double()
    truth, pieces = _grads(plain, inputs), []
    for grid in GRIDS:
        torch.manual_seed(1)
        model, report = parallelize(Mixed().double(), grid)
        place = grid.coordinates(model.axonn.grid_mesh.rank)
        begin = (place["data"] * grid.z + place["z"]) * 8 // grid.dp_size
        grads = _grads(model, inputs[begin : begin + 8 // grid.dp_size])
        sync_gradients(model)
        errors = relative_errors(grads, truth)
        assert max(errors.values()) < 1e-10, (grid, errors)
        with torch.no_grad():
            torch.testing.assert_close(model(inputs), plain(inputs), rtol=1e-12, atol=1e-12)
        if grid == Grid(z=2, x=2):
            pieces = [parameter.to_local().numel() for parameter in (model.heads, model.table, model.small)]
            assert grads["heads"].to_local().numel() == pieces[0]
    return {entry.name: entry.kind for entry in report.entries}, pieces


def test_parameters_of_no_linear_on_every_grid():
    torch.manual_seed(0)
    results = run_ranks(_equal, 4)
    styles, _ = results[0]
    assert styles == {"(root)": "gathered", "convolution": "gathered", "big": "linear"}
    # 5 rows over x=2 are 3 and 2, over z=2 then 2, 1, 1, 1; what is too small is held whole.
    by_rank = [pieces for _, pieces in results]
    assert sorted(heads for heads, _, _ in by_rank) == [12, 12, 12, 24]
    assert sum(table for _, table, _ in by_rank) == 70
    assert {small for _, _, small in by_rank} == {1}
