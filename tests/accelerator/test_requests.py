"""A request without effect over a grid is refused, with the names of both; so are two grids in one run."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    TorchTensorParallelPlugin,
)
from transformers import Trainer, TrainingArguments

from hf_axonn import AxonnConfig, AxonnPlugin, Grid, parallelize
from hf_axonn.accelerator.requests import ENGINES, _check_accelerator, refuse_other_engines
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import collate, token_data


@pytest.mark.parametrize("variable", ENGINES)
def test_the_environment_of_another_engine(variable):
    with pytest.raises(ValueError, match=rf"{variable}=True asks for .*, and AxonnPlugin for the grid .*z=2"):
        refuse_other_engines(Grid(z=2), {variable: "True"})
    refuse_other_engines(Grid(z=2), {variable: "false"})


def test_an_environment_that_came_later_is_read(monkeypatch):
    """As after `map(num_proc=...)` of datasets, which puts a copy in the place of os.environ."""
    config = AxonnConfig(grid=Grid(z=2))
    monkeypatch.setattr(os, "environ", {"AXONN_CONFIG": config.to_json(), "ACCELERATE_USE_FSDP": "true"})
    assert AxonnConfig.from_env() == config
    with pytest.raises(ValueError, match="ACCELERATE_USE_FSDP=true asks for"):
        refuse_other_engines(config.grid)
    monkeypatch.setattr(os, "environ", {"PARALLELISM_CONFIG_TP_SIZE": "2"})
    with pytest.raises(ValueError, match="tp_size=2"):
        refuse_other_engines(config.grid)


def test_the_mixed_precision_of_a_notebook_is_in_effect_or_refused(monkeypatch):
    """TrainingArguments from before the launch have a precision of their own, which Trainer gives its Accelerator."""
    monkeypatch.setenv("AXONN_LAUNCH_FILE", "notebook_launcher")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    _check_accelerator(SimpleNamespace(mixed_precision="bf16"), {})
    with pytest.raises(ValueError, match="mixed_precision='bf16', .* 'no': make TrainingArguments in the function"):
        _check_accelerator(SimpleNamespace(mixed_precision="no"), {})


def test_sizes_of_accelerates_own_parallelism():
    environment = {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2", "PARALLELISM_CONFIG_TP_SIZE": "1"}
    refuse_other_engines(Grid(z=2), environment)
    message = r"the environment \(PARALLELISM_CONFIG_\*\) has dp_shard_size=2, which is the grid .*z=2.*the grid .*x=2"
    with pytest.raises(ValueError, match=message):
        refuse_other_engines(Grid(x=2), environment)


def refused(function, *arguments, **options) -> str:
    try:
        function(*arguments, **options)
    except ValueError as error:
        return str(error)
    raise AssertionError("it was accepted")


def fresh(**options) -> Accelerator:
    AcceleratorState._reset_state(True)
    return Accelerator(cpu=True, **options)


def check_accelerators() -> None:
    plugin, other = AxonnPlugin(grid=Grid(z=2)), AxonnPlugin(grid=Grid(x=2))
    message = refused(fresh, parallelism_config=plugin, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    assert "fsdp_plugin" in message and "z=2" in message
    del os.environ["ACCELERATE_USE_FSDP"]
    message = refused(fresh, parallelism_config=plugin, torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))
    assert "torch_tp_plugin" in message
    harmless = DistributedDataParallelKwargs(find_unused_parameters=True, static_graph=True, broadcast_buffers=False)
    fresh(parallelism_config=plugin, kwargs_handlers=[harmless])

    fresh(parallelism_config=plugin)
    second = Accelerator(cpu=True)
    assert second.axonn_plugin is plugin and Accelerator(parallelism_config=AxonnPlugin(grid=Grid(z=2))).axonn_plugin
    message = refused(Accelerator, cpu=True, parallelism_config=other)
    assert "x=2" in message and "z=2" in message and "first Accelerator" in message
    fresh()
    message = refused(Accelerator, cpu=True, parallelism_config=other)
    assert "x=2" in message and "has no grid" in message

    model, _ = parallelize(tiny_model("llama", dtype=torch.float32), Grid(x=2))
    accelerator = fresh(parallelism_config=plugin)
    message = refused(accelerator.prepare, model)
    assert "the model lies on the grid" in message and "x=2" in message and "z=2" in message
    ids = torch.full((2, 4), 5 + accelerator.process_index)
    message = refused(model.train(), input_ids=ids, labels=ids)
    assert (
        f"the grid {Grid(x=2)}, but samples are divided by that of this process's Accelerator, {Grid(z=2)}" in message
    )
    accelerator = fresh(parallelism_config=AxonnPlugin(grid=Grid(x=2), reduce_dtype="bfloat16", async_save=True))
    message = refused(accelerator.prepare, model)
    assert "AxonnPlugin(reduce_dtype='bfloat16') has no effect" in message and "plugin.config" in message
    fresh(parallelism_config=AxonnPlugin(grid=Grid(x=2), async_save=True)).prepare(model)


def test_accelerators(tmp_path):
    run_ranks(check_accelerators, 2)


def check_trainers(where) -> None:
    options = dict(output_dir=str(where), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no")
    model, _ = parallelize(tiny_model("llama", dtype=torch.float32), Grid(x=2))
    data = dict(train_dataset=token_data(8, seed=3), data_collator=collate)
    plugin = AxonnPlugin(grid=Grid(z=2))
    for asked in ({}, {"fsdp": True}, {"fsdp_config": {"min_num_params": 1}}):
        args = TrainingArguments(**options, **asked, parallelism_config=plugin)
        given = tiny_model("llama", dtype=torch.float32) if asked else model
        message = refused(Trainer, model=given, args=args, **data)
        os.environ.pop("ACCELERATE_USE_FSDP", None)
        assert "z=2" in message and (asked or "x=2" in message), message
        assert all(name in message for name in asked)
    args = TrainingArguments(
        **options, ddp_find_unused_parameters=True, ddp_bucket_cap_mb=5, parallelism_config=plugin
    )
    Trainer(model=tiny_model("llama", dtype=torch.float32), args=args, **data)


def test_trainers(tmp_path: Path):
    run_ranks(check_trainers, 2, tmp_path)
