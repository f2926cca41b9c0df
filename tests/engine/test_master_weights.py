"""Under mixed precision a model that is trained has float32 weights, whoever makes its optimizer, and no other has."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from hf_axonn import AxonnPlugin, GoldfishConfig, GoldfishTrainer, Grid, from_pretrained
from hf_axonn.config import AxonnConfig
from hf_axonn.engine import master_weights
from hf_axonn.engine.dtensors import whole
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import collate, token_data


STEPS, RATE = 8, 2e-5
HALF, FULL = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint in bfloat16, as most are."""
    folder = tmp_path_factory.mktemp("half")
    tiny_model("qwen3", dtype=HALF).save_pretrained(folder)
    return folder


def dtypes(model) -> set[torch.dtype]:
    found = {parameter.dtype for parameter in model.parameters()}
    assert {whole(each).dtype for each in model.parameters()} == found, "a shard has another dtype than its parameter"
    return found


def values(model) -> dict[str, torch.Tensor]:
    return {name: whole(value.detach()).double() for name, value in model.named_parameters()}


def equal(model, other) -> bool:
    expected = values(other)
    return all(torch.equal(value, expected[name]) for name, value in values(model).items())


def moved(model, before: dict[str, torch.Tensor]) -> tuple[float, float]:
    """The share of all weights that have changed, and that of the final norm."""
    changed = {name: (value != before[name]).flatten() for name, value in values(model).items()}
    norm = [flags for name, flags in changed.items() if name.endswith("model.norm.weight")]
    return float(torch.cat([*changed.values()]).float().mean()), float(torch.cat(norm).float().mean()) if norm else 1.0


