"""The log-probability of every token of a run, as other programs read it."""

import sys
from math import inf

import numpy as np
import pytest
from pyarrow import parquet

from hf_axonn_eval import Sample
from hf_axonn_eval.data import token_file
from hf_axonn_eval.data.token_file import OF_SAMPLES, write_tokens
from tests.helpers.eval_support import result


LENGTHS = (2, 1, 3)
RUN = [
    result(
        f"s{place}\u00e9",
        document_id="d" if place else "other",
        bucket=place,
        offset=10 * place,
        prefix_length=4 + place,
        suffix_length=length,
        hits=[place % 2 == 0] * length,
        logprobs=[-0.1 * place - 1e-17 * token if token else -inf for token in range(length)],
    )
    for place, length in enumerate(LENGTHS)
]
SAMPLES = [
    Sample(
        sample_id=answer.sample_id,
        document_id=answer.document_id,
        bucket=answer.bucket,
        offset=answer.offset,
        prefix=(1,) * answer.prefix_length,
        suffix=tuple(100 * answer.bucket + place for place in range(answer.suffix_length)),
    )
    for answer in reversed(RUN)
]
LOGPROBS = [logprob for answer in RUN for logprob in answer.logprobs]
HITS = [hit for answer in RUN for hit in answer.hits]
TOKENS = [0, 1, 100, 200, 201, 202]


@pytest.mark.parametrize("samples", [None, SAMPLES])
def test_npz(tmp_path, samples):
    assert write_tokens(iter(RUN), tmp_path / "tokens.npz", samples=samples) == 6
    with np.load(tmp_path / "tokens.npz", allow_pickle=False) as file:
        arrays = dict(file)
    assert arrays["logprob"].dtype == np.float64 and arrays["logprob"].tolist() == LOGPROBS
    assert arrays["hit"].dtype == bool and arrays["hit"].tolist() == HITS
    assert arrays["start"].tolist() == [0, 2, 3, 6]
    for name in OF_SAMPLES:
        assert arrays[name].tolist() == [getattr(answer, name) for answer in RUN]
    assert ("token" in arrays) == (samples is not None)
    if samples is not None:
        assert arrays["token"].tolist() == TOKENS


@pytest.mark.parametrize("at_once", [1, 2, 1000])
@pytest.mark.parametrize("samples", [None, SAMPLES])
def test_parquet(tmp_path, samples, at_once, monkeypatch):
    monkeypatch.setattr(token_file, "_RESULTS_AT_ONCE", at_once)
    assert write_tokens(iter(RUN), tmp_path / "tokens.parquet", samples=samples) == 6
    columns = parquet.read_table(tmp_path / "tokens.parquet").to_pydict()
    assert columns["logprob"] == LOGPROBS and columns["hit"] == HITS
    assert columns["position"] == [0, 1, 0, 0, 1, 2]
    assert columns["document_position"] == [4, 5, 15, 26, 27, 28]
    for name in ("sample_id", "document_id", "bucket"):
        assert columns[name] == [getattr(RUN[place], name) for place in (0, 0, 1, 2, 2, 2)]
    assert columns.get("token") == (None if samples is None else TOKENS)


@pytest.mark.parametrize("name", ["tokens.npz", "tokens.parquet"])
def test_what_is_not_there_is_refused_and_leaves_no_file(tmp_path, name):
    with pytest.raises(ValueError, match=r"'x' has no log-probabilities: extract without --stop_early"):
        write_tokens([*RUN, result("x", logprobs=None, hits=None)], tmp_path / name)
    with pytest.raises(ValueError, match="'s0\u00e9' of the run is not among the samples"):
        write_tokens(RUN, tmp_path / name, samples=SAMPLES[:1])
    with pytest.raises(ValueError, match="tokens.csv is neither .parquet nor .npz"):
        write_tokens(RUN, tmp_path / "tokens.csv")
    assert list(tmp_path.iterdir()) == []


def test_without_pyarrow_npz_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"needs the package pyarrow: .*; .npz does not"):
        write_tokens(RUN, tmp_path / "tokens.parquet")
