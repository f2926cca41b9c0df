"""`hf-axonn`: what one does with a checkpoint or a bug report, on one process.

    hf-axonn convert CHECKPOINT OUTPUT      a sharded checkpoint becomes an ordinary Hugging Face directory
    hf-axonn verify CHECKPOINT              is it complete, and on which grid was it written
    hf-axonn env                            versions and devices, to paste into a bug report

Bad input ends with exit code 2 and a message.
"""

from __future__ import annotations

import argparse
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from hf_axonn import __version__
from hf_axonn.grid import Grid


PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets", "safetensors")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="hf-axonn", description="Checkpoints and bug reports of hf_axonn.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    convert = commands.add_parser("convert", help="make an ordinary Hugging Face directory of a sharded checkpoint")
    convert.add_argument("checkpoint", help="a directory that training on a grid wrote")
    convert.add_argument("output", help="a new directory")
    convert.add_argument(
        "--max-shard-gb", type=float, default=5.0, help="most gigabytes (2**30 bytes) of one safetensors file"
    )
    verify = commands.add_parser("verify", help="check that a sharded checkpoint is complete")
    verify.add_argument("checkpoint")
    commands.add_parser("env", help="print versions and devices")
    options = parser.parse_args(arguments)
    try:
        return {"convert": _convert, "verify": _verify, "env": _env}[options.command](options)
    except (ValueError, OSError) as problem:
        print(f"hf-axonn {options.command}: {problem}", file=sys.stderr)
        return 2


def _convert(options: argparse.Namespace) -> int:
    from hf_axonn.checkpoint import export_hf

    if options.max_shard_gb <= 0:
        raise ValueError(f"--max-shard-gb is {options.max_shard_gb}: give a number above 0.")
    export_hf(options.checkpoint, options.output, shard_bytes=int(options.max_shard_gb * 2**30))
    print(f"{options.output} holds the model: AutoModelForCausalLM.from_pretrained({options.output!r})")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from hf_axonn.checkpoint import check_complete

    manifest = check_complete(options.checkpoint)
    size = sum(manifest["files"].values())
    grid = Grid(**manifest["grid"])
    print(f"{options.checkpoint} is complete: {len(manifest['files'])} files, {size:,} bytes, written on {grid}")
    return 0


def _env(options: argparse.Namespace) -> int:
    print(f"hf_axonn {__version__}")
    print(f"python {platform.python_version()} on {platform.platform()}")
    for name in PACKAGES:
        try:
            print(f"{name} {version(name)}")
        except PackageNotFoundError:
            print(f"{name} is not installed")
    import torch

    count = torch.cuda.device_count()
    print("devices: " + (", ".join(torch.cuda.get_device_name(index) for index in range(count)) or "CPU only"))
    print(f"torch.distributed backends: {', '.join(_backends(torch.distributed))}")
    return 0


def _backends(distributed) -> list[str]:
    return [name for name in ("gloo", "nccl", "mpi") if getattr(distributed, f"is_{name}_available")()]


if __name__ == "__main__":
    sys.exit(main())
