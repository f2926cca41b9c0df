"""The pilot: a learning rate and a suffix that show memorization, fixed on one model before the runs.

The model is continued with the ordinary loss at each learning rate, as in any run but with a seed of its own, and
asked for the passages that it saw most often and for those that it never saw. All samples have the longest suffix: a
shorter one, behind the same prefix, comes back verbatim if the first miss is behind it. Taken is the longest suffix at
which enough of the largest bucket come back and few enough of bucket 0; where several rates reach it, that at which
most come back, and of equals the smallest.

    pilot/chosen.json       what was chosen, and what was tried
    pilot/rate-RATE.json    what was counted at a rate, so that a pilot that is killed goes on with the next
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_axonn_eval import Sample, SampleResult, extract, read_samples, samples_digest
from hf_axonn_eval.data.jsonl import write_json
from hf_axonn_eval.extraction.work_split import WorkSplit
from hf_axonn_scripts.demo.pipeline import read_if_there
from hf_axonn_scripts.study.recipe.definition import ORDINARY, Pilot
from hf_axonn_scripts.study.training.train import Work


def run_pilot(work: Work) -> None:
    """Try every learning rate of the recipe's pilot, and write the chosen one.

    Raises:
        ValueError: a step before is missing; no rate satisfies both conditions.
    """
    pilot, directory = work.recipe.pilot, work.output / "pilot"
    assert pilot is not None, "a recipe without a pilot has no such step"
    tried: list[dict[str, Any]] = []
    for rate in pilot.learning_rates:
        tried += _try(work, pilot, rate, directory / f"rate-{rate:g}.json")
    chosen = choose(tried, pilot)
    if WorkSplit.for_model(None).rank == 0:
        write_json(directory / "chosen.json", {**chosen, "tried": tried})


def choose(tried: Sequence[Mapping[str, Any]], pilot: Pilot) -> dict[str, Any]:
    """Choose the learning rate and the suffix.

    Args:
        tried: of `count`, for every rate and suffix.
        pilot: the conditions.
    Returns:
        `learning_rate` and `suffix`.
    Raises:
        ValueError: nothing that was tried satisfies both conditions; the message shows all of it.
    """
    good = [row for row in tried if row["largest"] >= pilot.at_least and row["none"] <= pilot.at_most]
    if not good:
        raise ValueError(_refusal(tried, pilot))
    best = max(good, key=lambda row: (row["suffix"], row["largest"], -row["learning_rate"]))
    return {"learning_rate": best["learning_rate"], "suffix": best["suffix"]}


def _refusal(tried: Sequence[Mapping[str, Any]], pilot: Pilot) -> str:
    table = "\n".join(
        f"  {row['learning_rate']:>10g} {row['suffix']:>8} {row['largest']:>10.1%} {row['none']:>10.1%} "
        f"{row['held_out_loss']:>14.3f}"
        for row in tried
    )
    advice = []
    if all(row["largest"] < pilot.at_least for row in tried):
        advice.append(
            "too little comes back of the largest bucket: larger learning_rates, shorter suffixes, or a larger bucket"
        )
    if all(row["none"] > pilot.at_most for row in tried):
        advice.append("too much comes back of bucket 0, which nobody has seen: longer suffixes, or smaller rates")
    if not advice:
        advice.append(
            "where enough of the largest bucket comes back, too much of bucket 0 does: longer suffixes between them"
        )
    return (
        f"the pilot on {pilot.model} found no learning rate and suffix at which at least {pilot.at_least:.0%} of the "
        f"largest bucket and at most {pilot.at_most:.0%} of bucket 0 come back verbatim:\n"
        f"  {'rate':>10} {'suffix':>8} {'largest':>10} {'bucket 0':>10} {'held-out loss':>14}\n{table}\n"
        f"Change `pilot` in the recipe: {'; '.join(advice)}."
    )


def count(results: Sequence[SampleResult], suffixes: Sequence[int], *, largest: int) -> list[dict[str, Any]]:
    """Return the shares of samples that come back verbatim by suffix length, of the bucket `largest` and of bucket 0.

    Args:
        results: with the longest suffix.
        suffixes: lengths, in tokens; a sample counts if its first tokens come back, as many as these.
        largest: the bucket.
    """

    def share(bucket: int, suffix: int) -> float:
        own = [result.divergence_point >= suffix for result in results if result.bucket == bucket]
        return sum(own) / len(own)

    return [{"suffix": suffix, "largest": share(largest, suffix), "none": share(0, suffix)} for suffix in suffixes]


def _try(work: Work, pilot: Pilot, rate: float, file: Path) -> list[dict[str, Any]]:
    """Return the counts at a learning rate, from the file if it was measured with the same settings before."""
    recipe = work.recipe
    seed, largest = recipe.pilot_seed, max(recipe.documents.buckets)
    training, rows = {**recipe.training, "learning_rate": rate}, f"train-s{seed}.jsonl"
    start = work.prepare(f"pilot-{rate:g}", rows, training, ORDINARY, seed=seed)
    samples = _samples(work.samples(seed), pilot.suffixes, largest)
    about = {"bucket": largest, "suffixes": list(pilot.suffixes), "samples_sha256": samples_digest(samples)}
    settings = work.settings(rows, training, ORDINARY, **about)
    work_split = WorkSplit.for_model(None)
    kept = work_split.on_rank_zero(lambda: read_if_there(file))
    if kept is not None and kept["settings"] == json.loads(json.dumps(settings)):
        return kept["measured"]
    model, held_out_loss = start(work.base_model, settings=settings)
    results = extract(model, None, samples, batch_size="auto", generate=False, progress=False)
    work.clock.lap("extract")
    measured: list[dict[str, Any]] = []
    if work_split.rank == 0:
        counts = count(results, pilot.suffixes, largest=largest)
        measured = [{"learning_rate": rate, **row, "held_out_loss": held_out_loss} for row in counts]
        write_json(file, {"settings": settings, "measured": measured})
    return work_split.on_rank_zero(lambda: measured)


def _samples(path: Path, suffixes: Sequence[int], largest: int) -> list[Sample]:
    """Return the samples of two buckets.

    Raises:
        ValueError: they are none, or not long enough for the suffixes.
    """
    samples = [sample for sample in read_samples(path) if sample.bucket in (0, largest)]
    for bucket in (0, largest):
        if not any(sample.bucket == bucket for sample in samples):
            raise ValueError(f"{path} has no sample of bucket {bucket}, which the pilot asks for")
    shortest = min(len(sample.suffix) for sample in samples)
    if shortest < max(suffixes):
        raise ValueError(f"{path} has suffixes of {shortest} tokens, but the pilot asks for {max(suffixes)}")
    return samples
