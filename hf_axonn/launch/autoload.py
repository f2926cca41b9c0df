"""Hook that torch runs at the end of every `import torch` in an environment where this package is installed.

It is registered under the entry point group `torch.backends`, and is how stock accelerate learns of our launch file:

- in a process that is `accelerate launch`, the command line is rewritten before accelerate reads it (command.py);
- in a process that is another command of accelerate, such as `accelerate env`, or TRL's `trl sft`, the key is known,
  too (accelerate_commands.py);
- in a process that was started with AXONN_CONFIG set, a bare `Accelerator()` or `Trainer` gets the plugin (plugin.py),
  by a hook that acts when accelerate itself is imported; and RANK becomes what the order of the axes says, where the
  launch file gives one (topology/axis_order.py), and all nodes give the same (node_check.py);
- in every other process nothing happens.

torch turns any exception raised here into a failure of `import torch`, so none leaves this module. A launch that
cannot be right ends by SystemExit, which torch lets through.
"""

from __future__ import annotations

import os
import sys


LAUNCH_MODULES = {"accelerate.commands.launch": 0, "accelerate.commands.accelerate_cli": 1}
LAUNCH_COMMANDS = {"accelerate-launch": 0, "accelerate": 1}
# What else reads a launch file; so does `accelerate`, wherever it does not launch.
OTHER_MODULES = ("accelerate.commands.env",)
OTHER_COMMANDS = ("accelerate-config",)
TRL = "trl"  # its commands call the launcher of accelerate
OWN_LAUNCHERS = ("axonn-launch", "hf_axonn.launch")


def autoload() -> None:
    """Act according to what this process is.

    Never raises an Exception; may raise SystemExit in a launcher, and where the nodes of a launch differ. Set
    TORCH_DEVICE_BACKEND_AUTOLOAD=0 to keep torch from calling it.
    """
    try:
        program = _program()
        if program in OWN_LAUNCHERS:  # it prepares its command line itself
            return
        start = _launch_arguments_start(program)
        if start is not None:
            from hf_axonn.launch.command import prepare_or_exit

            sys.argv[start:] = prepare_or_exit(sys.argv[start:])
        elif program in (*LAUNCH_MODULES, *LAUNCH_COMMANDS, *OTHER_MODULES, *OTHER_COMMANDS):
            from hf_axonn.compat.post_import import after_import

            after_import("accelerate.commands.config.config_args", _keep_section)
            after_import("accelerate.commands.test", _test_on_grid)
        elif program == TRL:
            from hf_axonn.compat.post_import import after_import

            after_import("accelerate.commands.launch", _prepare_what_is_parsed)
        elif os.environ.get("AXONN_CONFIG"):
            if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
                from hf_axonn.launch.node_check import compare_or_exit

                compare_or_exit(os.environ)
            if '"order"' in os.environ["AXONN_CONFIG"]:
                from hf_axonn.topology.axis_order import take_rank

                take_rank(os.environ)
            from hf_axonn.compat.post_import import after_import
            from hf_axonn.distributed.watchdog.signals import keep_until_limit

            keep_until_limit()  # a Trainer may save (stopping.py)
            after_import("accelerate.parallelism_config", _install_plugin)
    except Exception as error:
        print(f"hf_axonn: its part of `import torch` failed, and is left out: {error!r}", file=sys.stderr)


def _program() -> str:
    """The name of the command, or of the module after `python -m`, that this process runs."""
    first = sys.argv[0] if sys.argv else ""
    if first == "-m":  # Python has not yet found the module: torch is imported by one of its parent packages
        module = sys.orig_argv[-len(sys.argv)]
        return module[2:] if module.startswith("-m") else module
    if first.endswith(os.path.join("hf_axonn", "launch", "__main__.py")):
        return "hf_axonn.launch"
    for module in (*LAUNCH_MODULES, *OTHER_MODULES):
        if first.endswith(os.path.join(*module.split(".")) + ".py"):
            return module
    name = os.path.basename(first)
    return name if name not in (*LAUNCH_COMMANDS, *OTHER_COMMANDS, *OWN_LAUNCHERS) or _is_command(first) else ""


def _is_command(path: str) -> bool:
    """True if a file is the one that pip writes for a launcher's command, and no script of that name."""
    try:
        with open(path, "rb") as file:
            start = file.read(4096)
    except OSError:
        return True
    return b"accelerate.commands" in start or b"hf_axonn.launch" in start


def _launch_arguments_start(program: str) -> int | None:
    """Index in sys.argv of the first argument of `accelerate launch`; None if the process is something else."""
    subcommands = LAUNCH_MODULES.get(program, LAUNCH_COMMANDS.get(program))
    if subcommands is None or (subcommands and sys.argv[1:2] != ["launch"]):
        return None
    return 1 + subcommands


def _install_plugin() -> None:
    """Accelerate has just been imported; if plugin.py is what imports it, wait until that is complete, too."""
    from hf_axonn.compat.post_import import after_import

    def install() -> None:
        from hf_axonn.plugin import install_default

        install_default()

    after_import("hf_axonn.plugin", install)
    import hf_axonn.plugin  # noqa: F401  (which calls it, unless it was there)


def _keep_section() -> None:
    from hf_axonn.launch.accelerate_commands import keep_section

    keep_section()


def _test_on_grid() -> None:
    from hf_axonn.launch.accelerate_commands import test_on_grid

    test_on_grid()


def _prepare_what_is_parsed() -> None:
    from hf_axonn.launch.accelerate_commands import prepare_what_is_parsed

    prepare_what_is_parsed()
