"""Ask a model for its training data, and keep the answers.

One teacher-forced pass a batch gives everything but ROUGE, the edit distance and the longest run. These need the
model's own continuation, which up to the first wrong token is known already: only the rest is decoded.
"""

import contextlib
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tqdm import tqdm

from hf_axonn_eval import metrics, scoring
from hf_axonn_eval.division import Division
from hf_axonn_eval.results import RunDirectory, SampleResult
from hf_axonn_eval.samples import Sample, samples_digest
from hf_axonn_eval.scoring import Score
from hf_axonn_eval.stats import check_confidence
from hf_axonn_eval.summary import summarize


_PACKAGES = ("hf_axonn", "torch", "transformers", "tokenizers", "peft", "rouge-score", "rapidfuzz", "numpy")


def extract(
    model,
    tokenizer,
    samples: Iterable[Sample],
    *,
    output: str | os.PathLike | None = None,
    model_record: dict[str, Any] | None = None,
    batch_size: int = 8,
    generate: bool = True,
    confidence: float = 0.95,
    seed: int = 0,
    progress: bool = True,
) -> list[SampleResult]:
    """Measure every sample.

    Args:
        model: a causal LM, plain or parallelized. Samples are dealt to the (data, z) coordinates of its grid, or,
            for a plain model, to all processes.
        tokenizer: for the text that ROUGE compares; None leaves ROUGE and the texts out.
        samples: what to ask; the sample ids must differ.
        output: directory for the run (files: see results.py). A run that was stopped goes on from there. None keeps
            nothing.
        model_record: what identifies the model: `load_model(...).record`, or for a model of another origin a dict
            with a `fingerprint` of your choice. Needed with `output`, so that a run never goes on with other weights.
        batch_size: samples in one forward pass.
        generate: whether to decode, which the edit distance, ROUGE, the longest run and free-running accuracy need.
        confidence: of the intervals in summary.json.
        seed: of the bootstrap in summary.json; greedy decoding has none.
        progress: show a progress bar on rank 0.
    Returns:
        On rank 0 one result a sample, in the order of the samples; on other ranks an empty list.
    Raises:
        ValueError: no samples, ids that repeat or lie outside the vocabulary, sequences longer than the model's
            window, or an `output` that holds another run. Raised on every rank.
    Collectives: over the world, and per batch those of the model over x, y and z.
    """
    samples = list(samples)
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, but it must be at least 1.")
    if not samples:
        raise ValueError("there are no samples to extract.")
    check_confidence(confidence)
    order = {sample.sample_id: place for place, sample in enumerate(samples)}
    if len(order) != len(samples):
        raise ValueError(f"{len(samples)} samples have only {len(order)} different sample ids.")
    scoring.check_fits(
        model,
        longest=max(len(sample.prefix) + len(sample.suffix) for sample in samples),
        largest_id=max(max(*sample.prefix, *sample.suffix) for sample in samples),
    )
    division = Division.of(model)
    directory, record, results = None, None, []
    if output is not None:
        if not model_record or "fingerprint" not in model_record:
            raise ValueError(
                "output=... needs model_record=... with a 'fingerprint', so that a stopped run never goes on with "
                "another model: pass load_model(...).record, or {'fingerprint': <any text that names the weights>}."
            )
        directory = RunDirectory(output)
        record = _record(model, model_record, samples, batch_size=batch_size, generate=generate, division=division)
        results = division.on_rank_zero(lambda: directory.begin(record))

    done = {result.sample_id for result in results}
    batches = _batches([sample for sample in samples if sample.sample_id not in done], batch_size)
    bar = tqdm(total=len(samples), initial=len(done), unit="sample", disable=not progress or division.rank != 0)
    with bar, scoring.evaluating(model):
        for batch, counts in division.rounds(batches):
            scores = scoring.score_suffixes(model, batch)
            continuations = _continuations(model, batch, scores, division) if generate else [None] * len(batch)
            measured = [
                _measure(sample, score, continuation, tokenizer)
                for sample, score, continuation in zip(batch, scores, continuations, strict=True)
                if counts
            ]
            measured = division.gather(measured)
            if directory is not None and division.rank == 0:
                directory.append(measured)
            results = results + measured if division.rank == 0 else []
            bar.update(len(measured))

    if division.rank != 0:
        return []
    results = sorted(results, key=lambda result: order[result.sample_id])
    if directory is not None:
        directory.finish(summarize(results, record=record, confidence=confidence, seed=seed))
    return results


