"""Reads a recipe file, and refuses one that cannot be carried out."""

import itertools
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hf_axonn.topology.grid import Grid
from hf_axonn_scripts.study.recipe.checks import check_recipe
from hf_axonn_scripts.study.recipe.definition import Model, Recipe, Run, Texts
from hf_axonn_scripts.study.recipe.marked_yaml import Marked, check_keys, converted, filled, read_marked


@dataclass(frozen=True, kw_only=True)
class _Runs:
    """An entry of `runs` or `base_losses` in a file: every combination of what it names."""

    models: tuple[str, ...]
    losses: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    grid: dict[str, int] | None = None


def read_recipe(path: str | Path) -> Recipe:
    """The recipe of a file.

    A file has the fields of `Recipe` by name. `models` maps names to the fields of `Model`, `runs` lists entries with
    models, losses, seeds and maybe a grid, of which every combination is a run, and `base_losses` the same without
    seeds and grid. `processes` and `grid` at the top are those of the models that do not say theirs; a grid is a
    mapping of axes to sizes, or auto.

    Raises:
        ValueError: Something in it cannot be; the message begins with FILE:LINE and says numbers, place and remedy.
    """
    path = Path(path)
    marked = read_marked(path)
    entries = dict(marked.mapping())
    check_keys(marked, [*(each.name for each in fields(Recipe) if each.name != "path"), "processes", "grid"])
    shared: dict[str, Marked] = {name: entries.pop(name) for name in ("processes", "grid") if name in entries}
    models = _models(entries.pop("models", None), shared, marked)
    runs, run_places = _runs(entries.pop("runs", None))
    base_losses, base_places = _runs(entries.pop("base_losses", None), seeded=False)
    losses = entries.setdefault("losses", Marked({}, "losses", path, marked.line))
    for name, loss in losses.mapping().items():
        if loss.value is None:  # `ordinary:` with nothing behind it
            losses.value[name] = Marked({}, loss.name, path, loss.line)
    recipe = filled(
        Recipe,
        Marked(entries, "", path, marked.line),
        path=path,
        models=models,
        runs=runs,
        base_losses=tuple((run.model, run.loss) for run in base_losses),
    )
    recipe = replace(recipe, texts=_beside(recipe.texts, path.parent))
    check_recipe(recipe, marked, run_places, base_places)
    return recipe


def _beside(texts: Texts, folder: Path) -> Texts:
    """The same with files that lie beside the recipe by their full path."""
    found = {name: folder / str(getattr(texts, name)) for name in ("articles", "base") if getattr(texts, name)}
    full: dict[str, Any] = {name: str(file.resolve()) for name, file in found.items() if file.exists()}
    return replace(texts, **full)


def _models(models: Marked | None, shared: dict[str, Marked], marked: Marked) -> tuple[Model, ...]:
    if models is None or not models.mapping():
        raise (models or marked).error("the recipe has no models: name at least one under models.")
    made = []
    for name, about in models.value.items():
        entries = dict(about.mapping())
        grid = entries.pop("grid", shared.get("grid"))
        processes = entries.pop("processes", shared.get("processes"))
        if processes is None:
            raise about.error(f"{about.name} has no processes: write them here, or at the top for all models.")
        given = {"name": name, "grid": _grid(grid), "processes": converted(int, processes)}
        made.append(filled(Model, Marked(entries, about.name, about.file, about.line), **given))
    return tuple(made)


def _grid(grid: Marked | None) -> dict[str, int] | None:
    """Sizes of all axes, or None for auto."""
    if grid is None or grid.value == "auto":
        return None
    check_keys(grid, ("data", "z", "y", "x"))
    sizes = converted(dict[str, int], grid)
    try:
        return Grid(**sizes).as_dict()
    except ValueError as error:
        raise grid.error(f"{grid.name}: {error}") from None


def _runs(runs: Marked | None, *, seeded: bool = True) -> tuple[tuple[Run, ...], dict[Run, Marked]]:
    """Every run of the entries, and the entry of each."""
    made: dict[Run, Marked] = {}
    if runs is not None and not isinstance(runs.value, list):
        raise runs.refused(tuple)
    for entry in runs.value if runs is not None else ():
        check_keys(entry, ("models", "losses", "seeds", "grid") if seeded else ("models", "losses"))
        inside = dict(entry.mapping())
        grid = _grid(inside.pop("grid", None))
        named = filled(_Runs, Marked(inside, entry.name, entry.file, entry.line), grid=grid)
        sizes = tuple(grid.items()) if grid is not None else ()
        for model, loss, seed in itertools.product(named.models, named.losses, named.seeds):
            run = Run(model=model, loss=loss, seed=seed, grid=sizes)
            if run in made:
                raise entry.error(
                    f"{model} has the run {run.name} a second time, after line {made[run].line}: name each run once."
                )
            made[run] = entry
    return tuple(made), made
