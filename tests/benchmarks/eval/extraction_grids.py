"""Extraction over grids of processes beside one process with as many threads: how fast, and where the time goes.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.eval.extraction_grids --output grids.md

The model is a Llama of SmolLM2-135M's sizes with random weights and 8 heads (of the original's 9 no two ranks have
equally many; `--model DIR` takes another). Samples are random tokens, so none is extracted: a continuation of each is
decoded. Each contender is started anew in each round, in turns, and reads the model from a folder; what is timed is
one call of `extract`, packing of the weights included, from a barrier to a barrier. All must find the same.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_axonn
from hf_axonn import Grid
from hf_axonn.compat import packed_weights
from hf_axonn.distributed.collectives import watch_waits
from hf_axonn_eval import Sample, extract
from hf_axonn_eval.extraction import decoding, prefix_matching, scoring
from hf_axonn_eval.extraction.kv_cache import Columns
from tests.benchmarks.eval.extraction import CLOCKS, command_line
from tests.helpers.pages import show
from tests.helpers.ranks import run_ranks


# What is asked of the samples, by the name of a column.
WORK: dict[str, dict[str, Any]] = {
    "every probability": {"generate": False},
    "exact match": {"generate": False, "stop_early": True},
    "all metrics": {},
}
ALONE = "one process"
PLAIN, FULL = ", weights not packed", ", logits in full on every rank"  # as it was before
CONTENDERS = {
    2: [
        ALONE,
        "2 processes, no grid",
        "data=2",
        "z=2",
        "x=2",
        "y=2",
        f"x=2{PLAIN}",
        f"x=2{FULL}",
        f"x=2{PLAIN}{FULL}",
    ],
    4: [ALONE, "4 processes, no grid", "data=4", "data=2,x=2", "x=4"],
}
# Functions by what they do: (the module or class whose attribute they are, name).
PARTS: dict[str, list[tuple[Any, str]]] = {
    "packing weights": [],  # and products by packed weights: `Watch` wraps what makes them
    "products of weights": [(torch.nn.functional, "linear")],
    "attention": [(torch.nn.functional, "scaled_dot_product_attention")],
    "keys and values: kept, copied": [(Columns, "update"), (decoding, "join_rows"), (prefix_matching, "rows_of")],
    "reading logits": [
        (scoring, "score_tokens"),
        (scoring, "token_ranks"),
        (scoring, "_choices"),
        (decoding, "first_largest"),
    ],
}
HOW = {
    "wall": (
        "Speed by the fastest round, one process with a thread for each core being 1 (its seconds a sample in",
        "brackets); a rank has one thread.",
    ),
    "processor": (
        "Work a second of processor time (of all ranks together, the threads of gloo included), one process with one",
        "thread being 1 (its seconds a sample in brackets). It is that of the clock where ranks never wait for each",
        "other and the cores are busy: what other work on the machine does not change.",
    ),
}
WAITS, REST = "waiting for collectives", "the rest: norms, rotations, residuals, Python"
OTHERS = "other threads (gloo's)"


def make_model(folder: Path, layers: int) -> None:
    """Write the model; its logits differ enough that few first choices are near ties."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 0.1)
    model.save_pretrained(folder)


def make_samples(count: int, tokens: int, vocabulary: int) -> list[Sample]:
    """Random tokens, of which the model knows nothing."""
    draw = random.Random(0)
    texts = [[draw.randrange(vocabulary) for _ in range(2 * tokens)] for _ in range(count)]
    return [
        Sample(
            sample_id=str(number),
            document_id=str(number),
            bucket=0,
            offset=0,
            prefix=tuple(text[:tokens]),
            suffix=tuple(text[tokens:]),
        )
        for number, text in enumerate(texts)
    ]


