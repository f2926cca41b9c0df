"""tests/helpers/devices.py, with GPUs that are only said to be there."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

from hf_axonn.launch.notebook import _has_autograd_threads
from tests.helpers import devices
from tests.helpers.devices import CPUS, Devices, moved
from tests.helpers.ranks import run_ranks


ONE, FOUR = Devices("cuda", 1), Devices("cuda", 4)


def test_nccl_has_a_gpu_for_each_rank_and_gloo_shares_one():
    assert [CPUS.backend(world) for world in (1, 8)] == ["gloo", "gloo"]
    assert [FOUR.backend(world) for world in (1, 2, 4)] == ["nccl"] * 3
    assert [ONE.backend(world) for world in (1, 2, 4)] == ["nccl", "gloo", "gloo"]
    assert [str(FOUR.of_rank(rank)) for rank in range(4)] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert {ONE.of_rank(rank) for rank in range(4)} == {torch.device("cuda", 0)}
    assert CPUS.of_rank(3) == torch.device("cpu")


def test_what_does_not_fit_is_skipped_with_the_numbers():
    assert CPUS.skip_reason(8) is ONE.skip_reason(8) is FOUR.skip_reason(4) is None
    assert FOUR.skip_reason(6) == "6 ranks need 6 GPUs, and there are 4"
    assert Devices("cuda", 0).skip_reason(1) == "HF_AXONN_TEST_DEVICE=cuda, but torch finds no GPU here"
    with devices.used(FOUR), pytest.raises(pytest.skip.Exception, match="6 ranks need 6 GPUs"):
        run_ranks(print, 6)


class Served(Devices):
    """GPUs as far as their ranks are started, which compute on CPUs."""

    def backend(self, world):
        return "gloo"

    def of_rank(self, rank):
        return torch.device("cpu")


def ends(weight):
    (weight.square().sum() / 2).backward()
    return dist.get_rank(), os.getppid(), weight.grad


# What starts threads of autograd where torch was built for CUDA or finds GPUs; this process shall not get them.
USED = """
import os, torch
from torch._subclasses import FakeTensorMode
from tests.helpers import devices
from tests.helpers.ranks import run_ranks
from tests.repository.test_devices import Served, ends
with FakeTensorMode():
    torch.ones(1, device="cuda" if torch.backends.cuda.is_built() else "cpu")
torch.ones(2, requires_grad=True).sum().backward()
with devices.used(Served("cuda", 2)):
    found = run_ranks(ends, 2, torch.ones(3, requires_grad=True))
assert [rank for rank, _, _ in found] == [0, 1] and len({parent for _, parent, _ in found} - {os.getpid()}) == 1
assert all(torch.equal(gradient, torch.ones(3)) for _, _, gradient in found)
"""


@pytest.mark.slow
def test_ranks_on_gpus_are_forked_by_a_server_which_went_not_backward():
    subprocess.run([sys.executable, "-c", USED], check=True, timeout=120)


def test_this_process_has_no_threads_of_autograd():
    """Forks of it go backward, also where torch was built for CUDA and has made fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.ones(1)
    torch.ones((), requires_grad=True).backward()
    assert not _has_autograd_threads()


def test_the_environment_chooses(monkeypatch):
    devices.chosen.cache_clear()
    monkeypatch.setattr(devices, "_gpu_count", lambda: 3)
    try:
        monkeypatch.delenv(devices.CHOICE, raising=False)
        assert devices.chosen() is CPUS
        devices.chosen.cache_clear()
        monkeypatch.setenv(devices.CHOICE, "cuda")
        assert devices.chosen() == Devices("cuda", 3)
        devices.chosen.cache_clear()
        monkeypatch.setenv(devices.CHOICE, "gpu")
        with pytest.raises(ValueError, match="is 'gpu', but it is cpu or cuda"):
            devices.chosen()
    finally:
        devices.chosen.cache_clear()


def test_counting_gpus_leaves_cuda_alone():
    assert devices._gpu_count() >= 0 and not torch.cuda.is_initialized()


def test_the_fixture_is_what_ranks_are_started_on(device):
    assert devices.in_use() is device is devices.chosen()
    with devices.used(ONE):
        assert devices.in_use() is ONE
    assert devices.in_use() is device


@dataclasses.dataclass
class Given:
    name: str
    tensors: list


def test_tensors_move_wherever_they_are():
    value = Given("a", [torch.ones(2), {"b": (torch.zeros(1), None)}])
    there = moved((value, functools.partial(print, torch.ones(3), end=torch.ones(4)), 5), torch.device("meta"))
    given, partial, number = there
    assert given.name == "a" and number == 5 and value.tensors[0].device.type == "cpu"
    tensors = [given.tensors[0], given.tensors[1]["b"][0], partial.args[0], partial.keywords["end"]]
    assert all(tensor.is_meta for tensor in tensors) and [len(tensor) for tensor in tensors] == [2, 1, 3, 4]
    assert given.tensors[1]["b"][1] is None and partial.func is print


def of_this_rank():
    return dist.get_backend(), str(devices.rank_device()), torch.ones(2)


def test_without_a_choice_ranks_are_gloo_on_cpus():
    for backend, device, value in run_ranks(of_this_rank, 2):
        assert (backend, device) == ("gloo", "cpu") and value.device.type == "cpu"
