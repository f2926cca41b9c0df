"""What accelerate's own scripts check, for grids whose ranks share samples; started by `accelerate launch`.

Nothing here names a grid to accelerate: it is a script as a user has it, and looks at what it gets. The truth is the
same loop on one process, without accelerate, on every rank.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import accelerate
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import GradientState
from accelerate.utils import DataLoaderConfiguration, broadcast_object_list, gather_object, set_seed
from torch.utils.data import DataLoader, IterableDataset

from tests.helpers.float64 import Float64
from tests.helpers.models import tiny_model


ROWS = 19
STEPS, MICRO, BATCH = 4, 2, 4  # rows of a micro-batch over all positions
BOUND = 1e-10


class Stream(IterableDataset):
    """Rows of which one does not know how many there are."""

    def __iter__(self):
        yield from ({"row": row} for row in range(ROWS))


def new_accelerator(**options) -> Accelerator:
    """As a script makes it; the grid comes from the launcher."""
    GradientState._reset_state()
    return Accelerator(**options)


def place(accelerator: Accelerator) -> tuple[int, int]:
    """This rank's position among those with samples of their own, and their number."""
    state, positions = PartialState(), accelerator.parallelism_config.data_parallel_size
    found = state.process_index * positions // state.num_processes, positions
    assert (accelerator.process_index, accelerator.num_processes) == found
    return found


