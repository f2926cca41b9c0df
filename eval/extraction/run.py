"""The driver of a run: it puts the samples to an asker, keeps the answers, and resumes a run that was stopped.

A model in this process or on a grid is an asker (runner.py), and so is a server (served/extract.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

from tqdm import tqdm

from hf_axonn.compat.messages import get_logger
from hf_axonn_eval.analysis.chance import against_chance
from hf_axonn_eval.analysis.summary import summarize
from hf_axonn_eval.data.protocols import check_protocol
from hf_axonn_eval.data.results import RunDirectory, SampleResult, read_record
from hf_axonn_eval.data.samples import Sample, SampleFile, tokenizer_of
from hf_axonn_eval.data.tokenizer_identity import check_ids, check_same, tokenizer_identity
from hf_axonn_eval.extraction.options import Options
from hf_axonn_eval.extraction.run_record import describe_start
from hf_axonn_eval.extraction.shared_rows import followers
from hf_axonn_eval.extraction.work_split import WorkSplit


logger = get_logger(__name__)


class Survey(NamedTuple):
    """Samples, the place of each sample id, prefix and suffix length of each sample, and the largest token id; and by
    the place of a sample those of others that are its beginning (`shared_rows.followers`).
    """

    samples: Sequence[Sample]
    places: dict[str, int]
    lengths: list[tuple[int, int]]
    largest_id: int
    followers: dict[int, list[int]]

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return max(map(sum, self.lengths))


class Asker(ABC):
    """Whatever answers samples, with the `options` of a run; texts are those of its `tokenizer`."""

    options: Options
    tokenizer: Any
    work_split: WorkSplit
    vocabulary: int  # number of tokens that a guess chooses from

    @abstractmethod
    def prepare(self, survey: Survey) -> AbstractContextManager[None]:
        """Plan how the samples are asked, and be ready to answer inside of the context."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return the facts about a run that the options do not tell (contract.OF_A_RUN)."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return entries of run.json, in the order of the file; those of `settings` may change in a later start."""

    @abstractmethod
    def measure(self, samples: Sequence[Sample], done: set[int]) -> Iterator[list[SampleResult]]:
        """Yield the results of all samples but those at the places `done`, on rank 0; elsewhere empty lists."""

    def check_resumed(self, sample: Sample, kept: SampleResult) -> None:  # noqa: B027 - weights have a fingerprint
        """Raise ValueError unless a sample that an earlier start measured would be answered in the same way."""

    def conclude(self, results: Sequence[SampleResult]) -> dict[str, Any]:
        """Return the asker's entries of summary.json."""
        return {}


def survey_samples(samples: Iterable[Sample]) -> Survey:
    """Go through all samples once.

    Raises:
        ValueError: there are no samples, or ids that repeat.
    """
    samples = samples if isinstance(samples, Sequence) else list(samples)
    places: dict[str, int] = {}
    lengths, largest = [], 0

    def pass_on() -> Iterator[Sample]:
        nonlocal largest
        for place, sample in enumerate(samples):
            places[sample.sample_id] = place
            lengths.append((len(sample.prefix), len(sample.suffix)))
            largest = max(largest, *sample.prefix, *sample.suffix)
            yield sample

    nested = followers(pass_on())
    if not lengths:
        raise ValueError("there are no samples to extract.")
    if len(places) != len(lengths):
        raise ValueError(f"{len(lengths)} samples have only {len(places)} different sample ids.")
    return Survey(samples, places, lengths, largest, nested)


