"""Modules that use the parameters of others: found in their source, and right on a grid."""

from __future__ import annotations

import ast

import pytest
import torch
from torch import Tensor, nn

from hf_axonn import Grid, parallelize, sync_gradients
from hf_axonn.architectures.parameter_reads import _path, find_readers
from tests.helpers.float64 import relative_errors
from tests.helpers.ranks import run_ranks


class Scale(nn.Module):
    """Its parameter is used by a method that is not forward."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(10))

    def apply_to(self, hidden: Tensor) -> Tensor:
        return hidden * self.factor

    @property
    def root(self) -> Tensor:
        return self.factor.sqrt()


class Bent(nn.Linear):
    """A Linear of its own kind, whose own forward is called under another name."""

    def straight(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.straight(hidden).tanh()


class Net(nn.Module):
    """Reads a Linear's weight and bias, a norm's weight, a list of parameters and, for its logits, the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 10)
        self.norm = nn.LayerNorm(10)
        self.read = nn.Linear(10, 10)
        self.called = nn.Linear(10, 10)
        self.clamped = nn.Linear(10, 10)
        self.bent = Bent(10, 10)
        self.scales = nn.ModuleList([Scale()])
        self.shifts = nn.ParameterList([torch.rand(10), torch.rand(10)])

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.called(self.norm(self.embed(ids))).to(self.called.weight.dtype)
        hidden = hidden + nn.functional.linear(hidden, self.read.weight, self.read.bias) + self.read(hidden) ** 2
        hidden = hidden * self.scales[0].root
        hidden = self.scales[0].apply_to(hidden) * self.norm.weight + self.bent(hidden) * self.bent.straight(hidden)
        for shift in self.shifts:
            hidden = hidden + shift
        return self._logits(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        self.clamped.weight.data.clamp_(-0.1, 0.1)
        return self.clamped(hidden) @ self.embed.weight.t()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.called.bias)


GRIDS = [Grid(x=4), Grid(y=4), Grid(y=2, x=2), Grid(z=2, x=2), Grid(z=2, y=2), Grid(data=2, z=2)]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("self.a[0].b", ("a", "[]", "b")),
        ("super().b", ("b",)),
        ("weights.a", None),
        ("a.self.b", None),
        ("other().b", None),
        ("1 .real", None),
    ],
)
def test_what_begins_at_self_is_a_path(text, path):
    assert _path(ast.parse(text, mode="eval").body) == path


def test_who_reads_what():
    net = Net()
    scale = net.scales[0]
    readers, changed = find_readers(net)
    found = {(reader.module, reader.method): set(reader.read) for reader in readers}
    assert found == {
        (net, "forward"): {net.embed, net.read, net.norm, net.clamped, net.shifts, scale},
        (scale, "apply_to"): {scale},
        (net.bent, "straight"): {net.bent},
    }
    assert changed == {net.clamped}


def test_a_class_without_a_source_reads_nothing():
    namespace = {"nn": nn}
    exec("class Made(nn.Module):\n    def forward(self, x):\n        return self.inner.weight * x", namespace)
    made = namespace["Made"]()
    made.inner = nn.Linear(2, 2)
    assert find_readers(made) == ([], set())


def _train(net: nn.Module, ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
    nn.functional.cross_entropy(net(ids).flatten(0, 1), targets.flatten()).backward()
    return {name: parameter.grad for name, parameter in net.named_parameters()}


def _equal() -> dict[str, str]:
    ids, targets = torch.randint(13, (8, 3)), torch.randint(13, (8, 3))
    torch.manual_seed(1)
    plain = Net().double()
    truth = _train(plain, ids, targets)
    for grid in GRIDS:
        torch.manual_seed(1)
        net, report = parallelize(Net().double(), grid)
        place = grid.coordinates(net.axonn.grid_mesh.rank)
        begin = (place["data"] * grid.z + place["z"]) * 8 // grid.dp_size
        mine = slice(begin, begin + 8 // grid.dp_size)
        grads = _train(net, ids[mine], targets[mine])
        sync_gradients(net)
        errors = relative_errors(grads, truth)
        assert max(errors.values()) < 1e-10, (grid, errors)
        changed = net.clamped.weight.to_local()
        torch.testing.assert_close(changed, plain.clamped.weight.detach(), rtol=0, atol=0)
        assert changed.abs().max() == 0.1
        assert type(net.read) is nn.Linear and "factor" not in net.scales[0].__dict__
    return {entry.name: entry.kind for entry in report.entries}


def test_readers_on_every_grid():
    torch.manual_seed(0)
    styles = run_ranks(_equal, 4)[0]
    assert styles == {
        "embed": "vocabulary",
        "norm": "replicated",
        "read": "linear",
        "called": "linear",
        "clamped": "replicated",
        "bent": "gathered",
        "scales.0": "replicated",
        "shifts": "replicated",
    }
