"""Documents and settings that make no sense: a ValueError that says why, or samples that are pieces of the documents.

The same ones are tried in every run; AXONN_FUZZ=2000 tries as many others.
"""

import json
from collections import Counter

import pyarrow
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from pyarrow import parquet

from hf_axonn_eval import PROTOCOLS, Sampling, extract, iter_documents, iter_samples, protocol
from hf_axonn_eval.canaries.generate import insert_canaries, make_canaries, read_canaries
from hf_axonn_eval.data.sampling import Tally
from hf_axonn_eval.data.windows import COMBINE, KINDS, STRIDE_UNITS
from tests.helpers.eval_support import tiny_llama, topics_tokenizer
from tests.helpers.fuzzing import fuzz


FUZZ, FILES = fuzz(120), fuzz(50)
# surrogates too: JSON can hold half of a pair
TEXTS = st.text(st.characters(), max_size=60) | st.text("ab <>/s\u4e2d\U0001f600\ud83d", max_size=30) | st.just("")
ANYTHING = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.lists(st.integers(), max_size=3)
)
IDS = st.lists(st.integers(0, 799), max_size=40)


def rarely(strategy, other=ANYTHING):
    """Nearly always the one, now and then the other."""
    return st.integers(0, 11).flatmap(lambda number: other if number == 11 else strategy)


DOCUMENT = st.one_of(
    st.fixed_dictionaries(
        {
            "id": rarely(st.text("abcd", min_size=1, max_size=4)),
            "bucket": rarely(st.integers(0, 5)),
            "text": rarely(TEXTS),
        }
    ),
    st.fixed_dictionaries(
        {
            "id": st.integers(0, 99),
            "bucket": st.integers(0, 5),
            "input_ids": rarely(IDS, st.lists(st.integers(), max_size=9)),
        }
    ),
)
NUMBER = rarely(st.integers(1, 6), st.integers(-1, 40))
SETTINGS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(list(KINDS)),
        "prefix_length": NUMBER | st.lists(NUMBER, max_size=3),
        "suffix_length": NUMBER | st.lists(NUMBER, max_size=2),
        "offset": st.integers(0, 5) | st.lists(st.integers(0, 9), max_size=3),
    },
    optional={
        "combine": st.sampled_from(COMBINE),
        "shared_suffix": st.booleans(),
        "max_tokens": st.none() | NUMBER,
        "stride": NUMBER,
        "stride_unit": st.sampled_from(STRIDE_UNITS),
        "min_document_tokens": st.none() | NUMBER,
        "max_document_tokens": st.none() | st.integers(0, 50),
        "max_documents": st.none() | st.integers(0, 3),
        "add_special_tokens": st.booleans(),
        "deduplicate": st.booleans(),
    },
)


@FUZZ
@given(documents=st.lists(DOCUMENT, max_size=6), asked=SETTINGS)
@example(documents=[{"id": "a", "bucket": 0, "text": ""}], asked={"kind": "first", "suffix_length": 1})
@example(
    documents=[{"id": "a", "bucket": 0, "text": "a" * 99}], asked={"kind": "sliding", "stride_unit": "characters"}
)
def test_samples_are_pieces_of_their_documents(documents, asked):
    tokenizer, tally = topics_tokenizer(), Tally()
    try:
        sampling = Sampling(**asked)
        samples = list(iter_samples(documents, sampling=sampling, tokenizer=tokenizer, tally=tally))
    except ValueError as error:
        assert len(str(error)) > 20
        return
    assert len({sample.sample_id for sample in samples}) == len(samples) == tally.samples > 0
    assert tally.documents == len(documents) and tally.buckets == Counter(sample.bucket for sample in samples)
    by_id = {str(document["id"]): document for document in documents}
    by_characters = sampling.kind == "sliding" and sampling.stride_unit == "characters"
    for sample in samples:
        document = by_id[sample.document_id]
        assert sample.bucket == document["bucket"]
        if by_characters:
            tokens = tokenizer(
                document["text"][int(sample.sample_id.rpartition("@")[2][:-1]) :],
                add_special_tokens=sampling.add_special_tokens,
            )["input_ids"]
            begin = 0
        else:
            tokens = document.get("input_ids")
            if tokens is None:
                tokens = tokenizer(document["text"], add_special_tokens=sampling.add_special_tokens)["input_ids"]
            begin = sample.offset
        piece = [*sample.prefix, *sample.suffix]
        assert tokens[begin : begin + len(piece)] == piece
        if sampling.kind in ("rest", "sentence"):
            assert begin + len(piece) == len(tokens)
        else:
            assert len(sample.suffix) in sampling.suffix_length
        if sampling.kind in ("offsets", "sliding"):
            assert len(sample.prefix) in sampling.prefix_length
    if sampling.deduplicate:
        assert len({(sample.prefix, sample.suffix) for sample in samples}) == len(samples)


