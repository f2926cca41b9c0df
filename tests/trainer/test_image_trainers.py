"""Trainer, GoldfishTrainer and TRL's SFTTrainer on rows with images: every grid equals one process."""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
from pathlib import Path

import datasets
import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from hf_axonn import GoldfishConfig, GoldfishTrainer, Grid
from hf_axonn.goldfish.mask import goldfish_mask
from hf_axonn_scripts.buckets import same_documents
from hf_axonn_scripts.data import DataArguments, load_documents, load_rows
from hf_axonn_scripts.images import ImageCollator
from tests.helpers import images
from tests.helpers.chats import ExactLogProbs, chat_tokenizer, logged, run_chat_script
from tests.helpers.float64 import Float64
from tests.helpers.ranks import run_ranks
from tests.helpers.training import numbers, training_options, worst_difference


TOLERANCE = 1e-10
SIZES = [*images.UNEQUAL, (), *images.ON_FIRST_HALF]


def make_trainer(output: Path, grid: Grid | None, model_type: str, *, goldfish: bool, **changes) -> Trainer:
    """A trainer whose global batch is 8 rows in two micro-batches; some ranks get rows without any image."""
    often = dict(max_steps=4, save_steps=2, remove_unused_columns=False)
    if goldfish:  # the stock Trainer takes means of batches, which grids cut otherwise
        often |= dict(eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=2)
    options = training_options(output, grid, goldfish=goldfish, **often | changes)
    trainer_class, config = (GoldfishTrainer, GoldfishConfig) if goldfish else (Trainer, TrainingArguments)
    rows = [images.sample(model_type, row, sizes) for row, sizes in zip(range(40), itertools.cycle(SIZES))]
    return trainer_class(
        model=images.tiny_model(model_type),
        args=config(**options),
        train_dataset=rows,
        eval_dataset=rows[:7],
        data_collator=functools.partial(images.collate, model_type),
    )


def train(output: Path, grid: Grid | None, model_type: str, *, resume: Path | None = None, goldfish: bool = False):
    """Train in float64; returns the logged losses and norms."""
    trainer = make_trainer(output, grid, model_type, goldfish=goldfish)
    with Float64():
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return numbers(trainer.state.log_history)


CASES = [("gemma3", True), ("qwen3_vl", False), ("smolvlm", True)]


def _runs(folder: Path, grid: Grid, truths: list, *, resumed: Grid | None = None) -> list[float]:
    found = []
    for (model_type, goldfish), truth in zip(CASES, truths, strict=True):
        output = folder / f"{model_type} {grid}"
        found.append(worst_difference(train(output, grid, model_type, goldfish=goldfish), truth))
        if resumed is not None:
            again = train(output / "again", resumed, model_type, resume=output / "checkpoint-2", goldfish=goldfish)
            found.append(worst_difference(again[:-1], truth[:-1]))  # the last is a mean over the steps of a run
    return found


@pytest.mark.slow
def test_runs_and_resumed_runs_are_as_on_one_process(tmp_path):
    truths = [train(tmp_path / "one", None, model_type, goldfish=goldfish) for model_type, goldfish in CASES]
    for grid, resumed in ((Grid(x=2, z=2), Grid(data=2, y=2)), (Grid(z=4), None), (Grid(z=4, context=2), None)):
        for found in run_ranks(functools.partial(_runs, resumed=resumed), 4, tmp_path, grid, truths):
            assert max(found) < TOLERANCE, found


TEMPLATE = (
    "{% for message in messages %}{{ '<' + message.role + '>' }}{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ '<start_of_image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}{{ '<end>' }}{% endfor %}"
)


