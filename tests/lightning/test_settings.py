"""What a strategy takes and refuses, without processes."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision, Precision
from torch import nn

from hf_axonn import AxonnConfig, AxonnFabricStrategy, AxonnStrategy, Grid
from hf_axonn.engine.master_weights import leave_dtype_open
from hf_axonn.lightning.files import local_path
from hf_axonn.lightning.models import PRECISIONS, check_precision, fit_optimizer, model_inside, put_on_grid, without
from tests.helpers.models import tiny_model
from tests.lightning.runs import Module


STRATEGIES = (AxonnStrategy, AxonnFabricStrategy)
BOTH = pytest.mark.parametrize("strategy", STRATEGIES)


@BOTH
def test_a_grid_in_each_of_its_forms(strategy, monkeypatch):
    assert strategy(z=2, x=2).grid == strategy(Grid(z=2, x=2)).grid == Grid(z=2, x=2)
    config = AxonnConfig(grid=Grid(z=2), reduce_dtype="float64")
    assert strategy(config).config is config
    assert strategy(z=2, reduce_dtype="float64").config == config
    monkeypatch.setenv("AXONN_CONFIG", config.to_json())
    assert strategy().config == config


@BOTH
@pytest.mark.parametrize(
    "arguments, options, message",
    [
        ((), {}, "AXONN_CONFIG, which is not set: write sizes, as in"),
        ((Grid(z=2),), {"x": 2}, "x beside Grid"),
        ((AxonnConfig(grid=Grid(z=2)),), {"async_save": True}, "async_save beside an AxonnConfig"),
        ((), {"pipe": 2}, "pipe=2.* has pipe, which Lightning's loops cannot drive"),
        ((), {"z": 0}, "grid axis z is 0"),
        ((), {"z": 2, "save_failure": "continue"}, "ModelCheckpoint must know"),
        ((AxonnConfig(grid=Grid(z=2), order=("z", "y", "x", "pipe", "data")),), {}, "order is z, y, x, pipe, data"),
    ],
)
def test_what_contradicts_itself_is_refused(strategy, arguments, options, message, monkeypatch):
    monkeypatch.delenv("AXONN_CONFIG", raising=False)
    with pytest.raises(ValueError, match=message):
        strategy(*arguments, **options)


def test_settings_beside_a_launched_grid_are_refused(monkeypatch):
    monkeypatch.setenv("AXONN_CONFIG", AxonnConfig(grid=Grid(z=2)).to_json())
    with pytest.raises(ValueError, match="so omit async_save"):
        AxonnStrategy(async_save=True)


def test_another_number_of_devices_is_refused(tmp_path):
    trainer = L.Trainer(strategy=AxonnStrategy(z=2), devices=1, accelerator="cpu", default_root_dir=tmp_path)
    with pytest.raises(ValueError, match="= 2, but 1 process"):
        trainer.fit(Module(), [])
    with pytest.raises(ValueError, match="= 2, but 1 process"):
        L.Fabric(strategy=AxonnFabricStrategy(z=2), devices=1, accelerator="cpu").launch()


def test_the_model_inside():
    module = Module()
    assert model_inside(module) is model_inside(module.model) is module.model
    module.again = module.model
    assert model_inside(module) is module.model
    with without(module, module.model):
        assert module.model is module.again is None
        assert set(module.state_dict()) == {"scale"}
    assert model_inside(module) is module.model is module.again
    module.teacher = tiny_model("qwen3")
    with pytest.raises(ValueError, match=r"holds 2 models \(LlamaForCausalLM, Qwen3ForCausalLM\)"):
        model_inside(module)
    plain = nn.Sequential(nn.Linear(2, 2))
    assert model_inside(plain, or_all=True) is plain
    with pytest.raises(ValueError, match="Sequential holds no model of Transformers"):
        model_inside(plain)


def put(module: nn.Module, precision: Precision | None = None) -> nn.Module:
    precision = precision or Precision()
    config = AxonnConfig(grid=Grid(z=2))
    return put_on_grid(module, config, torch.device("cpu"), precision=precision, convert=precision.convert_module)


def test_modules_that_cannot_be_sharded_are_refused_before_anything_changes():
    module = Module()
    module.head = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"has 2 trained parameter\(s\) beside its model, among them head.weight"):
        put(module)
    with pytest.raises(ValueError, match=r"HalfPrecision with precision '16-true' is not supported.*bf16-mixed"):
        put(Module(), HalfPrecision("16-true"))
    with pytest.raises(ValueError, match="torch.compile of a whole module"):
        put(torch.compile(Module()))


def test_precisions():
    for name in PRECISIONS:
        check_precision(L.Trainer(precision=name, accelerator="cpu", logger=False).precision_plugin)

    class Own(Precision):
        pass

    with pytest.raises(ValueError, match="Own with precision '32-true' is not supported"):
        check_precision(Own())


def test_optimizers_that_cannot_train_shards_are_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="LBFGS is not supported"):
        fit_optimizer(torch.optim.LBFGS(model.parameters()), model, "32-true")
    with pytest.raises(ValueError, match=r"the optimizer \(SGD\) has no parameter of the model \(Linear\)"):
        fit_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1), model, "32-true")


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", torch.float32), ("32-true", torch.bfloat16), ("bf16-true", torch.bfloat16)]
)
def test_mixed_precision_trains_float32_weights(precision, dtype):
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    leave_dtype_open(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    fit_optimizer(optimizer, model, precision)
    assert {each.dtype for each in optimizer.param_groups[0]["params"]} == {dtype} == {model.weight.dtype}


def test_paths_of_other_file_systems_are_refused(tmp_path):
    assert local_path(str(tmp_path), None) == tmp_path
    for path, options in (("s3://bucket/run", None), (tmp_path, {"anon": True})):
        with pytest.raises(ValueError, match="directories that all ranks write to"):
            local_path(path, options)
