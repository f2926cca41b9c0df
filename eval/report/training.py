"""The models by their own records: how they were reached, and the training record that lies beside their weights.

How often a document was seen is a claim of the samples file. The record (hf_axonn/goldfish/record.py) is what training
itself wrote down; a model without one may have been trained on anything.
"""

from collections.abc import Mapping
from typing import Any

from hf_axonn.goldfish.record import all_parts, describe_counts, describe_loss, is_record
from hf_axonn_eval.data.access import access_of
from hf_axonn_eval.report.words import join_words


UNKNOWN = "unknown"
SHORT = 12  # characters of a checksum in a table; "Where the numbers come from" has it in full

Comparison = Mapping[str, Any]


def record_of(summary: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the training record in the run.json of a run; None without one."""
    found: Mapping[str, Any] | None = ((summary["run"] or {}).get("model") or {}).get("training")
    return found if is_record(found) else None


def sentence(comparison: Comparison) -> str:
    """Write what the models were trained on by their own records, in a sentence or two."""
    known, silent = [], []
    for name, summary in comparison["runs"].items():
        record = record_of(summary)
        if record is None:
            silent.append(name)
            continue
        steps, tokens, dropped = describe_counts(record)
        losses = join_words(list(dict.fromkeys(map(describe_loss, record["parts"]))), "then")
        known.append(f"{name}: {losses}, {steps} steps, {tokens} tokens, {dropped} of them dropped")
    found = [f"By their training records, {'; '.join(known)}."] if known else []
    if silent:
        have = "has" if len(silent) == 1 else "have"
        found.append(f"{join_words(silent)} {have} no training record, so only the samples file says what was seen.")
    return " ".join(found)


def models(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells of the table of models: how each was reached, when, with which tokenizer."""
    body = []
    for name, summary in comparison["runs"].items():
        run = summary["run"]
        if run is not None:
            tokenizer = (run.get("tokenizer") or {}).get("sha256") or run["identity"].get("tokenizer_sha256")
            path = (run.get("model") or {}).get("path", "a model in memory")
            cells = [str(path), access_of(run), str(run.get("started") or UNKNOWN).partition("T")[0]]
            digests = [tokenizer or UNKNOWN, str(run["identity"].get("model_fingerprint", UNKNOWN))]
            digests = [UNKNOWN if digest.startswith(UNKNOWN) else digest[:SHORT] for digest in digests]
            body.append([name, *cells, *digests])
    return ["model", "path", "level of access", "measured", "tokenizer, sha256", "weights, sha256"], body


def records(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells of the table of training records: a line for each setting of loss or data."""
    body = []
    for name, summary in comparison["runs"].items():
        record = record_of(summary)
        for number, part in enumerate(all_parts(record) if record is not None else (), start=1):
            data = part.get("data") or {}
            rows = UNKNOWN if data.get("rows") is None else f"{data['rows']:,}"
            digest = (data.get("rows_sha256") or "")[:SHORT] or f"{UNKNOWN}: {data.get('why', 'no record')}"
            body.append([name, str(number), describe_loss(part), *describe_counts(part), rows, digest])
    return ["model", "part", "loss", "steps", "tokens", "dropped", "rows", "rows, sha256"], body
