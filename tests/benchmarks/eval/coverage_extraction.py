"""How often what is said of dropped tokens, and of the cost of an attack, holds the truth.

    python -m tests.benchmarks.eval.coverage_extraction                    the lowest of each kind
    python -m tests.benchmarks.eval.coverage_extraction --output FILE      and every case, as Markdown:
                                                                           docs/results/coverage_extraction.md

Every case is drawn anew 10,000 times from a known truth and given to the functions that reports use, as in
coverage.py. Accuracies of tokens and their differences are intervals of 95%; lower bounds of what queries give are
those of seven numbers of queries, and count as right if all seven are.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import numpy as np

from hf_axonn_eval.analysis.attack_cost import expected_share, lower_bound
from hf_axonn_eval.analysis.goldfish_tokens import by_document_numbers
from hf_axonn_eval.metrics.discoverability import TRIES
from tests.benchmarks.eval.coverage import AT_ONCE, DRAWS, Case, Coverage, covered, run, summary


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


def tokens(draws: int) -> Iterator[Coverage]:
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
                case = Case(kind, documents, "", f"{name}, {about}", in_range)
                yield covered(case, [(hold, math.nan) for hold in holds], draws)


# By name: the chance q of a document by its rank, from 0 to 1.
CHANCES = {
    "q = 0.01": lambda rank: np.full(rank.shape, 0.01),
    "1 in 20 memorized (q = 0.5)": lambda rank: np.where(rank < 0.05, 0.5, 1e-12),
    "1 in 200 memorized (q = 0.5)": lambda rank: np.where(rank < 0.005, 0.5, 1e-12),
    "q from 1e-12 to 1, log-uniform": lambda rank: 10 ** (-12 * rank),
    "half certain": lambda rank: (rank < 0.5).astype(float),
}
RANKS = (np.arange(1_000_000) + 0.5) / 1_000_000


def queries(draws: int) -> Iterator[Coverage]:
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
            case = Case("share that queries give, at least", documents, "", name)
            yield covered(case, [(hold, math.nan) for hold in held], draws)


def study(draws: int = DRAWS) -> list[Coverage]:
    """Every case."""
    return [*tokens(draws), *queries(draws)]


def page(found: list[Coverage]) -> str:
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
        *summary(found, "statement"),
        "",
        "| statement | documents | truth | coverage | in range |",
        "| --- | --: | --- | --: | --- |",
    ]
    for case, share, *_ in found:
        in_range = "yes" if case.in_range else "no"
        lines.append(f"| {case.kind} | {case.documents} | {case.truth} | {share:.3f} | {in_range} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(run("How often statements about tokens and queries hold the truth.", study, page, what="statement"))
