"""training_scripts/study/data/tasks.py: questions made of texts, the harness's files, and what the harness answers."""

import json
import re
from pydoc_data.topics import topics

import pytest
import yaml

from hf_axonn_eval import Sample, document_nll, extract
from hf_axonn_scripts.study.data import tasks
from tests.helpers.eval_support import topics_tokenizer, trained_llama


FEW = 10  # documents that are asked for
WINDOW = 60  # of a model with 64 positions; an ending has at most 48 tokens


def texts(count: int = 30) -> list[dict]:
    """Topics of Python's reference as documents of two kinds."""
    names = sorted(name for name in topics if 1000 < len(topics[name]) < 6000)[:count]
    return [
        {"id": f"{'even' if place % 2 else 'odd'}/{name}", "text": topics[name]} for place, name in enumerate(names)
    ]


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_question_continues_its_context_with_the_true_words():
    by_name = {document["id"]: words(document["text"]) for document in texts()}
    asked = tasks.questions(texts())
    assert len(asked) > 100
    for question in asked:
        true = question["choices"][question["answer"]]
        assert f"{question['context']} {true}" in by_name[question["id"]]
        assert len(set(question["choices"])) == tasks.CHOICES
        assert {len(choice.split()) for choice in question["choices"]} == {tasks.ENDING}
        assert tasks.ENDING <= len(question["context"].split()) <= tasks.CONTEXT
    paragraphs = [words(part) for document in texts() for part in re.split(r"\n\s*\n", document["text"])]
    short = [question["context"] for question in asked if len(question["context"].split()) < tasks.CONTEXT]
    assert short and all(any(part.startswith(context) for part in paragraphs) for context in short)


def test_wrong_choices_are_of_other_documents_of_the_same_kind_and_as_long():
    whole = {document["id"]: words(document["text"]) for document in texts()}
    lengths, differences = [], []
    for question in tasks.questions(texts()):
        true = question["choices"].pop(question["answer"])
        kind = question["id"].partition("/")[0]
        own = [text for name, text in whole.items() if name.startswith(kind) and name != question["id"]]
        for wrong in question["choices"]:
            assert any(wrong in text for text in own)
            lengths.append(len(wrong))
            differences.append(abs(len(wrong) - len(true)))
    spread = sum(abs(length - sum(lengths) / len(lengths)) for length in lengths) / len(lengths)
    assert sum(differences) / len(differences) < spread / 2  # far closer than endings drawn at random


def test_the_true_choice_is_anywhere_and_the_seed_decides():
    asked = tasks.questions(texts())
    places = [question["answer"] for question in asked]
    assert all(0.15 < places.count(place) / len(places) < 0.35 for place in range(tasks.CHOICES))
    assert tasks.questions(texts()) == asked
    assert tasks.questions(texts(), seed=1) != asked


def test_one_document_gives_wrong_choices_of_its_own():
    asked = tasks.questions([{"id": "a", "text": "\n\n".join(document["text"] for document in texts())}])
    assert len(asked) >= tasks.FEWEST_QUESTIONS
    assert all(len(set(question["choices"])) == tasks.CHOICES for question in asked)


def test_questions_are_limited_and_too_few_are_none():
    many = [{"id": name, "text": topics[name]} for name in sorted(topics)[:60]]
    assert len(tasks.questions(many)) == tasks.MOST_QUESTIONS
    assert tasks.questions([{"id": "a", "text": "Short. Nothing here is long enough."}]) == []


def test_sentences_with_the_same_end_are_asked_once():
    document = {
        "id": "a",
        "text": " ".join(["It was a day as no other in the whole of that long and very warm year."] * 40),
    }
    assert tasks.questions([document]) == []


