"""Accelerate's own commands over a launch file with `axonn_config`: `env`, `config update` and `test`; and TRL's
`trl`, which calls accelerate's launcher.

Stock accelerate refuses the key. In a process that is one of these commands the autoload hook (autoload.py) calls
`keep_section` and `test_on_grid` when accelerate has imported the parts in question; files on disk stay as they are,
and what `config update` writes has the section.

`accelerate test` runs a script that takes every process for a data-parallel rank, which fails where x or y is larger
than 1. With a section it runs self_test.py in its place.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_axonn.launch.command import default_file, prepare_or_exit, read_launch_file
from hf_axonn.launch.launch_file import SECTION


def keep_section() -> None:
    """Give accelerate's class of a launch file the key `axonn_config`; right after config_args.py was imported."""
    import accelerate.commands.config.config_args as module

    stock = module.ClusterConfig

    @dataclass
    class ClusterConfig(module.ClusterConfig):
        axonn_config: Any = None

        @staticmethod
        def process_config(config_dict: dict[str, Any]) -> dict[str, Any]:
            # Stock accelerate writes false for a missing use_cpu; beside the section it means GPUs or nothing.
            undecided = SECTION in config_dict and "use_cpu" not in config_dict
            processed = stock.process_config(config_dict)
            return {**processed, "use_cpu": None} if undecided else processed

        def to_dict(self) -> dict[str, Any]:
            section, self.axonn_config = self.axonn_config, None  # stock would make null of what is empty in it
            try:
                found = super().to_dict()
            finally:
                self.axonn_config = section
            return found if section is None else {**found, SECTION: section}

    module.ClusterConfig = ClusterConfig


def test_on_grid() -> None:
    """Let `accelerate test` look at a grid; right after accelerate/commands/test.py was imported."""
    import accelerate.commands.test as module

    stock = module.test_command

    def test_command(args: Any) -> None:
        path = Path(args.config_file) if args.config_file else default_file()
        if path is None or SECTION not in _settings(path):
            stock(args)
            return
        words = [sys.executable, "-m", "accelerate.commands.launch", f"--config_file={path}"]
        code = subprocess.call([*words, "-m", "hf_axonn.launch.self_test"])
        if code:
            raise SystemExit(code)
        print("Test is a success! You are ready for your distributed training!")

    module.test_command = test_command


def prepare_what_is_parsed() -> None:
    """Let a command that hands its arguments to accelerate's launcher, as `trl sft --accelerate_config` does, launch a
    grid; right after accelerate/commands/launch.py was imported."""
    import accelerate.commands.launch as module

    stock = module.launch_command_parser

    def launch_command_parser(*args: Any, **options: Any) -> Any:
        parser = stock(*args, **options)
        parse = parser.parse_args
        parser.parse_args = lambda arguments: parse(prepare_or_exit(arguments))
        return parser

    module.launch_command_parser = launch_command_parser


def _settings(path: Path) -> dict[str, Any]:
    """The launch file; ends the process with a sentence where it cannot be read."""
    try:
        return read_launch_file(path)
    except ValueError as problem:
        print(f"hf_axonn: nothing was started. {problem}", file=sys.stderr)
        raise SystemExit(2) from None
