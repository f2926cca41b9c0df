"""Ask a model for its training data, and keep the answers.

One teacher-forced pass a batch gives everything but ROUGE, the edit distance and the longest run. These need the
model's own continuation, which up to the first wrong token is known already: only the rest is decoded, from the keys
and values that the pass left behind. Samples are dealt to the ranks in units (batching.py), and the results of a unit
are written before the next one begins.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any

from hf_axonn_eval.data.jsonl import is_count
from hf_axonn_eval.data.results import SampleResult
from hf_axonn_eval.data.samples import Sample
from hf_axonn_eval.extraction import scoring
from hf_axonn_eval.extraction.near_copies import NearCopySearch
from hf_axonn_eval.extraction.options import Options
from hf_axonn_eval.extraction.recite import Recital
from hf_axonn_eval.extraction.reciter import Reciter
from hf_axonn_eval.extraction.run import run, survey_samples
from hf_axonn_eval.extraction.runner import Runner
from hf_axonn_eval.metrics.discoverability import Sampler


def extract(
    model,
    tokenizer,
    samples: Iterable[Sample],
    *,
    output: str | os.PathLike | None = None,
    model_record: dict[str, Any] | None = None,
    batch_size: int | str = 8,
    generate: bool = True,
    stop_early: bool = False,
    sampler: Sampler | None = None,
    membership: bool = False,
    guesses: bool = False,
    near_copies: NearCopySearch | None = None,
    recite: Recital | None = None,
    protocol: dict[str, Any] | None = None,
    left_out: dict[str, int] | None = None,
    confidence: float = 0.95,
    progress: bool = True,
) -> Sequence[SampleResult]:
    """Measure every sample.

    Args:
        model: a causal LM, plain or parallelized. Samples are dealt to the (data, z) coordinates of its grid, or,
            for a plain model, to all processes.
        tokenizer: of the model, for the text that ROUGE and zlib compare; None leaves ROUGE and the texts out.
        samples: what to ask; the sample ids must differ. A `SampleFile` is read as it is needed, and its tokenizer
            must be the model's, if its about file names one.
        output: directory for the run (files: see data/results.py). A run that was stopped is resumed. None
            keeps nothing.
        model_record: what identifies the model: `load_model(...).record`, or for a model of another origin a dict
            with a `fingerprint` of your choice. Needed with `output`: a run is never resumed with other weights.
        batch_size: samples in one forward pass; "auto" finds one that fits into memory.
        generate: whether to decode, which the edit distance, ROUGE, the longest run and free-running accuracy need.
        stop_early: check the suffix chunk by chunk and drop a sample from the pass as soon as it has failed, to be
            decoded from there if `generate` says so. There are no probabilities and hits then: exact match,
            divergence point and what comes of decoding are all.
        sampler: a way of drawing; `sampled_logprob` is then the log-probability of the suffix under it.
        membership: whether to compute membership scores, of prefix and suffix together; needs a tokenizer.
        guesses: whether to compute how likely the greedy continuations are, in one more pass; by that
            `recall_at_errors` orders them.
        near_copies: also search for a lower bound of the probability of near copies, under the sampler.
        recite: write the suffix step by step from the model's own text, with a sliding context, which may be longer
            than the model's window. Nothing is scored then: there are no probabilities.
        protocol: what the samples were made by (`Protocol.record`); run.json says line by line what the run does as
            was published, and what it does not.
        left_out: number of `documents` they were made of, and of those excluded by reason, for the record.
        confidence: of the intervals in summary.json.
        progress: show a progress bar with the rate and the time left on rank 0.
    Returns:
        On rank 0 one result a sample, in the order of the samples; on other ranks an empty list. With `output` they
        are read from the file as they are asked for.
    Raises:
        ValueError: no samples, ids that repeat or lie outside the vocabulary, samples of another tokenizer, sequences
            longer than the model's window, options that exclude each other, or an `output` that holds another run.
            Raised on every rank.
    Collectives: over the world, and per batch those of the model over x, y and z. Decoding and `stop_early` on a grid
        with z > 1 gather the weights of the model once and keep them until the end.
    """
    if batch_size != "auto" and not is_count(batch_size, least=1):
        raise ValueError(f"batch_size is {batch_size!r}, but it must be at least 1, or 'auto'.")
    options = Options(
        output=output,
        generate=generate,
        stop_early=stop_early,
        sampler=sampler,
        membership=membership,
        guesses=guesses,
        near_copies=near_copies,
        recite=recite,
        protocol=protocol,
        left_out=left_out,
        confidence=confidence,
        progress=progress,
    )
    survey = survey_samples(samples)
    if near_copies is not None:
        near_copies.check(min(suffix for _, suffix in survey.lengths))
    longest = survey.longest if recite is None else min(survey.longest, recite.context)
    scoring.check_fits(model, longest=longest, largest_id=survey.largest_id)
    if output is not None and (not model_record or "fingerprint" not in model_record):
        raise ValueError(
            "output=... needs model_record=... with a 'fingerprint', so that a stopped run never goes on with "
            "another model: pass load_model(...).record, or {'fingerprint': <any text that names the weights>}."
        )
    asker = (Runner if recite is None else Reciter)(
        model=model, tokenizer=tokenizer, options=options, model_record=model_record, batch_size=batch_size
    )
    return run(asker, survey)
