"""What holds for every module of the package, checked folder by folder, next to the other tests of the folder."""

import dataclasses
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import hf_axonn_eval


def modules_of(folder: str) -> list[ModuleType]:
    """The modules of a folder of the package."""
    place = Path(hf_axonn_eval.__file__).parent / folder
    names = sorted(path.stem for path in place.glob("*.py") if path.stem != "__init__")
    return [import_module(f"hf_axonn_eval.{folder}.{name}") for name in names]


def functions_of(folder: str) -> Iterator:
    """The functions of these modules, and the methods of their classes."""
    for module in modules_of(folder):
        for some in vars(module).values():
            if getattr(some, "__module__", None) != module.__name__:
                continue
            if inspect.isfunction(some):
                yield some
            elif inspect.isclass(some):
                yield from (method for method in vars(some).values() if inspect.isfunction(method))


def not_to_be_named(folder: str) -> list[str]:
    """Parameters of functions that cannot be given by name."""
    return [
        f"{function.__qualname__}: {parameter.name}"
        for function in functions_of(folder)
        for parameter in inspect.signature(inspect.unwrap(function)).parameters.values()
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.name != "self"
    ]


def records_of(folder: str) -> dict[str, set[str]]:
    """Dataclasses by name, and which of these hold: "stays" as it was made, takes its fields "by name"."""
    return {
        some.__name__: {
            word
            for word, holds in (
                ("stays", some.__dataclass_params__.frozen),
                ("by name", all(field.kw_only for field in dataclasses.fields(some))),
            )
            if holds
        }
        for module in modules_of(folder)
        for some in vars(module).values()
        if dataclasses.is_dataclass(some) and inspect.isclass(some) and some.__module__ == module.__name__
    }


def defaults_of(folder: str) -> dict[str, dict[str, object]]:
    """By function or record what its arguments are where nothing is said; None is left out."""
    found = {}
    for function in functions_of(folder):
        parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
        given = {one.name: one.default for one in parameters if isinstance(one.default, (int, float, str, tuple))}
        if given:
            found[function.__qualname__.removesuffix(".__init__")] = given
    return found
