"""The pilot: which learning rate and which suffix show memorization, fixed on one model before the runs.

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
from hf_axonn_scripts.study.recipe.definition import ORDINARY, Pilot
from hf_axonn_scripts.study.training.training import make_arguments, train


def pilot(work) -> None:
    """Try every learning rate of the recipe's pilot, and write what was chosen.

    Args:
        work: the study and the model, `train.Work`.
    Raises:
        ValueError: the recipe has no pilot, or another model's; a step before is missing; no rate satisfies both
            conditions.
    """
    recipe = work.recipe
    if recipe.pilot is None or recipe.pilot.model != work.model.name:
        of = "no pilot" if recipe.pilot is None else f"a pilot of {recipe.pilot.model}"
        raise ValueError(f"{recipe.path} has {of}, not one of {work.model.name}")
    directory = work.output / "pilot"
    tried: list[dict[str, Any]] = []
    for rate in recipe.pilot.learning_rates:
        tried += _try(work, rate, directory / f"rate-{rate:g}.json")
    chosen = choose(tried, recipe.pilot)
    if WorkSplit.of(None).rank == 0:
        write_json(directory / "chosen.json", {**chosen, "tried": tried})


def choose(tried: Sequence[Mapping[str, Any]], asked: Pilot) -> dict[str, Any]:
    """The learning rate and the suffix.

    Args:
        tried: of `count`, for every rate and suffix.
        asked: the conditions.
    Returns:
        `learning_rate` and `suffix`.
    Raises:
        ValueError: nothing that was tried satisfies both conditions; the message shows all of it.
    """
    good = [row for row in tried if row["largest"] >= asked.at_least and row["none"] <= asked.at_most]
    if not good:
        raise ValueError(_refusal(tried, asked))
    best = max(good, key=lambda row: (row["suffix"], row["largest"], -row["learning_rate"]))
    return {"learning_rate": best["learning_rate"], "suffix": best["suffix"]}


def _refusal(tried: Sequence[Mapping[str, Any]], asked: Pilot) -> str:
    table = "\n".join(
        f"  {row['learning_rate']:>10g} {row['suffix']:>8} {row['largest']:>10.1%} {row['none']:>10.1%} "
        f"{row['held_out_loss']:>14.3f}"
        for row in tried
    )
    advice = []
    if all(row["largest"] < asked.at_least for row in tried):
        advice.append(
            "too little comes back of the largest bucket: larger learning_rates, shorter suffixes, or a larger bucket"
        )
    if all(row["none"] > asked.at_most for row in tried):
        advice.append("too much comes back of bucket 0, which nobody has seen: longer suffixes, or smaller rates")
    if not advice:
        advice.append(
            "where enough of the largest bucket comes back, too much of bucket 0 does: longer suffixes between them"
        )
    return (
        f"the pilot on {asked.model} found no learning rate and suffix at which at least {asked.at_least:.0%} of the "
        f"largest bucket and at most {asked.at_most:.0%} of bucket 0 come back verbatim:\n"
        f"  {'rate':>10} {'suffix':>8} {'largest':>10} {'bucket 0':>10} {'held-out loss':>14}\n{table}\n"
        f"Change `pilot` in the recipe: {'; '.join(advice)}."
    )


def count(results: Sequence[SampleResult], suffixes: Sequence[int], *, largest: int) -> list[dict[str, Any]]:
    """What share of samples comes back verbatim for each suffix length, of the bucket `largest` and of bucket 0.

    Args:
        results: with the longest suffix.
        suffixes: lengths, in tokens; a sample counts if its first so many tokens come back.
        largest: the bucket.
    """

    def share(bucket: int, suffix: int) -> float:
        own = [result.divergence_point >= suffix for result in results if result.bucket == bucket]
        return sum(own) / len(own)

    return [{"suffix": suffix, "largest": share(largest, suffix), "none": share(0, suffix)} for suffix in suffixes]


def _try(work, rate: float, file: Path) -> list[dict[str, Any]]:
    """What `count` gives at a learning rate, from the file if it was measured with the same settings before."""
    recipe, asked = work.recipe, work.recipe.pilot
    seed, largest = recipe.seeds[-1] + 1, max(recipe.documents.buckets)
    training, loss = {**recipe.training, "learning_rate": rate}, recipe.losses[ORDINARY]
    rows_name = f"train-s{seed}.jsonl"
    arguments = make_arguments(
        training,
        loss,
        work=work.work_directory(f"pilot-{rate:g}"),
        sequences=recipe.batch_sequences,
        seed=seed,
        in_order=True,
        evaluations=0,
    )
    rows = work.rows(rows_name, recipe.batch_sequences)
    samples = _samples(work.samples(seed), asked.suffixes, largest)
    tokenizer, held_out = work.tokenizer(), work.held_out()
    settings = work.settings(rows_name, training=training, loss=loss, sequences=recipe.batch_sequences)
    settings |= {"bucket": largest, "suffixes": list(asked.suffixes), "samples_sha256": samples_digest(samples)}
    work_split = WorkSplit.of(None)
    measured = work_split.on_rank_zero(lambda: _measured(file, settings))
    if measured is not None:
        return measured
    model, held_out_loss = train(
        work.base_model, tokenizer, rows, held_out, arguments, settings=settings, clock=work.clock
    )
    results = extract(model, None, samples, batch_size="auto", generate=False, progress=False)
    work.clock.lap("extract")
    if work_split.rank == 0:
        counted = count(results, asked.suffixes, largest=largest)
        measured = [{"learning_rate": rate, **row, "held_out_loss": held_out_loss} for row in counted]
        write_json(file, {"settings": settings, "measured": measured})
    return work_split.on_rank_zero(lambda: measured)


def _measured(file: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    if not file.is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    return content["measured"] if content["settings"] == json.loads(json.dumps(settings)) else None


def _samples(path: Path, suffixes: Sequence[int], largest: int) -> list[Sample]:
    """The samples of two buckets.

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
