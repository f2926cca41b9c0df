"""training_scripts/study/report: what a report says is what was measured."""

import csv
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from markdown_it import MarkdownIt

from hf_axonn_scripts.study.findings.findings import measure
from hf_axonn_scripts.study.findings.results import read_study
from hf_axonn_scripts.study.report import claims, tables
from hf_axonn_scripts.study.report.page import html, markdown, write_report
from hf_axonn_scripts.study.report.sentences import opening
from hf_axonn_scripts.study.report.wording import fullest
from tests.study.planted import SETTINGS, Plan, plant


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """A study that is not complete, and its report."""
    output = tmp_path_factory.mktemp("planted")
    plan = Plan(
        models=("XS", "M", "XL"),
        losses=("ordinary", "k2", "k4", "random"),
        articles=12,
        grid=True,
        left_out=("train-XL-k4-s2",),
    )
    recipe = plant(plan, output)
    stamp = {"seconds": 12.5, "processes": 2, "grid": {"x": 2}, "hf_axonn": "1", "commit": "abc1234", "ended": "today"}
    (output / ".stamps").mkdir()
    (output / ".stamps" / "train-XS-k4-s0.json").write_text(json.dumps(stamp))
    utility = {
        name: {
            "held_out_loss": {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "interval": "t", "tokens": 9},
            "tasks": {"left_out": "lm_eval is not installed"},
            "minus_ordinary": {"held_out_loss": {"difference": 0.0125, "low": 0.01, "high": 0.015, "interval": "t"}},
        }
        for name, mean in (("base", 5.0), ("k4-s0", 5.2))
    }
    (output / "utility").mkdir()
    (output / "utility" / "XS.json").write_text(json.dumps(utility))
    write_report(recipe, output)
    return recipe, output


@pytest.fixture(scope="module")
def content(reported):
    return json.loads((reported[1] / "report" / "study.json").read_text())


def texts(reported):
    return [(reported[1] / "report" / name).read_text() for name in ("study.html", "study.md")]


