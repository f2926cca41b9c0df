"""How often what is said of dropped tokens, and of the cost of an attack, holds the truth.

    python -m tests.benchmarks.eval.coverage_extraction                    the lowest of each kind
    python -m tests.benchmarks.eval.coverage_extraction --output FILE      and every case, as Markdown:
                                                                           docs/results/coverage_extraction.md

Every case is drawn anew 10,000 times from a known truth and given to the functions that reports use, as in
coverage.py. Accuracies of tokens and their differences are intervals of 95%; lower bounds of what queries give are
those of seven numbers of queries, and count as right if all seven are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hf_axonn_eval.analysis.attack_cost import expected_share, lower_bound
from hf_axonn_eval.analysis.goldfish_tokens import by_document_numbers
from hf_axonn_eval.metrics.discoverability import TRIES


DRAWS = 10_000
LEAST = 0.93
AT_ONCE = 500
TOKENS = 32  # of a document, in the mean
DROPPED = 0.25

# Accuracies of dropped and supervised tokens, and how alike documents are (beta: of 0.3 most are near 0 or 1).
ACCURACIES = (
    (0.5, 0.5, 8.0),
    (0.2, 0.9, 8.0),
    (0.3, 0.6, 2.0),
    (0.9, 0.97, 8.0),
    (0.3, 0.5, 0.3),
    (0.1, 0.2, 0.3),
)


class Case(NamedTuple):
    """What was drawn, in which share of the draws the statement was true, and of how many."""

    kind: str
    documents: int
    truth: str
    share: float
    draws: int
    in_range: bool = True

    @property
    def low(self) -> bool:
        """Whether it is below LEAST by more than three standard errors of the draws."""
        return self.in_range and self.share < LEAST - 3 * (LEAST * (1 - LEAST) / self.draws) ** 0.5


def tokens(draws: int) -> Iterator[Case]:
    """Accuracies of dropped and supervised tokens and their difference; documents have 16 to 48 tokens."""
    generator = np.random.default_rng(1)
    for documents in (12, 20, 50):
        for dropped, supervised, scale in ACCURACIES:
            truths = {"dropped": dropped, "supervised": supervised, "difference": supervised - dropped}
            held: dict[str, list[bool]] = {name: [] for name in truths}
            for _ in range(draws):
                sizes = generator.integers(TOKENS // 2, 3 * TOKENS // 2, size=documents)
                counts = np.zeros((documents, 2, 3))
                counts[:, 0, 0] = generator.binomial(sizes, DROPPED)
                counts[:, 1, 0] = sizes - counts[:, 0, 0]
                for side, accuracy in enumerate((dropped, supervised)):
                    chance = generator.beta(accuracy * scale, (1 - accuracy) * scale, size=documents)
                    counts[:, side, 1] = generator.binomial(counts[:, side, 0].astype(int), chance)
                found = by_document_numbers(counts, 0.95)
                for name, truth in truths.items():
                    entry = found[name]["accuracy"]
                    if entry["low"] is not None:
                        held[name].append(entry["low"] - 1e-12 <= truth <= entry["high"] + 1e-12)
            about = f"accuracies {dropped:g} and {supervised:g}, beta {scale:g}"
            for name, holds in held.items():
                kind = "difference of tokens" if name == "difference" else "accuracy of tokens"
                sides = (dropped, supervised) if name == "difference" else (truths[name],)
                in_range = all(documents >= 4 * (1 - 2 * p) ** 2 / (p * (1 - p)) for p in sides)
                yield Case(kind, documents, f"{name}, {about}", float(np.mean(holds)), len(holds), in_range)


# By name: the chance q of a document by its rank, from 0 to 1.
CHANCES = {
    "q = 0.01": lambda rank: np.full(rank.shape, 0.01),
    "1 in 20 memorized (q = 0.5)": lambda rank: np.where(rank < 0.05, 0.5, 1e-12),
    "1 in 200 memorized (q = 0.5)": lambda rank: np.where(rank < 0.005, 0.5, 1e-12),
    "q from 1e-12 to 1, log-uniform": lambda rank: 10 ** (-12 * rank),
    "half certain": lambda rank: (rank < 0.5).astype(float),
}
RANKS = (np.arange(1_000_000) + 0.5) / 1_000_000


def queries(draws: int) -> Iterator[Case]:
    """Lower bounds of the share that n queries give, all n at once."""
    generator = np.random.default_rng(2)
    for documents in (2, 12, 50, 200):
        for name, chances in CHANCES.items():
            truth = np.array([expected_share(chances(RANKS), tries).mean() for tries in TRIES])
            held: list[bool] = []
            for _ in range(0, draws, AT_ONCE):
                drawn = chances(generator.random((AT_ONCE, documents)))
                sums = np.stack([expected_share(drawn, tries).sum(axis=1) for tries in TRIES], axis=1)
                bounds = lower_bound(sums.ravel(), documents, level=0.05 / len(TRIES)).reshape(sums.shape)
                held += (bounds <= truth + 1e-9).all(axis=1).tolist()
            yield Case("share that queries give, at least", documents, name, float(np.mean(held)), len(held))


def study(draws: int = DRAWS) -> list[Case]:
    """Every case."""
    return [*tokens(draws), *queries(draws)]


def summary(found: list[Case]) -> list[str]:
    """Lines of the table of kinds."""
    lines = ["| statement | cases | lowest coverage | of | mean coverage |", "| --- | --: | --: | --- | --: |"]
    for kind in dict.fromkeys(each.kind for each in found):
        mine = [each for each in found if each.kind == kind and each.in_range]
        worst = min(mine, key=lambda each: each.share)
        mean = np.mean([each.share for each in mine])
        where = f"{worst.documents} documents, {worst.truth}"
        lines.append(f"| {kind} | {len(mine)} | {worst.share:.3f} | {where} | {mean:.3f} |")
    return lines


def page(found: list[Case]) -> str:
    """docs/results/coverage_extraction.md."""
    lines = ["# How often statements about tokens and queries hold the truth", ""]
    lines += ["`python -m tests.benchmarks.eval.coverage_extraction --output docs/results/coverage_extraction.md`", ""]
    lines += [
        f"95%, {max(each.draws for each in found):,} draws a case (standard error 0.002 to 0.003), of which those "
        "without an interval, where all documents are alike or too skewed, do not count. Documents have 16 to 48 "
        "tokens, of which one in four is dropped; their accuracies are beta-distributed. In range is an accuracy p if "
        "there are 4 (1 - 2p)^2 / (p (1 - p)) documents or more: four times the square of the skewness of documents "
        "that are all or nothing. A difference is in range if both accuracies are.",
        "",
        *summary(found),
        "",
        "| statement | documents | truth | coverage | in range |",
        "| --- | --: | --- | --: | --- |",
    ]
    for each in found:
        in_range = "yes" if each.in_range else "no"
        lines.append(f"| {each.kind} | {each.documents} | {each.truth} | {each.share:.3f} | {in_range} |")
    return "\n".join([*lines, ""])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="How often statements about tokens and queries hold the truth.")
    parser.add_argument("--draws", type=int, default=DRAWS, help=f"of each case (default {DRAWS})")
    parser.add_argument("--output", type=Path, help="write every case to this file, too")
    options = parser.parse_args(arguments)
    found = study(options.draws)
    print("\n".join(summary(found)))
    if options.output:
        options.output.write_text(page(found))
    low = [each for each in found if each.low]
    for each in low:
        print(f"too low: {each}")
    return int(bool(low))


if __name__ == "__main__":
    sys.exit(main())
