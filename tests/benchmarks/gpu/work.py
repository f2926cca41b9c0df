"""What one process measures: `python -m tests.benchmarks.gpu.work WHAT --result FILE`, each as JSON.

machine       what there is to run on
start         the engine's layers and a Trainer on a grid of one beside stock; again with CUDA_LAUNCH_BLOCKING=1
axes          grids of two and four ranks against one process; again with CUDA_LAUNCH_BLOCKING=1
reads         steps in which the host must not wait for the device
memcheck      a tiny step under compute-sanitizer
packing       packing.py
equality      a file of tests: which passed, failed and were skipped
host          tests/benchmarks/host/host_time.py
tuning        tests/benchmarks/kernels/tuning.py
extraction    tests/benchmarks/eval/extraction.py, with random weights
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.gpu import train
from tests.benchmarks.gpu.jobs import ERROR
from tests.benchmarks.gpu.settings import LOSS_TOLERANCE, MODELS, ONE_RANK, largest_ratio, llama
from tests.helpers import ROOT, devices
from tests.helpers.equality import local


# As `make test-gpu`, in processes of their own: one that has used a GPU cannot fork ranks that do.
SELECT = {False: "on_device and not slow and not gpu", True: "gpu"}
NO_TESTS = 5  # pytest's exit code
SANITIZER = "/usr/local/cuda/bin/compute-sanitizer"  # where it is not on the PATH
PACKAGES = ("hf_axonn", "torch", "transformers", "accelerate")
BOUND = 1e-9  # of float64, after steps of AdamW, which makes much of small differences
WIDE = dict(hidden_size=384, intermediate_size=1024, vocab_size=8192, head_dim=32)  # messages of more than 512 KiB


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

        memory = psutil.virtual_memory().total
        found = {"count": 0, "name": "CPU", "memory": memory, "compiler": compiler, "sanitizer": ""}
    else:
        _, memory = torch.accelerator.get_memory_info(here)
        found = {
            "count": torch.accelerator.device_count(),
            "name": torch.get_device_module(here).get_device_name(here),
            "memory": memory,
            "compiler": compiler and importlib.util.find_spec("triton") is not None,
            "sanitizer": shutil.which("compute-sanitizer") or shutil.which(SANITIZER) or "",
        }
        if here.type == "cuda" and torch.version.cuda:
            versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {"kind": here.type, **found, "versions": versions}


def twice(work: Callable[..., dict[str, Any]]) -> Callable[[argparse.Namespace], dict[str, Any]]:
    """The work, and again by a process with CUDA_LAUNCH_BLOCKING=1: what it has under "bits" must be the same."""

    @functools.wraps(work)
    def both(options: argparse.Namespace) -> dict[str, Any]:
        found = json.loads(json.dumps(work(options)))
        if options.once:
            return found
        options.result.write_text(json.dumps(found))  # should the time be over before the second is
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            command = [sys.executable, "-m", "tests.benchmarks.gpu.work", *sys.argv[1:], "--once", "--result", result]
            if code := subprocess.run(command, env={**os.environ, "CUDA_LAUNCH_BLOCKING": "1"}).returncode:
                return found | {"failures": [*found["failures"], f"with CUDA_LAUNCH_BLOCKING=1 it ends with {code}"]}
            bits = json.loads(result.read_text())["bits"]
        other = [name for name in found["bits"] if found["bits"][name] != bits.get(name)]
        why = [f"CUDA_LAUNCH_BLOCKING=1 gives other bits: {', '.join(other)}"] if other else []
        return found | {"other_bits": other, "failures": found["failures"] + why}

    return both


@twice
def start(options: argparse.Namespace) -> dict[str, Any]:
    """Losses of some steps: stock and the engine's layers in a loop, stock Trainer and ours on a grid of one."""
    import torch.distributed as dist
    from transformers import Trainer

    from hf_axonn import AxonnPlugin, GoldfishTrainer, Grid

    # Trainer would divide the batch over all GPUs of a process.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    one = {"parallelism_config": AxonnPlugin(grid=Grid())}
    contenders: dict[str, Callable[[], tuple[list[float], Any]]] = {
        "Trainer": lambda: _fit(Trainer, options),
        "GoldfishTrainer, grid of one": lambda: _fit(GoldfishTrainer, options, goldfish=False, **one),
        "GoldfishTrainer, a label in 4 left out": lambda: _fit(GoldfishTrainer, options, **one),
        **{name: functools.partial(_loop, name, options) for name in ("plain", ONE_RANK)},
    }
    losses: dict[str, list[float]] = {}
    bits: dict[str, Any] = {}
    wrong: list[str] = []
    for name, run in contenders.items():
        try:  # one that fails hides none of the others
            losses[name], bits[name] = run()
        except Exception as error:
            traceback.print_exc()
            wrong.append(f"{name}: {type(error).__name__}: {error}")
    pairs = [("GoldfishTrainer, grid of one", "Trainer"), (ONE_RANK, "plain")]
    pairs = [(name, stock) for name, stock in pairs if name in losses and stock in losses]
    apart = {name: largest_ratio(losses[name], losses[stock]) for name, stock in pairs}
    wrong += [f"losses of {name} are {far:.1e} from stock" for name, far in apart.items() if not far <= LOSS_TOLERANCE]
    wrong += [f"losses of {name}: {each}" for name, each in losses.items() if not all(map(math.isfinite, each))]
    backend = dist.get_backend() if dist.is_initialized() else "none"
    return {"backend": backend, "losses": losses, "apart": apart, "bits": bits, "failures": wrong}


