"""The part of docs/protocols.md that is made of the files in eval/data/published.

`python -m tests.tools.protocol_page` writes it; test_protocol_page.py compares.
"""

import sys
import textwrap

from hf_axonn_eval import PROTOCOLS
from hf_axonn_eval.data.contract import Line
from hf_axonn_eval.data.protocols import Protocol
from tests.helpers import ROOT


DOCUMENT = ROOT / "docs" / "protocols.md"
BEGIN, END = "<!-- begin of the protocols, written by tests/tools/protocol_page.py -->", "<!-- end -->"


def section(some: Protocol) -> str:
    """Everything that the file of a protocol says."""
    never = [line for line in some.lines if line.differs]
    cannot = [f"- {line.what}: published {line.published}; here {line.differs}." for line in never]
    unchecked = [f"- {line.what}: {line.unchecked}." for line in some.lines if line.unchecked]
    parts = [
        f"## {some.name}",
        f"{_capital(some.summary)}.",
        f"How to cite: {some.cite}" + (f" Paths are those of `{some.code}`." if some.code else ""),
        "\n".join(["| line | published | source | here |", "| --- | --- | --- | --- |", *map(_row, some.lines)]),
    ]
    if some.drop:
        parts.append(f"Ids that are left out: {', '.join(f'`{name}`' for name in some.drop)}.")
    if cannot:
        parts += ["What no run here meets:", "\n".join(cannot)]
    if unchecked:
        parts += ["What is not checked:", "\n".join(unchecked)]
    parts.append("\n".join(["```bash", *(_wrapped(command) for command in some.commands), "```"]))
    return "\n\n".join(parts)


def written(text: str) -> str:
    """The text of docs/protocols.md with its made part as the files have it.

    Raises:
        ValueError: the text has no place for it.
    """
    before, found, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (found and end):
        raise ValueError(f"{DOCUMENT.name} has no lines {BEGIN} and {END}: put them where the protocols belong.")
    made = "\n\n".join(section(some) for some in PROTOCOLS.values())
    return f"{before}{BEGIN}\n\n{made}\n\n{end}{after}"


def _row(line: Line) -> str:
    checks = [
        f"`{name} = {_value(value)}`" for asked in (line.sampling, line.extract) for name, value in asked.items()
    ]
    checks += [f"is found: `{name} = {_value(value)}`" for name, value in line.require.items()]
    if line.unchecked is not None:
        checks = ["not checked", *checks]
    elif line.differs is not None:
        checks = ["**otherwise**"]
    ours = [f"metric{'s' if len(line.ours) > 1 else ''} {', '.join(f'`{name}`' for name in line.ours)}"]
    cells = [line.what, line.published, line.source, "; ".join([*checks, *(ours if line.ours else [])])]
    return "| " + " | ".join(cell.replace("|", "/").replace("*_", "\\*_") for cell in cells) + " |"


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_value(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value).replace("'", '"')


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _wrapped(command: str) -> str:
    lines = textwrap.wrap(command, 110, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return " \\\n".join(lines)


def main() -> None:
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{DOCUMENT.relative_to(ROOT)} has the protocols as their files have them")


if __name__ == "__main__":
    sys.exit(main())
