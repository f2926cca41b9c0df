"""Train the same language model with hf_axonn and with what people would use instead, and print ratios.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.peers.peers --ranks 2 --rounds 20
    OMP_NUM_THREADS=1 python -m tests.benchmarks.peers.peers --ranks 4 --rounds 20 --output docs/results/peers.md
    OMP_NUM_THREADS=1 python -m tests.benchmarks.peers.peers --ranks 4 --size mixture-top2 --others DDP "native EP" ...

A Llama of 55 million parameters on 1,024 tokens a step, float32, AdamW, gloo, one thread a rank; the text is the
language reference that comes with Python. All contenders start from the same weights and see the same batches, so
their losses must agree, which is checked at every step. They take turns in random order, a step or a few at a time, so
that what else the machine does hits all alike: compare the ratios, which are taken within a round, not the seconds. On
a machine shared with others, --patience waits for quiet moments. Grids that do not fit into memory all at once run in
several heats, the peers in each of them.

What the contenders are: contenders.py. With --axonn FOLDER, where AxoNN's source is, AxoNN trains on the same grids,
and each grid is compared with AxoNN on that grid. Our collectives and AxoNN's are counted in one more step after the
rounds. Memory: resident memory of the largest rank at its peak, beyond what it had before its model was made.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import tempfile
import time
from pathlib import Path


os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would not survive the forks
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig  # noqa: E402

from hf_axonn import Grid  # noqa: E402
from tests.benchmarks.peers import axonn_on_cpus  # noqa: E402
from tests.benchmarks.peers.contenders import (  # noqa: E402
    EXPERTS,
    FLOORS,
    KEEPING,
    MIXTURES,
    PEERS,
    STAGES,
    axonn_names,
    grid_name,
    parse_grid,
)
from tests.benchmarks.peers.ranks import Ranks, Traffic, Turn, wait_for_quiet  # noqa: E402
from tests.benchmarks.peers.report import QUIET, description, loss_difference, table, traffic_table  # noqa: E402


# Qwen3-MoE, 16 experts of a layer. Heads and experts divide by 8, as Transformers' tensor and expert parallelism ask.
MIXTURE = dict(
    hidden_size=384,
    num_hidden_layers=4,
    num_attention_heads=8,
    head_dim=48,
    intermediate_size=1024,
    moe_intermediate_size=512,
    num_experts=16,
    num_experts_per_tok=2,
    vocab_size=8192,
)
SIZES = {
    "60m": dict(hidden_size=768, num_hidden_layers=6, num_attention_heads=12, intermediate_size=2048, vocab_size=8192),
    "mixture-top2": MIXTURE | dict(num_experts_per_tok=2),
    "mixture-top8": MIXTURE | dict(num_experts_per_tok=8),
    "tiny-mixture": MIXTURE | dict(hidden_size=64, head_dim=8, moe_intermediate_size=32),
    "tiny": dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, vocab_size=512),
}
# Largest relative difference of a loss from that of the first contender. Sums in another order differ by about 1e-6 in
# float32, and training makes such differences grow: mistakes in a gradient show as 1e-2 after few steps.
LOSS_TOLERANCE = 1e-3


def main(arguments: list[str] | None = None) -> int:
    args = _parse(arguments)
    torch.set_num_threads(1)
    begin = time.time()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config = model_config(args.size, sequence=args.sequence, kv_heads=args.kv_heads)
        parameters = save_weights(config, folder / "weights")
        batches = text_batches(config.vocab_size, args.rows, args.sequence)
        heats = [args.grids[i : i + args.together] for i in range(0, len(args.grids), args.together)] or [[]]
        if args.axonn is not None:
            heats = [[*grids, *axonn_names(grids)] for grids in heats]
        runs, traffic = [], {}
        for number, names in enumerate(heats):
            title = f"heat {number + 1} of {len(heats)}"
            turns, counted = run_heat([*args.others, *names], args, folder, batches, title)
            runs.append(turns)
            traffic.update(counted)
    worst = loss_difference(runs)
    agree = worst <= LOSS_TOLERANCE
    report = "\n".join(
        [
            description(args.command, f"{parameters / 1e6:.1f}M parameters", time.time() - begin, axonn=args.axonn),
            table(runs, args.rows * args.sequence),
            *([traffic_table(traffic)] if traffic else []),
            f"Largest relative difference between losses at the same step: {worst:.1e}, "
            f"{'at most' if agree else 'MORE THAN'} the allowed {LOSS_TOLERANCE:.0e}.",
        ]
    )
    print(report)
    if args.output is not None:
        args.output.write_text(report + "\n")
    return 0 if agree else 1


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes of each contender (2)")
    parser.add_argument("--rounds", type=int, default=20, help="rounds that count, after one that does not (20)")
    parser.add_argument("--steps", type=int, default=1, help="steps in one turn (1)")
    parser.add_argument("--size", choices=SIZES, default="60m", help="the model (60m)")
    parser.add_argument("--rows", type=int, default=4, help="rows of a global batch (4)")
    parser.add_argument("--sequence", type=int, default=256, help="tokens of a row (256)")
    parser.add_argument("--kv-heads", type=int, help="kv heads (as many as query heads)")
    parser.add_argument(
        "--grids", nargs="*", help='ours, as "x=2" "data=2,z=2 keeping all" (every grid of --ranks ranks)'
    )
    parser.add_argument(
        "--others", nargs="*", default=["plain", *FLOORS, *PEERS], help="the others (all without pipelines)"
    )
    parser.add_argument("--axonn", type=Path, metavar="FOLDER", help="AxoNN's source: it runs on the same grids")
    parser.add_argument("--together", type=int, default=4, help="grids in one heat, for the sake of memory (4)")
    parser.add_argument(
        "--patience", type=float, default=0, help="seconds to wait before a turn for a quiet machine (0)"
    )
    parser.add_argument("--minutes", type=float, default=60, help="after so many a heat begins no new round (60)")
    parser.add_argument("--output", type=Path, help="write the report to this file too")
    args = parser.parse_args(arguments)
    args.command = " ".join(
        ["python -m tests.benchmarks.peers.peers", *(sys.argv[1:] if arguments is None else arguments)]
    )
    if args.grids is None:
        sizes = itertools.product(range(1, args.ranks + 1), repeat=4)
        grids = [Grid(data=d, z=z, y=y, x=x) for d, z, y, x in sizes if d * z * y * x == args.ranks]
        args.grids = [grid_name(grid) for grid in grids]
    try:
        settings = [name.partition(KEEPING if KEEPING in name else EXPERTS)[1:] for name in args.grids]
        args.grids = [
            "".join((grid_name(parse_grid(name)), *of)) for name, of in zip(args.grids, settings, strict=True)
        ]
        for name in args.grids:
            parse_grid(name).check(args.ranks)
    except (TypeError, ValueError) as error:
        parser.error(f"--grids: {error}")
    if unknown := set(args.others) - {"plain", *FLOORS, *PEERS, *MIXTURES, STAGES}:
        there = ", ".join((*FLOORS, *PEERS, *MIXTURES, STAGES))
        parser.error(f"--others: {', '.join(sorted(unknown))}: there are plain, {there}.")
    if args.axonn is not None:
        try:
            axonn_on_cpus.load(args.axonn)
        except ValueError as error:
            parser.error(f"--axonn: {error}")
    if args.ranks < 2:
        parser.error(f"--ranks is {args.ranks}: contenders divide the work among at least 2.")
    parts = {name: args.ranks for name in args.others if name in ("DDP", "FSDP2", STAGES)}
    parts |= {name: parse_grid(name).dp_size for name in args.grids}
    if uneven := next((name for name, size in parts.items() if args.rows % size), None):
        parser.error(f"--rows is {args.rows}, which {uneven} cannot divide among {parts[uneven]} ranks.")
    return args


def model_config(size: str, *, sequence: int, kv_heads: int | None = None) -> LlamaConfig | Qwen3MoeConfig:
    """One of SIZES."""
    kind = Qwen3MoeConfig if "num_experts" in SIZES[size] else LlamaConfig
    return kind(
        **SIZES[size],
        num_key_value_heads=kv_heads or SIZES[size]["num_attention_heads"],
        max_position_embeddings=sequence,
        tie_word_embeddings=False,
        use_cache=False,
    )


def save_weights(config: LlamaConfig | Qwen3MoeConfig, folder: Path) -> int:
    """Write the weights that all contenders start from; returns the number of parameters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def text_batches(vocabulary: int, rows: int, sequence: int) -> Tensor:
    """Python's language reference as ids [N, rows, sequence], by a byte-pair encoding that is made from it."""
    from pydoc_data.topics import topics

    from tokenizers import ByteLevelBPETokenizer

    texts = [topics[name] for name in sorted(topics)]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=vocabulary, show_progress=False)
    ids = torch.tensor([number for text in texts for number in tokenizer.encode(text).ids])
    count = len(ids) // (rows * sequence)
    return ids[: count * rows * sequence].view(count, rows, sequence)


