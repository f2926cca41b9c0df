"""Accelerate over pipe: a loop as scripts write it equals one process, and ranks of pipe share samples."""

from __future__ import annotations

import gc

import pytest
import torch
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, TorchDynamoPlugin
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from hf_axonn import Grid, parallelize, sync_gradients
from hf_axonn.config import AxonnConfig
from hf_axonn.engine.dtensors import local
from tests.helpers.float64 import Float64, relative_errors
from tests.helpers.models import tiny_model
from tests.helpers.ranks import refused, run_ranks
from tests.helpers.training import collate, new_accelerator, token_data


ROWS = 16
MAX_NORM = 0.01
CLIPS = {"llama": 2, "smollm2": 1, "qwen3": float("inf")}


def loop(grid: Grid | None, kind: str) -> dict:
    """Losses, norms before clipping, and the parameters of this rank after a few steps."""
    accelerator = new_accelerator(grid, gradient_accumulation_plugin=GradientAccumulationPlugin(2))
    samples = accelerator.num_processes
    model = tiny_model(kind).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    loader = DataLoader(token_data(ROWS, seed=2), batch_size=4 // samples, collate_fn=collate)
    optimizer, model, loader = accelerator.prepare(optimizer, model, loader)
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert trained == {id(parameter) for parameter in model.parameters()}, "nothing of other stages"
    losses, norms = [], []
    with Float64():
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch, num_items_in_batch=50).loss * samples
                losses.append(float(accelerator.gather(loss.detach()).mean()))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type=CLIPS[kind])
                    assert type(norm) is torch.Tensor
                    norms.append(norm.item())
                optimizer.step()
                optimizer.zero_grad()
    parameters = {name: value.detach() for name, value in accelerator.unwrap_model(model).named_parameters()}
    return {"losses": losses, "norms": norms, "parameters": parameters}


def _loops(grids: list[Grid], truths: dict[str, dict]) -> None:
    for grid in grids:
        for kind, truth in truths.items():
            ours = loop(grid, kind)
            for numbers in ("losses", "norms"):
                assert ours[numbers] == pytest.approx(truth[numbers], rel=1e-10), (grid, kind, numbers)
            parameters = {name: truth["parameters"][name] for name in ours["parameters"]}
            assert len(parameters) < len(truth["parameters"]), "each rank has its own layers only"
            errors = relative_errors(ours["parameters"], parameters)
            assert max(errors.values()) < 1e-10, (grid, kind, errors)


@pytest.fixture(scope="module")
def truths() -> dict[str, dict]:
    return {kind: loop(None, kind) for kind in CLIPS}


def _norms_of_a_bare_loop(truth: dict[str, float]) -> None:
    """`clip_grad_norm_` that a loop without Accelerate has imported before there was a pipeline."""
    batch = collate([token_data(4, seed=4)[row] for row in range(4)])
    for kind, norm_type in (("smollm2", 2.0), ("llama", float("inf"))):
        model, _ = parallelize(tiny_model(kind).train(), Grid(pipe=2))
        with Float64():
            model(**batch).loss.backward()
        sync_gradients(model)
        norm = clip_grad_norm_(model.parameters(), truth[kind] / 2, norm_type)
        assert float(norm) == pytest.approx(truth[kind], rel=1e-10)
        assert float(clip_grad_norm_(model.parameters(), 1e9, norm_type)) == pytest.approx(truth[kind] / 2, rel=1e-4)
        embedding = model.get_input_embeddings().weight  # of the first stage; the other one has nothing to give
        part = torch.nn.utils.get_total_norm([embedding.grad] if mesh_place(model) == 0 and kind == "llama" else [])
        assert (float(part) > 0) == (kind == "llama")
        broken = list(model.parameters())[-1]
        if mesh_place(model) == 1:
            local(broken.grad).fill_(float("nan"))
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(model.parameters(), 1.0, norm_type, error_if_nonfinite=True)
        del model
        gc.collect()
    plain = torch.nn.Linear(2, 2)
    plain(torch.ones(1, 2)).sum().backward()
    assert float(clip_grad_norm_(plain.parameters(), 1e9)) == pytest.approx(6**0.5)


def mesh_place(model) -> int:
    return model.axonn.grid_mesh.index("pipe")


