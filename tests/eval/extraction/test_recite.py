"""Whole documents, written step by step from the model's own text."""

import json

import pytest
import torch

from hf_axonn import Grid, parallelize
from hf_axonn_eval import Sample, Sampling, build_samples, compare, extract, html_page, read_run
from hf_axonn_eval.__main__ import main
from hf_axonn_eval.data.sentences import first_sentence
from hf_axonn_eval.extraction import decoding, reciter
from hf_axonn_eval.extraction.recite import WRITTEN, Cost, Recital, Written, deal
from hf_axonn_eval.metrics.near_verbatim import nv_recall
from hf_axonn_eval.report.documents import documents as shown_documents
from tests.helpers.eval_support import documents, result, samples, tiny_llama, topics_tokenizer, trained_llama
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks


RECITAL = Recital(step=5, context=30)


def long_samples(count: int = 2) -> list[Sample]:
    """Seeds of 12 tokens and 68 or 74 tokens after them, which are more than the model's window of 64."""
    tokenizer = topics_tokenizer()
    some = [
        {**document, "input_ids": tokenizer(document["text"])["input_ids"][: 80 + 6 * place]}
        for place, document in enumerate(documents()[:count])
    ]
    return build_samples(some, sampling=Sampling(kind="rest", prefix_length=12))


def reference(model, sample: Sample, recital: Recital) -> list[int]:
    """Follow the words of the definition, one token after the other."""
    written: list[int] = []
    while len(written) < len(sample.suffix):
        prompt = [*sample.prefix, *written][-(recital.context - recital.step) :]
        new: list[int] = []
        for _ in range(min(recital.step, len(sample.suffix) - len(written))):
            with torch.no_grad():
                new.append(int(model(input_ids=torch.tensor([[*prompt, *new]])).logits[0, -1].argmax()))
        written += new
    return written


def test_it_goes_on_from_its_own_text_with_a_sliding_context():
    model, some = trained_llama().double(), long_samples()
    for batch_size in (1, 2):
        results = extract(model, topics_tokenizer(), some, recite=RECITAL, batch_size=batch_size, progress=False)
        for sample, one in zip(some, results, strict=True):
            expected = reference(model, sample, RECITAL)
            assert one.generated == expected and len(expected) == len(sample.suffix) > 64
            assert one.generated_text == topics_tokenizer().decode(expected)
            assert one.divergence_point == next(
                (place for place, pair in enumerate(zip(expected, sample.suffix, strict=True)) if pair[0] != pair[1]),
                len(expected),
            )
            for name in ("logprob", "logprobs", "hits", "ranks", "margin", "near_tie", "token_accuracy"):
                assert getattr(one, name) is None, name
            assert one.edit_distance is not None and one.rougeL is not None
    known = [one for one in results if one.bucket]
    assert any(one.divergence_point >= 12 for one in known), "what was learnt by heart comes"


def recite_on_grid(grid: Grid) -> list[list[int]]:
    """Each number of documents: fewer than shares, as many, and more."""
    model = parallelize(tiny_model("llama").eval(), grid)[0].eval()
    results = [extract(model, None, random_samples(count), recite=SHORT, progress=False) for count in (1, 2, 5)]
    return [one.generated for some in results for one in some]


SHORT = Recital(step=3, context=11)


def random_samples(count: int) -> list[Sample]:
    chance = torch.Generator().manual_seed(5)
    lengths = (9 + 7 * place for place in range(count))
    rows = [torch.randint(3, 131, (length,), generator=chance).tolist() for length in lengths]
    some = [{"id": str(place), "text": "", "bucket": 0, "input_ids": row} for place, row in enumerate(rows)]
    return build_samples(some, sampling=Sampling(kind="rest", prefix_length=6))


@pytest.mark.parametrize("grid", [Grid(z=2), pytest.param(Grid(data=2, z=2), marks=pytest.mark.slow)], ids=str)
def test_of_fewer_documents_than_shares_no_rank_waits_for_ever(grid):
    """Ranks of z without a document lend their weights to those that have one."""
    model = tiny_model("llama").eval()
    expected = [reference(model, sample, SHORT) for count in (1, 2, 5) for sample in random_samples(count)]
    assert run_ranks(recite_on_grid, grid.size, grid, timeout=120)[0] == expected


