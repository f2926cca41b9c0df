"""Runs mypy, and fails where a package has more errors than type_errors.json says: `make lint` calls this.

    python -m tests.tools.type_errors
    python -m tests.tools.type_errors --write      write the numbers down, after they fell

A package that the file does not name has none. Which packages are strict is in pyproject.toml.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path


ROOT = Path(__file__).parents[2]
ALLOWED = Path(__file__).with_name("type_errors.json")
PACKAGES = ROOT / ".mypy_cache" / "packages"  # mypy_path in pyproject.toml
MAPPED = {"hf_axonn_eval": "eval", "hf_axonn_scripts": "training_scripts"}
SUMMARY = ("Found ", "Success: ")


def mypy(*arguments: str) -> list[str]:
    """What mypy prints, one message an item, with paths that begin at the root of the repository.

    It finds packages by their folder's name and knows nothing of what an editable install maps, so those of MAPPED
    need a folder of their name: a link.

    Raises:
        RuntimeError: mypy did not come to an end.
    """
    PACKAGES.mkdir(parents=True, exist_ok=True)
    for name, folder in MAPPED.items():
        if not (PACKAGES / name).is_symlink():
            (PACKAGES / name).symlink_to(Path("..", "..", folder))
    command = [sys.executable, "-m", "mypy", "--show-error-codes", "--no-pretty", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    if done.returncode not in (0, 1) or not lines or not lines[-1].startswith(SUMMARY):
        raise RuntimeError(f"mypy ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    links = {f"{(PACKAGES / name).relative_to(ROOT).as_posix()}/": f"{folder}/" for name, folder in MAPPED.items()}
    for link, folder in links.items():
        lines = [line.replace(link, folder, 1) if line.startswith(link) else line for line in lines]
    return lines[:-1]


def package_of(message: str) -> str:
    """The package that an error lies in: hf_axonn/engine/state.py is in hf_axonn/engine, hf_axonn/plugin.py in
    hf_axonn."""
    folders = Path(message.partition(":")[0]).parent.parts
    return "/".join(folders[:2])


def by_package(messages: list[str]) -> dict[str, list[str]]:
    """The errors of each package, without mypy's notes."""
    errors: dict[str, list[str]] = defaultdict(list)
    for message in messages:
        if ": error: " in message:
            errors[package_of(message)].append(message)
    return errors


def compare(allowed: dict[str, int], errors: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    """Two lists of lines: what is worse than allowed, every error included, and what is better."""
    worse, better = [], []
    for package in sorted({*allowed, *errors}):
        found, most = errors.get(package, []), allowed.get(package, 0)
        if len(found) > most:
            worse += [
                *found,
                f"{package} has {len(found)} type errors, {len(found) - most} more than the {most} allowed",
            ]
        elif len(found) < most:
            better.append(f"{package} has {len(found)} type errors, fewer than the {most} allowed")
    return worse, better


def main(arguments: list[str]) -> int:
    """Compare, or write; returns the exit code, 1 where a number rose."""
    errors = by_package(mypy())
    counts = {package: len(found) for package, found in sorted(errors.items())}
    if arguments == ["--write"]:
        ALLOWED.write_text(json.dumps(counts, indent=4) + "\n", encoding="utf-8")
        return 0
    worse, better = compare(json.loads(ALLOWED.read_text(encoding="utf-8")), errors)
    for line in [*worse, *better]:
        print(line)
    if better:
        print(f"Lower the numbers in {ALLOWED.relative_to(ROOT)}: python -m tests.tools.type_errors --write")
    print(f"mypy: {sum(counts.values())} errors, {'too many' if worse else 'no more than allowed'}")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
