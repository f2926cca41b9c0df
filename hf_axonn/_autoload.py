"""What torch runs at the end of every `import torch` in an environment where this package is installed.

It is registered under the entry point group `torch.backends`, and is how stock accelerate learns of our launch file:

- in a process that is `accelerate launch`, the command line is rewritten before accelerate reads it (launch.py);
- in a process that was started with AXONN_CONFIG set, a bare `Accelerator()` or `Trainer` gets the plugin (plugin.py),
  by a hook that acts when accelerate itself is imported;
- in every other process nothing happens.

torch turns any exception raised here into a failure of `import torch`, so none leaves this module. A launch that
cannot be right ends by SystemExit, which torch lets through.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


LAUNCH_MODULES = {"accelerate.commands.launch": 0, "accelerate.commands.accelerate_cli": 1}
LAUNCH_COMMANDS = {"accelerate-launch": 0, "accelerate": 1}
OWN_LAUNCHERS = ("axonn-launch", "hf_axonn.launch")


def autoload() -> None:
    """Act according to what this process is. Never raises an Exception; may raise SystemExit in a launcher.

    Set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to keep torch from calling it.
    """
    try:
        program = _program()
        if program in OWN_LAUNCHERS:  # it prepares its command line itself
            return
        start = _launch_arguments_start(program)
        if start is not None:
            from hf_axonn.launch import prepare_or_exit

            sys.argv[start:] = prepare_or_exit(sys.argv[start:])
        elif os.environ.get("AXONN_CONFIG"):
            after_import("accelerate.parallelism_config", _install_plugin)
    except Exception as error:
        print(f"hf_axonn: its part of `import torch` failed, and is left out: {error!r}", file=sys.stderr)


def _program() -> str:
    """The name of the command, or of the module after `python -m`, that this process runs."""
    first = sys.argv[0] if sys.argv else ""
    if first == "-m":  # Python has not yet found the module: torch is imported by one of its parent packages
        module = sys.orig_argv[-len(sys.argv)]
        return module[2:] if module.startswith("-m") else module
    for module in (*LAUNCH_MODULES, "hf_axonn.launch"):
        if first.endswith(os.path.join(*module.split(".")) + ".py"):
            return module
    return os.path.basename(first)


def _launch_arguments_start(program: str) -> int | None:
    """Index in sys.argv of the first argument of `accelerate launch`; None if the process is something else."""
    subcommands = LAUNCH_MODULES.get(program, LAUNCH_COMMANDS.get(program))
    if subcommands is None or (subcommands and sys.argv[1:2] != ["launch"]):
        return None
    return 1 + subcommands


def _install_plugin() -> None:
    from hf_axonn.plugin import install_default

    install_default()


def after_import(name: str, callback: Callable[[], None]) -> None:
    """Call `callback()` once, right after the module `name` has been imported; at once if it already is.

    An exception of the callback surfaces at that import, and then the next import of the module tries again.
    """
    if name in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, _PostImportFinder(name, callback))


class _PostImportFinder:
    """Finds one module by asking the finders behind it, and wraps its loader."""

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self.name = name
        self.callback = callback

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find_spec = getattr(finder, "find_spec", None)
            spec = find_spec(fullname, path, target) if find_spec else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _PostImportLoader(spec.loader, self)
                return spec
        return None


class _PostImportLoader:
    """A module's own loader, with the callback after it."""

    def __init__(self, loader, finder):
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        # The module must not be seen with our loader: inspect and importlib.resources ask it for sources and files.
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.callback()
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
