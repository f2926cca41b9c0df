"""Launching: from one file with an `axonn_config` section to what stock accelerate understands.

`accelerate launch` knows neither the option `--config` nor the key `axonn_config`. Both are mended before it reads its
command line: the section is validated and passed on in the environment, and accelerate gets `--config_file` with a
temporary copy of the file without the section. `accelerate launch --config axonn.yaml script.py` does it by the
autoload hook (autoload.py). `axonn-launch --config axonn.yaml script.py` does it without the hook, for places where
TORCH_DEVICE_BACKEND_AUTOLOAD is 0: it turns autoloading on for the processes that it starts, since there the hook
gives a bare `Accelerator()` its plugin. What is refused or mended in the file is decided in launch_file.py.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hf_axonn.compat.arguments import VERSION
from hf_axonn.compat.versions import bounds, check_versions, requirements
from hf_axonn.config import LAUNCH_FILE, VARIABLE
from hf_axonn.launch.failed_ranks import shorten_child_failures
from hf_axonn.launch.forwarding import forward_signals
from hf_axonn.launch.launch_file import SECTION, check_spelling, resolve
from hf_axonn.topology.upstream_sizes import PREFIX


CONFIG_OPTIONS = ("config", "config_file")
MOST_VALUES = 10_000  # of a launch file


def main() -> None:
    """The console script `axonn-launch`: the arguments of `accelerate launch`, and no need for the autoload hook."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    parser = launch_command_parser()
    parser.prog = "axonn-launch"
    parser.add_argument("--version", action="version", version=VERSION, help="print the version, and end")
    parser.epilog = f"--config is short for --config_file; the file may hold the section {SECTION}."
    arguments = parser.parse_args(prepare_or_exit(sys.argv[1:]))
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"
    launch_command(arguments)