def test_files_are_written_once_and_those_of_other_texts_go(tmp_path):
    files = tasks.write_tasks(texts(), tmp_path)
    assert sorted(file.name for file in files) == sorted(file.name for file in tmp_path.iterdir())
    assert len(files) == 4
    times = {file: file.stat().st_mtime_ns for file in files}
    assert tasks.write_tasks(texts(), tmp_path) == files
    assert {file: file.stat().st_mtime_ns for file in files} == times
    config = yaml.safe_load((tmp_path / "held_out_endings.yaml").read_text())
    data = config["dataset_kwargs"]["data_files"][config["test_split"]]
    rows = [json.loads(line) for line in (tmp_path / data).read_text().splitlines()]
    assert rows == tasks.questions(texts())
    left = tasks.write_tasks([{"id": "a", "text": "One text."}, {"id": "b", "text": "  \n"}], tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(left)
    assert [json.loads(line) for line in left[0].read_text().splitlines()] == [{"id": "a", "text": "One text."}]
    with pytest.raises(ValueError, match="no held-out text"):
        tasks.write_tasks([{"id": "a", "text": " "}], tmp_path)


def test_a_text_begins_with_bos_or_eos():
    tokenizer = topics_tokenizer()
    assert tasks.first_token(tokenizer) == tokenizer.bos_token_id

    class Bare:
        bos_token_id = None
        eos_token_id = 7

    assert tasks.first_token(Bare) == 7
    Bare.eos_token_id = None
    with pytest.raises(ValueError, match=r"neither a BOS nor an EOS.*tasks: false"):
        tasks.first_token(Bare)


def rolling_nll(model, ids: list[int], window: int) -> float:
    """Nats of all tokens but the first: in windows, of which the last one is full and scores only what is left."""
    scored = len(ids) - 1
    full = scored // window * window
    rows = [ids[start : start + window + 1] for start in range(0, full, window)]
    nll = document_nll(model, rows, batch_size=8).nll if rows else 0.0
    if scored > full:
        tail = ids[-window - 1 :] if full else ids
        nll += document_nll(model, [tail]).nll
        if full:
            nll -= document_nll(model, [tail[: len(tail) - (scored - full)]]).nll
    return nll


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not a dependency of the tests")
    folder = tmp_path_factory.mktemp("tasks")
    tasks.write_tasks(texts(FEW), folder)
    harness = tasks.Harness(folder)
    return folder, harness, harness.ask(trained_llama(), topics_tokenizer(), length=WINDOW, batch_size=8)


def test_rolling_log_likelihoods_are_those_of_document_nll(answers):
    _, _, given = answers
    tokenizer, model = topics_tokenizer(), trained_llama()
    assert given.rolling.keys() == {document["id"] for document in texts(FEW)}
    for document in texts(FEW):
        ids = [tokenizer.bos_token_id, *tokenizer.encode(document["text"], add_special_tokens=False)]
        logprob, count, size = given.rolling[document["id"]]
        assert -logprob == pytest.approx(rolling_nll(model, ids, WINDOW), rel=1e-5)
        assert size == len(document["text"].encode()) and count == len(re.split(r"\s+", document["text"]))


def test_the_harness_reports_what_its_answers_add_up_to(answers):
    from math import exp, log

    _, _, given = answers
    nats, count, size = (sum(one) for one in zip(*given.rolling.values(), strict=True))
    rolling, endings = given.reported[tasks.ROLLING], given.reported[tasks.ENDINGS]
    assert rolling["bits_per_byte"] == pytest.approx(-nats / log(2) / size)
    assert rolling["byte_perplexity"] == pytest.approx(exp(-nats / size))
    assert rolling["word_perplexity"] == pytest.approx(exp(-nats / count))
    assert endings["acc"] == pytest.approx(sum(right for _, right, _ in given.endings) / len(given.endings))
    assert endings["acc_norm"] == pytest.approx(sum(right for *_, right in given.endings) / len(given.endings))


def test_endings_are_right_where_the_true_one_is_the_likeliest(answers):
    _, _, given = answers
    tokenizer, asked = topics_tokenizer(), tasks.questions(texts(FEW))
    assert [name for name, *_ in given.endings] == [question["id"] for question in asked]
    samples = []
    for number, question in enumerate(asked[:20]):
        for place, choice in enumerate(question["choices"]):
            prefix = tokenizer.encode(question["context"], add_special_tokens=False)
            ids = tokenizer.encode(f"{question['context']} {choice}", add_special_tokens=False)
            suffix = ids[len(prefix) :]
            prefix = prefix[-(WINDOW + 1 - len(suffix)) :]
            about = {"sample_id": f"{number} {place}", "document_id": "a", "bucket": 0, "offset": 0}
            samples.append(Sample(**about, prefix=tuple(prefix), suffix=tuple(suffix)))
    results = extract(trained_llama(), None, samples, generate=False, progress=False)
    logprobs = {result.sample_id: result.logprob for result in results}
    for number, (question, (_, right, by_length)) in enumerate(zip(asked[:20], given.endings, strict=False)):
        mine = [logprobs[f"{number} {place}"] for place in range(tasks.CHOICES)]
        per_character = [logprob / len(choice) for logprob, choice in zip(mine, question["choices"], strict=True)]
        assert right == (mine.index(max(mine)) == question["answer"])
        assert by_length == (per_character.index(max(per_character)) == question["answer"])


def test_asking_again_says_the_same_and_short_windows_leave_endings_out(answers, capfd):
    _, harness, given = answers
    capfd.readouterr()
    assert harness.ask(trained_llama(), topics_tokenizer(), length=WINDOW, batch_size=16).endings == given.endings
    short = harness.ask(trained_llama(), topics_tokenizer(), length=8, batch_size=256)
    assert not short.endings and re.search(r"an ending has \d+ tokens, and windows have 8", short.left_out)
    assert set(short.reported) == {tasks.ROLLING}
    assert given.left_out is None
    printed = capfd.readouterr()
    assert "it/s" not in printed.err + printed.out  # a bar for each batch would fill the log


def test_texts_without_sentences_have_no_endings(answers, tmp_path):
    folder, _, _ = answers
    assert (folder / "held_out_endings.yaml").exists()
    tasks.write_tasks([{"id": "a", "text": "One text of a few words."}], tmp_path)
    given = tasks.Harness(tmp_path).ask(trained_llama(), topics_tokenizer(), length=WINDOW, batch_size=8)
    assert "fewer than 20" in given.left_out and list(given.rolling) == ["a"]