@fuzz(12)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=5), generate=st.booleans()
)
@example(lengths=[(1, 1)], generate=True)
@example(lengths=[(1, 1), (9, 1), (1, 5)], generate=True)
def test_any_lengths_are_measured(lengths, generate):
    """Prefixes and suffixes from one token on, in one run."""
    documents = [
        {"id": str(place), "bucket": 0, "input_ids": [(7 * place + step) % 800 for step in range(prefix + suffix)]}
        for place, (prefix, suffix) in enumerate(lengths)
    ]
    samples = [
        sample
        for document, (prefix, suffix) in zip(documents, lengths, strict=True)
        for sample in iter_samples([document], sampling=Sampling(prefix_length=prefix, suffix_length=suffix))
    ]
    results = list(extract(tiny_llama(), topics_tokenizer(), samples, batch_size=3, generate=generate, progress=False))
    assert [(result.prefix_length, result.suffix_length) for result in results] == lengths
    for result in results:
        assert len(result.hits) == result.suffix_length and result.logprob < 0
        assert result.exact_match == (result.divergence_point == result.suffix_length)


@FILES
@given(name=st.sampled_from(["d.jsonl", "d.txt", "d.parquet", "d"]), content=st.binary(max_size=80))
@example(name="d.jsonl", content=b'{"id": "a", "bucket": 1, "text": "\\ud83d"}')
@example(name="d.jsonl", content=b"[" * 100_000)
@example(name="d.jsonl", content=b"\xef\xbb\xbf")
@example(name="d.parquet", content=b"PAR1" + bytes(40) + b"PAR1")
def test_bytes_that_are_no_documents(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    for options in ({"bucket": 0}, {"bucket": 0, "id_key": None}, {}):
        try:
            documents = list(iter_documents(path, **options))
            list(
                iter_samples(documents, sampling=Sampling(kind="first", suffix_length=1), tokenizer=topics_tokenizer())
            )
        except ValueError as error:
            assert len(str(error)) > 20


@FILES
@given(
    rows=st.lists(st.dictionaries(st.sampled_from(["id", "text", "bucket", "input_ids", "x"]), ANYTHING), max_size=4)
)
def test_rows_of_any_types(tmp_path, rows):
    """The same rows as JSON lines, and, where a table can hold them, as parquet."""
    sampling = Sampling(prefix_length=1, suffix_length=1)
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = [tmp_path / "d.jsonl"]
    try:
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
        paths.append(tmp_path / "d.parquet")
    except (pyarrow.ArrowException, OverflowError, UnicodeEncodeError):
        pass  # a table has one type a column
    for path in paths:
        try:
            samples = list(iter_samples(iter_documents(path), sampling=sampling, tokenizer=topics_tokenizer()))
        except ValueError as error:
            assert len(str(error)) > 20
        else:
            assert samples


@pytest.mark.parametrize("name", PROTOCOLS)
@fuzz(30)
@given(
    changes=st.dictionaries(
        st.sampled_from(["stride", "offset", "suffix_length", "max_tokens", "combine", "x"]), ANYTHING
    )
)
def test_protocols_with_any_settings(name, changes):
    try:
        changed = protocol(name, **changes)
    except ValueError as error:
        assert len(str(error)) > 20
        return
    assert set(changed.changed) <= set(changes)
    assert json.loads(json.dumps(changed.record())) == changed.record()


@FILES
@given(
    format=st.text("ab{}:digts019 ", max_size=20) | st.just("{digits:2}"),
    each=st.integers(-1, 9),
    seed=st.integers(0, 9),
)
def test_canaries_of_any_format(format, each, seed):
    assume(len(format) < 12 or "0000" not in format)
    try:
        drawn = make_canaries(format, insertions=(0, 2), each=each, candidates=20, seed=seed)
    except ValueError as error:
        assert len(str(error)) > 20
        return
    texts = [*(canary.text for canary in drawn.canaries), *drawn.candidates]
    assert len(texts) == len(set(texts)) <= drawn.space and len(drawn.canaries) == 2 * each


@FILES
@given(content=st.binary(max_size=60), about=st.binary(max_size=60))
@example(content=b"[1]\n", about=b"{}")
@example(content=b'{"text": "a"}\n', about=b'{"candidates_sha256": 3}')
def test_damaged_canary_files(tmp_path, content, about):
    (tmp_path / "canaries.json").write_bytes(about)
    (tmp_path / "candidates.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=r".{20}"):
        read_canaries(tmp_path)
    drawn = make_canaries("{digits:3}", insertions=(1,), candidates=5)
    try:
        insert_canaries(tmp_path / "candidates.jsonl", tmp_path / "copy.jsonl", drawn)
    except ValueError as error:
        assert len(str(error)) > 20
