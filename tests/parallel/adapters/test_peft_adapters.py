"""What PEFT does with adapters on a grid beside training them: several of them, files and merging."""

from __future__ import annotations

import pytest
import torch
from peft import (
    LoraConfig,
    PeftModel,
)
from torch.distributed.tensor import DTensor

from hf_axonn import parallelize
from hf_axonn.checkpoint.adapter_files import load_adapters
from hf_axonn.checkpoint.sharded import save_sharded
from hf_axonn.topology.grid import Grid
from tests.helpers.adapting import ONE_OF_EACH, adapt, drawing
from tests.helpers.equality import exact, full
from tests.helpers.float64 import largest_difference
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks


IDS = {"input_ids": tiny_batch(2, 7)["input_ids"]}
TWO_GRIDS = ONE_OF_EACH[:2]


def logits(model):
    model.eval()
    with torch.no_grad(), exact():
        return model(**IDS).logits


def equal(ours, truth):
    torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-10)


ONE_LAYER = {"num_hidden_layers": 1}


def llama():
    return tiny_model("llama", **ONE_LAYER)


def sharded(grid):
    return parallelize(llama(), grid)[0]


# Several adapters.


def second(model, name="second", **options):
    options = {"r": 2, "target_modules": ["q_proj", "o_proj", "gate_proj"], "init_lora_weights": False} | options
    with drawing(8):
        model.add_adapter(name, LoraConfig(**options))


def use_in_turn(model) -> list[torch.Tensor]:
    """Logits of everything that can be done with two adapters."""
    found = [logits(model)]
    second(model)
    found.append(logits(model))  # the second is not active yet
    model.set_adapter("second")
    found.append(logits(model))
    with model.disable_adapter():
        found.append(logits(model))
    model.base_model.set_adapter(["default", "second"])
    found.append(logits(model))
    model.delete_adapter("default")
    model.set_adapter("second")
    found.append(logits(model))
    second(model, "default", r=4, modules_to_save=["lm_head"])
    model.set_adapter("default")
    found.append(logits(model))
    second(model, "third", use_dora=True)
    model.set_adapter("third")
    found.append(logits(model))
    return found


def put_in_after(grid):
    return adapt(sharded(grid))


def put_in_before(grid):
    return parallelize(adapt(llama()), grid)[0]


def _use_in_turn(truth, each, grids):
    for number, grid in enumerate(grids):
        for make in (put_in_after, put_in_before)[number % each :: each]:
            model = make(grid)
            for ours, its in zip(use_in_turn(model), truth, strict=True):
                equal(ours, its)
            assert all(isinstance(its, DTensor) for its in model.parameters())


# With 2, which is quick, every second case on one grid and the others on the other; with 1 all on both.
EACH = pytest.mark.parametrize("each", [2, pytest.param(1, marks=pytest.mark.slow)])


# Of files and of adapters in turn, quick are two ranks; what heads do on four is merged below.
EACH_ON = pytest.mark.parametrize(
    ("each", "grids"),
    [(2, [Grid(x=2), Grid(z=2)]), pytest.param(1, TWO_GRIDS, marks=pytest.mark.slow)],
    ids=["2", "1"],
)


@EACH_ON
def test_several_adapters(each, grids):
    truth = use_in_turn(adapt(llama()))
    assert len({round(float(its.sum()), 9) for its in truth}) == 5  # a new DoRA does what LoRA does
    run_ranks(_use_in_turn, grids[0].size, truth, each, grids)


# Merging.

MERGED = {
    "LoRA": ("llama", {}),
    "DoRA": ("qwen2", {"use_dora": True}),
    "biases": ("qwen2", {"target_modules": ["q_proj", "k_proj"], "lora_bias": True}),
    "embedding and head": ("llama", {"target_modules": ["v_proj", "embed_tokens", "lm_head"]}),
    "embedding, DoRA": ("llama", {"target_modules": ["v_proj", "embed_tokens"], "use_dora": True}),
    "Conv1D": ("gpt2", {"target_modules": ["c_attn", "c_proj"]}),
    "Conv1D, DoRA": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "use_dora": True}),
    "experts": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj", "gate.weight"]}),
    "saved whole": ("llama", {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "norm"]}),
}


