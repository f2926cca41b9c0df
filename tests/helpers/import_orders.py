"""Import a public name first and alone, in a fork that has torch and none of the libraries that import each other.

    python -m tests.helpers.import_orders CASES

CASES is JSON, a list of [launched, before, module, name]; `launched`: whether in the environment of a rank; `before`:
what is imported first. Each fork does `from module import name`. Prints the traceback of each case that failed.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType

import huggingface_hub  # noqa: F401  (what the libraries import and does not import them)
import safetensors.torch  # noqa: F401
import tokenizers  # noqa: F401
import torch


FORGOTTEN = ("accelerate", "hf_axonn", "hf_axonn_eval", "peft", "transformers", "trl")
RANK = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
RANK |= {"AXONN_CONFIG": '{"grid": {"z": 2}}', "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def exports(package: ModuleType) -> dict[str, str]:
    """Return public name -> module of a package, as Python's own parser reads its stub."""
    stub = ast.parse(Path(package.__file__).with_name("__init__.pyi").read_text(encoding="utf-8"))
    lines = [line for line in stub.body if isinstance(line, ast.ImportFrom)]
    return {alias.asname: line.module for line in lines for alias in line.names if alias.asname == alias.name}


def check(launched: bool, before: str, module: str, name: str) -> None:
    """Import as a case says, and see that a bare `Accelerator()` of a rank, and no other, gets the plugin."""
    if launched:
        os.environ.update(RANK)
    torch._import_device_backends()  # what `import torch` ends with
    exec(before)
    exec(f"from {module} import {name}")
    import accelerate.accelerator

    from hf_axonn import AxonnPlugin

    seen = {accelerate.ParallelismConfig, accelerate.utils.ParallelismConfig, accelerate.accelerator.ParallelismConfig}
    assert (seen == {AxonnPlugin}) == launched, seen
    if launched and "transformers.trainer" in sys.modules:
        assert "axonn_wrapped" in vars(sys.modules["transformers.trainer"].Trainer)


def failed(case: list, log) -> bool:
    """Run a case in a fork, its output in `log`."""
    child = os.fork()
    if child == 0:
        code = 1
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            check(*case)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitpid(child, 0)[1] != 0


def main(cases: list[list]) -> int:
    """Run the cases; returns the exit code."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in FORGOTTEN:
            del sys.modules[name]
    wrong = 0
    for case in cases:
        with tempfile.TemporaryFile("w+") as log:
            if failed(case, log):
                wrong += 1
                log.seek(0)
                print(f"{case}:\n{log.read()}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
