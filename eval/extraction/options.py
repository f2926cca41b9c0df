"""The options of a run: what is measured of every sample, and where it is kept."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_axonn_eval.analysis.intervals import check_confidence
from hf_axonn_eval.data.samples import Sample, samples_digest
from hf_axonn_eval.extraction.recite import Recital
from hf_axonn_eval.metrics.discoverability import Sampler


if TYPE_CHECKING:  # it needs torch, and a command checks its options before
    from hf_axonn_eval.extraction.near_copies import NearCopySearch


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments that `extract` and `extract_served` share; `extract` describes them.

    Raises:
        ValueError: options that exclude each other, or a confidence that is none.
    """

    output: str | os.PathLike[str] | None = None
    generate: bool = True
    stop_early: bool = False
    sampler: Sampler | None = None
    membership: bool = False
    guesses: bool = False
    near_copies: NearCopySearch | None = None
    recite: Recital | None = None
    protocol: dict[str, Any] | None = None
    left_out: dict[str, int] | None = None
    confidence: float = 0.95
    progress: bool = True

    def __post_init__(self) -> None:
        given = [name for name in ("sampler", "membership", "near_copies") if getattr(self, name)]
        if self.stop_early and given:
            raise ValueError(
                "stop_early drops a sample from the pass when it has failed, so it does not go with "
                f"{' and '.join(given)}: all probabilities are needed for that."
            )
        if self.guesses and not self.generate:
            raise ValueError("guesses are greedy continuations: they need generate=True (no --no_generation).")
        others = [
            name for name in ("sampler", "membership", "near_copies", "guesses", "stop_early") if getattr(self, name)
        ]
        if self.recite is not None and (others or not self.generate):
            raise ValueError(
                "recite writes a text and scores none, so it does not go with "
                f"{' and '.join(others) or 'generate=False (--no_generation)'}."
            )
        check_confidence(self.confidence)

    def identity(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Return what distinguishes a run from others before a model is known: the samples, and what is measured.

        Entries are None where the run does not have the option.
        """
        return {
            "samples": len(samples),
            "samples_sha256": samples_digest(samples),
            "generate": self.generate,
            "stop_early": self.stop_early or None,
            "sampler": self.sampler.text if self.sampler is not None else None,
            "membership": self.membership or None,
            "guesses": self.guesses or None,
            "near_copies": self.near_copies.text if self.near_copies is not None else None,
            "recite": self.recite.text if self.recite is not None else None,
        }

    def decoding(self) -> dict[str, Any]:
        """Return the settings of run.json that follow from the options alone."""
        sampler = vars(self.sampler) if self.sampler is not None else None
        how = self.recite.text if self.recite is not None else "greedy"
        return {"decoding": f"{how}, no stop, no penalties", "sampler": sampler}

    def facts(self) -> dict[str, Any]:
        """Return the facts about a run that follow from its options (contract.OF_A_RUN)."""
        return {
            "generate": self.generate,
            "sampler": self.decoding()["sampler"],
            "stop_early": self.stop_early,
            "guesses": self.guesses,
        }
