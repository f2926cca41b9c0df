"""`report` with books, a goldfish mask and budgets, and `tokens`: from documents to files."""

import csv
import json
from html import unescape

import numpy as np
import pytest

from hf_axonn_eval.__main__ import main
from hf_axonn_eval.data.results import read_run
from hf_axonn_eval.data.samples import read_samples
from tests.helpers.eval_support import documents, tiny_llama, topics_tokenizer, trained_llama


MASK = "strategy=hash,k=3,context_width=4"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Documents, windows over them, and what two models answer."""
    place = tmp_path_factory.mktemp("attacks")
    lines = [json.dumps({**document, "text": document["text"][:300]}) for document in documents()]
    (place / "documents.jsonl").write_text("\n".join(lines) + "\n")
    for name, model in (("base", tiny_llama()), ("trained", trained_llama())):
        model.save_pretrained(place / name)
        topics_tokenizer().save_pretrained(place / name)
    sliding = "--sampling sliding --stride_unit characters --stride 10 --prefix_length 12 --suffix_length 12"
    files = f"--documents {place}/documents.jsonl --tokenizer {place}/base --output {place}/samples.jsonl"
    assert main(["samples", *files.split(), *sliding.split()]) == 0
    for name in ("base", "trained"):
        asked = f"extract --model {place}/{name} --samples {place}/samples.jsonl --output {place}/runs/{name}"
        assert main([*asked.split(), "--no_generation", "--sampler", "temperature=1,top_k=40"]) == 0
    return place


def report(place, output, *options):
    runs = [f"{name}={place}/runs/{name}" for name in ("base", "trained")]
    return main(["report", "--runs", *runs, "--output", str(output), *map(str, options)])


@pytest.fixture(scope="module")
def written(place):
    options = ["--samples", place / "samples.jsonl", "--documents", place / "documents.jsonl", "--goldfish", MASK]
    assert report(place, place / "report", *options, "--budget_queries", 5000, "--budget_tokens", 10**6) == 0
    return place / "report"


def test_all_files_are_there(written):
    names = {path.name for path in written.iterdir()}
    assert {"passages.csv", "books.svg", "books.png", "maps.svg", "maps.png", "summary.json"} <= names


def test_the_summary_has_the_numbers(place, written):
    summary = json.loads((written / "summary.json").read_text())
    coverage = summary["coverage"]["runs"]["trained"]
    assert list(coverage) == [document["id"] for document in documents()]
    learnt = [coverage[document["id"]]["at"]["0.5"]["share"] for document in documents() if document["bucket"]]
    others = [coverage[document["id"]]["at"]["0.5"]["share"] for document in documents() if not document["bucket"]]
    assert sum(share > 0.1 for share in learnt) >= 4, "the first 24 tokens were learnt by heart"
    assert max(others) == 0
    cost = summary["attack_cost"]["trained"]["40"]
    assert [row["unit"] for row in cost["budgets"]] == ["queries", "tokens"] and cost["bounds"]["count"] == 9
    assert cost["tries"]["1"]["expected"] > summary["attack_cost"]["base"]["40"]["tries"]["1"]["expected"]
    tokens = summary["goldfish_tokens"]["tokens"]
    samples = read_samples(place / "samples.jsonl")
    assert sum(tokens.values()) == 12 * len(samples) and tokens["unknown"] == 0
    assert summary["goldfish_tokens"]["mask"] == {"strategy": "hash", "k": 3, "context_width": 4}


def test_passages_are_listed(written):
    with open(written / "passages.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    summary = json.loads((written / "summary.json").read_text())["coverage"]["runs"]
    for name in ("base", "trained"):
        for document, book in summary[name].items():
            mine = [row for row in rows if (row["run"], row["document_id"]) == (name, document)]
            for tau, entry in {"greedy": book["greedy"], **book["at"]}.items():
                characters = sum(int(row["characters"]) for row in mine if row["tau"] == tau)
                assert characters == entry["characters"]
    assert any(row["tau"] == "greedy" and float(row["largest_p_z"]) > 0.5 for row in rows)


def test_the_page_and_the_markdown_have_the_tables(written):
    page, text = unescape((written / "report.html").read_text()), (written / "report.md").read_text()
    for title in (
        "Coverage in characters",
        "Coverage by the ranges of the published code",
        "Dropped and supervised tokens",
        "Expected queries and tokens to extract a text",
        "What n queries of each sample give",
        "What a budget gives, spread evenly",
    ):
        assert title in page and title in text
    assert "Longest passages with p_z >= 0.001" in page and "by the stated sampler" in page
    assert "5,000 queries" in page and "300 characters" in page


@pytest.mark.parametrize("ending", ["npz", "parquet"])
def test_tokens_are_written(place, tmp_path, capsys, ending):
    asked = f"tokens --run {place}/runs/trained --samples {place}/samples.jsonl --output {tmp_path}/tokens.{ending}"
    assert main(asked.split()) == 0
    _, results = read_run(place / "runs" / "trained")
    assert f"{12 * len(results):,} tokens of {len(results):,} samples" in capsys.readouterr().out
    if ending == "npz":
        with np.load(tmp_path / "tokens.npz") as file:
            start, logprob = file["start"], file["logprob"]
        for number, answer in enumerate(results):
            assert logprob[start[number] : start[number + 1]].sum() == pytest.approx(answer.logprob)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--goldfish k=4", "--goldfish needs the samples of the runs"),
        ("--documents {place}/documents.jsonl", "--documents needs the samples of the runs"),
        ("--samples {place}/samples.jsonl --goldfish k=four", "--goldfish k=four is not like"),
        ("--samples {place}/samples.jsonl --goldfish width=4", "--goldfish width=4 is not like"),
        ("--samples {place}/samples.jsonl --goldfish strategy=static", "no function of the text"),
        ("--samples {place}/samples.jsonl --documents {place}/runs/base/results.jsonl", "looks like results of an"),
    ],
)
def test_bad_input_is_exit_code_2_with_a_message(place, tmp_path, capsys, options, message):
    assert report(place, tmp_path / "out", *options.format(place=place).split()) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_other_samples_are_refused(place, tmp_path, capsys):
    lines = (place / "samples.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "fewer.jsonl").write_text("".join(lines[1:]))
    asked = f"tokens --run {place}/runs/trained --samples {tmp_path}/fewer.jsonl --output {tmp_path}/tokens.npz"
    assert main(asked.split()) == 2
    assert "fewer.jsonl is not what the runs were asked" in capsys.readouterr().err
