"""The command `extract`: what the command line says, and what the protocol of the samples asks for."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_axonn_eval.__main__ import main
from hf_axonn_eval.data.samples import samples_digest, write_about, write_samples
from tests.helpers.eval_support import documents, samples, tiny_llama, topics_tokenizer, trained_llama


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a model, samples without a protocol, and samples of one that draws and does not decode."""
    place = tmp_path_factory.mktemp("place")
    tiny_llama().save_pretrained(place / "model")
    topics_tokenizer().save_pretrained(place / "model")
    for name in ("plain", "cooper"):
        write_samples(samples()[:4], place / f"{name}.jsonl")
    about = {"sha256": samples_digest(samples()[:4]), "protocol": {"name": "cooper100"}}
    about |= {"documents": 9, "left_out": {"too_short": 5}, "not_round_trip": 1}
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
    assert run["settings"]["protocol"]["name"] == "cooper100" and run["settings"]["sampler"]["top_k"] == 40
    assert run["settings"]["left_out"] == {"documents": 9, "too_short": 5, "not_round_trip": 1}
    assert run["settings"]["batch_size"] == "auto" and run["settings"]["batches"]["rows"] >= 4
    assert result["sampled_logprob"] == "-inf" or result["sampled_logprob"] < 0
    assert result["generated"] is None


def test_a_model_at_chance_is_warned_of_once(place, tmp_path, capsys, caplog):
    """The warning is logged, as `extract` of Python does, too, and does not stand in the table again."""
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(100)
    model.save_pretrained(tmp_path / "model")
    topics_tokenizer().save_pretrained(tmp_path / "model")
    words = ["--model", tmp_path / "model", "--samples", place / "plain.jsonl", "--output", tmp_path / "run"]
    assert main(["extract", *map(str, words)]) == 0
    printed = told_of(capsys.readouterr().out) + caplog.text
    assert printed.count("better than chance") == 1 and "better than chance" in caplog.text


def told_of(words: str) -> str:
    """What is printed, without the frame and the line ends of a table."""
    return " ".join(words.split())


def test_a_run_says_what_it_does_not_do_as_published(place, tmp_path, capsys):
    """From the documents to the report: the lines of run.json, the table, the first sentence, the last section."""
    lines = [json.dumps({"id": str(number), "bucket": 1, "text": "def while " * 30}) for number in range(3)]
    (tmp_path / "docs.jsonl").write_text("\n".join(lines))
    asked = ["--documents", tmp_path / "docs.jsonl", "--tokenizer", place / "model", "--output", tmp_path / "s.jsonl"]
    settings = ["--protocol", "goldfish", "--max_tokens", "60"]
    assert main([str(word) for word in ("samples", *asked, *settings)]) == 0
    capsys.readouterr()
    asked = ["--model", place / "model", "--samples", tmp_path / "s.jsonl", "--output", tmp_path / "run"]
    assert main(["extract", *map(str, asked)]) == 0
    expected = {
        "prefix": "here max_tokens 60",
        "documents": "here 3 documents of bucket 1",
        "dtype": "published bfloat16, here float32",
    }
    table = told_of(capsys.readouterr().out)
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    found = {line["line"]: line for line in run["settings"]["protocol"]["lines"]}
    assert {name for name, line in found.items() if line["state"] == "deviation"} == set(expected)
    assert found["EOS"]["state"] == found["metrics"]["state"] == "met" and found["training"]["state"] == "not checked"
    report = ["report", "--runs", f"mine={tmp_path / 'run'}", "--output", str(tmp_path / "report")]
    assert main(report) == 0
    text = (tmp_path / "report" / "report.md").read_text()
    opening, page = text.partition("\n| ")[0], (tmp_path / "report" / "report.html").read_text()
    for name, line in expected.items():
        for shown in (opening, page.partition("<nav>")[0]):
            assert f"{name}: published" in shown and line in shown
        assert f"{name}: published" in table
    assert "This is protocol goldfish, not as published (5 of 10 lines met, 2 not checked, 3 not met)." in opening
    assert "The protocol, line by line" in text and "## Runs" in text
    assert "protocol This is protocol goldfish, not as published" in text.partition("## Runs")[2]


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
        ("--sampler top_k=1,top_k=2", "--sampler top_k=1,top_k=2 has top_k twice."),
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


def test_samples_of_another_tokenizer_are_exit_code_2(tmp_path, capsys, caplog):
    """The model knows these documents by heart; with ids of single bytes it would read as one that knows nothing."""
    trained_llama().save_pretrained(tmp_path / "model")
    topics_tokenizer().save_pretrained(tmp_path / "model")
    letters = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    other = Tokenizer(models.BPE(vocab=letters, merges=[]))
    other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=other).save_pretrained(tmp_path / "other")
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents()))

    def run(tokenizer: str) -> int:
        asked = {"--documents": "documents.jsonl", "--tokenizer": tokenizer, "--output": f"{tokenizer}.jsonl"}
        lengths = ["--prefix_length", "12", "--suffix_length", "12"]
        assert main(["samples", *paths(asked), *lengths]) == 0
        capsys.readouterr()
        return main(["extract", *paths({"--model": "model", "--samples": f"{tokenizer}.jsonl", "--output": "run"})])

    def paths(options: dict[str, str]) -> list[str]:
        return [word for option, name in options.items() for word in (option, str(tmp_path / name))]

    assert run("other") == 2
    told = capsys.readouterr().err
    for name, tokens in (("other", 256), ("model", 800)):
        assert f"{tmp_path / name} ({tokens} tokens, sha256 " in told
    assert f"again with --tokenizer {tmp_path / 'model'}" in told and not (tmp_path / "run").exists()

    # what is left where nothing says by which tokenizer they were made
    (tmp_path / "other.jsonl.about.json").unlink()
    asked = ["extract", *paths({"--model": "model", "--samples": "other.jsonl", "--output": "unknown"})]
    assert main(asked) == 0
    assert json.loads((tmp_path / "unknown" / "run.json").read_text())["tokenizer"]["checked"] is False
    summary = json.loads((tmp_path / "unknown" / "summary.json").read_text())
    assert summary["all"]["metrics"]["exact_match"]["count"] == 0 and summary["chance"]["no_better"] is True
    assert "no better than chance" in caplog.text

    assert run("model") == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["tokenizer"]["checked"] is True
    assert main([*asked[:-1], str(tmp_path / "unknown"), "--attn_implementation", "eager"]) == 2
    assert "attn_implementation was 'sdpa' and is 'eager'" in capsys.readouterr().err


def test_a_proxy_is_asked_too_and_the_report_finds_it(place, tmp_path, capsys):
    output = tmp_path / "run"
    extracted(place, output, "plain", "--proxy", str(place / "model"), "--no_generation")
    proxy, own = (json.loads((folder / "run.json").read_text()) for folder in (output / "proxy", output))
    assert proxy["identity"]["generate"] is False and proxy["access"] == "weights"
    assert proxy["identity"]["samples_sha256"] == own["identity"]["samples_sha256"]
    extracted(place, output, "plain", "--proxy", str(place / "model"), "--no_generation")  # resumed: nothing is left
    words = ["--runs", f"m={output}", "--samples", place / "plain.jsonl", "--output", tmp_path / "report"]
    assert main(["report", *map(str, words)]) == 0
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert summary["proxy"]["m"]["40"]["gap"]["mean"] == 0 and summary["proxy"]["m"]["40"]["verbatim"]["n"] == 4
    assert "Memorized or predictable, by a proxy" in (tmp_path / "report" / "report.html").read_text()
