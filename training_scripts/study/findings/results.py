"""Results of the runs of a study: one table with a row for each passage that each model was asked.

A study that is not complete is read as far as it goes. What is missing is listed with the reason, and nothing is put
in its place.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from hf_axonn import GoldfishConfig
from hf_axonn.goldfish.mask import HASHES
from hf_axonn_eval import Sample, SampleResult, read_run, read_samples, token_masks
from hf_axonn_eval.analysis.goldfish_tokens import TokenMasks
from hf_axonn_eval.data.jsonl import json_lines
from hf_axonn_eval.data.results import MEASURED
from hf_axonn_eval.metrics.registry import METRICS, value
from hf_axonn_scripts.study.recipe.definition import ORDINARY, Model, Recipe, Run
from hf_axonn_scripts.study.recipe.planning import shape_of
from hf_axonn_scripts.study.recipe.steps import base_of, curve_directory, run_directory, tokenizer_of


@dataclass(frozen=True, kw_only=True)
class Missing:
    """Something that the report would show and that is not there.

    Attributes:
        step: name of the step that makes it.
        state: `failed`, `not finished` (it was begun, and is at work or was stopped) or `not done`.
        why: the message of the step that failed, or what was looked for.
    """

    step: str
    state: str
    why: str


@dataclass(frozen=True)
class Answers:
    """Answers of one model on the passages.

    Args:
        model: name of the model.
        run: its continuation; None: the model before any.
        results: one a passage, sorted by passage: `sample_id` is the passage, `document_id` the article, over which
            intervals are taken. They are of the first tokens of the suffix that was asked for, as many as the study's
            suffix has. Texts and generated tokens are left out.
        right: [passages] tokens that greedy decoding has right before its first miss, of all that were asked for.
        requested: tokens that were asked for.
    """

    model: str
    run: Run | None
    results: tuple[SampleResult, ...]
    right: np.ndarray
    requested: int

    @property
    def seed(self) -> int | None:
        """Seed of the continuation; None before any."""
        return self.run.seed if self.run else None

    @cached_property
    def place(self) -> dict[str, int]:
        """Place of each passage in `results`."""
        return {result.sample_id: place for place, result in enumerate(self.results)}

    @cached_property
    def buckets(self) -> np.ndarray:
        """[passages] number of times that each was trained on."""
        return np.array([result.bucket for result in self.results])

    @cached_property
    def articles(self) -> np.ndarray:
        """[passages] the article of each."""
        return np.array([result.document_id for result in self.results], dtype=object)

    def column(self, name: str) -> np.ndarray:
        """Return a metric, or `logprob` and other fields of a result, [passages]; NaN where a passage has none."""
        numbers = self._columns.get(name)
        if numbers is None:
            found = [value(one, name) if name in METRICS else getattr(one, name) for one in self.results]
            numbers = np.array([nan if one is None else float(one) for one in found])
            self._columns[name] = numbers
        return numbers

    @cached_property
    def _columns(self) -> dict[str, np.ndarray]:
        return {}


@dataclass(frozen=True)
class Study:
    """The results that are there of a study.

    Attributes:
        recipe, output: the study and its directory.
        bases: by model its answers before its continuations.
        runs: by continuation the model's answers after it; in the order of the recipe.
        parameters: by model with a result the number of its parameters, tied ones once.
        missing: outputs that are not there.
    """

    recipe: Recipe
    output: Path
    bases: Mapping[str, Answers]
    runs: Mapping[Run, Answers]
    parameters: Mapping[str, int]
    missing: Sequence[Missing] = field(default=())

    @property
    def models(self) -> list[Model]:
        """Models with a run, the smallest first, and those that are plotted apart last."""
        has = {run.model for run in self.runs}
        found = [model for model in self.recipe.models if model.name in has]
        return sorted(found, key=lambda model: (model.apart, self.parameters[model.name]))

    @property
    def losses(self) -> list[str]:
        """Losses with a result, in the order of the recipe, the ordinary one first."""
        has = {run.loss for run in self.runs}
        return sorted((loss for loss in self.recipe.losses if loss in has), key=lambda loss: loss != ORDINARY)

    def runs_with(self, model: str, loss: str) -> list[Answers]:
        """Return the continuations of a model with a loss on the model's own grid, by seed."""
        found = [answers for run, answers in self.runs.items() if (run.model, run.loss, run.grid) == (model, loss, ())]
        return sorted(found, key=lambda answers: answers.seed or 0)

    def learnt(self, answers: Answers) -> np.ndarray:
        """Return the log-probability of the suffix after the continuation minus that before it, [passages], in nats.

        NaN for passages that the base model was not asked.
        """
        base = self.bases.get(answers.model)
        if base is None:
            return np.full(len(answers.results), nan)
        before = base.column("logprob")
        of_base = [
            before[base.place[one.sample_id]] if one.sample_id in base.place else nan for one in answers.results
        ]
        return np.asarray(answers.column("logprob") - np.array(of_base))

    def gains(self, answers: Answers) -> np.ndarray:
        """Return `learnt` minus its mean over the run's own passages of bucket 0, [passages], in nats.

        This is the primary outcome. The gain on passages that a model has not seen comes of training on the others,
        on their style and subjects; a gain beyond that comes of having been seen.
        """
        learnt = self.learnt(answers)
        unseen = learnt[(answers.buckets == 0) & ~np.isnan(learnt)]
        return np.asarray(learnt - (unseen.mean() if len(unseen) else nan))

    def masks(self, model: str, loss: str) -> TokenMasks | None:
        """Return the suffix tokens of the passages that the loss left out; None where the passages do not tell.

        Raises:
            ValueError: there is no samples file of the model's tokenizer.
        """
        options = goldfish_options(self.recipe, loss)
        if options.get("strategy") not in HASHES:
            return None
        key = (tokenizer_of(self.recipe.model(model)), loss)
        if key not in self._masks:
            table = self.recipe.losses[loss].get("goldfish_table")
            self._masks[key] = token_masks(self._samples(model), table=table, **options)
        return self._masks[key]

    @cached_property
    def _masks(self) -> dict[tuple[str, str], TokenMasks]:
        return {}

    def on_the_way(self, run: Run, step: int) -> Answers:
        """Return the answers of a model at a step of a run, which it was asked with an evaluation (`curve_points`).

        Raises:
            ValueError: it was not asked there.
        """
        if (run, step) not in self._on_the_way:
            directory = curve_directory(run, self.output) / f"step-{step}"
            self._on_the_way[run, step] = self._reader.read(self.recipe.model(run.model), run, directory)
        return self._on_the_way[run, step]

    @cached_property
    def _on_the_way(self) -> dict[tuple[Run, int], Answers]:
        return {}

    @cached_property
    def _reader(self) -> "_Reader":
        return _Reader(self.recipe, self.output)

    def _samples(self, model: str) -> list[Sample]:
        return list(self._reader.samples(self.recipe.model(model)).values())


