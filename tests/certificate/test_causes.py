"""What a wrong gradient consists of, whose losses are others, draws of loaders, and ranks that stand still."""

from __future__ import annotations

import random
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from hf_axonn.certificate import watching
from hf_axonn.certificate.float64 import without_noise
from hf_axonn.certificate.hypotheses import MicroBatch
from hf_axonn.certificate.loaders import Draws, LoaderPatches, PositionCollator, draw_alike, join_batches
from hf_axonn.certificate.mixture import Mixture, describe_mixtures, find_mixture, find_other_losses
from hf_axonn.certificate.shards import Shard


GROUPS = [[0], [1]]
STANDING = """
import faulthandler, os, signal, sys, time
rank = 0 if os.fork() else 1
faulthandler.register(signal.SIGUSR1, file=open(f"{sys.argv[1]}/stack-rank{rank}.txt", "w"), all_threads=False)
open(f"{sys.argv[1]}/pid-rank{rank}.txt", "w").write(str(os.getpid()))
name = ("all_gather", "all_reduce")[rank]
exec(compile(f"def {name}(): time.sleep(600)", "/site/torch/distributed/distributed_c10d.py", "exec"))
open(f"{sys.argv[1]}/begun-rank{rank}.txt", "w").write("trainer-sgd")
exec(compile(f"\\n\\n{name}()", "/home/train.py", "exec"))
"""


def made_batches() -> list[list[MicroBatch]]:
    """Draw two micro-batches for each of two positions."""
    generator = torch.Generator().manual_seed(0)
    return [
        [
            MicroBatch(
                {"a": torch.randn(4, 3, generator=generator, dtype=torch.float64)}, 2.0 + index + place, 5, 5 + place
            )
            for index in range(2)
        ]
        for place in range(2)
    ]


def gradient_of(
    positions: list[list[MicroBatch]], weights: list[list[float]], kept: torch.Tensor | None = None
) -> list[Shard]:
    """The lower half of a gradient that consists of these."""
    tokens = sum(batch.counted for batches in positions for batch in batches)
    whole = sum(
        batch.gradients["a"] * weight / tokens
        for batches, of in zip(positions, weights, strict=True)
        for batch, weight in zip(batches, of, strict=True)
    )
    return [Shard("a", (4, 3), (2, 0), (whole if kept is None else whole + kept)[2:])]


def test_weights_of_a_gradient_are_found():
    positions = made_batches()
    right = find_mixture(gradient_of(positions, [[1, 1], [1, 1]]), [], positions)
    assert right.right
    left = find_mixture(gradient_of(positions, [[1, 1], [0, 1]]), [], positions)
    assert describe_mixtures([left, left], positions, GROUPS) == "the gradients are without micro-batch 1 of rank(s) 1"
    old = torch.ones(4, 3, dtype=torch.float64)
    kept = find_mixture(
        gradient_of(positions, [[1, 1], [1, 1]], 0.25 * old), [Shard("a", (4, 3), (2, 0), old[2:])], positions
    )
    assert kept.kept == pytest.approx(0.25) and "times 0.25: they were not set to zero" in describe_mixtures(
        [kept], positions, GROUPS
    )
    assert find_mixture([Shard("a", (4, 3), (2, 0), old[2:])], [], positions) is None
    text = describe_mixtures([right, left], positions, GROUPS)
    assert text.startswith("the gradients of rank(s) 0 are right; the gradients of rank(s) 1 are without")


def test_clipping_before_averaging_is_told_from_other_weights():
    positions = made_batches()
    tokens = sum(batch.counted for batches in positions for batch in batches)
    norms = [float((2 / tokens * sum(batch.gradients["a"] for batch in batches)).norm()) for batches in positions]
    clipped = [[0.1 / (norm + 1e-6)] * 2 for norm in norms]
    found = find_mixture(gradient_of(positions, clipped), [], positions)
    assert describe_mixtures([found], positions, GROUPS).startswith("the gradients are clipped at 0.1 on each rank")
    other = Mixture(((0.5, 0.5), (0.25, 0.25)), 0.0)
    assert "have micro-batch 1 of rank(s) 0 times 0.5" in describe_mixtures([other], positions, GROUPS)


