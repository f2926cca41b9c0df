"""Float32 weights in host memory: every bit of training in bf16, what saves and loads them, other changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import SGD, AdamW

from hf_axonn import AxonnPlugin, Grid, load_sharded, save_sharded
from hf_axonn.compat.accelerate import forget_state
from hf_axonn.compat.host_dtensor import HostDTensor
from hf_axonn.engine import host_moments, optimizer_steps
from hf_axonn.engine.dtensors import local, whole
from hf_axonn.engine.host_weights import HostWeight, host_weight_of
from tests.helpers.equality import rows_of
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks


class Run:
    """A model and its AdamW, prepared over a grid."""

    def __init__(self, grid: Grid, offload: str = "optimizer", kind: str = "llama", precision: str = "bf16") -> None:
        forget_state()
        self.grid = grid
        plugin = AxonnPlugin(grid=grid, offload=offload)
        self.accelerator = Accelerator(cpu=True, parallelism_config=plugin, mixed_precision=precision)
        model = tiny_model(kind, num_hidden_layers=1, dtype=torch.float32)
        optimizer = AdamW(model.parameters(), lr=0.01)
        if grid.z == 1:  # either may come first
            self.optimizer, self.model = self.accelerator.prepare(optimizer, model)
        else:
            self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.accelerator.unwrap_model(self.model).named_parameters())

    @torch.no_grad()
    def double(self) -> None:
        for parameter in self.parameters().values():
            parameter.mul_(2)

    def loss(self, seed: int) -> Tensor:
        rows = rows_of(tiny_batch(2 * self.grid.dp_size, 7, seed=seed), self.grid, dist.get_rank())
        torch.manual_seed(seed)  # of dropout
        return self.model(**rows).loss

    def step(self, seed: int, between: Callable[[], object] = lambda: None) -> list[Tensor]:
        """Take a step; returns the loss, and this rank's gradients."""
        loss = self.loss(seed)
        self.accelerator.backward(loss)
        between()
        gradients = [local(parameter.grad).clone() for parameter in self.parameters().values()]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [loss.detach(), *gradients]

    def state(self) -> list[Tensor]:
        """This rank's weights and moments."""
        entries = self.optimizer.optimizer.state.values()
        kept = [local(value) for each in entries for value in each.values() if isinstance(value, Tensor)]
        return [*(local(parameter).detach() for parameter in self.parameters().values()), *kept]


def same(ours: list[Tensor], others: list[Tensor]) -> None:
    assert len(ours) == len(others)
    for number, (moved, true) in enumerate(zip(ours, others, strict=True)):
        assert moved.dtype == true.dtype and torch.equal(moved, true), number


@contextmanager
def nothing_renewed() -> Iterator[None]:
    """Fail where a product inside needs other values than there are on the device."""
    values = HostWeight.values

    def look(self: HostWeight, version: int, dtype: torch.dtype | None) -> Tensor:
        before = self._copy
        found = values(self, version, dtype)
        assert found is before
        return found

    with mock.patch.object(HostWeight, "values", look):
        yield


def check_bits(grid: Grid, kind: str = "llama") -> None:
    """Two copies of a model, one of which has its weights in host memory; the last bucket holds one weight."""
    ours, others = Run(grid, kind=kind), Run(grid, "none", kind)
    with mock.patch.object(host_moments, "BUCKET_BYTES", 2**13):
        for seed in range(3):
            if seed:
                with nothing_renewed():
                    found = ours.step(seed)
            else:
                found = ours.step(seed)
            same(found, others.step(seed))
            same(ours.state(), others.state())
    with torch.no_grad():
        assert torch.equal(ours.loss(3), others.loss(3))
    moved = {name for name, each in ours.parameters().items() if host_weight_of(each) is not None}
    assert moved == {name for name in ours.parameters() if name.endswith(LINEARS)} and len(moved) > 4
    assert not any(host_weight_of(each) for each in others.parameters().values())
    for name in moved:
        host = host_weight_of(ours.parameters()[name])
        assert host is not None and host._copy.dtype == torch.bfloat16


LINEARS = ("proj.weight", "c_fc.weight", "c_attn.weight", "lm_head.weight", "gate_up_proj", "down_proj")