def merge(base, *, safe=False, **options):
    """Logits before, while and after an adapter is merged, and parameters of the model that is left."""
    model = adapt(base, **options)
    found = [logits(model)]
    model.merge_adapter(safe_merge=safe)
    found.append(logits(model))
    model.unmerge_adapter()
    found.append(logits(model))
    plain = model.merge_and_unload(safe_merge=safe)
    assert not [name for name, _ in plain.named_modules() if "lora" in name]
    found.append(logits(plain))
    return found, {name: its.detach() for name, its in plain.named_parameters()}


MORE = ("embedding, DoRA", "Conv1D")  # a half of others


SIZES = {"mixtral": {"num_local_experts": 5}, "gpt2": {"num_key_value_heads": 12}}


def small(kind):
    model = tiny_model(kind, **ONE_LAYER, **SIZES.get(kind, {}))
    if kind == "mixtral":
        model.set_experts_implementation("eager")  # the other one is not written for float64
    return model


def _merge(truths, each):
    for number, (grid, safe) in enumerate(zip(TWO_GRIDS, (False, True), strict=True)):
        for name in list(truths)[number % each :: each]:
            kind, options = MERGED[name]
            ours, parameters = merge(parallelize(small(kind), grid)[0], safe=safe, **options)
            for mine, its in zip(ours, truths[name][0], strict=True):
                equal(mine, its)
            assert parameters.keys() == truths[name][1].keys()
            for key, value in parameters.items():
                assert largest_difference(value, truths[name][1][key]) < 1e-10, (grid, name, key)


@EACH
def test_merging_and_unmerging(each):
    cases = {name: case for name, case in MERGED.items() if each == 1 or name not in MORE}
    truths = {name: merge(small(kind), **options) for name, (kind, options) in cases.items()}
    for (before, merged, again, left), _ in truths.values():
        for its in (merged, again, left):
            equal(its, before)
    run_ranks(_merge, 4, truths, each)


def _merge_broken():
    grid = Grid(z=2, x=2)
    model = adapt(sharded(grid))
    weight = model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight
    with torch.no_grad():
        weight.to_local()[0] = float("nan")  # which only some ranks merge
    before = {name: full(its) for name, its in model.named_parameters() if "layers.0.self_attn.q_proj.base" in name}
    with pytest.raises(ValueError, match="not finite"):
        model.merge_adapter(safe_merge=True)
    for name, its in model.named_parameters():
        if name in before:
            assert torch.equal(full(its), before[name])


def test_a_safe_merge_fails_on_every_rank_or_on_none():
    run_ranks(_merge_broken, 4)


# Files.

FILES = {
    "LoRA": {},
    "embedding and head": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "DoRA, norms and head": {"use_dora": True, "modules_to_save": ["norm", "lm_head"]},
}


def _files(each, grids):
    """The grids, each with the names of FILES that are written on it."""
    return [(grid, list(FILES)[number % each :: each]) for number, grid in enumerate(grids)]


def _write_and_read(folder, truths, files):
    for grid, names in files:
        for name in names:
            options = FILES[name]
            model = adapt(sharded(grid), **options)
            here = folder / f"{name}-{grid}"
            model.save_pretrained(here)
            save_sharded(model, folder / f"ours-{name}-{grid}")
            # What one process has saved, read into sharded models; the second is a name of its own.
            read = PeftModel.from_pretrained(sharded(grid), folder / name)
            equal(logits(read), truths[name])
            read.load_adapter(here, adapter_name="again")
            read.set_adapter("again")
            equal(logits(read), truths[name])
            empty = PeftModel.from_pretrained(sharded(grid), here, low_cpu_mem_usage=True)
            equal(logits(empty), truths[name])


@EACH_ON
def test_files_go_between_a_grid_and_plain_peft(tmp_path, each, grids):
    truths = {}
    for name, options in FILES.items():
        model = adapt(llama(), **options)
        truths[name] = logits(model)
        model.save_pretrained(tmp_path / name)
    files = _files(each, grids)
    run_ranks(_write_and_read, grids[0].size, tmp_path, truths, files)
    for grid, names in files:
        for name in names:
            for folder in (f"{name}-{grid}", f"ours-{name}-{grid}"):
                equal(logits(PeftModel.from_pretrained(llama(), tmp_path / folder)), truths[name])


def test_a_damaged_file_of_adapters_is_named(tmp_path):
    model = PeftModel(tiny_model("smollm2"), LoraConfig(target_modules=["q_proj"]))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"0123456789")
    with pytest.raises(ValueError, match="adapter_model.safetensors cannot be read"):
        load_adapters(model, tmp_path)
