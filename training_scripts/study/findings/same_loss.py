"""Cost of a loss in training: the text that it needs for the same held-out loss."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hf_axonn_scripts.study.findings.results import goldfish_options, read_json
from hf_axonn_scripts.study.recipe.definition import Recipe


DROPPED = "goldfish_dropped_fraction"  # of the labels, in the logs of GoldfishTrainer


def tokens_for_same_loss(recipe: Recipe, output: Path) -> dict[str, dict[str, Any]]:
    """Compare the text that base trainings with another loss need for the same held-out loss.

    The held-out losses of both trainings are curves over tokens. Each point of the ordinary one is looked up on the
    other curve: the tokens at which that first comes down to the loss, between two of its points linear in the
    logarithm of the tokens. Nothing is extrapolated: there is None for a loss that the other training does not reach,
    or that its first evaluation is below already. `at_end` looks up the other way: the tokens that the ordinary
    training needs for the loss that the other one ends with.

    Each curve is of one training, so that there is no interval. Where the learning rate decays, a training that is
    not at its end has a higher loss than one that ends there: `at_end` then understates the ratio if the ordinary
    training is the better one, as it compares the other's end with a point on the ordinary one's way.

    Returns:
        By model and loss, for each of `recipe.base_losses`:

        - `k` and `predicted`, k / (k - 1): the ratio of seen tokens if a token that is left out taught nothing; None
          where the loss is none of goldfish;
        - `curves`: by `ordinary` and `other` a list of points with `tokens` (seen), `supervised` (that entered the
          loss, as the Trainer counted them) and `loss`, nats a token of held-out text;
        - `points`: for every point of the ordinary curve after its start `loss`; `ordinary` and `other`, the seen
          tokens; `ratio`, other by ordinary; and `supervised_ratio`, the same of supervised tokens;
        - `at_end`: the same at the last loss of the other curve;

        or `left_out`, why there is none.
    """
    found: dict[str, dict[str, Any]] = {}
    each = recipe.base_batch_sequences
    for name, loss in recipe.base_losses:
        k = goldfish_options(recipe, loss).get("k")
        entry: dict[str, Any] = {"k": k, "predicted": k / (k - 1) if k else None}
        try:
            ordinary, other = (
                held_out_curve(output / "base" / folder / "trainer_state.json", each, recipe.base_length)
                for folder in (name, f"{name}-{loss}")
            )
        except ValueError as error:
            entry["left_out"] = str(error).replace(f"{output}/", "")  # no paths of a machine in a report
        else:
            entry["curves"] = {"ordinary": ordinary, "other": other}
            entry["points"] = [
                _same_loss(ordinary, other, point["loss"], at=point) for point in ordinary if point["tokens"]
            ]
            entry["at_end"] = _same_loss(ordinary, other, other[-1]["loss"], at_other=other[-1])
        found.setdefault(name, {})[loss] = entry
    return found


def held_out_curve(file: Path, sequences: int, length: int) -> list[dict[str, float]]:
    """Return the held-out loss over the tokens of a training.

    Args:
        file: trainer_state.json of the training.
        sequences: rows of a step.
        length: tokens of a row.
    Returns:
        Points in order: `tokens` seen, those of all steps; `supervised`, labels that entered the loss, of each row all
        tokens but the first and those that goldfish left out, as GoldfishTrainer counted them; `loss`, nats a token.
    Raises:
        ValueError: there is no such file, or no held-out loss or count in it.
    """
    if not file.is_file():
        raise ValueError(f"{file} is not there: the step of this training writes it")
    try:
        history = read_json(file)["log_history"]
        losses = {entry["step"]: float(entry["eval_loss"]) for entry in history if "eval_loss" in entry}
        logged = {entry["step"]: entry[DROPPED] for entry in history if DROPPED in entry}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a state of Trainer ({error!r})") from None
    if not losses or not logged:
        lacks = DROPPED if losses else "held-out loss (eval_loss)"
        raise ValueError(f"{file} has no {lacks}: GoldfishTrainer logs it, with logging and evaluation on")
    # A log counts the labels since the one before.
    last = max(losses)
    shares = {**logged, last: logged[max(logged)]} if last > max(logged) else logged
    at, kept = [0], [0.0]
    for step in sorted(shares):
        kept.append(kept[-1] + (step - at[-1]) * (1 - shares[step]))
        at.append(step)
    return [
        {
            "tokens": step * sequences * length,
            "supervised": float(np.interp(step, at, kept)) * sequences * (length - 1),
            "loss": losses[step],
        }
        for step in sorted(losses)
    ]


def _same_loss(
    ordinary: Sequence[Mapping[str, float]],
    other: Sequence[Mapping[str, float]],
    loss: float,
    *,
    at: Mapping[str, float] | None = None,
    at_other: Mapping[str, float] | None = None,
) -> dict[str, float | None]:
    one, two = at or _find_point(ordinary, loss), at_other or _find_point(other, loss)
    return {
        "loss": loss,
        "ordinary": one["tokens"] if one else None,
        "other": two["tokens"] if two else None,
        "ratio": two["tokens"] / one["tokens"] if one and two else None,
        "supervised_ratio": two["supervised"] / one["supervised"] if one and two else None,
    }


def _find_point(curve: Sequence[Mapping[str, float]], loss: float) -> Mapping[str, float] | None:
    """Return the point where a curve first comes down to a loss, between two of its points; None where it does not.

    The start is no such point: from there the loss falls by most of what it ever does, on no line.
    """
    after_start = [point for point in curve if point["tokens"]]
    if after_start and after_start[0]["loss"] == loss:
        return after_start[0]
    for before, after in pairwise(after_start):
        if before["loss"] > loss >= after["loss"]:
            share = (before["loss"] - loss) / (before["loss"] - after["loss"])
            tokens = before["tokens"] * (after["tokens"] / before["tokens"]) ** share
            part = (tokens - before["tokens"]) / (after["tokens"] - before["tokens"])
            supervised = before["supervised"] + part * (after["supervised"] - before["supervised"])
            return {"tokens": tokens, "supervised": supervised, "loss": loss}
        if before["loss"] < loss:
            return None  # below from its first evaluation on
    return None
