"""Copies of a document that are not exact, and the tokens that they reveal although the goldfish loss drops some.

    python -m tests.benchmarks.goldfish.near_duplicates --texts TEXTS.jsonl --tokenizer DIRECTORY

A hash drops the same label in each exact copy of a passage. In a copy with an edit among the h tokens that the hash
reads, it draws anew. A token of the document is *hidden* if no copy has it as a label that is kept, else revealed.
Counted, by the number of copies:

    edits      each token of a copy is replaced with a chance e, by one that is drawn evenly (or also removed, or one
               is put before it); for replacements there is a closed form, `hidden_share`
    texts      real documents with other line breaks, doubled spaces, and other segmentations by the same tokenizer,
               by characters: one is hidden if no token with it is kept in any copy
    repeats    labels whose window of h tokens is in several documents of a text: one in k of these is dropped in
               all of them, so no document teaches it; this is the price of a small h

Nothing is trained; near_duplicates_trained.py does that.
"""

from __future__ import annotations

import argparse
import json
import random
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from hf_axonn import goldfish_mask


VOCABULARY, LENGTH, DOCUMENTS = 50_000, 512, 40  # of random documents
WIDTHS, RATES, K, COUNTED = (2, 4, 8, 13, 25, 50), (0.0, 0.01, 0.02, 0.05, 0.1, 0.2), 4, 8
KS, COPIES = (2, 3, 4, 8), (1, 2, 8, 32)
KINDS = ("replaced", "replaced, removed, added")
MANY = 5  # documents with a window, for its labels to count as repeated


def hidden_share(*, k: int, context_width: int, edit_rate: float, copies: int) -> float:
    """Return the share of tokens that no copy reveals, where each token of a copy is replaced with a chance e.

    A token is dropped in the document itself with probability 1/k. A copy has it, and its window of h tokens as it
    was, with probability w = (1 - e)^h, and then the document's coin; it has the token and another window with
    probability 1 - e - w, and then a coin of its own. So with n copies, of which none has to be exact,

        1/k (1 - (1 - e - w)(1 - 1/k))^n + (1 - 1/k) (e + (1 - e - w)/k)^n

    for `hash-table` and `hash-avalanche`, whose window ends with the token. As documents have more tokens than one,
    and different windows may share their coin by chance, it is exact for a large vocabulary.
    """
    kept = 1 - 1 / k
    same = (1 - edit_rate) ** context_width
    other = 1 - edit_rate - same
    return (1 - other * kept) ** copies / k + kept * (edit_rate + other / k) ** copies


def edit(tokens: Tensor, rate: float, kind: str, draw: torch.Generator, vocabulary: int = VOCABULARY) -> Tensor:
    """Return a copy of a document [S] as [2, S'] tokens and the place of each in the document, -1 for others.

    Args:
        tokens: [S] ids.
        rate: chance of an edit at a token.
        kind: of KINDS.
        draw: of chances and tokens.
        vocabulary: number of ids to draw from.
    """
    length = len(tokens)
    edited = torch.rand(length, generator=draw) < rate
    other = torch.randint(vocabulary, (length,), generator=draw)
    places = torch.arange(length)
    if kind == KINDS[0]:
        return torch.stack([torch.where(edited, other, tokens), places.masked_fill(edited, -1)])
    which = torch.randint(3, (length,), generator=draw)  # 0 replaced, 1 removed, 2 one put before
    pieces = torch.stack(
        [
            torch.stack([other, torch.full((length,), -1)]),
            torch.stack(
                [torch.where(edited & (which == 0), other, tokens), places.masked_fill(edited & (which == 0), -1)]
            ),
        ],
        dim=-1,
    ).flatten(1)
    there = torch.stack([edited & (which == 2), ~(edited & (which == 1))], dim=-1).flatten()
    return pieces[:, there]


def revealed(copy: Tensor, length: int, **options) -> Tensor:
    """Return [length] bool, the tokens of a document that a copy of `edit` has as kept labels; options of a mask."""
    tokens, places = copy
    kept = ~goldfish_mask(tokens[None], **options)[0]
    found = torch.zeros(length, dtype=torch.bool)
    found[places[kept & (places >= 0)]] = True
    return found


def count_hidden(
    *, k: int, context_width: int, edit_rate: float, copies: int, kind: str = KINDS[0], seed: int = 0
) -> float:
    """Return the share of tokens of random documents, behind the first `context_width`, that no copy reveals."""
    draw = torch.Generator().manual_seed(seed)
    hidden = total = 0
    for _ in range(DOCUMENTS):
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=draw)
        found = torch.zeros(LENGTH, dtype=torch.bool)
        for _ in range(copies):
            found |= revealed(edit(tokens, edit_rate, kind, draw), LENGTH, k=k, context_width=context_width)
        inside = found[2 * context_width :]  # removed tokens bring later ones among the first, which are never dropped
        hidden += int((~inside).sum())
        total += len(inside)
    return hidden / total


