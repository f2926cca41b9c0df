"""`from_pretrained`: every rank reads its own slices and no more, and has what plain loading gives, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import safetensors
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GgufConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    core_model_loading,
    modeling_utils,
)
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter
from transformers.utils import logging

from hf_axonn import Grid, from_pretrained, load_sharded, save_sharded
from hf_axonn.checkpoint import hf_loader
from hf_axonn.checkpoint import lazy_tensors as unread
from hf_axonn.checkpoint.coverage import Coverage
from hf_axonn.checkpoint.shard_files import file_name
from hf_axonn.config import AxonnConfig
from hf_axonn.parallel.sharded_loading import install_sharded_loading, remove_sharded_loading
from tests.helpers.equality import Outcome, exact, fit, rows_of
from tests.helpers.float64 import relative_errors
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks


GRIDS = [Grid(z=2, x=2), Grid(y=2, x=2), Grid(data=2, z=2), Grid(y=4)]
IDS = torch.arange(3, 13).view(2, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind, layers in (("qwen3", 2), ("smollm2", 1)):  # those of two layers could be taken for each other
        tiny_model(kind, dtype=torch.float32, num_hidden_layers=layers).save_pretrained(folder / kind)
    return folder


@contextlib.contextmanager
def shown_bars() -> Iterator[list[bool]]:
    """Of each progress bar that Transformers makes inside, whether it is shown."""
    shown: list[bool] = []

    def note(factory, args, kwargs):
        shown.append(factory is not logging.EmptyTqdm)
        return logging.EmptyTqdm(*args, **kwargs)

    before = logging.set_tqdm_hook(note)
    try:
        yield shown
    finally:
        logging.set_tqdm_hook(before)


def _equal(folder: Path, on: dict[str, list[Grid]]) -> None:
    logging.enable_progress_bar()  # a test before this one may have switched it off
    for kind, grids in on.items():
        plain = AutoModelForCausalLM.from_pretrained(folder / kind)
        for grid in grids:
            with shown_bars() as bars:
                model = from_pretrained(folder / kind, grid=grid)
            assert bars and set(bars) == {dist.get_rank() == 0}, "one rank shows the progress"
            assert not model.training and model.axonn.grid == grid
            for name, parameter in plain.named_parameters():
                assert torch.equal(model.get_parameter(name).full_tensor(), parameter), (kind, grid, name)
            assert torch.equal(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
            tied = model.lm_head.weight is model.model.embed_tokens.weight
            assert tied == (kind == "smollm2")
            assert model.config.to_dict() == plain.config.to_dict()
            with torch.no_grad():
                torch.testing.assert_close(model(IDS).logits, plain(IDS).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "on",
    [
        {"qwen3": GRIDS[:1], "smollm2": GRIDS[1:2]},
        pytest.param({"qwen3": GRIDS[1:], "smollm2": [GRIDS[0], *GRIDS[2:]]}, marks=pytest.mark.slow),
    ],
    ids=["some", "others"],
)
def test_bit_for_bit_what_plain_loading_gives(folder, on):
    run_ranks(_equal, 4, folder, on)


def _transposed_experts() -> None:
    """Let files hold mixtral's experts with their last two dims turned, as those of some model types do."""
    turns = {"gate_up_proj": Transpose(1, 2, check_dims=True), "down_proj": Transpose(1, 2)}
    names = {f"mlp.experts.{name}": turn for name, turn in turns.items()}
    converters = [WeightConverter(name, name, operations=[turn]) for name, turn in names.items()]
    register_checkpoint_conversion_mapping("mixtral", converters, overwrite=True)


def _transposed(folder: Path, target: Path) -> None:
    _transposed_experts()
    plain = AutoModelForCausalLM.from_pretrained(folder)
    plain.save_pretrained(target / "stock")  # rank 0 writes
    dist.barrier()
    stored = load_file(target / "stock" / "model.safetensors")
    for grid in (Grid(z=2), Grid(y=2)):
        model = from_pretrained(folder, grid=grid)
        model.save_pretrained(target / f"{grid}")
        save_sharded(model, target / f"sharded-{grid}")
        dist.barrier()
        saved = load_file(target / f"{grid}" / "model.safetensors")
        assert saved.keys() == stored.keys() and all(torch.equal(saved[name], stored[name]) for name in stored)
        for source in (folder, target / f"sharded-{grid}"):
            model = from_pretrained(source, grid=Grid(z=2))
            for name, parameter in plain.named_parameters():
                assert torch.equal(model.get_parameter(name).full_tensor(), parameter), (grid, source, name)


