"""QLoRA as users run it, with Trainer, SFTTrainer and an Accelerate loop: on a grid as on one process."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_axonn import Grid, from_pretrained
from hf_axonn.engine.state import parallel_state
from tests.helpers.adapting import adapt
from tests.helpers.chats import EXPERTS, logged, make_sft
from tests.helpers.float64 import Float64, recompute_in_float64
from tests.helpers.four_bit import SIZES, dequantized_model, quantized_model
from tests.helpers.launching import launch, run
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import make_trainer, numbers, worst_difference


pytest.importorskip("bitsandbytes")
SCRIPT = Path(__file__).with_name("qlora_script.py")


def in_four_bits(compute_dtype=torch.float64, *, double=False) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=compute_dtype,
    )


def trained(output, model, grid=None, resume=None):
    """The log of stock Trainer."""
    trainer = make_trainer(output, grid, model=model, save_steps=2, eval_strategy="no", stock=True)
    with Float64():
        trainer.train(resume_from_checkpoint=resume)
    return numbers(trainer.state.log_history)


def prepared(model):
    """As PEFT asks for it, with layers that run again in backward."""
    model = prepare_model_for_kbit_training(model.double())
    for layer in model.model.layers:
        for child in layer.children():
            recompute_in_float64(child)
    return adapt(model)


def _train(folder):
    base, histories = str(folder / "base"), {}
    whole = AutoModelForCausalLM.from_pretrained(base, quantization_config=in_four_bits(), dtype=torch.float32)
    histories["whole"] = trained(folder / "whole", prepared(whole), Grid(data=2, z=2))
    read = functools.partial(from_pretrained, base, quantization_config=in_four_bits(), dtype=torch.float32)
    histories["read"] = trained(folder / "read", prepared(read(grid=Grid(z=2, x=2))), Grid(z=2, x=2))
    again = adapt(read(grid=Grid(y=2, x=2)).double())
    resumed = trained(folder / "again", again, Grid(y=2, x=2), str(folder / "read" / "checkpoint-4"))
    return histories, resumed


@pytest.mark.slow
def test_trainer_is_as_on_one_process(tmp_path):
    """With prepare_model_for_kbit_training, of a whole model and of one read in slices; resumed on another grid."""
    tiny_model("llama", dtype=torch.float32, **SIZES).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=in_four_bits(), dtype=torch.float32
    )
    plain = dequantized_model(base.double())
    del plain.hf_quantizer
    plain.is_quantized = False
    truth = trained(tmp_path / "one", adapt(plain))
    histories, resumed = run_ranks(_train, 4, tmp_path, timeout=600)[0]
    for name, history in histories.items():
        assert worst_difference(history, truth) < 1e-9, name
    assert worst_difference(resumed[:-1], truth[:-1]) < 1e-9
    loaded = [
        PeftModel.from_pretrained(tiny_model("llama", **SIZES), tmp_path / name / "checkpoint-6")
        for name in ("read", "one")
    ]
    for (name, ours), its in zip(loaded[0].named_parameters(), loaded[1].parameters(), strict=True):
        torch.testing.assert_close(ours, its, rtol=1e-7, atol=1e-8, msg=name)


def _mixture(folder):
    model = adapt(quantized_model("qwen3_moe", **EXPERTS))
    history = trained(folder / "ranks", model, Grid(z=2, x=2))
    assert "tokens travel" in parallel_state(model).report.experts
    return history


@pytest.mark.slow
def test_a_mixture_whose_tokens_travel_is_as_on_one_process(tmp_path):
    """Linears in 4 bits, adapters on them, on experts and on routers."""
    truth = trained(tmp_path / "one", adapt(dequantized_model(quantized_model("qwen3_moe", **EXPERTS))))
    for history in run_ranks(_mixture, 4, tmp_path, timeout=400):
        assert worst_difference(history, truth) < 1e-9


def _chat(folder, output, grid=None, *, read=False):
    """A few steps of TRL's own SFTTrainer, which makes the adapters and casts them to bfloat16."""
    options = {"quantization_config": in_four_bits(torch.float32, double=True), "dtype": torch.float32}
    base = str(folder / "base")
    model = (
        from_pretrained(base, grid=grid, **options) if read else AutoModelForCausalLM.from_pretrained(base, **options)
    )
    adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(5)
    trainer = make_sft(folder / output, grid, goldfish=False, model=model, peft_config=adapters)
    trained = [its for its in trainer.model.parameters() if its.requires_grad]
    assert {its.dtype for its in trained} == {torch.bfloat16}
    trainer.train()
    if grid is not None:
        assert {its.to_local().dtype for its in trainer.model.parameters() if its.requires_grad} == {torch.bfloat16}
        assert parallel_state(trainer.model).four_bit
    return [entry["loss"] for entry in logged(trainer.state.log_history) if "loss" in entry]


def _chat_on_grids(folder):
    return [
        _chat(folder, "z", Grid(z=2)),
        _chat(folder, "z-read", Grid(z=2), read=True),
        _chat(folder, "x-read", Grid(x=2), read=True),
    ]


@pytest.mark.slow
def test_sft_trainer_is_as_on_one_process(tmp_path):
    """Its adapters are in bfloat16, which rounds to 0.4%: the losses of three steps agree to that of a step."""
    tiny_model("llama", dtype=torch.float32, **SIZES).save_pretrained(tmp_path / "base")
    truth = _chat(tmp_path, "one")
    for losses in run_ranks(_chat_on_grids, 2, tmp_path)[0]:
        assert losses == pytest.approx(truth, rel=5e-3)
        assert losses[0] == pytest.approx(truth[0], rel=1e-5)  # adapters add nothing yet


@pytest.mark.slow
def test_an_unmodified_accelerate_loop_is_as_on_one_process(tmp_path):
    tiny_model("llama", dtype=torch.bfloat16, **SIZES).save_pretrained(tmp_path / "base")
    runs = {"one": run(tmp_path, SCRIPT, tmp_path / "base", tmp_path / "one")}
    for grid in (Grid(z=2), Grid(x=2), Grid(data=2)):
        runs[str(grid)] = launch(tmp_path, grid, SCRIPT, tmp_path / "base", tmp_path / str(grid))
    losses = {}
    for name, ended in runs.items():
        assert ended.code == 0, ended.output
        losses[name] = [float(found) for found in re.findall(r"^loss (\S+)", ended.output, re.MULTILINE)]
        assert (tmp_path / name / "adapter_model.safetensors").is_file()
    assert len(losses["one"]) == 4 and losses["one"][0] != losses["one"][-1]
    for name, found in losses.items():
        assert found == pytest.approx(losses["one"], rel=1e-4), name
