"""Reading documents from every kind of file, and what a wrong one is told."""

import json

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from hf_axonn_eval import iter_documents, read_documents


ROWS = [
    {"id": "a", "text": "words \u00e9", "bucket": 4},
    {"id": "b", "text": "", "bucket": 0},
    {"id": "c", "text": "more\r\nlines\n", "bucket": 1},
]


def write_jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8", newline="")
    return path


def write_parquet(path, rows=ROWS):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def write_dataset(path, rows=ROWS):
    datasets.Dataset.from_list(rows).with_format("torch").save_to_disk(str(path))
    return path


@pytest.mark.parametrize(
    ("name", "write"),
    [("d.jsonl", write_jsonl), ("any_name", write_jsonl), ("d.parquet", write_parquet), ("d", write_dataset)],
)
def test_every_format_gives_the_same_documents(tmp_path, name, write):
    path = write(tmp_path / name)
    assert read_documents(path) == ROWS
    other = [{"title": row["id"], "body": row["text"], "more": 1.5} for row in ROWS]
    path = write(tmp_path / f"other_{name}", other)
    expected = [{"id": row["id"], "text": row["text"], "bucket": 6} for row in ROWS]
    assert read_documents(path, id_key="title", text_key="body", bucket=6) == expected
    with pytest.raises(ValueError, match=r"(line|row) 1 has no field 'id', 'bucket', 'text'"):
        read_documents(path)
    numbered = read_documents(path, id_key=None, text_key="body", bucket=6)
    assert [row["id"] for row in numbered] == [f"other_{name}:{place}" for place in (1, 2, 3)]


@pytest.mark.parametrize(
    ("name", "write"), [("d.jsonl", write_jsonl), ("d.parquet", write_parquet), ("d", write_dataset)]
)
def test_token_ids_are_used_instead_of_text(tmp_path, name, write):
    padded = {"id": "b", "text": "words", "input_ids": [0, 5, 6], "attention_mask": [0, 1, 1], "bucket": 0}
    plain = {"id": "a", "text": "words", "input_ids": [3, 4], "attention_mask": None, "bucket": 0}
    expected = [{"id": "a", "input_ids": [3, 4], "bucket": 0}, {"id": "b", "input_ids": [5, 6], "bucket": 0}]
    assert read_documents(write(tmp_path / name, [plain, padded])) == expected
    path = write(tmp_path / f"other_{name}", [padded | {"attention_mask": [1, 1]}])
    with pytest.raises(ValueError, match="1 has 3 input_ids, but 2 in attention_mask"):
        read_documents(path)


def test_empty_lines_and_a_byte_order_mark(tmp_path):
    file = tmp_path / "d.jsonl"
    file.write_bytes(
        b'\xef\xbb\xbf\n{"id": "a", "text": "words", "bucket": 4}\n\n \n{"id": "b", "input_ids": [1], "bucket": 0}'
    )
    assert read_documents(file) == [
        {"id": "a", "text": "words", "bucket": 4},
        {"id": "b", "input_ids": [1], "bucket": 0},
    ]


