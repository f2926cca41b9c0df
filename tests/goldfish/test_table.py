"""The table of hash-table: what every CPU draws, and tables that a file brings from another machine."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from hf_axonn.goldfish import table as tables
from hf_axonn.goldfish.mask import goldfish_mask
from hf_axonn.goldfish.table import (
    CPU_TABLE_SHA256,
    TABLE_SIZE,
    cpu_table,
    draw_table,
    load_table,
    main,
    save_table,
    table_sha256,
)
from hf_axonn.goldfish.trainer import GoldfishConfig
from tests.helpers import ROOT


ROW = torch.randint(1, 32000, (1, 4000), generator=torch.Generator().manual_seed(0))


def other_table(path, **about: str) -> torch.Tensor:
    """A table as another device might have drawn it, in a file whose words a test changes."""
    table = torch.rand(TABLE_SIZE, generator=torch.Generator().manual_seed(1))
    save_file({"table": table}, path, metadata={"format": tables._FORMAT, "sha256": table_sha256(table)} | about)
    return table


def test_table_is_the_references():
    table = cpu_table(torch.device("cpu"))
    assert table.shape == (1_000_003,) and table.dtype == torch.float32
    assert table_sha256(table) == CPU_TABLE_SHA256
    assert [round(value, 6) for value in table[[0, 1, 2, 1_000_002]].tolist()] == [
        0.233684,
        0.441264,
        0.741148,
        0.836007,
    ]


def test_a_torch_that_draws_other_numbers_is_refused(monkeypatch):
    monkeypatch.setattr(tables, "draw_table", lambda device: torch.full((TABLE_SIZE,), 0.5))
    cpu_table.cache_clear()
    with pytest.raises(RuntimeError, match=f"not {CPU_TABLE_SHA256}.*goldfish_table=FILE"):
        goldfish_mask(ROW)


def test_a_file_has_the_numbers_and_says_where_they_are_from(tmp_path):
    about = save_table(tmp_path / "table.safetensors", "cpu")
    assert about["sha256"] == CPU_TABLE_SHA256 and about["torch"] == torch.__version__ and "cpu" in about["device"]
    table = load_table(tmp_path / "table.safetensors", CPU_TABLE_SHA256.upper())
    assert torch.equal(table, draw_table())
    assert torch.equal(goldfish_mask(ROW, table=table), goldfish_mask(ROW))


def test_the_mask_is_that_of_the_table(tmp_path):
    table = other_table(tmp_path / "table")
    read = load_table(tmp_path / "table")
    assert torch.equal(read, table)
    mask = goldfish_mask(ROW, table=read, k=4, context_width=2)
    tokens = ROW[0].tolist()
    expected = [t >= 2 and table[tokens[t - 1] * tokens[t] % TABLE_SIZE].item() < 0.25 for t in range(len(tokens))]
    assert mask[0].tolist() == expected
    assert not torch.equal(mask, goldfish_mask(ROW, k=4, context_width=2))


def test_damaged_and_foreign_files_are_refused(tmp_path):
    path = tmp_path / "table"
    with pytest.raises(ValueError, match="cannot be read as a goldfish table"):
        load_table(path)
    save_table(path, "cpu")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"is damaged: .*but it was written with {CPU_TABLE_SHA256}"):
        load_table(path)
    path.write_bytes(content[:-4])
    with pytest.raises(ValueError, match="cannot be read as a goldfish table"):
        load_table(path)
    other_table(path, format="another")
    with pytest.raises(ValueError, match="does not say that it is a goldfish table"):
        load_table(path)
    other_table(path)
    with pytest.raises(ValueError, match=f"has a table with SHA-256 .* but {CPU_TABLE_SHA256} is asked for"):
        load_table(path, CPU_TABLE_SHA256)
    save_file({"table": torch.rand(7)}, path, metadata={"format": tables._FORMAT})
    with pytest.raises(ValueError, match=r"has \(7,\) numbers of torch.float32, not 1000003"):
        load_table(path)


def test_settings_read_the_file_and_keep_its_checksum(tmp_path):
    """The checksum is an argument like others, which ranks compare and a run is logged with."""
    path = str(tmp_path / "table")
    sha256 = table_sha256(other_table(path))
    args = GoldfishConfig(str(tmp_path), use_cpu=True, goldfish_table=path)
    assert args.goldfish_table_sha256 == sha256 and args.to_dict()["goldfish_table_sha256"] == sha256
    for options, message in (
        ({"goldfish_table": path, "goldfish_table_sha256": CPU_TABLE_SHA256}, "is asked for"),
        ({"goldfish_table": path, "goldfish_strategy": "hash"}, "goldfish_strategy=hash: only hash-table"),
        ({"goldfish_table_sha256": sha256}, "is of no table"),
        ({"goldfish_table": str(tmp_path / "none")}, "cannot be read"),
    ):
        with pytest.raises(ValueError, match=message):
            GoldfishConfig(str(tmp_path), use_cpu=True, **options)


def test_the_command_writes_a_table(tmp_path, capsys):
    path = tmp_path / "table"
    main(["--device", "cpu", "--output", str(path)])
    printed = capsys.readouterr().out
    assert f"sha256 {CPU_TABLE_SHA256}, drawn on cpu" in printed and "every CPU draws" in printed
    assert table_sha256(load_table(path)) == CPU_TABLE_SHA256


@pytest.mark.parametrize("options", (["--device", "nothing"], ["--device", "cpu", "--output", "no/such/folder/table"]))
def test_a_command_that_fails_says_why(tmp_path, monkeypatch, capsys, options):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["--output", "table", *options])
    assert f"--device {options[1]} --output" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_the_command_says_so_and_writes_nothing(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path / "table")])
    assert "sees no GPU here" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_command_needs_torch_and_safetensors_alone(tmp_path):
    """It may run on a machine with an old torch, as the one that a checkpoint was trained with."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('transformers', 'accelerate'))); "
        f"from hf_axonn.goldfish.table import main; main(['--device', 'cpu', '--output', {str(tmp_path / 'table')!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert CPU_TABLE_SHA256 in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="draws a table on a GPU: no GPU here")
def test_a_gpu_draws_another_table_and_masks_by_it_anywhere(tmp_path):
    about = save_table(tmp_path / "table", "cuda")
    assert about["sha256"] != CPU_TABLE_SHA256 and "multiprocessors" in about["device"]
    assert about == save_table(tmp_path / "again", "cuda")
    table = load_table(tmp_path / "table", about["sha256"])
    generator = torch.Generator("cuda").manual_seed(tables.TABLE_SEED)
    assert torch.equal(table, torch.rand(TABLE_SIZE, device="cuda", generator=generator).cpu())
    on_gpu = goldfish_mask(ROW.cuda(), table=table.cuda())
    assert torch.equal(on_gpu.cpu(), goldfish_mask(ROW, table=table))
