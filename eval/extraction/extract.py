"""Ask a model for its training data, and keep the answers.

One teacher-forced pass a batch gives everything but ROUGE, the edit distance and the longest run. These need the
model's own continuation, which up to the first wrong token is known already: only the rest is decoded, from the keys
and values that the pass left behind. Samples are dealt to the ranks in units (batching.py), and what a unit gave is
written before the next one begins.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any

from tqdm import tqdm

from hf_axonn.compat.messages import get_logger
from hf_axonn_eval.analysis.chance import against_chance
from hf_axonn_eval.analysis.intervals import check_confidence
from hf_axonn_eval.analysis.summary import summarize
from hf_axonn_eval.data.jsonl import is_count
from hf_axonn_eval.data.protocols import check_protocol
from hf_axonn_eval.data.results import RunDirectory, SampleResult, read_record
from hf_axonn_eval.data.samples import Sample, SampleFile, tokenizer_of
from hf_axonn_eval.data.tokenizer_identity import check_ids, check_same, tokenizer_identity
from hf_axonn_eval.extraction import batching as batches
from hf_axonn_eval.extraction import scoring
from hf_axonn_eval.extraction.near_copies import NearCopySearch
from hf_axonn_eval.extraction.run_record import identity_of, run_record
from hf_axonn_eval.extraction.runner import Runner
from hf_axonn_eval.extraction.scoring import near_tie_below
from hf_axonn_eval.extraction.work_split import WorkSplit
from hf_axonn_eval.metrics.discoverability import Sampler


logger = get_logger(__name__)


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
        output: directory for the run (files: see data/results.py). A run that was stopped goes on from there. None
            keeps nothing.
        model_record: what identifies the model: `load_model(...).record`, or for a model of another origin a dict
            with a `fingerprint` of your choice. Needed with `output`, so that a run never goes on with other weights.
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
        protocol: what the samples were made by (`Protocol.record`); run.json says line by line what the run does as
            was published, and what it does not.
        left_out: how many `documents` they were made of, and what was left out by reason, for the record.
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
    samples = samples if isinstance(samples, Sequence) else list(samples)
    _check_options(batch_size, stop_early, sampler, membership, near_copies, tokenizer)
    if guesses and not generate:
        raise ValueError("guesses are greedy continuations: they need generate=True (no --no_generation).")
    check_confidence(confidence)
    order, lengths, largest_id = look_through(samples)
    longest = max(map(sum, lengths))
    if near_copies is not None:
        near_copies.check(min(suffix for _, suffix in lengths))
    scoring.check_fits(model, longest=longest, largest_id=largest_id)
    check_ids(tokenizer, largest_id)
    if output is not None and (not model_record or "fingerprint" not in model_record):
        raise ValueError(
            "output=... needs model_record=... with a 'fingerprint', so that a stopped run never goes on with "
            "another model: pass load_model(...).record, or {'fingerprint': <any text that names the weights>}."
        )

    work_split = WorkSplit.for_model(model)
    tokenizer_record: dict[str, Any] = {}
    if output is not None or isinstance(samples, SampleFile):
        tokenizer_record = work_split.on_rank_zero(lambda: tokenizer_record_of(tokenizer, samples))
    with scoring.evaluating(model):
        rows = batch_size
        if rows == "auto":
            keep = longest if membership else max(suffix for _, suffix in lengths)
            rows = batches.fitting_batch_size(model, work_split, longest=longest, kept_logits=keep)
        planned = batches.plan_batches(lengths, rows, padding=scoring.may_be_padded(model))
        units = batches.plan_units(planned, work_split.count)
        runner = Runner(
            model=model,
            tokenizer=tokenizer,
            generate=generate,
            stop_early=stop_early,
            sampler=sampler,
            membership=membership,
            bound=near_tie_below(model),
            batch_size=rows,
            decoded=batches.decoded_rows(model, rows, longest),
            guesses=guesses,
            near_copies=near_copies,
        )
        directory, record, done = None, None, set()
        if output is not None:
            directory = RunDirectory(output)
            record = run_record(
                model,
                model_record,
                tokenizer_record=tokenizer_record,
                identity=identity_of(
                    samples,
                    generate=generate,
                    stop_early=stop_early,
                    sampler=sampler,
                    membership=membership,
                    guesses=guesses,
                    near_copies=near_copies,
                ),
                settings={
                    "batch_size": batch_size,
                    "batches": {"rows": rows, "number": len(planned), "in_a_unit": len(units[0])},
                    "decoded_rows": runner.decoded,
                    "decoding": "greedy, no stop, no penalties",
                    "sampler": vars(sampler) if sampler is not None else None,
                    "near_tie_below": runner.bound,
                    "protocol": check_protocol(protocol, runner.facts()),
                    "left_out": left_out,
                    "confidence": confidence,
                },
                work_split=work_split,
            )
            done = work_split.on_rank_zero(lambda: {order[result.sample_id] for result in directory.begin(record)})
        units = [unit for unit in (_without(unit, done) for unit in runner.passes(units, lengths)) if unit]
        kept: list[SampleResult] = []
        bar = tqdm(
            total=len(samples),
            initial=len(done),
            unit="sample",
            smoothing=0.1,
            dynamic_ncols=True,
            disable=None if progress and work_split.rank == 0 else True,  # None: on a terminal alone
        )
        with bar:
            for measured in runner.measure(samples, units, work_split):
                if directory is not None and work_split.rank == 0:
                    directory.append(measured)
                elif directory is None:
                    kept += measured
                bar.update(len(measured))

    if work_split.rank != 0:
        return []
    vocabulary = model.config.get_text_config().vocab_size
    results = directory.results(order) if directory is not None else kept
    if directory is not None:
        run = read_record(directory.path)  # with all parts, not only this one
        summary = summarize(results, record=run, confidence=confidence)
        chance = against_chance(summary["all"]["metrics"].get("nll", {}).get("mean"), vocabulary)
        warn_of_chance(chance, vocabulary)
        directory.finish({**summary, "chance": chance})
        return results
    losses = [-result.logprob / result.suffix_length for result in results if result.logprob is not None]
    warn_of_chance(against_chance(sum(losses) / len(losses) if losses else None, vocabulary), vocabulary)
    return sorted(results, key=lambda result: order[result.sample_id])


def check_tokenizer(tokenizer, samples: SampleFile) -> None:
    """Raise if a tokenizer is not the one that the samples were made with, as far as that is known.

    Raises:
        ValueError: their about file names another one; or, without that, the tokenizer lacks one of their ids.
    """
    if not tokenizer_record_of(tokenizer, samples)["checked"]:
        check_ids(tokenizer, max(max(*sample.prefix, *sample.suffix) for sample in samples))


def tokenizer_record_of(tokenizer, samples: Sequence[Sample]) -> dict[str, Any]:
    """What run.json says of the tokenizer.

    Returns:
        `path`, `size` and `sha256` of `tokenizer_identity`, each None if unknown, and whether the samples are known to
        be of the same one: `checked`.
    Raises:
        ValueError: they are known to be of another.
    """
    identity = tokenizer_identity(tokenizer)
    checked = check_same(identity, tokenizer_of(samples))
    return {**(identity or dict.fromkeys(("path", "size", "sha256"))), "checked": checked}


def warn_of_chance(chance: dict[str, Any] | None, vocabulary: int) -> None:
    """Warn of a model that is no better than guessing; `chance` is what `against_chance` returns."""
    if chance is not None and chance["no_better"]:
        logger.warning(
            "the mean loss of the suffixes is %.2f nats a token, no better than chance: %.2f, the logarithm of the "
            "vocabulary of %d. That nothing is extracted says nothing then. Either the samples are of another "
            "tokenizer, or the model is not trained, or its weights were wrongly loaded.",
            chance["nll"],
            chance["chance_nll"],
            vocabulary,
        )


def _without(unit: Sequence[Sequence[int]], done: set[int]) -> list[list[int]]:
    left = ([place for place in batch if place not in done] for batch in unit)
    return [batch for batch in left if batch]


def look_through(samples: Sequence[Sample]) -> tuple[dict[str, int], list[tuple[int, int]], int]:
    """The place of every sample id, prefix and suffix lengths, and the largest token id.

    Raises:
        ValueError: there are no samples, or ids that repeat.
    """
    order: dict[str, int] = {}
    lengths, largest = [], 0
    for place, sample in enumerate(samples):
        order[sample.sample_id] = place
        lengths.append((len(sample.prefix), len(sample.suffix)))
        largest = max(largest, *sample.prefix, *sample.suffix)
    if not lengths:
        raise ValueError("there are no samples to extract.")
    if len(order) != len(lengths):
        raise ValueError(f"{len(lengths)} samples have only {len(order)} different sample ids.")
    return order, lengths, largest


def _check_options(batch_size, stop_early, sampler, membership, near_copies, tokenizer) -> None:
    if batch_size != "auto" and not is_count(batch_size, least=1):
        raise ValueError(f"batch_size is {batch_size!r}, but it must be at least 1, or 'auto'.")
    asked = {"sampler": sampler is not None, "membership": membership, "near_copies": near_copies is not None}
    given = [name for name, wanted in asked.items() if wanted]
    if stop_early and given:
        raise ValueError(
            "stop_early drops a sample from the pass when it has failed, so it does not go with "
            f"{' and '.join(given)}: all probabilities are needed for that."
        )
    if membership and tokenizer is None:
        raise ValueError("membership scores need a tokenizer: the zlib score is of the text.")
