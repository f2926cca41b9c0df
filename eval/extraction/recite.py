"""A whole document from its first tokens: the model goes on from its own text, step by step, as far as the document.

    seed | step | step | step ...        the prompt of a step: the last `context - step` tokens, the model's own

A suffix may be longer than the model's window, since only the context slides over it. So nothing is scored by a pass
over the true text: there are no probabilities, and what is measured is the text that comes. What was written so far
stands in `recited.jsonl` beside the results, a line for each step, so that a run that was stopped goes on within a
document.

Source: Cooper et al. 2025, arXiv 2505.12546v3, and reconstruct-hp1.py of pasta41/book-extraction-science at 71813f5:
steps of 50 tokens, a context of 3,000, 8 beams. Its seed is the first seven tokens of a book; there an EOS is replaced
by the heading of the next chapter, here it stays and the text goes on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hf_axonn_eval.data.jsonl import append_lines, cut_unfinished_line, is_count


if TYPE_CHECKING:
    from hf_axonn_eval.data.samples import Sample


WRITTEN = "recited.jsonl"
CONTEXT = 3000


class Cost(NamedTuple):
    """Tokens that are written, the steps, and the tokens that the model reads before it writes."""

    written: int
    steps: int
    read: int


@dataclass(frozen=True, kw_only=True)
class Recital:
    """Settings of a recital.

    Args:
        step: tokens that are written at once.
        context: tokens of prompt and step together, at most.
        beams: of a beam search; 1 is greedy decoding.
    Raises:
        ValueError: no whole numbers of at least 1, or a context that has no room for a prompt.
    """

    step: int = 50
    context: int = CONTEXT
    beams: int = 1

    def __post_init__(self) -> None:
        for name in ("step", "context", "beams"):
            if not is_count(getattr(self, name), least=1):
                raise ValueError(f"{name} is {getattr(self, name)!r}, but it must be a whole number of at least 1.")
        if self.context <= self.step:
            raise ValueError(
                f"a context of {self.context} tokens has no room for a prompt beside a step of {self.step}: take a "
                "longer context, or shorter steps."
            )

    @property
    def text(self) -> str:
        """Text for records, such as "steps of 50 tokens, context 3000, greedy"."""
        how = "greedy" if self.beams == 1 else f"{self.beams} beams"
        return f"steps of {self.step} tokens, context {self.context}, {how}"

    def prompt(self, sample: Sample, written: Sequence[int]) -> list[int]:
        """Return what the model is shown for the next step."""
        return [*sample.prefix, *written][-(self.context - self.step) :]

    def next_step(self, sample: Sample, written: Sequence[int]) -> int:
        """Return how many tokens the next step writes; 0 if the document is as long."""
        return min(self.step, len(sample.suffix) - len(written))

    def cost(self, lengths: Sequence[tuple[int, int]]) -> Cost:
        """Count what samples of these prefix and suffix lengths cost."""
        steps, read = 0, 0
        for prefix, suffix in lengths:
            for written in range(0, suffix, self.step):
                steps += 1
                read += min(prefix + written, self.context - self.step)
        return Cost(sum(suffix for _, suffix in lengths), steps, read)


class Written:
    """Text that was written of each sample so far, in a file; without a directory in memory alone.

    Args:
        directory: of the run.
    """

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self.path = Path(directory) / WRITTEN if directory is not None else None

    def read(self) -> dict[str, list[int]]:
        """Return the tokens by sample id; a last line that a crash cut short is removed.

        Raises:
            ValueError: a line is none of ours.
        """
        if self.path is None or not self.path.exists():
            return {}
        tokens: dict[str, list[int]] = {}
        for number, line in enumerate(cut_unfinished_line(self.path).splitlines(), start=1):
            try:
                entry = json.loads(line)
                if not all(map(is_count, entry["tokens"])):
                    raise TypeError
                tokens.setdefault(entry["sample_id"], []).extend(entry["tokens"])
            except (ValueError, TypeError, KeyError):
                raise ValueError(f"{self.path}, line {number} is damaged: remove the file, and start over.") from None
        return tokens

    def append(self, steps: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Add steps, and see that they are on disk."""
        if self.path is None or not steps:
            return
        entries = ({"sample_id": name, "tokens": list(tokens)} for name, tokens in steps)
        append_lines(self.path, (f"{json.dumps(entry, separators=(',', ':'))}\n" for entry in entries))


def deal(left: Mapping[int, int], *, rows: int, count: int, step: int) -> tuple[list[list[list[int]]], int]:
    """Deal samples to shares, in batches whose samples are about equally far from their end.

    Args:
        left: by the place of a sample the tokens that it lacks.
        rows: samples in a batch, at most.
        count: shares.
        step: tokens of a step.
    Returns:
        the batches of each share, and how many steps the share with most of them takes.
    """
    order = sorted(left, key=lambda place: -left[place])
    shares = [order[index::count] for index in range(count)]
    batches = [[share[at : at + rows] for at in range(0, len(share), rows)] for share in shares]
    steps = [sum(-(-max(left[place] for place in batch) // step) for batch in share) for share in batches]
    return batches, max(steps, default=0)


def recite_steps(
    batches: Sequence[Sequence[int]], samples: Sequence[Sample], written: dict[int, list[int]], recital: Recital, go_on
) -> Iterator[list[tuple[int, list[int]]]]:
    """Write batch after batch, a step at a time; yields (place, new tokens) of each step, which `written` has then.

    Args:
        batches: places of samples.
        samples: all samples.
        written: by place what is there already.
        recital: the settings.
        go_on: called with prompts and a number of tokens; returns so many tokens after each prompt.
    """
    for batch in batches:
        going = list(batch)
        while going := [place for place in going if recital.next_step(samples[place], written[place])]:
            sizes = [recital.next_step(samples[place], written[place]) for place in going]
            prompts = [recital.prompt(samples[place], written[place]) for place in going]
            # a search for fewer tokens may find others: the last step is searched in full, and cut
            new = go_on(prompts, max(sizes) if recital.beams == 1 else recital.step)
            steps = [(place, tokens[:size]) for place, tokens, size in zip(going, new, sizes, strict=True)]
            for place, tokens in steps:
                written[place] += tokens
            yield steps
