"""Samples as tasks of other tools: only those of whose texts a tool makes the same ids, and none lost in silence."""

import json

import pytest
import yaml
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_axonn_eval import Sample, build_samples, extract
from hf_axonn_eval.__main__ import main
from hf_axonn_eval.data.samples import samples_digest, write_about, write_samples
from hf_axonn_eval.data.tokenizer_identity import tokenizer_identity
from hf_axonn_eval.data.windows import Sampling
from hf_axonn_eval.export.lm_eval import export_lm_eval
from hf_axonn_eval.export.texts import Tally, as_texts
from tests.helpers.eval_support import documents, samples, topics_tokenizer, trained_llama


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tokenizer, samples that begin with BOS and that do not, and one that no text leads to."""
    place = tmp_path_factory.mktemp("place")
    topics_tokenizer().save_pretrained(place / "tokenizer")
    write_samples([*samples(), in_letters()], place / "plain.jsonl")
    write_samples(with_bos(), place / "bos.jsonl")
    return place


def with_bos() -> list[Sample]:
    sampling = Sampling(kind="offsets", prefix_length=(12,), suffix_length=(12,), add_special_tokens=True)
    return build_samples(documents(), tokenizer=topics_tokenizer(), sampling=sampling)


def in_letters() -> Sample:
    """A word in letters, which the tokenizer would write in one piece."""
    ids = topics_tokenizer().convert_tokens_to_ids(list("the"))
    assert topics_tokenizer().encode("the", add_special_tokens=False) != ids
    return Sample(sample_id="cut", document_id="cut", bucket=40, offset=0, prefix=tuple(ids[:2]), suffix=(ids[2],))


def exported(place, output, samples_name: str, form: str, name: str = "topics", code: int = 0) -> dict:
    asked = ["--samples", place / f"{samples_name}.jsonl", "--tokenizer", place / "tokenizer", "--output", output]
    assert main(["export", *map(str, asked), "--format", form, "--name", name]) == code
    return json.loads((output / "export.json").read_text()) if code == 0 else {}


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def harness_ids(context: str, continuation: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """As lm-evaluation-harness cuts a pair, with add_bos_token=False."""
    stripped = context.rstrip()
    whole = topics_tokenizer().encode(context + continuation, add_special_tokens=False)
    shown = topics_tokenizer().encode(stripped, add_special_tokens=False)
    return tuple(shown), tuple(whole[len(shown) :])


@pytest.mark.parametrize(("name", "asked"), [("plain", samples), ("bos", with_bos)])
def test_harness_tasks_ask_for_the_ids_of_the_samples(place, tmp_path, name, asked):
    record = exported(place, tmp_path / "out", name, "lm-eval")
    by_id = {sample.sample_id: sample for sample in asked()}
    seen = 0
    for task in record["tasks"]:
        config = yaml.safe_load((tmp_path / "out" / f"{task}.yaml").read_text())
        assert config["task"] == task and config["tag"] == "topics" and config["output_type"] == "loglikelihood"
        data = config["dataset_kwargs"]["data_files"][config["test_split"]]
        for line in lines(tmp_path / "out" / data):
            sample = by_id[line["sample_id"]]
            assert task == f"topics_bucket_{sample.bucket}"
            pair = (line[config["doc_to_text"]], line[config["doc_to_target"]])
            assert harness_ids(*pair) == (sample.prefix, sample.suffix)
            seen += 1
    total = record["exported"] + sum(record["left_out"].values())
    assert seen == record["exported"] >= 8 and total == record["samples"] == len(by_id) + (name == "plain")
    if name == "plain":
        assert record["left_out"]["other_ids"] >= 1
        assert not any(
            line["sample_id"] == "cut"
            for task in record["tasks"]
            for line in lines(tmp_path / "out" / f"{task}.jsonl")
        )
    for sample in by_id.values():  # and no more is left out than must be
        text = topics_tokenizer().decode([*sample.prefix]), topics_tokenizer().decode([*sample.suffix])
        if harness_ids(*text) == (sample.prefix, sample.suffix):
            assert any(
                line["sample_id"] == sample.sample_id
                for task in record["tasks"]
                for line in lines(tmp_path / "out" / f"{task}.jsonl")
            )


def test_open_unlearning_scores_the_suffix_and_leaves_the_end_of_text_out(place, tmp_path):
    record = exported(place, tmp_path / "out", "bos", "open-unlearning")
    by_id = {sample.sample_id: sample for sample in with_bos()}
    tokenizer = topics_tokenizer()
    for task in record["tasks"]:
        dataset = yaml.safe_load((tmp_path / "out/configs/data/datasets" / f"{task}.yaml").read_text())[task]
        options = dataset["args"]
        assert dataset["handler"] == "CompletionDataset" and options["insert_space"] is False
        for line in lines(tmp_path / "out" / options["hf_args"]["data_files"]):
            prefix, text = line[options["prefix_key"]], line[options["text_key"]]
            full, shown = tokenizer(prefix + text)["input_ids"], tokenizer(prefix)["input_ids"]
            sample = by_id[line["sample_id"]]
            scored = full[: len(shown) + options["max_length"]][len(shown) :]
            assert tuple(shown) == sample.prefix and tuple(scored[:-1]) == sample.suffix
            assert scored[-1] == tokenizer.eos_token_id
        evaluation = (tmp_path / "out/configs/eval" / f"{task}.yaml").read_text()
        assert evaluation.startswith(f"# @package eval.{task}\n")
        metrics = yaml.safe_load(evaluation)["defaults"][0][f"{task}_metrics"]
        for metric in metrics:
            content = (tmp_path / "out/configs/eval" / f"{task}_metrics" / f"{metric}.yaml").read_text()
            assert content.startswith(f"# @package eval.{task}.metrics.{metric}\n")
            assert yaml.safe_load(content)["defaults"][0] == {"../../data/datasets@datasets": task}
    assert record["exported"] >= 8 and sum(record["left_out"].values()) == 12 - record["exported"]


def test_samples_without_bos_are_not_for_a_tool_that_adds_it(place, tmp_path, capsys):
    exported(place, tmp_path / "out", "plain", "open-unlearning", code=2)
    assert "no sample can be exported (0 not_text, 13 other_ids)" in capsys.readouterr().err
    assert not list((tmp_path / "out").rglob("*.jsonl"))


def test_another_tokenizer_and_names_of_nothing(place, tmp_path, capsys):
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    write_samples(samples(), tmp_path / "known.jsonl")
    write_about(
        tmp_path / "known.jsonl",
        {"sha256": samples_digest(samples()), "tokenizer": tokenizer_identity(other), "documents": 1},
    )
    command = ["export", "--samples", str(tmp_path / "known.jsonl"), "--tokenizer", str(place / "tokenizer")]
    assert main([*command, "--format", "lm-eval", "--output", str(tmp_path / "out")]) == 2
    assert "another tokenizer" in capsys.readouterr().err
    command[2] = str(place / "plain.jsonl")
    assert main([*command, "--format", "lm-eval", "--output", str(tmp_path / "out"), "--name", "***"]) == 2
    assert "--name needs letters" in capsys.readouterr().err


def test_a_cut_within_a_character_is_no_text():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    bytewise.pre_tokenizer, bytewise.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise)
    ids = tokenizer.encode("a\u4e2db")
    assert len(ids) == 5

    def cut(at: int) -> Sample:
        return Sample(
            sample_id=str(at), document_id="a", bucket=0, offset=0, prefix=tuple(ids[:at]), suffix=tuple(ids[at:])
        )

    tally = Tally()

    def tokenize(prefix: str, suffix: str) -> tuple[list[int], list[int]]:
        return tokenizer.encode(prefix), tokenizer.encode(suffix)

    given = list(as_texts(map(cut, (1, 2, 3, 4)), tokenizer, begin=(), tokenize=tokenize, tally=tally))
    assert [(texts.prefix, texts.suffix) for texts in given] == [("a", "\u4e2db"), ("a\u4e2d", "b")]
    assert tally == Tally(exported=2, left_out={"not_text": 2, "other_ids": 0})


def test_spaces_at_the_end_of_a_prefix_go_with_the_suffix(tmp_path):
    """The harness moves them, and then they are tokenized with what follows, or the context ends elsewhere."""
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, " ": 2, "?": 3, "bb": 4}, unk_token="?"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Split(Regex("bb|."), "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert tokenizer.encode("a b") == [0, 2, 1] and tokenizer.decode([0, 2, 1]) == "a b"

    def cut(name: str, *ids: int, at: int) -> Sample:
        return Sample(sample_id=name, document_id="a", bucket=0, offset=0, prefix=ids[:at], suffix=ids[at:])

    tally = Tally()
    cuts = [cut("after", 0, 2, 1, at=2), cut("before", 0, 2, 1, at=1), cut("two for one", 0, 2, 1, 1, at=1)]
    assert export_lm_eval(cuts, tokenizer, tmp_path, name="t", tally=tally) == ["t_bucket_0"]
    assert [line["sample_id"] for line in lines(tmp_path / "t_bucket_0.jsonl")] == ["before"]
    assert tally.left_out == {"not_text": 0, "other_ids": 2}


def test_texts_are_not_templates(place, tmp_path):
    tokenizer = topics_tokenizer()
    ids = tokenizer.encode("{{ 7 * 7 }} and {% raw %} are words, not code", add_special_tokens=False)
    braces = Sample(sample_id="b", document_id="b", bucket=3, offset=0, prefix=tuple(ids[:-4]), suffix=tuple(ids[-4:]))
    write_samples([braces], tmp_path / "braces.jsonl")
    (tmp_path / "tokenizer").symlink_to(place / "tokenizer")
    exported(tmp_path, tmp_path / "out", "braces", "lm-eval")
    config = yaml.safe_load((tmp_path / "out" / "topics_bucket_3.yaml").read_text())
    (line,) = lines(tmp_path / "out" / "topics_bucket_3.jsonl")
    assert config["doc_to_text"] in line and config["doc_to_target"] in line  # columns, which are not rendered
    assert line["prefix"] + line["suffix"] == tokenizer.decode(ids)


def test_the_harness_agrees(place, tmp_path, monkeypatch):
    lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not a dependency of the tests")
    from lm_eval.tasks import TaskManager

    exported(place, tmp_path / "out", "plain", "lm-eval")
    trained_llama().save_pretrained(tmp_path / "model")
    topics_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path / "out")
    arguments = f"pretrained={tmp_path / 'model'},dtype=float32,add_bos_token=False"
    manager = TaskManager(include_path=".", include_defaults=False)
    given = lm_eval.simple_evaluate(
        model="hf",
        model_args=arguments,
        tasks=["topics"],
        task_manager=manager,
        device="cpu",
        bootstrap_iters=0,
        log_samples=True,
    )
    here = {
        result.sample_id: result
        for result in extract(trained_llama(), topics_tokenizer(), samples(), progress=False, generate=False)
    }
    compared = 0
    for docs in given["samples"].values():
        for doc in docs:
            ((logprob, greedy),) = doc["filtered_resps"]
            result = here[doc["doc"]["sample_id"]]
            assert greedy == result.exact_match
            assert float(logprob) == pytest.approx(result.logprob, abs=1e-3)
            compared += 1
    assert compared >= 8
