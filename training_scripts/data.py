"""Rows of tokens made of documents, for `finetune.py` to train on.

Documents come from a JSONL file, a folder of text files, a data set saved by `datasets`, or the hub. A document is
laid out as often as its bucket says (buckets.py). Every token of it but its first is then a target exactly once,
however long the document is and however rows are cut.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hf_axonn_scripts.buckets import read_buckets, repeat, same_documents, shared_with, warnings_of
from hf_axonn_scripts.images import as_pictures, open_images, to_image_rows


OF_TOKENS = ("input_ids", "labels", "attention_mask")  # columns that are read of documents that are tokenized


@dataclass
class DataArguments:
    """Sources of the documents, and the way they become rows."""

    _argument_group_name = "data"

    data: str = field(
        metadata={
            "help": "A .jsonl file with one document a line, a folder of .txt files (one document each), a folder "
            "written by datasets' save_to_disk, or the name of a data set on the hub."
        }
    )
    data_config: str | None = field(default=None, metadata={"help": "Configuration of a data set on the hub."})
    split: str = field(default="train", metadata={"help": "Split to take where the data has splits."})
    text_column: str = field(
        default="text",
        metadata={
            "help": "Column that holds the text. Data that is tokenized already has a column input_ids instead; its "
            "tokens are used as they are, with the columns labels and attention_mask where it has them."
        },
    )
    bucket_column: str = field(
        default="bucket",
        metadata={
            "help": "Column that holds how often training sees the document in an epoch; documents of 0 are left out. "
            "Without such a column every document is seen once."
        },
    )
    sequence_length: int = field(default=1024, metadata={"help": "Longest row, in tokens."})
    packing: bool = field(
        default=False,
        metadata={
            "help": "Fill every row to the sequence length with as many documents as it takes. position_ids start "
            "again at each document, so that attention and the goldfish hash stay inside it."
        },
    )
    held_out: float = field(
        default=0.0, metadata={"help": "Part of the documents kept for evaluation, for example 0.05."}
    )
    held_out_data: str | None = field(
        default=None, metadata={"help": "Documents for evaluation from a place of their own, named as --data is."}
    )

    def __post_init__(self):
        if self.sequence_length < 2:
            raise ValueError(f"sequence_length is {self.sequence_length}: a row needs 2 tokens to hold a target")
        check_share(self.held_out)
        if self.held_out and self.held_out_data:
            raise ValueError("held_out and held_out_data both say what to evaluate on: give one of them")


def check_share(held_out: float) -> None:
    """Refuse a number that is no part of the rows.

    Raises:
        ValueError: it is not from 0 up to 1.
    """
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out is {held_out}: write the part of the documents to keep, such as 0.05")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows to train on, and facts on the documents they are made of.

    Attributes:
        train: rows with columns `input_ids` and `labels`, each a list of at most `sequence_length` ids; packed rows
            have exactly that many, and `position_ids` besides; rows of documents with images are those of
            images.to_image_rows.
        held_out: the same of what is held out, or None.
        documents: documents that were read, without those of `held_out_data`.
        buckets: bucket -> documents to train on, 0 included; None if the data have no buckets.
        held_out_documents: documents that `held_out` is made of.
        columns: columns of the documents.
        warnings: sentences on documents that are trained on and should not be, or the other way round.
    """

    train: datasets.Dataset
    held_out: datasets.Dataset | None
    documents: int
    buckets: Mapping[int, int] | None
    held_out_documents: int
    columns: Sequence[str]
    warnings: Sequence[str] = ()


