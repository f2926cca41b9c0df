"""Every strategy on a grid: each number that a run logs is that of one process, in one launch for all of them."""

import itertools
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from hf_axonn import AxonnPlugin, Grid
from hf_axonn.engine.rows import Rows
from hf_axonn.goldfish.mask import STRATEGIES
from hf_axonn.goldfish.table import TABLE_SIZE, save_table, table_sha256
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import make_trainer, train, worst_difference


BRIEF = {"max_steps": 2, "save_strategy": "no", "eval_strategy": "no"}
# z and data cut the batch; x and y, alone in test_fuzz_goldfish.py, share it. The quick grid cuts it.
GRIDS = [Grid(z=2), Grid(z=2, y=2), Grid(data=2, z=2), Grid(z=4, context=2)]


def write_table(path: Path, seed: int) -> None:
    table = torch.rand(TABLE_SIZE, generator=torch.Generator().manual_seed(seed))
    about = {"format": "hf_axonn goldfish table 1", "sha256": table_sha256(table)}
    save_file({"table": table}, path, metadata=about)


def settings(folder: Path, steps: int) -> list[dict]:
    write_table(folder / "table", seed=1)
    return [
        # What is drawn at random is drawn anew in each step.
        *({"goldfish_strategy": name, "max_steps": 2 if "random" in name else steps} for name in STRATEGIES),
        {"goldfish_strategy": "static", "goldfish_start_position": 2, "max_steps": steps},
        {"goldfish_table": str(folder / "table"), "max_steps": steps},
        {"goldfish_as_reference": True, "goldfish_ignored_token": 2, "max_steps": steps},
    ]


def history_of(folder: Path, grid: Grid | None, options: dict) -> list[dict]:
    return train(folder, grid, model=tiny_model("llama", num_hidden_layers=1), **BRIEF | options)


def differences(folder: Path, grid: Grid, runs: list[dict], truth: list[list[dict]]) -> dict[str, float]:
    return {
        f"{grid} {options}": worst_difference(history_of(folder / "run", grid, options), history)
        for options, history in zip(runs, truth, strict=True)
    }


@pytest.mark.parametrize(
    ("grid", "steps"), [(GRIDS[0], 1), *(pytest.param(grid, 2, marks=pytest.mark.slow) for grid in GRIDS[1:])], ids=str
)
def test_each_strategy_equals_one_process(tmp_path, grid, steps):
    runs = settings(tmp_path, steps)
    truth = [history_of(tmp_path / "truth", None, options) for options in runs]
    # Each setting drops other labels than the rest, or the grid could not be seen to follow it. The rows have neither
    # prompts nor documents, so the last one is the default.
    dropped = [history[0]["loss_dropped"] for history in truth]
    assert len(set(dropped)) == len(dropped) - 1 and dropped[-1] == dropped[0]
    for found in run_ranks(differences, grid.size, tmp_path, grid, runs, truth):
        wrong = {name: value for name, value in found.items() if not value < 1e-9}
        assert not wrong


def packed_rows() -> dict[str, torch.Tensor]:
    """Two rows of 21 tokens; documents end before, at and behind position 11, where context 2 cuts them."""
    ids = torch.randint(3, 131, (2, 21), generator=torch.Generator().manual_seed(7))
    ids[:, 12:18] = ids[:, 2:8]  # the same tokens are dropped alike, on either side
    lengths = ((4, 7, 10), (9, 3, 9))
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions}


def kept_targets(folder: Path, plugin: AxonnPlugin | None) -> dict[str, torch.Tensor]:
    """Return the targets of the loss [2, 21] by strategy and width: on a grid joined over the ranks of context."""
    grid = plugin and plugin.grid
    options = BRIEF | ({"parallelism_config": plugin} if plugin else {})
    trainer = make_trainer(folder / "run", grid, kind="llama", **options)
    loss, found = trainer._token_loss(), {}
    name = "weighted_nll" if grid is None else "_own_nll"
    for strategy, width in itertools.product(STRATEGIES, (1, 3, 13)):
        trainer._training_record.end()  # which has one loss for each call of train()
        trainer.args.goldfish_strategy, trainer.args.goldfish_context_width = strategy, width
        batch = trainer._mask_batch(0, packed_rows())
        with mock.patch.object(loss, name, wraps=getattr(loss, name)) as called:
            trainer.compute_loss(trainer.model, batch)
        _, targets, weights = called.call_args.args
        kept = targets.masked_fill(weights == 0, -100).view(2, -1)
        striped = plugin and plugin.config.context_attention == "keys"
        found[f"{strategy} {width}"] = kept if grid is None else join_positions(kept, 21, grid, striped)
    return found


def join_positions(own: torch.Tensor, length: int, grid: Grid, striped: bool) -> torch.Tensor:
    parts = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, own.contiguous())
    filled = own.shape[1] * grid.context
    whole = Rows(grid.place(0), 2, filled, torch.arange(filled), striped=striped)._in_rows(torch.stack(parts))
    assert (whole[:, length:] == -100).all(), "what fills rows up counts nowhere"
    return whole[:, :length]


@pytest.mark.parametrize("way", [pytest.param("heads", marks=pytest.mark.slow), "keys"])
def test_masks_are_of_whole_rows_bit_by_bit(tmp_path, way):
    truth = kept_targets(tmp_path, None)
    assert len({str(targets.tolist()) for targets in truth.values()}) > len(STRATEGIES)
    for found in run_ranks(kept_targets, 2, tmp_path, AxonnPlugin(grid=Grid(z=2, context=2), context_attention=way)):
        assert [name for name, targets in truth.items() if not torch.equal(found[name], targets)] == []


def _with_a_table_of_its_own(folder: Path, same: bool) -> str:
    rank = torch.distributed.get_rank()
    (folder / str(rank)).mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / str(rank))
        if same:
            save_table("table", "cpu")
        else:
            write_table(Path("table"), seed=rank)
        trainer = make_trainer(folder / "run", Grid(x=2), kind="llama", goldfish_table="table", **BRIEF)
        try:
            trainer.train()
        except ValueError as error:
            return str(error)
    return ""


def test_ranks_with_other_tables_under_one_name_are_refused(tmp_path):
    for problem in run_ranks(_with_a_table_of_its_own, 2, tmp_path, False):
        assert "goldfish_table_sha256" in problem
    assert run_ranks(_with_a_table_of_its_own, 2, tmp_path, True) == ["", ""]
