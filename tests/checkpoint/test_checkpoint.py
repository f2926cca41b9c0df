"""save_sharded and load_sharded: any grid to any grid, any optimizer, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.optimization import Adafactor

from hf_axonn import Grid, from_pretrained, load_sharded, parallelize, save_sharded, sync_gradients
from hf_axonn.checkpoint.commit import write_manifest
from hf_axonn.checkpoint.manifest import check_complete
from hf_axonn.checkpoint.shard_files import checksum_of, file_name
from tests.helpers.equality import full
from tests.helpers.models import UnlistedForCausalLM, tiny_batch, tiny_model, unplanned_model
from tests.helpers.ranks import run_ranks


class Odd(nn.Module):
    """Linears of odd sizes, tensors smaller than the number of ranks, a scalar, buffers, an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(211, 48)
        self.second = nn.Linear(48, 5, bias=False)
        self.third = nn.Linear(5, 3)
        self.last = nn.Linear(3, 1, bias=False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.unused = nn.Parameter(torch.ones(7))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("nothing", torch.empty(0, 4))

    def forward(self, x):
        return self.last(self.third(self.second(self.first(x).tanh()))) * self.scale


def odd(seed: int) -> Odd:
    torch.manual_seed(seed)
    return Odd().double()


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),  # which has a state before its first step
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(4)
    model(torch.randn(6, 211, dtype=torch.float64)).square().mean().backward()
    sync_gradients(model)
    optimizer.step()
    optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(value) for name, value in model.state_dict().items()}


def from_grid_to_grid(folder: Path, kind: str, grids: list[Grid]) -> None:
    """Two steps, saved after the first on one grid and continued on the next, are the same two steps."""
    for index, (before, after) in enumerate(zip(grids, [*grids[1:], grids[0]], strict=True)):
        model, _ = parallelize(odd(0), before)
        optimizer = OPTIMIZERS[kind](model.parameters())
        step(model, optimizer)
        save_sharded(model, folder / str(index), optimizer=optimizer)
        step(model, optimizer)
        other, _ = parallelize(odd(1), after)
        resumed = OPTIMIZERS[kind](other.parameters())
        load_sharded(other, folder / str(index), optimizer=resumed)
        step(other, resumed)
        expected = values(model)
        for name, value in values(other).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12, msg=f"{name}, {before}, {after}")
        assert torch.equal(expected["unused"], torch.ones(7).double())


GRIDS = [Grid(z=2, x=2), Grid(y=4), Grid(data=4), Grid(data=2, x=2), Grid(z=4)]


@pytest.mark.parametrize(
    ("kind", "grids"),
    [
        ("adamw", GRIDS[:3]),
        ("adagrad", GRIDS[:2]),
        *(pytest.param(kind, GRIDS, marks=pytest.mark.slow) for kind in OPTIMIZERS),
    ],
)
def test_any_grid_resumes_from_any_other(tmp_path, kind, grids):
    run_ranks(from_grid_to_grid, 4, tmp_path, kind, grids)
    # One process reads it, too.
    model = odd(1)
    optimizer = OPTIMIZERS[kind](model.parameters())
    load_sharded(model, tmp_path / "0", optimizer=optimizer)
    truth = odd(0)
    its = OPTIMIZERS[kind](truth.parameters())
    for _ in range(2):
        step(truth, its)
    step(model, optimizer)
    for name, value in truth.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-9, atol=1e-10, msg=name)


UNSTEPPED = {
    **OPTIMIZERS,
    "adafactor": lambda parameters: Adafactor(parameters, lr=0.1, relative_step=False, scale_parameter=False),
}


def after_a_step(kind: str) -> dict[str, torch.Tensor]:
    model = odd(0)
    step(model, UNSTEPPED[kind](model.parameters()))
    return values(model)


def saved_before_a_step(folder: Path, truths: dict[str, dict[str, torch.Tensor]]) -> None:
    for kind, truth in truths.items():
        model, _ = parallelize(odd(0), Grid(z=2))
        other, _ = parallelize(odd(1), Grid(x=2))
        optimizer, resumed = (UNSTEPPED[kind](each.parameters()) for each in (model, other))
        save_sharded(model, folder / kind, optimizer=optimizer)
        load_sharded(other, folder / kind, optimizer=resumed)
        for each, updates in ((model, optimizer), (other, resumed)):
            step(each, updates)
            for name, value in values(each).items():
                torch.testing.assert_close(value, truth[name], rtol=1e-10, atol=1e-12, msg=f"{name}, {kind}")


def test_a_save_before_the_first_step_counts_none(tmp_path):
    """Both the run that goes on and one that is resumed, as where fp16 has skipped the first step."""
    run_ranks(saved_before_a_step, 2, tmp_path, {kind: after_a_step(kind) for kind in UNSTEPPED})


