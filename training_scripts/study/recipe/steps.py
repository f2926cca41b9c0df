"""The steps of a study, in an order in which each can be done, and a key of all that decides its outputs.

A key is made of the part of the recipe that a step depends on and of the keys of the steps before, not of code: a
study on a cluster must not train again because a comment changed. Nor does it depend on processes and grid, which may
change between two calls. A new run of a seed that is there leaves all other training as it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from pathlib import Path
from typing import Any

from hf_axonn_scripts.demo.pipeline import digest
from hf_axonn_scripts.study.recipe.definition import MACHINE, ORDINARY, Model, Recipe, Run


STUDY = "study"  # the tokenizer of models that are trained from nothing
PACKAGE = "package:"  # begins the checkpoint of a model that a package brings
Outputs = Mapping[Path, Mapping[str, Any]]  # files and directories, each with the settings that decide it


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a study.

    Attributes:
        name: the name in logs and stamps.
        kind: `data`, `base`, `pilot`, `ask`, `train`, `utility` or `report`.
        model: name of the model that it is about.
        run: the continuation, of a step of kind `train`.
        loss: of a training.
        launched: whether every rank of a launch does it; else one process.
        processes: ranks of the launch.
        grid: sizes of its axes; None: the planner chooses.
        after: names of the steps whose outputs this one reads.
        partial: whether it is done with what is there when steps before it failed.
        outputs: files and directories that it makes -> key of what decides each.
        settings: what decides all outputs, beside the steps before.
        key: digest of the settings and of the keys of the steps before.
    """

    name: str
    kind: str
    model: str | None = None
    run: Run | None = None
    loss: str | None = None
    launched: bool = False
    processes: int = 1
    grid: Mapping[str, int] | None = None
    after: tuple[str, ...] = ()
    partial: bool = False
    outputs: Mapping[Path, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    key: str


def tokenizer_of(model: Model) -> str:
    """Return the folder of a model's data under `data/`; models trained from nothing share the study's tokenizer."""
    return STUDY if model.config is not None else model.name


def base_of(model: Model, output: Path) -> str:
    """Return the place of a model before its continuations: a directory under `output`, or one elsewhere, or a name
    on the hub."""
    if model.config is not None or str(model.checkpoint).startswith(PACKAGE):
        return str(output / "base" / model.name)
    return str(model.checkpoint)


def curve_directory(run: Run, output: Path) -> Path:
    """Return the directory of what a continuation was asked on its way, a run of `extract` in `step-<step>`."""
    return run_directory(run, output) / "curve"


def run_directory(run: Run, output: Path) -> Path:
    """Return the directory of a continuation."""
    return output / "runs" / run.model / run.name


def steps_of(recipe: Recipe, output: Path) -> list[Step]:
    """Return every step of the study, each behind those that it reads from.

    The pilot and the base that it needs come early, because every continuation waits for them; then each model from
    its base to its utility, so that a study that is cut short has whole models.

    Raises:
        ValueError: two steps would have the same name.
    """
    return list(_Steps(recipe, output.resolve()).all().values())


class _Steps:
    """Makes steps one after the other; each needs those before it for its key."""

    def __init__(self, recipe: Recipe, output: Path) -> None:
        self.recipe = recipe
        self.output = output
        self.steps: dict[str, Step] = {}

    def all(self) -> dict[str, Step]:
        recipe = self.recipe
        self._texts()
        if any(model.config is not None for model in recipe.models):
            self._tokenizer()
            self._data(STUDY)
        first = [recipe.model(recipe.pilot.model)] if recipe.pilot else []
        for model in first:
            self._base_and_data(model)
            self._pilot(model)
        for model in recipe.models:
            if model not in first:
                self._base_and_data(model)
            for loss in recipe.base_losses_of(model):
                self._base(model, loss)
            self._ask(model)
            for run in recipe.runs_of(model):
                self._train(model, run)
            self._utility(model)
        self._report()
        return self.steps

    def _add(
        self,
        name: str,
        kind: str,
        outputs: Outputs,
        *,
        keys_of: Sequence[str] = (),
        after: Sequence[str] = (),
        **about: Any,
    ) -> None:
        """Add a step.

        Args:
            name, kind: of the step.
            outputs: each with the settings that decide it.
            keys_of: steps before this one whose keys decide the outputs.
            after: steps that come before, but of whose settings only those matter that are in `outputs`.
            about: other fields.
        """
        if name in self.steps:
            raise ValueError(
                f"{self.recipe.path}: two steps would be called {name}, and have the same files: give a model or a "
                "loss another name"
            )
        # A recipe may leave out what a step would come after: a model on a hub has no base training.
        before = [self.steps[other].key for other in keys_of if other in self.steps]
        keyed = {path: digest([settings, before]) for path, settings in outputs.items()}
        self.steps[name] = Step(
            name=name,
            kind=kind,
            outputs=keyed,
            after=tuple(other for other in (*keys_of, *after) if other in self.steps),
            settings={part: value for settings in outputs.values() for part, value in settings.items()},
            key=digest(sorted(keyed.values())) if len(keyed) > 1 else next(iter(keyed.values())),
            **about,
        )

    def _launch(self, model: Model, run: Run | None = None) -> dict[str, Any]:
        """Return the fields of a step that is done on a grid of processes."""
        grid = dict(run.grid) if run is not None and run.grid else model.grid
        processes = model.processes if grid is None else prod(grid.values())
        return {"model": model.name, "run": run, "launched": True, "processes": processes, "grid": grid}

    def _texts(self) -> None:
        documents = self.recipe.documents
        settings = {
            "texts": _settings_of(self.recipe.texts),
            "documents": [len(documents.buckets), documents.length, documents.per_article],
            "per_bucket": self._most_per_bucket(self.recipe.models),
            "vocabulary": self.recipe.vocabulary,
        }
        self._add("texts", "data", {self.output / "texts": settings})

    def _tokenizer(self) -> None:
        settings = {"vocabulary": self.recipe.vocabulary}
        self._add("tokenizer", "data", {self.output / "tokenizer": settings}, keys_of=["texts"])

    def _data(self, tokenizer: str) -> None:
        recipe = self.recipe
        models = [model for model in recipe.models if tokenizer_of(model) == tokenizer]
        settings = {
            "documents": _settings_of(recipe.documents),
            "suffixes": list(recipe.pilot.suffixes) if recipe.pilot else [],
            **({"pilot": "every bucket"} if recipe.pilot else {}),
            "per_bucket": self._most_per_bucket(models),
            "seeds": [*recipe.seeds, *([recipe.pilot_seed] if recipe.pilot and recipe.seeds else [])],
            "batch_sequences": recipe.batch_sequences,
            "base_length": recipe.base_length,
            "warm_up_sequences": recipe.warm_up_sequences,
            "canaries": recipe.evaluation.canaries,
        }
        before = ["texts", "tokenizer", *([] if tokenizer == STUDY else [f"base-{tokenizer}"])]
        model = None if tokenizer == STUDY else tokenizer
        outputs = {self.output / "data" / tokenizer: settings}
        self._add(f"data-{tokenizer}", "data", outputs, keys_of=before, model=model)

    def _base_and_data(self, model: Model) -> None:
        if model.config is not None:
            self._base(model, ORDINARY)
            return
        if str(model.checkpoint).startswith(PACKAGE):
            outputs = {self.output / "base" / model.name: {"checkpoint": model.checkpoint}}
            self._add(f"base-{model.name}", "base", outputs, model=model.name)
        self._data(model.name)

    def _base(self, model: Model, loss: str) -> None:
        recipe = self.recipe
        name = model.name if loss == ORDINARY else f"{model.name}-{loss}"
        settings = {
            "config": model.config,
            "training": recipe.base_training,
            "loss": recipe.losses[loss],
            "batch_sequences": recipe.base_batch_sequences,
            "length": recipe.base_length,
        }
        self._add(
            f"base-{name}",
            "base",
            {self.output / "base" / name: settings},
            keys_of=["texts", "tokenizer"],
            after=[f"data-{STUDY}"],
            loss=loss,
            **self._launch(model),
        )

    def _continuation(self, model: Model) -> dict[str, Any]:
        """Return the settings that every continuation of a model depends on, whatever its loss and seed."""
        recipe = self.recipe
        return {
            "checkpoint": model.checkpoint,
            "training": recipe.training,
            **({"learning_rate": model.learning_rate} if model.learning_rate is not None else {}),
            "documents": _settings_of(recipe.documents),
            "per_bucket": self._most_per_bucket([model]),
            "batch_sequences": recipe.batch_sequences,
            "warm_up_sequences": recipe.warm_up_sequences,
            "canaries": recipe.evaluation.canaries,
        }

    def _asking(self) -> dict[str, Any]:
        evaluation = self.recipe.evaluation
        return {name: getattr(evaluation, name) for name in ("protocol", "near_copies", "sampler")}

    def _add_launched(
        self, name: str, kind: str, model: Model, outputs: Outputs, *pilot: str, run: Run | None = None
    ) -> None:
        """Add a step on ranks that reads the model's base and data, and, where it is named, the pilot's choice."""
        before = [f"base-{model.name}", "texts", "tokenizer", *pilot]
        about = {"loss": run.loss if run else None, **self._launch(model, run)}
        self._add(name, kind, outputs, keys_of=before, after=[f"data-{tokenizer_of(model)}"], **about)

    def _pilot(self, model: Model) -> None:
        settings = {**self._continuation(model), "pilot": _settings_of(self.recipe.pilot)}
        settings |= {"seed": self.recipe.pilot_seed, "trained on": "every bucket"}
        self._add_launched("pilot", "pilot", model, {self.output / "pilot": settings})

    def _ask(self, model: Model) -> None:
        documents = _settings_of(self.recipe.documents)
        settings = {"checkpoint": model.checkpoint, "documents": documents, "seed": self.recipe.seeds[0]}
        settings |= {"per_bucket": self._most_per_bucket([model]), **self._asking()}
        outputs = {self.output / "runs" / model.name / "base": settings}
        self._add_launched(f"ask-{model.name}", "ask", model, outputs, "pilot")

    def _train(self, model: Model, run: Run) -> None:
        directory = run_directory(run, self.output)
        training = {**self._continuation(model), "loss": self.recipe.losses[run.loss], "seed": run.seed}
        training |= {"grid": list(run.grid)}
        outputs: dict[Path, Mapping[str, Any]] = {}
        if self.recipe.evaluation.curve_points:
            training |= {"curve_points": self.recipe.evaluation.curve_points}
            outputs[curve_directory(run, self.output)] = training
        outputs |= {directory / "checkpoint": training, directory / "extraction": {**training, **self._asking()}}
        if self.recipe.evaluation.canaries:
            outputs[directory / "canaries.json"] = training
        self._add_launched(f"train-{model.name}-{run.name}", "train", model, outputs, "pilot", run=run)

    def _utility(self, model: Model) -> None:
        about = [f"base-{model.name}-{loss}" for loss in self.recipe.base_losses_of(model)]
        about += [f"train-{model.name}-{run.name}" for run in self.recipe.runs_of(model)]
        settings = {"tasks": self.recipe.evaluation.tasks, "canaries": self.recipe.evaluation.canaries}
        self._add(
            f"utility-{model.name}",
            "utility",
            {self.output / "utility" / f"{model.name}.json": settings},
            keys_of=[f"base-{model.name}", f"ask-{model.name}", *about],
            after=[f"data-{tokenizer_of(model)}"],
            partial=True,
            # A model of a cluster may not fit into one GPU. On a CPU it does, and ranks would repeat the questions.
            **({"model": model.name} if self.recipe.machine == MACHINE else self._launch(model)),
        )

    def _report(self) -> None:
        settings = {"name": self.recipe.name, "deviations": list(self.recipe.deviations)}
        self._add(
            "report",
            "report",
            {self.output / "report": settings},
            keys_of=[name for name, step in self.steps.items() if step.kind != "data"],
            partial=True,
        )

    def _most_per_bucket(self, models: Sequence[Model]) -> int:
        return max(map(self.recipe.per_bucket, models))


def _settings_of(part: Any) -> dict[str, Any]:
    """Return the fields of a part of a recipe that are not at their defaults: a new field changes no older study."""
    return {each.name: value for each in fields(part) if (value := getattr(part, each.name)) != each.default}
