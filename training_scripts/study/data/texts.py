"""The texts of a study, and the tokenizer that is trained on them.

    texts/articles.jsonl   whole articles; passages of them are repeated (passages.py)
    texts/base.jsonl       what models learn that are trained from nothing, and what warms continuations up
    texts/held_out.jsonl   what no run trains on
    texts/sources.json     packages or files, their licences, counts

No document is in two of them. Which one goes where depends on the recipe alone: the same recipe writes the same bytes.
"""

import hashlib
import json
import math
import random
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets

from hf_axonn_eval import find_overlaps
from hf_axonn_eval.data.jsonl import write_json
from hf_axonn_scripts.demo.corpus import write_rows
from hf_axonn_scripts.study.data import sources
from hf_axonn_scripts.study.recipe.definition import Recipe


ORDER = 0  # seed of every choice here: seeds of runs choose among passages, not among texts
# Text is counted in characters while there is no tokenizer. Tokens of English prose have three to five, so that this
# many are enough; what is more than the recipe asks for stays unused.
CHARACTERS_OF_A_TOKEN = 6
ROOM_OF_A_TOKEN = 8  # characters of an article: passages begin at paragraphs and have their length in any tokenizer
SPARE_ARTICLES = 1 / 8  # some fall out, because they share text
SPARE_HELD_OUT = 1 / 2  # the same
NEAR = 0.2  # a held-out document is left out if the base text has this share of its runs of 8 words
MOST_COMPARED = 200_000_000  # characters of base text that it is compared with; more take hours and gigabytes
TOKENIZER_CHARACTERS = 200_000_000  # of base text that a tokenizer is trained on, and of each file that it is tried on
ROWS_AT_ONCE = 1000  # of a data set, which may be larger than memory
END = "<|end|>"


def write_texts(recipe: Recipe, output: Path) -> None:
    """Write the four files of OUTPUT/texts.

    Documents with the words of an earlier one are left out, and held-out documents of whose runs of 8 words the base
    text has a fifth. Where the base text is longer than 200 million characters, held-out documents are not compared
    with it. `sources.json` counts all of them.

    Raises:
        ValueError: there is too little text, or files cannot be read; the message has the numbers.
        SystemExit: pip could not download a package.
    """
    found = sources.read(recipe, output / "download")
    texts = output / "texts"
    texts.mkdir(parents=True, exist_ok=True)
    chosen, long_enough = _choose(found.articles, recipe)
    write_rows(texts / "articles.jsonl", found.articles.select(chosen))
    others = found.others
    if others is None or found.mixed:
        rest = found.articles.select(sorted(set(range(len(found.articles))) - set(chosen)))
        others = rest if others is None else concatenate_datasets([rest, others])

    documents = _Different(others)
    held_out = list(documents.take(recipe.texts.held_out_tokens * CHARACTERS_OF_A_TOKEN * (1 + SPARE_HELD_OUT)))
    write_rows(texts / "base.jsonl", documents.take(recipe.texts.base_tokens * CHARACTERS_OF_A_TOKEN))
    counts = {"base": _count(texts / "base.jsonl")}
    near = None
    if counts["base"]["characters"] <= MOST_COMPARED:
        near = _near(held_out, texts / "base.jsonl")
        held_out = [document for document in held_out if document["id"] not in near]
    write_rows(texts / "held_out.jsonl", held_out)
    for name in ("articles", "held_out"):
        counts[name] = _count(texts / f"{name}.jsonl")
    for name in ("base", "held_out"):
        needed, there = getattr(recipe.texts, f"{name}_tokens"), counts[name]
        if there["characters"] < needed:  # the exact number of tokens is known when there is a tokenizer
            raise ValueError(
                f"{name}_tokens asks for {needed:,} tokens, but there are {there['documents']:,} such documents of "
                f"{there['characters']:,} characters in all: lower it, or give more text"
            )
    about = {
        "sources": found.about,
        "documents": counts,
        "articles_long_enough": long_enough,
        "left_out": {"same_words": documents.same_words, "held_out_near_base": None if near is None else len(near)},
    }
    write_json(texts / "sources.json", about)
    print(", ".join(f"{name}: {facts['documents']:,} documents" for name, facts in counts.items()), flush=True)


