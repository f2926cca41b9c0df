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
        value: A number, text, true, false or None; a list of `Marked`; or a mapping of names to `Marked`.
        name: Keys that lead to it, such as `models.1M.grid`; empty for the whole file.
        file, line: Where it stands; a value of a mapping stands where its key does.
    """

    value: Any
    name: str
    file: Path
    line: int

    def error(self, message: str) -> ValueError:
        """What to raise about this value."""
        return ValueError(f"{self.file}:{self.line}: {message}")

    def at(self, *keys: str | int) -> Marked:
        """The value under some keys, or the nearest around it that is in the file."""
        here = self
        for key in keys:
            inside = here.value
            found = inside.get(key) if isinstance(inside, dict) else None
            if isinstance(inside, list) and isinstance(key, int) and key < len(inside):
                found = inside[key]
            if found is None:
                return here
            here = found
        return here

    def plain(self) -> Any:
        """The value without its marks."""
        if isinstance(self.value, dict):
            return {key: inside.plain() for key, inside in self.value.items()}
        if isinstance(self.value, list):
            return [inside.plain() for inside in self.value]
        return self.value

    def mapping(self) -> dict[str, Marked]:
        """The value as a mapping of names.

        Raises:
            ValueError: It is none.
        """
        if not isinstance(self.value, dict):
            raise self.refused(dict)
        return self.value

    def refused(self, kind: type) -> ValueError:
        """What to raise where the value is not of a kind."""
        shown = self.value if not isinstance(self.value, (dict, list)) else self.plain()
        return self.error(f"{self.name or 'the file'} is {shown!r}, but it is {KINDS[kind]}.")


def read_marked(path: Path) -> Marked:
    """The contents of a YAML file.

    Raises:
        ValueError: There is no such file, it is not YAML, or a mapping has a name twice.
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
        return _marked(loader, node, path, "", node.start_mark.line + 1)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ValueError(f"{path}:{mark.line + 1 if mark else 1}: it is not YAML: {error.problem}.") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}:1: it is not YAML: {error}") from None
    finally:
        loader.dispose()


def _marked(loader: _Loader, node: yaml.Node, file: Path, name: str, line: int) -> Marked:
    inside = f"{name}." if name else ""
    if isinstance(node, yaml.SequenceNode):
        values = [
            _marked(loader, each, file, f"{name}[{index}]", each.start_mark.line + 1)
            for index, each in enumerate(node.value)
        ]
        return Marked(values, name, file, line)
    if not isinstance(node, yaml.MappingNode):
        return Marked(loader.construct_object(node), name, file, line)
    entries: dict[str, Marked] = {}
    for key_node, value_node in node.value:
        key = str(loader.construct_object(key_node)) if not isinstance(key_node, yaml.ScalarNode) else key_node.value
        where = key_node.start_mark.line + 1
        if key in entries:
            raise ValueError(
                f"{file}:{where}: {inside}{key} stands here a second time, after line {entries[key].line}: give it "
                "another name, or remove one."
            )
        entries[key] = _marked(loader, value_node, file, f"{inside}{key}", where)
    return Marked(entries, name, file, line)


def check_keys(marked: Marked, known: Iterable[str]) -> None:
    """Refuse keys that are not known.

    Raises:
        ValueError: There is one; the message says which known one is the most like it.
    """
    known = list(known)
    for key, value in marked.mapping().items():
        if key not in known:
            near = get_close_matches(key, known, n=1, cutoff=0.5)
            where = marked.name or "a recipe"
            remedy = f"did you mean {near[0]}?" if near else f"remove it; it has {', '.join(known[:20])}."
            raise value.error(f"{where} has no key {key!r}: {remedy}")


def filled(kind: type[Made], marked: Marked, **given: Any) -> Made:
    """An object of a dataclass from a mapping of its fields.

    Args:
        kind: The dataclass; what its fields may hold follows from their types.
        marked: The mapping.
        given: Fields that the file does not say.

    Raises:
        ValueError: A key is unknown or missing, or a value has another type.
    """
    fields = {each.name: each for each in dataclasses.fields(kind) if each.name not in given}  # type: ignore[arg-type]
    check_keys(marked, fields)
    hints = get_type_hints(kind)
    for name, each in fields.items():
        needed = each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
        if needed and name not in marked.value:
            raise marked.error(f"{marked.name or 'the recipe'} has no {name}: write it, it has no default.")
    values = {name: converted(hints[name], value) for name, value in marked.value.items()}
    return kind(**values, **given)


def converted(hint: Any, marked: Marked) -> Any:
    """The value as a type hint wants it: numbers, texts, tuples, mappings and dataclasses, maybe None.

    Raises:
        ValueError: It is of another type.
    """
    if get_origin(hint) in (Union, types.UnionType):
        options = get_args(hint)
        if marked.value is None and type(None) in options:
            return None
        return converted(next(option for option in options if option is not type(None)), marked)
    origin = get_origin(hint) or hint
    if hint is Any:
        return marked.plain()
    if dataclasses.is_dataclass(hint):
        return filled(hint, marked)  # type: ignore[arg-type]
    if origin is tuple:
        if not isinstance(marked.value, list):
            raise marked.refused(tuple)
        return tuple(converted(get_args(hint)[0], each) for each in marked.value)
    if origin is dict:
        return {key: converted(get_args(hint)[1], each) for key, each in marked.mapping().items()}
    if origin is float and isinstance(marked.value, int) and not isinstance(marked.value, bool):
        return float(marked.value)
    if not isinstance(marked.value, origin) or (isinstance(marked.value, bool) and origin is not bool):
        raise marked.refused(origin)
    return marked.value


def named_numbers(text: str) -> dict[str, int | float]:
    """`temperature=1,top_k=40` as a mapping.

    Raises:
        ValueError: It is not like that.
    """
    found: dict[str, int | float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            found[name.strip()] = int(value) if value.strip().isdecimal() else float(value)
        except ValueError:
            raise ValueError(f"{text!r} is not like name=number,name=number.") from None
    return found
