"""AxoNN's easy API: any module built inside the block equals the same module on one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from hf_axonn import Grid, auto_parallelize, sync_gradients
from tests.helpers.devices import seeded
from tests.helpers.float64 import Float64, relative_errors
from tests.helpers.ranks import run_ranks


pytestmark = pytest.mark.usefixtures("device")


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


class Encoder(nn.Module):
    """torch's own encoder layer, whose attention reads the weights of its projections instead of calling them."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(7, 7, 10, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(7, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.encoder(inputs))


class Vision(nn.Module):
    """A ViT of Transformers: convolution, a class token, positions. 21 numbers are seen as pixels of an image."""

    def __init__(self) -> None:
        super().__init__()
        config = ViTConfig(
            hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=10, image_size=4,
            patch_size=2, num_labels=15, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.vit = ViTForImageClassification(config)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        pixels = inputs.flatten(1).repeat(1, 3)[:, :48].reshape(-1, 3, 4, 4)
        return self.vit(pixel_values=pixels).logits.view(-1, 3, 5)


MODULES = {"mlp": Net, "torch encoder": Encoder, "vit": Vision}
GRIDS = [Grid(x=4), Grid(y=4), Grid(y=2, x=2), Grid(z=2, x=2), Grid(z=2, y=2), Grid(data=2, z=2)]


def _step(net: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    with Float64():
        output = net(inputs)
        nn.functional.mse_loss(output, targets).backward()
    return output.detach()


def _equal() -> None:
    generator = seeded(3)
    inputs, targets = (torch.randn(8, 3, size, generator=generator).double() for size in (7, 5))
    for name, make in MODULES.items():
        torch.manual_seed(1)
        truth = make().double()
        answers = _step(truth, inputs, targets)
        expected = {name: parameter.grad for name, parameter in truth.named_parameters()}
        for grid in GRIDS:
            torch.manual_seed(1)
            with auto_parallelize(grid):
                net = make().double()
                loose = nn.Linear(7, 3)
            assert net.axonn.grid == loose.axonn.grid == grid
            assert {entry.kind for entry in net.axonn.report.entries} <= {"linear", "gathered", "replicated"}
            place = grid.coordinates(net.axonn.grid_mesh.rank)
            first = (place["data"] * grid.z + place["z"]) * 8 // grid.dp_size
            mine = slice(first, first + 8 // grid.dp_size)
            torch.testing.assert_close(_step(net, inputs[mine], targets[mine]), answers[mine], rtol=1e-11, atol=1e-12)
            sync_gradients(net)
            grads = {name: parameter.grad for name, parameter in net.named_parameters()}
            errors = relative_errors(grads, expected)
            assert max(errors.values()) < 1e-10, (name, grid, errors)
            assert loose(torch.ones(2, 7)).shape == (2, 3)


def test_any_module_on_every_grid():
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