def test_experts_that_a_checkpoint_transposes(tmp_path):
    """down_proj is square: no shape tells whether it was turned."""
    model = tiny_model("mixtral", dtype=torch.float32, num_local_experts=4, intermediate_size=48)
    weights = {
        name: (value.transpose(1, 2) if "mlp.experts" in name else value).contiguous()
        for name, value in model.state_dict().items()
    }
    (tmp_path / "plain").mkdir()
    model.config.save_pretrained(tmp_path / "plain")
    save_file(weights, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    run_ranks(_transposed, 2, tmp_path / "plain", tmp_path)


@contextlib.contextmanager
def _counted() -> Iterator[list[int]]:
    """Numbers of elements of what is copied out of files inside."""
    copied: list[int] = []
    stock = unread._copy

    def counting(copy):
        stock(copy)
        copied.append(copy[2].numel())

    with mock.patch.object(unread, "_copy", counting):
        yield copied


def _reads(folder: Path) -> None:
    with _counted() as copied:
        model = from_pretrained(folder / "qwen3", grid=Grid(y=2, x=2))
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    total = sum(parameter.numel() for parameter in model.parameters())
    assert sum(copied) == held < 0.4 * total


def test_a_rank_reads_only_what_it_holds(folder):
    run_ranks(_reads, 4, folder)


def _refusals(folder: Path) -> None:
    grid = Grid(x=2)
    for name, value in {"device_map": "auto", "tp_plan": "auto", "output_loading_info": True}.items():
        with pytest.raises(ValueError, match=name):
            from_pretrained(folder / "qwen3", grid=grid, **{name: value})
    with pytest.raises(ValueError, match=r"from_pretrained\(config=.* takes an AxonnConfig, .* given a Qwen3Config"):
        from_pretrained(folder / "qwen3", config=Qwen3Config())
    with pytest.raises(ValueError, match="quantized weights cannot be sharded, but for bitsandbytes' 4 bits"):
        from_pretrained(folder / "qwen3", grid=grid, quantization_config=GgufConfig())
    with pytest.raises(ValueError, match="has no weights for 1 parameters, among them lm_head.weight"):
        from_pretrained(folder / "headless", grid=grid)
    with pytest.raises(OSError, match="nowhere"):
        from_pretrained(folder / "nowhere", grid=grid)
    assert from_pretrained(folder / "qwen3", grid=Grid(), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_refusals_name_what_to_do(folder):
    _behead(folder / "qwen3", folder / "headless")
    run_ranks(_refusals, 2, folder)


def _behead(source: Path, target: Path) -> None:
    """A copy of a checkpoint without the weight of the head."""
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    weights = load_file(source / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def _fails_on_one(folder: Path) -> None:
    def broken(copy) -> None:
        raise OSError(5, "Input/output error")

    stock = unread._copy
    if dist.get_rank() == 2:
        unread._copy = broken
    for kind in ("qwen3", "smollm2"):
        with pytest.raises(ValueError, match=r"^rank 2: OSError: \[Errno 5\] Input/output error$"):
            from_pretrained(folder / kind, grid=Grid(z=2, x=2))
    unread._copy = stock
    assert from_pretrained(folder / "qwen3", grid=Grid(z=2, x=2)).axonn.grid == Grid(z=2, x=2)


def test_what_one_rank_cannot_read_is_an_error_on_all(folder):
    run_ranks(_fails_on_one, 4, folder)


def _hooks() -> dict[str, object]:
    """What a class and a module of Transformers hold themselves; a hook is there or is not."""
    return {**vars(PreTrainedModel), **vars(core_model_loading)}


def _plain_afterwards(folder: Path) -> None:
    before = _hooks()
    with mock.patch.object(hf_loader, "loading_hooks") as of_four_bits:
        from_pretrained(folder / "qwen3", grid=Grid(x=2))
    assert _hooks() == before
    assert not of_four_bits.called, "bitsandbytes is imported for a model without 4 bits"
    with pytest.raises(OSError, match="nowhere"):
        from_pretrained(folder / "nowhere", grid=Grid(x=2))
    assert _hooks() == before
    plain = AutoModelForCausalLM.from_pretrained(folder / "qwen3")
    assert not hasattr(plain, "axonn") and type(plain.lm_head.weight) is torch.nn.Parameter


def _by_the_launch_file(folder: Path) -> None:
    """Under `load: sharded` Transformers' own method reads slices of language models, and of nothing else."""
    before = _hooks()
    with mock.patch.dict(os.environ, AXONN_CONFIG=AxonnConfig(grid=Grid(x=2), load="sharded").to_json()):
        for _ in range(2):
            install_sharded_loading()
        for auto, device_map in ((AutoModelForCausalLM, {"": "cpu"}), (Qwen3ForCausalLM, "cpu")):
            with _counted() as copied:
                model = auto.from_pretrained(folder / "qwen3", device_map=device_map)
            assert model.axonn.grid == Grid(x=2)
            held = sum(parameter.to_local().numel() for parameter in model.parameters())
            assert sum(copied) == held < 0.6 * sum(parameter.numel() for parameter in model.parameters())
        assert from_pretrained(folder / "qwen3").axonn.grid == Grid(x=2)
        assert not hasattr(AutoModel.from_pretrained(folder / "qwen3"), "axonn")
        for refused in ({"state_dict": {"a": 1}}, {"output_loading_info": True}, {"device_map": "auto"}):
            with pytest.raises(ValueError, match=f"{next(iter(refused))}.*[oO]mit"):
                AutoModelForCausalLM.from_pretrained(folder / "qwen3", **refused)
        with pytest.raises(ValueError, match="quantized weights cannot be sharded"):
            AutoModelForCausalLM.from_pretrained(folder / "qwen3", quantization_config=GgufConfig())
        remove_sharded_loading()
    assert _hooks() == before


def _hooks_come_and_go(folder: Path) -> None:
    _plain_afterwards(folder)
    _by_the_launch_file(folder)


def test_the_hooks_in_transformers_are_taken_away_again(folder):
    run_ranks(_hooks_come_and_go, 2, folder)


def _trains(folder: Path, truths: dict) -> None:
    for ((kind, attention), truth), grid in zip(truths.items(), GRIDS[:2], strict=True):
        options = {"dtype": torch.float64, "attn_implementation": attention}
        model = from_pretrained(folder / kind, grid=grid, **options).train()
        with exact():
            ours = fit(model, [rows_of(tiny_batch(4, 7), grid, model.axonn.grid_mesh.rank)])
        for what in ("gradients", "parameters"):
            errors = relative_errors(getattr(ours, what), getattr(truth, what))
            assert max(errors.values()) < 1e-10, (kind, grid, what, errors)


def test_a_loaded_model_trains_as_a_plainly_loaded_one(folder):
    """Rotary frequencies are computed in float32 by `from_pretrained`, here and there, so the truth is loaded too."""
    truths = {}
    for kind, attention in (("qwen3", "sdpa"), ("smollm2", "eager")):
        options = {"dtype": torch.float64, "attn_implementation": attention}
        with exact():
            model = AutoModelForCausalLM.from_pretrained(folder / kind, **options).train()
            truths[kind, attention] = fit(model, [tiny_batch(4, 7)])
    run_ranks(_trains, 4, folder, truths)


def _other_forms(folder: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder / "qwen3")
    for form in ("many", "bin"):
        model = from_pretrained(str(folder / form), grid=Grid(y=2))
        for name, parameter in plain.named_parameters():
            assert torch.equal(model.get_parameter(name).full_tensor(), parameter), (form, name)
    model = from_pretrained(folder / "bfloat16", grid=Grid(y=2), auto_class=LlamaForCausalLM)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_several_files_pickled_weights_and_the_dtype_of_the_file(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "qwen3")
    model.save_pretrained(folder / "many", max_shard_size="20KB")
    assert len(list((folder / "many").glob("*.safetensors"))) > 2
    model.config.save_pretrained(folder / "bin")
    torch.save(model.state_dict(), folder / "bin" / "pytorch_model.bin")
    tiny_model("llama", dtype=torch.bfloat16).save_pretrained(folder / "bfloat16")
    run_ranks(_other_forms, 2, folder)


def _adapters(folder: Path, grids: list[Grid], truth: Outcome, expected: torch.Tensor) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder / "adapter", dtype=torch.float64)
    for grid in grids:
        model = from_pretrained(folder / "adapter", grid=grid, dtype=torch.float64)
        for name, parameter in plain.named_parameters():
            own = model.get_parameter(name)
            assert own.requires_grad == parameter.requires_grad, name
            assert torch.equal(own.full_tensor(), parameter), name
        assert max(its.to_local().numel() / its.numel() for its in model.parameters() if its.numel() > 4000) < 0.3
        with torch.no_grad(), exact():
            torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-10, atol=1e-10)
        _train_adapters(model)
        with exact():
            ours = fit(model, [rows_of(tiny_batch(4, 7), grid, model.axonn.grid_mesh.rank)])
        for what in ("gradients", "parameters"):
            errors = relative_errors(getattr(ours, what), getattr(truth, what))
            assert max(errors.values()) < 1e-10, (grid, what, errors)
    with pytest.raises(ValueError, match=r"has no weights for 1 parameters, among them lm_head\.weight"):
        from_pretrained(folder / "adapter-of-headless", grid=Grid(x=4))


def _train_adapters(model) -> None:
    for name, parameter in model.train().named_parameters():
        parameter.requires_grad_("lora_" in name)


@pytest.mark.parametrize(
    "grids", [GRIDS[:1], pytest.param(GRIDS[1:2], marks=pytest.mark.slow)], ids=["z and x", "y and x"]
)
def test_adapters_in_the_directory_are_loaded_onto_a_sharded_base(folder, grids):
    base = AutoModelForCausalLM.from_pretrained(folder / "qwen3")
    adapted = get_peft_model(base, LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False))
    adapted.save_pretrained(folder / "adapter")
    shutil.rmtree(folder / "other", ignore_errors=True)
    shutil.rmtree(folder / "adapter-of-headless", ignore_errors=True)
    _behead(folder / "qwen3", folder / "other")
    shutil.copytree(folder / "adapter", folder / "adapter-of-headless")
    _set_base(folder / "adapter-of-headless", folder / "other")
    with exact():
        plain = AutoModelForCausalLM.from_pretrained(folder / "qwen3", dtype=torch.float64)(IDS).logits
        model = AutoModelForCausalLM.from_pretrained(folder / "adapter", dtype=torch.float64)
        expected = model(IDS).logits.detach()
        _train_adapters(model)
        truth = fit(model, [tiny_batch(4, 7)])
    assert (plain - expected).abs().max() > 1e-2
    run_ranks(_adapters, 4, folder, grids, truth, expected)


