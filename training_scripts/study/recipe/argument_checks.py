"""Checks of training arguments, losses and sizes of models, by building what train.py builds of them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from transformers import LlamaConfig

from hf_axonn import GoldfishConfig
from hf_axonn.goldfish.config import LOSSES
from hf_axonn_scripts.study.recipe.definition import Recipe
from hf_axonn_scripts.study.recipe.marked_yaml import Marked, check_keys, convert


# Training arguments that follow from the rest of a recipe, with what to write instead.
DECIDED = {
    "output_dir": "the study has a folder for each run",
    "data_seed": "the order of training is that of the rows that the study writes",
    "train_sampling_strategy": "the order of training is that of the rows that the study writes",
    "max_steps": "the number of steps follows from the rows",
    "per_device_train_batch_size": "write batch_sequences, or base_batch_sequences",
    "per_device_eval_batch_size": "write batch_sequences, or base_batch_sequences",
}
DECIDED_IN_RUNS = DECIDED | {
    "seed": "write seeds under runs",
    "num_train_epochs": "how often a document is seen is its bucket's number",
}


def check_arguments(recipe: Recipe, marked: Marked) -> None:
    """Refuse training arguments, losses and sizes that Transformers or the goldfish loss does not take.

    Raises:
        ValueError: there is one; the message begins with its line.
    """
    for name in ("base_training", "training"):
        place, arguments = marked.at(name), getattr(recipe, name)
        for key in arguments:
            why = (DECIDED if name == "base_training" else DECIDED_IN_RUNS).get(key)
            if why is not None:
                raise place.at(key).error(f"{name}.{key} is not a setting of a recipe: {why}.")
            if is_of_loss(key):
                raise place.at(key).error(f"{name}.{key} is of a loss: write it under losses.")
        _check_built(arguments, place)
    for name, loss in recipe.losses.items():
        _check_built(loss, marked.at("losses", name))
    for model in recipe.models:
        if model.config is not None:
            _check_config(model.config, marked.at("models", model.name, "config"))


def is_of_loss(key: str) -> bool:
    """Return whether an argument of `GoldfishConfig` is one of the loss, which stands under `losses`."""
    return key.startswith(("goldfish", "loss_strategy", *(f"{rival}_" for rival in LOSSES)))


def _check_built(arguments: Mapping[str, Any], place: Marked) -> None:
    """Refuse arguments that GoldfishConfig does not know, or refuses."""
    if not arguments:
        return
    hints = get_type_hints(GoldfishConfig)
    check_keys(place, [each.name for each in fields(GoldfishConfig)])
    plain = (bool, int, float, bool | None, int | None, float | None)
    for key in arguments:
        if hints[key] in plain:
            convert(hints[key], place.at(key))

    def refusal(some: Mapping[str, Any]) -> str:
        try:
            with warnings.catch_warnings():  # a deprecated name is the affair of who runs it
                warnings.simplefilter("ignore")
                GoldfishConfig(output_dir="unused", use_cpu=True, report_to="none", **some)
        except (ValueError, TypeError, ImportError) as error:
            return str(error)
        return ""

    together = refusal(arguments)
    if together:
        alone = {key: refusal({key: value}) for key, value in arguments.items()}
        # Some are refused only together; then they share the line of the mapping.
        where, what = next(((place.at(key), what) for key, what in alone.items() if what), (place, together))
        raise where.error(f"{where.name}: {what}")


def _check_config(config: Mapping[str, Any], place: Marked) -> None:
    check_keys(place, [each.name for each in fields(LlamaConfig)])
    try:
        LlamaConfig(**config)
    except (ValueError, TypeError) as error:
        raise place.error(f"{place.name}: {error}") from None