def heard() -> list[str]:
    """What is said of weights in half precision from here on."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    master_weights.logger.addHandler(handler)
    master_weights._warn.cache_clear()
    return messages


def trainer_of(model, where, plugin=None, **options) -> GoldfishTrainer:
    AcceleratorState._reset_state(True)
    defaults = dict(
        output_dir=str(where), use_cpu=True, bf16=True, max_steps=STEPS, learning_rate=RATE, save_strategy="no",
        lr_scheduler_type="constant", report_to=[], disable_tqdm=True, per_device_train_batch_size=2,
    )  # fmt: skip
    args = GoldfishConfig(**defaults | options, parallelism_config=plugin)
    return GoldfishTrainer(model=model, args=args, train_dataset=token_data(60, seed=3), data_collator=collate)


def loop(model, plugin, *, precision="bf16", steps=STEPS, optimizer_first=True):
    """A loop of Accelerate; returns the accelerator, the prepared model and its optimizer."""
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, parallelism_config=plugin)
    batch = collate([token_data(4, seed=5)[index] for index in range(4)])
    if optimizer_first:
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        optimizer, model = accelerator.prepare(optimizer, model.train())
    else:
        model = accelerator.prepare(model.train())
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=RATE))
    for _ in range(steps):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, model, optimizer


def test_one_process(folder, tmp_path):
    """GoldfishTrainer and Accelerate on one process: every weight moves at 2e-5; a model that comes in bfloat16 does
    not, and that is told of once."""
    messages = heard()
    model = from_pretrained(str(folder), grid=Grid())
    assert dtypes(model) == {HALF}, "nobody has said that it will be trained"
    before = values(model)
    trainer = trainer_of(model, tmp_path)
    trainer.train()
    assert dtypes(model) == {FULL}
    assert min(moved(model, before)) > 0.95 and not messages

    model = from_pretrained(str(folder), grid=Grid())
    loop(model, AxonnPlugin(grid=Grid()), steps=1)
    assert dtypes(model) == {FULL} and not messages

    for plain in (AutoModelForCausalLM.from_pretrained(folder), from_pretrained(str(folder), grid=Grid(), dtype=HALF)):
        trainer_of(plain, tmp_path).train()
        assert dtypes(plain) == {HALF}
        share, norm = moved(plain, before)
        assert share < 0.7 and norm == 0, "then there would be nothing to warn of"
        assert len(messages) == 1 and "bfloat16" in messages[0] and "dtype=torch.float32" in messages[0]

    messages.clear()
    master_weights._warn.cache_clear()
    model = from_pretrained(str(folder), grid=Grid())
    trainer_of(model, tmp_path, bf16=False, max_steps=1).train()
    assert dtypes(model) == {HALF} and len(messages) == 1, "without mixed precision nothing is changed"

    messages.clear()
    master_weights._warn.cache_clear()
    model = from_pretrained(str(folder), grid=Grid()).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model(**collate([token_data(1, seed=5)[0]])).loss.backward()
    optimizer.step()
    assert len(messages) == 1, "nor in a loop of one's own, which is told at its first step"


def test_the_checkpoint_of_a_run_and_its_continuation_are_float32(folder, tmp_path):
    """A run that resumes reads float32 weights into float32 ones, and goes on to the bit as the one that did not."""
    model = from_pretrained(str(folder), grid=Grid())
    trainer_of(model, tmp_path, max_steps=4, save_strategy="steps", save_steps=2).train()
    assert equal(AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4"), model)
    again = from_pretrained(str(folder), grid=Grid())
    trainer_of(again, tmp_path, max_steps=4).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert equal(again, model)


def check_grid(folder, where) -> None:
    messages = heard()
    kept = dict(residual_dtype="bfloat16", keep_gathered="all")
    for grid, settings in ((Grid(z=2), kept), (Grid(pipe=2), {})):
        config = AxonnConfig(grid=grid, **settings)
        found = []
        for asked, first in ((None, True), (None, False), (FULL, True)):
            model = from_pretrained(str(folder), grid=grid, config=config, dtype=asked)
            assert dtypes(model) == {asked or HALF}
            before = values(model)
            loop(model, AxonnPlugin(grid=grid, **settings), optimizer_first=first, steps=STEPS if grid.z > 1 else 2)
            assert dtypes(model) == {FULL}
            found.append(model)
            assert grid.z == 1 or min(moved(model, before)) > 0.95
        assert equal(found[0], found[2]) and equal(found[1], found[2]), grid
        assert not messages, "of float32 weights there is nothing to say"


def test_a_loop_of_accelerate_on_a_grid(folder, tmp_path):
    """The optimizer before `prepare` and after it; the numbers are those of a model that was loaded in float32."""
    run_ranks(check_grid, 2, folder, tmp_path)


def check_others(folder, where) -> None:
    rank, messages, grid = torch.distributed.get_rank(), heard(), Grid(z=2)
    plugin = AxonnPlugin(grid=grid)
    model = from_pretrained(str(folder), grid=grid)
    trainer = trainer_of(model, where / "other", plugin)
    trainer.evaluate(token_data(4, seed=3))
    model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2)
    reference = from_pretrained(str(folder), grid=grid)
    trainer.accelerator.prepare_model(reference, evaluation_mode=True)
    assert dtypes(model) == {HALF} and dtypes(reference) == {HALF}, "neither is trained"

    adapted = get_peft_model(from_pretrained(str(folder), grid=grid), LoraConfig(r=2, target_modules=["q_proj"]))
    trainer_of(adapted, where / "adapted", plugin, max_steps=1).train()
    of = {
        trained: {each.dtype for each in adapted.parameters() if each.requires_grad == trained} for trained in (0, 1)
    }
    assert of == {0: {HALF}, 1: {FULL}} and not messages

    whole_model = AutoModelForCausalLM.from_pretrained(folder)
    trainer_of(whole_model, where / "whole", plugin, max_steps=1).train()
    assert dtypes(whole_model) == {HALF} and len(messages) == (rank == 0)

    run = where / "run"
    trainer_of(model, run, plugin, max_steps=4, save_strategy="steps", save_steps=2).train()
    assert dtypes(model) == {FULL}
    assert equal(AutoModelForCausalLM.from_pretrained(run / "checkpoint-4"), model)
    assert json.loads((run / "checkpoint-4" / "config.json").read_text())["dtype"] == "float32"
    again = from_pretrained(str(folder), grid=grid)
    trainer_of(again, run, plugin, max_steps=4).train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert equal(again, model)
    piped = from_pretrained(str(folder), grid=Grid(pipe=2))
    resumed = trainer_of(piped, run, AxonnPlugin(grid=Grid(pipe=2)), max_steps=6)
    resumed.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    assert dtypes(piped) == {FULL}

    low = where / "low"  # a run of before: weights and moments in bfloat16
    trainer_of(from_pretrained(str(folder), grid=grid, dtype=HALF), low, plugin, max_steps=2, save_strategy="steps",
               save_steps=2).train()  # fmt: skip
    again = from_pretrained(str(folder), grid=grid)
    resumed = trainer_of(again, low, plugin, max_steps=5)
    resumed.train(resume_from_checkpoint=str(low / "checkpoint-2"))
    moments = [value for state in resumed.optimizer.optimizer.state.values() for value in state.values()]
    assert {each.dtype for each in moments if isinstance(each, DTensor)} == {FULL} and dtypes(again) == {FULL}


def test_models_that_are_not_trained_adapters_and_checkpoints(folder, tmp_path):
    run_ranks(check_others, 2, folder, tmp_path)
