"""The table of the strategy hash-table: 1,000,003 numbers, drawn on the CPU, or read from a file that says where.

The authors' code draws the table from one seed on the device that the labels are on. On a CPU every machine draws the
same numbers. On a GPU another generator draws others, and they depend on the GPU: torch.rand gives numbers to threads
by the device's count of multiprocessors (`calc_execution_policy` in ATen/native/cuda/DistributionTemplates.h). So the
mask of a checkpoint whose table a GPU drew needs a table of that kind of GPU. Where there is one,

    python -m hf_axonn.goldfish.table --device cuda --output table.safetensors

writes it, with a checksum; `load_table` and the setting `goldfish_table` read it anywhere.

Source: `_load_hash_table` in lit_gpt/utils.py of https://github.com/ahans30/goldfish-loss, commit 35d29f9.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
from collections.abc import Sequence
from functools import lru_cache

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


TABLE_SIZE = 1_000_003
TABLE_SEED = 2_971_215_073
CPU_TABLE_SHA256 = "33025be4fa64d02d0a2e630dfa7fc166bf76a5364206fe4cd8973ce46e836562"

_FORMAT = "hf_axonn goldfish table 1"
_NAME = "table"


def draw_table(device: torch.device | str = "cpu") -> Tensor:
    """Draw the table as the authors' code does on a device.

    Returns:
        [TABLE_SIZE] float32 in [0, 1), on the CPU.
    """
    generator = torch.Generator(device=device).manual_seed(TABLE_SEED)
    return torch.rand(TABLE_SIZE, generator=generator, dtype=torch.float32, device=device).cpu()


@lru_cache(maxsize=16)
def cpu_table(device: torch.device) -> Tensor:
    """Return the table as every CPU draws it, kept on a device.

    Raises:
        RuntimeError: torch draws other numbers here than those that masks are made from.
    """
    table = draw_table("cpu")
    if table_sha256(table) != CPU_TABLE_SHA256:
        raise RuntimeError(
            f"torch {torch.__version__} on {platform.machine()} draws a goldfish table with SHA-256 "
            f"{table_sha256(table)}, not {CPU_TABLE_SHA256}: its masks would be other ones. Take goldfish_table=FILE "
            "with a table that another machine wrote (python -m hf_axonn.goldfish.table), or the strategy hash."
        )
    return table.to(device)


def table_sha256(table: Tensor) -> str:
    """Return the SHA-256 of the numbers of a table as little-endian float32, in hexadecimal."""
    return hashlib.sha256(table.cpu().numpy().astype("<f4").tobytes()).hexdigest()


def save_table(path: str | os.PathLike[str], device: torch.device | str) -> dict[str, str]:
    """Draw the table on a device and write it, with its checksum and what drew it, as safetensors.

    Returns:
        What the file says about itself: format, seed, sha256, torch, device.
    """
    table = draw_table(device)
    about = {
        "format": _FORMAT,
        "seed": str(TABLE_SEED),
        "sha256": table_sha256(table),
        "torch": str(torch.__version__),
        "device": _in_words(torch.device(device)),
    }
    save_file({_NAME: table}, path, metadata=about)
    return about


def load_table(path: str | os.PathLike[str], sha256: str | None = None) -> Tensor:
    """Read a table that `save_table` wrote.

    Args:
        path: the file.
        sha256: the checksum that it must have (`table_sha256`), as a publication may state it. None: the one in the
            file, which tells a damaged file and not another table.
    Returns:
        [TABLE_SIZE] float32 on the CPU.
    Raises:
        ValueError: the file is missing, damaged, of another form, or has another checksum.
    """
    make = "write one with `python -m hf_axonn.goldfish.table --device cuda --output FILE`, and copy it whole"
    try:
        with safe_open(path, framework="pt") as file:
            about, names = file.metadata() or {}, set(file.keys())
            table: Tensor | None = file.get_tensor(_NAME) if _NAME in names else None
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{os.fspath(path)} cannot be read as a goldfish table ({error}): {make}.") from error
    if about.get("format") != _FORMAT or table is None:
        raise ValueError(f"{os.fspath(path)} does not say that it is a goldfish table ({_FORMAT}): {make}.")
    if table.shape != (TABLE_SIZE,) or table.dtype != torch.float32:
        raise ValueError(
            f"{os.fspath(path)} has {tuple(table.shape)} numbers of {table.dtype}, not {TABLE_SIZE} of float32: "
            f"{make}."
        )
    found = table_sha256(table)
    if found != about.get("sha256"):
        raise ValueError(
            f"{os.fspath(path)} is damaged: its numbers have SHA-256 {found}, but it was written with "
            f"{about.get('sha256')}: {make}."
        )
    if sha256 is not None and found != sha256.lower():
        raise ValueError(
            f"{os.fspath(path)} has a table with SHA-256 {found}, drawn on {about.get('device')}, but {sha256} is "
            "asked for: take the table that has it, or another checksum."
        )
    return table


def _in_words(device: torch.device) -> str:
    """Describe what drew a table: a GPU by its name and what torch.rand's order of numbers depends on."""
    if device.type != "cuda":
        return f"{device.type} ({platform.machine()})"
    properties = torch.cuda.get_device_properties(device)
    software = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return (
        f"{properties.name}, {properties.multi_processor_count} multiprocessors of "
        f"{properties.max_threads_per_multi_processor} threads, {software}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a table that a device draws, and print its checksum."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_axonn.goldfish.table",
        description="Write the table of the goldfish strategy hash-table as a device draws it.",
    )
    parser.add_argument("--device", default="cuda", help="what draws: cuda (also AMD GPUs), cuda:1, cpu")
    parser.add_argument("--output", required=True, metavar="FILE", help="the safetensors file to write")
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(
            f"--device {options.device}: torch {torch.__version__} sees no GPU here. Run it where the GPU is, or with "
            "--device cpu."
        )
    try:
        about = save_table(options.output, options.device)
    except (RuntimeError, AssertionError, OSError, SafetensorError) as error:
        parser.error(f"--device {options.device} --output {options.output}: {error}".splitlines()[0])
    print(f"{options.output}: sha256 {about['sha256']}, drawn on {about['device']} by torch {about['torch']}")
    if about["sha256"] == CPU_TABLE_SHA256:
        print("These are the numbers that every CPU draws: goldfish_table is not needed for them.")


if __name__ == "__main__":
    main()