def load_rows(args: DataArguments, tokenizer, *, documents: datasets.Dataset | None = None, seed: int = 42) -> Rows:
    """Read documents and lay them out as rows.

    The rows keep the order of the documents, but for copies, which are spread evenly. No document is both trained on
    and held out, however many copies of it there are.

    Args:
        args: names the documents, and the sequence length.
        tokenizer: a transformers tokenizer with an end-of-sequence token; for documents with images a processor.
        documents: what `load_documents` returns for `args.data`, if that has been called; else it is called here.
        seed: decides which documents are held out.
    Raises:
        ValueError: the data is not there, or has no documents, no text column, a bucket that is no number, no split
            or configuration where one is named, or nothing long enough to train on; documents with images do not fit
            the model (`to_image_rows`), or are to be packed.
    """
    names = [name for name in (args.data, args.held_out_data) if name]
    refuse_choices(names, split=args.split, config=args.data_config, of_texts=True)
    documents = load_documents(args, args.data) if documents is None else documents
    number = len(documents)
    buckets = read_buckets(documents, args.bucket_column, args.data)
    warnings: list[str] = []
    group = np.arange(number)
    content = ["input_ids" if "input_ids" in documents.column_names else args.text_column]
    content += ["images"] if "images" in documents.column_names else []
    if buckets is not None or args.held_out:
        # Without buckets a column id may be anything.
        ids = [["id"]] if buckets is not None and "id" in documents.column_names else []
        group = same_documents(documents, [*ids, content])
    if buckets is not None:
        warnings = warnings_of(buckets, group, args.data)
    counts = buckets if buckets is not None else np.ones(number, dtype=np.int64)
    trained, held_out = np.arange(number), None
    if args.held_out_data:
        held_out = load_documents(args, args.held_out_data)
        if ("images" in held_out.column_names) != ("images" in documents.column_names):
            raise ValueError(f"of {args.data} and {args.held_out_data} one alone has a column images")
        if set(content) <= set(held_out.column_names) and (
            shared := shared_with(held_out, documents.select(np.flatnonzero(counts)), content)
        ):
            warnings.append(
                f"{shared} of the {len(held_out)} documents of {args.held_out_data} are trained on, too: their loss "
                "is not one of held-out documents"
            )
    elif args.held_out:
        trained, chosen = split(group, counts, args.held_out, seed)
        held_out = documents.select(chosen)
        if buckets is not None:
            warnings.append(
                f"the {len(chosen)} held-out documents are not trained on, though their buckets say so: samples that "
                f"are made of {args.data} count them as trained on. Give --held_out_data other documents in place of "
                "--held_out"
            )
    train = repeat(documents.select(trained) if len(trained) < number else documents, counts[trained])
    return Rows(
        train=to_rows(train, args, tokenizer),
        held_out=None if held_out is None else to_rows(held_out, args, tokenizer),
        documents=number,
        buckets=None if buckets is None else dict(sorted(Counter(buckets[trained].tolist()).items())),
        held_out_documents=0 if held_out is None else len(held_out),
        columns=documents.column_names,
        warnings=warnings,
    )