Variant = Callable[[str, int], str]
VARIANTS: dict[str, Variant] = {  # the document and the number of a copy, from 0 on
    "exact": lambda text, number: text,
    "line breaks": lambda text, number: textwrap.fill(text, 60 + 7 * number, break_long_words=False),
    "doubled spaces after sentences": lambda text, number: text.replace(". ", ".  ") if number % 2 else text,
}
SEGMENTED = "other segmentation"  # BPE dropout, a variant of tokens and not of texts
DROPOUT = 0.1


def hidden_characters(texts: Sequence[str], tokenizer: Tokenizer, variant: str, copies: int, **options) -> float:
    """Return the share of the letters and digits of texts that no copy reveals.

    Args:
        texts: documents.
        tokenizer: BPE, whose dropout is set for SEGMENTED: of each merge, from the second copy on.
        variant: of VARIANTS, or SEGMENTED.
        copies: of each document, the first one as it is (or the variant's first).
        options: of the mask.
    """
    hidden = total = 0
    width = options["context_width"]
    for text in texts:
        letters = [place for place, letter in enumerate(text) if letter.isalnum()]
        found = [False] * len(letters)
        late = len(letters)
        for number in range(copies):
            tokenizer.model.dropout = DROPOUT if variant == SEGMENTED and number else None
            other = text if variant == SEGMENTED else VARIANTS[variant](text, number)
            encoded = tokenizer.encode(other, add_special_tokens=False)
            kept = ~goldfish_mask(torch.tensor([encoded.ids]), **options)[0]
            order = {
                place: count for count, place in enumerate(p for p, letter in enumerate(other) if letter.isalnum())
            }
            for place, (begin, end) in enumerate(encoded.offsets):
                inside = [order[at] for at in range(begin, end) if at in order]
                if place >= 2 * width and not number and inside:
                    late = min(late, *inside)
                if kept[place]:
                    for at in inside:
                        found[at] = True
        hidden += found[late:].count(False)
        total += len(found) - late
    tokenizer.model.dropout = None
    return hidden / total


def repeated_labels(documents: Sequence[Sequence[int]], context_width: int) -> float:
    """Return the share of labels, behind the first h of a document, whose window is in MANY documents or more."""
    seen: dict[tuple[int, ...], set[int]] = {}
    for number, tokens in enumerate(documents):
        for window in _windows(tokens, context_width):
            seen.setdefault(window, set()).add(number)
    labels = [len(seen[window]) >= MANY for tokens in documents for window in _windows(tokens, context_width)]
    return sum(labels) / len(labels)


def _windows(tokens: Sequence[int], width: int) -> Iterator[tuple[int, ...]]:
    for end in range(width + 1, len(tokens) + 1):
        yield tuple(sorted(tokens[end - width : end]))  # the product of the authors' hash has no order


def main() -> None:
    """Print the tables of docs/goldfish.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, help="JSON lines with `text`")
    parser.add_argument("--tokenizer", type=Path, help="directory with tokenizer.json, a BPE")
    options = parser.parse_args()
    print(f"## Hidden, of tokens in {COUNTED} copies, k = {K}: counted (closed form)\n")
    print("| edits | h | " + " | ".join(f"e = {rate:.0%}" for rate in RATES) + " |")
    for kind in KINDS:
        for width in WIDTHS:
            cells = []
            for rate in RATES:
                setting = {"k": K, "context_width": width, "edit_rate": rate, "copies": COUNTED}
                form = f" ({hidden_share(**setting):.3f})" if kind == KINDS[0] else ""
                cells.append(f"{count_hidden(**setting, kind=kind):.3f}{form}")
            print(f"| {kind} | {width} | " + " | ".join(cells) + " |", flush=True)
    print("\n## Hidden, by the closed form, tokens replaced\n")
    print("| e | h | k | " + " | ".join(f"{copies} copies" for copies in COPIES) + " |")
    for rate in (0.02, 0.1):
        for width in (4, 13, 50):
            for k in KS:
                shares = [hidden_share(k=k, context_width=width, edit_rate=rate, copies=copies) for copies in COPIES]
                print(f"| {rate:.0%} | {width} | {k} | " + " | ".join(f"{share:.3f}" for share in shares) + " |")
    if options.texts is None or options.tokenizer is None:
        return
    tokenizer = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in options.texts.read_text(encoding="utf-8").splitlines()]
    random.Random(0).shuffle(texts)
    some = [" ".join(text.split())[:2000] for text in texts if len(text) > 2000][:30]
    widths = " | ".join(f"h = {width}" for width in WIDTHS)
    print(f"\n## Hidden, of letters and digits, k = {K}\n\n| copies | copies differ in | {widths} |")
    for copies in (2, COUNTED):
        for variant in (*VARIANTS, SEGMENTED):
            shares = [
                hidden_characters(some, tokenizer, variant, copies, k=K, context_width=width) for width in WIDTHS
            ]
            print(f"| {copies} | {variant} | " + " | ".join(f"{share:.3f}" for share in shares) + " |", flush=True)
    documents = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    shares = [repeated_labels(documents, width) for width in (1, *WIDTHS)]
    print(
        f"\n## Labels whose window is in {MANY} documents or more, of {sum(map(len, documents)):,} in {len(texts):,}\n"
    )
    print(f"| h = 1 | {widths} |")
    print("| " + " | ".join(f"{share:.4f}" for share in shares) + " |")


if __name__ == "__main__":
    main()
