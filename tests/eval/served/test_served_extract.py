"""A model behind a server gives the results that the same model gives here."""

import json
import math

import pytest

from hf_axonn_eval import Sample, extract
from hf_axonn_eval.__main__ import main
from hf_axonn_eval.data.results import read_run
from hf_axonn_eval.data.samples import samples_digest, write_about, write_samples
from hf_axonn_eval.extraction.near_copies import NearCopySearch
from hf_axonn_eval.extraction.recite import Recital
from hf_axonn_eval.metrics.discoverability import Sampler
from hf_axonn_eval.served.completions import CompletionsBackend
from hf_axonn_eval.served.extract import extract_served
from hf_axonn_eval.served.transport import JsonClient
from tests.helpers.eval_support import samples, tiny_llama, topics_tokenizer
from tests.helpers.vllm_server import MODEL


ODD = (
    Sample(sample_id="short", document_id="short", bucket=0, offset=0, prefix=(5,), suffix=(9,)),
    Sample(sample_id="long", document_id="long", bucket=0, offset=0, prefix=tuple(range(9, 30)), suffix=(7,) * 30),
)


def asked(served, output, some=(), *, first_wait=0.01, **options):
    backend = CompletionsBackend(JsonClient(served.url, first_wait=first_wait), MODEL)
    return extract_served(
        backend, topics_tokenizer(), some or samples(), output=output, **{"progress": False, "requests": 3, **options}
    )


def close(one, other, within: float = 2e-5) -> bool:
    return all(math.isclose(mine, yours, abs_tol=within) for mine, yours in zip(one, other, strict=True))


def test_results_are_those_of_the_model_itself(served, trained, tmp_path):
    some = [*samples(), *ODD]
    sampler = Sampler(temperature=0.7, top_k=8, top_p=0.9)
    options = {"sampler": sampler, "membership": True, "guesses": True}
    here = extract(trained, topics_tokenizer(), some, progress=False, **options)
    there = asked(served, tmp_path / "run", some, **options)
    assert [result.sample_id for result in there] == [sample.sample_id for sample in some]
    for mine, yours in zip(here, there, strict=True):
        for name in ("exact_match", "token_accuracy", "divergence_point", "hits", "generated", "generated_text"):
            assert getattr(mine, name) == getattr(yours, name), name
        for name in ("rougeL", "edit_distance", "rougeL_to_eos", "longest_run", "extraction_strength", "suffix_text"):
            assert mine.metric(name) == yours.metric(name), name
        assert close(mine.logprobs, yours.logprobs)
        assert close([mine.metric("guess_nll")], [yours.metric("guess_nll")]) and yours.metric("guess_nll") > 0
        assert close([mine.margin, mine.logprob], [yours.margin, yours.logprob], 1e-4)
        if math.isinf(mine.sampled_logprob):
            assert yours.sampled_logprob == mine.sampled_logprob
        else:
            assert close([mine.sampled_logprob], [yours.sampled_logprob], 1e-4)
        assert set(yours.membership) == set(mine.membership) - {"min_k_plus_plus"}
        assert all(close([mine.membership[name]], [yours.membership[name]], 1e-4) for name in yours.membership)
    assert any(math.isinf(result.sampled_logprob) for result in there)
    assert any(result.exact_match for result in there) and not all(result.exact_match for result in there)


def test_token_ids_are_sent_and_extracted_samples_cost_one_request(served, tmp_path):
    results = asked(served, tmp_path / "run")
    missed = sum(not result.exact_match and result.divergence_point < len(result.hits) - 1 for result in results)
    assert 0 < missed < len(results)
    assert len(served.requests) == 1 + len(results) + missed
    prompts = [body["prompt"] for body in served.requests]
    assert sorted([*sample.prefix, *sample.suffix] for sample in samples()) == sorted(
        body["prompt"] for body in served.requests[1:] if "prompt_logprobs" in body
    )
    assert all(isinstance(token, int) for prompt in prompts for token in prompt)
    assert all(body["repetition_penalty"] == 1 and body["ignore_eos"] for body in served.requests)
    assert 1 < served.most_at_once <= 3
    without = asked(served, tmp_path / "scored", generate=False)
    assert all(result.generated is None and result.logprobs for result in without)


@pytest.mark.parametrize("option", [{"stop_early": True}, {"near_copies": NearCopySearch()}])
def test_options_of_a_pass_are_refused_before_the_server_is_asked(served, tmp_path, option):
    with pytest.raises(ValueError, match=f"{next(iter(option))} does not go with a server"):
        asked(served, tmp_path / "run", **option)
    assert served.requests == [] and not (tmp_path / "run").exists()


def test_the_record_says_what_is_known_of_a_server(served, tmp_path):
    asked(served, tmp_path / "run")
    record, _ = read_run(tmp_path / "run")
    assert record["identity"]["model_fingerprint"].startswith(f"unknown: {MODEL} as {served.url} serves it")
    assert record["identity"]["served"] == {
        "base_url": served.url,
        "name": MODEL,
        "root": "org/tiny",
        "server": "0.11.0",
    }
    assert record["versions"]["server"] == "0.11.0" and record["tokenizer"]["server_checked"] is True
    assert record["settings"]["alternatives"] == 2 and record["settings"]["near_tie_below"] == 0.5
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["chance"]["no_better"] is False and summary["sampled_unknown"] == 0


