"""A server on this machine that speaks vLLM's completions API for a model of Transformers.

It answers in vLLM's documented format (docs of `vllm serve`; vllm/entrypoints/openai/completion at commit
002032ee2b18): the addresses /v1/models, /v1/completions, /version and /tokenize, `prompt_logprobs` as a list of null
and of mappings id -> {logprob, rank, decoded_token} with the k most likely tokens and the prompt's own, -9999 for
minus infinity, errors as {"error": {...}}, at most `max_logprobs` alternatives, and stop tokens of its own. No
vLLM is run in the tests; docs/served_models.md says which one gave the same answers.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.helpers.local_server import QuietHandler, serving


MODEL = "tiny"


@dataclass
class Served:
    """What is served, and what came.

    `fault`, if set, is called with the number of the completion request (from 1 on), its body and the answer, and
    returns another answer: a mapping, bytes, an HTTP status as a number (with a Retry-After of 0), or None to close
    the connection.
    """

    model: Any
    tokenizer: Any
    max_logprobs: int = 20
    max_model_len: int = 64
    version: str | None = "0.11.0"
    tokenizes: bool = True
    key: str | None = None
    stop_token_ids: tuple[int, ...] = ()
    fault: Callable[[int, dict, dict], Any] | None = None
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    most_at_once: int = 0
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """While a completion is worked on."""
        with self._lock:
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            yield
        finally:
            with self._lock:
                self._now -= 1

    def complete(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and answer for the body of a request."""
        prompt, wanted = body["prompt"], body.get("prompt_logprobs")
        if body["model"] != MODEL:
            return 404, _error(f"The model `{body['model']}` does not exist.", "NotFoundError", 404)
        if wanted is not None and wanted > self.max_logprobs:
            said = f"Requested prompt logprobs of {wanted}, which is greater than max allowed: {self.max_logprobs}"
            return 400, _error(said)
        if len(prompt) + body["max_tokens"] > self.max_model_len:
            return 400, _error(f"This model's maximum context length is {self.max_model_len} tokens.")
        if max(prompt) >= self.model.config.vocab_size:
            return 400, _error(f"Token id {max(prompt)} is out of vocabulary")
        with self._lock:  # one model, and torch may use few threads
            tokens, reason = self._continued(prompt, body)
            known = self._prompt_logprobs(prompt, wanted) if wanted is not None else None
        choice = {
            "index": 0,
            "text": self.tokenizer.decode(tokens),
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": None,
            "token_ids": tokens if body.get("return_token_ids") else None,
            "prompt_logprobs": known,
            "prompt_token_ids": prompt if body.get("return_token_ids") else None,
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens), "total_tokens": len(prompt + tokens)}
        return 200, {"id": "cmpl-1", "object": "text_completion", "model": MODEL, "choices": [choice], "usage": usage}

    @torch.no_grad()
    def _continued(self, prompt: list[int], body: dict[str, Any]) -> tuple[list[int], str]:
        assert body["temperature"] == 0 and body["n"] == 1 and body["stream"] is False
        ids, tokens = list(prompt), []
        while len(tokens) < body["max_tokens"]:
            logits, eos = self.model(input_ids=torch.tensor([ids])).logits[0, -1], self.model.config.eos_token_id
            if len(tokens) < body.get("min_tokens", 0) and eos is not None:
                logits[eos] = -math.inf  # whether it ends the text or not
            token = int(logits.argmax())
            if token in self.stop_token_ids or (token == eos and not body.get("ignore_eos")):
                return tokens, "stop"
            tokens.append(token)
            ids.append(token)
        return tokens, "length"

    @torch.no_grad()
    def _prompt_logprobs(self, prompt: list[int], wanted: int) -> list[Any]:
        table = self.model(input_ids=torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        places: list[Any] = [None]
        for token, row in zip(prompt[1:], table, strict=False):
            most_likely = row.topk(wanted).indices.tolist()
            shown = dict.fromkeys([token, *most_likely])  # its own first, as vLLM has it
            ranks = {other: int((row >= row[other]).sum()) for other in shown}
            places.append(
                {
                    str(other): {
                        "logprob": max(float(row[other]), -9999.0),
                        "rank": ranks[other],
                        "decoded_token": self.tokenizer.decode([other]),
                    }
                    for other in shown
                }
            )
        assert not any(math.isnan(value["logprob"]) for place in places[1:] for value in place.values())
        return places


def _error(message: str, kind: str = "BadRequestError", code: int = 400) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


@contextmanager
def vllm_server(served: Served) -> Iterator[Served]:
    """The server in threads of this process, at `served.url`."""
    with serving(_Handler, served=served) as url:
        served.url = f"{url}/v1"
        yield served


class _Handler(QuietHandler):
    served: Served

    def do_GET(self) -> None:
        served = self.served
        if self.path == "/v1/models":
            card = {"id": MODEL, "object": "model", "owned_by": "vllm", "root": "org/tiny", "parent": None}
            self._answer(200, {"object": "list", "data": [{**card, "max_model_len": served.max_model_len}]})
        elif self.path == "/version" and served.version is not None:
            self._answer(200, {"version": served.version})
        else:
            self._answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        served = self.served
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if served.key is not None and self.headers.get("Authorization") != f"Bearer {served.key}":
            self._answer(401, {"error": "Unauthorized"})
        elif self.path == "/tokenize" and served.tokenizes:
            ids = served.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
            self._answer(200, {"count": len(ids), "max_model_len": served.max_model_len, "tokens": ids})
        elif self.path == "/v1/completions":
            with served.counted():
                status, answer = served.complete(body)
                served.requests.append(body)
                if served.fault is not None and status == 200:
                    answer = served.fault(len(served.requests), body, answer)
            if answer is None:
                self.connection.close()
            elif isinstance(answer, int):
                self._answer(answer, _error("busy", "InternalServerError", answer))
            else:
                self._answer(status, answer)
        else:
            self._answer(404, {"detail": "Not Found"})

    def _answer(self, status: int, answer: Any) -> None:
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if status in (429, 503):
            self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(content)