def _loop(name: str, options: argparse.Namespace) -> tuple[list[float], Any]:
    """Losses of ten steps in a loop, and a sum of the bits of each weight after them."""
    import torch.distributed as dist

    if not dist.is_initialized():
        train.start()
    ones = torch.ones(8, device=device())
    dist.all_reduce(ones)
    dist.all_gather([torch.empty_like(ones)], ones)
    with device():
        training = train.make(name, options)
    _, losses = train.train(training, _batches(options).to(device()), device())
    weights = [local(parameter).detach() for parameter in training.model.parameters()]
    return losses, [losses, *(int(weight.view(torch.int32).sum(dtype=torch.int64)) for weight in weights)]


def _batches(options: argparse.Namespace) -> torch.Tensor:
    return train.read_batches(MODELS[options.model][0]["vocab_size"], options.rows, options.sequence)


def _fit(kind: type, options: argparse.Namespace, **more: Any) -> tuple[list[float], Any]:
    """Losses of four steps of a Trainer, by its own log; their bits are all that is compared."""
    from transformers import TrainingArguments

    from hf_axonn import GoldfishConfig, GoldfishTrainer

    with device():
        model = train.draw(options, torch.float32)
    rows = [{"input_ids": row, "labels": row} for row in _batches(options).flatten(0, 1)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = (GoldfishConfig if issubclass(kind, GoldfishTrainer) else TrainingArguments)(
            output_dir=folder,
            max_steps=4,
            per_device_train_batch_size=options.rows,
            bf16=True,
            use_cpu=device().type == "cpu",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=1,
            **more,
        )
        trainer = kind(model=model, args=arguments, train_dataset=rows)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, losses


@twice
def axes(options: argparse.Namespace) -> dict[str, Any]:
    """Relative errors in float64 by grid and model, of three steps on every grid of two ranks, then of four."""
    from hf_axonn import Grid
    from tests.helpers.equality import Case, compare, too_large
    from tests.helpers.models import tiny_model
    from tests.helpers.ranks import all_grids, run_ranks

    tiny = Case("tiny", functools.partial(tiny_model, "llama"), steps=3)
    wide = Case("wide", functools.partial(tiny_model, "llama", **WIDE), steps=3)
    plans = [([tiny, wide], [grid]) for grid in all_grids(2)]  # an axis that fails hides none of the others
    plans += [([tiny], all_grids(4)), ([wide], [Grid(z=2, x=2), Grid(y=2, data=2)])]
    if options.smoke:
        plans = [([tiny], all_grids(2)), ([wide], [Grid(z=2, x=2)])]
    table: dict[str, dict[str, float]] = {}
    wrong: list[str] = []
    with devices.used(devices.chosen()) as used:
        while plans:
            cases, grids = plans.pop(0)
            with_truth = [(case, case.truth()) for case in cases]
            try:
                errors = run_ranks(compare, grids[0].size, with_truth, grids, timeout=300 if options.smoke else 60)[0]
            except AssertionError as error:
                print(error)
                if len(grids) > 1:
                    plans += [(cases, [grid]) for grid in grids]
                else:
                    wrong += [f"{grids[0]}: {line}" for line in ERROR.findall(str(error))[:3] or [str(error)[:300]]]
                continue
            wrong += too_large(errors, BOUND)
            table |= {f"{grid}, {case}": found for (case, grid), found in errors.items()}
        backend = used.backend(2)
    return {"backend": backend, "errors": table, "bits": table, "failures": wrong}


@contextlib.contextmanager
def find_waits(here: torch.device) -> Iterator[list[traceback.FrameSummary]]:
    """Find where the host waits for the device: the innermost lines that are not torch's. A CPU is not waited for.

    A wait in backward is found at the call of backward. The mode "error" would show no more than the first.
    """
    found: list[traceback.FrameSummary] = []
    others = (str(Path(torch.__file__).parent), warnings.__file__, contextlib.__file__)

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchronizing" in str(message):
            frames = traceback.extract_stack()[:-1]
            found.append([frame for frame in frames if not frame.filename.startswith(others)][-1])

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        if here.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            if here.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")


def reads(options: argparse.Namespace) -> dict[str, Any]:
    """Find where the host waits for the device in the third step of each; a wait of a library is no failure."""
    from hf_axonn.goldfish.mask import goldfish_mask

    here = train.start()
    batch = _batches(options)[0].to(here)
    with here:
        steps = {name: train.make(name, options).step for name in ("plain", ONE_RANK, train.LORA + ONE_RANK)}
    steps["goldfish mask"] = goldfish_mask
    waits: dict[str, list[str]] = {}
    failures: list[str] = []
    for name, step in steps.items():
        for _ in range(2):
            step(batch)
        with find_waits(here) as found:
            step(batch)
        waits[name] = [f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} {frame.line}" for frame in found]
        ours = [Path(frame.filename).is_relative_to(ROOT) and ".venv" not in frame.filename for frame in found]
        failures += [f"{name} waits at {where}" for where, is_ours in zip(waits[name], ours, strict=True) if is_ours]
    return {"waits": waits, "mode": "warn" if here.type == "cuda" else "none on a CPU", "failures": failures}


def memcheck(options: argparse.Namespace) -> dict[str, Any]:
    """Errors that compute-sanitizer finds in ten tiny steps, with no memory kept back between tensors."""
    with tempfile.TemporaryDirectory() as folder:
        # NCCL loads all of its kernels, each of which the sanitizer would rewrite.
        training = ["-m", "tests.benchmarks.gpu.train", "--contender", ONE_RANK, "--gloo"]
        training += ["--result", f"{folder}/result.json"]
        # Libraries ask for what a driver may not have; that is no error of memory.
        tool = [options.sanitizer, "--tool", "memcheck", "--error-exitcode", "9", "--report-api-errors", "no"]
        done = subprocess.run(
            [*tool, sys.executable, *training],
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    print(done.stdout)
    lines = [line.strip("= ") for line in done.stdout.splitlines() if line.startswith("=========")]
    summary = next((line for line in reversed(lines) if "SUMMARY" in line), "no summary")
    failures = [] if done.returncode == 0 else [*lines[:10], f"{summary}; ended with code {done.returncode}"]
    return {"summary": summary, "failures": failures}


class Outcomes:
    """A plugin of pytest: how each test ended."""

    def __init__(self) -> None:
        self.ends: dict[str, str] = {}

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


def equality(options: argparse.Namespace) -> dict[str, Any]:
    """Run the tests of a file and count how they ended."""
    ends = pytest("-m", SELECT[options.gpu], str(ROOT / options.file)).ends
    counts = {end: list(ends.values()).count(end) for end in ("passed", "failed", "skipped")}
    return {**counts, "failures": [name for name, end in ends.items() if end == "failed"]}


def host(options: argparse.Namespace) -> dict[str, Any]:
    """Processor seconds of a layer by phase and contender, and the table of host_time.py."""
    from tests.benchmarks.host import host_time

    os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")  # as the table that it stands beside
    torch.set_num_threads(1)
    effort = dict(rounds=1, repeats=1) if options.smoke else dict(rounds=12, repeats=3)
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


def packing(options: argparse.Namespace) -> dict[str, Any]:
    """Packed documents with one kind of attention."""
    from tests.benchmarks.gpu import packing as benchmark

    return benchmark.measure(options)


WORK = {
    each.__name__: each
    for each in (machine, start, axes, reads, memcheck, packing, equality, host, tuning, extraction)
}


def main() -> None:
    """Measure one thing and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=WORK)
    train.add_options(parser)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--once", action="store_true", help="not again with CUDA_LAUNCH_BLOCKING=1")
    parser.add_argument("--attention", help="of packing: sdpa, varlen or flex")
    parser.add_argument("--sanitizer", help="the program, for memcheck")
    parser.add_argument("--file", help="of tests, for equality")
    parser.add_argument("--gpu", action="store_true", help="those of its tests that are marked gpu")
    options = parser.parse_args()
    found = WORK[options.what](options)
    options.result.write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
