"""In which passes batches are compared, and what is said where they differ."""

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

import hf_axonn
from hf_axonn import Grid
from hf_axonn.compat.accelerate import forget_state
from hf_axonn.distributed.mesh import SAME_SAMPLES
from hf_axonn.parallel.batch_check import BatchCheck, checksum
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import refused, run_ranks


class Mesh:
    """The sizes of a mesh, and nothing behind them."""

    device = torch.device("cpu")

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self, *axes: str) -> int:
        assert axes == SAME_SAMPLES
        return self.ranks


class Noted(BatchCheck):
    """Notes the batches of every comparison instead of making it."""

    def __init__(self, ranks: int) -> None:
        self.compared: list[int] = []
        super().__init__(Mesh(ranks), nn.Linear(1, 1))

    def _compare(self, tensors, since) -> None:
        self.compared.append(since.batches)


@pytest.mark.parametrize("training", [True, False])
def test_the_first_passes_and_every_32nd_compare_all_batches_since(training):
    check = Noted(2)
    check.model.train(training)
    for number in range(100):
        check((torch.tensor([number]),), {})
    assert check.compared == [1, 1, 1, 1, 29, 32, 32]  # passes 0 to 3, 32, 64, 96


def test_evaluation_counts_for_itself():
    check = Noted(2)
    for number in range(40):
        check.model.train(number % 2 == 0)
        check((torch.tensor([number]),), {})
    assert check.compared == [1] * 8


def test_random_states_are_compared_while_something_drops():
    check = Noted(2)
    check.model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.0))
    assert not check._uses_random()
    check.model[1].p = 0.1  # as a schedule, or an adapter that is added later
    assert check._uses_random()
    assert not (check.model.eval() and check._uses_random())


def test_the_first_pass_of_each_epoch_compares():
    forget_state()
    check = Noted(2)
    accelerator = Accelerator(cpu=True)
    loader, other = (accelerator.prepare(DataLoader(torch.arange(10))) for _ in range(2))
    for each in (loader, loader, other):
        for batch in each:
            check((batch,), {})
    check((batch,), {})  # not read from a loader
    assert check.compared == [1, 1, 1, 1, 7, 10]  # passes 0 to 3, 10, 20
    forget_state()


def test_where_no_ranks_share_samples_nothing_is_compared():
    check = Noted(1)
    check((torch.tensor([1]),), {})
    assert check.compared == []


def _batches() -> dict[str, str]:
    me = dist.get_rank()
    model, _ = hf_axonn.parallelize(tiny_model("llama", attention_dropout=0.1), Grid(x=2))
    found = {}

    def call(**changes):
        batch = tiny_batch(2, 8) | changes
        return lambda: model(**batch)

    model.train()
    torch.manual_seed(5)
    call()()  # the same: nothing is said
    found["shape"] = refused(lambda: model(**tiny_batch(2, 8 + me)))
    found["content"] = refused(lambda: model(**tiny_batch(2, 8, seed=3 + me)))
    torch.manual_seed(5 + me)
    found["random"] = refused(call())
    noisy = tiny_model("mixtral", router_jitter_noise=0.1, experts_implementation="eager")
    hf_axonn.parallelize(noisy, Grid(x=2))
    torch.manual_seed(5 + me)
    found["jitter"] = refused(lambda: noisy.train()(**tiny_batch(2, 8)))
    model.eval()  # drops nothing, so random numbers are not needed
    call()()
    found["keys"] = refused(call(**({"position_ids": torch.arange(8)[None]} if me else {})))
    # After the first four passes one batch that differs is found at the 32nd, once.
    with torch.no_grad():
        for _ in range(2):
            call()()
        model(**tiny_batch(2, 8, seed=3 + me))
        for _ in range(27):
            call()()
        found["earlier"] = refused(call())
        for _ in range(32):
            call()()
    return found


def test_what_is_found_at_the_first_step():
    found = run_ranks(_batches, 2)[0]
    assert all("data=0, z=0" in text for text in found.values())
    assert "input_ids is [2, 8] int64" in found["shape"] and "[2, 9] int64" in found["shape"]
    assert "input_ids is [2, 8] int64" in found["content"] and "on rank 1" in found["content"]
    assert "a batch among the last 29 is of checksum " in found["earlier"] and "Feed ranks" in found["earlier"]
    assert not any("among" in text for name, text in found.items() if name != "earlier")
    for name in ("random", "jitter"):
        assert "of seed 5) on rank 0" in found[name] and "set_seed" in found[name]
    assert "position_ids is missing on rank 0" in found["keys"]


def _rows_of_one_context_group() -> str:
    model, _ = hf_axonn.parallelize(tiny_model("llama"), Grid(z=2, context=2))
    return refused(lambda: model.train()(**tiny_batch(2, 8, seed=3 + dist.get_rank())))


def test_ranks_of_context_are_given_the_same_rows():
    for text in run_ranks(_rows_of_one_context_group, 2):
        assert text.startswith("ranks that share samples (data=0, rows=0) were not given the same")
        assert "input_ids is [2, 8] int64" in text and "Feed ranks by their (data, rows)" in text


def _different_samples() -> None:
    """Ranks of data and z have their own samples, of any length, and their own random state."""
    me = dist.get_rank()
    model, _ = hf_axonn.parallelize(tiny_model("llama", attention_dropout=0.1), Grid(data=2))
    torch.manual_seed(me)
    model.train()
    model(**tiny_batch(2, 8 + me, seed=me)).loss.backward()


def test_ranks_with_samples_of_their_own_are_left_alone():
    run_ranks(_different_samples, 2)


def test_a_checksum_sees_values_and_their_places():
    one = torch.arange(12).view(3, 4)
    assert checksum(one) != checksum(one.flip(0)) and checksum(one) != checksum(one.view(3, 4) + 1)
    assert checksum(one) == checksum(one.clone()) and checksum(one.float()) == 0
    assert checksum(torch.tensor([True, False])) != checksum(torch.tensor([False, True]))
