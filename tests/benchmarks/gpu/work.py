"""What one process measures: `python -m tests.benchmarks.gpu.work WHAT --result FILE`, each as JSON.

machine       what there is to run on
collect       the files of tests that run their ranks on what HF_AXONN_TEST_DEVICE says, and of those marked gpu
equality      one of these files: which tests passed, failed and were skipped
weights       random weights and the batches that all contenders start from
host          tests/benchmarks/host/host_time.py
tuning        tests/benchmarks/kernels/tuning.py
extraction    tests/benchmarks/eval/extraction.py, with random weights
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.gpu.settings import BATCHES, MODELS, STEPS, llama
from tests.helpers import ROOT


# As `make test-gpu`, in processes of their own: one that has used a GPU cannot fork ranks that do.
SELECT = {False: "on_device and not slow and not gpu", True: "gpu"}
NO_TESTS = 5  # pytest's exit code
PACKAGES = ("hf_axonn", "torch", "transformers", "accelerate")


def device() -> torch.device:
    """The first accelerator, or the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else torch.device(found.type, 0)


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of `settings.Machine`."""
    versions = {name: version(name) for name in PACKAGES}
    here = device()
    # Inductor builds C++ on a CPU, and Triton builds launchers with a C compiler.
    compiler = any(map(shutil.which, ("cc", "gcc", "clang", "c++", "g++")))
    if here.type == "cpu":
        import psutil

        found = {"count": 0, "name": "CPU", "memory": psutil.virtual_memory().total, "compiler": compiler}
    else:
        _, memory = torch.accelerator.get_memory_info(here)
        found = {
            "count": torch.accelerator.device_count(),
            "name": torch.get_device_module(here).get_device_name(here),
            "memory": memory,
            "compiler": compiler and importlib.util.find_spec("triton") is not None,
        }
        if here.type == "cuda" and torch.version.cuda:
            versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {"kind": here.type, **found, "versions": versions}


class Outcomes:
    """A plugin of pytest: the items that were collected, and how each ended."""

    def __init__(self) -> None:
        self.files: dict[bool, list[str]] = {}  # by whether a test is marked gpu
        self.ends: dict[str, str] = {}

    def pytest_collection_finish(self, session: Any) -> None:
        """Called by pytest."""
        for gpu in SELECT:
            items = (item for item in session.items if gpu == (item.get_closest_marker("gpu") is not None))
            self.files[gpu] = sorted({str(item.path.relative_to(ROOT)) for item in items})

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called by pytest after set-up, test and tear-down of each."""
        if report.when == "call" or not report.passed:
            worse = self.ends.get(report.nodeid) == "failed"
            self.ends[report.nodeid] = "failed" if worse else report.outcome


def pytest(*arguments: str) -> Outcomes:
    """Tests in this process, which forks their ranks.

    Raises:
        RuntimeError: pytest could not run them.
    """
    import pytest as program

    found = Outcomes()
    code = program.main([f"--rootdir={ROOT}", "-p", "no:cacheprovider", "-q", *arguments], plugins=[found])
    if code not in (program.ExitCode.OK, program.ExitCode.TESTS_FAILED, NO_TESTS):
        raise RuntimeError(f"pytest {' '.join(arguments)} ended with {code}; see above.")
    return found


def collect(options: argparse.Namespace) -> dict[str, Any]:
    """Files of tests that ask for the fixture `device`, and of those that use a GPU themselves."""
    both = pytest("--collect-only", "-m", " or ".join(f"({each})" for each in SELECT.values()), str(ROOT / "tests"))
    return {"files": both.files[False], "gpu": both.files[True]}


def equality(options: argparse.Namespace) -> dict[str, Any]:
    """How the tests of a file ended."""
    ends = pytest("-m", SELECT[options.gpu], str(ROOT / options.file)).ends
    counts = {end: list(ends.values()).count(end) for end in ("passed", "failed", "skipped")}
    return {**counts, "failures": [name for name, end in ends.items() if end == "failed"]}


