"""Ranks that were not started alike are found before they train, and named."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import hf_axonn
from hf_axonn import AxonnConfig, AxonnPlugin, Grid
from hf_axonn.distributed import consistency as facts
from hf_axonn.distributed.consistency import assert_same_on_all_ranks, differences, first_problem, gather_texts
from tests.helpers.models import tiny_model
from tests.helpers.ranks import refused, run_ranks
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
    assert 'alike: axonn_config.layout is "auto" on rank 0, "token" on rank 1. Start' in found["yaml"]
    assert '"x": 2' in found["grid"] and '"z": 2' in found["grid"]
    assert "the model is LlamaForCausalLM with" in found["model"]
    assert "missing on rank 1" in found["versions"] and "transformers is missing on rank 0" in found["versions"]
    assert "seed is 42 on rank 0, 43 on rank 1" in found["seed"]
    assert "gradient_accumulation_steps is 2 on rank 0, 3 on rank 1" in found["steps"]
    assert "the data set is 64 rows" in found["length"] and "56 rows" in found["length"]
    assert "the data set is 64 rows" in found["rows"] and "Give every rank the whole" in found["rows"]
    assert "the batch size is 2 on rank 0, 3 on rank 1" in found["loader"]


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
