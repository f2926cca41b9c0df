"""`parallelize` itself: models that differ from a Llama, its report, its refusals."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification
from transformers.distributed.configuration_utils import DistributedConfig

from hf_axonn import Grid, from_pretrained, parallelize, sync_gradients
from hf_axonn.config import AxonnConfig
from hf_axonn.parallel.parallelize import _plan
from tests.helpers.float64 import Float64, recompute_in_float64, relative_errors
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks


pytestmark = pytest.mark.usefixtures("device")


GRIDS = [Grid(y=2, x=2), Grid(z=2, x=2)]
SIZES = dict(vocab_size=131, bos_token_id=1, eos_token_id=2, pad_token_id=0)
DECODER = dict(hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=6, **SIZES)
# What is built tiny from its config, for each way that an architecture can differ from a Llama.
OTHERS = {
    "gpt2": dict(n_embd=24, n_layer=2, n_head=3, n_positions=32, **SIZES),  # Conv1D, learned positions, tied
    "opt": dict(
        hidden_size=24, ffn_dim=20, num_hidden_layers=2, num_attention_heads=3, word_embed_proj_dim=24, **SIZES
    ),
    "gpt_neox": DECODER,  # fused query, key and value with biases
    "phi": DECODER,  # a head with a bias, parallel attention and MLP
    "gemma2": dict(num_key_value_heads=2, head_dim=4, **DECODER),  # scaled embeddings, capped logits
    "unlisted": dict(num_key_value_heads=2, head_dim=4, **DECODER),  # no block plan
    "mixtral": dict(num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2, **DECODER),  # experts
    "doge": dict(num_key_value_heads=2, **DECODER),  # layers with parameters of their own
}


def other_model(kind: str):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **OTHERS[kind])
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "hidden_dropout", "attention_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    # The fused kernel for experts has no float64.
    experts = {"experts_implementation": "eager"} if kind == "mixtral" else {}
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", **experts).double().train()
    if kind == "doge":
        model.gradient_checkpointing_enable()
        for layer in model.model.layers:
            for child in layer.children():
                recompute_in_float64(child)
    return model


def gradients(model, batch: dict, scale: float = 1.0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    with Float64():
        loss = model(**batch).loss
        (loss * scale).backward()
    sync_gradients(model)
    return loss.detach(), {name: its.grad for name, its in model.named_parameters() if its.grad is not None}


def _others(kinds: list[str], grids: list[list[Grid]]) -> None:
    batch = tiny_batch(4, 6)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    for kind, of_kind in zip(kinds, grids, strict=True):
        truth, expected = gradients(other_model(kind), batch)
        for grid in of_kind:
            model, report = parallelize(other_model(kind), grid)
            assert ("no block plan" in report.summary) == (kind == "unlisted")
            rows = 4 // grid.dp_size
            first = model.axonn.coordinates["z"] * rows
            loss, ours = gradients(model, {name: value[first : first + rows] for name, value in batch.items()})
            if grid.z == 1:
                torch.testing.assert_close(loss, truth, rtol=1e-12, atol=0)
            errors = relative_errors(ours, expected)
            worst = max(errors, key=errors.get)
            assert errors[worst] < 1e-10, (kind, grid, worst, errors[worst])
            _check_report(model, report)


def _check_report(model, report) -> None:
    """A line for every module with parameters of its own; those that are not sharded say why."""
    lines = report.lines()
    for name, module in model.named_modules():
        if any(parameter is not None for parameter in module._parameters.values()):
            found = [line for line in lines if line.split(" ", 2)[-1].startswith(name) or f" {name}" in line]
            assert found, name
    assert len(lines) == len(report.entries) == len({entry.name for entry in report.entries})
    for entry in report.not_sharded():
        assert f"not sharded {entry.name}: {entry.reason}" in lines and len(entry.reason) > 10
    total = sum(parameter.numel() for parameter in model.parameters())
    assert sum(entry.parameters for entry in report.entries) == total
    assert report.summary in str(report)


# Quick, each on one of the grids.
EACH_ON = [GRIDS[place % 2] for place, _ in enumerate(OTHERS)]


@pytest.mark.parametrize(
    "grids",
    [
        [[grid] for grid in EACH_ON],
        pytest.param([[grid for grid in GRIDS if grid != own] for own in EACH_ON], marks=pytest.mark.slow),
    ],
    ids=["one grid each", "the other grids"],
)
def test_every_other_model(grids):
    run_ranks(_others, 4, list(OTHERS), grids)


def _classifier() -> None:
    config = LlamaConfig(num_key_value_heads=2, num_labels=5, **DECODER)

    def build():
        torch.manual_seed(0)
        return LlamaForSequenceClassification._from_config(config).double().train()

    batch = {"input_ids": tiny_batch(4, 6)["input_ids"], "labels": torch.tensor([0, 4, 2, 1])}
    truth, expected = gradients(build(), batch)
    model, report = parallelize(build(), Grid(y=2, x=2))
    loss, ours = gradients(model, batch)
    torch.testing.assert_close(loss, truth, rtol=1e-12, atol=0)
    assert max(relative_errors(ours, expected).values()) < 1e-10
    assert {"column", "row", "linear", "vocabulary", "replicated"} == {entry.kind for entry in report.entries}
    assert not any(entry.name.startswith("model.layers") for entry in report.entries if entry.kind == "linear")


def test_a_model_with_another_head():
    run_ranks(_classifier, 4)


def _tensor_parallel(folder) -> None:
    ours = from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))
    assert ours.axonn.grid == Grid(x=2) and "distributed_config" not in vars(ours.config)
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    with pytest.raises(ValueError, match=r"DTensors already, as of from_pretrained\(tp_plan=...\).* without tp_plan"):
        parallelize(model, Grid(x=2))


def test_transformers_own_tensor_parallelism_is_a_grid_or_refused(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    run_ranks(_tensor_parallel, 2, tmp_path)


def _reports_and_refusals() -> None:
    model, report = parallelize(tiny_model("qwen2"), Grid(y=2, x=2))
    _check_report(model, report)
    assert "2 decoder layers sharded as 4 blocks" in report.summary
    assert "not sharded model.norm: " in "\n".join(report.lines())
    assert "6 kv heads are not divisible by x*y = 4" in str(report)
    with pytest.raises(ValueError, match="sharded over the grid data=1,z=1,y=2,x=2 already"):
        parallelize(model, Grid(y=2, x=2))
    with pytest.raises(ValueError, match="= 8, but 4 process"):
        parallelize(tiny_model("llama"), Grid(x=8))
    with pytest.raises(ValueError, match=r"use_kernels=True .* omit them. attn_implementation may be a kernel"):
        model.set_use_kernels(True)
    model.set_use_kernels(False)
    with pytest.raises(ValueError, match="use_kernels=True"):
        from_pretrained("not read", grid=Grid(x=4), use_kernels=True)
    with_kernels = tiny_model("llama")
    with_kernels._use_kernels = True
    with pytest.raises(ValueError, match="use_kernels=True"):
        parallelize(with_kernels, Grid(x=4))
    quantized = tiny_model("llama")
    quantized.is_quantized = True
    with pytest.raises(ValueError, match="quantized"):
        parallelize(quantized, Grid(x=4))


def test_reports_and_refusals():
    run_ranks(_reports_and_refusals, 4)


def _rank_zero_counts() -> None:
    model = tiny_model("llama", seed=torch.distributed.get_rank())
    model, _ = parallelize(model, Grid(x=2))
    for name, parameter in tiny_model("llama", seed=0).named_parameters():
        assert torch.equal(model.get_parameter(name).full_tensor(), parameter), name


def test_the_weights_of_rank_zero_count():
    run_ranks(_rank_zero_counts, 2)


def test_one_rank_leaves_the_model_untouched():
    model = tiny_model("llama")
    before = {name: module.forward for name, module in model.named_modules()}
    same, report = parallelize(model, Grid())
    assert same is model and not hasattr(model, "axonn") and "untouched" in report.summary
    assert all(module.forward == before[name] for name, module in model.named_modules())


def test_without_processes_it_says_what_to_do():
    with pytest.raises(RuntimeError, match="accelerate launch or torchrun"):
        parallelize(tiny_model("llama"), Grid(x=2))


def test_settings_without_effect_are_named_once(caplog):
    for kind, options, warning in (
        ("gemma2", {}, ""),
        ("mixtral", {"experts": "gather"}, ""),
        (
            "gemma2",
            {"experts": "gather", "prefetch": 7},
            "prefetch=7 (z is 1), experts=gather (the model has none)",
        ),
    ):
        caplog.clear()
        _plan(other_model(kind), AxonnConfig(grid=Grid(x=2), **options))
        assert len(caplog.messages) == bool(warning) and warning in caplog.text
