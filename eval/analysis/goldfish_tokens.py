"""A comparison of the tokens that the goldfish loss left out of training with the others: does a model know them less?

The goldfish mask is a function of the text, so that it can be computed again. Of every suffix token it is known then
whether the model was supervised on it or not (it was dropped). If the loss protects, a dropped token is less often the
first choice, given the true tokens before it, and less likely. Where nothing was dropped in training, as in a base
model, controls, or a model with another mask, the two kinds of tokens are alike but for chance.

A hash needs the h tokens before a token (`context_width`). So the first h + 1 tokens of a sample are left out, one
for a BOS that may stand before it; with prefixes of more than h tokens these are none of the suffix. They are also the
only ones on which a BOS in training, or what was packed before the document, has an influence.

Source: Hans et al. 2024, arXiv 2406.10209 (the loss and its mask).
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import deprecated

from hf_axonn_eval.analysis.estimates import ends
from hf_axonn_eval.analysis.intervals import check_confidence, jackknife_interval, kish, number_documents
from hf_axonn_eval.data.results import SampleResult
from hf_axonn_eval.data.samples import Sample, tokens_of


DROPPED, SUPERVISED = "dropped", "supervised"
METRICS = ("accuracy", "nll")
_ROWS = 256  # samples whose masks are computed at once


@dataclass(frozen=True)
class TokenMasks:
    """The suffix tokens of samples that were dropped in training.

    Args:
        place: of each sample id, the number of its first suffix token in `dropped`.
        dropped: [suffix tokens of all samples] 1: dropped, 0: supervised, -1: not known.
        settings: of the mask.
    """

    place: Mapping[str, int]
    dropped: np.ndarray
    settings: Mapping[str, Any]

    def select(self, result: SampleResult) -> np.ndarray:
        """Select those of one result, [suffix_length].

        Raises:
            ValueError: it is of none of the samples.
        """
        if result.sample_id not in self.place:
            raise ValueError(f"sample {result.sample_id!r} of the run is not among the samples that were given.")
        begin = self.place[result.sample_id]
        return self.dropped[begin : begin + result.suffix_length]

    @deprecated("TokenMasks.of is TokenMasks.select now, and leaves with the next release.", category=FutureWarning)
    def of(self, result: SampleResult) -> np.ndarray:
        """Call `select`, by its name until 0.2."""
        return self.select(result)


def token_masks(
    samples: Iterable[Sample],
    *,
    strategy: str = "hash-table",
    k: int = 4,
    context_width: int = 13,
    table: str | os.PathLike[str] | None = None,
) -> TokenMasks:
    """Compute the mask of training on the suffixes of samples, by the settings that the model was trained with.

    Args:
        samples: as they were asked; their tokens must be those of training.
        strategy: of `goldfish_mask`.
        k: one token in k was dropped.
        context_width: h, tokens in a hashed window.
        table: file with the table of "hash-table", where training drew it on a GPU (`hf_axonn.goldfish.table`).
    Raises:
        ValueError: settings that no mask can be made from, or a strategy whose mask the tokens of a sample do not
            determine.
    """
    from hf_axonn.goldfish.mask import HASHES, check_options
    from hf_axonn.goldfish.table import load_table, table_sha256

    options: dict[str, Any] = {"strategy": strategy, "k": k, "context_width": context_width}
    check_options(**options)
    if strategy not in HASHES:
        raise ValueError(
            f"--goldfish strategy={strategy}: this mask is no function of the text, so samples do not tell which of "
            f"their tokens were dropped. Those of {', '.join(HASHES)} can be computed again."
        )
    settings = dict(options)
    if table is not None:
        options["table"] = load_table(table)
        settings["table_sha256"] = table_sha256(options["table"])
    place: dict[str, int] = {}
    found: list[np.ndarray] = []
    rows: list[Sample] = []
    total = 0

    def compute() -> None:
        found.extend(_masks(rows, options))
        rows.clear()

    for sample in samples:
        length = tokens_of(sample)
        if rows and (len(rows) == _ROWS or length != tokens_of(rows[0])):
            compute()
        place[sample.sample_id] = total
        total += len(sample.suffix)
        rows.append(sample)
    if rows:
        compute()
    return TokenMasks(place, np.concatenate(found) if found else np.zeros(0, dtype=np.int8), settings)


def recorded_mask(records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings for `token_masks` that the training records of runs name.

    Args:
        records: run.json by the name of the run.
    Raises:
        ValueError: no record names a goldfish loss, two name another one each, or the mask needs more than the
            tokens of a sample: labels as the authors' code packs them, or a table that is not that of every CPU.
    """
    from hf_axonn.goldfish.record import all_parts, describe_loss, is_record, loss_of, trained_with_goldfish
    from hf_axonn.goldfish.table import CPU_TABLE_SHA256

    remedy = "give the settings: --goldfish strategy=hash-table,k=4,context_width=13."
    found: dict[str, dict[str, Any]] = {}
    for name, run in records.items():
        record = (run.get("model") or {}).get("training")
        for part in all_parts(record) if record is not None and is_record(record) else ():
            if trained_with_goldfish(part):
                found.setdefault(f"{name} with {describe_loss(part)}", loss_of(part))
    losses = list(found.values())
    if not losses or any(loss != losses[0] for loss in losses):
        trained = "; ".join(found) or "no training record of these runs names a goldfish loss"
        raise ValueError(f"--goldfish without settings takes those of training records, but: {trained}: {remedy}")
    settings = losses[0]
    if settings.get("as_reference") or settings.get("table_sha256", CPU_TABLE_SHA256) != CPU_TABLE_SHA256:
        raise ValueError(f"--goldfish: the mask of {next(iter(found))} needs more than the record: {remedy}")
    return {name: settings[name] for name in ("strategy", "k", "context_width") if name in settings}


