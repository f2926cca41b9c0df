"""JSON over HTTP: temporary errors are tried again, others are raised with the server's own words."""

from __future__ import annotations

import json
import random
import threading
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from hf_axonn.compat.messages import get_logger


logger = get_logger(__name__)

ATTEMPTS = 7
FIRST_WAIT = 1.0  # seconds; each wait is twice the last one
LONGEST_WAIT = 60.0
TIMEOUT = 300.0  # seconds; a server that is busy answers late
_PASSES = (408, 409, 425, 429, 500, 502, 503, 504)  # HTTP statuses after which the same request may succeed
_SHOWN = 400  # characters of an answer in a message


class Refused(ValueError):
    """The server answered, and will not do what it was asked; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: a POST would become a GET, and the key would go to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


class JsonClient:
    """Requests to one server. May be used by several threads.

    Args:
        base_url: http://host:port/v1, where the API is; in it no user and no password, since run.json keeps it.
        key: sent as a bearer token; None sends none. It is not in messages.
        first_wait: seconds before the second attempt.
        timeout: seconds without an answer after which a request is tried again.
    Raises:
        ValueError: no such address.
    """

    def __init__(
        self, base_url: str, *, key: str | None = None, first_wait: float = FIRST_WAIT, timeout: float = TIMEOUT
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"the server is {base_url!r}, but it must be like http://localhost:8000/v1.")
        if parts.username is not None or parts.password is not None:
            raise ValueError("the server's address holds a user or a password, which run.json would keep.")
        self.base_url = base_url.rstrip("/")
        self.origin = f"{parts.scheme}://{parts.netloc}"
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        self._headers |= {} if key is None else {"Authorization": f"Bearer {key}"}
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._first_wait, self._timeout = first_wait, timeout
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Let requests that wait for another attempt fail now: their answers are of no use any more."""
        self._stopped.set()

    def get(self, url: str) -> Any:
        """Return the JSON at an address.

        Raises:
            Refused: an HTTP status that waiting does not change.
            ValueError: no answer after ATTEMPTS, or one that is not JSON.
        """
        return self._ask(urllib.request.Request(url, headers=self._headers))

    def post(self, url: str, body: dict[str, Any]) -> Any:
        """Send JSON and return the JSON of the answer; raises as `get`."""
        data = json.dumps(body, allow_nan=False).encode()
        return self._ask(urllib.request.Request(url, data=data, headers=self._headers, method="POST"))

    def _ask(self, request: urllib.request.Request) -> Any:
        for attempt in range(1, ATTEMPTS + 1):
            asked_to_wait = None
            try:
                with self._opener.open(request, timeout=self._timeout) as answer:
                    content = answer.read()
                return _json_of(content, request.full_url)
            except urllib.error.HTTPError as error:
                message = _message_of(error)
                if error.code not in _PASSES:
                    raise Refused(error.code, f"{request.full_url} answers {error.code}: {message}") from None
                problem, asked_to_wait = f"{error.code}: {message}", error.headers.get("Retry-After")
            except _NotJson as error:  # half an answer, or the page of a proxy
                problem = str(error)
            except (urllib.error.URLError, HTTPException, OSError) as error:
                problem = str(getattr(error, "reason", error)) or type(error).__name__
            if attempt == ATTEMPTS or self._stopped.is_set():
                break
            wait = _wait(attempt, self._first_wait, asked_to_wait)
            logger.warning(
                "%s: %s; attempt %d of %d in %.1f s.", request.full_url, problem, attempt + 1, ATTEMPTS, wait
            )
            if self._stopped.wait(wait):
                break
        raise ValueError(
            f"{request.full_url} gave no answer in {attempt} attempts; the last one ended with {problem}. Results "
            "that were measured are kept: run the same command again when the server is up."
        )


class _NotJson(ValueError):
    pass


def _wait(attempt: int, first: float, retry_after: str | None) -> float:
    """Return seconds: as the server asks, else twice as long each time, and not the same for all requests."""
    if retry_after is not None and retry_after.strip().isdecimal():
        return min(float(retry_after), LONGEST_WAIT)
    return min(first * 2.0 ** (attempt - 1), LONGEST_WAIT) * (0.75 + 0.5 * random.random())


def _json_of(content: bytes, url: str) -> Any:
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError):
        raise _NotJson(f"an answer of {url} that is not JSON: {_clip(content)}") from None


def _message_of(error: urllib.error.HTTPError) -> str:
    """Return the server's message: OpenAI's `error.message`, or vLLM's older `message`, or the bytes themselves."""
    try:
        content = error.read()
    except (OSError, HTTPException):
        return str(error.reason)
    try:
        answer = json.loads(content)
        inner = answer.get("error", answer)
        return str(inner["message"] if isinstance(inner, dict) else inner)[:_SHOWN]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return _clip(content) or str(error.reason)


def _clip(content: bytes) -> str:
    return content[:_SHOWN].decode("utf-8", "replace")
