"""Utility of a model after a run, and the cost of a loss.

    utility/MODEL.json        of the model before its continuations (`base`), of base trainings with another loss
                              (`base-LOSS`), and of every run: held-out loss and tasks, with intervals over documents
    utility/tasks/TOKENIZER/  the tasks (tasks.py), of the held-out documents that rows in data/TOKENIZER have
    utility/parts/MODEL/      the same by document, so that a call that was stopped measures nothing twice

same_loss.py and exposed.py have the rest of what a loss costs and prevents.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import e, log
from pathlib import Path
from typing import Any

import numpy as np

from hf_axonn import Grid
from hf_axonn_eval import document_nll, load_model
from hf_axonn_eval.data.jsonl import write_json
from hf_axonn_eval.extraction.load_model import load_tokenizer, start_distributed
from hf_axonn_eval.extraction.weights_on_disk import fingerprint
from hf_axonn_eval.extraction.work_split import WorkSplit
from hf_axonn_scripts.study.data.held_out import HeldOut, read_held_out
from hf_axonn_scripts.study.data.tasks import (
    CHOICES,
    Harness,
    HarnessAnswers,
    first_token,
    harness_version,
    write_tasks,
)
from hf_axonn_scripts.study.findings.effects import Cell, estimate
from hf_axonn_scripts.study.findings.results import read_json
from hf_axonn_scripts.study.recipe.definition import ORDINARY, Model, Recipe
from hf_axonn_scripts.study.recipe.steps import STUDY, base_of, run_directory, tokenizer_of


BASE = "base"
WEIGHTS = "float32"  # as models are trained, and asked for passages
_TOKENS_AT_ONCE = 2048  # in a forward pass: logits of a vocabulary of 49,152 tokens then take 400 MB
_MOST_AT_ONCE = 16


def measure(recipe: Recipe, output: Path, model_name: str, *, grid: Grid | None = None) -> None:
    """Measure a model before and after each of its runs, and write utility/MODEL.json.

    By `base`, `base-LOSS` and name of the run:

    - `held_out_loss`: nats a token, over all tokens but the first of each held-out row: `mean`, `low`, `high`,
      `interval` (its kind), `tokens`, `documents`;
    - `tasks`: by metric of lm-evaluation-harness an estimate with such ends, `bits_per_byte`, `byte_perplexity` and
      `word_perplexity` of the held-out texts with `documents`, `acc` and `acc_norm` of the endings with `questions`
      and `chance`; `harness`, its version; `left_out`, why there are none, or none of endings;
    - `minus_base`, and for runs `minus_ordinary` (the run with the ordinary loss on the same seed and grid): by
      `held_out_loss`, `bits_per_byte`, `acc` and `acc_norm` the `difference` with `low`, `high` and `interval`, of
      pairs of documents;
    - `checkpoint` and `fingerprint` of what was measured.

    Args:
        recipe, output: the study and its directory.
        model_name: of a model of the recipe.
        grid: over which it is sharded; all its ranks call this. None: one process. Held-out rows are dealt to the
            (data, z) coordinates, the questions of the harness are asked by each of them.
    Raises:
        ValueError: a checkpoint is not there. All others are measured before, and the file has them.
    Collectives: over the world, and those of the model in each pass.
    """
    start_distributed()
    work_split = WorkSplit.for_model(None)
    model = recipe.model(model_name)
    inputs = _inputs(recipe, output, model)
    checkpoints = _checkpoints(recipe, output, model)
    parts: dict[str, dict[str, Any]] = {}
    there = work_split.on_rank_zero(
        lambda: {name for name, path in checkpoints.items() if not _made_here(path, output) or _is_model(Path(path))}
    )
    for number, name in enumerate(checkpoints, start=1):
        if name not in there:
            continue
        file = output / "utility" / "parts" / model.name / f"{name}.json"
        part = parts[name] = _part(file, checkpoints[name], inputs, grid, work_split)
        about = f"{name}, held-out loss {_ratio(part['held_out'])['mean']:.4f} ({number} of {len(checkpoints)})"
        if work_split.rank == 0:
            print(f"utility of {model_name}: {about}", flush=True)
    entries = {name: _entry(part, inputs.left_out) for name, part in parts.items()}
    for name, other in _pairs(recipe, model):
        if name in parts and other in parts:
            where = "minus_base" if other == BASE else "minus_ordinary"
            entries[name][where] = _differences(parts[name], parts[other])
    for name in parts:
        if _made_here(checkpoints[name], output):
            entries[name]["checkpoint"] = str(Path(checkpoints[name]).relative_to(output))
    work_split.on_rank_zero(lambda: write_json(output / "utility" / f"{model_name}.json", entries))
    missing = [
        f"{Path(path).relative_to(output)} (step {_step(model, name)})"
        for name, path in checkpoints.items()
        if name not in there
    ]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(checkpoints)} checkpoints of {model_name} are not there: {', '.join(missing)}. "
            f"Do these steps, then this one again; utility/{model_name}.json has the others."
        )


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    """Inputs of every model; `left_out` says why there is no harness, `digest` is of all that decides answers."""

    held_out: HeldOut
    harness: Harness | None
    left_out: str | None
    digest: str

    @property
    def window(self) -> int:
        """Tokens that a model reads at once, as many as in held-out rows."""
        return self.held_out.longest - 1


def _inputs(recipe: Recipe, output: Path, model: Model) -> _Inputs:
    rows = output / "data" / tokenizer_of(model) / "held_out.jsonl"
    where = output / "tokenizer" if tokenizer_of(model) == STUDY else base_of(model, output)
    held_out = read_held_out(rows, output / "texts" / "held_out.jsonl", load_tokenizer(where))
    digest = hashlib.sha256(rows.read_bytes())
    harness, left_out, version = None, None, harness_version()
    if not recipe.evaluation.tasks:
        left_out = "the recipe does not ask for them (evaluation: tasks)"
    elif version is None:
        again = f"`pip install lm_eval`, remove utility/{model.name}.json and call the study again"
        left_out = f"lm_eval is not installed: {again}"
        print(f"utility of {model.name}: no tasks of lm-evaluation-harness, because {left_out}", flush=True)
    else:
        folder = output / "utility" / "tasks" / tokenizer_of(model)
        for file in write_tasks(held_out.texts, folder):
            digest.update(file.read_bytes())
        digest.update(version.encode())
        harness = Harness(folder)
    return _Inputs(held_out=held_out, harness=harness, left_out=left_out, digest=digest.hexdigest())


def _checkpoints(recipe: Recipe, output: Path, model: Model) -> dict[str, str]:
    found = {BASE: base_of(model, output)}
    for loss in recipe.base_losses_of(model):
        found[f"{BASE}-{loss}"] = str(output / BASE / f"{model.name}-{loss}")
    return found | {run.name: str(run_directory(run, output) / "checkpoint") for run in recipe.runs_of(model)}


def _made_here(path: str, output: Path) -> bool:
    return Path(path).is_relative_to(output)


def _is_model(path: Path) -> bool:
    return (path / "config.json").is_file()


def _step(model: Model, name: str) -> str:
    of_base = name == BASE or name.startswith(f"{BASE}-")
    return f"base-{model.name}{name.removeprefix(BASE)}" if of_base else f"train-{model.name}-{name}"


def _pairs(recipe: Recipe, model: Model) -> list[tuple[str, str]]:
    """Return the pairs that are compared."""
    runs, bases = recipe.runs_of(model), [f"{BASE}-{loss}" for loss in recipe.base_losses_of(model)]
    pairs = [(name, BASE) for name in [*bases, *(run.name for run in runs)]]
    for run in runs:
        twin = replace(run, loss=ORDINARY)
        if twin != run and twin in runs:
            pairs.append((run.name, twin.name))
    return pairs


def _part(file: Path, path: str, inputs: _Inputs, grid: Grid | None, work_split: WorkSplit) -> dict[str, Any]:
    """Return the numbers of one model on every document; read them where it was measured before."""
    model = fingerprint(Path(path), work_split) if Path(path).is_dir() else path
    identity = {"inputs": inputs.digest, "model": model}
    kept = work_split.on_rank_zero(lambda: read_json(file) if file.exists() else None)
    if kept is not None and kept["identity"] == identity:
        return kept
    loaded = load_model(path, grid=grid, dtype=WEIGHTS)
    batch = max(1, min(_MOST_AT_ONCE, _TOKENS_AT_ONCE // inputs.window))
    held_out = {
        name: document_nll(loaded.model, some, batch_size=batch) for name, some in inputs.held_out.rows.items()
    }
    part: dict[str, Any] = {
        "identity": identity,
        "harness": harness_version() if inputs.harness is not None else None,
        "fingerprint": loaded.record["fingerprint"],
        "held_out": {name: [found.nll, found.tokens] for name, found in held_out.items()},
    }
    if inputs.harness is not None:
        try:
            first_token(loaded.tokenizer)
        except ValueError as error:
            part["left_out"] = str(error)
        else:
            answers = inputs.harness.ask(loaded.model, loaded.tokenizer, length=inputs.window, batch_size=batch)
            part["tasks"] = _json_ready(answers)
    work_split.on_rank_zero(lambda: write_json(file, part))
    return work_split.on_rank_zero(lambda: read_json(file))


def _json_ready(answers: HarnessAnswers) -> dict[str, Any]:
    return {
        "rolling": {name: list(numbers) for name, numbers in answers.rolling.items()},
        "endings": [list(one) for one in answers.endings],
        "left_out": answers.left_out,
        "reported": {metric: number for task in answers.reported.values() for metric, number in task.items()},
    }


def _entry(part: Mapping[str, Any], left_out: str | None) -> dict[str, Any]:
    tokens = sum(count for _, count in part["held_out"].values())
    tasks = _tasks(part["tasks"]) if "tasks" in part else {"left_out": part.get("left_out", left_out)}
    if part["harness"] is not None:
        tasks["harness"] = part["harness"]
    return {
        "fingerprint": part["fingerprint"],
        "held_out_loss": {**_ratio(part["held_out"]), "tokens": tokens, "documents": len(part["held_out"])},
        "tasks": tasks,
    }


def _tasks(tasks: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers that the harness reports, with intervals."""
    reported = tasks["reported"]
    bits, words = (_ratio(_rolling(tasks, per)) for per in ("byte", "word"))
    found: dict[str, Any] = {
        "bits_per_byte": {**bits, "mean": reported["bits_per_byte"]},
        "byte_perplexity": {**_powers(bits, 2.0), "mean": reported["byte_perplexity"]},
        "word_perplexity": {**_powers(words, e), "mean": reported["word_perplexity"]},
    }
    for entry in found.values():
        entry["documents"] = len(tasks["rolling"])
    if tasks["left_out"] is not None:
        return {**found, "left_out": tasks["left_out"]}
    for metric, right in _endings(tasks).items():
        share = _ratio(right)
        if share["high"] is not None:
            share["high"] = min(share["high"], 1.0)
        found[metric] = {**share, "mean": reported[metric], "questions": len(tasks["endings"]), "chance": 1 / CHOICES}
    return found


