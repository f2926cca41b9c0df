"""Folders that stock FSDP2 and Transformers' tensor parallelism wrote: a grid resumes from them, equal to the bit."""

from __future__ import annotations

import functools
import pathlib
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from transformers import AutoModelForCausalLM
from transformers.distributed.checkpoint import save_optimizer_distributed

from hf_axonn import Grid, export_hf, parallelize
from hf_axonn.checkpoint.single_process import load_plain_optimizer, load_plain_weights
from hf_axonn.checkpoint.torch_folders import MODEL, read_torch_folder
from tests.benchmarks.peers.contenders import fully_sharded
from tests.helpers.adapting import adapted_model
from tests.helpers.equality import full
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks


make = functools.partial(tiny_model, "llama", dtype=torch.float32)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
WHOLE = StateDictOptions(flatten_optimizer_state_dict=True, full_state_dict=True, cpu_offload=True)


def make_adapted(**options):
    """A whole module is trained beside the adapters."""
    sizes = {"dtype": torch.float32, "seed": 3}
    return adapted_model("llama", sizes, **{"modules_to_save": ["lm_head"], **options})


def adamw(model) -> torch.optim.AdamW:
    """Two groups, as Trainer makes them, with other settings than AdamW's own."""
    parameters = list(model.parameters())
    groups = [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2], "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9))


def train(model, optimizer) -> None:
    for _ in range(2):
        model(**tiny_batch(2, 6)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def keep_truth(model, optimizer, file: Path) -> None:
    weights, moments = get_state_dict(model, optimizer, options=WHOLE)
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optimizer": moments}, file)


def write_as_others(folder: Path) -> None:
    """Accelerate's own functions write what FSDP2 holds; Transformers' what tensor parallelism holds."""
    PartialState()  # which Accelerate's logger asks
    model = fully_sharded(make(seed=3).train())
    optimizer = adamw(model)
    train(model, optimizer)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = SimpleNamespace(process_index=dist.get_rank(), num_processes=2, is_fsdp2=True)
    save_fsdp_model(plugin, accelerator, model, folder / "fsdp2")
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder / "fsdp2")
    keep_truth(model, optimizer, folder / "fsdp2.pt")

    model = AutoModelForCausalLM.from_pretrained(folder / "start", tp_plan="auto").train()
    optimizer = adamw(model)
    train(model, optimizer)
    model.save_pretrained(folder / "tp")
    save_optimizer_distributed(model, optimizer, folder / "tp" / "optimizer")
    keep_truth(model, optimizer, folder / "tp.pt")

    adapted = make_adapted().train()
    fully_sharded(adapted.get_base_model())
    optimizer = torch.optim.AdamW([each for each in adapted.parameters() if each.requires_grad], lr=1e-2)
    train(adapted, optimizer)
    for name, alone in (("adapters", True), ("beside", False)):  # Trainer's form, and that of `save_state`
        save_fsdp_model(plugin, accelerator, adapted, folder / name, adapter_only=alone)
        save_fsdp_optimizer(plugin, accelerator, optimizer, adapted, folder / name)
    keep_truth(adapted, optimizer, folder / "adapted.pt")


def resume_adapters(folder: Path) -> None:
    truth = torch.load(folder / "adapted.pt")
    for grid in (Grid(x=2), Grid(z=2)):
        for source in ("adapters", "beside"):
            model = make_adapted().train()
            for each in model.parameters():
                if each.requires_grad:
                    torch.nn.init.constant_(each, 7.0)
            parallelize(model, grid)
            optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=7.0)
            load_plain_weights(model, folder / source)
            load_plain_optimizer(model, optimizer, folder / source)
            trained = 0
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    trained += 1
                    assert torch.equal(full(parameter), truth["model"][name]), (source, name)
                    for key in ("exp_avg", "exp_avg_sq"):
                        known = truth["optimizer"][f"state.{name}.{key}"]
                        assert torch.equal(full(optimizer.state[parameter][key]), known), (source, name, key)
            assert trained > 3 and optimizer.param_groups[0]["lr"] == 1e-2
    other = parallelize(make_adapted(r=5), Grid(x=2))[0]
    for source in ("adapters", "beside"):
        with pytest.raises(ValueError, match=r"with the shape .*: adapters of another rank"):
            load_plain_weights(other, folder / source)
    fewer = parallelize(make_adapted(modules_to_save=None), Grid(x=2))[0]
    with pytest.raises(ValueError, match="holds other adapters than the model has"):
        load_plain_weights(fewer, folder / "adapters")
    with pytest.raises(ValueError, match=r"holds base_model\..*lm_head.* that the model does not have"):
        load_plain_weights(fewer, folder / "beside")