def test_what_is_short_is_what_extract_decodes():
    model = trained_llama()
    alone = extract(model, topics_tokenizer(), samples(), progress=False)
    for recital in (Recital(step=5, context=40), Recital(step=12, context=24)):
        results = extract(model, topics_tokenizer(), samples(), recite=recital, progress=False)
        assert [one.generated for one in results] == [one.generated for one in alone]
        assert [one.exact_match for one in results] == [one.exact_match for one in alone]


def test_beams_are_those_of_generate():
    model, [sample] = trained_llama(), long_samples(1)
    [one] = extract(model, None, [sample], recite=Recital(step=8, context=30, beams=4), progress=False)
    expected = decoding.continue_greedily(model, [sample.prefix], steps=8, beams=4)[0]
    prompt = torch.tensor([sample.prefix])
    model.generation_config.eos_token_id = None
    given = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), num_beams=4, do_sample=False, max_new_tokens=8, pad_token_id=0
    )
    assert one.generated[:8] == expected == given[0, len(sample.prefix) :].tolist()


def test_a_run_that_was_stopped_goes_on_within_a_document(tmp_path, monkeypatch):
    model, some = trained_llama(), long_samples()
    options = {"recite": RECITAL, "progress": False, "batch_size": 1, "model_record": {"fingerprint": "tiny"}}
    whole = extract(model, topics_tokenizer(), some, output=tmp_path / "whole", **options)
    go_on, steps, most = decoding.continue_greedily, [], [20]

    def stop(*arguments, **more):
        if len(steps) in most:
            raise KeyboardInterrupt
        steps.append(more)
        return go_on(*arguments, **more)

    monkeypatch.setattr(reciter.decoding, "continue_greedily", stop)
    with pytest.raises(KeyboardInterrupt):
        extract(model, topics_tokenizer(), some, output=tmp_path / "run", **options)
    done = (tmp_path / "run" / "results.jsonl").read_text().count("\n")
    assert 0 < done < len(some)
    with open(tmp_path / "run" / WRITTEN, "a") as file:
        file.write('{"sample_id":"cut o')
    steps.clear()
    most.clear()
    again = extract(model, topics_tokenizer(), some, output=tmp_path / "run", **options)
    assert [one.generated for one in again] == [one.generated for one in whole]
    assert len(steps) < RECITAL.cost([(len(one.prefix), len(one.suffix)) for one in some]).steps
    record = read_run(tmp_path / "run")[0]
    assert record["identity"]["recite"] == "steps of 5 tokens, context 30, greedy"
    assert record["settings"]["batches"]["steps"] == RECITAL.cost([(12, len(one.suffix)) for one in some]).steps
    with pytest.raises(ValueError, match="holds another run"):
        extract(model, topics_tokenizer(), some, output=tmp_path / "run", **{**options, "recite": Recital(context=60)})
    (tmp_path / "run" / WRITTEN).write_text("no\n")
    with pytest.raises(ValueError, match="line 1 is damaged"):
        Written(tmp_path / "run").read()


def test_the_cost_is_counted_before():
    assert Recital(step=4, context=10).cost([(3, 9), (20, 4)]) == Cost(13, 4, 3 + 6 + 6 + 6)
    assert deal({0: 9, 1: 2, 2: 5}, rows=1, count=2, step=4) == ([[[0], [1]], [[2]]], 4)
    assert deal({}, rows=2, count=2, step=4) == ([[], []], 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recite": Recital(), "membership": True}, "does not go with membership"),
        ({"recite": Recital(), "generate": False}, "does not go with generate=False"),
        ({"recite": Recital(context=65)}, "a sequence has 65 tokens"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        extract(tiny_llama(), topics_tokenizer(), long_samples(1), progress=False, **options)


def test_settings_that_cannot_be_are_refused():
    for settings in ({"step": 0}, {"beams": 0}, {"context": 50}, {"step": True}):
        with pytest.raises(ValueError, match="must be|no room"):
            Recital(**settings)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Mr. and Mrs. Dursley were proud to say so. It was so.", "Mr. and Mrs. Dursley were proud to say so."),
        ("He said (as it was known to be so.) Then he went.", "He said (as it was known to be so.)"),
        ("A version like 3.11 is not the end of it. No.", "A version like 3.11 is not the end of it."),
    ],
)
def test_the_first_sentence(text, sentence):
    tokenizer = topics_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids[: first_sentence(ids, tokenizer)]) == sentence
    endless = tokenizer("word " * 300, add_special_tokens=False)["input_ids"]
    assert first_sentence(endless, tokenizer) == 100 and first_sentence(endless[:5], tokenizer) == 5


