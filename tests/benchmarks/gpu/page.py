"""One page and one JSON file of all results: `record` collects them, `page` writes Markdown of what is recorded."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tests.benchmarks.gpu.figures import LOSS_TOLERANCE, agree, best, published, training
from tests.benchmarks.gpu.jobs import DONE, FAILED, LEFT_OUT, STOPPED, WAITING, Outcome, Part
from tests.benchmarks.gpu.settings import COUNTED, MODELS, STEPS, Settings, parameters


GIB = 2**30
STATES = (DONE, FAILED, STOPPED, WAITING, LEFT_OUT)


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
    parts = {part["name"]: part for part in found["parts"]}
    sections = [
        _head(found),
        _overview(found["parts"]),
        _troubles(found["parts"]),
        _training(found, [job for name in ("peers", "grids", "overlap") for job in parts[name]["jobs"]]),
        _published(found),
        _overlap(found["training"]),
        _links(_result(parts["links"])),
        _equality(parts["equality"]["jobs"]),
        _tuning(_result(parts["tuning"])),
        _host(_result(parts["host"])),
        _extraction(_result(parts["extraction"])),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table whose first column is text."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _result(part: dict[str, Any]) -> dict[str, Any] | None:
    """Of a part with one job, if it is done."""
    return part["jobs"][0]["result"] if part["jobs"] else None


def _head(found: dict[str, Any]) -> str:
    settings, machine = found["settings"], found["settings"]["machine"]
    commits = {job["commit"] for part in found["parts"] for job in part["jobs"] if job["commit"]}
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    count = f"{machine['count']} x " if machine["count"] else ""
    lines = [
        "# Measured on GPUs" if machine["count"] else "# The measurements for GPUs, run on a CPU",
        "",
        f"`python -m tests.benchmarks.gpu --size {settings['size']}`, which `make gpu` runs; docs/gpu.md says what"
        f" each table means. {count}{machine['name']}, {machine['memory'] / GIB:.1f} GiB each; {versions}; commit "
        f"{', '.join(sorted(commits)) or 'none yet'}.",
    ]
    if settings["size"] == "smoke":
        lines += ["", "**Tiny sizes: these are no figures, only a sign that everything runs.**"]
    return "\n".join(lines)


def _overview(parts: list[dict[str, Any]]) -> str:
    rows = []
    for part in parts:
        states = [job["state"] for job in part["jobs"]]
        took = sum(job["seconds"] for job in part["jobs"])
        counts = [str(states.count(state)) for state in STATES]
        rows.append([f"{part['name']}: {part['title']}", *counts, f"{took:.0f}", f"{part['limit']:.0f}"])
    return "## Parts\n\n" + table(["jobs", *STATES, "seconds", "limit"], rows)


def _troubles(parts: list[dict[str, Any]]) -> str:
    lines = []
    for part in parts:
        wrong = [job for job in part["jobs"] if job["state"] in (FAILED, STOPPED)]
        waiting = [job["name"] for job in part["jobs"] if job["state"] == WAITING]
        if wrong or waiting:
            lines += ["", f"### {part['name']}"]
        if wrong:
            lines += ["", part["remedy"]]
        for job in wrong:
            lines += ["", f"{job['name']}: {job['state']} after {job['seconds']:.0f} s", "", "```text", job["told"]]
            lines += ["```"]
        if waiting:
            lines += ["", f"Not begun, run again to go on: {', '.join(waiting)}."]
    return "\n".join(["## What failed or is not begun", *lines]) if lines else ""


def _training(found: dict[str, Any], jobs: list[dict[str, Any]]) -> str:
    settings, lines = found["settings"], found["training"]
    again = "layers run again in backward" if settings["checkpointing"] else "no layer runs again in backward"
    text = [
        "## Training",
        "",
        f"{settings['model']} shape, {found['parameters'] / 1e6:,.1f}M parameters with random weights, "
        f"{settings['rows']} rows of {settings['sequence']} tokens a step, the same for all; {again}. float32 weights "
        f"and AdamW, bfloat16 activations. plain: stock Transformers on one rank; one rank: the engine's layers and"
        f" loss there. {STEPS} steps, the last {COUNTED} count. Utilisation: model FLOPs, of the "
        "advertised peak (MFU) and of the fastest product measured here. Losses: the largest relative difference from "
        f"the first line, at most {LOSS_TOLERANCE:.0%} is expected of bfloat16.",
    ]
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
        if line["part"] != "overlap"
    ]
    head = ["contender", "ranks", "s a step", "tokens/s a rank", "model TFLOP/s", "MFU", "of the product", "peak GiB"]
    head += ["predicted s", "predicted GiB", "losses apart"]
    if rows:
        text += ["", table(head, rows)]
    out = [f"- {job['name']}: {job['told']}" for job in jobs if job["state"] == LEFT_OUT]
    text += ["", "Left out:", "", *out] if out else []
    if not settings["machine"]["count"]:
        text += [
            "",
            "On a CPU the peak is resident memory, with the libraries, of which the prediction knows nothing.",
        ]
    ours, theirs = best(lines, ours=True), best(lines, ours=False)
    if ours and theirs:
        ratio = ours["tokens_per_second_per_gpu"] / theirs["tokens_per_second_per_gpu"]
        text += ["", f"The fastest grid, {ours['name']}, is {ratio:.2f} times as fast as {theirs['name']}."]
    predicted = [line for line in lines if line["part"] == "grids" and line["predicted_seconds"]]
    if len(predicted) > 1:
        choice = min(predicted, key=lambda line: line["predicted_seconds"])
        fastest = min(predicted, key=lambda line: line["seconds"])
        text += [
            "",
            f"The plan puts {choice['name']} first, which is {choice['seconds'] / fastest['seconds'] - 1:.1%} slower "
            f"than the fastest, {fastest['name']}.",
        ]
    return "\n".join(text)


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


def _overlap(lines: list[dict[str, Any]]) -> str:
    base = {line["name"]: line for line in lines if line["part"] == "grids"}
    rows = []
    for line in lines:
        with_all = base.get(line["contender"])
        if line["part"] != "overlap" or with_all is None:
            continue
        slower = [line[key] / with_all[key] if line[key] else None for key in ("seconds", "predicted_seconds")]
        rows.append([line["name"], f"{line['seconds']:.3f}", *(_number(value, "{:.3f}") for value in slower)])
    if not rows:
        return ""
    head = ["grid and switches", "s a step", "beside all on", "predicted beside all on"]
    return "## Overlaps\n\nSeconds over those with all switches on: above 1 the switch helps.\n\n" + table(head, rows)


def _links(machine: dict[str, Any] | None) -> str:
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
    text = (
        f"Share of the fastest product, by tokens: {sizes}. In the JSON file this is a machine file for the planner."
    )
    return f"## Links and products\n\n{table(['what', 'value'], rows)}\n\n{text}"


def _equality(jobs: list[dict[str, Any]]) -> str:
    done = [job for job in jobs if job["result"] and "passed" in job["result"]]
    if not done:
        return ""
    keys = ("passed", "failed", "skipped")
    rows = [[job["name"], *(str(job["result"][key]) for key in keys), f"{job['seconds']:.0f}"] for job in done]
    rows.append(["all", *(str(sum(job["result"][key] for job in done)) for key in keys), ""])
    text = table(["tests", *keys, "seconds"], rows)
    failures = [f"- {name}" for job in done for name in job["result"]["failures"]]
    return "## Equality with one process\n\n" + text + ("\n\nFailed:\n\n" + "\n".join(failures) if failures else "")


def _tuning(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    head = "| model | dtype | y, x | matmul | as is ms | TFLOP/s | closest | chosen | gain promised | gain kept |"
    gains = "| model | dtype | y, x | matmul | M x N x K | lies | chosen | part of the time | again |"
    text = [f"## Kernel tuner\n\n{found['tokens']} tokens a rank; a layout was chosen for {len(found['gains'])} of "]
    text[0] += f"{found['shapes']} shapes, in {found['seconds']:.1f} s. Columns as in docs/results/tuning.md."
    text += ["", head, "|---|---|---|---|---:|---:|---:|---:|---:|---:|", *found["rows"]]
    if found["gains"]:
        text += ["", gains, "|---|---|---|---|---|---|---|---:|---:|", *found["gains"]]
    return "\n".join(text)


def _host(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    return f"## Host time of a layer\n\nAs in docs/results/host_time.md, on this host's processor.\n\n{found['table']}"


def _extraction(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    shares = list(found["seconds"])
    names = list(found["seconds"][shares[0]])
    rows = [[name, *(f"{min(found['seconds'][share][name]) * 1e3:.2f}" for share in shares)] for name in names]
    return (
        f"## Extraction\n\nMilliseconds a sample, the fastest round; {found['samples']} samples of {found['tokens']} +"
        f" {found['tokens']} tokens, batches of {found['batch']}, float32, random weights. Rows as in "
        "docs/results/extraction.md; figures of all ways were equal.\n\n"
        + table(["way", *(f"{float(share):.0%} memorized" for share in shares)], rows)
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None, form: str, times: float = 1) -> str:
    if value is None:
        return "-"
    return form.format(value * times if times != 1 else value)
