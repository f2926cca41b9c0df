"""The verdict: on one screen, as certificate.json, and as a page of HTML that needs no other file."""

from __future__ import annotations

import hashlib
import html
import math
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hf_axonn.certificate.compare import BOUND, KINDS, CaseResult, Error
from hf_axonn.certificate.job import FLOAT64, Job
from hf_axonn.launch.launch_file import core_count


EQUAL, DIFFERENT = 0, 1
FIELDS = "ranks positions steps batch accumulation trainer script peft packing seed notes".split()  # of a job
PACKAGES = ("hf_axonn", "torch", "transformers", "accelerate")
NAMES = {"saved": "saved and loaded", "start": "weights at the start"}
STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}table{border-collapse:collapse}"
    "td,th{border:1px solid #bbb;padding:.3rem .6rem;text-align:left}.no{background:#fdd}.yes{background:#dfd}"
    "pre{white-space:pre-wrap}"
)


def verdict(results: list[CaseResult], dtype: str = FLOAT64) -> str:
    """Return the verdict in one line."""
    if all(result.equal for result in results):
        if dtype != FLOAT64:
            return f"equal to one process within {dtype}"
        return f"equal to one process, within {BOUND:.0e} in float64"
    if failed := [result for result in results if result.failed]:
        return f"DOES NOT RUN in {len(failed)} of {len(results)} runs"
    mistakes = [result for result in results if not result.equal and not result.documented]
    if not mistakes:
        return f"equal to one process {'in' if dtype == FLOAT64 else 'within'} {dtype}, but for what is documented"
    return f"DIFFERENT from one process in {len(mistakes)} of {len(results)} runs"


def exit_code(results: list[CaseResult]) -> int:
    """Return 0 where every difference is documented, else 1."""
    return EQUAL if all(result.equal or result.documented for result in results) else DIFFERENT


def plan_lines(job: Job, title: str, model: str | None, seconds: int) -> list[str]:
    """Return the lines that say what will be run."""
    runs = ", ".join(f"{path} {optimizer}" for path, optimizer in job.cases)
    return [
        f"{title}, beside one process, in {job.dtype}.",
        f"  model     {f'{model}, made small' if model else 'that of the script, made small'}",
        f"  settings  {settings(job)}",
        f"  runs      {runs}; {_shape(job)}",
        f"  time      about {seconds} s on {core_count()} cores",
        "",
    ]


def settings(job: Job) -> str:
    """Return the settings of the user, in a line."""
    if job.script:
        return "those of the script"
    given = {**job.trainer, **({"peft": job.peft} if job.peft else {}), **({"packing": True} if job.packing else {})}
    if job.accumulation > 1:
        given = {"gradient_accumulation_steps": job.accumulation, **given}
    return ", ".join(f"{name}: {value}" for name, value in given.items()) or "none given: those by default"


def _shape(job: Job) -> str:
    if job.script:
        return f"{job.steps} steps, of the script's rows, on {job.positions} position(s)"
    rows = job.batch * job.positions * job.accumulation
    end = "; the last one is not full" if job.uneven else ""
    return (
        f"{job.steps} steps, of {rows} rows: {job.positions} position(s) x {job.accumulation} micro-batch(es) x "
        f"{job.batch}{end}"
    )


def lines(job: Job, title: str, results: list[CaseResult], model: str) -> list[str]:
    """Return the verdict, on one screen."""
    kinds = [kind for kind in KINDS if any(kind in result.worst for result in results)]
    width = max(len(_name(result)) for result in results) + 2
    text = [
        f"{title}: {verdict(results, job.dtype)}.",
        f"  model     {model}",
        f"  settings  {settings(job)}",
        f"  compared  {_shape(job)}",
        "",
        "  " + " " * width + "".join(f"{kind:<12}" for kind in kinds),
    ]
    for result in results:
        if result.failed:
            text.append("  " + f"{_name(result):<{width}}" + "does not run")
            continue
        cells = "".join(f"{_cell(result.worst.get(kind)):<12}" for kind in kinds)
        text.append("  " + f"{_name(result):<{width}}" + cells.rstrip())
    abouts: dict[str, list[str]] = {}
    for result in results:
        if not result.equal:
            abouts.setdefault(_about(result), []).append(_name(result))
    text += ["", *(f"  {' and '.join(names)}: {about}" for about, names in abouts.items())] if abouts else []
    text += [f"  note: {note}" for note in job.notes]
    return text


