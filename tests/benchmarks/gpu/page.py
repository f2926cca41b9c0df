"""One page of all results: `record` collects them, `page` and `section` write Markdown of what is recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from tests.benchmarks.gpu.figures import agree, best, published, training
from tests.benchmarks.gpu.jobs import DONE, FAILED, LEFT_OUT, OPEN, STOPPED, Outcome, Part
from tests.benchmarks.gpu.settings import COUNTED, LOSS_TOLERANCE, MODELS, STEPS, Settings, parameters


GIB = 2**30
STATES = (DONE, FAILED, STOPPED, OPEN, LEFT_OUT)
PRINTED = 5_000  # characters of what is printed of a part: who sees the last 12,000 of a call sees two parts, or more


def record(settings: Settings, parts: list[Part], outcomes: dict[str, list[Outcome]]) -> dict[str, Any]:
    """Everything that was measured, as JSON takes it."""
    lines = training(settings, outcomes)
    return {
        "settings": asdict(settings) | {"checkpointing": settings.checkpointing},
        "parameters": parameters(MODELS[settings.model][0]),
        "parts": [
            {
                **{key: getattr(part, key) for key in ("name", "title", "limit", "remedy")},
                "jobs": [asdict(outcome) for outcome in outcomes[part.name]],
            }
            for part in parts
        ],
        "training": lines,
        "losses_agree": agree(lines),
        "published": published(),
    }


def page(found: dict[str, Any]) -> str:
    """The page of a record."""
    sections = [_head(found), overview(found), *(_troubles(part) for part in found["parts"])]
    sections += [_section(found, part) for part in found["parts"]] + [_published(found)]
    return "\n\n".join(section for section in sections if section) + "\n"


def section(found: dict[str, Any], name: str) -> str:
    """Return what is printed of a part when it ends: its troubles and its table, in PRINTED characters at most."""
    part = next(part for part in found["parts"] if part["name"] == name)
    return clip("\n\n".join(filter(None, (_troubles(part), _section(found, part)))), PRINTED)


def clip(text: str, most: int) -> str:
    """The first lines of a text, with a line that says how many are missing."""
    if len(text) <= most:
        return text
    lines = text.splitlines()
    kept = text[: most - 60].count("\n")
    return "\n".join([*lines[:kept], f"... {len(lines) - kept} more lines are in gpu.md"])


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table whose first column is text."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _section(found: dict[str, Any], part: dict[str, Any]) -> str:
    """The table of a part, and what is left out of it; nothing where no job has a result."""
    text = SECTIONS[part["name"]](found, part)
    out = [f"- {job['name']}: {job['reason']}" for job in part["jobs"] if job["state"] == LEFT_OUT]
    if not (text or out):
        return ""
    return "\n\n".join(
        [f"## {part['title']}", *filter(None, [text, "\n".join(["Left out:", "", *out]) if out else ""])]
    )


def _results(part: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The jobs of a part whose result has a key, also of those that failed."""
    return [job for job in part["jobs"] if job["result"] and key in job["result"]]


def _head(found: dict[str, Any]) -> str:
    settings, machine = found["settings"], found["settings"]["machine"]
    commits = {job["commit"] for part in found["parts"] for job in part["jobs"] if job["commit"]}
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    count = f"{machine['count']} x " if machine["count"] else ""
    lines = [
        "# Measured on GPUs" if machine["count"] else "# The measurements for GPUs, run on a CPU",
        "",
        f"`python -m tests.benchmarks.gpu --size {settings['size']}`; docs/gpu.md says what each table means. "
        f"{count}{machine['name']}, {machine['memory'] / GIB:.1f} GiB each; {versions}; code: "
        f"{', '.join(sorted(commits)) or 'none yet'}.",
    ]
    if settings["size"] == "smoke":
        lines += ["", "**Tiny sizes: these are no figures, only a sign that everything runs.**"]
    return "\n".join(lines)


def overview(found: dict[str, Any]) -> str:
    """Count the jobs of each part by state."""
    rows = []
    for part in found["parts"]:
        states = [job["state"] for job in part["jobs"]]
        took = sum(job["seconds"] for job in part["jobs"])
        counts = [str(states.count(state)) for state in STATES]
        rows.append([f"{part['name']}: {part['title']}", *counts, f"{took:.0f}", f"{part['limit']:.0f}"])
    return "## Parts\n\n" + table(["jobs", *STATES, "seconds", "limit"], rows)


