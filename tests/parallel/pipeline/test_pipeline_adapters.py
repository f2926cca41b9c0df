"""PEFT's adapters over pipe against one process, in float64: put in before the model is divided or after."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model

from hf_axonn import Grid, parallelize
from hf_axonn.checkpoint.adapter_files import load_adapters
from hf_axonn.checkpoint.sharded import load_sharded, save_sharded
from hf_axonn.config import AxonnConfig
from hf_axonn.distributed.consistency import gather_texts
from tests.helpers.adapting import adapt
from tests.helpers.equality import exact, rows_of
from tests.helpers.float64 import Float64, relative_errors
from tests.helpers.models import tiny_batch
from tests.helpers.ranks import refused, run_ranks
from tests.helpers.training import make_trainer, numbers, worst_difference
from tests.parallel.pipeline.test_pipeline import BOUND, SCHEDULES, make, steps


# Adapters of a model, by a name of the case.
ADAPTERS = {
    "linears": {},
    "ends": {"target_modules": ["embed_tokens", "q_proj", "lm_head"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj", "down_proj"]},
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "dora": {"use_dora": True, "target_modules": ["q_proj", "down_proj"]},
    "saved": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "norm"]},
}
CASES = [
    ("smollm2", "linears", SCHEDULES[4]),
    ("smollm2", "embedding", {}),
    ("qwen3", "dora", SCHEDULES[3]),
    ("qwen3", "saved", SCHEDULES[2]),
]
# `_after` has adapters on both ends, too.
MORE = [("smollm2", "linears", {}), ("smollm2", "head", SCHEDULES[2]), ("qwen3", "ends", {})]
ROWS = 8
NEW = {"r": 3, "target_modules": ["embed_tokens", "q_proj", "down_proj", "lm_head"]}


def trained(model, grid: Grid | None = None) -> dict:
    batch = tiny_batch(ROWS, 7)
    return steps(model.train(), rows_of(batch, grid, dist.get_rank()) if grid else batch, grid=grid)


def compare(ours: dict, truth: dict, grid: Grid, where: object) -> None:
    losses = ours["losses"].clone()
    dist.all_reduce(losses)
    assert float((losses / grid.size - truth["losses"]).abs().max()) < BOUND, where
    for what in ("gradients", "parameters"):
        assert any("lora_" in name for name in ours[what]), where
        errors = relative_errors(ours[what], {name: truth[what][name] for name in ours[what]})
        assert max(errors.values()) < BOUND, (where, what, max(errors, key=errors.get))


def _before(cases: list, grid: Grid, truths: dict) -> None:
    for kind, adapters, settings in cases:
        config = AxonnConfig(grid=grid, **settings)
        model, _ = parallelize(adapt(make(kind), **ADAPTERS[adapters]), grid, config=config)
        truth = truths[kind, adapters]
        compare(trained(model, grid), truth, grid, (kind, adapters, settings))
        there: list = [set() for _ in range(grid.size)]
        dist.all_gather_object(there, set(model.state_dict()))
        assert set().union(*there) == truth["names"], (kind, adapters)
        if kind == "smollm2" and adapters == "embedding":
            assert "the first and the last stage both have the weight" in refused(model.merge_and_unload)
            names = set(model.unload().state_dict())
            assert "model.embed_tokens.weight" in names and not any("base_layer" in name for name in names)


def _after(folder: Path, grid: Grid) -> None:
    """The adapters of each stage, in files, are those of one process; and come back from them."""
    model, _ = parallelize(make("qwen3"), grid)
    state = torch.get_rng_state()
    model = get_peft_model(model, LoraConfig(**NEW))
    assert len(set(gather_texts(str(torch.get_rng_state().tolist()), "cpu"))) == 1
    assert not torch.equal(state, torch.get_rng_state())
    with torch.no_grad():  # zeros of a new adapter would hide the gradient of its other half
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                own = parameter.to_local()
                own.copy_(torch.arange(own.numel()).sin().view_as(own) / 10)
    model.save_pretrained(folder / "peft")
    save_sharded(model, folder / "sharded")
    on_one = PeftModel.from_pretrained(make("qwen3"), folder / "peft", is_trainable=True)
    both = {name: (value.clone(), None) for name, value in on_one.state_dict().items() if "lora_" in name}
    assert len(both) == 2 * (2 * 4 + 2)
    load_adapters(on_one, folder / "sharded")
    for name, (value, _) in both.items():
        assert torch.equal(on_one.state_dict()[name], value), name
    for read in ("peft", "sharded"):
        again, _ = parallelize(make("qwen3"), grid)
        if read == "peft":
            again = PeftModel.from_pretrained(again, folder / "peft", is_trainable=True)
        else:
            again = get_peft_model(again, LoraConfig(**NEW))
            load_sharded(again, folder / "sharded")
        with torch.no_grad(), exact():
            ids = tiny_batch(ROWS, 7)["input_ids"]
            expected = on_one.eval()(input_ids=ids).logits
            torch.testing.assert_close(again.eval()(input_ids=ids).logits, expected, rtol=BOUND, atol=BOUND)
    compare(trained(model, grid), trained(on_one), grid, "after")
    merged = again.merge_and_unload()
    merged.save_pretrained(folder / "merged")
    with torch.no_grad(), exact():
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=BOUND, atol=BOUND)


def _refusals(grid: Grid) -> None:
    one = refused(get_peft_model, parallelize(make("qwen3"), grid)[0], LoraConfig(target_modules=["lm_head"]))
    assert "at pipe=0 of" in one and "lm_head" in one
    listed = LoraConfig(target_modules=["q_proj"], layers_to_transform=[0])
    both = refused(parallelize, get_peft_model(make("qwen3"), listed), grid)
    assert "of 2 stages over pipe, 1 would have nothing to train" in both


def _two(folder: Path, truths: dict) -> None:
    grid = Grid(pipe=2)
    _before(CASES, grid, truths)
    _after(folder, grid)
    _refusals(grid)


def truths_of(cases: list) -> dict:
    truths = {}
    for kind, which, _ in cases:
        model = adapt(make(kind), **ADAPTERS[which])
        truths[kind, which] = {**trained(model), "names": set(model.state_dict())}
    return truths


def test_adapters_over_two_stages(tmp_path) -> None:
    run_ranks(_two, 2, tmp_path, truths_of(CASES), timeout=300)


@pytest.mark.slow
def test_more_adapters_over_two_stages() -> None:
    run_ranks(_before, 2, MORE, Grid(pipe=2), truths_of(MORE), timeout=300)


def _four(folder: Path, truths: dict) -> None:
    for grid in (Grid(pipe=2, x=2), Grid(pipe=2, z=2), Grid(pipe=2, y=2)):
        _before(CASES[-2:], grid, truths)
    _after(folder, Grid(pipe=2, x=2))


@pytest.mark.slow
def test_adapters_with_other_axes(tmp_path) -> None:
    run_ranks(_four, 4, tmp_path, truths_of(CASES[-2:]), timeout=300)


OPTIONS = dict(max_steps=4, eval_steps=4, save_steps=2, save_strategy="steps", gradient_accumulation_steps=4)


def fine_tuned(output: Path, grid: Grid | None, **more) -> tuple[list[dict], dict[str, torch.Tensor]]:
    trainer = make_trainer(output, grid, model=adapt(make("qwen3")), per_device_train_batch_size=2, **OPTIONS)
    with Float64():
        trainer.train(**more)
    history = [entry for entry in numbers(trainer.state.log_history) if "train_loss" not in entry]  # since the start
    return history, {name: its.detach() for name, its in trainer.model.named_parameters()}


def _trainer(folder: Path, truth: tuple) -> None:
    """A Trainer's run, and one that goes on from its second step on one process's checkpoint, and the other way."""
    grid = Grid(pipe=2)
    for output, more in (("grid", {}), ("on", {"resume_from_checkpoint": folder / "one/checkpoint-2"})):
        history, parameters = fine_tuned(folder / output, grid, **more)
        assert worst_difference(history, truth[0]) < BOUND
        assert max(relative_errors(parameters, {name: truth[1][name] for name in parameters}).values()) < BOUND


def test_trainer_over_pipe(tmp_path) -> None:
    truth = fine_tuned(tmp_path / "one", None)
    run_ranks(_trainer, 2, tmp_path, truth, timeout=300)
    history, parameters = fine_tuned(tmp_path / "back", None, resume_from_checkpoint=tmp_path / "grid/checkpoint-2")
    assert worst_difference(history, truth[0]) < BOUND
    assert max(relative_errors(parameters, truth[1]).values()) < BOUND
