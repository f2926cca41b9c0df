"""Kinds of layers in use, on x=2, y=2: checkpointing, adapters, lazy loading, and what is saved and exported.

Their loss and gradients on every kind of grid are compared by the survey, their generation by
tests/parallel/test_generate_planned.py.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from hf_axonn import Grid, export_hf, from_pretrained, parallelize, save_sharded, sync_gradients
from hf_axonn.architectures.plan import plan_for
from hf_axonn.engine.linears import is_linear
from tests.benchmarks.architectures.survey import in_float64
from tests.benchmarks.architectures.tiny_configs import tiny_batch, tiny_model
from tests.helpers.equality import mean_over_world, model_loss
from tests.helpers.float64 import relative_errors
from tests.helpers.ranks import run_ranks
from tests.parallel.adapters.test_peft_architectures import NOT_IN_PEFT


GRID = Grid(y=2, x=2)
AS_IT_IS = {"dtype": torch.float64, "experts_implementation": "eager"}
# Per-layer inputs, shared keys and experts; several residual streams; numbers of kv heads by layer, sinks; norms
# before row layers; mixers of four kinds; two attentions a layer; a shared block with adapters; an indexer; attention
# whose projections are experts.
KINDS = (
    "gemma4_text", "gemma3n_text", "mimo_v2_flash", "bitnet", "nemotron_h", "longcat_flash", "zamba2", "deepseek_v32",
    "jetmoe",
)  # fmt: skip
OTHERS = ("bart", "phi4_multimodal", "moshi", "fuyu", "recurrent_gemma", "dbrx", "zamba", "gemma4")
COPIES = ("gpt_neox_japanese", "hy_v4", "deepseek_v4", "qwen4_exp_text")  # but for the first of the residual stream
MIXERS = ("kimi_linear", "qwen3_5", "falcon_h1", "lfm2_moe", "mamba", "jamba", "mamba2")


def gradients_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients in float64; where layers are computed again in backward, what code casts is in float32."""
    with contextlib.nullcontext() if model.is_gradient_checkpointing else in_float64():
        loss = model_loss(model, batch, 1)
        loss.backward()
    sync_gradients(model)
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return mean_over_world(loss) if dist.is_initialized() else loss.detach(), found


def checkpointed(kind: str) -> nn.Module:
    """A model whose layers are computed again in backward, if Transformers does so for its type."""
    model = tiny_model(kind)
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def adapted(kind: str) -> nn.Module:
    """A model with adapters on the projections of its blocks, none of which is zero."""
    model = tiny_model(kind)
    blocks = plan_for(model).blocks
    names = [name for block in blocks for name in (*block.columns, block.row) if is_linear(model.get_submodule(name))]
    names += [f"{block.entry}.{name}" for block in blocks if block.mixer for name in block.mixer.linears]
    names = [name for name in names if kind not in NOT_IN_PEFT or not name.endswith("out_proj")]
    model = get_peft_model(model, LoraConfig(r=3, target_modules=names, init_lora_weights=False))
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def loaded(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, **AS_IT_IS)


def logits_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with in_float64(), torch.no_grad():
        return model.eval()(**{name: value for name, value in batch.items() if name != "labels"}).logits


def _train(kind: str, truths: dict) -> None:
    batch = tiny_batch(tiny_model(kind))
    for build, bound in ((checkpointed, 1e-4), (adapted, 1e-10)):
        loss, gradients = truths[build.__name__]
        model, _ = parallelize(build(kind), GRID)
        ours, found = gradients_of(model, batch)
        assert found.keys() == gradients.keys(), (kind, build, sorted(found.keys() ^ gradients.keys())[:3])
        assert abs(float(ours - loss)) < bound * abs(float(loss)), (kind, build)
        errors = relative_errors(found, gradients)
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] < bound, (kind, build, worst, errors[worst])


def _load_and_save(kind: str, folder: Path, logits: torch.Tensor) -> None:
    """Read the files of one process lazily, and write them again in both ways."""
    model = from_pretrained(folder / "plain", grid=GRID, **AS_IT_IS)
    assert model.axonn.report.summary == parallelize(tiny_model(kind), GRID)[1].summary
    ours = logits_of(model, tiny_batch(tiny_model(kind)))
    assert (ours - logits).abs().max() < 1e-10 * logits.abs().max(), kind
    model.save_pretrained(folder / "saved")
    save_sharded(model, folder / "sharded")


def check(kinds: tuple[str, ...], folder: Path) -> None:
    for kind in kinds:
        plain = tiny_model(kind)
        batch = tiny_batch(plain)
        truths = {build.__name__: gradients_of(build(kind), batch) for build in (checkpointed, adapted)}
        run_ranks(_train, GRID.size, kind, truths, timeout=240)
        plain.save_pretrained(folder / kind / "plain")
        logits = logits_of(loaded(folder / kind / "plain"), batch)
        run_ranks(_load_and_save, GRID.size, kind, folder / kind, logits, timeout=240)
        export_hf(folder / kind / "sharded", folder / kind / "exported")
        for name in ("saved", "exported"):
            again = logits_of(loaded(folder / kind / name), batch)
            assert (again - logits).abs().max() < 1e-14 * logits.abs().max(), (kind, name)


def test_one_kind(tmp_path):
    check(("gemma4_text",), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [KINDS[1:], OTHERS, MIXERS, COPIES], ids=["kinds", "others", "mixers", "copies"])
def test_the_others(kinds, tmp_path):
    check(kinds, tmp_path)
