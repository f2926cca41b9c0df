"""Comparing without processes: records as ranks would leave them."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_axonn.certificate.compare import Runs, find_sample_problem, group_ranks, is_filled_up, shard_errors
from hf_axonn.certificate.hypotheses import close, name_factor
from hf_axonn.certificate.recording import Record, Recorder
from hf_axonn.certificate.rows import collate, make_rows, seen_in, tokens_of
from hf_axonn.certificate.shards import (
    Shard,
    assemble,
    copied_shards,
    load_shards,
    plain_name,
    save_shards,
    shards_of,
)


ROWS = make_rows(9, 100, 0)


def test_flat_parts_of_zero_are_put_together():
    """Of ranks of ZeRO-1: one has the first four numbers of a matrix, the other one the rest, and a bias."""
    model = nn.Linear(3, 2)
    whole, bias = (parameter.detach().clone() for parameter in (model.weight, model.bias))
    ranks = []
    for start, numel, of_bias in ((0, 4, None), (4, 2, (0, 2))):
        for parameter, part in ((model.weight, (start, numel)), (model.bias, of_bias)):
            parameter._hp_mapping = None if part is None else fragment(parameter, *part)
        ranks.append(shards_of(model, gradients=False))
    assert [[(shard.name, shard.offsets) for shard in shards] for shards in ranks] == [
        [("weight", (0,))],
        [("weight", (4,)), ("bias", (0,))],
    ]
    assert all(
        torch.equal(values, {"weight": whole, "bias": bias}[name].double()) for name, values in assemble(ranks).items()
    )
    assert [shard.values.shape for shard in copied_shards(model)] == [(6,), (2,)]
    truth = {"weight": whole.double() + torch.tensor([[0, 0, 0], [0, 1, 0]]), "bias": bias.double()}
    sizes = [[error.size > 0 for error in shard_errors(shards, truth, 1, 0)] for shards in ranks]
    assert sizes == [[False], [True, False]]


def fragment(parameter, start: int, numel: int) -> SimpleNamespace:
    """What DeepSpeed says of the part of a parameter that a rank has."""
    values = parameter.detach().flatten()[start : start + numel].clone()
    address = SimpleNamespace(start=start, numel=numel)
    return SimpleNamespace(lp_fragment_address=address, get_hp_fragment=lambda: values)


def record(folder, rank: int, steps: list[list[list[int]]]) -> Record:
    """What a rank leaves that saw these rows."""
    recorder = Recorder(folder, rank, ROWS)
    model = nn.Linear(2, 2, dtype=torch.float64)
    recorder.start(model)
    for batches in steps:
        for batch in batches:
            recorder.batch(collate([ROWS[row] for row in batch]), torch.tensor(float(rank)))
        recorder.end_step(model)
    recorder.close(norms=[1.0] * len(steps))
    return Record(folder, rank)


def runs(folder, one, *many) -> Runs:
    """The runs of one process and of several."""
    return Runs(record(folder / "one", 0, one), [record(folder / "many", rank, its) for rank, its in enumerate(many)])


def test_rows_differ_in_length_and_labels():
    lengths = {len(row["input_ids"]) for row in ROWS}
    assert len(lengths) > 3
    batch = collate(ROWS)
    assert seen_in(batch, ROWS) == list(range(9))
    assert tokens_of(batch) == sum(sum(label != -100 for label in row["labels"][1:]) for row in ROWS)
    empty = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    assert seen_in(empty, ROWS) == []
    with pytest.raises(ValueError, match="a vocabulary of 8 is too small"):
        make_rows(30, 8, 0)


def test_every_sample_once(tmp_path):
    both = runs(tmp_path, [[[0, 1, 2, 3]], [[4, 5]]], [[[0, 1]], [[4]]], [[[2, 3]], [[5]]])
    groups = group_ranks(both.many)
    assert groups == [[0], [1]]
    assert [find_sample_problem(both, groups, 2, step) for step in (1, 2)] == ["", ""]


def test_ranks_with_the_same_samples_are_one_position(tmp_path):
    both = runs(tmp_path, [[[0, 1]]], [[[0, 1]]], [[[0, 1]]])
    assert find_sample_problem(both, group_ranks(both.many), 1, 1) == ""
    problem = find_sample_problem(both, group_ranks(both.many), 2, 1)
    assert problem == "" or "on 2 data-parallel positions" in problem


def test_missing_and_repeated_samples_arename_factor(tmp_path):
    both = runs(tmp_path, [[[0, 1, 2, 3]]], [[[0, 1]]], [[[3, 3]]])
    problem = find_sample_problem(both, group_ranks(both.many), 2, 1)
    assert problem == "samples 2 were seen by no rank; samples 3 were seen once too often"


def test_samples_of_the_beginning_fill_the_end(tmp_path):
    both = runs(tmp_path, [[[5, 1, 2, 3]], [[4]]], [[[5, 1]], [[4, 5]]], [[[2, 3]], [[1, 2]]])
    groups = group_ranks(both.many)
    assert is_filled_up(both, groups, 2, 2, 2)
    assert not is_filled_up(both, groups, 2, 1, 2)


def test_pieces_of_ranks_are_put_together(tmp_path):
    whole = torch.arange(6.0, dtype=torch.float64).reshape(3, 2)
    ranks = [[Shard("w", (3, 2), (0, 0), whole[:2])], [Shard("w", (3, 2), (2, 0), whole[2:])]]
    assert torch.equal(assemble(ranks)["w"], whole)
    with pytest.raises(ValueError, match="w: 2 of 6 numbers are on no rank"):
        assemble(ranks[:1])
    save_shards(tmp_path / "file", ranks[1])
    (read,) = load_shards(tmp_path / "file")
    assert read.offsets == (2, 0) and torch.equal(read.values, whole[2:])


def test_errors_are_of_every_rank_and_have_names():
    truth = {"a": torch.ones(4, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}
    wrong = [Shard("a", (4,), (2,), torch.tensor([1.0, 1.5], dtype=torch.float64))]
    (error,) = shard_errors(wrong, truth, 3, 1)
    assert (error.name, error.step, error.rank) == ("a", 3, 1) and error.size == pytest.approx(0.5)
    nan = [Shard("a", (4,), (0,), torch.full((4,), math.nan, dtype=torch.float64))]
    assert shard_errors(nan, truth, 1, 0)[0].size == math.inf
    assert "on one process [4]" in shard_errors([Shard("a", (5,), (0,), torch.ones(5))], truth, 1, 0)[0].text
    assert shard_errors([Shard("c", (1,), (0,), torch.ones(1))], truth, 1, 0)[0].text == "not there on one process"


def test_names_are_those_without_wrappers():
    assert plain_name("module.model.layers.0._checkpoint_wrapped_module.mlp.weight") == "model.layers.0.mlp.weight"
    model = nn.Sequential(nn.Linear(1, 1))
    assert [shard.name for shard in shards_of(model, gradients=False)] == ["0.weight", "0.bias"]
    assert shards_of(model, gradients=True) == []


def test_factors_have_names():
    factors = {"ranks": 4, "data-parallel positions": 2}
    assert name_factor(2.0, factors) == "2 (the number of data-parallel positions)"
    assert name_factor(0.25, factors) == "0.25 (1 / the number of ranks)"
    assert name_factor(3.0, factors) == "3"
    assert close(1.0, 1 + 1e-9) and not close(1.0, 1.1)
