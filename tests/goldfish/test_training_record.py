"""training_record.json: what it counts, that it follows the weights, and that a report of the model shows it."""

import copy
import hashlib
import json
import logging
import shutil
import struct
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from datasets import Dataset, IterableDataset, List, Value
from huggingface_hub import ModelCard, metadata_load, metadata_save

from hf_axonn import GoldfishConfig, GoldfishTrainer, Grid
from hf_axonn.checkpoint.export import export_hf
from hf_axonn.checkpoint.manifest import check_complete
from hf_axonn.goldfish.card import find_record, section
from hf_axonn.goldfish.mask import goldfish_mask
from hf_axonn.goldfish.record import FORMAT, MOST_BYTES, RECORD, Data, TrainingRecord, read_record
from hf_axonn.goldfish.table import CPU_TABLE_SHA256
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import collate, make_trainer, token_data


ROWS = [[5, 6, 7], [8], [], [9, 130]]
DIGEST = hashlib.sha256(b"".join(struct.pack(f"<q{len(row)}i", len(row), *row) for row in ROWS)).hexdigest()
MODEL = tiny_model("llama", dtype=torch.float32)


def trainer_for(folder: Path, model=None, **options) -> GoldfishTrainer:
    """Twelve rows, four a step: three steps an epoch."""
    settings = {
        "output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 5,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2,
        "max_steps": 6, "goldfish_context_width": 3, "goldfish_k": 3,
    }  # fmt: skip
    return GoldfishTrainer(
        model=copy.deepcopy(MODEL) if model is None else model,
        args=GoldfishConfig(**(settings | options)),
        train_dataset=token_data(12, seed=0),
        eval_dataset=token_data(4, seed=3),
        data_collator=collate,
    )


def by_hand(epochs: int = 2) -> tuple[int, int]:
    """Labels of all rows, and those that are dropped, whatever the order of the rows."""
    rows = [row["input_ids"] for row in token_data(12, seed=0)]
    dropped = sum(int(goldfish_mask(torch.tensor([row]), k=3, context_width=3).sum()) for row in rows)
    return epochs * sum(len(row) - 1 for row in rows), epochs * dropped


