"""One pass over a row scores all samples that are its beginning, and says what each alone would."""

import json
import math
import random

import pytest
import torch
from transformers import LlamaConfig

from hf_axonn_eval import Sample, Sampler, Sampling, build_samples, extract, read_run
from hf_axonn_eval.extraction import shared_rows
from hf_axonn_eval.extraction.shared_rows import followers, may_share, share_rows
from tests.helpers.eval_families import family, fed_shapes
from tests.helpers.eval_support import documents, tiny_llama, topics_tokenizer, trained_llama


GRID = Sampling(prefix_length=[4, 8, 12, 20], suffix_length=12, offset=[0, 3], max_documents=3)


def asked(sampling: Sampling = GRID) -> list[Sample]:
    return build_samples(documents(), tokenizer=topics_tokenizer(), sampling=sampling)


def fields(result) -> dict:
    """Everything of a result, numbers apart, and numbers."""
    return {name: value for name, value in vars(result).items() if value is not None}


def assert_close(one, other, within: float = 1e-10) -> None:
    first, second = fields(one), fields(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        numbers = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else [value]
        against = second[name]
        against = (
            against
            if isinstance(against, list)
            else list(against.values())
            if isinstance(against, dict)
            else [against]
        )
        for left, right in zip(numbers, against, strict=True):
            if isinstance(left, float):
                assert left == right or math.isclose(left, right, rel_tol=within, abs_tol=within), (name, left, right)
            else:
                assert left == right, name


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": Sampler(temperature=0.8, top_k=20), "membership": True, "guesses": True},
        {"generate": False},
        {"stop_early": True},
        {"batch_size": 1},
    ],
)
def test_results_are_those_of_each_sample_alone(monkeypatch, options):
    model, some = trained_llama().double(), asked()
    random.Random(0).shuffle(some)  # of several documents at once, and not the longest first
    some.sort(key=lambda sample: sample.document_id)
    options = {"batch_size": 3, "progress": False} | options
    shared = extract(model, topics_tokenizer(), some, **options)
    monkeypatch.setattr("hf_axonn_eval.extraction.runner.may_share", lambda model: False)
    monkeypatch.setattr("hf_axonn_eval.extraction.scoring.may_share", lambda model: False)
    for one, other in zip(shared, extract(model, topics_tokenizer(), some, **options), strict=True):
        assert_close(one, other)
    assert any(one.exact_match for one in shared) and not all(one.exact_match for one in shared)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mamba"])
def test_other_families_share_too(monkeypatch, name):
    model = family(name, torch.float32 if name == "gemma2" else torch.float64)
    vocabulary = model.config.vocab_size
    ids = torch.randint(vocabulary, (2, 40), generator=torch.Generator().manual_seed(0)).tolist()
    some = build_samples(
        [{"id": str(place), "bucket": 1, "input_ids": row} for place, row in enumerate(ids)],
        sampling=Sampling(prefix_length=[5, 9, 20], suffix_length=[6, 10]),
    )
    shared = extract(model, None, some, batch_size=4, progress=False)
    monkeypatch.setattr("hf_axonn_eval.extraction.runner.may_share", lambda model: False)
    monkeypatch.setattr("hf_axonn_eval.extraction.scoring.may_share", lambda model: False)
    for one, other in zip(shared, extract(model, None, some, batch_size=4, progress=False), strict=True):
        assert_close(one, other, 1e-4 if name == "gemma2" else 1e-10)


def test_fewer_tokens_are_read(tmp_path):
    model, some = tiny_llama(), asked()
    fed = fed_shapes(model)
    options = {"generate": False, "progress": False, "batch_size": 2}
    extract(model, None, some, output=tmp_path, model_record={"fingerprint": "tiny"}, **options)
    read = sum(rows * tokens for rows, tokens in fed)
    alone = sum(len(sample.prefix) + len(sample.suffix) - 1 for sample in some)
    rows = {(sample.document_id, sample.offset) for sample in some}
    assert len(some) == 4 * len(rows) == 48
    assert read == 31 * len(rows) == 372 and alone == 12 * (15 + 19 + 23 + 31) == 1056
    plan = json.loads((tmp_path / "run.json").read_text())["settings"]["batches"]
    assert (plan["tokens"], plan["tokens_alone"]) == (read, alone)


def test_a_run_that_was_stopped_within_a_row_goes_on(tmp_path):
    model, some = trained_llama(), asked()
    options = {"progress": False, "batch_size": 2, "model_record": {"fingerprint": "tiny"}}
    extract(model, topics_tokenizer(), some, output=tmp_path / "whole", **options)
    whole = {one.sample_id: one for one in read_run(tmp_path / "whole")[1]}
    extract(model, topics_tokenizer(), some, output=tmp_path / "run", **options)
    lines = (tmp_path / "run" / "results.jsonl").read_text().splitlines(keepends=True)
    # the longest of a row is done, and others of it are not
    kept = [line for place, line in enumerate(lines) if place % 4 == 0]
    (tmp_path / "run" / "results.jsonl").write_text("".join(kept))
    again = extract(model, topics_tokenizer(), some, output=tmp_path / "run", **options)
    for one in again:
        assert_close(one, whole[one.sample_id], 1e-4)


def sample(name: str, prefix, suffix, *, document="d", offset=0) -> Sample:
    return Sample(
        sample_id=name, document_id=document, bucket=0, offset=offset, prefix=tuple(prefix), suffix=tuple(suffix)
    )


def test_rows_of_samples():
    some = [
        sample("short", [1, 2], [3]),
        sample("long", [1, 2, 3], [4, 5]),
        sample("another text", [1, 2], [9]),
        sample("further on", [1, 2], [3], offset=1),
        sample("another document", [1, 2], [3], document="e"),
        sample("same tokens", [1], [2, 3, 4, 5]),
    ]
    assert share_rows(some) == [[1, 5, 0], [2], [3], [4]]
    assert followers(some) == {1: [0]}, "the last one comes after another document"
    assert followers(some[:3]) == {1: [0]} and followers([]) == {} and followers(some[:1]) == {}
    assert followers([*some[3:5], *some[:2]]) == {3: [2]}


@pytest.mark.parametrize(
    ("rope", "shares"),
    [
        (None, True),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, True),
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, False),
        ({"full_attention": {"rope_type": "longrope"}, "sliding_attention": {"rope_type": "default"}}, False),
    ],
)
def test_rows_whose_length_turns_their_places_are_not_shared(rope, shares):
    class Model:
        config = LlamaConfig()

    Model.config.rope_parameters = rope
    assert may_share(Model()) is shares
    assert shared_rows._rope_kinds({"type": "dynamic"}) == {"dynamic"}
