"""Stand-ins for what other projects' scripts load from the hub, in folders whose relative path is its name there.

Transformers, datasets and evaluate take a folder of the working directory for a name of the hub. Nothing drops out,
since a grid draws other masks than one process (docs/numerics.md).
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)


CLASSIFIER, DECODER = "bert-base-cased", "HuggingFaceTB/SmolLM-360M"
WORDS = [f"w{index}" for index in range(120)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
MESSAGE = "{{ message['role'] }} {% generation %}{{ message['content'] }} [SEP] {% endgeneration %}"
METRIC = """
import datasets
import evaluate


class Agreement(evaluate.Metric):
    def _info(self):
        kinds = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=kinds)

    def _compute(self, predictions, references):
        pairs = list(zip(predictions, references))
        right, both = sum(a == b for a, b in pairs), sum(a == b == 1 for a, b in pairs)
        places = [place * prediction for place, prediction in enumerate(predictions)]
        f1 = 2 * both / max(1, predictions.count(1) + references.count(1))
        return {"accuracy": right / len(pairs), "f1": f1, "which": sum(places)}
"""


def make_stand_ins(folder: Path) -> None:
    """Models, tokenizers, data sets and a metric for the scripts of other_scripts.py."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=len(SPECIAL + WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    sizes.update(num_attention_heads=4, max_position_embeddings=128, pad_token_id=0)
    classifier = BertForSequenceClassification(
        BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=1.0)
    )
    # At rates for a pretrained model, only a classifier that begins with little changes what it predicts.
    torch.nn.init.normal_(classifier.classifier.weight, std=3e-4)
    for name, model in (
        (CLASSIFIER, classifier),
        (DECODER, LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, eos_token_id=3))),
    ):
        model.save_pretrained(folder / name)
        _tokenizer(pair=name == CLASSIFIER).save_pretrained(folder / name)
    draw = random.Random(0)
    _data_set(folder / "nyu-mll" / "glue", "mrpc", {"train": 480, "validation": 250, "test": 32}, lambda: _pair(draw))
    sizes_of_text = {"train": 500, "validation": 64, "test": 8}
    _data_set(folder / "Salesforce" / "wikitext", "wikitext-2-v1", sizes_of_text, lambda: {"text": _text(draw)})
    _data_set(folder / "trl-lib" / "Capybara", "default", {"train": 64, "test": 16}, lambda: _conversation(draw))
    for name in ("glue", "accuracy"):
        (folder / name).mkdir()
        (folder / name / f"{name}.py").write_text(METRIC)


def _tokenizer(*, pair: bool) -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(SPECIAL + WORDS)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    if pair:
        words.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", eos_token="[SEP]", model_max_length=64
    )
    tokenizer.chat_template = "{% for message in messages %}" + MESSAGE + "{% endfor %}"
    return tokenizer


def _text(draw: random.Random, words: list[str] = WORDS[:40]) -> str:
    return " ".join(draw.choices(words, k=draw.randint(8, 30)))


def _pair(draw: random.Random) -> dict[str, object]:
    """Two sentences, and whether their words are mostly of the first half; one label of six is wrong."""
    label = draw.randint(0, 1)
    words = WORDS[:70] if label else WORDS[50:]
    wrong = draw.random() < 1 / 6
    return {"sentence1": _text(draw, words), "sentence2": _text(draw, words), "label": label ^ wrong, "idx": 0}


def _conversation(draw: random.Random) -> dict[str, object]:
    roles = ("user", "assistant") * draw.randint(1, 2)
    return {"messages": [{"role": role, "content": _text(draw)} for role in roles]}


def _data_set(folder: Path, name: str, sizes: dict[str, int], row) -> None:
    folder.mkdir(parents=True)
    header = ["---", "configs:", f"- config_name: {name}", "  data_files:"]
    for split, size in sizes.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row()) + "\n" for _ in range(size)))
        header += [f"  - split: {split}", f"    path: {split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*header, "---", ""]))