def test_the_norm_of_a_bare_loop_is_of_all_stages():
    truth, batch = {}, collate([token_data(4, seed=4)[row] for row in range(4)])
    for kind, norm_type in (("smollm2", 2.0), ("llama", float("inf"))):
        model = tiny_model(kind).train()
        with Float64():
            model(**batch).loss.backward()
        truth[kind] = float(clip_grad_norm_(model.parameters(), 1e9, norm_type))
    run_ranks(_norms_of_a_bare_loop, 2, truth)


def _few_rows() -> None:
    """Batches that have fewer rows than stages, or a number that the schedule cannot divide."""
    for kind, rows in (("llama", 1), ("smollm2", 5)):
        batch = collate([token_data(rows, seed=4)[row] for row in range(rows)])
        plain, (model, _) = tiny_model(kind).train(), parallelize(tiny_model(kind).train(), Grid(pipe=2))
        with Float64():
            losses = [each(**batch).loss for each in (plain, model)]
            for loss in losses:
                loss.backward()
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-12)
        truth = dict(plain.named_parameters())
        ours = {name: its.grad for name, its in model.named_parameters()}
        assert max(relative_errors(ours, {name: truth[name].grad for name in ours}).values()) < 1e-10


def _two(truths: dict[str, dict]) -> None:
    _loops([Grid(pipe=2)], truths)
    _few_rows()
    _refusals()


def test_a_loop_over_two_stages_equals_one_process(truths):
    assert all(truth["norms"][0] > MAX_NORM for truth in truths.values())
    run_ranks(_two, 2, truths)


def _refusals() -> None:
    grid = Grid(pipe=2)
    assert "Use bf16" in refused(new_accelerator, grid, mixed_precision="fp16")
    config = AxonnConfig(grid=grid)
    routers = tiny_model("doge", output_router_logits=True)
    assert "Set it to False" in refused(parallelize, routers, grid, config=config)
    model, _ = parallelize(tiny_model("llama"), grid, config=config)
    assert "torch.compile" in refused(model.compile)
    compiling = new_accelerator(grid, dynamo_plugin=TorchDynamoPlugin(backend="eager"))
    assert "torch.compile" in refused(compiling.prepare, model)
    batch = collate([token_data(4, seed=4)[row] for row in range(4)])
    with torch.autocast("cpu", torch.float16):
        assert "Use bfloat16" in refused(model.train(), **batch)


def _shares(grid: Grid) -> None:
    here = grid.coordinates(torch.distributed.get_rank())
    place = here["data"] * grid.z + here["z"]
    for dispatch in (False, True):
        accelerator = new_accelerator(grid, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
        assert (accelerator.num_processes, accelerator.process_index) == (grid.dp_size, place)
        loader = accelerator.prepare(DataLoader(torch.arange(11), batch_size=2))
        every, seen = [], []
        for batch in loader:
            seen.append(batch)
            every += accelerator.gather_for_metrics(batch).tolist()
        assert every == list(range(11)), (grid, dispatch, every)
        assert seen[0].tolist() == [2 * place, 2 * place + 1], (grid, dispatch)
    assert accelerator.gather(torch.tensor(place)).tolist() == list(range(grid.dp_size))
    assert accelerator.gather_for_metrics([f"of {place}"]) == [f"of {each}" for each in range(grid.dp_size)]
    total = torch.tensor(10.0**place)
    assert float(accelerator.reduce(total)) == sum(10.0**each for each in range(grid.dp_size))
    assert float(accelerator.reduce(total, "mean")) == sum(10.0**each for each in range(grid.dp_size)) / grid.dp_size
    model, _ = parallelize(tiny_model("llama"), grid, config=AxonnConfig(grid=grid))
    batch = {
        name: value + here["pipe"] * (name == "labels")
        for name, value in collate([token_data(2, seed=4)[0]] * 2).items()
    }
    message = "were not given the same"
    with pytest.raises(ValueError, match=message):
        model.train()(**batch)


def _four(truths: dict[str, dict]) -> None:
    for grid in (Grid(pipe=2, z=2), Grid(data=2, pipe=2), Grid(pipe=2, x=2)):
        _shares(grid)
    _loops([Grid(pipe=2, z=2)], {kind: truths[kind] for kind in ("llama", "smollm2")})


def test_loaders_gather_and_a_loop_on_four_ranks(truths):
    run_ranks(_four, 4, truths)
