"""training_scripts/finetune_chat.py: refusals are sentences, and no option is without effect."""

import json
import shutil
import sys
from pathlib import Path

import datasets
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_axonn_scripts import finetune_chat
from tests.helpers.chats import chat_tokenizer, chats
from tests.helpers.models import tiny_model


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with `model` and `chats.jsonl`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    tiny_model("llama").float().save_pretrained("model")
    chat_tokenizer().save_pretrained("model")
    chats(12, seed=0, completions=False).to_json("chats.jsonl")
    return tmp_path


def command(*more):
    return [
        "--model_name_or_path", "model", "--data", "chats.jsonl", "--output_dir", "out", "--use_cpu", "True",
        "--report_to", "none", "--disable_tqdm", "True", "--bf16", "False", "--max_steps", "2",
        "--per_device_train_batch_size", "2", "--logging_steps", "1", "--save_strategy", "no",
        "--goldfish_context_width", "3", *more,
    ]  # fmt: skip


def refusal(capsys, *more):
    """The sentence that a run ends with, which has read no weights."""
    with pytest.raises(SystemExit) as stopped:
        finetune_chat.main(command(*more))
    assert stopped.value.code == 2
    name = Path(sys.argv[0]).name
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith(name)]
    return line


CONVERSATION = {"messages": [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "def"}]}
LINES = {
    "none.jsonl": ([], "none.jsonl holds no documents"),
    "other.jsonl": ([{"body": "abc"}], "has neither a column messages, nor prompt and completion, nor text"),
    "prompts.jsonl": ([{"prompt": "abc"}], "has neither a column messages, nor prompt and completion, nor text"),
    "gap.jsonl": ([CONVERSATION, {"id": 3}], "gap.jsonl, document 2 has no messages: leave it out"),
    "text.jsonl": ([{"messages": "abc"}], "messages of the first row of text.jsonl is 'abc': write a list of"),
}


def test_bad_data_is_named(folder, capsys, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("reads weights"))
    for name, (rows, message) in LINES.items():
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert message in refusal(capsys, "--data", name)
    Path("broken.jsonl").write_text('{"messages": [\n')
    Path("latin.jsonl").write_bytes('{"text": "\u00e9t\u00e9"}\n'.encode("latin-1"))
    for options, message in (
        (["--data", "broken.jsonl"], "broken.jsonl cannot be read"),
        (["--data", "latin.jsonl"], "latin.jsonl is not UTF-8: write the file as UTF-8"),
        (["--held_out", "0.99"], "n_samples=12"),
    ):
        assert message in refusal(capsys, *options)


def test_bad_options_and_models_are_named(folder, capsys, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("reads weights"))
    for name, file, change in (
        ("adapters", "adapter_config.json", {"base_model_name_or_path": "some/base"}),
        ("no_end", "tokenizer_config.json", {"pad_token": None, "eos_token": None}),
        ("own", "config.json", {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}),
    ):
        path = Path(shutil.copytree("model", name), file)
        path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **change}))
    plain = AutoTokenizer.from_pretrained("model")
    plain.chat_template = None
    Path("plain").mkdir()
    plain.save_pretrained("plain")
    shutil.copy("model/config.json", "plain/config.json")
    Path("pictures.jsonl").write_text(json.dumps({**CONVERSATION, "images": []}) + "\n")
    for options, message in (
        (["--goldfish_k", "1"], "k"),
        (["--held_out", "2"], "held_out is 2.0"),
        (["--eval_strategy", "epoch"], "--eval_strategy epoch needs --held_out"),
        (["--lora_r", "8"], "--lora_r has no effect without --use_peft"),
        (["--use_dora"], "--use_dora has no effect without --use_peft"),
        (["--bnb_4bit_quant_type", "fp4"], "--bnb_4bit_quant_type has no effect without --load_in_4bit"),
        (["--resume_from_checkpoint", "./nowhere"], "nowhere is no folder; last is the newest one"),
        (["--output_dir", "chats.jsonl"], "cannot be made (File exists): name another folder"),
        (["--output_dir", "adapters"], "adapters holds adapters of another run"),
        (["--model_name_or_path", "./nowhere"], "nowhere is neither a folder here, nor a model on the hub"),
        (["--model_name_or_path", "adapters"], "they are for (some/base), and --use_peft for new ones"),
        (["--model_name_or_path", "no_end"], "neither a padding token nor an end of sequence: set pad_token"),
        (["--model_name_or_path", "own"], "own comes with code of its own: read it, and give --trust-remote-code"),
        (["--model_name_or_path", "plain"], "plain has no chat template, and conversations need one"),
        (["--data", "pictures.jsonl"], "the model has a tokenizer and no processor of images"),
    ):
        assert message in refusal(capsys, *options), options
    assert not list(Path("out").glob("*"))


def test_rows_are_compared_with_the_model(folder, capsys):
    config = json.loads(Path("model/config.json").read_text())
    shutil.copytree("model", "short")
    Path("short/config.json").write_text(json.dumps({**config, "max_position_embeddings": 8}))
    finetune_chat.main(command("--model_name_or_path", "short"))
    printed = capsys.readouterr().out
    assert (
        "are longer than the 8 that the config allows (max_position_embeddings): give a shorter --max_length"
        in printed
    )
    tiny_model("llama", vocab_size=20).float().save_pretrained("few")
    chat_tokenizer().save_pretrained("few")
    assert "the vocabulary of few ends at 19" in refusal(capsys, "--model_name_or_path", "few")


def test_options_of_the_model_reach_its_loader(folder, monkeypatch):
    """Revision, code, quantization and model_init_kwargs, of which a model that is made already knows nothing."""
    seen = {}

    def load(name, **options):
        seen.update(options)
        raise ValueError("seen enough")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    options = ["--model_revision", "v2", "--trust_remote_code", "True", "--model_init_kwargs", '{"use_cache": false}']
    with pytest.raises(SystemExit):
        finetune_chat.main(command(*options, "--load_in_4bit", "--use_bnb_nested_quant"))
    quantization = seen.pop("quantization_config")
    assert quantization.load_in_4bit and quantization.bnb_4bit_use_double_quant
    assert {"revision": "v2", "trust_remote_code": True, "use_cache": False}.items() <= seen.items()
