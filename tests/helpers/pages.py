"""What the benchmarks of evaluation say: on the terminal, and in a file of docs/results."""

from pathlib import Path


def show(text: str, output: Path | None) -> None:
    """Print a page, and write it where there is an `output`; its folder is made."""
    print(text)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="ascii")