def _batches(samples: Sequence[Sample], batch_size: int) -> list[list[Sample]]:
    """Batches of samples that have the same lengths, so that no batch needs padding."""
    alike: dict[tuple[int, int], list[Sample]] = {}
    for sample in samples:
        alike.setdefault((len(sample.prefix), len(sample.suffix)), []).append(sample)
    return [some[start : start + batch_size] for some in alike.values() for start in range(0, len(some), batch_size)]


def _continuations(model, batch: Sequence[Sample], scores: Sequence[Score], division: Division) -> list[list[int]]:
    """Greedy continuations of the prefixes, each as long as its suffix.

    Up to and including the first miss they are known from the scores. All ranks decode the same number of steps,
    those with nothing left to decode too: the steps gather weights.
    """
    known = []
    for sample, score in zip(batch, scores, strict=True):
        miss = metrics.divergence_point(_hits(sample, score))
        known.append(list(score.choices[: miss + 1]))
    missing = [len(sample.suffix) - len(some) for sample, some in zip(batch, known, strict=True)]
    steps = division.maximum(max(missing))
    if steps == 0:
        return known
    rows = [row for row, tokens in enumerate(missing) if tokens > 0]
    prompts = [[*batch[row].prefix, *known[row]] for row in rows] or [list(batch[0].prefix)]
    decoded = scoring.continue_greedily(model, prompts, steps=steps)
    for row, tokens in zip(rows, decoded, strict=False):
        known[row] += tokens[: missing[row]]
    return known


def _hits(sample: Sample, score: Score) -> list[bool]:
    return [choice == true for choice, true in zip(score.choices, sample.suffix, strict=True)]


def _measure(sample: Sample, score: Score, continuation: list[int] | None, tokenizer) -> SampleResult:
    hits = _hits(sample, score)
    free_running: dict[str, Any] = {}
    if continuation is not None:
        distance = metrics.edit_distance(continuation, sample.suffix)
        free_running = {
            "generated": continuation,
            "free_running_accuracy": metrics.free_running_accuracy(continuation, sample.suffix),
            "longest_run": metrics.longest_common_run(continuation, sample.suffix),
            "edit_distance": distance,
            "near_verbatim": metrics.near_verbatim(distance),
        }
        if tokenizer is not None:
            texts = [tokenizer.decode(list(ids), skip_special_tokens=True) for ids in (continuation, sample.suffix)]
            free_running |= {"generated_text": texts[0], "suffix_text": texts[1], **metrics.rouge(*texts)}
    return SampleResult(
        sample_id=sample.sample_id,
        document_id=sample.document_id,
        bucket=sample.bucket,
        offset=sample.offset,
        prefix_length=len(sample.prefix),
        suffix_length=len(sample.suffix),
        exact_match=all(hits),
        token_accuracy=metrics.token_accuracy(hits),
        divergence_point=metrics.divergence_point(hits),
        extraction_strength=metrics.extraction_strength(hits),
        logprob=sum(score.logprobs),
        logprobs=score.logprobs,
        hits=hits,
        **free_running,
    )


def _record(
    model,
    model_record: dict[str, Any],
    samples: Sequence[Sample],
    *,
    batch_size: int,
    generate: bool,
    division: Division,
) -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    device = next(model.parameters()).device
    return {
        "identity": {
            "samples": len(samples),
            "samples_sha256": samples_digest(samples),
            "model_fingerprint": model_record["fingerprint"],
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "generate": generate,
        },
        "model": model_record,
        "settings": {"batch_size": batch_size, "decoding": "greedy, no stop, no penalties"},
        "processes": division.world_size,
        "grid": str(model.axonn.grid) if getattr(model, "axonn", None) is not None else None,
        "device": {"type": device.type, "name": _device_name(device)},
        "versions": versions,
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _device_name(device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