def goldfish_options(recipe: Recipe, loss: str) -> dict[str, Any]:
    """Return `strategy`, `k` and `context_width` of a loss; nothing where it leaves out no token."""
    settings = {field.name: field.default for field in fields(GoldfishConfig)} | recipe.losses[loss]
    if not settings["goldfish"] or settings["loss_strategy"] != "goldfish":
        return {}
    return {name: settings[f"goldfish_{name}"] for name in ("strategy", "k", "context_width")}


def read_study(recipe: Recipe, output: Path) -> Study:
    """Read the results that are there of a study."""
    missing: list[Missing] = []
    reader = _Reader(recipe, output)
    bases: dict[str, Answers] = {}
    runs: dict[Run, Answers] = {}
    for model in recipe.models:
        folder = output / "runs" / model.name / "base" / "extraction"
        found = _try(missing, output, f"ask-{model.name}", partial(reader.read, model, None, folder))
        if found is not None:
            bases[model.name] = found
    for run in recipe.runs:
        step = f"train-{run.model}-{run.name}"
        folder = run_directory(run, output) / "extraction"
        found = _try(missing, output, step, partial(reader.read, recipe.model(run.model), run, folder))
        if found is not None:
            runs[run] = found
    files = [("pilot", output / "pilot" / "chosen.json")] if recipe.pilot else []
    files += [(f"utility-{model.name}", output / "utility" / f"{model.name}.json") for model in recipe.models]
    for step, file in files:
        _try(missing, output, step, partial(read_json, file))
    parameters = {
        model.name: count_parameters(recipe, output, model)
        for model in recipe.models
        if model.name in {run.model for run in runs} | set(bases)
    }
    return Study(recipe, output, bases, runs, parameters, tuple(missing))


