"""`--print-completion SHELL`: what a shell reads to complete a command, made by shtab of argparse's parsers.

shtab is the extra `completion`. It completes names of commands, options and choices; where an option or argument is a
text, as paths are, it is told here to complete files, for which argparse's private classes are looked at.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


SHELLS = ("bash", "zsh", "fish")


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Give the parser of a command the option that prints its script. Its `prog` is the command's name."""
    parser.add_argument(
        "--print-completion",
        choices=SHELLS,
        action=_PrintCompletion,
        help="print a script for this shell that completes the command, and end",
    )


class _PrintCompletion(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        try:
            import shtab
        except ImportError:
            parser.exit(2, f"{parser.prog}: {option} needs shtab: pip install 'hf_axonn[completion]'.\n")
        _complete_files(parser, shtab.FILE)
        print(shtab.complete(parser, shell=values))
        parser.exit()


def _complete_files(parser: argparse.ArgumentParser, files: Any) -> None:
    """Let texts that are no choice of few be completed as names of files."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command, files)
        elif action.nargs != 0 and action.choices is None and action.type in (None, str, Path):
            action.complete = files  # type: ignore[attr-defined]
