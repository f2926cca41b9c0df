"""Memory of a rank by the length of a row and by context: the table of docs/how_to/long_rows.md.

    python -m tests.benchmarks.planner.long_rows
    python -m tests.benchmarks.planner.long_rows --lengths 131072 --grids z=16,context=16 z=8,x=2,context=8

Llama 3 8B with AdamW, bf16 on fp32 weights, gradient checkpointing, one row at a time. The engine's own step is
counted on one rank, by tensors without values (simulate.py).
"""

from __future__ import annotations

import argparse
import logging
import warnings

from transformers import LlamaConfig

from hf_axonn.topology.grid import Grid
from tests.benchmarks.checkpoint.big_load import read_grid
from tests.benchmarks.planner.simulate import GIB, Case, simulate


LLAMA_8B = dict(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
)
LENGTHS = (16384, 65536, 131072)
GRIDS = (
    Grid(z=8),
    Grid(z=8, context=2),
    Grid(z=8, context=4),
    Grid(z=8, context=8),
    Grid(z=4, x=2, context=4),
    Grid(x=8),
)


def name(grid: Grid) -> str:
    """A grid as a launch file has it, without axes of one rank."""
    return ", ".join(f"{axis}: {size}" for axis, size in grid.as_dict().items() if size > 1)


def line(grid: Grid, lengths: list[int], sizes: dict[str, int]) -> str:
    """A line of the table: how many rows a step has at least, and GiB at the worst moment, by length."""
    cells = [name(grid), str(grid.dp_size)]
    for length in lengths:
        outcome = simulate(Case(LlamaConfig(**sizes), grid, rows=1, seq=length))
        cells.append(f"{outcome.peak / GIB:.1f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="tokens of a row")
    parser.add_argument("--grids", type=read_grid, nargs="+", default=list(GRIDS), help="as z=8,context=4")
    parser.add_argument("--layers", type=int, default=LLAMA_8B["num_hidden_layers"])
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    print("| GiB of a rank | rows a step |", " | ".join(f"{length:,}" for length in options.lengths), "|")
    print("| --- | --: |", " | ".join("--:" for _ in options.lengths), "|")
    for grid in options.grids:
        print(line(grid, options.lengths, LLAMA_8B | {"num_hidden_layers": options.layers}), flush=True)


if __name__ == "__main__":
    main()
