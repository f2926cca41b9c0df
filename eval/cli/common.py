"""Options that several commands of `hf-axonn-eval` take, how an option is read, and what is printed.

Each command has a file of its own (samples.py, ...) with `add(commands)`, which lists its options; its other imports
wait until it runs, so that --help does not wait for torch.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from hf_axonn_eval.data.kinds import check_kind, check_output
from hf_axonn_eval.data.visible import visible
from hf_axonn_eval.extraction.load_model import DTYPES


def from_zero(text: str, least: int = 0) -> int:
    """Read a whole number of at least 0."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {least}")
    return int(text)


def at_least_one(text: str) -> int:
    """Read a whole number of at least 1."""
    return from_zero(text, 1)


def share(text: str) -> float:
    """Read a number between 0 and 1, without the two."""
    try:
        if 0 < float(text) < 1:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text} is not a number between 0 and 1")


# Options of more than one command, as `command` adds them; a command may change an entry, such as the help.
OPTIONS: dict[str, dict[str, Any]] = {
    "--model": {"reads": "model"},
    "--tokenizer": {"reads": "tokenizer", "help": "if it is not beside the model"},
    "--grid": {
        "metavar": "SIZES",
        "help": "data=1,z=2,y=1,x=2 (default: axonn_config of accelerate launch, else none)",
    },
    "--trust_remote_code": {"action": "store_true", "help": "execute code that comes with the model or tokenizer"},
    "--samples": {"reads": "samples", "help": "what `samples` wrote"},
    "--runs": {
        "reads": "run",
        "nargs": "+",
        "metavar": "NAME=DIR",
        "required": True,
        "help": "outputs of `extract`, the untrained model first",
    },
    "--base": {"metavar": "NAME", "help": "run that the others are compared with (default: base, or the first)"},
    "--lengths": {"nargs": "+", "default": (), "type": at_least_one, "help": "also verbatim for suffixes cut to N"},
    "--confidence": {"type": share, "default": 0.95, "help": "of the intervals (default 0.95)"},
    "--id_key": {"default": "id", "metavar": "KEY"},
    "--text_key": {"default": "text", "metavar": "KEY"},
}
_METAVARS: dict[Any, str] = {int: "N", from_zero: "N", at_least_one: "N", float: "P", share: "P", "documents": "PATH"}
_METAVARS |= dict.fromkeys(("run", "model", "tokenizer", "report", "canaries", "export"), "DIR")


def command(commands, name: str, summary: str, function: Callable[[argparse.Namespace], int | None]) -> Callable:
    """Add a command, whose function returns its exit code or None for 0.

    Returns:
        Its `add_argument`, which takes four more: `reads`, the kind (data/kinds.py) of the files that an option
        names, `writes`, that of what the command writes there, `needs`, options without any of which it does
        nothing, and `replaces`, one beside which it is refused. It begins with the entry of OPTIONS, and a metavar by
        type or kind.
    """
    parser = commands.add_parser(name, help=summary, description=summary)
    checks: list[tuple[Callable[..., None], str, str, str]] = []
    needs: dict[str, Sequence[str]] = {}
    replaces: dict[str, str | None] = {}
    parser.set_defaults(command=function, checks=checks, needs=needs, replaces=replaces, default_of=parser.get_default)

    def add(option: str, **settings: Any) -> None:
        settings = OPTIONS.get(option, {}) | settings
        files = {check_kind: settings.pop("reads", None), check_output: settings.pop("writes", None)}
        needs[option], replaces[option] = settings.pop("needs", ()), settings.pop("replaces", None)
        kinds = [kind for kind in files.values() if kind is not None]
        if not settings.keys() & {"action", "choices", "metavar"}:
            known = [_METAVARS[key] for key in (settings.get("type"), *kinds) if key in _METAVARS]
            settings["metavar"] = (known or ["FILE"])[0]
        place = parser.add_argument(option, **settings).dest
        checks.extend((check, place, kind, option) for check, kind in files.items() if kind is not None)

    return add


def check_needs(arguments: argparse.Namespace) -> None:
    """Raise ValueError where an option is given that does nothing without another one, or with one whose place it
    takes, or where two outputs are one file."""

    def is_given(option: str) -> bool:
        name = option.removeprefix("--")
        return getattr(arguments, name) != arguments.default_of(name)

    for option, needs in arguments.needs.items():
        if needs and is_given(option) and not any(map(is_given, needs)):
            others = " or ".join(needs)
            raise ValueError(f"{option} does nothing without {others}: give {others}, too, or leave {option} out.")
    for option, replaced in arguments.replaces.items():
        if replaced is not None and is_given(option) and is_given(replaced):
            raise ValueError(f"{option} stands in place of {replaced}: give one of the two.")
    outputs: dict[str, str] = {}
    for check, place, _, option in arguments.checks:
        path = getattr(arguments, place)
        if check is check_output and path is not None:
            other = outputs.setdefault(os.path.realpath(path), option)
            if other != option:
                raise ValueError(f"{other} and {option} are both {path}: name two files.")


