"""AxonnPlugin with a plain Accelerate loop: equal to one process, nothing gathered twice, wrong use refused."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, TorchDynamoPlugin
from torch.utils.data import DataLoader, IterableDataset

from hf_axonn import AxonnPlugin, AxonnStrategy, Grid, auto_parallelize, from_pretrained, parallelize
from hf_axonn.config import VARIABLE, AxonnConfig, Overlap
from tests.helpers.float64 import Float64
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import collate, token_data


GRIDS = [Grid(z=2, x=2), Grid(data=2, y=2)]


def loop(plugin: AxonnPlugin | None, *, model=None, steps: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A loop as one writes it: (norms before clipping, parameters afterwards). The optimizer comes before prepare."""
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, parallelism_config=plugin, gradient_accumulation_steps=2)
    model = (model or tiny_model("llama")).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    samples = plugin.grid.dp_size if plugin else 1
    loader = DataLoader(token_data(24, seed=2), batch_size=4 // samples, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    norms = []
    with Float64():
        for batch in loader:
            with accelerator.accumulate(model):
                # The rows of a batch differ in length: a sum over a known count does not depend on how they are cut.
                loss = model(**batch, num_items_in_batch=50).loss * samples
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
            if len(norms) == steps:
                break
    values = {name: value.detach() for name, value in accelerator.unwrap_model(model).named_parameters()}
    return norms, {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in values.items()}


@pytest.fixture(scope="module")
def truth():
    return loop(None)


def test_a_plain_loop_equals_one_process(truth, tmp_path):
    """With a model that is sharded when it comes; test_accelerator_training.py has those that are not."""
    tiny_model("llama").save_pretrained(tmp_path)
    run_ranks(_loops, 4, truth, tmp_path)


def _loops(truth, folder) -> None:
    for grid in GRIDS:
        model = from_pretrained(folder, grid=grid, dtype=torch.float64)
        # Plain loading computes the rotary frequencies in float32, so must the truth.
        model.model.rotary_emb.inv_freq = tiny_model("llama").model.rotary_emb.inv_freq
        norms, parameters = loop(AxonnPlugin(grid=grid), model=model)
        assert norms == pytest.approx(truth[0], rel=1e-9)
        for name, value in parameters.items():
            difference = float((value - truth[1][name]).abs().max())
            assert difference < 1e-9, (grid, name, difference)


def test_gathering_takes_each_sample_once():
    run_ranks(_gather, 4)


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(16))


def _gather() -> None:
    for grid in GRIDS:
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(cpu=True, parallelism_config=AxonnPlugin(grid=grid))
        for dataset, size in ((torch.arange(11), 11), (Numbers(), 16)):
            loader = accelerator.prepare(DataLoader(dataset, batch_size=2))
            seen = [accelerator.gather_for_metrics(batch) for batch in loader]
            assert sorted(torch.cat(seen).tolist()) == list(range(size))
        place = grid.coordinates(torch.distributed.get_rank())
        sample = place["data"] * grid.z + place["z"]
        assert accelerator.gather(torch.tensor([sample, 7])).tolist() == [0, 7, 1, 7]
        assert accelerator.gather(torch.tensor(sample)).tolist() == [0, 1]
        assert accelerator.gather_for_metrics([f"text {sample}"], use_gather_object=True) == ["text 0", "text 1"]
        nested = accelerator.gather({"a": (torch.tensor([sample]),)})
        assert nested["a"][0].tolist() == [0, 1]


def test_what_is_not_supported_is_refused_by_name():
    run_ranks(_refusals, 2)


def _refusals() -> None:
    def accelerator(grid: Grid | None = None, async_save: bool = False, **options) -> Accelerator:
        AcceleratorState._reset_state(True)
        plugin = AxonnPlugin(grid=grid or Grid(x=2), async_save=async_save)
        return Accelerator(cpu=True, parallelism_config=plugin, **options)

    with pytest.raises(ValueError, match="= 4, but 2 process"):
        accelerator(Grid(x=4))
    with pytest.raises(ValueError, match="mixed_precision=fp16 is not possible over a grid with pipe"):
        accelerator(Grid(pipe=2), mixed_precision="fp16")
    with pytest.raises(ValueError, match="alike: axonn_config.async_save is false on rank 0, true on rank 1. Start"):
        accelerator(async_save=dist.get_rank() == 1)
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    with pytest.raises(ValueError, match=r"comm_hook=bf16.*: over a grid gradients are averaged without"):
        accelerator(kwargs_handlers=[hook])
    accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    with pytest.raises(ValueError, match="omit fullgraph"):
        dynamo = TorchDynamoPlugin(backend="eager", fullgraph=True)
        accelerator(dynamo_plugin=dynamo).prepare(tiny_model("llama"))
    with pytest.raises(ValueError, match="given to accelerator.prepare"):
        accelerator().save_state("anywhere")
    with pytest.raises(ValueError, match="join_uneven_inputs"):
        accelerator().join_uneven_inputs([])
    model = tiny_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss.backward()
    optimizer.step()
    with pytest.raises(ValueError, match="taken steps"):
        accelerator().prepare(model, optimizer)


def test_the_grid_of_the_launch_file(monkeypatch):
    monkeypatch.setenv(VARIABLE, json.dumps({"grid": {"z": 2, "x": 2}, "overlap": {"all_reduce": False}}))
    plugin = AxonnPlugin()
    assert plugin.grid == Grid(z=2, x=2) and not plugin.config.overlap.all_reduce
    assert (plugin.tp_size, plugin.dp_shard_size, plugin.dp_replicate_size) == (2, 2, 1)
    with pytest.raises(ValueError, match="write layout there, under axonn_config"):
        AxonnPlugin(layout="token")
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ValueError, match="accelerate launch --config axonn.yaml"):
        AxonnPlugin()