class Page(HTMLParser):
    """Tags and attributes of a page, its text, and whether its tags are closed."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text, self.open = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_whole_and_needs_nothing_else(reported):
    page = Page(texts(reported)[0])
    assert page.open == []
    tags = [tag for tag, _ in page.tags]
    assert "script" not in tags and "link" not in tags and tags.count("img") == 6
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href"):
            assert attributes.get(name, "#").startswith(("#", "data:image/png;base64,")), tag
    policy = next(attributes["content"] for tag, attributes in page.tags if "http-equiv" in attributes)
    assert "default-src 'none'" in policy and "img-src data:" in policy and "script" not in policy
    assert all(attributes.get("alt") for tag, attributes in page.tags if tag == "img")


def test_every_file_is_written(reported, content):
    names = {path.name for path in (reported[1] / "report").iterdir()}
    assert {"study.json", "study.md", "study.html", "passages.csv", "heat.png", "goldfish.png"} <= names
    with open(reported[1] / "report" / "passages.csv") as file:
        assert len(list(csv.DictReader(file))) == content["runs"]["done"] * 48
    assert content["deviations"] == ["It was never trained."]


def test_what_is_missing_is_on_both_pages(reported):
    for text in texts(reported):
        assert re.search(r"36 of 37 runs are there", text)
        for step in ("train-XL-k4-s2", "utility-M", "utility-XL"):
            assert re.search(re.escape(step) + r"\W{0,3}\(not done", text), step


def test_the_opening_has_the_numbers_of_the_tables(content):
    said = " ".join(opening(content))
    cell = next(
        row for row in content["cells"] if (row["model"], row["loss"], row["bucket"]) == ("XL", "ordinary", 16)
    )
    assert f"{cell['verbatim']['count']} of {cell['verbatim']['n']} [" in said
    assert f"gains {cell['gain']['mean']:.2f} [{cell['gain']['low']:.2f}, {cell['gain']['high']:.2f}] nats" in said
    slope = next(
        row["slope"]
        for row in content["slopes"]
        if (row["outcome"], row["loss"], row["bucket"]) == ("gain", "ordinary", "overall")
    )
    assert f"that gain grows: by {slope['mean']:.2f} [{slope['low']:.2f}" in said
    assert "3 sizes of one family cannot show a jump" in said
    assert "first 16 tokens of every passage and asked for the next 16" in said


def test_verdicts_follow_the_planted_effects(content):
    verdicts = {claim.question: claim.verdict for claim in claims.claims(content)}
    assert verdicts["Does memorization grow with size?"].startswith("as reported")
    assert verdicts["Does memorization grow with repetition?"] == "as reported, but not on a straight line"
    assert verdicts["Do small models stay near the control?"] == "otherwise"
    assert verdicts["Does goldfish remove copies?"] == "as reported"
    assert verdicts["Does leaving out at random protect?"] == "as reported"
    # No dropped token of these passages is predicted, so the difference has no interval (docs/evaluation.md).
    assert verdicts["Are dropped tokens not learnt?"] == "not decided"
    assert verdicts["What does goldfish cost?"] == "not measured"


@pytest.mark.parametrize(
    ("signs", "verdict"),
    [([1, 1], "as reported"), ([1, 0], "not decided"), ([-1, 1], "not decided"), ([-1, -1, 1], "otherwise")],
)
def test_a_verdict_on_several_models(signs, verdict):
    assert claims.judge(signs) == verdict


def test_copies_are_removed_where_an_interval_shows_it(content):
    def verdict(high):
        rows = [{**row, "verbatim_difference": {**row["verbatim_difference"], "high": high}} for row in goldfish]
        found = claims.claims({**content, "goldfish": rows})
        return next(claim.verdict for claim in found if claim.question == "Does goldfish remove copies?")

    goldfish = content["goldfish"]
    assert (verdict(-0.1), verdict(0.1), verdict(None)) == ("as reported", "not decided", "not decided")


def report_of(tmp_path, plan):
    recipe = plant(plan, tmp_path)
    return measure(read_study(recipe, tmp_path))


def test_verdicts_turn_with_the_effects(tmp_path):
    """Memorization that falls with size, copies that goldfish keeps, a random loss that protects."""
    plan = Plan(
        models=("XS", "M", "XL"),
        losses=("ordinary", "k4", "random"),
        articles=16,
        kept={"k4": 1.0, "random": 0.2},
        gain=lambda parameters, bucket: 150.0 / len(str(parameters)) * (bucket > 0),
        dropped=False,
    )
    content = report_of(tmp_path, plan)
    found = {claim.question: claim for claim in claims.claims(content)}
    verdicts = {question: claim.verdict for question, claim in found.items()}
    assert verdicts["Does memorization grow with size?"] == "otherwise"
    assert verdicts["Does goldfish remove copies?"] == "otherwise"
    assert "XS k4" in found["Does goldfish remove copies?"].seen
    assert verdicts["Does leaving out at random protect?"] == "otherwise"
    assert verdicts["Are dropped tokens not learnt?"] == "not decided"
    assert "that gain falls" in " ".join(opening(content))


def test_nothing_memorized_decides_nothing(tmp_path):
    nothing = {"gain": lambda size, bucket: 0.0, "calm": 20}
    plan = Plan(models=("XS", "M", "XL"), losses=("ordinary", "k4"), articles=8, **nothing)
    content = report_of(tmp_path / "few", plan)
    verdicts = {claim.question: claim.verdict for claim in claims.claims(content)}
    assert verdicts["Do small models stay near the control?"] == "not decided"  # 0 of 8 may be a third
    assert verdicts["Does goldfish remove copies?"] == "not decided"
    assert verdicts["Does memorization grow with repetition?"] == "not decided"
    plan = Plan(models=("XS",), losses=("ordinary",), seeds=(0,), articles=40, **nothing)
    content = report_of(tmp_path / "many", plan)
    verdicts = {claim.question: claim.verdict for claim in claims.claims(content)}
    assert verdicts["Do small models stay near the control?"] == "as reported"


def test_losses_are_compared_in_the_largest_model_that_has_most_of_them():
    models = [{"model": name, "apart": name == "apart"} for name in ("small", "middle", "large", "apart")]
    losses = {"small": "abc", "middle": "abc", "large": "ab", "apart": "abcd"}
    cells = [{"model": name, "loss": loss} for name, some in losses.items() for loss in some]
    assert fullest({"models": models, "cells": cells}) == "middle"
    assert fullest({"models": [], "cells": []}) == ""


def test_tables_are_those_of_the_page_and_of_markdown(reported, content):
    html, markdown = texts(reported)
    made = tables.tables(content)
    names = [table.title for table in made]
    assert "Memorization by size, loss and repetitions" in names and "What is missing" in names
    assert "Goldfish beside the ordinary loss" in names and "The same run on another grid" in names
    rendered = MarkdownIt("commonmark").enable("table").render(markdown)
    for table in made:
        assert all(len(row) == len(table.headings) for row in table.rows), table.title
        assert f"<caption>{table.title}</caption>" in html and f"<h2>{table.title}</h2>" in rendered
    assert rendered.count("<table>") == html.count("<table>")
    utility = next(table for table in made if table.title.startswith("What it costs"))
    assert ["XS", "k4-s0", "5.200 [5.100, 5.300]", "-", "-", "-", "+0.013 [+0.010, +0.015]", "-", "-"] in utility.rows
    assert "lm_eval is not installed" in utility.note


def test_steps_say_what_they_were_made_with(reported, content):
    assert content["provenance"]["steps"]["train-XS-k4-s0"]["commit"] == "abc1234"
    for text in texts(reported):
        assert "abc1234" in text and "12" in text
    assert content["provenance"]["versions"]["torch"]
    assert not re.search(r"/(tmp|home|root)/", json.dumps(content))


def test_names_cannot_act(tmp_path):
    evil = '<img src=x onerror="alert(1)">|`*'
    plan = Plan(models=("XS", "M"), losses=("ordinary", "k4"), seeds=(0,))
    recipe = plant(plan, tmp_path)
    content = measure(read_study(recipe, tmp_path))
    changed = json.loads(json.dumps(content).replace('"XS"', json.dumps(evil)))
    recipe = replace(recipe, name=evil, deviations=(evil,))
    made = {"recipe": evil, "steps": {}, "versions": {}, "machine": {}, "seconds": 0, "sources": {evil: evil}}
    page = html(changed, recipe, made, figures={})
    found = Page(page)
    assert not [tag for tag, _ in found.tags if tag in ("img", "script")] and found.open == []
    assert evil in " ".join(found.text)
    rendered = MarkdownIt("commonmark").enable("table").render(markdown(changed, recipe, made))
    assert not [tag for tag, attributes in Page(rendered).tags if tag == "img"]
    assert rendered.count("<table>") == page.count("<table>")
    assert evil in "".join(Page(rendered).text)


def test_a_study_without_any_run_has_a_page(tmp_path):
    recipe = plant(Plan(models=("XS",), losses=("ordinary",), seeds=(0,)), tmp_path / "there")
    write_report(recipe, tmp_path / "empty")
    page = (tmp_path / "empty" / "report" / "study.html").read_text()
    assert "No run of the study is done yet" in page and "There is nothing to draw yet" in page
    assert "train-XS-ordinary-s0" in page and page.count("not measured") >= 8


def test_the_report_of_a_pilot_and_of_base_losses(tmp_path):
    plan = Plan(models=("XS", "M"), losses=("ordinary", "k4"), seeds=(0,), chosen=8)
    recipe = replace(plant(plan, tmp_path), base_losses=(("XS", "k4"),))
    for name, steps, rise in (("XS", 4, 0.0), ("XS-k4", 4, 0.3)):
        history = [{"step": step, "eval_loss": 6 - step + rise} for step in range(steps + 1)]
        history += [{"step": step, "goldfish_dropped_fraction": 0.25 if rise else 0.0} for step in range(1, steps + 1)]
        (tmp_path / "base" / name).mkdir(parents=True)
        (tmp_path / "base" / name / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    content = measure(read_study(recipe, tmp_path))
    made = {table.title: table for table in tables.tables(content)}
    assert [row[-1] for row in made["The pilot"].rows] == ["chosen", ""]
    assert made["Tokens for the same held-out loss"].rows
    claim = next(one for one in claims.claims(content) if one.question == "What does goldfish cost?")
    assert "XS k4" in claim.seen and "supervised" in claim.seen and claim.verdict == "not decided"
    assert SETTINGS["k4"]["goldfish_k"] == 4 and "1.33" in claim.seen
