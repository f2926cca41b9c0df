"""Number of times that each article is seen, and the order of training.

Every article gives one passage: its first tokens, half prefix and half suffix. The articles are dealt to buckets in an
order that depends on the seed alone, and a bucket's passages are repeated as often as the bucket says, spread evenly
over the run.
"""

import heapq
import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_axonn_eval.data.jsonl import replacing
from hf_axonn_scripts.buckets import turn


BUCKETS = {0: 12, 1: 8, 4: 8, 12: 12}


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The passages of the demo, as token ids.

    Attributes:
        passages: title -> the first token ids of the article.
        buckets: title -> how often the passage is trained on.
        held_out: titles that are in no bucket; the held-out loss is theirs.
        batches: the titles of every training batch, in order.
    """

    passages: dict[str, list[int]]
    buckets: dict[str, int]
    held_out: list[str]
    batches: list[list[str]]


def build_corpus(
    texts: Mapping[str, str],
    tokenizer,
    *,
    length: int = 64,
    held_out: int = 16,
    batch_size: int = 8,
    seed: int = 0,
) -> Corpus:
    """Deal articles to buckets and lay out the training run.

    Args:
        texts: title -> plain text, in a fixed order.
        tokenizer: a transformers tokenizer; no special tokens are added.
        length: tokens of a passage.
        held_out: articles kept for the held-out loss, beside bucket 0.
        batch_size: articles in one optimizer step, over all ranks.
        seed: decides which article is in which bucket, and the order of training.
    Raises:
        ValueError: too few articles are long enough, or the repetitions do not fill whole batches.
    """
    # A token covers fewer than 40 characters of prose: the start of an article is enough, and ten times as quick.
    ids = {
        title: tokenizer(text[: 40 * length], add_special_tokens=False)["input_ids"][:length]
        for title, text in texts.items()
    }
    titles = [title for title, passage in ids.items() if len(passage) == length]
    needed = sum(BUCKETS.values()) + held_out
    if len(titles) < needed:
        raise ValueError(
            f"{needed} articles of at least {length} tokens are needed, {len(titles)} of {len(texts)} are as long: "
            "take shorter passages or smaller buckets"
        )
    random.Random(seed).shuffle(titles)
    bucket_of: dict[str, int] = {}
    for repetitions, count in BUCKETS.items():
        for title in titles[len(bucket_of) :][:count]:
            bucket_of[title] = repetitions
    chosen = titles[:needed]
    return Corpus(
        passages={title: ids[title] for title in chosen},
        buckets=bucket_of,
        held_out=chosen[len(bucket_of) :],
        batches=schedule(bucket_of, batch_size=batch_size, seed=seed),
    )


def schedule(repetitions: Mapping[str, int], *, batch_size: int, seed: int = 0) -> list[list[str]]:
    """Spread repeated titles over batches so that no batch holds a title twice.

    Every title has its repetitions at equal distances over the run, from a random starting point. A batch takes the
    titles that are due first, those not in it yet.

    Raises:
        ValueError: the repetitions do not fill whole batches, or a title has more of them than there are batches.
    """
    total = sum(repetitions.values())
    if total % batch_size:
        raise ValueError(
            f"{total} repetitions in all are no multiple of the batch size {batch_size}: "
            f"take {batch_size - total % batch_size} more, or another batch size"
        )
    steps = total // batch_size
    if max(repetitions.values()) > steps:
        raise ValueError(f"a title is seen {max(repetitions.values())} times but the run has {steps} batches only")
    draw = random.Random(seed)
    # The turns of a title, the last one first, so that pop() takes the next.
    turns = {
        title: [(turn(index, count, phase), title) for index in reversed(range(count))]
        for title, count, phase in ((title, count, draw.random()) for title, count in repetitions.items() if count)
    }
    titles_with: dict[int, set[str]] = {}  # so many turns left -> titles
    for title, waiting in turns.items():
        titles_with.setdefault(len(waiting), set()).add(title)
    due = [waiting[-1] for waiting in turns.values()]
    heapq.heapify(due)
    batches: list[list[str]] = []
    for left in range(steps, 0, -1):
        # A title that needs every batch that is left cannot wait for its turn.
        batch = sorted(turns[title][-1] for title in titles_with.get(left, ()))
        urgent = {title for _, title in batch}
        while len(batch) < batch_size:
            item = heapq.heappop(due)
            # Turns that could not wait are still in the heap.
            if item[1] not in urgent and turns[item[1]][-1:] == [item]:
                batch.append(item)
        for _, title in batch:
            titles_with[len(turns[title])].remove(title)
            turns[title].pop()
            if turns[title]:
                titles_with.setdefault(len(turns[title]), set()).add(title)
                heapq.heappush(due, turns[title][-1])
        batches.append([title for _, title in batch])
    return batches


def write_training_set(corpus: Corpus, path: Path) -> None:
    """Write the run as JSONL, one row a line in the order of training: title, token ids.

    A row stands there as often as it is to be seen, so it has no bucket.
    """
    rows = ((title, corpus.passages[title]) for batch in corpus.batches for title in batch)
    write_rows(path, ({"title": title, "input_ids": ids} for title, ids in rows))


def write_held_out(corpus: Corpus, path: Path) -> None:
    """Write the passages that no run trains on and that are in no bucket."""
    write_rows(path, ({"title": title, "input_ids": corpus.passages[title]} for title in corpus.held_out))


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write JSON lines, and return how many; the file appears complete or not at all."""
    count = 0
    with replacing(path) as file:
        for row in rows:
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
            count += 1
    return count
