"""training_scripts/buckets.py and announce.py: how often documents are seen, and what a run says of it."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter

import datasets
import numpy as np
import pytest

from hf_axonn_scripts import announce, buckets, data, finetune
from tests.helpers.eval_support import tiny_llama, topics_tokenizer


LENGTH = 12


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder, rows, name="documents.jsonl"):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def document(number: int, bucket: int | None = None, **more) -> dict:
    """A document of ten ids that no other has."""
    row = {"id": f"d{number}", "input_ids": list(range(10 * number + 10, 10 * number + 20))}
    return row | ({} if bucket is None else {"bucket": bucket}) | more


def load(name: str, **options) -> data.Rows:
    tokenizer = copy.deepcopy(topics_tokenizer())
    tokenizer.pad_token = tokenizer.eos_token
    return data.load_rows(data.DataArguments(data=name, sequence_length=LENGTH, **options), tokenizer)


def starts(rows: datasets.Dataset) -> list[int]:
    """Number of the document of each row."""
    return [ids[0] // 10 - 1 for ids in rows["input_ids"]]


def test_a_document_is_seen_as_often_as_its_bucket_says(folder):
    rows = load(write(folder, [document(0, 0), document(1, 1), document(2, 2), document(3, 4)]))
    assert Counter(starts(rows.train)) == {1: 1, 2: 2, 3: 4}
    assert rows.buckets == {0: 1, 1: 1, 2: 1, 4: 1} and rows.documents == 4 and not rows.warnings
    alike = load(write(folder, [document(number, 2) for number in range(5)], "twice.jsonl"))
    assert starts(alike.train) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4], "the order of the file, twice"
    once = load(write(folder, [document(number) for number in range(5)], "once.jsonl"))
    assert starts(once.train) == [0, 1, 2, 3, 4] and once.buckets is None
    other = load("twice.jsonl", bucket_column="times")
    assert starts(other.train) == [0, 1, 2, 3, 4], "a column of another name"


def test_copies_are_apart():
    counts = np.array([0, 1, 12, 12, 4, 1, 1, 4, 8] * 4)
    order = list(buckets.repeat(datasets.Dataset.from_dict({"place": range(len(counts))}), counts)["place"])
    assert Counter(order) == {place: count for place, count in enumerate(counts.tolist()) if count}
    for place in set(order):
        at = [index for index, other in enumerate(order) if other == place]
        apart = np.diff(at)
        assert not len(apart) or apart.min() > 0.8 * len(order) / len(at), (place, at)


def test_packed_rows_hold_every_copy_and_none_twice(folder):
    rows = load(write(folder, [document(number, number % 4) for number in range(16)]), packing=True)
    places = [label // 10 - 1 for labels in rows.train["labels"] for label in labels if label >= 0]
    assert Counter(places) == {number: 9 * (number % 4) for number in range(16) if number % 4}
    for ids, positions in zip(rows.train["input_ids"], rows.train["position_ids"], strict=True):
        begun = [token // 10 for token, position in zip(ids, positions, strict=True) if position == 0]
        assert len(begun) == len(set(begun))


def test_another_process_reads_the_rows_from_the_cache(folder):
    name = write(folder, [document(number, number % 4) for number in range(8)])
    first, second = load(name, held_out=0.25), load(name, held_out=0.25)
    for one, other in ((first.train, second.train), (first.held_out, second.held_out)):
        assert one.cache_files and one.cache_files == other.cache_files


@pytest.mark.parametrize("same", ["id", "input_ids"])
def test_copies_of_a_held_out_document_are_not_trained_on(folder, same):
    """Each document is in the file four times: with one id and other texts, or with one text and other ids."""
    lines = [document(number, 1, **{same: document(number // 4)[same]}) for number in range(40)]
    rows = load(write(folder, lines), held_out=0.3)
    held = {number // 4 if same == "id" else number for number in starts(rows.held_out)}
    kept = {number // 4 if same == "id" else number for number in starts(rows.train)}
    assert len(held) == 3 and len(rows.held_out) == 12 and not held & kept and len(held | kept) == 10


def test_what_is_on_the_wrong_side_is_counted(folder):
    lines = [document(number, number % 2) for number in range(8)]
    same_id = document(20, 1, id="d0")
    same_text = document(21, 1, input_ids=lines[2]["input_ids"])
    rows = load(write(folder, [*lines, same_id, same_text]))
    (warning,) = rows.warnings
    assert warning.startswith("2 of the 4 controls (bucket 0) reach training") and "document 1." in warning
    rows = load(write(folder, [*lines, lines[1], lines[3]], "repeated.jsonl"))
    (warning,) = rows.warnings
    assert warning.startswith("2 documents of repeated.jsonl stand there more than once")
    rows = load(write(folder, lines, "right.jsonl"), held_out=0.5)
    (warning,) = rows.warnings
    assert warning.startswith("the 2 held-out documents are not trained on, though their buckets say so")
    assert all(number % 2 for number in starts(rows.held_out)), "a control is no held-out document"
    rows = load("right.jsonl", held_out_data=write(folder, [lines[0], lines[1], document(30)], "held_out.jsonl"))
    (warning,) = rows.warnings
    assert warning.startswith("1 of the 3 documents of held_out.jsonl are trained on, too")


def test_without_buckets_an_id_may_be_anything(folder):
    rows = load(write(folder, [document(number, id="train") for number in range(8)]), held_out=0.25)
    assert len(rows.held_out) == 2 and len(rows.train) == 6 and not rows.warnings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, None], r"documents.jsonl, document 2: bucket is None"),
        ([1, -1], "document 2: bucket is -1"),
        ([1.5, 1], "document 1: bucket is 1.5"),
        (["en", "de"], "document 1: bucket is 'en'.*--bucket_column"),
        ([0, 0], "all 2 documents of documents.jsonl are controls"),
    ],
)
def test_a_bucket_that_is_none_is_named(folder, values, message):
    name = write(folder, [document(number, bucket=value) | {"bucket": value} for number, value in enumerate(values)])
    with pytest.raises(ValueError, match=message):
        load(name)


def test_buckets_may_come_as_floats(folder):
    """As pandas writes a column that had gaps once."""
    assert Counter(starts(load(write(folder, [document(0, 2.0), document(1, 0.0)])).train)) == {0: 2}


@pytest.fixture
def model(folder):
    tiny_llama().save_pretrained(folder / "model")
    topics_tokenizer().save_pretrained(folder / "model")
    return folder / "model"


def options(*more: str) -> list[str]:
    fixed = "--model model --data documents.jsonl --output_dir out --sequence_length 16 --use_cpu --report_to none"
    return [*f"{fixed} --per_device_train_batch_size 1 --goldfish_context_width 3".split(), *more]


def test_a_run_says_what_it_does_and_what_it_left(model, folder, capsys):
    lines = [{"id": f"d{number}", "text": "one two three " * 5, "bucket": number % 3} for number in range(30)]
    for number, line in enumerate(lines):
        line["text"] += str(number)
    write(folder, lines)
    trainer = finetune.main(options())
    text = capsys.readouterr().out
    rows = len(trainer.train_dataset)
    size = trainer.model.num_parameters()
    for line in (
        "documents  30 of documents.jsonl: 10 of bucket 0 (controls, left out), 10 of bucket 1, 10 of bucket 2; each "
        "is seen as often as its bucket says",
        f"model      LlamaForCausalLM, {size:,} parameters, float32 weights",
        "grid       one process, no grid",
        f"steps      {rows} (1 epoch); 1 rows a step: 1 a process",
        "saved      out: an ordinary model directory",
        "    hf-axonn-eval samples --documents documents.jsonl --tokenizer out --output samples.jsonl",
        "    hf-axonn-eval extract --model out --samples samples.jsonl --output runs/out",
    ):
        assert line in text.splitlines(), (line, text)
    (share,) = re.findall(r"loss +goldfish loss \(hash-table, k=4, h=3, table=\w+\); ([0-9.]+)% of the labels", text)
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert 10 <= len(entries) <= 20
    dropped = sum(entry["goldfish_dropped_fraction"] for entry in entries) / len(entries)
    assert float(share) == pytest.approx(100 * dropped, abs=3)
    assert "warning" not in text
    finetune.main(options("--max_steps", "1", "--goldfish", "False", "--lora_r", "2"))
    text = capsys.readouterr().out
    assert "warning: out holds checkpoint-60, model.safetensors, training_args.bin of an earlier run" in text
    assert "loss       ordinary loss\n" in text
    assert "LoRA of rank 2 (alpha 32) on down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj\n" in text
    assert "saved      out: LoRA adapters" in text


def test_ids_of_another_tokenizer_end_before_weights_are_read(model, folder, monkeypatch, capsys):
    def refuse(*_, **__):
        raise AssertionError("weights are read")

    monkeypatch.setattr(finetune, "load_model", refuse)
    write(folder, [document(number, 1) for number in range(3)] + [{"id": "x", "input_ids": [5, 900], "bucket": 1}])
    with pytest.raises(SystemExit) as ended:
        finetune.main(options())
    assert ended.value.code == 2
    assert "the data have the token id 900, but the vocabulary of model ends at 799" in capsys.readouterr().err


def test_a_sharded_checkpoint_is_converted_next(folder, monkeypatch, capsys):
    (folder / "my out").mkdir()
    (folder / "my out" / announce.MANIFEST).write_text("{}")
    manifest = type("Manifest", (), {"grid": "z=2", "model": {"weight": None}})
    monkeypatch.setattr(announce, "read_manifest", lambda _: manifest)
    announce.say_saved(folder / "my out")
    text = capsys.readouterr().out
    assert "a sharded checkpoint of the grid z=2" in text and f"hf-axonn convert '{folder}/my out' " in text


@pytest.mark.parametrize(
    ("columns", "more"),
    [("id text bucket", ""), ("id text", " --bucket 1"), ("id text seen", " --bucket_key seen")],
)
def test_samples_are_made_with_the_buckets_of_the_data(folder, capsys, columns, more):
    (folder / "d.jsonl").write_text("")
    column = "seen" if "seen" in columns else "bucket"
    announce.say_saved(folder / "o", data.DataArguments("d.jsonl", bucket_column=column), columns.split())
    assert f"--documents d.jsonl --tokenizer {folder}/o{more} --output samples.jsonl" in capsys.readouterr().out


def test_a_model_that_is_nowhere_is_named(folder, monkeypatch, capsys):
    def nothing(*_, **__):
        raise OSError("no connection")

    monkeypatch.setattr(finetune.AutoTokenizer, "from_pretrained", nothing)
    with pytest.raises(ValueError, match="MODLE is neither a folder here, nor a model on the hub: no connection"):
        finetune.read_tokenizer(finetune.ModelArguments(model="MODLE"))
    with pytest.raises(OSError, match="no connection"):  # what is there has another fault
        finetune.read_tokenizer(finetune.ModelArguments(model=str(folder)))