def split(group: np.ndarray, counts: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide documents into those to train on and those to hold out; copies of a document stay together.

    Args:
        group: for each row the first row that is the same document.
        counts: repetitions of each row; documents that no row shows are never held out.
        share: part of the documents to hold out.
        seed: decides which.
    Returns:
        The places of the rows on either side. Controls stay on the first one.
    Raises:
        ValueError: the share leaves nothing on one side.
    """
    different = np.unique(group[counts > 0])
    count = round(share * len(different))
    if not 0 < count < len(different):
        raise ValueError(
            f"held_out={share} of {len(different)} documents is {count}, which leaves nothing to "
            f"{'evaluate' if count == 0 else 'train'} on: take another part, or give --held_out_data"
        )
    parts = datasets.Dataset.from_dict({"first": different}).train_test_split(test_size=count, seed=seed)
    rows: dict[int, list[int]] = {}
    for row, first in enumerate(group.tolist()):
        rows.setdefault(first, []).append(row)
    shown = [[row for first in parts[side]["first"] for row in rows[first]] for side in ("train", "test")]
    never = np.flatnonzero(~np.isin(group, different))
    return np.array([*shown[0], *never]), np.array(shown[1])


def open_data(
    name: str, *, config: str | None = None, split: str = "train", text_column: str | None = None
) -> datasets.Dataset:
    """Open a JSONL file, a folder written by `datasets`, another folder, or a data set on the hub.

    Args:
        name: of the file, the folder or the data set.
        config: configuration of a data set on the hub.
        split: split to take where the data has splits.
        text_column: column for the text of each .txt file of another folder; None: it is what `load_dataset` reads.
    Raises:
        ValueError: the data is not there, cannot be read, or has no rows.
    """
    path = Path(name)
    try:
        if path.is_dir() and any((path / mark).exists() for mark in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(name)
        elif path.is_dir() and text_column is not None:
            files = sorted(str(file) for file in path.rglob("*.txt"))
            if not files:
                raise ValueError(f"{name} holds no .txt file and was not written by datasets' save_to_disk")
            found = datasets.load_dataset("text", data_files=files, sample_by="document", split="train")
            found = found.rename_column("text", text_column) if text_column != "text" else found
        elif path.is_file():
            found = datasets.load_dataset("json", data_files=name, split="train")
            found = open_images(found, path.parent) if "images" in found.column_names else found
        else:
            found = datasets.load_dataset(name, config, split=split)
    except StopIteration:  # of a file without a line
        raise ValueError(f"{name} holds no documents") from None
    except datasets.exceptions.DatasetGenerationError as error:
        raise ValueError(f"{name} cannot be read: {error.__cause__ or error}") from error
    except (FileNotFoundError, ConnectionError) as error:
        raise ValueError(f"{name} is neither a file nor a folder here, nor a data set on the hub: {error}") from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise ValueError(f"{name} has no split {split!r}: give --split one of {sorted(found)}")
        found = found[split]
    if len(found) == 0:
        raise ValueError(f"{name} holds no documents")
    return found


def refuse_choices(names: Sequence[str], *, split: str, config: str | None = None, of_texts: bool) -> None:
    """Refuse a split or a configuration that no data has, of which all would be taken in silence.

    Args:
        names: of the data, as `open_data` takes them.
        split, config: what is chosen; the split train is there always.
        of_texts: whether a folder that `datasets` did not write is one of .txt files.
    Raises:
        ValueError: it has no effect.
    """
    paths = [Path(name) for name in names]
    splits = [
        path
        for path in paths
        if not path.exists()
        or (path / "dataset_dict.json").exists()
        or (path.is_dir() and not of_texts and not (path / "state.json").exists())
    ]
    if split != "train" and not splits:
        raise ValueError(f"{names[0]} has no splits, and all of it would be taken: leave --split {split} out")
    if config is not None and all(path.exists() for path in paths):
        raise ValueError(
            f"{names[0]} has no configurations, as data sets of the hub have: leave --data_config {config} out"
        )


def refuse_gaps(rows: datasets.Dataset, column: str, name: str) -> None:
    """Refuse rows that lack a column, or whose bytes are no UTF-8, which pyarrow reads as text, too.

    Raises:
        ValueError: there are such rows.
    """
    try:
        rows.data.column(column).validate(full=True)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{name} is not UTF-8: write the file as UTF-8 ({error})") from None
    first = pc.index(pc.is_null(rows.data.column(column)), True).as_py()
    if first >= 0:
        raise ValueError(f"{name}, document {first + 1} has no {column}: leave it out")


def load_documents(args: DataArguments, name: str) -> datasets.Dataset:
    """Read the documents called `name`; see `DataArguments.data` for what a name may be."""
    found = open_data(name, config=args.data_config, split=args.split, text_column=args.text_column)
    if not {"input_ids", args.text_column} & set(found.column_names):
        raise ValueError(
            f"{name} has no column {args.text_column!r}: give --text_column one of {', '.join(found.column_names)}"
        )
    tokenized = "input_ids" in found.column_names
    if tokenized and "position_ids" in found.column_names:
        raise ValueError(
            f"{name} has a column position_ids, as packed rows have, and here a row is one document: give each "
            "document a row without that column, and --packing"
        )
    for column in OF_TOKENS if tokenized else (args.text_column,):
        if column in found.column_names:
            refuse_gaps(found, column, name)
    return as_pictures(found, decode=False) if "images" in found.column_names else found


def to_rows(documents: datasets.Dataset, args: DataArguments, tokenizer) -> datasets.Dataset:
    """Tokenize documents, unless they are, and cut or pack them into rows; those with images are a row each.

    Raises:
        ValueError: not one document has two tokens; see `load_rows` for images.
    """
    tokenized = "input_ids" in documents.column_names

    def lay_out(batch: dict[str, list]) -> dict[str, list]:
        if tokenized:
            tokens, labels = read_tokens(batch)
        else:
            tokens = labels = tokenize(batch[args.text_column], tokenizer)
        if args.packing:
            rows = pack(tokens, labels, length=args.sequence_length, filler=tokenizer.pad_token_id)
        else:
            rows = cut(tokens, labels, length=args.sequence_length)
        learnt = [any(label != -100 for label in row[1:]) for row in rows["labels"]]
        return {name: list(compress(column, learnt)) for name, column in rows.items()}

    if "images" in documents.column_names:
        if args.packing or tokenized:
            what = "--packing" if args.packing else "the column input_ids"
            raise ValueError(f"documents with images are rows of their own, made of text: omit {what}")
        rows = to_image_rows(documents, tokenizer, text_column=args.text_column, length=args.sequence_length)
    else:
        rows = documents.map(lay_out, batched=True, remove_columns=documents.column_names, desc="tokens to rows")
    if len(rows) == 0:
        raise ValueError(
            f"none of the {len(documents)} documents has 2 tokens or more{' and a label' if tokenized else ''}, so "
            f"that there is nothing to predict: look at the column {'input_ids' if tokenized else args.text_column}"
        )
    return rows


def largest_id(rows: datasets.Dataset) -> int:
    """Return the largest token id of rows."""
    return max(pc.max(pc.list_flatten(chunk)).as_py() for chunk in rows.data.column("input_ids").chunks if len(chunk))


def longest_row(rows: datasets.Dataset) -> int:
    """Return the tokens of the longest row."""
    return int(pc.max(pc.list_value_length(rows.data.column("input_ids"))).as_py())


def tokenize(texts: Sequence[str], tokenizer) -> list[list[int]]:
    """Turn texts into token ids, each ending in the end-of-sequence token; an empty text has no tokens.

    Raises:
        ValueError: an entry is not text.
    """
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"a document is {text!r}, which is not text: give --text_column")
    texts = [text for text in texts if text.strip()]
    # Length warnings are about the model's window; rows are cut to the sequence length afterwards.
    tokens = tokenizer(texts, verbose=False)["input_ids"] if texts else []
    end = tokenizer.eos_token_id
    return [ids if end is None or ids[-1:] == [end] else [*ids, end] for ids in tokens]


def read_tokens(batch: Mapping[str, list]) -> tuple[list[list[int]], list[list[int]]]:
    """Return token ids and labels of documents that are tokenized, without the places that attention_mask leaves out.

    Args:
        batch: columns `input_ids`, and if they are there `labels` and `attention_mask`.
    Raises:
        ValueError: the columns differ in length.
    """
    columns = {name: batch[name] for name in OF_TOKENS if name in batch}
    for rows in zip(*columns.values(), strict=True):
        if len(set(map(len, rows))) > 1:
            lengths = ", ".join(f"{len(row)} {name}" for name, row in zip(columns, rows, strict=True))
            raise ValueError(f"a document has {lengths}: give each of its tokens one of each")
    ids = columns["input_ids"]
    labels = columns.get("labels", ids)
    if "attention_mask" not in columns:
        return ids, labels
    masks = columns["attention_mask"]
    ids, labels = ([list(compress(*pair)) for pair in zip(rows, masks, strict=True)] for rows in (ids, labels))
    return ids, labels


def cut(
    documents: Iterable[Sequence[int]], targets: Iterable[Sequence[int]], *, length: int
) -> dict[str, list[list[int]]]:
    """Give each document rows of its own.

    A longer document goes on in the next row, which begins with the last token of the row before as context, because
    the first token of a row is never a target.

    Args:
        documents: token ids.
        targets: their labels.
        length: longest row, in tokens.
    Returns:
        Columns `input_ids` and `labels`; rows differ in length.
    """
    rows: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for document, labels in zip(documents, targets, strict=True):
        for start in range(0, len(document) - 1, length - 1):
            rows["input_ids"].append(list(document[start : start + length]))
            rows["labels"].append(list(labels[start : start + length]))
    return rows


def pack(
    documents: Iterable[Sequence[int]], targets: Iterable[Sequence[int]], *, length: int, filler: int
) -> dict[str, list[list[int]]]:
    """Fill rows with documents, one behind the other.

    The first token of a piece has label -100: its predecessor in the row belongs to another document. A document cut
    by the end of a row goes on as in `cut`. What stays empty is filled with a piece of its own without labels.

    Args:
        documents: token ids.
        targets: their labels.
        length: tokens of every row.
        filler: token id for the places that stay empty.
    Returns:
        Columns `input_ids`, `labels` and `position_ids`, every row `length` long.
    """
    rows: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "position_ids": []}
    ids: list[int] = []
    labels: list[int] = []
    positions: list[int] = []

    def close() -> None:
        empty = length - len(ids)
        rows["input_ids"].append(ids + [filler] * empty)
        rows["labels"].append(labels + [-100] * empty)
        rows["position_ids"].append(positions + list(range(empty)))
        for column in (ids, labels, positions):
            column.clear()

    for document, own in zip(documents, targets, strict=True):
        start = 0
        while start < len(document) - 1:
            if length - len(ids) < 2:  # one place holds no target
                close()
            end = start + length - len(ids)
            piece = document[start:end]
            ids += piece
            labels += [-100, *own[start + 1 : end]]
            positions += range(len(piece))
            start += len(piece) - 1
    if ids:
        close()
    return rows