def counts(part: dict) -> tuple[int, int, int]:
    return part["steps"], part["tokens"], part["dropped"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run of two epochs, with checkpoints at 2, 4 and 6, and the model beside them."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = trainer_for(folder)
    trainer.train()
    trainer.save_model()
    return folder


def test_the_checksum_is_of_the_input_ids_in_their_order():
    stored = Dataset.from_list([{"input_ids": row, "labels": row} for row in ROWS])
    assert Data(stored).facts() == {"rows": 4, "rows_sha256": DIGEST}
    assert Data([{"input_ids": row} for row in ROWS]).facts()["rows_sha256"] == DIGEST
    assert Data([{"input_ids": torch.tensor(row, dtype=torch.int64)} for row in ROWS]).facts()["rows_sha256"] == DIGEST
    assert Data(stored.select([1, 0, 2, 3])).facts()["rows_sha256"] != DIGEST
    assert Data(stored.select([1, 0, 2, 3]).select([1, 0, 2, 3])).facts()["rows_sha256"] == DIGEST
    assert Data(stored.cast_column("input_ids", List(Value("int32")))).facts()["rows_sha256"] == DIGEST
    fixed = Dataset.from_list([{"input_ids": [1, 2]}]).cast_column("input_ids", List(Value("int64"), length=2))
    assert Data(fixed).facts() == Data([{"input_ids": [1, 2]}]).facts()


def test_rows_that_are_not_stored_have_no_checksum_and_a_reason():
    class Made(torch.utils.data.Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, place):
            raise AssertionError("reading a row may draw random numbers")

    stream = IterableDataset.from_generator(lambda: iter([{"input_ids": [1]}]))
    for rows, count, why in (
        (stream, None, "the rows are streamed"),
        (Made(), 3, "the rows are made when they are asked for"),
        (Dataset.from_list([{"text": "x"}]), 1, "the rows have no input_ids before they are asked for"),
        (None, None, "the trainer has no train_dataset"),
    ):
        assert Data(rows).facts() == {"rows": count, "rows_sha256": None, "why": why}
    words = Data([{"input_ids": ["a"]}]).facts()
    assert words["rows_sha256"] is None and words["why"].startswith("reading the rows failed (ValueError")


def test_a_run_counts_what_it_trained_on(whole):
    record = read_record(whole)
    [part] = record["parts"]
    assert counts(record) == counts(part) == (6, *by_hand())
    assert 0 < part["dropped"] < part["tokens"]
    settings = {"strategy": "hash-table", "k": 3, "context_width": 3, "table_sha256": CPU_TABLE_SHA256}
    assert {name: part[name] for name in settings} == settings and record["format"] == FORMAT
    assert part["data"] == Data(token_data(12, seed=0)).facts() and part["data"]["rows"] == 12
    assert [read_record(whole / f"checkpoint-{step}")["steps"] for step in (2, 4, 6)] == [2, 4, 6]
    assert counts(read_record(whole / "checkpoint-6")) == counts(record), "that is all, though no log came after it"


def test_a_resumed_run_adds_up_to_an_unbroken_one(whole, tmp_path):
    trainer = trainer_for(tmp_path)
    trainer.train(resume_from_checkpoint=str(whole / "checkpoint-4"))
    trainer.save_model()
    record, unbroken = read_record(tmp_path), read_record(whole)
    assert len(record["parts"]) == 1 and counts(record) == counts(unbroken)
    assert record["parts"][0]["started"] == unbroken["parts"][0]["started"]


def test_another_loss_is_another_part(whole, tmp_path):
    ordinary = trainer_for(tmp_path, goldfish=False)
    ordinary.train(resume_from_checkpoint=str(whole / "checkpoint-4"))
    record = read_record(tmp_path / "checkpoint-6")
    assert [(part["strategy"], part["steps"]) for part in record["parts"]] == [("hash-table", 4), ("none", 2)]
    assert record["parts"][1]["dropped"] == 0 and counts(record)[:2] == (6, by_hand()[0])
    ordinary.train()  # once more, from where the weights are now
    ordinary.save_training_record(tmp_path)
    again = read_record(tmp_path)
    assert [part["steps"] for part in again["parts"]] == [4, 8] and again["tokens"] == 2 * by_hand()[0]


def test_a_loss_that_changes_within_a_run_is_refused():
    record, settings, data = TrainingRecord(None), {"strategy": "hash-table", "k": 4, "context_width": 13}, Data(None)
    for step in (0, 1):
        record.begin(settings, data, step=step)
    with pytest.raises(ValueError, match=r"k=4, h=13\), and step 2 has the goldfish loss \(hash-table, k=8, h=13\)"):
        record.begin(settings | {"k": 8}, data, step=2)
    record.end()
    record.begin(settings | {"k": 8}, data, step=2)
    assert [part["k"] for part in record.as_dict()["parts"]] == [4, 8]


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"goldfish": False}, {"strategy": "none"}),
        ({"goldfish_strategy": "static", "goldfish_start_position": 2}, {"strategy": "static", "start_position": 2}),
        ({"goldfish_strategy": "random", "goldfish_seed": 7}, {"strategy": "random", "seed": 7}),
        ({"goldfish_as_reference": True}, {"as_reference": True, "ignored_token": -1}),
    ],
)
def test_settings_that_matter_are_recorded(tmp_path, options, settings):
    trainer = trainer_for(tmp_path, max_steps=1, save_steps=1, **options)
    trainer.train()
    [part] = read_record(tmp_path / "checkpoint-1")["parts"]
    assert {name: part.get(name) for name in settings} == settings
    assert ("k" in part) == ("context_width" in part or part["strategy"] in ("static", "random"))


def test_what_a_checkpoint_without_a_record_was_trained_on_is_unknown(whole, tmp_path, caplog):
    for name, content in (("none", None), ("damaged", "{}"), ("large", " " * (MOST_BYTES + 1))):
        start = tmp_path / name / "checkpoint-4"
        shutil.copytree(whole / "checkpoint-4", start)
        (start / RECORD).unlink()
        if content is not None:
            (start / RECORD).write_text(content)
            with pytest.raises(ValueError, match="is no training record"):
                read_record(start)
        with caplog.at_level(logging.WARNING):
            trainer = trainer_for(tmp_path / name)
            trainer.train(resume_from_checkpoint=str(start))
        record = read_record(tmp_path / name / "checkpoint-6")
        assert [(part["strategy"], part["steps"]) for part in record["parts"]] == [("unknown", 4), ("hash-table", 2)]
        assert record["steps"] == 6 and record["tokens"] is None and "unknown" in section(record)
        assert (RECORD in caplog.text) == (content is not None)
        caplog.clear()


