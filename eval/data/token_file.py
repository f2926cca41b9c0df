"""Tokens of a run with their log-probabilities, as Parquet or NPZ for other programs.

The numbers are those of results.jsonl, of the full distribution at temperature 1.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_axonn_eval.data.jsonl import replacing
from hf_axonn_eval.data.results import SampleResult
from hf_axonn_eval.data.samples import Sample


PARQUET, NPZ = ".parquet", ".npz"
OF_SAMPLES = ("sample_id", "document_id", "bucket", "offset", "prefix_length", "suffix_length")
_RESULTS_AT_ONCE = 1000


def write_tokens(
    results: Iterable[SampleResult], path: str | os.PathLike[str], *, samples: Sequence[Sample] | None = None
) -> int:
    """Write the suffix tokens of a run, in the order of its results.

    Parquet has a row a token with `sample_id`, `document_id`, `bucket`, `position` (in the suffix, from 0 on),
    `document_position` (in the tokens of the document, the BOS of a sample counted), `logprob` (nats, float64), `hit`
    (whether the token is the likeliest) and, with samples, `token`, its id. NPZ has arrays of the tokens, `logprob`,
    `hit` and `token`; arrays of the samples, by their names in results.jsonl; and `start`, [samples + 1]: tokens
    start[i] to start[i + 1] are those of sample i. It needs no pickle.

    Args:
        results: of one run.
        path: by its ending .parquet, which needs pyarrow, or .npz. It appears complete or not at all.
        samples: what was asked, for the ids of tokens.
    Returns:
        The number of tokens.
    Raises:
        ValueError: another ending, no pyarrow, results without log-probabilities, or other samples.
    """
    path = Path(path)
    if path.suffix not in (PARQUET, NPZ):
        raise ValueError(f"{path} is neither {PARQUET} nor {NPZ}, by the ending of its name.")
    ids = None if samples is None else {sample.sample_id: number for number, sample in enumerate(samples)}
    rows = _pair_with_ids(results, samples, ids)
    return (_write_parquet if path.suffix == PARQUET else _write_npz)(rows, path, samples is not None)


def _pair_with_ids(
    results: Iterable[SampleResult], samples: Sequence[Sample] | None, ids: Mapping[str, int] | None
) -> Iterator[tuple[SampleResult, Sequence[int] | None]]:
    """Yield each result with the ids of its suffix."""
    for result in results:
        if result.logprobs is None or result.hits is None:
            raise ValueError(f"sample {result.sample_id!r} has no log-probabilities: extract without --stop_early.")
        suffix = None
        if samples is not None and ids is not None:
            if result.sample_id not in ids:
                raise ValueError(f"sample {result.sample_id!r} of the run is not among the samples that were given.")
            suffix = samples[ids[result.sample_id]].suffix
        yield result, suffix


def _write_npz(rows: Iterable[tuple[SampleResult, Sequence[int] | None]], path: Path, with_ids: bool) -> int:
    logprobs, hits, tokens, starts = array("d"), array("b"), array("q"), array("q", [0])
    columns: dict[str, list[Any]] = {name: [] for name in OF_SAMPLES}
    for result, suffix in rows:
        logprobs.extend(result.logprobs or ())
        hits.extend(result.hits or ())
        tokens.extend(suffix or ())
        starts.append(len(logprobs))
        for name, column in columns.items():
            column.append(getattr(result, name))
    arrays: dict[str, Any] = {
        "logprob": np.array(logprobs),
        "hit": np.array(hits).astype(bool),
        "start": np.array(starts),
    }
    arrays |= {"token": np.array(tokens)} if with_ids else {}
    arrays |= {name: np.array(column) for name, column in columns.items()}
    with replacing(path) as file:
        np.savez_compressed(file, **arrays)
    return len(logprobs)


def _write_parquet(rows: Iterable[tuple[SampleResult, Sequence[int] | None]], path: Path, with_ids: bool) -> int:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f"{path} needs the package pyarrow: pip install 'hf_axonn[data]'; {NPZ} does not.") from error
    names = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    kinds = {"sample_id": names, "document_id": names, "bucket": pyarrow.int64(), "position": pyarrow.int32()}
    kinds |= {"document_position": pyarrow.int64(), "logprob": pyarrow.float64(), "hit": pyarrow.bool_()}
    kinds |= {"token": pyarrow.int64()} if with_ids else {}
    schema, count = pyarrow.schema(kinds), 0
    with replacing(path) as file, parquet.ParquetWriter(file, schema) as writer:
        columns: dict[str, list[Any]] = {name: [] for name in kinds}

        def flush() -> None:
            writer.write_table(pyarrow.table(columns, schema=schema))
            for column in columns.values():
                column.clear()

        for number, (result, suffix) in enumerate(rows, start=1):
            length = result.suffix_length
            first = result.offset + result.prefix_length
            values: dict[str, Sequence[Any]] = {
                **{name: [getattr(result, name)] * length for name in ("sample_id", "document_id", "bucket")},
                "position": range(length),
                "document_position": range(first, first + length),
                "logprob": result.logprobs or (),
                "hit": result.hits or (),
                "token": suffix or (),
            }
            for name, column in columns.items():
                column.extend(values[name])
            count += length
            if number % _RESULTS_AT_ONCE == 0:
                flush()
        flush()
    return count