def weights(options: argparse.Namespace) -> dict[str, Any]:
    """Write a model's random weights in bfloat16, which are loaded as float32, and the batches of all steps."""
    from transformers import AutoModelForCausalLM

    from tests.benchmarks.peers.peers import text_batches

    config = llama(MODELS[options.model][0], options.sequence)
    batches = text_batches(min(8192, config.vocab_size), options.rows, options.sequence)
    if not len(batches):
        raise ValueError(f"the text has no {options.rows} rows of {options.sequence} tokens: give a lower --sequence.")
    torch.manual_seed(0)
    with device():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(options.folder)
    model.config.dtype = torch.float32  # what a loader makes of them
    model.config.save_pretrained(options.folder)
    torch.save(batches[:STEPS].clone(), options.folder / BATCHES)
    return {"parameters": sum(parameter.numel() for parameter in model.parameters())}


def host(options: argparse.Namespace) -> dict[str, Any]:
    """Processor seconds of a layer by phase and contender, and the table of host_time.py."""
    from tests.benchmarks.host import host_time

    torch.set_num_threads(1)
    effort = dict(rounds=1, repeats=1) if options.smoke else dict(rounds=20, repeats=3)
    found = {phase: host_time.measure(phase, **effort) for phase in host_time.PHASES}
    return {"seconds": found, "table": host_time.table(found)}


def tuning(options: argparse.Namespace) -> dict[str, Any]:
    """The tables of tuning.py: what other operand layouts would gain."""
    from tests.benchmarks.kernels import tuning as benchmark

    models, grids, tokens = list(benchmark.MODELS), benchmark.GRIDS, 4096
    if options.smoke:
        models, grids, tokens = models[:1], grids[:1], 16
    rows, gains, shapes, seconds = [], [], 0, 0.0
    kinds = {"dtype": torch.bfloat16, "device": device().type}
    for model in models:
        for y, x in grids:
            its_rows, its_gains, count, took = benchmark.compare(model, tokens, y, x, kinds)
            rows += its_rows
            gains += its_gains
            shapes += count
            seconds += took
    return {"rows": rows, "gains": gains, "shapes": shapes, "seconds": seconds, "tokens": tokens}


def extraction(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds a sample of each way, by the share of samples that the model knows; their figures have to be equal."""
    from transformers import AutoModelForCausalLM

    from tests.benchmarks.eval import extraction as benchmark
    from tests.helpers.eval_support import topics_tokenizer

    tokenizer = topics_tokenizer()
    samples, tokens, batch, few = (4, 8, 2, 1) if options.smoke else (128, 50, 64, 4)
    shape = {**MODELS[options.model][0], "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    with device():
        model = AutoModelForCausalLM.from_config(llama(shape, 4 * tokens), dtype=torch.float32).eval()
    with torch.no_grad():
        asked = benchmark.make_samples(model, tokenizer, samples, tokens, batch)
        contenders = benchmark.Contenders(model, tokenizer, batch, few)
        seconds, _ = benchmark.measure(contenders, asked, {}, 1 if options.smoke else 2, time.perf_counter)
    return {"seconds": seconds, "samples": samples, "tokens": tokens, "batch": batch}


WORK = {each.__name__: each for each in (machine, collect, equality, weights, host, tuning, extraction)}


def main() -> None:
    """Measure one thing and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=WORK)
    parser.add_argument("--result", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--model", choices=MODELS, help="of weights and extraction")
    parser.add_argument("--rows", type=int, help="of a batch, for weights")
    parser.add_argument("--sequence", type=int, help="tokens of a row, for weights")
    parser.add_argument("--folder", type=Path, help="of weights")
    parser.add_argument("--file", help="of tests, for equality")
    parser.add_argument("--gpu", action="store_true", help="those of its tests that are marked gpu")
    options = parser.parse_args()
    found = WORK[options.what](options)
    options.result.write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