def test_the_record_is_that_of_the_weights_that_are_loaded_at_the_end(tmp_path):
    steps = []
    for greater in (False, True):
        folder = tmp_path / str(greater)
        best = trainer_for(
            folder, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, greater_is_better=greater,
            metric_for_best_model="eval_loss", learning_rate=1e-2,
        )  # fmt: skip
        best.train()
        best.save_model()
        steps.append(best.state.best_global_step)
        assert read_record(folder)["steps"] == steps[-1]
    assert min(steps) < 6, "the largest loss and the smallest are not both the last"


def test_a_model_card_has_it_and_a_model_that_is_trained_on_keeps_the_earlier_one(whole, tmp_path):
    model = type(MODEL).from_pretrained(whole)
    trainer = trainer_for(tmp_path, model, max_steps=2)
    trainer.train()
    record = read_record(tmp_path / "checkpoint-2")
    assert record["model"] == whole.name and record["earlier"] == read_record(whole) and record["steps"] == 2
    trainer.create_model_card()
    text = (tmp_path / "README.md").read_text()
    tokens, dropped = record["tokens"], record["dropped"]
    assert text.count("## Training record") == 1 and record["parts"][0]["data"]["rows_sha256"] in text
    assert (
        f"| 2 | {tokens:,} | {dropped / tokens:.2%} | 12 |" in text and "goldfish loss (hash-table, k=3, h=3" in text
    )
    TrainingRecord(str(whole)).write(tmp_path / "checkpoint-2")
    assert read_record(tmp_path / "checkpoint-2") == read_record(whole), "nothing trained: that of the model as it was"
    TrainingRecord().write(tmp_path / "checkpoint-2")
    assert read_record(tmp_path / "checkpoint-2") is None, "that of other weights is none of these"
    untrained = trainer_for(tmp_path / "new")
    untrained.create_model_card()
    assert "Training record" not in (tmp_path / "new" / "README.md").read_text()


def test_the_card_stands_in_for_the_record_and_a_contradiction_is_refused(whole, tmp_path, caplog):
    trainer = trainer_for(tmp_path)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    card, record = ModelCard.load(tmp_path / "README.md"), read_record(tmp_path)
    assert card.data.library_name == "transformers"
    assert {"generated_from_trainer", "hf_axonn", "goldfish-loss"} <= set(card.data.tags)
    entry = card.data.to_dict()["hf_axonn"]
    assert entry["batch"] == {"samples": 4, "per_device": 2, "accumulation": 2} and entry["steps"] == 6
    assert entry["loss"] > 0 and entry["versions"]["torch"] == version("torch") and "grid" not in entry
    assert f"- 6 steps, last loss {entry['loss']:.4f}" in card.text and "- no grid, 1 process(es)" in card.text

    (tmp_path / RECORD).unlink()
    found = find_record(tmp_path)
    assert {**found, "saved": None} == {**record, "saved": None}
    TrainingRecord(str(whole)).write(tmp_path)
    assert find_record(tmp_path) == read_record(whole), "the same loss: the file counts"
    metadata = metadata_load(tmp_path / "README.md")
    metadata["hf_axonn"]["training_record"]["parts"][0]["k"] = 4
    metadata_save(tmp_path / "README.md", metadata)
    with pytest.raises(ValueError, match=r"training_record\.json .*k=3, .*README\.md .*k=4, .*remove"):
        find_record(tmp_path)
    for broken in ("---\nhf_axonn: {training_record: {}}\n---\n", "---\na: [\n---\n", "no metadata\n"):
        (tmp_path / "README.md").write_text(broken)
        assert find_record(tmp_path) == read_record(whole)
    assert "is no training record" in caplog.text and "is no model card" in caplog.text


def _on_a_grid(folder: Path) -> None:
    for name, grid in (("z", Grid(z=2)), ("y", Grid(y=2)), ("pipe", Grid(pipe=2)), ("context", Grid(z=2, context=2))):
        trainer = make_trainer(folder / name, grid, kind="llama", max_steps=2, save_steps=2, eval_strategy="no")
        trainer.train()
        trainer.save_model()
        trainer.create_model_card()