def train_tokenizer(recipe: Recipe, output: Path) -> None:
    """Train a byte-level BPE on the base text and write it to OUTPUT/tokenizer, where AutoTokenizer reads it.

    It has `recipe.vocabulary` tokens. One of them ends documents and fills rows; nothing stands before a text. The
    articles have no say in it.

    Raises:
        ValueError: the vocabulary is larger than the text gives, or a text does not come back unchanged.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(_beginning(output / "texts" / "base.jsonl"), trainer=trainer)
    if bpe.get_vocab_size() < recipe.vocabulary:
        raise ValueError(
            f"the base text gives {bpe.get_vocab_size():,} tokens, not the {recipe.vocabulary:,} of `vocabulary`: "
            "lower it, or give more text"
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=END)
    for name in ("articles", "base", "held_out"):
        for text in _beginning(output / "texts" / f"{name}.jsonl"):
            if END in text or tokenizer.decode(tokenizer(text, verbose=False)["input_ids"]) != text:
                raise ValueError(
                    f"texts/{name}.jsonl: the tokenizer does not give a text back unchanged, or the text holds {END}: "
                    f"{text[:80]!r}"
                )
    tokenizer.save_pretrained(output / "tokenizer")


def count_articles(recipe: Recipe) -> tuple[int, int]:
    """Return the number of articles that a study takes, and of passages of each."""
    documents = recipe.documents
    per_article = documents.per_article or len(documents.buckets)
    return documents.per_bucket * len(documents.buckets) // per_article, per_article


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file that `write_rows` wrote."""
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


class _Different:
    """Documents in an order of their own, each once, taken piece by piece.

    Attributes:
        same_words: number of those that were passed over because an earlier one has the same words.
    """

    def __init__(self, documents: Dataset) -> None:
        order = list(range(len(documents)))
        random.Random(ORDER).shuffle(order)
        self._documents = iter(documents.select(order))
        self._seen: set[int] = set()
        self.same_words = 0

    def take(self, characters: float) -> Iterator[dict[str, Any]]:
        """Yield the next documents, until they have this number of characters, or there are none left."""
        taken = 0
        while taken < characters and (document := next(self._documents, None)) is not None:
            words = " ".join(document["text"].casefold().split())
            key = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest())
            if key in self._seen:
                self.same_words += 1
                continue
            self._seen.add(key)
            taken += len(document["text"])
            yield document


def _choose(articles: Dataset, recipe: Recipe) -> tuple[list[int], int]:
    """Return the rows of the articles that are to give passages, and the number of those with room for all of theirs.

    A random choice of those with room and, where these do not suffice, the longest of the others.
    """
    needed, per_article = count_articles(recipe)
    lengths = [len(text) for some in articles.select_columns(["text"]).iter(ROWS_AT_ONCE) for text in some["text"]]
    room = per_article * recipe.documents.length * ROOM_OF_A_TOKEN
    order = list(range(len(lengths)))
    random.Random(ORDER).shuffle(order)
    long_enough = [row for row in order if lengths[row] >= room]
    others = sorted((row for row in order if lengths[row] < room), key=lambda row: (-lengths[row], row))
    return (long_enough + others)[: needed + math.ceil(needed * SPARE_ARTICLES)], len(long_enough)


def _near(held_out: list[dict[str, Any]], base: Path) -> set[str]:
    """Return the ids of the held-out documents that the base text has much of."""
    if not held_out:
        return set()
    members = ({"bucket": 1, **document, "id": f"base {document['id']}"} for document in read_rows(base))
    outside = [{"bucket": 0, **document} for document in held_out]
    return set(find_overlaps(members, outside, least=NEAR).drop)


def _beginning(path: Path) -> Iterator[str]:
    """Yield the first texts of a file."""
    characters = accumulate((len(document["text"]) for document in read_rows(path)), initial=0)
    for document, before in zip(read_rows(path), characters, strict=False):
        if before >= TOKENIZER_CHARACTERS:
            return
        yield document["text"]


def _count(path: Path) -> dict[str, int]:
    lengths = [len(document["text"]) for document in read_rows(path)]
    return {"documents": len(lengths), "characters": sum(lengths)}