def resume(folder: Path) -> None:
    for grid in (Grid(x=2), Grid(z=2)):
        for source in ("fsdp2", "tp"):
            model, _ = parallelize(make(seed=5).train(), grid)
            optimizer = adamw(model)
            for group in optimizer.param_groups:
                group.update(lr=7.0, betas=(0.1, 0.2), weight_decay=3.0)  # until those of the folder are there
            load_plain_weights(model, folder / source)
            load_plain_optimizer(model, optimizer, folder / source)
            truth = torch.load(folder / f"{source}.pt")
            weights, moments = get_state_dict(model, optimizer, options=FLAT)
            for found, known in ((weights, truth["model"]), (moments, truth["optimizer"])):
                assert found.keys() == known.keys(), source
                for name, value in found.items():
                    same = torch.equal(full(value), known[name]) if torch.is_tensor(value) else value == known[name]
                    assert same, (source, name)
        with pytest.raises(ValueError, match="FULL_STATE_DICT: save with SHARDED_STATE_DICT"):
            load_plain_weights(model, folder / "whole")
        with pytest.raises(ValueError, match="zero_to_fp32"):
            load_plain_optimizer(model, optimizer, folder / "zero")


@pytest.mark.slow
def test_a_grid_resumes_from_what_others_wrote(tmp_path):
    make(seed=3).save_pretrained(tmp_path / "start")
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "pytorch_model_fsdp.bin").touch()
    (tmp_path / "zero" / "global_step10").mkdir(parents=True)
    run_ranks(write_as_others, 2, tmp_path)
    run_ranks(resume, 2, tmp_path)
    run_ranks(resume_adapters, 2, tmp_path)
    for source in ("adapters", "beside"):
        with pytest.raises(ValueError, match=r"holds adapters \(base_model.* not a whole model"):
            export_hf(tmp_path / source, tmp_path / "nothing")
    export_hf(tmp_path / "fsdp2", tmp_path / "plain")
    make().config.save_pretrained(tmp_path / "plain")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").state_dict()
    truth = torch.load(tmp_path / "fsdp2.pt")["model"]
    assert read.keys() == truth.keys() and all(torch.equal(read[name], truth[name]) for name in truth)


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def test_nothing_of_a_folder_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "folder"
    with monkeypatch.context() as of_python:  # as Python 3.13 names the class of paths
        of_python.setitem(sys.modules, "pathlib._local", pathlib)
        of_python.setattr(pathlib.PosixPath, "__module__", "pathlib._local")
        dcp.save({"model": {"weight": torch.arange(6.0).view(2, 3), "step": 4}}, checkpoint_id=folder, no_dist=True)
    assert b"pathlib._local" in (folder / ".metadata").read_bytes()
    tensors, values = read_torch_folder(folder, MODEL)
    assert torch.equal(tensors["weight"][0:2, 1:3], torch.tensor([[1.0, 2], [4, 5]])) and values["step"]() == 4
    with pytest.raises(ValueError, match=r"no optimizer\.\* among what it names"):
        read_torch_folder(folder, "optimizer.")
    damaged = tensors["weight"].pieces[0]
    file = next(folder.glob("*.distcp"))
    file.write_bytes(pickle.dumps(Evil()) + bytes(file.stat().st_size))
    with pytest.raises(ValueError, match="holds more than tensors and plain values"):
        damaged.read()
    for evil in (pickle.dumps(Evil()), b"", b"\x80"):
        (folder / ".metadata").write_bytes(evil)
        with pytest.raises(ValueError, match="no description of a checkpoint"):
            read_torch_folder(folder, MODEL)
    assert not Path("executed").exists()
