"""The protocol that the samples of a report were made by: which lines were met, and which were not.

run.json has the lines (data/contract.py); those that wait for the answers are decided here, by the summary of the run.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hf_axonn_eval.data.contract import DEVIATION, MET, close_lines, deviations


Comparison = Mapping[str, Any]


def lines_of(summary: Mapping[str, Any]) -> tuple[str, list[dict[str, str]] | None] | None:
    """Return the name of a run's protocol, and its lines.

    Args:
        summary: of one run, as `compare` has it in `runs`.
    Returns:
        None if the record says of no protocol; no lines if it was written by a version that did not check them.
    """
    record = ((summary["run"] or {}).get("settings") or {}).get("protocol")
    if not isinstance(record, Mapping) or not record.get("name"):
        return None
    if "lines" not in record:
        return str(record["name"]), None
    entry = summary["all"]["metrics"].get("holds_eos")
    facts = {} if entry is None else {"eos_generated": round(entry["mean"] * entry["n"])}
    return str(record["name"]), close_lines(record["lines"], facts)


def standing(comparison: Comparison) -> str:
    """Write whether the runs are as published, and the deviations of those that are not, one by one.

    Empty if no record says of a protocol.
    """
    sentences: dict[str, list[str]] = {}
    for name, summary in comparison["runs"].items():
        found = lines_of(summary)
        if found is not None:
            sentences.setdefault(_standing(*found), []).append(name)
    if len(sentences) == 1 and len(next(iter(sentences.values()))) == len(comparison["runs"]):
        return next(iter(sentences))
    return " ".join(f"{', '.join(names)}: {sentence}" for sentence, names in sentences.items())


def table_rows(comparison: Comparison) -> list[list[str]]:
    """Make rows of line, published, state, here and the runs that these hold for."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, summary in comparison["runs"].items():
        for line in (lines_of(summary) or ("", None))[1] or ():
            key = (line["line"], line["published"], line["state"], line.get("here", ""))
            rows.setdefault(key, []).append(name)
    return [[*key, ", ".join(names)] for key, names in rows.items()]


def _standing(name: str, lines: Sequence[Mapping[str, str]] | None) -> str:
    if lines is None:
        return f"The samples are of protocol {name}; whether this is as published was not recorded."
    other = deviations(lines)
    met = sum(line["state"] == MET for line in lines)
    unchecked = sum(line["state"] not in (MET, DEVIATION) for line in lines)
    counts = f"{met} of {len(lines)} lines met" + (f", {unchecked} not checked" if unchecked else "")
    if not other:
        return f"This is protocol {name} as published ({counts})."
    return f"This is protocol {name}, not as published ({counts}, {len(other)} not met). {'; '.join(other)}."