def test_texts_are_one_document_a_file(tmp_path):
    folder = tmp_path / "books"
    (folder / "more").mkdir(parents=True)
    (folder / "b.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    (folder / "more" / "A.MD").write_text("three")
    (folder / "cover.png").write_bytes(b"\x89PNG")
    assert read_documents(folder, bucket=3) == [
        {"id": "b.txt", "text": "one\r\ntwo", "bucket": 3},
        {"id": "more/A.MD", "text": "three", "bucket": 3},
    ]
    assert read_documents(folder / "b.txt", bucket=0) == [{"id": "b.txt", "text": "one\r\ntwo", "bucket": 0}]
    with pytest.raises(ValueError, match=r"b.txt is a text, which cannot say how often .*--bucket"):
        read_documents(folder)


def test_a_directory_of_other_files(tmp_path):
    write_parquet(tmp_path / "2.parquet", ROWS[1:])
    write_jsonl(tmp_path / "1.jsonl", ROWS[:1])
    assert read_documents(tmp_path) == ROWS
    assert [row["id"] for row in read_documents(tmp_path, id_key=None)] == ["1.jsonl:1", "2.parquet:1", "2.parquet:2"]


def test_a_dataset_of_several_splits(tmp_path):
    whole = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": whole, "test": whole.select([1])}).save_to_disk(str(tmp_path / "d"))
    assert read_documents(tmp_path / "d", split="test") == ROWS[1:2]
    with pytest.raises(ValueError, match="name one of its splits with split=.*: train, test"):
        read_documents(tmp_path / "d")
    with pytest.raises(ValueError, match="no split 'validation'.*: train, test"):
        read_documents(tmp_path / "d", split="validation")
    with pytest.raises(ValueError, match="has no splits, so there is no split 'train'"):
        read_documents(write_dataset(tmp_path / "plain"), split="train")
    with pytest.raises(ValueError, match="no split 'train'"):
        read_documents(write_jsonl(tmp_path / "d.jsonl"), split="train")


def test_rows_are_read_as_they_are_asked_for(tmp_path):
    rows = [{"id": str(place), "text": "words", "bucket": 0} for place in range(200)]
    for path in (write_jsonl(tmp_path / "d.jsonl"), write_parquet(tmp_path / "d.parquet", rows)):
        first = next(iter_documents(path))
        assert first["id"] in ("a", "0")
    broken = write_jsonl(tmp_path / "broken.jsonl")
    broken.write_bytes(broken.read_bytes() + b"{")
    documents = iter_documents(broken)
    assert [next(documents)["id"] for _ in range(3)] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="line 4 is not JSON"):
        next(documents)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", b'{"id": "a"}\n', "line 1 has no field 'bucket', 'text'"),
        ("d.jsonl", b"[1]\n", "line 1 has no field 'id', 'bucket', 'text'"),
        ("d.jsonl", b"\n\n", "holds no documents"),
        ("d.jsonl", b'{}\n{"id": "\xff"}', r"d.jsonl, line 1 has no field"),
        ("d.jsonl", b'\n{"id": "\xff"}', r"d.jsonl, line 2 is not UTF-8: byte 0xff at position 9 of the file"),
        ("d.jsonl", b'\xef\xbb\xbf{"id": "\xe9"}', r"line 1 is not UTF-8: byte 0xe9 at position 11 of the file"),
        ("d.txt", b"caf\xe9 au lait", r"d.txt is not UTF-8: byte 0xe9 at position 3 of the file"),
        ("d.parquet", b"words", "d.parquet is not a parquet file, or a damaged one"),
    ],
)
def test_wrong_files_are_named(tmp_path, name, content, message):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_documents(file, **({"bucket": 0} if name.endswith("txt") else {}))


def test_nothing_to_read(tmp_path):
    for name in ("absent", "absent.txt", "absent.parquet"):
        with pytest.raises(ValueError, match=f"{name} is not a file"):
            read_documents(tmp_path / name, bucket=0)
    with pytest.raises(ValueError, match=r"holds no documents: neither a dataset .* nor files named .txt"):
        read_documents(tmp_path)
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(ValueError, match="is a damaged dataset"):
        read_documents(tmp_path)


def test_a_text_in_parquet_that_is_not_utf8(tmp_path):
    bytes_column = pyarrow.array([b"good", b"caf\xe9"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(
        pyarrow.table({"id": ["a", "b"], "text": bytes_column, "bucket": [0, 0]}), tmp_path / "d.parquet"
    )
    with pytest.raises(ValueError, match="d.parquet: a text is not UTF-8"):
        read_documents(tmp_path / "d.parquet")


@pytest.mark.parametrize(("package", "name"), [("pyarrow", "d.parquet"), ("datasets", "d")])
def test_a_missing_package_is_named(tmp_path, monkeypatch, package, name):
    path = (write_parquet if package == "pyarrow" else write_dataset)(tmp_path / name)
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ValueError, match=rf"needs the package {package}: pip install 'hf_axonn\[data\]'"):
        read_documents(path)
