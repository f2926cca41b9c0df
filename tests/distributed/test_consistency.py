"""Ranks that were not started alike are found before they train, and named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import hf_axonn
from hf_axonn import AxonnConfig, AxonnPlugin, Grid
from hf_axonn.distributed import consistency as facts
from hf_axonn.distributed.consistency import assert_same_on_all_ranks, differences, first_problem, gather_texts
from hf_axonn.parallel import batch_check
from hf_axonn.parallel.batch_check import checksum
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import make_trainer, token_data


X2 = Grid(x=2)


def test_differences_are_told_with_their_ranks():
    ranks = [{"seed": "1", "torch": "2.13"}, {"seed": "2", "torch": "2.13"}, {"seed": "1"}]
    assert differences(ranks) == [
        "seed is 1 on ranks 0 and 2, 2 on rank 1",
        "torch is 2.13 on ranks 0 and 1, missing on rank 2",
    ]
    assert differences(ranks[:1] * 3) == []


def test_one_process_agrees_with_itself():
    assert_same_on_all_ranks({"seed": 1}, torch.device("cpu"), "")
    assert gather_texts("a", "cpu") == ["a"] and first_problem("a", "cpu") == "a"


def refused(function, *args, **kwargs) -> str:
    """The message of a ValueError, which every rank must raise."""
    with pytest.raises(ValueError) as error:
        function(*args, **kwargs)
    messages = gather_texts(str(error.value), "cpu")
    assert len(set(messages)) == 1, messages
    return messages[0]


def _at_start(folder: str) -> dict[str, str]:
    from accelerate import Accelerator

    me = dist.get_rank()
    found = {}
    config = AxonnConfig(grid=X2, layout=("auto", "token")[me])
    found["yaml"] = refused(hf_axonn.parallelize, tiny_model("llama"), X2, config=config)
    other = Grid(x=2) if me else Grid(z=2)
    found["grid"] = refused(Accelerator, cpu=True, parallelism_config=AxonnPlugin(grid=other))
    found["model"] = refused(hf_axonn.parallelize, tiny_model("llama", intermediate_size=40 + 8 * me), X2)
    true = facts.versions()
    facts.versions.cache_clear()
    packages, facts.PACKAGES = facts.PACKAGES, ("torch", "transformers" if me else "accelerate")
    found["versions"] = refused(hf_axonn.parallelize, tiny_model("llama"), X2)
    facts.PACKAGES = packages
    facts.versions.cache_clear()
    assert facts.versions() == true

    def trainer(**changes):
        return make_trainer(Path(folder), X2, eval_strategy="no", save_strategy="no", max_steps=1, **changes)

    found["seed"] = refused(trainer(seed=42 + me).train)
    found["steps"] = refused(trainer(gradient_accumulation_steps=2 + me).train)
    changed = trainer()
    changed.train_dataset = token_data(64 - 8 * me, seed=0)
    found["length"] = refused(changed.train)
    changed = trainer()
    changed.train_dataset = token_data(64, seed=me)
    found["rows"] = refused(changed.train)
    # What may differ: logs, and who writes them.
    trainer(report_to="none", disable_tqdm=bool(me), run_name=f"rank {me}", log_level=("info", "error")[me]).train()
    accelerator = Accelerator(cpu=True, parallelism_config=AxonnPlugin(grid=X2))
    rows = torch.arange(12).view(6, 2)
    found["loader"] = refused(accelerator.prepare, DataLoader(rows.tolist(), batch_size=2 + me))
    return found


def test_what_is_found_at_the_start(tmp_path):
    found = run_ranks(_at_start, 2, str(tmp_path))[0]
    assert '"layout": "auto"' in found["yaml"] and "on rank 0" in found["yaml"]
    assert '"x": 2' in found["grid"] and '"z": 2' in found["grid"]
    assert "the model is LlamaForCausalLM with" in found["model"]
    assert "missing on rank 1" in found["versions"] and "transformers is missing on rank 0" in found["versions"]
    assert "seed is 42 on rank 0, 43 on rank 1" in found["seed"]
    assert "gradient_accumulation_steps is 2 on rank 0, 3 on rank 1" in found["steps"]
    assert "the data set is 64 rows" in found["length"] and "56 rows" in found["length"]
    assert "the data set is 64 rows" in found["rows"] and "Give every rank the whole" in found["rows"]
    assert "the batch size is 2 on rank 0, 3 on rank 1" in found["loader"]


def _batches() -> dict[str, str]:
    me = dist.get_rank()
    model, _ = hf_axonn.parallelize(tiny_model("llama", attention_dropout=0.1), X2)
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
    model.eval()  # drops nothing, so random numbers are not needed
    call()()
    found["keys"] = refused(call(**({"position_ids": torch.arange(8)[None]} if me else {})))
    # After the first passes only every 32nd is looked at.
    torch.manual_seed(5)
    checks, passes = [], [0]
    compare = batch_check.BatchCheck._compare
    batch_check.BatchCheck._compare = lambda self, tensors, since: checks.append(passes[0])
    with torch.no_grad():
        for passes[0] in range(2, 66):
            call()()
    batch_check.BatchCheck._compare = compare
    assert checks == [2, 3, 32, 64], checks
    # One batch between them that differs is found at the next, once.
    with torch.no_grad():
        model(**tiny_batch(2, 8, seed=3 + me))
        for _ in range(29):
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
    assert "a batch among the last 32 is of checksum " in found["earlier"] and "Feed ranks" in found["earlier"]
    assert not any("among" in text for name, text in found.items() if name != "earlier")
    assert "of seed 5) on rank 0" in found["random"] and "set_seed" in found["random"]
    assert "position_ids is missing on rank 0" in found["keys"]


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


def test_rows_that_change_by_themselves_are_not_compared():
    class Random(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            raise AssertionError("reading it may change what is read next")

    assert facts.loader_facts(DataLoader(Random(), batch_size=2))["the data set"] == "4 rows"
    transformed = token_data(8, seed=0).with_transform(lambda rows: rows)
    assert facts.loader_facts(DataLoader(transformed))["the data set"] == "8 rows"

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(())

    assert facts.loader_facts(DataLoader(Stream())) == {}