def save_model(folder: Path) -> None:
    model, _ = parallelize(tiny_model("smollm2", dtype=torch.bfloat16), Grid(z=2, x=2))
    save_sharded(model, folder / "with", optimizer=torch.optim.AdamW(model.parameters()))
    save_sharded(model, folder / "without")
    model(**tiny_batch(4, 8)).loss.backward()
    save_sharded(model, folder / "with")  # over one with an optimizer
    save_sharded(parallelize(unplanned_model(), Grid(z=2, x=2))[0], folder / "own")
    if dist.get_rank() == 1:  # alone, as a script's main process, while the others are elsewhere
        found = AutoModelForCausalLM.from_pretrained(folder / "with")
        truth = tiny_model("smollm2", dtype=torch.bfloat16)
        assert found.dtype == torch.bfloat16 and found.state_dict().keys() == truth.state_dict().keys()
        assert all(torch.equal(found.state_dict()[name], value) for name, value in truth.state_dict().items())


def test_what_is_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(UnlistedForCausalLM, "_auto_class", "AutoModelForCausalLM")  # as trust_remote_code does
    run_ranks(save_model, 4, tmp_path)
    manifest = check_complete(tmp_path / "without")
    assert {file_name(rank) for rank in range(4)} <= set(manifest.files)
    assert manifest.tied == ["lm_head.weight"] and not manifest.optimizer
    found = {path.relative_to(tmp_path / "with").as_posix() for path in (tmp_path / "with").rglob("*")}
    assert found == {*manifest.files, "axonn_checkpoint.json"}, "the optimizer of the first save is left"
    # What others read: Transformers, and torch's own reader.
    truth = tiny_model("smollm2", dtype=torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "with", dtype=torch.bfloat16)
    for name, stock in (("with", truth), ("own", unplanned_model())):
        stock.save_pretrained(tmp_path / "stock")
        saved, written = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in (name, "stock"))
        assert saved == written and saved["architectures"] == [type(stock).__name__]
    assert "models.py" in check_complete(tmp_path / "own").files, "the code that auto_map names"
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    state = {name: torch.zeros_like(value) for name, value in truth.state_dict().items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / "with")), no_dist=True)
    for name, value in truth.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value) and torch.equal(state[name], value), name


def test_what_is_refused(tmp_path):
    run_ranks(save_model, 4, tmp_path)
    model = tiny_model("smollm2", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="save_pretrained"):
        save_sharded(model, tmp_path / "plain")
    with pytest.raises(ValueError, match="has no optimizer state"):
        load_sharded(model, tmp_path / "without", optimizer=torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="with the shape"):
        load_sharded(tiny_model("smollm2", hidden_size=72), tmp_path / "without")
    with pytest.raises(ValueError, match="lacks 9 tensors"):
        load_sharded(tiny_model("smollm2", num_hidden_layers=3), tmp_path / "without")
    with pytest.raises(ValueError, match="holds 9 tensors that the model does not have, among them model.layers.1"):
        load_sharded(tiny_model("smollm2", num_hidden_layers=1), tmp_path / "without")
    manifest, values = check_complete(tmp_path / "with"), tmp_path / "with" / "optimizer" / "values.json"
    shutil.copytree(tmp_path / "without", tmp_path / "with", dirs_exist_ok=True)
    for text in ("[", "[]", "[" * 100_000, "{}", '{"param_groups": 3}'):  # with checksums that fit
        values.parent.mkdir(exist_ok=True)
        values.write_text(text)
        files = {**check_complete(tmp_path / "without").files, "optimizer/values.json": checksum_of(values)}
        write_manifest(tmp_path / "with", dataclasses.replace(manifest, files=files))
        with pytest.raises(ValueError, match="values.json (is|holds) no|values.json is of another optimizer"):
            load_sharded(model, tmp_path / "with", optimizer=torch.optim.AdamW(model.parameters()))
    (tmp_path / "with" / "model.safetensors").write_bytes(b"1")
    for load in (
        lambda: load_sharded(model, tmp_path / "with"),
        lambda: from_pretrained(tmp_path / "with", grid=Grid()),
    ):
        with pytest.raises(ValueError, match="model.safetensors holds other weights"):
            load()
    run_ranks(refusals, 2, tmp_path)


def refusals(folder: Path) -> None:
    """Only one rank looks at the damaged file, and all of them refuse before a weight is changed."""
    from hf_axonn.distributed.collectives import barrier, world_rank

    model, _ = parallelize(tiny_model("smollm2", dtype=torch.bfloat16), Grid(x=2))
    before = values(model)
    victim = folder / "without" / file_name(2)
    if world_rank() == 0:
        content = bytearray(victim.read_bytes())
        content[-1] ^= 1
        victim.write_bytes(content)
    barrier()
    with pytest.raises(ValueError, match=f"rank [01]: .*{victim.name} has other content"):
        load_sharded(model, folder / "without")
    barrier()
    if world_rank() == 0:
        shutil.rmtree(folder / "without")
    barrier()
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        load_sharded(model, folder / "without")
    assert all(torch.equal(value, before[name]) for name, value in values(model).items())
