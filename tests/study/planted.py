"""The outputs of a study that was never trained, with effects of known size, in the files of a real one.

Models, seeds, buckets and passages are as in a real study; what a model says of a passage is drawn. The suffix has a
log-probability before, all passages gain `DRIFT` by the continuation, and a passage seen b times gains
`gain(parameters, b)` more, of which a loss keeps a share. Tokens come back the more often the likelier the suffix is,
the dropped ones of a goldfish loss never.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import exp, floor, log10
from pathlib import Path
from typing import Any

import numpy as np

from hf_axonn_eval import Sample, SampleResult, token_masks, write_samples
from hf_axonn_eval.data.jsonl import write_json
from hf_axonn_eval.data.results import RunDirectory
from hf_axonn_eval.metrics.registry import METRICS
from hf_axonn_scripts.study.findings import results
from hf_axonn_scripts.study.recipe.definition import Documents, Evaluation, Model, Pilot, Recipe, Run, Texts
from hf_axonn_scripts.study.recipe.steps import curve_directory


BUCKETS = (0, 1, 4, 16)
PREFIX, SUFFIX = 16, 16
DRIFT = 3.0  # nats of the suffix
STEPS, START = 3, 5.0  # of each continuation; its held-out loss before
VOCABULARY = 512
SHAPES = {"XS": 16, "XS again": 16, "S": 32, "M": 64, "L": 128, "XL": 256}
SETTINGS: dict[str, dict[str, Any]] = {
    "ordinary": {"goldfish": False},
    "k2": {"goldfish_k": 2},
    "k3": {"goldfish_k": 3},
    "k4": {"goldfish_k": 4},
    "k8": {"goldfish_k": 8},
    "random": {"goldfish_k": 4, "goldfish_strategy": "random"},
}


def planted_gain(parameters: int, bucket: int) -> float:
    """Nats of the suffix: 1.5 more for each factor of ten of the parameters, and more the more often it was seen."""
    return bucket**0.5 * (4.0 + 1.5 * (log10(parameters) - 4)) if bucket else 0.0


@dataclass
class Plan:
    """What is planted.

    Attributes:
        models: Names among SHAPES; `apart` is one more that is plotted apart.
        losses: Of SETTINGS.
        seeds: Of each loss.
        articles: How many; each has a passage for each bucket.
        kept: By loss the share of the gain that it keeps.
        pages: Whether each passage is an article of its own, which is in one bucket.
        noise: Standard deviation of what a passage gains, in nats.
        gain: By parameters and bucket.
        left_out: Names of steps whose outputs are not written.
        dropped: Whether tokens that a loss left out are never hit.
        calm: Nats by which all suffixes are less likely.
        chosen: Tokens of the suffix that a pilot chose, if there was one.
        grid: Whether the first model has a run on another grid.
        rises: By loss what each step adds to the held-out loss; runs are then asked after each step, and passages gain
            evenly over the steps. Empty: they are asked at their end alone.
    """

    models: Sequence[str] = ("XS", "S", "M", "L", "XL")
    apart: bool = False
    losses: Sequence[str] = ("ordinary", "k2", "k4")
    seeds: Sequence[int] = (0, 1, 2)
    articles: int = 12
    kept: dict[str, float] = field(default_factory=lambda: {"k2": 0.25, "k4": 0.5, "random": 0.9})
    pages: bool = False
    noise: float = 1.0
    gain: Callable[[int, int], float] = planted_gain
    left_out: Sequence[str] = ()
    grid: bool = False
    dropped: bool = True
    calm: float = 0.0
    chosen: int | None = None
    rises: dict[str, float] = field(default_factory=dict)


def recipe_of(plan: Plan) -> Any:
    """The recipe of such a study."""
    models = [Model(name=name, config=_config(SHAPES[name]), processes=2) for name in plan.models]
    if plan.apart:
        models.append(Model(name="Known", config=_config(384), apart=True, processes=2))
    runs = [
        Run(model=model.name, loss=loss, seed=seed) for model in models for loss in plan.losses for seed in plan.seeds
    ]
    if plan.grid:
        runs.append(replace(runs[0], grid=(("x", 2), ("z", 2))))
    return Recipe(
        name="planted",
        path=Path("planted.yaml"),
        machine="cpu",
        texts=Texts(),
        documents=Documents(
            buckets=BUCKETS,
            per_bucket=plan.articles,
            length=PREFIX + SUFFIX,
            suffix=None if plan.chosen else SUFFIX,
        ),
        vocabulary=VOCABULARY,
        models=tuple(models),
        batch_sequences=8,
        base_batch_sequences=8,
        base_length=32,
        losses={loss: SETTINGS[loss] for loss in plan.losses},
        runs=tuple(runs),
        pilot=Pilot(model=plan.models[0], learning_rates=(1e-3,), suffixes=(8, SUFFIX)) if plan.chosen else None,
        evaluation=Evaluation(curve_points=STEPS if plan.rises else 0),
        deviations=("It was never trained.",),
    )


def plant(plan: Plan, output: Path) -> Any:
    """Write the outputs of the study, and give its recipe."""
    recipe = recipe_of(plan)
    draw = np.random.default_rng(0)
    passages = [f"Article {article}#{place}" for article in range(plan.articles) for place in range(len(BUCKETS))]
    if plan.pages:
        passages = [f"Page {number}#0" for number in range(len(passages))]
    tokens = draw.integers(1, VOCABULARY, size=(len(passages), PREFIX + SUFFIX))
    folder = output / "data" / "study"
    folder.mkdir(parents=True)
    lines = [
        {"id": name, "article": name.partition("#")[0], "passage": int(name[-1]), "input_ids": row.tolist()}
        for name, row in zip(passages, tokens, strict=True)
    ]
    (folder / "passages.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    by_seed = {seed: _samples(passages, tokens, seed) for seed in plan.seeds}
    digests = {seed: write_samples(some, folder / f"samples-s{seed}.jsonl") for seed, some in by_seed.items()}
    if plan.chosen:
        tried = [
            {"learning_rate": 1e-3, "suffix": suffix, "largest": 0.75, "none": 0.0, "held_out_loss": 5.0}
            for suffix in (8, SUFFIX)
        ]
        chosen = {"learning_rate": 1e-3, "suffix": plan.chosen, "tried": tried}
        write_json(output / "pilot" / "chosen.json", chosen)
    masks = {loss: _masks(by_seed[plan.seeds[0]], SETTINGS[loss]) for loss in plan.losses}
    known = draw.normal(-60.0 - plan.calm, 4.0, size=len(passages))  # of each text, whoever is asked
    sizes = {model.name: results.count_parameters(recipe, output, model) for model in recipe.models}
    for model in recipe.models:
        before = known + 2 * log10(sizes[model.name]) + draw.normal(0, 1, size=len(passages))
        if f"ask-{model.name}" not in plan.left_out:
            base = [
                _result(one, logprob, None, draw) for one, logprob in zip(by_seed[plan.seeds[0]], before, strict=True)
            ]
            _write(output / "runs" / model.name / "base" / "extraction", base, digests[plan.seeds[0]])
        for run in (run for run in recipe.runs if run.model == model.name):
            step = f"train-{run.model}-{run.name}"
            if step in plan.left_out:
                continue
            rows, kept = by_seed[run.seed], plan.kept.get(run.loss, 1.0)
            gains = np.array([plan.gain(sizes[model.name], one.bucket) * kept for one in rows])
            after = before + DRIFT + gains + plan.noise * draw.normal(size=len(rows))
            dropped = masks[run.loss] if plan.dropped else None

            def ask(logprobs: np.ndarray, rows=rows, dropped=dropped) -> list[SampleResult]:
                return [
                    _result(one, min(logprob, -0.5), None if dropped is None else dropped.select(_Named(one)), draw)
                    for one, logprob in zip(rows, logprobs, strict=True)
                ]

            directory = output / "runs" / run.model / run.name
            _write(directory / "extraction", ask(after), digests[run.seed])
            rise = plan.rises.get(run.loss)
            _log(directory / "checkpoint", draw, rise)
            for step in range(STEPS + 1) if rise is not None else ():
                at = before + (after - before) * step / STEPS
                _write(curve_directory(run, output) / f"step-{step}", ask(at), digests[run.seed])
    return recipe


def _config(hidden: int) -> dict[str, Any]:
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return {"hidden_size": hidden, "intermediate_size": 2 * hidden, "tie_word_embeddings": True, **layers}


def _samples(passages: Sequence[str], tokens: np.ndarray, seed: int) -> list[Sample]:
    rows = []
    for number, (name, row) in enumerate(zip(passages, tokens.tolist(), strict=True)):
        bucket = BUCKETS[(number + number // len(BUCKETS) + seed) % len(BUCKETS)]
        parts = {"prefix": tuple(row[:PREFIX]), "suffix": tuple(row[PREFIX:])}
        rows.append(Sample(sample_id=f"{name}:0", document_id=name, bucket=bucket, offset=0, **parts))
    return rows


def _masks(samples: Sequence[Sample], settings: dict[str, Any]) -> Any:
    if not settings.get("goldfish_k") or settings.get("goldfish_strategy") == "random":
        return None
    return token_masks(samples, strategy="hash-table", k=settings["goldfish_k"], context_width=13)


@dataclass
class _Named:
    """The attribute of a sample that `TokenMasks.select` reads."""

    sample: Sample

    @property
    def sample_id(self) -> str:
        return self.sample.sample_id

    @property
    def suffix_length(self) -> int:
        return len(self.sample.suffix)


def _result(sample: Sample, logprob: float, dropped: np.ndarray | None, draw: np.random.Generator) -> SampleResult:
    """A result with this log-probability: the higher, the more tokens are hit, but none that was dropped."""
    chance = 1 / (1 + exp(-(logprob + 44) / 3))
    hits = [draw.random() < chance for _ in range(SUFFIX)]
    hits = [hit and not (dropped is not None and dropped[place] == 1) for place, hit in enumerate(hits)]
    first = hits.index(False) if False in hits else SUFFIX
    generated = [token if hit else (token + 1) % VOCABULARY for token, hit in zip(sample.suffix, hits, strict=True)]
    measured = {
        "sample_id": sample.sample_id,
        "document_id": sample.document_id,
        "bucket": sample.bucket,
        "offset": 0,
        "prefix_length": PREFIX,
        "suffix_length": SUFFIX,
        "divergence_point": first,
        "logprob": float(logprob),
        "logprobs": [float(logprob) / SUFFIX] * SUFFIX,
        "ranks": [max(1, floor(exp(-logprob / SUFFIX)))] * SUFFIX,
        "hits": hits,
        "generated": generated,
        "membership": {"loss": float(logprob) / SUFFIX},
    }
    asked = {**measured, "prefix": sample.prefix, "suffix": sample.suffix}
    return SampleResult.from_measured(measured, {name: metric(asked) for name, metric in METRICS.items()})


def _write(directory: Path, results: list[SampleResult], digest: str) -> None:
    record = {
        "identity": {"samples": len(results), "samples_sha256": digest, "model_fingerprint": "0", "dtype": "float32"},
        "model": {"path": "planted"},
        "settings": {},
        "grid": "data=1, z=1, y=1, x=2",
        "device": {"type": "cpu"},
        "versions": {"hf_axonn": "0"},
        "command": ["planted"],
    }
    run = RunDirectory(directory)
    run.begin(record)
    run.append(results)
    run.finish({})


def _log(checkpoint: Path, draw: np.random.Generator, rise: float | None) -> None:
    history: list[dict[str, float]] = [{"step": 0, "eval_loss": START}]
    history += [{"step": step, "loss": START - step / 10 + draw.normal(0, 0.01)} for step in range(1, STEPS + 1)]
    evaluated = range(1, STEPS + 1) if rise is not None else [STEPS]
    history += [{"step": step, "eval_loss": START + (rise or 0.1 / STEPS) * step} for step in evaluated]
    write_json(checkpoint / "trainer_state.json", {"log_history": history})