def test_a_grid_in_the_code_that_the_launch_file_contradicts(monkeypatch):
    """Whatever takes a grid says so, and before a model is read: there is none of that name."""
    monkeypatch.setenv(VARIABLE, json.dumps({"grid": {"z": 2}, "layout": "token"}))
    monkeypatch.setenv("AXONN_LAUNCH_FILE", "axonn.yaml")
    calls = {
        "AxonnPlugin": lambda grid: AxonnPlugin(grid),
        "from_pretrained": lambda grid: from_pretrained("nowhere", grid=grid),
        "parallelize": lambda grid: parallelize(torch.nn.Linear(2, 2), grid),
        "auto_parallelize": lambda grid: auto_parallelize(grid).__enter__(),
        "the strategy": lambda grid: AxonnStrategy(grid),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"^grid has two values. axonn.yaml: z=2; code, {name}: z=2, x=2. Leave"):
            call(Grid(z=2, x=2))
    assert AxonnPlugin(Grid(z=2)).config == AxonnPlugin().config == AxonnConfig(grid=Grid(z=2), layout="token")
    with pytest.raises(ValueError, match="two grids: grid is data=1,z=2,y=1,x=1, config.grid is data=1,z=1,y=1,x=2"):
        from_pretrained("nowhere", grid=Grid(z=2), config=AxonnConfig(grid=Grid(x=2)))
    monkeypatch.delenv(VARIABLE)
    for call in (lambda: from_pretrained("nowhere"), lambda: parallelize(torch.nn.Linear(2, 2))):
        with pytest.raises(ValueError, match=r"\(\) without a grid takes it from the launch file, but AXONN_CONFIG"):
            call()


def test_the_plugin_takes_every_setting_of_a_launch_file():
    """But for the order of the axes, and for how a script loads, which are of no effect in a script that runs."""
    names = [setting.name for setting in dataclasses.fields(AxonnConfig) if setting.name not in ("order", "load")]
    parameters = inspect.signature(AxonnPlugin).parameters
    assert set(parameters) == set(names) and next(iter(parameters)) == "grid"
    assert parameters["layout"].kind is inspect.Parameter.KEYWORD_ONLY and parameters["layout"].default == "auto"
    assert AxonnPlugin(grid=Grid(z=2)).config == AxonnConfig(grid=Grid(z=2))
    wanted = dict(reduce_dtype="bfloat16", keep_gathered=3, tune_matmuls=True, layout="token", async_save=True)
    wanted |= dict(overlap=Overlap(all_gather=False), save_failure="continue", residual_dtype="bfloat16")
    config = AxonnConfig(grid=Grid(y=2), **wanted)
    assert AxonnPlugin(**{name: getattr(config, name) for name in names}).config == config
    with pytest.raises(ValueError, match="layout is 'tokens', but it is one of auto, token, feature"):
        AxonnPlugin(grid=Grid(y=2), layout="tokens")
    with pytest.raises(TypeError, match=r"AxonnPlugin.__init__\(\) got an unexpected keyword argument 'order'"):
        AxonnPlugin(Grid(y=2), order=("y", "x", "z", "data"))


def test_the_plugin_takes_the_sizes_of_a_parallelism_config(monkeypatch):
    """A launch file lets it replace the ParallelismConfig of a script; and it takes them by itself."""
    assert AxonnPlugin(tp_size=2, dp_shard_size=2, cp_backend="torch").grid == Grid(z=2, x=2)
    assert AxonnPlugin(Grid(x=2), tp_size=2, layout="token").config == AxonnConfig(grid=Grid(x=2), layout="token")
    with pytest.raises(ValueError, match="^ParallelismConfig has tp_size=2, which is the grid .*beside it .*z=2"):
        AxonnPlugin(Grid(z=2), tp_size=2)
    with pytest.raises(ValueError, match=r"ParallelismConfig\(tp_handler=...\) sets what a grid does in its own way"):
        AxonnPlugin(tp_size=2, tp_handler=object())
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2")
    assert AxonnPlugin().grid == Grid(data=2)
    monkeypatch.setenv("AXONN_CONFIG", AxonnConfig(grid=Grid(z=2), layout="token").to_json())
    assert AxonnPlugin().grid == Grid(z=2)  # what the environment has beside it is refused with the Accelerator
    assert AxonnPlugin(dp_shard_size=2).config.layout == "token"
    with pytest.raises(ValueError, match="grid has two values. .*: z=2; code, AxonnPlugin: x=2"):
        AxonnPlugin(tp_size=2)


def test_a_plugin_survives_pickle_and_copy():
    plugin = AxonnPlugin(grid=Grid(z=2), reduce_dtype="bfloat16", layout="token", save_failure="continue")
    for twin in (pickle.loads(pickle.dumps(plugin)), copy.deepcopy(plugin)):
        assert twin.config == plugin.config and twin.dp_shard_size == 2


def test_a_grid_of_one_rank_is_stock_accelerate():
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, parallelism_config=AxonnPlugin(grid=Grid()))
    model = accelerator.prepare(tiny_model("llama"))
    assert not hasattr(model, "axonn") and "prepare" not in vars(accelerator)