def read_json(file: Path) -> Any:
    """Return the contents of a JSON file.

    Raises:
        ValueError: there is none, or it is not JSON.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file.name} is not there") from error
    except ValueError as error:
        raise ValueError(f"{file.name} is damaged ({error})") from error


def training_log(checkpoint: Path) -> dict[str, Any]:
    """Return the log of a training in its trainer_state.json.

    Returns:
        `losses` and `held_out`, by step the logged training loss and the held-out loss, in nats a token; the first
        evaluation is that before the training.
    Raises:
        ValueError: there is no such file, or it has another form.
    """
    history = read_json(checkpoint / "trainer_state.json")["log_history"]
    losses = {entry["step"]: float(entry["loss"]) for entry in history if "loss" in entry}
    held_out = {entry["step"]: float(entry["eval_loss"]) for entry in history if "eval_loss" in entry}
    return {"losses": losses, "held_out": held_out}


ROWS = (
    *("model", "parameters", "loss", "seed", "grid", "passage", "article", "bucket", "suffix_tokens", "logprob"),
    *("logprob_base", "gain", "verbatim", "right_tokens", "near_verbatim", "rougeL", "extraction_strength"),
    *("dropped", "dropped_hits", "supervised", "supervised_hits"),
)


def rows(study: Study) -> Iterator[tuple[Any, ...]]:
    """Yield the table of the study, a row for each passage of each run, with the columns of ROWS; None: not measured.

    Log-probabilities and the gain are in nats, for all tokens of the suffix. `right_tokens` is the number of tokens
    that greedy decoding has right before its first miss, of all that were asked for. `dropped` and `supervised` count
    the tokens of the suffix that the run's own loss left out and did not, and `_hits` those of them that are the
    model's first choice given the true ones before them.
    """
    for run, answers in study.runs.items():
        masks = study.masks(run.model, run.loss)
        gains, learnt = study.gains(answers), study.learnt(answers)
        grid = " ".join(f"{axis}={size}" for axis, size in run.grid)
        about = (run.model, study.parameters[run.model], run.loss, run.seed, grid)
        columns = [answers.column("exact_match"), answers.right.astype(np.float64)]
        columns += [answers.column(name) for name in ("near_verbatim", "rougeL", "extraction_strength")]
        for place, result in enumerate(answers.results):
            logprob = result.logprob
            base = None if logprob is None or np.isnan(learnt[place]) else logprob - float(learnt[place])
            numbers = [_number(column[place]) for column in columns]
            counts = [None] * 4 if masks is None or result.hits is None else _counts(masks, result)
            yield (
                *(*about, result.sample_id, result.document_id, result.bucket, result.suffix_length, logprob, base),
                *(_number(gains[place]), *numbers, *counts),
            )


def table_csv(study: Study) -> str:
    """Return `rows` as CSV, with headings."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(ROWS)
    for row in rows(study):
        writer.writerow(["" if one is None else f"{one:.9g}" if isinstance(one, float) else one for one in row])
    return text.getvalue()


def _counts(masks: TokenMasks, result: SampleResult) -> list[int]:
    hits, dropped = np.array(result.hits), masks.select(result)
    return [int(count) for kind in (1, 0) for count in ((dropped == kind).sum(), hits[dropped == kind].sum())]


def _number(number: float) -> float | None:
    return None if np.isnan(number) else float(number)


def _try(missing: list[Missing], output: Path, step: str, read: Callable[[], Any]) -> Any:
    """Return what `read` gives; None, and an entry in `missing`, where it raises ValueError."""
    try:
        return read()
    except (ValueError, KeyError) as error:
        stamps = output / ".stamps"
        failure = stamps / f"{step}.failed"
        state = "not done"
        if failure.exists() or (stamps / f"{step}.begun").exists():
            state = "failed" if failure.exists() else "not finished"
        why = failure.read_text(encoding="utf-8").strip() if failure.exists() else str(error)
        missing.append(Missing(step=step, state=state, why=why.replace(f"{output}/", "")))
        return None


