"""`NgramStopping`: ends training when a model begins to give n-grams of its training text back.

    trainer.add_callback(NgramStopping(trainer, probe, every=100, threshold=0.2))

Source: early stopping by an n-gram memorization score, arXiv 2510.11372.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import TrainerControl

from hf_axonn_eval.data.results import SampleResult
from hf_axonn_eval.data.samples import Sample
from hf_axonn_eval.extraction.callback import PREFIX, ExtractionCallback


SCORE = f"{PREFIX}ngram_overlap"


def ngram_overlap(suffix: Sequence[int], generated: Sequence[int], lengths: Sequence[int] = (4, 5, 6)) -> float:
    """Return the share of the n-grams of a suffix that are among those of a continuation, the mean over n.

    A suffix that is shorter than n has no n-grams; it counts for no such n, and with none at all the score is 0.
    """
    shares = []
    for length in lengths:
        known = {tuple(generated[start : start + length]) for start in range(len(generated) - length + 1)}
        own = [tuple(suffix[start : start + length]) for start in range(len(suffix) - length + 1)]
        if own:
            shares.append(sum(ngram in known for ngram in own) / len(own))
    return sum(shares) / len(shares) if shares else 0.0


class NgramStopping(ExtractionCallback):
    """An `ExtractionCallback` that decodes, logs `eval_extraction_ngram_overlap`, and may end training.

    The score is the mean of `ngram_overlap` over the samples that are trained on, those of a bucket above 0.

    Args:
        trainer, samples, options: as `ExtractionCallback`; `generate` is always on.
        threshold: a score of this or more ends training after the step; above 0 and up to 1.
        lengths: numbers of tokens of the n-grams, each at least 1.
    Raises:
        ValueError: as `ExtractionCallback`, a threshold or length out of range, or no sample with a bucket above 0.
    Collectives: those of `ExtractionCallback`.
    """

    def __init__(
        self,
        trainer: Any,
        samples: Sequence[Sample],
        *,
        threshold: float = 0.2,
        lengths: Sequence[int] = (4, 5, 6),
        **options: Any,
    ) -> None:
        super().__init__(trainer, samples, **{**options, "generate": True})
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold is {threshold}: a share of n-grams is above 0 and at most 1.")
        if not lengths or min(lengths) < 1:
            raise ValueError(f"lengths are {list(lengths)}: give at least one, and each at least 1.")
        if not any(sample.bucket for sample in samples):
            raise ValueError("no sample is trained on (bucket above 0), so there is nothing to stop for.")
        self.threshold, self.lengths = threshold, tuple(lengths)
        self._suffixes = {sample.sample_id: sample.suffix for sample in samples if sample.bucket}

    def summarize(self, results: Sequence[SampleResult]) -> dict[str, float]:
        """Return what is logged of the results, with the score, on rank 0."""
        scores = [
            ngram_overlap(self._suffixes[result.sample_id], result.generated or (), self.lengths)
            for result in results
            if result.sample_id in self._suffixes
        ]
        return super().summarize(results) | {SCORE: sum(scores) / len(scores)}

    def _log(self, control: TrainerControl) -> dict[str, float]:
        found = super()._log(control)
        if found[SCORE] >= self.threshold:
            control.should_training_stop = True
        return found