def contend(name: str, threads: int, folder: str, samples: Sequence[Sample], batch: int, watched: str) -> dict:
    """Return (seconds by clock, results) of each kind of work on this rank; or (seconds by part, results) where it is
    `watched` by a clock."""
    torch.set_num_threads(threads)
    grid, *_ = name.split(", ")
    if PLAIN in name:
        packed_weights.can_be_packed = lambda weight: False
    if FULL in name:
        scoring.spreads_logits = lambda model: False
    transformers.logging.set_verbosity_error()
    if "=" in name:
        sizes = dict(axis.split("=") for axis in grid.split(","))
        axes = Grid(**{axis: int(size) for axis, size in sizes.items()})
        model = hf_axonn.from_pretrained(folder, grid=axes, dtype=torch.float32).eval()
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = {}
    for kind, options in WORK.items():
        dist.barrier()
        begin = {clock: read() for clock, read in CLOCKS.items()}
        with Watch(watched) if watched else ExitStack() as watch:
            results = extract(model, None, samples, batch_size=batch, progress=False, **options)
        taken = {clock: read() - begin[clock] for clock, read in CLOCKS.items()}
        dist.barrier()
        figures = [(each.sample_id, each.exact_match, each.near_tie, each.logprob) for each in results]
        found[kind] = watch.shares(taken[watched]) if watched else taken, figures
    return found


class Watch(ExitStack):
    """Time of PARTS and of waits inside, by the clock or of the processor in the thread that computes."""

    def __init__(self, clock: str) -> None:
        super().__init__()
        self._now = {"wall": time.perf_counter, "processor": time.thread_time}[clock]

    def __enter__(self) -> Watch:
        super().__enter__()
        self._begin = self._now()
        self.spent: Counter[str] = Counter()
        pack = packed_weights.packed_product

        def timed_pack(weight: torch.Tensor):
            return self._timed("products of weights", self._timed("packing weights", pack)(weight))

        self.enter_context(mock.patch.object(packed_weights, "packed_product", timed_pack))
        for part, functions in PARTS.items():
            for owner, name in functions:
                timed = self._timed(part, getattr(owner, name))
                self.enter_context(mock.patch.object(owner, name, timed))
        self.enter_context(watch_waits(lambda kind, group: self._timing(WAITS)))
        return self

    def _timed(self, part: str, function: Callable) -> Callable:
        def timed(*args, **kwargs):
            with self._timing(part):
                return function(*args, **kwargs)

        return timed

    @contextmanager
    def _timing(self, part: str) -> Iterator[None]:
        begin = self._now()
        yield
        self.spent[part] += self._now() - begin

    def shares(self, seconds: float) -> dict[str, float]:
        """Return seconds by part, and what is left of all in this thread, and of all `seconds`."""
        own = self._now() - self._begin
        return {**self.spent, REST: own - self.spent.total(), OTHERS: seconds - own}


def launch(name: str, ranks: int, arguments: argparse.Namespace, folder: str, samples, *, watched: str = "") -> dict:
    """Start a contender; returns (seconds, or of a watched one their parts on rank 0, results) of each kind of work.

    Wall time is that of the slowest rank, processor time the sum of all.
    """
    alone = name == ALONE
    threads = min(ranks, arguments.cores) if alone and arguments.clock == "wall" else 1
    world = 1 if alone else ranks
    every = run_ranks(contend, world, name, threads, folder, samples, arguments.batch_size, watched, timeout=900)
    if watched:
        return every[0]
    add_up = {"wall": max, "processor": sum}[arguments.clock]
    return {
        kind: (add_up(of[kind][0][arguments.clock] for of in every), results)
        for kind, (_, results) in every[0].items()
    }


def check_same(found: dict, truth: dict, name: str) -> None:
    """Raise where exact matches are not those of one process, or log-probabilities of a suffix by 1e-3 nats."""
    for kind, (_, results) in found.items():
        for result, expected in zip(results, truth[kind][1], strict=True):
            same = result[0] == expected[0] and (result[1] == expected[1] or result[2] or expected[2])
            close = expected[3] is None or abs(result[3] - expected[3]) < 1e-3
            if not (same and close):
                raise ValueError(f"{name} answers {kind} with {result}, and one process with {expected}.")


