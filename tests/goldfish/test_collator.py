"""GoldfishCollator, and the blocks of docs/goldfish.md for other loops and trainers: all train as GoldfishTrainer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import BatchEncoding, DataCollatorForSeq2Seq, TrainingArguments

from hf_axonn import AxonnPlugin, GoldfishCollator, GoldfishConfig, GoldfishTrainer, Grid, goldfish_mask
from hf_axonn.compat.accelerate import forget_state
from hf_axonn.layers import vocabulary
from tests.helpers.chats import ExactLogProbs, chat_tokenizer, chats
from tests.helpers.float64 import Float64, relative_errors
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import collate, token_data, training_options
from tests.tools.documents import blocks


TOLERANCE = 1e-10
ROWS = token_data(24, seed=0, length=40)  # three steps of 8 rows of two lengths
OPTIONS = dict(goldfish_k=4, goldfish_context_width=13)  # as the blocks have them
RUN = dict(max_steps=3, save_strategy="no", train_sampling_strategy="sequential", lr_scheduler_type="constant")
RUN |= dict(max_grad_norm=0.0, weight_decay=0.0, gradient_accumulation_steps=2)
# What a block of docs/goldfish.md has that the others have not.
RECIPES = {"loop": "for batch in loader:", "compute_loss_func": "compute_loss_func=", "SFT": "trl import SFTTrainer"}
RECIPES |= {"collator": "train_dataset=rows,  # input_ids and labels\n    data_collator="}
TWO = (Grid(x=2), Grid(z=2), Grid(data=2))


@functools.cache
def block(recipe: str) -> str:
    page = [block.text for block in blocks("python") if block.place.startswith("docs/goldfish.md:")]
    (found,) = [text for text in page if RECIPES[recipe] in text]
    return found


def arguments(config: type, folder: Path, grid: Grid | None, **changes: Any) -> Any:
    return config(**training_options(folder, grid, **RUN | changes))


def sft_arguments(folder: Path, grid: Grid | None, *, goldfish: bool) -> Any:
    from trl import SFTConfig

    from hf_axonn import GoldfishSFTConfig

    own = dict(max_length=37, packing=True, gradient_checkpointing=False, bf16=False) | (OPTIONS if goldfish else {})
    return arguments(GoldfishSFTConfig if goldfish else SFTConfig, folder, grid, **own)


def conversations() -> Any:
    return chats(80, seed=0, completions=False)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def truths(tmp_path_factory) -> Callable[[str], dict[str, torch.Tensor]]:
    """The weights after three steps of GoldfishTrainer, or for the recipe "SFT" of GoldfishSFTTrainer."""
    folder = tmp_path_factory.mktemp("truths")

    @functools.cache
    def truth(kind: str) -> dict[str, torch.Tensor]:
        if kind == "SFT":
            import trl.trainer.utils as utils

            from hf_axonn import GoldfishSFTTrainer

            with pytest.MonkeyPatch.context() as patch, Float64():
                patch.setattr(utils, "_ChunkedLogProbFunction", ExactLogProbs)
                args = sft_arguments(folder, None, goldfish=True)
                given = dict(train_dataset=conversations(), processing_class=chat_tokenizer())
                trainer = GoldfishSFTTrainer(tiny_model("llama"), args, **given)
                trainer.train()
        else:
            args = arguments(GoldfishConfig, folder, None, **OPTIONS)
            given = dict(train_dataset=ROWS, processing_class=chat_tokenizer())
            trainer = GoldfishTrainer(model=tiny_model("llama"), args=args, **given)
            with Float64():
                trainer.train()
        first = trainer.state.log_history[0]
        assert first["goldfish_dropped_fraction"] > 0.05 and abs(first["loss_kept"] - first["loss_all"]) > 1e-4
        return weights(trainer.model)

    return lambda recipe: truth("SFT" if recipe == "SFT" else "Trainer")


def follow(recipe: str, folder: Path, grid: Grid | None, wrap: Callable | None = None) -> dict[str, torch.Tensor]:
    """Run a block with the names that it takes for granted, and return the weights that it leaves.

    `wrap` makes the model of the block of the one that is prepared.
    """
    names: dict[str, Any] = {"model": tiny_model("llama").train(), "tokenizer": chat_tokenizer(), "rows": ROWS}
    if recipe == "loop":
        forget_state()
        accelerator = Accelerator(cpu=True, **({"parallelism_config": AxonnPlugin(grid=grid)} if grid else {}))
        size = 8 // (grid.dp_size if grid else 1)
        loader = DataLoader(ROWS, batch_size=size, collate_fn=DataCollatorForSeq2Seq(names["tokenizer"]))
        optimizer = torch.optim.AdamW(names["model"].parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
        prepared = accelerator.prepare(names["model"], optimizer, loader)
        names |= dict(zip(("model", "optimizer", "loader"), prepared, strict=True)) | {"accelerator": accelerator}
    elif recipe == "SFT":
        names |= {"args": sft_arguments(folder, grid, goldfish=False), "conversations": conversations()}
    else:
        names["args"] = arguments(TrainingArguments, folder, grid)
    model = names["model"]
    names["model"] = wrap(model) if wrap else model
    with Float64():
        exec(block(recipe), names)
    return weights(model)


def assert_equal(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor], *about: object) -> None:
    errors = relative_errors(found, truth)
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < TOLERANCE, (*about, worst, errors[worst])


@pytest.mark.parametrize(
    "recipe", ["loop", "collator", "compute_loss_func", pytest.param("SFT", marks=pytest.mark.slow)]
)
def test_a_printed_recipe_equals_goldfish_trainer(tmp_path, truths, monkeypatch, recipe):
    if recipe == "SFT":
        import trl.trainer.utils as utils

        monkeypatch.setattr(utils, "_ChunkedLogProbFunction", ExactLogProbs)
    assert_equal(follow(recipe, tmp_path, None), truths(recipe))


def _on_grids(folder: Path, wanted: dict[str, dict[str, torch.Tensor]]) -> list[str]:
    with mock.patch.object(vocabulary.logger, "warning") as warned:
        for grid in TWO:
            for recipe, truth in wanted.items():
                assert_equal(follow(recipe, folder / "run", grid), truth, grid, recipe)
            assert_equal(_by_lightning(folder, grid), wanted["loop"], grid, "Lightning")
        assert not warned.called
        for labelled, grid in ((True, Grid(x=2)), (True, Grid(z=2)), (False, Grid(data=2))):
            own = follow("loop", folder / "run", grid, wrap=functools.partial(OwnMean, labelled=labelled))
            errors = relative_errors(own, wanted["loop"])
            assert (max(errors.values()) < TOLERANCE) == (grid == Grid(x=2)), (grid, errors)
            vocabulary._warn_of_own_means.cache_clear()
        return [call.args[0] for call in warned.call_args_list]


class OwnMean(torch.nn.Module):
    """A model whose loss is a mean over logits, as a loop of one's own may take it."""

    def __init__(self, model: torch.nn.Module, *, labelled: bool) -> None:
        super().__init__()
        self.model, self.labelled = model, labelled

    def forward(self, labels, **batch):
        logits = self.model(**batch, labels=labels if self.labelled else None).logits
        logits = logits.full() if self.labelled and not isinstance(logits, torch.Tensor) else logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss)