def _name(result: CaseResult) -> str:
    return f"{result.path} {result.optimizer}"


def _cell(error: Error | None) -> str:
    if error is None:
        return "-"
    if not math.isfinite(error.size):
        return "WRONG"
    if error.name == "samples":
        return "each once"
    return f"{error.size:.0e}" + (f"/{error.bound:.0e}" if error.bound != BOUND else "")


def _about(result: CaseResult) -> str:
    """Return what differs first, and why; or the error of the framework."""
    if result.failed:
        return result.failed
    assert result.first is not None
    kind, error = result.first
    what = error.name if error.name.startswith(kind) or kind in ("logged", "norm") else f"{kind} {error.name}"
    size = error.text or f"off by {error.size:.1e}"
    where = "samples" if kind == "samples" else f"{what}, rank {error.rank}"
    known = "documented" if result.documented else "cause"
    return f"from step {error.step}: {where}: {size}" + (f". {known}: {result.cause}" if result.cause else "")


def certificate(
    job: Job, title: str, results: list[CaseResult], model: dict[str, Any], command: list[str], files: dict[str, Path]
) -> dict[str, Any]:
    """Return the contents of certificate.json."""
    return {
        "verdict": verdict(results, job.dtype),
        "exit_code": exit_code(results),
        "run": title,
        "command": command,
        "bound": BOUND if job.dtype == FLOAT64 else None,  # in another dtype each number has its own
        "dtype": job.dtype,
        "model": model,
        **{name: getattr(job, name) for name in FIELDS},
        "cases": [_case(result, job.dtype) for result in results],
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "sha256": {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()},
    }


def _case(result: CaseResult, dtype: str) -> dict[str, Any]:
    first = None
    if result.first is not None:
        kind, error = result.first
        first = {"kind": kind, **_values(error)}
    return {
        "path": result.path,
        "optimizer": result.optimizer,
        "equal": result.equal,
        "worst": {kind: _values(error) for kind, error in result.worst.items()},
        "first": first,
        "cause": result.cause,
        "documented": result.documented,
        "failed": result.failed,
        "ranks_with_the_same_samples": result.groups,
    } | ({} if dtype == FLOAT64 else {"bounds": [{"kind": kind, **_values(error)} for kind, error in result.errors]})


def _values(error: Error) -> dict[str, Any]:
    values = asdict(error)
    size = values.pop("size")
    return {"error": size if math.isfinite(size) else None, **values}  # JSON has no infinity


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def page(found: dict[str, Any], screen: list[str]) -> str:
    """Return the certificate as HTML."""
    kinds = [kind for kind in KINDS if any(kind in case["worst"] for case in found["cases"])]
    head = "".join(f"<th>{html.escape(NAMES.get(kind, kind))}</th>" for kind in ("run", *kinds))
    body = []
    for case in found["cases"]:
        cells = [f"<td>{html.escape(case['path'])} {html.escape(case['optimizer'])}</td>"]
        for kind in kinds:
            error = case["worst"].get(kind)
            if error is None:
                cells.append("<td>-</td>")
                continue
            right = error["error"] is not None and error["error"] <= error["bound"]
            size = "wrong" if error["error"] is None else f"{error['error']:.1e} of {error['bound']:.1e}"
            whose = "" if right else f" {html.escape(error['name'])}, step {error['step']}, rank {error['rank']}"
            cells.append(f'<td class="{"yes" if right else "no"}">{size}{whose}</td>')
        body.append(f"<tr>{''.join(cells)}</tr>")
    facts = {
        "command": " ".join(found["command"]),
        **found["versions"],
        **{f"SHA-256 of {name}": digest for name, digest in found["sha256"].items()},
    }
    listed = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>" for name, value in facts.items()
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(found["run"])}</title>'
        f"<style>{STYLE}</style><h1>{html.escape(found['run'])}</h1><p>{html.escape(found['verdict'])}</p>"
        f"<pre>{html.escape(chr(10).join(screen))}</pre><h2>Largest errors</h2>"
        f"<table><tr>{head}</tr>{''.join(body)}</table><h2>How it was made</h2><table>{listed}</table></html>\n"
    )