def model_and_processor():
    """A Gemma 3 and a processor for conversations with images, which needs no torchvision."""
    from transformers import AutoTokenizer, Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    names = {"image_token": "<image>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    with tempfile.TemporaryDirectory() as folder:  # of this rank alone: another may read while this one writes
        chat_tokenizer().save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, extra_special_tokens=names)
    pictures = Gemma3ImageProcessorPil(size={"height": 8, "width": 8})
    found = {f"{name[:3]}_token_index": getattr(tokenizer, f"{name}_id") for name in ("boi_token", "eoi_token")}
    model = images.tiny_model("gemma3", image_token_index=tokenizer.image_token_id, **found)
    return model, Gemma3Processor(pictures, tokenizer, chat_template=TEMPLATE, image_seq_length=4)


def conversations(rows: int) -> list[dict]:
    """Questions with no picture, one or two."""
    pictures = pytest.importorskip("PIL.Image", reason="pillow makes the pictures")
    found = []
    for row in range(rows):
        shown = [pictures.new("RGB", (9 + row, 7), (5 * row, 90, 200 - 5 * row))] * (row % 3)
        question = {"role": "user", "content": "abc"[: 1 + row % 3]}
        found.append({"images": shown, "messages": [question, {"role": "assistant", "content": "defab"[row % 4 :]}]})
    return found


def fine_tune(output: Path, grid: Grid | None, **changes) -> list[dict[str, float]]:
    """Train by TRL's stock SFTTrainer and its own collator, in float64; returns what it logs."""
    from trl import SFTConfig, SFTTrainer

    model, processor = model_and_processor()
    own = dict(max_steps=3, max_length=None, bf16=False, save_strategy="no", gradient_checkpointing=False)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**training_options(output, grid, **own | changes)),
        train_dataset=Dataset.from_list(conversations(40)),
        processing_class=processor,
    )
    with Float64():
        trainer.train()
    return logged(trainer.state.log_history)


def _fine_tunes(folder: Path, truth: list, grids: list[Grid]) -> list[float]:
    return [worst_difference(fine_tune(folder / str(grid), grid), truth) for grid in grids]


@pytest.mark.slow
def test_the_stock_sft_trainer_is_as_on_one_process(tmp_path, monkeypatch):
    import trl.trainer.utils as utils

    with monkeypatch.context() as patch:
        patch.setattr(utils, "_ChunkedLogProbFunction", ExactLogProbs)
        truth = fine_tune(tmp_path / "one", None)
    assert truth[0]["loss"] > 1 and truth[0]["entropy"] > 1
    for found in run_ranks(_fine_tunes, 2, tmp_path, truth, [Grid(x=2), Grid(z=2), Grid(z=2, context=2)]):
        assert max(found) < TOLERANCE, found


def write_rows(folder: Path, rows: list[dict]) -> str:
    """Write rows as lines of JSON, their images as files beside it."""
    with (folder / "chats.jsonl").open("w") as file:
        for number, row in enumerate(rows):
            names = [f"{number}-{place}.png" for place in range(len(row["images"]))]
            for name, image in zip(names, row["images"], strict=True):
                image.save(folder / name)
            file.write(json.dumps(row | {"images": names or None}) + "\n")
    return str(folder / "chats.jsonl")


