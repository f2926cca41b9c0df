"""Token ids that models of one tokenizer are trained on and asked for: OUTPUT/data/TOKENIZER.

    base.jsonl           input_ids; rows of the base training (only with the study's tokenizer)
    held_out.jsonl       input_ids; rows that no run trains on
    passages.jsonl       id ("Title#3"), article, passage, start and end (characters of the article), input_ids
    train-sSEED.jsonl    id, input_ids, bucket; the rows of a continuation in the order of training
    samples-sSEED.jsonl  every passage once, with its bucket of that seed, as hf_axonn_eval asks; about file beside it
    canaries/            as hf_axonn_eval writes them
    data.json            counts, and what was left out

TOKENIZER is `study` or the name of a model that comes trained. Passages are the same characters in all of them: they
are placed with the study's tokenizer, or the first model's where there is none (placing.py). Documents of the base
and held-out texts that share 13 tokens in a row with a passage are left out.

The suffix. The prefix of a sample is what is before the longest suffix that may be asked for
(`Recipe.longest_suffix`). A shorter suffix of n tokens means the first n tokens after the same prefix: it came back
verbatim if the first miss is at n or later, and its log-probability is the sum over its first n.

The order of training. `warm_up_sequences` rows of base text come first ("warm-up-1", bucket null). Then the
repetitions of every passage are spread evenly, none twice in a batch (corpus.schedule of the demo), among them those
of the canaries ("canary-1": the secret, the end token, and base text up to the length) and as many rows of base text
("base-1", bucket null) as whole batches need. Every row has `documents.length` tokens.

The pilot. Its seed is the study's last plus one; its files are as those of any run, because the other rows of a
training decide how much comes back.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any

from hf_axonn_eval import Sampling, iter_samples, make_canaries, protocol, write_samples
from hf_axonn_eval.canaries.generate import CanarySet, write_canaries
from hf_axonn_eval.data.jsonl import write_json
from hf_axonn_eval.data.samples import write_about
from hf_axonn_eval.data.sampling import Tally
from hf_axonn_eval.data.tokenizer_identity import tokenizer_identity
from hf_axonn_eval.extraction.load_model import load_tokenizer
from hf_axonn_scripts.data import tokenize
from hf_axonn_scripts.demo.corpus import schedule, write_rows
from hf_axonn_scripts.study.data.placing import SHARED_RUN, Known, Placed, Span, latin_square, place, span_at
from hf_axonn_scripts.study.data.texts import count_articles, read_rows
from hf_axonn_scripts.study.recipe.definition import Model, Recipe
from hf_axonn_scripts.study.recipe.steps import STUDY, base_of, tokenizer_of


CANARY_FORMAT = "Gate code: {digits:6}."  # short, for rows of few tokens
CANARY_CANDIDATES = 1023  # so that the first place is an exposure of 10 bits
DOCUMENTS_AT_ONCE = 256


def write_data(recipe: Recipe, output: Path, tokenizer_name: str) -> None:
    """Write OUTPUT/data/TOKENIZER from OUTPUT/texts; see the module.

    Args:
        recipe: the study.
        output: its directory, with texts, the tokenizer where models are trained from nothing, and the converted model
            (base/MODEL) where it comes as a package.
        tokenizer_name: `study`, or the name of a model that comes trained.
    Raises:
        ValueError: there is too little text for the recipe, or numbers of it do not go together; the message has them.
    """
    data = Data(recipe, output, tokenizer_name)
    directory = output / "data" / tokenizer_name
    directory.mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = {"passages": data.about()}
    write_rows(directory / "passages.jsonl", data.passage_rows())
    if tokenizer_name == STUDY:
        about["base"] = data.write_base(directory / "base.jsonl")
    about["held_out"] = data.write_held_out(directory / "held_out.jsonl")
    canaries = data.canaries()
    if canaries is not None:
        (directory / "canaries").mkdir(exist_ok=True)
        write_canaries(canaries, directory / "canaries")
    about["training"] = {}
    for seed in data.seeds():
        buckets = data.buckets(seed)
        about["training"][str(seed)] = data.write_training(directory / f"train-s{seed}.jsonl", buckets, seed, canaries)
        data.write_samples(directory / f"samples-s{seed}.jsonl", buckets)
    write_json(directory / "data.json", about)
    rows = ", ".join(f"{facts['rows']:,} with seed {seed}" for seed, facts in about["training"].items())
    print(
        f"{len(data.passages)} passages of {about['passages']['articles']} articles; training rows: {rows}", flush=True
    )


class Data:
    """Passages and rows of one tokenizer.

    Args:
        recipe, output, name: as for `write_data`.
    Raises:
        ValueError: as `write_data`.
    """

    def __init__(self, recipe: Recipe, output: Path, name: str) -> None:
        self.recipe = recipe
        self.name = name
        self.models = [model for model in recipe.models if tokenizer_of(model) == name]
        if not self.models:
            raise ValueError(f"no model of {recipe.path} has the tokenizer {name}")
        self._texts = output / "texts"
        self._length = recipe.documents.length
        suffix, published = recipe.longest_suffix, recipe.evaluation.protocol
        self._protocol = protocol(published) if published else None
        self._sampling = Sampling(prefix_length=self._length - suffix, suffix_length=suffix)
        if self._protocol is not None:
            self._sampling = self._protocol.sampling
        self._special = self._sampling.add_special_tokens
        self.tokenizer = _tokenizer(output, self.models[0])
        self._placed, self._spans = self._place(output)
        self.passages = {self._id(article, number): span.input_ids for article, number, span in self._each()}
        self._known = Known(self.passages.values())
        self._base: list[list[int]] = []  # rows as long as passages, as many as were needed so far

    def about(self) -> dict[str, Any]:
        """Return the facts on the passages for `data.json`."""
        return {
            "count": len(self.passages),
            "articles": len(self._spans),
            "of_an_article": len(next(iter(self._spans.values()))),
            "tokens": self._length,
            "prefix": self._length - self.recipe.longest_suffix,
            "longest_suffix": self.recipe.longest_suffix,
            "shared_run": SHARED_RUN,
            "articles_left_out": {"too_short": self._placed.too_short, "shared": self._placed.shared},
            "moved": self._placed.moved,
            "runs_in_two": self._known.repeated,
        }

    def passage_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of passages.jsonl."""
        for article, number, span in self._each():
            yield {"id": self._id(article, number), "article": article, "passage": number, **span._asdict()}

    def seeds(self) -> list[int]:
        """Return the seeds of the runs of these models, and that of the pilot if it is one of theirs."""
        names = {model.name for model in self.models}
        seeds = sorted({run.seed for run in self.recipe.runs if run.model in names})
        if self.recipe.pilot is not None and self.recipe.pilot.model in names:
            seeds.append(self.recipe.pilot_seed)
        return seeds

    def buckets(self, seed: int) -> dict[str, int]:
        """Return passage -> its bucket, by rising bucket."""
        square = latin_square(self._spans, self.recipe.documents.buckets, seed)
        dealt = {self._id(*passage): bucket for passage, bucket in square.items()}
        return dict(sorted(dealt.items(), key=lambda item: item[1]))

    def canaries(self) -> CanarySet | None:
        """Draw the secrets that training rows hold, the same in every seed.

        They are dealt to the buckets' repetitions from the most on, those at 0 last: a multiple of the buckets gives
        each equally many.
        """
        count = self.recipe.evaluation.canaries
        if not count:
            return None
        drawn = make_canaries(CANARY_FORMAT, insertions=[0], each=count, candidates=CANARY_CANDIDATES)
        insertions = cycle(sorted(self.recipe.documents.buckets, reverse=True))
        dealt = tuple(replace(canary, insertions=next(insertions)) for canary in drawn.canaries)
        return replace(drawn, canaries=dealt)

    def write_base(self, path: Path) -> dict[str, int]:
        """Write `base_tokens` tokens of the base text in rows of `base_length`; return counts.

        Raises:
            ValueError: there is less.
        """
        return self._write_rows(path, "base", self.recipe.base_length, self.recipe.texts.base_tokens)

    def write_held_out(self, path: Path) -> dict[str, int]:
        """Write the held-out text; rows of models that come trained are as long as passages."""
        length = self.recipe.base_length if self.name == STUDY else self._length
        return self._write_rows(path, "held_out", length, self.recipe.texts.held_out_tokens)

    def write_training(
        self, path: Path, buckets: Mapping[str, int], seed: int, canaries: CanarySet | None
    ) -> dict[str, int]:
        """Write the rows of a continuation in the order of training; return counts.

        Raises:
            ValueError: there is too little base text for rows of it.
        """
        batch, warm_up = self.recipe.batch_sequences, self.recipe.warm_up_sequences
        repetitions = {passage: bucket for passage, bucket in buckets.items() if bucket}
        secrets = {}
        if canaries is not None:
            secrets = {canary.canary_id: canary for canary in canaries.canaries if canary.insertions}
        repetitions |= {name: canary.insertions for name, canary in secrets.items()}
        of_secrets = sum(canary.insertions for canary in secrets.values())
        filling = -sum(repetitions.values()) % batch
        repetitions |= {f"base-{number}": 1 for number in range(1, filling + 1)}
        base = self._some_base(warm_up + of_secrets + filling, seed)

        def rows() -> Iterator[dict[str, Any]]:
            for number in range(1, warm_up + 1):
                yield {"id": f"warm-up-{number}", "input_ids": next(base), "bucket": None}
            for titles in schedule(repetitions, batch_size=batch, seed=seed):
                for title in titles:
                    if title in secrets:
                        ids = self._with_secret(secrets[title].text, next(base))
                        yield {"id": title, "input_ids": ids, "bucket": secrets[title].insertions}
                    elif title in self.passages:
                        yield {"id": title, "input_ids": self.passages[title], "bucket": buckets[title]}
                    else:
                        yield {"id": title, "input_ids": next(base), "bucket": None}

        count = write_rows(path, rows())
        return {"rows": count, "batches": count // batch, "canary_rows": of_secrets, "filling_rows": filling}

    def write_samples(self, path: Path, buckets: Mapping[str, int]) -> None:
        """Write the samples, and beside them how they were made.

        Raises:
            ValueError: the recipe's protocol does not make one sample of each passage.
        """
        documents = (
            {"id": passage, "input_ids": self.passages[passage], "bucket": bucket}
            for passage, bucket in buckets.items()
        )
        tally = Tally()
        samples = iter_samples(documents, sampling=self._sampling, tokenizer=self.tokenizer, tally=tally)
        digest = write_samples(samples, path)
        about = {**tally.about(), "sha256": digest, "tokenizer": tokenizer_identity(self.tokenizer)}
        if self._protocol is not None:
            facts = self._protocol.samples_facts(tally.facts(), [], self.tokenizer)
            about |= {"protocol": self._protocol.record(facts), "extract": dict(self._protocol.extract)}
        if tally.samples != len(buckets) or set(tally.suffixes) != {self.recipe.longest_suffix}:
            raise ValueError(
                f"the protocol {self.recipe.evaluation.protocol} makes {tally.samples} samples with suffixes of "
                f"{sorted(tally.suffixes)} tokens of {len(buckets)} passages of {self._length} tokens; a study asks "
                f"each once, for {self.recipe.longest_suffix}: take another protocol or length, or none"
            )
        write_about(path, about)

    def _place(self, output: Path) -> tuple[Placed, dict[str, list[Span]]]:
        """Return the passages as the placing tokenizer has them, and those of these models, in their own tokens."""
        recipe = self.recipe
        model = next((model for model in recipe.models if model.config is not None), recipe.models[0])
        own = tokenizer_of(model) == self.name
        placing = self.tokenizer if own else _tokenizer(output, model)
        articles = list(read_rows(self._texts / "articles.jsonl"))
        placed = choose(recipe, articles, placing, add_special_tokens=self._special)
        per_bucket = recipe.per_bucket(self.models[0])  # models that share a tokenizer have the same
        passages = per_bucket * len(recipe.documents.buckets)
        of_an_article = len(next(iter(placed.spans.values())))
        needed, rest = divmod(passages, of_an_article)
        if rest or needed > len(placed.spans):
            raise ValueError(
                f"{self.models[0].name}: per_bucket={per_bucket} is {passages} passages, which are not those of whole "
                f"articles of {of_an_article} each, of which there are {len(placed.spans)}: take a multiple of "
                f"{max(of_an_article // len(recipe.documents.buckets), 1)} and at most {recipe.documents.per_bucket}"
            )
        chosen = dict(islice(placed.spans.items(), needed))
        if own:
            return placed, chosen
        texts = {article["id"]: article["text"] for article in articles}
        return placed, {name: self._in_own_tokens(name, texts[name], spans) for name, spans in chosen.items()}

    def _in_own_tokens(self, article: str, text: str, spans: list[Span]) -> list[Span]:
        """Return passages that begin at the same characters.

        Raises:
            ValueError: one is shorter here, or reaches into the next.
        """
        found = []
        ends = [*(span.start for span in spans[1:]), len(text)]
        for span, end in zip(spans, ends, strict=True):
            own = span_at(text, span.start, self.tokenizer, length=self._length, add_special_tokens=self._special)
            if own is None or own.end > end:
                raise ValueError(
                    f"{self.name}: {self._length} tokens from character {span.start} of {article!r} on reach beyond "
                    f"character {end}, where the next passage or the end is: take shorter passages, or articles with "
                    "more text"
                )
            found.append(own)
        return found

    def _write_rows(self, path: Path, name: str, length: int, tokens: int) -> dict[str, int]:
        left: Counter[str] = Counter()
        needed = tokens // length
        count = write_rows(path, ({"input_ids": row} for row in islice(self._rows(name, length, left), needed)))
        if count < needed:
            raise ValueError(
                f"{name}_tokens asks for {tokens:,} tokens, but texts/{name}.jsonl has {count * length:,} in "
                f"rows of {length}, without {left['sharing']:,} of {left.total():,} documents, which "
                f"share {SHARED_RUN} tokens in a row with a passage: lower it, or give more text"
            )
        return {"rows": count, "tokens": count * length, "documents": left["documents"], "left_out": left["sharing"]}

    def _some_base(self, count: int, seed: int) -> Iterator[list[int]]:
        """Return rows of base text as long as passages, in an order that depends on the seed."""
        if len(self._base) < count:
            self._base = list(islice(self._rows("base", self._length, Counter()), count))
        if len(self._base) < count:
            raise ValueError(
                f"warm-up, canaries and whole batches of {self.recipe.batch_sequences} need {count:,} rows of base "
                f"text of {self._length} tokens, but texts/base.jsonl gives {len(self._base):,}: give more base text "
                "(base, base_tokens), or take none of them"
            )
        rows = self._base[:count]
        Random(seed).shuffle(rows)
        return iter(rows)

    def _rows(self, name: str, length: int, left: Counter[str]) -> Iterator[list[int]]:
        """Yield a text as rows of `length` tokens, one document behind the other."""
        row: list[int] = []
        for document in self._documents(name, left):
            row += document
            whole = len(row) // length * length
            yield from (row[start : start + length] for start in range(0, whole, length))
            row = row[whole:]

    def _documents(self, name: str, left: Counter[str]) -> Iterator[list[int]]:
        """Yield the documents of a text in token ids, each with its end token, but for those that share a passage's.

        `left` counts `documents`, and those left out as `sharing`.
        """
        rows = (document["text"] for document in read_rows(self._texts / f"{name}.jsonl"))
        while some := list(islice(rows, DOCUMENTS_AT_ONCE)):
            for ids in tokenize(some, self.tokenizer):
                if self._known.shares(ids):
                    left["sharing"] += 1
                else:
                    left["documents"] += 1
                    yield ids

    def _with_secret(self, secret: str, base: list[int]) -> list[int]:
        ids = self.tokenizer(secret, add_special_tokens=self._special, verbose=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        ids = ids if end is None or ids[-1] == end else [*ids, end]
        if len(ids) > self._length:
            raise ValueError(
                f"a canary has {len(ids)} tokens, but documents have {self._length}: take longer documents"
            )
        return [*ids, *base[: self._length - len(ids)]]

    def _each(self) -> Iterator[tuple[str, int, Span]]:
        for article, spans in self._spans.items():
            for number, span in enumerate(spans):
                yield article, number, span

    def _id(self, article: str, number: int) -> str:
        return f"{article}#{number}"


def choose(recipe: Recipe, articles: Iterable[Mapping[str, Any]], tokenizer, *, add_special_tokens: bool) -> Placed:
    """Place the passages of a study.

    Where there are too few articles for one passage a bucket, each gives two, or three and so on, as many as suffice:
    all of an article's are in different places.

    Raises:
        ValueError: the articles are too few or too short; the message says how many there are of what.
    """
    articles = list(articles)
    documents = recipe.documents
    needed, per_article = count_articles(recipe)
    tried = []
    for times in range(1, needed + 1 if documents.per_article is None else 2):
        if needed % times:
            continue
        placed = place(
            articles,
            tokenizer,
            per_article=per_article * times,
            length=documents.length,
            most=needed // times,
            add_special_tokens=add_special_tokens,
        )
        if len(placed.spans) == needed // times:
            if times > 1:
                print(f"{len(placed.spans)} articles give {per_article * times} passages each", flush=True)
            return placed
        tried.append(
            f"{needed // times} articles with {per_article * times}: {len(placed.spans)} are ({len(placed.too_short)} "
            f"too short, {len(placed.shared)} share text with others)"
        )
    raise ValueError(
        f"{documents.per_bucket} passages of {documents.length} tokens in each of {len(documents.buckets)} buckets "
        f"cannot be taken from {len(articles)} articles ({'; '.join(tried)}): take shorter passages, fewer in a "
        "bucket, or more text"
    )


def _tokenizer(output: Path, model: Model):
    """Load the tokenizer of a model before it is trained."""
    return load_tokenizer(output / "tokenizer" if model.config is not None else base_of(model, output))