def check_files(arguments: argparse.Namespace) -> None:
    """Raise ValueError where an option names a file of another kind than it takes, or would write over one."""
    for check, place, kind, option in arguments.checks:
        given = getattr(arguments, place)
        for path in given if isinstance(given, list) else [] if given is None else [given]:
            named = kind == "run" and not os.path.exists(path)  # NAME=DIRECTORY
            check(path.partition("=")[2] if named else path, kind, option)


def pick(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return options by name, to pass them on."""
    return {name: getattr(arguments, name) for name in names}


def add_model_options(add: Callable) -> None:
    """Add the options of every command that asks one model; `load` reads them."""
    add("--model", required=True, help="HF directory, or a sharded checkpoint; a name on the Hub")
    add("--revision", metavar="NAME", help="branch, tag or commit of a model on the Hub")
    add("--tokenizer")
    add("--grid")
    add("--dtype", choices=DTYPES, default="auto", help="of the weights (default: as in the checkpoint)")
    add("--trust_remote_code")


def load(arguments: argparse.Namespace, **options: Any):
    """Load the model that `add_model_options` named, as a `LoadedModel`; `options` are more of `load_model`."""
    from hf_axonn_eval.extraction.load_model import load_model

    if os.environ.get("RANK", "0") != "0" or not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # one bar for the job, not one a rank, and none in a file
    options |= pick(arguments, "tokenizer", "dtype", "trust_remote_code", "revision")
    return load_model(arguments.model, grid=read_grid(arguments.grid), **options)


def load_tokenizer(path: str, arguments: argparse.Namespace):
    """Load the tokenizer of a command that needs no model, without torch where the process is the command's own; the
    command takes --trust_remote_code.
    """
    from hf_axonn.compat.without_torch import without_torch
    from hf_axonn_eval.extraction.load_model import load_tokenizer

    with without_torch() if arguments.own_process else nullcontext():
        return load_tokenizer(path, trust_remote_code=arguments.trust_remote_code)


def show(
    runs: Mapping[str, Sequence], arguments: argparse.Namespace, *, show_warnings: bool = True, **options: Any
) -> dict[str, Any]:
    """Print the table of some runs; returns the comparison it was made of."""
    from rich.console import Console

    from hf_axonn_eval.analysis.summary import compare
    from hf_axonn_eval.report.write import terminal_table

    comparison = compare(runs, confidence=arguments.confidence, **options)
    Console().print(terminal_table(comparison, show_warnings=show_warnings))
    return comparison


def say(what: object) -> None:
    """Print one line, on the first process alone; a path in it cannot act on the terminal."""
    if os.environ.get("RANK", "0") == "0":
        print(visible(str(what)), flush=True)


def read_runs(pairs: Sequence[str]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Read NAME=DIRECTORY pairs of outputs of `extract`.

    Returns:
        The results and the records, both by name.
    Raises:
        ValueError: not such pairs, a name twice, or no finished run in a directory.
    """
    from hf_axonn_eval.data.results import read_run

    named = [pair.partition("=") for pair in pairs]
    if any(not name or not directory for name, _, directory in named):
        raise ValueError(f"--runs takes NAME=DIRECTORY pairs, not {' '.join(pairs)}.")
    if len({name for name, _, _ in named}) != len(named):
        raise ValueError(f"--runs has a name twice: {' '.join(pairs)}.")
    read = {name: read_run(directory) for name, _, directory in named}
    return {name: results for name, (_, results) in read.items()}, {name: record for name, (record, _) in read.items()}


def check_asked(samples: Iterable[Any], records: Mapping[str, Mapping[str, Any]], path: str) -> None:
    """Raise ValueError unless runs with these records were asked these samples, which are in the file `path`."""
    from hf_axonn_eval.data.samples import samples_digest

    digest = samples_digest(samples)
    digests = {record["identity"]["samples_sha256"] for record in records.values()}
    if digests != {digest}:
        raise ValueError(
            f"{path} is not what the runs were asked: its sha256 is {digest}, theirs {', '.join(sorted(digests))}."
        )


def run_name(directory: str | os.PathLike) -> str:
    """Name a run by its directory, for a table that shows it alone."""
    return os.path.basename(os.path.normpath(directory))


def read_grid(text: str | None):
    """Return the grid named on the command line, else that of `accelerate launch --config axonn.yaml`, else None."""
    if text is None and "AXONN_CONFIG" not in os.environ:
        return None
    from hf_axonn import AxonnConfig, Grid

    if text is None:
        return AxonnConfig.from_env().grid
    return Grid(
        **read_settings(
            "--grid", text, dict.fromkeys(("data", "z", "y", "x", "context"), from_zero), "data=1,z=2,y=1,x=2"
        )
    )


def read_settings(option: str, text: str, kinds: Mapping[str, Callable[[str], Any]], example: str) -> dict[str, Any]:
    """Read NAME=VALUE pairs with commas between them.

    Args:
        option: that they were given to.
        text: the pairs.
        kinds: by name what reads the value.
        example: of a text that would do.
    Raises:
        ValueError: another name, one twice, or a value that cannot be read.
    """
    settings: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name in settings:
            raise ValueError(f"{option} {text} has {name} twice.")
        try:
            settings[name] = kinds[name](value)
        except (KeyError, ValueError, argparse.ArgumentTypeError):
            raise ValueError(f"{option} {text} is not like {example}.") from None
    return settings