def check_loaders() -> None:
    """Every row once in what is counted; ranks that share samples get the same, others not."""
    rows = [{"row": row} for row in range(ROWS)]
    for options in ({}, {"dispatch_batches": True}, {"split_batches": True}, {"use_seedable_sampler": True}):
        accelerator = new_accelerator(dataloader_config=DataLoaderConfiguration(**options))
        position, positions = place(accelerator)
        for loader in (
            DataLoader(rows, batch_size=4, shuffle=True),
            DataLoader(rows, batch_size=4, num_workers=1),
            DataLoader(rows, batch_size=4, drop_last=True),
            DataLoader(Stream(), batch_size=4),
        ):
            wanted = ROWS
            if loader.drop_last:
                each = 4 if options.get("split_batches") else 4 * positions
                wanted = ROWS // each * each
            set_seed(3)
            prepared = accelerator.prepare(loader)
            for epoch in range(2):
                prepared.set_epoch(epoch)
                counted, own = [], []
                for batch in prepared:
                    own += batch["row"].tolist()
                    counted += accelerator.gather_for_metrics(batch)["row"].tolist()
                assert len(counted) == len(set(counted)) == wanted, (options, counted)
                every = gather_object([own])
                for rank, its in enumerate(every):
                    same = rank * positions // len(every) == position
                    assert (its == own) == same, (options, rank, its, own)
            if loader.drop_last and not options.get("dispatch_batches"):
                skipped = [
                    row for batch in accelerator.skip_first_batches(prepared, 1) for row in batch["row"].tolist()
                ]
                assert skipped == own[-len(skipped) :] and len(skipped) == len(own) - (len(own) // len(prepared))


def check_operations(folder: Path) -> None:
    """Each position counts once in the accelerator's methods, each process in accelerate's functions."""
    accelerator = new_accelerator()
    position, positions = place(accelerator)
    mine, ranks = PartialState().process_index, PartialState().num_processes
    assert sum(gather_object([accelerator.is_main_process])) == sum(gather_object([accelerator.is_last_process])) == 1
    own = torch.tensor([[position, 7.0]])
    assert accelerator.gather(own)[:, 0].tolist() == list(range(positions))
    assert accelerator.gather_for_metrics([f"at {position}"]) == [f"at {its}" for its in range(positions)]
    assert accelerator.reduce(own, "sum").tolist() == [[sum(range(positions)), 7.0 * positions]]
    assert accelerator.reduce(own, "mean").tolist() == [[sum(range(positions)) / positions, 7.0]]
    ragged = accelerator.pad_across_processes(torch.ones(1 + position), pad_index=-1)
    assert (accelerator.gather(ragged) == -1).sum() == sum(positions - 1 - its for its in range(positions))
    with accelerator.split_between_processes(list(range(5))) as part:
        assert sorted(set(sum(gather_object([part]), []))) == list(range(5))
        every = gather_object([part])
        assert all((its == part) == (rank * positions // ranks == position) for rank, its in enumerate(every))
    assert accelerate.utils.gather(torch.tensor([mine])).tolist() == list(range(ranks))
    assert broadcast_object_list([mine], from_process=ranks - 1) == [ranks - 1]
    written = folder / "written"
    with accelerator.main_process_first():
        assert written.exists() != accelerator.is_main_process
        written.touch()
    for rank in range(ranks):
        if mine == rank:
            accelerator.set_trigger()
        assert accelerator.check_trigger() and not accelerator.check_trigger()


def token_rows() -> torch.Tensor:
    """[STEPS * MICRO * BATCH, 12]."""
    return torch.randint(3, 131, (STEPS * MICRO * BATCH, 12), generator=torch.Generator().manual_seed(1))


def on_one_process() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, norms and the weights in the end."""
    model = tiny_model("llama").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for number, ids in enumerate(token_rows().split(BATCH)):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        (loss / MICRO).backward()
        if number % MICRO == MICRO - 1:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms, model.state_dict()


def differ(own: list[float], true: list[float]) -> bool:
    """Whether numbers are further apart than rounding."""
    return len(own) != len(true) or any(abs(a - b) > BOUND * max(1.0, abs(b)) for a, b in zip(own, true, strict=True))


def check_training(folder: Path) -> None:
    """Accumulation, clipping, `no_sync`; then the same again from a state saved in the middle."""
    losses, norms, weights = on_one_process()
    accelerator = new_accelerator(gradient_accumulation_steps=MICRO)
    _, positions = place(accelerator)
    loader = DataLoader(list(token_rows()), batch_size=BATCH // positions)
    model = tiny_model("llama").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, loader, rates = accelerator.prepare(model, optimizer, loader, rates)
    parameters, copies = list(model.parameters()), accelerator.parallelism_config.grid.data

    def train(batches) -> tuple[list[float], list[float]]:
        seen, lengths = [], []
        for ids in batches:
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                seen.append(accelerator.gather(loss.detach()).mean().item())
                accelerator.backward(loss)
                own = parameters[-1].grad
                own = getattr(own, "to_local", lambda own=own: own)().flatten().tolist()
                if copies > 1:  # ranks that hold the same part of the weights, of which each has its own samples
                    every = gather_object([own])
                    alike = every[: len(every) // copies] == every[-(len(every) // copies) :]
                    assert alike == accelerator.sync_gradients
                if accelerator.sync_gradients:
                    lengths.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                optimizer.step()
                rates.step()
                optimizer.zero_grad()
            if len(seen) == STEPS * MICRO // 2 and batches is loader:
                accelerator.save_state(folder)
        return seen, lengths

    def assert_right(seen: list[float], lengths: list[float], past: int) -> None:
        assert not differ(seen, losses[past:]), (seen, losses)
        assert not differ(lengths, norms[past // MICRO :]), (lengths, norms)
        state = accelerator.get_state_dict(model)
        assert bool(state) == accelerator.is_main_process
        for name, value in state.items():
            assert (value - weights[name]).abs().max() < BOUND, name

    first = train(loader)
    assert_right(*first, 0)
    half = STEPS * MICRO // 2
    accelerator.load_state(folder)
    again = train(accelerator.skip_first_batches(loader, half))
    assert_right(*again, half)
    assert again[0] == first[0][half:] and again[1] == first[1][half // MICRO :], "not the same bits"
    accelerator.free_memory()


def check_data_loop() -> None:
    """accelerate's test_distributed_data_loop without what needs `join_uneven_inputs`; two positions.

    Its last part saves the state of a data loader without a model, which is refused.
    """
    from accelerate.test_utils.scripts import test_distributed_data_loop as script

    accelerator = script.create_accelerator()
    torch.manual_seed(PartialState().process_index)
    script.test_default_ensures_even_batch_sizes()
    script.test_can_disable_even_batches()
    accelerator = script.create_accelerator()
    script.test_pickle_accelerator()
    data = script.DummyDataset()
    sampler = script.BatchSampler(script.RandomSampler(data), batch_size=script.BATCH_SIZE, drop_last=False)
    for options in (
        {"batch_size": script.BATCH_SIZE},
        {"batch_size": script.BATCH_SIZE, "shuffle": True},
        {"batch_sampler": sampler},
        {"sampler": sampler, "batch_size": None, "collate_fn": script.default_collate},
    ):
        script.test_data_loader(DataLoader(data, num_workers=script.NUM_WORKERS, **options), accelerator)
    if accelerate.utils.is_torchdata_stateful_dataloader_available():
        script.test_stateful_dataloader(accelerator)
        try:
            script.test_stateful_dataloader_save_state(accelerator)
        except ValueError as refusal:
            assert "save_state needs models" in str(refusal)


def main() -> None:
    """Run the parts that are named, or all of them but `data_loop`."""
    accelerator = Accelerator()
    named = sys.argv[1:] or ["loaders", "operations", "training"]
    with tempfile.TemporaryDirectory() as folder, Float64():
        folder = broadcast_object_list([folder])[0]
        if "loaders" in named:
            check_loaders()
        if "operations" in named:
            check_operations(Path(folder))
        if "training" in named:
            check_training(Path(folder, "state"))
        if "data_loop" in named:
            check_data_loop()
        accelerator.wait_for_everyone()
    accelerator.print("ALL IS WELL", *named)
    accelerator.end_training()


if __name__ == "__main__":
    main()
