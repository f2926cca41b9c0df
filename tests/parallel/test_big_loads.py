"""Models too big for a rank: what `from_pretrained` takes of memory and of the disk, and converted weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    MixtralConfig,
    Qwen3VLMoeConfig,
)

from hf_axonn import Grid, from_pretrained, save_sharded
from hf_axonn.checkpoint import lazy_tensors as unread
from tests.benchmarks.architectures.tiny_configs import tiny_model
from tests.benchmarks.checkpoint import big_load
from tests.helpers.allocated import Peak, glibc
from tests.helpers.ranks import run_ranks


MIB = 2**20
SMALL = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 10, "vocab_size": 8192}
LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "vocab_size": 65536}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "dtype": "bfloat16"}


def generate(folder: Path, config, *, file_bytes: int) -> int:
    """Write a checkpoint of random weights, a file at a time; returns its bytes."""
    with torch.device("meta"):
        tensors = big_load.stored_tensors(AutoModelForCausalLM.from_config(config))
    folder.mkdir()
    config.save_pretrained(folder)
    index = big_load.file_of_each(tensors, file_bytes)
    generator = torch.Generator().manual_seed(0)
    for file in sorted(set(index.values())):
        names = [name for name in index if index[name] == file]
        noise = {name: torch.empty(tensors[name].shape, dtype=torch.bfloat16) for name in names}
        for tensor in noise.values():
            tensor.view(torch.int16).random_(0, 2**14, generator=generator)  # finite numbers, quickly made
        save_file(noise, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return sum(tensor.numel() for tensor in tensors.values()) * 2


def _grows(folder: Path, grids: list[Grid], dtype: torch.dtype | None) -> list[tuple[float, float, float]]:
    """For each grid MiB: growth at its peak, this rank's shard, the largest slice. A save grows by less."""
    found = []
    # Imports and thread pools are not of the load.
    save_sharded(from_pretrained(folder.parent / "warm", grid=grids[0]), folder.parent / "warm saved")
    for grid in grids:
        peak = Peak()
        model = from_pretrained(folder, grid=grid, dtype=dtype)
        growth = peak.growth()
        held = [its.to_local().nbytes for its in model.parameters()]
        found.append((growth / MIB, sum(held) / MIB, max(held) / MIB))
        assert str(folder) not in Path("/proc/self/maps").read_text()
        if grid == grids[0]:
            growths = []
            for name in ("saved", "saved again"):  # what a process allocates once is not of a save
                peak = Peak()
                save_sharded(model, folder.parent / name)
                growths.append(peak.growth() / MIB)
            assert min(growths) < max(held) / MIB + 4, f"saves take {growths} MiB"
        del model
    return found


def generate_both(folder: Path, config: LlamaConfig, *, file_bytes: int) -> float:
    """Write the checkpoint `big` and a small one beside it; returns the MiB of the big one."""
    small = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, vocab_size=128, **HEADS)
    generate(folder / "warm", small, file_bytes=file_bytes)
    return generate(folder / "big", config, file_bytes=file_bytes) / MIB


@pytest.fixture(scope="module")
def big(tmp_path_factory) -> tuple[Path, float]:
    """The folder of both, and MiB."""
    folder = tmp_path_factory.mktemp("loads")
    return folder, generate_both(folder, LlamaConfig(**SMALL, **HEADS), file_bytes=64 * MIB)


def check_growth(folder: Path, whole: float, grids: list[Grid], dtype=None) -> None:
    for ranks in run_ranks(_grows, 4, folder / "big", grids, dtype):
        for growth, shard, largest in ranks:
            assert shard < 0.3 * whole * (2 if dtype == torch.float32 else 1)
            assert 0.9 * shard < growth < 1.1 * (shard + largest), (growth, shard, largest)


@glibc
@pytest.mark.parametrize("grid", [Grid(z=2, x=2), pytest.param(Grid(y=2, x=2), marks=pytest.mark.slow)], ids=str)
def test_a_rank_grows_by_its_shard_and_a_slice_and_saves_within_a_slice(big, grid):
    check_growth(*big, [grid])


@glibc
@pytest.mark.slow
def test_a_rank_grows_by_its_shard_and_a_slice_of_2_gigabytes(tmp_path):
    whole = generate_both(tmp_path, LlamaConfig(**LARGE, **HEADS), file_bytes=500 * MIB)
    check_growth(tmp_path, whole, [Grid(z=2, x=2), Grid(y=2, x=2), Grid(z=4)])


@glibc
@pytest.mark.slow
def test_another_dtype_costs_no_more(big):
    check_growth(*big, [Grid(y=2, x=2)], torch.float32)


def _grows_by_experts(folder: Path) -> tuple[float, float, float]:
    (found,) = _grows(folder, [Grid(z=2, x=2)], None)
    return found