def test_a_loss_that_is_not_that_of_its_samples_is_told():
    positions = made_batches()
    tokens = sum(batch.counted for batches in positions for batch in batches)
    losses = [[2 * batch.loss / tokens for batch in batches] for batches in positions]
    assert find_other_losses(losses, positions, GROUPS) == ""
    losses[1][1] *= 1.37
    assert find_other_losses(losses, positions, GROUPS).startswith("the loss of rank 1 (micro-batch 2) is not that")
    of_one = [[MicroBatch({}, 2.0, 1, 1)] for _ in positions]  # a loss of 0
    assert find_other_losses([[2.0], [0.0]], of_one, GROUPS).startswith(
        "the loss of rank 1 (micro-batch 1) is not that"
    )
    fewer = [[loss * tokens / (tokens - 1) for loss in each] for each in losses]  # other labels are fewer, too
    assert find_other_losses(fewer, positions, GROUPS).startswith("the loss of rank 1 (micro-batch 2) is not that")


def test_gradients_that_are_rounding_make_no_step():
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    noise = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = torch.optim.Adagrad([weight, noise], lr=1.0, eps=1e-30)
    for exact, moved in ((True, 0.0), (False, 1.0)):
        weight.grad, noise.grad = torch.full_like(weight, 0.3), torch.tensor([1e-17, -1e-17], dtype=torch.float64)
        before = noise.detach().clone()
        with without_noise(exact):
            optimizer.step()
        assert (noise - before).abs().max().item() == pytest.approx(moved) and bool((weight != 1).all())


class Collator:
    """Draws from everything that can be drawn from."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(5)

    def __call__(self, rows):
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        drawn = [torch.rand(()), random.random(), np.random.rand(), self.own.random()]
        return {"input_ids": ids, "labels": ids + 100, "drawn": torch.tensor(drawn).repeat(len(rows), 1)}


def test_draws_of_a_collator_are_those_of_a_positions_rows():
    rows = [[1, 2], [3], [4, 5, 6], [7, 8]]

    def collated(positions: int, batch: int):
        return PositionCollator(
            SimpleNamespace(batch_sampler=None, batch_size=batch),
            Collator(),
            LoaderPatches(positions, 0, lambda made: made),
        )

    before = torch.get_rng_state()
    whole = collated(2, 4)(rows)
    torch.rand(3)  # a rank has drawn something else
    parts = [collated(1, 2)(rows[:2]), collated(1, 2)(rows[2:])]
    assert torch.equal(whole["drawn"], torch.cat([part["drawn"] for part in parts]))
    assert len({tuple(line.tolist()) for line in whole["drawn"]}) == 2
    assert whole["labels"][0].tolist() == [101, 102, -100] and whole["input_ids"].shape == (4, 3)
    torch.set_rng_state(before)
    draws = Draws(None)
    collated(1, 2)(rows[:2])
    assert draws.are_as_before()


def test_batches_that_cannot_be_put_together_are_refused():
    with pytest.raises(ValueError, match="the collator draws at random"):
        join_batches([{"input_ids": torch.zeros(4, 2)}, {"input_ids": torch.zeros(4, 2)}], [2, 2])
    with pytest.raises(ValueError, match="the collator draws at random"):
        join_batches([[1], [2]], [1, 1])


def test_an_order_without_a_generator_is_that_of_the_seed():
    orders = []
    for noise in (3, 5):
        torch.manual_seed(noise)
        orders.append(list(draw_alike(torch.utils.data.RandomSampler(range(20)), 7)))
    assert orders[0] == orders[1]
    assert draw_alike(None, 7) is None


def test_ranks_that_wait_for_each_other_are_ended(tmp_path, monkeypatch):
    """Two processes that are in functions with the names of collectives, in a file with the name of torch's."""
    monkeypatch.setattr(watching, "STILL", 1.0)
    process = subprocess.Popen([sys.executable, "-c", STANDING, str(tmp_path)])
    begun = []
    why = watching.wait_for(process, tmp_path, 120, begun.append)
    assert why.startswith(watching.STANDS_STILL) and begun == ["trainer-sgd"]
    assert "rank 0 in all_gather (home/train.py, line 3), rank 1 in all_reduce (home/train.py, line 3)" in why
    assert process.poll() is not None


def test_a_run_that_ends_by_itself_is_no_run_that_stands_still(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    assert watching.wait_for(process, tmp_path, 120, print) == "" and process.returncode == 0


def test_a_process_in_no_collective_is_not_called_waiting():
    stack = 'Current thread (most recent call first):\n  File "/a/train.py", line 7 in read\n'
    assert watching.place(stack.partition("first)")[2]) == ("", "a/train.py, line 7")
    stack = """  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 9 in all_gather
  File "/x/site-packages/torch/distributed/c10d_logger.py", line 8 in wrapper
  File "/x/site-packages/accelerate/utils/operations.py", line 7 in _gpu_gather
  File "/home/certificate/train.py", line 3 in main
  File "<frozen runpy>", line 88 in _run_code"""
    assert watching.place(stack) == ("all_gather", "certificate/train.py, line 3")