def _by_lightning(folder: Path, grid: Grid) -> dict[str, torch.Tensor]:
    import lightning as L

    from tests.lightning.runs import trainer_of

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny_model("llama").train()

        def training_step(self, batch, batch_idx):
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)

    place = grid.place(torch.distributed.get_rank()).index("data", "rows")
    own = [range(first + place, first + 8, grid.dp_size) for first in (0, 8, 16)]
    collator = GoldfishCollator(DataCollatorForSeq2Seq(chat_tokenizer()), k=4, context_width=13)
    options = dict(max_epochs=1, accumulate_grad_batches=1, gradient_clip_val=None, use_distributed_sampler=False)
    module = Module()
    with Float64():
        loader = DataLoader(ROWS, batch_sampler=[list(rows) for rows in own], collate_fn=collator)
        trainer_of(folder, grid, **options).fit(module, loader)
    return weights(module.model)


@pytest.mark.slow
def test_printed_recipes_and_lightning_equal_goldfish_trainer_on_grids(tmp_path, truths):
    pytest.importorskip("lightning")
    found, none = run_ranks(_on_grids, 2, tmp_path, {recipe: truths(recipe) for recipe in RECIPES})
    assert (
        len(found) == 2
        and not none
        and all("mean over them is that of one of 2 data-parallel" in each for each in found)
    )


def packed() -> BatchEncoding:
    """Two rows of documents of 21 and 11, 16 and 16 tokens, with a prompt; as a collator that shifts gives them."""
    ids = torch.randint(3, 131, (2, 32), generator=torch.Generator().manual_seed(3))
    ids[0, 21:] = ids[0, :11]
    labels = ids.masked_fill(torch.arange(32) < 4, -100)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in ((21, 11), (16, 16))])
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    return BatchEncoding({"input_ids": ids, "labels": labels, "position_ids": positions, "shift_labels": shifted})


@pytest.mark.parametrize("options", [{}, {"strategy": "hash"}, {"strategy": "static", "start_position": 2}], ids=str)
def test_a_batch_lacks_what_the_mask_drops(options):
    given = packed()
    made = GoldfishCollator(lambda examples: examples, k=3, context_width=3, **options)(given)
    documents = torch.stack([(torch.arange(32) >= first).long() for first in (21, 16)])
    mask = goldfish_mask(given["input_ids"], given["labels"], documents, k=3, context_width=3, **options)
    assert type(made) is BatchEncoding and 10 < int(mask.sum()) < 30
    assert torch.equal(made["labels"], packed()["labels"].masked_fill(mask, -100))
    assert torch.equal(made["shift_labels"][:, :-1], made["labels"][:, 1:])
    assert torch.equal(given["labels"], packed()["labels"]) and made["input_ids"] is given["input_ids"]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"k": 1}, "goldfish k is 1"), ({"strategy": "random"}, "draws for each step"), ({}, "no labels")],
    ids=str,
)
def test_what_cannot_be_masked_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        GoldfishCollator(lambda examples: {"input_ids": examples}, **options)(torch.ones(1, 5))


def test_labels_are_not_dropped_twice(tmp_path):
    args = arguments(GoldfishConfig, tmp_path, None, **OPTIONS)
    collator = GoldfishCollator(collate, k=4)
    trainer = GoldfishTrainer(tiny_model("llama"), args, data_collator=collator, train_dataset=ROWS)
    with pytest.raises(ValueError, match="GoldfishTrainer drops labels by itself"):
        trainer.train()