def test_samples_of_first_sentences():
    some = [
        {"id": "two", "bucket": 1, "text": "This is the first sentence of a document. Here is another one."},
        {"id": "one", "bucket": 1, "text": "This is the only sentence there is."},
    ]
    [sample] = build_samples(some, tokenizer=topics_tokenizer(), sampling=Sampling(kind="sentence"))
    assert topics_tokenizer().decode(sample.prefix) == "This is the first sentence of a document."
    assert topics_tokenizer().decode(sample.suffix) == " Here is another one." and sample.document_id == "two"
    with pytest.raises(ValueError, match="needs a tokenizer"):
        build_samples([{"id": "a", "bucket": 1, "input_ids": [1] * 20}], sampling=Sampling(kind="sentence"))


@pytest.mark.slow
def test_the_commands_from_documents_to_the_page(tmp_path, capsys):
    """The commands of docs/attacks.md: the seed is a sentence, the cost comes first, the texts stand side by side."""
    trained_llama().save_pretrained(tmp_path / "model")
    topics_tokenizer().save_pretrained(tmp_path / "model")
    text = f"This is the first sentence of it. {'if else ' * 60}"
    (tmp_path / "docs.jsonl").write_text(json.dumps({"id": "book", "bucket": 1, "text": text}))
    place = {name: str(tmp_path / name) for name in ("model", "docs.jsonl", "books.jsonl", "run", "report")}
    words = ["--documents", place["docs.jsonl"], "--tokenizer", place["model"], "--output", place["books.jsonl"]]
    assert main(["samples", *words, "--sampling", "sentence"]) == 0
    words = ["--model", place["model"], "--samples", place["books.jsonl"], "--output", place["run"]]
    assert main(["extract", *words, "--recite", "step=40,context=60"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    some = read_run(tmp_path / "run")[1]
    tokens = sum(one.suffix_length for one in some)
    assert f"recites {tokens:,} tokens in {sum(-(-one.suffix_length // 40) for one in some)} steps" in printed
    assert all(one.metric("nv_recall") == nv_recall(one.generated_text, one.suffix_text) for one in some)
    words = ["--runs", f"m={place['run']}", "--samples", place["books.jsonl"], "--output", place["report"]]
    assert main(["report", *words]) == 0
    page = (tmp_path / "report" / "report.html").read_text()
    assert 'id="documents"' in page and "near-verbatim recall" in page


def test_the_page_shows_texts_side_by_side_with_blocks_marked():
    true = " ".join(f"word{number}" for number in range(2000))
    written = true.replace("word50 ", "another ").replace("word1900 ", "<script>alert(1)</script> ")
    some = [
        result("book", bucket=1, suffix_text=true, generated_text=written, suffix_length=3000, divergence_point=70),
        result("other", suffix_text=true, generated_text="nothing of it", suffix_length=3000),
        result("short", suffix_text="a b", generated_text="a b"),
    ]
    found = shown_documents({"m": some})
    [table] = found["table"]
    assert table.rows[0] == ["book", "m", "1x", "2,000", "99.9%", "1", "1,998", "70 of 3,000"]
    assert table.rows[1][4:6] == ["0.0%", "0"] and len(table.rows) == 2
    spans = found["shown"][0]["answers"][0]["true"]
    assert [span.mark for span in spans] == ["start", "", "start", ""] and "500 more words" in spans[-1].text
    page = html_page(compare({"m": some}), runs={"m": some})
    assert "<script" not in page and "Whole documents, near-verbatim" in page
    assert page.count("word1999") == 0, "of a long text the first words"
    assert shown_documents({"m": [result("a")]}) == {}