def run(asker: Asker, survey: Survey) -> Sequence[SampleResult]:
    """Measure every sample; returns and raises what `extract` does, with the collectives of the asker."""
    samples, options, work_split = survey.samples, asker.options, asker.work_split
    if options.membership and asker.tokenizer is None:
        raise ValueError("membership scores need a tokenizer: the zlib score is of the text.")
    check_ids(asker.tokenizer, survey.largest_id)
    tokenizer_record: dict[str, Any] = {}
    if options.output is not None or isinstance(samples, SampleFile):
        tokenizer_record = work_split.on_rank_zero(lambda: describe_tokenizer(asker.tokenizer, samples))
    directory = RunDirectory(options.output) if options.output is not None else None
    kept: list[SampleResult] = []
    with asker.prepare(survey):
        done: set[int] = set()
        if directory is not None:
            record = _make_record(asker, samples, tokenizer_record)
            done = work_split.on_rank_zero(partial(_begin, directory, record, asker, survey))
        bar = tqdm(
            total=len(samples),
            initial=len(done),
            unit="sample",
            smoothing=0.1,
            dynamic_ncols=True,
            disable=None if options.progress and work_split.rank == 0 else True,  # None: on a terminal alone
        )
        with bar:
            for results in asker.measure(samples, done):
                if directory is None:
                    kept += results
                elif work_split.rank == 0:
                    directory.append(results)
                bar.update(len(results))
    if work_split.rank != 0:
        return []
    if directory is None:
        losses = [-result.logprob / result.suffix_length for result in kept if result.logprob is not None]
        _compare_with_chance(sum(losses) / len(losses) if losses else None, asker.vocabulary)
        return sorted(kept, key=lambda result: survey.places[result.sample_id])
    everything = directory.results(survey.places)
    # the record with all parts, not only this one
    summary = summarize(everything, record=read_record(directory.path), confidence=options.confidence)
    more = asker.conclude(everything)
    chance = _compare_with_chance(summary["all"]["metrics"].get("nll", {}).get("mean"), asker.vocabulary)
    directory.finish({**summary, "chance": chance, **more})
    return everything


def _make_record(asker: Asker, samples: Sequence[Sample], tokenizer_record: dict[str, Any]) -> dict[str, Any]:
    """Return the content of run.json: the asker's entries, and those that all runs have."""
    record, start, options = asker.describe(), describe_start(), asker.options
    tokenizer_sha256 = {"tokenizer_sha256": tokenizer_record["sha256"]}
    return record | {
        "identity": {**options.identity(samples), **record["identity"], **tokenizer_sha256},
        "tokenizer": {**tokenizer_record, **record["tokenizer"]},
        "settings": {
            **record["settings"],
            "protocol": check_protocol(options.protocol, options.facts() | asker.facts()),
            "left_out": options.left_out,
            "confidence": options.confidence,
        },
        **start,
        "versions": start["versions"] | record.get("versions", {}),
    }


def _begin(directory: RunDirectory, record: dict[str, Any], asker: Asker, survey: Survey) -> set[int]:
    """Begin or resume a run; returns the places of the samples that an earlier start measured."""
    finished = directory.begin(record)
    if finished:
        asker.check_resumed(survey.samples[survey.places[finished[0].sample_id]], finished[0])
    return {survey.places[result.sample_id] for result in finished}


def check_tokenizer(tokenizer: Any, samples: SampleFile) -> None:
    """Raise if a tokenizer is not the one that the samples were made with, as far as that is known.

    Raises:
        ValueError: their about file names another one; or, without that, the tokenizer lacks one of their ids.
    """
    if not describe_tokenizer(tokenizer, samples)["checked"]:
        check_ids(tokenizer, max(max(*sample.prefix, *sample.suffix) for sample in samples))


def describe_tokenizer(tokenizer: Any, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the entry `tokenizer` of run.json.

    Returns:
        `path`, `size` and `sha256` of `tokenizer_identity`, each None if unknown, and whether the samples are known to
        be of the same one: `checked`.
    Raises:
        ValueError: they are known to be of another.
    """
    identity = tokenizer_identity(tokenizer)
    checked = check_same(identity, tokenizer_of(samples))
    return {**(identity or dict.fromkeys(("path", "size", "sha256"))), "checked": checked}


def _compare_with_chance(loss: float | None, vocabulary: int) -> dict[str, Any] | None:
    """Return `against_chance`, and warn of a model that is no better than guessing."""
    chance = against_chance(loss, vocabulary)
    if chance is not None and chance["no_better"]:
        logger.warning(
            "the mean loss of the suffixes is %.2f nats a token, no better than chance: %.2f, the logarithm of the "
            "vocabulary of %d. That nothing is extracted says nothing then. Either the samples are of another "
            "tokenizer, or the model is not trained, or its weights were wrongly loaded.",
            chance["nll"],
            chance["chance_nll"],
            vocabulary,
        )
    return chance
