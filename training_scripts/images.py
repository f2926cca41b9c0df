"""Documents with images, for `finetune.py`: a row each, made by the processor of a model for images and text.

A document has a column `images`, files or a data set's pictures, and its text has the model's placeholder where each
of them stands. A row keeps text and images: pixels are made when a batch is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch


def open_images(rows: datasets.Dataset, folder: Path) -> datasets.Dataset:
    """Take the column `images` of rows as files whose paths count from `folder`; None is a row without any.

    Raises:
        ValueError: a row has no list of files, or a file is not there.
    """
    files = []
    for number, names in enumerate(rows["images"], start=1):
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise ValueError(f"images of row {number} are {names!r}: write a list of files")
        files.append([str(folder / name) for name in names or ()])
    if absent := [file for row in files for file in row if not Path(file).is_file()]:
        raise ValueError(f"{absent[0]}, an image, is not there ({len(absent)} are not)")
    return as_pictures(rows.remove_columns("images").add_column("images", files))


def as_pictures(rows: datasets.Dataset, *, decode: bool = True) -> datasets.Dataset:
    """Let a column `images` be read as pictures, or with `decode` False as files, which can be compared."""
    return rows.cast_column("images", datasets.List(datasets.Image(decode=decode)))


def require_images(processor: Any) -> None:
    """Refuse the tokenizer of a model that takes no images.

    Raises:
        ValueError: `processor` has no processor of images.
    """
    if not hasattr(processor, "image_processor"):
        raise ValueError(
            "the data have a column images, and the model has a tokenizer and no processor of images: take another "
            "model, or remove the column"
        )


def to_image_rows(documents: datasets.Dataset, processor: Any, *, text_column: str, length: int) -> datasets.Dataset:
    """Make a row of each document that has two tokens or more.

    Args:
        documents: columns `images` and `text_column`; a text has one placeholder for each of its images.
        processor: a transformers processor of text and images.
        length: longest row, in tokens, those of images included.
    Returns:
        Columns `text`, with the end-of-sequence token, `images`, and `input_ids`, as the processor makes them.
    Raises:
        ValueError: the model has no processor of images, a document has no text or another number of placeholders than
            of images, or a row is too long.
    """
    require_images(processor)
    end = processor.tokenizer.eos_token or ""
    documents = as_pictures(documents)

    def lay_out(row: dict[str, Any], number: int) -> dict[str, Any]:
        text, images = row[text_column], row["images"] or []
        if not isinstance(text, str):
            raise ValueError(f"document {number + 1} is {text!r}, which is not text: give --text_column")
        found = text.count(processor.image_token)
        if found != len(images):
            raise ValueError(
                f"document {number + 1} has {len(images)} images, and in its text {found} times "
                f"{processor.image_token}: write it once for each image, where the image stands"
            )
        text = text if not text.strip() or text.endswith(end) else text + end
        ids = processor(text=[text], images=[images] if images else None)["input_ids"][0] if text.strip() else []
        return {"text": text, "input_ids": list(ids)}

    made = documents.map(lay_out, with_indices=True, remove_columns=documents.column_names, desc="tokens to rows")
    lengths = np.array([len(ids) for ids in made["input_ids"]])
    if (lengths > length).any():
        raise ValueError(
            f"{(lengths > length).sum()} of {len(lengths)} documents with images are longer than --sequence_length "
            f"{length}, up to {lengths.max()} tokens: rows with images are not cut, so make it {lengths.max()}"
        )
    rows = datasets.concatenate_datasets([made, documents.select_columns(["images"])], axis=1)
    return rows if (lengths > 1).all() else rows.select(np.flatnonzero(lengths > 1))


class ImageCollator:
    """Make a batch of rows by the processor; padding and the places of images have no labels.

    Args:
        processor: the one that the rows were made by.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Return what the processor makes of `text` and `images` of the rows, and `labels` [rows, length]."""
        images = [row["images"] or [] for row in rows]
        batch = self.processor(
            text=[row["text"] for row in rows],
            images=images if any(images) else None,
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        ids = batch["input_ids"]
        unlearnt = (batch["attention_mask"] == 0) | torch.isin(ids, torch.tensor(self.processor.image_token_ids))
        return {**batch, "labels": ids.masked_fill(unlearnt, -100)}