def _other_sizes(folder: Path) -> None:
    with pytest.raises(ValueError, match="ignore_mismatched_sizes"):
        from_pretrained(folder / "resized", grid=Grid(x=2))
    with pytest.raises(ValueError, match="every rank would fill such weights with other numbers"):
        from_pretrained(folder / "resized", grid=Grid(x=2), ignore_mismatched_sizes=True)
    with pytest.raises(ValueError, match="a quantized model cannot be sharded"):
        from_pretrained(folder / "quantized", grid=Grid(x=2))


@pytest.mark.filterwarnings("ignore")
def test_other_sizes_and_quantized_weights_are_refused(folder):
    changes = {"resized": {"vocab_size": 140}, "quantized": {"quantization_config": {"quant_method": "fp8"}}}
    for name, change in changes.items():
        shutil.copytree(folder / "qwen3", folder / name)
        config = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps(config | change))
    run_ranks(_other_sizes, 2, folder)


def _round_trip(folder: Path, output: Path, first: Grid, second: Grid) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder / "smollm2")
    save_sharded(from_pretrained(folder / "smollm2", grid=first), output / "sharded")
    model = from_pretrained(output / "sharded", grid=second)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_sharded(model, output / "sharded")
    for name, parameter in plain.named_parameters():
        assert torch.equal(model.get_parameter(name).full_tensor(), parameter), name
    assert "axonn" not in json.dumps(json.loads((output / "sharded" / "config.json").read_text()))
    with pytest.raises(ValueError, match="save_pretrained"):
        save_sharded(plain, output / "plain")