def report(
    seconds: dict[int, dict[str, dict[str, list[float]]]], shares: dict[str, dict], args: argparse.Namespace
) -> str:
    """The results as Markdown."""
    lines = [
        "# Extraction over grids",
        "",
        f"`{command_line(sys.argv[1:], __spec__.name)}`",
        "",
        f"{args.name}, float32, {args.samples} samples of {args.tokens} + {args.tokens} tokens of which none is",
        f"extracted, batches of {args.batch_size}, {args.rounds} rounds in turns. {platform.machine()}, {args.cores}",
        f"cores; Python {platform.python_version()}, torch {torch.__version__}, transformers",
        f"{transformers.__version__}. All contenders found the same.",
        "",
        *HOW[args.clock],
        "",
    ]
    for ranks, contenders in seconds.items():
        lines += [f"## {ranks} ranks", "", "| | " + " | ".join(WORK) + " |", "|---|" + "---|" * len(WORK)]
        for name, of in contenders.items():
            cells = []
            for kind in WORK:
                best, alone = min(of[kind]), min(contenders[ALONE][kind])
                within = [one / own for one, own in zip(contenders[ALONE][kind], of[kind], strict=True)]
                cells.append(
                    f"1 ({alone / args.samples:.4f} s; median {statistics.median(of[kind]) / args.samples:.4f} s)"
                    if name == ALONE
                    else f"{alone / best:.2f} ({min(within):.2f} to {max(within):.2f})"
                )
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")
    lines += [
        "## Where the time goes",
        "",
        f"Milliseconds a sample on rank 0, {args.clock} time, with a timer around each part:",
        "",
    ]
    names = list(shares)
    for kind in WORK:
        parts = [*PARTS, WAITS, REST, OTHERS]
        lines += [f"| {kind} | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
        for part in parts:
            cells = [f"{1000 * shares[name][kind][0].get(part, 0.0) / args.samples:.2f}" for name in names]
            lines.append(f"| {part} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Run the comparison; print it, and write it where `--output` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of another model")
    parser.add_argument("--layers", type=int, default=30, help="of the model that is made")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=CONTENDERS)
    parser.add_argument("--contenders", nargs="+", help="some of them; all by default")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=50, help="of the prefix, and of the suffix")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2, help="of this machine")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="processor time where others use the machine")
    parser.add_argument("--watched", nargs="*", default=[ALONE, "data=2", "x=2", "y=2"], help="whose parts are timed")
    parser.add_argument("--output", type=Path, help="Markdown file")
    args = parser.parse_args()
    torch.set_num_threads(1)  # threads that were used do not come along to the ranks, which are forked
    with tempfile.TemporaryDirectory() as made:
        if args.model is None:
            make_model(Path(made), args.layers)
        folder = str(args.model or made)
        args.name = args.model.name if args.model else "A Llama of SmolLM2-135M's sizes with 8 heads, random weights"
        config = transformers.AutoConfig.from_pretrained(folder)
        samples = make_samples(args.samples, args.tokens, config.vocab_size)
        seconds: dict[int, dict[str, dict[str, list[float]]]] = {}
        for ranks in args.ranks:
            names = [name for name in CONTENDERS[ranks] if args.contenders is None or name in args.contenders]
            seconds[ranks] = {name: {kind: [] for kind in WORK} for name in names}
            for number in range(args.rounds):
                truth = None
                for name in names:  # one process is the first
                    found = launch(name, ranks, args, folder, samples)
                    truth = truth or found
                    check_same(found, truth, name)
                    for kind, (taken, _) in found.items():
                        seconds[ranks][name][kind].append(taken)
                    print(number, name, {kind: round(taken, 2) for kind, (taken, _) in found.items()}, flush=True)
        shares = {
            name: launch(name, args.ranks[0], args, folder, samples, watched=args.clock) for name in args.watched
        }
    show(report(seconds, shares, args), args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