def prepare_or_exit(arguments: Sequence[str]) -> list[str]:
    """`prepare` of this process, the launcher: a wrong launch file, or ranks that fail, end it with a few lines."""
    try:
        prepared = prepare(arguments)
    except (ValueError, OSError) as error:  # OSError: of a disk without room for the temporary file
        print(f"hf_axonn: nothing was started. {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if VARIABLE in os.environ:  # a launch over a grid
        shorten_child_failures()
        forward_signals()
    return prepared


def prepare(arguments: Sequence[str]) -> list[str]:
    """Turn the arguments of a launch into arguments of stock `accelerate launch`.

    Where the launch file has an `axonn_config`, sets AXONN_CONFIG and AXONN_LAUNCH_FILE (and, on CPUs,
    ACCELERATE_USE_CPU and OMP_NUM_THREADS, on GPUs those of gpu_settings.py) in os.environ, which accelerate copies to
    the processes, and writes a temporary launch file that is deleted when this process ends. Without one, only
    `--config` is respelled `--config_file`.

    Args:
        arguments: what stands after `accelerate launch`: options, the script, the script's own arguments.
    Raises:
        ValueError: the launch file is missing, unreadable or wrong; the message says what to write instead. Or the
            release of a library is not proven (`check_versions`).
    """
    command = Command.parse(arguments)
    given = command.value(*CONFIG_OPTIONS)
    path = Path(given) if given else default_file()
    if path is None:
        return list(arguments)
    settings = read_launch_file(path)
    check_spelling(path.name, settings)
    if SECTION not in settings:
        return command.without(*CONFIG_OPTIONS).arguments(f"--config_file={given}") if given else list(arguments)
    check_versions()
    try:
        launch = resolve(settings, command.values())
    except ValueError as error:
        raise ValueError(f"{given or path}: {error}") from None
    for note in launch.notes:
        print(f"hf_axonn: {note}", file=sys.stderr)
    os.environ.update(launch.environment, **{LAUNCH_FILE: str(given or path)})
    upstream = [name for name in command.values() if name.startswith(PREFIX)]
    remaining = command.without("cpu", "use_parallelism_config", *upstream, *CONFIG_OPTIONS)
    return remaining.arguments(f"--config_file={write_temporary(launch.settings)}")


@dataclass(frozen=True)
class Command:
    """A command line of `accelerate launch`, divided where the script begins.

    Args:
        options: for each option before the script its name, its value (None for a switch) and its words.
        rest: the script and everything after it, which is never looked at.
    """

    options: tuple[tuple[str, str | None, tuple[str, ...]], ...]
    rest: tuple[str, ...]

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Command:
        """Divide `arguments`, as accelerate's own parser will; an option it does not know is left for it to refuse."""
        takes_value = {**accelerate_options(), "--config": True}
        words, options = list(arguments), []
        while words and words[0].startswith("-") and words[0] not in ("-", "--"):
            word = words.pop(0)
            option, equals, value = word.partition("=")
            used = (word,)
            if takes_value.get(option) and not equals and words:
                value = words.pop(0)
                used = (word, value)
            name = option.lstrip("-").replace("-", "_")
            options.append((name, value if takes_value.get(option) else None, used))
        return cls(options=tuple(options), rest=tuple(words))

    def values(self) -> dict[str, str | None]:
        """Options by name, with underscores; the last one counts, as in argparse."""
        return {name: value for name, value, _ in self.options}

    def value(self, *names: str) -> str | None:
        """The value of the last option that has one of these names."""
        return next((value for name, value, _ in reversed(self.options) if name in names), None)

    def without(self, *names: str) -> Command:
        """The same command line with no option of these names."""
        return Command(options=tuple(option for option in self.options if option[0] not in names), rest=self.rest)

    def arguments(self, *first: str) -> list[str]:
        """The command line as a list of words, with `first` in front."""
        return [*first, *(word for _, _, words in self.options for word in words), *self.rest]


def accelerate_options() -> dict[str, bool]:
    """Every option string of `accelerate launch`, and whether a value follows it.

    Read from the source of accelerate's parser without running it: the autoload hook is called while accelerate is
    still being imported.

    Raises:
        ValueError: accelerate has no such source file, which a release outside our range may bring.
    """
    source = Path(find_spec("accelerate").origin).with_name("commands") / "launch.py"
    if not source.is_file():
        (proven,) = requirements("accelerate")
        raise ValueError(f"this release of accelerate has no {source}: install accelerate{bounds(proven)}.")
    options = {}
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "add_argument":
            names = [word.value for word in node.args if isinstance(word, ast.Constant)]
            actions = [keyword.value for keyword in node.keywords if keyword.arg == "action"]
            takes_value = not actions or getattr(actions[0], "value", None) in ("store", "append")
            for name in names:
                if name.startswith("-"):
                    options[name] = takes_value
                if name.startswith("--"):  # accelerate takes both --log_dir and --log-dir
                    options["--" + name[2:].replace("_", "-")] = takes_value
    return options


def default_file() -> Path | None:
    """The file that accelerate takes when none is named, if there is one."""
    cache = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    path = Path(os.path.expanduser(cache), "accelerate", "default_config.yaml")  # Path's own fails without a home
    return path if path.is_file() else None


def read_launch_file(path: Path) -> dict:
    """The settings of a launch file.

    Raises:
        ValueError: it cannot be read, or is not YAML with keys, each of them once.
    """
    import yaml

    class EachKeyOnce(yaml.SafeLoader):
        """PyYAML takes the last of two values; which one was meant is not known."""

        def construct_mapping(self, node, deep=False):
            lines: dict[str, int] = {}
            for name, line in ((str(key.value), key.start_mark.line + 1) for key, _ in node.value):
                if name in lines:
                    raise ValueError(f"the key {name!r} has two values, in lines {lines[name]} and {line}.")
                lines[name] = line
            return super().construct_mapping(node, deep)

    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), EachKeyOnce)
    except OSError as error:
        raise ValueError(f"the launch file {path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"the launch file {path} is not YAML: {error}") from None
    if not _is_small(settings):
        raise ValueError(f"the launch file {path} holds more than {MOST_VALUES} values: it is no launch file.")
    if not isinstance(settings, dict):
        raise ValueError(f"the launch file {path} holds no settings: write num_processes, axonn_config and so on.")
    return settings


def _is_small(settings: object) -> bool:
    """True if there are at most MOST_VALUES values, those behind YAML's aliases counted at every place."""
    count, stack = 0, [settings]
    while stack and count <= MOST_VALUES:
        value = stack.pop()
        count += 1
        if isinstance(value, (dict, list)):
            stack += [*value, *value.values()] if isinstance(value, dict) else value
    return count <= MOST_VALUES


def write_temporary(settings: dict) -> str:
    """Write settings to a file that is removed when this process ends, and return its name."""
    import atexit
    import tempfile

    import yaml

    with tempfile.NamedTemporaryFile("w", prefix="axonn-", suffix=".yaml", delete=False, encoding="utf-8") as file:
        yaml.safe_dump(settings, file)
    owner = os.getpid()
    # A forked child that ends in the ordinary way runs this too, while the launcher may still need the file.
    atexit.register(lambda: os.getpid() == owner and Path(file.name).unlink(missing_ok=True))
    return file.name
