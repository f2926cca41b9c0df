"""YAML whose values know their line, and dataclasses made of it: every error begins with FILE:LINE."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml


Made = TypeVar("Made")
KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    dict: "a mapping of names to values",
    tuple: "a list such as [1, 2]",
}


class _Loader(yaml.SafeLoader):
    """YAML 1.1, but 1e-4 is a number, as it is everywhere else."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


@dataclasses.dataclass(frozen=True)
class Marked:
    """A value of a YAML file.

    Args:
        value: a number, text, true, false or None; a list of `Marked`; or a mapping of names to `Marked`.
        name: keys that lead to it, such as `models.1M.grid`; empty for the whole file.
        file, line: its place; a value of a mapping stands where its key does.
    """

    value: Any
    name: str
    file: Path
    line: int

    def error(self, message: str) -> ValueError:
        """Return the error to raise about this value."""
        return ValueError(f"{self.file}:{self.line}: {message}")

    def at(self, *keys: str) -> Marked:
        """Return the value under some keys, or the nearest around it that is in the file."""
        here = self
        for key in keys:
            if not isinstance(here.value, dict) or key not in here.value:
                break
            here = here.value[key]
        return here

    def with_value(self, value: Any, name: str | None = None) -> Marked:
        """Return another value at the same place."""
        return Marked(value, self.name if name is None else name, self.file, self.line)

    def plain(self) -> Any:
        """Return the value without its marks."""
        if isinstance(self.value, dict):
            return {key: inside.plain() for key, inside in self.value.items()}
        return [inside.plain() for inside in self.value] if isinstance(self.value, list) else self.value

    def mapping(self) -> dict[str, Marked]:
        """Return the value as a mapping of names.

        Raises:
            ValueError: it is none.
        """
        return self.check(dict)

    def items(self) -> list[Marked]:
        """Return the value as a list.

        Raises:
            ValueError: it is none.
        """
        return self.check(tuple, list)

    def check(self, kind: type, *others: type) -> Any:
        """Return the value; raise ValueError if it is neither of this kind nor of the others. True is no number."""
        is_kind = isinstance(self.value, (kind, *others))
        if not is_kind or (isinstance(self.value, bool) and kind is not bool):
            raise self.error(f"{self.name or 'the file'} is {self.plain()!r}, but it is {KINDS[kind]}.")
        return self.value


def read_marked(path: Path) -> Marked:
    """Return the contents of a YAML file.

    Raises:
        ValueError: there is no such file, it is not YAML, or a mapping has a name twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}:1: it cannot be read: {error}") from None
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            raise ValueError(f"{path}:1: the file is empty.")
        return _mark(loader, node, Marked(None, "", path, node.start_mark.line + 1))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line, why = mark.line + 1 if mark else 1, getattr(error, "problem", None) or error
        raise ValueError(f"{path}:{line}: it is not YAML: {why}.") from None
    finally:
        loader.dispose()


def _mark(loader: _Loader, node: yaml.Node, place: Marked) -> Marked:
    """Return the value of a node, with the name, file and line of `place`."""
    if isinstance(node, yaml.SequenceNode):
        places = (
            Marked(None, f"{place.name}[{index}]", place.file, each.start_mark.line + 1)
            for index, each in enumerate(node.value)
        )
        return place.with_value([_mark(loader, *each) for each in zip(node.value, places, strict=True)])
    if not isinstance(node, yaml.MappingNode):
        return place.with_value(loader.construct_object(node))
    entries: dict[str, Marked] = {}
    for key_node, value_node in node.value:
        key = str(loader.construct_object(key_node)) if not isinstance(key_node, yaml.ScalarNode) else key_node.value
        name, line = f"{place.name}.{key}" if place.name else key, key_node.start_mark.line + 1
        if key in entries:
            raise ValueError(
                f"{place.file}:{line}: {name} stands here a second time, after line {entries[key].line}: give it "
                "another name, or remove one."
            )
        entries[key] = _mark(loader, value_node, Marked(None, name, place.file, line))
    return place.with_value(entries)


def suggest(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return the end of a message on a name that is not known: the known one that is most like it, if there is one."""
    near = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else otherwise


def check_keys(marked: Marked, known: Iterable[str]) -> None:
    """Refuse keys that are not known.

    Raises:
        ValueError: there is one; the message says which known one is the most like it.
    """
    known = list(known)
    for key, value in marked.mapping().items():
        if key not in known:
            remedy = suggest(key, known, f"remove it; it has {', '.join(known[:20])}.")
            raise value.error(f"{marked.name or 'a recipe'} has no key {key!r}: {remedy}")


def fill(kind: type[Made], marked: Marked, **given: Any) -> Made:
    """Make an object of a dataclass from a mapping of its fields.

    Args:
        kind: the dataclass; the types of its fields say what they may hold.
        marked: the mapping.
        given: fields that are not in the file.
    Raises:
        ValueError: a key is unknown or missing, or a value has another type.
    """
    fields = {each.name: each for each in dataclasses.fields(kind) if each.name not in given}  # type: ignore[arg-type]
    check_keys(marked, fields)
    hints = get_type_hints(kind)
    for name, each in fields.items():
        needed = each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
        if needed and name not in marked.value:
            raise marked.error(f"{marked.name or 'the recipe'} has no {name}: write it, it has no default.")
    values = {name: convert(hints[name], value) for name, value in marked.value.items()}
    return kind(**values, **given)


def convert(hint: Any, marked: Marked) -> Any:
    """Return the value as a type hint says: numbers, texts, tuples, mappings and dataclasses, maybe None.

    Raises:
        ValueError: it is of another type.
    """
    if get_origin(hint) in (Union, types.UnionType):
        options = get_args(hint)
        if marked.value is None and type(None) in options:
            return None
        return convert(next(option for option in options if option is not type(None)), marked)
    origin = get_origin(hint) or hint
    if hint is Any:
        return marked.plain()
    if dataclasses.is_dataclass(hint):
        return fill(hint, marked)  # type: ignore[arg-type]
    if origin is tuple:
        return tuple(convert(get_args(hint)[0], each) for each in marked.items())
    if origin is dict:
        return {key: convert(get_args(hint)[1], each) for key, each in marked.mapping().items()}
    return float(marked.check(float, int)) if origin is float else marked.check(origin)


def named_numbers(text: str) -> dict[str, int | float]:
    """Return `temperature=1,top_k=40` as a mapping.

    Raises:
        ValueError: it is not like that.
    """
    found: dict[str, int | float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            found[name.strip()] = int(value) if value.strip().isdecimal() else float(value)
        except ValueError:
            raise ValueError(f"{text!r} is not like name=number,name=number.") from None
    return found
