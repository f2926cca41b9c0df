"""The parser of every command of this package: argparse's, with a few habits for all of them.

- `--batch-size` and `--batch_size` are the same option, whichever of the two is listed.
- Every command and subcommand has `--version`.
- Options are not abbreviated, so that a new one never changes what a script of yours means.
- A usage error is two lines: what is wrong, and where help is. Without any word, a command that has subcommands lists
  them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn


try:
    VERSION = f"hf_axonn {version('hf_axonn')}"
except PackageNotFoundError:
    VERSION = "hf_axonn, imported from a folder"


def with_reason(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Make `read` the type of an option: argparse prints the message of its ValueError, not one of its own."""

    def value(text: str) -> Any:
        try:
            return read(text)
        except ValueError as problem:
            raise argparse.ArgumentTypeError(str(problem)) from None

    return value


class Parser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` with the habits of this package; its subparsers are of this class too."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **options})
        self.add_argument("--version", action="version", version=VERSION, help="print the version, and end")

    def parse_known_args(  # type: ignore[override]  # overloaded in the stubs
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse as argparse does, for subcommands as well; options are spelt as they are listed first."""
        words = sys.argv[1:] if args is None else args
        if not words and self._subparsers is not None:
            self.print_help(sys.stderr)
            self.exit(2)
        return super().parse_known_args(self._spelt(words), namespace)

    def error(self, message: str) -> NoReturn:
        """End with exit code 2, without the list of all options."""
        self.exit(2, f"{self.prog}: {message}\n{self.prog} --help shows the options.\n")

    def _spelt(self, words: Sequence[str]) -> list[str]:
        """The words with dashes and underscores of option names as they are listed; what follows `--` is no option."""
        listed = {name.replace("_", "-"): name for name in self._option_string_actions if name.startswith("--")}
        end = words.index("--") if "--" in words else len(words)
        found = []
        for word in words[:end]:
            name, equals, value = word.partition("=")
            found.append(listed.get(name.replace("_", "-"), name) + equals + value)
        return [*found, *words[end:]]