def documents(rows: int) -> list[dict]:
    """Texts with no picture, one or two, each where its placeholder stands."""
    return [
        {
            "images": chat["images"],
            "text": "<start_of_image>ab" * len(chat["images"]) + chat["messages"][-1]["content"],
        }
        for chat in conversations(rows)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows"), [("finetune_chat.py", conversations), ("finetune.py", documents)])
def test_the_script_takes_images_of_files(name, rows, tmp_path):
    model, processor = model_and_processor()
    model.float().save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    write_rows(tmp_path, rows(40))
    one, grid = run_chat_script(tmp_path, timeout=300, name=name)
    assert "eval_loss" in one[-1] and one[0]["loss"] > 1
    assert worst_difference(grid, one) < 1e-4  # float32


def test_documents_with_images_are_rows_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    model, processor = model_and_processor()
    texts = documents(6)
    texts[3]["text"] = ""  # nothing to predict: no row
    args = DataArguments(data=write_rows(tmp_path, texts), sequence_length=40)
    rows = load_rows(args, processor).train
    kept = [text for text in texts if text["text"]]
    assert rows["text"] == [text["text"] + "<end>" for text in kept]
    assert [len(row["images"]) for row in rows] == [len(text["images"]) for text in kept] == [0, 1, 2, 1, 2]

    image = processor.tokenizer.image_token_id
    batch = ImageCollator(processor)(list(rows))
    pixels = processor.image_processor([image for text in kept for image in text["images"]], return_tensors="pt")
    torch.testing.assert_close(batch["pixel_values"], pixels["pixel_values"], rtol=0, atol=0)
    for ids, labels, mask, row in zip(
        batch["input_ids"], batch["labels"], batch["attention_mask"], rows["input_ids"], strict=True
    ):
        assert ids[: len(row)].tolist() == row and mask.tolist() == [1] * len(row) + [0] * (len(ids) - len(row))
        learnt = [token if token != image else -100 for token in row]
        assert labels.tolist() == learnt + [-100] * (len(ids) - len(row))
    assert (batch["input_ids"] == image).sum() == 4 * 6  # four places an image
    assert model.double()(**batch | {"pixel_values": batch["pixel_values"].double()}).loss > 1


def test_documents_whose_images_do_not_fit_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    _, processor = model_and_processor()
    path = write_rows(tmp_path, documents(6))

    def refused(message: str, processing=processor, **options) -> None:
        with pytest.raises(ValueError, match=message):
            load_rows(DataArguments(data=path, **{"sequence_length": 40} | options), processing)

    refused("a tokenizer and no processor of images", chat_tokenizer())
    refused("omit --packing", packing=True)
    refused(
        r"[1-6] of 6 documents with images are longer than --sequence_length 12, up to \d+ tokens", sequence_length=12
    )
    plain = tmp_path / "plain.jsonl"
    plain.write_text('{"text": "abc"}\n')
    refused("one alone has a column images", held_out_data=str(plain))
    rows = documents(3)
    rows[1]["text"] = rows[1]["text"].replace("<start_of_image>", "")
    write_rows(tmp_path, rows)
    refused("document 2 has 1 images, and in its text 0 times <start_of_image>: write it once")
    write_rows(tmp_path, documents(3))
    (tmp_path / "2-1.png").unlink()
    refused(r"2-1.png, an image, is not there \(1 are not\)")
    Path(path).write_text('{"text": "<start_of_image>", "images": "2-0.png"}\n')
    refused("images of row 1 are '2-0.png': write a list of files")


def test_the_same_text_under_another_image_is_another_document(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    texts = [text | {"text": "<start_of_image>" * len(text["images"]) + "ab"} for text in documents(7)]
    found = load_documents(DataArguments(data="none"), write_rows(tmp_path, texts))
    assert same_documents(found, [["text", "images"]]).tolist() == [0, 1, 2, 0, 4, 5, 0]
    assert same_documents(found, [["text"]]).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_labels_of_image_tokens_that_are_learnt_are_all_dropped_or_all_kept():
    # Collators put -100 there; TRL's does not. Windows inside of an image are alike: so is what a hash says of them.
    ids = torch.randint(3, 120, (64, 40), generator=torch.Generator().manual_seed(0))
    ids[:, 10:30] = images.IMAGE
    for strategy in ("hash-table", "hash-avalanche", "hash"):
        mask = goldfish_mask(ids, ids, strategy=strategy, k=4, context_width=5)
        inside = mask[:, 15:30]  # windows that begin in the image, and end in it
        assert inside.all() or not inside.any(), strategy
        assert 0.1 < mask[:, 36:].double().mean() < 0.4, strategy  # text after it is hashed as ever
        labels = ids.masked_fill(ids == images.IMAGE, -100)
        assert not goldfish_mask(ids, labels, strategy=strategy, k=4, context_width=5)[:, 10:30].any()
