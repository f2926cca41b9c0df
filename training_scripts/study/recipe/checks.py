"""Conditions on a recipe beyond its types, checked before anything starts; errors name the line of what is wrong."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_axonn import Grid
from hf_axonn_eval import PROTOCOLS, Sampler
from hf_axonn_scripts.study.recipe.argument_checks import check_arguments, is_of_loss
from hf_axonn_scripts.study.recipe.definition import MACHINE, ORDINARY, Model, Recipe, Run
from hf_axonn_scripts.study.recipe.marked_yaml import Marked, named_numbers, suggest
from hf_axonn_scripts.study.recipe.planning import load_machine, predict_step, shape_of
from hf_axonn_scripts.study.recipe.steps import STUDY


SOURCES = ("packages", "files")
FILES = (".jsonl", ".json", ".txt")  # a name that ends so is no name on the hub
# Names are parts of file names and of the names of steps.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
LOSS_NAME = re.compile(r"[A-Za-z0-9_.]+")


def check_recipe(
    recipe: Recipe, marked: Marked, runs: Mapping[Run, Marked], base_losses: Mapping[Run, Marked]
) -> None:
    """Refuse a recipe that cannot be carried out, or would be in another way than it reads.

    Args:
        recipe, marked: the recipe, and the file that it comes from.
        runs, base_losses: the entry of each run and of each base training with another loss.
    Raises:
        ValueError: something in it cannot be.
    """
    _check_names(recipe, marked)
    _check_machine(recipe, marked)
    _check_texts(recipe, marked)
    _check_base(recipe, marked)
    _check_documents(recipe, marked)
    for model in recipe.models:
        _check_model(recipe, model, marked.at("models", model.name))
    _check_losses(recipe, marked)
    _check_runs(recipe, marked, runs, base_losses)
    _check_rows(recipe, marked)
    _check_pilot(recipe, marked)
    _check_evaluation(recipe, marked)
    check_arguments(recipe, marked)
    # Last, because a grid is predicted only for what is otherwise right.
    for model in recipe.models:
        _check_grid(recipe, model, marked)
    for run, entry in runs.items():
        if run.grid:
            _check_sizes(recipe, recipe.model(run.model), Grid(**dict(run.grid)), entry.at("grid"), base=False)


def _check_least(marked: Marked, name: str, value: float, least: float) -> None:
    if not value >= least or not math.isfinite(value):
        raise marked.at(*name.split(".")).error(f"{name} is {value}, but it is at least {least}.")


def _check_names(recipe: Recipe, marked: Marked) -> None:
    if not NAME.fullmatch(recipe.name):
        raise marked.at("name").error(
            f"name is {recipe.name!r}, but it names a folder: use letters, digits, . _ and -."
        )
    for model in recipe.models:
        if not NAME.fullmatch(model.name) or model.name == STUDY:
            raise marked.at("models", model.name).error(
                f"a model is named {model.name!r}, but its name is part of file names: use letters, digits, . _ -, "
                f"and not {STUDY!r}, which names the study's tokenizer."
            )
    for loss in recipe.losses:
        if not LOSS_NAME.fullmatch(loss):
            raise marked.at("losses", loss).error(
                f"a loss is named {loss!r}, but its name is part of file names before a -: use letters, digits, . _."
            )


def _check_machine(recipe: Recipe, marked: Marked) -> None:
    if recipe.machine != MACHINE:
        try:
            load_machine(recipe.machine)
        except ValueError as error:
            raise marked.at("machine").error(f"machine: {error} {MACHINE!r} is this machine.") from None


def _check_texts(recipe: Recipe, marked: Marked) -> None:
    texts, place = recipe.texts, marked.at("texts")
    if texts.source not in SOURCES:
        raise place.at("source").error(f"texts.source is {texts.source!r}, but it is one of {', '.join(SOURCES)}.")
    if texts.source == "files" and texts.articles is None:
        raise place.error("texts.source is files, but texts.articles does not say which: write the documents' file.")
    if texts.source == "packages":
        for name in ("articles", "base"):
            if getattr(texts, name) is not None:
                raise place.at(name).error(
                    f"texts.{name} is given, but texts.source is packages: write source: files."
                )
    for name, value, least in (
        ("texts.base_tokens", texts.base_tokens, 0),
        ("texts.held_out_tokens", texts.held_out_tokens, 1),
        ("batch_sequences", recipe.batch_sequences, 1),
        ("warm_up_sequences", recipe.warm_up_sequences, 0),
    ):
        _check_least(marked, name, value, least)
    for name in ("articles", "base"):
        file = Path(str(getattr(texts, name)))
        if file.suffix in FILES and not file.exists():
            raise place.at(name).error(f"texts.{name} is {file}, which is not there: write the path of the file.")


def _check_base(recipe: Recipe, marked: Marked) -> None:
    """Refuse a text, or a vocabulary, that does not suffice for models from nothing and for warm-ups."""
    texts, place = recipe.texts, marked.at("texts")
    own = [model.name for model in recipe.models if model.config is not None]
    for name, least in (("base_length", 2), ("base_batch_sequences", 1)):
        if own:
            _check_least(marked, name, getattr(recipe, name), least)
        elif name in marked.value:
            raise marked.at(name).error(
                f"{name} is given, but no model has a config, to be trained from nothing: remove it."
            )
    if own and recipe.vocabulary is None:
        raise marked.error(
            f"{own[0]} is trained from nothing, but there is no vocabulary: write its number of tokens."
        )
    if not own and recipe.vocabulary is not None:
        raise marked.at("vocabulary").error(
            f"vocabulary is {recipe.vocabulary}, but every model comes with its tokenizer: remove it."
        )
    if recipe.vocabulary is not None:
        _check_least(marked, "vocabulary", recipe.vocabulary, 257)  # the bytes, and the end of a text
    needed, what = recipe.warm_up_sequences * recipe.documents.length, "warm_up_sequences"
    if own:
        batch = recipe.base_batch_sequences * recipe.base_length
        needed, what = max((needed, what), (batch, "one step of the base training"))
    if texts.base_tokens < needed:
        raise place.at("base_tokens").error(
            f"texts.base_tokens is {texts.base_tokens:,}, but {what} takes {needed:,}: write at least as many."
        )
    if texts.base_tokens and texts.source == "files" and texts.base is None:
        raise place.error("texts.base_tokens is given, but texts.base does not say of which text: write its file.")


def _check_documents(recipe: Recipe, marked: Marked) -> None:
    documents, place = recipe.documents, marked.at("documents")
    twice = [bucket for bucket, count in Counter(documents.buckets).items() if count > 1]
    if twice:
        raise place.at("buckets").error(f"documents.buckets has {twice[0]} more than once: write each number once.")
    if 0 not in documents.buckets:
        raise place.at("buckets").error(
            f"documents.buckets is {list(documents.buckets)}, without 0: add it, others are compared with documents "
            "that no run has seen."
        )
    if min(documents.buckets) < 0 or max(documents.buckets) < 1:
        raise place.at("buckets").error(
            f"documents.buckets is {list(documents.buckets)}: write 0 and numbers of repetitions of at least 1."
        )
    _check_least(marked, "documents.per_bucket", documents.per_bucket, 1)
    _check_least(marked, "documents.length", documents.length, 2)
    _check_articles(recipe, marked)
    if documents.suffix is not None:
        _check_least(marked, "documents.suffix", documents.suffix, 1)
        if documents.suffix >= documents.length:
            raise place.at("suffix").error(
                f"documents.suffix is {documents.suffix}, which leaves no prefix in documents of {documents.length} "
                f"tokens: write at most {documents.length - 1}."
            )
        if recipe.pilot is not None:
            raise place.at("suffix").error(
                f"documents.suffix is {documents.suffix}, but the pilot chooses it as well: remove one of them."
            )
    elif recipe.pilot is None:
        raise place.error("there is neither documents.suffix nor a pilot that chooses it: write one of them.")


def _check_articles(recipe: Recipe, marked: Marked) -> None:
    """Refuse articles whose passages do not fill buckets evenly, and passages that are not those of whole articles."""
    documents, count = recipe.documents, len(recipe.documents.buckets)
    of_one = count if documents.per_article is None else documents.per_article
    if of_one != 1 and (of_one < 1 or of_one % count):
        raise marked.at("documents", "per_article").error(
            f"documents.per_article is {of_one}, but with {count} buckets it is 1 or a multiple of {count}: an "
            "article is in all buckets equally often, or in one."
        )
    own = [model for model in recipe.models if model.config is not None]
    if len({model.per_bucket for model in own}) > 1:
        model = next(model for model in own if model.per_bucket is not None)
        raise marked.at("models", model.name, "per_bucket").error(
            f"models.{model.name}.per_bucket is {model.per_bucket}, but models with a config share their passages: "
            "write the same for all of them, or documents.per_bucket."
        )
    places = [(marked.at("documents", "per_bucket"), documents.per_bucket)]
    for model in recipe.models:
        if model.per_bucket is not None:
            places.append((marked.at("models", model.name, "per_bucket"), model.per_bucket))
    for place, per_bucket in places:
        if per_bucket * count % of_one:
            raise place.error(
                f"{place.name} is {per_bucket}, so that {count} buckets have {per_bucket * count} passages, which are "
                f"not those of whole articles of {of_one}: write a multiple of {of_one // count}."
            )


def _check_model(recipe: Recipe, model: Model, place: Marked) -> None:
    if (model.config is None) == (model.checkpoint is None):
        both = "both config and checkpoint" if model.config is not None else "neither config nor checkpoint"
        raise place.error(
            f"{place.name} has {both}: config is for a model from nothing, checkpoint for a trained one."
        )
    if model.shape is not None and model.config is not None:
        raise place.at("shape").error(f"{place.name} has shape beside config, which says the sizes: remove it.")
    if model.processes < 1:
        raise place.at("processes").error(f"{place.name} has {model.processes} processes, but it runs on at least 1.")
    if model.learning_rate is not None and not model.learning_rate > 0:
        raise place.at("learning_rate").error(
            f"{place.name}.learning_rate is {model.learning_rate}: write a number above 0."
        )
    if model.per_bucket is not None and not 1 <= model.per_bucket <= recipe.documents.per_bucket:
        raise place.at("per_bucket").error(
            f"{place.name}.per_bucket is {model.per_bucket}: write a number from 1 to documents.per_bucket, "
            f"{recipe.documents.per_bucket}."
        )
    if model.config is not None and "vocab_size" in model.config:
        raise place.at("config", "vocab_size").error(
            f"{place.name}.config has a vocab_size, which is the recipe's vocabulary, {recipe.vocabulary}: remove it."
        )
    if model.config is None and model.shape is None and not (Path(str(model.checkpoint)) / "config.json").is_file():
        raise place.error(
            f"{place.name} has no shape, and {model.checkpoint} is no folder with a config.json: write its sizes "
            "under shape, from which the cost is predicted."
        )
    sizes = place.at("config" if model.config is not None else "shape")
    try:
        shape = shape_of(recipe, model)
    except ValueError as error:
        raise sizes.error(f"{sizes.name}: {error}") from None
    if shape.hidden % shape.heads and shape.head_dim is None:
        raise sizes.error(
            f"{sizes.name}: {shape.heads} heads do not divide hidden_size {shape.hidden}: write other sizes."
        )
    longest = max(recipe.documents.length, recipe.base_length if model.config is not None else 0)
    if shape.max_positions and shape.max_positions < longest:
        raise sizes.at("max_position_embeddings").error(
            f"{sizes.name} has {shape.max_positions} positions, but rows have {longest} tokens: write at least as "
            "many."
        )


def _check_losses(recipe: Recipe, marked: Marked) -> None:
    place, ordinary = marked.at("losses"), recipe.losses.get(ORDINARY)
    if ordinary is None:
        raise place.error(
            "losses has no ordinary loss, with which others are compared: add `ordinary: {goldfish: false}`."
        )
    if ordinary != {"goldfish": False}:
        raise place.at("ordinary").error(
            f"losses.ordinary is {ordinary}, but it is the loss without goldfish: write {{goldfish: false}}."
        )
    for name, loss in recipe.losses.items():
        wrong = [key for key in loss if not is_of_loss(key)]
        if wrong:
            raise place.at(name, wrong[0]).error(
                f"losses.{name}.{wrong[0]} is no argument of the loss: write what all runs share under training."
            )
        if name != ORDINARY and loss.get("goldfish") is False:
            raise place.at(name, "goldfish").error(
                f"losses.{name} is the ordinary loss under another name: remove it."
            )
        first = next(other for other, arguments in recipe.losses.items() if arguments == loss)
        if first != name:
            raise place.at(name).error(f"losses.{name} and losses.{first} are the same loss: remove one of them.")


def _check_runs(recipe: Recipe, marked: Marked, runs: Mapping[Run, Marked], base_losses: Mapping[Run, Marked]) -> None:
    models = [model.name for model in recipe.models]
    for run, entry in [*runs.items(), *base_losses.items()]:
        for kind, name, known in (("models", run.model, models), ("losses", run.loss, list(recipe.losses))):
            if name not in known:
                remedy = suggest(name, known, f"there are {', '.join(known)}.")
                raise entry.at(kind).error(f"{entry.name}.{kind} has {name}, which is not among {kind}: {remedy}")
        if run.seed < 0:
            raise entry.at("seeds").error(f"{entry.name}.seeds has {run.seed}, but a seed is at least 0.")
    for run, entry in base_losses.items():
        if recipe.model(run.model).config is None:
            raise entry.error(f"{entry.name} has {run.model}, which comes trained: name models that have a config.")
        if run.loss == ORDINARY:
            raise entry.at("losses").error(f"{entry.name} has the ordinary loss, with which every base is trained.")
        if f"{run.model}-{run.loss}" in models:
            raise entry.error(f"{run.model}-{run.loss} would name a base and is a model's name: rename the model.")
    made = {(run.model, run.loss, run.seed) for run in runs if not run.grid}
    for run, entry in runs.items():
        if run.grid:
            if dict(run.grid) == recipe.model(run.model).grid:
                raise entry.at("grid").error(f"{entry.name}.grid is that of {run.model}: remove it, or write another.")
            if (run.model, run.loss, run.seed) not in made:
                raise entry.error(
                    f"{entry.name}: {run.model} has no run {run.loss}-s{run.seed} on its own grid to compare with: "
                    "add it."
                )
        elif (run.model, ORDINARY, run.seed) not in made:
            raise entry.error(
                f"{entry.name}: {run.model} has {run.loss} on seed {run.seed}, but not the ordinary loss to compare "
                "with: add it."
            )
    _check_used(marked, "models", models, {run.model for run in runs})
    _check_used(marked, "losses", recipe.losses, {run.loss for run in [*runs, *base_losses]})


def _check_used(marked: Marked, kind: str, names: Iterable[str], used: set[str]) -> None:
    for name in names:
        if name not in used:
            raise marked.at(kind, name).error(f"no run has {kind}.{name}: name it under runs, or remove it.")


def _check_rows(recipe: Recipe, marked: Marked) -> None:
    batch, largest = recipe.batch_sequences, max(recipe.documents.buckets)
    if recipe.warm_up_sequences % batch:
        raise marked.at("warm_up_sequences").error(
            f"{recipe.warm_up_sequences} warm_up_sequences do not fill whole batches of {batch}: write "
            f"{math.ceil(recipe.warm_up_sequences / batch) * batch}."
        )
    for model in recipe.models:
        count = recipe.per_bucket(model)
        rows = count * sum(recipe.documents.buckets)
        place = marked.at("documents") if model.per_bucket is None else marked.at("models", model.name)
        if rows % batch and recipe.texts.base_tokens == 0:
            unit = batch // math.gcd(batch, sum(recipe.documents.buckets))
            raise place.at("per_bucket").error(
                f"{model.name} sees {count} documents {sum(recipe.documents.buckets)} times in all buckets, {rows} "
                f"rows, which do not fill whole batches of {batch}, and there is no base text to fill them: write a "
                f"per_bucket that is a multiple of {unit}, another batch_sequences, or texts.base_tokens."
            )
        if math.ceil(rows / batch) < largest:
            raise place.at("per_bucket").error(
                f"{model.name} has {math.ceil(rows / batch)} batches of {batch}, but a document is seen {largest} "
                f"times, once in a batch at most: write more documents, or a batch_sequences up to {rows // largest}."
            )


def _check_pilot(recipe: Recipe, marked: Marked) -> None:
    pilot, place = recipe.pilot, marked.at("pilot")
    if pilot is None:
        return
    if pilot.model not in [model.name for model in recipe.models]:
        raise place.at("model").error(f"pilot.model is {pilot.model}, which is not among models.")
    if not pilot.learning_rates or min(pilot.learning_rates) <= 0:
        raise place.at("learning_rates").error("pilot.learning_rates are to be one or more numbers above 0.")
    longest = recipe.documents.length - 1
    if not pilot.suffixes or not all(1 <= suffix <= longest for suffix in pilot.suffixes):
        raise place.at("suffixes").error(
            f"pilot.suffixes is {list(pilot.suffixes)}: write numbers from 1 to {longest}, so that documents of "
            f"{recipe.documents.length} tokens keep a prefix."
        )
    if not 0 <= pilot.at_most <= pilot.at_least <= 1:
        raise place.error(
            f"pilot.at_most is {pilot.at_most} and at_least {pilot.at_least}: write shares, the first not the larger."
        )
    if "learning_rate" in recipe.training:
        raise marked.at("training", "learning_rate").error(
            "training.learning_rate is given, but the pilot chooses it: remove it, or the pilot."
        )


def _check_evaluation(recipe: Recipe, marked: Marked) -> None:
    evaluation, place = recipe.evaluation, marked.at("evaluation")
    _check_least(marked, "evaluation.canaries", evaluation.canaries, 0)
    _check_least(marked, "evaluation.curve_points", evaluation.curve_points, 0)
    try:
        if evaluation.sampler is not None:
            sampler: dict[str, Any] = named_numbers(evaluation.sampler)
            Sampler(**sampler)
    except (ValueError, TypeError) as error:
        raise place.at("sampler").error(f"evaluation.sampler: {error}") from None
    try:
        if evaluation.near_copies is not None:
            from hf_axonn_eval.extraction.near_copies import NearCopySearch

            search: dict[str, Any] = named_numbers(evaluation.near_copies)
            NearCopySearch(**search).check(recipe.longest_suffix)
    except (ValueError, TypeError) as error:
        raise place.at("near_copies").error(f"evaluation.near_copies: {error}") from None
    if evaluation.protocol is not None:
        _check_protocol(recipe, place.at("protocol"))


def _check_protocol(recipe: Recipe, place: Marked) -> None:
    name, documents = str(recipe.evaluation.protocol), recipe.documents
    if name not in PROTOCOLS:
        raise place.error(f"evaluation.protocol is {name!r}, but it is one of {', '.join(PROTOCOLS)}.")
    sampling = PROTOCOLS[name].sampling
    needed = max(sampling.needed, sampling.min_document_tokens or 0)
    if needed > documents.length:
        raise place.error(
            f"the protocol {name} needs documents of {needed} tokens, but documents.length is {documents.length}: "
            "write longer documents, or another protocol."
        )
    if documents.suffix is None:
        raise place.error(
            f"the protocol {name} fixes the suffix, which the pilot chooses here: write documents.suffix."
        )
    windows = sampling.windows(documents.length) if sampling.stride_unit == "tokens" else []
    requested = {(window.middle, window.end) for window in windows if window.offset == 0}
    ours = (documents.length - documents.suffix, documents.length)
    if len(windows) != 1 or requested != {ours}:
        prefixes = ", ".join(f"{middle} + {end - middle}" for middle, end in sorted(requested)) or "other windows"
        raise place.error(
            f"the protocol {name} asks for {prefixes} tokens of a document, but the study for {ours[0]} + "
            f"{documents.suffix}: write other documents.length and documents.suffix, or another protocol."
        )


def _check_grid(recipe: Recipe, model: Model, marked: Marked) -> None:
    place = marked.at("models", model.name)
    holders = [holder for holder in (place, marked) if "grid" in holder.value]
    where = holders[0].at("grid") if holders else place
    if model.grid is not None:
        grid = Grid(**model.grid)
        try:
            grid.check(model.processes)
        except ValueError as error:
            raise where.error(f"{place.name}.grid: {error}") from None
        _check_sizes(recipe, model, grid, where, base=model.config is not None)
    if recipe.machine != MACHINE:
        try:
            found = predict_step(recipe, model)
        except ValueError as error:
            raise where.error(f"{place.name}: {error}") from None
        if not found.fits:
            needs, has = found.memory.total / 2**30, found.job.machine.memory / 2**30
            raise where.error(
                f"{place.name}: {found.grid} needs {needs:.1f} of {has:.0f} GiB of a GPU (a tenth is kept free): take "
                "more processes, or grid: auto."
            )


def _check_sizes(recipe: Recipe, model: Model, grid: Grid, place: Marked, *, base: bool) -> None:
    """Refuse a grid over which a batch, or the heads of a model of the study's own, cannot be divided."""
    batches = {"batch_sequences": recipe.batch_sequences}
    if base:
        batches["base_batch_sequences"] = recipe.base_batch_sequences
    for name, sequences in batches.items():
        if sequences % grid.dp_size:
            raise place.error(
                f"{place.name} {grid} of {model.name}: {name} {sequences} is not divisible by data * z = "
                f"{grid.dp_size}: write other sizes, or another {name}."
            )
    if model.config is None:
        return
    shape = shape_of(recipe, model)
    for name, size in (("num_attention_heads", shape.heads), ("intermediate_size", shape.intermediate)):
        if size % (grid.x * grid.y):
            raise place.error(
                f"{place.name} {grid} of {model.name}: {name} {size} is not divisible by x * y = {grid.x * grid.y}: "
                "write other sizes, of the grid or of the model."
            )
