"""Every strategy on four ranks: each number that a run logs is that of one process, in one launch for all of them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_axonn import Grid
from hf_axonn.goldfish.mask import STRATEGIES
from hf_axonn.goldfish.table import TABLE_SIZE, save_table, table_sha256
from tests.helpers.ranks import run_ranks
from tests.helpers.training import make_trainer, train, worst_difference


BRIEF = {"max_steps": 2, "save_strategy": "no", "eval_strategy": "no", "kind": "llama"}
# z and data cut the batch; x and y, alone in test_fuzz_goldfish.py, share it. The quick grid has one of each.
GRIDS = [Grid(z=2, y=2), Grid(data=2, z=2)]


def write_table(path: Path, seed: int) -> None:
    table = torch.rand(TABLE_SIZE, generator=torch.Generator().manual_seed(seed))
    about = {"format": "hf_axonn goldfish table 1", "sha256": table_sha256(table)}
    save_file({"table": table}, path, metadata=about)


def settings(folder: Path) -> list[dict]:
    write_table(folder / "table", seed=1)
    return [
        *({"goldfish_strategy": strategy} for strategy in STRATEGIES),
        {"goldfish_strategy": "static", "goldfish_start_position": 2},
        {"goldfish_table": str(folder / "table")},
        {"goldfish_as_reference": True, "goldfish_ignored_token": 2},
    ]


def differences(folder: Path, grids: list[Grid], asked: list[dict], truth: list[list[dict]]) -> dict[str, float]:
    return {
        f"{grid} {options}": worst_difference(train(folder / "run", grid, **BRIEF, **options), history)
        for grid in grids
        for options, history in zip(asked, truth, strict=True)
    }


@pytest.mark.parametrize("grids", [GRIDS[:1], pytest.param(GRIDS[1:], marks=pytest.mark.slow)], ids=str)
def test_each_strategy_equals_one_process(tmp_path, grids):
    asked = settings(tmp_path)
    truth = [train(tmp_path / "truth", **BRIEF, **options) for options in asked]
    # Each setting drops other labels than the rest, or the grid could not be seen to follow it. The rows have neither
    # prompts nor documents, so the last one is the default.
    dropped = [tuple(entry["loss_dropped"] for entry in history[:2]) for history in truth]
    assert len(set(dropped)) == len(dropped) - 1 and dropped[-1] == dropped[0]
    for found in run_ranks(differences, 4, tmp_path, grids, asked, truth):
        wrong = {name: value for name, value in found.items() if not value < 1e-9}
        assert not wrong


def _with_a_table_of_its_own(folder: Path, same: bool) -> str:
    rank = torch.distributed.get_rank()
    (folder / str(rank)).mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / str(rank))
        if same:
            save_table("table", "cpu")
        else:
            write_table(Path("table"), seed=rank)
        trainer = make_trainer(folder / "run", Grid(x=2), goldfish_table="table", **BRIEF)
        try:
            trainer.train()
        except ValueError as error:
            return str(error)
    return ""


def test_ranks_with_other_tables_under_one_name_are_refused(tmp_path):
    for problem in run_ranks(_with_a_table_of_its_own, 2, tmp_path, False):
        assert "goldfish_table_sha256" in problem
    assert run_ranks(_with_a_table_of_its_own, 2, tmp_path, True) == ["", ""]