@glibc
def test_experts_that_lie_apart_cost_no_more(tmp_path):
    """A checkpoint with a tensor for each expert: they are joined where they are to lie, not beside it."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_local_experts": 16}
    config = MixtralConfig(**sizes, vocab_size=512, **HEADS)
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "big", max_shard_size="50MB")
    index = json.loads((tmp_path / "big" / "model.safetensors.index.json").read_text())["weight_map"]
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in index
    small = MixtralConfig(**sizes | {"hidden_size": 64, "intermediate_size": 32}, vocab_size=128, **HEADS)
    AutoModelForCausalLM.from_config(small).save_pretrained(tmp_path / "warm")
    for growth, shard, largest in run_ranks(_grows_by_experts, 4, tmp_path / "big"):
        assert 0.9 * shard < growth < 1.1 * (shard + largest), (growth, shard, largest)


CUT = [Grid(z=2, x=2), Grid(y=2, x=2)]


def auto_class_of(folder: Path) -> type:
    return AutoModelForImageTextToText if folder.name == "qwen3_vl_moe" else AutoModelForCausalLM


def _wrongly_loaded(plain: dict[Path, dict[str, torch.Tensor]], grids: list[list[Grid]]) -> list[str]:
    """Names of what is not, bit for bit, what plain loading gives: weights by the folder of the model."""
    wrong = []
    for (folder, weights), of_model in zip(plain.items(), grids, strict=True):
        for grid in of_model:
            state = from_pretrained(folder, grid=grid, auto_class=auto_class_of(folder)).state_dict()
            for name, value in weights.items():
                own = state[name].full_tensor() if hasattr(state[name], "full_tensor") else state[name]
                if not torch.equal(own, value):
                    wrong.append(f"{folder.name} {grid} {name}")
    return wrong


@pytest.mark.parametrize(
    "grids",
    [
        [[grid] for grid in CUT] * 2,  # each model on one of them
        pytest.param([[*CUT, Grid(y=2, z=2)]] * 4, marks=pytest.mark.slow),
    ],
    ids=["some", "every"],
)
def test_converted_weights_are_cut_after_the_conversion(tmp_path, grids):
    """Chunked (hrm_text), joined on a cut dim (olmo_hybrid), experts stacked (mixtral), transposed (qwen3_vl_moe)."""
    for name in ("hrm_text", "olmo_hybrid", "mixtral"):
        tiny_model(name).save_pretrained(tmp_path / name)
    text = {"hidden_size": 48, "moe_intermediate_size": 22, "intermediate_size": 42, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "num_experts": 4}
    text |= {"num_experts_per_tok": 2, "vocab_size": 131, "rope_parameters": {"mrope_section": [2, 2, 2]}}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 48}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": []}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "qwen3_vl_moe")
    folders = sorted(tmp_path.iterdir())
    plain = {folder: auto_class_of(folder).from_pretrained(folder).state_dict() for folder in folders}
    assert run_ranks(_wrongly_loaded, 4, plain, grids) == [[]] * 4


def _counted(folder: Path, grid: Grid) -> tuple[int, int]:
    """Bytes that a real load copies out of files, and the most for one slice."""
    sizes = []
    stock = unread._copy

    def counting(copy: unread.Copy) -> None:
        source, region, _ = copy
        sizes.append((source[region] if region else source[...]).nbytes)
        stock(copy)

    unread._copy = counting
    try:
        from_pretrained(folder, grid=grid)
    finally:
        unread._copy = stock
    return sum(sizes), max(sizes)


@pytest.mark.parametrize("grid", [Grid(z=2, x=2), pytest.param(Grid(data=2, y=2), marks=pytest.mark.slow)], ids=str)
def test_the_simulation_of_a_load_counts_what_a_load_reads(tmp_path, grid):
    sizes = {"hidden_size": 72, "intermediate_size": 90, "num_hidden_layers": 3, "vocab_size": 131}
    generate(tmp_path / "model", LlamaConfig(**sizes, **HEADS | {"num_attention_heads": 4}), file_bytes=20_000)
    config = AutoConfig.from_pretrained(tmp_path / "model")
    tensors = big_load.stored_tensors(big_load.meta_model(config, grid))
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())["weight_map"]
    simulated = [big_load.reads_of(tensors, index, grid, rank) for rank in range(4)]
    assert run_ranks(_counted, 4, tmp_path / "model", grid) == [(its.bytes, its.largest) for its in simulated]
    assert 2 < len(simulated[0].files) <= len(set(index.values()))


def test_the_shape_of_405_billion_parameters(capsys):
    assert big_load.main(["--grid", "z=16,y=4,x=8", "--ranks", "16"]) == 0
    printed = capsys.readouterr().out
    assert "checkpoint: 811,706,777,600 bytes in 191 files, 1,137 tensors" in printed
    (row,) = re.findall(r"bytes read \| ([\d,]+) \| ([\d,]+)", printed)
    least, most = (int(number.replace(",", "")) for number in row)
    assert 811_706_777_600 / 512 <= least <= most < 1.01 * 811_706_777_600 / 512
    assert "| files touched | 191 | 191 |" in printed


@pytest.mark.parametrize("arguments", [["--grid", "w=2"], ["--grid", "x=1"], ["--grid", "x=2", "--ranks", "0"]])
def test_wrong_arguments_end_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        big_load.main(arguments)
    assert ended.value.code == 2 and "--grid" in capsys.readouterr().err