def _troubles(part: dict[str, Any]) -> str:
    wrong = [job for job in part["jobs"] if job["state"] in (FAILED, STOPPED)]
    waiting = [job["name"] for job in part["jobs"] if job["state"] == OPEN]
    lines = [f"## What failed or is open: {part['name']}"]
    if wrong:
        lines += ["", part["remedy"]]
    for job in wrong:
        lines += [
            "",
            f"{job['name']}: {job['state']} after {job['seconds']:.0f} s",
            "",
            "```text",
            job["reason"],
            "```",
        ]
    if waiting:
        lines += ["", f"Open, run again to go on: {', '.join(waiting)}."]
    return "\n".join(lines) if wrong or waiting else ""


def _start(found: dict[str, Any], part: dict[str, Any]) -> str:
    text = []
    for job in _results(part, "apart"):
        result = job["result"]
        rows = [
            [
                name,
                *(f"{value:.5f}" for value in (losses[0], losses[-1])),
                _number(result["apart"].get(name), "{:.1e}"),
            ]
            for name, losses in result["losses"].items()
        ]
        head = ["contender", "first loss", "last loss", "apart from stock"]
        text = [f"Backend: {result['backend']}. {_same_bits(result)}", table(head, rows)]
    return "\n\n".join(text)


def _same_bits(result: dict[str, Any]) -> str:
    other = result.get("other_bits")
    found = "not run" if other is None else f"**other bits: {', '.join(other)}**" if other else "the same bits"
    return f"With CUDA_LAUNCH_BLOCKING=1: {found}."


def _axes(found: dict[str, Any], part: dict[str, Any]) -> str:
    text = []
    for job in _results(part, "errors"):
        rows = []
        for name, errors in job["result"]["errors"].items():
            kinds = {what.partition(":")[0]: value for what, value in errors.items()}
            rows.append([name, *(f"{kinds[kind]:.0e}" for kind in ("loss", "norm", "gradients", "parameters"))])
        head = ["grid and model", "loss", "norm", "gradients", "parameters"]
        text = [f"Backend: {job['result']['backend']}. {_same_bits(job['result'])}", table(head, rows)]
    return "\n\n".join(text)


def _checks(found: dict[str, Any], part: dict[str, Any]) -> str:
    rows = []
    for job in _results(part, "waits"):
        for name, places in job["result"]["waits"].items():
            rows.append([f"host waits, {name} (mode: {job['result']['mode']})", "; ".join(places) or "none"])
    rows += [["memcheck", job["result"]["summary"]] for job in _results(part, "summary")]
    return table(["check", "found"], rows) if rows else ""


def _packing(found: dict[str, Any], part: dict[str, Any]) -> str:
    rows = []
    for job in _results(part, "leak"):
        result = job["result"]
        seconds = f"{result['seconds']:.4f}" + ("" if result["backward"] else ", forward alone")
        row = [f"{result['error']:.1e}", f"{result['leak']:.0e}", f"{result['loss']:.4f}", seconds]
        rows.append([job["name"], *row, f"{result['peak_bytes'] / GIB:.2f}"])
    if not rows:
        return ""
    text = f"{result['documents']} documents in a row of {result['tokens']} tokens, the engine's layers in bfloat16."
    head = ["attention", "error", "leak", "loss", "s a step", "peak GiB"]
    return (
        f"{text} Error: beside the documents one by one. Leak: of a changed token, in others.\n\n{table(head, rows)}"
    )


def _training(found: dict[str, Any], part: dict[str, Any]) -> str:
    settings = found["settings"]
    lines = [line for line in found["training"] if line["part"] == part["name"]]
    if not lines:
        return ""
    rows = [
        [
            line["name"],
            str(line["world"]),
            f"{line['seconds']:.3f}",
            f"{line['tokens_per_second_per_gpu']:.0f}",
            f"{line['model_tflops']:.3g}",
            _percent(line["mfu"]),
            _percent(line["of_gemm"]),
            f"{line['peak_bytes'] / GIB:.2f}",
            _number(line["predicted_seconds"], "{:.3f}"),
            _number(line["predicted_bytes"], "{:.2f}", 1 / GIB),
            f"{line['loss_difference']:.1e}" + ("" if line["loss_difference"] <= LOSS_TOLERANCE else " **WRONG**"),
        ]
        for line in lines
    ]
    head = ["contender", "ranks", "s a step", "tokens/s a rank", "model TFLOP/s", "MFU", "of the product", "peak GiB"]
    head += ["predicted s", "predicted GiB", "losses apart"]
    text = [_legend(found, lines[0]), table(head, rows)]
    if not settings["machine"]["count"]:
        text.append("On a CPU the peak is resident memory, with the libraries, of which the prediction knows nothing.")
    return "\n\n".join([*text, *_conclusions(found, part["name"])])