def test_a_stopped_run_goes_on_and_another_model_is_refused(served, trained, tmp_path):
    def fails(number, body, answer):
        return b"<html>" if number > 8 else answer

    served.fault = fails
    with pytest.raises(ValueError, match="not JSON: <html>"):
        asked(served, tmp_path / "run", generate=False, requests=1, first_wait=0)
    kept = (tmp_path / "run" / "results.jsonl").read_bytes()
    assert 0 < kept.count(b"\n") < len(samples())
    served.fault = None
    before = len(served.requests)
    results = asked(served, tmp_path / "run", generate=False)
    assert len(results) == len(samples())
    assert (tmp_path / "run" / "results.jsonl").read_bytes().startswith(kept)
    assert len(served.requests) - before == 2 + len(samples()) - kept.count(b"\n")

    lines = (tmp_path / "run" / "results.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "results.jsonl").write_text("".join(lines[:-1]))
    served.model = tiny_llama(seed=3)
    with pytest.raises(ValueError, match="it serves another model now"):
        asked(served, tmp_path / "run", generate=False)
    served.model, served.version = trained, "0.12.0"
    with pytest.raises(ValueError, match=r"served was .*0\.11\.0.* and is .*0\.12\.0"):
        asked(served, tmp_path / "run", generate=False)


def test_the_command_asks_a_server_as_the_protocol_says(served, tmp_path, monkeypatch, capsys):
    served.key = "s3cret"
    monkeypatch.setenv("HF_AXONN_EVAL_SERVER_KEY", "s3cret")
    topics_tokenizer().save_pretrained(tmp_path / "tokenizer")
    write_samples(samples(), tmp_path / "samples.jsonl")
    command = ["extract", "--server", served.url, "--model", MODEL, "--samples", str(tmp_path / "samples.jsonl")]
    command += ["--output", str(tmp_path / "run")]
    assert main([*command, "--tokenizer", str(tmp_path / "tokenizer"), "--sampler", "top_k=5"]) == 0
    record, results = read_run(tmp_path / "run")
    assert sum(result.exact_match for result in results) == 6
    assert record["identity"]["sampler"] == "temperature 1, top-k 5" and record["settings"]["alternatives"] == 10
    assert "s3cret" not in (tmp_path / "run" / "run.json").read_text()
    assert main(["report", "--runs", f"there={tmp_path / 'run'}", "--output", str(tmp_path / "report")]) == 0
    page = (tmp_path / "report" / "report.html").read_text()
    assert "a server does not show its weights" in page and f"{MODEL} at {served.url}" in page
    capsys.readouterr()
    about = {"sha256": samples_digest(samples()), "documents": 12}
    write_about(
        tmp_path / "samples.jsonl", {**about, "protocol": {"name": "carlini50"}, "extract": {"generate": False}}
    )
    assert main([*command[:-1], str(tmp_path / "of_protocol"), "--tokenizer", str(tmp_path / "tokenizer")]) == 0
    record, _ = read_run(tmp_path / "of_protocol")
    assert record["identity"]["generate"] is False
    states = {line["line"]: line["state"] for line in record["settings"]["protocol"]["lines"]}
    assert states and "open" not in states.values()
    capsys.readouterr()
    for words, message in (
        ([], "--server needs --tokenizer"),
        (["--tokenizer", "t", "--stop_early"], "--server does not go with --stop_early"),
        (["--tokenizer", "t", "--dtype", "float32"], "--server does not go with --dtype"),
    ):
        assert main([*command, *words]) == 2
        assert message in capsys.readouterr().err


def test_a_server_recites_as_the_model_does(served, trained, tmp_path):
    recital = Recital(step=5, context=20)
    here = extract(trained, topics_tokenizer(), samples()[:4], recite=recital, progress=False)
    there = list(asked(served, tmp_path / "run", samples()[:4], recite=recital))
    assert [one.generated for one in there] == [one.generated for one in here]
    assert all("prompt_logprobs" not in body for body in served.requests), "texts alone are needed"
    assert len(served.requests) == 4 * 3 and max(len(body["prompt"]) for body in served.requests) == 15
    record = read_run(tmp_path / "run")[0]
    assert record["access"] == "text" and record["settings"]["decoding"].startswith("steps of 5 tokens")
    # what a stopped run has written is not asked for again
    (tmp_path / "run" / "results.jsonl").unlink()
    again = asked(served, tmp_path / "run", samples()[:4], recite=recital)
    assert list(again) == there and len(served.requests) == 4 * 3
    with pytest.raises(ValueError, match="4 beams are not possible"):
        asked(served, tmp_path / "beams", recite=Recital(beams=4))
    with pytest.raises(ValueError, match="the server takes 64"):
        long = [Sample(sample_id="a", document_id="a", bucket=0, offset=0, prefix=(5,) * 9, suffix=(6,) * 200)]
        asked(served, tmp_path / "long", long, recite=Recital())
