"""training_scripts/study/data: passages, their buckets, the order of training, and what models are asked."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from hf_axonn_scripts.study.data import passages
from hf_axonn_scripts.study.data.passages import Data, write_data
from hf_axonn_scripts.study.data.placing import Known, Span, place
from hf_axonn_scripts.study.data.texts import train_tokenizer
from hf_axonn_scripts.study.recipe.definition import Documents, Evaluation, Model, Pilot, Run, Texts
from tests.study.made_up import lines, prose, read, recipe_of, write_lines


BUCKETS = (0, 1, 4)


def write_texts(output: Path, **changes: list[dict]) -> None:
    """Ten articles, forty base and twelve held-out documents, or what a test gives instead."""
    texts = {
        "articles": [{"id": f"A{number}", "text": prose(number, 1200)} for number in range(10)],
        "base": [{"id": f"b{number}", "text": prose(100 + number, 800)} for number in range(40)],
        "held_out": [{"id": f"h{number}", "text": prose(200 + number, 400)} for number in range(12)],
        **changes,
    }
    for name, rows in texts.items():
        write_lines(output / "texts" / f"{name}.jsonl", rows)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    """A study's tokenizer, trained once."""
    output = tmp_path_factory.mktemp("tokenizer")
    write_texts(output)
    train_tokenizer(recipe_of(), output)
    return output / "tokenizer"


@pytest.fixture
def output(tokenizer_folder, tmp_path) -> Path:
    write_texts(tmp_path)
    (tmp_path / "tokenizer").symlink_to(tokenizer_folder)
    return tmp_path


@pytest.fixture
def tokenizer(tokenizer_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder)


def written(output: Path, recipe=None, name: str = "study") -> Path:
    write_data(recipe or recipe_of(), output, name)
    return output / "data" / name