def _legend(found: dict[str, Any], line: dict[str, Any]) -> str:
    settings = found["settings"]
    counted = f"{STEPS} steps, the last {COUNTED} count"
    if line["part"] == "lora":
        published = next(entry for entry in found["published"] if entry["lora"])
        return (
            f"{line['model']} shape, frozen in bfloat16, {counted}. Beside it: {published['what']}, "
            f"{published['gpus']}: {published['tokens_per_second_per_gpu']:,} tokens/s ({published['source']})."
        )
    again = "layers run again in backward" if settings["checkpointing"] else "no layer runs again in backward"
    return (
        f"{line['model']} shape, {found['parameters'] / 1e6:,.1f}M parameters with random weights, "
        f"{settings['rows']} rows of {settings['sequence']} tokens a step, the same for all; {again}. float32 weights "
        "and AdamW, bfloat16 activations. plain: stock Transformers; one rank: the engine's layers and loss. "
        f"{counted}. Utilisation: model FLOPs, of the advertised peak (MFU) and of the fastest product measured here. "
        f"Losses: the largest relative difference from the first line, at most {LOSS_TOLERANCE:.0%} is expected of "
        "bfloat16."
    )


def _conclusions(found: dict[str, Any], part: str) -> list[str]:
    """Compare the fastest grid with the fastest peer, and with the choice of the planner."""
    lines, text = found["training"], []
    ours, theirs = best(lines, ours=True), best(lines, ours=False)
    if part == "grids" and ours and theirs:
        ratio = ours["tokens_per_second_per_gpu"] / theirs["tokens_per_second_per_gpu"]
        text.append(f"The fastest grid, {ours['name']}, is {ratio:.2f} times as fast as {theirs['name']}.")
    predicted = [line for line in lines if line["part"] == part == "grids" and line["predicted_seconds"]]
    if len(predicted) > 1:
        choice = min(predicted, key=lambda line: line["predicted_seconds"])
        fastest = min(predicted, key=lambda line: line["seconds"])
        text.append(
            f"The plan puts {choice['name']} first, which is {choice['seconds'] / fastest['seconds'] - 1:.1%} slower "
            f"than the fastest, {fastest['name']}."
        )
    return text


def _published(found: dict[str, Any]) -> str:
    rows = [
        [
            entry["what"],
            entry["gpus"],
            _number(entry["tokens_per_second_per_gpu"], "{:,}"),
            f"{entry['tflops']:.0f}",
            entry["source"],
        ]
        for entry in found["published"]
    ]
    return (
        "## Published, to stand beside\n\nNot measured here. TFLOP/s of a GPU: of tokens/s model FLOPs as in the table"
        " above, of AxoNN as published, recomputation included.\n\n"
        + table(["what", "GPUs", "tokens/s a GPU", "TFLOP/s a GPU", "source"], rows)
    )


def _overlap(found: dict[str, Any], part: dict[str, Any]) -> str:
    base = {line["name"]: line for line in found["training"] if line["part"] == "grids"}
    rows = []
    for line in found["training"]:
        with_all = base.get(line["contender"])
        if line["part"] != "overlap" or with_all is None:
            continue
        slower = [line[key] / with_all[key] if line[key] else None for key in ("seconds", "predicted_seconds")]
        rows.append([line["name"], f"{line['seconds']:.3f}", *(_number(value, "{:.3f}") for value in slower)])
    if not rows:
        return ""
    head = ["grid and switches", "s a step", "beside all on", "predicted beside all on"]
    return "Seconds over those with all switches on: above 1 the switch helps.\n\n" + table(head, rows)


