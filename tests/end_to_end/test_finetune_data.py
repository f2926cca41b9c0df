"""training_scripts/data.py and finetune.py: documents to rows, and a training run on one process."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_axonn.checkpoint import run_folder
from hf_axonn.goldfish.mask import goldfish_mask
from hf_axonn_scripts import checks, data, finetune
from tests.helpers import ROOT


SCRIPTS = ROOT / "training_scripts"
WORDS = "the quick brown fox jumps over a lazy dog while seven wizards box with five dozen liquor jugs".split()
FILLER = 0


@pytest.fixture(scope="module")
def tokenizer():
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def tiny_llama(**options):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS) + 3, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, **options)


def targets_of(rows):
    """Every (context token, target) pair that the loss sees."""
    pairs = []
    for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True):
        pairs += [(ids[t - 1], labels[t]) for t in range(1, len(ids)) if labels[t] != -100]
    return pairs


@pytest.mark.parametrize("length", [2, 3, 5, 8, 40])
def test_each_token_is_a_target_once(length):
    # All tokens differ, so that a pair names one place of one document.
    documents = [list(range(10, 21)), [30], [40, 41], [], list(range(50, 58)), [60, 61, 62]]
    expected = sorted((a, b) for document in documents for a, b in zip(document, document[1:], strict=False))
    cut = data.cut(documents, documents, length=length)
    packed = data.pack(documents, documents, length=length, filler=FILLER)
    assert sorted(targets_of(cut)) == expected
    assert sorted(targets_of(packed)) == expected
    assert max(map(len, cut["input_ids"])) <= length
    assert {len(row) for column in packed.values() for row in column} == {length}


def test_packed_row_by_hand():
    rows = data.pack([[5, 6, 7], [8, 9, 10, 11, 12]], [[5, 6, 7], [8, -100, 10, 11, 12]], length=6, filler=FILLER)
    assert rows["input_ids"] == [[5, 6, 7, 8, 9, 10], [10, 11, 12, 0, 0, 0]]
    assert rows["labels"] == [[-100, 6, 7, -100, -100, 10], [-100, 11, 12, -100, -100, -100]]
    assert rows["position_ids"] == [[0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1, 2]]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_stays_inside_packed_documents(attention):
    model = tiny_llama(attn_implementation=attention)
    model.config.use_cache = False  # as Trainer sets it; a cache would hide that rows are packed
    documents = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
    # Two rows, so that a mask made from the first row alone would be seen.
    both = [*documents, *reversed(documents)]
    rows = data.pack(both, both, length=12, filler=FILLER)
    packed = model(torch.tensor(rows["input_ids"]), position_ids=torch.tensor(rows["position_ids"])).logits
    for row, pieces in zip(packed, (documents, documents[::-1]), strict=True):
        alone = torch.cat([model(torch.tensor([piece])).logits[0] for piece in pieces])
        torch.testing.assert_close(row, alone, rtol=1e-5, atol=1e-6)
    blurred = model(torch.tensor(rows["input_ids"])).logits
    assert (blurred[:, 5:] - packed[:, 5:]).abs().max() > 1e-3  # without position_ids documents do see each other


def test_packed_loss_is_that_of_the_documents():
    model = tiny_llama()
    model.config.use_cache = False
    documents = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
    rows = {
        name: torch.tensor(column)
        for name, column in data.pack(documents, documents, length=14, filler=FILLER).items()
    }
    alone = [model(torch.tensor([ids]), labels=torch.tensor([ids])).loss * (len(ids) - 1) for ids in documents]
    assert model(**rows).loss.item() == pytest.approx(sum(alone).item() / 9, rel=1e-5)


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_the_sources_agree(tokenizer, tmp_path, cache):
    texts = ["the quick brown fox", "a lazy dog\nwhile seven wizards box", "five dozen liquor jugs"]
    lines = write_lines(tmp_path / "documents.jsonl", [{"text": text} for text in texts])
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    for name, text in zip(("a.txt", "b.txt", "deep/c.txt"), texts, strict=True):
        (folder / name).write_text(text, encoding="utf-8")
    saved = tmp_path / "saved"
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": texts})}).save_to_disk(saved)
    tokens = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    ready = write_lines(tmp_path / "ready.jsonl", [{"input_ids": ids, "title": "x"} for ids in tokens])
    for source in (lines, str(folder), str(saved), ready):
        read = data.load_rows(data.DataArguments(data=source, sequence_length=16), tokenizer)
        assert read.train["input_ids"] == tokens and read.train["labels"] == tokens, source
        assert read.train.column_names == ["input_ids", "labels"] and read.held_out is None
        assert (read.documents, read.buckets, read.warnings) == (3, None, [])


def test_labels_and_masks_of_tokenized_documents_are_kept(tokenizer, tmp_path, cache):
    documents = [
        {"input_ids": [3, 4, 5, 6, 7], "labels": [-100, -100, 5, 6, 7], "attention_mask": [1, 1, 1, 1, 1]},
        {"input_ids": [0, 0, 8, 9, 3], "labels": [-100, -100, 8, 9, 3], "attention_mask": [0, 0, 1, 1, 1]},
        {"input_ids": [8, 3, 8, 0, 0], "labels": [-100] * 5, "attention_mask": [1, 1, 1, 0, 0]},
    ]
    lines = write_lines(tmp_path / "documents.jsonl", documents)
    rows = data.load_rows(data.DataArguments(data=lines, sequence_length=4), tokenizer)
    assert rows.train["input_ids"] == [[3, 4, 5, 6], [6, 7], [8, 9, 3]]
    assert rows.train["labels"] == [[-100, -100, 5, 6], [6, 7], [8, 9, 3]]
    packed = data.load_rows(data.DataArguments(data=lines, sequence_length=8, packing=True), tokenizer).train
    assert packed["input_ids"] == [[3, 4, 5, 6, 7, 8, 9, 3]]
    assert packed["labels"] == [[-100, -100, 5, 6, 7, -100, 9, 3]]


def test_no_document_is_on_both_sides(tokenizer, tmp_path, cache):
    ids = [[index, index + 1, index + 2] for index in range(0, 60, 3)]
    lines = write_lines(tmp_path / "documents.jsonl", [{"input_ids": document} for document in ids])
    args = data.DataArguments(data=lines, held_out=0.25, sequence_length=8)
    rows = data.load_rows(args, tokenizer, seed=1)
    assert len(rows.held_out) == 5 and len(rows.train) == 15
    assert sorted([*rows.train["input_ids"], *rows.held_out["input_ids"]]) == ids
    again = data.load_rows(args, tokenizer, seed=1).held_out
    assert list(again["input_ids"]) == list(rows.held_out["input_ids"])
    assert data.load_rows(args, tokenizer, seed=2).held_out.to_dict() != rows.held_out.to_dict()


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ([{"text": "the fox"}], {"text_column": "body"}, "no column 'body': give --text_column one of text"),
        ([{"text": 3}], {}, "a document is 3, which is not text"),
        ([{"text": " "}, {"text": ""}], {}, "none of the 2 documents has 2 tokens or more"),
        ([{"input_ids": [4]}], {}, "none of the 1 documents .* column input_ids"),
        ([{"input_ids": [4, 5], "labels": [4, -100]}], {}, "none of the 1 documents .* and a label, .*input_ids"),
        ([{"input_ids": [4, 5], "labels": [5]}], {}, "a document has 2 input_ids, 1 labels: give each"),
        ([{"input_ids": [4, 5], "labels": None}, {"input_ids": [4], "labels": [4]}], {}, "document 1 has no labels"),
        ([{"input_ids": [4, 5], "position_ids": [0, 0]}], {}, "has a column position_ids, as packed rows have"),
        ([{"text": "the fox", "bucket": float("inf")}], {}, "document 1: bucket is inf"),
        ([{"text": "the fox"}, {"text": "a dog"}], {"held_out": 0.1}, "held_out=0.1 of 2 documents is 0"),
        ([{"text": "the fox"}, {"text": "a dog"}], {"held_out": 0.9}, "held_out=0.9 of 2 documents is 2"),
    ],
)
def test_bad_data_is_named(tokenizer, tmp_path, cache, content, options, message):
    lines = write_lines(tmp_path / "documents.jsonl", content)
    with pytest.raises(ValueError, match=message):
        data.load_rows(data.DataArguments(data=lines, **options), tokenizer)


def test_places_without_data_are_named(tokenizer, tmp_path, cache, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "the fox"}\n{"text": \n', encoding="utf-8")
    saved = tmp_path / "saved"
    datasets.DatasetDict({"test": datasets.Dataset.from_dict({"text": ["the fox"]})}).save_to_disk(saved)
    (tmp_path / "none.jsonl").touch()
    (tmp_path / "latin.jsonl").write_bytes('{"text": "the fox"}\n{"text": "\u00e9t\u00e9"}\n'.encode("latin-1"))
    lacking = write_lines(tmp_path / "lacking.jsonl", [{"text": "the fox"}, {"id": "b"}])
    for source, message in (
        (tmp_path / "none.jsonl", "none.jsonl holds no documents"),
        (tmp_path / "latin.jsonl", "latin.jsonl is not UTF-8: write the file as UTF-8"),
        (lacking, "lacking.jsonl, document 2 has no text: leave it out"),
        (empty, "holds no .txt file"),
        (broken, "broken.jsonl cannot be read"),
        (tmp_path / "nowhere.jsonl", "neither a file nor a folder"),
        (saved, r"no split 'train': give --split one of \['test'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            data.load_rows(data.DataArguments(data=str(source)), tokenizer)


def test_a_choice_that_the_data_do_not_offer_is_refused(tmp_path, tokenizer):
    texts, saved = tmp_path / "texts", tmp_path / "saved"
    texts.mkdir()
    (texts / "a.txt").write_text("the fox and the dog")
    lines = write_lines(tmp_path / "a.jsonl", [{"text": "the fox and the dog"}] * 2)
    datasets.DatasetDict({"test": datasets.Dataset.from_dict({"text": ["the dog and the fox"]})}).save_to_disk(saved)
    datasets.Dataset.from_dict({"text": ["the fox"]}).save_to_disk(tmp_path / "one")
    for source in (lines, texts, tmp_path / "one"):
        with pytest.raises(ValueError, match=r"has no splits, and all of it would be taken: leave --split test out"):
            data.load_rows(data.DataArguments(data=str(source), split="test"), tokenizer)
        with pytest.raises(ValueError, match=r"has no configurations, .*: leave --data_config en out"):
            data.load_rows(data.DataArguments(data=str(source), data_config="en"), tokenizer)
    options = {"held_out_data": str(saved), "split": "test", "sequence_length": 4}  # of what is held out
    assert data.load_rows(data.DataArguments(data=str(lines), **options), tokenizer).held_out_documents == 1
    data.refuse_choices([str(texts)], split="test", of_texts=False)  # which `datasets` looks for in a folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 1}, "sequence_length is 1"),
        ({"held_out": 1.5}, "held_out is 1.5"),
        ({"held_out": 0.1, "held_out_data": "x"}, "give one of them"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        data.DataArguments(data="x", **options)


@pytest.fixture
def model_directory(tokenizer, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def command(model_directory, tmp_path, *more, documents=8):
    texts = [" ".join(WORDS[index : index + 6] + WORDS[:6]) for index in range(documents)]
    lines = write_lines(tmp_path / "documents.jsonl", [{"text": text} for text in texts])
    return [
        "--model", str(model_directory), "--data", lines, "--sequence_length", "16", "--output_dir",
        str(tmp_path / "out"), "--use_cpu", "True", "--report_to", "none", "--disable_tqdm", "True",
        "--max_steps", "2", "--per_device_train_batch_size", "2", "--logging_steps", "1", "--save_strategy", "no",
        "--goldfish_context_width", "3", *more,
    ]  # fmt: skip


def test_a_run_trains_saves_and_evaluates(model_directory, tmp_path, cache):
    trainer = finetune.main(command(model_directory, tmp_path, "--held_out", "0.25", "--learning_rate", "0.01"))
    out = tmp_path / "out"
    before, after = LlamaForCausalLM.from_pretrained(model_directory), LlamaForCausalLM.from_pretrained(out)
    changed = [
        name for name, weight in after.named_parameters() if not torch.equal(weight, before.get_parameter(name))
    ]
    assert len(changed) == len(list(after.parameters()))
    assert (out / "tokenizer.json").exists()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(log) == 2 and all(0 < entry["goldfish_dropped_fraction"] < 1 for entry in log)
    # The loss of the whole held-out rows, every target counted once
    rows = trainer.eval_dataset
    sums = [
        after(torch.tensor([ids]), labels=torch.tensor([ids])).loss.item() * (len(ids) - 1)
        for ids in rows["input_ids"]
    ]
    expected = sum(sums) / sum(len(ids) - 1 for ids in rows["input_ids"])
    assert json.loads((out / "eval_results.json").read_text())["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_packed_rows_reach_the_model_with_their_boundaries(model_directory, tmp_path, cache):
    trainer = finetune.main(command(model_directory, tmp_path, "--packing", "--max_steps", "1"))
    batch = next(iter(trainer.get_train_dataloader()))
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert ((batch["position_ids"] == 0).sum(1) > 1).all()  # more than one document in a row
    assert trainer.model.config.use_cache is False
    (entry,) = [entry for entry in trainer.state.log_history if "goldfish_dropped_fraction" in entry]
    starts = (batch["position_ids"] == 0).cumsum(1)
    assert goldfish_mask(batch["input_ids"], batch["labels"], starts, context_width=3).any()
    assert 0 < entry["goldfish_dropped_fraction"] < 1


def test_lora_trains_adapters_alone(model_directory, tmp_path, cache):
    pytest.importorskip("peft", reason="LoRA needs the extra `peft`")
    trainer = finetune.main(command(model_directory, tmp_path, "--lora_r", "2", "--goldfish", "False"))
    trained = {name for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert all(entry["goldfish_dropped_fraction"] == 0 for entry in trainer.state.log_history if "loss_all" in entry)


def test_an_interrupted_run_goes_on_by_the_command_that_started_it(model_directory, tmp_path, cache, caplog):
    options = command(model_directory, tmp_path, "--save_strategy", "steps", "--save_steps", "1", "--max_steps", "3")
    options += ["--lr_scheduler_type", "constant", "--resume_from_checkpoint", "last"]
    unbroken = finetune.main(options).state.log_history
    for step in (2, 3):
        checkpoint = tmp_path / "out" / f"checkpoint-{step}"
        checkpoint.rename(tmp_path / f"gone-{step}")
    again = finetune.main(options).state.log_history
    losses = [[entry["loss"] for entry in history if "loss" in entry] for history in (unbroken, again)]
    assert len(losses[0]) == 3 and losses[0] == pytest.approx(losses[1])
    (said,) = [record.message for record in caplog.records if "no checkpoint" in record.message]
    assert said == f"{tmp_path / 'out'} has no checkpoint: training starts at step 0."


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--packing"], ["--lora_r", "2", "--held_out", "0.25"]], ids=["packed", "lora"])
def test_a_grid_trains_as_one_process(model_directory, tmp_path, cache, options):
    """The same rows, masks and adapters: the losses of two ranks that share every layer are those of one process."""
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    settings = command(model_directory, tmp_path, *options, "--learning_rate", "0.01", "--save_strategy", "no")
    finetune.main([*settings, "--output_dir", str(alone)])
    launch = [str(Path(sys.executable).with_name("accelerate")), "launch", "--main_process_port", "0", "--config"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path)}
    ended = subprocess.run(
        [*launch, str(SCRIPTS / "grids" / "cpu_2_x2.yaml"), str(SCRIPTS / "finetune.py"), *settings]
        + ["--output_dir", str(shared)],
        env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    logs = [json.loads((output / "trainer_state.json").read_text())["log_history"] for output in (alone, shared)]
    for key in ("loss", "grad_norm", "loss_all", "goldfish_dropped_fraction", "eval_loss"):
        one, two = ([entry[key] for entry in log if key in entry] for log in logs)
        assert one == pytest.approx(two, rel=1e-4), key
        assert one or key == "eval_loss"
    losses = [entry["loss"] for entry in logs[0] if "loss" in entry]
    assert len(losses) == 2 and losses[0] != losses[1]
    if "--lora_r" in options:
        assert (shared / "adapter_config.json").exists()
    else:
        read = [LlamaForCausalLM.from_pretrained(output).state_dict() for output in (alone, shared)]
        for name, weight in read[0].items():
            torch.testing.assert_close(read[1][name], weight, rtol=1e-4, atol=1e-5)


def test_gguf_options_reach_the_loader(monkeypatch):
    """A GGUF file is read dequantized; the demo's model step reads a real one."""
    seen = {}
    monkeypatch.setattr(finetune.AutoModelForCausalLM, "from_pretrained", lambda name, **options: seen.update(options))
    finetune.load_model(finetune.ModelArguments(model="x", gguf_file="y.gguf"), None)
    assert seen["gguf_file"] == "y.gguf" and seen["quantization_config"].dequantize and seen["dtype"] == "float32"