@pytest.mark.parametrize(
    ("first", "second"),
    [(Grid(z=2, x=2), Grid(y=4)), pytest.param(Grid(y=2, x=2), Grid(data=2, z=2), marks=pytest.mark.slow)],
    ids=str,
)
def test_sharded_checkpoints_of_other_grids(folder, tmp_path, first, second):
    run_ranks(_round_trip, 4, folder, tmp_path, first, second)


@contextlib.contextmanager
def _opened() -> Iterator[list[str]]:
    """Names of the safetensors files that are opened to read weights, by whatever library."""
    names = []
    stock = safetensors.safe_open

    def opening(filename, *args, **kwargs):
        names.append(Path(filename).name)
        return stock(filename, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for module in (safetensors, modeling_utils):
            patch.setattr(module, "safe_open", opening)
        patch.setattr(Coverage, "problem_of", lambda *_: None)  # which looks into the headers of all files
        yield names


def _opens(folder: Path, output: Path) -> tuple[list[str], list[str], list[str]]:
    """What is opened by loads on the grid of the checkpoint and on another, and of a base with adapters."""
    grid = Grid(y=2, x=2)
    plain = AutoModelForCausalLM.from_pretrained(folder / "qwen3")
    save_sharded(from_pretrained(folder / "qwen3", grid=grid), output / "sharded")
    if dist.get_rank() == 0:
        _adapter_of(output / "sharded", copy.deepcopy(plain), output / "adapter")
    dist.barrier()
    found = []
    for directory, loaded in (("sharded", grid), ("sharded", Grid(data=4)), ("adapter", grid)):
        with _opened() as names:
            model = from_pretrained(output / directory, grid=loaded, dtype=torch.bfloat16)
        own = {name.replace(".base_layer", ""): its for name, its in model.named_parameters()}
        for name, parameter in plain.named_parameters():
            assert own[name].dtype == torch.bfloat16
            assert torch.equal(own[name].full_tensor(), parameter.bfloat16()), (directory, loaded, name)
        found.append(sorted(names))
    return tuple(found)


def test_a_rank_opens_only_the_files_that_hold_its_slices(folder, tmp_path):
    """On the grid of the checkpoint its own, and that of rank 0 for what every rank holds, each once."""
    for rank, (same, other, adapted) in enumerate(run_ranks(_opens, 4, folder, tmp_path)):
        assert same == sorted({file_name(0), file_name(rank)})
        assert other == [file_name(each) for each in range(4)]
        assert [name for name in adapted if name.startswith("shard")] == same


def _adapter_of(base: Path, model, target: Path) -> None:
    """Save a new adapter of a model as one of the checkpoint `base`."""
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(target)
    _set_base(target, base)


def _set_base(adapter: Path, base: Path) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(base)}))


