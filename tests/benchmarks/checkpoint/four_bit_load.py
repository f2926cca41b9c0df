"""Memory while a model is read in 4 bits, beside full precision: what a rank allocates at most, and holds afterwards.

    python -m tests.benchmarks.checkpoint.four_bit_load                  a Llama of 12 layers, 2,048 wide, on z=2
    python -m tests.benchmarks.checkpoint.four_bit_load --grid x=2 --layers 4

The model has random weights in bfloat16, and is written to a temporary directory first. Files are mapped, which malloc
does not count; what is read of them is.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

from hf_axonn import Grid, from_pretrained
from tests.benchmarks.checkpoint.big_load import read_grid
from tests.helpers.allocated import Peak, allocated
from tests.helpers.ranks import run_ranks


MIB = 2**20


def in_four_bits(double: bool) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=double,
    )


WAYS = {
    "bfloat16": {},
    "4 bits": {"quantization_config": in_four_bits(False)},
    "4 bits, double quantization": {"quantization_config": in_four_bits(True)},
}


def loaded(folder: Path, way: str, grid: Grid | None) -> tuple[int, int]:
    """(bytes that are held, most that were allocated) of one load in this process; grid None: stock, the whole."""
    gc.collect()
    before, peak = allocated(), Peak()
    options = {"dtype": torch.bfloat16, **WAYS[way]}
    if grid is None:
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
    else:
        model = from_pretrained(str(folder), grid=grid, **options)
    most = peak.growth()
    held = allocated() - before
    del model
    return held, most


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", type=read_grid, default="z=2", help="sizes, as in z=2,x=2")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=2048)
    options = parser.parse_args(arguments)
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 128,
        num_key_value_heads=options.hidden // 128,
        vocab_size=32000,
    )
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        elements = sum(parameter.numel() for parameter in model.parameters())
        largest = max(parameter.numel() for parameter in model.parameters())
        model.save_pretrained(folder)
        del model
        print(
            f"{elements:,} parameters, {2 * elements / MIB:,.0f} MiB in bfloat16, the largest {2 * largest / MIB:.0f}"
        )
        print("| way | where | held, MiB | at most, MiB |\n|---|---|--:|--:|")
        for way in WAYS:
            for where, grid in (("one process, stock", None), (f"a rank of {options.grid}", options.grid)):
                world = 1 if grid is None else grid.size
                found = run_ranks(loaded, world, Path(folder), way, grid, timeout=1200)
                held, most = (max(column) / MIB for column in zip(*found, strict=True))
                print(f"| {way} | {where} | {held:,.0f} | {most:,.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
