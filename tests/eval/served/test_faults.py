"""What a server may answer instead: later, less, something else, or nothing."""

import socket

import pytest

from hf_axonn_eval.metrics.discoverability import Sampler
from hf_axonn_eval.served import transport
from hf_axonn_eval.served.completions import CompletionsBackend
from hf_axonn_eval.served.transport import JsonClient, Refused
from tests.eval.served.test_served_extract import asked
from tests.helpers.eval_support import samples, topics_tokenizer
from tests.helpers.vllm_server import MODEL


def backend_of(served, **options) -> CompletionsBackend:
    return CompletionsBackend(JsonClient(served.url, **{"first_wait": 0.0, **options}), MODEL)


def changed(choice: dict, **changes) -> dict:
    return {"choices": [{**choice["choices"][0], **changes}]}


@pytest.mark.parametrize("first", [500, 503, 429, None, b"<html>Bad gateway</html>", b'{"choices": [{"ind'])
def test_what_passes_is_tried_again(served, first):
    served.fault = lambda number, _, answer: first if number in (1, 2) else answer
    places = backend_of(served).score([5, 9, 7], last=2, alternatives=3)
    assert len(places) == 2 and len(served.requests) == 3


def test_a_server_that_does_not_come_back_is_given_up(served, monkeypatch):
    monkeypatch.setattr(transport, "ATTEMPTS", 4)
    served.fault = lambda *_: 502
    backend = backend_of(served)
    with pytest.raises(ValueError, match=r"gave no answer in 4 attempts; the last one ended with 502: busy"):
        backend.generate([5], 2)
    assert len(served.requests) == 4
    backend.stop()
    with pytest.raises(ValueError, match="in 1 attempts"):
        backend.generate([5], 2)


def test_a_server_that_is_not_there_or_is_slow(served, monkeypatch):
    monkeypatch.setattr(transport, "ATTEMPTS", 2)
    with pytest.raises(ValueError, match="refused"):
        CompletionsBackend(JsonClient("http://127.0.0.1:9/v1", first_wait=0.0), MODEL)

    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ValueError, match="timed out"):
        CompletionsBackend(JsonClient(f"http://127.0.0.1:{silent.getsockname()[1]}/v1", timeout=0.1), MODEL)

    backend = backend_of(served)
    opener = backend._client._opener
    tried = []

    def slow_once(request, timeout):
        tried.append(timeout)
        if len(tried) == 1:
            raise TimeoutError("timed out")
        return type(opener).open(opener, request, timeout=timeout)

    monkeypatch.setattr(opener, "open", slow_once)
    assert len(backend.generate([5], 2)) == 2 and len(tried) == 2


def test_waits_double_and_a_server_may_name_its_own():
    waits = [transport._wait(attempt, 1.0, None) for attempt in range(1, 8)]
    for wait, expected in zip(waits, (1, 2, 4, 8, 16, 32, 60), strict=True):
        assert 0.75 * expected <= wait <= 1.25 * expected
    assert transport._wait(1, 1.0, "7") == 7 and transport._wait(1, 1.0, "9999") == transport.LONGEST_WAIT


def test_a_refusal_is_not_tried_again_and_keeps_its_words(served):
    with pytest.raises(Refused, match="answers 400: Token id 799999 is out of vocabulary") as caught:
        backend_of(served).score([5, 799999], last=1, alternatives=2)
    assert caught.value.status == 400 and len(served.requests) == 1
    served.key = "right"
    with pytest.raises(Refused, match="answers 401: Unauthorized"):
        backend_of(served, key="wrong").generate([5], 1)
    with pytest.raises(ValueError, match=r"serves no model 'other', but 'tiny'"):
        CompletionsBackend(JsonClient(served.url), "other")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("localhost:8000", "must be like http://localhost:8000/v1"),
        ("file:///etc/passwd", "must be like http"),
        ("http://me:pw@localhost/v1", "holds a user or a password"),
    ],
)
def test_addresses(url, message):
    with pytest.raises(ValueError, match=message):
        JsonClient(url)