def goldfish_tokens(
    runs: Mapping[str, Iterable[SampleResult]], masks: TokenMasks, *, confidence: float = 0.95
) -> dict[str, Any]:
    """Measure how well runs know dropped and supervised tokens.

    Args:
        runs: results by name, with hits and log-probabilities (not with `stop_early`).
        masks: of the samples that they were asked.
        confidence: of the intervals.
    Returns:
        - `mask`: the settings;
        - `tokens`: how many suffix tokens are "dropped", "supervised" and "unknown";
        - `runs`: by name and bucket, as text, "dropped" and "supervised", each with `hits` of `n` tokens in so many
          `documents`, `accuracy` (hits / n) and `nll` (the mean of -log p, nats a token), estimates with `mean`,
          `low`, `high` and `interval`; and "difference", supervised minus dropped, of both, with `difference` in place
          of `mean`. Intervals are over documents, as those of means in summaries. A side without tokens has no entry,
          and then there is no difference.
    Raises:
        ValueError: a run without log-probabilities, or of other samples, or not 0 < confidence < 1.
    """
    check_confidence(confidence)
    counts = {DROPPED: 1, SUPERVISED: 0, "unknown": -1}
    return {
        "mask": dict(masks.settings),
        "tokens": {name: int((masks.dropped == value).sum()) for name, value in counts.items()},
        "runs": {name: _run(name, results, masks, confidence) for name, results in runs.items()},
    }


def _masks(samples: list[Sample], options: Mapping[str, Any]) -> list[np.ndarray]:
    """Compute the masks of suffixes, of samples of one length, as `TokenMasks.dropped`."""
    import torch

    from hf_axonn import goldfish_mask

    tokens = torch.tensor([sample.prefix + sample.suffix for sample in samples])
    masks = goldfish_mask(tokens, **options).numpy().astype(np.int8)
    masks[:, : options["context_width"] + 1] = -1
    return [mask[len(sample.prefix) :] for sample, mask in zip(samples, masks, strict=True)]


def _run(
    name: str, results: Iterable[SampleResult], masks: TokenMasks, confidence: float
) -> dict[str, dict[str, dict[str, Any]]]:
    buckets: list[int] = []
    documents: list[str] = []
    sums: list[list[float]] = []  # tokens, hits and nll, of dropped and of supervised ones
    for result in results:
        if result.hits is None or result.logprobs is None:
            raise ValueError(
                f"run {name!r} has no log-probabilities of tokens (sample {result.sample_id!r}): extract without "
                "--stop_early."
            )
        hits, nll, dropped = np.array(result.hits), -np.array(result.logprobs), masks.select(result)
        sums.append([])
        for value in (1, 0):
            side = dropped == value
            sums[-1] += [float(side.sum()), float(hits[side].sum()), float(nll[side].sum())]
        buckets.append(result.bucket)
        documents.append(result.document_id)
    table, bucket_of = np.array(sums).reshape(-1, 2, 3), np.array(buckets)
    found = {}
    for bucket in np.unique(bucket_of).tolist():
        rows = np.flatnonzero(bucket_of == bucket)
        index, count = number_documents([documents[place] for place in rows])
        by_document = np.zeros((count, 2, 3))
        np.add.at(by_document, index, table[rows])
        found[str(bucket)] = by_document_numbers(by_document, confidence)
    return found


def by_document_numbers(by_document: np.ndarray, confidence: float) -> dict[str, Any]:
    """Compute the numbers of one bucket from [documents, dropped or supervised, (tokens, hits, nll)]."""
    found: dict[str, Any] = {}
    for side, name in enumerate((DROPPED, SUPERVISED)):
        tokens, hits, _ = by_document[:, side].T
        if tokens.sum():
            found[name] = {"hits": int(hits.sum()), "n": int(tokens.sum()), "documents": int((tokens > 0).sum())}
            for number, metric in enumerate(METRICS, start=1):
                has = by_document[tokens > 0, side]
                mean, changes = _ratio(has[:, number], has[:, 0])
                interval = jackknife_interval(mean, changes, kish(has[:, 0] ** 2) - 1, confidence=confidence)
                found[name][metric] = {"mean": mean, **ends(interval, 0.0, 1.0 if metric == "accuracy" else np.inf)}
    if len(found) == 2:
        found["difference"] = {}
        for number, metric in enumerate(METRICS, start=1):
            of_dropped, of_supervised = (
                _ratio(by_document[:, side, number], by_document[:, side, 0]) for side in (0, 1)
            )
            difference = of_supervised[0] - of_dropped[0]
            changes = of_supervised[1] - of_dropped[1]
            freedom = min(kish(by_document[:, side, 0] ** 2) for side in (0, 1)) - 1
            interval = jackknife_interval(difference, changes, freedom, confidence=confidence)
            width = 1.0 if metric == "accuracy" else np.inf
            found["difference"][metric] = {"difference": difference, **ends(interval, -width, width)}
    return found


def _ratio(sums: np.ndarray, sizes: np.ndarray) -> tuple[float, np.ndarray]:
    """Compute a mean over tokens, and by how much it is less without each document."""
    mean, others = float(sums.sum() / sizes.sum()), sizes.sum() - sizes
    return mean, (sums - mean * sizes) / np.where(others > 0, others, np.inf)
