"""How often the intervals of hf_axonn_eval hold the truth: shares, their differences, means.

    python -m tests.benchmarks.eval.coverage                    the lowest of each kind
    python -m tests.benchmarks.eval.coverage --output FILE      and every case, as Markdown: docs/results/coverage.md

Every case is drawn anew 10,000 times from a known truth and given to the functions that summaries use. Intervals say
95%; one that holds the truth in fewer than LEAST of the draws, beyond what chance does, may not be printed. Those of
membership attacks are in coverage_attack.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hf_axonn_eval.analysis.intervals import Found, difference_interval, mean_intervals, share_intervals


LEAST = 0.93
DRAWS = 10_000
SKEWNESS = 5  # documents of a mean, in Kish's number, for the square of the skewness
AT_ONCE = 500  # draws
SAMPLES = 10  # a document, on average, where it has several
KINDS = ("equal", "unequal")  # of numbers of samples a document, where it has several


class Case(NamedTuple):
    """Documents that are drawn, the numbers of their samples (empty: they do not matter), and the truth."""

    kind: str
    documents: int
    sizes: str
    truth: str
    in_range: bool = True


class Coverage(NamedTuple):
    """In which share of the intervals the truth was held, how wide they were in the mean, and how many there were."""

    case: Case
    share: float
    width: float
    draws: int
    given: float  # the share of the draws that had an interval

    @property
    def low(self) -> bool:
        """Whether it is in range, and below LEAST by more than three standard errors of the draws."""
        return self.case.in_range and self.share < LEAST - 3 * (LEAST * (1 - LEAST) / self.draws) ** 0.5


def sizes_of(kind: str, documents: int, generator: np.random.Generator) -> np.ndarray:
    """Samples of each document: one, SAMPLES, or unequal (lognormal, a deviation of 0.8 of the mean)."""
    if kind == "one":
        return np.ones(documents, dtype=int)
    if kind == "equal":
        return np.full(documents, SAMPLES)
    return np.ceil(generator.lognormal(np.log(SAMPLES) - 0.25, 0.7, size=documents)).astype(int)


def held(found: Iterable[Found], truth: float) -> Iterator[tuple[bool, float]]:
    """Whether each interval holds the truth, and its width; unequal samples may leave too few documents for any."""
    for interval, _ in found:
        if interval is not None:
            yield interval.low <= truth + 1e-12 and truth <= interval.high + 1e-12, interval.high - interval.low


def chances(share: float, correlation: float, size: tuple[int, int], generator: np.random.Generator) -> np.ndarray:
    """The chance of yes of each document: all alike, or beta-distributed, or 0 and 1."""
    if correlation == 0 or share in (0, 1):
        return np.full(size, share)
    if correlation == 1:
        return (generator.random(size) < share).astype(float)
    scale = 1 / correlation - 1
    return generator.beta(share * scale, (1 - share) * scale, size=size)


def shares(draws: int) -> Iterator[Coverage]:
    """Shares: rare ones, down to a twentieth of a document, and others; of independent and of clustered samples."""
    generator = np.random.default_rng(1)
    for documents, sizes in (
        (12, "one"),
        (100, "one"),
        (1000, "one"),
        *((k, s) for k in (2, 5, 10, 50) for s in KINDS),
    ):
        for correlation in (0,) if sizes == "one" else (0, 0.3, 1):
            for share in rare(documents):
                results = []
                for _ in range(0, draws, AT_ONCE):
                    index = np.repeat(np.arange(documents), sizes_of(sizes, documents, generator))
                    chance = chances(share, correlation, (documents, AT_ONCE), generator)[index]
                    answers = (generator.random(chance.shape) < chance).astype(float)
                    results += held(share_intervals(answers, index.tolist()), share)
                truth = f"{share:.4g}" + (f", correlation {correlation}" if sizes != "one" else "")
                yield covered(Case("share", documents, sizes, truth), results, draws)


def differences(draws: int) -> Iterator[Coverage]:
    """Differences of two shares of the same samples, of independent documents and of such whose samples agree."""
    generator = np.random.default_rng(2)
    for documents in (8, 12, 50, 200):
        for sizes in ("one", "unequal"):
            for gained in (0.0, 0.05 / documents, 1 / documents, 0.1, 0.3, 0.7):
                for lost in (0.0, 1 / documents, 0.3):
                    results = []
                    for _ in range(draws):
                        index = np.repeat(np.arange(documents), sizes_of(sizes, documents, generator))
                        which = generator.choice(3, size=documents, p=[gained, lost, 1 - gained - lost])[index]
                        found = difference_interval(which == 0, which == 1, index.tolist())
                        results += held([found], gained - lost)
                    truth = f"gained {gained:.4g}, lost {lost:.4g}"
                    yield covered(Case("difference of shares", documents, sizes, truth), results, draws)


# By name: draws of documents' values, their mean and their skewness.
VALUES = {
    "normal": (lambda generator, size: generator.normal(size=size), 0.0, 0.0),
    "even": (lambda generator, size: generator.random(size), 0.5, 0.0),
    "gamma 2": (lambda generator, size: generator.gamma(2, size=size), 2.0, 2**0.5),
    "exponential": (lambda generator, size: generator.exponential(size=size), 1.0, 2.0),
    "lognormal 0.5": (lambda generator, size: generator.lognormal(0, 0.5, size=size), np.exp(0.125), 1.75),
    "lognormal 1": (lambda generator, size: generator.lognormal(0, 1, size=size), np.exp(0.5), 6.18),
    **{
        f"{share:g} memorized": (
            lambda generator, size, share=share: (
                np.where(generator.random(size) < share, 1.0, 0.2) + generator.normal(size=size) * 0.05
            ),
            0.2 + 0.8 * share,
            (1 - 2 * share) / (share * (1 - share)) ** 0.5,
        )
        for share in (0.5, 0.3, 0.1, 0.02)
    },
}


def means(draws: int) -> Iterator[Coverage]:
    """Means over documents. In range: at least SKEWNESS times as many documents, in Kish's number, as the square of
    the skewness."""
    generator = np.random.default_rng(3)
    for documents in (12, 20, 50, 200):
        for sizes in KINDS:
            for name, (values, truth, skewness) in VALUES.items():
                results = []
                for _ in range(0, draws, AT_ONCE):
                    counts = sizes_of(sizes, documents, generator)
                    index = np.repeat(np.arange(documents), counts)
                    columns = values(generator, (documents, AT_ONCE))[index]
                    results += held(mean_intervals(columns, index.tolist()), truth)
                effective = documents * (1 if sizes == "equal" else 0.6)  # Kish's number of these sizes
                case = Case("mean", documents, sizes, name, effective >= SKEWNESS * skewness**2)
                if results:  # of few draws none may have documents enough
                    yield covered(case, results, draws)


def rare(documents: int) -> list[float]:
    """Shares from a twentieth of a document to a half."""
    return sorted({*(min(0.9, times / documents) for times in (0.05, 0.5, 0.999, 3)), 0.1, 0.5})


def covered(case: Case, results: list[tuple[bool, float]], draws: int) -> Coverage:
    """What came of the draws of a case."""
    holds, widths = zip(*results, strict=True)
    return Coverage(case, float(np.mean(holds)), float(np.mean(widths)), len(results), len(results) / draws)


def study(draws: int = DRAWS) -> list[Coverage]:
    """Every case."""
    return [*shares(draws), *differences(draws), *means(draws)]


def summary(found: list[Coverage], what: str = "interval") -> list[str]:
    """Lines of the table of kinds of `what`."""
    lines = [f"| {what} | cases | lowest coverage | of | mean coverage |", "| --- | --: | --: | --- | --: |"]
    for kind in dict.fromkeys(each.case.kind for each in found):
        mine = [each for each in found if each.case.kind == kind and each.case.in_range]
        worst = min(mine, key=lambda each: each.share)
        where = ", ".join(filter(None, (f"{worst.case.documents} documents", worst.case.sizes, worst.case.truth)))
        mean = np.mean([each.share for each in mine])
        lines.append(f"| {kind} | {len(mine)} | {worst.share:.3f} | {where} | {mean:.3f} |")
    return lines


def page(found: list[Coverage]) -> str:
    """docs/results/coverage.md."""
    lines = ["# How often intervals hold the truth", ""]
    lines += ["`python -m tests.benchmarks.eval.coverage --output docs/results/coverage.md`", ""]
    lines += [
        f"Intervals of 95%, {found[0].draws:,} draws a case (standard error 0.002 to 0.003). Samples a document: one, "
        f"{SAMPLES}, or unequal numbers of about {SAMPLES}. Correlation: of the samples of a document; 1: all agree. "
        "Values of documents: 0.1 memorized are near 1 with a chance of 0.1, else near 0.2. Given: the share of the "
        "draws that had an interval; coverage and width are of these.",
        "",
        *summary(found),
        "",
    ]
    for title, in_range in (("In the stated range", True), ("Outside of it", False)):
        lines += [f"## {title}", ""]
        if not in_range:
            lines += [
                "A mean of few documents cannot know of a kind that none, or one, of them is of: there must be five "
                "times as many documents, in Kish's number, as the square of the skewness of the values. Data do not "
                "prove that; where they contradict it there is no interval (mean_intervals).",
                "",
            ]
        lines += ["| interval | documents | samples | truth | coverage | mean width | given |"]
        lines += ["| --- | --: | --- | --- | --: | --: | --: |"]
        lines += [
            f"| {case.kind} | {case.documents} | {case.sizes} | {case.truth} | {share:.3f} | {width:.3g} | "
            f"{given:.3f} |"
            for case, share, width, _, given in found
            if case.in_range == in_range
        ]
        lines.append("")
    return "\n".join(lines)


def run(
    about: str,
    study: Callable[[int], list[Coverage]],
    page: Callable[[list[Coverage]], str],
    arguments: list[str] | None = None,
    what: str = "interval",
) -> int:
    """Draw every case, print the table of kinds, and write the page; returns 1 if a coverage is too low."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--draws", type=int, default=DRAWS, help=f"of each case (default {DRAWS})")
    parser.add_argument("--output", type=Path, help="write every case to this file, too")
    options = parser.parse_args(arguments)
    found = study(options.draws)
    print("\n".join(summary(found, what)))
    if options.output:
        options.output.write_text(page(found))
    low = [each for each in found if each.low]
    for each in low:
        print(f"too low: {each}")
    return int(bool(low))


if __name__ == "__main__":
    sys.exit(run("How often the intervals of hf_axonn_eval hold the truth.", study, page))