def run_heat(
    names: list[str], args: argparse.Namespace, folder: Path, batches: Tensor, title: str
) -> tuple[dict[str, list[Turn]], dict[str, Traffic]]:
    """Let contenders take turns; what each did in every round, and what one more step of it communicates."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    contenders: list[Ranks] = []
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    order = random.Random(0)
    try:
        for name in names:
            # One process alone may have the cores that the others have together.
            world, threads = (1, min(args.ranks, cores)) if name == "plain" else (args.ranks, 1)
            contenders.append(Ranks(name, world, threads, folder / "weights", batches, folder))
        end = time.monotonic() + 60 * args.minutes
        for number in range(args.rounds + 1):
            if number > 2 and time.monotonic() > end:
                break
            for contender in order.sample(contenders, len(contenders)):
                wait_for_quiet(args.patience, QUIET)
                turns[contender.name].append(contender.turn(args.steps))
            last = ", ".join(f"{name} {of_name[-1].seconds:.2f}" for name, of_name in turns.items())
            print(f"{title}, round {number} of {args.rounds}: {last}", file=sys.stderr, flush=True)
        counts = {contender.name: contender.traffic() for contender in contenders}
    finally:
        for contender in contenders:
            contender.stop()
    return turns, {name: traffic for name, traffic in counts.items() if traffic is not None}


if __name__ == "__main__":
    sys.exit(main())