def test_on_a_grid_it_is_under_the_manifest_and_survives_export_and_another_grid(tmp_path):
    alone = make_trainer(tmp_path / "alone", None, kind="llama", max_steps=2, save_steps=2, eval_strategy="no")
    alone.train()
    truth = read_record(tmp_path / "alone" / "checkpoint-2")
    run_ranks(_on_a_grid, 2, tmp_path)
    for name in ("z", "y", "pipe", "context"):
        for folder in (tmp_path / name, tmp_path / name / "checkpoint-2"):
            assert RECORD in check_complete(folder).files
            assert counts(read_record(folder)) == counts(truth), name
    for name, axes in (("z", {"z": 2}), ("y", {"y": 2}), ("pipe", {"pipe": 2}), ("context", {"z": 2, "context": 2})):
        entry = ModelCard.load(tmp_path / name / "README.md").data.to_dict()["hf_axonn"]
        assert entry["grid"] == Grid(**axes).as_dict() and counts(entry["training_record"]) == counts(truth)
        per_device = 4 // Grid(**axes).dp_size
        assert entry["batch"] == {"samples": 8, "per_device": per_device, "accumulation": 2}, name
    checkpoint = tmp_path / "z" / "checkpoint-2"
    export_hf(checkpoint, tmp_path / "exported")
    assert (tmp_path / "exported" / RECORD).read_bytes() == (checkpoint / RECORD).read_bytes()
    further = make_trainer(tmp_path / "further", None, kind="llama", max_steps=4, save_steps=4, eval_strategy="no")
    further.train(resume_from_checkpoint=str(checkpoint))
    record = read_record(tmp_path / "further" / "checkpoint-4")
    assert record["steps"] == 4 and len(record["parts"]) == 1 and record["tokens"] > truth["tokens"]


def _under_ddp(folder: Path) -> None:
    trainer_for(folder, per_device_train_batch_size=1).train()


def test_under_ddp_the_counts_are_those_of_all_ranks(tmp_path):
    run_ranks(_under_ddp, 2, tmp_path)
    assert counts(read_record(tmp_path / "checkpoint-6")) == (6, *by_hand())


def test_from_the_trainer_to_the_report(tmp_path):
    """A tiny model is trained, asked and reported on in one process: the page says what the record says."""
    from hf_axonn_eval import compare, extract, load_model, write_report
    from hf_axonn_eval.bundle.anonymous import Anonymous
    from hf_axonn_eval.bundle.keys import Key
    from hf_axonn_eval.data.results import read_run
    from tests.helpers.eval_support import samples, tiny_llama, topics_tokenizer

    tokenizer = copy.deepcopy(topics_tokenizer())
    tokenizer.pad_token = "</s>"
    known = [list(sample.prefix + sample.suffix) for sample in samples() if sample.bucket]
    arguments = GoldfishConfig(
        output_dir=str(tmp_path / "model"), use_cpu=True, report_to="none", disable_tqdm=True, max_steps=2,
        per_device_train_batch_size=3, save_strategy="no", goldfish_context_width=4,
    )  # fmt: skip
    trainer = GoldfishTrainer(
        model=tiny_llama(),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in known],
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    loaded = load_model(tmp_path / "model")
    extract(
        loaded.model, loaded.tokenizer, samples(), output=tmp_path / "run", model_record=loaded.record, progress=False
    )
    record, results = read_run(tmp_path / "run")
    training = read_record(tmp_path / "model")
    assert record["model"]["training"] == training and record["access"] == "weights"
    assert record["vocabulary"] == len(topics_tokenizer())
    comparison = compare({"goldfish": results}, records={"goldfish": record})
    paths = write_report(comparison, tmp_path / "report")
    tokens, dropped = training["tokens"], training["dropped"]
    for name in ("report.md", "report.html"):
        text = paths[name].read_text(encoding="utf-8")
        for told in (
            "Extraction: goldfish (model)", f"{tokens:,}", f"{dropped / tokens:.2%}",
            "goldfish loss (hash-table, k=4, h=4, table=33025be4fa64)",
            training["parts"][0]["data"]["rows_sha256"][:12],
            "extraction strength", record["tokenizer"]["sha256"], "weights", record["started"][:10],
        ):  # fmt: skip
            assert told in text, (name, told)
        assert "{'" not in text and "{&#39;" not in text
    shown = Anonymous(Key(bytes(32))).record(record)["model"]["training"]
    assert shown["parts"][0]["strategy"] == "hash-table" and shown["parts"][0]["table_sha256"] == CPU_TABLE_SHA256
    assert counts(shown) == counts(training) and training["parts"][0]["data"]["rows_sha256"] not in json.dumps(shown)