def test_a_folder_that_another_run_trains_into_ends_a_run_before_weights_are_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_folder, "HELD", 0.01)
    with run_folder.hold_folder(tmp_path), pytest.raises(SystemExit) as ended, checks.end_with_sentence("model"):
        checks.make_output(tmp_path, adapters=False)
    assert ended.value.code == 2 and f"another run trains into {tmp_path} now" in capsys.readouterr().err
    checks.make_output(tmp_path, adapters=False)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--goldfish_k", "1"], "k"),
        (["--held_out", "2"], "held_out is 2.0"),
        (["--lora_r", "-1"], "lora_r is -1"),
        (["--no_such_option", "1"], "no_such_option"),
        (["--eval_strategy", "epoch"], "needs --held_out or --held_out_data"),
        (["--text_column", "body"], "no column 'body'"),
        (["--model", "./nowhere"], "nowhere"),
        (["--resume_from_checkpoint", "./nowhere"], "nowhere is no folder; last is the newest one in --output_dir"),
        (["--output_dir", "documents.jsonl"], "cannot be made (File exists): name another folder"),
        (["--output_dir", "adapters"], "adapters holds adapters of another run"),
        (["--model", "adapters"], "give the model that they are for (some/base), and --lora_r for new ones"),
        (["--model", "cut"], "the weights of cut are damaged"),
        (["--model", "own"], "own comes with code of its own: read it, and give --trust-remote-code"),
        (["--tokenizer", "own_words"], "own_words comes with code of its own: read it, and give --trust-remote-code"),
        (["--tokenizer", "no_end"], "the tokenizer no_end has neither a padding token nor an end of sequence"),
    ],
)
def test_a_bad_command_line_ends_with_code_2(model_directory, tmp_path, cache, capsys, monkeypatch, more, message):
    monkeypatch.chdir(tmp_path)
    own_words = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    for name, file, change in (
        ("own", "config.json", {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}),
        ("own_words", "tokenizer_config.json", own_words),
        ("no_end", "tokenizer_config.json", {"pad_token": None, "eos_token": None}),
        ("adapters", "adapter_config.json", {"base_model_name_or_path": "some/base"}),
    ):
        path = Path(shutil.copytree(model_directory, name), file)
        path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **change}))
    weights = Path(shutil.copytree(model_directory, "cut"), "model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(SystemExit) as stopped:
        finetune.main(command(model_directory, tmp_path, *more))
    assert stopped.value.code == 2
    assert (
        message
        in [line for line in capsys.readouterr().err.splitlines() if line.startswith(Path(sys.argv[0]).name)][0]
    )
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_rows_longer_than_the_model_are_warned_of(model_directory, tokenizer, tmp_path, cache, capsys):
    lines = write_lines(tmp_path / "documents.jsonl", [{"text": " ".join(WORDS * 5)}])
    for length in (64, 65):
        rows = data.load_rows(data.DataArguments(data=lines, sequence_length=length), tokenizer)
        finetune.check_data(finetune.ModelArguments(model=str(model_directory)), rows)
        warned = "warning: sequences of 65 tokens are longer than the 64 that the config" in capsys.readouterr().out
        assert warned == (length == 65)


def test_help_is_readable(capsys):
    with pytest.raises(SystemExit) as stopped:
        finetune.parse(["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    assert text.index("accelerate launch --config axonn.yaml") < text.index("GOLDFISH_K")
    assert text.index("options:") < text.index("model:") < text.index("data:") < text.index("--held_out_data")
    assert all(len(line) <= 140 for line in text.splitlines()[:20])


def test_packing_is_refused_where_documents_would_mix(tmp_path):
    args = finetune.GoldfishConfig(output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=4)
    model = tiny_llama()
    finetune.check_packing(model, args)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="takes one row at a time, not 8"):
        finetune.check_packing(model, args)

    class WithoutPositions(torch.nn.Module):
        config = model.config

        def forward(self, input_ids):
            raise AssertionError("only looked at")

    with pytest.raises(ValueError, match="documents of WithoutPositions see each other"):
        finetune.check_packing(WithoutPositions(), args)


def test_rows_of_a_batch_cover_a_global_step(model_directory, tmp_path, cache):
    """One process with 8 rows a step and two with 4 read the same rows in the same step, in the order of the file."""
    from accelerate.data_loader import BatchSamplerShard

    trainer = finetune.main(
        command(model_directory, tmp_path, "--train_sampling_strategy", "sequential", "--max_steps", "1", documents=12)
    )
    sampler = trainer.get_train_dataloader().batch_sampler
    order = [index for batch in sampler for index in batch]
    assert order == list(range(12))
    halves = [
        list(
            BatchSamplerShard(torch.utils.data.BatchSampler(range(12), 2, False), num_processes=2, process_index=rank)
        )
        for rank in range(2)
    ]
    steps = [first + second for first, second in zip(*halves, strict=True)]
    assert steps == [list(range(start, start + 4)) for start in range(0, 12, 4)]