def _rolling(tasks: Mapping[str, Any], per: str) -> dict[str, tuple[float, int]]:
    """Return bits and bytes of each document, or nats and words."""
    rolling = tasks["rolling"].items()
    if per == "byte":
        return {name: (-logprob / log(2), size) for name, (logprob, _, size) in rolling}
    return {name: (-logprob, words) for name, (logprob, words, _) in rolling}


def _endings(tasks: Mapping[str, Any]) -> dict[str, dict[str, list[int]]]:
    """Return by metric and document the number of right questions, and of all."""
    found: dict[str, dict[str, list[int]]] = {"acc": {}, "acc_norm": {}}
    for name, *right in tasks["endings"]:
        for metric, one in zip(found, right, strict=True):
            counts = found[metric].setdefault(name, [0, 0])
            counts[0] += one
            counts[1] += 1
    return found


def _differences(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    found = {"held_out_loss": _ratio_difference(after["held_out"], before["held_out"])}
    now, then = after.get("tasks"), before.get("tasks")
    if now is None or then is None:
        return found
    found["bits_per_byte"] = _ratio_difference(_rolling(now, "byte"), _rolling(then, "byte"))
    if now["left_out"] is None and then["left_out"] is None:
        right_then = _endings(then)
        found |= {metric: _ratio_difference(right, right_then[metric]) for metric, right in _endings(now).items()}
    return found


def _ratio(by_document: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Divide a sum over documents by another, such as nats by tokens, with an interval over documents."""
    sums, sizes = np.array(list(by_document.values()), dtype=np.float64).T
    found = _without_counts(estimate([(1.0, Cell(sums, sizes))]))
    return found if found["low"] is None else {**found, "low": max(found["low"], 0.0)}


def _ratio_difference(after: Mapping[str, Sequence[float]], before: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the difference of two such ratios, of the same documents with the same sizes."""
    pairs = [(after[name][0] - before[name][0], after[name][1]) for name in after]
    sums, sizes = np.array(pairs, dtype=np.float64).T
    found = _without_counts(estimate([(1.0, Cell(sums, sizes))]))
    return {"difference": found.pop("mean"), **found}


def _without_counts(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("mean", "low", "high", "interval")}


def _powers(of: Mapping[str, Any], base: float) -> dict[str, Any]:
    """Return the estimate of a perplexity from that of its logarithm."""
    return {name: base**value if isinstance(value, float) else value for name, value in of.items()}