def check_reads(grid: Grid) -> None:
    """Everything that reads weights finds them in float32: states, sums of all ranks, a pass without autocast."""
    run = Run(grid)
    run.step(0)
    for name, value in get_model_state_dict(run.accelerator.unwrap_model(run.model)).items():
        assert value.dtype == torch.float32 and torch.equal(local(value), local(run.parameters()[name]))
    assert all(whole(parameter).dtype == torch.float32 for parameter in run.parameters().values())
    other = Run(run.grid, "none")
    with torch.no_grad():
        for moved, true in zip(run.parameters().values(), other.parameters().values(), strict=True):
            true.copy_(moved)
        plain = [each.accelerator.unwrap_model(each.model, keep_fp32_wrapper=False) for each in (run, other)]
        rows = rows_of(tiny_batch(2 * run.grid.dp_size, 7, seed=5), run.grid, dist.get_rank())
        assert torch.equal(plain[0](**rows).logits, plain[1](**rows).logits)


def check_penalties(grid: Grid) -> None:
    """Sums over whole weights have the gradients that they have on the device."""
    ours, others = Run(grid), Run(grid, "none")
    found = []
    for run in (ours, others):
        for name, parameter in run.parameters().items():
            if name.endswith(LINEARS):
                parameter.full_tensor().square().sum().backward()
                parameter.redistribute(placements=[Replicate()] * parameter.device_mesh.ndim).sum().backward()
                assert parameter.grad.placements == parameter.placements
        found.append([local(parameter.grad) for parameter in run.parameters().values() if parameter.grad is not None])
    assert len(found[0]) > 4
    same(*found)


def on_data(parameter: Tensor, factor: float) -> None:
    parameter.data.mul_(factor)


def new_data(parameter: Tensor, factor: float) -> None:
    before = local(parameter).clone()
    parameter.data = parameter.data * factor
    assert torch.equal(local(parameter), before * factor)


def on_shard(parameter: Tensor, factor: float) -> None:
    local(parameter).mul_(factor)


def on_list(parameter: Tensor, factor: float) -> None:
    torch._foreach_mul_([parameter], factor)


def uncounted(parameter: Tensor, factor: float) -> None:
    local(parameter).data.mul_(factor)


def check_changes(grid: Grid) -> None:
    """Changes from outside are used at once; those that nobody counts are refused by the next step."""
    ours, others = Run(grid), Run(grid, "none")

    def scale(factor: float, how: Callable[[Tensor, float], object]) -> None:
        with torch.no_grad():
            for run in (ours, others):
                for parameter in run.parameters().values():
                    how(parameter, factor)

    same(ours.step(0), others.step(0))
    for seed, how in enumerate((Tensor.mul_, on_data, new_data, on_list), 1):
        scale(1.5, how)
        ours.loss(seed)
        with nothing_renewed():  # but once
            ours.loss(seed)
        same(ours.step(seed), others.step(seed))
    scale(1.5, on_shard)
    same(ours.step(5, between=ours.double), others.step(5, between=others.double))
    same(ours.state(), others.state())
    with torch.inference_mode():
        for run in (ours, others):
            run.double()
        assert torch.equal(ours.loss(5), others.loss(5))
    same(ours.step(6), others.step(6))
    with torch.no_grad():  # as averages of weights are exchanged
        mean = {name: parameter.detach().clone() for name, parameter in ours.parameters().items()}
        for name, parameter in ours.parameters().items():
            mean[name].lerp_(parameter, 0.5)
            average = mean[name].clone()
            mean[name].copy_(parameter.data)
            parameter.data.copy_(average)
    same([ours.loss(6)], [others.loss(6)])
    ours.accelerator.unwrap_model(ours.model).to("cpu")  # where it is
    same(ours.step(6), others.step(6))
    scale(3.0, uncounted)
    with pytest.raises(RuntimeError, match=r"8 weights in host memory .* torch does not count, the first of shape \["):
        ours.step(7)


