"""A run that goes on in the middle of any epoch has the order of the unbroken one."""

from __future__ import annotations

import json

import pytest
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader

from hf_axonn.accelerator.shuffling import SampleOrder


def started(as_one_process: bool) -> tuple[SampleOrder, DataLoader, DataLoader]:
    """A loader that shuffles, and one that does not, as after `prepare`."""
    torch.manual_seed(3)
    order = SampleOrder()
    loaders = DataLoader(range(11), batch_size=2, shuffle=True), DataLoader(range(3))
    generator = order.adopt(loaders[0].sampler, as_one_process=as_one_process, resumable=True)
    train, evaluation = (prepare_data_loader(loader, put_on_device=False) for loader in loaders)
    for loader in (train, evaluation):
        loader.base_dataloader.generator = order.shared
    assert (generator is order.shared) == as_one_process
    return order, train, evaluation


def seen(order, train, evaluation, epochs, *, skip=0, save_at=None):
    """The batches of some epochs, of which the first may skip some; and what a state saved on the way would hold."""
    batches, saved = [], None
    for epoch in epochs:
        loader = skip_first_batches(train, skip) if skip and epoch == epochs[0] else train
        for number, batch in enumerate(loader, start=skip if loader is not train else 0):
            batches.append((epoch, number, batch.tolist()))
            if (epoch, number) == save_at:
                saved = json.dumps(order.state((train, evaluation)))
        list(evaluation)
    return batches, saved


@pytest.mark.parametrize("as_one_process", [True, False])
@pytest.mark.parametrize("epoch, number", [(0, 2), (1, 0), (2, 4), (1, 5)])
def test_an_epoch_goes_on_in_its_order(as_one_process, epoch, number):
    unbroken, saved = seen(*started(as_one_process), range(4), save_at=(epoch, number))
    order, train, evaluation = started(as_one_process)
    list(evaluation)
    torch.manual_seed(99)
    order.resume(json.loads(saved), (evaluation, train))
    rest, _ = seen(order, train, evaluation, range(epoch, 4), skip=number + 1)
    assert rest == [batch for batch in unbroken if batch[:2] > (epoch, number)]
    assert len({tuple(map(tuple, (b for e, _, b in unbroken if e == one))) for one in range(4)}) == 4


@pytest.mark.parametrize("as_one_process", [True, False])
def test_a_new_epoch_has_a_new_order(as_one_process):
    """A state of the end of an epoch, and one that skips nothing."""
    order, train, evaluation = started(as_one_process)
    unbroken, _ = seen(order, train, evaluation, range(2))
    saved = order.state((train, evaluation))
    assert saved[0]["began"] is None
    third, _ = seen(order, train, evaluation, [2])
    order, train, evaluation = started(as_one_process)
    order.resume(saved, (train, evaluation))
    assert seen(order, train, evaluation, [2])[0] == third
    order.resume([record | {"began": record["now"]} for record in saved], (train, evaluation))
    assert seen(order, train, evaluation, [2])[0] == third


@pytest.mark.parametrize("as_one_process", [True, False])
def test_an_open_epoch_keeps_its_order_on_another_grid(as_one_process):
    """Where the one shuffles as one process and the other as several; later epochs have orders of their own."""
    unbroken, saved = seen(*started(as_one_process), range(2), save_at=(1, 2))
    order, *loaders = started(not as_one_process)
    order.resume(json.loads(saved), loaders)
    rest, _ = seen(order, *loaders, range(1, 4), skip=3)
    assert rest[:3] == [batch for batch in unbroken if batch[:2] > (1, 2)]
    for epoch in (2, 3):
        assert sorted(sum((rows for its, _, rows in rest if its == epoch), [])) == list(range(11))
