"""What is shown of records and results: numbers and names, never paths, texts, ids or people."""

from dataclasses import dataclass, fields

import pytest

from hf_axonn_eval.bundle import anonymous as module
from hf_axonn_eval.bundle.anonymous import Anonymous, iterate_texts
from hf_axonn_eval.bundle.keys import Key
from hf_axonn_eval.data.results import SampleResult
from hf_axonn_eval.data.samples import Sample
from tests.helpers.eval_support import result


KEY = Key(bytes(32))


@pytest.fixture
def shown(someone):
    return Anonymous(KEY, ["/home/trillian/x", r"C:\Users\Marvin\x"])


@pytest.mark.parametrize(
    ("word", "left"),
    [
        ("/home/arthur/models/llama-7b", "llama-7b"),
        ("../private/runs/base/", "base"),
        ("~/secret/m", "m"),
        (r"C:\data\m", "m"),
        ("--model=/srv/private/m", "--model=m"),
        ("base=/srv/private/m", "base=m"),
        ("--sampler", "--sampler"),
        ("temperature=1,top_k=40", "temperature=1,top_k=40"),
        ("samples.jsonl", "samples.jsonl"),
        ("/home/zaphodb", "<private>"),
        ("runs-of-zaphodb", "runs-of-<private>"),
        ("Goldheart42", "<private>"),
        ("/x/trillian_run", "<private>_run"),
        ("marvin.jsonl", "<private>.jsonl"),
        ("zaphodbeeblebrox", "zaphodbeeblebrox"),
        ("/", "."),
    ],
)
def test_a_command_keeps_options_and_names(shown, word, left):
    assert shown.command([word]) == [left]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("dtype is float32 and not float16", "dtype is float32 and not float16"),
        ("read from /srv/private/a.json, line 3", "read from a.json, line 3"),
        ("(file:///srv/private/a.json)", "(a.json)"),
        ("from https://github.com/a/b and/or c, 1/2", "from https://github.com/a/b and/or c, 1/2"),
        ("by zaphodb on goldheart42.magrathea.example", "by <private> on <private>"),
    ],
)
def test_sentences_lose_paths_and_people(shown, text, left):
    assert shown.hide(text) == left


def test_a_record_keeps_numbers_known_words_and_fingerprints_and_hashes_the_rest(shown):
    record = {
        "identity": {"samples": 3, "samples_sha256": "ab" * 32, "dtype": "bfloat16", "model_fingerprint": "cd" * 32},
        "model": {"path": "/srv/private/m", "fingerprint": "a title that an owner chose"},
        "settings": {"batch_size": "auto", "protocol": {"name": "sc24", "deviations": ["a /srv/private/x b", 3]}},
        "served": {"model_fingerprint": "unknown: m as http://host/v1 serves it", "dtype": "unknown: the server's"},
        "device": {"name": "Xeon(R) @ 2.4 GHz", "threads": 2},
        "versions": {"torch": "2.13.0+cpu"},
        "tokenizer": {"path": "../private/t", "sha256": "ef" * 32, "checked": True},
        "command": ["/usr/bin/x.py", "--model", "/srv/private/m"],
        "parts": [{"command": ["/srv/private/y"], "documents_sha256": "ab" * 32}],
        "of_tomorrow": {"prompt": "the secret text", "number": 2.5, "/srv/private/key": [1, "more text"]},
    }
    told = shown.record(record)
    assert told["identity"]["samples_sha256"] == shown.samples_hash("ab" * 32) != "ab" * 32
    assert told["identity"]["dtype"] == "bfloat16" and told["identity"]["model_fingerprint"] == "cd" * 32
    assert told["model"] == {"path": "m", "fingerprint": KEY.hash("fingerprint", "a title that an owner chose")}
    assert told["settings"]["protocol"] == {"name": "sc24", "deviations": ["a x b", 3]}
    assert told["served"] == {"model_fingerprint": "unknown", "dtype": "unknown: the server's"}
    assert told["device"] == record["device"] and told["versions"] == record["versions"]
    assert told["tokenizer"] == {"path": "t", "sha256": "ef" * 32, "checked": True}
    assert told["command"] == ["x.py", "--model", "m"] and told["parts"][0]["command"] == ["y"]
    assert told["parts"][0]["documents_sha256"] == KEY.hash("documents_sha256", "ab" * 32)
    assert told["of_tomorrow"]["number"] == 2.5
    everything = "\n".join([*iterate_texts(told), *told["of_tomorrow"]])
    assert not any(word in everything for word in ("private/", "srv", "secret", "more text"))


def test_results_keep_numbers_and_lose_texts_and_token_ids(shown, monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class OfTomorrow(SampleResult):
        beams: list[int] | None = None
        excerpt: str | None = None
        best: float | None = None

    base = vars(result("Albedo:0", document_id="Albedo", generated=[7, 8], generated_text="a b", suffix_text="a c"))
    mine = OfTomorrow(
        **{
            **base,
            "membership": {"loss": -1.0},
            "near_copies": [-2, -1.5],
            "beams": [7, 9],
            "excerpt": "a c",
            "best": 0.5,
        }
    )
    assert {field.name for field in fields(OfTomorrow)} > {"beams"}
    monkeypatch.setattr(module, "SampleResult", OfTomorrow)
    told = vars(shown.result(mine))
    assert told["sample_id"] == KEY.hash("sample", "Albedo:0") and told["document_id"] == KEY.hash(
        "document", "Albedo"
    )
    for name in ("generated", "generated_text", "suffix_text", "beams", "excerpt"):
        assert told[name] is None, name
    for name in ("hits", "logprobs", "logprob", "divergence_point", "membership", "near_copies"):
        assert told[name] == vars(mine)[name], name
    assert told["best"] == 0.5 and told["rouge1"] == pytest.approx(0.5)  # computed from the texts before these go


def test_ids_in_the_clear_only_where_asked(someone):
    sample = Sample(sample_id="a:0", document_id="a", bucket=1, offset=0, prefix=(1,), suffix=(2,))
    clear = Anonymous(KEY, document_ids=True)
    assert (clear.sample_id("a:0"), clear.document_id("a")) == ("a:0", "a")
    assert clear.tokens(sample) == KEY.hash("tokens", [[1], [2]])
    assert clear.result(result("a:0")).document_id == "a:0"
