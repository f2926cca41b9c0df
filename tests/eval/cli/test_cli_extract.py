"""The command `extract`: what the command line says, and what the protocol of the samples asks for."""

import json

import pytest

from hf_axonn_eval.__main__ import main
from hf_axonn_eval.data.samples import samples_digest, write_about, write_samples
from tests.helpers.eval_support import samples, tiny_llama, topics_tokenizer


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a model, samples without a protocol, and samples of one that draws and does not decode."""
    place = tmp_path_factory.mktemp("place")
    tiny_llama().save_pretrained(place / "model")
    topics_tokenizer().save_pretrained(place / "model")
    for name in ("plain", "cooper"):
        write_samples(samples()[:4], place / f"{name}.jsonl")
    about = {"sha256": samples_digest(samples()[:4]), "protocol": {"name": "cooper100"}}
    asked = {"generate": False, "sampler": {"temperature": 1.0, "top_k": 40, "top_p": None}}
    write_about(place / "cooper.jsonl", {**about, "extract": asked})
    return place


def extracted(place, output, name: str, *words: str) -> tuple[dict, dict]:
    """run.json, and the first result."""
    asked = ["--model", place / "model", "--samples", place / f"{name}.jsonl", "--output", output]
    assert main(["extract", *map(str, asked), *words]) == 0
    lines = (output / "results.jsonl").read_text().splitlines()
    assert len(lines) == 4
    return json.loads((output / "run.json").read_text()), json.loads(lines[0])


def test_the_protocol_of_the_samples_is_followed_and_recorded(place, tmp_path):
    run, result = extracted(place, tmp_path / "run", "cooper")
    assert run["identity"]["sampler"] == "temperature 1, top-k 40" and run["identity"]["generate"] is False
    assert run["settings"]["protocol"] == {"name": "cooper100"} and run["settings"]["sampler"]["top_k"] == 40
    assert run["settings"]["batch_size"] == "auto" and run["settings"]["batches"]["rows"] >= 4
    assert result["sampled_logprob"] == "-inf" or result["sampled_logprob"] < 0
    assert result["generated"] is None


def test_the_command_line_has_the_last_word(place, tmp_path):
    run, result = extracted(place, tmp_path / "run", "cooper", "--generation", "--sampler", "none", "--membership")
    assert run["identity"]["sampler"] is None and run["identity"]["generate"] is run["identity"]["membership"] is True
    assert result["sampled_logprob"] is None and result["rougeL"] is not None
    assert set(result["membership"]) == {"loss", "zlib", "min_k", "min_k_plus_plus"}
    run, result = extracted(place, tmp_path / "early", "cooper", "--stop_early", "--batch_size", "3")
    assert run["identity"]["stop_early"] is True and run["identity"]["sampler"] is None
    assert run["identity"]["generate"] is False
    assert run["settings"]["batches"]["rows"] == 3 and result["logprob"] is None
    run, result = extracted(place, tmp_path / "rest", "plain", "--stop_early")
    assert run["identity"]["stop_early"] is run["identity"]["generate"] is True
    assert result["logprobs"] is None and result["rougeL"] is not None
    run, _ = extracted(place, tmp_path / "plain", "plain", "--sampler", "temperature=0.5,top_p=0.9")
    assert run["identity"]["sampler"] == "temperature 0.5, top-p 0.9" and run["identity"]["generate"] is True


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--sampler top_k", "--sampler top_k is not like"),
        ("--sampler heat=1", "--sampler heat=1 is not like"),
        ("--sampler temperature=0", "temperature is 0.0"),
        ("--generation --no_generation", "--generation does not go with"),
        ("--stop_early --sampler top_k=2", "does not go with sampler"),
        ("--stop_early --membership", "does not go with membership"),
    ],
)
def test_what_does_not_fit_together_is_exit_code_2(place, tmp_path, capsys, words, message):
    asked = ["--model", place / "model", "--samples", place / "plain.jsonl", "--output", tmp_path / "run"]
    assert main(["extract", *map(str, asked), *words.split()]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
