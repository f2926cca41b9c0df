"""Which heavy modules each command imports, and that tokenizers are the same where torch is not imported for them."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys

import pytest
from transformers import AutoTokenizer, ByT5Tokenizer, GPT2Tokenizer, LlamaTokenizer, Qwen2Tokenizer, T5Tokenizer

from hf_axonn_eval import build_samples, extract, write_samples
from hf_axonn_eval.data.tokenizer_identity import tokenizer_identity
from tests.helpers.eval_support import documents, tiny_llama, topics_tokenizer
from tests.helpers.models import tiny_config


HEAVY = {"torch", "transformers", "accelerate", "datasets", "scipy", "matplotlib", "rich"}
PROGRAM = """
import json, sys
module, *sys.argv = sys.argv[1:]
try:
    code = __import__(module, fromlist=["main"]).main()
except SystemExit as end:
    code = end.code
print(json.dumps([code, sorted(set(sys.modules) & set({heavy!r}))]))
"""
PLAN = "plan --machine dgx-h100 --gpus 8 --batch-tokens 1M --seq 2048 --model"
# What a command may import. With torch it takes two seconds more, with Transformers beside it four.
COMMANDS = {
    "hf-axonn --help": set(),
    "hf-axonn --version": set(),
    "hf-axonn init --yes --force": set(),
    "hf-axonn init --yes --force --machine dgx-h100 --model gpt-5b": set(),
    f"hf-axonn {PLAN} gpt-5b": set(),
    f"hf-axonn {PLAN} llama/config.json": set(),
    "hf-axonn doctor --config absent.yaml": set(),
    "hf-axonn-eval --help": set(),
    "hf-axonn-eval extract --version": set(),
    "hf-axonn-eval samples --documents documents.jsonl --tokenizer tokenizer --output s.jsonl": {"transformers"},
    "hf-axonn-eval samples --documents absent.jsonl --tokenizer absent --output s.jsonl": {"transformers"},
    "hf-axonn-eval overlaps --documents documents.jsonl --tokenizer tokenizer --output o.json": {
        "scipy",
        "transformers",
    },
    "hf-axonn-eval tokens --run run --output t.npz": set(),
    "hf-axonn-eval export --samples samples.jsonl --tokenizer tokenizer --format lm-eval --output e": {"transformers"},
    "hf-axonn-eval compare --runs a=run b=run": {"rich", "scipy"},
    "hf-axonn-eval report --runs a=run --samples samples.jsonl --tokenizer tokenizer --output r": HEAVY
    - {"torch", "accelerate", "datasets"},
    "hf-axonn-eval canaries make --output c": set(),
    "hf-axonn-eval bundle run --samples samples.jsonl --output b.tar --key k": {"scipy"},
}
MODULES = {"hf-axonn": "hf_axonn.cli.main", "hf-axonn-eval": "hf_axonn_eval.__main__"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with what the commands read."""
    place = tmp_path_factory.mktemp("place")
    tokenizer = topics_tokenizer()
    tokenizer.save_pretrained(place / "tokenizer")
    tiny_config("llama").save_pretrained(place / "llama")
    rows = "".join(json.dumps(document) + "\n" for document in documents())
    (place / "documents.jsonl").write_text(rows)
    asked = build_samples(documents(), tokenizer=tokenizer, prefix_length=8, suffix_length=8)
    write_samples(asked, place / "samples.jsonl")
    extract(tiny_llama(), tokenizer, asked, output=place / "run", generate=False, model_record={"fingerprint": "a"})
    return place


# Of commands that come by the same imports one is quick.
SLOW = {
    "hf-axonn-eval overlaps --documents documents.jsonl --tokenizer tokenizer --output o.json",
    "hf-axonn-eval compare --runs a=run b=run",
    "hf-axonn --version",
    "hf-axonn init --yes --force --machine dgx-h100 --model gpt-5b",
    f"hf-axonn {PLAN} gpt-5b",
    "hf-axonn-eval --help",
    "hf-axonn-eval samples --documents absent.jsonl --tokenizer absent --output s.jsonl",
    "hf-axonn-eval export --samples samples.jsonl --tokenizer tokenizer --format lm-eval --output e",
}
assert SLOW < COMMANDS.keys()


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=[pytest.mark.slow] if line in SLOW else []) for line in COMMANDS]
)
def test_a_command_imports_what_it_needs(place, line):
    program, *words = line.split()
    code = PROGRAM.format(heavy=sorted(HEAVY))
    done = subprocess.run(
        [sys.executable, "-c", code, MODULES[program], program, *words],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    code, imported = json.loads(done.stdout.splitlines()[-1])
    assert code == (2 if "absent" in line else 0), done.stdout + done.stderr
    assert set(imported) <= COMMANDS[line]
    assert "PyTorch was not found" not in done.stderr


LOAD = """
import importlib.util, json, sys
from hf_axonn.compat.without_torch import without_torch
from hf_axonn_eval.data.tokenizer_identity import tokenizer_identity
from hf_axonn_eval.extraction.load_model import load_tokenizer
found = []
with without_torch():
    for path in sys.argv[2:]:
        tokenizer = load_tokenizer(path)
        ids = tokenizer(sys.argv[1], return_offsets_mapping=tokenizer.is_fast)
        decoded = tokenizer.decode(ids["input_ids"])
        found.append([type(tokenizer).__name__, tokenizer_identity(tokenizer), {**ids}, decoded])
assert "torch" not in sys.modules and importlib.util.find_spec("torch")  # it can be imported again
print(json.dumps(found))
"""


def test_a_tokenizer_without_torch_is_the_same(tmp_path):
    letters = {letter: place for place, letter in enumerate(("<unk>", "<s>", "</s>", *"abcdefghijk\u0120\u2581"))}
    made = [
        copy.deepcopy(topics_tokenizer()),
        *(kind(vocab=letters, merges=[]) for kind in (LlamaTokenizer, GPT2Tokenizer, Qwen2Tokenizer)),
        T5Tokenizer(vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581a", -1.0), ("b", -2.0)]),
        ByT5Tokenizer(),
    ]
    made[0].bos_token = made[0].eos_token  # a tokenizer with special tokens
    text = "a bad cab, caf\u00e9  <s> \n1234"
    paths, expected = [], []
    for place, tokenizer in enumerate(made):
        paths.append(str(tmp_path / str(place)))
        tokenizer.save_pretrained(paths[-1])
        loaded = AutoTokenizer.from_pretrained(paths[-1])
        ids = loaded(text, return_offsets_mapping=loaded.is_fast)
        expected.append([type(loaded).__name__, tokenizer_identity(loaded), {**ids}, loaded.decode(ids["input_ids"])])
    done = subprocess.run([sys.executable, "-c", LOAD, text, *paths], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(json.dumps(expected))