def check_files(grid: Grid, folder: Path) -> None:
    """A checkpoint fills models of both kinds, and so does `load_state_dict`; training goes on with the same bits."""
    ours, others = Run(grid), Run(grid, "none")
    for seed in range(2):
        same(ours.step(seed), others.step(seed))
    path, model = folder / f"{grid}", ours.accelerator.unwrap_model(ours.model)
    save_sharded(model, path, optimizer=ours.optimizer)
    full = {name: whole(value).detach().clone() for name, value in model.state_dict().items()}
    ours.step(2)  # away from there
    load_sharded(model, path, optimizer=ours.optimizer)
    same(ours.state(), others.state())
    again = Run(grid, "none")
    load_sharded(again.accelerator.unwrap_model(again.model), path, optimizer=again.optimizer)
    same(again.state(), others.state())
    same([ours.loss(3)], [again.loss(3)])
    ours.double()
    model.load_state_dict(full)
    same(ours.step(3), again.step(3))
    same(ours.state(), again.state())


def check_states(grid: Grid, folder: Path) -> None:
    """Accelerate's `save_state` and torch's state dicts bring weights and moments back."""
    ours, others = Run(grid), Run(grid, "none")
    same(ours.step(0), others.step(0))
    model, other = (each.accelerator.unwrap_model(each.model) for each in (ours, others))
    ours.accelerator.save_state(folder / f"state-{grid}")
    ours.step(1)
    ours.accelerator.load_state(folder / f"state-{grid}")
    same(ours.state(), others.state())
    same(ours.step(2), others.step(2))
    ours.double()
    set_model_state_dict(model, get_model_state_dict(other))
    same([ours.loss(3)], [others.loss(3)])
    same(ours.step(3), others.step(3))
    same(ours.state(), others.state())


def check_refused(grid: Grid) -> None:
    """Another optimizer, and a state that torch makes before the first step."""
    run = Run(grid)
    made = get_optimizer_state_dict(run.accelerator.unwrap_model(run.model), run.optimizer.optimizer)
    assert len(made["state"]) == len(run.parameters())
    run.accelerator.backward(run.loss(0))
    with pytest.raises(ValueError, match="SGD got weights that offload: optimizer keeps in host memory for another"):
        SGD(run.parameters().values(), lr=0.1).step()


def check_torch(grid: Grid) -> None:
    """Weights stay and moments move with a torch whose operators do not ask the class."""
    with mock.patch.object(HostDTensor, "__torch_dispatch__", DTensor.__torch_dispatch__):
        ours, others = Run(grid), Run(grid, "none")
    assert optimizer_steps._warn_that_weights_stay.cache_info().currsize == 1
    assert not any(host_weight_of(parameter) for parameter in ours.parameters().values())
    same(ours.step(0), others.step(0))
    same(ours.state(), others.state())


def check_precision(grid: Grid) -> None:
    """Nothing moves without mixed precision."""
    run = Run(grid, precision="no")
    assert not any(host_weight_of(parameter) for parameter in run.parameters().values())
    assert any(isinstance(parameter, DTensor) for parameter in run.parameters().values())


def check_quickly() -> None:
    for each in (check_bits, check_changes, check_refused):
        each(Grid(z=2))


def test_weights_in_host_memory_train_as_on_the_device() -> None:
    run_ranks(check_quickly, 2)


def check(folder: Path) -> None:
    for each in (check_bits, check_changes):
        each(Grid(x=2))
    for grid in (Grid(z=2), Grid(x=2)):
        check_reads(grid)
        check_penalties(grid)
        check_files(grid, folder)
        check_states(grid, folder)
        check_precision(grid)
        check_torch(grid)


@pytest.mark.slow
def test_what_reads_and_loads_weights_in_host_memory(tmp_path: Path) -> None:
    run_ranks(check, 2, tmp_path)


def check_kinds() -> None:
    """GPT-2's Conv1D, experts, a head that is the embedding, which stays, and weights that lie whole on a rank."""
    grids = {"gpt2": Grid(z=2, y=2), "mixtral": Grid(z=2, x=2), "qwen3_moe": Grid(data=2, z=2), "smollm2": Grid(z=4)}
    grids["llama"] = Grid(data=4)
    for kind, grid in grids.items():
        check_bits(grid, kind)


@pytest.mark.slow
def test_other_kinds_of_weights_in_host_memory() -> None:
    run_ranks(check_kinds, 4)
