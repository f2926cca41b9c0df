"""Reader of recipe files, which refuses one that cannot be carried out."""

import itertools
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hf_axonn import GoldfishConfig, Grid
from hf_axonn_scripts.study.recipe.checks import check_recipe
from hf_axonn_scripts.study.recipe.definition import Model, Recipe, Run, Texts
from hf_axonn_scripts.study.recipe.marked_yaml import Marked, check_keys, convert, fill, read_marked


@dataclass(frozen=True, kw_only=True)
class _Runs:
    """An entry of `runs` or `base_losses` in a file: every combination of what it names."""

    models: tuple[str, ...]
    losses: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    grid: dict[str, int] | None = None


def read_recipe(path: str | Path) -> Recipe:
    """Return the recipe of a file.

    A file has the fields of `Recipe` by name. `models` maps names to the fields of `Model`, `runs` lists entries with
    models, losses, seeds and maybe a grid, of which every combination is a run, and `base_losses` the same without
    seeds and grid. `processes` and `grid` at the top hold for the models that have none of their own; a grid is a
    mapping of axes to sizes, or auto.

    Raises:
        ValueError: something in it cannot be; the message begins with FILE:LINE and says numbers, place and remedy.
    """
    path = Path(path)
    marked = read_marked(path)
    entries = dict(marked.mapping())
    check_keys(marked, [*(each.name for each in fields(Recipe) if each.name != "path"), "processes", "grid"])
    for name in ("training", "base_training"):
        _rename_as_installed(entries.get(name))
    shared: dict[str, Marked] = {name: entries.pop(name) for name in ("processes", "grid") if name in entries}
    models = _models(entries.pop("models", None), shared, marked)
    runs, run_places = _runs(entries.pop("runs", None))
    base_losses, base_places = _runs(entries.pop("base_losses", None), seeded=False)
    losses = entries.setdefault("losses", marked.with_value({}, "losses"))
    for name, loss in losses.mapping().items():
        if loss.value is None:  # `ordinary:` with nothing behind it
            losses.value[name] = loss.with_value({})
    recipe = fill(
        Recipe,
        marked.with_value(entries),
        path=path,
        models=models,
        runs=runs,
        base_losses=tuple((run.model, run.loss) for run in base_losses),
    )
    recipe = replace(recipe, texts=_beside(recipe.texts, path.parent))
    check_recipe(recipe, marked, run_places, base_places)
    return recipe


def _rename_as_installed(arguments: Marked | None) -> None:
    """Call the recomputation of activations what Transformers up to 5.22 calls it, where that is installed."""
    new, old = "activation_checkpointing", "gradient_checkpointing"
    if (
        arguments is not None
        and new in arguments.mapping()
        and new not in {each.name for each in fields(GoldfishConfig)}
    ):
        arguments.value[old] = arguments.value.pop(new)


def _beside(texts: Texts, folder: Path) -> Texts:
    """Return the same with files that lie beside the recipe by their full path."""
    found = {name: folder / str(getattr(texts, name)) for name in ("articles", "base") if getattr(texts, name)}
    full: dict[str, Any] = {name: str(file.resolve()) for name, file in found.items() if file.exists()}
    return replace(texts, **full)


def _models(models: Marked | None, shared: dict[str, Marked], marked: Marked) -> tuple[Model, ...]:
    if models is None or not models.mapping():
        raise (models or marked).error("the recipe has no models: name at least one under models.")
    made = []
    for name, about in models.value.items():
        entries = {**shared, **about.mapping()}
        grid, processes = entries.pop("grid", None), entries.pop("processes", None)
        if processes is None:
            raise about.error(f"{about.name} has no processes: write them here, or at the top for all models.")
        given = {"name": name, "grid": _grid(grid), "processes": convert(int, processes)}
        made.append(fill(Model, about.with_value(entries), **given))
    return tuple(made)


def _grid(grid: Marked | None) -> dict[str, int] | None:
    """Return the sizes of all axes, or None for auto."""
    if grid is None or grid.value == "auto":
        return None
    check_keys(grid, ("data", "z", "y", "x"))
    sizes = convert(dict[str, int], grid)
    try:
        return Grid(**sizes).as_dict()
    except ValueError as error:
        raise grid.error(f"{grid.name}: {error}") from None


def _runs(runs: Marked | None, *, seeded: bool = True) -> tuple[tuple[Run, ...], dict[Run, Marked]]:
    """Return every run of the entries, and the entry of each."""
    made: dict[Run, Marked] = {}
    for entry in runs.items() if runs is not None else ():
        check_keys(entry, ("models", "losses", "seeds", "grid") if seeded else ("models", "losses"))
        inside = dict(entry.mapping())
        grid = _grid(inside.pop("grid", None))
        named = fill(_Runs, entry.with_value(inside), grid=grid)
        sizes = tuple(grid.items()) if grid is not None else ()
        for model, loss, seed in itertools.product(named.models, named.losses, named.seeds):
            run = Run(model=model, loss=loss, seed=seed, grid=sizes)
            if run in made:
                raise entry.error(
                    f"{model} has the run {run.name} a second time, after line {made[run].line}: name each run once."
                )
            made[run] = entry
    return tuple(made), made
