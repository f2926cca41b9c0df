"""`hf-axonn kit`: the wheels that a machine without a network needs beside what it has, and the script for them.

    hf-axonn kit --have machine.txt --python 3.12       machine.txt is that machine's `pip list --format=freeze`

Exit code 0: the kit is complete; 1: something is missing, or cannot be imported; 2: bad input, or no kit.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from pathlib import Path

from packaging.version import InvalidVersion, Version

from hf_axonn.cli.plan_report import number_of
from hf_axonn.compat.arguments import VERSION, with_reason
from hf_axonn.kit.machine import Machine, read_glibc, read_packages
from hf_axonn.kit.make import (
    Kit,
    find_interpreter,
    find_unusable,
    make_kit,
    read_python_version,
    read_version,
    try_kit,
)


PACKAGES = ("hf_axonn", "hf_axonn_eval", "hf_axonn_scripts")
SOURCES = Path(__file__).parents[2]  # of a clone
MIB = 2**20


def add_kit(commands) -> None:
    """Register `kit` with the subparsers of main.py."""
    parser = commands.add_parser(
        "kit",
        help="collect the wheels that a machine without a network needs beside what it has",
        description="Collect the wheels that a machine without a network needs beside what it has, with a script that "
        "installs them there. A kit brings no torch, Triton or CUDA.",
    )
    parser.add_argument("--have", type=Path, metavar="FILE", help="its `pip list --format=freeze`")
    parser.add_argument("--torch", metavar="VERSION", help="its release of torch, where FILE has none")
    parser.add_argument(
        "--python",
        default=platform.python_version(),
        help=f"its version of Python ({platform.python_version()})",
    )
    parser.add_argument(
        "--glibc",
        type=with_reason(read_glibc),
        default=(2, 28),
        help="its version of glibc, or a manylinux tag (2.28)",
    )
    parser.add_argument(
        "--architecture", default=platform.machine(), help=f"its processor ({platform.machine()}), as `uname -m` says"
    )
    parser.add_argument(
        "--extras", default="data,peft,trl,eval", help="of this package, with commas between them (data,peft,trl,eval)"
    )
    parser.add_argument(
        "--beside", type=Path, metavar="KIT", help="a kit that is there as well; leave out what it has"
    )
    parser.add_argument("--output", type=Path, default=Path("build/kit"), help="the folder to write (build/kit)")
    parser.add_argument(
        "--interpreter", metavar="PYTHON", help="installs the kit on trial; a Python of that version on this machine"
    )
    parser.add_argument(
        "--pip", action="append", default=[], metavar="ARGUMENT", help="for pip, as --pip=--index-url=URL; repeatable"
    )


def run_kit(options: argparse.Namespace) -> int:
    """`hf-axonn kit`; returns the exit code.

    Raises:
        ValueError: bad input, or there is no kit for that machine.
        OSError: a file cannot be read or written.
    """
    machine = read_machine(options)
    interpreter = find_interpreter(machine.minor)
    if options.interpreter:
        interpreter = os.path.abspath(shutil.which(options.interpreter) or options.interpreter)
        if (here := read_python_version(interpreter)) != machine.minor:
            what = f"Python {here}, and the machine has {machine.minor}" if here else "no Python that runs"
            raise ValueError(f"--interpreter {options.interpreter} is {what}")
    source = SOURCES if (SOURCES / "setup.cfg").is_file() else VERSION.replace(" ", "==")
    kit = make_kit(
        source,
        options.extras.split(","),
        machine,
        options.output,
        interpreter=interpreter or sys.executable,
        arguments=options.pip,
        beside=options.beside,
    )
    print("\n".join(describe(kit, machine)), flush=True)
    failed = False
    if wheel := find_unusable(kit.folder):
        print(f"not tried: {wheel} is not for this machine")
    elif interpreter is None:
        print(f"not tried: there is no python{machine.minor} here; --interpreter names one")
    else:
        kits = [kit.folder] if options.beside is None else [options.beside, kit.folder]
        found = try_kit(kits, interpreter, PACKAGES)
        print("\n".join(describe_trial(found, interpreter)))
        failed = bool(found.get("failed"))
    if kit.missing:
        print(f"missing there: {', '.join(kit.missing)}. A kit brings no torch, Triton or CUDA: install them there.")
    print(f"Install it there: bash {kit.folder.name}/install.sh FOLDER, then export PYTHONPATH=FOLDER")
    return int(failed or bool(kit.missing))


def read_machine(options: argparse.Namespace) -> Machine:
    """Return the machine that the options describe.

    Raises:
        ValueError: a version is none, or no torch is given, or two.
        OSError: the file cannot be read.
    """
    packages = read_packages(options.have) if options.have else {}
    for option, value in (("--torch", options.torch), ("--python", options.python)):
        try:
            Version(value or "0")
        except InvalidVersion:
            raise ValueError(f"{option} {value} is no version: give it as 3.12 or 2.11.0") from None
    if options.torch and "torch" in packages:
        raise ValueError(f"{options.have} has torch {packages['torch']}: leave --torch {options.torch} out")
    if options.torch:
        packages["torch"] = options.torch
    if "torch" not in packages:
        where = f"{options.have} has none" if options.have else "without --have it is not known"
        raise ValueError(f"which torch is there? {where}: give its release, as --torch 2.11, since a kit brings none")
    return Machine(packages, options.python, options.glibc, options.architecture)


def describe(kit: Kit, machine: Machine) -> list[str]:
    """Return the lines on what a kit has: a wheel each, with its size."""
    glibc = ".".join(map(str, machine.glibc))
    lines = [
        f"for Python {machine.python} on {machine.architecture} with glibc {glibc}, beside "
        f"{len(machine.packages)} packages:"
    ]
    for name, wheel in kit.wheels.items():
        there = machine.packages.get(name)
        notes = ["built here"] if name in kit.built else []
        notes += [f"in place of {there}"] if there else []
        size = wheel.stat().st_size / MIB
        lines.append(f"  {name:24}{read_version(wheel):16}{size:6.2f} MiB  {', '.join(notes)}".rstrip())
    return [*lines, f"{kit.folder}: {number_of(len(kit.wheels), 'wheel')}, {kit.nbytes / MIB:.1f} MiB"]


def describe_trial(found: dict, interpreter: str) -> list[str]:
    """Return the lines on a trial of a kit with an interpreter."""
    if not found:
        return [f"tried: it installs with {interpreter}, which has no torch, so nothing was imported"]
    lines = [f"tried: it installs with {interpreter}, and {found['imported']} modules can be imported"]
    lacking: dict[str, list[str]] = {}
    for module, needed in sorted(found["lacking"].items()):
        lacking.setdefault(needed, []).append(module)
    for needed, modules in lacking.items():
        more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
        lines.append(f"  not there: {needed}, for {modules[0]}{more}")
    return [*lines, *(f"  FAILED: {module}: {error}" for module, error in sorted(found["failed"].items()))]