def _links(found: dict[str, Any], part: dict[str, Any]) -> str:
    machine = next((job["result"] for job in _results(part, "gemm_tflops")), None)
    if machine is None:
        return ""
    rows = [
        ["fastest product, TFLOP/s", f"{machine['gemm_tflops']:.3g}"],
        ["memory, GB/s (a copy, read and written)", f"{machine['memory_gbs']:.4g}"],
        ["shortest operation, us", f"{machine['kernel_us']:.1f}"],
    ]
    rings = machine["intra_gbs"] if isinstance(machine["intra_gbs"], dict) else {}  # of one rank there are none
    if rings:
        rows += [
            ["share of a gather beside products", f"{machine['overlap']:.2f}"],
            ["start of a collective, us", f"{machine['latency_us']['base']:.1f}"],
            ["a step of a ring in a node, us", f"{machine['latency_us']['intra']:.1f}"],
        ]
    rows += [[f"ring {name} (stride x ranks), GB/s a rank", f"{value:.4g}"] for name, value in rings.items()]
    rows += [[f"{kind} over all-gather, bytes", f"{value:.2f}"] for kind, value in machine["relative_cost"].items()]
    sizes = ", ".join(f"{size}: {share:.0%}" for size, share in machine["gemm_by_size"].items())
    text = f"Share of the fastest product, by tokens: {sizes}. In gpu.json this is a machine file for the planner."
    return f"{table(['what', 'value'], rows)}\n\n{text}"


def _equality(found: dict[str, Any], part: dict[str, Any]) -> str:
    done = _results(part, "passed")
    if not done:
        return ""
    keys = ("passed", "failed", "skipped")
    rows = [[job["name"], *(str(job["result"][key]) for key in keys), f"{job['seconds']:.0f}"] for job in done]
    rows.append(["all", *(str(sum(job["result"][key] for job in done)) for key in keys), ""])
    failures = [f"- {name}" for job in done for name in job["result"]["failures"]]
    return table(["tests", *keys, "seconds"], rows) + ("\n\nFailed:\n\n" + "\n".join(failures) if failures else "")


def _tuning(found: dict[str, Any], part: dict[str, Any]) -> str:
    result = next((job["result"] for job in _results(part, "gains")), None)
    if result is None:
        return ""
    head = "| model | dtype | y, x | matmul | as is ms | TFLOP/s | closest | chosen | gain promised | gain kept |"
    gains = "| model | dtype | y, x | matmul | M x N x K | lies | chosen | part of the time | again |"
    text = [f"{result['tokens']} tokens a rank; a layout was chosen for {len(result['gains'])} of {result['shapes']} "]
    text[0] += f"shapes, in {result['seconds']:.1f} s. Columns as in docs/results/tuning.md."
    text += ["", head, "|---|---|---|---|---:|---:|---:|---:|---:|---:|", *result["rows"]]
    if result["gains"]:
        text += ["", gains, "|---|---|---|---|---|---|---|---:|---:|", *result["gains"]]
    return "\n".join(text)


def _host(found: dict[str, Any], part: dict[str, Any]) -> str:
    tables = [job["result"]["table"] for job in _results(part, "table")]
    return "\n\n".join(["As in docs/results/host_time.md, on this host's processor.", *tables]) if tables else ""


def _extraction(found: dict[str, Any], part: dict[str, Any]) -> str:
    result = next((job["result"] for job in _results(part, "samples")), None)
    if result is None:
        return ""
    shares = list(result["seconds"])
    names = list(result["seconds"][shares[0]])
    rows = [[name, *(f"{min(result['seconds'][share][name]) * 1e3:.2f}" for share in shares)] for name in names]
    return (
        f"Milliseconds a sample, the fastest round; {result['samples']} samples of {result['tokens']} +"
        f" {result['tokens']} tokens, batches of {result['batch']}, float32, random weights. Rows as in "
        "docs/results/extraction.md; figures of all ways were equal.\n\n"
        + table(["way", *(f"{float(share):.0%} memorized" for share in shares)], rows)
    )


SECTIONS: dict[str, Callable[[dict[str, Any], dict[str, Any]], str]] = {
    "start": _start,
    "axes": _axes,
    "training": _training,
    "lora": _training,
    "checks": _checks,
    "packing": _packing,
    "host": _host,
    "extraction": _extraction,
    "links": _links,
    "grids": _training,
    "overlap": _overlap,
    "equality": _equality,
    "tuning": _tuning,
}


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None, form: str, times: float = 1) -> str:
    if value is None:
        return "-"
    return form.format(value * times if times != 1 else value)
