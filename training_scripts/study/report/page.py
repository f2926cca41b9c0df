"""The report of a study: one page for people, the same in Markdown, and all numbers for programs.

    report/study.json      every number (findings.measure), and where it comes from
    report/study.md        sentences, claims and tables
    report/study.html      the same with the figures in it; it needs no other file
    report/passages.csv    a row for each passage of each run (results.rows)
    report/*.png           the figures

None of them has texts of articles: titles and numbers only.
"""

import base64
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_axonn_eval.data.jsonl import replacing, write_json
from hf_axonn_eval.data.visible import PAGE, visible
from hf_axonn_eval.report.html import read_templates
from hf_axonn_eval.report.markdown import plain, table
from hf_axonn_eval.report.tables import Details
from hf_axonn_scripts.demo.report import find_versions
from hf_axonn_scripts.study.findings.findings import measure
from hf_axonn_scripts.study.findings.results import Study, read_json, read_study, table_csv
from hf_axonn_scripts.study.recipe.definition import Recipe
from hf_axonn_scripts.study.report.claims import claims
from hf_axonn_scripts.study.report.figures import draw
from hf_axonn_scripts.study.report.sentences import opening
from hf_axonn_scripts.study.report.tables import tables


PACKAGES = ("hf_axonn", "torch", "transformers", "accelerate", "numpy", "lm_eval")
CLAIMS = ["question", "reported", "source", "seen here", "verdict"]
CLAIMS_NOTE = (
    "A verdict says where an interval lies and nothing else. These models, texts, repetitions and suffixes are not "
    "those of the publications: agreement does not show that their numbers hold here, and no difference refutes them."
)


def write_report(recipe: Recipe, output: Path) -> None:
    """Write the report of a study, as far as it is done, to `report/` in its directory.

    Raises:
        ValueError: a file of the study is not what its step writes.
    """
    study = read_study(recipe, output)
    content = measure(study)
    made = _provenance(study)
    folder = output / "report"
    captions = draw(content, folder)
    write_json(folder / "study.json", {**content, "deviations": list(recipe.deviations), "provenance": made})
    texts = {
        "passages.csv": table_csv(study),
        "study.md": markdown(content, recipe, made, figures=captions),
        "study.html": html(content, recipe, made, figures={folder / name: text for name, text in captions.items()}),
    }
    for name, text in texts.items():
        with replacing(folder / name) as file:
            file.write(text.encode("utf-8", errors="backslashreplace"))
    for sentence in opening(content):
        print(visible(sentence))
    print(f"The report is {folder / 'study.html'}")


def html(content: Mapping[str, Any], recipe: Recipe, made: Mapping[str, Any], *, figures: Mapping[Path, str]) -> str:
    """Return the page.

    Args:
        content: numbers of `findings.measure`.
        recipe: of the study.
        made: provenance of the numbers.
        figures: by file its caption.
    """
    page = (
        read_templates(Path(__file__).parent)
        .get_template("study.html")
        .render(
            title=_title(recipe),
            opening=opening(content),
            claims=[list(claim) for claim in claims(content)],
            claims_headings=CLAIMS,
            claims_note=CLAIMS_NOTE,
            figures=[
                {"data": base64.b64encode(file.read_bytes()).decode(), "caption": text}
                for file, text in figures.items()
            ],
            tables=tables(content),
            deviations=recipe.deviations,
            provenance=_provenance_tables(made),
        )
    )
    return visible(page, keep=PAGE)


def markdown(
    content: Mapping[str, Any], recipe: Recipe, made: Mapping[str, Any], *, figures: Mapping[str, str] | None = None
) -> str:
    """Return the report as Markdown; arguments as of `html`, figures by file name."""
    lines = [f"# {plain(_title(recipe))}", ""]
    for sentence in opening(content):
        lines += [plain(sentence), ""]
    lines += ["## What publications report, and what was seen", ""]
    lines += [*table(CLAIMS, [list(claim) for claim in claims(content)]), "", plain(CLAIMS_NOTE), ""]
    for name, caption in (figures or {}).items():
        lines += [f"![{Path(name).stem}]({name})", "", plain(caption), ""]
    for details in [*tables(content), *_provenance_tables(made)]:
        lines += [f"## {plain(details.title)}", "", *table(details.headings, details.rows), ""]
        lines += [plain(details.note), ""] if details.note else []
    lines += ["## Where it differs from the publication", ""]
    lines += [f"- {plain(sentence)}" for sentence in recipe.deviations] or ["The recipe names nothing."]
    return "\n".join([*lines, ""])


def _title(recipe: Recipe) -> str:
    return f"Memorization over model size, repetition and k: {recipe.name}"


def _provenance(study: Study) -> dict[str, Any]:
    """Return the versions, grids and times of each step, and those of the report."""
    steps = {}
    for file in sorted((study.output / ".stamps").glob("*.json")):
        stamp = read_json(file)
        names = ("seconds", "processes", "grid", "hf_axonn", "commit", "ended")
        steps[file.stem] = {name: stamp[name] for name in names if stamp.get(name) is not None}
    sources = study.output / "texts" / "sources.json"
    return {
        "recipe": study.recipe.path.name,
        "versions": find_versions(PACKAGES),
        "machine": {"cores": os.cpu_count(), "architecture": platform.machine(), "system": platform.system()},
        "command": [Path(word).name for word in sys.argv],
        "steps": steps,
        "seconds": round(sum(step.get("seconds", 0.0) for step in steps.values()), 1),
        "sources": read_json(sources) if sources.exists() else None,
    }


def _provenance_tables(made: Mapping[str, Any]) -> list[Details]:
    rows = [
        [name, f"{step.get('seconds', 0):,.0f}", str(step.get("processes", 1)), _pairs(step.get("grid"))]
        + [str(step.get("hf_axonn", "-")), str(step.get("commit", "-")), str(step.get("ended", "-"))]
        for name, step in made["steps"].items()
    ]
    hours = f"{made['seconds'] / 3600:.1f} hours in all. " if rows else ""
    note = f"{hours}The report was made on {_pairs(made['machine'])}, with {_pairs(made['versions'])}."
    heads = ["step", "seconds", "processes", "grid", "hf_axonn", "commit", "ended"]
    about = [Details(f"Steps of {made['recipe']}", heads, rows, note)]
    if made["sources"]:
        about.append(Details("Texts", ["", ""], [[str(name), _pairs(of)] for name, of in _entries(made["sources"])]))
    return about


def _entries(sources: Any) -> list[tuple[str, Any]]:
    """Return the contents of sources.json, entry by entry."""
    if isinstance(sources, Mapping):
        return list(sources.items())
    return [(str(number), one) for number, one in enumerate(sources, start=1)]


def _pairs(of: Any) -> str:
    if isinstance(of, Mapping):
        return ", ".join(f"{name} {_pairs(value)}" for name, value in of.items()) or "-"
    if isinstance(of, Sequence) and not isinstance(of, str):
        return "; ".join(map(_pairs, of))
    return "-" if of is None else str(of)
