"""The completions API of OpenAI as vLLM serves it: prompts as token ids, log-probabilities of prompt tokens by id.

    POST {base_url}/completions      prompt: [ids], max_tokens, temperature 0, prompt_logprobs: k, return_token_ids
        choices[0].prompt_logprobs   a list as long as the prompt: null for the first token, then for each a mapping
                                     id -> {logprob, rank, decoded_token} of the k most likely tokens and of its own
        choices[0].prompt_token_ids, choices[0].token_ids
    GET  {base_url}/models           id, root and max_model_len of each model that is served
    GET  {origin}/version, POST {origin}/tokenize

Source: vllm/entrypoints/openai/completion/protocol.py and serving.py, vllm/entrypoints/serve, at vLLM's commits
002032ee2b18 and 030ea52effcb. `prompt_logprobs` and `return_token_ids` are vLLM's own: other servers of this API leave
them out of the answer, which is an error here. A log-probability of minus infinity comes as -9999.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from hf_axonn_eval.data.jsonl import is_count
from hf_axonn_eval.data.results import LOGPROB_ROUNDING
from hf_axonn_eval.served.backend import Place
from hf_axonn_eval.served.transport import JsonClient, Refused


_MINUS_INFINITY = -9999.0
# Greedy, which turns top-k, top-p and min-p off, and none of the penalties that a generation_config.json beside the
# weights may ask for; one that is left out is taken from there. `ignore_eos` goes on after the end of a text, as
# decoding here does; `min_tokens` would forbid that token instead.
_NEUTRAL = {
    "temperature": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "ignore_eos": True,
    "n": 1,
    "stream": False,
    "return_token_ids": True,
}
_NOT_THERE = (404, 405)
_ALLOWED = re.compile(r"max(?:imum)? (?:allowed|number)\D*(\d+)|max_logprobs\D*(\d+)", re.IGNORECASE)


class CompletionsBackend:
    """A model behind such a server. Several threads may use it.

    Args:
        client: of the server; its base_url ends in /v1.
        name: of the model, as the server calls it.
    Raises:
        ValueError: no such server, or it serves no such model; the message lists those that it does.
    """

    def __init__(self, client: JsonClient, name: str) -> None:
        self._client = client
        self._name = name
        served = _served_models(client)
        if name not in served:
            raise ValueError(
                f"{client.base_url} serves no model {name!r}, but {', '.join(map(repr, served)) or 'none'}: name it "
                "with --model, as the server calls it."
            )
        entry = served[name]
        self.max_tokens = entry["max_model_len"] if is_count(entry.get("max_model_len"), least=1) else None
        self.record = {
            "base_url": client.base_url,
            "name": name,
            "root": entry["root"] if isinstance(entry.get("root"), str) else None,
            "server": _version(client),
            "max_tokens": self.max_tokens,
        }

    def check(self, token_ids: Sequence[int], *, least: int, better: int) -> int:
        """See `Backend.check`."""
        for alternatives in dict.fromkeys((better, least)):
            try:
                self.score(token_ids, last=1, alternatives=alternatives)
                return alternatives
            except Refused as error:
                refused = error
        allowed = _ALLOWED.search(str(refused))
        number = f"gives at most {next(filter(None, allowed.groups()))}" if allowed else "does not give them"
        raise ValueError(
            f"{least} log-probabilities of each token are needed, and the server {number}: start vLLM with "
            f"--max-logprobs {better}, or ask for less (--sampler none). {refused}"
        ) from refused

    def score(self, token_ids: Sequence[int], *, last: int, alternatives: int) -> list[Place]:
        """See `Backend.score`; the server also decodes one token, the least number that it can be asked for."""
        choice = self._choice(token_ids, max_tokens=1, prompt_logprobs=alternatives)
        places = choice.get("prompt_logprobs")
        if not isinstance(places, list):
            raise ValueError(
                f"{self._client.base_url} gives no log-probabilities of prompt tokens (prompt_logprobs): no vLLM, or "
                "a version or a proxy without them. They are what a suffix is scored by; docs/served_models.md lists "
                "what other servers give."
            )
        if len(places) != len(token_ids):
            raise ValueError(f"{self._where} gives {len(places)} prompt_logprobs for {len(token_ids)} tokens.")
        start = len(token_ids) - last
        return [
            self._place(entry, token, number, alternatives)
            for number, (token, entry) in enumerate(zip(token_ids[start:], places[start:], strict=True), start=start)
        ]

    def generate(self, token_ids: Sequence[int], count: int) -> list[int]:
        """See `Backend.generate`."""
        choice = self._choice(token_ids, max_tokens=count)
        tokens = choice.get("token_ids")
        if not isinstance(tokens, list) or not all(map(is_count, tokens)):
            raise ValueError(
                f"{self._where} gives no token_ids of its continuation (return_token_ids; vLLM has it since 0.10.2): "
                "give --no_generation, then only what needs no decoding is measured."
            )
        if len(tokens) != count:
            raise ValueError(
                f"{self._where} ended a continuation after {len(tokens)} of {count} tokens (finish_reason "
                f"{choice.get('finish_reason')!r}, stop_reason {choice.get('stop_reason')!r}). A stop token of the "
                "server's generation config does this: start vLLM with --generation-config vllm."
            )
        return tokens

    def encode(self, text: str) -> list[int] | None:
        """See `Backend.encode`; uses vLLM's /tokenize."""
        try:
            body = {"model": self._name, "prompt": text, "add_special_tokens": False}
            answer = self._client.post(f"{self._client.origin}/tokenize", body)
        except Refused as error:
            if error.status in _NOT_THERE:
                return None
            raise
        tokens = answer.get("tokens") if isinstance(answer, Mapping) else None
        return tokens if isinstance(tokens, list) and all(map(is_count, tokens)) else None

    def stop(self) -> None:
        """See `Backend.stop`."""
        self._client.stop()

    @property
    def _where(self) -> str:
        return f"{self._name} at {self._client.base_url}"

    def _choice(self, token_ids: Sequence[int], **options: Any) -> Mapping[str, Any]:
        body = {"model": self._name, "prompt": list(token_ids), **_NEUTRAL, **options}
        answer = self._client.post(f"{self._client.base_url}/completions", body)
        choices = answer.get("choices") if isinstance(answer, Mapping) else None
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
            raise ValueError(f"{self._where} answers without one choice, so it is no such API: {_clip(answer)}")
        seen = choices[0].get("prompt_token_ids")
        if seen is not None and seen != list(token_ids):
            raise ValueError(
                f"{self._where} was sent {len(token_ids)} token ids and says that it saw others: {_clip(seen)}. "
                "Something between here and the model changes prompts, by another tokenizer or by cutting them."
            )
        return choices[0]

    def _place(self, entry: Any, token: int, number: int, alternatives: int) -> Place:
        where = f"{self._where}, prompt token {number}"
        if not isinstance(entry, Mapping):
            raise ValueError(f"{where} has no log-probabilities, but {_clip(entry)}.")
        try:
            known = {int(other): _logprob(value["logprob"]) for other, value in entry.items()}
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{where} has log-probabilities that are none: {_clip(entry)}.") from None
        if token not in known:
            raise ValueError(
                f"{where} is id {token}, and the server gives the log-probabilities of {_clip(sorted(known))} there: "
                "it was asked about other ids than it answers for."
            )
        if len(known) < alternatives:
            raise ValueError(
                f"{where} has {len(known)} log-probabilities, and {alternatives} were asked for. Fewer than asked "
                "leave the best other token, or the sampler's choice, unknown: raise vLLM's --max-logprobs, or find "
                "out what stands before the server."
            )
        return Place(known[token], known)


def _logprob(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value <= LOGPROB_ROUNDING:
        raise ValueError
    return -inf if value <= _MINUS_INFINITY else float(value)


def _served_models(client: JsonClient) -> dict[str, Mapping[str, Any]]:
    answer = client.get(f"{client.base_url}/models")
    entries = answer.get("data") if isinstance(answer, Mapping) else None
    if not isinstance(entries, list):
        raise ValueError(f"{client.base_url}/models does not list models, so it is no such API: {_clip(answer)}")
    return {entry["id"]: entry for entry in entries if isinstance(entry, Mapping) and isinstance(entry.get("id"), str)}


def _version(client: JsonClient) -> str | None:
    """Return the server's version, if it has vLLM's address for it."""
    try:
        answer = client.get(f"{client.origin}/version")
    except Refused:
        return None
    version = answer.get("version") if isinstance(answer, Mapping) else None
    return version if isinstance(version, str) else None


def _clip(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