def _damaged_base(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"damaged checkpoint: .*its checksum differs"):
        from_pretrained(folder / "adapter", grid=Grid(x=2))
    for grid in (Grid(x=2), Grid()):
        with pytest.raises(ValueError, match=r"sharded is a damaged checkpoint: .*its checksum differs"):
            from_pretrained(folder, subfolder="sharded", grid=grid)
    for text, words in (("{", "is not JSON"), ("[1]", "holds no mapping"), ("\xff", "is not JSON")):
        (folder / f"settings-{dist.get_rank()}").mkdir(exist_ok=True)
        (folder / f"settings-{dist.get_rank()}" / "adapter_config.json").write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match=f"adapter_config.json {words}"):
            from_pretrained(folder / f"settings-{dist.get_rank()}", grid=Grid(x=2))


def test_the_base_of_adapters_is_verified_too(folder, tmp_path):
    plain = AutoModelForCausalLM.from_pretrained(folder / "qwen3")
    run_ranks(_save, 2, folder / "qwen3", tmp_path / "sharded")
    _adapter_of(tmp_path / "sharded", plain, tmp_path / "adapter")
    path = tmp_path / "sharded" / file_name(1)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    run_ranks(_damaged_base, 2, tmp_path)


def _save(source: Path, target: Path) -> None:
    save_sharded(from_pretrained(source, grid=Grid(x=2)), target)
