"""`hf-axonn finetune`, `demo` and `study`: the scripts of training_scripts, which is installed as `hf_axonn_scripts`.

All words after the name of the script go to it, `--help` too. `finetune --config FILE` starts it on every
rank of a launch file, by `axonn-launch`; those before `--config` go to the launcher as well.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from hf_axonn.compat.arguments import VERSION
from hf_axonn.compat.extras import lacking


SCRIPTS = {
    "finetune": (
        "hf_axonn_scripts.finetune",
        "fine-tune a causal LM with the goldfish loss; --config FILE: on a grid",
    ),
    "demo": ("hf_axonn_scripts.demo.run", "train a real model with and without the goldfish loss, and measure it"),
    "study": ("hf_axonn_scripts.study.study", "a study of memorization over size, repetition and k, from one recipe"),
}
EXTRAS = {"finetune": "data", "demo": "demo", "study": "study"}
# Extras that a script would miss on every rank or in the midst of its work; it checks the others itself.
BEFORE = {"finetune": ("data",), "demo": ("data", "eval"), "study": ()}


def run_script(name: str, arguments: Sequence[str]) -> int:
    """Run a script with its arguments; returns its exit code, 2 where a package that it needs is not installed.

    A launch takes the place of this process. An exception of a script ends with its traceback.
    """
    module = SCRIPTS[name][0]
    if "--version" in arguments:
        print(VERSION)
        return 0
    if name == "finetune":
        arguments = [part for word in arguments for part in _parts(word)]
    asks = "--help" in arguments or "-h" in arguments
    if BEFORE[name] and not asks and (reason := lacking(EXTRAS[name], *BEFORE[name])):
        print(f"hf-axonn {name}: {reason}", file=sys.stderr)
        return 2
    if name == "finetune" and "--config" in arguments:
        at = arguments.index("--config")
        launcher, rest = [*arguments[:at], *arguments[at : at + 2]], arguments[at + 2 :]
        if "--config" in rest:
            print(f"hf-axonn {name}: --config is given twice: leave one of the files out", file=sys.stderr)
            return 2
        command = [sys.executable, "-m", "hf_axonn.launch", *launcher, "-m", "hf_axonn", name, *rest]
        sys.stdout.flush()
        os.execv(sys.executable, command)
    try:
        script = importlib.import_module(module)
    except ModuleNotFoundError as error:
        needs = lacking(EXTRAS[name]) or f"{error.name} is not installed: pip install 'hf_axonn[{EXTRAS[name]}]'"
        print(f"hf-axonn {name}: {needs}", file=sys.stderr)
        return 2
    sys.argv = [f"hf-axonn {name}", *arguments]  # what argparse and messages call the program
    code = script.main()
    return code if isinstance(code, int) else 0


def _parts(word: str) -> list[str]:
    """Return `--config=FILE` as two words, anything else as it is."""
    return word.split("=", 1) if word.startswith("--config=") else [word]