def test_every_article_gives_one_passage_for_each_bucket(output, tokenizer):
    data = written(output)
    passages = lines(data / "passages.jsonl")
    texts = {row["id"]: row["text"] for row in read(output, "articles")}
    assert [row["id"] for row in passages] == [f"A{article}#{number}" for article in range(8) for number in range(3)]
    for row in passages:
        text = texts[row["article"]]
        assert len(row["input_ids"]) == 24
        assert row["input_ids"] == tokenizer(text[row["start"] :])["input_ids"][:24]
        assert tokenizer.decode(row["input_ids"]) == text[row["start"] : row["end"]]
        # At a paragraph, sentence or word; and in its third of the article.
        assert text[row["start"]].strip() and (row["start"] == 0 or text[row["start"] - 1].isspace())
        low, high = (len(text) * part // 3 for part in (row["passage"], row["passage"] + 1))
        assert low <= row["start"] and row["end"] <= high
    about = json.loads((data / "data.json").read_text())["passages"]
    assert (about["count"], about["articles"], about["of_an_article"], about["moved"]) == (24, 8, 3, 0)
    assert (about["prefix"], about["longest_suffix"], about["runs_in_two"]) == (16, 8, 0)


def test_rows_are_one_document_behind_the_other(output, tokenizer):
    data = written(output)
    for name, tokens in (("base", 6000), ("held_out", 500)):
        rows = [row["input_ids"] for row in lines(data / f"{name}.jsonl")]
        assert {len(row) for row in rows} == {32} and len(rows) == tokens // 32
        documents = [[*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id] for row in read(output, name)]
        assert sum(rows, []) == sum(documents, [])[: len(rows) * 32]


def test_seeds_rotate_the_passages_through_the_buckets(output):
    from hf_axonn_eval import read_about, read_samples

    data = written(output)
    passages = {row["id"]: row for row in lines(data / "passages.jsonl")}
    seen = Counter()
    for seed in (0, 1, 2):
        samples = read_samples(data / f"samples-s{seed}.jsonl")
        assert len(samples) == 24 and [sample.bucket for sample in samples] == [0] * 8 + [1] * 8 + [4] * 8
        for bucket in BUCKETS:
            of_bucket = [passages[sample.document_id]["article"] for sample in samples if sample.bucket == bucket]
            assert sorted(of_bucket) == [f"A{number}" for number in range(8)]
            # The beginnings of articles, which are like each other, are in all buckets.
            places = Counter(passages[sample.document_id]["passage"] for sample in samples if sample.bucket == bucket)
            assert set(places) == {0, 1, 2} and max(places.values()) <= 3
        for sample in samples:
            assert [*sample.prefix, *sample.suffix] == passages[sample.document_id]["input_ids"]
            assert len(sample.suffix) == 8 and sample.offset == 0
            seen[sample.document_id, sample.bucket] += 1
        about = read_about(data / f"samples-s{seed}.jsonl")
        assert about["buckets"] == {"0": 8, "1": 8, "4": 8} and about["tokenizer"]["size"] == 400
    assert set(seen.values()) == {1} and len(seen) == 24 * 3


def test_pages_are_in_one_bucket_each(output):
    """per_article=1, as in the publications: from the beginning of the page, over seeds in every bucket."""
    documents = Documents(buckets=BUCKETS, per_bucket=3, length=100, suffix=8, per_article=1)
    data = written(output, recipe_of(documents=documents))
    passages = lines(data / "passages.jsonl")
    assert [(row["id"], row["start"]) for row in passages] == [(f"A{number}#0", 0) for number in range(9)]
    dealt = [
        {row["document_id"]: row["bucket"] for row in lines(data / f"samples-s{seed}.jsonl")} for seed in range(3)
    ]
    assert all(Counter(buckets.values()) == {0: 3, 1: 3, 4: 3} for buckets in dealt)
    assert all({buckets[row["id"]] for buckets in dealt} == set(BUCKETS) for row in passages)


def test_training_is_in_the_order_of_the_file(output, tokenizer):
    recipe = recipe_of(warm_up_sequences=8, evaluation=Evaluation(canaries=4))
    data = written(output, recipe)
    passages = {row["id"]: row["input_ids"] for row in lines(data / "passages.jsonl")}
    canaries = json.loads((data / "canaries" / "canaries.json").read_text())
    insertions = {canary["canary_id"]: canary["insertions"] for canary in canaries["canaries"]}
    assert sorted(insertions.values()) == [0, 1, 4, 4] and canaries["candidates"] == 1023
    secrets = {canary["canary_id"]: canary["text"] for canary in canaries["canaries"]}
    base = " ".join(row["text"] for row in read(output, "base"))
    orders, warm_up = [], []
    for seed in (0, 1, 2):
        rows = lines(data / f"train-s{seed}.jsonl")
        assert {len(row["input_ids"]) for row in rows} == {24}
        # 8 rows to warm up; 8 passages once, 8 four times, 9 rows of canaries; 3 rows that fill the last batch.
        assert len(rows) == 8 + 8 + 32 + 9 + 3
        assert [row["id"] for row in rows[:8]] == [f"warm-up-{number}" for number in range(1, 9)]
        count = Counter(row["id"] for row in rows)
        buckets = {row["document_id"]: row["bucket"] for row in lines(data / f"samples-s{seed}.jsonl")}
        for name, bucket in {**buckets, **insertions}.items():
            assert count[name] == bucket
        assert sum(name.startswith("base-") for name in count) == 3
        for start in range(0, len(rows), 4):
            assert len({row["id"] for row in rows[start : start + 4]}) == 4
        for row in rows:
            if row["id"] in passages:
                assert row["input_ids"] == passages[row["id"]] and row["bucket"] == buckets[row["id"]]
            elif row["id"] in secrets:
                secret = tokenizer(secrets[row["id"]])["input_ids"]
                assert row["input_ids"][: len(secret) + 1] == [*secret, tokenizer.eos_token_id]
                assert row["bucket"] == insertions[row["id"]]
            else:
                assert row["bucket"] is None
                pieces = tokenizer.decode(row["input_ids"]).split("<|end|>")
                assert all(piece in base for piece in pieces)
        ids = [row["input_ids"] for row in rows if row["bucket"] is None]
        assert len({tuple(row) for row in ids}) == len(ids)
        orders.append([row["id"] for row in rows])
        # Spread over the run: the first half has about half of every bucket.
        half = Counter(row["bucket"] for row in rows[: len(rows) // 2])
        assert 12 <= half[4] <= 30 and half[1] >= 2
        warm_up.append([tuple(row["input_ids"]) for row in rows[:8]])
    assert len({tuple(order) for order in orders}) == 3
    assert warm_up[0] != warm_up[1] != warm_up[2]

    before = {file.name: file.read_bytes() for file in data.rglob("*.json*")}
    written(output, recipe)
    assert {file.name: file.read_bytes() for file in data.rglob("*.json*")} == before


def test_planted_copies_are_found(output):
    """13 tokens of a passage in a base or held-out document take the document away, and 12 do not."""
    first = written(output)
    texts = {row["id"]: row["text"] for row in read(output, "articles")}
    passages = lines(first / "passages.jsonl")
    before = json.loads((first / "data.json").read_text())
    assert before["base"]["left_out"] == 0 and before["held_out"]["left_out"] == 0
    row = passages[4]
    copied = texts[row["article"]][row["start"] : row["end"]]
    base, held_out = read(output, "base"), read(output, "held_out")
    base[3]["text"] = prose(901, 300) + "\n\n" + copied + "\n\n" + prose(902, 300)
    held_out[1]["text"] = copied + " " + prose(903, 300)
    write_texts(output, base=base, held_out=held_out)
    second = written(output)
    after = json.loads((second / "data.json").read_text())
    assert lines(second / "passages.jsonl") == passages
    assert after["base"]["left_out"] == 1 and after["held_out"]["left_out"] == 1
    runs = {tuple(row["input_ids"][start : start + 13]) for row in passages for start in range(24 - 12)}
    for name in ("base", "held_out"):
        stream = [token for line in lines(second / f"{name}.jsonl") for token in line["input_ids"]]
        assert not any(tuple(stream[start : start + 13]) in runs for start in range(len(stream)))


def test_thirteen_tokens_are_the_bound():
    known = Known([list(range(100, 124))])
    for start in (0, 5, 11):
        assert known.shares([1, 2, *range(100 + start, 113 + start), 3])
        assert not known.shares([1, 2, *range(100 + start, 112 + start), 3])
    assert not known.shares([]) and not known.shares([1])
    assert not Known([]).shares(list(range(20)))
    assert Known([list(range(20)), list(range(6, 30))]).repeated == 2


def test_passages_that_share_text_are_moved_or_their_article_left_out(output, tokenizer):
    """A copied paragraph moves the passage; an article that is a copy as a whole is left out."""
    articles = read(output, "articles")
    paragraphs = [prose(300 + number, 100).split("\n\n")[0] for number in range(14)]
    articles[2]["text"] = "\n\n".join(paragraphs[:7])
    articles[4]["text"] = "\n\n".join([paragraphs[0], *paragraphs[8:14]])
    articles[6]["text"] = f"{paragraphs[13][:50]} " * 20  # the same wherever a passage begins
    write_texts(output, articles=articles)
    data = written(output)
    passages = lines(data / "passages.jsonl")
    about = json.loads((data / "data.json").read_text())["passages"]
    assert about["articles_left_out"] == {"too_short": [], "shared": ["A6"]} and about["moved"] >= 1
    assert [row["id"] for row in passages if row["article"] in ("A2", "A4")] == [
        f"{name}#{number}" for name in ("A2", "A4") for number in range(3)
    ]
    starts = {row["id"]: row["start"] for row in passages}
    assert starts["A2#0"] == 0 and starts["A4#0"] == len(paragraphs[0]) + 2
    assert "A8#0" in starts and "A9#0" not in starts
    runs = Counter(
        run for row in passages for run in {tuple(row["input_ids"][start : start + 13]) for start in range(12)}
    )
    assert max(runs.values()) == 1


def test_few_articles_give_more_passages_each(output, capsys):
    articles = [{"id": f"A{number}", "text": prose(number, 3000)} for number in range(5)]
    write_texts(output, articles=articles)
    data = written(output)
    assert "4 articles give 6 passages each" in capsys.readouterr().out
    passages = lines(data / "passages.jsonl")
    for name in ("A0", "A1", "A2", "A3"):
        spans = [(row["start"], row["end"]) for row in passages if row["article"] == name]
        assert len(spans) == 6 and all(one[1] <= other[0] for one, other in pairwise(spans))
        for seed in (0, 1, 2):
            buckets = [
                row["bucket"] for row in lines(data / f"samples-s{seed}.jsonl") if row["document_id"][:2] == name
            ]
            assert Counter(buckets) == {0: 2, 1: 2, 4: 2}


def test_too_little_text_is_said_in_numbers(output):
    with pytest.raises(
        ValueError, match=r"base_tokens asks for 90,000 tokens, but texts/base.jsonl has \d\d,\d{3} in rows"
    ):
        written(output, recipe_of(texts=Texts(base_tokens=90_000, held_out_tokens=100)))
    with pytest.raises(ValueError, match="held_out_tokens asks for 9,000 tokens"):
        written(output, recipe_of(texts=Texts(base_tokens=1000, held_out_tokens=9000)))
    tried = r"8 articles with 3: 0 are \(10 too short, 0 share text with others\); 4 articles with 6"
    asked = "8 passages of 300 tokens in each of 3 buckets cannot be taken from 10 articles"
    with pytest.raises(ValueError, match=rf"{asked} \({tried}"):
        documents = Documents(buckets=BUCKETS, per_bucket=8, length=300, suffix=8)
        written(output, recipe_of(documents=documents))
    with pytest.raises(ValueError, match="need 4,000 rows of base text of 24 tokens, but texts/base.jsonl gives"):
        written(output, recipe_of(warm_up_sequences=4000))
    with pytest.raises(ValueError, match=r"a canary has \d+ tokens, but documents have 8"):
        documents = Documents(buckets=BUCKETS, per_bucket=8, length=8, suffix=4)
        written(output, recipe_of(documents=documents, evaluation=Evaluation(canaries=3)))
    with pytest.raises(ValueError, match="documents have no `suffix`, and there is no pilot"):
        documents = Documents(buckets=BUCKETS, per_bucket=8, length=24)
        written(output, recipe_of(documents=documents))
    with pytest.raises(ValueError, match="no model of small.yaml has the tokenizer other"):
        written(output, name="other")


def test_the_pilot_is_a_run_with_a_seed_of_its_own_and_the_longest_suffix(output):
    pilot = Pilot(model="tiny", learning_rates=(1e-3,), suffixes=(4, 10))
    documents = Documents(buckets=BUCKETS, per_bucket=8, length=24)
    evaluation = Evaluation(canaries=3)
    data = written(output, recipe_of(documents=documents, pilot=pilot, evaluation=evaluation))
    assert {len(row["suffix"]) for row in lines(data / "samples-s0.jsonl")} == {10}
    for name in ("train", "samples"):
        # What comes back of a bucket depends on what else is trained on, canaries and base text among it.
        pilots, run = (Counter(row["bucket"] for row in lines(data / f"{name}-s{seed}.jsonl")) for seed in (3, 0))
        assert pilots == run and len(run) > 2
    pilots, run = ([row["id"] for row in lines(data / f"train-s{seed}.jsonl")] for seed in (3, 0))
    assert pilots != run and any(name.startswith("canary-") for name in pilots)
    assert not (data / "train-s4.jsonl").exists()


def test_a_published_way_of_asking(output, monkeypatch):
    """Where to cut, and what stands beside the samples, are the protocol's; one that cannot be ends with numbers."""
    from hf_axonn_eval import protocol, read_about

    small = protocol("sc24", max_tokens=24, min_document_tokens=24, suffix_length=8)
    other = protocol("goldfish", max_tokens=24, suffix_length=5)
    monkeypatch.setattr(passages, "protocol", {"sc24": small, "goldfish": other}.__getitem__)
    data = written(output, recipe_of(evaluation=Evaluation(protocol="sc24")))
    about = read_about(data / "samples-s0.jsonl")
    assert about["protocol"]["name"] == "sc24" and about["extract"] == {"generate": True}
    assert about["protocol"]["samples"]["suffix_tokens"] == {"least": 8, "most": 8}
    with pytest.raises(
        ValueError, match=r"goldfish makes 24 samples with suffixes of \[5\] tokens of 24 passages of 24"
    ):
        written(output, recipe_of(evaluation=Evaluation(protocol="goldfish")))


def test_another_tokenizer_has_the_same_characters(output, tokenizer, tmp_path_factory):
    """A model that comes trained: its own tokens from the same places on, of the first articles."""
    from transformers import AutoTokenizer

    other = tmp_path_factory.mktemp("other")
    write_texts(other)
    train_tokenizer(recipe_of(vocabulary=300), other)
    models = (
        Model(name="tiny", config={"hidden_size": 16}, processes=1),
        Model(name="large", checkpoint=str(other / "tokenizer"), per_bucket=4, processes=1),
    )
    runs = (*recipe_of().runs, Run(model="large", loss="ordinary", seed=0))
    both = recipe_of(models=models, runs=runs)
    first, second = written(output, both), written(output, both, "large")
    own = AutoTokenizer.from_pretrained(other / "tokenizer")
    texts = {row["id"]: row["text"] for row in read(output, "articles")}
    passages = lines(second / "passages.jsonl")
    assert [(row["id"], row["start"]) for row in passages] == [
        (row["id"], row["start"]) for row in lines(first / "passages.jsonl")[:12]
    ]
    assert all(row["input_ids"] == own(texts[row["article"]][row["start"] :])["input_ids"][:24] for row in passages)
    # The same passages are in the same buckets, and there are files for the model's seeds alone.
    buckets = [
        {row["document_id"]: row["bucket"] for row in lines(data / "samples-s0.jsonl")} for data in (first, second)
    ]
    assert buckets[1] == {name: bucket for name, bucket in buckets[0].items() if name in buckets[1]}
    assert {file.name for file in second.iterdir()} == {
        *("data.json", "held_out.jsonl", "passages.jsonl"),
        *("samples-s0.jsonl", "samples-s0.jsonl.about.json", "train-s0.jsonl"),
    }
    assert {len(row["input_ids"]) for row in lines(second / "held_out.jsonl")} == {24}
    assert {len(row["input_ids"]) for row in lines(first / "held_out.jsonl")} == {32}


def test_passages_stay_in_their_part_of_the_article():
    """Also with tokens that are longer than prose has: 24 of 10 characters do not fit into a third of 690."""
    article = {"id": "A", "text": prose(0, 1200)[:690]}
    found = place([article], Characters(10), per_article=3, length=24)
    assert found.too_short == ["A"] and not found.spans and not found.shared
    article["text"] = prose(0, 1200)[:1000]
    (spans,) = place([article], Characters(10), per_article=3, length=24).spans.values()
    assert [span.end <= 1000 * (number + 1) // 3 for number, span in enumerate(spans)] == [True] * 3


def test_a_tokenizer_in_which_passages_reach_too_far_is_named(output):
    data = Data(recipe_of(), output, "study")
    data.tokenizer = Characters(40)
    text, spans = prose(0, 3000), [Span(start, start + 60, []) for start in (0, 900)]
    with pytest.raises(ValueError, match=r"24 tokens from character 0 of 'A0' on reach beyond character 900"):
        data._in_own_tokens("A0", text, spans)
    with pytest.raises(ValueError, match=r"24 tokens from character 900 of 'A0' on reach beyond character 1800"):
        data._in_own_tokens("A0", text[:1800], [spans[1]])
    assert [span.end for span in data._in_own_tokens("A0", text, [spans[1]])] == [1860]


class Characters:
    """Stands where a tokenizer does whose tokens have so many characters each."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, text, **_):
        spans = [(start, min(start + self.size, len(text))) for start in range(0, len(text), self.size)]
        return {"input_ids": [hash(text[a:b]) % 10**6 for a, b in spans], "offset_mapping": spans}
