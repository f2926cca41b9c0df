"""Who measures what: first as plain loops over all ranks, then with real processes."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from hf_axonn import Grid
from hf_axonn_eval import Sampler, document_nll, extract
from hf_axonn_eval.extraction.work_split import WorkSplit
from tests.helpers.eval_families import fed_shapes
from tests.helpers.eval_support import samples, tiny_llama, topics_tokenizer, trained_llama
from tests.helpers.ranks import run_ranks


GRIDS = [Grid(), Grid(data=2), Grid(z=3), Grid(x=2, y=2), Grid(data=2, z=2, y=1, x=2), Grid(data=1, z=2, y=3, x=1)]


def work_split_of(grid: Grid, rank: int, monkeypatch, *, travels: bool = False) -> WorkSplit:
    monkeypatch.setattr("hf_axonn_eval.extraction.work_split._world", lambda: (rank, grid.size))
    parallel = SimpleNamespace(grid=grid, coordinates=grid.coordinates(rank), travels_over_z=travels)
    monkeypatch.setattr("hf_axonn.parallel_state", lambda model: parallel)
    return WorkSplit.for_model(object())


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("batches", [0, 1, 4, 7])
def test_every_batch_is_reported_once_and_all_ranks_make_the_same_calls(grid, batches, monkeypatch):
    names = [f"batch {number}" for number in range(batches)]
    reported, calls, by_samples = [], set(), {}
    for rank in range(grid.size):
        rounds = list(work_split_of(grid, rank, monkeypatch).rounds(names))
        calls.add(len(rounds))
        reported += [batch for batch, counts in rounds if counts]
        here = grid.coordinates(rank)
        by_samples.setdefault((here["data"], here["z"]), set()).add(tuple(batch for batch, _ in rounds))
    assert sorted(reported) == names
    assert len(calls) == 1
    assert all(len(seen) == 1 for seen in by_samples.values()), "ranks of one (data, z) must be fed the same samples"


def test_a_plain_model_is_divided_over_the_processes(monkeypatch):
    monkeypatch.setattr("hf_axonn_eval.extraction.work_split._world", lambda: (2, 3))
    work_split = WorkSplit.for_model(object())
    assert (work_split.index, work_split.count, work_split.reports) == (2, 3, True)


def test_without_processes_nothing_is_communicated():
    work_split = WorkSplit()
    assert work_split.gather([1, 2]) == [1, 2]
    assert work_split.maximum(3) == 3
    assert work_split.total([1.5, 2.0]) == [1.5, 2.0]
    assert work_split.on_rank_zero(lambda: "value") == "value"


def test_a_rank_that_does_not_report_makes_every_pass_and_no_result(monkeypatch):
    model, sampler = trained_llama(), Sampler(top_k=5)
    fed, drawn = fed_shapes(model), []
    logprobs = Sampler.logprobs
    monkeypatch.setattr(Sampler, "logprobs", lambda *args: drawn.append(1) or logprobs(*args))
    asked = {"model": model, "tokenizer": topics_tokenizer(), "samples": samples(), "sampler": sampler}
    assert len(extract(**asked, batch_size=3, progress=False)) == len(samples())
    expected, draws = list(fed), len(drawn)
    assert draws and any(columns == 1 for _, columns in expected)
    monkeypatch.setattr(WorkSplit, "for_model", classmethod(lambda cls, model: cls(reports=False)))
    monkeypatch.setattr("hf_axonn_eval.extraction.runner.result_of", None)
    assert extract(**asked, batch_size=3, progress=False) == []
    assert fed[len(expected) :] == expected and len(drawn) == draws


def worker(directory: str) -> tuple:
    rank, work_split = dist.get_rank(), WorkSplit.for_model(None)

    assert work_split.gather([rank, rank]) == ([0, 0, 1, 1] if rank == 0 else [])
    assert work_split.maximum(10 * rank) == 10
    assert work_split.total([rank + 1.0, 2.0]) == [3.0, 4.0]
    with pytest.raises(ValueError, match="told to all"):  # on both ranks: neither waits for the other

        def fail():
            raise ValueError("told to all")

        work_split.on_rank_zero(fail)

    # 11 samples in batches of 2 are 6 batches; the second run goes on where a stop left the first
    model = trained_llama()
    record, output = {"fingerprint": "trained"}, os.path.join(directory, "run")
    some = samples()[:11]
    options = {"output": output, "model_record": record, "batch_size": 2, "progress": False}
    results = extract(model, topics_tokenizer(), some, **options)
    if rank == 0:
        file = Path(output, "results.jsonl")
        lines = file.read_text().splitlines(keepends=True)
        assert len(lines) == 11
        file.write_text("".join(lines[:3]) + lines[3][:40])
    again = extract(model, topics_tokenizer(), some, **options)
    with pytest.raises(ValueError, match="holds another run"):
        extract(model, topics_tokenizer(), some[:10], **options)

    loss = document_nll(model, [sample.prefix + sample.suffix[: 3 + i % 4] for i, sample in enumerate(some)])
    return results, again, loss


def test_two_processes_measure_what_one_does(tmp_path):
    trained_llama(), topics_tokenizer(), samples(), tiny_llama()  # made before the fork, shared after it
    (first, first_again, first_loss), (second, second_again, second_loss) = run_ranks(worker, 2, str(tmp_path))
    some = samples()[:11]
    alone = extract(trained_llama(), topics_tokenizer(), some, batch_size=2, progress=False)
    assert second == second_again == []
    for results in (first, first_again):
        assert [result.sample_id for result in results] == [sample.sample_id for sample in some]
        assert [result.generated for result in results] == [result.generated for result in alone]
        for result, expected in zip(results, alone, strict=True):
            assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    expected = document_nll(
        trained_llama(), [sample.prefix + sample.suffix[: 3 + i % 4] for i, sample in enumerate(some)]
    )
    assert first_loss == second_loss == (pytest.approx(expected.nll, rel=1e-6), expected.tokens)


def test_the_share_of_a_rank_by_its_coordinates(monkeypatch):
    grid = Grid(data=2, z=3, y=1, x=2)
    found = {}
    for rank in range(grid.size):
        split, here = work_split_of(grid, rank, monkeypatch), grid.coordinates(rank)
        assert (split.count, split.rank, split.world_size) == (6, rank, 12)
        assert split.reports == (here["x"] == 0)
        found[here["data"], here["z"]] = split.index
    assert found == {(0, 0): 0, (0, 1): 1, (0, 2): 2, (1, 0): 3, (1, 1): 4, (1, 2): 5}
    for rank in range(grid.size):  # tokens travel over z: its ranks have one share
        split, here = work_split_of(grid, rank, monkeypatch, travels=True), grid.coordinates(rank)
        assert (split.count, split.index) == (2, here["data"])
        assert split.reports == (here["z"] == here["x"] == 0)
    others = Grid(y=2, x=2)
    reporting = [work_split_of(others, rank, monkeypatch).reports for rank in range(4)]
    assert reporting == [True, False, False, False]


def test_a_rank_without_a_batch_repeats_the_last_one():
    batches = ["a", "b", "c"]
    assert list(WorkSplit(index=0, count=2, world_size=2).rounds(batches)) == [("a", True), ("c", True)]
    assert list(WorkSplit(index=1, count=2, world_size=2).rounds(batches)) == [("b", True), ("c", False)]
    assert list(WorkSplit(index=1, count=2, reports=False).rounds(batches)) == [("b", False), ("c", False)]
    plain = WorkSplit()
    assert (plain.index, plain.count, plain.reports, plain.rank, plain.world_size) == (0, 1, True, 0, 1)
    with pytest.raises(AttributeError):
        plain.rank = 1
    with pytest.raises(TypeError):
        WorkSplit(0)