class _Reader:
    """Reader of the answers of models; it reads passages and samples of a tokenizer once."""

    def __init__(self, recipe: Recipe, output: Path) -> None:
        self.recipe, self.output = recipe, output
        self._articles: dict[str, dict[str, str]] = {}
        self._samples: dict[str, dict[str, Sample]] = {}

    def read(self, model: Model, run: Run | None, directory: Path) -> Answers:
        """Return the answers of a model in a run of `extract`: after a continuation or on its way, or before any.

        Raises:
            ValueError: it was not asked, or not for all samples, or for several of one passage.
        """
        _, results = read_run(directory)
        suffix = self._suffix()
        kept, right = {}, {}
        for result in results:
            passage = self._passage(model, result)
            article = self.articles(model)[passage]
            right[passage] = result.divergence_point
            if suffix is not None and suffix < result.suffix_length:
                result = cut(result, self.samples(model)[passage], suffix)
            # the samples have the buckets of a seed, and the model before any run has seen none of them
            bucket = result.bucket if run else 0
            kept[passage] = replace(_bare(result), sample_id=passage, document_id=article, bucket=bucket)
        if len(kept) != len(results):
            raise ValueError(f"{directory} has several samples of one passage")
        order = sorted(kept)
        longest = max(result.suffix_length for result in results)
        found = np.array([right[passage] for passage in order])
        return Answers(model.name, run, tuple(kept[passage] for passage in order), found, longest)

    def samples(self, model: Model) -> dict[str, Sample]:
        """Return the sample of each passage, with the passage as its id; those of all seeds have the same tokens."""
        folder = tokenizer_of(model)
        if folder not in self._samples:
            files = [self.output / "data" / folder / f"samples-s{seed}.jsonl" for seed in self.recipe.seeds]
            file = next((file for file in files if file.exists()), files[0])
            named = ((self._passage(model, one), one) for one in read_samples(file))
            self._samples[folder] = {passage: replace(one, sample_id=passage) for passage, one in named}
        return self._samples[folder]

    def articles(self, model: Model) -> dict[str, str]:
        """Return the article of each passage."""
        folder = tokenizer_of(model)
        if folder not in self._articles:
            self._articles[folder] = _articles(self.output / "data" / folder / "passages.jsonl")
        return self._articles[folder]

    def _passage(self, model: Model, one: Sample | SampleResult) -> str:
        """Return the passage of a sample or a result: its id, or the document that the sample was cut from."""
        found = next((name for name in (one.sample_id, one.document_id) if name in self.articles(model)), None)
        if found is None:
            raise ValueError(f"the sample {one.sample_id!r} is of none of the passages of {model.name}")
        return found

    def _suffix(self) -> int | None:
        """Return the tokens of the study's suffix; None: all that were asked for."""
        if self.recipe.documents.suffix is None and self.recipe.pilot is not None:
            return int(read_json(self.output / "pilot" / "chosen.json")["suffix"])
        return self.recipe.documents.suffix


def cut(result: SampleResult, sample: Sample, length: int) -> SampleResult:
    """Return the result for the first tokens of a suffix.

    A greedy continuation does not depend on its length, so this is the result of a sample with the shorter suffix.
    Numbers that need the texts or the logits of the shorter suffix are None: ROUGE, and the log-probability under a
    sampler that leaves out tokens. Membership scores are of the full sample.

    Args:
        result: with hits, log-probabilities, ranks and the continuation.
        sample: that was asked.
        length: tokens that stay, fewer than there are.
    """
    begin = {name: getattr(result, name) for name in ("hits", "logprobs", "ranks", "generated")}
    begin = {name: None if values is None else values[:length] for name, values in begin.items()}
    measured = {field.name: getattr(result, field.name) for field in fields(result) if field.name in MEASURED}
    measured |= begin
    measured |= {"suffix_length": length, "divergence_point": min(result.divergence_point, length)}
    measured["logprob"] = None if begin["logprobs"] is None else float(sum(begin["logprobs"]))
    lost = ("generated_text", "suffix_text", "margin", "near_tie", "sampled_logprob", "near_copies")
    measured |= dict.fromkeys((*lost, "near_copies_read"))
    inputs = {**measured, "prefix": sample.prefix, "suffix": sample.suffix[:length]}
    return SampleResult.from_measured(measured, {name: metric(inputs) for name, metric in METRICS.items()})


def _bare(result: SampleResult) -> SampleResult:
    """Return a result without texts and generated tokens, with the metrics that come of them."""
    metrics = {**(result.metrics or {}), **{name: value(result, name) for name in METRICS}}
    measured = {name: number for name, number in vars(result).items() if name != "metrics"}
    measured |= {"generated": None, "generated_text": None, "suffix_text": None}
    return SampleResult.from_measured(measured, metrics)


def _articles(file: Path) -> dict[str, str]:
    found = {}
    for line in json_lines(file):
        entry = line.value
        if not isinstance(entry, dict) or not {"id", "article"} <= entry.keys():
            raise ValueError(f"{file}, line {line.number} is no passage: it has no id or no article")
        found[entry["id"]] = entry["article"]
    return found


def count_parameters(recipe: Recipe, output: Path, model: Model) -> int:
    """Count the parameters of a model, from its sizes; tied ones once."""
    return shape_of(recipe, model, base_of(model, output)).parameters()
