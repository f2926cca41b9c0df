"""An asker that lets a model recite whole documents; recite.py says how."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hf_axonn import parallel_state
from hf_axonn_eval.data.results import SampleResult
from hf_axonn_eval.data.samples import Sample
from hf_axonn_eval.extraction import decoding, scoring
from hf_axonn_eval.extraction.prefix_matching import Match
from hf_axonn_eval.extraction.recite import Recital, Written, deal, recite_steps
from hf_axonn_eval.extraction.run import Survey
from hf_axonn_eval.extraction.runner import Runner, result_of
from hf_axonn_eval.metrics.text import first_miss


ROWS = 8  # documents that are written together, unless another number is given


def match_of(sample: Sample, written: Sequence[int]) -> Match:
    """Return how far a text that was written is the suffix; how close it came elsewhere is not known."""
    return Match(
        first_miss([one == true for one, true in zip(written, sample.suffix, strict=True)]), None, list(written)
    )


@dataclass(kw_only=True)
class Reciter(Runner):
    """Lets a model recite; the arguments are those of `Runner`, whose options have `recite`."""

    @contextlib.contextmanager
    def prepare(self, survey: Survey) -> Iterator[None]:
        """Choose how many documents are written together; inside, the model is in eval mode."""
        rows = self.batch_size if isinstance(self.batch_size, int) else ROWS
        self.rows = self.planned = self.decoded = rows if scoring.may_be_padded(self.model) else 1
        cost = self._recital.cost(survey.lengths)
        self.plan = {"rows": self.rows, "tokens": cost.read + cost.written, "steps": cost.steps}
        with scoring.evaluating(self.model):
            yield

    def measure(self, samples: Sequence[Sample], done: set[int]) -> Iterator[list[SampleResult]]:
        """Write step by step, all ranks as many; a document is yielded when it is whole.

        Collective over the world once a step, and over x and y for each token; z once, in the first step.
        """
        split, kept = self.work_split, Written(self.options.output)
        before = split.on_rank_zero(kept.read)
        places = [place for place in range(len(samples)) if place not in done]
        written = {place: list(before.get(samples[place].sample_id, ())) for place in places}
        left = {place: len(samples[place].suffix) - len(tokens) for place, tokens in written.items()}
        shares, rounds = deal(left, rows=self.rows, count=split.count, step=self._recital.step)
        own = shares[split.index]
        parallel = parallel_state(self.model)
        in_step = parallel is not None and parallel.grid.z > 1
        whole = [place for batch in own for place in batch if not left[place]]
        with decoding.weights_in_place(self.model) if in_step else contextlib.nullcontext():
            steps = recite_steps(own, samples, written, self._recital, self._go_on)
            yield split.gather(self._results(samples, written, whole))
            if in_step and rounds and not any(left[place] for batch in own for place in batch):
                # Another rank of z waits for the weights of this one, once: in its first step, which no gather of
                # results may come before.
                decoding.continue_greedily(self.model, [samples[0].prefix], steps=1)
            for _ in range(rounds):
                new = next(steps, [])
                lines = [(samples[place].sample_id, tokens) for place, tokens in new] if split.reports else []
                together = split.gather(lines)
                if split.rank == 0:
                    kept.append(together)
                whole = [place for place, _ in new if len(written[place]) == len(samples[place].suffix)]
                yield split.gather(self._results(samples, written, whole))

    @property
    def _recital(self) -> Recital:
        recital = self.options.recite
        assert recital is not None
        return recital

    def _go_on(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        return decoding.continue_greedily(self.model, prompts, steps=count, beams=self._recital.beams)

    def _results(
        self, samples: Sequence[Sample], written: dict[int, list[int]], places: Sequence[int]
    ) -> list[SampleResult]:
        if not self.work_split.reports:
            return []
        return [
            result_of(
                samples[place],
                match_of(samples[place], written[place]),
                written[place],
                self.tokenizer,
                bound=self.bound,
                eos=self.eos,
            )
            for place in places
        ]
