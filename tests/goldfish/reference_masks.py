"""What the authors' code drops: runs it on made-up rows and writes the digests of its masks, which a test compares.

    git clone https://github.com/ahans30/goldfish-loss
    git clone https://github.com/swiss-ai/Megatron-LM
    python -m tests.goldfish.reference_masks --goldfish_loss goldfish-loss --megatron Megatron-LM

Needs git and a C++ compiler (the authors compile their hash). The functions are read out of the files at the commits
below and run as they stand. Rows are made of torch's CPU generator, so that a test makes the same ones again.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


RESULTS = Path(__file__).with_name("reference_masks.json")
SOURCES = {
    "goldfish-loss": {
        "repository": "https://github.com/ahans30/goldfish-loss",
        "commit": "35d29f96553462f6c30417f8065225aa6b89e172",
        "path": "lit_gpt/utils.py",
        "names": ["hash_table", "table_size", "_load_hash_table", "apply_goldfish", "hashint"],
    },
    "megatron": {  # of Apertus: branch main-run-v1
        "repository": "https://github.com/swiss-ai/Megatron-LM",
        "commit": "bb01d57aed91f6558f03ffe3602d053b662229be",
        "path": "megatron/core/datasets/gpt_dataset.py",
        "names": ["_HASH_TABLE_SIZE", "_create_hash_table", "apply_goldfish"],
    },
}
IGNORED = -100
# Ids whose 32 bits lie so near a threshold of hash-avalanche that float32 and whole numbers part: found by trying the
# first 2**29 ids with a window of one token.
EDGES = {
    2: [12359141, 43974108, 64642380, 165103169, 179985739, 323674352, 353530957, 443928161, 495182996],
    3: [488511300],
    4: [248862026],
    5: [79669383, 130708027, 133081853, 158891359, 376817391, 419911024],
    6: [209032601],
    8: [53184976, 314226598, 437848177],
}


def made_up(kind: str, vocabulary: int, rows: int, length: int, seed: int) -> tuple[Tensor, Tensor, int]:
    """Rows of one kind: (input_ids, labels), both [rows, length] int64, and what the reference has for ignored labels.

    plain: independent ids. zeros: small ids, 0 and 1 among them, which make products equal. packed: texts of other
    lengths that repeat from row to row. padded: the end of rows is padding, which the reference hashes by its id.
    prompts: the beginning of texts is not learnt, and is -1 for the reference.
    """
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    tokens = ids(1, vocabulary, rows, length)
    labels, ignored = tokens.clone(), -1
    if kind == "zeros":
        tokens = ids(0, 4, rows, length)
        labels = tokens.clone()
    elif kind == "packed":
        texts = [ids(1, vocabulary, int(size)) for size in ids(3, 200, 16)]
        for row in tokens:
            order = torch.randperm(len(texts) * 8, generator=generator) % len(texts)
            joined = torch.cat([texts[number] for number in order])[:length]
            row[: len(joined)] = joined
        labels = tokens.clone()
    elif kind == "padded":
        ignored = vocabulary  # an id that no text has
        ends = ids(1, length + 1, rows)
        padding = torch.arange(length) >= ends[:, None]
        tokens = tokens.masked_fill(padding, ignored)
        labels = tokens.masked_fill(padding, IGNORED)
    elif kind == "prompts":
        begins = ids(0, length, rows)
        again = ids(0, length, rows)
        places = torch.arange(length)
        prompt = (places < begins[:, None]) | ((places >= again[:, None]) & (places < again[:, None] + 40))
        labels = tokens.masked_fill(prompt, IGNORED)
    return tokens, labels, ignored


def cases() -> Iterator[dict[str, Any]]:
    """Each setting of a comparison: what a test needs to make it again."""
    seed = 0
    shapes = {"plain": (8, 4097), "zeros": (4, 1025), "packed": (8, 2049), "padded": (16, 1025), "prompts": (16, 1025)}
    for strategy in ("hash-table", "hash-avalanche"):
        for kind, (rows, length) in shapes.items():
            for vocabulary in (257, 32_000, 262_144):
                for k, width in ((2, 1), (3, 13), (4, 13), (8, 5), (32, 13), (50, 50), (128, 26)):
                    seed += 1
                    yield {
                        "source": "goldfish-loss", "strategy": strategy, "kind": kind, "vocabulary": vocabulary,
                        "rows": rows, "length": length, "seed": seed, "k": k, "width": width, "start": 0,
                    }  # fmt: skip
    for k, start in ((2, 0), (3, 1), (4, 0), (4, 3), (4, 9), (50, 17), (7, 4000)):
        for kind in ("plain", "padded"):
            seed += 1
            yield {
                "source": "goldfish-loss", "strategy": "static", "kind": kind, "vocabulary": 257,
                "rows": 4, "length": 1025, "seed": seed, "k": k, "width": 13, "start": start,
            }  # fmt: skip
    for k in (2, 4, 50):
        seed += 1
        yield {  # three batches in order from one generator
            "source": "goldfish-loss", "strategy": "seeded_random", "kind": "plain", "vocabulary": 257,
            "rows": 6, "length": 513, "seed": seed, "k": k, "width": 13, "start": 0, "batches": 3,
        }  # fmt: skip
    for kind in ("plain", "packed"):
        for vocabulary in (32_000, 131_072):
            for k, width in ((50, 50), (4, 13)):
                seed += 1
                yield {
                    "source": "megatron", "strategy": "hash-table", "kind": kind, "vocabulary": vocabulary,
                    "rows": 16, "length": 4097, "seed": seed, "k": k, "width": width, "start": 0,
                }  # fmt: skip
    for k, ids in EDGES.items():
        yield {
            "source": "goldfish-loss", "strategy": "hash-avalanche", "kind": "edges", "ids": ids,
            "k": k, "width": 1, "start": 0,
        }  # fmt: skip


def rows_of(case: dict[str, Any]) -> tuple[Tensor, Tensor, int]:
    """The rows of a case: (input_ids, labels, what the reference has for ignored labels)."""
    if case["kind"] == "edges":
        tokens = torch.tensor([[1, *case["ids"]]])
        return tokens, tokens, -1
    return made_up(case["kind"], case["vocabulary"], case["rows"], case["length"], case["seed"])


def summary(masks: list[Tensor]) -> dict[str, Any]:
    """Of [.., S-1] masks of predicted labels: how many there are, how many are dropped, and their SHA-256."""
    bits = torch.cat([mask.flatten() for mask in masks])
    digest = hashlib.sha256(bits.numpy().astype("u1").tobytes()).hexdigest()
    return {"bits": bits.numel(), "dropped": int(bits.sum()), "sha256": digest}


def functions(source: dict[str, Any], clone: Path) -> dict[str, Any]:
    """The names of a source, defined as its file at the commit defines them."""
    show = ["git", "-C", str(clone), "show", f"{source['commit']}:{source['path']}"]
    text = subprocess.run(show, check=True, capture_output=True, text=True).stdout
    chosen = []
    for node in ast.parse(text).body:
        named = [node.name] if isinstance(node, ast.FunctionDef) else []
        if isinstance(node, ast.Assign):
            named = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if set(named) & set(source["names"]):
            chosen.append(node)
    namespace: dict[str, Any] = {"torch": torch, "Tuple": tuple}
    exec(compile(ast.Module(chosen, []), source["path"], "exec"), namespace)
    missing = set(source["names"]) - set(namespace)
    if missing:
        raise ValueError(f"{source['path']} at {source['commit']} does not define {sorted(missing)}")
    return namespace


def reference(case: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    """The summary of what a reference drops in a case."""
    tokens, labels, ignored = rows_of(case)
    targets = labels[:, 1:].masked_fill(labels[:, 1:] == IGNORED, ignored)
    apply: Callable[..., Any] = names["apply_goldfish"]
    if case["source"] == "megatron":
        table = names["_create_hash_table"]("cpu")
        return summary([apply(row, -2, case["k"], table, case["width"]) == -2 for row in targets])
    options = (case["strategy"], case["k"], case["start"], ignored, case["width"])
    if case["strategy"] == "seeded_random":
        torch.manual_seed(case["seed"])
        found = [apply(targets, *options) for _ in range(case["batches"])]
        # What it draws is its second answer. What it does with it is another matter: it takes the 0 and 1 of its coins
        # as numbers of rows.
        rows = (found[0][0] == ignored).sum(dim=1).tolist()
        return {**summary([coins == 1 for _, coins in found]), "ignored_of_each_row": rows}
    masked, _ = apply(targets, *options)
    return summary([(masked == ignored) & (targets != ignored)])


def main() -> None:
    """Run the references and write `reference_masks.json`."""
    parser = argparse.ArgumentParser(description="Write what the authors' code drops from made-up rows.")
    parser.add_argument("--goldfish_loss", type=Path, required=True, help="a clone of ahans30/goldfish-loss")
    parser.add_argument("--megatron", type=Path, required=True, help="a clone of swiss-ai/Megatron-LM")
    options = parser.parse_args()
    clones = {"goldfish-loss": options.goldfish_loss, "megatron": options.megatron}
    names = {source: functions(about, clones[source]) for source, about in SOURCES.items()}
    found = [case | reference(case, names[case["source"]]) for case in cases()]
    written = {"torch": str(torch.__version__), "sources": SOURCES, "bits": sum(case["bits"] for case in found)}
    lines = ",\n".join("    " + json.dumps(case) for case in found)
    head = json.dumps(written, indent=2).removesuffix("\n}")
    RESULTS.write_text(f'{head},\n  "cases": [\n{lines}\n  ]\n}}\n', encoding="utf-8")
    print(f"{RESULTS.name}: {len(found)} cases, {written['bits']:,} bits")


if __name__ == "__main__":
    main()