def test_too_few_log_probabilities_are_refused_with_both_numbers(served, tmp_path):
    with pytest.raises(ValueError, match=r"^41 log-prob.*gives at most 20: start vLLM with --max-logprobs 80"):
        asked(served, tmp_path / "run", sampler=Sampler(top_k=40))
    served.max_logprobs = 41  # enough, if not better
    asked(served, tmp_path / "run", some=samples()[:1], sampler=Sampler(top_k=40), generate=False)
    assert {body["prompt_logprobs"] for body in served.requests} == {80, 41}
    for sampler in (Sampler(top_p=0.9), Sampler(temperature=0.5)):
        with pytest.raises(ValueError, match="needs the probability of every token of the vocabulary"):
            asked(served, tmp_path / "other", sampler=sampler)
    served.max_logprobs = 1
    with pytest.raises(ValueError, match=r"^2 log-probabilities .* gives at most 1"):
        asked(served, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def fewer(answer: dict) -> dict:
    places = answer["choices"][0]["prompt_logprobs"]
    return changed(answer, prompt_logprobs=[None] + [dict(list(place.items())[:1]) for place in places[1:]])


def of_others(answer: dict) -> dict:
    places = answer["choices"][0]["prompt_logprobs"]
    return changed(answer, prompt_logprobs=[None, *({"790": next(iter(place.values()))} for place in places[1:])])


def above_one(answer: dict) -> dict:
    places = answer["choices"][0]["prompt_logprobs"]
    wrong = [{token: {"logprob": 0.5} for token in place} for place in places[1:]]
    return changed(answer, prompt_logprobs=[None, *wrong])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (fewer, r"prompt token 2 has 1 log-probabilities, and 3 were asked for"),
        (of_others, r"prompt token 2 is id 7, and the server gives the log-probabilities of \[790\] there"),
        (above_one, r"prompt token 2 has log-probabilities that are none"),
        (lambda answer: changed(answer, prompt_logprobs=None), "gives no log-probabilities of prompt tokens"),
        (lambda answer: changed(answer, prompt_logprobs=[None, {}]), "gives 2 prompt_logprobs for 3 tokens"),
        (lambda answer: changed(answer, prompt_logprobs=[None, None, None]), "prompt token 2 has no log-prob"),
        (lambda answer: changed(answer, prompt_token_ids=[1, 5, 9, 7]), r"says that it saw others: \[1, 5, 9, 7\]"),
        (lambda _: {"choices": []}, "answers without one choice"),
        (lambda _: [1], "answers without one choice"),
    ],
)
def test_an_answer_to_another_question_is_an_error(served, fault, message):
    served.fault = lambda _, __, answer: fault(answer)
    with pytest.raises(ValueError, match=message):
        backend_of(served).score([5, 9, 7], last=1, alternatives=3)


def test_a_probability_of_zero_is_minus_infinity(served):
    def zero(_, __, answer):
        places = answer["choices"][0]["prompt_logprobs"]
        return changed(answer, prompt_logprobs=[None, {**places[1], "9": {"logprob": -9999.0}}])

    served.fault = zero
    assert backend_of(served).score([5, 9], last=1, alternatives=2)[0].logprob == float("-inf")


def test_a_continuation_that_ends_or_has_no_ids(served):
    backend = backend_of(served)
    full = backend.generate([5, 9], 6)
    served.stop_token_ids = (full[3],)
    with pytest.raises(ValueError, match=rf"ended a continuation after {full.index(full[3])} of 6 tokens"):
        backend.generate([5, 9], 6)
    served.stop_token_ids, served.model.config.eos_token_id = (), full[0]
    try:
        assert backend.generate([5, 9], 6) == full  # the end of a text does not end it
    finally:
        served.model.config.eos_token_id = None
    served.fault = lambda _, __, answer: changed(answer, token_ids=None)
    with pytest.raises(ValueError, match="gives no token_ids of its continuation"):
        backend.generate([5, 9], 6)


def test_another_tokenizer_is_refused(served, tmp_path):
    class Other:
        def encode(self, text, add_special_tokens):
            return [token + 1 for token in topics_tokenizer().encode(text, add_special_tokens=add_special_tokens)]

        def decode(self, ids):
            return topics_tokenizer().decode(ids)

    served.tokenizer = Other()
    with pytest.raises(ValueError, match=r"the server's tokenizer is another one: .* differ from place 0 on"):
        asked(served, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    served.tokenizes = False  # then it is not known, and the record says so
    asked(served, tmp_path / "run", some=samples()[:2], generate=False)
    assert '"server_checked": false' in (tmp_path / "run" / "run.json").read_text()


def test_a_window_that_is_too_short(served, tmp_path):
    served.max_model_len = 24  # as long as a sample, and a token must be decoded
    with pytest.raises(ValueError, match="a sample has 24 tokens, and the server takes 23"):
        asked(served, tmp_path / "run")
    served.max_model_len = 25
    assert len(asked(served, tmp_path / "run", some=samples()[:2], generate=False)) == 2
